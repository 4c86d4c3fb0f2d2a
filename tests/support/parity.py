"""Owns the comparison of this package's models with transformers' models that hold the same weights.

A difference is the largest absolute one at real tokens; transformers computes something at padding too, which is
nobody's business.

Shape legend: B sequences, T padded length, N tokens, X width of an output, L labels.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bert_tasks.checkpoints.load import match_weights
from bert_tasks.data.columns import Column, Row
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.heads import PerTokenHead
from bert_tasks.encoder.packing import PackedBatch, pack
from bert_tasks.families import encoder_config, family_of, parameter_map
from bert_tasks.model.encoder import Encoder
from bert_tasks.model.task_model import TaskModel
from bert_tasks.outputs.base import LossTerm, Output
from bert_tasks.outputs.features import Feature
from bert_tasks.outputs.prediction import Prediction
from bert_tasks.tasks import MultipleChoice, SequenceClassification, Task
from support.hf_models import Head, HFBatch

Model = Encoder | TaskModel


@dataclass(frozen=True, kw_only=True)
class Squares(Output[Prediction]):
    """The sum of the squares of all logits. Models only: it predicts nothing."""

    name: ClassVar[str] = "squares"
    column: ClassVar[None] = None
    primary_metric: ClassVar[str] = "accuracy"

    @property
    def size(self) -> int:
        return len(self.labels)

    def loss(self, logits: Tensor, batch: PackedBatch) -> tuple[LossTerm]:
        """The sum of squares: every token and every logit takes part."""
        return (LossTerm(name=self.name, total=logits.square().sum(), count=logits.new_full((), logits.shape[0])),)

    def counts(self, features: Sequence[Feature]) -> dict[str, float]:
        raise NotImplementedError("a batch is made of token ids here")

    def decode(
        self,
        compact: Sequence[Tensor],
        features: Sequence[Feature],
        rows: Sequence[Row],
        tokenizer: PreTrainedTokenizerBase,
    ) -> list[Prediction]:
        raise NotImplementedError("a batch is made of token ids here")

    def metrics(self, predictions: Sequence[Prediction], rows: Sequence[Row]) -> dict[str, float]:
        raise NotImplementedError("a batch is made of token ids here")


@dataclass(frozen=True, kw_only=True)
class RowTask(Task[Prediction]):
    """A head on every token, as transformers' token and span classes have it. Models only: it reads no rows."""

    name: ClassVar[str] = "rows"
    outputs: ClassVar[tuple[type[Output[Any]], ...]] = (Squares,)
    columns: ClassVar[tuple[Column, ...]] = ()
    kind: Literal["token", "span"] = "token"
    max_length: int = 48

    @property
    def head_kind(self) -> Literal["token", "span"]:
        return self.kind

    def head(self, config: EncoderConfig) -> PerTokenHead:
        dropout = config.head.token_dropout if self.kind == "token" else config.head.span_dropout
        return PerTokenHead(config, self.output.size, dropout=dropout)

    def features(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[Feature]:
        raise NotImplementedError("a batch is made of token ids here")


def task_for(head: Head) -> Task:
    """The task whose head equals transformers' class for ``head``, with the labels of ``hf_models.hf_model``."""
    if head == "sequence":
        return SequenceClassification.of(labels=("a", "b", "c"), max_length=48)
    if head == "choice":
        return MultipleChoice.of(max_length=48)
    if head == "token":
        return RowTask.of(kind="token", labels=("a", "b", "c"))
    return RowTask.of(kind="span", labels=("start", "end"))


def ours_from(hf_model: PreTrainedModel, head: Any, task: Task | None = None) -> Any:
    """Our model with the weights and the config of a transformers model, in evaluation mode; nothing is shared."""
    hf_config = hf_model.config.to_dict()
    family, config = family_of(hf_config), encoder_config(hf_config)
    tensors = hf_model.state_dict()
    pooler = head == "base" and any("pooler" in name for name in tensors)
    model: Model
    if head == "base":
        model = Encoder(hf_config, pooler=pooler)
    else:
        model = TaskModel(hf_config, task_for(head) if task is None else task)
    matched = match_weights(
        tensors,
        parameter_map(family, config, head=head, pooler=pooler),
        shapes={name: value.shape for name, value in model.state_dict().items()},
        family=family,
        head_may_be_new=False,
        dtype=hf_model.dtype,
    )
    model.load_state_dict(matched.tensors, assign=True)
    return model.eval()


def in_our_names(tensors: Mapping[str, Tensor], hf_model: PreTrainedModel, head: Any) -> dict[str, Tensor]:
    """Tensors of a transformers model, by its names (weights or gradients), under ours; without those not trained."""
    frozen = {name for name, parameter in hf_model.named_parameters() if not parameter.requires_grad}
    hf_config = hf_model.config.to_dict()
    names = parameter_map(family_of(hf_config), encoder_config(hf_config), head=head, pooler=False)
    trained = {ours: sources for ours, sources in names.items() if frozen.isdisjoint(sources)}
    return {ours: torch.cat([tensors[name] for name in sources]) for ours, sources in trained.items()}


def packed_batch(model: Model, batch: HFBatch, labels: Sequence[Sequence[float]] | None = None) -> PackedBatch:
    """The real tokens of a padded batch without padding; positions count from each sequence's first token."""
    real = [row.bool() for row in batch.attention_mask]
    return pack(
        [ids[mask].tolist() for ids, mask in zip(batch.input_ids, real, strict=True)],
        [types[mask].tolist() for types, mask in zip(batch.token_type_ids, real, strict=True)],
        position_offset=model.config.position_offset,
        labels=labels,
    )


def loss_curve(model: nn.Module, losses: Callable[[int], Tensor], *, steps: int) -> list[float]:
    """A plain loop: AdamW, linear decay to 0, gradients clipped to norm 1."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.01)
    schedule = LambdaLR(optimizer, lambda step: 1.0 - step / steps)
    curve = []
    for step in range(steps):
        loss = losses(step)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        curve.append(loss.item())
    return curve


def hf_output(hf_model: PreTrainedModel, batch: HFBatch, **inputs: Any) -> Tensor:
    """What transformers computes: ``[B, T, H]``, ``[B, L]`` or ``[B, T, L]`` (span: start and end side by side).

    The sequences of a model for multiple choice are the choices of one row.
    """
    arguments = batch.inputs(hf_model.config.model_type) | inputs
    if type(hf_model).__name__.endswith("MultipleChoice"):
        choices: Tensor = hf_model(**{name: tensor.unsqueeze(0) for name, tensor in arguments.items()}).logits
        return choices.transpose(0, 1)
    output = hf_model(**arguments)
    if "last_hidden_state" in output:
        hidden: Tensor = output.last_hidden_state
        return hidden
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    logits: Tensor = output.logits
    return logits


def shaped_output(model: Model, batch: HFBatch, **inputs: Any) -> Tensor:
    """The same from our HF-shaped call."""
    output: Tensor = model(batch.input_ids, batch.attention_mask, batch.token_type_ids, **inputs)
    return output


def packed_output(model: Model, batch: HFBatch) -> Tensor:
    """The same from our packed path, with rows put back into the rectangle and zeros at padding."""
    packed = packed_batch(model, batch).to(batch.input_ids.device)
    rows = packed_rows(model, packed)
    if isinstance(model, TaskModel) and not isinstance(model.head, PerTokenHead):
        return rows  # [B, L]
    rectangle = rows.new_zeros(*batch.input_ids.shape, rows.shape[-1])  # [B, T, X]
    in_order = rows if isinstance(model, TaskModel) else rows.index_select(0, packed.layout.gather_positions)
    for sequence, values in enumerate(in_order.split(list(packed.layout.lengths))):
        rectangle[sequence, batch.attention_mask[sequence].bool()] = values
    return rectangle


def packed_rows(model: Model, packed: PackedBatch) -> Tensor:
    """``[N, X]`` or ``[B, L]``: logits of a task model, last hidden states of an encoder."""
    if isinstance(model, TaskModel):
        logits: Tensor = model(packed)
        return logits
    hidden: Tensor = model.encoder(packed.input_ids, packed.position_ids, packed.token_type_ids, packed.layout)
    return hidden


def difference(theirs: Tensor, ours: Tensor, mask: Tensor) -> float:
    """The largest absolute difference of ``[B, L]`` outputs, or at the real tokens of ``[B, T, X]`` ones."""
    apart = (theirs.detach() - ours.detach()).abs()
    return float((apart if apart.dim() == 2 else apart[mask.bool()]).max())


@torch.no_grad()
def shaped_difference(hf_model: PreTrainedModel, model: Model, batch: HFBatch) -> float:
    return difference(hf_output(hf_model, batch), shaped_output(model, batch), batch.attention_mask)


@torch.no_grad()
def packed_difference(hf_model: PreTrainedModel, model: Model, batch: HFBatch) -> float:
    """For batches padded on the right: there transformers counts positions from each first token too."""
    return difference(hf_output(hf_model, batch), packed_output(model, batch), batch.attention_mask)
