"""The bytes of an ONNX file, searched for references to other files before a runtime sees them.

Owns the few fields of the ONNX messages that this needs, read from protobuf's wire format: running a graph needs
onnxruntime only, which would read external data from any path that the file states. Must not know what a graph
computes.

The model as an ONNX graph: exported, quantised to int8, and run by onnxruntime in place of torch.

Owns the one export of a graph and the one int8 implementation. They lie here because prediction runs the graph and
export writes it, and neither may import the other. The libraries of the ``export`` extra are imported on first use.
Must not know rows or files.

Shape legend: N tokens, B sequences, T padded length, L labels, R rows that a head reads.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from bert_tasks.data.problems import shortened
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.heads import CRFHead, Head, PerTokenHead
from bert_tasks.encoder.packing import Packed, PackedBatch
from bert_tasks.environment import disable_telemetry
from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.model.predicting import Logits
from bert_tasks.model.task_model import TaskModel
from bert_tasks.paths import os_error_message

if TYPE_CHECKING:
    import onnx
    import onnxruntime

# Message -> its fields that lead to a tensor, by number (onnx.proto of ONNX 1.22); the other fields are passed over.
_MESSAGES: Mapping[str, Mapping[int, str]] = MappingProxyType(
    {
        "model": {7: "graph", 20: "training", 25: "function"},
        "training": {1: "graph", 2: "graph"},
        "function": {7: "node", 11: "attribute"},
        "graph": {1: "node", 5: "tensor", 15: "sparse_tensor"},
        "node": {5: "attribute"},
        "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse_tensor", 23: "sparse_tensor"},
        "sparse_tensor": {1: "tensor", 2: "tensor"},
        "tensor": {},
    }
)
_NAME, _EXTERNAL_DATA, _DATA_LOCATION = 8, 13, 14  # fields of a tensor
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types; groups (3 and 4) occur in no ONNX message


def external_tensor(content: bytes) -> str | None:
    """The name of a tensor whose values are outside the file, wherever in the graph it is; None if there is none.

    Args:
        content: an ONNX file.

    Raises:
        ValueError: it is no ONNX model: cut, damaged or something else.
    """
    waiting = [("model", memoryview(content))]
    while waiting:
        kind, message = waiting.pop()
        name, is_external = "", False
        for number, value in _fields(message):
            if isinstance(value, memoryview) and number in _MESSAGES[kind]:
                waiting.append((_MESSAGES[kind][number], value))
            elif kind == "tensor" and isinstance(value, memoryview):
                name = bytes(value).decode("utf-8", errors="replace") if number == _NAME else name
                is_external |= number == _EXTERNAL_DATA
            elif kind == "tensor":
                is_external |= number == _DATA_LOCATION and value != 0
        if is_external:
            return name
    return None


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """The fields of a message by their numbers: integers, and the bytes of what has a length; fixed ones as 0."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        number, wire = tag >> 3, tag & 7
        if number == 0 or tag >= 1 << 32:
            raise ValueError(f"a field with the tag {tag}")
        size = 0
        if wire == _VARINT:
            value, place = _varint(message, place)
            yield number, value
            continue
        if wire == _BYTES:
            size, place = _varint(message, place)
        elif wire in (_FIXED64, _FIXED32):
            size = 8 if wire == _FIXED64 else 4
        else:
            raise ValueError(f"a field of the unknown type {wire}")
        if size > len(message) - place:
            raise ValueError("a field that is longer than its message")
        yield number, message[place : place + size] if wire == _BYTES else 0
        place += size


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    """A number of at most ten bytes, seven bits in each, and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(message):
            raise ValueError("it ends within a number")
        byte = message[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
    raise ValueError("a number of more than ten bytes")


DType = Literal["float32", "int8"]

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
OPSET = 20  # the first with Gelu
RECTANGLE_TOKENS = 2048
LIBRARIES = ("onnx", "onnxruntime", "onnxscript")


class _PaddedCall(nn.Module):
    """The padded call with nothing but the graph's inputs and outputs."""

    def __init__(self, model: TaskModel) -> None:
        super().__init__()
        self.model = model
        self.splits = len(output_names(model)) > 1

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        logits: Tensor = self.model(input_ids, attention_mask, token_type_ids)
        return logits.unbind(-1) if self.splits else logits


