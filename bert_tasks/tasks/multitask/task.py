"""Several tasks on one encoder, as one task.

Each row has the rows of the tasks, each prediction their predictions. A task reads its own windows of a row, and the
encoder reads equal windows once (head.py). Every task keeps its own loss terms with their own counts, so a row without
the label of a task counts nothing for it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import ValidationError
from torch import Tensor

from bert_tasks.data.checks import lack_of_rows, named_splits
from bert_tasks.data.columns import Column, HeadColumns, Row, as_row, head_column, text_columns
from bert_tasks.data.problems import shortened
from bert_tasks.data.splits import Splits
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.heads import Head
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import DataError, UsageError
from bert_tasks.metrics.tables import MetricTable, merged
from bert_tasks.tasks.base import Feature, LossTerm, Part, Prediction, Task, is_dynamic, typed_setting
from bert_tasks.tasks.multitask.head import SharedHeads, SharedOutput, share
from bert_tasks.tasks.shared.card import TEXTS, Card
from bert_tasks.tasks.shared.fitting import Fitting
from bert_tasks.tasks.shared.hf_config import HFConfig
from bert_tasks.tasks.shared.rendering import Rendering
from bert_tasks.tasks.shared.report import Report
from bert_tasks.tasks.shared.windows import Windows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LARGEST_WEIGHT = 1e6  # of a loss, far below what float32 can hold
_SEPARATOR = "."  # between the name of a task and its metric


@dataclass(frozen=True, kw_only=True)
class MultiTaskPrediction(Prediction):
    """The predictions for one row, by the names of the tasks that have an input."""

    tasks: Mapping[str, Prediction]

    def to_json(self, **options: Any) -> dict[str, Any]:
        return {name: prediction.to_json(**options) for name, prediction in self.tasks.items()}


class MultiTaskFitting(Fitting, Windows, HFConfig, Rendering):
    """Training, windows and files for each of several tasks."""

    task: "MultiTask"
    fields: ClassVar[tuple[str, ...]] = ("fitted",)
    has_labels: ClassVar[bool] = False

    @property
    def prediction_type(self) -> type[Prediction]:
        """A dataclass with a field for each task."""
        types = {name: Rendering.of(task).prediction_type for name, task in self.task.tasks.items()}
        columns = [(name, of_task | None, field(default=None)) for name, of_task in types.items()]
        built: type[Prediction] = make_dataclass("Predictions", columns, bases=(Prediction,), frozen=True)
        return built

    def columns_of(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        columns: dict[str, Any] = {}
        for name, prediction in content.items():
            columns |= {_column(name, key): value for key, value in prediction.items()}
        return columns

    @property
    def column_types(self) -> Mapping[str, tuple[Any, Sequence[str]]]:
        types: dict[str, tuple[Any, Sequence[str]]] = {}
        for name, task in self.task.tasks.items():
            types |= {_column(name, key): value for key, value in Rendering.of(task).column_types.items()}
        return types

    @property
    def reserved_names(self) -> frozenset[str]:
        names: set[str] = set()
        for name, task in self.task.tasks.items():
            names |= {_column(name, key) for key in Rendering.of(task).reserved_names}
        return frozenset(names)

    @property
    def sample(self) -> Literal["row", "window", "group"]:  # type: ignore[override]  # it depends on the tasks
        """Returns all windows of a row, which the tasks share, or one task's sample."""
        tasks = list(self.task.tasks.values())
        return Fitting.of(tasks[0]).sample if len(tasks) == 1 else "row"

    def label(self, splits: Splits, *, labels: Sequence[str] = (), unlabelled: bool = False) -> Task[Any]:
        named = {}
        for name, head in self.task.row_columns.items():
            labelled = splits.labelled(name, head)
            for (_, table), (_, rows) in zip(named_splits(splits), named_splits(labelled), strict=True):
                if len(rows) == 0:
                    raise DataError(f"{table.source}: {lack_of_rows(table, name, head)}")
            of_task = Fitting.of(self.task.tasks[name])
            named[name] = of_task.label(labelled, labels=head.labels, unlabelled=unlabelled).labels
        return self.task.with_labels(named)

    def fit_to_train(self, rows: Iterable[Row]) -> Task[Any]:
        return self._fitted(lambda name, task: Fitting.of(task).fit_to_train(_rows_of(name, rows)))

    @property
    def calibrates(self) -> bool:
        return any(Fitting.of(task).calibrates for task in self.task.tasks.values())

    def calibrate(self, compact: Sequence[Tensor], features: Sequence[Feature], rows: Sequence[Row]) -> Task[Any]:
        def calibrated(name: str, task: Task[Any]) -> Task[Any]:
            _, inputs = self.task.inputs_of(name, compact, features, rows)
            return Fitting.of(task).calibrate(*inputs) if Fitting.of(task).calibrates else task

        return self._fitted(calibrated)

    def tune_on_validation(self, predictions: Sequence[MultiTaskPrediction], rows: Sequence[Row]) -> Task[Any]:
        def tuned(name: str, task: Task[Any]) -> Task[Any]:
            pairs = self.task.labelled_pairs(name, predictions, rows)
            return Fitting.of(task).tune_on_validation(*pairs) if pairs[1] else task

        return self._fitted(tuned)

    def _fitted(self, fit: Callable[[str, Task[Any]], Task[Any]]) -> Task[Any]:
        values = {name: Fitting.of(fit(name, task)).values() for name, task in self.task.tasks.items()}
        return replace(self.task, fitted={name: value for name, value in values.items() if value})

    @property
    def remedies(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(remedy for task in self.task.tasks.values() for remedy in Fitting.of(task).remedies))

    @property
    def needs_document_context(self) -> bool:
        return any(Windows.of(task).needs_document_context for task in self.task.tasks.values())

    @property
    def libraries(self) -> tuple[str, ...]:
        return tuple(library for task in self.task.tasks.values() for library in Windows.of(task).libraries)

    def collate(self, features: Sequence[Feature], *, position_offset: int, pad_groups: bool) -> PackedBatch:
        names = list(self.task.tasks)
        return share(features, names, position_offset=position_offset, pad_groups=pad_groups)


