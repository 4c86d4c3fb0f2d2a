"""Results of span extraction: scores with and without an answer, the threshold for "no answer", questions.

Owns which figures and examples it has, and which part of a context is shown. Must not know how they are shown.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, cast

import numpy as np

from bert_tasks.data.columns import Row
from bert_tasks.report.charts import thinned
from bert_tasks.report.collect import Answers
from bert_tasks.report.results import (
    MOST_CHARACTERS,
    QUESTIONS,
    GroupRow,
    QuestionExample,
    Results,
    Segment,
    ThresholdCurve,
    Verdict,
    cut,
    estimated,
)
from bert_tasks.report.statistics import AnswerScore, answer_measure, answer_score, calibration
from bert_tasks.tasks.span_extraction.task import SpanExtraction, SpanPrediction

_AROUND = 130  # characters of the context on both sides of an answer
_N_BEST = 5
_RIGHT_EXAMPLES = 3


class _Answer(NamedTuple):
    row: Row
    golds: Sequence[str]
    guess: SpanPrediction
    score: AnswerScore


def results(answers: Answers) -> Results:
    """Of the questions whose answers are known."""
    task = cast("SpanExtraction", answers.task)
    guesses = cast("Sequence[SpanPrediction]", answers.predictions)
    given = [
        _Answer(row, row["answers"]["text"], guess, answer_score(row["answers"]["text"], guess.answer))
        for row, guess in zip(answers.rows, guesses, strict=True)
        if row.get("answers") is not None
    ]
    exact = "exact" if task.version_2_with_negative else "exact_match"
    measure = answer_measure([one.score for one in given], exact)
    wrong = sorted((one for one in given if not one.score.exact), key=lambda one: (one.score.f1, -one.guess.score))
    fine = [one for one in given if one.score.exact][:_RIGHT_EXAMPLES]
    return Results(
        measure=measure,
        estimates=estimated(measure),
        rows=len(given),
        unit="questions",
        headline=("f1", exact),
        groups=_groups(given, exact) if task.version_2_with_negative else (),
        calibration=calibration([one.guess.score for one in given], [one.score.exact for one in given]),
        sure_of="answer",
        mistakes=len(wrong),
        questions=tuple(_example(one) for one in [*wrong[: QUESTIONS - len(fine)], *fine]),
        curve=_curve(given, task.null_threshold) if task.version_2_with_negative else None,
        right=tuple(bool(one.score.exact) for one in given),
        verdicts=tuple(
            Verdict(
                row=one.row,
                label=list(one.golds),
                prediction=one.guess.answer,
                score=one.guess.score,
                right=bool(one.score.exact),
            )
            for one in given
        ),
    )


def _groups(given: Sequence[_Answer], exact: str) -> tuple[GroupRow, ...]:
    found = []
    for name, wanted in (("with an answer", True), ("without an answer", False)):
        scores = [one.score for one in given if bool(one.golds) is wanted]
        if scores:
            numbers = estimated(answer_measure(scores, exact))
            found.append(GroupRow(name=name, exact=numbers[exact], f1=numbers["f1"], count=len(scores)))
    return tuple(found)


def _curve(given: Sequence[_Answer], chosen: float) -> ThresholdCurve:
    """The scores at every threshold that changes an answer; where none is exceeded all questions are answered."""
    odds = np.array([0.0 if one.guess.null_odds is None else one.guess.null_odds for one in given])
    order = np.argsort(odds, kind="stable")
    answered = np.array([answer_score(one.golds, one.guess.best.text) for one in given])[order]  # [S, 2]
    silent = np.array([[float(not one.golds)] * 2 for one in given])[order]
    total = np.vstack([np.zeros(2), np.cumsum(answered - silent, axis=0)]) + silent.sum(axis=0)
    scores = 100.0 * total / len(given)
    ordered = odds[order]
    places = np.append(np.flatnonzero(np.diff(ordered)) + 1, len(ordered))  # equal odds are answered together
    points = [(float(ordered[place - 1]), float(place)) for place in places]
    kept = [int(place) for _, place in thinned(points) if place is not None]
    start = (float(ordered[0]) - 0.05 * max(1.0, float(ordered[-1] - ordered[0])), *map(float, scores[0]))
    found = [(float(ordered[place - 1]), float(scores[place, 0]), float(scores[place, 1])) for place in kept]
    return ThresholdCurve(points=(cast("tuple[float, float, float]", start), *found), chosen=chosen)


def _example(one: _Answer) -> QuestionExample:
    n_best = [(cut(span.text, 120), span.probability) for span in one.guess.n_best[:_N_BEST]]
    return QuestionExample(
        line=one.row.get("line"),
        question=cut(one.row["question"]),
        excerpt=_excerpt(one),
        truths=tuple(cut(text, 120) for text in dict.fromkeys(one.golds)),
        answer=cut(one.guess.answer, 200),
        score=one.guess.score,
        f1=one.score.f1,
        n_best=tuple(n_best),
    )


def _excerpt(one: _Answer) -> tuple[Segment, ...]:
    """The context around the true and the given answer, cut where one begins or ends."""
    context: str = one.row["context"]
    truth = _place(one.row["answers"])
    answer = (one.guess.start, one.guess.end) if one.guess.answer else None
    marked = [span for span in (truth, answer) if span is not None]
    if not marked:
        return (Segment(text=cut(context)),)
    found: list[Segment] = []
    end = 0
    for low, high in _merged([(max(0, start - _AROUND), stop + _AROUND) for start, stop in marked]):
        found += [Segment(text=" … " if end else "… ")] if low > end else []
        end = min(high, len(context))
        cuts = sorted({low, end, *(place for span in marked for place in span if low < place < end)})
        found += [
            Segment(text=context[a:b], truth=_mark(truth, a, b), answer=_mark(answer, a, b)) for a, b in pairwise(cuts)
        ]
    return (*found, Segment(text=" …")) if end < len(context) else tuple(found)


def _place(answers: dict[str, list[object]]) -> tuple[int, int] | None:
    """The first true answer, as long as what is shown may be."""
    if not answers["text"]:
        return None
    start, text = cast("int", answers["answer_start"][0]), str(answers["text"][0])
    return start, start + min(len(text), MOST_CHARACTERS)


def _merged(windows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for low, high in sorted(windows):
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return found


def _mark(span: tuple[int, int] | None, start: int, end: int) -> str:
    return "answer" if span is not None and span[0] <= start and end <= span[1] else ""