def input_names(config: EncoderConfig) -> tuple[str, ...]:
    """As transformers' tokenizers of the family give them: segments only where there is more than one."""
    return INPUTS if config.type_vocab_size > 1 else INPUTS[:2]


def output_names(model: TaskModel) -> tuple[str, ...]:
    """As transformers' models of the same head have them."""
    return ("start_logits", "end_logits") if model.task.hf_head == "span" else ("logits",)


def exported_graph(model: TaskModel) -> "onnx.ModelProto":
    """The graph of the padded call in float32: ``input_names``, each int64 ``[B, T]``, -> ``output_names``; B, T free.

    Logits are ``[B, L]``, or ``[B, T, L]`` with zeros at padding, of spans two times ``[B, T]``; of a CRF they are the
    emissions, its transitions stay with the head. The model is left as it was.

    Raises:
        UsageError: the ``export`` extra is missing, or the model is a graph already.
    """
    check_libraries()
    if not hasattr(model, "stack"):
        raise UsageError("the model is exported already: its precision is fixed, and its weights are not here")
    inputs, outputs = input_names(model.config), output_names(model)
    mask = torch.ones(2, 7, dtype=torch.int64)  # any sizes but 0 and 1, which the exporter takes as fixed
    mask[0, 5:] = 0
    example = tuple(tensor.to(model.device) for tensor in (mask * 5, mask, torch.zeros_like(mask)))
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    was_training = model.training
    try:
        with _quiet(), torch.no_grad():
            program = torch.onnx.export(
                _PaddedCall(model).eval(),
                example[: len(inputs)],
                dynamo=True,
                verbose=False,
                opset_version=OPSET,
                input_names=inputs,
                output_names=outputs,
                dynamic_shapes=(free,) * len(inputs),
            )
    finally:
        model.train(was_training)
    graph: onnx.ModelProto = program.model_proto  # type: ignore[union-attr]  # dynamo=True always gives a program
    _tidy(graph)
    return graph


def _tidy(graph: "onnx.ModelProto") -> None:
    """Names the free sizes, and takes out what the exporter notes of where on this machine each node was made.

    Shapes in between go too: they would no longer fit once the quantiser has transposed weights.
    """
    free = [size.dim_param for size in graph.graph.input[0].type.tensor_type.shape.dim]
    names = dict(zip(free, ("batch", "sequence"), strict=True))
    for value in (*graph.graph.input, *graph.graph.output):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param in names:
                size.dim_param = names[size.dim_param]
    for part in (graph, graph.graph, *graph.graph.node, *graph.graph.input, *graph.graph.output, *graph.functions):
        del part.metadata_props[:]
    for weights in graph.graph.initializer:
        del weights.metadata_props[:]
    del graph.graph.value_info[:]


def quantized_graph(graph: "onnx.ModelProto") -> bytes:
    """The graph with int8 weights, and activations that are quantised as they come, as onnxruntime does it.

    One scale per output channel, and 7 bits: of the settings tried, the one that kept most labels and was still half as
    fast again as float32 (docs/performance.md). Embeddings, norms, softmax, attention's own products and the head stay
    in float32.

    The scale of activations is one for a padded rectangle: a row's scores move a little with the rows beside it.

    Raises:
        UsageError: the quantiser's temporary files cannot be written.
    """
    quantization = import_onnxruntime("onnxruntime.quantization")
    with _needs_temporary_files(graph.ByteSize()), TemporaryDirectory() as folder, _quiet():
        path = Path(folder) / "int8.onnx"
        quantization.quantize_dynamic(
            graph,
            path,
            op_types_to_quantize=["MatMul", "Gemm"],
            per_channel=True,
            reduce_range=True,
            weight_type=quantization.QuantType.QInt8,
            nodes_to_exclude=_head_products(graph),
        )
        return path.read_bytes()


