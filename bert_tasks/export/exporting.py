"""Export of a trained model to a folder that onnxruntime runs: exported, verified against the model, written whole.

The graph and its quantization are made in model/onnx.py, which ``predict --dtype int8`` uses too.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from importlib import import_module
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

from bert_tasks.checkpoints.save import save_folder
from bert_tasks.data.columns import Row
from bert_tasks.data.readers import ReadOptions
from bert_tasks.data.validator import valid_rows
from bert_tasks.encoder.heads import CRFHead
from bert_tasks.environment import disable_telemetry
from bert_tasks.errors import CheckpointError, DataError, UsageError
from bert_tasks.export.verification import verified_graph
from bert_tasks.model.inputs import Data, as_trained, load_table
from bert_tasks.model.onnx import GRAPH, LIBRARIES, OPSET, RECORD, check_libraries, input_names, output_names
from bert_tasks.model.pretrained import saved_config
from bert_tasks.model.task_model import TaskModel
from bert_tasks.paths import exists, is_folder, resolved
from bert_tasks.run_dir.trained import load_trained
from bert_tasks.storage import atomic_folder, locked, sha256, sibling_path, weights_write_error
from bert_tasks.tasks.base import Task

ExportFormat = Literal["onnx", "int8"]

VERIFIED_ROWS = 200


@dataclass(frozen=True, kw_only=True)
class Export:
    """An exported model.

    Attributes:
        folder: where it was written.
        record: the content of its ``export.json``: what was measured, names of inputs and outputs, versions.
    """

    folder: Path
    record: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The folder and the record as one JSON object."""
        return {"folder": str(self.folder), **self.record}

    def lines(self) -> list[str]:
        """The record for a terminal."""
        record, parity = self.record, self.record["parity"]
        lines = [
            f"{GRAPH}: {record['bytes']:,} bytes, opset {record['opset']}, {', '.join(record['inputs'])} -> "
            f"{', '.join(record['outputs'])}",
            f"float32 graph: {parity['sequences']} sequences of {parity['shortest']} to {parity['longest']} tokens in "
            f"batches of 1 and 7, largest difference {parity['max_difference']:.2g}, allowed {parity['allowed']:.2g}",
        ]
        if "int8" in record:
            int8 = record["int8"]
            lines.append(
                f"int8 graph: {int8['kept']:.1%} of {int8['answers']} predictions unchanged, required "
                f"{int8['required']:.0%}; largest difference of a logit {int8['max_difference']:.2g}"
            )
        return [*lines, f"exported: {self.folder}"]


def export(
    model: TaskModel | str | Path,
    *,
    to: ExportFormat,
    output: str | Path,
    data: Data | None = None,
    task: str | type[Task] | None = None,
    settings: Mapping[str, Any] | None = None,
    revision: str | None = None,
    overwrite: bool = False,
    columns: Mapping[str, str] | None = None,
    format: str | None = None,
    delimiter: str | None = None,
    encoding: str | None = None,
    header: bool | None = None,
    label_separator: str | None = None,
) -> Export:
    """Exports a model to ONNX, verifies the graph against the model and writes a folder that predict and evaluate run.

    A float32 graph is compared with the model on random sequences of many lengths and on the first 200 rows of
    ``data``; an int8 graph also by its predictions on these rows. All rows of ``data`` are read and checked.

    Args:
        model: a model, a folder, or a name on the hub.
        to: ``onnx`` (float32) or ``int8``.
        output: a new or empty folder, or with ``overwrite`` an earlier export.
        data: rows to verify the graph on; required for int8.
        task: the task of a folder that does not state one, or a task class.
        settings: fields of the task to change, if ``model`` is loaded here.
        revision: the revision of a name on the hub.
        overwrite: whether to replace an earlier export.
        columns, format, delimiter, encoding, header, label_separator: how ``data`` is read; see ``ReadOptions``.

    Returns:
        The folder and what was measured.

    Raises:
        UsageError: the ``export`` extra is not installed, an argument is wrong, the output folder cannot be used, or
            another process exports to it.
        DataError: a row cannot be used, there are no rows, or the predictions on them cannot tell a good int8 graph
            from a bad one (sentences without words, the same number for all rows).
        CheckpointError: the model cannot be loaded, the graph differs by more than the tolerance, or the folder cannot
            be written. Nothing is left behind.
    """
    arguments = locals()
    if to not in get_args(ExportFormat):
        raise UsageError(f"to is {to!r}, expected one of {', '.join(map(repr, get_args(ExportFormat)))}")
    if to == "int8" and data is None:
        raise UsageError("int8 export is verified on real data: pass a file with --data.")
    check_libraries()
    target = Path(output)
    _check_output(target, overwrite=overwrite)
    with _locked_workspace(target) as workspace:
        how = ReadOptions(**{field.name: arguments[field.name] for field in fields(ReadOptions)})
        loaded = load_trained(model, task=task, settings=settings, data=data, reading=how, revision=revision)
        dtypes = {str(weights.dtype) for weights in loaded.parameters()} - {"torch.float32"}
        if dtypes:
            raise UsageError(f"the weights are {', '.join(dtypes)}, expected float32: convert the model with .float()")
        rows: list[Row] = []
        if data is not None:  # its first rows in canonical form, without labels
            data, how = as_trained(loaded, data, how, read_labels=False)
            table = load_table(data, loaded.task, reading=how, labels="unread")
            if len(table) == 0:
                raise DataError(f"{table.source}: no rows to verify the graph with")
            inputs = [column for column in loaded.task.columns if not column.is_label]
            rows = valid_rows(islice(table, VERIFIED_ROWS), inputs)
        content, measured = verified_graph(loaded, rows, int8=to == "int8")
        disable_telemetry()  # before the libraries are imported
        modules = {name: str(import_module(name).__version__) for name in ("torch", *LIBRARIES)}
        record = {
            "to": to,
            "opset": OPSET,
            "inputs": list(input_names(loaded.config)),
            "outputs": list(output_names(loaded)),
            "bytes": len(content),
            "sha256": sha256(content),
            **measured,
            "versions": {"bert-tasks": version("bert-tasks"), **modules},
        }
        _write(loaded, content, record, target, workspace)
    return Export(folder=target, record=record)


