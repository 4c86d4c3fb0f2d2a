"""DistilBERT (Sanh et al., arXiv:1910.01108), a BERT without segments and pooler."""

from bert_tasks.families.base import (
    BERT_FIELDS,
    EMBEDDING_KEYS,
    Family,
    architectures,
    choice_keys,
    head_keys,
    layer_keys,
    vocabulary_keys,
)

FAMILY = Family(
    model_type="distilbert",
    prefix="distilbert.",
    fields={
        **BERT_FIELDS,
        # The config class has short names of its own.
        "hidden_size": ("dim", 768),
        "num_hidden_layers": ("n_layers", 6),
        "num_attention_heads": ("n_heads", 12),
        "intermediate_size": ("hidden_dim", 3072),
        "hidden_act": ("activation", "gelu"),
        "hidden_dropout_prob": ("dropout", 0.1),
        "attention_probs_dropout_prob": ("attention_dropout", 0.1),
        # The code of transformers fixes these two. No config has a field for them.
        "type_vocab_size": ("", 0),
        "layer_norm_eps": ("", 1e-12),
    },
    keys=EMBEDDING_KEYS
    + layer_keys(
        "transformer.layer.{i}.",
        qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        attention_output="attention.out_lin",
        attention_norm="sa_layer_norm",
        intermediate="ffn.lin1",
        output="ffn.lin2",
        output_norm="output_layer_norm",
    ),
    # The first layer of the classifier takes the place of BERT's pooler, with relu instead of tanh.
    pooler=None,
    heads={
        **head_keys(dense="pre_classifier", output="classifier"),
        **choice_keys(dense="pre_classifier"),
        "masked-lm": vocabulary_keys(dense="vocab_transform", norm="vocab_layer_norm", bias="vocab_projector"),
    },
    architectures=architectures("DistilBert"),
    pretraining=("vocab_transform.", "vocab_layer_norm.", "vocab_projector."),
    decoder="vocab_projector",
    head_activation="relu",
    sequence_dropout={"seq_classif_dropout": 0.2},
    choice_dropout={"seq_classif_dropout": 0.2},
    token_dropout={"dropout": 0.1},
    span_dropout={"qa_dropout": 0.1},
    # ``dropout`` counts after the embeddings and the feed-forward, but not after the output of attention.
    options={"attention_output_dropout": 0.0},
    has_segments=False,
)
