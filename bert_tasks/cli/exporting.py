"""The command that turns a trained model into one for onnxruntime: export."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bert_tasks.cli.app import app, show
from bert_tasks.cli.options import (
    AsJson,
    Columns,
    DataFormat,
    Delimiter,
    ModelName,
    OwnTask,
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
def export(
    model: ModelName,
    to: Annotated[Literal["onnx", "int8"], typer.Option(help="onnx: float32; int8: quantised, needs --data.")],
    output: Annotated[Path, typer.Option(metavar="DIR", help="A new or empty folder.")],
    data: Annotated[Path | None, typer.Option(help="A file of rows: all are checked, 200 verify the graph.")] = None,
    format: DataFormat = None,
    column: Columns = None,
    delimiter: Delimiter = None,
    encoding: TrainedEncoding = None,
    header: TrainedHeader = None,
    label_separator: TrainedLabelSeparator = None,
    task: OwnTask = None,
    set_: Settings = None,
    revision: Revision = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export in the folder.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a folder with an ONNX graph, verified against the model; predict and evaluate run it. Extra: `export`.

    Example: bert-tasks export runs/first/model --to onnx --output first-onnx --data dev.csv
    """
    from bert_tasks.export import export

    options: dict[str, Any] = {"task": task_class(task), "settings": settings(set_), "revision": revision}
    options |= {"columns": column_names(column), "format": format, "delimiter": delimiter, "encoding": encoding}
    options |= {"header": header, "label_separator": label_separator}
    result = export(model, to=to, output=output, data=data, overwrite=overwrite, **options)
    show(result.to_json(), result.lines(), as_json=as_json)
