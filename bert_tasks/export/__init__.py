"""Exports a trained model to a folder that onnxruntime or transformers runs.

A graph is verified against the model before it is written: its logits on random sequences and on rows of the user, and
for int8 also the predictions. The folder is written under another name and then renamed, so that it appears whole or
not at all.

Shape legend: N tokens, B sequences, L labels.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from itertools import chain, islice
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Unpack, get_args

import torch
from torch import Tensor

from bert_tasks.checkpoints.hub import is_model_file, model_folder
from bert_tasks.checkpoints.save import save_folder
from bert_tasks.data.columns import Row
from bert_tasks.data.issues import counted
from bert_tasks.data.options import ReadingArguments, ReadOptions
from bert_tasks.data.reading import valid_rows
from bert_tasks.encoder.heads import HiddenStatesHead, PretrainingOutput, VocabularyOutput
from bert_tasks.environment import check_libraries
from bert_tasks.errors import CheckpointError, DataError, UsageError, argument
from bert_tasks.export.graph import LIBRARIES, OPSET, check_int8_graph, exported_graph, quantized_graph
from bert_tasks.export.vocabulary import save_with_vocabulary
from bert_tasks.model.encoder import Encoder
from bert_tasks.model.exported import GRAPHS, RECORD, GraphModel, input_names, names_other_file, output_names
from bert_tasks.model.inputs import Data, load_table, load_trained, reading_for_prediction
from bert_tasks.model.multitask import AnyModel
from bert_tasks.model.prediction import REQUIRED_AGREEMENT, agreements, predictions_by_head
from bert_tasks.model.pretrained import saved_config
from bert_tasks.model.shared_heads import SharedOutput
from bert_tasks.model.task_model import TaskModel
from bert_tasks.model.windows import features_of, in_evaluation, pack_features
from bert_tasks.outputs.features import Feature
from bert_tasks.outputs.prediction import Prediction
from bert_tasks.storage import check_new_folder, check_path, check_writable, new_folder, sha256, weights_write_error
from bert_tasks.tables import Result
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.embedding import Embedding
from bert_tasks.variables import disable_telemetry

ExportFormat = Literal["onnx", "int8", "transformers"]

VERIFIED_ROWS = 200
TOLERANCE = 1e-5  # for the logits of a float32 graph, times the largest logit if that is above 1
LENGTHS = (1, 2, 3, 127, 128)  # of random sequences, besides the longest input and one token less
BATCH_SIZES = (1, 7)
_HIDDEN = ".exporting"  # end of the name of the folder beside the output that is written first
_LARGEST_GRAPH = 2**31 - 1  # bytes, the limit of a protobuf file


@dataclass(frozen=True, kw_only=True)
class Export(Result):
    """An exported model, which ``export`` returns.

    Attributes:
        folder: The folder of the model.
        record: The content of its ``export.json`` with measurements, names of inputs and outputs, and versions.
    """

    folder: Path
    record: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Returns the folder and the record as one JSON object."""
        return {"folder": str(self.folder), **self.record}

    def lines(self) -> list[str]:
        """Returns the record for a terminal."""
        record = self.record
        if "parity" not in record:
            lines = [f"{record['architecture']} with {counted(record['labels'], 'label')}"]
            if "vocabulary" in record:
                before, after = record["vocabulary"]["before"], record["vocabulary"]["after"]
                lines.append(f"vocabulary: {after['pieces']:,} of {before['pieces']:,} pieces")
                lines.append(f"weights: {after['mib']:.1f} of {before['mib']:.1f} MiB")
            return [*lines, f"exported: {self.folder}"]
        parity = record["parity"]
        lines = [
            f"{GRAPHS[record['to']]}: {record['bytes']:,} bytes, opset {record['opset']}, "
            f"{', '.join(record['inputs'])} -> {', '.join(record['outputs'])}",
            f"float32 graph: {counted(parity['sequences'], 'sequence')} of {parity['shortest']} to {parity['longest']} "
            f"tokens in batches of 1 and 7, largest difference {parity['max_difference']:.2g}, "
            f"allowed {parity['allowed']:.2g}",
        ]
        if "int8" in record:
            int8 = record["int8"]
            lines.append(
                f"int8 graph: {int8['kept']:.1%} of {counted(int8['answers'], 'prediction')} unchanged, required "
                f"{int8['required']:.0%}, largest difference of a logit {int8['max_difference']:.2g}"
            )
        return [*lines, f"exported: {self.folder}"]


