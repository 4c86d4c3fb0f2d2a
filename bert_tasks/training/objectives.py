"""What a run minimises: an objective gives the loss terms of a batch and names the model that is evaluated and saved.

Owns the interface between the training loop and the loss. ``Supervised``, the loss of the task, is what ``fit`` and
recipes use; ``Distillation`` adds the distance from a teacher.

Shape legend: N tokens; totals and counts of loss terms are 0-dimensional.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from bert_tasks.checkpoints.tokenizers import same_token_ids
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import UsageError
from bert_tasks.model.task_model import TaskModel
from bert_tasks.storage import sha256
from bert_tasks.tasks.base import Feature, FeatureKeys, LossTerm
from bert_tasks.tasks.distillation import DISTILLATION


class Objective(nn.Module, ABC):
    """A loss with the parameters it trains.

    The training loop calls ``forward`` through accelerate, optimises every parameter that requires a gradient, and
    stores all parameters in checkpoints. Every forward pass must use every trainable parameter, if only by adding 0
    times an output, because processes that train together wait for each other's gradients.

    Attributes:
        model: what is evaluated and saved.
    """

    def __init__(self, model: TaskModel) -> None:
        super().__init__()
        self.model = model

    @abstractmethod
    def forward(self, batch: PackedBatch) -> tuple[LossTerm, ...]:
        """The terms of the loss of a batch, the same terms in the same order for every batch.

        Accelerate runs it with automatic mixed precision: compute losses from float32 with autocast disabled.
        """

    def prepare(
        self, features: Sequence[Feature], keys: FeatureKeys, corpus: Sequence[Mapping[str, Any]]
    ) -> Sequence[Feature]:
        """The features as a step sees them; see ``Task.prepare``."""
        return self.model.task.prepare(features, keys, corpus, self.model.require_tokenizer())

    def counts(self, features: Sequence[Feature]) -> dict[str, float]:
        """The count of each loss term for prepared features; see ``Task.counts``."""
        return self.model.task.counts(features)

    @property
    def settings(self) -> dict[str, Any]:
        """Section -> the settings of a run that are this objective's, with which it can be resumed."""
        return {}

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for people about what is minimised."""
        return ()

    def parameter_depths(self) -> dict[str, int]:
        """Each parameter's depth, from which its learning rate follows; see ``TaskModel.parameter_depths``.

        Parameters outside the model are as deep as its head.
        """
        depths = {f"model.{name}": depth for name, depth in self.model.parameter_depths().items()}
        return {name: depths.get(name, max(depths.values())) for name, _ in self.named_parameters()}

    def checkpoint_parameters(self) -> dict[str, nn.Parameter]:
        """All parameters under their names in checkpoints: those of the model under their names in the model."""
        return {
            name.removeprefix("model.") if name.startswith("model.") else f"objective.{name}": parameter
            for name, parameter in self.named_parameters()
        }


class Supervised(Objective):
    """The loss of the model's task against the labels of the rows."""

    def forward(self, batch: PackedBatch) -> tuple[LossTerm, ...]:
        """See ``Objective.forward``."""
        logits = _float32(self.model(batch))
        with torch.autocast(logits.device.type, enabled=False):
            return self.model.task.loss(logits, batch)


