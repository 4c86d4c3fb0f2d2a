"""The report of token classification with entities, or with tags without entities."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from bert_tasks.data.columns import Row
from bert_tasks.data.conll import entities, label_scheme, to_labels
from bert_tasks.metrics.calibration import calibration
from bert_tasks.metrics.formulas import Span, entity_measure, word_measure
from bert_tasks.outputs.base import labelled
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
)
from bert_tasks.outputs.tag_prediction import TokenPrediction

OUTSIDE = "O"
MOST_WORDS = 80  # in a sentence on a page
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
    pairs = labelled(rows, predictions, "tags")
    tags = [list(row["tags"]) for row, _ in pairs]
    predicted_tags = [list(prediction.tags) for _, prediction in pairs]
    sentences = [_sentence(row, prediction, raw=is_raw) for row, prediction in pairs]
    # The names that the model can predict or that the data have, so that two models count the same.
    names = {*labels, *chain.from_iterable(tags)}
    if is_raw:
        measure = word_measure(tags, predicted_tags, sorted(names))
    else:
        types = {_type(name) for name in names} - {OUTSIDE}
        entities_of_rows = [sentence.labels for sentence in sentences]
        measure = entity_measure(entities_of_rows, [sentence.predictions for sentence in sentences], sorted(types))
    words, predicted_words = _classes(tags, raw=is_raw), _classes(predicted_tags, raw=is_raw)
    occurring = {*words, *predicted_words}
    shown = tuple(label for label in measure.labels if label in occurring)
    classes = shown if is_raw else (*shown, OUTSIDE)
    # A word's score is the probability of its tag, prefix and type. Labels are written as the model's, whatever the
    # scheme of the file.
    expected = chain.from_iterable(to_labels(sentence, labels) for sentence in tags)
    correct = [tag == label for tag, label in zip(chain.from_iterable(predicted_tags), expected, strict=True)]
    scores = list(chain.from_iterable(prediction.scores for _, prediction in pairs))
    return ReportSections(
        measure=measure,
        unit="sentences",
        headline=headline,
        results=tuple(sentence.result for sentence in sentences),
        label_word=label_word(labels),
        labels=shown,
        confusion=Confusion.of(words, predicted_words, classes, "words"),
        calibration=calibration(scores, correct),
        confidence_in="tag",
        examples=_examples(sentences, [label for label in shown if label in measure.support()]),
    )


def label_word(labels: Sequence[str]) -> str:
    """Returns the noun for what metrics are about, which are entity types, or tags without entities."""
    return "tag" if label_scheme(labels) == "raw" else "type"


def _classes(tagged: Sequence[Sequence[str]], *, raw: bool) -> list[str]:
    """Returns the tag of each word, or the type of chunk tags, because prefixes differ between schemes."""
    tags = chain.from_iterable(tagged)
    return list(tags) if raw else [_type(tag) for tag in tags]


def _type(tag: str) -> str:
    return OUTSIDE if tag == OUTSIDE else tag.partition("-")[2]


def _sentence(row: Row, prediction: TokenPrediction, *, raw: bool) -> _Sentence:
    """Returns entities, or for raw tags the words with different label and prediction."""
    tags, predicted_tags = row["tags"], prediction.tags
    if raw:
        pairs = zip(tags, predicted_tags, strict=True)
        differing = [index for index, (label, tag) in enumerate(pairs) if label != tag]
        true = frozenset(Span(index, index + 1, tags[index]) for index in differing)
        predicted = frozenset(Span(index, index + 1, predicted_tags[index]) for index in differing)
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
    shown = [*wrong[:MOST_EXAMPLES], *correct[:_CORRECT_EXAMPLES]]
    items = [_example(sentence, hues) for sentence in shown]
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
    both: frozenset[Span],
    is_label: bool,
) -> tuple[Segment, ...]:
    """Returns the words with the spans of a side. Spans on both sides are correct."""
    segments: list[Segment] = []
    if shown.start:
        segments.append(Segment(text="…"))
    position = shown.start
    for span in sorted(spans):
        if span.end <= shown.start or span.start >= shown.stop:
            continue
        segments += _plain_words(words[position : span.start])
        marked = words[max(span.start, shown.start) : min(span.end, shown.stop)]
        segment = Segment(
            text=cut(" ".join(marked), 200),
            label=span.type if is_label or span in both else "",
            prediction=span.type if span in both or not is_label else "",
            hue=hues.get(span.type, 0),
        )
        segments.append(segment)
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