def export(
    model: AnyModel | str | Path,
    *,
    to: ExportFormat,
    output: str | Path,
    data: Data | None = None,
    task: str | type[Task] | None = None,
    settings: Mapping[str, Any] | None = None,
    revision: str | None = None,
    adapter: str | Path | None = None,
    overwrite: bool = False,
    vocabulary: Data | Sequence[Path] | None = None,
    **reading: Unpack[ReadingArguments],
) -> Export:
    """Exports a model to an ONNX graph and verifies the graph against the model.

    Use it to run a model where torch is too large or too slow: onnxruntime, transformers.js and other runtimes read the
    graph, and ``predict``, ``evaluate`` and the server of this package run the folder as they run a model. In an
    int8 graph the weights of the layers take a quarter of the bytes. Embeddings and the head stay in float32.

    Logits are compared on random sequences of many lengths and on the first 200 rows of ``data``. An int8 graph must
    also leave 95 % of the predictions for these rows unchanged. If the graph differs too much, no folder is written.

    Args:
        model: A model or its name.
        to: ``onnx`` (float32), ``int8``, or ``transformers`` for weights that ``AutoModelFor...`` opens.
        output: A new or empty folder, or with ``overwrite`` an earlier export.
        data: Rows to verify the graph on, which int8 needs. All of them are read and checked.
        task: Name or class of the task, or the name of one of several tasks. Without it a graph has the heads of all
            tasks, and its outputs are ``NAME.logits``. ``embedding`` exports the encoder alone, with the output
            ``last_hidden_state``.
        settings: Fields of the task to change. See ``evaluate``.
        revision: See ``TaskModel.from_pretrained``.
        adapter: See ``TaskModel.from_pretrained``.
        overwrite: True to replace an earlier export. Default: False.
        vocabulary: Rows whose pieces are the vocabulary of the weights for ``transformers``, with special tokens and
            single characters for other texts. Pass what ``predict`` accepts, or a list of ``Path`` for several files.
            That the rows have the same tokens as before is checked. Default: the whole vocabulary.
        reading: Fields of `ReadOptions` for ``data`` and ``vocabulary``.

    Returns:
        The folder, and the record of the measurements that is also in its ``export.json``.

    Raises:
        UsageError: The ``export`` extra is not installed, an argument is wrong, or ``output`` cannot be used.
        DataError: A row cannot be used, or the rows cannot tell a good int8 graph from a bad one.
        CheckpointError: The model cannot be loaded, the graph differs too much, or the folder cannot be written.

    Examples:
        >>> export("runs/first", to="onnx", output="exported").record["outputs"]
        ['logits']
    """
    how = ReadOptions.from_arguments(export, reading)
    if to not in get_args(ExportFormat):
        raise UsageError(f"to is {to!r}, expected one of {', '.join(map(repr, get_args(ExportFormat)))}")
    if to == "int8" and data is None:
        raise UsageError(f"int8 export is verified on real data. Set {argument('data', 'FILE')}")
    check_path(output)
    target = Path(output)
    loading: dict[str, Any] = {"task": task, "settings": settings, "revision": revision, "adapter": adapter}
    if to == "transformers":
        if data is not None:
            raise UsageError(f"data verify a graph. Remove {argument('data', 'FILE')} for transformers")
        _check_weights_output(target, model, overwrite=overwrite)
        return _export_weights(load_trained(model, reading=how, **loading), target, vocabulary, how)
    if vocabulary is not None:
        raise UsageError(f"a smaller vocabulary is for weights. Set {argument('to', 'transformers')}")
    check_libraries(LIBRARIES, extra="export", purpose="ONNX graphs")
    _check_output(target, overwrite=overwrite)
    with new_folder(target, suffix=_HIDDEN) as folder:
        loaded: AnyModel
        if task == Embedding.name:
            loaded = _encoder(model, to, loading)
        else:
            loaded = load_trained(model, data=data, reading=how, **loading)
        dtypes = {str(weights.dtype) for weights in loaded.parameters()} - {"torch.float32"}
        if dtypes:
            raise UsageError(f"the weights are {', '.join(dtypes)}, expected float32. Convert the model with .float()")
        rows: list[Row] = []
        if data is not None:
            options = reading_for_prediction(loaded, data, how)
            table = load_table(data, loaded.row_columns, names=loaded.columns, reading=options, labels="unread")
            if len(table) == 0:
                raise DataError(f"{table.source}: no rows to verify the graph with")
            rows = list(valid_rows(islice(table, VERIFIED_ROWS), loaded.input_columns))
        content, measured = _verified_graph(loaded, rows, int8=to == "int8")
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
        _write(loaded, content, record, folder, target)
    return Export(folder=target, record=record)


