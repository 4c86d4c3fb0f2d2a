"""Converts checkpoints of Google's TensorFlow 1 programs to Hugging Face's format.

The folder has ``NAME.index`` with its data files, ``bert_config.json`` or ``albert_config.json`` (ELECTRA has none) and
a vocabulary. A config.json beside them is not needed. If it exists, its fields take precedence, for example
``id2label``.
"""

import json
import re
import shutil
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bert_tasks.checkpoints.files import MAX_CONFIG_BYTES, checked_file, read_json, refuse
from bert_tasks.checkpoints.inspect import inspect_checkpoint
from bert_tasks.checkpoints.save import save_folder
from bert_tasks.checkpoints.tokenizers import load_tokenizer
from bert_tasks.data.problems import first_few
from bert_tasks.errors import CheckpointError
from bert_tasks.families import FAMILIES, encoder_config
from bert_tasks.families.base import MOST_LABELS, Family
from bert_tasks.storage import check_new_folder, new_folder
from bert_tasks.tensorflow.names import MODELS, TF1Names
from bert_tasks.tensorflow.tensor_bundle import INDEX, TensorBundle, open_bundle

_LATEST = re.compile(r'^model_checkpoint_path:\s*"(?:[^"]*/)?([^"/]+)"', re.MULTILINE)
# Heads that a checkpoint may hold. The first complete head counts, so a task's head precedes pre-training heads.
_HEADS = ("sequence", "span", "pretraining", "masked-lm", "replaced-token")
_HEAD_SIZE = 64  # of an attention head, in ELECTRA's get_generator_config (run_pretraining.py) and published models
_SPECIAL = re.compile(r"\[.*\]|<.*>")
_DIGIT_COMMA = re.compile(r"\d,$")


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A converted folder.

    Attributes:
        folder: The new folder.
        architecture: Class of transformers that opens it.
        tensors: Number of tensors.
        tokenizer: The tokenizer's class, or None if there is no vocabulary.
        left_out: Variables that are no part of the model, such as the optimizer's.
    """

    folder: str
    architecture: str
    tensors: int
    tokenizer: str | None
    left_out: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        tokenizer = "no tokenizer, because there is no vocabulary" if self.tokenizer is None else self.tokenizer
        skipped = [f"skipped {len(self.left_out)} variables: {first_few(self.left_out, 3)}"] if self.left_out else []
        return [f"{self.architecture}: {self.tensors} tensors, {tokenizer}", *skipped, f"converted: {self.folder}"]


def convert(folder: str | Path, output: str | Path) -> Conversion:
    """Converts a TensorFlow 1 checkpoint of BERT, ALBERT or ELECTRA.

    Args:
        folder: Folder of the checkpoint.
        output: New folder, which must be empty if it exists.

    Returns:
        The description of the conversion.

    Raises:
        UsageError: The output folder is not empty.
        CheckpointError: A file is missing or damaged, the checkpoint is of another program, or the model would not
            load. Nothing is written.

    Example::

        convert("uncased_L-12_H-768_A-12", "bert-base-uncased")
    """
    source, target = Path(folder), Path(output)
    check_new_folder(target)
    bundle = open_bundle(_index(source))
    hf_config = _read_optional(source, "config.json")
    names, parameters, head = _model(bundle, hf_config)
    family = FAMILIES[names.family]
    config = _config(bundle, names, parameters, head, hf_config)
    vocab_size = encoder_config(config).vocab_size
    tensors = {}
    for parameter, (variable, is_transposed) in parameters.items():
        tensor = bundle.read(variable)
        name = parameter.removeprefix(family.prefix) if head == "base" else parameter
        tensors[name] = tensor.t().contiguous() if is_transposed and tensor.dim() == 2 else tensor
    with new_folder(target, suffix=".converting") as workspace:
        has_vocabulary = _write_vocabulary(source, workspace)
        (workspace / "config.json").write_text(json.dumps(config), "utf-8")
        tokenizer = load_tokenizer(workspace, vocab_size=vocab_size, required=has_vocabulary)
        save_folder(workspace, config=config, tensors=tensors, tokenizer=tokenizer)
        if (workspace / "spiece.model").exists():
            _read_pieces_as_google(workspace)
        problems = inspect_checkpoint(workspace).problems
        if problems:
            raise CheckpointError(f"{source}: the model would not load ({first_few(problems, 8)})")
    used = {variable for variable, _ in parameters.values()}
    return Conversion(
        folder=str(target),
        architecture=str(config["architectures"][0]),
        tensors=len(tensors),
        tokenizer=None if tokenizer is None else type(tokenizer).__name__,
        left_out=tuple(sorted(bundle.entries.keys() - used)),
    )


def _index(folder: Path) -> Path:
    """Returns the index of the checkpoint that the file ``checkpoint`` calls latest."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder. Expected the folder of a TensorFlow checkpoint")
    indexes = sorted(path.name for path in folder.glob(f"?*{INDEX}"))
    latest = folder / "checkpoint"
    match = _LATEST.search(latest.read_text("utf-8", errors="replace")) if latest.is_file() else None
    if len(indexes) > 1 and match is not None and f"{match[1]}{INDEX}" in indexes:
        return folder / f"{match[1]}{INDEX}"
    if len(indexes) > 1:
        raise CheckpointError(
            f"{folder} holds several TensorFlow checkpoints ({first_few(indexes, 3)}). Keep one of them, or "
            f'write a file checkpoint with the line model_checkpoint_path: "{indexes[-1].removesuffix(INDEX)}"'
        )
    if not indexes:
        raise CheckpointError(f"{folder}: no TensorFlow checkpoint. Expected NAME{INDEX}")
    return folder / indexes[0]


