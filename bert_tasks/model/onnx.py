"""A model as an ONNX graph: exported, quantized to int8, checked, and run by onnxruntime in place of torch.

Prediction runs such a graph and export writes it to a folder, so both use this module. ``ExportedModel`` is such a
folder as a model that predicts; prediction, evaluation and batching are those of any other model. The libraries of the
``export`` extra are imported on first use. To run a graph onnxruntime alone is enough; therefore a file is searched for
external data without the ``onnx`` library.

Shape legend: N tokens, B sequences, T padded length, L labels, R rows that a head reads.
"""

import logging
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from bert_tasks.checkpoints.files import checked_file, read_json
from bert_tasks.checkpoints.hub import resolve
from bert_tasks.checkpoints.load import checked_tensors
from bert_tasks.checkpoints.protobuf import fields
from bert_tasks.checkpoints.save import read_head_tensors
from bert_tasks.checkpoints.tokenizers import load_tokenizer
from bert_tasks.data.problems import shortened
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.heads import CRFHead, Head
from bert_tasks.encoder.packing import PackedBatch, group_rows
from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.model.fixed import FixedModel
from bert_tasks.model.pretrained import CheckpointFolder, stated_task
from bert_tasks.model.task_model import TaskModel
from bert_tasks.storage import os_error_message, sha256
from bert_tasks.tasks.base import PredictionT, Task
from bert_tasks.variables import disable_telemetry

if TYPE_CHECKING:
    import onnx
    import onnxruntime

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
OPSET = 20  # the first with Gelu
RECTANGLE_TOKENS = 512
LIBRARIES = ("onnx", "onnxruntime", "onnxscript")
GRAPH, RECORD = "model.onnx", "export.json"
_MAX_RECORD_BYTES = 2**20
# Settings that the graph depends on.
_FIXED = frozenset({"crf", "labels", "pooling", "problem_type"})

# Message -> its fields that can contain a tensor, by number (onnx.proto of ONNX 1.22); other fields are skipped.
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


def external_tensor(content: bytes) -> str | None:
    """Searches an ONNX file for a tensor whose values are in another file, which onnxruntime would read from any path.

    Args:
        content: the ONNX file.

    Returns:
        The name of such a tensor, or None.

    Raises:
        ValueError: the content is not an ONNX model: it is truncated, damaged or something else.
    """
    waiting = [("model", memoryview(content))]
    while waiting:
        kind, message = waiting.pop()
        name, is_external = "", False
        for number, value in fields(message):
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


class _PaddedCall(nn.Module):
    """The padded call of a model, with the inputs and outputs of the graph only."""

    def __init__(self, model: TaskModel) -> None:
        super().__init__()
        self.model = model
        self.splits = len(output_names(model)) > 1

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        found = self.model(input_ids, attention_mask, token_type_ids)
        # Of tokens, and of pairs of sentences, which no prediction reads.
        logits: Tensor = found[0] if isinstance(found, tuple) else found
        return logits.unbind(-1) if self.splits else logits


def input_names(config: EncoderConfig) -> tuple[str, ...]:
    """The names that transformers uses: ``token_type_ids`` only if the model has more than one segment."""
    return INPUTS if config.type_vocab_size > 1 else INPUTS[:2]


def output_names(model: TaskModel) -> tuple[str, ...]:
    """The names that transformers uses for a model with this head."""
    return ("start_logits", "end_logits") if model.task.hf_head == "span" else ("logits",)


def check_weights(model: TaskModel) -> None:
    """Refuses a model that is exported already, or an ensemble.

    Raises:
        UsageError: it has no weights of its own.
    """
    if model.no_weights_reason:
        raise UsageError(f"it cannot be converted: {model.no_weights_reason}")


