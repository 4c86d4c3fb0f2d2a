"""XLM-RoBERTa (Conneau et al., 2020), a RoBERTa for 100 languages."""

from dataclasses import replace

from bert_tasks.families.base import architectures
from bert_tasks.families.roberta import FAMILY as ROBERTA

FAMILY = replace(
    ROBERTA,
    model_type="xlm-roberta",
    # The default of the config class, not the size of any published model (they have 250,002 tokens).
    fields={**ROBERTA.fields, "vocab_size": ("vocab_size", 30522)},
    architectures=architectures("XLMRoberta"),
)