def _model(bundle: TensorBundle, hf_config: Mapping[str, Any]) -> tuple[TF1Names, dict[str, tuple[str, bool]], str]:
    """Returns names, parameters and head of config.json's model, or of the first."""
    variables = [variable.removeprefix("module/") for variable in bundle.entries]
    models = [names for names in MODELS if any(variable.startswith(names.marker) for variable in variables)]
    if not models:
        is_tf2 = "_CHECKPOINTABLE_OBJECT_GRAPH" in bundle.entries
        program = "an object-based checkpoint of TensorFlow 2" if is_tf2 else "a checkpoint of another program"
        refuse(
            bundle.path,
            f"{program}, whose variables do not belong to {', '.join(dict.fromkeys(names.family for names in MODELS))} "
            f"({first_few(sorted(bundle.entries), 3)})",
        )
    choices = []
    for names in models:
        parameters = names.parameters(bundle.entries)
        choices.append((names, parameters, _head(FAMILIES[names.family], parameters)))
    architectures = hf_config.get("architectures")
    matching = [
        choice
        for choice in choices
        if isinstance(architectures, list) and FAMILIES[choice[0].family].architectures[choice[2]] in architectures
    ]
    return [*matching, *choices][0]


def _head(family: Family, parameters: Iterable[str]) -> str:
    for head_type in _HEADS:
        rows = family.heads.get(head_type, ())
        needed = {f"{name}.{parameter}" for row in rows for name in row.hf_modules for parameter in row.parameters}
        if needed and needed <= set(parameters):
            return head_type
    return "base"


def _config(
    bundle: TensorBundle,
    names: TF1Names,
    parameters: Mapping[str, tuple[str, bool]],
    head: str,
    hf_config: Mapping[str, Any],
) -> dict[str, Any]:
    """Makes the config.json. A config.json beside the checkpoint takes precedence."""
    family, folder = FAMILIES[names.family], bundle.path.parent

    def shape(parameter: str) -> tuple[int, ...]:
        variable, is_transposed = parameters.get(parameter, ("", False))
        sizes = bundle.entries[variable].shape if variable else ()
        return sizes[::-1] if is_transposed else sizes

    if names.config_file is not None:
        config = _read_optional(folder, names.config_file)
        if config.get("hidden_act") == "gelu":
            config["hidden_act"] = names.gelu
    else:
        config = {}
        for field, (parameter, dimension) in names.sizes.items():
            if len(shape(parameter)) != 2:
                refuse(bundle.path, f"{field} is not known, because {parameter} is missing or is not a matrix")
            config[field] = shape(parameter)[dimension]
        layers = [re.search(r"^electra\.encoder\.layer\.(\d+)\.", parameter) for parameter in parameters]
        config["num_hidden_layers"] = len({layer[1] for layer in layers if layer is not None})
        if config["hidden_size"] % _HEAD_SIZE == 0:
            config["num_attention_heads"] = config["hidden_size"] // _HEAD_SIZE
    if "num_attention_heads" not in {**config, **hf_config}:
        raise CheckpointError(
            f"{folder}: the weights do not show the number of attention heads. Set num_attention_heads in "
            f"{'config.json' if names.config_file is None else names.config_file}, beside {bundle.path.name}"
        )
    if hf_config.get("model_type", family.model_type) != family.model_type:
        refuse(folder / "config.json", f"names another model than the one in {bundle.path.name}, {family.model_type}")
    labels: dict[str, Any] = {}
    if head == "sequence":
        output = next(row for row in family.heads[head] if row.module == "head.output")
        count = shape(f"{output.hf_modules[0]}.weight")[0]
        if count > MOST_LABELS:
            refuse(bundle.path, f"its classifier has {count} classes, expected at most {MOST_LABELS}")
        labels["id2label"] = {str(number): f"LABEL_{number}" for number in range(count)}
        labels["label2id"] = {f"LABEL_{number}": number for number in range(count)}
    config |= {"model_type": family.model_type, "architectures": [family.architectures[head]], **labels}
    return config | dict(hf_config)