def exported_graph(model: TaskModel) -> "onnx.ModelProto":
    """The float32 graph of a model's padded call, with free batch size and length.

    Its inputs are ``input_names``, each int64 ``[B, T]``. Its outputs are ``output_names``: logits ``[B, L]``, or
    ``[B, T, L]`` with zeros at padding, or for spans two tensors ``[B, T]``. For a CRF the logits are the emissions;
    the transitions stay with the head. Logits of pairs of sentences are left out. The model is not changed.

    Raises:
        UsageError: the ``export`` extra is not installed, or the model is an exported one.
    """
    check_libraries()
    check_weights(model)
    inputs, outputs = input_names(model.config), output_names(model)
    mask = torch.ones(2, 7, dtype=torch.int64)  # any sizes but 0 and 1, which the exporter treats as fixed
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
    sizes = [size.dim_param for size in graph.graph.input[0].type.tensor_type.shape.dim]
    names = dict(zip(sizes, ("batch", "sequence"), strict=True))
    for value in (*graph.graph.input, *graph.graph.output):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param in names:
                size.dim_param = names[size.dim_param]
    # The metadata of nodes contain paths of this machine.
    for part in (graph, graph.graph, *graph.graph.node, *graph.graph.input, *graph.graph.output, *graph.functions):
        del part.metadata_props[:]
    for weights in graph.graph.initializer:
        del weights.metadata_props[:]
    del graph.graph.value_info[:]  # intermediate shapes, which are wrong after the quantizer has transposed weights
    return graph


def check_int8(model: TaskModel) -> None:
    """Refuses a model that cannot be quantized.

    Raises:
        UsageError: its head multiplies with the word embeddings, of which the quantizer makes a graph that is wrong.
    """
    if model.head.reads_embeddings:
        raise UsageError(
            f"int8 is not supported for {model.task.name}: the weights of its head are the word embeddings; use float32"
        )


def quantized_graph(graph: "onnx.ModelProto", *, weight_bits: Literal[7, 8] = 7) -> bytes:
    """The graph with int8 weights and dynamically quantized activations, by onnxruntime's quantizer.

    Weights have one scale per output channel, and activations one per token: of the settings that were tried, this
    changed the fewest labels (docs/performance.md). Embeddings, norms, softmax, the products of queries, keys and
    values, and the head stay in float32. What remains is one range for a padded batch, so a row's scores depend a
    little on the other rows.

    Args:
        graph: in float32.
        weight_bits: 8 are for processors with VNNI; on others intermediate sums of 16 bits would overflow.

    Raises:
        UsageError: the quantizer's temporary files cannot be written.
    """
    quantization = import_onnxruntime("onnxruntime.quantization")
    # The products of the head, also under the names that the quantizer gives them first.
    head = [node.name for node in graph.graph.node if any(name.startswith("model.head.") for name in node.input)]
    try:
        with TemporaryDirectory() as folder, _quiet():
            path = Path(folder) / "int8.onnx"
            quantization.quantize_dynamic(
                _with_token_scales(graph, excluded=head),
                path,
                op_types_to_quantize=["MatMul", "Gemm"],
                per_channel=True,
                reduce_range=weight_bits == 7,
                weight_type=quantization.QuantType.QInt8,
                nodes_to_exclude=[*head, *(f"{name}_MatMul" for name in head)],
            )
            return path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"int8 needs temporary files of about {2 * graph.ByteSize()} bytes, which cannot be written "
            f"({os_error_message(error)}): free some space there, or set TMPDIR to another folder"
        ) from None


