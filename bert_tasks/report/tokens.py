"""Results of token classification: entities, or tags where the labels mark none.

Owns which figures and examples it has, and how a sentence is cut into spans. Must not know how they are shown.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, cast

from bert_tasks.data.columns import Row
from bert_tasks.data.conll import entities, label_scheme, to_labels
from bert_tasks.report.collect import Answers
from bert_tasks.report.results import (
    EXAMPLES,
    MOST_WORDS,
    Confusion,
    Results,
    Segment,
    SentenceExample,
    Verdict,
    cut,
    estimated,
    label_rows,
)
from bert_tasks.report.statistics import (
    Measure,
    Span,
    calibration,
    entity_measure,
    span_counts,
    word_counts,
    word_measure,
)
from bert_tasks.tasks.token_classification.task import TokenPrediction

OUTSIDE = "O"
_RIGHT_EXAMPLES = 3  # sentences without a mistake that are shown too


class _Word(NamedTuple):
    truth: str
    answer: str


class _Answer(NamedTuple):
    row: Row
    truth: frozenset[Span]
    guess: frozenset[Span]
    surest: float


def results(answers: Answers) -> Results:
    """Of the rows that have tags."""
    guesses = cast("Sequence[TokenPrediction]", answers.predictions)
    pairs = [(row, one) for row, one in zip(answers.rows, guesses, strict=True) if row.get("tags") is not None]
    truths, found = [list(row["tags"]) for row, _ in pairs], [list(one.tags) for _, one in pairs]
    raw = label_scheme(answers.task.labels) == "raw"
    judged = [_judged(row, one, raw=raw) for row, one in pairs]
    measure = _tag_measure(answers, truths, found) if raw else _type_measure(answers, judged)
    estimates = estimated(measure)
    wrong = sorted((one for one in judged if one.truth != one.guess), key=lambda one: -one.surest)
    fine = [one for one in judged if one.truth == one.guess and one.truth]
    words = [one for row, guess in pairs for one in _words(row, guess, raw=raw)]
    true_words, answered = [one.truth for one in words], [one.answer for one in words]
    seen = {*true_words, *answered}
    labels = tuple(label for label in measure.labels if label in seen)
    table = label_rows(measure, estimates, labels)
    return Results(
        measure=measure,
        estimates=estimates,
        rows=len(pairs),
        unit="sentences",
        headline=("overall_accuracy", "macro_f1") if raw else ("overall_f1", "overall_precision", "overall_recall"),
        label_word="tag" if raw else "type",
        table=table,
        left_out=len(labels) - len(table),
        confusion=Confusion.of(true_words, answered, labels if raw else (*labels, OUTSIDE), "words"),
        calibration=calibration(
            list(chain.from_iterable(guess.scores for _, guess in pairs)), _right_tags(answers, pairs)
        ),
        sure_of="tag",
        mistakes=len(wrong),
        sentences=tuple(_example(one) for one in [*wrong[:EXAMPLES], *fine[:_RIGHT_EXAMPLES]]),
        right=tuple(one.truth == one.guess for one in judged),
        verdicts=tuple(
            Verdict(
                row=row,
                label=list(row["tags"]),
                prediction=list(guess.tags),
                score=one.surest,
                right=one.truth == one.guess,
            )
            for (row, guess), one in zip(pairs, judged, strict=True)
        ),
    )


def _tag_measure(answers: Answers, truths: Sequence[Sequence[str]], found: Sequence[Sequence[str]]) -> Measure:
    """Of all tags that the model may say or that are true, so that two models count the same."""
    labels = sorted({*answers.task.labels, *chain.from_iterable(truths)})
    return word_measure(word_counts(truths, found, labels), labels)


def _type_measure(answers: Answers, judged: Sequence[_Answer]) -> Measure:
    """The same of entity types."""
    known = {_type(label) for label in answers.task.labels if label != OUTSIDE}
    types = sorted(known | {span.type for one in judged for span in one.truth})
    return entity_measure(span_counts([one.truth for one in judged], [one.guess for one in judged], types), types)


def _words(row: Row, guess: TokenPrediction, *, raw: bool) -> list[_Word]:
    """Each word's tag; of chunk tags only what they mark, since schemes spell where it begins and ends differently."""
    tags = zip(row["tags"], guess.tags, strict=True)
    return [_Word(one, two) if raw else _Word(_type(one), _type(two)) for one, two in tags]


def _right_tags(answers: Answers, pairs: Sequence[tuple[Row, TokenPrediction]]) -> list[bool]:
    """For each word whether its tag is right: a word's score is the probability of the tag, prefix and type.

    The true tags are written as the model's labels are, whatever the scheme of the file.
    """
    labels = [to_labels(row["tags"], answers.task.labels) for row, _ in pairs]
    return [
        tag == label
        for (_, guess), sentence in zip(pairs, labels, strict=True)
        for tag, label in zip(guess.tags, sentence, strict=True)
    ]


def _type(tag: str) -> str:
    return OUTSIDE if tag == OUTSIDE else tag.partition("-")[2]


def _spans(tags: Sequence[str], other: Sequence[str], *, raw: bool) -> frozenset[Span]:
    """Entities; of raw tags the words on which both sides differ."""
    if raw:
        differing = enumerate(zip(tags, other, strict=True))
        return frozenset(Span(place, place + 1, tag) for place, (tag, wanted) in differing if tag != wanted)
    return frozenset(Span(entity.start, entity.end, entity.type) for entity in entities(tags))


def _judged(row: Row, guess: TokenPrediction, *, raw: bool) -> _Answer:
    truth, found = _spans(row["tags"], guess.tags, raw=raw), _spans(guess.tags, row["tags"], raw=raw)
    wrong = [place for span in truth ^ found for place in range(span.start, span.end)]
    return _Answer(row, truth, found, max((guess.scores[place] for place in wrong), default=0.0))


def _example(one: _Answer) -> SentenceExample:
    words = one.row["words"]
    first = min((span.start for span in one.truth ^ one.guess), default=0)
    start = max(0, min(first - MOST_WORDS // 3, len(words) - MOST_WORDS))
    end = min(len(words), start + MOST_WORDS)
    return SentenceExample(
        line=one.row.get("line"),
        truth=_segments(words, one.truth, one.guess, start, end, is_truth=True),
        answer=_segments(words, one.guess, one.truth, start, end, is_truth=False),
        mistakes=len(one.truth ^ one.guess),
    )


def _segments(
    words: Sequence[str], spans: frozenset[Span], other: frozenset[Span], start: int, end: int, *, is_truth: bool
) -> tuple[Segment, ...]:
    """The words from start to end with one side's spans; a span that the other side has too is right."""
    found = [Segment(text="…")] if start else []
    place = start
    for span in sorted(spans):
        if span.end <= start or span.start >= end:
            continue
        found += _plain(words[place : max(place, span.start)])
        text = cut(" ".join(words[max(span.start, start) : min(span.end, end)]), 200)
        both = span in other
        found.append(
            Segment(text=text, truth=span.type, answer=span.type if both else "")
            if is_truth
            else Segment(text=text, truth=span.type if both else "", answer=span.type)
        )
        place = span.end
    found += _plain(words[place:end])
    return tuple([*found, Segment(text="…")] if end < len(words) else found)


def _plain(words: Sequence[str]) -> list[Segment]:
    return [Segment(text=" ".join(cut(word, 60) for word in words))] if words else []
