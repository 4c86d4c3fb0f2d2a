"""Positions that attention reads, with or without a table of positions.

A type of positions is a module that the encoder owns (``position_module``). It is called once per forward pass. The
attention of every layer calls its result to change queries, keys and scores.

Shape legend: N tokens, B sequences, T length of the longest sequence (in scores of the longest in a group), A heads, D
head size, H = A * D, S embeddings of distances.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from bert_tasks.encoder.config import DisentangledConfig, EncoderConfig, RotaryScaling
from bert_tasks.encoder.cpu import is_eager_on_cpu
from bert_tasks.encoder.dropout import Dropout
from bert_tasks.encoder.packing import Layout, Packed
from bert_tasks.errors import CheckpointError

# Queries and keys of the sequences of one group or of a padded layout, ``[B, A, T, D]`` each -> what is added to their
# scaled products before softmax, broadcastable to ``[B, A, T, T]`` (query, key), in their dtype.
Scores = Callable[[Tensor, Tensor], Tensor]

_ROWS = 256  # that are rotated together


class LayerAttention(Protocol):
    """The properties of a layer's attention that positions may use.

    Attributes:
        heads: Number of heads.
        theta: Base of the wavelengths of rotary positions.
        rotary_scaling: Scaling of rotary positions, or None.
        position_key, position_query: Linear layers for positions, ``[..., H] -> [..., H]``, or None.
    """

    heads: int
    theta: float | None
    rotary_scaling: RotaryScaling | None

    def project(self, hidden: Tensor) -> Tensor:
        """Computes queries, keys and values, ``[S, H] -> [S, 3, A, D]``."""

    @property
    def position_key(self) -> nn.Module | None: ...
    @property
    def position_query(self) -> nn.Module | None: ...


class Positions(Protocol):
    """Values that are computed once per forward pass, for all layers."""

    def apply(self, attention: LayerAttention, qkv: Tensor) -> tuple[Tensor, Scores | None]:
        """Applies the positions to one layer.

        Args:
            attention: The layer's attention.
            qkv: ``[N, 3, A, D]`` queries, keys and values.

        Returns:
            The queries, keys and values to attend with, and the terms to add to the scores, or None.
        """


def position_module(config: EncoderConfig) -> nn.Module | None:
    """Returns the module of ``Positions``, or None if embeddings contain them all.

    Raises:
        CheckpointError: This version does not compute such positions.
    """
    match config.positions:
        case "absolute":
            return None
        case "rotary" | "rotary-interleaved":
            return RotaryPositions(is_interleaved=config.positions == "rotary-interleaved")
        case "rotary-table":
            return RotaryTable(config)
        case "disentangled" if config.disentangled is not None:
            return DisentangledPositions(config, config.disentangled)
        case "relative":
            return RelativeBias(config)
    raise CheckpointError(f"the encoder needs positions = {config.positions!r}, which this version does not compute")


class RotaryPositions(nn.Module):
    """Rotations that make products depend on distance (RoPE, arXiv:2104.09864)."""

    def __init__(self, *, is_interleaved: bool) -> None:
        super().__init__()
        self.is_interleaved = is_interleaved

    def forward(self, position_ids: Tensor, layout: Layout) -> "RotaryAngles":
        return RotaryAngles(position_ids, layout, is_interleaved=self.is_interleaved)


class RotaryAngles:
    """The cosines and sines of one forward pass, shared by layers with the same base and scaling.

    Component i of the first half of a head and component i of the second half form one plane. Interleaved, two
    neighbours do.
    """

    def __init__(self, position_ids: Tensor, layout: Layout, *, is_interleaved: bool = False) -> None:
        self.position_ids, self.layout, self.is_interleaved = position_ids, layout, is_interleaved
        self._angles: dict[tuple[float, RotaryScaling | None, torch.dtype], tuple[Tensor, Tensor]] = {}

    def apply(self, attention: LayerAttention, qkv: Tensor) -> tuple[Tensor, None]:
        """Rotates queries and keys ``[N, 3, A, D]``. Values are not changed."""
        cosines, sines = self._cosines_and_sines(cast("float", attention.theta), attention.rotary_scaling, qkv)
        if self.is_interleaved:
            return rotate_neighbours(qkv, cosines, sines), None
        if is_eager_on_cpu(qkv):
            return apply_rotary(qkv, cosines, sines), None
        query_key, value = torch.split(qkv, [2, 1], dim=1)
        halves = rotate_halves(query_key, cosines, sines)
        return torch.cat([torch.cat(halves, dim=-1).to(qkv.dtype), value], dim=1), None

    def _cosines_and_sines(self, theta: float, scaling: RotaryScaling | None, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ``[N, 1, 1, D / 2]`` each, in float32 at least to have enough digits."""
        dtype, size = torch.promote_types(qkv.dtype, torch.float32), qkv.shape[-1]
        angles = self._angles.get((theta, scaling, dtype))
        if angles is None:
            steps = torch.arange(0, size, 2, dtype=dtype, device=qkv.device)
            frequencies = 1.0 / theta ** (steps / size)  # [D / 2]
            attention_factor = 1.0
            if scaling is not None:
                attention_factor = scaling.attention_factor
                frequencies = scaled_frequencies(frequencies, theta, scaling, self.position_ids, self.layout)
            radians = (self.position_ids.to(dtype)[:, None] * frequencies)[:, None, None, :]
            angles = radians.cos() * attention_factor, radians.sin() * attention_factor
            self._angles[theta, scaling, dtype] = angles
        return angles