def _encoder(model: AnyModel | str | Path, to: str, loading: Mapping[str, Any]) -> TaskModel:
    """Returns an encoder as a model whose logits are the states of the last layer."""
    if isinstance(model, AnyModel) or to != "onnx" or loading["settings"] or loading["adapter"] is not None:
        onnx = argument("to", "onnx")
        raise UsageError(f"the encoder of a folder is exported with {onnx}, without settings and adapters")
    loaded = Encoder.from_pretrained(model, revision=loading["revision"]).embedding_model(pooling="mean", prompt="")
    loaded.head = HiddenStatesHead(width=loaded.config.hidden_size)
    return loaded


def _export_weights(
    model: AnyModel, target: Path, vocabulary: Data | Sequence[Path] | None, reading: ReadOptions
) -> Export:
    """Saves a model whose head transformers has, perhaps with the pieces of some texts only."""
    task = model.one_task().task
    if not task.has_hf_head:
        raise UsageError(f"transformers lacks the head of this {task.name}. Use the folder with bert_tasks")
    architecture = saved_config(model.hf_config, model.head_tasks, model.reading)["architectures"][0]
    record = {"to": "transformers", "architecture": architecture, "labels": len(task.output.labels)}
    with new_folder(target, suffix=_HIDDEN) as folder:
        if vocabulary is None:
            model.save_pretrained(folder)
        else:
            record["vocabulary"] = save_with_vocabulary(model.one_task(), vocabulary, folder, reading)
    return Export(folder=target, record=record)


def _check_weights_output(target: Path, model: AnyModel | str | Path, *, overwrite: bool) -> None:
    """Refuses an output folder for weights before any work is done for it."""
    if not overwrite or not target.is_dir():
        check_new_folder(target)
        return
    if not isinstance(model, AnyModel):
        source = model_folder(Path(model).expanduser())
        if source.is_dir() and os.path.samefile(source, target):
            raise UsageError(f"{target} is the model to export. Choose another folder")
    # Files of the user, for example notes or data, must not be lost with the earlier export.
    foreign = sorted(name for name in _file_names(target) if not is_model_file(name))
    if foreign:
        raise UsageError(
            f"{target} has other files than those of an exported model ({foreign[0]}). Choose another folder"
        )
    check_writable(target.absolute().parent)


def _check_output(target: Path, *, overwrite: bool) -> None:
    """Refuses an output folder before any work is done for it."""
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is a file, expected a folder for the exported model")
    existing: set[str] = set()
    if target.is_dir():
        existing = _file_names(target)
    if existing and RECORD not in existing:
        raise UsageError(
            f"{target} is not empty and contains no export (it contains {min(existing)}). Choose another folder"
        )
    own_files = {RECORD}
    try:
        files = json.loads((target / RECORD).read_text("utf-8"))["files"]
        own_files.update(name for name in files if isinstance(name, str))
    except (OSError, ValueError, RecursionError, KeyError, TypeError):  # there is none, or it is damaged
        pass
    foreign = sorted(existing - own_files)
    if foreign:
        raise UsageError(f"{target} holds an export and other files ({foreign[0]}). Choose another folder")
    if existing and not overwrite:
        raise UsageError(
            f"{target} already holds an export. Choose another folder, or replace it with {argument('overwrite')}"
        )
    check_writable(target.absolute().parent)


