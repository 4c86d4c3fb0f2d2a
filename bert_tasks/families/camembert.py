"""CamemBERT (Martin et al., 2020), a RoBERTa for French with Unigram pieces."""

from dataclasses import replace

from bert_tasks.families.base import architectures
from bert_tasks.families.roberta import FAMILY as ROBERTA

FAMILY = replace(
    ROBERTA,
    model_type="camembert",
    # The default of the config class, not the size of any published model (camembert-base has 32,005 tokens).
    fields={**ROBERTA.fields, "vocab_size": ("vocab_size", 30522)},
    architectures=architectures("Camembert"),
)