def scaled_frequencies(
    frequencies: Tensor, theta: float, scaling: RotaryScaling, position_ids: Tensor, layout: Layout
) -> Tensor:
    """Scales rotary positions for long inputs, as transformers 5.23 does (modeling_rope_utils.py).

    ``linear`` divides the angles of all planes by ``factor``. See ``_dynamic`` and ``_yarn`` for the others.

    Args:
        frequencies: ``[D / 2]`` angle between neighbouring positions in each plane, in radians.
        theta: Base of the wavelengths.
        scaling: The scaling.
        position_ids, layout: See ``sequence_lengths``.

    Returns:
        ``[D / 2]``, or if they depend on the sequence, ``[N, D / 2]``.
    """
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    if scaling.rope_type == "dynamic":
        return _dynamic(frequencies, scaling, sequence_lengths(position_ids, layout))
    return _yarn(frequencies, theta, scaling)


def _dynamic(frequencies: Tensor, scaling: RotaryScaling, lengths: Tensor) -> Tensor:
    """Divides the angles of sequences that are longer than the original length, ``[D / 2], [N] -> [N, D / 2]``.

    transformers takes the padded length of the batch, and may keep it for later batches, so that the result for a row
    depends on the others. Here each sequence has its own length, so a row gets what transformers computes for this row
    alone.
    """
    lengthening = lengths.to(frequencies.dtype) / scaling.original_length
    growth = 1.0 + scaling.factor * (lengthening.clamp(min=1.0) - 1.0)
    size = 2 * len(frequencies)
    # The base grows to the power of D / (D - 2), and plane i has the base to the power of -2 i / D.
    return frequencies / growth[:, None] ** (2 * _planes(frequencies) / max(size - 2, 1))


def _yarn(frequencies: Tensor, theta: float, scaling: RotaryScaling) -> Tensor:
    """Divides the angles of planes that turn less than about once, ``[D / 2] -> [D / 2]``.

    Planes that turn often tell neighbours apart, and stay as they are (Peng et al., arXiv:2309.00071).
    """
    size = 2 * len(frequencies)
    # Plane i turns by a radian in theta^(2 i / D) tokens.
    radians = [scaling.original_length / (turns * 2 * math.pi) for turns in (scaling.beta_fast, scaling.beta_slow)]
    fast, slow = (size * math.log(tokens) / (2 * math.log(theta)) for tokens in radians)
    first: float = max(math.floor(fast), 0)
    last: float = min(math.ceil(slow), size - 1)
    if first == last:
        last += 0.001  # as in transformers, to avoid a division by zero
    kept = 1 - ((_planes(frequencies) - first) / (last - first)).clamp(0, 1)
    return frequencies / scaling.factor * (1 - kept) + frequencies * kept


