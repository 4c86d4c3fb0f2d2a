"""A folder becomes a ``TaskModel`` and back: which task it is, which head it has, whose label order counts.

Owns the ``bert_tasks`` key of config.json and the head that transformers lacks. Must not follow any name in a file to
code: a task registered as ``module:Class`` is loaded only if the caller passes it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from pydantic import ValidationError
from torch import Tensor

from bert_tasks.checkpoints.hub import origin, resolve
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
from bert_tasks.checkpoints.tokenizers import load_tokenizer
from bert_tasks.data.readers import ReadOptions
from bert_tasks.data.stored_reading import loaded_options, stored_options
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

if TYPE_CHECKING:
    from bert_tasks.model.task_model import TaskModel

READING_KEY = "reading"  # below our key of config.json

ModelT = TypeVar("ModelT", bound="TaskModel")

_UNNAMED = re.compile(r"LABEL_\d+")  # transformers' name of a class that nobody has named


@dataclass(frozen=True, kw_only=True)
class _Folder:
    """The parts of a checkpoint folder that decide what is built."""

    path: Path
    hf_config: dict[str, Any]
    head: str | None

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


def load_task_model(
    cls: type[ModelT],
    name: str | Path,
    *,
    task: str | Task | type[Task] | None,
    revision: str | None,
    given: Mapping[str, Any],
    served_as: Callable[[type[Task]], type[Task]] | None = None,
) -> ModelT:
    """See ``TaskModel.from_pretrained``.

    Args:
        given: fields of the task, ``labels`` among them.
        served_as: replaces the class that a folder without our key is taken for where no task is named.
    """
    path = resolve(name, revision=revision)
    hf_config = read_config(path)
    folder = _Folder(path=path, hf_config=hf_config, head=head_kind(hf_config))
    kind = None if isinstance(task, Task) else _task_class(folder, task, served_as, is_new=bool(given))
    built = _given_task(task, given) if kind is None else _merged_task(folder, kind, given)
    is_own = task is None or (kind is not None and not given and folder.states(kind))
    config = encoder_config(hf_config)
    with torch.device("meta"):
        model = cls(hf_config, built)
    matched = _match(model, folder, head_may_be_new=not is_own)
    model.head = built.head(config)  # with the initial weights that its constructor gives it
    of_head = {key: value for key, value in matched.tensors.items() if key.startswith("head.")}
    of_encoder = {key: value for key, value in matched.tensors.items() if key not in of_head}
    model.load_state_dict(of_encoder, strict=False, assign=True)
    model.load_state_dict(of_head, strict=False)  # copied, because parameters of an own head may be tied
    model.mark_drawn(set(model.state_dict()) - set(matched.tensors))
    model.load_report = matched.report
    model.origin = origin(name, path, revision=revision)
    model.reading = stored_reading(path, hf_config)
    model.tokenizer = load_tokenizer(path, vocab_size=config.vocab_size)
    return model.eval()


def stored_reading(path: Path, hf_config: Mapping[str, Any]) -> ReadOptions:
    """How the training data were read, as far as config.json says it. Raises CheckpointError if that is damaged."""
    entry = hf_config.get(CONFIG_KEY)
    if not isinstance(entry, dict) or READING_KEY not in entry:
        return ReadOptions()
    try:
        return loaded_options(entry[READING_KEY])
    except ValueError as error:
        raise CheckpointError(f"{path}: config.json, key {CONFIG_KEY}: {error}") from None


def restore_weights(model: "TaskModel", path: Path) -> None:
    """See ``TaskModel.restore``."""
    hf_config = read_config(path)
    folder = _Folder(path=path, hf_config=hf_config, head=head_kind(hf_config))
    check_names(model)
    dtype = model.stack.embeddings.word.weight.dtype
    model.load_state_dict(_match(model, folder, head_may_be_new=False, dtype=dtype).tensors)


def check_names(model: "TaskModel") -> None:
    """Compares the model's parameters with those that its configuration and its task call for.

    Raises:
        UsageError: modules were wrapped, renamed or replaced since the model was made (peft, pruning, ...), so that its
            weights have no names in a saved folder.
    """
    with torch.device("meta"):
        wanted = type(model)(model.hf_config, model.task)
    expected = {key: value.shape for key, value in wanted.state_dict().items()}
    found = {key: value.shape for key, value in model.state_dict().items()}
    differences = {
        "missing": sorted(expected.keys() - found.keys()),
        "not known": sorted(found.keys() - expected.keys()),
        "of another shape": sorted(key for key in expected.keys() & found.keys() if expected[key] != found[key]),
    }
    told = [f"{kind}: {_first(names)}" for kind, names in differences.items() if names]
    if told:
        raise UsageError(
            "the model can be neither trained nor saved: its parameters are not those of its configuration and task "
            f"({'; '.join(told)}). A library has wrapped or replaced modules: undo that first. Adapters of peft are "
            "merged by model = peft_model.merge_and_unload()"
        )


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
    folder = _Folder(path=path, hf_config=dict(hf_config), head=head_kind(hf_config))
    stored = folder.stored
    if stored is not None and not isinstance(task, Task):
        kind = _task_class(folder, task, None, is_new=False)
        if folder.states(kind):
            return _merged_task(folder, kind, given)
    stated = None if stored is None else stored.get("task")
    raise CheckpointError(f"{path}: config.json says its task is {stated!r}; only that one can be run")


def _task_class(
    folder: _Folder,
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


def _given_task(task: str | Task | type[Task] | None, given: Mapping[str, Any]) -> Task:
    if not isinstance(task, Task) or given:
        raise UsageError("pass either a task, or a task's name with labels and settings")
    return task


def _merged_task(folder: _Folder, kind: type[Task], given: Mapping[str, Any]) -> Task:
    """The task of this class that a folder holds or starts from, with the caller's fields.

    The one place where settings are merged: given by the caller, else stored by us in config.json (only of the same
    task), else implied by transformers' configuration, else the defaults. A field that is given changes no other, but
    those that cannot hold beside it (``Task.compatible_fields``).

    Raises:
        CheckpointError: what the folder states is damaged.
        UsageError: a given field is not one of the task's, or does not fit the others.
    """
    stated = {**_implied(folder, kind), **_stored_fields(folder, kind)}
    if folder.states(kind) or not given:
        place = f"config.json, key {CONFIG_KEY}" if folder.states(kind) else "config.json"
        try:
            task = _build(kind, stated)
        except UsageError as error:
            raise CheckpointError(f"{folder.path}: {place}: {error}") from None
        if not given:
            return task
        stated = {field.name: getattr(task, field.name) for field in fields(task)}
    checked = _checked_fields(kind, given)
    return _build(kind, {**kind.compatible_fields(stated, checked), **checked})


def _stored_fields(folder: _Folder, kind: type[Task]) -> dict[str, Any]:
    """What we stored of a task of this class: its settings and what was fitted to data."""
    if folder.stored is None or not folder.states(kind):
        return {}
    settings = folder.stored.get("settings", {})
    if not isinstance(settings, dict):
        raise CheckpointError(f"{folder.path}: config.json, key {CONFIG_KEY}: settings must be an object")
    beside = {key: value for key, value in folder.stored.items() if key in ("labels", *kind.tuned)}
    return {**settings, **beside}


def _checked_fields(kind: type[Task], given: Mapping[str, Any]) -> dict[str, Any]:
    """The caller's fields as the types of the task's fields want them."""
    known = {field.name for field in fields(kind)}
    checked = dict(given)
    for name in given.keys() & known:
        try:
            checked[name] = typed_setting(kind, name, given[name])
        except ValidationError as error:
            problem = error.errors()[0]["msg"]
            raise UsageError(f"{kind.name}: {name} is {given[name]!r}: {problem}") from None
    return checked


def _stored_class(folder: _Folder, stored: Mapping[str, Any]) -> type[Task]:
    name = stored.get("task")
    if not isinstance(name, str) or name not in TASKS:
        raise CheckpointError(
            f"{folder.path}: config.json says its task is {name!r}, which is not built in; pass the class: "
            "TaskModel.from_pretrained(folder, task=YourTask), or --task module:YourTask"
        )
    return TASKS[name]


def _implied(folder: _Folder, kind: type[Task]) -> dict[str, Any]:
    """What transformers' part of the configuration says about the task; of a new head only the lengths."""
    implied = kind.from_hf(folder.hf_config, folder.labels, encoder_config(folder.hf_config).usable_length)
    if folder.states(kind) or kind in tasks_with_head(folder.head):
        return implied
    return {key: value for key, value in implied.items() if isinstance(value, int)}


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


