"""A graph that onnxruntime runs, and an exported folder as a model that predicts.

The graph takes padded rectangles, as all users of ONNX expect it, and the models of this package packed batches.
``GraphModel`` translates between the two. The classes of exported models have the methods of ``TaskModel`` and
``MultiTaskModel``, so that prediction and evaluation need not know of them.

Shape legend: N tokens, B sequences, T padded length, L labels, R rows that a head reads.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from bert_tasks.checkpoints.files import checked_file, read_json
from bert_tasks.checkpoints.hub import origin
from bert_tasks.checkpoints.load import checked_tensors
from bert_tasks.checkpoints.save import read_head_tensors
from bert_tasks.data.issues import shortened
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.heads import Head
from bert_tasks.encoder.packing import Packed, PackedBatch, group_rows
from bert_tasks.environment import check_libraries
from bert_tasks.errors import CheckpointError, UsageError, argument
from bert_tasks.families import CONFIG_KEY
from bert_tasks.model.encoder_with_heads import EncoderWithHeads, check_parameters
from bert_tasks.model.loading import describe, open_checkpoint, replace_heads
from bert_tasks.model.multitask import AnyModel, MultiTaskModel, new_models, weights_of
from bert_tasks.model.pretrained import CheckpointFolder, stated_task, stored_heads
from bert_tasks.model.shared_heads import SharedLayout, SharedOutput
from bert_tasks.model.task_model import TaskModel, task_fields
from bert_tasks.outputs.prediction import PredictionT
from bert_tasks.storage import sha256
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.embedding import Embedding
from bert_tasks.tasks.several import head_key
from bert_tasks.variables import disable_telemetry

if TYPE_CHECKING:
    import onnxruntime

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
RECTANGLE_TOKENS = 512
RECORD = "export.json"
# What ``export`` writes -> its file, where transformers.js looks for the dtypes "fp32" and "q8"
# (https://huggingface.co/docs/transformers.js/guides/dtypes).
GRAPHS = {"onnx": "onnx/model.onnx", "int8": "onnx/model_quantized.onnx"}
_MAX_RECORD_BYTES = 2**20
# Settings that the graph depends on.
_FIXED = frozenset({"crf", "labels", "pooling", "problem_type"})


def names_other_file(content: bytes) -> bool:
    """Returns True if an ONNX file has the key "location" of values in another file.

    The search in the bytes needs no parser, and finds every such key because protobuf stores texts as they are.
    """
    return b"location" in content


def input_names(config: EncoderConfig) -> tuple[str, ...]:
    """Returns transformers' names, ``token_type_ids`` only for several segments."""
    if config.type_vocab_size > 1:
        return INPUTS
    return INPUTS[:2]


def output_names(model: AnyModel) -> tuple[str, ...]:
    """Returns transformers' names for a head, or ``NAME.logits`` for several tasks."""
    names: list[str] = []
    for name, task in model.tasks.items():
        names += [head_key(name, output) for output in _outputs_of(task)]
    return tuple(names)


def _outputs_of(task: Task) -> tuple[str, ...]:
    """Returns transformers' names of the outputs of the head of a task."""
    if isinstance(task, Embedding):
        return ("last_hidden_state",)
    if task.head_kind == "span":
        return ("start_logits", "end_logits")
    return ("logits",)


def outputs_by_head(names: Iterable[str]) -> list[list[str]]:
    """Returns the outputs of a graph, grouped by the tasks in their names, such as ``intent.logits``."""
    return [list(group) for _, group in groupby(names, key=lambda name: name.rpartition(".")[0])]


