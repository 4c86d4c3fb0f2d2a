"""Reads the families' data: config.json becomes our configuration, and our parameters get the names of Hugging Face.

The names serve both ways: loading concatenates where one of our parameters has several sources (query, key and value),
saving splits it again.
"""

from collections.abc import Iterable, Mapping
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType
from typing import Any, get_args

from bert_tasks import families
from bert_tasks.encoder.config import Activation, EncoderConfig, HeadConfig
from bert_tasks.errors import CheckpointError
from bert_tasks.families.base import OLD_PARAMETERS, Family, KeyRow

# The one key of ours in a config.json: task, settings, values fitted to data, version.
CONFIG_KEY = "bert_tasks"


def _families() -> Mapping[str, Family]:
    """model_type -> what each data file of this package defines."""
    names = [module.name for module in iter_modules(families.__path__) if module.name not in ("base", "registry")]
    found: list[Family] = [import_module(f"{families.__name__}.{name}").FAMILY for name in names]
    return MappingProxyType({family.model_type: family for family in found})


FAMILIES = _families()


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The family that a ``config.json`` names.

    Raises:
        CheckpointError: ``model_type`` is missing or unknown.
    """
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CheckpointError(f"config.json: model_type is {model_type!r}; supported are {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


def encoder_config(hf_config: Mapping[str, Any]) -> EncoderConfig:
    """Translates a ``config.json``.

    Raises:
        CheckpointError: an unknown family, a value of the wrong type, or one that this encoder does not compute.
    """
    family = family_of(hf_config)
    for name, only in family.only_values.items():
        if hf_config.get(name, only) != only:
            raise CheckpointError(f"config.json: {name} = {hf_config[name]!r} is not supported, only {only!r} is")
    values = {ours: _value(hf_config, theirs, default) for ours, (theirs, default) in family.fields.items()}
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
    derived = {
        "project_embeddings": embedding_size != values["hidden_size"],
        "layer_order": tuple(int(i / (layers / groups)) for i in range(layers)),
        "position_offset": values["pad_token_id"] + 1 if family.positions_after_padding else 0,
        "attention_output_dropout": values["hidden_dropout_prob"],
        "feed_forward_dropout": values["hidden_dropout_prob"],
        "has_pooler": family.pooler is not None,
        "head": HeadConfig(
            activation=family.head_activation,
            dropout_before_dense=family.dropout_before_dense,
            sequence_dropout=_dropout(hf_config, family.sequence_dropout),
            token_dropout=_dropout(hf_config, family.token_dropout),
            span_dropout=_dropout(hf_config, family.span_dropout),
        ),
    }
    try:
        return EncoderConfig(**{**values, **derived, **family.options})
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from None


def _value(hf_config: Mapping[str, Any], name: str, default: Any) -> Any:
    value = hf_config.get(name, default)
    kinds = (int, float) if isinstance(default, float) else (type(default),)
    if not isinstance(value, kinds) or (isinstance(value, bool) and not isinstance(default, bool)):
        raise CheckpointError(f"config.json: {name} = {value!r}, expected a {type(default).__name__}")
    least = 1 if isinstance(default, int) and name not in ("type_vocab_size", "pad_token_id", "") else 0
    if isinstance(value, int | float) and value < least:
        raise CheckpointError(f"config.json: {name} = {value!r}, expected at least {least}")
    return value


def _dropout(hf_config: Mapping[str, Any], fields: Mapping[str, float | None]) -> float:
    """The first of some fields that is not None; 0 where all are."""
    stated = (name for name, default in fields.items() if hf_config.get(name, default) is not None)
    name = next(stated, None)
    return 0.0 if name is None else float(_value(hf_config, name, 0.0 if fields[name] is None else fields[name]))


def second_segment(hf_config: Mapping[str, Any]) -> int:
    """The segment id of the second text of a pair: 1 where the family has segments and the model a row for it, else 0.

    Raises:
        CheckpointError: as for ``encoder_config``.
    """
    has_two = family_of(hf_config).has_segments and encoder_config(hf_config).type_vocab_size >= 2
    return 1 if has_two else 0


def parameter_map(family: Family, config: EncoderConfig, *, head: str, pooler: bool) -> dict[str, tuple[str, ...]]:
    """Our parameter name -> the full HF names of its parts, in the order of concatenation.

    Args:
        head: a kind of head of ``Family.heads``; any other, such as ``base``, stands for an encoder alone.
        pooler: whether the encoder carries a pooler of its own (``base`` only).
    """
    rows = [
        KeyRow(row.ours, tuple(family.prefix + name for name in row.theirs), row.parameters, row.only_with)
        for row in family.keys
    ]
    if pooler and family.pooler is not None:
        rows.append(KeyRow("pooler", (family.prefix + family.pooler,)))
    rows += family.heads.get(head, ())
    return {
        f"{row.ours.format(i=i)}.{parameter}": tuple(f"{name.format(i=i)}.{parameter}" for name in row.theirs)
        for row in rows
        if row.only_with is None or getattr(config, row.only_with)
        for i in range(max(config.layer_order) + 1 if "{i}" in row.ours else 1)
        for parameter in row.parameters
    }


def head_kind(hf_config: Mapping[str, Any]) -> str | None:
    """The kind of head that the file's ``architectures`` names; None for classes this package does not know."""
    family = family_of(hf_config)
    named = hf_config.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    kinds = [kind for kind, architecture in family.architectures.items() if architecture == first]
    return kinds[0] if kinds else None


def pooler_is_there(family: Family, keys: Iterable[str]) -> bool:
    """Whether a file of a base model holds its pooler, with or without the base prefix."""
    wanted = {f"{family.prefix}{family.pooler}.weight", f"{family.pooler}.weight"}
    return family.pooler is not None and not wanted.isdisjoint(keys)


def current_name(key: str) -> str:
    """A key of a file with the old names of layer norm parameters replaced."""
    module, dot, parameter = key.rpartition(".")
    return f"{module}{dot}{OLD_PARAMETERS.get(parameter, parameter)}" if dot else key


def droppable_prefixes(family: Family) -> tuple[str, ...]:
    """Prefixes of full HF names that are heads: they may be left out when another head is wanted."""
    modules = [name for head in family.heads.values() for row in head for name in row.theirs]
    poolers = [family.prefix + family.pooler] if family.pooler is not None else []
    return (*family.pretraining, *(f"{name}." for name in [*modules, *poolers]))
