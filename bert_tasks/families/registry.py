"""The five families as a table: Hugging Face's config fields, module names and head shapes, translated to ours.

Owns every Hugging Face parameter and config name in this package; nothing else knows one. The maps are used both ways:
loading concatenates where one of our modules has several sources (query, key, value), saving splits again.

Module names: ours are those of ``Encoder`` and ``TaskModel`` (``stack.``, ``pooler.``, ``head.``), with ``{i}`` for the
index of a layer's parameters. Facts were read off transformers 5.23 and are held by tests against it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

from bert_tasks.encoder.config import Activation, EncoderConfig, HeadConfig
from bert_tasks.errors import CheckpointError

# The one key of ours in a config.json: task, settings, tuned thresholds, version.
CONFIG_KEY = "bert_tasks"

HeadKind = Literal["base", "sequence", "token", "span"]
Modules = Mapping[str, str | tuple[str, ...]]

# Module types that hold a weight and no bias.
_EMBEDDINGS = ("stack.embeddings.word", "stack.embeddings.position", "stack.embeddings.token_type")


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row of the table.

    Attributes:
        prefix: of the base model's parameters inside a model with a head (``bert.``).
        fields: our config field -> (HF's name, default of HF's config class).
        modules: our module -> HF module(s) below the prefix.
        pooler: HF module below the prefix of the base model's linear layer on the first token.
        heads: head kind -> our head module -> full HF module name.
        architectures: head kind -> HF class.
        pretraining: prefixes of pre-training heads, dropped on load.
        head_activation, dropout_before_dense: see ``HeadConfig``.
        dropout_after_attention, dropout_after_feed_forward: whether the layers drop out there at all.
        has_segments: the family tells the second text of a pair by its segment id; RoBERTa and DistilBERT do not, even
            where a config has more than one.
        head_dropouts: HF config fields for the (sequence, token, span) dropout, the first that is set counts.
    """

    model_type: str
    prefix: str
    fields: Mapping[str, tuple[str, Any]]
    modules: Modules
    pooler: str | None
    heads: Mapping[HeadKind, Mapping[str, str]]
    architectures: Mapping[HeadKind, str]
    pretraining: tuple[str, ...]
    head_activation: Activation
    dropout_before_dense: bool
    head_dropouts: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
    dropout_after_attention: bool = True
    has_segments: bool = True
    dropout_after_feed_forward: bool = True


_FIELDS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", 30522),
    "hidden_size": ("hidden_size", 768),
    "num_hidden_layers": ("num_hidden_layers", 12),
    "num_attention_heads": ("num_attention_heads", 12),
    "intermediate_size": ("intermediate_size", 3072),
    "hidden_act": ("hidden_act", "gelu"),
    "hidden_dropout_prob": ("hidden_dropout_prob", 0.1),
    "attention_probs_dropout_prob": ("attention_probs_dropout_prob", 0.1),
    "max_position_embeddings": ("max_position_embeddings", 512),
    "type_vocab_size": ("type_vocab_size", 2),
    "initializer_range": ("initializer_range", 0.02),
    "layer_norm_eps": ("layer_norm_eps", 1e-12),
    "pad_token_id": ("pad_token_id", 0),
}

_TABLES: dict[str, str | tuple[str, ...]] = {
    "stack.embeddings.word": "embeddings.word_embeddings",
    "stack.embeddings.position": "embeddings.position_embeddings",
    "stack.embeddings.token_type": "embeddings.token_type_embeddings",
    "stack.embeddings.norm": "embeddings.LayerNorm",
}

_BERT_LAYER: dict[str, str | tuple[str, ...]] = {
    "stack.layers.{i}.attention.qkv": (
        "encoder.layer.{i}.attention.self.query",
        "encoder.layer.{i}.attention.self.key",
        "encoder.layer.{i}.attention.self.value",
    ),
    "stack.layers.{i}.attention.output": "encoder.layer.{i}.attention.output.dense",
    "stack.layers.{i}.attention_norm": "encoder.layer.{i}.attention.output.LayerNorm",
    "stack.layers.{i}.intermediate": "encoder.layer.{i}.intermediate.dense",
    "stack.layers.{i}.output": "encoder.layer.{i}.output.dense",
    "stack.layers.{i}.output_norm": "encoder.layer.{i}.output.LayerNorm",
}

