"""Predictions in a format of their task: CoNLL columns, SQuAD's files.

Owns that such an output is made of all predictions at once, in memory. Must not know the formats.
"""

from collections.abc import Sequence
from pathlib import Path

from accelerate import Accelerator

from bert_tasks.data.kept import FAULT
from bert_tasks.data.table import RowTable
from bert_tasks.data.writers import whole_file
from bert_tasks.inference.finish import write_rejects
from bert_tasks.inference.processes import from_first_process
from bert_tasks.inference.rows_out import Progress
from bert_tasks.inference.shards import part_rows, run_parts
from bert_tasks.inference.targets import Predicted, Target, beside_output
from bert_tasks.inference.work import Done, Work


def predict_rendered(
    accelerator: Accelerator, work: Work, table: RowTable, target: Target, path: Path, progress: Progress
) -> Predicted:
    """Predicts all rows and writes the files of the target's format; the one asked for appears last.

    Raises:
        DataError: the format has no place for these rows; before any is predicted.
    """
    found: list[Done] = []
    size = part_rows(work.model.task, table)

    def take(parts: Sequence[Done]) -> None:
        found.extend(parts)
        progress(sum(len(part.rows) for part in found), len(table))

    good = (row for row in table if row.get(FAULT) is None)
    notes = from_first_process(accelerator, lambda: work.model.task.check_render(target.form, good))
    progress(0, len(table))
    run_parts(accelerator, table, size=size, done=0, work=work.done, take=take)

    def write() -> Predicted:
        if target.rejects is not None:
            write_rejects(table, target.rejects)
        predictions = [prediction for part in found for prediction in part.predictions]
        rows = [row for part in found for row in part.rows]
        files = work.model.task.render(target.form, predictions, rows)
        for name in sorted(files, reverse=True):
            with whole_file(beside_output(path, name) if name else path) as file:
                file.write(files[name])
        truncated = sum(part.truncated for part in found)
        return Predicted(rows=len(rows), truncated=truncated, rejected=len(table) - len(rows), notes=notes)

    return from_first_process(accelerator, write)