class MultiTaskCard(Card):
    """Examples for all tasks, with one text for all tasks of a single text."""

    task: "MultiTask"

    @property
    def example_rows(self) -> Sequence[Row]:
        rows = []
        for text, *examples in zip(
            TEXTS, *(Card.of(task).example_rows for task in self.task.tasks.values()), strict=True
        ):
            row: dict[str, Any] = {}
            for (name, head), example in zip(self.task.row_columns.items(), examples, strict=True):
                if len(text_columns(head.columns)) == 1:
                    row |= as_row(text, {name: head}, 0)
                else:
                    row |= {head.names.get(column, column): value for column, value in example.items()}
            rows.append(row)
        return rows

    def pipeline_inputs(self, row: Row) -> Sequence[Any]:
        return TEXTS[:1]

    @property
    def limits(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(limit for task in self.task.tasks.values() for limit in Card.of(task).limits))


class MultiTaskReport(Report):
    """The metrics of each task, with its name in front."""

    task: "MultiTask"

    @property
    def lower_is_better(self) -> frozenset[str]:  # type: ignore[override]  # it depends on the tasks
        return frozenset(self._named(lambda report: report.lower_is_better))

    @property
    def neutral_metrics(self) -> frozenset[str]:  # type: ignore[override]  # it depends on the tasks
        return frozenset(self._named(lambda report: report.neutral_metrics))

    @property
    def curves(self) -> tuple[str, ...]:
        return (self.task.primary_metric, *self._named(lambda report: [report.task.primary_metric]))

    def _named(self, of: Callable[[Report], Iterable[str]]) -> list[str]:
        return [_key(name, metric) for name, task in self.task.tasks.items() for metric in of(Report.of(task))]

    def table(self, metrics: Mapping[str, float]) -> MetricTable:
        overall = {key: value for key, value in metrics.items() if _SEPARATOR not in key}
        for name, task in self.task.tasks.items():
            start = _key(name, "")
            of_task = {key.removeprefix(start): value for key, value in metrics.items() if key.startswith(start)}
            overall |= {_key(name, key): value for key, value in Report.of(task).table(of_task).overall.items()}
        return MetricTable(overall=overall)

    def by_task(
        self, predictions: Sequence[MultiTaskPrediction], rows: Sequence[Row]
    ) -> Mapping[str, tuple[Any, Sequence[Any], Sequence[Row]]]:
        pairs = {name: self.task.labelled_pairs(name, predictions, rows) for name in self.task.tasks}
        return {name: (self.task.tasks[name], *of_task) for name, of_task in pairs.items() if of_task[1]}

    def same(self, predictions: Sequence[MultiTaskPrediction], others: Sequence[MultiTaskPrediction]) -> list[bool]:
        pairs = {
            name: [[each.tasks[name] for each in side if name in each.tasks] for side in (predictions, others)]
            for name in self.task.tasks
        }
        return [same for name, task in self.task.tasks.items() for same in Report.of(task).same(*pairs[name])]

    def collapse(self, predictions: Sequence[MultiTaskPrediction], rows: Sequence[Row]) -> str | None:
        for name, task in self.task.tasks.items():
            note = Report.of(task).collapse(*self.task.labelled_pairs(name, predictions, rows))
            if note is not None:
                return f"{note} ({name})"
        return None


