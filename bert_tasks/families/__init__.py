"""The encoder families that can be loaded and saved.

Each family is one data file that defines ``FAMILY``. This module translates config.json into an ``EncoderConfig``, and
parameter names into the names of Hugging Face. The names serve both ways, because loading concatenates the sources of a
parameter (query, key and value), and saving splits it again. A new file in this folder is a new family, and nothing
else needs to know of it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType
from typing import Any, get_args

from bert_tasks.data.issues import did_you_mean, end_sentence, nearest_or_all, shortened
from bert_tasks.encoder.config import Activation, EncoderConfig, HeadConfig
from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.families.base import (
    BUFFERS,
    MOST_LABELS,
    OLD_PARAMETERS,
    VALUE_REASONS,
    Family,
    KeyMapping,
    config_value,
    encoder_field,
)

# The only key that bert_tasks adds to a config.json, with task, settings, values fitted to data and version.
CONFIG_KEY = "bert_tasks"

# Fields of ``Family`` that name the dropout of a head, and fields of ``HeadConfig``.
_HEAD_DROPOUT = (
    "sequence_dropout",
    "dense_dropout",
    "token_dropout",
    "span_dropout",
    "pair_dropout",
    "choice_dropout",
    "choice_dense_dropout",
)
_DATA_FILES = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__) if module.name != "base"]
FAMILIES: Mapping[str, Family] = MappingProxyType({file.FAMILY.model_type: file.FAMILY for file in _DATA_FILES})


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """Returns the family of a ``config.json``.

    Raises:
        CheckpointError: ``model_type`` is missing or unknown.
    """
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CheckpointError(
            f"config.json: model_type is {shortened(model_type)}. Supported types are {', '.join(FAMILIES)}"
        )
    family = FAMILIES[model_type]
    for (name, value), changes in family.variants.items():
        if hf_config.get(name) == value:
            family = replace(family, **changes)
    return family


def family_with_tokenizer(model_type: str) -> str:
    """Returns the family whose tokenizers have this type of model in ``tokenizer.json``."""
    return {"BPE": "roberta", "Unigram": "albert"}.get(model_type, "bert")


def encoder_config(hf_config: Mapping[str, Any]) -> EncoderConfig:
    """Translates a ``config.json`` into the configuration of this package's encoder.

    A value that the encoder does not compute is an error. If it were ignored, the model would load and predict
    something else than it was trained for.

    Raises:
        CheckpointError: The family is unknown, or a value has the wrong type or is not supported by this encoder.
    """
    family = family_of(hf_config)
    for name, only in family.only_values.items():
        if hf_config.get(name, only) != only:
            raise CheckpointError(
                f"config.json: {name} = {shortened(hf_config[name])} is not supported, only {only!r} is, because "
                f"{VALUE_REASONS[name]}"
            )
    if hf_config.get("num_labels") is not None:  # transformers makes as many names when it reads the tokenizer
        config_value(hf_config, "num_labels", 2, least=0, most=MOST_LABELS)
    values = {}
    for field, (name, default) in family.fields.items():
        values[field] = encoder_field(hf_config, field, name, default)
    supported = [name for name in get_args(Activation) if name != "tanh"]
    if values["hidden_act"] not in supported:
        raise CheckpointError(
            f"config.json: activation {shortened(values['hidden_act'])} is not supported. Supported activations are "
            f"{', '.join(supported)}"
        )
    if values["pad_token_id"] >= values["vocab_size"]:
        raise CheckpointError(f"config.json: pad_token_id = {values['pad_token_id']!r} is not below vocab_size")
    offset = 0
    if family.positions_after_padding:
        offset = values["pad_token_id"] + 1
    if values["max_position_embeddings"] <= offset:
        raise CheckpointError(
            f"config.json: max_position_embeddings = {values['max_position_embeddings']} leaves no position for a "
            f"token, because position ids begin at pad_token_id + 1 = {offset}"
        )
    size, heads = values["hidden_size"], values["num_attention_heads"]
    if size % heads:
        raise CheckpointError(f"config.json: hidden_size {size} is not a multiple of num_attention_heads {heads}")
    # ALBERT's layers share parameters in groups. Other families have as many groups as layers.
    layers = values.pop("num_hidden_layers")
    groups = values.pop("num_hidden_groups", layers)
    embedding_size = values.setdefault("embedding_size", size)
    for field in ("attention_output_dropout", "feed_forward_dropout"):
        values.setdefault(field, values["hidden_dropout_prob"])
    derived = {
        "project_embeddings": embedding_size != size,
        "layer_order": tuple(int(i / (layers / groups)) for i in range(layers)),
        "position_offset": offset,
        "second_segment": int(family.has_segments and values["type_vocab_size"] >= 2),
        "head": _head_config(family, hf_config, hidden_act=values["hidden_act"]),
    }
    # The later values take precedence, because families refine what their fields say.
    longest = {"max_position_embeddings": values["max_position_embeddings"]}
    of_layers = family.of_layers({**family.layer_fields, **hf_config, **longest}, layers)
    return EncoderConfig(**{**values, **derived, **of_layers, **family.options})


def _head_config(family: Family, hf_config: Mapping[str, Any], *, hidden_act: Activation) -> HeadConfig:
    """Returns the differences of a model's heads from other models'.

    Raises:
        CheckpointError: The pooling is unknown, or a dropout is no number from 0 to 1.
    """
    pooling = hf_config.get(family.head_pooling, next(iter(family.poolings)))
    if not isinstance(pooling, str) or pooling not in family.poolings:
        names = " or ".join(map(repr, family.poolings))
        raise CheckpointError(f"config.json: {family.head_pooling} = {shortened(pooling)}, expected {names}")
    activation, vocabulary_activation = family.head_activation, family.vocabulary_activation
    if activation is None:
        activation = hidden_act
    if vocabulary_activation is None:
        vocabulary_activation = hidden_act
    dropout: dict[str, Any] = {}
    for head in _HEAD_DROPOUT:
        options: Mapping[str, float | None] = getattr(family, head)
        dropout[head] = 0.0
        for name, default in options.items():
            if hf_config.get(name, default) is None:
                continue
            if default is None:  # the field is set, so only the type of the default counts
                default = 0.0
            dropout[head] = float(encoder_field(hf_config, head, name, default))
            break
    return HeadConfig(
        activation=activation,
        pair_objectives=family.pair_objectives,
        pooling=family.poolings[pooling],
        prediction_head=family.prediction_head,
        vocabulary_activation=vocabulary_activation,
        **dropout,
        **family.head_options,
    )


def converted_config(hf_config: Mapping[str, Any], *, layers: Sequence[int], family: str | None) -> dict[str, Any]:
    """Returns the config.json of a model that has only some layers of another, and perhaps its weights under new names.

    Distillation begins with such a student.

    Args:
        hf_config: The config.json of the model.
        layers: The indices of the layers that the new model has.
        family: Family of the new model, or None for the same family.

    Raises:
        UsageError: The family does not exist, or computes something else.
    """
    source = family_of(hf_config)
    target: Family | None = source
    if family is not None:
        target = FAMILIES.get(family)
    if target is None:
        problem = end_sentence(f"unknown family {family!r}{did_you_mean(str(family), FAMILIES)}")
        raise UsageError(f"{problem} Known families are {', '.join(FAMILIES)}")
    name, _ = target.fields["num_hidden_layers"]
    if target is source:
        kept: Mapping[str, Any] = {}
        if source.kept_layers is not None:
            kept = source.kept_layers({**source.layer_fields, **hf_config}, layers)
        return {**hf_config, **kept, name: len(layers)}
    config = vars(encoder_config(hf_config))
    fields = {}
    for ours, (theirs, _) in target.fields.items():
        if theirs and config.get(ours) is not None:
            fields[theirs] = config[ours]
    converted = {"model_type": target.model_type, **fields, name: len(layers)}
    # Dropout is no part of what a trained model computes, and the rows of the segment table can be added to positions.
    free = ("layer_order", "head", "type_vocab_size", "second_segment", "initializer_range", "initializer_cutoff")
    for field, value in vars(encoder_config(converted)).items():
        if field not in free and not field.endswith(("dropout", "dropout_prob")) and value != config[field]:
            raise UsageError(
                f"a {source.model_type} checkpoint cannot be converted to {family}, which computes with "
                f"{field} = {value!r} instead of {config[field]!r}"
            )
    return converted


def config_of_kept_ids(hf_config: Mapping[str, Any], new_ids: Mapping[int, int]) -> dict[str, Any]:
    """Returns the config.json of a model that keeps some rows of the word embeddings, for ids with their new ids.

    Special tokens have their new ids, also those in a list. An id whose row is gone is removed.
    """
    fields = family_of(hf_config).fields
    # The file may lack the id of padding, which is then transformers' default.
    complete = {**hf_config, fields["pad_token_id"][0]: encoder_config(hf_config).pad_token_id}
    config: dict[str, Any] = {}
    for name, value in complete.items():
        if not name.endswith("_token_id") or value is None:
            config[name] = value
        elif isinstance(value, list):  # as in configurations of Llama, in which several tokens end a text
            known = [number for number in value if isinstance(number, int) and number in new_ids]
            config[name] = [new_ids[number] for number in known]
        elif isinstance(value, int) and value in new_ids:  # an id outside the vocabulary was never used
            config[name] = new_ids[value]
    return {**config, fields["vocab_size"][0]: len(new_ids)}


def new_hf_config(
    settings: Mapping[str, Any], *, vocab_size: int | None = None, special_ids: Mapping[str, int] = MappingProxyType({})
) -> dict[str, Any]:
    """Returns the config.json of a model from scratch, completed by HF's defaults.

    Args:
        settings: ``family``, and fields of HF's config of that family.
        vocab_size: Number of ids of the tokenizer. ``settings`` must not set fewer. None means that it is not known
            yet, and the other fields are checked.
        special_ids: The tokenizer's ``pad_token_id`` and so on, which ``settings`` cannot set.

    Raises:
        CheckpointError: The family or a field does not exist, or a value does not fit.
    """
    fields = dict(settings)
    name = fields.pop("family", None)
    if not isinstance(name, str) or name not in FAMILIES:
        problem = "family is missing"
        if name is not None:
            problem = f"unknown family {name!r}{did_you_mean(str(name), FAMILIES)}"
        raise CheckpointError(f"{end_sentence(problem)} Known families are {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    defaults = {hf_name: default for hf_name, default in family.fields.values() if hf_name}
    defaults |= {hf_name: default for hf_name, default in family.layer_fields.items() if default is not None}
    settable = {*defaults, *family.layer_fields, *family.only_values, family.head_pooling}
    for head in _HEAD_DROPOUT:
        settable |= getattr(family, head).keys()
    names = sorted(settable - {""})  # a family without a choice of pooling has no field for it
    names.remove("pad_token_id")  # which the tokenizer decides
    for field in fields:
        if field not in names:
            raise CheckpointError(f"{name} has no field {field!r}{nearest_or_all(field, names)}")
    least, usual_size = 1, defaults["vocab_size"]
    if vocab_size is not None:
        least = usual_size = vocab_size
    size = fields.get("vocab_size", usual_size)
    if isinstance(size, int) and size < least:
        raise CheckpointError(f"vocab_size = {size}, but the tokenizer has {least} tokens")
    config = {"model_type": name, **defaults, **fields, **special_ids, "vocab_size": size}
    try:
        encoder_config(config)
    except CheckpointError as error:
        raise CheckpointError(str(error).removeprefix("config.json: ")) from None
    return config


def parameter_map(family: Family, config: EncoderConfig, *, head: str, pooler: bool) -> dict[str, tuple[str, ...]]:
    """Maps our parameter names to the full HF names of their sources, in order.

    Args:
        head: A type of head of ``Family.heads``. Any other value, such as ``base``, means an encoder alone.
        pooler: True if the encoder has a pooler of its own (``base`` only).
    """
    rows = [replace(row, hf_modules=tuple(family.prefix + name for name in row.hf_modules)) for row in family.keys]
    if pooler and family.pooler is not None:
        rows.append(KeyMapping("pooler", (family.prefix + family.pooler,)))
    rows += family.heads.get(head, ())
    names: dict[str, tuple[str, ...]] = {}
    for row in rows:
        if row.only_with is not None and not _has(config, row.only_with):
            continue
        end = 1  # a module outside the layers occurs once
        if "{i}" in row.module:
            end = max(config.layer_order) + 1  # parameters that layers share are listed once
        for i in range(row.first_layer, end):
            module = row.module.format(i=i)
            sources = [name.format(i=i) for name in row.hf_modules]
            for parameter in row.parameters:
                names[f"{module}.{parameter}"] = tuple(f"{source}.{parameter}" for source in sources)
    return names


def _has(config: EncoderConfig, field: str) -> bool:
    """Returns True if a field is set, or a property of it such as ``disentangled.norm``."""
    name, _, inner = field.partition(".")
    value = getattr(config, name)
    if value is not None and inner:
        value = getattr(value, inner)
    return bool(value)


def copies_of_tied(
    family: Family, config: EncoderConfig, names: Mapping[str, tuple[str, ...]], *, head: str | None
) -> dict[str, str]:
    """Maps HF's names of a tied decoder to the names of the tensors that it repeats.

    Files may hold the decoder, although transformers no longer saves it.

    Args:
        names: See ``parameter_map``.
        head: A type of head, or None. A head without logits over the vocabulary has no decoder.
    """
    if head not in ("masked-lm", "pretraining") or config.output_embedding_size is not None:
        return {}
    copies: dict[str, str] = {}
    for parameter, ours in (("weight", "encoder.embeddings.word.weight"), ("bias", "head.bias")):
        copy = f"{family.decoder}.{parameter}"
        # In some families, such as ModernBERT, the bias itself has the decoder's name.
        if ours in names and names[ours][0] != copy:
            copies[copy] = names[ours][0]
    return copies


def head_kind(hf_config: Mapping[str, Any]) -> str | None:
    """Returns the type of head of ``architectures``, or None for an unknown class."""
    family = family_of(hf_config)
    named = hf_config.get("architectures")
    if not isinstance(named, list) or not named:
        return None
    for head, architecture in family.architectures.items():
        if architecture == named[0]:
            return head
    return None


def label_names(hf_config: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of the labels in the order of their ids, or none if config.json has no names.

    Names under our own key take precedence over those of ``id2label``, because a head that transformers lacks has its
    names there only.

    Raises:
        CheckpointError: The ids are not numbers, or our labels are no list of texts.
    """
    entry = hf_config.get(CONFIG_KEY)
    if isinstance(entry, dict) and "labels" in entry:
        labels = entry["labels"]
        if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
            raise CheckpointError(f"config.json, key {CONFIG_KEY}: labels must be a list of texts")
        return tuple(labels)
    names = hf_config.get("id2label")
    if not isinstance(names, dict):
        return ()
    try:
        # JSON has only texts as keys, and "10" comes before "9" among texts.
        return tuple(str(names[key]) for key in sorted(names, key=int))
    except ValueError:
        raise CheckpointError("config.json: the keys of id2label are not numbers") from None


