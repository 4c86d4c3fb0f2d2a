"""``Encoder``: a published encoder by itself, with the call and the files of transformers' base models.

The HF-shaped call takes padded ``[B, T]`` tensors and transformers' defaults for what is left out; ``padded_inputs``
translates it into rows and a ``Padded`` layout, without data-dependent shapes.

Shape legend: B sequences, T padded length, N = B * T rows, H hidden, X width of an output.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from bert_tasks.checkpoints.hub import resolve
from bert_tasks.checkpoints.load import LoadReport, match_weights, read_config, read_weights
from bert_tasks.checkpoints.save import hf_tensors, save_folder
from bert_tasks.checkpoints.tokenizers import load_tokenizer, with_segments
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.layers import TransformerEncoder, initialize
from bert_tasks.encoder.packing import Padded
from bert_tasks.families import (
    CONFIG_KEY,
    encoder_config,
    family_of,
    parameter_map,
    pooler_is_there,
)


@dataclass(frozen=True, kw_only=True)
class PaddedInputs:
    """Rows of a padded call: ``[N]`` ids each, and the layout."""

    input_ids: Tensor
    position_ids: Tensor
    token_type_ids: Tensor
    layout: Padded

    def rectangle(self, rows: Tensor) -> Tensor:
        """``[N, X] -> [B, T, X]`` with zeros at padding."""
        return rows.view(*self.layout.mask.shape, -1).masked_fill(~self.layout.mask[..., None], 0.0)


def padded_inputs(
    config: EncoderConfig,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    token_type_ids: Tensor | None,
    position_ids: Tensor | None,
    output_attentions: bool,
) -> PaddedInputs:
    """Fills in the defaults of an HF call: without a mask all tokens are real, segments are 0, positions the family's.

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
    tables = {
        "input_ids": (input_ids, config.vocab_size),
        "position_ids": (positions, config.max_position_embeddings),
        "token_type_ids": (types, config.type_vocab_size),
    }
    for name, (ids, rows) in tables.items():
        # Elsewhere a check would wait for the device, or make the graph depend on data.
        if rows and ids.device.type == "cpu" and not torch.compiler.is_compiling() and ids.numel():
            smallest, largest = (int(extreme) for extreme in torch.aminmax(ids))
            if smallest < 0 or largest >= rows:
                outside = smallest if smallest < 0 else largest
                raise ValueError(f"{name} holds {outside}, this checkpoint has embeddings for 0 to {rows - 1}")
    return PaddedInputs(
        input_ids=input_ids.flatten(),
        position_ids=positions.expand(batch, length).flatten(),
        token_type_ids=types.expand(batch, length).flatten(),
        layout=Padded(batch=batch, length=length, mask=mask.bool()),
    )


def default_positions(config: EncoderConfig, input_ids: Tensor) -> Tensor:
    """``[B, T]`` column index; where positions have an offset (RoBERTa), ids that are not padding are counted.

    As ``create_position_ids_from_input_ids`` in transformers: padding gets ``pad_token_id``.
    """
    if not config.position_offset:
        return torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    real = (input_ids != config.pad_token_id).long()
    return real.cumsum(1) * real + config.pad_token_id


class PretrainedModule(nn.Module):
    """What ``Encoder`` and ``TaskModel`` have in common: a configuration, the encoder's modules and a tokenizer."""

    def __init__(self, hf_config: Mapping[str, Any]) -> None:
        super().__init__()
        self.hf_config = dict(hf_config)
        self.config: EncoderConfig = encoder_config(hf_config)
        self.load_report: LoadReport | None = None
        self.tokenizer = None
        self.stack = TransformerEncoder(self.config)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer, with the segment ids of the model's family; setting one that gives others stores a copy."""
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        fits = None if tokenizer is None else with_segments(tokenizer, second=self.config.second_segment)
        self._tokenizer: PreTrainedTokenizerBase | None = fits


class Encoder(PretrainedModule):
    """The encoder of any family.

    Attributes:
        config: our view of the configuration.
        hf_config: ``config.json`` as loaded; written back on saving.
        pooler: the base model's linear layer on the first token, kept where the file has one; not part of the call.
        load_report: what was done with each key of the file; None for a model made from a configuration.
    """

    def __init__(self, hf_config: Mapping[str, Any], *, pooler: bool = False) -> None:
        super().__init__(hf_config)
        self.pooler = nn.Linear(self.config.hidden_size, self.config.hidden_size) if pooler else None
        initialize(self, std=self.config.initializer_range)

    @classmethod
    def from_pretrained(cls, name: str | Path, *, revision: str | None = None) -> Self:
        """Loads published weights in float32, in evaluation mode.

        Args:
            name: a folder, a hub id, or ``package:NAME/PATH`` for weights inside an installed package.
            revision: branch, tag or commit of a hub id.

        Raises:
            CheckpointError: files are missing or damaged, the family is not supported, or a key does not fit.
        """
        folder = resolve(name, revision=revision)
        hf_config = read_config(folder)
        family, config = family_of(hf_config), encoder_config(hf_config)
        tensors = read_weights(folder)
        pooler = pooler_is_there(family, tensors)
        names = parameter_map(family, config, head="base", pooler=pooler)
        with torch.device("meta"):
            model = cls(hf_config, pooler=pooler)
        shapes = {key: value.shape for key, value in model.state_dict().items()}
        matched = match_weights(tensors, names, shapes=shapes, family=family, head_may_be_new=False)
        model.load_state_dict(matched.tensors, assign=True)
        model.load_report = matched.report
        model.tokenizer = load_tokenizer(folder, vocab_size=config.vocab_size, required=False)
        return model.eval()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> Tensor | tuple[Tensor, tuple[Tensor, ...]]:
        """Last hidden states ``[B, T, H]``, zeros at padding.

        All arguments are ``[B, T]`` with transformers' meaning and defaults; masks may have holes. With
        ``output_hidden_states`` also the embeddings' and every layer's states, in transformers' order.

        Raises:
            ValueError: a mask that is not ``[B, T]``, an input that is too long, an id that has no embedding, or
                ``output_attentions``.
        """
        inputs = padded_inputs(self.config, input_ids, attention_mask, token_type_ids, position_ids, output_attentions)
        states: list[Tensor] | None = [] if output_hidden_states else None
        hidden = self.stack(
            inputs.input_ids, inputs.position_ids, inputs.token_type_ids, inputs.layout, hidden_states=states
        )
        last = inputs.rectangle(hidden)
        return last if states is None else (last, tuple(inputs.rectangle(state) for state in states))

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes config.json, model.safetensors and the tokenizer's files; ``AutoModel`` opens the folder."""
        family = family_of(self.hf_config)
        names = parameter_map(family, self.config, head="base", pooler=self.pooler is not None)
        tensors = hf_tensors(self.state_dict(), names, strip_prefix=family.prefix)
        of_a_head = (CONFIG_KEY, "id2label", "label2id", "problem_type")
        kept = {key: value for key, value in self.hf_config.items() if key not in of_a_head}
        config = {**kept, "architectures": [family.architectures["base"]]}
        save_folder(Path(folder), config=config, tensors=tensors, tokenizer=self.tokenizer)
