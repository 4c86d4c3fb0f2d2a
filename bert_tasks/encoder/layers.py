"""Embeddings and layers: token ids in, hidden states out, for every family.

Only attention sees the layout; everything else runs on the rows of ``[N, H]``.

Shape legend: N tokens, B sequences, H hidden, A heads, D head size, R tokens that a head reads.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bert_tasks.encoder.attention import attend, attend_first
from bert_tasks.encoder.config import Activation, EncoderConfig
from bert_tasks.encoder.dropout import Dropout
from bert_tasks.encoder.linear import Linear, activated, linear
from bert_tasks.encoder.packing import Layout, Packed, Selection
from bert_tasks.errors import CheckpointError


class Embeddings(nn.Module):
    """Word, position and segment embeddings, summed and normalised, then projected where the family does so."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width = config.embedding_size
        self.word = nn.Embedding(config.vocab_size, width, padding_idx=config.pad_token_id)
        self.position = nn.Embedding(config.max_position_embeddings, width)
        self.token_type = nn.Embedding(config.type_vocab_size, width) if config.type_vocab_size else None
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.projection = Linear(width, config.hidden_size) if config.project_embeddings else None

    def forward(self, input_ids: Tensor, position_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        """``[N]`` ids each -> ``[N, H]``"""
        embedded: Tensor = self.word(input_ids) + self.position(position_ids)  # [N, width]
        if self.token_type is not None:
            embedded = embedded + self.token_type(token_type_ids)
        embedded = self.dropout(self.norm(embedded))
        if self.projection is not None:
            embedded = self.projection(embedded)
        return embedded


class Attention(nn.Module):
    """Self-attention; query, key and value are one linear layer (rows of its weight: all q, all k, all v)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.dropout = config.attention_probs_dropout_prob
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size)
        self.output = Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor, layout: Layout, selection: Selection | None = None) -> Tensor:
        """Context ``[N, H]``, or ``[R, H]`` of the selected tokens, before the output projection."""
        dropout = self.dropout if self.training else 0.0
        is_first = selection is not None and selection.first_tokens
        if is_first and isinstance(layout, Packed) and hidden.device.type == "cpu":
            # The other tokens need keys and values, but no queries.
            sizes = [hidden.shape[1], 2 * hidden.shape[1]]
            query_weight, key_value_weight = torch.split(self.qkv.weight, sizes)
            query_bias, key_value_bias = torch.split(self.qkv.bias, sizes)
            first = hidden.index_select(0, layout.cu_seqlens[:-1])  # [B, H]
            query = linear(first, query_weight, query_bias).view(len(first), self.heads, -1)  # [B, A, D]
            key_value = linear(hidden, key_value_weight, key_value_bias).view(len(hidden), 2, self.heads, -1)
            return attend_first(query, key_value, layout, dropout=dropout).index_select(0, layout.order)
        qkv = self.qkv(hidden).unflatten(-1, (3, self.heads, -1))  # [N, 3, A, D]
        context = attend(qkv, layout, dropout=dropout)
        return context if selection is None else context.index_select(0, selection.rows)


class Layer(nn.Module):
    """Attention and feed-forward, each followed by dropout, residual and norm (post-norm)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.activation: Activation = config.hidden_act
        self.attention = Attention(config)
        self.attention_norm = nn.LayerNorm(hidden, eps=config.layer_norm_eps)
        self.intermediate = Linear(hidden, config.intermediate_size)
        self.output = Linear(config.intermediate_size, hidden)
        self.output_norm = nn.LayerNorm(hidden, eps=config.layer_norm_eps)
        self.attention_dropout = Dropout(config.attention_output_dropout)
        self.output_dropout = Dropout(config.feed_forward_dropout)

    def forward(self, hidden: Tensor, layout: Layout, selection: Selection | None = None) -> Tensor:
        """``[N, H] -> [N, H]``, or ``[R, H]`` of the selected tokens; keys and values are those of all tokens."""
        context = self.attention(hidden, layout, selection)  # [R, H]
        if selection is not None:
            hidden = hidden.index_select(0, selection.rows)
        hidden = self.attention_norm(hidden + self.attention_dropout(self.attention.output(context)))
        expanded = activated(self.intermediate, hidden, self.activation)  # [R, intermediate]
        hidden = self.output_norm(hidden + self.output_dropout(self.output(expanded)))
        return hidden


class TransformerEncoder(nn.Module):
    """Embeddings and all layers.

    Attributes:
        gradient_checkpointing: compute each layer again in the backward pass in place of keeping its activations.

    Raises:
        CheckpointError: the configuration has an option that this version does not compute.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        computed = {"norm": "post", "positions": "absolute", "mlp": "dense", "attention_window": None, "bias": True}
        for name, value in computed.items():
            needed = getattr(config, name)
            if needed != value:
                raise CheckpointError(
                    f"the encoder needs {name} = {needed!r}; this version computes {name} = {value!r} only"
                )
        self.layer_order = config.layer_order
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(max(config.layer_order) + 1))
        self.gradient_checkpointing = False

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        token_type_ids: Tensor,
        layout: Layout,
        *,
        selection: Selection | None = None,
        hidden_states: list[Tensor] | None = None,
    ) -> Tensor:
        """Runs all layers.

        Args:
            input_ids, position_ids, token_type_ids: ``[N]``.
            layout: where the sequences are.
            selection: the tokens of the last layer that will be read; default: all.
            hidden_states: a list that receives the embeddings and every layer's output, in HF's order.

        Returns:
            ``[R, H]`` of the selected tokens, or ``[N, H]``.
        """
        hidden: Tensor = self.embeddings(input_ids, position_ids, token_type_ids)  # [N, H]
        if hidden.device.type == "cpu" and torch.is_autocast_enabled("cpu"):  # else the residuals would stay in float32
            hidden = hidden.to(torch.get_autocast_dtype("cpu"))
        if hidden_states is not None:
            hidden_states.append(hidden)
        last = len(self.layer_order) - 1
        for position, index in enumerate(self.layer_order):
            layer, wanted = self.layers[index], selection if position == last else None
            if self.gradient_checkpointing and self.training:
                hidden = checkpoint(layer, hidden, layout, wanted, use_reentrant=False)
            else:
                hidden = layer(hidden, layout, wanted)
            if hidden_states is not None:
                hidden_states.append(hidden)
        return hidden

    def last_queries_keys_values(self, hidden_states: Sequence[Tensor]) -> Tensor:
        """``[N, 3, H]`` of the last layer for all tokens, from the states that ``forward`` collected.

        They are computed once more, so that no layer has to hand them out, checkpointed or not.
        """
        index = self.layer_order[-1]
        last = cast("Layer", self.layers[index])
        qkv: Tensor = last.attention.qkv(hidden_states[-2])
        return qkv.view(len(qkv), 3, -1)


def initialize(module: nn.Module, *, std: float) -> None:
    """Draws weights as BERT does: linear and embedding weights normal(0, std), biases 0, norms the identity."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=std)
            nn.init.zeros_(part.bias)
        elif isinstance(part, nn.Embedding):
            nn.init.normal_(part.weight, std=std)
        elif isinstance(part, nn.LayerNorm):
            nn.init.ones_(part.weight)
            nn.init.zeros_(part.bias)
