"""RoBERTa (Liu et al., arXiv:1907.11692), a BERT whose positions count from the padding id.

fairseq, in which it was trained, gave padding the position ``pad_token_id`` and the first token the next one. So the
first rows of the table of positions belong to no token, and 514 rows hold 512 tokens.
"""

from dataclasses import replace

from bert_tasks.families.base import (
    BERT_FIELDS,
    CLASSIFIER_DROPOUT,
    architectures,
    choice_keys,
    head_keys,
    vocabulary_keys,
)
from bert_tasks.families.bert import FAMILY as BERT

FAMILY = replace(
    BERT,
    model_type="roberta",
    prefix="roberta.",
    fields={**BERT_FIELDS, "vocab_size": ("vocab_size", 50265), "pad_token_id": ("pad_token_id", 1)},
    # The classifier has a linear layer of its own. Only multiple choice reads the pooler.
    heads={
        **head_keys(dense="classifier.dense", output="classifier.out_proj"),
        **choice_keys(dense="roberta.pooler.dense"),
        "masked-lm": vocabulary_keys(dense="lm_head.dense", norm="lm_head.layer_norm", bias="lm_head"),
    },
    architectures=architectures("Roberta"),
    pretraining=("lm_head.",),
    decoder="lm_head.decoder",
    # Whatever ``hidden_act`` says.
    vocabulary_activation="gelu",
    # The classifier drops inputs of both of its layers.
    dense_dropout=CLASSIFIER_DROPOUT,
    choice_dropout={"hidden_dropout_prob": 0.1},
    positions_after_padding=True,
    # The table of segments has one row, although some tokenizers give the second text of a pair segment 1.
    has_segments=False,
)
