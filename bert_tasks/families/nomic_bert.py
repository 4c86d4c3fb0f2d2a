"""NomicBERT (Nussbaum et al., arXiv:2402.01613), a BERT with rotary positions and gates."""

from bert_tasks.families.base import (
    BERT_FIELDS,
    EMBEDDING_KEYS,
    ROTARY_FIELDS,
    WEIGHT,
    Family,
    KeyMapping,
    architectures,
    rotary_layers,
    vocabulary_keys,
)

_DROPOUT = {"classifier_dropout": None, "hidden_dropout_prob": 0.0}
_PROJECTIONS = tuple(f"self_attn.{name}_proj" for name in "qkv")
_CLASSIFIER = KeyMapping("head.output", ("classifier",))

FAMILY = Family(
    model_type="nomic_bert",
    prefix="nomic_bert.",
    fields={
        **BERT_FIELDS,
        "vocab_size": ("vocab_size", 30528),
        # With a gate, silu makes the feed-forward SwiGLU (Shazeer, arXiv:2002.05202).
        "hidden_act": ("hidden_act", "silu"),
        "hidden_dropout_prob": ("hidden_dropout_prob", 0.0),
        "attention_probs_dropout_prob": ("attention_probs_dropout_prob", 0.0),
        "max_position_embeddings": ("max_position_embeddings", 2048),
    },
    layer_fields={**ROTARY_FIELDS, "rope_theta": 1000.0},
    of_layers=rotary_layers,
    keys=(
        *EMBEDDING_KEYS,
        KeyMapping("encoder.layers.{i}.attention.qkv", tuple(f"layers.{{i}}.{name}" for name in _PROJECTIONS), WEIGHT),
        KeyMapping("encoder.layers.{i}.attention.output", ("layers.{i}.self_attn.o_proj",), WEIGHT),
        KeyMapping("encoder.layers.{i}.attention_norm", ("layers.{i}.post_attention_layernorm",)),
        # The activation acts on ``gate_proj``, so it is the first half of the encoder's layer.
        KeyMapping("encoder.layers.{i}.intermediate", ("layers.{i}.mlp.gate_proj", "layers.{i}.mlp.up_proj"), WEIGHT),
        KeyMapping("encoder.layers.{i}.output", ("layers.{i}.mlp.down_proj",), WEIGHT),
        KeyMapping("encoder.layers.{i}.output_norm", ("layers.{i}.post_mlp_layernorm",)),
    ),
    pooler="pooler.dense",
    heads={
        "sequence": (KeyMapping("head.dense", ("nomic_bert.pooler.dense",)), _CLASSIFIER),
        "token": (_CLASSIFIER,),
        "masked-lm": vocabulary_keys(
            dense="cls.predictions.transform.dense",
            norm="cls.predictions.transform.layer_norm",
            bias="cls.predictions",
        ),
    },
    architectures=architectures("NomicBert"),
    pretraining=("cls.",),
    # The published files have the names of the code that they came with, and transformers converts them.
    file_names={
        "encoder.layers.": ("layers.",),
        "emb_ln.": ("embeddings.LayerNorm.",),
        "attn.Wqkv.": tuple(f"{name}." for name in _PROJECTIONS),
        "attn.out_proj.": ("self_attn.o_proj.",),
        "norm1.": ("post_attention_layernorm.",),
        "norm2.": ("post_mlp_layernorm.",),
        "mlp.fc11.": ("mlp.up_proj.",),
        "mlp.fc12.": ("mlp.gate_proj.",),
        "mlp.fc2.": ("mlp.down_proj.",),
    },
    decoder="cls.predictions.decoder",
    head_activation="tanh",
    sequence_dropout=_DROPOUT,
    token_dropout=_DROPOUT,
    choice_dropout={},
    options={"positions": "rotary", "absolute_positions": False, "mlp": "gated", "bias": False},
    # Fields of the code that published files came with. transformers reads none of them, whatever their values say.
    only_values={
        "activation_function": "swiglu",
        "n_head": 12,
        "layer_norm_epsilon": 1e-12,
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "prenorm": False,
        "parallel_block": False,
        "use_rms_norm": False,
        "causal": False,
        "num_experts": 0,
    },
)
