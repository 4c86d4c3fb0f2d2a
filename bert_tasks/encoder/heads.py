"""Heads of tasks, and pooling over sequences.

A head selects the tokens that it reads from the last layer (``select``) and turns their states into logits
(``forward``). The families differ in data (``HeadConfig``). Logits over a vocabulary need much memory, so a head for
them returns a ``VocabularyOutput``, which computes them some rows at a time.

Shape legend: N tokens, B sequences, T padded length, H hidden, L labels, R tokens that a head reads, V vocabulary, E
width of the embeddings.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bert_tasks.encoder.config import EncoderConfig, TokenPooling
from bert_tasks.encoder.dropout import Dropout
from bert_tasks.encoder.layers import initialize
from bert_tasks.encoder.linear import ACTIVATIONS, Linear, linear, linear_activation
from bert_tasks.encoder.packing import Layout, Packed, Padded, Selection

# The field of a batch with a number in [0, 1) for each masked token, which decides what a generator puts there.
UNIFORM = "uniform"

_CHUNK_BYTES = 2**25  # of logits over the vocabulary that exist at once


class Head(nn.Module, ABC):
    """The layers of a task on the encoder. Your task may return any subclass.

    Attributes:
        per_token: The logits have one row for each token that is read, and not one for each sequence.
        reads_embeddings: The logits are products with a table over the vocabulary, the word embeddings or the head's
            decoder.
        label_dims: Maps the name of a parameter of single labels to its dimensions that count labels, so that loading
            can reorder the labels.
        output: The linear layer that makes the logits. A head without this layer overrides ``num_logits``.
        depth: Number of the encoder's layers that run before the head. None means all.
    """

    per_token: ClassVar[bool] = False
    reads_embeddings: ClassVar[bool] = False
    label_dims: ClassVar[dict[str, tuple[int, ...]]] = {"output.weight": (0,), "output.bias": (0,)}
    output: nn.Linear
    depth: int | None = None

    @property
    def num_logits(self) -> int:
        """The number of logits in a row. Export needs it."""
        return self.output.out_features

    @property
    def outputs_per_token(self) -> int:
        """The number of outputs per token. If it is large, prediction runs fewer tokens."""
        return 1

    @property
    def outside_graph(self) -> dict[str, Tensor]:
        """Returns the parameters that are not in an exported graph, by their names."""
        return {}

    def from_graph(self, logits: Tensor) -> Tensor:
        """Returns the output of ``forward`` for the logits of an exported graph."""
        return logits

    def select(self, layout: Layout) -> Selection | None:
        """Returns the tokens whose states ``forward`` reads. None means all."""
        return None

    @abstractmethod
    def forward(self, hidden: Tensor, layout: Layout, embeddings: Tensor) -> Any:
        """Returns the logits of the selected tokens, or a ``VocabularyOutput``.

        Args:
            hidden: ``[R, H]``, or ``[N, H]`` of all tokens.
            layout: Layout of the sequences.
            embeddings: ``[V, E]`` the encoder's word embeddings, for heads with ``reads_embeddings``. Other heads must
                not read them, because in training they may be the rows of some tokens only
                (``training/vocabulary.py``).
        """


def select_first_tokens(layout: Layout) -> Selection:
    """Selects each sequence's first real token, ``[B]``, also under left padding."""
    if isinstance(layout, Packed):
        return Selection(rows=layout.first_rows, first_tokens=True)
    starts = torch.arange(layout.batch, device=layout.mask.device) * layout.length
    return Selection(rows=starts + layout.mask.int().argmax(dim=1), first_tokens=True)


def reduce_rows(hidden: Tensor, layout: Layout, how: Literal["sum", "mean", "max"]) -> Tensor:
    """Reduces ``[N, H] -> [B, H]``, the sum, mean or maximum over each sequence."""
    if isinstance(layout, Packed):
        compact = torch.segment_reduce(hidden, how, lengths=layout.row_lengths, unsafe=True)
        return compact.index_select(0, layout.caller_order)
    rectangle, absent = hidden.view(*layout.mask.shape, -1), ~layout.mask[..., None]  # [B, T, H], [B, T, 1]
    if how == "max":
        return rectangle.masked_fill(absent, torch.finfo(hidden.dtype).min).amax(1)
    total = rectangle.masked_fill(absent, 0.0).sum(1)
    return total if how == "sum" else total / layout.mask.sum(1, keepdim=True).clamp(min=1)


