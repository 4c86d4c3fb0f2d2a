"""What a folder holds of a ``TaskModel``, and how it is written: the task, its settings, the head and its labels.

This module owns the ``bert_tasks`` key of config.json and task_head.safetensors, the head that transformers lacks. No
name in a file is followed to code: a task of the form ``module:Class`` is loaded only if the caller passes it. The
functions take and return plain parts, of which ``TaskModel`` builds itself.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bert_tasks.checkpoints.hub import resolve
from bert_tasks.checkpoints.load import (
    LoadReport,
    Matched,
    checked_tensors,
    label_names,
    match_weights,
    read_config,
    read_weights,
)
from bert_tasks.checkpoints.save import hf_tensors, read_head_tensors, save_folder
from bert_tasks.data.readers import ReadOptions, loaded_options, stored_options
from bert_tasks.encoder.heads import reordered
from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.families.registry import (
    CONFIG_KEY,
    encoder_config,
    family_of,
    head_kind,
    parameter_map,
)
from bert_tasks.tasks import TASK_NAMES, TASKS, Task, named_task, tasks_with_head
from bert_tasks.tasks.base import label_places, typed_setting

READING_KEY = "reading"  # below our key of config.json

_UNNAMED = re.compile(r"LABEL_\d+")  # transformers' name of a class that nobody has named


@dataclass(frozen=True, kw_only=True)
class CheckpointFolder:
    """The parts of a folder that decide what is built.

    Attributes:
        path: the folder.
        hf_config: config.json.
        head: the kind of head that ``architectures`` names; None for classes this package does not know.
    """

    path: Path
    hf_config: dict[str, Any]
    head: str | None

    @classmethod
    def open(cls, name: str | Path, *, revision: str | None = None) -> Self:
        """Reads the config.json of a folder, a hub id or a package; see ``hub.resolve``.

        Raises:
            CheckpointError: there is no such model, config.json is damaged, or the family is not supported.
        """
        path = resolve(name, revision=revision)
        return cls.of(path, read_config(path))

    @classmethod
    def of(cls, path: Path, hf_config: Mapping[str, Any]) -> Self:
        return cls(path=path, hf_config=dict(hf_config), head=head_kind(hf_config))

    @property
    def labels(self) -> tuple[str, ...]:
        return label_names(self.hf_config)

    @property
    def stored(self) -> dict[str, Any] | None:
        entry = self.hf_config.get(CONFIG_KEY)
        return entry if isinstance(entry, dict) else None

    def states(self, kind: type[Task]) -> bool:
        """Whether we stored a task of this class here."""
        return self.stored is not None and self.stored.get("task") == registered_name(kind)


def folder_task(
    folder: CheckpointFolder,
    task: str | Task | type[Task] | None,
    given: Mapping[str, Any],
    served_as: Callable[[type[Task]], type[Task]] | None = None,
) -> tuple[Task, bool]:
    """The task to load from a folder, and whether it is the folder's own, whose head must be complete.

    Args:
        folder, task, given, served_as: see ``TaskModel.load``.

    Raises:
        CheckpointError: what the folder states is damaged, or it has no head that this package knows.
        UsageError: an unknown task, or a given field is not one of the task's or does not fit the others.
    """
    if isinstance(task, Task):
        if given:
            raise UsageError("pass either a task, or a task's name with labels and settings")
        return task, False
    kind = _task_class(folder, task, served_as, is_new=bool(given))
    return _merged_task(folder, kind, given), task is None or (not given and folder.states(kind))


def stored_reading(path: Path, hf_config: Mapping[str, Any]) -> ReadOptions:
    """How the training data were read, as far as config.json says it. Raises CheckpointError if that is damaged."""
    entry = hf_config.get(CONFIG_KEY)
    if not isinstance(entry, dict) or READING_KEY not in entry:
        return ReadOptions()
    try:
        return loaded_options(entry[READING_KEY])
    except ValueError as error:
        raise CheckpointError(f"{path}: config.json, key {CONFIG_KEY}: {error}") from None


def differing_parameters(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """The names of parameters that differ in existence or shape, for messages; empty if none does."""
    differences = {
        "missing": sorted(expected.keys() - found.keys()),
        "not known": sorted(found.keys() - expected.keys()),
        "of another shape": sorted(
            key for key in expected.keys() & found.keys() if expected[key].shape != found[key].shape
        ),
    }
    return "; ".join(f"{kind}: {_first(names)}" for kind, names in differences.items() if names)


def _first(names: Sequence[str], most: int = 3) -> str:
    more = [f"and {len(names) - most} more"] if len(names) > most else []
    return ", ".join([*names[:most], *more])


def stated_task(
    path: Path, hf_config: Mapping[str, Any], task: str | Task | type[Task] | None, given: Mapping[str, Any]
) -> Task:
    """The task that a folder which this package wrote states, with the given fields.

    Args:
        task: its name, or its class if it is not built in.

    Raises:
        CheckpointError: the folder does not say it, or ``task`` is another.
        UsageError: a given field is not one of the task's.
    """
    folder = CheckpointFolder.of(path, hf_config)
    stored = folder.stored
    if stored is not None and not isinstance(task, Task):
        kind = _task_class(folder, task, None, is_new=False)
        if folder.states(kind):
            return _merged_task(folder, kind, given)
    stated = None if stored is None else stored.get("task")
    raise CheckpointError(f"{path}: config.json says its task is {stated!r}; only that one can be run")


def _task_class(
    folder: CheckpointFolder,
    task: str | type[Task] | None,
    served_as: Callable[[type[Task]], type[Task]] | None,
    *,
    is_new: bool,
) -> type[Task]:
    """The class of the task: the caller's, else the stored one, else the one that the folder's head serves.

    Args:
        is_new: the caller describes a head, so that a folder without one needs a task's name.
    """
    stored = folder.stored
    if isinstance(task, type):
        return task
    if task is not None:
        is_own = stored is not None and stored.get("task") == task and task not in TASK_NAMES
        return _stored_class(folder, stored) if is_own and stored is not None else named_task(task)
    if stored is not None:
        return _stored_class(folder, stored)
    served = tasks_with_head(folder.head)
    if served:
        return served[0] if served_as is None else served_as(served[0])
    example = f"pass task={next(iter(TASKS))!r} (or another)"
    if is_new:
        raise UsageError(f"labels and settings need a task: {example} too")
    raise CheckpointError(
        f"{folder.path} has no task head this package knows (architectures: "
        f"{folder.hf_config.get('architectures')}); {example} for a new one"
    )


def _merged_task(folder: CheckpointFolder, kind: type[Task], given: Mapping[str, Any]) -> Task:
    """The task of this class that a folder holds or starts from, with the caller's fields.

    The one place where settings are merged: given by the caller, else stored by us in config.json (only of the same
    task), else implied by transformers' configuration, else the defaults. A given field changes no other field, except
    those that cannot be combined with it (``Task.compatible_fields``).

    Raises:
        CheckpointError: what the folder states is damaged.
        UsageError: a given field is not one of the task's, or does not fit the others.
    """
    is_own = folder.states(kind)
    implied = kind.from_hf(folder.hf_config, folder.labels, encoder_config(folder.hf_config).usable_length)
    if not is_own and kind not in tasks_with_head(folder.head):  # of a new head only the lengths are implied
        implied = {name: value for name, value in implied.items() if isinstance(value, int)}
    stored: dict[str, Any] = {}
    if is_own and folder.stored is not None:
        settings = folder.stored.get("settings", {})
        if not isinstance(settings, dict):
            raise CheckpointError(f"{folder.path}: config.json, key {CONFIG_KEY}: settings must be an object")
        fitted = {name: value for name, value in folder.stored.items() if name in ("labels", *kind.tuned)}
        stored = {**settings, **fitted}
    base = {**implied, **stored}
    if is_own or not given:
        try:
            task = _build(kind, base)
        except UsageError as error:
            place = f"config.json, key {CONFIG_KEY}" if is_own else "config.json"
            raise CheckpointError(f"{folder.path}: {place}: {error}") from None
        if not given:
            return task
        base = {field.name: getattr(task, field.name) for field in fields(task)}
    checked = dict(given)
    for name in given.keys() & {field.name for field in fields(kind)}:
        try:
            checked[name] = typed_setting(kind, name, given[name])
        except ValidationError as error:
            problem = error.errors()[0]["msg"]
            raise UsageError(f"{kind.name}: {name} is {given[name]!r}: {problem}") from None
    return _build(kind, {**kind.compatible_fields(base, checked), **checked})


def _stored_class(folder: CheckpointFolder, stored: Mapping[str, Any]) -> type[Task]:
    name = stored.get("task")
    if not isinstance(name, str) or name not in TASKS:
        raise CheckpointError(
            f"{folder.path}: config.json says its task is {name!r}, which is not built in; pass the class: "
            "TaskModel.from_pretrained(folder, task=YourTask), or --task module:YourTask"
        )
    return TASKS[name]


def _build(kind: type[Task], entries: Mapping[str, Any]) -> Task:
    known = {field.name for field in fields(kind)}
    for key in entries:
        if key not in known:
            close = get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise UsageError(f"{kind.name} has no setting {key!r}{hint}")
    plain = {key: tuple(value) if isinstance(value, list) else value for key, value in entries.items()}
    construct: Callable[..., Task] = kind  # its fields are checked by the task itself
    try:
        return construct(**plain)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{kind.name}: {error}") from None


def match_folder(
    folder: CheckpointFolder,
    task: Task,
    hf_config: Mapping[str, Any],
    state: Mapping[str, Tensor],
    *,
    label_dims: Mapping[str, tuple[int, ...]],
    head_may_be_new: bool,
    dtype: torch.dtype = torch.float32,
) -> Matched:
    """The folder's tensors for every parameter of a model; a head of another kind is not read even where shapes fit.

    Args:
        task, hf_config: of the model.
        state: the model's parameters, of which only names, shapes and (of buffers) dtypes are used.
        label_dims: see ``Head``.
        head_may_be_new: whether parameters of the head may be missing or of another shape.
        dtype: of the parameters that are returned.

    Raises:
        CheckpointError: naming every tensor that is missing, unknown, of another shape or not finite.
        UsageError: the head lacks a parameter of the head of transformers that the task names.
    """
    family, kind = family_of(hf_config), task.hf_head
    names = parameter_map(family, encoder_config(hf_config), head="base" if kind is None else kind, pooler=False)
    shapes = {key: value.shape for key, value in state.items() if key in names}
    if unknown := sorted(names.keys() - shapes.keys()):
        raise UsageError(
            f"{type(task).__name__}: hf_head is {kind!r}, but the head has no {_first(unknown)}; hf_head is None "
            "for a head that is not one of transformers"
        )
    matched = match_weights(
        read_weights(folder.path),
        names,
        shapes=shapes,
        family=family,
        head_may_be_new=head_may_be_new,
        ignore_head=folder.head != kind,
        dtype=dtype,
    )
    own = {key: value for key, value in state.items() if key not in names}
    if own:
        matched = _with_own_tensors(matched, own, folder, may_be_new=head_may_be_new)
    return _reordered(matched, folder, task, label_dims, names)


def _with_own_tensors(
    matched: Matched, own: Mapping[str, Tensor], folder: CheckpointFolder, *, may_be_new: bool
) -> Matched:
    """Adds what transformers has no name for (``own``: as the model has it), from ``task_head.safetensors``."""
    found, report = read_head_tensors(folder.path), matched.report
    shapes = {key: value.shape for key, value in own.items()}
    if found is not None and {key: value.shape for key, value in found.items()} == shapes:
        loaded = tuple(sorted([*report.loaded, *own]))
        checked = checked_tensors(found, {key: value.dtype for key, value in own.items()})
        return Matched(tensors=matched.tensors | checked, report=replace(report, loaded=loaded))
    if not may_be_new:
        raise CheckpointError(f"{folder.path}: task_head.safetensors is missing or does not fit the stored task")
    return Matched(tensors=matched.tensors, report=replace(report, new=tuple(sorted([*report.new, *own]))))


def _reordered(
    matched: Matched,
    folder: CheckpointFolder,
    task: Task,
    label_dims: Mapping[str, tuple[int, ...]],
    names: Mapping[str, tuple[str, ...]],
) -> Matched:
    """Brings what the head knows of labels into the task's label order, by name.

    Args:
        names: our parameter name -> transformers' names, which the report uses.
    """
    theirs, ours = folder.labels, task.labels
    dims = {
        key: dim
        for key, dim in ((f"head.{name}", dim) for name, dim in label_dims.items())
        # An own head may have outputs that are no labels.
        if key in matched.tensors and matched.tensors[key].size(dim[-1]) == len(ours)
    }
    if not theirs:  # transformers leaves the default names of two classes out of the file
        theirs = tuple(f"LABEL_{index}" for index in range(len(ours)))
    if not dims or theirs == ours or not ours:
        return matched
    named = theirs if label_places(theirs, ours) is not None else _named(theirs, ours)
    places = label_places(named, ours)
    if places is not None:
        order = torch.tensor(places)
        moved = {key: reordered(matched.tensors[key], order, dims[key]) for key in dims}
        report = matched.report
        if named != theirs:
            pairs = [(old, new) for old, new in zip(theirs, named, strict=True) if old != new]
            unnamed, taken = (", ".join(names) for names in zip(*pairs, strict=True))
            report = _noted(report, f"the file's labels are unnamed ({unnamed}): taken in the order {taken}")
        if places != sorted(places):
            report = _noted(report, f"head reordered from labels {', '.join(named)} to {', '.join(ours)}")
        return Matched(tensors=matched.tensors | moved, report=report)
    kept = {key: value for key, value in matched.tensors.items() if key not in dims}
    note = f"the file's head has other labels ({', '.join(theirs)}): its last layer is new"
    redrawn = [name for key in dims for name in names.get(key, (key,))]
    loaded = tuple(name for name in matched.report.loaded if name not in redrawn)
    report = replace(matched.report, loaded=loaded, new=(*matched.report.new, *redrawn))
    return Matched(tensors=kept, report=_noted(report, note))


def _named(theirs: Sequence[str], ours: Sequence[str]) -> tuple[str, ...]:
    """The file's labels, its unnamed ones (``LABEL_1``) with the names of ours that are left, in order."""
    unnamed = [index for index, label in enumerate(theirs) if _UNNAMED.fullmatch(label)]
    known = {label.casefold() for index, label in enumerate(theirs) if index not in unnamed}
    left = [label for label in ours if label.casefold() not in known]
    if len(left) != len(unnamed):
        return tuple(theirs)
    names = dict(zip(unnamed, left, strict=True))
    return tuple(names.get(index, label) for index, label in enumerate(theirs))


