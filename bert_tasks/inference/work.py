"""What is done with a part's rows: predicted, and made into the rows of the output.

Owns neither files nor processes, and must not know them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bert_tasks.data.columns import Row
from bert_tasks.data.kept import FAULT, KEPT, is_kept, plain
from bert_tasks.data.writers import json_line
from bert_tasks.inference.parts import Part
from bert_tasks.inference.rows_out import LINE, Writing, output_row, repeated_columns
from bert_tasks.model.onnx import Logits
from bert_tasks.model.predicting import predict_rows
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks.base import Feature, Prediction


@dataclass(frozen=True, kw_only=True)
class Done:
    """Rows that were predicted: what they were, what came of them, how many were cut at the longest length."""

    rows: list[Row]
    predictions: list[Prediction]
    truncated: int


@dataclass(frozen=True, kw_only=True)
class Work:
    """A model at work for an output.

    Attributes:
        run: what runs a batch in place of the model.
        names: the task's columns -> the file's.
        given: rows in memory, whose columns are kept from there.
    """

    model: TaskModel
    run: Logits | None
    writing: Writing
    names: Mapping[str, str] | None = None
    given: Sequence[Row] | None = None

    def done(self, first: int, rows: Sequence[Row]) -> Done:
        """``first``: the number of the first row, for messages."""
        good = [row for row in rows if row.get(FAULT) is None]
        truncated = 0

        def count(features: Sequence[Feature]) -> None:
            nonlocal truncated
            truncated += len({feature["row"] for feature in features if feature.get("lost_tokens", 0) > 0})

        logits = self.writing.logits
        predictions = list(predict_rows(self.model, good, run=self.run, first=first, note=count, logits=logits))
        return Done(rows=good, predictions=predictions, truncated=truncated)

    def part(self, first: int, rows: Sequence[Row]) -> Part:
        done = self.done(first, rows)
        content = "".join(map(json_line, self.output_rows(done, first)))
        return Part(
            content=content.encode(),
            rows=len(done.rows),
            truncated=done.truncated,
            rejected=len(rows) - len(done.rows),
        )

    def output_rows(self, done: Done, first: int) -> list[dict[str, Any]]:
        repeated = repeated_columns(self.model.task, self.names)
        return [
            output_row(
                self._kept(row, first + number),
                prediction,
                repeated=repeated,
                line=row[LINE] if self.writing.skips else None,
            )
            for number, (row, prediction) in enumerate(zip(done.rows, done.predictions, strict=True))
        ]

    def _kept(self, row: Row, number: int) -> Mapping[str, Any]:
        """The columns to keep; ``number`` counts all rows in memory, of which none is ever left out."""
        keep = self.writing.keep_columns
        if keep == "none":
            return {}
        if KEPT in row:
            kept: Mapping[str, Any] = json.loads(row[KEPT])
            return kept
        cells = {name: row[name] for name in row if name != LINE} if self.given is None else self.given[number]
        return {name: plain(value) for name, value in cells.items() if is_kept(name, keep)}
