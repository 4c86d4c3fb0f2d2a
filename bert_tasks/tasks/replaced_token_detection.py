"""Replaced-token detection, the pre-training of ELECTRA: which tokens of a text were put in place of others.

Owns the settings, loss, predictions and metrics of the task (Clark et al., arXiv:2003.10555). A small masked language
model, the generator, makes the inputs of training; training/replaced_tokens.py runs both.

Shape legend: B windows, N tokens, R masked tokens, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from bert_tasks.data.columns import Column, Row
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.heads import UNIFORM, ReplacedTokenHead, ReplacedTokenOutput
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import DataError, UsageError
from bert_tasks.metrics.formulas import area_under_curve, ratio
from bert_tasks.tasks.base import Feature, FeatureKeys, LossTerm, Prediction, Task, label_config
from bert_tasks.tasks.masked_language_modeling.masking import NO_WORD, MaskingRule, mask_features
from bert_tasks.tasks.masked_language_modeling.task import MaskedLanguageModeling

GENERATOR, DISCRIMINATOR = "generator", "discriminator"  # the terms of the loss
_UNKNOWN = -1.0


@dataclass(frozen=True, kw_only=True)
class ReplacedTokenPrediction(Prediction):
    """The prediction for one row.

    Attributes:
        tokens: the texts of its tokens, without the special tokens around it.
        scores: the probability that each was put in place of another one.
        measured: in evaluation (logit, replaced, masked) of each token that the discriminator saw.
        ids: of the tokens.
    """

    tokens: tuple[str, ...]
    scores: tuple[float, ...]
    measured: tuple[tuple[float, bool, bool], ...] = ()
    ids: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"tokens": list(self.tokens), "scores": list(self.scores)}


class ReplacedTokenJson(BaseModel):
    """The tokens of the text, and the probability that each was put in place of another one."""

    tokens: list[str]
    scores: list[float]


@dataclass(frozen=True, kw_only=True)
class ReplacedTokens(Task[ReplacedTokenPrediction]):
    """Settings of replaced-token detection; those of masking are the generator's.

    Attributes:
        labels: none; leave it out.
        max_length: of a window: documents are cut into windows of so many tokens, and nothing is dropped.
        mlm_probability, mask_replace_prob, random_replace_prob, whole_word_mask: see ``MaskingRule``. ELECTRA masks 85
            of 100 chosen tokens and leaves the others as they are.
        generator_size: width of the generator as a share of the model's; it has as many layers.
        discriminator_weight: of the discriminator's loss; the generator's has the weight 1.
    """

    name: ClassVar[str] = "replaced-token-detection"
    sample: ClassVar[Literal["row", "window"]] = "window"
    default_head: ClassVar[Literal["replaced-token"]] = "replaced-token"
    mlm_probability: float = 0.15
    mask_replace_prob: float = 0.85
    random_replace_prob: float = 0.0
    whole_word_mask: bool = False
    generator_size: float = 0.25
    discriminator_weight: float = 50.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.labels:
            raise ValueError("labels do not apply to replaced-token detection: leave them out")
        if not 0 < self.generator_size <= 1:
            raise ValueError(f"generator_size is {self.generator_size}, expected a share above 0 and at most 1")
        if not self.discriminator_weight > 0:
            raise ValueError(f"discriminator_weight is {self.discriminator_weight}, expected more than 0")
        _ = self.rule

    @property
    def rule(self) -> MaskingRule:
        """What the generator sees masked."""
        return MaskingRule(
            mlm_probability=self.mlm_probability,
            mask_replace_prob=self.mask_replace_prob,
            random_replace_prob=self.random_replace_prob,
            whole_word_mask=self.whole_word_mask,
        )

    @property
    def columns(self) -> tuple[Column, ...]:
        return (Column(name="text", kind="text"),)

    @property
    def primary_metric(self) -> str:
        return "auc"

    @property
    def curve_metrics(self) -> tuple[str, ...]:
        return ("auc", "generator_accuracy")

    @property
    def hf_config(self) -> dict[str, Any]:
        """The names that transformers gives two classes by default: those of a fine-tuned model would not apply."""
        return {**label_config(("LABEL_0", "LABEL_1")), "problem_type": None}

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any], labels: tuple[str, ...], usable_length: int) -> dict[str, Any]:
        return {"max_length": min(cls.max_length, usable_length)}

    def head(self, config: EncoderConfig) -> ReplacedTokenHead:
        return ReplacedTokenHead(config)

    def generator(self) -> tuple[MaskedLanguageModeling, float]:
        """See ``Task``."""
        return MaskedLanguageModeling(max_length=self.max_length), self.generator_size

    def features(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[Feature]:
        """The windows of masked language modelling, of which the discriminator reads all tokens."""
        windows = MaskedLanguageModeling(max_length=self.max_length).features(rows, tokenizer)
        return [{**window, "gather_positions": None} for window in windows]

    def prepare(
        self,
        features: Sequence[Feature],
        keys: FeatureKeys,
        corpus: Sequence[Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
    ) -> Sequence[Feature]:
        """The features with tokens masked, and a uniform number for each, which decides what the generator draws."""
        masked = mask_features(features, keys, corpus, tokenizer, self.rule)
        prepared: list[Feature] = []
        for feature, number in zip(masked, keys.numbers, strict=True):
            count = len(feature.get("gather_positions") or ())
            generator = np.random.default_rng((keys.seed, keys.epoch, number, 1))
            prepared.append({**feature, "fields": {UNIFORM: generator.random(count).tolist()}})
        return prepared

    # The loss.

    def loss(self, logits: Any, batch: PackedBatch) -> tuple[LossTerm, ...]:
        """Cross entropy of the masked tokens, and whether each of all tokens was replaced.

        Raises:
            UsageError: there is no generator: a saved model alone has none.
        """
        if not isinstance(logits, ReplacedTokenOutput):
            if len(batch.labels) > 0:
                raise UsageError(
                    f"{self.name} is evaluated in training only, because a saved model has no generator; see "
                    "metrics.json of its run"
                )
            zero = logits.sum() * 0.0
            names = ((GENERATOR, 1.0), (DISCRIMINATOR, self.discriminator_weight))
            return tuple(LossTerm(name=name, total=zero, count=zero.detach(), weight=weight) for name, weight in names)
        masked = logits.generator.cross_entropy(batch.labels.long())
        replaced = F.binary_cross_entropy_with_logits(logits.logits, logits.replaced.to(logits.dtype), reduction="sum")
        return (
            LossTerm(name=GENERATOR, total=masked, count=masked.new_full((), len(logits.generator)).detach()),
            LossTerm(
                name=DISCRIMINATOR,
                total=replaced,
                count=replaced.new_full((), len(logits.logits)).detach(),
                weight=self.discriminator_weight,
            ),
        )

    def counts(self, features: Sequence[Feature]) -> dict[str, float]:
        """See ``Task``: the masked tokens, and all tokens of windows that were prepared."""
        prepared = [feature for feature in features if feature.get("labels") is not None]
        return {
            GENERATOR: float(sum(len(feature.get("labels") or ()) for feature in prepared)),
            DISCRIMINATOR: float(sum(len(feature["input_ids"]) for feature in prepared)),
        }

    def distillation_count(self, features: Sequence[Feature]) -> float:
        """Raises UsageError: a generator is the model's teacher."""
        raise UsageError(f"{self.name} cannot learn from a teacher")

    # Predictions and metrics.

    def reduce_logits(self, logits: Sequence[Tensor], features: Sequence[Feature]) -> Sequence[Tensor]:
        """``[T, 5]`` for each window: id, whether it is of a word, logit, replaced and masked (-1 where unknown)."""
        parts = []
        for part, feature in zip(logits, features, strict=True):
            words = [float(word != NO_WORD) for word in feature.get("word_ids") or ()]
            known = torch.tensor([feature["input_ids"], words], dtype=part.dtype).t().to(part.device)
            unknown = part if part.shape[1] == 3 else F.pad(part, (0, 2), value=_UNKNOWN)
            parts.append(torch.cat([known, unknown], dim=1))
        return parts

    def decode(
        self, reduced: Sequence[Tensor], features: Sequence[Feature], rows: Sequence[Row]
    ) -> list[ReplacedTokenPrediction]:
        parts = iter(reduced)
        predictions = []
        for _, windows in groupby(features, key=lambda feature: feature["row"]):
            table = torch.cat([next(parts) for _ in windows])
            of_words = table[table[:, 1] > 0]
            measured = tuple(
                (logit, replaced > 0, masked > 0) for logit, replaced, masked in table[:, 2:].tolist() if masked >= 0
            )
            predictions.append(
                ReplacedTokenPrediction(
                    tokens=(),
                    scores=tuple(of_words[:, 2].sigmoid().tolist()),
                    measured=measured,
                    ids=tuple(of_words[:, 0].long().tolist()),
                )
            )
        return predictions

    def with_texts(
        self, predictions: Sequence[ReplacedTokenPrediction], tokenizer: PreTrainedTokenizerBase
    ) -> Sequence[ReplacedTokenPrediction]:
        """See ``Task``."""
        return [
            replace(one, tokens=tuple(map(str, tokenizer.convert_ids_to_tokens(list(one.ids))))) for one in predictions
        ]

    def same_predictions(
        self, predictions: Sequence[ReplacedTokenPrediction], others: Sequence[ReplacedTokenPrediction]
    ) -> list[bool]:
        """For each token whether both models find that it was replaced, or both that it was not."""
        pairs = [
            pair
            for one, other in zip(predictions, others, strict=True)
            for pair in zip(one.scores, other.scores, strict=True)
        ]
        return [(score > 0.5) == (theirs > 0.5) for score, theirs in pairs]

    def metrics(self, predictions: Sequence[ReplacedTokenPrediction], rows: Sequence[Row]) -> dict[str, float]:
        """How well replaced tokens are told from others, and how often the generator drew the original token.

        Accuracy is left out: "not replaced" for every token has a high one.

        Raises:
            DataError: no token was masked.
        """
        values = np.array([token for one in predictions for token in one.measured], dtype=np.float64).reshape(-1, 3)
        logits, replaced, masked = values[:, 0], values[:, 1] > 0, values[:, 2] > 0
        if not masked.any():
            raise DataError("no token was masked: the texts are empty")
        found = logits > 0
        both = np.array([(found & replaced).sum()])
        return {
            "auc": area_under_curve(replaced, logits),
            "precision": float(ratio(both, np.array([found.sum()]))[0]),
            "recall": float(ratio(both, np.array([replaced.sum()]))[0]),
            "generator_accuracy": 1.0 - float(replaced[masked].mean()),
        }

    @property
    def prediction_schema(self) -> type[BaseModel]:
        return ReplacedTokenJson
