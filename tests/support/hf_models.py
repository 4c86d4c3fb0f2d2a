"""Owns the reference side of parity tests: small transformers models of every family, and batches.

At transformers' own initialisation (0.02) parity tests are blind to swapped norms or another gelu, so every
weight is redrawn: norm weights 1 + 0.2 N(0, 1), everything else 0.3 N(0, 1).

Shape legend: B sequences, T padded length.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

FAMILIES = ("bert", "roberta", "distilbert", "albert", "electra")
HEADS = ("base", "sequence", "token", "span")
Head = Literal["base", "sequence", "token", "span"]
PREFIX = {
    "bert": "Bert",
    "roberta": "Roberta",
    "distilbert": "DistilBert",
    "albert": "Albert",
    "electra": "Electra",
}
CLASS_SUFFIX = {
    "base": "Model",
    "sequence": "ForSequenceClassification",
    "token": "ForTokenClassification",
    "span": "ForQuestionAnswering",
}

VOCAB_SIZE = 120
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 36,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "intermediate_size": 56,
    "max_position_embeddings": 48,
    "num_labels": 3,
}
CHANGES: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {
        "type_vocab_size": 1,
        "max_position_embeddings": 50,
        "layer_norm_eps": 1e-5,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    "distilbert": {},
    "albert": {"embedding_size": 20, "num_hidden_groups": 2},
    "electra": {"embedding_size": 20},
}


def hf_config(family: str, **changes: Any) -> PretrainedConfig:
    """Hidden size 36 in 4 heads of 9, 4 layers (ALBERT: in 2 groups), 3 labels, 48 usable positions.

    ``changes`` take transformers' common names (``hidden_size``) for DistilBERT too.
    """
    config_class = getattr(transformers, f"{PREFIX[family]}Config")
    settings = {**COMMON, **CHANGES[family], **changes}
    names = config_class.attribute_map | {"intermediate_size": "hidden_dim"} if family == "distilbert" else {}
    return config_class(**{names.get(name, name): value for name, value in settings.items()})


def hf_class(family: str, head: Head) -> type[PreTrainedModel]:
    return getattr(transformers, PREFIX[family] + CLASS_SUFFIX[head])


def hf_model(
    family: str,
    head: Head = "base",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    config: PretrainedConfig | None = None,
    **model_arguments: Any,
) -> PreTrainedModel:
    """A reference model in eval mode with eager attention. ``model_arguments``: e.g. add_pooling_layer."""
    if config is None:
        config = hf_config(family, num_labels=2 if head == "span" else 3)
    config._attn_implementation = "eager"
    model = hf_class(family, head)(config, **model_arguments).to(dtype).eval()
    widen(model, seed=seed)
    return model


@torch.no_grad()
def widen(model: nn.Module, *, seed: int) -> None:
    """Redraws every parameter in the order of names: a seed gives the same weights in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    norms = {id(module.weight) for module in model.modules() if isinstance(module, nn.LayerNorm)}
    for _, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        wide = 1 + 0.2 * noise if id(parameter) in norms else 0.3 * noise
        parameter.copy_(wide.to(parameter.dtype))


@dataclass(frozen=True, kw_only=True)
class HFBatch:
    """A padded batch as transformers takes it; all three are int64 ``[B, T]``."""

    input_ids: Tensor
    attention_mask: Tensor
    token_type_ids: Tensor

    def inputs(self, family: str) -> dict[str, Tensor]:
        """Keyword arguments for the family's transformers model (DistilBERT takes no segment ids)."""
        inputs = {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
        return inputs if family == "distilbert" else inputs | {"token_type_ids": self.token_type_ids}


def random_batch(
    family: str,
    *,
    lengths: tuple[int, ...] = (17, 1, 30, 9, 2),
    side: Literal["left", "right"] = "right",
    seed: int = 0,
) -> HFBatch:
    """Ragged random sequences; the second half of each is segment 1 where the family has two segments."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    pad = hf_config(family).pad_token_id
    input_ids = torch.full(shape, pad)  # [B, T]
    attention_mask = torch.zeros(shape, dtype=torch.long)
    token_type_ids = torch.zeros(shape, dtype=torch.long)
    for row, length in enumerate(lengths):
        first = 0 if side == "right" else shape[1] - length
        real = slice(first, first + length)
        input_ids[row, real] = torch.randint(3, VOCAB_SIZE, (length,), generator=generator)
        attention_mask[row, real] = 1
        if family != "roberta":
            token_type_ids[row, first + (length + 1) // 2 : first + length] = 1
    return HFBatch(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