def _with_token_scales(graph: "onnx.ModelProto", *, excluded: Collection[str]) -> "onnx.ModelProto":
    """An equivalent graph that divides the activations of each token by their largest magnitude before a product.

    The quantizer gives all tokens of a product one scale, and some have activations that are many times as large as
    those of others, for which few of the 256 steps would be left. The quotients ``[..., I]`` of every token have
    magnitudes up to 1. The product ``[..., O]`` is multiplied by the divisor ``[..., 1]`` before the bias is added.

    A ``Gemm`` becomes a ``MatMul`` with the transposed weight: the quantizer would transpose the weight itself, once
    for each product, and layers may share it.

    Args:
        graph: as ``exported_graph`` makes it; it is not changed.
        excluded: the names of products that stay as they are.
    """
    helper, numpy_helper = import_module("onnx.helper"), import_module("onnx.numpy_helper")
    weights = {tensor.name: tensor for tensor in graph.graph.initializer}
    constants = {"last_axis": np.array([-1]), "least_divisor": np.array(np.finfo(np.float32).tiny)}
    nodes, transposed = [], set()
    for node in graph.graph.node:
        if node.op_type not in ("MatMul", "Gemm") or node.input[1] not in weights or node.name in excluded:
            nodes.append(node)
            continue
        (tokens, weight, *bias), (output,) = node.input, node.output
        if any(attribute.name == "transB" and attribute.i for attribute in node.attribute):
            transposed.add(weight)
            weight = f"{weight}_transposed"
        magnitudes, largest, divisor, quotients, product, scaled = (
            f"{output}_{part}" for part in ("magnitudes", "largest", "divisor", "quotients", "product", "scaled")
        )
        nodes += [
            helper.make_node("Abs", [tokens], [magnitudes]),
            helper.make_node("ReduceMax", [magnitudes, "last_axis"], [largest]),
            helper.make_node("Max", [largest, "least_divisor"], [divisor]),
            helper.make_node("Div", [tokens, divisor], [quotients]),
            helper.make_node("MatMul", [quotients, weight], [product], name=node.name),
            helper.make_node("Mul", [product, divisor], [scaled if bias else output]),
        ]
        if bias:
            nodes.append(helper.make_node("Add", [scaled, *bias], [output]))
    constants |= {f"{name}_transposed": numpy_helper.to_array(weights[name]).T for name in sorted(transposed)}
    result = type(graph)()
    result.CopyFrom(graph)
    del result.graph.node[:], result.graph.initializer[:]
    result.graph.node.extend(nodes)
    used = {name for node in nodes for name in node.input}
    result.graph.initializer.extend(tensor for name, tensor in weights.items() if name in used)
    result.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    return result