@dataclass(frozen=True, kw_only=True)
class GraphModel:
    """A graph in onnxruntime that takes a model's packed batches.

    Attributes:
        session: The session of onnxruntime, which holds the weights.
        outputs: The names of the graph's outputs, in order.
        heads: The heads of the model by the names of their tasks. Their weights are in the graph.
        pad_token_id: The id that fills rectangles.
    """

    session: "onnxruntime.InferenceSession"
    outputs: tuple[str, ...]
    heads: Mapping[str, Head]
    pad_token_id: int

    @classmethod
    def of(cls, model: AnyModel, content: bytes) -> Self:
        """Loads a graph of this model for the CPU, with torch's number of threads.

        Raises:
            CheckpointError: onnxruntime rejects it, or its inputs and outputs differ from the model's.
        """
        onnxruntime = import_onnxruntime()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        # Two batches may be computed at the same time, and a thread that waits in a loop would take the other's core.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 4  # errors are raised, and log lines would show names of a graph unescaped
        # Never onnxruntime's own format, which it would detect.
        options.add_session_config_entry("session.load_model_format", "ONNX")
        with _graph_errors("rejects"):
            # The fallback would do the same again, and print the reason on standard output.
            session = onnxruntime.InferenceSession(
                content, options, providers=["CPUExecutionProvider"], enable_fallback=0
            )
            checks = (
                ("inputs", session.get_inputs(), input_names(model.config), "tensor(int64)"),
                ("outputs", session.get_outputs(), output_names(model), "tensor(float)"),
            )
            for direction, values, names, dtype in checks:
                if [(value.name, value.type) for value in values] != [(name, dtype) for name in names]:
                    actual = ", ".join(shortened(f"{value.name} {value.type}") for value in values)
                    raise CheckpointError(
                        f"the graph's {direction} are {actual}, expected {', '.join(names)}, each {dtype}. "
                        "Export the model again"
                    )
        outputs, padding = output_names(model), model.config.pad_token_id
        heads = {name: of_head.head for name, of_head in model.heads.items()}
        return cls(session=session, outputs=outputs, heads=heads, pad_token_id=padding)

    def __call__(self, batch: PackedBatch) -> Any:
        """Returns logits ``[B, L]``, or ``[R, L]`` for the tokens that the head reads.

        Sequences are run in rectangles, in the order of their rows in the batch. The logits are then put into the order
        that the head gives its output: that of the caller's sequences, or of the tokens in ``gather_positions``.
        """
        device, layout = batch.input_ids.device, batch.layout
        batch = batch.to(torch.device("cpu"))
        heads = list(self.heads.values())
        chunks: list[list[Tensor]] = [[] for _ in heads]
        reads, row = _rows_read(heads, batch.layout), 0
        ordered = [read.sort() for read in reads]
        for lengths in rectangles(batch.layout.row_lengths):
            rows = slice(row, row + int(lengths.sum()))
            results = self.rectangle_logits(batch.input_ids[rows], batch.token_type_ids[rows], lengths)
            for head, (positions, _), logits, chunk in zip(heads, ordered, results, chunks, strict=True):
                if head.per_token:  # keeps only rows that are read, because logits over a vocabulary are large
                    first, end = torch.searchsorted(positions, torch.tensor([row, rows.stop])).tolist()
                    logits = logits.index_select(0, positions[first:end] - row)
                chunk.append(logits)
            row = rows.stop
        logits_of_heads: list[Tensor] = []
        for head, read, (_, order), chunk in zip(heads, reads, ordered, chunks, strict=True):
            # ``argsort`` of a permutation is its inverse, here of the one that has sorted the rows.
            places = order.argsort() if head.per_token else batch.layout.sequence_of_row.index_select(0, read)
            logits_of_heads.append(torch.cat(chunk).index_select(0, places).to(device))
        return self.output(logits_of_heads, layout)

    def output(self, logits: Sequence[Tensor], layout: Packed) -> Any:
        """Returns the output of the model's head for the logits of each of ``heads``."""
        results = {name: head.from_graph(each) for (name, head), each in zip(self.heads.items(), logits, strict=True)}
        if not isinstance(layout, SharedLayout):
            return next(iter(results.values()))
        return SharedOutput(logits=results, batches=layout.heads)

    def rectangle_logits(self, input_ids: Tensor, token_type_ids: Tensor, lengths: Tensor) -> list[Tensor]:
        """Pads sequences and runs them in one call.

        Args:
            input_ids, token_type_ids: ``[N]`` the tokens of all sequences behind one another.
            lengths: ``[B]`` the number of tokens of each sequence.

        Returns:
            The logits of each of ``heads``, ``[N, L]`` for a head with logits for each token, and else ``[B, L]``.

        Raises:
            CheckpointError: The graph cannot be run, or its logits have another shape.
        """
        mask = torch.arange(int(lengths.max())) < lengths[:, None]  # [B, T]
        # The true places of the mask, row by row, are the tokens in their order.
        padded = torch.full(mask.shape, self.pad_token_id).masked_scatter_(mask, input_ids)
        segments = torch.zeros_like(padded).masked_scatter_(mask, token_type_ids)
        feed = dict(zip(INPUTS, (padded.numpy(), mask.long().numpy(), segments.numpy()), strict=True))
        taken = [node.name for node in self.session.get_inputs()]
        with _graph_errors("cannot run"):
            arrays = self.session.run(None, {name: feed[name] for name in taken})
        results = dict(zip(self.outputs, map(torch.from_numpy, arrays), strict=True))
        logits_of_heads = []
        for head, names in zip(self.heads.values(), outputs_by_head(self.outputs), strict=True):
            outputs = [results[name] for name in names]
            shape = tuple(mask.shape) if head.per_token else (len(lengths),)
            if len(outputs) == 1:  # the logits of spans are two outputs without a dimension of labels
                shape = (*shape, head.num_logits)
            if any(output.shape != shape for output in outputs):
                raise CheckpointError(f"the graph returns logits of shape {tuple(outputs[0].shape)}, expected {shape}")
            logits = outputs[0]  # [B, L] or [B, T, L]
            if len(outputs) > 1:
                logits = torch.stack(outputs, dim=-1)
            if head.per_token:
                logits = logits[mask]  # [N, L]
            logits_of_heads.append(logits)
        return logits_of_heads