@dataclass(frozen=True, kw_only=True)
class MultiTask(Task[MultiTaskPrediction]):
    """Several tasks whose heads are on one encoder.

    Attributes:
        heads: The name of each task -> the name of its kind (``task``), its settings and ``labels``, its ``columns`` in
            the data, where they have other names, and the ``weight`` of its loss.
        fitted: The name of a task -> its fields that are fitted to data.
    """

    name: ClassVar[str] = "multi-task"
    entries: ClassVar[tuple[str, ...]] = ("task", "columns", "weight")  # keys of a head besides its settings
    registry: ClassVar[Mapping[str, type[Task[Any]]]] = {}  # the built-in tasks by their names
    parts: ClassVar[tuple[type[Part], ...]] = (MultiTaskFitting, MultiTaskCard, MultiTaskReport)
    heads: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    fitted: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "heads", dict(sorted(self.heads.items())))  # the order in config.json
        if not self.heads:
            raise ValueError("there are no tasks with a head each")
        for name, entry in self.heads.items():
            if not name.isidentifier():
                raise ValueError(f"tasks: the name {name!r} is no word of letters, digits and _")
            weight = entry.get("weight", 1.0)
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= _LARGEST_WEIGHT:
                raise ValueError(
                    f"tasks.{name}: weight is {shortened(weight)}, expected a number from 0 to {_LARGEST_WEIGHT:g}"
                )
            task = self.tasks[name]
            columns = entry.get("columns", {})
            if not isinstance(columns, Mapping) or not all(isinstance(other, str) for other in columns.values()):
                raise ValueError(f"tasks.{name}: columns is {columns!r}, expected the task's columns and their names")
            unknown = sorted(set(columns) - {column.name for column in task.columns})
            if unknown:
                names = ", ".join(column.name for column in task.columns)
                raise ValueError(f"tasks.{name}.columns: the task reads {names}, not {unknown[0]!r}")
            if is_dynamic(task) or Fitting.of(task).generator() is not None or task.output_kind == "vocabulary":
                raise ValueError(f"tasks.{name}: {task.name} cannot be one of several tasks")
            if Fitting.of(task).sample == "group":
                raise ValueError(f"tasks.{name}: a loss over groups of rows cannot be one of several tasks")
        longest = max(task.max_length for task in self.tasks.values())
        if self.max_length not in (MultiTask.max_length, longest):
            raise ValueError(
                f"max_length is {self.max_length}, but each task has its own. Choose one of the tasks "
                f"{', '.join(self.tasks)}"
            )
        object.__setattr__(self, "max_length", longest)

    @classmethod
    def of(cls, tasks: Mapping[str, Task[Any]], entries: Mapping[str, Mapping[str, Any]]) -> Self:
        """Returns the task that consists of tasks.

        Args:
            tasks: The tasks by their names.
            entries: For each name ``columns`` and ``weight``, if they differ from the defaults.

        Raises:
            UsageError: The tasks cannot share an encoder.
        """
        heads = {
            name: {
                "task": task.name,
                "labels": list(task.labels),
                **Fitting.of(task).settings(),
                **{key: entries[name][key] for key in ("columns", "weight") if key in entries.get(name, {})},
            }
            for name, task in tasks.items()
        }
        fitted = {name: values for name, task in tasks.items() if (values := Fitting.of(task).values())}
        try:
            return cls(heads=heads, fitted=fitted)
        except (ValueError, TypeError) as error:
            raise UsageError(str(error)) from None

    @cached_property
    def tasks(self) -> Mapping[str, Task[Any]]:
        """The tasks by their names."""
        built = {}
        for name, entry in self.heads.items():
            options = {key: value for key, value in entry.items() if key not in self.entries}
            options |= self.fitted.get(name, {})
            if not isinstance(entry.get("task"), str) or entry["task"] not in self.registry:
                raise ValueError(f"tasks.{name}: unknown task {entry.get('task')!r}")
            plain = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
            task_class = self.registry[entry["task"]]
            _check_types(name, task_class, options)
            construct: Callable[..., Task[Any]] = task_class
            built[name] = construct(**plain)
        return built

    @property
    def weights(self) -> list[float]:
        """The weight of each task's loss."""
        return [float(entry.get("weight", 1.0)) for entry in self.heads.values()]

    def with_labels(self, labels: Mapping[str, Sequence[str]]) -> Self:
        """Returns the task with other labels of some of its tasks."""
        heads = {
            name: {**entry, "labels": list(labels.get(name, entry.get("labels", ())))}
            for name, entry in self.heads.items()
        }
        return replace(self, heads=heads)

    @property
    def columns(self) -> tuple[Column, ...]:
        """None, because each task has its own (``row_columns``)."""
        return ()

    @property
    def row_columns(self) -> Mapping[str, HeadColumns]:
        columns = {}
        for name, task in self.tasks.items():
            names = dict(self.heads[name].get("columns", {}))
            columns[name] = HeadColumns(columns=task.columns, names=names, labels=task.labels)
        return columns

    @property
    def input_columns(self) -> Mapping[str, HeadColumns]:
        inputs = {}
        for name, head in self.row_columns.items():
            columns = tuple(column for column in head.columns if not column.is_label)
            names = {column.name: head.names[column.name] for column in columns if column.name in head.names}
            inputs[name] = HeadColumns(columns=columns, names=names)
        return inputs

    def features(self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase") -> list[Feature]:
        """Returns the windows of all tasks, row by row, in the order of the tasks.

        Raises:
            DataError: A row has the input of no task.
        """
        by_row: dict[int, list[Feature]] = defaultdict(list)
        for name, task in self.tasks.items():
            numbers = [i for i, row in enumerate(rows) if row.get(head_column(name)) is not None]
            for feature in task.features([_without_none(rows[i][head_column(name)]) for i in numbers], tokenizer):
                row = numbers[feature["row"]]
                by_row[row].append(Feature(**{**feature, "row": row, "head": name}))
        empty = next((number for number in range(len(rows)) if number not in by_row), None)
        if empty is not None:
            raise DataError(f"row {empty + 1} has the input of none of the tasks {', '.join(self.tasks)}")
        return [feature for number in range(len(rows)) for feature in by_row[number]]

    def head(self, config: EncoderConfig) -> Head:
        return SharedHeads({name: task.head(config) for name, task in self.tasks.items()})

    def counts(self, features: Sequence[Feature]) -> dict[str, float]:
        return {
            _term(name, term, len(counts)): count
            for name, task in self.tasks.items()
            for counts in [task.counts([feature for feature in features if feature.get("head") == name])]
            for term, count in counts.items()
        }

    def loss(self, logits: SharedOutput, batch: PackedBatch) -> tuple[LossTerm, ...]:
        terms: list[LossTerm] = []
        outputs = zip(self.tasks.items(), self.weights, logits.logits.values(), logits.batches, strict=True)
        for (name, task), weight, task_logits, head_batch in outputs:
            each = task.loss(task_logits, head_batch)
            terms += [
                replace(term, name=_term(name, term.name, len(each)), weight=term.weight * weight) for term in each
            ]
        return tuple(terms)

    def compact_logits(self, logits: Sequence[Any], features: Sequence[Feature]) -> Sequence[Tensor]:
        compact: dict[int, Tensor] = {}
        for name, task in self.tasks.items():
            indices = [i for i, feature in enumerate(features) if feature.get("head") == name]
            if indices:
                results = task.compact_logits([logits[i] for i in indices], [features[i] for i in indices])
                compact |= zip(indices, results, strict=True)
        return [compact[i] for i in range(len(features))]

    def decode(
        self, compact: Sequence[Tensor], features: Sequence[Feature], rows: Sequence[Row]
    ) -> list[MultiTaskPrediction]:
        by_row: list[dict[str, Prediction]] = [{} for _ in rows]
        for name, task in self.tasks.items():
            numbers, inputs = self.inputs_of(name, compact, features, rows)
            for row, prediction in zip(numbers, task.decode(*inputs), strict=True):
                by_row[row][name] = prediction
        return [MultiTaskPrediction(tasks=predictions) for predictions in by_row]

    def inputs_of(
        self, name: str, compact: Sequence[Tensor], features: Sequence[Feature], rows: Sequence[Row]
    ) -> tuple[list[int], tuple[list[Tensor], list[Feature], list[Row]]]:
        """Returns the numbers of a task's rows, and the arguments of ``decode``."""
        indices = [i for i, feature in enumerate(features) if feature.get("head") == name]
        numbers = {row: position for position, row in enumerate(dict.fromkeys(features[i]["row"] for i in indices))}
        renumbered = [Feature(**{**features[i], "row": numbers[features[i]["row"]]}) for i in indices]
        read = [_without_none(rows[row][head_column(name)]) for row in numbers]
        return list(numbers), ([compact[i] for i in indices], renumbered, read)

    def metrics(self, predictions: Sequence[MultiTaskPrediction], rows: Sequence[Row]) -> dict[str, float]:
        """Returns the metrics of each task with its name, and the mean of primary metrics."""
        metrics: dict[str, float] = {}
        primary = []
        for name, task in self.tasks.items():
            pairs = self.labelled_pairs(name, predictions, rows)
            if pairs[1]:
                values = task.metrics(*pairs)
                metrics = merged(metrics, {_key(name, key): value for key, value in values.items()})
                primary.append(values[task.primary_metric])
        if not primary:
            raise DataError(f"no row has a label of the tasks {', '.join(self.tasks)}")
        return merged({self.primary_metric: fmean(primary)}, metrics)

    @property
    def primary_metric(self) -> str:
        return "mean_primary_metric"

    def labelled_pairs(
        self, name: str, predictions: Sequence[MultiTaskPrediction], rows: Sequence[Row]
    ) -> tuple[list[Any], list[Row]]:
        """Returns a task's predictions and rows, of the rows with a label of the task."""
        labels = [column.name for column in self.tasks[name].columns if column.is_label]
        pairs = [
            (prediction.tasks[name], _without_none(row[head_column(name)]))
            for prediction, row in zip(predictions, rows, strict=True)
            if name in prediction.tasks and any(row[head_column(name)].get(label) is not None for label in labels)
        ]
        return [prediction for prediction, _ in pairs], [row for _, row in pairs]


def _check_types(name: str, task_class: type[Task[Any]], options: Mapping[str, Any]) -> None:
    """Raises ValueError for a setting, or a label, of another type than its field."""
    for setting in fields(task_class):
        if setting.name not in options:
            continue
        value = options[setting.name]
        try:
            typed_setting(task_class, setting.name, value)
        except ValidationError as error:
            problem = error.errors()[0]["msg"]
            raise ValueError(f"tasks.{name}: {setting.name} is {value!r}. {problem}") from None


def _key(name: str, metric: str) -> str:
    return f"{name}{_SEPARATOR}{metric}"


def _column(name: str, field: str) -> str:
    """Returns the column of a field of a task's predictions, the task's name if they are equal."""
    return name if field == name else _key(name, field)


def _term(name: str, term: str, count: int) -> str:
    """Returns the name of a task's loss term, "loss" for a single term."""
    return f"{name}/{'loss' if count == 1 else term}"


def _rows_of(name: str, rows: Iterable[Row]) -> Iterable[Row]:
    return (_without_none(row[head_column(name)]) for row in rows if row.get(head_column(name)) is not None)


def _without_none(row: Row) -> Row:
    """Returns a row without the columns that Arrow fills in."""
    return {name: value for name, value in row.items() if value is not None}