@contextmanager
def _needs_temporary_files(size: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"int8 needs temporary files of about {2 * size} bytes, which cannot be written "
            f"({os_error_message(error)}): make room there, or set TMPDIR to a folder that has it"
        ) from None


def _head_products(graph: "onnx.ModelProto") -> list[str]:
    """The products with the head's weights, also under the names that the quantiser gives them first."""
    found = [node.name for node in graph.graph.node if any(name.startswith("model.head.") for name in node.input)]
    return [*found, *(f"{name}_MatMul" for name in found)]


@dataclass(frozen=True, kw_only=True)
class GraphModel:
    """A graph with its runtime, called as a model's packed batches are."""

    session: "onnxruntime.InferenceSession"
    head: Head
    pad_token_id: int

    @classmethod
    def of(cls, model: TaskModel, content: bytes) -> Self:
        """A graph of this model, to be run on the CPU with torch's number of threads.

        Raises:
            CheckpointError: onnxruntime does not take it, or its inputs and outputs are not those of the model.
        """
        with _graph_errors("does not take"):
            session = _session(content)
            _check_values("inputs", session.get_inputs(), input_names(model.config), "tensor(int64)")
            _check_values("outputs", session.get_outputs(), output_names(model), "tensor(float)")
        return cls(session=session, head=model.head, pad_token_id=model.config.pad_token_id)

    @property
    def labels(self) -> int | None:
        """L of the graph's logits; None if it does not say."""
        outputs = self.session.get_outputs()
        *_, last = (None, *outputs[0].shape) if len(outputs) == 1 else (len(outputs),)
        return last if isinstance(last, int) else None

    def packed_logits(self, batch: PackedBatch) -> Tensor:
        """As ``TaskModel.packed_logits``: ``[B, L]``, or of the rows that the head reads ``[R, L]``."""
        device = batch.input_ids.device
        batch = batch.to(torch.device("cpu"))
        parts, row = [], 0
        for lengths in rectangles(batch.layout):
            rows = slice(row, row + int(lengths.sum()))
            parts.append(self.rectangle_logits(batch.input_ids[rows], batch.token_type_ids[rows], lengths))
            row = rows.stop
        wanted = batch.layout.gather_positions if isinstance(self.head, PerTokenHead) else batch.layout.order
        logits = torch.cat(parts).index_select(0, wanted).to(device)
        return self.head.with_transitions(logits) if isinstance(self.head, CRFHead) else logits

    def rectangle_logits(self, input_ids: Tensor, token_type_ids: Tensor, lengths: Tensor) -> Tensor:
        """Sequences one after another, padded to the longest and run in one call: ``[N] -> [N, L]`` or ``[B, L]``.

        Raises:
            CheckpointError: the graph cannot be run, or gives logits of another shape.
        """
        mask = torch.arange(int(lengths.max())) < lengths[:, None]  # [B, T]
        padded = torch.full(mask.shape, self.pad_token_id).masked_scatter_(mask, input_ids)
        segments = torch.zeros_like(padded).masked_scatter_(mask, token_type_ids)
        feed = dict(zip(INPUTS, (padded.numpy(), mask.long().numpy(), segments.numpy()), strict=True))
        taken = [node.name for node in self.session.get_inputs()]
        with _graph_errors("cannot run"):
            found = [torch.from_numpy(part) for part in self.session.run(None, {name: feed[name] for name in taken})]
        per_token, labels = isinstance(self.head, PerTokenHead), self.head.output.out_features
        shape = (*(mask.shape if per_token else mask.shape[:1]), *((labels,) if len(found) == 1 else ()))
        if any(part.shape != shape for part in found):
            raise CheckpointError(f"the graph gives logits of the shape {tuple(found[0].shape)}, expected {shape}")
        logits = found[0] if len(found) == 1 else torch.stack(found, dim=-1)  # [B, L] or [B, T, L]
        return logits[mask] if per_token else logits