@dataclass(frozen=True, kw_only=True)
class GraphModel:
    """A graph in onnxruntime that takes a model's packed batches.

    Attributes:
        session: the graph, loaded.
        head: the head of the model, which states the tokens that are read.
        pad_token_id: the id of padding.
    """

    session: "onnxruntime.InferenceSession"
    head: Head
    pad_token_id: int

    @classmethod
    def of(cls, model: TaskModel, content: bytes) -> Self:
        """Loads a graph of this model, to be run on the CPU with torch's number of threads.

        Raises:
            CheckpointError: onnxruntime rejects it, or its inputs and outputs are not those of the model.
        """
        onnxruntime = import_onnxruntime()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        # Two batches may be computed at the same time, and a thread that waits in a loop would take the other's core.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 4  # errors are raised; log lines would show the names in a graph unescaped
        # Never onnxruntime's own format, which it would detect.
        options.add_session_config_entry("session.load_model_format", "ONNX")
        with _graph_errors("rejects"):
            # The fallback would try the same again, and print the reason on standard output.
            session = onnxruntime.InferenceSession(
                content, options, providers=["CPUExecutionProvider"], enable_fallback=0
            )
            checks = (
                ("inputs", session.get_inputs(), input_names(model.config), "tensor(int64)"),
                ("outputs", session.get_outputs(), output_names(model), "tensor(float)"),
            )
            for what, found, names, kind in checks:
                if [(value.name, value.type) for value in found] != [(name, kind) for name in names]:
                    given = ", ".join(shortened(f"{value.name} {value.type}") for value in found)
                    raise CheckpointError(
                        f"the graph's {what} are {given}, expected {', '.join(names)}, each {kind}: "
                        "export the model again"
                    )
        return cls(session=session, head=model.head, pad_token_id=model.config.pad_token_id)

    def packed_logits(self, batch: PackedBatch) -> Tensor:
        """As ``TaskModel.packed_logits``: logits ``[B, L]``, or ``[R, L]`` for the tokens that the head reads."""
        device = batch.input_ids.device
        batch = batch.to(torch.device("cpu"))
        parts, row, per_token = [], 0, self.head.per_token
        wanted, order = batch.layout.gather_positions.sort()
        for lengths in rectangles(batch.layout.row_lengths):
            rows = slice(row, row + int(lengths.sum()))
            part = self.rectangle_logits(batch.input_ids[rows], batch.token_type_ids[rows], lengths)
            if per_token:  # only rows that are read are kept: over a vocabulary the logits of all are many
                first, end = torch.searchsorted(wanted, torch.tensor([row, rows.stop])).tolist()
                part = part.index_select(0, wanted[first:end] - row)
            parts.append(part)
            row = rows.stop
        places = order.argsort() if per_token else batch.layout.order
        logits = torch.cat(parts).index_select(0, places).to(device)
        return self.head.with_transitions(logits) if isinstance(self.head, CRFHead) else logits

    def rectangle_logits(self, input_ids: Tensor, token_type_ids: Tensor, lengths: Tensor) -> Tensor:
        """Pads sequences that lie one after another and runs them in one call: ``[N] -> [N, L]`` or ``[B, L]``.

        Raises:
            CheckpointError: the graph cannot be run, or its logits have another shape.
        """
        mask = torch.arange(int(lengths.max())) < lengths[:, None]  # [B, T]
        padded = torch.full(mask.shape, self.pad_token_id).masked_scatter_(mask, input_ids)
        segments = torch.zeros_like(padded).masked_scatter_(mask, token_type_ids)
        feed = dict(zip(INPUTS, (padded.numpy(), mask.long().numpy(), segments.numpy()), strict=True))
        taken = [node.name for node in self.session.get_inputs()]
        with _graph_errors("cannot run"):
            found = [torch.from_numpy(part) for part in self.session.run(None, {name: feed[name] for name in taken})]
        per_token, labels = self.head.per_token, self.head.num_logits
        shape = (*(mask.shape if per_token else mask.shape[:1]), *((labels,) if len(found) == 1 else ()))
        if any(part.shape != shape for part in found):
            raise CheckpointError(f"the graph returns logits of shape {tuple(found[0].shape)}, expected {shape}")
        logits = found[0] if len(found) == 1 else torch.stack(found, dim=-1)  # [B, L] or [B, T, L]
        return logits[mask] if per_token else logits


