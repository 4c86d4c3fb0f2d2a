"""Owns the reference side of parity tests: small transformers models of every family, and batches.

At transformers' own initialisation (0.02) parity tests are blind to swapped norms or another gelu, so every
weight is redrawn: norm weights 1 + 0.2 N(0, 1), everything else 0.3 N(0, 1).

Shape legend: B sequences, T padded length.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, TypeVar

import pytest
import torch
import transformers
from _pytest.mark import ParameterSet
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, modeling_rope_utils
from transformers.models.deberta_v2 import modeling_deberta_v2
from transformers.models.modernbert import modeling_modernbert

# RoBERTa under other names, and with norms elsewhere.
ROBERTAS = ("roberta", "xlm-roberta", "camembert", "roberta-prelayernorm", "xlm-roberta-xl")
# No part of their exported graphs is their own. XLM-RoBERTa and CamemBERT differ from RoBERTa in names and sizes alone.
# Megatron-BERT and XLM-RoBERTa XL have the layers of RoBERTa-PreLayerNorm and the embeddings of BERT and RoBERTa.
# NomicBERT has the layers of GTE with the gates of EuroBERT.
WITHOUT_OWN_GRAPH = ("xlm-roberta", "camembert", "xlm-roberta-xl", "megatron-bert", "nomic_bert")
# Later versions of transformers than the oldest one that the package accepts have these.
LATER_FAMILIES = ("eurobert", "nomic_bert", "gte", "ultrabert")
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
with_current_names = pytest.mark.skipif(
    VERSION < (5, 23),
    reason="older versions of transformers have other tensors in some files",
)
# `make test` runs these through the tests marked `every_family` alone.
LONG_FAMILIES = (
    *(*ROBERTAS[1:], "modernbert", "deberta-v2", "mpnet", "megatron-bert", "ernie", "rembert", "roformer"),
    *LATER_FAMILIES,
)
FAMILIES = ("bert", "roberta", "distilbert", "albert", "electra", *LONG_FAMILIES)
# Position ids count from the padding id.
AFTER_PADDING = (*ROBERTAS, "mpnet")
# transformers' classes take no segment ids; RoBERTa's have one segment.
WITHOUT_TYPES = ("distilbert", "modernbert", "mpnet", "eurobert", "ultrabert")
WITHOUT_SEGMENTS = (*WITHOUT_TYPES, *ROBERTAS, "deberta-v2")
HEADS = ("base", "sequence", "token", "span")
Head = Literal["base", "sequence", "token", "span", "choice"]
PREFIX = {
    "bert": "Bert",
    "roberta": "Roberta",
    "distilbert": "DistilBert",
    "albert": "Albert",
    "electra": "Electra",
    "xlm-roberta": "XLMRoberta",
    "camembert": "Camembert",
    "modernbert": "ModernBert",
    "deberta-v2": "DebertaV2",
    "mpnet": "MPNet",
    "megatron-bert": "MegatronBert",
    "roberta-prelayernorm": "RobertaPreLayerNorm",
    "xlm-roberta-xl": "XLMRobertaXL",
    "eurobert": "EuroBert",
    "nomic_bert": "NomicBert",
    "gte": "Gte",
    "ultrabert": "Ultrabert",
    "ernie": "Ernie",
    "rembert": "RemBert",
    "roformer": "RoFormer",
}
CLASS_SUFFIX = {
    "base": "Model",
    "sequence": "ForSequenceClassification",
    "token": "ForTokenClassification",
    "span": "ForQuestionAnswering",
    "choice": "ForMultipleChoice",
}


def has_head(family: str, head: Head) -> bool:
    """Whether transformers has the class, and it computes the same for a row in any batch.

    RoFormer's class for multiple choice reads the last column, which may be padding.
    """
    return hasattr(transformers, PREFIX[family] + CLASS_SUFFIX[head]) and (family, head) != ("roformer", "choice")


def tolerance_float32(family: str) -> float:
    """How far float32 logits may be apart. NomicBERT and GTE multiply errors more: in transformers, too, they are up to
    1e-4 of the largest logit from float64.
    """
    return 1.5e-4 if family in ("nomic_bert", "gte") else 5e-5


EVERY_HEAD = [(family, head) for family in FAMILIES for head in HEADS if has_head(family, head)]
WITH_SPAN = [family for family in FAMILIES if has_head(family, "span")]
WITH_CHOICE = [family for family in FAMILIES if has_head(family, "choice")]

Case = TypeVar("Case")

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
MPNET = {
    "max_position_embeddings": 50,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
ROBERTA = MPNET | {"type_vocab_size": 1}
CHANGES: dict[str, dict[str, Any]] = {
    "bert": {},
    **dict.fromkeys(ROBERTAS, ROBERTA),
    "mpnet": MPNET,
    "distilbert": {},
    "megatron-bert": {},
    "ernie": {"use_task_id": True},
    "albert": {"embedding_size": 20, "num_hidden_groups": 2},
    "electra": {"embedding_size": 20},
    "rembert": {"input_embedding_size": 20, "output_embedding_size": 44},
    # Rotary positions need heads of an even size.
    "roformer": {"embedding_size": 20, "num_attention_heads": 6},
    # Windows of three tokens on each side between global layers, 0 and 3; heads of an even size, too.
    "modernbert": {
        "num_attention_heads": 6,
        "local_attention": 6,
        "pad_token_id": 0,
        "cls_token_id": 1,
        "bos_token_id": 1,
        "sep_token_id": 2,
        "eos_token_id": 2,
    },
    # Three queries share keys and values; heads are narrower than a sixth of the hidden size.
    "eurobert": {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    },
    # Windows of three tokens on each side in layers 0, 1 and 3, and another base of positions there.
    "ultrabert": {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "sliding_window": 3,
        "prediction_head_size": 20,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
    },
    "nomic_bert": {"num_attention_heads": 6},
    "gte": {"num_attention_heads": 6, "type_vocab_size": 2},
    # As the published models of v3, with fewer buckets, so that short inputs reach the shared ones.
    "deberta-v2": {
        "relative_attention": True,
        "position_buckets": 16,
        "max_relative_positions": -1,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "layer_norm_eps": 1e-7,
    },
}


def root_of_size(query: Tensor, products: int) -> Tensor:
    """What transformers' DeBERTa divides scores by, without its rounding to float32 in float64 models."""
    return torch.tensor(query.size(-1) * products, dtype=query.dtype).sqrt()


