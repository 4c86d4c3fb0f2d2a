"""From the name of a model to a model: its folder, its task, its weights, its labels and its tokenizer.

Models are made on the device "meta", where tensors have shapes and no numbers, and get the tensors of the folder. So no
weight is drawn that a file replaces anyway, and no memory is used twice. Only heads are made with numbers, because a
part of a head may be new.

Shape legend: L labels.
"""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from bert_tasks.checkpoints.adapters import adapter_folder, model_weights
from bert_tasks.checkpoints.hub import Origin, origin, resolve, unfinished_note
from bert_tasks.checkpoints.load import CheckpointMatch, LoadReport, checked_tensors, match_weights
from bert_tasks.checkpoints.save import read_head_tensors
from bert_tasks.checkpoints.stored_tokenizers import open_tokenizer
from bert_tasks.data.columns import first_column
from bert_tasks.data.issues import first_few
from bert_tasks.data.kinds import ClassKind
from bert_tasks.distributed import is_main_process
from bert_tasks.errors import CheckpointError, NoHeadError, UsageError
from bert_tasks.families import copies_of_tied, family_of
from bert_tasks.model.encoder_with_heads import EncoderWithHeads, check_parameters, hf_names
from bert_tasks.model.pretrained import CheckpointFolder, folder_task
from bert_tasks.outputs.hf_config import label_places
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.several import task_name

ModelT = TypeVar("ModelT", bound=EncoderWithHeads)

_ASSUMED = ("LABEL_0", "LABEL_1")  # until the labels are known
_UNNAMED = re.compile(r"LABEL_\d+")  # transformers' name of a class that nobody has named

_log = logging.getLogger("bert_tasks")


def open_checkpoint(
    name: str | Path, *, revision: str | None, task: object = None, adapter: str | Path | None = None
) -> CheckpointFolder:
    """Opens the folder of a model, of one of several tasks, or of adapters on a base.

    One process warns if the folder holds the model of a run that is not finished.

    Raises:
        CheckpointError: There is no such model, or its description is damaged.
        UsageError: The folder has several tasks, and ``task`` is none of them.
    """
    path = resolve(name, revision=revision)
    note = unfinished_note(path)
    if note is not None and is_main_process():
        _log.warning(note)
    if adapter is None:
        return CheckpointFolder.open(path).of_task(task)
    return CheckpointFolder.open(adapter_folder(adapter, path), base=path).of_task(task)


def load_one_task(
    make: Callable[[Mapping[str, Any], Task[Any]], ModelT],
    name: str | Path,
    *,
    task: str | Task[Any] | type[Task[Any]] | None,
    revision: str | None,
    options: Mapping[str, Any],
    served_as: Callable[[type[Task]], type[Task]] | None = None,
    adapter: str | Path | None = None,
) -> ModelT:
    """Loads a model of one task. See ``TaskModel.from_pretrained``.

    Args:
        make: The class of the model, which takes config.json and the task.
        name, task, revision, adapter: See ``TaskModel.from_pretrained``.
        options: All fields of the task that the caller sets.
        served_as: See ``folder_task``.

    Raises:
        CheckpointError: The folder cannot be used. Its subclass NoHeadError says that it has no head of a known task.
        UsageError: A task or setting is unknown.
    """
    folder = open_checkpoint(name, revision=revision, task=task, adapter=adapter)
    try:
        built, is_own = folder_task(folder, task, options, served_as)
        classes = first_column(built.columns, ClassKind)
        needs_labels = classes is not None and built.output.has_labels and not built.output.labels
        has_assumed_labels = needs_labels and not isinstance(task, Task)
        if has_assumed_labels:  # so that there is a model, whose head fits two classes until ``fit`` knows the labels
            built = built.with_settings(labels=_ASSUMED)
        with torch.device("meta"):
            model = make(folder.hf_config, built)
        load_weights(model, folder, head_may_be_new=not is_own)
    except CheckpointError as error:
        if adapter is None or isinstance(error, NoHeadError):
            raise
        raise CheckpointError(f"{adapter} does not fit the base {name}. {error}") from None
    model.has_assumed_labels = has_assumed_labels
    opened = name if adapter is None else adapter
    describe(model, folder, origin(opened, folder.path, revision=revision))
    return model.eval()


def load_several_tasks(make: Callable[[CheckpointFolder], ModelT], name: str | Path, *, revision: str | None) -> ModelT:
    """Loads a saved model of several tasks.

    Args:
        make: Makes the model of a folder.
        name, revision: See ``MultiTaskModel.from_pretrained``.
    """
    folder = open_checkpoint(name, revision=revision)
    with torch.device("meta"):
        model = make(folder)
    load_weights(model, folder, head_may_be_new=False)
    describe(model, folder, origin(name, folder.path, revision=revision))
    return model.eval()