def _noted(report: LoadReport, note: str) -> LoadReport:
    return replace(report, notes=(*report.notes, note))


def save_task_folder(
    folder: Path,
    task: Task,
    state: Mapping[str, Tensor],
    hf_config: Mapping[str, Any],
    *,
    reading: ReadOptions,
    tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """Writes a model's folder; see ``TaskModel.save_pretrained``.

    Args:
        state: all parameters and buffers of the model.
        hf_config: config.json as loaded.
        reading: how the training data were read.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    family, kind = family_of(hf_config), task.hf_head
    names = parameter_map(family, encoder_config(hf_config), head="base" if kind is None else kind, pooler=False)
    own = {key: value.detach().cpu().clone() for key, value in state.items() if key not in names}
    save_folder(
        folder,
        config=saved_config(hf_config, task, reading),
        tensors=hf_tensors(
            {key: state[key] for key in names}, names, strip_prefix=family.prefix if kind is None else ""
        ),
        tokenizer=tokenizer,
        head_tensors=own if own else None,
    )


def saved_config(hf_config: Mapping[str, Any], task: Task, reading: ReadOptions) -> dict[str, Any]:
    """config.json of a saved model: the loaded one, updated, with one key of our own."""
    entry: dict[str, Any] = {
        "task": registered_name(type(task)),
        "settings": task.settings(),
        "version": version("bert-tasks"),
        **{key: getattr(task, key) for key in task.tuned},
    }
    options = stored_options(reading)
    if options:
        entry[READING_KEY] = options
    unwanted = ["_name_or_path", "num_labels", "finetuning_task"]
    if not task.is_stock_head:
        entry["labels"] = list(task.labels)
        unwanted += ["id2label", "label2id", "problem_type"]
    kept = {key: value for key, value in hf_config.items() if key not in unwanted}
    architecture = family_of(hf_config).architectures["base" if task.hf_head is None else task.hf_head]
    return {**kept, **_stock_config(task), "architectures": [architecture], CONFIG_KEY: entry}


def _stock_config(task: Task) -> dict[str, Any]:
    """What transformers is told of the task. Of a head that it lacks it learns no label, only how many outputs it has.

    Otherwise its pipelines would print our labels beside the scores of a head that they have drawn at random.
    """
    if task.is_stock_head:
        return task.hf_config
    if task.hf_head is None:
        return {}
    names = [f"LABEL_{index}" for index in range(len(task.hf_config.get("id2label", {})))]
    return {
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
    }


def registered_name(kind: type[Task]) -> str:
    """What config.json calls a task: its name in ``TASKS``, else ``module:Class``."""
    names = {known: name for name, known in TASKS.items()}
    return names.get(kind, f"{kind.__module__}:{kind.__qualname__}")
