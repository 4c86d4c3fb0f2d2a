"""The HF-shaped call: padded ``[B, T]`` tensors in, with transformers' defaults for what is left out.

Owns the translation of an HF call into rows and a Padded layout, free of data-dependent shapes.

Shape legend: B sequences, T padded length, N = B * T rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.packing import Padded


@dataclass(frozen=True, kw_only=True)
class ShapedInputs:
    """Rows of a padded call: ``[N]`` ids each, and the layout."""

    input_ids: Tensor
    position_ids: Tensor
    token_type_ids: Tensor
    layout: Padded

    def rectangle(self, rows: Tensor) -> Tensor:
        """``[N, X] -> [B, T, X]`` with zeros at padding."""
        return rows.view(*self.layout.mask.shape, -1).masked_fill(~self.layout.mask[..., None], 0.0)


def shaped_inputs(
    config: EncoderConfig,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    token_type_ids: Tensor | None,
    position_ids: Tensor | None,
    *,
    output_attentions: bool,
) -> ShapedInputs:
    """Fills in the defaults of an HF call: no mask means all real, segments 0, positions as the family counts them.

    Raises:
        ValueError: attention weights are asked for, the mask is not ``[B, T]``, the input is too long, or an id is
            outside its embedding table (checked on the CPU, where reading the ids waits for nothing).
    """
    if output_attentions:
        raise ValueError("output_attentions is not supported: attention weights are never materialised")
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}, expected [batch, length]")
    batch, length = input_ids.shape
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}, expected {[batch, length]}; "
            "3-D masks are not supported"
        )
    if position_ids is None and length > config.usable_length:
        raise ValueError(f"the input has {length} tokens, this checkpoint has positions for {config.usable_length}")
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
    positions = default_positions(config, input_ids) if position_ids is None else position_ids
    _check_ids("input_ids", input_ids, config.vocab_size)
    _check_ids("position_ids", positions, config.max_position_embeddings)
    if config.type_vocab_size:
        _check_ids("token_type_ids", types, config.type_vocab_size)
    return ShapedInputs(
        input_ids=input_ids.flatten(),
        position_ids=positions.expand(batch, length).flatten(),
        token_type_ids=types.expand(batch, length).flatten(),
        layout=Padded(batch=batch, length=length, mask=mask.bool()),
    )


def _check_ids(name: str, ids: Tensor, rows: int) -> None:
    if ids.device.type != "cpu" or torch.compiler.is_compiling() or not ids.numel():
        return  # a check would wait for the device, or make the graph depend on data
    smallest, largest = (int(extreme) for extreme in torch.aminmax(ids))
    if smallest < 0 or largest >= rows:
        outside = smallest if smallest < 0 else largest
        raise ValueError(f"{name} holds {outside}, this checkpoint has embeddings for 0 to {rows - 1}")


def default_positions(config: EncoderConfig, input_ids: Tensor) -> Tensor:
    """``[B, T]`` column index; where positions have an offset (RoBERTa), ids that are not padding are counted.

    As ``create_position_ids_from_input_ids`` in transformers: padding gets ``pad_token_id``.
    """
    if not config.position_offset:
        return torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    real = (input_ids != config.pad_token_id).long()
    return real.cumsum(1) * real + config.pad_token_id