def load_weights(model: EncoderWithHeads, folder: CheckpointFolder, *, head_may_be_new: bool) -> None:
    """Loads the weights of a folder into a model on the device "meta"."""
    matched = match_folder(model, folder, head_may_be_new=head_may_be_new)
    replace_heads(model)  # with the initial weights that the constructors give them
    of_encoder: dict[str, Tensor] = {}
    of_head: dict[str, Tensor] = {}
    for key, value in matched.tensors.items():
        part = of_head if key.startswith("head.") else of_encoder
        part[key] = value
    model.load_state_dict(of_encoder, strict=False, assign=True)
    # The numbers are copied into the head, because ``assign`` would untie parameters that share a tensor.
    model.load_state_dict(of_head, strict=False)
    state = model.state_dict()
    model.drawn = {name: value.clone() for name, value in state.items() if name not in matched.tensors}
    model.load_report = matched.report


def replace_heads(model: EncoderWithHeads) -> None:
    """Gives a model heads with the initial weights of their constructors, instead of heads on the device "meta"."""
    tasks = model.tasks
    for name, of_head in model.heads.items():
        of_head.head = tasks[name].head(model.config)
    model.adopt_heads()


def describe(model: EncoderWithHeads, folder: CheckpointFolder, origin: Origin) -> None:
    """Reads what a folder holds besides the weights."""
    model.origin, model.columns, model.reading = origin, folder.columns, folder.reading
    model.tokenizer = open_tokenizer(
        folder.tokenizer_path, vocab_size=model.config.vocab_size, second=model.config.second_segment
    )


def restore(model: EncoderWithHeads, folder: str | Path) -> None:
    """Loads all weights of a model from a folder. Raises CheckpointError if they do not fit."""
    check_parameters(model)
    # A model in half precision stays so. A copy is not needed, because ``load_state_dict`` copies.
    dtype = model.encoder.embeddings.word.weight.dtype
    opened = CheckpointFolder.open(Path(folder))
    model.load_state_dict(match_folder(model, opened, head_may_be_new=False, dtype=dtype, copy=False).tensors)


def match_folder(
    model: EncoderWithHeads,
    folder: CheckpointFolder,
    *,
    head_may_be_new: bool,
    dtype: torch.dtype = torch.float32,
    copy: bool = True,
) -> CheckpointMatch:
    """Returns the folder's tensors for every parameter of a model, but no other kind of head.

    Raises:
        CheckpointError: Tensors are missing, unknown, of another shape or not finite. The message lists them.
        UsageError: The head lacks a parameter of transformers' head for the task.
    """
    state, names, head_kind = model.state_dict(), hf_names(model), model.head_kind
    if unknown := sorted(names.keys() - state.keys()):
        raise UsageError(
            f"{task_name(model.tasks)}: Task.head_kind is {head_kind!r}, but the head has no {first_few(unknown, 3)}. "
            "Set head_kind of the task or of its output to None for a head that transformers lacks"
        )
    if folder.head_name is not None:  # the heads of several tasks are in task_head.safetensors
        names = {key: of_key for key, of_key in names.items() if not key.startswith("head.")}
    family = family_of(model.hf_config)
    # The head of another task may have keys of the same names, such as ``classifier.weight``, which mean something
    # else. The keys of language-modelling heads are their own.
    ignore_head = folder.head != head_kind and not model.head.reads_embeddings
    matched = match_weights(
        model_weights(folder.path, family, folder.base),
        names,
        shapes={key: state[key].shape for key in names},
        family=family,
        copies=copies_of_tied(family, model.config, names, head=head_kind),
        head_may_be_new=head_may_be_new,
        ignore_head=ignore_head,
        dtype=dtype,
        copy=copy,
    )
    # Parameters that transformers has no name for are in task_head.safetensors.
    head_state = {key: value for key, value in state.items() if key not in names}
    if head_state:
        matched = _with_head_tensors(matched, folder, head_state, head_may_be_new=head_may_be_new)
    return _with_label_order(matched, folder.labels, model, names)


