"""The report of token classification with entities, or with tags without entities."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from bert_tasks.data.columns import Row
from bert_tasks.data.conll import entities, label_scheme, to_labels
from bert_tasks.metrics.calibration import calibration
from bert_tasks.metrics.formulas import Span, entity_measure, word_measure
from bert_tasks.outputs.base import labelled
from bert_tasks.outputs.row_sections import most_frequent_label
from bert_tasks.outputs.sections import (
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
    per_cent,
)
from bert_tasks.outputs.tag_prediction import TokenPrediction

OUTSIDE = "O"  # the tag of words outside of all chunks
MOST_WORDS = 80  # of a sentence on a page
_CORRECT_EXAMPLES = 3  # sentences without a mistake that are shown too


class _Sentence(NamedTuple):
    """A row with the spans of its labels and of its prediction."""

    result: RowResult
    labels: frozenset[Span]
    predictions: frozenset[Span]


def tag_sections(
    predictions: Sequence[TokenPrediction], rows: Sequence[Row], labels: Sequence[str], headline: tuple[str, ...]
) -> ReportSections:
    """Returns the report of the rows that have tags.

    Args:
        predictions: The predictions.
        rows: As many rows.
        labels: The labels of the model.
        headline: The names of the metrics that are shown first.
    """
    is_raw = label_scheme(labels) == "raw"
    tags: list[list[str]] = []
    predicted_tags: list[list[str]] = []
    scores: list[float] = []
    correct: list[bool] = []
    sentences: list[_Sentence] = []
    for row, prediction in labelled(rows, predictions, "tags"):
        tags.append(list(row["tags"]))
        predicted_tags.append(list(prediction.tags))
        sentences.append(_sentence(row, prediction, raw=is_raw))
        # A word's score is the probability of its tag, prefix and type. Labels are written as the model's, whatever
        # the scheme of the file.
        scores += prediction.scores
        expected = to_labels(row["tags"], labels)
        correct += [tag == label for tag, label in zip(prediction.tags, expected, strict=True)]
    # The names that the model can predict or that the data have, so that two models count the same.
    names = {*labels, *chain.from_iterable(tags)}
    if is_raw:
        measure = word_measure(tags, predicted_tags, sorted(names))
    else:
        types = {_type(name) for name in names} - {OUTSIDE}
        spans = [sentence.labels for sentence in sentences]
        predicted_spans = [sentence.predictions for sentence in sentences]
        measure = entity_measure(spans, predicted_spans, sorted(types))
    words, predicted_words = _classes(tags, raw=is_raw), _classes(predicted_tags, raw=is_raw)
    occurring = {*words, *predicted_words}
    shown = tuple(label for label in measure.labels if label in occurring)
    classes = shown if is_raw else (*shown, OUTSIDE)
    support = measure.support()
    with_numbers = [label for label in shown if label in support]
    summary = _word_summary(words, predicted_words) if is_raw else _entity_summary(sentences)
    return ReportSections(
        measure=measure,
        unit="sentences",
        headline=headline,
        results=tuple(sentence.result for sentence in sentences),
        summary=summary,
        label_word=label_word(labels),
        labels=shown,
        confusion=Confusion.of(words, predicted_words, classes, "words"),
        calibration=calibration(scores, correct),
        confidence_in="tag",
        examples=_examples(sentences, with_numbers),
    )


def _entity_summary(sentences: Sequence[_Sentence]) -> str:
    """Returns in words how many entities are found (recall) and how many of those predicted are right (precision)."""
    expected = sum(len(sentence.labels) for sentence in sentences)
    predicted = sum(len(sentence.predictions) for sentence in sentences)
    found = sum(len(sentence.labels & sentence.predictions) for sentence in sentences)
    if expected == 0:
        return f"there is no entity, and the model predicts {predicted:,}"
    summary = f"the model finds {found:,} of the {expected:,} entities ({per_cent(found, expected)})"
    if predicted == 0:
        return f"{summary}, because it predicts none"
    return f"{summary}, and {found:,} of the {predicted:,} that it predicts are right ({per_cent(found, predicted)})"


def _word_summary(tags: Sequence[str], predicted_tags: Sequence[str]) -> str:
    """Returns in words how many tags are right, and how many if the most frequent tag was always predicted."""
    if not tags:
        return ""
    right = sum(tag == predicted for tag, predicted in zip(tags, predicted_tags, strict=True))
    share = per_cent(right, len(tags))
    return f"{right:,} of the {len(tags):,} tags are right ({share}); {most_frequent_label(tags)}"


def label_word(labels: Sequence[str]) -> str:
    """Returns the noun for what metrics are about, which are entity types, or tags without entities."""
    return "tag" if label_scheme(labels) == "raw" else "type"


def _classes(tagged: Sequence[Sequence[str]], *, raw: bool) -> list[str]:
    """Returns the tag of each word, or the type of chunk tags, because prefixes differ between schemes."""
    tags = chain.from_iterable(tagged)
    if raw:
        return list(tags)
    return [_type(tag) for tag in tags]


def _type(tag: str) -> str:
    """Returns the type of a chunk tag, which stands behind its prefix, or ``OUTSIDE``."""
    if tag == OUTSIDE:
        return OUTSIDE
    return tag.partition("-")[2]


def _sentence(row: Row, prediction: TokenPrediction, *, raw: bool) -> _Sentence:
    """Returns entities, or for raw tags the words with different label and prediction."""
    tags, predicted_tags = row["tags"], prediction.tags
    if raw:
        wrong: list[Span] = []
        wrong_predictions: list[Span] = []
        for index, (label, tag) in enumerate(zip(tags, predicted_tags, strict=True)):
            if label != tag:
                wrong.append(Span(index, index + 1, label))
                wrong_predictions.append(Span(index, index + 1, tag))
        true, predicted = frozenset(wrong), frozenset(wrong_predictions)
    else:
        true, predicted = _entity_set(tags), _entity_set(predicted_tags)
    score = 0.0  # of the most confident mistake
    for span in true ^ predicted:
        score = max([score, *prediction.scores[span.start : span.end]])
    result = RowResult(
        row=row,
        label=list(tags),
        prediction=list(predicted_tags),
        score=score,
        is_correct=true == predicted,
    )
    return _Sentence(result, true, predicted)


def _entity_set(tags: Sequence[str]) -> frozenset[Span]:
    """Returns the entities that chunk tags mark, as spans that can be compared."""
    return frozenset(Span(entity.start, entity.end, entity.type) for entity in entities(tags))


def _examples(sentences: Sequence[_Sentence], names: Sequence[str]) -> Examples:
    """Returns sentences with mistakes, the most confident first, and some without."""
    wrong = [sentence for sentence in sentences if not sentence.result.is_correct]
    wrong.sort(key=lambda sentence: -sentence.result.score)
    correct = [sentence for sentence in sentences if sentence.result.is_correct and sentence.labels]
    hues = {name: index % HUES for index, name in enumerate(names)}
    lead = (
        f"Sentences with a mistake: {len(wrong):,} of {len(sentences):,}. The most confident mistakes come first. Some "
        "correct sentences follow. Dashed frames: ○ missed by the model, ✗ not in the labels."
    )
    chosen = [*wrong[:MOST_EXAMPLES], *correct[:_CORRECT_EXAMPLES]]
    items = [_example(sentence, hues) for sentence in chosen]
    return Examples(word="Sentences", title="Sentences", lead=lead, items=tuple(items))


def _example(sentence: _Sentence, hues: Mapping[str, int]) -> Example:
    """Returns the part of the sentence around its first mistake."""
    row, differing = sentence.result.row, sentence.labels ^ sentence.predictions
    words = row["words"]
    first = min((span.start for span in differing), default=0)
    # A third of the words stand before the mistake, unless the sentence ends earlier.
    start = max(0, min(first - MOST_WORDS // 3, len(words) - MOST_WORDS))
    shown = range(start, min(len(words), start + MOST_WORDS))
    sides = (
        ("label", _segments(words, shown, sentence.labels, hues, others=sentence.predictions, is_label=True)),
        ("model", _segments(words, shown, sentence.predictions, hues, others=sentence.labels, is_label=False)),
    )
    return Example(line=row.get("line"), sides=sides, remarks=(_remark(len(differing)),))


def _remark(differing: int) -> Remark:
    """Returns the remark on a sentence with so many spans that differ."""
    if differing == 0:
        return Remark(name="✓ all correct", tone="good")
    if differing == 1:
        return Remark(name="✗ 1 span differs", tone="bad")
    return Remark(name=f"✗ {differing} spans differ", tone="bad")


def _segments(
    words: Sequence[str],
    shown: range,
    spans: frozenset[Span],
    hues: Mapping[str, int],
    *,
    others: frozenset[Span],
    is_label: bool,
) -> tuple[Segment, ...]:
    """Returns the words with the spans of one side, which are those of the labels or of the prediction.

    Args:
        words: The words of the sentence.
        shown: The words that are shown.
        spans: The spans of this side.
        hues: Type -> number of its colour.
        others: The spans of the other side. A span that is on both sides is correct.
        is_label: True if this side is that of the labels.
    """
    segments: list[Segment] = []
    if shown.start:
        segments.append(Segment(text="…"))
    position = shown.start
    for span in sorted(spans):
        if span.end <= shown.start or span.start >= shown.stop:
            continue
        segments += _plain_words(words[position : span.start])
        marked = words[max(span.start, shown.start) : min(span.end, shown.stop)]
        label = span.type
        prediction = span.type
        if span not in others:
            if is_label:
                prediction = ""
            else:
                label = ""
        text = cut(" ".join(marked), 200)
        segments.append(Segment(text=text, label=label, prediction=prediction, hue=hues.get(span.type, 0)))
        position = span.end
    segments += _plain_words(words[position : shown.stop])
    if shown.stop < len(words):
        segments.append(Segment(text="…"))
    return tuple(segments)


def _plain_words(words: Sequence[str]) -> list[Segment]:
    """Returns words without a mark as one segment, or nothing if there are none."""
    if not words:
        return []
    return [Segment(text=" ".join(cut(word, 60) for word in words))]