def _rows_read(heads: Sequence[Head], layout: Packed) -> list[Tensor]:
    """Returns the rows of the batch that each head reads, or the first rows of its sequences."""
    if not isinstance(layout, SharedLayout):
        return [_rows_of_head(head, layout) for head in heads]
    reads: list[Tensor] = []
    for head, of_head in zip(heads, layout.heads, strict=True):
        reads.append(of_head.rows.index_select(0, _rows_of_head(head, of_head.layout)))
    return reads


def _rows_of_head(head: Head, layout: Packed) -> Tensor:
    """Returns the rows of a layout that a head with this layout reads."""
    if head.per_token:
        return layout.gather_positions
    return layout.first_rows


def rectangles(row_lengths: Tensor) -> Iterator[Tensor]:
    """Returns the lengths of sequences to pad together, at most an eighth of padding.

    They are in row order. A rectangle is so small that the output of a layer stays in the processor's cache.
    """
    groups, _ = group_rows(row_lengths)
    lengths_of_groups = torch.split(row_lengths, [group.sequences for group in groups])
    for group, lengths in zip(groups, lengths_of_groups, strict=True):
        yield from torch.split(lengths, max(1, RECTANGLE_TOKENS // group.length))


@contextmanager
def _graph_errors(action: str) -> Iterator[None]:
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
        RuntimeError,  # a C++ exception without a class
        UnicodeDecodeError,  # in a message, or in the name of an input
    ) as error:
        raise CheckpointError(f"onnxruntime {action} the graph ({str(error).partition(chr(10))[0][:300]})") from None


def import_onnxruntime(module: str = "onnxruntime") -> Any:
    """Imports onnxruntime or one of its modules, with its telemetry disabled.

    The package imports it nowhere else. Its Linux wheels (1.29 and later) would resolve a host name of Microsoft, write
    a device id to the user's cache folder and send events.
    """
    disable_telemetry()
    return import_module(module)


def is_exported(name: str | Path) -> bool:
    """Returns True if the name of a model is a folder of an export."""
    return (Path(os.path.expanduser(name)) / RECORD).is_file()


ExportedT = TypeVar("ExportedT", bound="_Exported")
OneTaskT = TypeVar("OneTaskT", bound="ExportedModel[Any]")


class _Exported(EncoderWithHeads):
    """A model of a graph. Its heads select tokens, and hold the transitions of a CRF."""

    no_weights_reason: ClassVar[str] = (
        "the model is already exported and has no weights. Use the model that it was exported from"
    )
    graph: GraphModel
    graph_sha256: str

    def check_graph(self, folder: CheckpointFolder) -> None:
        """Checks that the graph belongs to the tasks, and loads the values that are outside the graph."""
        path, nodes = folder.path, {node.name: node for node in self.graph.session.get_outputs()}
        for head, names in zip(self.graph.heads.values(), outputs_by_head(self.graph.outputs), strict=True):
            expected = head.num_logits
            count: int | None = None
            if len(names) > 1:  # one output for each logit, the start and the end of a span
                count = len(names)
            else:
                shape = nodes[names[0]].shape
                # A free dimension of a graph has a name instead of a number.
                if shape and isinstance(shape[-1], int):
                    count = shape[-1]
            if count != expected:
                raise CheckpointError(
                    f"{path}: the graph returns {count} logits, but config.json states {expected} labels"
                )
        shapes = {f"head.{name}": tensor.shape for name, tensor in self.head.outside_graph.items()}
        if shapes:
            tensors = read_head_tensors(path)
            stored_shapes: dict[str, torch.Size] = {}
            if tensors is not None:
                stored_shapes = {name: tensors[name].shape for name in shapes if name in tensors}
            if tensors is None or stored_shapes != shapes:
                raise CheckpointError(f"{path}: task_head.safetensors is missing or does not belong to the stored task")
            checked = checked_tensors({name: tensors[name] for name in shapes}, dict.fromkeys(shapes, torch.float32))
            self.load_state_dict(checked, strict=False)

    @property
    def device(self) -> torch.device:
        """The device of the head, which is the CPU for a head without parameters (a decoder that is the table)."""
        parameter = next(self.parameters(), None)
        if parameter is None:
            return torch.device("cpu")
        return parameter.device

    def forward(self, input_ids: Tensor | PackedBatch, *_: Any, **__: Any) -> Any:
        if not isinstance(input_ids, PackedBatch):  # a caller with padded tensors can use the graph itself
            raise UsageError(f"it accepts packed batches, not padded tensors, because {self.no_weights_reason}")
        return self.graph(input_ids)

    def train(self, mode: bool = True) -> Self:
        if mode:
            check_parameters(self)  # raises, because there is nothing to train
        return super().train(mode)


class ExportedModel(_Exported, TaskModel[PredictionT]):
    """An exported model of one task."""

    def __init__(self, hf_config: Mapping[str, Any], task: Task[PredictionT], *, graph: bytes) -> None:
        with torch.device("meta"):  # the weights are in the graph
            super().__init__(hf_config, task)
        replace_heads(self)  # what a head does besides its products needs tensors with numbers
        _replace_encoder(self, graph)

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        task: str | Task[PredictionT] | type[Task[PredictionT]] | None = None,
        labels: Sequence[str] | None = None,
        revision: str | None = None,
        adapter: str | Path | None = None,
        **settings: Any,
    ) -> Self:
        """Opens an exported folder. See ``load_exported``."""
        if adapter is not None:
            raise UsageError(f"adapters cannot be added, because {cls.no_weights_reason}")
        return load_exported(cls, name, task=task, revision=revision, options=task_fields(settings, labels))