STOCK_ROOT_OF_SIZE = modeling_deberta_v2.scaled_size_sqrt
modeling_deberta_v2.scaled_size_sqrt = root_of_size


def hf_config(family: str, **changes: Any) -> PretrainedConfig:
    """Hidden size 36 in 4 heads of 9, 4 layers (ALBERT: in 2 groups), 3 labels, 48 usable positions.

    ``changes`` take transformers' common names (``hidden_size``) for DistilBERT too.
    """
    config_class = _stock(family, "Config")
    settings = {**COMMON, **CHANGES[family], **changes}
    names = config_class.attribute_map | {"intermediate_size": "hidden_dim"} if family == "distilbert" else {}
    return config_class(**{names.get(name, name): value for name, value in settings.items()})


def hf_class(family: str, head: Head) -> type[PreTrainedModel]:
    return _stock(family, CLASS_SUFFIX[head])


def lacks(family: str) -> bool:
    """Returns True for a family with which this version of transformers is no reference."""
    is_missing = family in LATER_FAMILIES and family not in transformers.CONFIG_MAPPING
    return is_missing or (family == "modernbert" and VERSION < (5, 3))


def _stock(family: str, suffix: str) -> Any:
    """Returns a class of transformers. A test of a family that this version does not have yet is skipped.

    Before 5.3 ModernBERT's scores are not finite where nothing is attended to, and its configurations differ.
    """
    if lacks(family):
        pytest.skip(f"transformers {transformers.__version__} is no reference for {family}")
    return getattr(transformers, PREFIX[family] + suffix)


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