def _read_optional(folder: Path, name: str) -> dict[str, Any]:
    if not (folder / name).exists():
        return {}
    return read_json(checked_file(folder, name), max_bytes=MAX_CONFIG_BYTES)


def _write_vocabulary(source: Path, folder: Path) -> bool:
    """Copies the vocabulary under transformers' name. Returns False if there is none."""
    files = sorted(path for pattern in ("*.model", "vocab*.txt") for path in source.glob(pattern))
    if len(files) > 1:
        raise CheckpointError(f"{source} holds several vocabularies ({', '.join(f.name for f in files)}). Keep one")
    if not files:
        return False
    path, is_wordpiece = checked_file(source, files[0].name), files[0].suffix == ".txt"
    shutil.copyfile(path, folder / ("vocab.txt" if is_wordpiece else "spiece.model"))
    tokens = path.read_text("utf-8").splitlines() if is_wordpiece else _pieces(path)
    settings = _read_optional(source, "tokenizer_config.json")
    is_lower = settings.get("do_lower_case", _is_lower_cased(tokens, keeps_accents=is_wordpiece))
    if not isinstance(is_lower, bool):
        raise CheckpointError(
            f"{path}: neither its tokens nor the checkpoint tell whether the model is cased or uncased. "
            f'Set {{"do_lower_case": true}} (uncased) or false (cased) in {source / "tokenizer_config.json"}'
        )
    tokenizer_class = "BertTokenizer" if is_wordpiece else "AlbertTokenizer"
    content = {**settings, "do_lower_case": is_lower, "tokenizer_class": tokenizer_class}
    (folder / "tokenizer_config.json").write_text(json.dumps(content), "utf-8")
    return True


def _pieces(path: Path) -> list[str]:
    """Returns the pieces of a SentencePiece model."""
    from sentencepiece import SentencePieceProcessor

    try:
        processor = SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as error:
        refuse(path, f"not a SentencePiece model, or damaged ({error}). Copy or download it again")
    return [processor.id_to_piece(number) for number in range(processor.get_piece_size())]


def _is_lower_cased(tokens: Iterable[str], *, keeps_accents: bool) -> bool | None:
    """Returns True if texts are lower-cased before look-up, or None if it is unknown."""
    # A token with a capital letter would never be found otherwise. If all letters are small, the texts from which the
    # vocabulary was made were lower-cased. WordPiece then also removes accents, so that there must be none.
    plain = [token for token in tokens if not _SPECIAL.fullmatch(token)]
    if any(token != token.lower() for token in plain):
        return False
    has_accents = any(unicodedata.category(c) == "Mn" for c in unicodedata.normalize("NFD", "".join(plain)))
    has_letters = any(token != token.upper() for token in plain)
    return True if has_letters and not (has_accents and keeps_accents) else None


def _read_pieces_as_google(folder: Path) -> None:
    """Makes ALBERT's tokenizer return the ids of Google's program."""
    # Symbols that users defined, such as "(", are pieces like others, and pieces such as "2," are split again.
    (folder / "spiece.model").unlink()  # tokenizer.json alone is read
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text("utf-8"))
    content["added_tokens"] = [token for token in content["added_tokens"] if token["special"]]
    for piece in content["model"]["vocab"]:
        if _DIGIT_COMMA.search(piece[0]):
            piece[1] -= 100  # a score so low that the piece is never the best one
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")