def _file_names(folder: Path) -> set[str]:
    """Returns the files of a folder and of its folders, relative to it."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def _write(model: AnyModel, content: bytes, record: Mapping[str, Any], folder: Path, target: Path) -> None:
    """Writes the files of an export to ``folder``, which becomes ``target``."""
    # Decoding needs the transitions of a CRF, because the graph ends with the emissions.
    outside: dict[str, Tensor] | None = None
    if model.head.outside_graph:
        outside = {f"head.{name}": tensor.detach().cpu() for name, tensor in model.head.outside_graph.items()}
    try:
        save_folder(
            folder,
            config=saved_config(model.hf_config, model.head_tasks, model.reading),
            tensors=None,
            tokenizer=model.require_tokenizer(),
            head_tensors=outside,
        )
        graph = folder / GRAPHS[record["to"]]
        graph.parent.mkdir()
        graph.write_bytes(content)
        text = json.dumps({**record, "files": sorted(_file_names(folder))}, indent=2, ensure_ascii=False)
        (folder / RECORD).write_text(text + "\n", "utf-8")
    except OSError as error:
        reason = weights_write_error(error, target.parent, len(content))
        raise CheckpointError(f"{target} cannot be written ({reason})") from error


def _verified_graph(model: AnyModel, rows: Sequence[Row], *, int8: bool) -> tuple[bytes, dict[str, Any]]:
    """Returns the ONNX file and the differences of logits and, for int8, predictions."""
    expected: dict[str, list[Prediction]] = {}
    if int8:
        expected = predictions_by_head(model, rows)
        check_int8_graph(model)
        try:
            # A model agrees with itself in all decisions. If there is none, the comparison below would say nothing.
            if not agreements(model, expected, expected):
                raise DataError(f"the first {len(rows)} rows have nothing to predict, as their sentences have no words")
        except DataError as error:
            other = argument("data", "FILE")
            raise DataError(f"int8 export compares predictions, but {error}. Pass other rows with {other}") from None
    graph = exported_graph(model)
    if graph.ByteSize() > _LARGEST_GRAPH:
        raise CheckpointError(
            f"the graph has {graph.ByteSize()} bytes, which is more than the 2 GiB that an ONNX file may have"
        )
    content: bytes = graph.SerializeToString()
    if names_other_file(content):
        raise CheckpointError("a parameter of the model has 'location' in its name, which is not supported. Rename it")
    windows: list[Feature] = []
    if rows:
        windows = features_of(model, rows, model.require_tokenizer())
    measured = {"parity": _compare_logits(model, GraphModel.of(model, content), windows, rows=len(rows))}
    if int8:
        content = quantized_graph(graph)
        quantized = GraphModel.of(model, content)
        measured["int8"] = _compare_predictions(model, quantized, rows, expected)
        # One batch size is enough: the difference is reported, and must only be finite.
        worst, _ = _largest_differences(model, quantized, windows, BATCH_SIZES[-1:])
        if not isfinite(worst):
            raise CheckpointError(
                f"the logits of the int8 graph are not finite, so export wrote no file. Use {argument('to', 'onnx')}"
            )
        measured["int8"]["max_difference"] = worst
    return content, measured


def _compare_logits(model: AnyModel, graph: GraphModel, windows: Sequence[Feature], *, rows: int) -> dict[str, Any]:
    """Compares logits on random sequences and on all windows of the rows."""
    sequences = [*_random_sequences(model), *windows]
    worst, largest = _largest_differences(model, graph, sequences, BATCH_SIZES)
    allowed = TOLERANCE * max(1.0, largest)  # float32 has about 7 digits, so large logits differ by more
    if not worst <= allowed:  # also if it is NaN
        raise CheckpointError(
            "the graph does not compute what the model computes, so export wrote no file. Its logits differ by "
            f"{worst:.2g}, allowed is {allowed:.2g}. Please report this with the output of bert-tasks inspect"
        )
    lengths = [len(sequence["input_ids"]) for sequence in sequences]
    return {
        "tolerance": TOLERANCE,
        "max_difference": worst,
        "allowed": allowed,
        "largest_logit": largest,
        "sequences": len(sequences),
        "rows": rows,
        "shortest": min(lengths),
        "longest": max(lengths),
        "batches": list(BATCH_SIZES),
    }


def _compare_predictions(
    model: AnyModel, graph: GraphModel, rows: Sequence[Row], expected: Mapping[str, Sequence[Prediction]]
) -> dict[str, Any]:
    """Counts how many of the model's predictions the int8 graph leaves unchanged."""
    same = agreements(model, expected, predictions_by_head(model, rows, forward_fn=graph))
    share = fmean(same)
    if share < REQUIRED_AGREEMENT:
        raise CheckpointError(
            f"int8 changes too many predictions, so export wrote no file. {share:.1%} of {len(same)} stay the same, "
            f"required are {REQUIRED_AGREEMENT:.0%}. Use {argument('to', 'onnx')}, or verify with rows like the "
            "training rows"
        )
    return {"kept": share, "answers": len(same), "required": REQUIRED_AGREEMENT, "rows": len(rows)}


