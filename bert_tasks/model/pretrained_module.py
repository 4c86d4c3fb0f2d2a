"""The common base of ``Encoder`` and ``TaskModel``, with the HF-shaped call.

The call takes padded ``[B, T]`` tensors. ``padded_inputs`` translates them into rows and a ``Padded`` layout. No shape
depends on the content of a tensor, so that the call can be compiled and exported as a graph.

Shape legend: B sequences, T padded length, N = B * T rows, H hidden, X width of an output.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from bert_tasks.checkpoints.load import LoadReport
from bert_tasks.checkpoints.stored_tokenizers import StoredTokenizer
from bert_tasks.checkpoints.tokenizers import trained_segments
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.layers import TransformerEncoder
from bert_tasks.encoder.packing import Padded
from bert_tasks.families import encoder_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class PaddedInputs:
    """Rows of a padded call, each with ``[N]`` ids, and the layout."""

    input_ids: Tensor
    position_ids: Tensor
    token_type_ids: Tensor
    layout: Padded

    def rectangle(self, rows: Tensor) -> Tensor:
        """Pads ``[N, X] -> [B, T, X]`` with zeros."""
        return rows.view(*self.layout.mask.shape, -1).masked_fill(~self.layout.mask[..., None], 0.0)


def padded_inputs(
    config: EncoderConfig,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    token_type_ids: Tensor | None,
    position_ids: Tensor | None,
    output_attentions: bool,
) -> PaddedInputs:
    """Fills in the defaults of an HF call.

    Without a mask all tokens are real, segments are 0, and positions are the family's.

    Raises:
        ValueError: See ``TaskModel.forward``.
    """
    if output_attentions:
        raise ValueError("output_attentions is not supported, because attention weights are never materialised")
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}, expected [batch, length]")
    batch, length = input_ids.shape
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}, expected {[batch, length]}. "
            "3-D masks are not supported"
        )
    if position_ids is None and length > config.usable_length:
        raise ValueError(f"the input has {length} tokens, this checkpoint has positions for {config.usable_length}")
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
    positions = default_positions(config, input_ids) if position_ids is None else position_ids
    _check_ids(config, input_ids, positions, types)
    return PaddedInputs(
        input_ids=input_ids.flatten(),
        position_ids=positions.expand(batch, length).flatten(),
        token_type_ids=types.expand(batch, length).flatten(),
        layout=Padded(batch=batch, length=length, mask=mask.bool()),
    )


def _check_ids(config: EncoderConfig, input_ids: Tensor, positions: Tensor, types: Tensor) -> None:
    """Raises ValueError if an id has no row in its table, where torch would only say "index out of range"."""
    position_rows = 0  # for positions that are computed, where any id has a value
    if config.absolute_positions or config.positions == "rotary-table":
        position_rows = config.max_position_embeddings
    tables = {
        "input_ids": (input_ids, config.vocab_size),
        "position_ids": (positions, position_rows),
        "token_type_ids": (types, config.type_vocab_size),
    }
    for name, (ids, rows) in tables.items():
        # Elsewhere a check would wait for the device, or make the graph depend on data.
        if rows and ids.device.type == "cpu" and not torch.compiler.is_compiling() and ids.numel():
            extremes = torch.aminmax(ids)
            smallest, largest = int(extremes.min), int(extremes.max)
            if smallest < 0 or largest >= rows:
                outside = smallest if smallest < 0 else largest
                raise ValueError(f"{name} holds {outside}, this checkpoint has embeddings for 0 to {rows - 1}")


def default_positions(config: EncoderConfig, input_ids: Tensor) -> Tensor:
    """Returns positions, as transformers computes them for the family.

    They are column indices ``[1, T]``. For RoBERTa and its relatives they are ``[B, T]``, count the tokens that are no
    padding, and begin behind the id of padding. This is fairseq's rule, in which row ``pad_token_id`` of the table is
    that of padding (transformers, ``create_position_ids_from_input_ids``).
    """
    if not config.position_offset:
        return torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    real = (input_ids != config.pad_token_id).long()
    return real.cumsum(1) * real + config.pad_token_id


class PretrainedModule(nn.Module):
    """Configuration, encoder modules and tokenizer of ``Encoder`` and ``TaskModel``."""

    no_weights_reason: ClassVar[str] = ""  # why a model has no modules of its own, for messages

    def __init__(self, hf_config: Mapping[str, Any]) -> None:
        super().__init__()
        self.hf_config = dict(hf_config)
        self.config: EncoderConfig = encoder_config(hf_config)
        self.load_report: LoadReport | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self.encoder = TransformerEncoder(self.config)

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        """The tokenizer. A tokenizer with other segment ids than the model's is copied (see ``trained_segments``)."""
        # A stored tokenizer is a light stand-in. From now on the caller may change the tokenizer of transformers that
        # it stands for, so the model uses the same object.
        self._tokenizer = getattr(self._tokenizer, "of_transformers", self._tokenizer)
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: "PreTrainedTokenizerBase | None") -> None:
        second = self.config.second_segment
        has_fitting_segments = isinstance(tokenizer, StoredTokenizer) and tokenizer.second_segment == second
        if tokenizer is not None and not has_fitting_segments:
            tokenizer = trained_segments(tokenizer, second=second)
        self._tokenizer = tokenizer
