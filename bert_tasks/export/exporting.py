"""A trained model as a folder that onnxruntime runs: exported, verified against the model, then written whole.

Owns what is compared before anything is written, the tolerances, and the rule about an existing folder. The graph and
its quantisation are made in model/onnx.py, which `predict --dtype int8` runs too. Must not know training.

Shape legend: N tokens, B sequences, L labels.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from itertools import islice
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, get_args

import torch

from bert_tasks.checkpoints.save import save_folder
from bert_tasks.data.columns import Row
from bert_tasks.data.features import token_batches
from bert_tasks.data.readers import ReadOptions
from bert_tasks.encoder.heads import CRFHead
from bert_tasks.environment import disable_telemetry
from bert_tasks.errors import CheckpointError, DataError, UsageError
from bert_tasks.model.exported import GRAPH, RECORD
from bert_tasks.model.inputs import Data, as_trained, load_table
from bert_tasks.model.onnx import (
    LIBRARIES,
    OPSET,
    GraphModel,
    check_libraries,
    exported_graph,
    input_names,
    output_names,
    quantized_graph,
)
from bert_tasks.model.predicting import batch_logits, canonical_row, checked_features, predict_rows, tokenizer_of
from bert_tasks.model.pretrained import saved_config
from bert_tasks.model.task_model import TaskModel
from bert_tasks.paths import exists, is_folder, resolved
from bert_tasks.run_dir.trained import load_trained
from bert_tasks.storage import atomic_folder, locked, sha256, sibling_path, weights_write_error
from bert_tasks.tasks.base import Feature, Prediction, Task

To = Literal["onnx", "int8"]

TOLERANCE = 1e-5  # of a float32 graph's logits, times the largest logit where that is above 1
KEPT_ANSWERS = 0.95  # share of answers that an int8 graph must leave as they are
VERIFIED_ROWS = 200
LENGTHS = (1, 2, 3, 127, 128)  # and the longest and one less
BATCHES = (1, 7)
_LARGEST_GRAPH = 2**31 - 1  # bytes of a file that protobuf takes


@dataclass(frozen=True, kw_only=True)
class Export:
    """What was written: the folder and its ``export.json``."""

    folder: Path
    record: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Plain values for one JSON object."""
        return {"folder": str(self.folder), **self.record}

    def lines(self) -> list[str]:
        """The report for a terminal."""
        record = self.record
        parity = record["parity"]
        lines = [
            f"{GRAPH}: {record['bytes']:,} bytes, opset {record['opset']}, {', '.join(record['inputs'])} -> "
            f"{', '.join(record['outputs'])}",
            f"float32 graph: {parity['sequences']} sequences of {parity['shortest']} to {parity['longest']} tokens in "
            f"batches of 1 and 7, largest difference {parity['max_difference']:.2g}, allowed {parity['allowed']:.2g}",
        ]
        if "int8" in record:
            int8 = record["int8"]
            lines.append(
                f"int8 graph: {int8['kept']:.1%} of {int8['answers']} answers kept, required {int8['required']:.0%}; "
                f"largest difference of a logit {int8['max_difference']:.2g}"
            )
        return [*lines, f"exported: {self.folder}"]