_ALBERT_LAYER_PREFIX = "encoder.albert_layer_groups.{i}.albert_layers.0."
_ALBERT_LAYER: dict[str, str | tuple[str, ...]] = {
    "stack.layers.{i}.attention.qkv": tuple(
        f"{_ALBERT_LAYER_PREFIX}attention.{part}" for part in ("query", "key", "value")
    ),
    "stack.layers.{i}.attention.output": f"{_ALBERT_LAYER_PREFIX}attention.dense",
    "stack.layers.{i}.attention_norm": f"{_ALBERT_LAYER_PREFIX}attention.LayerNorm",
    "stack.layers.{i}.intermediate": f"{_ALBERT_LAYER_PREFIX}ffn",
    "stack.layers.{i}.output": f"{_ALBERT_LAYER_PREFIX}ffn_output",
    "stack.layers.{i}.output_norm": f"{_ALBERT_LAYER_PREFIX}full_layer_layer_norm",
}

_DISTILBERT_LAYER_PREFIX = "transformer.layer.{i}."
_DISTILBERT_LAYER: dict[str, str | tuple[str, ...]] = {
    "stack.layers.{i}.attention.qkv": tuple(
        f"{_DISTILBERT_LAYER_PREFIX}attention.{part}_lin" for part in ("q", "k", "v")
    ),
    "stack.layers.{i}.attention.output": f"{_DISTILBERT_LAYER_PREFIX}attention.out_lin",
    "stack.layers.{i}.attention_norm": f"{_DISTILBERT_LAYER_PREFIX}sa_layer_norm",
    "stack.layers.{i}.intermediate": f"{_DISTILBERT_LAYER_PREFIX}ffn.lin1",
    "stack.layers.{i}.output": f"{_DISTILBERT_LAYER_PREFIX}ffn.lin2",
    "stack.layers.{i}.output_norm": f"{_DISTILBERT_LAYER_PREFIX}output_layer_norm",
}

_TOKEN_HEAD = {"head.output": "classifier"}
_SPAN_HEAD = {"head.output": "qa_outputs"}
_DENSE_CLASSIFIER = {"head.dense": "classifier.dense", "head.output": "classifier.out_proj"}


def _architectures(name: str) -> dict[HeadKind, str]:
    return {
        "base": f"{name}Model",
        "sequence": f"{name}ForSequenceClassification",
        "token": f"{name}ForTokenClassification",
        "span": f"{name}ForQuestionAnswering",
    }