def rectangles(layout: Packed) -> Iterator[Tensor]:
    """The lengths of the sequences that are padded together, in the order of rows: at most an eighth is padding.

    Small ones, so that what a layer makes stays in the processor's cache.
    """
    by_group = torch.split(layout.row_lengths, [group.sequences for group in layout.groups])
    for group, lengths in zip(layout.groups, by_group, strict=True):
        yield from torch.split(lengths, max(1, RECTANGLE_TOKENS // group.length))


def logits_of(model: TaskModel, dtype: DType) -> Logits:
    """What runs a model's batches: the model itself, or its int8 graph, made now, which takes seconds.

    Raises:
        UsageError: an unknown dtype; for int8 see ``exported_graph``.
    """
    if dtype not in get_args(DType):
        raise UsageError(f"dtype is {dtype!r}, expected one of {', '.join(map(repr, get_args(DType)))}")
    if dtype == "float32":
        return model.packed_logits
    return GraphModel.of(model, quantized_graph(exported_graph(model))).packed_logits


def _session(content: bytes) -> "onnxruntime.InferenceSession":
    onnxruntime = import_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4  # errors are raised; their log lines would show a graph's names as they are
    options.add_session_config_entry("session.load_model_format", "ONNX")  # never onnxruntime's own, found by its bytes
    # Its fall-back would try the same once more, and print the reason on standard output.
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"], enable_fallback=0)


@contextmanager
def _graph_errors(what: str) -> Iterator[None]:
    """Raises CheckpointError for what onnxruntime finds wrong with a graph: it reads one when it is loaded and run."""
    errors = import_onnxruntime("onnxruntime.capi.onnxruntime_pybind11_state")
    try:
        yield
    except (
        errors.Fail,
        errors.InvalidArgument,
        errors.InvalidGraph,
        errors.InvalidProtobuf,
        errors.NotImplemented,
        errors.RuntimeException,
        RuntimeError,  # of C++ without a class of its own
        UnicodeDecodeError,  # of a message, or the name of an input
    ) as error:
        raise CheckpointError(f"onnxruntime {what} the graph: {str(error).partition(chr(10))[0][:300]}") from None


def _check_values(what: str, found: "Sequence[onnxruntime.NodeArg]", names: Sequence[str], kind: str) -> None:
    """Raises CheckpointError unless the graph's inputs, or its outputs, are those that the model's family has."""
    if [(value.name, value.type) for value in found] != [(name, kind) for name in names]:
        given = ", ".join(shortened(f"{value.name} {value.type}") for value in found)
        raise CheckpointError(f"the graph's {what} are {given}, expected {', '.join(names)}, each {kind}: export anew")


def import_onnxruntime(module: str = "onnxruntime") -> Any:
    """Imports onnxruntime or a module of it; the package imports it nowhere else.

    Without ``disable_telemetry`` before it, its Linux wheels (1.29 and later) resolve a name of Microsoft's, write a
    device id below the user's cache folder and send events, also where HF_HUB_OFFLINE is set.
    """
    disable_telemetry()
    return import_module(module)


def check_libraries(
    names: Sequence[str] = LIBRARIES, *, extra: str = "export", purpose: str = "ONNX graphs and int8"
) -> None:
    """Raises UsageError if a library of an extra is missing; to run a graph, onnxruntime is enough."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise UsageError(f"{', '.join(missing)} missing, needed for {purpose}: pip install 'bert-tasks[{extra}]'")


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the libraries' own notes from the user: torch's deprecated internals, absent torchvision, advice to
    pre-process a graph that needs none."""
    loggers = (logging.getLogger("torch.onnx"), logging.getLogger())
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, message=".*isinstance.treespec, LeafSpec.*")
            warnings.filterwarnings("ignore", category=UserWarning, message=".*The axis name.*")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
