"""Token classification with one tag for every word.

Examples are named entities, slots, chunks and parts of speech. Owns which sub-words are trained and read, what the loss
is, and how logits become tags and entities. A long row is read in windows, and every word is read in exactly one.
Windows are made in shared/windows.py, the CRF is in encoder/crf.py.

Shape legend: B windows, R sub-words read (words, for a CRF), W words, L labels.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice, pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from bert_tasks.data.columns import PASSTHROUGH, Column, Row
from bert_tasks.data.conll import (
    Scheme,
    continuation_label,
    detect_scheme,
    entities,
    forbidden_steps,
    invalid_transitions,
    label_scheme,
    to_iob2,
    to_labels,
)
from bert_tasks.data.kinds import known_tags
from bert_tasks.data.problems import shortened
from bert_tasks.data.profile import listed
from bert_tasks.data.table import Truncation, token_batches
from bert_tasks.data.words import located_words
from bert_tasks.encoder import crf, heads, packing
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.heads import Head
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import DataError, UsageError
from bert_tasks.metrics.tagging import check_names, tagging_metrics
from bert_tasks.tasks.base import Feature, LossTerm, OutputKind, Part, Prediction, labelled
from bert_tasks.tasks.shared.calibration import CalibratedFitting, CalibratedTask
from bert_tasks.tasks.shared.card import Card
from bert_tasks.tasks.shared.class_loss import WeightedConfig, WeightedFitting, WeightedTask, cross_entropy
from bert_tasks.tasks.shared.explanation import Explanation
from bert_tasks.tasks.shared.rendering import Rendering
from bert_tasks.tasks.shared.windows import WindowRules, Windows, document_windows, documents, split_words, word_starts
from bert_tasks.tasks.token_classification.detection import TokenDetection
from bert_tasks.tasks.token_classification.explanation import TokenExplainable
from bert_tasks.tasks.token_classification.report import TokenReport

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CRF_SCORES = 2**23  # numbers in the CRF matrices that are decoded at once


@dataclass(frozen=True, kw_only=True)
class EntitySpan:
    """An entity with the field names of transformers' pipeline.

    Attributes:
        score: Mean of its words' scores.
        word: Characters of the row's text from ``start`` to ``end``.
        start, end: Its characters in the row's text. Without a text in all words with a space between them.
        explanation: Explanation of the mean logit of its words' tags. Only on request.
    """

    entity_group: str
    score: float
    word: str
    start: int
    end: int
    explanation: Explanation | None = None


@dataclass(frozen=True, kw_only=True)
class TokenPrediction(Prediction):
    """The prediction for one row of words.

    Attributes:
        words, tags: The words, and one of the model's labels for each word.
        scores: Probability of each tag (with a CRF, over all tag sequences).
        entities: Entities that the tags mark, counted as conlleval does. Empty if labels are raw.
        logits: Logits of each word, in label order. Only on request.
    """

    words: tuple[str, ...]
    tags: tuple[str, ...]
    scores: tuple[float, ...]
    entities: tuple[EntitySpan, ...]
    logits: tuple[tuple[float, ...], ...] | None = None


class TokenFormats(Card, Rendering, WeightedConfig):
    """Token classification on cards, in prediction files and in transformers' config."""

    task: "TokenClassification"
    default_head: ClassVar[Literal["token"]] = "token"
    file_formats: ClassVar[tuple[str, ...]] = (".conll", ".conllu", ".txt")
    renders_labels: ClassVar[bool] = True
    formats_with_columns: ClassVar[tuple[str, ...]] = (".conllu",)
    pipeline_tag: ClassVar[str] = "token-classification"

    example_rows: ClassVar[Sequence[Row]] = (
        {"words": ["Ada", "Lovelace", "met", "Charles", "Babbage", "in", "London", "in", "1833", "."]},
        {"words": ["The", "European", "Commission", "met", "in", "Brussels", "on", "Monday", "."]},
        {"words": ["Please", "book", "a", "table", "at", "Luigi", "'s", "for", "four", "on", "Friday", "evening", "."]},
    )

    def check(self, extension: str, rows: Iterable[Row]) -> tuple[str, ...]:
        """Counts words that ``render`` changes. Changed tags would be other classes.

        Raises:
            DataError: A label, or a tag of the rows, has white space, which would split it into columns.
        """
        tags, count, changed = dict.fromkeys(self.task.labels), 0, Counter[str]()
        for row in rows:
            tags |= dict.fromkeys(row["tags"] if row.get("tags") is not None else ())
            count += len(row["words"])
            changed.update(word for word in row["words"] if _column(word) != word)
        wrong = next((tag for tag in tags if _column(tag) != tag), None)
        if wrong is not None:
            raise DataError(
                f"the tag {wrong!r} has white space, which separates the columns of {extension}. Write .jsonl"
            )
        if not changed:
            return ()
        example = next(iter(changed))
        return (
            f"{changed.total()} of {count} words have white space or are empty, which columns cannot hold. They have "
            f"_ in {extension} ({_column(example)} for {shortened(example)}, ...). Write .jsonl to keep the words",
        )

    def render(self, extension: str, predictions: Sequence[TokenPrediction], rows: Sequence[Row]) -> Mapping[str, str]:
        """Returns the columns of conlleval, with entities in IOB2.

        They are word, its tag if all rows have tags, and predicted tag. A blank line ends each row. White space within
        a word, which would separate columns, becomes ``_``, as does an empty word. ``check`` says how many.
        ".conllu" has the comments of the row, the predicted tag as ``UPOS``, and _ in other columns.
        """
        if extension not in self.file_formats:
            return super().render(extension, predictions, rows)
        if extension == ".conllu":
            sentences = [_universal(prediction, row) for prediction, row in zip(predictions, rows, strict=True)]
            return {"": "".join(sentences)}
        with_tags = all(row.get("tags") is not None for row in rows)
        lines: list[str] = []
        for prediction, row in zip(predictions, rows, strict=True):
            label_columns = [self.task._as_compared(row["tags"])] if with_tags else []
            columns = zip(
                map(_column, prediction.words), *label_columns, self.task._in_iob2(prediction.tags), strict=True
            )
            lines += [*map(" ".join, columns), ""]
        return {"": "".join(f"{line}\n" for line in lines)}

    @property
    def has_head(self) -> bool:
        """transformers has the scores of single tags, not the CRF over them."""
        return not self.task.crf

    def implied_fields(
        self, hf_config: Mapping[str, Any], labels: tuple[str, ...], usable_length: int
    ) -> dict[str, Any]:
        """Returns two labels without a file's, and an overlap of at most a quarter."""
        names = labels if labels else ("LABEL_0", "LABEL_1")
        max_length = min(self.task.max_length, usable_length)
        return {"labels": names, "max_length": max_length, "doc_stride": min(self.task.doc_stride, max_length // 4)}


def _universal(prediction: TokenPrediction, row: Row) -> str:
    """Returns a sentence in the columns of CoNLL-U, after the comments of its row."""
    lines = _comments(row)
    for number, (word, tag) in enumerate(zip(prediction.words, prediction.tags, strict=True), start=1):
        lines.append("\t".join([str(number), _column(word), "_", tag, *["_"] * 6]))
    return "".join(f"{line}\n" for line in [*lines, ""])


def _comments(row: Row) -> list[str]:
    """Returns the comments that CoNLL-U's reader found. Rows in memory may have anything in a column of this name."""
    given = row.get(PASSTHROUGH, {})
    comments = (json.loads(given) if isinstance(given, str) else given).get("comments")
    if not isinstance(comments, list):
        return []
    return [text for text in comments if isinstance(text, str) and re.fullmatch(r"#[^\r\n]*", text)]


class TokenFitting(WeightedFitting, CalibratedFitting, Windows):
    """Training of token classification, and the notes on skipped words."""

    task: "TokenClassification"
    fields: ClassVar[tuple[str, ...]] = ("scheme", "balanced_weights", *CalibratedFitting.fields)
    sample: ClassVar[Literal["window"]] = "window"

    def fit_to_train(self, rows: Iterable[Row]) -> Any:
        """Records the scheme of the training tags, and the ``balanced`` class weights.

        The weights count words, also if other sub-words are trained. As in training, a row with a tag that no label has
        does not count.

        Raises:
            DataError: ``context_tokens`` is set and no row has a document, a tag has the name of a metric over all
                tags, or no training word has one of the labels.
        """
        tags: list[Sequence[str]] = []
        documented = False
        for row in rows:
            documented |= row.get("document") is not None
            tags += [row["tags"]] if row.get("tags") is not None else []
        if self.task.context_tokens and not documented:
            raise DataError(
                f"context_tokens = {self.task.context_tokens}, but no row has a document. Name the column that says "
                "which sentences belong together (in CoNLL files the -DOCSTART- lines do), or set context_tokens = 0"
            )
        fitted = replace(self.task, scheme=detect_scheme(tags)) if tags else self.task
        check_names(fitted.labels, raw=fitted._label_scheme == "raw")
        if self.task.class_weights != "balanced":
            return fitted
        names = (to_labels(sentence, fitted.labels) for sentence in tags)
        counts = Counter(chain.from_iterable(row for row in names if set(row) <= set(fitted.labels)))
        return type(self)(fitted).balance(counts, counts.total(), noun="word")

    def labelled_logits(
        self, compact: Sequence[Tensor], features: Sequence[Feature], rows: Sequence[Row]
    ) -> list[tuple[Tensor, int]]:
        """Returns logits of the words of rows whose tags the model has."""
        index = {label: number for number, label in enumerate(self.task.labels)}
        words = iter(self.task.row_logits(compact, features))
        pairs = []
        for row in rows:
            logits = list(islice(words, len(row["words"])))
            tags = [] if row.get("tags") is None else to_labels(row["tags"], self.task.labels)
            if all(tag in index for tag in tags):
                pairs += [(each, index[tag]) for each, tag in zip(logits, tags, strict=bool(tags))]
        return pairs

    @property
    def needs_document_context(self) -> bool:
        return self.task.context_tokens > 0

    def cut_notes(self, cuts: Truncation) -> tuple[str, ...]:
        """Returns rows with words whose first sub-words alone are read."""
        if not cuts.cut_rows:
            return ()
        have = "has" if cuts.cut_rows == 1 else "have"
        limit = f"max_length = {self.task.max_length} tokens"
        return (
            f"{cuts.share(cuts.cut_rows)} rows {have} a word that alone is longer than {limit}. Only the beginning of "
            "such words is read, and each of them is tagged",
        )


@dataclass(frozen=True, kw_only=True)
class TokenClassification(WeightedTask[TokenPrediction], CalibratedTask[TokenPrediction]):
    """Words with a tag each, such as named entities.

    Attributes:
        labelling: The sub-words of a word that are trained. ``first`` trains the first one, ``all`` trains all, and
            ``continuation`` trains all with I- instead of B- after the first. A word's tag is always the tag of its
            first sub-word.
        doc_stride: The OVERLAP of two neighbouring windows in tokens, at most, as in transformers. Windows are cut
            between words.
        crf: Score tag sequences, not tags. Steps that the label scheme forbids are never predicted.
        context_tokens: how many tokens of the rows around (those with the same ``document``) a window may add on each
            side, as far as ``max_length`` allows. They are read, never tagged. Rows without a document have none.
        scheme: the scheme in which the training tags were written.

    Example:
        >>> model = TaskModel.from_pretrained(base, task=TokenClassification, labels=["O", "B-PER", "I-PER"])
        >>> model.predict({"words": ["Ada", "sings"]})[0].tags
    """

    name: ClassVar[str] = "token-classification"
    columns: ClassVar[tuple[Column, ...]] = (
        Column(name="words", kind="words"),
        Column(name="tags", kind="tags", required=False),
        Column(name="entities", kind="spans", required=False),  # instead of the tags
        Column(name="document", kind="id", required=False),
        Column(name="text", kind="text", required=False),  # instead of the words, or the text that they are from
    )
    parts: ClassVar[tuple[type[Part], ...]] = (
        TokenDetection,
        TokenFormats,
        TokenFitting,
        TokenExplainable,
        TokenReport,
    )
    labelling: Literal["first", "continuation", "all"] = "first"
    doc_stride: int = 32
    crf: bool = False
    context_tokens: int = 0
    scheme: Literal["", "IOB1", "IOB2", "BIOES", "raw"] = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.labels) == 1:
            raise ValueError("labels holds 1 name, a tagger needs at least 2")
        if not 0 <= self.doc_stride < self.max_length - 2:
            raise ValueError(
                f"doc_stride is {self.doc_stride}, but windows of {self.max_length} tokens (two of them special) "
                f"can overlap by 0 to {self.max_length - 3}"
            )
        if self.context_tokens < 0:
            raise ValueError(f"context_tokens is {self.context_tokens}, expected 0 (no context) or more")
        if self.crf and self.labelling != "first":
            raise ValueError(f"crf = true requires labelling = 'first', not {self.labelling!r}")
        if self.crf and self.calibration != "none":
            raise ValueError(
                "crf = true has no temperature, because it scores sequences of tags. Set calibration = 'none'"
            )

    @property
    def without_classes(self) -> str | None:
        return "crf = true, whose loss is of whole sentences, not of words" if self.crf else None

    @property
    def _label_scheme(self) -> Scheme:
        """The scheme of the labels, and so of the predictions."""
        return label_scheme(self.labels)

    @property
    def output_kind(self) -> OutputKind:
        return "chain" if self.crf else "softmax"

    @property
    def primary_metric(self) -> str:
        return "overall_accuracy" if self._label_scheme == "raw" else "overall_f1"

    def head(self, config: EncoderConfig) -> Head:
        if not self.labels:
            raise UsageError("token classification needs labels, e.g. labels=['O', 'B-PER', 'I-PER']")
        head_class = heads.CRFHead if self.crf else heads.PerTokenHead
        return head_class(config, len(self.labels), dropout=config.head.token_dropout)

    def features(self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase") -> list[Feature]:
        """Makes windows with ``gather_positions`` of all or the first sub-words.

        Rows with a tag that the model has no label for have no labels, so they are not trained, only counted in
        metrics.

        Raises:
            DataError: The labels are unnamed (LABEL_0, ...) and no tag is one of them.
        """
        rules = self.window_rules(tokenizer)
        split = split_words([row["words"] for row in rows], tokenizer, longest=rules.room)
        tags = [row["tags"] for row in rows if row.get("tags") is not None]
        if all(label.startswith("LABEL_") for label in self.labels):
            self._check_known(tags)
        numbers = {label: float(index) for index, label in enumerate(self.labels)}
        features: list[Feature] = []
        for document in documents([row.get("document") for row in rows], alone=not self.context_tokens):
            all_windows = document_windows([split[row] for row in document], rules)
            for row, windows in zip(document, all_windows, strict=True):
                names = None if rows[row].get("tags") is None else to_labels(rows[row]["tags"], self.labels)
                for number, window in enumerate(windows):
                    gather_positions, word_ids = window.gather_positions(first=self.labelling == "first")
                    feature = Feature(
                        row=row,
                        input_ids=window.ids,
                        token_type_ids=[0] * len(window.ids),
                        labels=self._word_labels(names, word_ids, numbers),
                        gather_positions=gather_positions,
                        word_ids=word_ids,
                        lost_tokens=0 if number else split[row].lost,
                    )
                    features.append(feature)
        return features

    def window_rules(self, tokenizer: "PreTrainedTokenizerBase") -> WindowRules:
        """Returns what windows look like."""
        limits = {"max_length": self.max_length, "overlap": self.doc_stride, "context": self.context_tokens}
        return WindowRules.of(tokenizer, **limits)

    def _word_labels(
        self, names: Sequence[str] | None, word_ids: Sequence[int], numbers: Mapping[str, float]
    ) -> list[float] | None:
        """Returns the labels of a window's tokens, if each word of the row has a label."""
        if names is None or not all(name in numbers for name in names):
            return None
        begins = word_starts(word_ids) if self.labelling == "continuation" else [True] * len(word_ids)
        # The model may lack an I- label that no training word has. Then B- stays.
        return [
            numbers[names[word] if is_start else continuation_label(names[word], numbers)]
            for word, is_start in zip(word_ids, begins, strict=True)
        ]

    def _check_known(self, sentences: Sequence[Sequence[str]]) -> None:
        """Raises DataError if labels are unnamed or of other data."""
        tags = {tag for sentence in sentences for tag in self._as_compared(sentence)}
        if tags and set(known_tags(self.labels)).isdisjoint(tags):
            ours, theirs = (listed(list(map(repr, names))) for names in (self.labels, sorted(tags)))
            raise DataError(
                f"the model's labels are {ours}, and none of the rows' tags, {theirs}, is among them. If the labels "
                "only lack names, load the model with labels=[...], the names in its order"
            )

    def loss(self, logits: Tensor, batch: PackedBatch) -> tuple[LossTerm]:
        """Sums the cross entropy over labelled sub-words, or the CRF's over windows.

        The loss of a CRF is the negative log likelihood of a window. Either way the mean divides by what is labelled,
        which with ``first`` are the words, as in transformers. With class weights it divides by the sum of the weights
        of these words.
        """
        gathered = batch.layout.gather_counts
        if sum(batch.label_counts) < sum(gathered):
            starts = accumulate(gathered, initial=0)
            ranges = [range(start, start + count) for start, count in zip(starts, batch.label_counts, strict=False)]
            labelled = packing.device_tensor([*chain.from_iterable(ranges)], logits.device, torch.long)
            logits = logits.index_select(0, labelled)
        counts = [count for count in batch.label_counts if count]
        if not counts:
            return (LossTerm(name=self.name, total=logits.sum() * 0.0, count=logits.new_zeros(())),)
        labels, weights = batch.labels.long(), self.weights_like(logits)
        if self.crf:
            total = -crf.log_likelihood(logits, labels, counts).sum()
        else:
            total = cross_entropy(logits, labels, weights=weights, gamma=self.focal_gamma)
        count = logits.new_full((), len(labels)) if weights is None else weights.index_select(0, labels).sum()
        return (LossTerm(name=self.name, total=total, count=count),)

    def counts(self, features: Sequence[Feature]) -> dict[str, float]:
        """Counts labelled sub-words, or sums their class weights."""
        weights = self.label_weights()
        if weights is None:
            return super().counts(features)
        labels = chain.from_iterable(row for feature in features if (row := feature.get("labels")))
        return {self.name: float(sum(weights[int(label)] for label in labels))}

    def compact_logits(self, logits: Sequence[Tensor], features: Sequence[Feature]) -> Sequence[Tensor]:
        return [crf.compressed(words) for words in logits] if self.crf else logits

    def decode(
        self, compact: Sequence[Tensor], features: Sequence[Feature], rows: Sequence[Row]
    ) -> list[TokenPrediction]:
        if not rows:
            return []
        counts = [len(row["words"]) for row in rows]
        if self.crf:
            best, scores = self._crf_labels(compact, features, counts)
        else:
            logits = self.calibrated(self.row_logits(compact, features))
            highest = logits.argmax(dim=1)
            best, scores = highest.tolist(), logits.softmax(dim=1).gather(1, highest[:, None]).squeeze(1).tolist()
        is_raw, predictions = self._label_scheme == "raw", []
        for row, (start, end) in zip(rows, pairwise(accumulate(counts, initial=0)), strict=True):
            words, word_scores = tuple(row["words"]), tuple(scores[start:end])
            tags = tuple(self.labels[index] for index in best[start:end])
            spans = () if is_raw else entity_spans(words, tags, word_scores, row.get("text"))
            predictions.append(TokenPrediction(words=words, tags=tags, scores=word_scores, entities=spans))
        return predictions

    def row_logits(self, compact: Sequence[Tensor], features: Sequence[Feature]) -> Tensor:
        """Returns ``[W, L]`` the logits of the first sub-word of each word."""
        logits = torch.cat(list(compact))  # [R, L]
        if self.labelling == "first":
            return logits
        firsts = [first for feature in features for first in word_starts(feature.get("word_ids"))]
        return logits.index_select(0, torch.tensor(firsts, dtype=torch.bool).nonzero().squeeze(1))

    def _crf_labels(
        self, compact: Sequence[Tensor], features: Sequence[Feature], counts: Sequence[int]
    ) -> tuple[list[int], list[float]]:
        """Returns the labels of a row's best path over its windows, and their marginals."""
        # In float64, because the score of a long sequence would leave too few digits for its words in float32.
        penalty = crf.FORBIDDEN * torch.tensor(forbidden_steps(self.labels), dtype=torch.float64)  # [L + 2, L]
        by_row: list[list[Tensor]] = [[] for _ in counts]
        for feature, window in zip(features, compact, strict=True):
            by_row[feature["row"]].append(window)
        best: list[int] = []
        scores: list[float] = []
        room = _CRF_SCORES // penalty.numel()  # words
        for block in token_batches([row for row, count in enumerate(counts) if count], counts, max_tokens=room):
            logits = crf.restored([window.double() for row in block for window in by_row[row]]) + penalty
            lengths = [counts[row] for row in block]
            labels = crf.best_labels(logits, lengths)
            best += labels.tolist()
            scores += crf.marginals(logits, lengths).gather(1, labels[:, None]).squeeze(1).tolist()
        return best, scores

    def metrics(self, predictions: Sequence[TokenPrediction], rows: Sequence[Row]) -> dict[str, float]:
        """Returns metrics over words, with entities in IOB2. See ``tagging_metrics``.

        Raises:
            DataError: No row has tags, or the model has a label for none of them.
        """
        pairs = [(row["tags"], prediction.tags) for row, prediction in labelled(rows, predictions, "tags")]
        self._check_known([tags for tags, _ in pairs])
        labels = [self._as_compared(tags) for tags, _ in pairs]
        metrics = tagging_metrics(labels, [self._in_iob2(tags) for _, tags in pairs], raw=self._label_scheme == "raw")
        if self._label_scheme != "raw":
            invalid = (invalid_transitions(tags, self._label_scheme) for _, tags in pairs)
            metrics["invalid_transitions"] = float(sum(invalid))
        scores = [score for _, prediction in labelled(rows, predictions, "tags") for score in prediction.scores]
        expected = chain.from_iterable(to_labels(tags, self.labels) for tags, _ in pairs)
        correct = [tag == label for tag, label in zip(chain.from_iterable(t for _, t in pairs), expected, strict=True)]
        return metrics | self.calibration_metrics(scores, correct)

    def _as_compared(self, tags: Sequence[str]) -> list[str]:
        """Returns the tags of a row in IOB2, or unchanged if the labels are raw."""
        return list(tags) if self._label_scheme == "raw" else to_iob2(tags)

    def _in_iob2(self, tags: Sequence[str]) -> list[str]:
        """Returns predicted tags in IOB2. Tags of an IOB2 model keep their errors."""
        plain = all(label == "O" or label.startswith(("B-", "I-")) for label in self.labels)
        return list(tags) if self._label_scheme == "raw" or (plain and self._label_scheme == "IOB2") else to_iob2(tags)


def entity_spans(
    words: Sequence[str], tags: Sequence[str], scores: Sequence[float], text: str | None = None
) -> tuple[EntitySpan, ...]:
    """Returns the entities of tags, with characters in the text of ``located_words``."""
    _, text, places = located_words(words, text)
    return tuple(
        EntitySpan(
            entity_group=entity.type,
            score=fmean(scores[entity.start : entity.end]),
            word=text[places[entity.start][0] : places[entity.end - 1][1]],
            start=places[entity.start][0],
            end=places[entity.end - 1][1],
        )
        for entity in entities(tags)
    )


def _column(word: str) -> str:
    """Returns a word as one column of a line."""
    return re.sub(r"\s+|^$", "_", word)