class _ExportedHead(_Exported, TaskModel[PredictionT]):
    """The model of one of several exported tasks, which knows its task but cannot run alone."""

    def forward(self, *_: Any, **__: Any) -> Any:
        raise UsageError("a task that was exported with others is predicted with them. Export this task alone")


class ExportedMultiTaskModel(_Exported, MultiTaskModel):
    """An exported model of several tasks, whose encoder is in the graph once."""

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        tasks: Mapping[str, Mapping[str, Any]] | None = None,
        revision: str | None = None,
    ) -> Self:
        """Opens an exported folder, which has its tasks.

        Raises:
            CheckpointError: The folder is damaged, or its graph belongs to another model.
            UsageError: ``tasks`` are set, or onnxruntime is not installed.
        """
        if tasks is not None:
            raise UsageError(f"the tasks cannot be others, because {cls.no_weights_reason}")
        folder = open_checkpoint(name, revision=revision)
        check_libraries(["onnxruntime"], extra="export", purpose="exported models")
        try:
            heads = stored_heads(folder)
            with torch.device("meta"):
                model = cls(new_models(folder.hf_config, heads, _ExportedHead), weights_of(heads))
        except UsageError as error:
            raise CheckpointError(f"{folder.path}/config.json, key {CONFIG_KEY}: {error}") from None
        replace_heads(model)
        _replace_encoder(model, _checked_graph(folder.path))
        return _opened(model, folder, name, revision)