def softmax_rows(scores: Tensor, layout: Layout) -> Tensor:
    """Computes softmax within each sequence, ``[N] -> [N]``. Padding gets 0."""
    if isinstance(layout, Packed):
        largest = torch.segment_reduce(scores.detach(), "max", lengths=layout.row_lengths, unsafe=True)  # [B]
        powers = (scores - largest.index_select(0, layout.sequence_of_row)).exp()
        sums = torch.segment_reduce(powers, "sum", lengths=layout.row_lengths, unsafe=True)
        return powers / sums.index_select(0, layout.sequence_of_row)
    rectangle = scores.view(layout.mask.shape).masked_fill(~layout.mask, torch.finfo(scores.dtype).min)
    return (rectangle.softmax(1) * layout.mask).flatten()


class SequenceHead(Head):
    """Head with one row of logits per sequence, as in the family's HF class.

    It reads the first token, or as ``HeadConfig.pooling`` says. In BERT and ALBERT ``dense`` is the pooler of the base
    model. In the other families it belongs to the classifier. UltraBERT has no such layer.

    Example:
        >>> SequenceHead(model.config, 3)
    """

    def __init__(self, config: EncoderConfig, num_labels: int) -> None:
        super().__init__()
        self.activation = config.head.activation
        self.pooling = config.head.pooling
        self.dropout = Dropout(config.head.sequence_dropout)
        self.input_dropout = Dropout(config.head.dense_dropout)
        has_dense, hidden = config.head.sequence_dense, config.hidden_size
        self.dense = Linear(hidden, hidden, bias=config.head_bias) if has_dense else None
        self.norm = _prediction_norm(config)
        self.output = Linear(config.hidden_size, num_labels)
        initialize(self, config)

    def select(self, layout: Layout) -> Selection | None:
        return select_first_tokens(layout) if self.pooling == "cls" else None

    def forward(self, hidden: Tensor, layout: Layout, embeddings: Tensor) -> Tensor:
        """``[B, H]`` (mean and late: ``[N, H]``) ``-> [B, L]``"""
        if self.pooling == "mean":
            hidden = reduce_rows(hidden, layout, "mean")
        if self.dense is not None:
            hidden = self.norm(ACTIVATIONS[self.activation](self.dense(self.input_dropout(hidden))))
        logits: Tensor = self.output(self.dropout(hidden))
        return reduce_rows(logits, layout, "mean") if self.pooling == "late" else logits


class ChoiceHead(SequenceHead):
    """Head with one logit for each choice, as in the family's HF class.

    Only dropout differs from the sequence head. In RoBERTa and MPNet, too, ``dense`` is the pooler of the base model.
    """

    label_dims: ClassVar[dict[str, tuple[int, ...]]] = {}

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config, 1)
        self.dropout = Dropout(config.head.choice_dropout)
        self.input_dropout = Dropout(config.head.choice_dense_dropout)


def _prediction_norm(config: EncoderConfig) -> nn.Module:
    """Returns the norm after a head's first linear layer, or the identity."""
    if not config.head.prediction_head:
        return nn.Identity()
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=config.head_bias)


class PoolingHead(Head):
    """Head with one row of logits per sequence, from a mean, maximum or attention."""

    def __init__(self, config: EncoderConfig, num_labels: int, *, pooling: TokenPooling) -> None:
        super().__init__()
        self.pooling: TokenPooling = pooling
        if pooling == "attention":
            self.score = Linear(config.hidden_size, 1)
        self.dropout = Dropout(config.head.sequence_dropout)
        self.output = Linear(config.hidden_size, num_labels)
        initialize(self, config)

    def forward(self, hidden: Tensor, layout: Layout, embeddings: Tensor) -> Tensor:
        """``[N, H] -> [B, L]``"""
        if self.pooling == "attention":
            weights = softmax_rows(self.score(hidden).squeeze(-1), layout)  # [N]
            pooled = reduce_rows(hidden * weights[:, None], layout, "sum")
        else:
            pooled = reduce_rows(hidden, layout, self.pooling)
        logits: Tensor = self.output(self.dropout(pooled))
        return logits


class HiddenStatesHead(Head):
    """The states of the tokens, for graphs whose users pool them. ``width`` is H."""

    per_token = True

    def __init__(self, *, width: int) -> None:
        super().__init__()
        self.width = width

    @property
    def num_logits(self) -> int:
        return self.width

    def forward(self, hidden: Tensor, layout: Layout, embeddings: Tensor) -> Tensor:
        """``[N, H] -> [N, H]``"""
        return hidden


