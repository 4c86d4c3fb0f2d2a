"""Samples, fitted values, row checks and the generator of a task in training."""

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar, Literal

from torch import Tensor

from bert_tasks.data.checks import check_splits
from bert_tasks.data.columns import Row
from bert_tasks.data.splits import Splits
from bert_tasks.data.table import RowTable
from bert_tasks.tasks.base import Feature, Part, Task


class Fitting(Part):
    """Facts of a task that training needs.

    Attributes:
        fields: Names of the settings that are fitted to data and that a user never sets.
        sample: The unit of one joint loss and of ``batch_size``. It is a row with all of its windows, each window, or a
            group of rows with one window each.

    Example:
        >>> Fitting.of(task).fit_to_train(rows)
    """

    fields: ClassVar[tuple[str, ...]] = ()
    sample: ClassVar[Literal["row", "window", "group"]] = "row"

    def settings(self) -> dict[str, Any]:
        """Returns the fields that a user sets, which are neither ``labels`` nor fitted to data."""
        names = [field.name for field in fields(self.task) if field.name not in ("labels", *self.fields)]
        return {name: getattr(self.task, name) for name in names}

    def values(self) -> dict[str, Any]:
        """Returns the fields that are fitted to data."""
        return {name: getattr(self.task, name) for name in self.fields}

    def drop_fitted_values(self) -> Task[Any]:
        """Returns the task with its labels and settings only."""
        task: Task[Any] = type(self.task)(labels=self.task.labels, **self.settings())
        return task

    def label(self, splits: Splits, *, labels: Sequence[str] = (), unlabelled: bool = False) -> Task[Any]:
        """Returns the task with its labels, after the checks of ``check_splits``, which has these arguments.

        Raises:
            DataError: The splits cannot be trained with.
            ValueError: The labels do not fit the settings.
        """
        names = check_splits(splits, columns=self.task.columns, labels=labels, unlabelled=unlabelled)
        task: Task[Any] = replace(self.task, labels=names) if names else self.task
        return task

    def fit_to_train(self, rows: Iterable[Row]) -> Task[Any]:
        """Returns the task with the fields that are computed from the training rows."""
        task: Task[Any] = self.task
        return task

    @property
    def calibrates(self) -> bool:
        """Returns True if ``calibrate`` needs the logits of the validation rows."""
        return False

    def calibrate(self, compact: Sequence[Tensor], features: Sequence[Feature], rows: Sequence[Row]) -> Task[Any]:
        """Returns the task with the temperature that fits validation rows. Takes the arguments of ``decode``."""
        task: Task[Any] = self.task
        return task

    def tune_on_validation(self, predictions: Sequence[Any], rows: Sequence[Row]) -> Task[Any]:
        """Returns the task with decision thresholds that are chosen on validation predictions."""
        task: Task[Any] = self.task
        return task

    @property
    def remedies(self) -> tuple[str, ...]:
        """Settings that are not in use and may keep a model from predicting one label only, as a recipe has them."""
        return ()

    def check_split(self, rows: RowTable, source: str) -> None:
        """Checks what only all rows of a split can tell, before a run begins.

        Args:
            rows: The training set or a validation set.
            source: The name of the set in messages.

        Raises:
            DataError: ``Task.prepare`` would fail for these rows.
        """

    def groups(self, rows: RowTable) -> Sequence[Any]:
        """Returns the group of each row. It is called if a sample is a group."""
        raise NotImplementedError

    def generator(self) -> tuple[Task, float] | None:
        """Returns the task of a smaller model that makes the inputs of training, and its width as a share."""
        return None
