"""What a report shows of token classification: entities, or tags where the labels mark none."""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from bert_tasks.data.columns import Row
from bert_tasks.data.conll import entities, label_scheme, to_labels
from bert_tasks.metrics.classification import calibration
from bert_tasks.metrics.formulas import Span, entity_measure, word_measure
from bert_tasks.tasks.shared.report import (
    HUES,
    MOST_EXAMPLES,
    Confusion,
    Example,
    Examples,
    Remark,
    ReportSections,
    RowResult,
    Segment,
    cut,
)

TokenPrediction = Any  # of task.py, which imports this module

OUTSIDE = "O"
MOST_WORDS = 80  # of one sentence that is shown
_CORRECT_EXAMPLES = 3  # sentences without a mistake that are shown too


class _Sentence(NamedTuple):
    """The spans of a row's labels and of its prediction; ``confidence``: the highest of a wrong word."""

    row: Row
    labels: frozenset[Span]
    predictions: frozenset[Span]
    confidence: float


def tag_sections(pairs: Sequence[tuple[Row, TokenPrediction]], names: tuple[str, ...]) -> ReportSections:
    """Figures of entities where the labels mark them, else of words.

    Args:
        pairs: the labelled rows and their predictions.
        names: of the model's labels.
    """
    raw = label_scheme(names) == "raw"
    tags, predicted_tags = [list(row["tags"]) for row, _ in pairs], [list(one.tags) for _, one in pairs]
    sentences = [_sentence(row, one, raw=raw) for row, one in pairs]
    results = tuple(
        RowResult(
            row=row, label=label, prediction=predicted, score=one.confidence, is_correct=one.labels == one.predictions
        )
        for (row, _), label, predicted, one in zip(pairs, tags, predicted_tags, sentences, strict=True)
    )
    # The names that the model can predict or that the data have, so that two models count the same.
    if raw:
        measure = word_measure(tags, predicted_tags, sorted({*names, *chain.from_iterable(tags)}))
    else:
        types = {_type(name) for name in names if name != OUTSIDE} | {one.type for s in sentences for one in s.labels}
        measure = entity_measure(
            [one.labels for one in sentences], [one.predictions for one in sentences], sorted(types)
        )
    # Of chunk tags the types: prefixes differ between schemes.
    words, predicted_words = (
        [tag if raw else _type(tag) for tag in chain.from_iterable(side)] for side in (tags, predicted_tags)
    )
    occurring = {*words, *predicted_words}
    shown = tuple(label for label in measure.labels if label in occurring)
    # A word's score is the probability of its tag, prefix and type; labels are written as the model's, whatever the
    # scheme of the file.
    wanted = (to_labels(sentence, names) for sentence in tags)
    correct = [
        tag == label for pair in zip(predicted_tags, wanted, strict=True) for tag, label in zip(*pair, strict=True)
    ]
    return ReportSections(
        measure=measure,
        unit="sentences",
        headline=("overall_accuracy", "macro_f1") if raw else ("overall_f1", "overall_precision", "overall_recall"),
        results=results,
        label_word="tag" if raw else "type",
        labels=shown,
        confusion=Confusion.of(words, predicted_words, shown if raw else (*shown, OUTSIDE), "words"),
        calibration=calibration(list(chain.from_iterable(one.scores for _, one in pairs)), correct),
        confidence_in="tag",
        examples=_examples(sentences, [label for label in shown if label in measure.support()]),
    )


def _type(tag: str) -> str:
    return OUTSIDE if tag == OUTSIDE else tag.partition("-")[2]


def _sentence(row: Row, prediction: TokenPrediction, *, raw: bool) -> _Sentence:
    """Entities; of raw tags the words on which label and prediction differ."""
    labels, predictions = row["tags"], prediction.tags
    if raw:
        differing = [(i, *pair) for i, pair in enumerate(zip(labels, predictions, strict=True)) if pair[0] != pair[1]]
        true = frozenset(Span(i, i + 1, label) for i, label, _ in differing)
        predicted = frozenset(Span(i, i + 1, tag) for i, _, tag in differing)
    else:
        true, predicted = (
            frozenset(Span(one.start, one.end, one.type) for one in entities(tags)) for tags in (labels, predictions)
        )
    wrong = [i for span in true ^ predicted for i in range(span.start, span.end)]
    return _Sentence(row, true, predicted, max((prediction.scores[i] for i in wrong), default=0.0))


def _examples(sentences: Sequence[_Sentence], names: Sequence[str]) -> Examples:
    """Sentences with mistakes, the most confident first, and a few with correct entities."""
    wrong = sorted((one for one in sentences if one.labels != one.predictions), key=lambda one: -one.confidence)
    correct = [one for one in sentences if one.labels == one.predictions and one.labels]
    hues = {name: place % HUES for place, name in enumerate(names)}
    lead = (
        f"Sentences with a mistake: {len(wrong):,} of {len(sentences):,}, the most confident mistakes first; then some "
        "that are correct. Dashed frames: ○ missed by the model, ✗ not in the labels."
    )
    items = [_example(one, hues) for one in [*wrong[:MOST_EXAMPLES], *correct[:_CORRECT_EXAMPLES]]]
    return Examples(word="Sentences", title="Sentences", lead=lead, items=tuple(items))


def _example(one: _Sentence, hues: dict[str, int]) -> Example:
    """The part of the sentence around its first mistake."""
    words, differing = one.row["words"], one.labels ^ one.predictions
    first = min((span.start for span in differing), default=0)
    start = max(0, min(first - MOST_WORDS // 3, len(words) - MOST_WORDS))
    end = min(len(words), start + MOST_WORDS)
    sides = tuple(
        (name, _segments(words[:end], spans, other, start, is_label=is_label, hues=hues, is_cut=end < len(words)))
        for name, spans, other, is_label in (
            ("label", one.labels, one.predictions, True),
            ("model", one.predictions, one.labels, False),
        )
    )
    count = len(differing)
    said = "✓ all correct" if not count else "✗ 1 span differs" if count == 1 else f"✗ {count} spans differ"
    remark = Remark(name=said, tone="bad" if count else "good")
    return Example(line=one.row.get("line"), sides=sides, remarks=(remark,))


def _segments(
    words: Sequence[str],
    spans: frozenset[Span],
    other: frozenset[Span],
    start: int,
    *,
    is_label: bool,
    hues: dict[str, int],
    is_cut: bool,
) -> tuple[Segment, ...]:
    """The words from ``start`` on with the spans of one side; a span that the other side has too is correct."""
    segments = [Segment(text="…")] if start else []
    place = start
    for span in sorted(spans):
        if span.end <= start or span.start >= len(words):
            continue
        segments += _plain(words[place : max(place, span.start)])
        both = span in other
        segments.append(
            Segment(
                text=cut(" ".join(words[max(span.start, start) : span.end]), 200),
                label=span.type if is_label or both else "",
                prediction=span.type if both or not is_label else "",
                hue=hues.get(span.type, 0),
            )
        )
        place = span.end
    segments += _plain(words[place:])
    return tuple([*segments, Segment(text="…")] if is_cut else segments)


def _plain(words: Sequence[str]) -> list[Segment]:
    return [Segment(text=" ".join(cut(word, 60) for word in words))] if words else []
