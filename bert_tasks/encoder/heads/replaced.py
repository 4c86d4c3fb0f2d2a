"""The head of replaced-token detection (ELECTRA), and the output of its generator and discriminator.

Shape legend: N tokens, R masked tokens, T tokens of a sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.heads.base import HeadOutput
from bert_tasks.encoder.heads.tokens import PerTokenHead
from bert_tasks.encoder.heads.vocabulary import VocabularyOutput
from bert_tasks.encoder.layers import initialize
from bert_tasks.encoder.linear import Linear

# The field of a batch with a number in [0, 1) for each masked token, which decides what a generator puts there.
UNIFORM = "uniform"


class ReplacedTokenHead(PerTokenHead):
    """Head with one logit for each token (ELECTRA's discriminator)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config, 1, dropout=0.0)
        self.activation = config.hidden_act
        self.dense = Linear(config.hidden_size, config.hidden_size)
        initialize(self, config)


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplacedTokenOutput(HeadOutput):
    """The logits of generator and discriminator for a batch.

    Attributes:
        logits: ``[N]`` logits of the discriminator for all tokens, in the caller's order of sequences.
        replaced: ``[N]`` 1 if the generator's token differs from the original, else 0.
        masked: ``[N]`` True if the generator chose the token.
        ids: ``[N]`` the ids that the discriminator read.
        generator: Output of the generator for the R masked tokens.
        lengths: Number of tokens of each sequence.
    """

    logit_fields: ClassVar[tuple[str, ...]] = ("logits", "generator")
    logits: Tensor
    replaced: Tensor
    masked: Tensor
    ids: Tensor
    generator: VocabularyOutput
    lengths: tuple[int, ...]

    def split(self, counts: Sequence[int]) -> tuple[Tensor, ...]:
        """Returns ``[T, 4]`` for each sequence, with logit, replaced, masked and id."""
        columns = [column.to(self.dtype) for column in (self.logits, self.replaced, self.masked, self.ids)]
        table = torch.stack(columns, dim=1)
        return torch.split(table, list(self.lengths))