def load_exported(
    make: type[OneTaskT],
    name: str | Path,
    *,
    task: str | Task[Any] | type[Task] | None,
    revision: str | None,
    options: Mapping[str, Any],
) -> OneTaskT:
    """Opens an exported model of one task. See ``load_one_task``.

    Raises:
        CheckpointError: The folder is damaged, or its graph belongs to another model.
        UsageError: A setting is fixed by the export, the folder has several tasks, or onnxruntime is not installed.
    """
    folder = open_checkpoint(name, revision=revision, task=task)
    check_libraries(["onnxruntime"], extra="export", purpose="exported models")
    if fixed := sorted(options.keys() & _FIXED):
        raise UsageError(f"{folder.path} is exported, which fixes {', '.join(fixed)}. Export the model again")
    if folder.head_name is not None:
        raise UsageError(
            f"{folder.path} is exported with all of its tasks. Remove {argument('task', folder.head_name)}, or "
            "export this task alone"
        )
    built = stated_task(folder, task, options)
    model = make(folder.hf_config, built, graph=_checked_graph(folder.path))
    return _opened(model, folder, name, revision)


def _opened(model: ExportedT, folder: CheckpointFolder, name: str | Path, revision: str | None) -> ExportedT:
    """Returns a model after a check of its graph, with what else is in its folder."""
    model.check_graph(folder)
    describe(model, folder, origin(name, folder.path, revision=revision))
    return model.eval()


def _replace_encoder(model: ExportedModel[Any] | ExportedMultiTaskModel, graph: bytes) -> None:
    """Replaces the encoder of a model by a graph."""
    del model.encoder
    # The graph computes the products of the heads, so these weights are never read. Without zeros they would differ
    # from one opened model to the next.
    for parameter in model.head.parameters():
        parameter.detach().zero_()
    model.graph = GraphModel.of(model, graph)
    model.graph_sha256 = sha256(graph)
    model.eval()


def _checked_graph(path: Path) -> bytes:
    """Returns the content of the graph's file, after a check of digest and tensors.

    The content is passed to onnxruntime as bytes, so that what was checked is what runs.
    """
    record = read_json(checked_file(path, RECORD), max_bytes=_MAX_RECORD_BYTES)
    name = next((file for form, file in GRAPHS.items() if form == record.get("to")), None)
    if name is None:
        raise CheckpointError(f"{path / RECORD}: 'to' is not one of {', '.join(GRAPHS)}. Export the model again")
    content = checked_file(path, name).read_bytes()
    if sha256(content) != record.get("sha256"):
        raise CheckpointError(
            f"{path / name}: damaged or changed, its sha256 is not the one in {RECORD}. Export the model again"
        )
    if names_other_file(content):
        raise CheckpointError(
            f"{path / name}: values of the graph may be in another file (external data), which is not supported, "
            "because a graph could name any file of this machine. Export the model again"
        )
    return content
