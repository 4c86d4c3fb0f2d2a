"""A tag for every word, by a softmax for each word or by a CRF over the words of a row.

Owns what the loss of tags is, and how logits become tags, entities and their metrics. The CRF is in encoder/crf.py.

Shape legend: R tokens read (words, for a CRF), W words, L labels.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch
from torch import Tensor

from bert_tasks.data.columns import Column, Row
from bert_tasks.data.conll import (
    Scheme,
    detect_scheme,
    forbidden_steps,
    invalid_transitions,
    label_scheme,
    to_labels,
)
from bert_tasks.data.features import token_batches
from bert_tasks.data.known_labels import known_tags
from bert_tasks.data.profile import listed
from bert_tasks.data.words import context_texts
from bert_tasks.encoder import crf
from bert_tasks.encoder.config import HeadKind
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import DataError, UsageError
from bert_tasks.metrics.tables import MetricTable, metric_table
from bert_tasks.metrics.tagging import check_names, tagging_metrics
from bert_tasks.outputs.base import LossTerm, labelled, no_loss
from bert_tasks.outputs.calibration import (
    ECE,
    CalibrationMethod,
    calibration_metrics,
    check_temperature,
    fitted_temperature,
)
from bert_tasks.outputs.class_weights import (
    REMEDY,
    balanced_weights,
    check_class_weights,
    label_weights,
    weights_like,
)
from bert_tasks.outputs.conll_files import TAG_FILES, compared_predictions, compared_tags
from bert_tasks.outputs.explanation import ExplainedLogit, Explanation
from bert_tasks.outputs.features import Feature
from bert_tasks.outputs.files import FileFormat
from bert_tasks.outputs.logits import softmax_divergence
from bert_tasks.outputs.losses import check_focal_gamma, cross_entropy
from bert_tasks.outputs.prediction import Prediction
from bert_tasks.outputs.sections import ReportSections
from bert_tasks.outputs.settings import fitted, per_label, require
from bert_tasks.outputs.tag_prediction import EntitySpan as EntitySpan
from bert_tasks.outputs.tag_prediction import TokenPrediction as TokenPrediction
from bert_tasks.outputs.tag_prediction import entity_candidates, entity_logits, without_entities
from bert_tasks.outputs.tag_prediction import entity_spans as entity_spans
from bert_tasks.outputs.tag_report import label_word, tag_sections
from bert_tasks.outputs.thresholds import ThresholdOutput
from bert_tasks.outputs.word_logits import labelled_logits, word_logits, word_places

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CRF_SCORES = 2**23  # numbers in the matrices of a CRF that are decoded at once, 64 MiB in float64


@dataclass(frozen=True, kw_only=True)
class Tags(ThresholdOutput[TokenPrediction]):
    """A tag for every word, such as named entities, slots, chunks or parts of speech.

    The tags are scored alone, by a softmax for each word, or as a sequence, by a CRF (Lafferty et al. 2001,
    https://repository.upenn.edu/handle/20.500.14332/6188), which costs some time and can only help if the tag of a word
    depends on its neighbours' tags. If the labels are chunk tags (B-PER, I-PER, ...), predictions have the entities
    that the tags mark, and metrics count entities. Other labels, such as parts of speech, are classes of words.

    Attributes:
        class_weights: One weight per label, or ``balanced`` (n / (labels x n of the label), from the n labelled words
            of the training data).
        balanced_weights: The weights of ``balanced`` on the training rows, one per label.
        focal_gamma: Exponent of the focal loss (arXiv:1708.02002), which multiplies the cross entropy of an example by
            (1 - p)^focal_gamma, where p is the probability of the right label. 0 is the cross entropy, the paper uses
            2.
        crf: True to score sequences of tags instead of single tags. Steps that the label scheme forbids are then never
            predicted.
        scheme: The scheme in which the training tags were written.
        calibration: ``temperature`` divides the logits by one number that gives the validation rows the lowest cross
            entropy. ``none`` uses them as they are.
        temperature: The number, fitted on the validation rows.
        reads_context: True if training rows had a context. The examples of the model then have one, too.

    Examples:
        >>> Tags(labels=("O", "B-PER", "I-PER")).word_labels({"words": ["Ada", "sings"], "tags": ["B-PER", "O"]})
        ['B-PER', 'O']
    """

    name: ClassVar[str] = "tags"
    column: ClassVar[Column] = Column(name="tags", kind="tags", required=False)
    prediction: ClassVar[type[Prediction]] = TokenPrediction
    head_kind: ClassVar[HeadKind | None] = "token"
    pipeline_tag: ClassVar[str | None] = "token-classification"
    lower_is_better: ClassVar[frozenset[str]] = frozenset({"invalid_transitions", ECE})
    files: ClassVar[Mapping[str, FileFormat]] = TAG_FILES
    class_weights: Literal["balanced"] | tuple[float, ...] | None = per_label(None)
    balanced_weights: tuple[float, ...] = fitted((), per_label=True)
    focal_gamma: float = 0.0
    crf: bool = False
    scheme: Literal["", "IOB1", "IOB2", "BIOES", "raw"] = fitted("")
    calibration: CalibrationMethod = "none"
    temperature: float = fitted(1.0)
    reads_context: bool = fitted(False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_temperature(self.temperature)
        check_focal_gamma(self.focal_gamma)
        require(
            not self.crf or (self.class_weights is None and self.focal_gamma == 0),
            "class_weights and focal_gamma do not apply to crf = true, whose loss is of whole sentences, not of words",
        )
        check_class_weights(self.labels, self.class_weights, self.balanced_weights)
        require(len(self.labels) != 1, "labels holds 1 name, a tagger needs at least 2")
        require(
            not self.crf or self.calibration == "none",
            "crf = true has no temperature, because it scores sequences of tags. Set calibration = 'none'",
        )

    @property
    def has_hf_head(self) -> bool:
        """False with a CRF, because transformers has the scores of single tags, not the CRF over them."""
        return not self.crf

    @property
    def has_names(self) -> bool:
        """False if all labels are LABEL_0, LABEL_1, ..., which transformers writes for labels without names."""
        return not all(label.startswith("LABEL_") for label in self.labels)

    @property
    def _label_scheme(self) -> Scheme:
        """The scheme of the labels, and so of the predictions."""
        return label_scheme(self.labels)

    # Training

    def word_labels(self, row: Row) -> list[str] | None:
        """Returns the label of each word of a row. None if the row has no tags, or one that no label has."""
        tags = row.get("tags")
        if tags is None:
            return None
        return self._labels_of(tags)

    def _labels_of(self, tags: Sequence[str]) -> list[str] | None:
        """Returns the labels of the tags of a sentence. None if one of the tags has no label."""
        names = to_labels(tags, self.labels)
        if not set(names).issubset(self.labels):
            return None
        return names

    def check_known(self, sentences: Iterable[Sequence[str]]) -> None:
        """Checks that the labels have names, and that they are of these data.

        Raises:
            DataError: The sentences have tags, and none of them is a label.
        """
        tags = set[str]()
        for sentence in sentences:
            tags.update(compared_tags(sentence, self.labels))
        if tags and set(known_tags(self.labels)).isdisjoint(tags):
            ours = listed([repr(label) for label in self.labels])
            theirs = listed([repr(tag) for tag in sorted(tags)])
            raise DataError(
                f"the model's labels are {ours}, and none of the rows' tags, {theirs}, is among them. If the labels "
                "only lack names, load the model with labels=[...], the names in its order"
            )

    def counts(self, features: Sequence[Feature]) -> dict[str, float]:
        """Returns the number of labelled tokens, or the sum of their class weights."""
        weights = label_weights(self.class_weights, self.balanced_weights)
        if weights is None:
            return super().counts(features)
        total: list[float] = []
        for feature in features:
            labels = feature.get("labels")
            if labels:
                total += [weights[int(label)] for label in labels]
        return {self.name: float(sum(total))}

    def loss(self, logits: Tensor, batch: PackedBatch) -> tuple[LossTerm]:
        """Returns the cross entropy of labelled tokens, or the CRF's negative log likelihood of windows, summed.

        Either way the mean divides by what is labelled, which with ``labelling = "first"`` are the words, as in
        transformers. With class weights it divides by the sum of the weights of these words.
        """
        logits = labelled_logits(logits, batch)
        counts = [count for count in batch.label_counts if count]
        if not counts:
            return (no_loss(self.name, logits),)
        labels = batch.labels.long()
        weights = weights_like(label_weights(self.class_weights, self.balanced_weights), logits)
        if self.crf:
            total = -crf.log_likelihood(logits, labels, counts).sum()
        else:
            total = cross_entropy(logits, labels, weights=weights, gamma=self.focal_gamma)
        count = logits.new_full((), len(labels))
        if weights is not None:
            count = weights.index_select(0, labels).sum()
        return (LossTerm(name=self.name, total=total, count=count),)

    @property
    def no_teacher_reason(self) -> str | None:
        if self.crf:
            return (
                "crf = true scores sequences of tags, but distillation compares the scores of single words. Set "
                "crf = false for the model and for its teacher"
            )
        return None

    def divergence(
        self, student: Tensor, teacher: Tensor, batch: PackedBatch, temperature: float
    ) -> tuple[Tensor, float]:
        """Returns the divergence of the tags of all tokens that are read, and the number of these tokens."""
        return softmax_divergence(student, teacher, temperature), len(student)

    def divergence_count(self, features: Sequence[Feature]) -> float:
        """Returns the number of tokens that are read."""
        count = 0
        for feature in features:
            read = feature.get("gather_positions")
            if read is None:  # all tokens of the window
                read = feature["input_ids"]
            count += len(read)
        return float(count)

    # Values fitted to data

    def fit_rows(self, rows: Iterable[Row]) -> Self:
        """Records the scheme of the training tags, if rows have a context, and the ``balanced`` class weights.

        The weights count words, also if other sub-words are trained. As in training, a row with a tag that no label has
        does not count.

        Raises:
            DataError: A tag has the name of a metric over all tags, or no training word has one of the labels.
        """
        sentences: list[Sequence[str]] = []
        reads_context = False
        for row in rows:
            if row.get("tags") is not None:
                sentences.append(row["tags"])
            reads_context = reads_context or len(context_texts(row)) > 0
        output = replace(self, reads_context=reads_context)
        if sentences:
            output = replace(output, scheme=detect_scheme(sentences))
        check_names(self.labels, raw=self._label_scheme == "raw")
        if self.class_weights != "balanced":
            return output
        counts = Counter[str]()
        for tags in sentences:
            names = self._labels_of(tags)
            if names is not None:
                counts.update(names)
        return replace(output, balanced_weights=balanced_weights(self.labels, counts, counts.total(), noun="word"))

    @property
    def calibrates(self) -> bool:
        return self.calibration == "temperature"

    def calibrate(self, compact: Sequence[Tensor], features: Sequence[Feature], rows: Sequence[Row]) -> Self:
        """Fits the temperature to the words of rows whose tags the model has."""
        index = {label: number for number, label in enumerate(self.labels)}
        words = iter(word_logits(compact, features, self.labels))
        pairs: list[tuple[Tensor, int]] = []
        for row in rows:
            logits = list(islice(words, len(row["words"])))
            labels = self.word_labels(row)
            if labels is not None:
                pairs += [(each, index[label]) for each, label in zip(logits, labels, strict=True)]
        temperature = fitted_temperature(pairs)
        if temperature is None:
            return self
        return replace(self, temperature=temperature)

    def candidates(
        self, predictions: Sequence[TokenPrediction], rows: Sequence[Row]
    ) -> Iterator[tuple[str, float, bool]]:
        if self._label_scheme == "raw" or "O" not in self.labels:
            raise UsageError("thresholds are for tags that mark entities, such as O, B-PER and I-PER")
        return entity_candidates(labelled(rows, predictions, "tags"))

    def threshold_name(self, label: str) -> str:
        """Returns the type of a tag's entities. It is empty for O, which has no threshold."""
        return label.partition("-")[2]

    @property
    def remedies(self) -> tuple[str, ...]:
        if self.crf or self.class_weights is not None:
            return ()
        return (REMEDY,)

    # Predictions

    def compact(self, logits: Sequence[Tensor], features: Sequence[Feature]) -> Sequence[Tensor]:
        """Returns the logits, or what a CRF's logits consist of."""
        if not self.crf:
            return logits
        return [crf.compressed(words) for words in logits]

    def decode(
        self,
        compact: Sequence[Tensor],
        features: Sequence[Feature],
        rows: Sequence[Row],
        tokenizer: "PreTrainedTokenizerBase",
    ) -> list[TokenPrediction]:
        """Returns the tag of each word, which is that of its first token, and the entities of each row."""
        if not rows:
            return []
        counts = [len(row["words"]) for row in rows]
        if self.crf:
            best, probabilities = self._best_paths(compact, features, counts)
        else:
            best, probabilities = self._best_labels(word_logits(compact, features, self.labels))
        scores = probabilities.gather(1, best[:, None]).squeeze(1).tolist()
        is_raw = self._label_scheme == "raw"
        borders = pairwise(accumulate(counts, initial=0))  # where the words of each row begin and end
        predictions = []
        for row, (start, end) in zip(rows, borders, strict=True):
            words, word_scores = tuple(row["words"]), tuple(scores[start:end])
            tags = tuple(self.labels[index] for index in best[start:end].tolist())
            if self.thresholds:
                limits = dict(zip(self.labels, self.thresholds, strict=True))
                outside = probabilities[start:end, self.labels.index("O")]
                tags, word_scores = without_entities(tags, word_scores, outside.tolist(), limits)
            spans: tuple[EntitySpan, ...] = ()
            if not is_raw:
                spans = entity_spans(words, tags, word_scores, row.get("text"))
            predictions.append(TokenPrediction(words=words, tags=tags, scores=word_scores, entities=spans))
        return predictions

    def _best_labels(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the most probable label of each word, ``[W]``, and the probabilities of all labels, ``[W, L]``."""
        if self.calibration == "temperature":
            logits = logits / self.temperature
        return logits.argmax(dim=1), logits.softmax(dim=1)

    def _best_paths(
        self, compact: Sequence[Tensor], features: Sequence[Feature], counts: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Returns the labels of a row's best path over its windows, ``[W]``, and the marginals of all, ``[W, L]``."""
        # In float64, because the score of a long sequence would leave too few digits for its words in float32.
        penalty = crf.FORBIDDEN * torch.tensor(forbidden_steps(self.labels), dtype=torch.float64)  # [L + 2, L]
        by_row: list[list[Tensor]] = [[] for _ in counts]
        for feature, window in zip(features, compact, strict=True):
            by_row[feature["row"]].append(window)
        best = [torch.empty(0, dtype=torch.long)]
        marginals = [torch.empty(0, self.size, dtype=torch.float64)]
        room = _CRF_SCORES // penalty.numel()  # words
        with_words = [row for row, count in enumerate(counts) if count]
        for block in token_batches(with_words, counts, max_tokens=room):
            windows: list[Tensor] = []
            for row in block:
                windows += [window.double() for window in by_row[row]]
            logits = crf.restored(windows) + penalty  # [R, L + 2, L]
            lengths = [counts[row] for row in block]
            best.append(crf.best_labels(logits, lengths))
            marginals.append(crf.marginals(logits, lengths))
        return torch.cat(best), torch.cat(marginals)

    def with_logits(
        self, predictions: Sequence[TokenPrediction], compact: Sequence[Tensor], features: Sequence[Feature]
    ) -> list[TokenPrediction]:
        """Returns the predictions with the logits of each word's first token."""
        if self.crf:
            raise UsageError("a tagger with crf = true scores sequences of tags, not words. Predict without logits")
        if not predictions:
            return []
        words = iter(word_logits(compact, features, self.labels).tolist())
        results = []
        for prediction in predictions:
            of_row = islice(words, len(prediction.words))
            results.append(replace(prediction, logits=tuple(tuple(of_word) for of_word in of_row)))
        return results

    @property
    def no_explanations_reason(self) -> str | None:
        if self.crf:
            return "a tagger with crf = true scores sequences of tags, not words. Predict without explanations"
        if self._label_scheme == "raw":
            return (
                "a tagger explains entities, and its labels mark none (an entity needs labels such as B-PER and "
                "I-PER). Predict without explanations"
            )
        return None

    def explained_logits(
        self,
        predictions: Sequence[TokenPrediction],
        compact: Sequence[Tensor],
        features: Sequence[Feature],
        rows: Sequence[Row],
        texts: Sequence[str],
    ) -> list[ExplainedLogit]:
        """Returns for each entity the mean logit of its words' predicted tags at their first tokens."""
        logits: list[ExplainedLogit] = []
        remaining = iter(word_places(compact, features, self.labels))
        for prediction, row in zip(predictions, rows, strict=True):
            tokens = list(islice(remaining, len(prediction.words)))  # one for each word of the row
            logits += entity_logits(prediction, row, tokens, self.labels)
        return logits

    def with_explanations(
        self, predictions: Sequence[TokenPrediction], explanations: Sequence[Explanation]
    ) -> list[TokenPrediction]:
        """Returns the predictions, with an explanation of each entity."""
        remaining = iter(explanations)
        explained = []
        for prediction in predictions:
            spans = [replace(entity, explanation=next(remaining)) for entity in prediction.entities]
            explained.append(replace(prediction, entities=tuple(spans)))
        return explained

    # Metrics and report

    def metrics(self, predictions: Sequence[TokenPrediction], rows: Sequence[Row]) -> dict[str, float]:
        """Returns metrics over words, with entities in IOB2. See ``tagging_metrics``.

        Raises:
            DataError: No row has tags, or the model has a label for none of them.
        """
        pairs = labelled(rows, predictions, "tags")
        self.check_known([row["tags"] for row, _ in pairs])
        is_raw = self._label_scheme == "raw"
        predicted, labels = self.metric_inputs(predictions, rows)
        metrics = tagging_metrics(labels, predicted, raw=is_raw)
        if not is_raw:
            # In the scheme of the model, because the conversion to IOB2 makes other tags of forbidden steps.
            invalid = [invalid_transitions(prediction.tags, self._label_scheme) for _, prediction in pairs]
            metrics["invalid_transitions"] = float(sum(invalid))
        if self.calibration != "temperature":
            return metrics
        scores: list[float] = []
        correct: list[bool] = []
        for row, prediction in pairs:
            scores += prediction.scores
            expected = to_labels(row["tags"], self.labels)
            correct += [tag == label for tag, label in zip(prediction.tags, expected, strict=True)]
        return metrics | calibration_metrics(scores, correct)

    def metric_inputs(
        self, predictions: Sequence[TokenPrediction], rows: Sequence[Row]
    ) -> tuple[list[list[str]], list[list[str]]]:
        """Returns the tags of each row's words, in IOB2 if they mark entities.

        It is the form of evaluate's seqeval (https://huggingface.co/spaces/evaluate-metric/seqeval).
        """
        predicted: list[list[str]] = []
        labels: list[list[str]] = []
        for row, prediction in labelled(rows, predictions, "tags"):
            predicted.append(compared_predictions(prediction.tags, self.labels))
            labels.append(compared_tags(row["tags"], self.labels))
        return predicted, labels

    @property
    def primary_metric(self) -> str:
        return "overall_accuracy" if self._label_scheme == "raw" else "overall_f1"

    @property
    def curves(self) -> tuple[str, ...]:
        if self._label_scheme == "raw":
            return ("overall_accuracy", "macro_f1")
        return ("overall_f1", "overall_precision", "overall_recall")

    def metric_table(self, metrics: Mapping[str, float]) -> MetricTable:
        """Returns a row for each entity type, or for each tag without entities."""
        names = [name.removesuffix("_number") for name in metrics if name.endswith("_number")]
        return metric_table(metrics, names, "{}_{}".format, word=label_word(self.labels), support="number")

    def report(
        self, predictions: Sequence[TokenPrediction], rows: Sequence[Row], texts: Sequence[str]
    ) -> ReportSections:
        """Returns entities and their confusion, the calibration of tags, and sentences with mistakes."""
        return tag_sections(predictions, rows, self.labels, self.curves)

    def truths(self, row: Row) -> Sequence[str]:
        tags: Sequence[str] | None = row.get("tags")
        return () if tags is None else tags

    def decisions(self, prediction: TokenPrediction) -> Sequence[str]:
        return prediction.tags

    def describe(self, decision: str) -> str:
        return f"{decision!r} for every word"
