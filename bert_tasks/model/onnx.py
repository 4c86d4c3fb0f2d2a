"""The model as an ONNX graph: exported, quantised to int8, and run by onnxruntime in place of torch.

Owns the one int8 implementation. It lies here because prediction runs the graph and export writes it, and neither may
import the other. The libraries of the ``export`` extra are imported on first use. Must not know rows, files or tasks.

Shape legend: N tokens, B sequences, T padded length, L labels, R rows that a head reads.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal, Self, get_args

import torch
from torch import Tensor, nn

from bert_tasks.encoder.heads import ChainHead, RowHead
from bert_tasks.encoder.packing import Packed, PackedBatch
from bert_tasks.errors import UsageError

if TYPE_CHECKING:
    import onnx
    import onnxruntime

    from bert_tasks.model.task_model import TaskModel

DType = Literal["float32", "int8"]
Logits = Callable[[PackedBatch], Tensor]  # a batch's logits: [B, L], or [R, L] of a head that reads rows

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
OPSET = 20  # the first with Gelu
RECTANGLE_TOKENS = 2048
_LIBRARIES = ("onnx", "onnxruntime", "onnxscript")


class _PaddedCall(nn.Module):
    """The padded call with nothing but the graph's inputs, in evaluation mode, without changing the model's."""

    def __init__(self, model: "TaskModel") -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids, attention_mask, token_type_ids)
        return logits


def exported_graph(model: "TaskModel") -> "onnx.ModelProto":
    """The graph of the padded call in float32: ``INPUTS``, each int64 ``[B, T]``, -> ``logits``; B and T are free.

    Logits are ``[B, L]``, or ``[B, T, L]`` with zeros at padding. The model is left as it was.

    Raises:
        UsageError: the ``export`` extra is missing, or the head is a CRF, whose graph would hold the emissions alone.
    """
    _check(model)
    mask = torch.ones(2, 7, dtype=torch.int64)  # any sizes but 0 and 1, which the exporter takes as fixed
    mask[0, 5:] = 0
    inputs = tuple(tensor.to(model.device) for tensor in (mask * 5, mask, torch.zeros_like(mask)))
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    was_training = model.training
    try:
        with _quiet(), torch.no_grad():
            program = torch.onnx.export(
                _PaddedCall(model).eval(),
                inputs,
                dynamo=True,
                verbose=False,
                opset_version=OPSET,
                input_names=INPUTS,
                output_names=["logits"],
                dynamic_shapes=(free,) * len(INPUTS),
            )
    finally:
        model.train(was_training)
    graph: onnx.ModelProto = program.model_proto  # type: ignore[union-attr]  # dynamo=True always gives a program
    # Shapes in between would no longer fit once the quantiser has transposed weights.
    del graph.graph.value_info[:]
    return graph


def quantized_graph(graph: "onnx.ModelProto") -> bytes:
    """The graph with int8 weights, and activations that are quantised as they come, as onnxruntime does it.

    One scale per output channel, and 7 bits: of the settings tried, the one that kept most labels and was still half as
    fast again as float32 (docs/performance.md). Embeddings, norms, softmax, attention's own products and the head stay
    in float32.

    The scale of activations is one for a padded rectangle: a row's scores move a little with the rows beside it.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with TemporaryDirectory() as folder, _quiet():
        path = Path(folder) / "int8.onnx"
        quantize_dynamic(
            graph,
            path,
            op_types_to_quantize=["MatMul", "Gemm"],
            per_channel=True,
            reduce_range=True,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=_head_products(graph),
        )
        return path.read_bytes()


def _head_products(graph: "onnx.ModelProto") -> list[str]:
    """The products with the head's weights, also under the names that the quantiser gives them first."""
    found = [node.name for node in graph.graph.node if any(name.startswith("model.head.") for name in node.input)]
    return [*found, *(f"{name}_MatMul" for name in found)]


@dataclass(frozen=True, kw_only=True)
class GraphModel:
    """A graph with its runtime, called as a model's packed batches are."""

    session: "onnxruntime.InferenceSession"
    reads_rows: bool
    pad_token_id: int

    @classmethod
    def of(cls, model: "TaskModel", content: bytes) -> Self:
        """A graph of this model, to be run on the CPU with torch's number of threads."""
        return cls(
            session=_session(content),
            reads_rows=isinstance(model.head, RowHead),
            pad_token_id=model.config.pad_token_id,
        )

    def packed_logits(self, batch: PackedBatch) -> Tensor:
        """As ``TaskModel.packed_logits``: ``[B, L]``, or ``[R, L]`` of the rows that the head reads."""
        device = batch.input_ids.device
        batch = batch.to(torch.device("cpu"))
        parts, row = [], 0
        for lengths in rectangles(batch.layout):
            rows = slice(row, row + int(lengths.sum()))
            parts.append(self._rectangle_logits(batch.input_ids[rows], batch.token_type_ids[rows], lengths))
            row = rows.stop
        wanted = batch.layout.reads if self.reads_rows else batch.layout.order
        return torch.cat(parts).index_select(0, wanted).to(device)

    def _rectangle_logits(self, input_ids: Tensor, token_type_ids: Tensor, lengths: Tensor) -> Tensor:
        """``[N] -> [N, L]``, or ``[B, L]`` of a head that does not read rows."""
        mask = torch.arange(int(lengths.max())) < lengths[:, None]  # [B, T]
        padded = torch.full(mask.shape, self.pad_token_id).masked_scatter_(mask, input_ids)
        segments = torch.zeros_like(padded).masked_scatter_(mask, token_type_ids)
        feed = dict(zip(INPUTS, (padded.numpy(), mask.long().numpy(), segments.numpy()), strict=True))
        taken = [node.name for node in self.session.get_inputs()]  # without segments, DistilBERT lacks the last
        (found,) = self.session.run(None, {name: feed[name] for name in taken})
        logits = torch.from_numpy(found)
        return logits[mask] if self.reads_rows else logits


def rectangles(layout: Packed) -> Iterator[Tensor]:
    """The lengths of the sequences that are padded together, in the order of rows: at most an eighth is padding.

    Small ones, so that what a layer makes stays in the processor's cache.
    """
    by_group = torch.split(layout.row_lengths, [group.sequences for group in layout.groups])
    for group, lengths in zip(layout.groups, by_group, strict=True):
        yield from torch.split(lengths, max(1, RECTANGLE_TOKENS // group.length))


def logits_of(model: "TaskModel", dtype: DType) -> Logits:
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
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def _check(model: "TaskModel") -> None:
    missing = [name for name in _LIBRARIES if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"{', '.join(missing)} missing, needed for ONNX graphs and int8: pip install 'bert-tasks[export]'"
        )
    if isinstance(model.head, ChainHead):
        raise UsageError("a graph holds no CRF, only its emissions: a model with crf = true runs in float32")


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