class Distillation(Objective):
    """The loss of the task, and how far the student is from a teacher that reads the same inputs.

    The loss is ``(1 - weight)`` times that of the task plus ``weight`` times the distance of the logits, which also
    rows without labels have. The teacher is not trained, is no part of checkpoints, and stays in evaluation mode.

    Attributes:
        model: the student.
        teacher: a model of the same task; see ``check_teacher``.
    """

    def __init__(self, model: TaskModel, teacher: TaskModel, *, temperature: float = 2.0, weight: float = 0.5) -> None:
        """Checks that the teacher can teach the model.

        Args:
            model: the student.
            teacher: a trained model.
            temperature: logits of classes are divided by it.
            weight: the share of the teacher in the loss, from 0 to 1.

        Raises:
            UsageError: the teacher has another task, other labels or another tokenizer, or the task cannot learn from
                one.
        """
        super().__init__(model)
        check_teacher(teacher, model)
        self.temperature, self.weight = temperature, weight
        self._unregistered = (teacher.eval(),)

    @property
    def teacher(self) -> TaskModel:
        return self._unregistered[0]

    @property
    def settings(self) -> dict[str, Any]:
        """See ``Objective.settings``; the digest tells a changed teacher of the same name."""
        origin = {} if self.teacher.origin is None else dict(vars(self.teacher.origin))
        own = {"temperature": self.temperature, "weight": self.weight}
        return {"teacher": {**origin, "digest": weights_digest(self.teacher.state_dict()), **own}}

    @property
    def notes(self) -> tuple[str, ...]:
        """See ``Objective.notes``."""
        origin, parameters = self.teacher.origin, sum(tensor.numel() for tensor in self.teacher.parameters())
        own = sum(tensor.numel() for tensor in self.model.parameters())
        name = "in memory" if origin is None else origin.name
        return (
            f"teacher {name}: {parameters:,} parameters, {len(self.teacher.config.layer_order)} layers; "
            f"the model: {own:,} parameters, {len(self.model.config.layer_order)} layers",
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves the teacher with the student, to a device or a precision."""
        self.teacher._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch
        return self

    def forward(self, batch: PackedBatch) -> tuple[LossTerm, ...]:
        """See ``Objective.forward``."""
        student = _float32(self.model(batch))
        with torch.no_grad():
            teacher = _float32(self.teacher(self._of_teacher(batch)))
        task, weight = self.model.task, self.weight
        with torch.autocast(student.device.type, enabled=False):
            labelled = [replace(term, weight=term.weight * (1 - weight)) for term in task.loss(student, batch)]
            distilled = task.distillation_loss(student, teacher, batch, self.temperature)
        return (*labelled, replace(distilled, weight=weight))

    def prepare(
        self, features: Sequence[Feature], keys: FeatureKeys, corpus: Sequence[Mapping[str, Any]]
    ) -> Sequence[Feature]:
        """See ``Objective.prepare``; a student without segment ids, which ignores them, leaves them to the teacher."""
        prepared = super().prepare(features, keys, corpus)
        if self.model.config.type_vocab_size or not self.teacher.config.second_segment:
            return prepared
        separator = self.model.require_tokenizer().sep_token_id
        return [_with_segments(feature, separator) for feature in prepared]

    def counts(self, features: Sequence[Feature]) -> dict[str, float]:
        """See ``Objective.counts``."""
        return {**super().counts(features), DISTILLATION: self.model.task.distillation_count(features)}

    def _of_teacher(self, batch: PackedBatch) -> PackedBatch:
        """The batch with the position ids that the teacher's family gives the same tokens."""
        shift = self.teacher.config.position_offset - self.model.config.position_offset
        return replace(batch, position_ids=batch.position_ids + shift) if shift else batch


def check_teacher(teacher: TaskModel, model: TaskModel) -> None:
    """Refuses a teacher whose logits do not mean for the same tokens what the student's mean.

    Raises:
        UsageError: it is the student itself, has another task, other labels or another tokenizer, or reads fewer
            tokens.
    """
    task, other = model.task, teacher.task
    task.distillation_count([])
    if teacher is model:
        raise UsageError("the teacher is the model itself; load the teacher a second time")
    if type(task) is not type(other):
        raise UsageError(f"the teacher's task is {other.name}, the model's is {task.name}; both need the same task")
    if task.labels != other.labels:
        theirs, ours = (", ".join(one.labels) if one.labels else "none" for one in (other, task))
        raise UsageError(f"the teacher's labels are {theirs}, the model's are {ours}; both need the same in one order")
    if task.hf_config != other.hf_config:
        raise UsageError("the teacher's logits mean something else: its task has other settings, such as problem_type")
    if not same_token_ids(teacher.require_tokenizer(), model.require_tokenizer()):
        raise UsageError(
            "the teacher has another tokenizer than the model: both read the same token ids, so distil from a teacher "
            "with the model's tokenizer, or make the student of the teacher's layers"
        )
    if teacher.config.usable_length < task.max_length:
        raise UsageError(
            f"max_length = {task.max_length}, but the teacher has {teacher.config.usable_length} positions"
        )


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """The sha256 of tensors and of their names."""
    return sha256(
        part
        for name, tensor in sorted(tensors.items())
        for part in (name.encode(), tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    )


def _with_segments(feature: Feature, separator: int) -> Feature:
    """The feature with segment 1 for what follows the first separator, as in BERT."""
    ids = feature["input_ids"]
    first = ids.index(separator) + 1 if separator in ids else len(ids)
    return {**feature, "token_type_ids": [0] * first + [1] * (len(ids) - first)}


def _float32(logits: Tensor) -> Tensor:
    """Logits in the precision of losses; double precision stays."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