def pooler_is_there(family: Family, keys: Iterable[str]) -> bool:
    """Returns True if a base model's file has its pooler, under either prefix."""
    names = {f"{family.prefix}{family.pooler}.weight", f"{family.pooler}.weight"}
    return family.pooler is not None and not names.isdisjoint(keys)


def current_name(family: Family, key: str) -> str:
    """Replaces old names of layer norm parameters and other names of modules in a key."""
    module, dot, parameter = key.rpartition(".")
    if not dot:
        return key
    return f"{family.aliases.get(module, module)}.{OLD_PARAMETERS.get(parameter, parameter)}"


def split_unused(family: Family, keys: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Splits unused keys into dropped heads, ignored buffers and unknown keys.

    A head may be dropped if the task uses another head.
    """
    modules: list[str] = []
    for head in family.heads.values():
        for row in head:
            modules += row.hf_modules
    if family.pooler is not None:
        modules.append(family.prefix + family.pooler)
    prefixes = (*family.pretraining, *(f"{name}." for name in modules))
    dropped, ignored, unknown = [], [], []
    for key in sorted(keys):
        current = current_name(family, key)
        if current.endswith(BUFFERS):
            ignored.append(key)
        elif current.startswith(prefixes) or (family.prefix + current).startswith(prefixes):
            dropped.append(key)
        else:
            unknown.append(key)
    return tuple(dropped), tuple(ignored), tuple(unknown)
