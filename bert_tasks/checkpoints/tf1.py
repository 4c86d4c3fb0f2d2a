"""Checkpoints of Google's TensorFlow 1 programs (BERT, ALBERT, ELECTRA) as if they were folders of Hugging Face.

Such a folder has ``NAME.index`` with its data files, ``bert_config.json`` or ``albert_config.json`` (ELECTRA has none)
and a vocabulary. A config.json beside them is not needed; what it states replaces single fields, such as ``id2label``
and ``architectures``.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bert_tasks.checkpoints.files import MAX_CONFIG_BYTES, checked_file, read_json, refuse
from bert_tasks.checkpoints.tensor_bundle import DATA_FILE, INDEX, TensorBundle, open_bundle
from bert_tasks.data.problems import first_few
from bert_tasks.errors import CheckpointError
from bert_tasks.families import GOOGLE, encoder_config, may_be_of_family, tf1_models, tf1_parameter
from bert_tasks.families.base import MOST_LABELS, Family, TF1Names

# The file in which TensorFlow notes the latest of several checkpoints.
_LATEST = "checkpoint"
_LATEST_NAME = re.compile(r'^model_checkpoint_path:\s*"(?:[^"]*/)?([^"/]+)"', re.MULTILINE)
_MAX_LATEST_BYTES = 2**20
# Heads that a checkpoint may hold, the first that is complete counts: one that was trained for a task, before those of
# pre-training.
_HEADS = ("sequence", "span", "pretraining", "masked-lm", "replaced-token")
_OF_THE_WEIGHTS = ("model_type", "architectures")
_TF2 = "_CHECKPOINTABLE_OBJECT_GRAPH"


@dataclass(frozen=True, kw_only=True)
class TF1Checkpoint:
    """A model in a checkpoint.

    Attributes:
        bundle: the checkpoint.
        family: of the model.
        names: what Google calls its parameters.
        parameters: parameter of Hugging Face -> variable of the checkpoint, and whether its values are transposed.
        stated: the config.json beside it; empty if there is none.
    """

    bundle: TensorBundle
    family: Family
    names: TF1Names
    parameters: Mapping[str, tuple[str, bool]]
    stated: Mapping[str, Any]

    @property
    def head(self) -> str:
        """The kind of head that it holds; base for none."""
        for kind in _HEADS:
            rows = self.family.heads.get(kind, ())
            modules = [f"{name}.{part}" for row in rows for name in row.hf_modules for part in row.parameters]
            if modules and self.parameters.keys() >= set(modules):
                return kind
        return "base"

    @property
    def left_out(self) -> tuple[str, ...]:
        """The variables that are no part of the model: those of the optimizer, and of another model."""
        return tuple(sorted(self.bundle.entries.keys() - {variable for variable, _ in self.parameters.values()}))

    def shape(self, parameter: str) -> tuple[int, ...]:
        """The shape of a parameter of Hugging Face; empty if the checkpoint lacks it."""
        if parameter not in self.parameters:
            return ()
        variable, transposed = self.parameters[parameter]
        shape = self.bundle.entries[variable].shape
        return shape[::-1] if transposed else shape

    def files(self) -> tuple[Path, ...]:
        """The files that were read, or that reading the weights needs."""
        config = () if self.names.config_file is None else (self.names.config_file,)
        shards = [self.bundle.shard(number) for number in range(self.bundle.num_shards)]
        named = [self.bundle.path.with_name(name) for name in config]
        return tuple(path for path in (self.bundle.path, *shards, *named) if path.exists())


def find_index(folder: Path) -> Path | None:
    """The index of the folder's TensorFlow checkpoint; None if it has none.

    Raises:
        CheckpointError: there are several, and it is not noted which is the latest; or there are only data files.
    """
    entries = folder.iterdir() if folder.is_dir() else ()
    names = sorted(path.name for path in entries)
    found = [name for name in names if name.endswith(INDEX) and name != INDEX and not (folder / name).is_dir()]
    if not found:
        data = next(filter(None, map(DATA_FILE.fullmatch, names)), None)
        if data is not None:
            refuse(folder / data[0], f"a data file of a TensorFlow checkpoint, whose index {data[1]}{INDEX} is missing")
        return None
    if len(found) == 1:
        return folder / found[0]
    if os.path.lexists(folder / _LATEST):
        latest = checked_file(folder, _LATEST)
        noted = _LATEST_NAME.search(latest.read_bytes()[:_MAX_LATEST_BYTES].decode(errors="replace"))
        if noted is not None and f"{noted[1]}{INDEX}" in found:
            return folder / f"{noted[1]}{INDEX}"
    raise CheckpointError(
        f"{folder} holds several TensorFlow checkpoints ({first_few(found, 3)}): leave one of them there, or name it "
        f'in a file {_LATEST}: model_checkpoint_path: "{found[-1].removesuffix(INDEX)}"'
    )


def open_google(index: Path, stated: Mapping[str, Any]) -> TF1Checkpoint:
    """The model of a checkpoint: the only one, or that of which config.json states the class, or the usual one.

    Args:
        index: of the checkpoint.
        stated: config.json; empty if there is none.

    Raises:
        CheckpointError: the index is damaged, or the checkpoint is of another program.
    """
    bundle = open_bundle(index)
    found = []
    for family, names in tf1_models(bundle.entries):
        pairs = ((tf1_parameter(names, variable), variable) for variable in bundle.entries)
        parameters = {pair[0]: (variable, pair[1]) for pair, variable in pairs if pair is not None}
        found.append(TF1Checkpoint(bundle=bundle, family=family, names=names, parameters=parameters, stated=stated))
    if not found:
        kind = (
            "an object-based checkpoint of TensorFlow 2"
            if _TF2 in bundle.entries
            else "a checkpoint of another program"
        )
        refuse(
            index,
            f"{kind}, whose variables are not those of {', '.join(GOOGLE)}: {first_few(sorted(bundle.entries), 3)}",
        )
    wanted = stated.get("architectures")
    chosen = [one for one in found if isinstance(wanted, list) and one.family.architectures.get(one.head) in wanted]
    return [*chosen, *found][0]


def tf1_config(checkpoint: TF1Checkpoint) -> dict[str, Any]:
    """What config.json would be if transformers had saved the model; the fields that it states win.

    Raises:
        CheckpointError: Google's configuration is missing or damaged, or a size is neither stated nor in the shapes.
    """
    family, folder, stated = checkpoint.family, checkpoint.bundle.path.parent, checkpoint.stated
    file = checkpoint.names.config_file
    if file is None:
        config = _sizes(checkpoint)
    elif (folder / file).exists():
        read = read_json(checked_file(folder, file), max_bytes=MAX_CONFIG_BYTES)
        # What the weights tell is not believed of a file that may have been copied from a folder of Hugging Face.
        config = {field: value for field, value in read.items() if field not in _OF_THE_WEIGHTS}
        values = checkpoint.names.values
        config |= {
            field: values[field].get(str(config[field]), config[field]) for field in values.keys() & config.keys()
        }
    else:
        config = {}
    if not may_be_of_family(stated, family):
        refuse(
            folder / "config.json",
            f"it names another model than the one in {checkpoint.bundle.path.name}, {family.model_type}",
        )
    heads, _ = family.fields["num_attention_heads"]
    if heads not in config and heads not in stated:
        is_there = (folder / str(file)).exists()
        what = f"{folder / str(file)}: {heads} is missing" if is_there else f"{folder}: {file} is missing"
        raise CheckpointError(
            f"{what}; expected Google's configuration beside {checkpoint.bundle.path.name}, because the weights do not "
            "show the number of attention heads"
        )
    found = {
        "model_type": family.model_type,
        "architectures": [family.architectures[checkpoint.head]],
        **_labels(checkpoint),
        **config,
        **stated,
    }
    try:
        encoder_config(found)
    except CheckpointError as error:
        files = " or ".join(filter(None, [file, "config.json" if stated or file is None else None]))
        raise CheckpointError(f"{folder / files}: {str(error).removeprefix('config.json: ')}") from None
    return found


def tf1_weights(checkpoint: TF1Checkpoint, expected: Mapping[str, tuple[int, ...]] | None = None) -> dict[str, Tensor]:
    """The tensors of a model under the names of Hugging Face, after comparing their checksums.

    Args:
        checkpoint: the checkpoint.
        expected: see ``read_weights``.

    Raises:
        CheckpointError: a data file is missing, truncated or damaged.
    """
    tensors = {}
    for parameter, (variable, transposed) in checkpoint.parameters.items():
        shape = checkpoint.shape(parameter)
        if expected is not None and expected.get(parameter) != shape:  # it may be of any size, so it takes no memory
            tensors[parameter] = torch.empty(shape, dtype=checkpoint.bundle.dtype(variable), device="meta")
            continue
        tensor = checkpoint.bundle.read(variable)
        tensors[parameter] = tensor.t().contiguous() if transposed and tensor.dim() == 2 else tensor
    return tensors


def _sizes(checkpoint: TF1Checkpoint) -> dict[str, Any]:
    """The sizes of a model that has no configuration, from the shapes of its weights."""
    path, names = checkpoint.bundle.path, checkpoint.names
    config: dict[str, Any] = {}
    for field, (parameter, dimension) in names.sizes.items():
        shape = checkpoint.shape(parameter)
        if len(shape) != 2:
            refuse(
                path,
                f"{field} cannot be determined: {parameter} is missing, or is not a matrix: {list(shape)}",
            )
        config[field] = shape[dimension]
    numbers = [re.search(names.layers, parameter) for parameter in checkpoint.parameters]
    config["num_hidden_layers"] = len({found[1] for found in numbers if found is not None})
    heads, rest = divmod(config["hidden_size"], names.head_size)
    if rest and "num_attention_heads" not in checkpoint.stated:
        raise CheckpointError(
            f"{path}: the number of attention heads is not in the checkpoint, and hidden_size {config['hidden_size']} "
            f"is not a multiple of {names.head_size}: state it in {path.parent / 'config.json'}: "
            '{"num_attention_heads": ...}'
        )
    return config | {"num_attention_heads": heads}


def _labels(checkpoint: TF1Checkpoint) -> dict[str, Any]:
    """The number of classes, under the names that transformers gives to classes without names."""
    if checkpoint.head != "sequence":
        return {}
    row = next(row for row in checkpoint.family.heads[checkpoint.head] if row.module == "head.output")
    shape = checkpoint.shape(f"{row.hf_modules[0]}.weight")
    number = shape[0] if shape else 0
    if number > MOST_LABELS:
        refuse(checkpoint.bundle.path, f"its classifier has {number} classes, expected at most {MOST_LABELS}")
    names = {str(index): f"LABEL_{index}" for index in range(number)}
    return {"id2label": names, "label2id": {name: int(index) for index, name in names.items()}}