def _random_sequences(model: AnyModel) -> list[Feature]:
    """Returns a random sequence of each length, half in segment 1 if there is one."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    longest = config.usable_length
    lengths = {length for length in (*LENGTHS, longest - 1, longest) if 1 <= length <= longest}
    # RoBERTa computes positions from the ids, and counts a token with the id of padding as padding.
    tokens = torch.tensor([token for token in range(config.vocab_size) if token != config.pad_token_id])
    second_segment = min(1, max(0, config.type_vocab_size - 1))
    sequences: list[Feature] = []
    for length in sorted(lengths):
        ids = tokens[torch.randint(len(tokens), (length,), generator=generator)].tolist()
        segments = [0] * (length - length // 2) + [second_segment] * (length // 2)
        sequences.append({"row": len(sequences), "input_ids": ids, "token_type_ids": segments})
    return sequences


def _largest_differences(
    model: AnyModel, graph: GraphModel, sequences: Sequence[Feature], sizes: Sequence[int]
) -> tuple[float, float]:
    """Returns the largest difference and the largest logit of all batches, or NaN."""
    whole: list[Feature] = []
    for number, sequence in enumerate(sequences):
        # Without ``gather_positions`` heads read all tokens.
        whole.append(Feature(row=number, input_ids=sequence["input_ids"], token_type_ids=sequence["token_type_ids"]))
    pairs: list[tuple[float, float]] = []
    for size in sizes:
        for first in range(0, len(whole), size):
            pairs.append(_difference(model, graph, whole[first : first + size]))
    # max() would skip a NaN that does not come first.
    difference, logit = torch.tensor(pairs, dtype=torch.float64).amax(dim=0).tolist()
    return difference, logit


def _difference(model: AnyModel, graph: GraphModel, batch: list[Feature]) -> tuple[float, float]:
    """Returns the largest difference of a logit on a batch, and the largest logit."""
    features: list[Feature] = []
    for sequence in batch:
        features += [Feature(**{**sequence, "head": name}) for name in model.heads]
    ids = torch.tensor(list(chain.from_iterable(sequence["input_ids"] for sequence in batch)))  # [N]
    segments = torch.tensor(list(chain.from_iterable(sequence["token_type_ids"] for sequence in batch)))  # [N]
    lengths = torch.tensor([len(sequence["input_ids"]) for sequence in batch])  # [B]
    with in_evaluation(model), torch.inference_mode():
        packed = pack_features(model, features)
        expected = model(packed).to(torch.float32)
        logits = graph.rectangle_logits(ids, segments, lengths)  # [N, L] or [B, L] of each head
        actual = graph.output([each.to(model.device) for each in logits], packed.layout).to(torch.float32)
    if isinstance(expected, PretrainingOutput):
        expected = expected.vocabulary
    if isinstance(expected, VocabularyOutput):
        with torch.inference_mode():
            expected = expected.logits()
    if isinstance(expected, SharedOutput):
        expected = torch.cat([of_head.flatten() for of_head in expected.logits.values()])
        actual = torch.cat([of_head.flatten() for of_head in actual.logits.values()])
    return (expected - actual).abs().max().item(), expected.abs().max().item()
