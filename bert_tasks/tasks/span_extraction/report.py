"""What a report shows of span extraction: scores by kind of question, the threshold of "no answer", questions."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from bert_tasks.data.columns import Row
from bert_tasks.metrics.classification import calibration
from bert_tasks.metrics.formulas import MetricFormula, answer_measure
from bert_tasks.metrics.squad import answer_scores
from bert_tasks.tasks.shared.report import (
    MOST_CHARACTERS,
    Axis,
    Chart,
    Example,
    Examples,
    Line,
    Remark,
    ReportSections,
    RowResult,
    Segment,
    cut,
    thinned,
)

SpanPrediction = Any  # of task.py, which imports this module

MOST_QUESTIONS = 12
_AROUND = 130  # characters of the context on both sides of an answer
_BEST = 5  # of the n best answers
_CORRECT_EXAMPLES = 3


class _Question(NamedTuple):
    row: Row
    labels: Sequence[str]
    prediction: SpanPrediction
    exact: float
    f1: float


def answer_sections(
    pairs: Sequence[tuple[Row, SpanPrediction]], null_threshold: float | None, *, version_2: bool
) -> ReportSections:
    """Exact match and F1 of questions.

    Args:
        pairs: the labelled rows and their predictions.
        null_threshold: "no answer" was predicted where the null odds exceed it; None if it is not the same for all
            predictions.
        version_2: questions may have no answer (SQuAD 2.0).
    """
    labels = [row["answers"]["text"] for row, _ in pairs]
    scores = answer_scores(labels, [one.answer for _, one in pairs], version_2=version_2)
    questions = [
        _Question(row, answers, one, exact, f1)
        for (row, one), answers, exact, f1 in zip(pairs, labels, *scores, strict=True)
    ]
    exact_name = "exact" if version_2 else "exact_match"
    groups: dict[str, MetricFormula] = {}
    charts: tuple[Chart, ...] = ()
    figures: Mapping[str, Any] = {}
    if version_2:
        for name, answerable in (("with an answer", True), ("without an answer", False)):
            group = [one for one in questions if bool(one.labels) is answerable]
            if group:
                groups[name] = _measure(group, exact_name)
        points = _threshold_scores(questions)
        charts = (_threshold_chart(points, null_threshold),)
        figures = {"curve": {"points": points, "chosen": null_threshold}}
    return ReportSections(
        measure=_measure(questions, exact_name),
        unit="questions",
        headline=("f1", exact_name),
        results=tuple(
            RowResult(
                row=one.row,
                label=list(one.labels),
                prediction=one.prediction.answer,
                score=one.prediction.score,
                is_correct=bool(one.exact),
            )
            for one in questions
        ),
        percent=True,
        groups=groups,
        calibration=calibration([one.prediction.score for one in questions], scores.exact),
        confidence_in="answer",
        charts=charts,
        examples=_examples(questions),
        figures=figures,
    )


def _measure(questions: Sequence[_Question], exact_name: str) -> MetricFormula:
    return answer_measure([one.exact for one in questions], [one.f1 for one in questions], exact_name=exact_name)


def _threshold_scores(questions: Sequence[_Question]) -> list[tuple[float, float, float]]:
    """(threshold, exact match, F1) at every threshold that changes a prediction."""
    odds = np.array([0.0 if one.prediction.null_odds is None else one.prediction.null_odds for one in questions])
    order = np.argsort(odds, kind="stable")
    labels = [one.labels for one in questions]
    best = answer_scores(labels, [one.prediction.best.text for one in questions], version_2=True)
    answered = np.array([best.exact, best.f1], dtype=np.float64).T[order]  # [S, 2]
    silent = np.array([[float(not one.labels)] * 2 for one in questions])[order]
    total = np.vstack([np.zeros(2), np.cumsum(answered - silent, axis=0)]) + silent.sum(axis=0)
    scores = 100.0 * total / len(questions)
    ordered = odds[order]
    ends = np.append(np.flatnonzero(np.diff(ordered)) + 1, len(ordered))  # equal odds are answered together
    shown = [int(end) for _, end in thinned([(float(ordered[end - 1]), float(end)) for end in ends]) if end is not None]
    below_all = float(ordered[0]) - 0.05 * max(1.0, float(ordered[-1] - ordered[0]))
    return [
        (below_all, float(scores[0, 0]), float(scores[0, 1])),
        *((float(ordered[end - 1]), float(scores[end, 0]), float(scores[end, 1])) for end in shown),
    ]


def _threshold_chart(points: Sequence[tuple[float, float, float]], chosen: float | None) -> Chart:
    exact = [(threshold, score) for threshold, score, _ in points]
    f1 = [(threshold, score) for threshold, _, score in points]
    ends = [points[0][0], points[-1][0], *([] if chosen is None else [chosen])]
    best = max(points, key=lambda point: point[2])
    return Chart(
        title="Threshold of “no answer”",
        description=(
            f"F1 and exact match by the threshold of the null odds; the best F1, {best[2]:.1f}, is at {best[0]:.2f}."
        ),
        x=Axis(name="threshold of the null odds", low=min(ends), high=max(ends)),
        y=Axis.around("score", (score for _, score in exact + f1)),
        lines=(
            Line(name="F1", points=f1, style=0, marked=False),
            Line(name="exact match", points=exact, style=1, marked=False),
        ),
        rule=None if chosen is None else (chosen, f"chosen: {chosen:.2f}"),
        note="Above the threshold “no answer” is predicted",
        is_fitted=True,
    )


def _examples(questions: Sequence[_Question]) -> Examples:
    """The worst predictions, among equals the most confident, and a few correct ones."""
    wrong = sorted((one for one in questions if not one.exact), key=lambda one: (one.f1, -one.prediction.score))
    correct = [one for one in questions if one.exact][:_CORRECT_EXAMPLES]
    lead = (
        f"Questions without an exact match: {len(wrong):,} of {len(questions):,}, the worst first and, among equals, "
        "the most confident; then some that are correct."
    )
    items = [_example(one) for one in [*wrong[: MOST_QUESTIONS - len(correct)], *correct]]
    return Examples(word="Questions", title="Questions", lead=lead, items=tuple(items))


def _example(one: _Question) -> Example:
    labels = " / ".join(cut(text, 120) for text in dict.fromkeys(one.labels))
    prediction = cut(one.prediction.answer, 200)
    return Example(
        line=one.row.get("line"),
        row=one.row,
        texts=(cut(one.row["question"]),),
        excerpt=_excerpt(one),
        remarks=(
            Remark(name="label", value=labels if one.labels else "no answer"),
            Remark(
                name="prediction",
                value=prediction if prediction else "no answer",
                tone="good" if one.f1 == 1 else "bad",
            ),
            Remark(name="F1", value=float(one.f1)),
            Remark(name="probability", value=one.prediction.score),
        ),
        candidates=tuple((cut(span.text, 120), span.score) for span in one.prediction.n_best[:_BEST]),
    )


def _excerpt(one: _Question) -> tuple[Segment, ...]:
    """The context around the first label and the prediction, cut where one begins or ends."""
    context: str = one.row["context"]
    label: tuple[int, int] | None = None
    if one.labels:
        start = one.row["answers"]["answer_start"][0]
        label = start, start + min(len(one.labels[0]), MOST_CHARACTERS)
    prediction = (one.prediction.start, one.prediction.end) if one.prediction.answer else None
    marked = [span for span in (label, prediction) if span is not None]
    if not marked:
        return (Segment(text=cut(context)),)
    windows: list[tuple[int, int]] = []
    for low, high in sorted((max(0, start - _AROUND), stop + _AROUND) for start, stop in marked):
        if windows and low <= windows[-1][1]:
            windows[-1] = (windows[-1][0], max(high, windows[-1][1]))
        else:
            windows.append((low, high))
    segments: list[Segment] = []
    end = 0
    for low, high in windows:
        segments += [Segment(text=" … " if end else "… ")] if low > end else []
        end = min(high, len(context))
        cuts = sorted({low, end, *(place for span in marked for place in span if low < place < end)})
        segments += [
            Segment(text=context[a:b], label=_mark(label, a, b), prediction=_mark(prediction, a, b))
            for a, b in pairwise(cuts)
        ]
    return (*segments, Segment(text=" …")) if end < len(context) else tuple(segments)


def _mark(span: tuple[int, int] | None, start: int, end: int) -> str:
    return "answer" if span is not None and span[0] <= start and end <= span[1] else ""