class EmbeddingHead(Head):
    """One vector per sequence from the states of its tokens, without parameters.

    Args:
        width: Length of a vector, H.
        depth: Number of layers that run before the states are read. 0 means the embeddings of the tokens.
    """

    def __init__(self, *, width: int, pooling: Literal["mean", "cls", "max"], depth: int) -> None:
        super().__init__()
        self.width, self.pooling, self.depth = width, pooling, depth

    @property
    def num_logits(self) -> int:
        return self.width

    def select(self, layout: Layout) -> Selection | None:
        return select_first_tokens(layout) if self.pooling == "cls" and self.depth else None

    def forward(self, hidden: Tensor, layout: Layout, embeddings: Tensor) -> Tensor:
        """``[N, H]`` (cls of a layer: ``[B, H]``) ``-> [B, H]``"""
        if self.pooling != "cls":
            hidden = reduce_rows(hidden, layout, self.pooling)
        elif not self.depth:
            hidden = hidden.index_select(0, select_first_tokens(layout).rows)
        return hidden


class PerTokenHead(Head):
    """Logits for each token that is read, for tags (L labels) and spans (start and end).

    They come out sequence after sequence in the caller's order, whatever the order of the rows.

    Example:
        >>> PerTokenHead(model.config, 3, dropout=0.1)
    """

    per_token = True
    dense: Linear | None

    def __init__(self, config: EncoderConfig, num_labels: int, *, dropout: float) -> None:
        super().__init__()
        hidden, self.activation = config.hidden_size, config.head.activation
        self.dense = Linear(hidden, hidden, bias=config.head_bias) if config.head.prediction_head else None
        self.norm = _prediction_norm(config)
        self.dropout = Dropout(dropout)
        self.output = Linear(config.hidden_size, num_labels)
        initialize(self, config)

    def select(self, layout: Layout) -> Selection | None:
        return Selection(rows=layout.gather_positions) if isinstance(layout, Packed) else None

    def forward(self, hidden: Tensor, layout: Layout, embeddings: Tensor) -> Tensor:
        """``[R, H] -> [R, L]``"""
        if self.dense is not None:
            hidden = self.norm(linear_activation(self.dense, hidden, self.activation))
        logits: Tensor = self.output(self.dropout(hidden))
        return logits


class CRFHead(PerTokenHead):
    """Head with a linear-chain CRF over the words.

    The logits of a word depend on the label of the word before. Row 0 of ``transitions [L + 2, L]`` scores a label at
    the start of a sequence, row i + 1 a label after label i, and the last row a label at the end.
    """

    label_dims: ClassVar[dict[str, tuple[int, ...]]] = {**PerTokenHead.label_dims, "transitions": (0, 1)}

    def __init__(self, config: EncoderConfig, num_labels: int, *, dropout: float) -> None:
        super().__init__(config, num_labels, dropout=dropout)
        self.transitions = nn.Parameter(torch.zeros(num_labels + 2, num_labels))

    def forward(self, hidden: Tensor, layout: Layout, embeddings: Tensor) -> Tensor:
        """Returns ``with_transitions`` of ``[R, H]``, or padded emissions ``[N, L]``."""
        emissions = super().forward(hidden, layout, embeddings)  # [R, L]
        return emissions if isinstance(layout, Padded) else self.with_transitions(emissions)

    @property
    def outputs_per_token(self) -> int:
        return self.transitions.numel()

    @property
    def outside_graph(self) -> dict[str, Tensor]:
        return {"transitions": self.transitions}

    def from_graph(self, logits: Tensor) -> Tensor:
        return self.with_transitions(logits)

    def with_transitions(self, emissions: Tensor) -> Tensor:
        """Computes the matrices that crf.py reads, ``[R, L] -> [R, L + 2, L]``.

        A word's matrix holds the score that each label adds to a path. The rows stand for the first word, for the word
        after each label, and (without the emission) for the last word.
        """
        within = emissions[:, None, :] + self.transitions[:-1]  # [R, L + 1, L]
        ends = self.transitions[-1:].expand(emissions.shape[0], 1, -1)  # [R, 1, L]
        return torch.cat([within, ends], dim=1)