_CLASSIFIER_DROPOUT = ("classifier_dropout", "hidden_dropout_prob")

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.model_type: family
        for family in (
            Family(
                model_type="bert",
                prefix="bert.",
                fields=_FIELDS,
                modules=_TABLES | _BERT_LAYER,
                pooler="pooler.dense",
                heads={
                    "sequence": {"head.dense": "bert.pooler.dense", "head.output": "classifier"},
                    "token": _TOKEN_HEAD,
                    "span": _SPAN_HEAD,
                },
                architectures=_architectures("Bert"),
                pretraining=("cls.",),
                head_activation="tanh",
                dropout_before_dense=False,
                head_dropouts=(_CLASSIFIER_DROPOUT, _CLASSIFIER_DROPOUT, ()),
            ),
            Family(
                model_type="roberta",
                prefix="roberta.",
                fields=_FIELDS | {"vocab_size": ("vocab_size", 50265), "pad_token_id": ("pad_token_id", 1)},
                modules=_TABLES | _BERT_LAYER,
                has_segments=False,
                pooler="pooler.dense",
                heads={"sequence": _DENSE_CLASSIFIER, "token": _TOKEN_HEAD, "span": _SPAN_HEAD},
                architectures=_architectures("Roberta"),
                pretraining=("lm_head.",),
                head_activation="tanh",
                dropout_before_dense=True,
                head_dropouts=(_CLASSIFIER_DROPOUT, _CLASSIFIER_DROPOUT, ()),
            ),
            Family(
                model_type="distilbert",
                prefix="distilbert.",
                fields=_FIELDS
                | {
                    "hidden_size": ("dim", 768),
                    "num_hidden_layers": ("n_layers", 6),
                    "num_attention_heads": ("n_heads", 12),
                    "intermediate_size": ("hidden_dim", 3072),
                    "hidden_act": ("activation", "gelu"),
                    "hidden_dropout_prob": ("dropout", 0.1),
                    "attention_probs_dropout_prob": ("attention_dropout", 0.1),
                    "type_vocab_size": ("", 0),
                    "layer_norm_eps": ("", 1e-12),
                },
                modules={k: v for k, v in _TABLES.items() if k != "stack.embeddings.token_type"} | _DISTILBERT_LAYER,
                has_segments=False,
                pooler=None,
                heads={
                    "sequence": {"head.dense": "pre_classifier", "head.output": "classifier"},
                    "token": _TOKEN_HEAD,
                    "span": _SPAN_HEAD,
                },
                architectures=_architectures("DistilBert"),
                pretraining=("vocab_transform.", "vocab_layer_norm.", "vocab_projector."),
                head_activation="relu",
                dropout_before_dense=False,
                head_dropouts=(("seq_classif_dropout",), ("dropout",), ("qa_dropout",)),
                dropout_after_attention=False,
            ),
            Family(
                model_type="albert",
                prefix="albert.",
                fields=_FIELDS
                | {
                    "vocab_size": ("vocab_size", 30000),
                    "embedding_size": ("embedding_size", 128),
                    "hidden_size": ("hidden_size", 4096),
                    "num_hidden_groups": ("num_hidden_groups", 1),
                    "num_attention_heads": ("num_attention_heads", 64),
                    "intermediate_size": ("intermediate_size", 16384),
                    "hidden_act": ("hidden_act", "gelu_new"),
                    "hidden_dropout_prob": ("hidden_dropout_prob", 0.0),
                    "attention_probs_dropout_prob": ("attention_probs_dropout_prob", 0.0),
                },
                modules=_TABLES
                | {"stack.embeddings.projection": "encoder.embedding_hidden_mapping_in"}
                | _ALBERT_LAYER,
                pooler="pooler",
                heads={
                    "sequence": {"head.dense": "albert.pooler", "head.output": "classifier"},
                    "token": _TOKEN_HEAD,
                    "span": _SPAN_HEAD,
                },
                architectures=_architectures("Albert"),
                pretraining=("predictions.", "sop_classifier."),
                head_activation="tanh",
                dropout_before_dense=False,
                head_dropouts=(
                    ("classifier_dropout_prob",),
                    ("classifier_dropout_prob", "hidden_dropout_prob"),
                    (),
                ),
                dropout_after_feed_forward=False,
            ),
            Family(
                model_type="electra",
                prefix="electra.",
                fields=_FIELDS
                | {
                    "embedding_size": ("embedding_size", 128),
                    "hidden_size": ("hidden_size", 256),
                    "num_attention_heads": ("num_attention_heads", 4),
                    "intermediate_size": ("intermediate_size", 1024),
                },
                modules=_TABLES | {"stack.embeddings.projection": "embeddings_project"} | _BERT_LAYER,
                pooler=None,
                heads={"sequence": _DENSE_CLASSIFIER, "token": _TOKEN_HEAD, "span": _SPAN_HEAD},
                architectures=_architectures("Electra"),
                pretraining=("discriminator_predictions.", "generator_predictions.", "generator_lm_head."),
                head_activation="gelu",
                dropout_before_dense=True,
                head_dropouts=(_CLASSIFIER_DROPOUT, _CLASSIFIER_DROPOUT, ()),
            ),
        )
    }
)