class TorchInFloat64:
    """torch, for functions of transformers that name float32, which become float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def hf_frequencies(
    config: PretrainedConfig, dtype: torch.dtype, *, length: int, layer_type: str | None = None
) -> tuple[Tensor, float]:
    """``[D / 2]`` frequencies and the factor of sines and cosines, of a new model for a batch of this length."""
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    if parameters["rope_type"] == "default":
        size = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
        return 1.0 / parameters["rope_theta"] ** (torch.arange(0, size, 2, dtype=dtype) / size), 1.0
    compute = modeling_rope_utils.ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
    with pytest.MonkeyPatch.context() as patch:
        if dtype == torch.float64:
            patch.setattr(modeling_rope_utils, "torch", TorchInFloat64())
        return compute(config, None, seq_len=length, layer_type=layer_type)


def lift_float32_roundings() -> None:
    """Lets transformers' models with rotary positions compute in float64 throughout where their weights are in float64.

    They round to float32 in four places: the angles of positions, the turned queries and keys, softmax (``eager``), and
    norms. In float32 the results stay the same, bit by bit.
    """

    def angles(self: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(x.dtype, torch.float32)
        length = int(position_ids.max()) + 1
        frequencies, factor = hf_frequencies(self.config, dtype, length=length, layer_type=layer_type)
        turns = position_ids[..., None].to(dtype) * frequencies.to(x.device)
        both = torch.cat([turns, turns], dim=-1)
        return (both.cos() * factor).to(x.dtype), (both.sin() * factor).to(x.dtype)

    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, ...]:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return tuple(tensor * cos + modeling_modernbert.rotate_half(tensor) * sin for tensor in (q, k))

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
    ) -> tuple[Tensor, Tensor]:
        key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1) for tensor in (key, value))
        scores = query @ key.transpose(2, 3) * scaling
        weights = (scores if mask is None else scores + mask).softmax(dim=-1)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    def normalised(self: Any, hidden: Tensor) -> Tensor:
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        scales = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (wide * scales).to(hidden.dtype)

    modeling_modernbert.ModernBertRotaryEmbedding.forward = angles
    modeling_modernbert.apply_rotary_pos_emb = turned
    modeling_modernbert.eager_attention_forward = attention
    for family in LATER_FAMILIES:
        if family in transformers.CONFIG_MAPPING:
            module = import_module(f"transformers.models.{family}.modeling_{family}")
            getattr(module, f"{PREFIX[family]}RotaryEmbedding").forward = angles
            if family in ("eurobert", "ultrabert"):
                module.eager_attention_forward = attention
                getattr(module, f"{PREFIX[family]}RMSNorm").forward = normalised


STOCK_MODERNBERT = {
    name: getattr(modeling_modernbert, name) for name in ("apply_rotary_pos_emb", "eager_attention_forward")
} | {"forward": modeling_modernbert.ModernBertRotaryEmbedding.forward}
lift_float32_roundings()


@torch.no_grad()
def widen(model: nn.Module, *, seed: int) -> None:
    """Redraws every trained parameter in the order of names: a seed gives the same weights in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    norms = {id(module.weight) for module in model.modules() if type(module).__name__.endswith("Norm")}
    for _, parameter in sorted(model.named_parameters()):
        if not parameter.requires_grad:  # RoFormer's sines and cosines
            continue
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        wide = 1 + 0.2 * noise if id(parameter) in norms else 0.3 * noise
        parameter.copy_(wide.to(parameter.dtype))


def with_families(
    cases: Mapping[str, Case],
    *,
    families: Callable[[Case], Sequence[str]] = lambda case: FAMILIES,
    every: bool = True,
    in_turn: bool = False,
) -> list[ParameterSet]:
    """Parameters (family, case), of which `make test` runs some.

    Args:
        cases: by the names that tests bear.
        families: those that a case runs on.
        every: run the first case on every family; else it runs on one, as the other cases do.
        in_turn: a family has one of the cases and not all.
    """
    parameters = []
    for index, (name, case) in enumerate(cases.items()):
        usual = [family for family in families(case) if family not in LONG_FAMILIES]
        quick = usual if every and index == 0 else [usual[index % len(usual)]]
        for number, family in enumerate(families(case)):
            if in_turn and number % len(cases) != index and family not in quick:
                continue
            marks = () if family in quick else pytest.mark.slow
            parameters.append(pytest.param(family, case, id=f"{name}-{family}", marks=marks))
    return parameters


@dataclass(frozen=True, kw_only=True)
class HFBatch:
    """A padded batch as transformers takes it; all three are int64 ``[B, T]``."""

    input_ids: Tensor
    attention_mask: Tensor
    token_type_ids: Tensor

    def inputs(self, family: str) -> dict[str, Tensor]:
        """Keyword arguments for the family's transformers model (some take no segment ids)."""
        inputs = {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
        return inputs if family in WITHOUT_TYPES else inputs | {"token_type_ids": self.token_type_ids}


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
        if family not in (*ROBERTAS, "modernbert", "eurobert", "ultrabert"):
            token_type_ids[row, first + (length + 1) // 2 : first + length] = 1
    return HFBatch(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