def rectangles(row_lengths: Tensor) -> Iterator[Tensor]:
    """The lengths of the sequences that are padded together, in row order; at most an eighth is padding.

    They are small, so that the output of a layer stays in the processor's cache.
    """
    groups, _ = group_rows(row_lengths.tolist())
    for group, lengths in zip(groups, torch.split(row_lengths, [group.sequences for group in groups]), strict=True):
        yield from torch.split(lengths, max(1, RECTANGLE_TOKENS // group.length))


@contextmanager
def _graph_errors(what: str) -> Iterator[None]:
    """Raises CheckpointError for errors of onnxruntime when it loads or runs a graph."""
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


def import_onnxruntime(module: str = "onnxruntime") -> Any:
    """Imports onnxruntime or one of its modules, with its telemetry disabled. The package imports it nowhere else.

    Without ``disable_telemetry`` its Linux wheels (1.29 and later) resolve a host name of Microsoft, write a device id
    to the user's cache folder and send events, even if HF_HUB_OFFLINE is set.
    """
    disable_telemetry()
    return import_module(module)


def check_libraries(
    names: Sequence[str] = LIBRARIES, *, extra: str = "export", purpose: str = "ONNX graphs and int8"
) -> None:
    """Raises UsageError if a library of an extra is not installed; to run a graph, onnxruntime is enough."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise UsageError(f"{', '.join(missing)} not installed, needed for {purpose}: pip install '.[{extra}]'")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences messages of the libraries that do not concern the user.

    They are about deprecated internals of torch, torchvision, and the preprocessing of graphs.
    """
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, message=".*isinstance.treespec, LeafSpec.*")
            warnings.filterwarnings("ignore", category=UserWarning, message=".*The axis name.*")
            yield
    finally:
        logging.disable(disabled)


def is_exported(name: str | Path) -> bool:
    """Whether the name of a model is a folder that an export wrote."""
    return (Path(os.path.expanduser(name)) / RECORD).is_file()


class ExportedModel(FixedModel[PredictionT]):
    """A model of a graph, which has no weights.

    Only the head is built: it states which tokens are read, and holds the transitions of a CRF, which are not in the
    graph.
    """

    no_weights_reason: ClassVar[str] = (
        "the model is already exported and has no weights; use the model that it was exported from"
    )

    def __init__(self, hf_config: Mapping[str, Any], task: Task[PredictionT], *, graph: bytes) -> None:
        super().__init__(hf_config, task)
        self.head = task.head(self.config)
        for parameter in self.head.parameters():  # unread values are the same in each copy
            parameter.detach().zero_()
        self.graph = GraphModel.of(self, graph)
        self.graph_sha256 = sha256(graph)
        self.eval()

    @classmethod
    def load(
        cls,
        name: str | Path,
        *,
        task: str | Task[PredictionT] | type[Task[PredictionT]] | None,
        revision: str | None,
        given: Mapping[str, Any],
        served_as: Callable[[type[Task]], type[Task]] | None = None,
    ) -> Self:
        """Loads an exported folder.

        Args:
            name, revision: see ``from_pretrained``.
            task: the class of a task that is not built in.
            given: fields of the task to change, except those that the graph fixes.
            served_as: not used, because the folder states its task.

        Raises:
            UsageError: onnxruntime is not installed, or the graph fixes a given setting.
            CheckpointError: a file is missing or damaged, or the files do not belong together.
        """
        check_libraries(("onnxruntime",))
        if fixed := sorted(given.keys() & _FIXED):
            raise UsageError(f"{name} is exported, which fixes {', '.join(fixed)}: export the model again to change it")
        path = resolve(name, revision=revision)
        graph, folder = _checked_graph(path), CheckpointFolder.open(path)
        model = cls(folder.hf_config, stated_task(folder, task, given), graph=graph)
        outputs = model.graph.session.get_outputs()
        found = (None, *outputs[0].shape)[-1] if len(outputs) == 1 else len(outputs)
        found, expected = found if isinstance(found, int) else None, model.head.num_logits
        if found != expected:
            raise CheckpointError(f"{path}: {GRAPH} returns {found} logits, but config.json states {expected} labels")
        if isinstance(model.head, CRFHead):  # its transitions are not in the graph
            tensors = read_head_tensors(path)
            transitions = None if tensors is None else tensors.get("head.transitions")
            if transitions is None or transitions.shape != model.head.transitions.shape:
                raise CheckpointError(f"{path}: task_head.safetensors is missing or does not belong to the stored task")
            checked = checked_tensors({"head.transitions": transitions}, {"head.transitions": torch.float32})
            model.load_state_dict(checked, strict=False)
        model.columns = folder.columns
        model.tokenizer = load_tokenizer(path, vocab_size=model.config.vocab_size)
        return model

    def packed_logits(self, batch: PackedBatch) -> Tensor:
        return self.graph.packed_logits(batch)


def _checked_graph(path: Path) -> bytes:
    """The content of the graph's file, after checking its digest and that it contains all of its tensors.

    Raises:
        CheckpointError: the file is damaged or was changed, or a tensor is in another file.
    """
    stated = read_json(checked_file(path, RECORD), max_bytes=_MAX_RECORD_BYTES).get("sha256")
    content = checked_file(path, GRAPH).read_bytes()
    if sha256(content) != stated:
        raise CheckpointError(
            f"{path / GRAPH}: damaged or changed, its sha256 is not that of {RECORD}: export the model again"
        )
    try:
        external = external_tensor(content)
    except ValueError as error:
        raise CheckpointError(f"{path / GRAPH}: not an ONNX graph ({error}): export the model again") from None
    if external is not None:
        raise CheckpointError(
            f"{path / GRAPH}: the values of the tensor {shortened(external)} are in another file (external data), "
            "which is refused, because a graph could name any file of this machine: export the model again"
        )
    return content
