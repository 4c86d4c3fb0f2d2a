"""What is done with a part's rows: predicted, and made into the rows of the output.

Owns neither files nor processes, and must not know them.

The rows of a table shared between processes, part by part, with results in row order on the first one.

Owns which process takes which part. A part is a chunk of the model's own, so what comes of it does not depend on who
runs it. Must not know files or what is made of rows.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from accelerate import Accelerator
from accelerate.utils import gather_object

from bert_tasks.data.columns import Row
from bert_tasks.data.records import FAULT, KEPT, is_kept, plain
from bert_tasks.data.table import RowTable
from bert_tasks.data.writers import json_line
from bert_tasks.distributed import broadcast_from_main
from bert_tasks.errors import DataError
from bert_tasks.inference.output import LINE, WriteOptions, output_row, repeated_columns
from bert_tasks.inference.unfinished import Part
from bert_tasks.model import predicting
from bert_tasks.model.onnx import Logits
from bert_tasks.model.predicting import predict_rows
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks.base import Feature, Prediction, Task


@dataclass(frozen=True, kw_only=True)
class ChunkResult:
    """Rows that were predicted: what they were, what came of them, how many were cut at the longest length."""

    rows: list[Row]
    predictions: list[Prediction]
    truncated: int


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """A model at work for an output.

    Attributes:
        run: what runs a batch in place of the model.
        names: the task's columns -> the file's.
        given: rows in memory, whose columns are kept from there.
    """

    model: TaskModel
    run: Logits | None
    writing: WriteOptions
    names: Mapping[str, str] | None = None
    given: Sequence[Row] | None = None

    def done(self, first: int, rows: Sequence[Row]) -> ChunkResult:
        """``first``: the number of the first row, for messages."""
        good = [row for row in rows if row.get(FAULT) is None]
        truncated = 0

        def count(features: Sequence[Feature]) -> None:
            nonlocal truncated
            truncated += len({feature["row"] for feature in features if feature.get("lost_tokens", 0) > 0})

        logits = self.writing.logits
        predictions = list(predict_rows(self.model, good, run=self.run, first=first, note=count, logits=logits))
        return ChunkResult(rows=good, predictions=predictions, truncated=truncated)

    def part(self, first: int, rows: Sequence[Row]) -> Part:
        done = self.done(first, rows)
        content = "".join(map(json_line, self.output_rows(done, first)))
        return Part(
            content=content.encode(),
            rows=len(done.rows),
            truncated=done.truncated,
            rejected=len(rows) - len(done.rows),
        )

    def output_rows(self, done: ChunkResult, first: int) -> list[dict[str, Any]]:
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


Result = TypeVar("Result")
Rows = list[dict[str, Any]]


def part_rows(task: Task, table: RowTable) -> int:
    """Rows of a part; all of them where a row's features depend on the rows around it."""
    return max(len(table), 1) if task.reads_neighbours else predicting.CHUNK_ROWS


def check_same_rows(accelerator: Accelerator, table: RowTable) -> None:
    """Raises DataError, on every process, if processes read different rows."""
    if accelerator.num_processes == 1:
        return
    found = gather_object([table.fingerprint])
    other = next((rank for rank, fingerprint in enumerate(found) if fingerprint != found[0]), None)
    if other is not None:
        error = DataError(f"{table.source}: process {other} reads other rows than process 0; give all the same file")
        error.collective = True
        raise error


def map_chunks_distributed(
    accelerator: Accelerator,
    table: RowTable,
    *,
    size: int,
    done: int,
    work: Callable[[int, Rows], Result],
    take: Callable[[Sequence[Result]], None],
) -> None:
    """Runs ``work`` on every part from number ``done`` on, each on one process.

    Args:
        size: rows of a part.
        work: gets the number of the part's first row, and its rows.
        take: gets results in row order, as they come, on the first process only.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    parts: Iterator[tuple[int, Rows]] = table.blocks(size, lambda n: n >= done and (n - done) % world == rank)
    for _ in range(done, -(-len(table) // size), world):
        part = next(parts, None)
        results = gather_object([] if part is None else [work(part[0] * size, part[1])])
        broadcast_from_main(accelerator, partial(take, results))
