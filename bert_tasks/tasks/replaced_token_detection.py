"""Replaced-token detection, the pre-training of ELECTRA.

The model detects which tokens replace others (Clark et al., arXiv:2003.10555). A small masked language model, the
generator, makes the inputs of training.

Shape legend: B windows, T tokens of a window, R masked tokens, V vocabulary.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bert_tasks.data.columns import Row
from bert_tasks.encoder import heads
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.heads import Head
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import DataError, UsageError
from bert_tasks.metrics.formulas import MetricFormula, replaced_token_measure
from bert_tasks.tasks.base import NOT_WRITTEN, Feature, FeatureKeys, LossTerm, OutputKind, Part, Prediction, require
from bert_tasks.tasks.masked_language_modeling.masking import NO_WORD, mask_features
from bert_tasks.tasks.masked_language_modeling.task import MaskedLanguageModeling
from bert_tasks.tasks.shared.corpus import CorpusTask
from bert_tasks.tasks.shared.fitting import Fitting
from bert_tasks.tasks.shared.hf_config import HFConfig
from bert_tasks.tasks.shared.rendering import Rendering
from bert_tasks.tasks.shared.report import (
    MOST_EXAMPLES,
    Example,
    Examples,
    Remark,
    Report,
    ReportSections,
    RowResult,
    Segment,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATOR, DISCRIMINATOR = "generator", "discriminator"  # the terms of the loss
_UNKNOWN = -1.0


@dataclass(frozen=True, kw_only=True)
class ReplacedTokenPrediction(Prediction):
    """The prediction for one row of replaced-token detection.

    Attributes:
        tokens, ids: Texts and ids of its tokens, without the special tokens around it.
        scores: Probability that each replaces another one.
        measured: (logit, replaced, masked) of each token that the discriminator saw. In evaluation only.
        originals: Ids of the tokens before some were replaced. In evaluation only.
        example: A row that a report may show, without its line.
    """

    tokens: tuple[str, ...]
    scores: tuple[float, ...]
    measured: tuple[tuple[float, bool, bool], ...] = field(default=(), metadata=NOT_WRITTEN)
    ids: tuple[int, ...] = field(default=(), metadata=NOT_WRITTEN)
    originals: tuple[int, ...] = field(default=(), metadata=NOT_WRITTEN)
    example: Example | None = field(default=None, metadata=NOT_WRITTEN)

    @property
    def worst(self) -> float:
        """The largest difference of a token's score from the right score, in evaluation."""
        tokens = zip(self.ids, self.originals, self.scores, strict=True) if self.originals else ()
        return max((abs((token != original) - score) for token, original, score in tokens), default=0.0)


class ReplacedFormats(Rendering, HFConfig):
    """Replaced-token detection in prediction files and in transformers' config."""

    default_head: ClassVar[Literal["replaced-token"]] = "replaced-token"
    has_labels: ClassVar[bool] = False

    def with_texts(
        self, predictions: Sequence[ReplacedTokenPrediction], tokenizer: "PreTrainedTokenizerBase"
    ) -> Sequence[ReplacedTokenPrediction]:
        worst = sorted((prediction.worst, i) for i, prediction in enumerate(predictions) if prediction.originals)
        shown = {number for _, number in worst[-MOST_EXAMPLES:]}
        return [
            replace(
                prediction,
                tokens=tuple(map(str, tokenizer.convert_ids_to_tokens(list(prediction.ids)))),
                example=_example(prediction, tokenizer) if number in shown else None,
            )
            for number, prediction in enumerate(predictions)
        ]


class ReplacedFitting(Fitting):
    """Training of replaced-token detection."""

    sample: ClassVar[Literal["row", "window"]] = "window"

    def generator(self) -> tuple[MaskedLanguageModeling, float]:
        return MaskedLanguageModeling(max_length=self.task.max_length), self.task.generator_size


class ReplacedReport(Report):
    """The report of replaced-token detection."""

    curves: ClassVar[tuple[str, ...]] = ("auc", "generator_accuracy")

    def decisions(self, prediction: ReplacedTokenPrediction) -> Sequence[bool]:
        """Returns for each token whether it seems to be replaced."""
        return [score > 0.5 for score in prediction.scores]

    def collapse(self, predictions: Sequence[ReplacedTokenPrediction], rows: Sequence[Row]) -> str | None:
        """Compares the tokens of evaluation, of which the generator has replaced some."""
        tokens = [token for prediction in predictions for token in prediction.measured]
        labels = {replaced for _, replaced, _ in tokens}
        decisions = {logit > 0 for logit, _, _ in tokens}
        if len(labels) < 2 or len(decisions) > 1:
            return None
        return f"predicts {'replaced' if decisions.pop() else 'original'!r} for every token"

    def sections(self, predictions: Sequence[ReplacedTokenPrediction], rows: Sequence[Row]) -> ReportSections:
        pairs = [(row, each) for row, each in zip(rows, predictions, strict=True) if each.measured]
        tokens = [token for _, each in pairs for token in each.measured]
        figures = {
            "tokens": len(tokens),
            "masked": sum(masked for _, _, masked in tokens),
            "replaced": sum(replaced for _, replaced, _ in tokens),
        }
        worst = sorted(pairs, key=lambda pair: -pair[1].worst)[:MOST_EXAMPLES]
        examples = Examples(
            word="Replaced tokens",
            title="Texts with the worst mistakes",
            lead=(
                f"Of {figures['tokens']:,} tokens {figures['masked']:,} were masked, and {figures['replaced']:,} of "
                "these replaced by another token. Each text is shown as the model read it. The numbers are the "
                "model's probabilities of being replaced, at replaced tokens."
            ),
            items=tuple(replace(each.example, line=row.get("line")) for row, each in worst if each.example is not None),
        )
        return ReportSections(
            measure=_measure([each for _, each in pairs]),
            unit="texts",
            headline=("auc", "precision", "recall", "generator_accuracy"),
            results=tuple(_result(row, each) for row, each in pairs),
            examples=examples if examples.items else None,
            figures=figures,
        )


