"""A folder that ``bert-tasks export`` wrote, as a model that predicts: onnxruntime runs its graph in place of torch.

Prediction, evaluation and batching are those of any other model.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from bert_tasks.checkpoints.hub import resolve
from bert_tasks.checkpoints.load import checked_file, checked_tensors, read_json
from bert_tasks.checkpoints.save import read_head_tensors
from bert_tasks.checkpoints.tokenizers import load_tokenizer
from bert_tasks.data.problems import shortened
from bert_tasks.encoder.heads import CRFHead
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.model.onnx import GraphModel, check_libraries, external_tensor
from bert_tasks.model.pretrained import CheckpointFolder, stated_task
from bert_tasks.model.task_model import TaskModel
from bert_tasks.paths import is_file, with_home
from bert_tasks.storage import sha256
from bert_tasks.tasks.base import PredictionT, Task

GRAPH, RECORD = "model.onnx", "export.json"
_MAX_RECORD_BYTES = 2**20
# Settings that the graph depends on.
_FIXED = ("crf", "labels", "pooling", "problem_type")


def is_exported(name: str | Path) -> bool:
    """Whether the name of a model is a folder that an export wrote."""
    return is_file(with_home(name) / RECORD)


class ExportedModel(TaskModel[PredictionT]):
    """A model that predicts as ``TaskModel`` does, but cannot be trained or saved, because it has no weights.

    Only the head is built: it states which tokens are read, and holds the transitions of a CRF, which are not in the
    graph.
    """

    def __init__(self, hf_config: Mapping[str, Any], task: Task[PredictionT], *, graph: bytes, **options: Any) -> None:
        with torch.device("meta"):
            super().__init__(hf_config, task, **options)
        del self.stack
        self.head = task.head(self.config)
        for parameter in self.head.parameters():  # unread values are the same in each copy
            parameter.detach().zero_()
        self.graph = GraphModel.of(self, graph)
        self.graph_sha256 = sha256(graph)
        self.eval()

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        task: str | Task[PredictionT] | type[Task[PredictionT]] | None = None,
        labels: Sequence[str] | None = None,
        revision: str | None = None,
        **settings: Any,
    ) -> Self:
        """Loads an exported folder.

        Args:
            name: the folder.
            task: the class of a task that is not built in.
            labels: not accepted, because the graph fixes them.
            revision: not used for folders.
            settings: fields of the task to change, except those that the graph fixes.

        Raises:
            UsageError: onnxruntime is not installed, or the graph fixes a given setting.
            CheckpointError: a file is missing or damaged, or the files do not belong together.
        """
        check_libraries(("onnxruntime",))
        fixed = sorted({*settings, *(() if labels is None else ("labels",))}.intersection(_FIXED))
        if fixed:
            raise UsageError(f"{name} is exported, which fixes {', '.join(fixed)}: export the model again to change it")
        path = resolve(name, revision=revision)
        graph, folder = _checked_graph(path), CheckpointFolder.open(path)
        model = cls(folder.hf_config, stated_task(folder, task, settings), graph=graph)
        model._load_head(path)
        model.reading = folder.reading
        model.tokenizer = load_tokenizer(path, vocab_size=model.config.vocab_size)
        return model

    def _load_head(self, path: Path) -> None:
        """Checks the number of labels of the graph, and loads the transitions of a CRF."""
        found, expected = self.graph.labels, self.head.output.out_features
        if found != expected:
            raise CheckpointError(f"{path}: {GRAPH} returns {found} logits, but config.json states {expected} labels")
        if isinstance(self.head, CRFHead):
            tensors = read_head_tensors(path)
            transitions = None if tensors is None else tensors.get("head.transitions")
            if transitions is None or transitions.shape != self.head.transitions.shape:
                raise CheckpointError(f"{path}: task_head.safetensors is missing or does not belong to the stored task")
            checked = checked_tensors({"head.transitions": transitions}, {"head.transitions": torch.float32})
            self.load_state_dict(checked, strict=False)

    def packed_logits(self, batch: PackedBatch) -> Tensor:
        return self.graph.packed_logits(batch)

    def forward(self, input_ids: Tensor | PackedBatch, *_: Any, **__: Any) -> Tensor:
        if not isinstance(input_ids, PackedBatch):
            raise UsageError(f"an exported model takes packed batches; for padded tensors run {GRAPH} with onnxruntime")
        return self.packed_logits(input_ids)

    def train(self, mode: bool = True) -> Self:
        if mode:
            _refuse("trained")
        return super().train(mode)

    def save_pretrained(self, folder: str | Path) -> None:
        _refuse("saved: copy its folder")

    def restore(self, folder: str | Path) -> None:
        _refuse("given other weights")


def _refuse(what: str) -> NoReturn:
    raise UsageError(f"an exported model has no weights and cannot be {what}; use the model from which it was exported")


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