class ReplacedTokenHead(PerTokenHead):
    """Head with one logit for each token (ELECTRA's discriminator)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config, 1, dropout=0.0)
        self.activation = config.hidden_act
        self.dense = Linear(config.hidden_size, config.hidden_size)
        initialize(self, config)


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadOutput:
    """The output of a head that is more than one tensor, with tensors' methods.

    Attributes:
        logit_fields: Names of the fields that hold logits, as tensors or further outputs.
    """

    logit_fields: ClassVar[tuple[str, ...]]

    @property
    def logit_parts(self) -> "dict[str, Any]":
        return {name: getattr(self, name) for name in self.logit_fields}

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(self, self.logit_fields[0]).dtype
        return dtype

    @property
    def device(self) -> torch.device:
        device: torch.device = getattr(self, self.logit_fields[0]).device
        return device

    def float(self) -> Self:
        return replace(self, **{name: logits.float() for name, logits in self.logit_parts.items()})

    def double(self) -> Self:
        return replace(self, **{name: logits.double() for name, logits in self.logit_parts.items()})

    def isfinite(self) -> Tensor:
        """Returns True for each part that is finite."""
        return torch.stack([logits.isfinite().all() for logits in self.logit_parts.values()])


@dataclass(frozen=True, kw_only=True, eq=False)
class VocabularyOutput(HeadOutput):
    """The logits of R tokens over the vocabulary, computed some rows at a time.

    ``[R, V]`` need not exist at once. For 600 masked tokens and 30,000 words it takes 72 MB, and training would keep
    several copies.

    Attributes:
        hidden: ``[R, E]`` the states to multiply with the table, in the precision of the product.
        table: ``[V, E]`` the word embeddings, or the decoder of the head. None means that ``hidden`` holds the logits,
            for example of an exported graph.
        bias: ``[V]``, or None.
        precision: The dtype of the logits after the product. Softmax is computed in it.
    """

    logit_fields: ClassVar[tuple[str, ...]] = ("hidden",)
    hidden: Tensor
    table: Tensor | None
    bias: Tensor | None
    precision: torch.dtype

    @classmethod
    def of_logits(cls, logits: Tensor) -> Self:
        """Returns the output for computed logits ``[R, V]``, which have no gradient."""
        return cls(hidden=logits, table=None, bias=None, precision=logits.dtype)

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Joins the rows of several outputs of one head, at least one."""
        return replace(parts[0], hidden=torch.cat([output.hidden for output in parts]))

    @property
    def dtype(self) -> torch.dtype:
        return self.precision

    def __len__(self) -> int:
        return len(self.hidden)

    def float(self) -> Self:
        return replace(self, precision=torch.float32)

    def double(self) -> Self:
        return replace(self, precision=torch.float64)

    def split(self, counts: Sequence[int]) -> tuple[Self, ...]:
        """Returns outputs with these numbers of rows."""
        return tuple(replace(self, hidden=hidden) for hidden in torch.split(self.hidden, list(counts)))

    @property
    def chunk_rows(self) -> int:
        """The number of rows whose logits exist at once."""
        width = self.hidden.shape[1] if self.table is None else len(self.table)
        return max(1, _CHUNK_BYTES // (width * self.dtype.itemsize))

    def logits(self) -> Tensor:
        """Computes all logits, ``[R, V]``."""
        return self._of_rows(self.hidden)

    def log_softmax(self) -> Iterator[Tensor]:
        """Yields the logarithms of all probabilities, ``[chunk_rows, V]`` at a time."""
        for rows in torch.split(self.hidden, self.chunk_rows):
            yield self._of_rows(rows).log_softmax(dim=1)

    def top_k(self, k: int) -> tuple[Tensor, Tensor]:
        """Returns the k highest probabilities of each row and their ids, ``[R, k]`` each."""
        best = [rows.topk(k, dim=1) for rows in self.log_softmax()]
        return torch.cat([top.values for top in best]).exp(), torch.cat([top.indices for top in best])

    def sample(self, uniforms: Tensor) -> Tensor:
        """Draws an id for each row by inversion, from ``[R]`` numbers in [0, 1)."""
        drawn = []
        for rows, shares in zip(self.log_softmax(), torch.split(uniforms, self.chunk_rows), strict=True):
            sums = rows.double().exp().cumsum(dim=1)
            limits = shares.double().unsqueeze(1) * sums.narrow(1, -1, 1)
            drawn.append((sums <= limits).sum(dim=1).clamp(max=sums.shape[1] - 1))
        return torch.cat(drawn)

    def log_probabilities(self, ids: Tensor) -> Tensor:
        """Returns the logarithm of the probability of one id in each row, ``[R] -> [R]``."""
        pairs = zip(self.log_softmax(), torch.split(ids, self.chunk_rows), strict=True)
        return torch.cat([rows.gather(1, labels.unsqueeze(1)).squeeze(1) for rows, labels in pairs])

    def cross_entropy(self, labels: Tensor) -> Tensor:
        """Returns the sum of the cross entropies of all rows, with its gradients.

        Args:
            labels: ``[R]`` int64, the id that each row should have predicted.
        """
        if self.table is None:
            return -self.log_probabilities(labels).sum()
        return _cross_entropy(
            self.hidden, self.table, self.bias, labels, self.dtype, self.chunk_rows, torch.is_grad_enabled()
        )

    def _of_rows(self, rows: Tensor) -> Tensor:
        if self.table is None:
            return rows.to(self.dtype)
        bias = None if self.bias is None else self.bias.to(rows.dtype)
        return linear(rows, self.table.to(rows.dtype), bias).to(self.dtype)


class _CrossEntropy(torch.autograd.Function):
    """Sum of cross entropies over a vocabulary, computed for some rows at a time.

    The forward pass computes the gradients, too, because the gradients of a sum are known up to the factor that the
    backward pass gets. So no product is computed twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        table: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        dtype: torch.dtype,
        chunk: int,
        with_gradients: bool,
    ) -> Tensor:
        weight, shift = table.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        total = hidden.new_zeros((), dtype=dtype)
        of_hidden: list[Tensor] = []
        of_table = of_bias = None
        for rows, targets in zip(torch.split(hidden, chunk), torch.split(labels.unsqueeze(1), chunk), strict=True):
            scores = linear(rows, weight, shift).to(dtype)  # [chunk, V]
            scores.sub_(scores.amax(dim=1, keepdim=True))
            of_labels = scores.gather(1, targets)
            sums = scores.exp_().sum(dim=1, keepdim=True)  # in place, because a chunk of logits is large
            total += (sums.log() - of_labels).sum()
            if not with_gradients:
                continue
            excess = scores.div_(sums)  # the probabilities, minus 1 for the label
            excess.scatter_add_(1, targets, excess.new_full((), -1.0).expand(len(rows), 1))
            excess = excess.to(hidden.dtype)
            of_hidden.append(linear(excess, weight.t(), None))
            products = linear(excess.t(), rows.t(), None).to(table.dtype)
            of_table = products if of_table is None else of_table.add_(products)
            if bias is not None:
                of_chunk = excess.sum(0).to(bias.dtype)
                of_bias = of_chunk if of_bias is None else of_bias.add_(of_chunk)
        if with_gradients:
            ctx.save_for_backward(torch.cat(of_hidden), of_table, of_bias)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # In place, because one gradient is as large as the table. A second pass over the same graph is an error.
        parts = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        return (*(grad.mul_(gradient.to(grad.dtype)) if needed else None for grad, needed in parts), *(None,) * 4)


_cross_entropy: Callable[..., Tensor] = _CrossEntropy.apply


class VocabularyHead(Head):
    """Head with logits over the vocabulary for each token that is read.

    A tied decoder is the table of word embeddings with a separate bias. Otherwise the decoder is a table of the head
    (RemBERT, EuroBERT). The layers before it are a linear layer and a norm in BERT, none in EuroBERT, and two linear
    layers in UltraBERT, each with the activation.
    """

    per_token = True
    reads_embeddings = True
    label_dims: ClassVar[dict[str, tuple[int, ...]]] = {}

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width = config.embedding_size if config.output_embedding_size is None else config.output_embedding_size
        shape, inner = config.head, config.prediction_head_size
        self.vocab_size, self.activation = config.vocab_size, shape.vocabulary_activation
        self.inner = None if inner is None else Linear(config.hidden_size, inner, bias=config.head_bias)
        self.dense: Linear | None = None
        if shape.vocabulary_dense:
            self.dense = Linear(config.hidden_size if inner is None else inner, width, bias=config.head_bias)
        self.norm: nn.Module = nn.Identity()
        if shape.vocabulary_norm:
            self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps, bias=config.head_bias)
        self.decoder: nn.Linear | None = None
        if config.output_embedding_size is not None:
            self.decoder = nn.Linear(width, config.vocab_size, bias=False)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size)) if shape.vocabulary_bias else None
        initialize(self, config)

    @property
    def num_logits(self) -> int:
        return self.vocab_size

    def select(self, layout: Layout) -> Selection | None:
        return Selection(rows=layout.gather_positions) if isinstance(layout, Packed) else None

    def forward(self, hidden: Tensor, layout: Layout, embeddings: Tensor) -> Any:
        """Returns the output for ``[R, H]``, or logits ``[N, V]`` for a padded layout."""
        output = self.output_of(hidden, embeddings)
        return output.logits() if isinstance(layout, Padded) else output

    def output_of(self, hidden: Tensor, embeddings: Tensor) -> VocabularyOutput:
        """Returns the output of R rows for ``[R, H]``."""
        for layer in (self.inner, self.dense):
            if layer is not None:
                hidden = linear_activation(layer, hidden, self.activation)
        states = self.norm(hidden)
        device = states.device.type
        has_autocast = device in ("cpu", "cuda") and torch.is_autocast_enabled(device)
        if has_autocast and torch.get_autocast_dtype(device) == torch.bfloat16:
            states = states.bfloat16()  # layer norm may leave float32, in which the product takes longer
        table = embeddings if self.decoder is None else self.decoder.weight
        return VocabularyOutput(hidden=states, table=table, bias=self.bias, precision=states.dtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class PretrainingOutput(HeadOutput):
    """The logits of masked tokens and of pairs.

    Attributes:
        vocabulary: Logits of R tokens over the vocabulary.
        pairs: ``[B, 2]``, or ``[2]`` for one sequence.
    """

    logit_fields: ClassVar[tuple[str, ...]] = ("pairs", "vocabulary")
    vocabulary: VocabularyOutput
    pairs: Tensor

    def split(self, counts: Sequence[int]) -> tuple[Self, ...]:
        """Returns the tokens and the pair of each sequence."""
        parts = zip(self.vocabulary.split(counts), self.pairs.unbind(), strict=True)
        return tuple(replace(self, vocabulary=tokens, pairs=pair) for tokens, pair in parts)


class PretrainingHead(VocabularyHead):
    """Head for masked tokens and pairs (BERT's next and ALBERT's swapped sentences)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.pooler = Linear(config.hidden_size, config.hidden_size)
        self.dropout = Dropout(config.head.pair_dropout)
        self.pair = Linear(config.hidden_size, 2)
        initialize(self, config)

    def select(self, layout: Layout) -> Selection | None:
        if isinstance(layout, Padded):
            return None
        return Selection(rows=torch.cat([layout.gather_positions, layout.first_rows]))

    def forward(self, hidden: Tensor, layout: Layout, embeddings: Tensor) -> Any:
        """Returns the output of ``[R + B, H]``, or padded ``[N, V]`` and ``[B, 2]``."""
        if isinstance(layout, Padded):
            first = hidden.index_select(0, select_first_tokens(layout).rows)
            return self.output_of(hidden, embeddings).logits(), self._pairs(first)
        tokens, first = torch.split(hidden, [len(hidden) - len(layout.lengths), len(layout.lengths)])
        return PretrainingOutput(vocabulary=self.output_of(tokens, embeddings), pairs=self._pairs(first))

    def _pairs(self, first: Tensor) -> Tensor:
        """``[B, H] -> [B, 2]``"""
        logits: Tensor = self.pair(self.dropout(torch.tanh(self.pooler(first))))
        return logits


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplacedTokenOutput(HeadOutput):
    """The logits of generator and discriminator for a batch.

    Attributes:
        logits: ``[N]`` logits of the discriminator for all tokens, in the caller's order of sequences.
        replaced: ``[N]`` 1 if the generator's token differs from the original, else 0.
        masked: ``[N]`` True if the generator chose the token.
        ids: ``[N]`` the ids that the discriminator read.
        generator: Output of the generator for the R masked tokens.
        lengths: Number of tokens of each sequence.
    """

    logit_fields: ClassVar[tuple[str, ...]] = ("logits", "generator")
    logits: Tensor
    replaced: Tensor
    masked: Tensor
    ids: Tensor
    generator: VocabularyOutput
    lengths: tuple[int, ...]

    def split(self, counts: Sequence[int]) -> tuple[Tensor, ...]:
        """Returns ``[T, 4]`` for each sequence, with logit, replaced, masked and id."""
        columns = [column.to(self.dtype) for column in (self.logits, self.replaced, self.masked, self.ids)]
        table = torch.stack(columns, dim=1)
        return torch.split(table, list(self.lengths))


def reordered(tensor: Tensor, order: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Moves label ``order[i]`` to index i. Start and end entries do not move."""
    for dim in dims:
        rim = (tensor.size(dim) - len(order)) // 2
        ends = torch.arange(tensor.size(dim))
        index = torch.cat([ends[:rim], order + rim, ends[len(order) + rim :]])
        tensor = tensor.index_select(dim, index)
    return tensor
