"""The prediction of rows: batches of rows, features, logits, predictions.

Everything that predicts rows of files, streams and batches of other engines goes through ``Predictor``. It adds to
``predict_batch`` what does not change from batch to batch, such as the precision, and counts what the model has not
read.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from bert_tasks.data.columns import Row, stored_names
from bert_tasks.data.unknown_tokens import UnknownTokens
from bert_tasks.inference.precision import DType, logits_of
from bert_tasks.model.explanation import check_explainable
from bert_tasks.model.multitask import AnyModel
from bert_tasks.model.prediction import HeadPredictions, batch_rows, predict_batch
from bert_tasks.outputs.calibration import check_abstention, without_label


class PredictedBatch(NamedTuple):
    """Neighbouring rows with their predictions.

    Attributes:
        rows: The rows as they were read.
        predictions: For each row the prediction of each head that has an input in it.
        truncated: Number of rows of which the model does not read all tokens.
        unknown: Number of tokens that the tokenizer does not know.
        labels: Number of rows for each predicted label, if the model predicts one label for a row.
    """

    rows: Sequence[Row]
    predictions: Sequence[HeadPredictions]
    truncated: int
    unknown: UnknownTokens
    labels: Counter[str | None]


class Predictor:
    """A model, and what is computed for each row.

    Args:
        model: The model, on its device.
        dtype: The precision of the logits (see ``logits_of``).
        logits, explain, abstain_below: See ``predict``.

    Raises:
        UsageError: The model cannot be run in this precision, or its predictions have no explanations or no label to
            leave out.
    """

    def __init__(
        self,
        model: AnyModel,
        *,
        dtype: DType = "float32",
        logits: bool = False,
        explain: bool = False,
        abstain_below: float = 0.0,
    ) -> None:
        if explain:  # at once, and not after the rows have been read
            check_explainable(model, model.one_task().task, dtype)
        if abstain_below:
            check_abstention(model.one_task().task.output, abstain_below)
        self.model, self.dtype, self.logits, self.explain = model, dtype, logits, explain
        self.abstain_below = abstain_below
        self._forward_fn = logits_of(model, dtype)
        self._inputs = stored_names(model.input_columns)

    @property
    def batch_rows(self) -> int | None:
        """Number of rows to predict together. None if the features of a row depend on the rows around it."""
        return batch_rows(self.model, explain=self.explain)

    def batches(self, rows: Iterable[Row]) -> Iterator[list[Row]]:
        """Cuts rows into batches.

        The batches do not depend on the number of processes, and so the last digits of predictions do not either.
        """
        remaining = iter(rows)
        while batch := list(islice(remaining, self.batch_rows)):
            yield batch

    def predict_batch(self, rows: Sequence[Row]) -> PredictedBatch:
        """Predicts rows that were read and checked. Further columns of the rows are not read.

        Raises:
            DataError, UsageError, CheckpointError: See ``TaskModel.predict``.
        """
        # A head has no input in a row in which a cell is missing, and then predicts nothing for it.
        inputs = [{name: row[name] for name in self._inputs if row.get(name) is not None} for row in rows]
        predictions, features = predict_batch(
            self.model, inputs, forward_fn=self._forward_fn, logits=self.logits, explain=self.explain
        )
        if self.abstain_below:
            predictions = [{"": without_label(each[""], self.abstain_below)} for each in predictions]
        token_ids = np.fromiter(chain.from_iterable(feature["input_ids"] for feature in features), np.int64)
        # A set, because several windows of a row may have lost tokens.
        truncated_rows = {feature["row"] for feature in features if feature.get("lost_tokens", 0) > 0}
        return PredictedBatch(
            rows=rows,
            predictions=predictions,
            truncated=len(truncated_rows),
            unknown=UnknownTokens.of([token_ids], self.model.require_tokenizer()),
            labels=self._labels(predictions),
        )

    def _labels(self, predictions: Sequence[HeadPredictions]) -> Counter[str | None]:
        """Counts the labels of a model that predicts one label for a row."""
        task = self.model.tasks.get("")  # None if there are several tasks
        if task is None or not (task.output.has_labels and task.output.can_abstain):
            return Counter()
        labels: list[Any] = [each[""] for each in predictions]
        return Counter(prediction.label for prediction in labels)
