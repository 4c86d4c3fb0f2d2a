"""Embeddings and layers of every family, from token ids to hidden states.

Only attention reads the layout. Everything else runs on the rows of ``[N, H]``.

Shape legend: N tokens, B sequences, H hidden, A heads, D head size, R tokens that a head reads.
"""

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bert_tasks.encoder.attention import attend, attend_cls_query
from bert_tasks.encoder.config import Activation, EncoderConfig, LoraTarget, RotaryScaling
from bert_tasks.encoder.dropout import Dropout
from bert_tasks.encoder.graphs import LayerGraphs
from bert_tasks.encoder.linear import ACTIVATIONS, Linear, linear, linear_activation
from bert_tasks.encoder.packing import Layout, Packed, Selection
from bert_tasks.encoder.positions import Positions, position_module


class RMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` that computes in the precision of its weight, because a CPU cannot mix two precisions."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows.to(self.weight.dtype)).to(rows.dtype)


def make_norm(config: EncoderConfig, size: int) -> nn.Module:
    """Returns a norm of the encoder's type."""
    if config.norm == "rms":
        return RMSNorm(size, eps=config.layer_norm_eps)
    return nn.LayerNorm(size, eps=config.layer_norm_eps, bias=config.norm_bias)


class Embedding(nn.Embedding):
    """``nn.Embedding`` that draws no weights on the meta device, which would be slow."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class Embeddings(nn.Module):
    """The normalised sum of all embeddings, projected if the family does so."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width = config.embedding_size
        self.word = Embedding(config.vocab_size, width, padding_idx=config.pad_token_id)
        self.position: Embedding | None = None
        if config.absolute_positions:
            self.position = Embedding(config.max_position_embeddings, width)
        self.token_type: Embedding | None = None
        if config.type_vocab_size:
            self.token_type = Embedding(config.type_vocab_size, width)
        self.task_type: Embedding | None = None
        if config.task_type_vocab_size:
            self.task_type = Embedding(config.task_type_vocab_size, width)
        self.norm_last = config.norm_after_projection
        normalised = width
        if self.norm_last:
            normalised = config.hidden_size
        self.norm: nn.Module = nn.Identity()
        if config.embedding_norm:
            self.norm = make_norm(config, normalised)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.projection = None
        if config.project_embeddings:
            self.projection = Linear(width, config.hidden_size, bias=not self.norm_last)

    def forward(self, input_ids: Tensor, position_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        """Embeds tokens, ``[N]`` ids each -> ``[N, H]``."""
        return self.combine(self.word(input_ids), position_ids, token_type_ids)

    def combine(self, words: Tensor, position_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        """Adds the other embeddings to those of the words, ``[N, width]`` and ``[N]`` ids ``-> [N, H]``."""
        embedded: Tensor = words
        if self.position is not None:
            embedded = embedded + self.position(position_ids)
        if self.token_type is not None:
            embedded = embedded + self.token_type(token_type_ids)
        if self.task_type is not None:
            embedded = embedded + self.task_type.weight[0]
        if self.projection is not None and self.norm_last:
            embedded = self.projection(embedded)
        embedded = self.dropout(self.norm(embedded))
        if self.projection is not None and not self.norm_last:
            embedded = self.projection(embedded)
        return embedded


class Attention(nn.Module):
    """Self-attention with one linear layer for query, key and value.

    The rows of its weight are all q, all k, all v. If groups of queries share keys and values, it has two layers,
    ``query`` and ``key_value``.

    Attributes:
        projections: Maps the names of these layers to their outputs.
        window: Number of tokens on each side that a token attends to. None means all.
        theta: Base of the wavelengths of rotary positions, or None.
        rotary_scaling: Scaling of rotary positions, or None.
    """

    def __init__(self, config: EncoderConfig, index: int) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.dropout = config.attention_probs_dropout_prob
        self.window: int | None = None
        if config.attention_window is not None:
            self.window = config.attention_window[index]
        self.theta: float | None = None
        if config.rotary_theta:
            self.theta = config.rotary_theta[index]
        self.rotary_scaling: RotaryScaling | None = None
        if config.rotary_scaling:
            self.rotary_scaling = config.rotary_scaling[index]
        self.size = config.head_size
        hidden, width = config.hidden_size, self.heads * self.size
        self.projections: dict[str, tuple[LoraTarget, ...]] = {"qkv": ("query", "key", "value")}
        if config.num_key_value_heads is None:
            self.qkv = Linear(hidden, 3 * width, bias=config.bias)
        else:
            self.projections = {"query": ("query",), "key_value": ("key", "value")}
            self.query = Linear(hidden, width, bias=config.bias)
            self.key_value = Linear(hidden, 2 * config.num_key_value_heads * self.size, bias=config.bias)
        self.output = Linear(width, hidden, bias=config.bias)
        self.scale: float | None = None
        self.position_key: Linear | None = None
        self.position_query: Linear | None = None
        if config.disentangled is not None:
            self.scale = config.disentangled.scale(config.head_size)
            if config.disentangled.own_keys:
                self.position_key = Linear(hidden, width)
            if config.disentangled.own_queries:
                self.position_query = Linear(hidden, width)

    def forward(
        self,
        hidden: Tensor,
        layout: Layout,
        selection: Selection | None = None,
        positions: Positions | None = None,
    ) -> Tensor:
        """Returns the context before the projection, ``[N, H]`` or selected ``[R, H]``."""
        dropout = 0.0
        if self.training:
            dropout = self.dropout
        is_first = selection is not None and selection.first_tokens and positions is None and self.window is None
        if is_first and isinstance(layout, Packed) and hidden.device.type == "cpu" and "qkv" in self.projections:
            # The other tokens need keys and values, but no queries.
            width = self.qkv.out_features // 3
            sizes = [width, 2 * width]
            first = hidden.index_select(0, layout.cu_seqlens[:-1])  # [B, H]
            query, key_value = self.qkv.parts((first, hidden), sizes)
            query = query.view(len(first), self.heads, -1)  # [B, A, D]
            key_value = key_value.view(len(hidden), 2, self.heads, -1)  # [N, 2, A, D]
            return attend_cls_query(query, key_value, layout, dropout=dropout).index_select(0, layout.caller_order)
        qkv = self.project(hidden)
        scores = None
        if positions is not None:
            qkv, scores = positions.apply(self, qkv)
        context = attend(qkv, layout, dropout=dropout, window=self.window, scores=scores, scale=self.scale)
        if selection is not None:
            context = context.index_select(0, selection.rows)
        return context

    def project(self, hidden: Tensor) -> Tensor:
        """Computes queries, keys and values, ``[N, H] -> [N, 3, A, D]``."""
        if "qkv" in self.projections:
            qkv: Tensor = self.qkv(hidden).unflatten(-1, (3, self.heads, -1))
            return qkv
        query = self.query(hidden).unflatten(-1, (1, self.heads, self.size))
        key_value = self.key_value(hidden).unflatten(-1, (2, -1, self.size))
        # Neighbouring heads of queries share a head of keys and values.
        shared = key_value.repeat_interleave(self.heads // key_value.shape[-2], dim=-2)
        return torch.cat([query, shared], dim=-3)


class Layer(nn.Module):
    """Attention and feed-forward, each with dropout, residual and norm (post-norm).

    Attributes:
        int8_feed_forward: The feed-forward of an ``int8_encoder``, or None.
    """

    def __init__(self, config: EncoderConfig, index: int) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.activation: Activation = config.hidden_act
        self.is_gated = config.mlp == "gated"
        self.attention = Attention(config, index)
        self.attention_norm = make_norm(config, hidden)
        expanded = inner
        if self.is_gated:
            expanded = 2 * inner
        self.intermediate = Linear(hidden, expanded, bias=config.bias and config.intermediate_bias)
        self.output = Linear(inner, hidden, bias=config.bias)
        self.output_norm = make_norm(config, hidden)
        self.attention_dropout = Dropout(config.attention_output_dropout)
        self.output_dropout = Dropout(config.feed_forward_dropout)
        self.gate_dropout = Dropout(config.gate_dropout)
        self.int8_feed_forward: nn.Module | None = None

    def forward(
        self,
        hidden: Tensor,
        layout: Layout,
        selection: Selection | None = None,
        positions: Positions | None = None,
    ) -> Tensor:
        """Returns the states after the layer, ``[N, H]``, or ``[R, H]`` of the selected tokens."""
        context = self.attention(self.before_attention(hidden), layout, selection, positions)  # [R, H]
        if selection is not None:
            hidden = hidden.index_select(0, selection.rows)
        return self.after_attention(hidden, context)

    def before_attention(self, hidden: Tensor) -> Tensor:
        """Returns the input of attention, ``[N, H] -> [N, H]``."""
        return hidden

    def after_attention(self, hidden: Tensor, context: Tensor) -> Tensor:
        """Applies the steps after attention to each token, ``[R, H]`` each ``-> [R, H]``."""
        hidden = self.attention_norm(hidden + self.attention_dropout(self.attention.output(context)))
        hidden = self.output_norm(hidden + self.feed_forward(hidden))
        return hidden

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """Applies the feed-forward, ``[R, H] -> [R, H]``, which may have a gate."""
        if self.int8_feed_forward is not None:
            in_int8: Tensor = self.int8_feed_forward(hidden)
            return in_int8
        if not self.is_gated:
            expanded = linear_activation(self.intermediate, hidden, self.activation)  # [R, intermediate]
        else:
            inner, gate = self.intermediate(hidden).chunk(2, dim=-1)  # [R, intermediate] each
            expanded = self.gate_dropout(ACTIVATIONS[self.activation](inner) * gate)
        change: Tensor = self.output_dropout(self.output(expanded))
        return change


class PreNormLayer(Layer):
    """A layer that normalises the inputs of attention and feed-forward (pre-norm)."""

    def __init__(self, config: EncoderConfig, index: int) -> None:
        super().__init__(config, index)
        if index == 0 and not config.first_norm:
            self.attention_norm = nn.Identity()

    def before_attention(self, hidden: Tensor) -> Tensor:
        normalised: Tensor = self.attention_norm(hidden)
        return normalised

    def after_attention(self, hidden: Tensor, context: Tensor) -> Tensor:
        hidden = hidden + self.attention_dropout(self.attention.output(context))
        return hidden + self.feed_forward(self.output_norm(hidden))


class Convolution(nn.Module):
    """Convolution over neighbouring embeddings, added to layer 0 (large DeBERTa-v2)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.activation: Activation = config.convolution_act
        self.convolution = nn.Conv1d(config.hidden_size, config.hidden_size, config.convolution_size)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, embedded: Tensor, hidden: Tensor, layout: Layout, selection: Selection | None = None) -> Tensor:
        """Returns the sum in the shape of ``hidden``, ``[N, H]`` or ``[R, H]``."""
        if isinstance(layout, Packed):
            sequences = layout.sequence_of_row  # [N]
        else:
            numbers = torch.arange(layout.batch, device=embedded.device)[:, None]
            sequences = numbers.where(layout.mask, -1).flatten()
        weights = self.convolution.weight.permute(2, 0, 1).contiguous().unbind(0)  # [H, H] for each neighbour
        reach, count = len(weights) // 2, embedded.shape[0]
        wide, numbers = F.pad(embedded, (0, 0, reach, reach)), F.pad(sequences, (reach, reach), value=-1)
        mixed = torch.zeros_like(embedded)
        for offset, weight in enumerate(weights):
            is_inside = numbers.narrow(0, offset, count) == sequences  # else there is no such neighbour
            neighbours = wide.narrow(0, offset, count) * is_inside[:, None]
            bias = None
            if offset == reach:  # once for all neighbours
                bias = self.convolution.bias
            mixed = mixed + linear(neighbours, weight, bias)
        if selection is not None:
            mixed = mixed.index_select(0, selection.rows)
        normalised: Tensor = self.norm(hidden + ACTIVATIONS[self.activation](self.dropout(mixed)))
        return normalised


class TransformerEncoder(nn.Module):
    """The embeddings and all layers of a model, from token ids to hidden states.

    Attributes:
        gradient_checkpointing: Compute each layer again in the backward pass instead of storing its activations.
        graphs: CUDA graphs that run all layers in training. None means that the layers run one after another.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        layer_class = Layer
        if config.placement == "pre":
            layer_class = PreNormLayer
        self.layer_order = config.layer_order
        self.embeddings = Embeddings(config)
        self.positions = position_module(config)
        self.layers = nn.ModuleList(layer_class(config, index) for index in range(max(config.layer_order) + 1))
        self.norm: nn.Module | None = None
        if config.final_norm:
            self.norm = make_norm(config, config.hidden_size)
        self.convolution: Convolution | None = None
        if config.convolution_size:
            self.convolution = Convolution(config)
        self.gradient_checkpointing = False
        self.graphs: LayerGraphs | None = None

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        token_type_ids: Tensor,
        layout: Layout,
        *,
        selection: Selection | None = None,
        hidden_states: list[Tensor] | None = None,
        depth: int | None = None,
    ) -> Tensor:
        """Runs all layers, or the first ones.

        Args:
            input_ids, position_ids, token_type_ids: ``[N]``.
            layout: Layout of the sequences.
            selection: Tokens that are read of the last layer, or of the embeddings if no layer runs. Default: all.
            hidden_states: List that receives the embeddings and every layer's output, in HF's order.
            depth: Number of layers to run. Default: all. A norm after the last layer runs only with all layers.

        Returns:
            ``[R, H]`` of the selected tokens, or ``[N, H]``.
        """
        embedded: Tensor = self.embeddings(input_ids, position_ids, token_type_ids)  # [N, H]
        return self.run_layers(
            embedded, position_ids, layout, selection=selection, hidden_states=hidden_states, depth=depth
        )

    def run_layers(
        self,
        embedded: Tensor,
        position_ids: Tensor,
        layout: Layout,
        *,
        selection: Selection | None = None,
        hidden_states: list[Tensor] | None = None,
        depth: int | None = None,
    ) -> Tensor:
        """Computes ``forward`` from embeddings ``[N, H]``."""
        is_whole = hidden_states is None and depth is None and not self.gradient_checkpointing
        if self.graphs is not None and self.training and is_whole and isinstance(layout, Packed):
            output = self.graphs.run(embedded, position_ids, layout)
            if output is not None:
                if selection is not None:
                    output = output.index_select(0, selection.rows)
                return output
        hidden = embedded
        if hidden.device.type == "cpu" and torch.is_autocast_enabled("cpu"):  # else the residuals would stay in float32
            hidden = hidden.to(torch.get_autocast_dtype("cpu"))
        if hidden_states is not None:
            hidden_states.append(hidden)
        positions = None
        if self.positions is not None:
            positions = self.positions(position_ids, layout)
        order = self.layer_order[:depth]
        if not order and selection is not None:
            hidden = hidden.index_select(0, selection.rows)
        last = len(order) - 1
        for position, index in enumerate(order):
            layer = self.layers[index]
            read = None  # all tokens, because the next layer attends to them
            if position == last:
                read = selection
            if self.gradient_checkpointing and self.training:
                hidden = checkpoint(layer, hidden, layout, read, positions, use_reentrant=False)
            else:
                hidden = layer(hidden, layout, read, positions)
            if position == 0 and self.convolution is not None:
                hidden = self.convolution(embedded, hidden, layout, read)
            if position == len(self.layer_order) - 1 and self.norm is not None:
                hidden = self.norm(hidden)
            if hidden_states is not None:
                hidden_states.append(hidden)
        return hidden

    def use_graphs(self, dtype: torch.dtype) -> None:
        """Runs layers in training as CUDA graphs in ``dtype`` until ``graphs`` is None."""

        def layers(embedded: Tensor, position_ids: Tensor, layout: Packed) -> Tensor:
            with torch.autocast("cuda", dtype, cache_enabled=False):
                return self.run_layers(embedded, position_ids, layout)

        modules = [self.layers[index] for index in set(self.layer_order)]
        if self.norm is not None:
            modules.append(self.norm)
        parameters: list[nn.Parameter] = []
        for module in modules:
            parameters += module.parameters()
        if any(parameter.requires_grad for parameter in parameters):
            self.graphs = LayerGraphs(layers, parameters)

    def last_queries_keys_values(self, hidden_states: Sequence[Tensor]) -> Tensor:
        """Returns ``[N, 3, A * D]`` of the last layer for all tokens.

        They are computed from the states that ``forward`` collected, so that no layer has to return them. They are not
        rotated.
        """
        index = self.layer_order[-1]
        last = cast("Layer", self.layers[index])
        return last.attention.project(last.before_attention(hidden_states[-2])).flatten(2)


def initialize(module: nn.Module, config: EncoderConfig) -> None:
    """Draws the weights of new modules as transformers does. Biases are 0, and norms are the identity."""
    for name, submodule in module.named_modules():
        if any(parameter.is_meta for parameter in submodule.parameters(recurse=False)):
            continue  # there is nothing to draw, see ``Embedding``
        if isinstance(submodule, nn.Linear | nn.Embedding | nn.Conv1d):
            cutoff = config.initializer_cutoff
            if cutoff is None or config.initializer_range == 0:
                nn.init.normal_(submodule.weight, std=config.initializer_range)
            else:
                std = _initial_std(name, config)
                nn.init.trunc_normal_(submodule.weight, std=std, a=-cutoff * std, b=cutoff * std)
        elif isinstance(submodule, nn.LayerNorm | nn.RMSNorm):
            nn.init.ones_(submodule.weight)
        if isinstance(submodule, nn.Linear | nn.LayerNorm) and submodule.bias is not None:
            nn.init.zeros_(submodule.bias)


def _initial_std(name: str, config: EncoderConfig) -> float:
    """Returns the deviation of a module's initial weights with ``initializer_cutoff``.

    As in transformers' ModernBERT, it is smaller before each residual connection and in the dense layer of a head, and
    1 / sqrt(H) in the last layer of a head.
    """
    *parents, last = name.split(".")
    if last == "dense" or (last == "output" and "layers" in parents):
        return config.initializer_range / math.sqrt(2 * len(config.layer_order))
    if last == "output":
        return 1 / math.sqrt(config.hidden_size)
    return config.initializer_range