def _planes(frequencies: Tensor) -> Tensor:
    """Returns ``[D / 2]`` the numbers of the planes, from 0."""
    return torch.arange(len(frequencies), dtype=frequencies.dtype, device=frequencies.device)


def sequence_lengths(position_ids: Tensor, layout: Layout) -> Tensor:
    """Returns ``[N]``, the number of positions of each token's sequence, without padding on its sides."""
    if isinstance(layout, Packed):
        # The layout of a captured graph has nothing but the starts of the sequences.
        rows = torch.arange(len(position_ids), dtype=torch.int32, device=position_ids.device)
        sequences = torch.bucketize(rows, layout.cu_seqlens, right=True) - 1
        lengths: Tensor = layout.cu_seqlens.diff()
        return lengths.index_select(0, sequences)
    positions = position_ids.view(layout.batch, layout.length)
    last = positions.where(layout.mask, -1).amax(dim=1, keepdim=True)  # [B, 1]
    first = positions.where(layout.mask, last).amin(dim=1, keepdim=True)
    return (last - first + 1).expand_as(positions).flatten()


class RotaryTable(nn.Module):
    """Interleaved rotary positions with stored sines and cosines (RoFormer).

    Attributes:
        weight: ``[P, D]`` the sines of all planes for each position, then their cosines. They are not trained.
    """

    weight: Tensor

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        steps = torch.arange(0, config.head_size, 2, dtype=torch.float64) / config.head_size
        places = torch.arange(config.max_position_embeddings, dtype=torch.float64)
        radians = places[:, None] / config.rotary_theta[0] ** steps
        self.register_buffer("weight", torch.cat([radians.sin(), radians.cos()], dim=1).float())

    def forward(self, position_ids: Tensor, layout: Layout) -> "TableAngles":
        return TableAngles(self.weight.index_select(0, position_ids)[:, None, None, :])


@dataclass(frozen=True, eq=False)
class TableAngles:
    """``Positions`` that all layers read from one table.

    Attributes:
        rows: ``[N, 1, 1, D]`` rows of the table.
    """

    rows: Tensor

    def apply(self, attention: LayerAttention, qkv: Tensor) -> tuple[Tensor, None]:
        sines, cosines = self.rows.chunk(2, dim=-1)
        return rotate_neighbours(qkv, cosines, sines), None


