"""Heads of tasks: pooled sequences, tokens, the vocabulary, and replaced tokens.

Owns the names that the layers above use.
"""

from bert_tasks.encoder.heads.base import Head, HeadOutput
from bert_tasks.encoder.heads.pooled import ChoiceHead, EmbeddingHead, SequenceHead, select_first_tokens
from bert_tasks.encoder.heads.replaced import UNIFORM, ReplacedTokenHead, ReplacedTokenOutput
from bert_tasks.encoder.heads.tokens import CRFHead, HiddenStatesHead, PerTokenHead
from bert_tasks.encoder.heads.vocabulary import PretrainingHead, PretrainingOutput, VocabularyHead, VocabularyOutput

__all__ = [
    "UNIFORM",
    "CRFHead",
    "ChoiceHead",
    "EmbeddingHead",
    "Head",
    "HeadOutput",
    "HiddenStatesHead",
    "PerTokenHead",
    "PretrainingHead",
    "PretrainingOutput",
    "ReplacedTokenHead",
    "ReplacedTokenOutput",
    "SequenceHead",
    "VocabularyHead",
    "VocabularyOutput",
    "select_first_tokens",
]