def _check_output(target: Path, *, overwrite: bool) -> None:
    """Refuses an output folder before any work is done for it."""
    if exists(target) and not is_folder(target):
        raise UsageError(f"{target} is a file, expected a folder for the exported model")
    existing = {path.name for path in target.iterdir()} if is_folder(target) else set()
    if existing and RECORD not in existing:
        raise UsageError(f"{target} is not empty and holds no export ({min(existing)}): choose another folder")
    try:
        stated = json.loads((target / RECORD).read_text("utf-8"))["files"]
        own = {RECORD, *(name for name in stated if isinstance(name, str))}
    except (OSError, ValueError, RecursionError, KeyError, TypeError):  # there is none, or it is damaged
        own = {RECORD}
    foreign = sorted(existing - own)
    if foreign:
        raise UsageError(f"{target} holds an export and other files ({foreign[0]}): choose another folder")
    if existing and not overwrite:
        raise UsageError(f"{target} already holds an export: choose another folder, or replace it with --overwrite")


@contextmanager
def _locked_workspace(target: Path) -> Iterator[Path]:
    """A folder beside the target that one process at a time works in; it is removed at the end.

    A killed export leaves at most this folder behind; the next export to the same target uses it.
    """
    workspace = sibling_path(resolved(target), prefix=".", suffix=".exporting")
    try:
        with locked(workspace):
            yield workspace
    finally:
        with suppress(OSError):  # another process holds it, or has just come
            workspace.rmdir()


def _write(model: TaskModel, content: bytes, record: Mapping[str, Any], target: Path, workspace: Path) -> None:
    """Writes the folder in the workspace and moves it to the target.

    Raises:
        CheckpointError: it cannot be written.
    """
    crf = {"head.transitions": model.head.transitions.detach().cpu()} if isinstance(model.head, CRFHead) else None
    try:
        with atomic_folder(resolved(target), staging=workspace / "new", replaced=workspace / "replaced") as folder:
            save_folder(
                folder,
                config=saved_config(model.hf_config, model.task, model.reading),
                tensors=None,
                tokenizer=model.tokenizer,
                head_tensors=crf,
            )
            (folder / GRAPH).write_bytes(content)
            files = sorted(path.name for path in folder.iterdir())
            text = json.dumps({**record, "files": files}, indent=2, ensure_ascii=False)
            (folder / RECORD).write_text(text + "\n", "utf-8")
    except OSError as error:
        reason = weights_write_error(error, target.parent, len(content))
        raise CheckpointError(f"{target}: cannot be written: {reason}") from error