def _match(
    model: "TaskModel", folder: _Folder, *, head_may_be_new: bool, dtype: torch.dtype = torch.float32
) -> Matched:
    """The file's tensors for every parameter; a head of another kind is not read even where shapes fit."""
    family = family_of(model.hf_config)
    kind = model.task.hf_head
    names = parameter_map(family, model.config, head="base" if kind is None else kind, pooler=False)
    shapes = {key: value.shape for key, value in model.state_dict().items() if key in names}
    if unknown := sorted(names.keys() - shapes.keys()):
        raise UsageError(
            f"{type(model.task).__name__}: hf_head is {kind!r}, but the head has no {_first(unknown)}; hf_head is None "
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
    own = {key: value for key, value in model.state_dict().items() if key not in names}
    if own:
        matched = _with_own_tensors(matched, own, folder, may_be_new=head_may_be_new)
    return _reordered(matched, model, folder, names)


def _with_own_tensors(matched: Matched, own: Mapping[str, Tensor], folder: _Folder, *, may_be_new: bool) -> Matched:
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


def _reordered(matched: Matched, model: "TaskModel", folder: _Folder, names: Mapping[str, tuple[str, ...]]) -> Matched:
    """Brings what the head knows of labels into the task's label order, by name.

    Args:
        names: our parameter name -> transformers' names, which the report speaks of.
    """
    theirs, ours = folder.labels, model.task.labels
    dims = {
        f"head.{name}": dim
        for name, dim in model.head.label_dims.items()  # an own head may have outputs that are no labels
        if f"head.{name}" in matched.tensors and matched.tensors[f"head.{name}"].size(dim[-1]) == len(ours)
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
            report = _noted(report, f"head re-ordered from labels {', '.join(named)} to {', '.join(ours)}")
        return Matched(tensors=matched.tensors | moved, report=report)
    kept = {key: value for key, value in matched.tensors.items() if key not in dims}
    note = f"the file's head knows other labels ({', '.join(theirs)}): its last layer is new"
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


def save_task_model(model: "TaskModel", folder: Path) -> None:
    """See ``TaskModel.save_pretrained``."""
    check_names(model)
    family = family_of(model.hf_config)
    kind = model.task.hf_head
    head: str = "base" if kind is None else kind
    names = parameter_map(family, model.config, head=head, pooler=False)
    state: dict[str, Tensor] = dict(model.state_dict())
    own = {key: value for key, value in state.items() if key not in names}
    save_folder(
        folder,
        config=saved_config(model),
        tensors=hf_tensors(
            {key: state[key] for key in names}, names, strip_prefix=family.prefix if kind is None else ""
        ),
        tokenizer=model.tokenizer,
        head_tensors={key: value.detach().cpu().clone() for key, value in own.items()} if own else None,
    )


def saved_config(model: "TaskModel") -> dict[str, Any]:
    """config.json of a saved model: the loaded one, updated, with one key of our own."""
    family, task = family_of(model.hf_config), model.task
    head: str = "base" if task.hf_head is None else task.hf_head
    entry: dict[str, Any] = {
        "task": registered_name(type(task)),
        "settings": task.settings(),
        "version": version("bert-tasks"),
        **{key: getattr(task, key) for key in task.tuned},
    }
    options = stored_options(model.reading)
    if options:
        entry[READING_KEY] = options
    unwanted = ["_name_or_path", "num_labels", "finetuning_task"]
    if not task.is_stock_head:
        entry["labels"] = list(task.labels)
        unwanted += ["id2label", "label2id", "problem_type"]
    kept = {key: value for key, value in model.hf_config.items() if key not in unwanted}
    return {**kept, **_stock_config(task), "architectures": [family.architectures[head]], CONFIG_KEY: entry}


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
