"""Scores of texts by a masked language model, which masks one token after the other.

Shape legend: R masked tokens of a copy of a window, which are one or none.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from bert_tasks.data.columns import Column, Row
from bert_tasks.encoder.config import HeadKind
from bert_tasks.encoder.heads import VocabularyOutput
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import DataError, UsageError
from bert_tasks.outputs.base import LossTerm, Output
from bert_tasks.outputs.features import Feature
from bert_tasks.outputs.logits import vocabulary_output
from bert_tasks.outputs.prediction import Prediction
from bert_tasks.outputs.settings import require
from bert_tasks.outputs.vocabulary import NO_LABELS, SentenceObjective, row_values

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST = 700.0  # exp of 710 overflows in float64


@dataclass(frozen=True, kw_only=True)
class TextScorePrediction(Prediction):
    """The score of a text (``settings.score``), and its number of tokens.

    Attributes:
        score: The score. None for the pseudo-perplexity of a text without tokens.
        tokens: Number of tokens of its words, without special tokens.
    """

    score: float | None
    tokens: int


@dataclass(frozen=True, kw_only=True)
class TextScore(Output[TextScorePrediction]):
    """A score for each text, from the logits over the vocabulary of each of its tokens.

    It ranks texts by how probable a masked language model finds them, for example the hypotheses of a speech
    recogniser. Each token is masked once, so a text of n tokens costs n forward passes. It is for predictions only.
    ``Vocabulary`` trains and evaluates the same head.

    Attributes:
        labels: None. Do not set them.
        sentence_objective: See ``Vocabulary``. The model has a head for it, and windows hold whole sentences.
        score: ``pppl`` is the pseudo-perplexity, exp of the mean negative log-probability of a token (Salazar et al.,
            arXiv:1910.14659), which is lower for more probable texts, and None for a text without tokens.
            ``pll-word-l2r`` is the pseudo-log-likelihood, the sum of the log-probabilities, for which the later tokens
            of a token's word are masked, too (Kauf and Ivanova, arXiv:2305.10588).

    Examples:
        >>> MaskedLanguageModeling.of(score="pppl").output
        TextScore(labels=(), sentence_objective='none', score='pppl')
    """

    name: ClassVar[str] = "text-scores"
    prediction: ClassVar[type[Prediction]] = TextScorePrediction
    has_labels: ClassVar[bool] = False
    head_kind: ClassVar[HeadKind | None] = "masked-lm"
    pipeline_tag: ClassVar[str | None] = "fill-mask"
    primary_metric: ClassVar[str] = "perplexity"  # of the model, which another output measures
    lower_is_better: ClassVar[frozenset[str]] = frozenset({"perplexity"})
    column: ClassVar[Column | None] = None
    sentence_objective: SentenceObjective = "none"
    score: Literal["pppl", "pll-word-l2r"] = "pppl"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(not self.labels, NO_LABELS)

    # Training, which is refused

    @property
    def no_training_reason(self) -> str:
        """Why the model can be neither trained nor evaluated, and what to do."""
        return f'score = "{self.score}" is for predictions. Set score = "none" to train or to evaluate'

    @property
    def no_teacher_reason(self) -> str:
        return self.no_training_reason

    def counts(self, features: Sequence[Feature]) -> dict[str, float]:
        """Raises UsageError."""
        raise UsageError(self.no_training_reason)

    def loss(self, logits: Any, batch: PackedBatch) -> tuple[LossTerm, ...]:
        """Raises UsageError."""
        raise UsageError(self.no_training_reason)

    def metrics(self, predictions: Sequence[TextScorePrediction], rows: Sequence[Row]) -> dict[str, float]:
        """Raises UsageError."""
        raise UsageError(self.no_training_reason)

    # Predictions

    def compact(self, logits: Sequence[Any], features: Sequence[Feature]) -> Sequence[Tensor]:
        """Returns the log-probability of the masked token for each copy of a window, ``[R]``."""
        outputs = [vocabulary_output(each) for each in logits]
        sizes = [len(output) for output in outputs]
        whole = VocabularyOutput.cat(outputs)
        labels: list[float] = []
        for feature in features:
            of_copy = feature.get("labels")
            if of_copy is not None:
                labels += of_copy
        ids = torch.tensor(labels, dtype=torch.int64).to(whole.hidden.device)
        return torch.split(whole.log_probabilities(ids), sizes)

    def decode(
        self,
        compact: Sequence[Tensor],
        features: Sequence[Feature],
        rows: Sequence[Row],
        tokenizer: "PreTrainedTokenizerBase",
    ) -> list[TextScorePrediction]:
        predictions = []
        for windows in row_values(compact, features, len(rows)):
            values = list(chain.from_iterable(windows))
            predictions.append(TextScorePrediction(score=self._score(values), tokens=len(values)))
        return predictions

    def _score(self, log_probabilities: Sequence[float]) -> float | None:
        """Returns the score of a text from the log-probabilities of its tokens."""
        # fsum rounds only once, so the sum does not depend on the order of the tokens.
        if self.score == "pll-word-l2r":
            return math.fsum(log_probabilities)
        if not log_probabilities:
            return None
        return math.exp(min(-math.fsum(log_probabilities) / len(log_probabilities), _MOST))

    def agreements(
        self, predictions: Sequence[TextScorePrediction], others: Sequence[TextScorePrediction]
    ) -> list[bool]:
        """See ``Output.agreements``. Scores are no decisions, so they cannot show whether models agree."""
        raise DataError(
            f'score = "{self.score}" predicts numbers, so how many predictions stay the same cannot be counted. Set '
            'score = "none", and use texts with masks'
        )