@dataclass(frozen=True, kw_only=True)
class ReplacedTokens(CorpusTask[ReplacedTokenPrediction]):
    """Documents with replaced tokens. The generator has the settings of masking.

    Attributes:
        mask_replace_prob: Share of the predicted tokens that the mask token replaces. ELECTRA masks 85 of 100.
        random_replace_prob: Share of the predicted tokens that random tokens replace. The rest is not changed.
        generator_size: Width of the generator as a share of the model's width. Both have the same number of layers.
        discriminator_weight: Weight of the discriminator's loss. The generator's loss has the weight 1.

    Example:
        >>> model = TaskModel.from_pretrained("google/electra-small-discriminator", task=ReplacedTokens)
        >>> model.predict("The soup was cold.")[0].scores
    """

    name: ClassVar[str] = "replaced-token-detection"
    output_kind: ClassVar[OutputKind] = "sigmoid"
    primary_metric: ClassVar[str] = "auc"
    parts: ClassVar[tuple[type[Part], ...]] = (ReplacedFormats, ReplacedFitting, ReplacedReport)
    mask_replace_prob: float = 0.85
    random_replace_prob: float = 0.0
    generator_size: float = 0.25
    discriminator_weight: float = 50.0

    def __post_init__(self) -> None:
        super().__post_init__()
        size, weight = self.generator_size, self.discriminator_weight
        require(0 < size <= 1, f"generator_size is {size}, expected a share above 0 and at most 1")
        require(weight > 0, f"discriminator_weight is {weight}, expected more than 0")

    def head(self, config: EncoderConfig) -> Head:
        return heads.ReplacedTokenHead(config)

    def features(self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase") -> list[Feature]:
        """Returns windows as for masked language modelling, whose tokens are all read."""
        return [{**window, "gather_positions": None} for window in super().features(rows, tokenizer)]

    def prepare(
        self,
        features: Sequence[Feature],
        keys: FeatureKeys,
        corpus: Sequence[Mapping[str, Any]],
        tokenizer: "PreTrainedTokenizerBase",
    ) -> Sequence[Feature]:
        """Returns features with masked tokens and a uniform number for each draw."""
        masked = mask_features(features, keys, corpus, tokenizer, self.rule)
        prepared: list[Feature] = []
        for feature, number in zip(masked, keys.numbers, strict=True):
            labels, generator = feature.get("labels"), np.random.default_rng((keys.seed, keys.epoch, number, 1))
            uniforms = generator.random(0 if labels is None else len(labels))
            prepared.append({**feature, "fields": {heads.UNIFORM: uniforms.tolist()}})
        return prepared

    # The loss.

    def loss(self, logits: Any, batch: PackedBatch) -> tuple[LossTerm, ...]:
        """Cross entropy of the masked tokens, and whether each of all tokens was replaced.

        Raises:
            UsageError: the logits come from a model without its generator.
        """
        if not isinstance(logits, heads.ReplacedTokenOutput):
            if len(batch.labels) > 0:
                raise UsageError(f"{self.name}: a loss needs what the generator returns, not logits alone")
            zero = logits.sum() * 0.0
            names = ((GENERATOR, 1.0), (DISCRIMINATOR, self.discriminator_weight))
            return tuple(LossTerm(name=name, total=zero, count=zero.detach(), weight=weight) for name, weight in names)
        masked = logits.generator.cross_entropy(batch.labels.long())
        replaced = F.binary_cross_entropy_with_logits(logits.logits, logits.replaced.to(logits.dtype), reduction="sum")
        counts = [
            total.new_full((), len(each)) for total, each in ((masked, logits.generator), (replaced, logits.logits))
        ]
        return (
            LossTerm(name=GENERATOR, total=masked, count=counts[0].detach()),
            LossTerm(name=DISCRIMINATOR, total=replaced, count=counts[1].detach(), weight=self.discriminator_weight),
        )

    def counts(self, features: Sequence[Feature]) -> dict[str, float]:
        """Counts the masked tokens, and all tokens of windows that were prepared."""
        prepared = [(feature, labels) for feature in features if (labels := feature.get("labels")) is not None]
        return {
            GENERATOR: float(sum(len(labels) for _, labels in prepared)),
            DISCRIMINATOR: float(sum(len(feature["input_ids"]) for feature, _ in prepared)),
        }

    # Predictions and metrics.

    def compact_logits(self, logits: Sequence[Tensor], features: Sequence[Feature]) -> Sequence[Tensor]:
        """Returns ``[T, 6]`` for each window.

        The columns are the original id, whether it is of a word, the logit, replaced, masked, and the id that was read.
        The last three are -1 in predictions, for which nothing is replaced.
        """
        tables = []
        for table, feature in zip(logits, features, strict=True):
            word_ids, positions, labels = feature["word_ids"], feature.get("gather_positions"), feature.get("labels")
            words = [] if word_ids is None else [float(word != NO_WORD) for word in word_ids]
            ids = dict(enumerate(feature["input_ids"]))
            if positions is not None and labels is not None:
                ids |= zip(positions, map(int, labels), strict=True)
            originals = torch.tensor([[*ids.values()], words], dtype=table.dtype).t().to(table.device)
            unknown = table if table.shape[1] == 4 else F.pad(table, (0, 3), value=_UNKNOWN)
            tables.append(torch.cat([originals, unknown], dim=1))
        return tables

    def decode(
        self, compact: Sequence[Tensor], features: Sequence[Feature], rows: Sequence[Row]
    ) -> list[ReplacedTokenPrediction]:
        parts = iter(compact)
        predictions = []
        for _, windows in groupby(features, key=lambda feature: feature["row"]):
            table = torch.cat([next(parts) for _ in windows])
            of_words = table[table[:, 1] > 0]
            measured = tuple(
                (logit, replaced > 0, masked > 0) for logit, replaced, masked in table[:, 2:5].tolist() if masked >= 0
            )
            originals = tuple(of_words[:, 0].long().tolist())
            predictions.append(
                ReplacedTokenPrediction(
                    tokens=(),
                    scores=tuple(of_words[:, 2].sigmoid().tolist()),
                    measured=measured,
                    ids=tuple(of_words[:, 5].long().tolist()) if measured else originals,
                    originals=originals if measured else (),
                )
            )
        return predictions

    def metrics(self, predictions: Sequence[ReplacedTokenPrediction], rows: Sequence[Row]) -> dict[str, float]:
        """Returns metrics of the discriminator, and the accuracy of the generator.

        The accuracy of the discriminator is not among them, because "not replaced" for every token has a high accuracy.

        Raises:
            DataError: No token was masked.
        """
        if not any(masked for prediction in predictions for _, _, masked in prediction.measured):
            raise DataError("no token was masked, because the texts are empty")
        values = _measure(predictions).values().items()
        return {name: math.nan if value is None else value for name, value in values}


def _measure(predictions: Sequence[ReplacedTokenPrediction]) -> MetricFormula:
    values = np.array([token for result in predictions for token in result.measured], dtype=np.float64).reshape(-1, 3)
    sizes = [len(prediction.measured) for prediction in predictions]
    return replaced_token_measure(sizes, values[:, 0], values[:, 1] > 0, values[:, 2] > 0)


def _result(row: Row, prediction: ReplacedTokenPrediction) -> RowResult:
    """Returns replaced and detected tokens, with the worst mistake's score."""
    replaced = [token != original for token, original in zip(prediction.ids, prediction.originals, strict=True)]
    predicted = [score > 0.5 for score in prediction.scores]
    return RowResult(
        row=row,
        label=[token for token, is_so in zip(prediction.tokens, replaced, strict=True) if is_so],
        prediction=[token for token, is_so in zip(prediction.tokens, predicted, strict=True) if is_so],
        score=prediction.worst,
        is_correct=replaced == predicted,
    )


def _example(prediction: ReplacedTokenPrediction, tokenizer: "PreTrainedTokenizerBase") -> Example:
    """Returns replaced and detected tokens, each alone, and the text between them."""
    segments, remarks = [], []
    rows = zip(prediction.ids, prediction.originals, prediction.scores, strict=True)
    for is_marked, group in groupby(rows, key=lambda row: row[0] != row[1] or row[2] > 0.5):
        tokens = list(group)
        if not is_marked:
            segments.append(Segment(text=f" {tokenizer.decode([token for token, _, _ in tokens])} "))
            continue
        for token, original, score in tokens:
            text, is_right = str(tokenizer.decode([token])).strip(), score > 0.5
            was = "" if token == original else f"instead of {str(tokenizer.decode([original])).strip()}"
            segments.append(Segment(text=f" {text} ", label=was, prediction="replaced" if is_right else ""))
            if was:
                remarks.append(Remark(name=f"{text} {was}", value=score, tone="good" if is_right else "bad"))
    return Example(line=None, excerpt=tuple(segments), remarks=tuple(remarks))
