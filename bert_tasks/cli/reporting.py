"""The command about what came out of runs: report."""

from pathlib import Path
from types import TracebackType
from typing import Annotated

import typer

from bert_tasks.cli.app import app, is_first_process, show, warn
from bert_tasks.cli.options import (
    AsJson,
    Columns,
    DataFormat,
    Delimiter,
    TrainedEncoding,
    TrainedHeader,
    TrainedLabelSeparator,
    column_names,
)
from bert_tasks.errors import BertTasksError


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Output folders of train.")],
    output: Annotated[
        Path | None, typer.Option(help="Default: RUN/report.html; for several runs ./report.html.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="A file with labels, e.g. a test set: the same figures on its rows.")
    ] = None,
    by: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="Scores for each value of this column of --data.")
    ] = None,
    mistakes: Annotated[
        Path | None, typer.Option(help="A .csv, .tsv or .jsonl file for the rows answered wrong, the surest first.")
    ] = None,
    format: DataFormat = None,
    column: Columns = None,
    delimiter: Delimiter = None,
    encoding: TrainedEncoding = None,
    header: TrainedHeader = None,
    label_separator: TrainedLabelSeparator = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML file about a run: curves, scores with intervals, mistakes. Several runs stand side by side.

    Example: bert-tasks report runs/first --data test.csv --mistakes mistakes.csv
    """
    from bert_tasks.data.readers import Reading
    from bert_tasks.report import make_report

    reading = Reading(
        columns=column_names(column),
        format=format,
        delimiter=delimiter,
        encoding=encoding,
        header=header,
        label_separator=label_separator,
    )
    made = make_report(runs, output, data=data, by=[] if by is None else by, mistakes=mistakes, reading=reading)
    show(made.to_json(), made.lines(), as_json=as_json)


def report_on(folder: Path) -> str | None:
    """Makes the report of what ``train`` has just finished, on the first process; where it is, or None."""
    made: list[str] = []
    if is_first_process():
        with _OnlyWarned():
            from bert_tasks.report import make_report

            made.append(str(make_report(folder).output))
    return made[0] if made else None


class _OnlyWarned:
    """The run is whole and saved: nothing that goes wrong with its report may change how the command ends."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        told = str(error) if isinstance(error, BertTasksError) else f"{type(error).__name__}: {error}"
        warn(f"no report was made ({told}); the run itself is complete")
        return True
