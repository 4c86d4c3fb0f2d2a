"""The rows of a table shared between processes, part by part, with results in row order on the first one.

Owns which process takes which part. A part is a chunk of the model's own, so what comes of it does not depend on who
runs it. Must not know files or what is made of rows.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from accelerate import Accelerator
from accelerate.utils import gather_object

from bert_tasks.data.table import RowTable
from bert_tasks.errors import DataError
from bert_tasks.inference.processes import from_first_process
from bert_tasks.model import predicting
from bert_tasks.tasks.base import Task

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


def run_parts(
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
        from_first_process(accelerator, partial(take, results))
