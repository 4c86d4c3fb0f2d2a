"""The report of token classification with entities, or with tags without entities."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, NamedTuple

from bert_tasks.data.columns import Row
from bert_tasks.data.conll import entities, label_scheme, to_labels
from bert_tasks.metrics.calibration import calibration
from bert_tasks.metrics.formulas import Span, entity_measure, word_measure
from bert_tasks.metrics.tables import MetricTable, metric_table
from bert_tasks.tasks.base import labelled
from bert_tasks.tasks.shared.calibration import ECE
from bert_tasks.tasks.shared.report import (
    HUES,
    MOST_EXAMPLES,
    Confusion,
    Example,
    Examples,
    Remark,
    Report,
    ReportSections,
    RowResult,
    Segment,
    cut,
)

OUTSIDE = "O"
MOST_WORDS = 80  # in a sentence on a page
_CORRECT_EXAMPLES = 3  # sentences without a mistake that are shown too


class _Sentence(NamedTuple):
    """A row with the spans of its labels and of its prediction."""

    result: RowResult
    labels: frozenset[Span]
    predictions: frozenset[Span]


class TokenReport(Report):
    """The report of token classification."""

    lower_is_better: ClassVar[frozenset[str]] = frozenset({"invalid_transitions", ECE})

    @property
    def _is_raw(self) -> bool:
        return label_scheme(self.task.labels) == "raw"

    def table(self, metrics: Mapping[str, float]) -> MetricTable:
        """Returns a row for each entity type, or for each tag without entities."""
        names = [name.removesuffix("_number") for name in metrics if name.endswith("_number")]
        word = "tag" if self._is_raw else "type"
        return metric_table(metrics, names, "{}_{}".format, word=word, support="number")

    @property
    def curves(self) -> tuple[str, ...]:
        if self._is_raw:
            return ("overall_accuracy", "macro_f1")
        return ("overall_f1", "overall_precision", "overall_recall")

    def truths(self, row: Row) -> Sequence[str]:
        return () if row.get("tags") is None else row["tags"]

    def decisions(self, prediction: Any) -> Sequence[str]:
        tags: Sequence[str] = prediction.tags
        return tags

    def describe(self, decision: str) -> str:
        return f"{decision!r} for every word"

    def sections(self, predictions: Sequence[Any], rows: Sequence[Row]) -> ReportSections:
        pairs, names, raw = labelled(rows, predictions, "tags"), self.task.labels, self._is_raw
        tags, predicted_tags = [list(row["tags"]) for row, _ in pairs], [list(result.tags) for _, result in pairs]
        sentences = [_sentence(row, prediction, raw=raw) for row, prediction in pairs]
        # The names that the model can predict or that the data have, so that two models count the same.
        if raw:
            measure = word_measure(tags, predicted_tags, sorted({*names, *chain.from_iterable(tags)}))
        else:
            types = {_type(name) for name in (*names, *chain.from_iterable(tags))} - {OUTSIDE}
            measure = entity_measure([s.labels for s in sentences], [s.predictions for s in sentences], sorted(types))
        # The types of chunk tags, because prefixes differ between schemes.
        words, predicted_words = (
            [tag if raw else _type(tag) for tag in chain.from_iterable(side)] for side in (tags, predicted_tags)
        )
        occurring = {*words, *predicted_words}
        shown = tuple(label for label in measure.labels if label in occurring)
        # A word's score is the probability of its tag, prefix and type. Labels are written as the model's, whatever the
        # scheme of the file.
        expected = chain.from_iterable(to_labels(sentence, names) for sentence in tags)
        correct = [tag == label for tag, label in zip(chain.from_iterable(predicted_tags), expected, strict=True)]
        return ReportSections(
            measure=measure,
            unit="sentences",
            headline=self.curves,
            results=tuple(sentence.result for sentence in sentences),
            label_word="tag" if raw else "type",
            labels=shown,
            confusion=Confusion.of(words, predicted_words, shown if raw else (*shown, OUTSIDE), "words"),
            calibration=calibration(list(chain.from_iterable(prediction.scores for _, prediction in pairs)), correct),
            confidence_in="tag",
            examples=_examples(sentences, [label for label in shown if label in measure.support()]),
        )


def _type(tag: str) -> str:
    return OUTSIDE if tag == OUTSIDE else tag.partition("-")[2]


def _sentence(row: Row, prediction: Any, *, raw: bool) -> _Sentence:
    """Returns entities, or for raw tags the words with different label and prediction."""
    sides = row["tags"], prediction.tags
    if raw:
        differing = [i for i, (label, tag) in enumerate(zip(*sides, strict=True)) if label != tag]
        true, predicted = (frozenset(Span(i, i + 1, tags[i]) for i in differing) for tags in sides)
    else:
        true, predicted = (frozenset(Span(e.start, e.end, e.type) for e in entities(tags)) for tags in sides)
    wrong = (prediction.scores[i] for span in true ^ predicted for i in range(span.start, span.end))
    result = RowResult(
        row=row,
        label=list(row["tags"]),
        prediction=list(prediction.tags),
        score=max(wrong, default=0.0),
        is_correct=true == predicted,
    )
    return _Sentence(result, true, predicted)


def _examples(sentences: Sequence[_Sentence], names: Sequence[str]) -> Examples:
    """Returns sentences with mistakes, the most confident first, and some without."""
    wrong = sorted(
        (sentence for sentence in sentences if not sentence.result.is_correct),
        key=lambda sentence: -sentence.result.score,
    )
    correct = [sentence for sentence in sentences if sentence.result.is_correct and sentence.labels]
    hues = {name: index % HUES for index, name in enumerate(names)}
    lead = (
        f"Sentences with a mistake: {len(wrong):,} of {len(sentences):,}. The most confident mistakes come first. Some "
        "correct sentences follow. Dashed frames: ○ missed by the model, ✗ not in the labels."
    )
    items = [_example(sentence, hues) for sentence in [*wrong[:MOST_EXAMPLES], *correct[:_CORRECT_EXAMPLES]]]
    return Examples(word="Sentences", title="Sentences", lead=lead, items=tuple(items))


def _example(sentence: _Sentence, hues: Mapping[str, int]) -> Example:
    """Returns the part of the sentence around its first mistake."""
    row, differing = sentence.result.row, sentence.labels ^ sentence.predictions
    words = row["words"]
    first = min((span.start for span in differing), default=0)
    start = max(0, min(first - MOST_WORDS // 3, len(words) - MOST_WORDS))
    shown = range(start, min(len(words), start + MOST_WORDS))
    sides = (
        ("label", _segments(words, shown, sentence.labels, hues, both=sentence.predictions, is_label=True)),
        ("model", _segments(words, shown, sentence.predictions, hues, both=sentence.labels, is_label=False)),
    )
    count = len(differing)
    text = "✓ all correct" if not count else "✗ 1 span differs" if count == 1 else f"✗ {count} spans differ"
    remark = Remark(name=text, tone="bad" if count else "good")
    return Example(line=row.get("line"), sides=sides, remarks=(remark,))


def _segments(
    words: Sequence[str],
    shown: range,
    spans: frozenset[Span],
    hues: Mapping[str, int],
    *,
    both: frozenset[Span],
    is_label: bool,
) -> tuple[Segment, ...]:
    """Returns the words with the spans of a side. Spans on both sides are correct."""
    segments, position = [Segment(text="…")] if shown.start else [], shown.start

    def add_words(end: int) -> None:
        if position < end:
            segments.append(Segment(text=" ".join(cut(word, 60) for word in words[position:end])))

    for span in sorted(spans):
        if span.end > shown.start and span.start < shown.stop:
            add_words(span.start)
            segments.append(
                Segment(
                    text=cut(" ".join(words[max(span.start, shown.start) : min(span.end, shown.stop)]), 200),
                    label=span.type if is_label or span in both else "",
                    prediction=span.type if span in both or not is_label else "",
                    hue=hues.get(span.type, 0),
                )
            )
            position = span.end
    add_words(shown.stop)
    return tuple([*segments, Segment(text="…")] if shown.stop < len(words) else segments)
