"""Heads with logits over the vocabulary, for masked tokens and for pre-training with pairs.

Such logits need much memory, so a ``VocabularyOutput`` holds what they are made of and computes them some rows at a
time. Tasks ask it for the loss, the most probable words or a sample, and never see all logits at once.

Shape legend: N tokens, B sequences, H hidden, R tokens that a head reads, V vocabulary, E width of the embeddings.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.dropout import Dropout
from bert_tasks.encoder.heads.base import Head, HeadOutput
from bert_tasks.encoder.heads.pooled import select_first_tokens
from bert_tasks.encoder.layers import initialize
from bert_tasks.encoder.linear import Linear, linear, linear_activation
from bert_tasks.encoder.packing import Layout, Packed, Padded, Selection

_CHUNK_BYTES = 2**25  # of logits over the vocabulary that exist at once


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

    def to(self, dtype: torch.dtype) -> Self:
        return replace(self, precision=dtype)

    def split(self, counts: Sequence[int]) -> tuple[Self, ...]:
        """Returns outputs with these numbers of rows."""
        return tuple(replace(self, hidden=hidden) for hidden in torch.split(self.hidden, list(counts)))

    @property
    def chunk_rows(self) -> int:
        """The number of rows whose logits exist at once."""
        width = self.hidden.shape[1]
        if self.table is not None:
            width = len(self.table)
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
        """Draws an id for each row by inversion, from ``[R]`` numbers in [0, 1).

        An id is the first whose cumulative probability exceeds the number. So equal numbers draw equal ids on every
        device, which ``torch.multinomial`` does not promise.
        """
        drawn = []
        for rows, shares in zip(self.log_softmax(), torch.split(uniforms, self.chunk_rows), strict=True):
            sums = rows.double().exp().cumsum(dim=1)
            # The last sum is 1 only up to rounding.
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
        """Returns the logits of some rows, ``[n, E] -> [n, V]``."""
        if self.table is None:
            return rows.to(self.dtype)
        bias = self.bias
        if bias is not None:
            bias = bias.to(rows.dtype)
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
        weight, shift = table.to(hidden.dtype), bias
        if shift is not None:
            shift = shift.to(hidden.dtype)
        total = hidden.new_zeros((), dtype=dtype)
        of_hidden: list[Tensor] = []
        of_table = of_bias = None
        for rows, targets in zip(torch.split(hidden, chunk), torch.split(labels.unsqueeze(1), chunk), strict=True):
            scores = linear(rows, weight, shift).to(dtype)  # [chunk, V]
            # Softmax does not change if the greatest score is subtracted, and without this exp would overflow.
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
            if of_table is None:
                of_table = products
            else:
                of_table.add_(products)
            if bias is not None:
                of_chunk = excess.sum(0).to(bias.dtype)
                if of_bias is None:
                    of_bias = of_chunk
                else:
                    of_bias.add_(of_chunk)
        if with_gradients:
            ctx.save_for_backward(torch.cat(of_hidden), of_table, of_bias)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # In place, because one gradient is as large as the table. A second pass over the same graph is an error.
        gradients: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for index, saved in enumerate(ctx.saved_tensors):  # of the first three inputs
            if ctx.needs_input_grad[index]:
                gradients[index] = saved.mul_(gradient.to(saved.dtype))
        return tuple(gradients)


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
        shape = config.head
        self.vocab_size, self.activation = config.vocab_size, shape.vocabulary_activation
        input_width, width = config.hidden_size, config.embedding_size
        if config.output_embedding_size is not None:
            width = config.output_embedding_size
        self.inner: Linear | None = None
        if config.prediction_head_size is not None:
            self.inner = Linear(input_width, config.prediction_head_size, bias=config.head_bias)
            input_width = config.prediction_head_size
        self.dense: Linear | None = None
        if shape.vocabulary_dense:
            self.dense = Linear(input_width, width, bias=config.head_bias)
        self.norm: nn.Module = nn.Identity()
        if shape.vocabulary_norm:
            self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps, bias=config.head_bias)
        self.decoder: nn.Linear | None = None
        if config.output_embedding_size is not None:
            self.decoder = nn.Linear(width, config.vocab_size, bias=False)
        self.bias: nn.Parameter | None = None
        if shape.vocabulary_bias:
            self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        initialize(self, config)

    @property
    def num_logits(self) -> int:
        return self.vocab_size

    def select(self, layout: Layout) -> Selection | None:
        if isinstance(layout, Packed):
            return Selection(rows=layout.gather_positions)
        return None

    def forward(self, hidden: Tensor, layout: Layout, embeddings: Tensor) -> Any:
        """Returns the output for ``[R, H]``, or logits ``[N, V]`` for a padded layout."""
        output = self.output_of(hidden, embeddings)
        if isinstance(layout, Padded):
            return output.logits()
        return output

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
        table = embeddings
        if self.decoder is not None:
            table = self.decoder.weight
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
        """Computes the logits of pairs from first tokens, ``[B, H] -> [B, 2]``."""
        logits: Tensor = self.pair(self.dropout(torch.tanh(self.pooler(first))))
        return logits