def _with_head_tensors(
    matched: CheckpointMatch, folder: CheckpointFolder, expected: Mapping[str, Tensor], *, head_may_be_new: bool
) -> CheckpointMatch:
    """Adds the tensors of task_head.safetensors, which must have the names and shapes of ``expected``."""
    saved, report = read_head_tensors(folder.path), matched.report
    if saved is not None and folder.head_name is not None:  # one of several heads, under the names of an only head
        start = f"head.heads.{folder.head_name}."
        saved = {key.replace(start, "head.", 1): value for key, value in saved.items() if key.startswith(start)}
    if saved is not None:
        shapes = {key: value.shape for key, value in expected.items()}
        saved_shapes = {key: value.shape for key, value in saved.items()}
        if saved_shapes == shapes:
            saved = checked_tensors(saved, {key: value.dtype for key, value in expected.items()})
            report = replace(report, loaded=tuple(sorted([*report.loaded, *expected])))
            return CheckpointMatch(tensors=matched.tensors | saved, report=report)
    if not head_may_be_new:
        raise CheckpointError(f"{folder.path}: task_head.safetensors is missing or does not fit the task")
    return replace(matched, report=replace(report, new=tuple(sorted([*report.new, *expected]))))


def _with_label_order(
    matched: CheckpointMatch,
    file_labels: tuple[str, ...],
    model: EncoderWithHeads,
    names: Mapping[str, tuple[str, ...]],
) -> CheckpointMatch:
    """Reorders the tensors of a folder's head from ``file_labels`` to the labels of the model.

    The meaning of a logit is its place, so a head is of use for labels in another order only after its rows have been
    moved. ``names`` are transformers' names of parameters for the report.
    """
    tensors, report, labels = matched.tensors, matched.report, model.labels
    dims_of_labels: dict[str, tuple[int, ...]] = {}
    for name, dims in model.head.label_dims.items():
        key = f"head.{name}"
        # A head of one's own may have outputs that are no labels.
        if key in tensors and tensors[key].size(dims[-1]) == len(labels):
            dims_of_labels[key] = dims
    if not file_labels:  # transformers leaves the default names of two classes out of the file
        file_labels = tuple(f"LABEL_{index}" for index in range(len(labels)))
    if not dims_of_labels or not labels or file_labels == labels:
        return matched
    named = _named_labels(file_labels, labels)
    places = label_places(named, labels)
    if places is None:
        redrawn: list[str] = []
        for key in dims_of_labels:
            redrawn += names.get(key, (key,))
        note = f"the file's head has other labels ({', '.join(file_labels)}), so its last layer is new"
        loaded = tuple(name for name in report.loaded if name not in redrawn)
        report = replace(report, loaded=loaded, new=(*report.new, *redrawn), notes=(*report.notes, note))
        kept = {key: value for key, value in tensors.items() if key not in dims_of_labels}
        return CheckpointMatch(tensors=kept, report=report)
    notes: list[str] = []
    if named != file_labels:
        pairs = [(old, new) for old, new in zip(file_labels, named, strict=True) if old != new]
        unnamed = ", ".join(old for old, _ in pairs)
        taken = ", ".join(new for _, new in pairs)
        notes.append(f"the file's labels are unnamed ({unnamed}) and taken in the order {taken}")
    if places != sorted(places):
        notes.append(f"head reordered from labels {', '.join(named)} to {', '.join(labels)}")
    order = torch.tensor(places)
    moved = {key: _reordered(tensors[key], order, dims) for key, dims in dims_of_labels.items()}
    return CheckpointMatch(tensors=tensors | moved, report=replace(report, notes=(*report.notes, *notes)))


def _named_labels(file_labels: tuple[str, ...], labels: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the labels of a file with names for its unnamed labels (LABEL_1), if names are missing.

    The names are those of ``labels`` that the file does not have, in their order.
    """
    if label_places(file_labels, labels) is not None:
        return file_labels
    known = {label.casefold() for label in file_labels if not _UNNAMED.fullmatch(label)}
    remaining = iter([label for label in labels if label.casefold() not in known])
    named: list[str] = []
    for label in file_labels:
        if _UNNAMED.fullmatch(label):
            named.append(next(remaining, label))
        else:
            named.append(label)
    return tuple(named)


def check_trained(name: str | Path, task: Task, report: LoadReport | None) -> None:
    """Raises NoHeadError if the head of a loaded model, or a part of it, is new."""
    if report is not None and report.new:
        raise NoHeadError(
            f"{name} has no trained head for {task.name} ({', '.join(report.new)} would be new). Train it first, or "
            "choose another model"
        )


def _reordered(tensor: Tensor, order: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Moves label ``order[i]`` to index i in each of the dimensions.

    The transitions of a CRF ``[L + 2, L]`` have a row for the start of a sentence before those of the labels, and a row
    for the end behind them. These rows do not move.
    """
    for dim in dims:
        rim = (tensor.size(dim) - len(order)) // 2
        ends = torch.arange(tensor.size(dim))
        index = torch.cat([ends[:rim], order + rim, ends[len(order) + rim :]])
        tensor = tensor.index_select(dim, index)
    return tensor
