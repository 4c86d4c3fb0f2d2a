"""From the name of a model to a model: its folder, its task, its weights, its labels and its tokenizer.

Models are made on the device "meta", where tensors have shapes and no numbers, and get the tensors of the folder.
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
    """
    folder = open_checkpoint(name, revision=revision, task=task, adapter=adapter)
    try:
        built, is_own = folder_task(folder, task, options, served_as)
        classes = first_column(built.columns, ClassKind)
        needs_labels = classes is not None and built.output.has_labels and not built.output.labels
        has_assumed_labels = needs_labels and not isinstance(task, Task)
        if has_assumed_labels:
            built = built.with_settings(labels=_ASSUMED)
        with torch.device("meta"):
            model = make(folder.hf_config, built)
        load_weights(model, folder, head_may_be_new=not is_own)
    except CheckpointError as error:
        if adapter is None or isinstance(error, NoHeadError):
            raise
        raise CheckpointError(f"{adapter} does not fit the base {name}. {error}") from None
    model.has_assumed_labels = has_assumed_labels
    describe(model, folder, origin(name if adapter is None else adapter, folder.path, revision=revision))
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
    for is_head in (False, True):  # copied to the head, whose parameters may be tied
        tensors = {key: value for key, value in matched.tensors.items() if key.startswith("head.") == is_head}
        model.load_state_dict(tensors, strict=False, assign=not is_head)
    state = model.state_dict()
    model.drawn = {name: value.clone() for name, value in state.items() if name not in matched.tensors}
    model.load_report = matched.report


def replace_heads(model: EncoderWithHeads) -> None:
    """Gives a model heads with the initial weights of their constructors."""
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
    matched = match_weights(
        model_weights(folder.path, family, folder.base),
        names,
        shapes={key: state[key].shape for key in names},
        family=family,
        copies=copies_of_tied(family, model.config, names, head=head_kind),
        head_may_be_new=head_may_be_new,
        ignore_head=folder.head != head_kind and not model.head.reads_embeddings,  # whose keys no other head has
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
    shapes = {key: value.shape for key, value in expected.items()}
    if saved is not None and {key: value.shape for key, value in saved.items()} == shapes:
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

    ``names`` are transformers' names of parameters for the report.
    """
    tensors, report, labels = matched.tensors, matched.report, model.labels
    dims = {
        key: dim
        for key, dim in ((f"head.{name}", dim) for name, dim in model.head.label_dims.items())
        # An own head may have outputs that are no labels.
        if key in tensors and tensors[key].size(dim[-1]) == len(labels)
    }
    if not file_labels:  # transformers leaves the default names of two classes out of the file
        file_labels = tuple(f"LABEL_{index}" for index in range(len(labels)))
    if not dims or not labels or file_labels == labels:
        return matched
    named = file_labels
    if label_places(file_labels, labels) is None:  # unnamed labels (LABEL_1) are the ones that are left, in order
        named_labels = {label.casefold() for label in file_labels if not _UNNAMED.fullmatch(label)}
        left = iter([label for label in labels if label.casefold() not in named_labels])
        named = tuple(next(left, label) if _UNNAMED.fullmatch(label) else label for label in file_labels)
    places = label_places(named, labels)
    if places is None:
        redrawn = [name for key in dims for name in names.get(key, (key,))]
        note = f"the file's head has other labels ({', '.join(file_labels)}), so its last layer is new"
        loaded = tuple(name for name in report.loaded if name not in redrawn)
        report = replace(report, loaded=loaded, new=(*report.new, *redrawn), notes=(*report.notes, note))
        return CheckpointMatch(tensors={key: value for key, value in tensors.items() if key not in dims}, report=report)
    notes = []
    if named != file_labels:
        pairs = [(old, new) for old, new in zip(file_labels, named, strict=True) if old != new]
        unnamed, taken = (", ".join(group) for group in zip(*pairs, strict=True))
        notes.append(f"the file's labels are unnamed ({unnamed}) and taken in the order {taken}")
    if places != sorted(places):
        notes.append(f"head reordered from labels {', '.join(named)} to {', '.join(labels)}")
    moved = {key: _reordered(tensors[key], torch.tensor(places), dims[key]) for key in dims}
    return CheckpointMatch(tensors=tensors | moved, report=replace(report, notes=(*report.notes, *notes)))


def check_trained(name: str | Path, task: Task, report: LoadReport | None) -> None:
    """Raises NoHeadError if the head of a loaded model, or a part of it, is new."""
    if report is not None and report.new:
        raise NoHeadError(
            f"{name} has no trained head for {task.name} ({', '.join(report.new)} would be new). Train it first, or "
            "choose another model"
        )


def _reordered(tensor: Tensor, order: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Moves label ``order[i]`` to index i. Start and end entries do not move."""
    for dim in dims:
        rim = (tensor.size(dim) - len(order)) // 2
        ends = torch.arange(tensor.size(dim))
        index = torch.cat([ends[:rim], order + rim, ends[len(order) + rim :]])
        tensor = tensor.index_select(dim, index)
    return tensor