def rotate_neighbours(qkv: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotates queries and keys ``[N, 3, A, D]`` in planes of two neighbours."""
    query_key, value = torch.split(qkv, [2, 1], dim=1)
    rotated = rotate(query_key[..., ::2], query_key[..., 1::2], cosines, sines)
    return torch.cat([torch.stack(rotated, dim=-1).flatten(-2).to(qkv.dtype), value], dim=1)


def rotate_halves(rows: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates ``[..., D]`` to halves ``[..., D / 2]``, in the angles' precision."""
    first, second = rows.chunk(2, dim=-1)
    return rotate(first, second, cosines, sines)


def rotate(first: Tensor, second: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates two halves, ``[..., D / 2]`` each, in the angles' precision."""
    rotated = torch.addcmul(first * cosines, second, sines, value=-1)
    return rotated, torch.addcmul(second * cosines, first, sines)


class ApplyRotary(torch.autograd.Function):
    """Rotation of queries and keys, piece by piece to stay in the processor's cache."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return _rotated_copy(qkv, cosines, sines)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cosines, sines = ctx.saved_tensors
        # The gradient of a rotation is the rotation by the opposite angle.
        return _rotated_copy(gradient, cosines, -sines), None, None


def _rotated_copy(qkv: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Returns a copy of ``[N, 3, A, D]`` whose queries and keys are rotated."""
    copy = qkv.clone(memory_format=torch.contiguous_format)
    queries_and_keys = copy.narrow(1, 0, 2)
    pieces = (torch.split(array, _ROWS) for array in (queries_and_keys, cosines, sines))
    for rows, *angles in zip(*pieces, strict=True):
        for half, rotated in zip(rows.chunk(2, dim=-1), rotate_halves(rows, *angles), strict=True):
            half.copy_(rotated)
    return copy


apply_rotary: Callable[[Tensor, Tensor, Tensor], Tensor] = ApplyRotary.apply


class DisentangledPositions(nn.Module):
    """Embeddings of distances (DeBERTa, He et al., arXiv:2006.03654).

    Every layer makes keys and queries of them. Distances are counted in the rows of a sequence, whatever its position
    ids are, and in a padded layout in columns.
    """

    def __init__(self, config: EncoderConfig, disentangled: DisentangledConfig) -> None:
        super().__init__()
        self.config = disentangled
        self.embeddings = nn.Embedding(2 * disentangled.span, config.hidden_size)
        self.norm: nn.Module = nn.Identity()
        if disentangled.norm:
            self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, position_ids: Tensor, layout: Layout) -> "DisentangledScores":
        """Returns the scores. The position ids ``[N]`` are not used."""
        span = self.config.span
        exact = self.config.max_distance  # the distances below this one have embeddings of their own
        if self.config.buckets:
            exact = self.config.buckets // 2
        length = _longest_length(layout)
        table, first = self.embeddings.weight, 0
        if isinstance(layout, Packed) and length <= exact:  # layers need not compute with the embeddings of others
            first = span - length
            table = table.narrow(0, first, 2 * length)
        distances = torch.arange(-length, length, device=table.device)
        if self.config.buckets:
            distances = log_buckets(distances, buckets=self.config.buckets, max_distance=self.config.max_distance)
        rows = (torch.stack([-distances, distances]) + span - first).clamp(0, len(table) - 1)  # [2, 2T]
        return DisentangledScores(table=self.norm(table), rows=rows, dropout=self.dropout, config=self.config)


def log_buckets(distances: Tensor, *, buckets: int, max_distance: int) -> Tensor:
    """Returns the bucket of each distance, an integer of the same sign.

    Distances up to half of the buckets have separate buckets. The logarithms are float32's, as in transformers, because
    a bucket begins where they reach a whole number.
    """
    half = buckets // 2
    sizes = distances.abs()
    greatest = sizes.new_full((), (max_distance - 1) / half, dtype=torch.float32)
    steps = (sizes.clamp(min=half).float() / half).log() / greatest.log() * (half - 1)
    far = distances.sign() * (steps.ceil().long() + half)
    return torch.where(sizes <= half, distances, far)


@dataclass(frozen=True, kw_only=True, eq=False)
class DisentangledScores:
    """The embeddings of all distances in one forward pass.

    Attributes:
        table: ``[S, H]`` embeddings of distances.
        rows: ``[2, 2T]`` the row of ``table`` for each distance from T down to 1 - T, and for each from -T up to T - 1.
        dropout: Dropout of the embeddings. Every layer draws a new mask.
        config: The scores to compute.
    """

    table: Tensor
    rows: Tensor
    dropout: Dropout
    config: DisentangledConfig

    def apply(self, attention: LayerAttention, qkv: Tensor) -> tuple[Tensor, Scores]:
        """Makes the keys and queries of distances, once for all groups."""
        table = self.dropout(self.table)
        position_queries: Any  # tensors, if the scores need them
        position_keys: Any
        if self.config.shared:
            position_queries, position_keys, _ = attention.project(table).flatten(2).unbind(1)  # [S, A * D]
        else:
            position_keys = position_queries = None
            if attention.position_key is not None:
                position_keys = attention.position_key(table)
            if attention.position_query is not None:
                position_queries = attention.position_query(table)
        scale, heads = self.config.scale(qkv.shape[-1]), attention.heads

        def of_distances(states: Tensor, rows: Tensor) -> Tensor:
            """Returns the scaled vectors of all distances by head, ``[S, H] -> [A, D, 2T]``."""
            return (states.index_select(0, rows) * scale).view(len(rows), heads, -1).permute(1, 2, 0)

        down, up = self.rows.unbind(0)
        keys: Tensor | None = None
        queries: Tensor | None = None
        if self.config.content_to_position:
            keys = of_distances(position_keys, down)
        if self.config.position_to_content:
            queries = of_distances(position_queries, up)

        def scores(query: Tensor, key: Tensor) -> Tensor:
            # Of a query the distances to the keys fall from left to right, of a key those to the queries rise.
            parts: list[Tensor] = []  # [B, A, query, key]
            if keys is not None:
                parts.append(gather_relative(query, keys))
            if queries is not None:
                parts.append(gather_relative(key, queries).transpose(2, 3))
            if len(parts) == 1:
                return parts[0]
            return parts[0] + parts[1]

        return qkv, scores


def _longest_length(layout: Layout) -> int:
    """Returns T, the length of the longest sequence, or of the rectangle."""
    if isinstance(layout, Packed):
        return max(layout.lengths)
    return layout.length


def gather_relative(content: Tensor, of_distances: Tensor) -> Tensor:
    """Multiplies every token i with the vector of its distance from every token j.

    Args:
        content: ``[B, A, T, D]`` queries or keys.
        of_distances: ``[A, D, 2L]`` with L >= T. Column L + j - i is for the tokens i and j.

    Returns:
        ``[B, A, T, T]``.
    """
    batch, heads, length, size = content.shape
    longest = of_distances.shape[-1] // 2
    if longest != length:
        of_distances = of_distances.narrow(-1, longest - length, 2 * length)
    # One product for each head, in which the rows of all sequences are together.
    products = content.transpose(0, 1).reshape(heads, batch * length, size) @ of_distances
    # Row i needs its columns from length - i on. In rows that are one shorter, they are below each other.
    rows = products.view(heads, batch, 2 * length**2).narrow(-1, length, length * (2 * length - 1))
    return rows.view(heads, batch, length, 2 * length - 1).narrow(-1, 0, length).transpose(0, 1)


# Distances in tokens at which the next bucket begins. Each has a bucket up to 8, then every second one begins at twice
# the distance (8 * 2^(k/2)), and the last has all from 91 on. transformers computes the same with float32 logarithms.
_BUCKET_STARTS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91)


