"""The heads of several tasks on one encoder, and the batch that they share.

A sequence that several heads read is in the batch once, so that the encoder runs it once. The layout has for each head
its rows of the batch, and a packed batch of these rows with its labels. The head and its output then work as if there
were no other task.

Shape legend: N tokens of the batch, M tokens that one head's task reads, H hidden.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from bert_tasks.encoder.heads import Head, HeadOutput
from bert_tasks.encoder.packing import Layout, Packed, PackedBatch, Padded, Selection, pack
from bert_tasks.errors import UsageError
from bert_tasks.outputs.features import Feature
from bert_tasks.tasks.features import collate


@dataclass(frozen=True, kw_only=True)
class HeadBatch(PackedBatch):
    """The sequences that one head reads, with its labels.

    Attributes:
        rows: ``[M]`` the row of the shared batch that each of its rows is.
        numbers: The features of the shared batch that its sequences are. Empty if the batch has none for the head,
            which then reads the first sequence without labels.
    """

    rows: Tensor
    numbers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SharedLayout(Packed):
    """A layout with the batch of each head."""

    heads: tuple[HeadBatch, ...]


def share(features: Sequence[Feature], names: Sequence[str], *, position_offset: int, pad_groups: bool) -> PackedBatch:
    """Packs the features of these heads as ``collate`` does, but equal windows of a row only once.

    Args:
        features: The windows. Each has the name of its head.
        names: The names of all heads, also of those without a window here.
        position_offset, pad_groups: See ``pack``.
    """
    if len(names) == 1:  # every row is read, so nothing has to be gathered
        batch = collate(features, position_offset=position_offset, pad_groups=pad_groups)
        rows, every = torch.arange(len(batch.input_ids)), tuple(range(len(features)))
        whole = HeadBatch(**vars(batch), rows=rows, numbers=every)
        return replace(batch, layout=SharedLayout(**vars(batch.layout), heads=(whole,)))
    numbers: dict[tuple[Any, ...], int] = {}  # row, ids and segments of each sequence -> its number in the batch
    places = []  # the number of the sequence of each feature
    for feature in features:
        key = (feature["row"], tuple(feature["input_ids"]), tuple(feature["token_type_ids"]))
        places.append(numbers.setdefault(key, len(numbers)))
    ids = [list(input_ids) for _, input_ids, _ in numbers]
    types = [list(token_type_ids) for _, _, token_type_ids in numbers]
    batch = pack(ids, types, position_offset=position_offset, pad_groups=pad_groups)
    batches = []
    for name in names:
        members = tuple(number for number, feature in enumerate(features) if feature.get("head") == name)
        read = [features[number] for number in members]
        sequences_read = [places[number] for number in members]
        if not members:
            # The head then reads the first sequence without labels, so that its loss term is there with a count of 0.
            first = Feature(row=0, input_ids=features[0]["input_ids"], token_type_ids=features[0]["token_type_ids"])
            read, sequences_read = [first], [0]
        packed = collate(read, position_offset=position_offset, pad_groups=pad_groups)
        sequences = torch.tensor(sequences_read)
        layout = packed.layout
        # How far each sequence, in the order of the rows, is moved in the shared batch.
        moved = batch.layout.first_rows.index_select(0, sequences) - layout.first_rows
        in_row_order = torch.empty_like(moved).index_copy_(0, layout.caller_order, moved)
        rows = torch.arange(len(layout.sequence_of_row)) + in_row_order.repeat_interleave(layout.row_lengths)
        batches.append(HeadBatch(**vars(packed), rows=rows, numbers=members))
    return replace(batch, layout=SharedLayout(**vars(batch.layout), heads=tuple(batches)))


def features_of_head(
    name: str, numbers: Sequence[int], features: Sequence[Feature], compact: Sequence[Tensor]
) -> tuple[list[Feature], list[Tensor]]:
    """Returns the features of some rows that one head reads, and their compact logits, as ``Output.decode`` takes them.

    Args:
        name: The name of the head. Empty for an only head, whose features are returned as they are.
        numbers: The rows. They are numbered from 0 in this order.
        features: The features of all heads.
        compact: Their compact logits.
    """
    if not name:
        return list(features), list(compact)
    places = {number: place for place, number in enumerate(numbers)}
    of_head: list[Feature] = []
    logits: list[Tensor] = []
    for feature, each in zip(features, compact, strict=True):
        if feature.get("head") == name and feature["row"] in places:
            of_head.append({**feature, "row": places[feature["row"]]})
            logits.append(each)
    return of_head, logits


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedOutput(HeadOutput):
    """The logits of each head by task. A padded call has no ``batches``."""

    logits: Mapping[str, Any]
    batches: tuple[HeadBatch, ...]

    @property
    def parts(self) -> Mapping[str, Any]:
        return self.logits

    def to(self, dtype: torch.dtype) -> Self:
        return replace(self, logits={name: logits.to(dtype) for name, logits in self.logits.items()})


class SharedHeads(Head):
    """The heads of several tasks, which all take the last hidden states of one encoder as input."""

    label_dims: ClassVar[dict[str, tuple[int, ...]]] = {}

    def __init__(self, heads: Mapping[str, Head]) -> None:
        """Keeps the heads under the names of their tasks.

        Raises:
            UsageError: A head reads word embeddings or a layer before the last one, or torch cannot store its name.
        """
        super().__init__()
        for name, head in heads.items():
            if hasattr(nn.ModuleDict, name):  # a ModuleDict stores its modules as attributes, so "keys" would collide
                raise UsageError(f"tasks: torch has a use of its own for the name {name!r}. Choose another name")
            if head.reads_embeddings or head.depth is not None:
                raise UsageError(f"tasks: {name} reads more than the last layer and cannot be one of several tasks")
        self.heads = nn.ModuleDict(heads)

    @property
    def named_heads(self) -> list[tuple[str, Head]]:
        return [(name, head) for name, head in self.heads.items() if isinstance(head, Head)]

    @property
    def outside_graph(self) -> dict[str, Tensor]:
        outside: dict[str, Tensor] = {}
        for name, head in self.named_heads:
            for key, tensor in head.outside_graph.items():
                outside[f"heads.{name}.{key}"] = tensor
        return outside

    def select(self, layout: Layout) -> Selection | None:
        """Returns all tokens, or the tokens that a single head reads."""
        heads = self.named_heads
        if len(heads) > 1:
            return None
        _, head = heads[0]
        return head.select(layout)

    def forward(self, hidden: Tensor, layout: Layout, embeddings: Tensor) -> SharedOutput:
        """Returns the logits of each head for ``[N, H]``, or for ``[R, H]`` of one head."""
        if isinstance(layout, Padded):
            padded = {name: self._padded(head, hidden, layout, embeddings) for name, head in self.named_heads}
            return SharedOutput(logits=padded, batches=())
        if not isinstance(layout, SharedLayout):  # made by ``collate`` for one task instead of by ``share``
            raise UsageError("the batch is not packed for several tasks. Use one of the models of the tasks")
        logits = {}
        for (name, head), batch in zip(self.named_heads, layout.heads, strict=True):
            if len(layout.heads) == 1:  # the encoder has selected the rows already
                logits[name] = head(hidden, layout, embeddings)
                continue
            selection = head.select(batch.layout)
            rows = batch.rows if selection is None else batch.rows.index_select(0, selection.rows)
            logits[name] = head(hidden.index_select(0, rows), batch.layout, embeddings)
        return SharedOutput(logits=logits, batches=layout.heads)

    def _padded(self, head: Head, hidden: Tensor, layout: Padded, embeddings: Tensor) -> Tensor:
        """Returns a head's logits ``[B, L]``, or ``[B, T, L]`` with zeros at padding."""
        selection = head.select(layout) if len(self.heads) > 1 else None  # of one head, the encoder has selected them
        states = hidden if selection is None else hidden.index_select(0, selection.rows)
        logits: Tensor = head(states, layout, embeddings)
        if not head.per_token:
            return logits
        return logits.view(*layout.mask.shape, -1).masked_fill(~layout.mask[..., None], 0.0)