def export(
    model: TaskModel | str | Path,
    *,
    to: To,
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
    """Writes a folder with an ONNX graph of the model, which predict and evaluate run, if the graph gives its answers.

    A float32 graph is compared on sequences of many lengths and on the first 200 rows of ``data``; an int8 graph on the
    answers to these rows, without which none is made. All rows of ``data`` are read and checked.

    Args:
        model: a model, or a folder or name that says what its task is (``revision`` of a hub id).
        to: ``onnx`` (float32) or ``int8``.
        output: a new or empty folder; with ``overwrite`` also an earlier export.
        settings: fields of the task to change, of a model that is loaded here.
        columns, format, delimiter, encoding, header, label_separator: how ``data`` is read; see ``ReadOptions``.

    Raises:
        UsageError: the ``export`` extra is missing, an argument is wrong, the output cannot be a folder of its own, or
            another process exports to it.
        DataError: a row cannot be used, or there is none; of int8 also rows whose answers say nothing about a graph: no
            words, or numbers that are all alike.
        CheckpointError: the model cannot be loaded, the graph differs by more than the tolerance, or the folder cannot
            be written. Nothing is left behind.
    """
    _check_arguments(to, data)
    check_libraries()
    target = _checked_folder(Path(output), overwrite=overwrite)
    with _held(target) as place:
        how = ReadOptions(
            columns=columns,
            format=format,
            delimiter=delimiter,
            encoding=encoding,
            header=header,
            label_separator=label_separator,
        )
        loaded = load_trained(model, task=task, settings=settings, data=data, reading=how, revision=revision)
        others = {str(weights.dtype) for weights in loaded.parameters()} - {"torch.float32"}
        if others:
            raise UsageError(
                f"the weights are {', '.join(others)}, a graph is float32: convert the model with .float()"
            )
        rows = [] if data is None else _rows(loaded, data, how)
        content, facts = _verified_graph(loaded, rows, to)
        record = {
            "to": to,
            "opset": OPSET,
            "inputs": list(input_names(loaded.config)),
            "outputs": list(output_names(loaded)),
            "bytes": len(content),
            "sha256": sha256(content),
            **facts,
            "versions": _versions(),
        }
        _write(loaded, content, record, target, place)
    return Export(folder=target, record=record)


def _versions() -> dict[str, str]:
    """Of a module, whatever package it came with: onnxruntime-gpu is one of several."""
    disable_telemetry()
    modules = {name: str(import_module(name).__version__) for name in ("torch", *LIBRARIES)}
    return {"bert-tasks": version("bert-tasks"), **modules}


def _check_arguments(to: str, data: Data | None) -> None:
    if to not in get_args(To):
        raise UsageError(f"to is {to!r}, expected one of {', '.join(map(repr, get_args(To)))}")
    if to == "int8" and data is None:
        raise UsageError(
            "int8 rounds, and whether its answers stay the same is judged on rows: name a file of real ones (--data)"
        )


def _checked_folder(target: Path, *, overwrite: bool) -> Path:
    """Refuses an output before any work is done for it."""
    if exists(target) and not is_folder(target):
        raise UsageError(f"{target} is a file, expected a folder for the exported model")
    there = {path.name for path in target.iterdir()} if is_folder(target) else set()
    if there and RECORD not in there:
        raise UsageError(f"{target} is not empty and holds no export ({min(there)}): choose another folder")
    foreign = sorted(there - _own_files(target))
    if foreign:
        raise UsageError(f"{target} holds an export, but {foreign[0]} is not of it: choose another folder")
    if there and not overwrite:
        raise UsageError(f"{target} holds an export already: choose another folder, or --overwrite to replace it")
    parent = next(path for path in target.absolute().parents if exists(path))
    if not is_folder(parent):
        raise UsageError(f"{parent} is a file, expected a folder: choose another output folder")
    if not os.access(parent, os.W_OK):
        raise UsageError(f"{parent} is not writable: choose another output folder")
    return target


def _own_files(folder: Path) -> set[str]:
    """The files that the record of an earlier export names."""
    try:
        files = json.loads((folder / RECORD).read_text("utf-8")).get("files", [])
    except (OSError, ValueError, RecursionError, AttributeError):
        files = []
    return {RECORD, *filter(lambda name: isinstance(name, str), files)} if isinstance(files, list) else {RECORD}


def _rows(model: TaskModel, data: Data, how: ReadOptions) -> list[Row]:
    data, how = as_trained(model, data, how)
    table = load_table(data, model.task, reading=how, targets="unread")
    if len(table) == 0:
        raise DataError(f"{table.source}: no rows to verify the graph with")
    inputs = [column for column in model.task.columns if not column.is_target]
    return [canonical_row(row, inputs, number) for number, row in enumerate(islice(table, VERIFIED_ROWS))]


def _verified_graph(model: TaskModel, rows: Sequence[Row], to: To) -> tuple[bytes, dict[str, Any]]:
    """The graph's bytes, and what the comparison with the model found.

    Raises:
        DataError, CheckpointError: see ``export``.
    """
    exact = _int8_baseline(model, rows) if to == "int8" else []
    graph = exported_graph(model)
    if graph.ByteSize() > _LARGEST_GRAPH:
        raise CheckpointError(f"the graph has {graph.ByteSize()} bytes, more than the 2 GiB that an ONNX file may have")
    content: bytes = graph.SerializeToString()
    windows = checked_features(model.task, rows, tokenizer_of(model), model.config) if rows else []
    facts: dict[str, Any] = {"parity": _parity(model, GraphModel.of(model, content), windows, rows=len(rows))}
    if to == "int8":
        content = quantized_graph(graph)
        facts["int8"] = _agreement(model, GraphModel.of(model, content), windows, rows, exact)
    return content, facts


def _parity(model: TaskModel, graph: GraphModel, windows: Sequence[Feature], *, rows: int) -> dict[str, Any]:
    """How far the graph's logits are from the model's. Raises CheckpointError if that is too far."""
    sequences = [*_random_sequences(model), *windows]
    lengths = [len(sequence["input_ids"]) for sequence in sequences]
    found = [_difference(model, graph, batch) for size in BATCHES for batch in _batches(sequences, size)]
    worst, largest = map(_largest, zip(*found, strict=True))
    allowed = TOLERANCE * max(1.0, largest)
    if not worst <= allowed:
        raise CheckpointError(
            f"the graph is not the model: its logits differ by {worst:.2g}, allowed is {allowed:.2g}; nothing was "
            "written. Please report this with the output of bert-tasks inspect"
        )
    return {
        "tolerance": TOLERANCE,
        "max_difference": worst,
        "allowed": allowed,
        "largest_logit": largest,
        "sequences": len(sequences),
        "rows": rows,
        "shortest": min(lengths),
        "longest": max(lengths),
        "batches": list(BATCHES),
    }


def _largest(values: Iterable[float]) -> float:
    """NaN if one is: ``max`` passes over one that does not come first."""
    return torch.tensor(list(values), dtype=torch.float64).max().item()


def _random_sequences(model: TaskModel) -> list[Feature]:
    """One sequence of each length to check, of any tokens but padding, the second half in segment 1 if there is one."""
    config = model.config
    longest = config.usable_length
    generator = torch.Generator().manual_seed(0)
    known = [token for token in range(config.vocab_size) if token != config.pad_token_id]
    last = min(1, max(0, config.type_vocab_size - 1))
    made: list[Feature] = []
    for length in sorted({length for length in (*LENGTHS, longest - 1, longest) if 1 <= length <= longest}):
        chosen = torch.randint(len(known), (length,), generator=generator).tolist()
        segments = [0] * (length - length // 2) + [last] * (length // 2)
        made.append({"row": len(made), "input_ids": [known[i] for i in chosen], "token_type_ids": segments})
    return made


def _batches(sequences: Sequence[Feature], size: int) -> Iterator[list[Feature]]:
    """Neighbours together, whatever their lengths, with all of their tokens read."""
    whole: list[Feature] = [
        {"row": i, "input_ids": sequence["input_ids"], "token_type_ids": sequence["token_type_ids"]}
        for i, sequence in enumerate(sequences)
    ]
    for batch in token_batches(range(len(whole)), [1] * len(whole), max_tokens=size):
        yield [whole[i] for i in batch]


def _difference(model: TaskModel, graph: GraphModel, batch: list[Feature]) -> tuple[float, float]:
    """The largest difference between the packed model and the graph on one padded rectangle; the largest logit."""

    def run(_: object) -> torch.Tensor:
        ids = torch.tensor([token for sequence in batch for token in sequence["input_ids"]])  # [N]
        segments = torch.tensor([kind for sequence in batch for kind in sequence["token_type_ids"]])  # [N]
        lengths = torch.tensor([len(sequence["input_ids"]) for sequence in batch])  # [B]
        found = graph.rectangle_logits(ids, segments, lengths).to(model.device)
        return model.head.with_transitions(found) if isinstance(model.head, CRFHead) else found

    exact, other = batch_logits(model, batch)[1], batch_logits(model, batch, run=run)[1]
    return (exact - other).abs().max().item(), exact.abs().max().item()


def _int8_baseline(model: TaskModel, rows: Sequence[Row]) -> list[Prediction]:
    """The model's predictions, which an int8 graph must keep.

    Raises:
        DataError: they cannot tell a good graph from a bad one: there are none, or the task says so.
    """
    exact = list(predict_rows(model, rows))
    try:
        if not model.task.same_predictions(exact, exact):
            raise DataError(f"the first {len(rows)} rows have nothing to predict: their sentences have no words")
    except DataError as error:
        raise DataError(f"int8 export compares predictions, but {error}; pass a file of other rows (--data)") from None
    return exact


def _agreement(
    model: TaskModel,
    graph: GraphModel,
    windows: Sequence[Feature],
    rows: Sequence[Row],
    exact: Sequence[Prediction],
) -> dict[str, Any]:
    """How many of the model's answers, ``exact``, the int8 graph keeps. Raises CheckpointError if these are too few."""
    rough = list(predict_rows(model, rows, run=graph.packed_logits))
    kept = model.task.same_predictions(exact, rough)
    share = fmean(kept)
    if share < KEPT_ANSWERS:
        raise CheckpointError(
            f"int8 changes too much: {share:.1%} of {len(kept)} answers stay the same, required are "
            f"{KEPT_ANSWERS:.0%}; nothing was written. Export to onnx, or verify with rows like those it was trained on"
        )
    worst = _largest(_difference(model, graph, batch)[0] for batch in _batches(windows, BATCHES[-1]))
    if not isfinite(worst):
        raise CheckpointError("the int8 graph gives logits that are not finite; nothing was written. Export to onnx")
    return {"kept": share, "answers": len(kept), "required": KEPT_ANSWERS, "max_difference": worst, "rows": len(rows)}


def _write(model: TaskModel, content: bytes, record: Mapping[str, Any], target: Path, place: Path) -> None:
    """Fills a folder in ``place`` and renames it. Raises CheckpointError if that cannot be done."""
    own = {"head.transitions": model.head.transitions} if isinstance(model.head, CRFHead) else None
    try:
        with atomic_folder(resolved(target), staging=place / "new", replaced=place / "replaced") as folder:
            save_folder(
                folder,
                config=saved_config(model),
                tensors=None,
                tokenizer=model.tokenizer,
                head_tensors=None if own is None else {name: value.detach().cpu() for name, value in own.items()},
            )
            (folder / GRAPH).write_bytes(content)
            files = sorted({path.name for path in folder.iterdir()})
            text = json.dumps({**record, "files": files}, indent=2, ensure_ascii=False)
            (folder / RECORD).write_text(text + "\n", "utf-8")
    except OSError as error:
        reason = weights_write_error(error, target.parent, len(content))
        raise CheckpointError(f"{target}: cannot be written: {reason}") from error


@contextmanager
def _held(target: Path) -> Iterator[Path]:
    """A folder beside the target to work in, which one process has at a time; removed at the end.

    A killed export leaves at most this folder behind; the next one to the same target takes it over.
    """
    target = resolved(target)
    place = sibling_path(target, prefix=".", suffix=".exporting")
    try:
        with locked(place):
            yield place
    finally:
        with suppress(OSError):  # another process has it, or has just come
            place.rmdir()