class RelativeBias(nn.Module):
    """A number for each head and bucket of distances (MPNet, after T5).

    All layers add it to their scores. Buckets of keys before the query and of the query itself come first, buckets of
    keys after it second.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.bias = nn.Embedding(2 * (len(_BUCKET_STARTS) + 1), config.num_attention_heads)

    def forward(self, position_ids: Tensor, layout: Layout) -> "AddedBias":
        """Returns the scores of the longest sequence, which contain shorter ones' scores."""
        length = _longest_length(layout)
        distances = torch.arange(1 - length, length, device=position_ids.device)  # [2T - 1] key - query
        buckets = (distances > 0) * (len(_BUCKET_STARTS) + 1)
        for start in _BUCKET_STARTS:
            buckets = buckets + (distances.abs() >= start)
        by_distance: Tensor = self.bias(buckets)  # [2T - 1, A]
        places = torch.arange(length, device=position_ids.device)
        pairs = places - places[:, None] + length - 1  # [T, T] rows of by_distance for query and key
        return AddedBias(F.embedding(pairs, by_distance).permute(2, 0, 1).unsqueeze(0))


@dataclass(frozen=True)
class AddedBias:
    """``Positions`` that add the same scores in every layer.

    Attributes:
        scores: ``[1, A, T, T]`` scores of query and key.
    """

    scores: Tensor

    def apply(self, attention: LayerAttention, qkv: Tensor) -> tuple[Tensor, Scores | None]:
        return qkv, lambda query, key: self.scores[:, :, : query.shape[2], : key.shape[2]].to(query.dtype)