# The defaults of HF's config classes for the dropouts that only some families have.
_DROPOUT_DEFAULTS = {
    "hidden_dropout_prob": 0.1,
    "seq_classif_dropout": 0.2,
    "qa_dropout": 0.1,
    "dropout": 0.1,
    "classifier_dropout_prob": 0.1,
}
# What a config may say that this encoder does not compute: refused instead of ignored.
_ONLY_VALUES = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "inner_group_num": 1,
}


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The family that a ``config.json`` names.

    Raises:
        CheckpointError: ``model_type`` is missing or not one of the five.
    """
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CheckpointError(f"config.json: model_type is {model_type!r}; supported are {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


def encoder_config(hf_config: Mapping[str, Any]) -> EncoderConfig:
    """Translates a ``config.json``.

    Raises:
        CheckpointError: another model type, a value of the wrong type, or something this encoder does not compute.
    """
    family = family_of(hf_config)
    for name, only in _ONLY_VALUES.items():
        if hf_config.get(name, only) != only:
            raise CheckpointError(f"config.json: {name} = {hf_config[name]!r} is not supported, only {only!r} is")
    values = {ours: _field(hf_config, theirs, default) for ours, (theirs, default) in family.fields.items()}
    supported = [name for name in get_args(Activation) if name != "tanh"]
    if values["hidden_act"] not in supported:
        raise CheckpointError(
            f"config.json: activation {values['hidden_act']!r} is not supported; supported are {', '.join(supported)}"
        )
    if values["pad_token_id"] >= values["vocab_size"]:
        raise CheckpointError(f"config.json: pad_token_id = {values['pad_token_id']!r} is not below vocab_size")
    layers = values.pop("num_hidden_layers")
    groups = values.pop("num_hidden_groups", layers)
    embedding_size = values.setdefault("embedding_size", values["hidden_size"])
    wide = family.model_type == "albert" or embedding_size != values["hidden_size"]
    try:
        return EncoderConfig(
            **values,
            project_embeddings=wide,
            layer_order=tuple(int(i / (layers / groups)) for i in range(layers)),
            position_offset=values["pad_token_id"] + 1 if family.model_type == "roberta" else 0,
            attention_output_dropout=values["hidden_dropout_prob"] if family.dropout_after_attention else 0.0,
            feed_forward_dropout=values["hidden_dropout_prob"] if family.dropout_after_feed_forward else 0.0,
            has_pooler=family.pooler is not None,
            head=_head_config(family, hf_config),
        )
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from None


def second_segment(hf_config: Mapping[str, Any]) -> int:
    """The segment id of the second text of a pair: 1 where the family has segments and the model a row for it, else 0.

    Raises:
        CheckpointError: as for ``encoder_config``.
    """
    has_two = family_of(hf_config).has_segments and encoder_config(hf_config).type_vocab_size >= 2
    return 1 if has_two else 0


def _field(hf_config: Mapping[str, Any], name: str, default: Any) -> Any:
    value = hf_config.get(name, default)
    kinds = (int, float) if isinstance(default, float) else (type(default),)
    if not isinstance(value, kinds) or (isinstance(value, bool) and not isinstance(default, bool)):
        raise CheckpointError(f"config.json: {name} = {value!r}, expected a {type(default).__name__}")
    least = 1 if isinstance(default, int) and name not in ("type_vocab_size", "pad_token_id", "") else 0
    if isinstance(value, int | float) and value < least:
        raise CheckpointError(f"config.json: {name} = {value!r}, expected at least {least}")
    return value


def _head_config(family: Family, hf_config: Mapping[str, Any]) -> HeadConfig:
    def dropout(names: tuple[str, ...]) -> float:
        values = [hf_config.get(name, _DROPOUT_DEFAULTS.get(name)) for name in names]
        return next((float(value) for value in values if value is not None), 0.0)

    sequence, token, span = (dropout(names) for names in family.head_dropouts)
    return HeadConfig(
        activation=family.head_activation,
        dropout_before_dense=family.dropout_before_dense,
        sequence_dropout=sequence,
        token_dropout=token,
        span_dropout=span,
    )


def parameter_map(family: Family, config: EncoderConfig, *, head: HeadKind, pooler: bool) -> dict[str, tuple[str, ...]]:
    """Our parameter name -> the full HF names it is made of, in order of concatenation.

    Args:
        head: ``base`` for an encoder alone.
        pooler: whether the encoder carries a pooler of its own (``base`` only).
    """
    names: dict[str, tuple[str, ...]] = {}
    for ours, theirs in family.modules.items():
        if ours == "stack.embeddings.projection" and not config.project_embeddings:
            continue
        if ours == "stack.embeddings.token_type" and not config.type_vocab_size:
            continue
        sources = (theirs,) if isinstance(theirs, str) else theirs
        for i in range(max(config.layer_order) + 1 if "{i}" in ours else 1):
            module = tuple(family.prefix + source.format(i=i) for source in sources)
            names |= _parameters(ours.format(i=i), module)
    if pooler and family.pooler is not None:
        names |= _parameters("pooler", (family.prefix + family.pooler,))
    for ours, full in family.heads.get(head, {}).items():
        names |= _parameters(ours, (full,))
    return names


def _parameters(ours: str, theirs: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for kind in ("weight",) if ours in _EMBEDDINGS else ("weight", "bias"):
        yield f"{ours}.{kind}", tuple(f"{name}.{kind}" for name in theirs)


def head_kind(hf_config: Mapping[str, Any]) -> HeadKind | None:
    """Which head the file's ``architectures`` says it has; None for classes this package does not know."""
    family = family_of(hf_config)
    named = hf_config.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    for kind, architecture in family.architectures.items():
        if first == architecture:
            return kind
    return None


def pooler_is_there(family: Family, keys: Iterable[str]) -> bool:
    """Whether a file of a base model holds its pooler, with or without the base prefix."""
    wanted = {f"{family.prefix}{family.pooler}.weight", f"{family.pooler}.weight"}
    return family.pooler is not None and not wanted.isdisjoint(keys)


def droppable_prefixes(family: Family) -> tuple[str, ...]:
    """Prefixes of full HF names that are heads: they may be left out when another head is wanted."""
    modules = [name for head in family.heads.values() for name in head.values()]
    poolers = [family.prefix + family.pooler] if family.pooler is not None else []
    return (*family.pretraining, *(f"{name}." for name in [*modules, *poolers]))
