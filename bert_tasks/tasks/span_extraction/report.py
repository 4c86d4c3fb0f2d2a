"""The report of span extraction by kind of question, with the null threshold."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np

from bert_tasks.data.columns import Row
from bert_tasks.metrics.calibration import calibration
from bert_tasks.metrics.formulas import MetricFormula, answer_measure
from bert_tasks.metrics.squad import answer_scores
from bert_tasks.metrics.tables import MetricTable, metric_table
from bert_tasks.tasks.base import labelled
from bert_tasks.tasks.shared.report import (
    MOST_CHARACTERS,
    Axis,
    Chart,
    Example,
    Examples,
    Line,
    Remark,
    Report,
    ReportSections,
    RowResult,
    Segment,
    cut,
    thinned,
)

MOST_QUESTIONS = 12
_AROUND = 130  # characters of the context on both sides of an answer
_BEST = 5  # answers on a page
_CORRECT_EXAMPLES = 3


class _Question(NamedTuple):
    row: Row
    labels: Sequence[str]
    prediction: Any
    exact: float
    f1: float


_LONGEST_ANSWER = 60  # characters of an answer in a note


class SpanReport(Report):
    """The report of span extraction."""

    neutral_metrics: ClassVar[frozenset[str]] = frozenset(
        {"total", "HasAns_total", "NoAns_total", "best_exact_thresh", "best_f1_thresh"}
    )

    def table(self, metrics: Mapping[str, float]) -> MetricTable:
        """Adds rows for ``version_2_with_negative``'s questions with and without answer."""
        kinds = [name for name in ("HasAns", "NoAns") if f"{name}_total" in metrics]
        key = "{}_{}".format
        table = metric_table(metrics, kinds, key, word="questions", columns=("exact", "f1"), support="total")
        return MetricTable(overall=table.overall) if len(kinds) == 1 else table  # one kind alone is all questions

    @property
    def curves(self) -> tuple[str, ...]:
        return ("exact" if self.task.version_2_with_negative else "exact_match", "f1")

    def collapse(self, predictions: Sequence[Any], rows: Sequence[Row]) -> str | None:
        """Treats answers with one text, or at one position of different contexts, as equal."""
        pairs = labelled(rows, predictions, "answers")
        if len(pairs) < 2 or not any(row["answers"]["text"] for row, _ in pairs):
            return None
        answers = {prediction.answer for _, prediction in pairs}
        if answers == {""}:
            return 'predicts "no answer" for every question'
        labels = [row["answers"] for row, _ in pairs]
        if len(answers) == 1:
            (answer,) = answers
            is_always_right = all(answer in label["text"] for label in labels)
            return None if is_always_right else f"predicts {cut(answer, _LONGEST_ANSWER)!r} for every question"
        starts = {prediction.start for _, prediction in pairs}
        first_starts = {min(label["answer_start"], default=None) for label in labels}
        if len(starts) == 1 and "" not in answers and len(first_starts) > 1:
            return f"predicts an answer that starts at character {starts.pop()} for every question"
        return None

    def decisions(self, prediction: Any) -> Sequence[tuple[int, str]]:
        return ((prediction.start, prediction.answer),)

    def sections(self, predictions: Sequence[Any], rows: Sequence[Row]) -> ReportSections:
        pairs, version_2 = labelled(rows, predictions, "answers"), self.task.version_2_with_negative
        labels = [row["answers"]["text"] for row, _ in pairs]
        scores = answer_scores(labels, [prediction.answer for _, prediction in pairs], version_2=version_2)
        questions = [
            _Question(row, row["answers"]["text"], prediction, exact, f1)
            for (row, prediction), exact, f1 in zip(pairs, *scores, strict=True)
        ]
        groups: dict[str, MetricFormula] = {}
        charts: tuple[Chart, ...] = ()
        figures: Mapping[str, Any] = {}
        if version_2:
            for name, answerable in (("with an answer", True), ("without an answer", False)):
                if group := [question for question in questions if bool(question.labels) is answerable]:
                    groups[name] = self._measure(group)
            points = _threshold_scores(questions)
            charts = (_threshold_chart(points, self.task.null_threshold),)
            figures = {"curve": {"points": points, "chosen": self.task.null_threshold}}
        return ReportSections(
            measure=self._measure(questions),
            unit="questions",
            headline=self.curves[::-1],
            results=tuple(
                RowResult(
                    row=question.row,
                    label=list(question.labels),
                    prediction=question.prediction.answer,
                    score=question.prediction.score,
                    is_correct=bool(question.exact),
                )
                for question in questions
            ),
            percent=True,
            groups=groups,
            calibration=calibration([question.prediction.score for question in questions], scores.exact),
            confidence_in="answer",
            charts=charts,
            examples=_examples(questions),
            figures=figures,
        )

    def _measure(self, questions: Sequence[_Question]) -> MetricFormula:
        exact = [question.exact for question in questions]
        return answer_measure(exact, [question.f1 for question in questions], exact_name=self.curves[0])


def _threshold_scores(questions: Sequence[_Question]) -> list[tuple[float, float, float]]:
    """Returns (threshold, exact match, F1) at thresholds that change a prediction."""
    odds = np.array([0.0 if row.prediction.null_odds is None else row.prediction.null_odds for row in questions])
    order = np.argsort(odds, kind="stable")
    labels = [question.labels for question in questions]
    best = answer_scores(labels, [question.prediction.best.text for question in questions], version_2=True)
    answered = np.array([best.exact, best.f1], dtype=np.float64).T[order]  # [S, 2]
    silent = np.array([[float(not question.labels)] * 2 for question in questions])[order]
    total = np.vstack([np.zeros(2), np.cumsum(answered - silent, axis=0)]) + silent.sum(axis=0)
    scores = 100.0 * total / len(questions)
    ordered = odds[order]
    ends = np.append(np.flatnonzero(np.diff(ordered)) + 1, len(ordered))  # equal odds are answered together
    below_all = float(ordered[0]) - 0.05 * max(1.0, float(ordered[-1] - ordered[0]))
    points = [(below_all, *scores[0].tolist()), *((float(ordered[end - 1]), *scores[end].tolist()) for end in ends)]
    return [points[0], *thinned(points[1:])]


def _threshold_chart(points: Sequence[tuple[float, float, float]], tuned: float | None) -> Chart:
    exact = [(threshold, score) for threshold, score, _ in points]
    f1 = [(threshold, score) for threshold, _, score in points]
    ends = [points[0][0], points[-1][0], *([] if tuned is None else [tuned])]
    best = max(points, key=lambda point: point[2])
    return Chart(
        title="Threshold of “no answer”",
        description=(
            f"F1 and exact match by the threshold of the null odds. The best F1, {best[2]:.1f}, is at {best[0]:.2f}."
        ),
        x=Axis(name="threshold of the null odds", low=min(ends), high=max(ends)),
        y=Axis.around("score", (score for _, score in exact + f1)),
        lines=(
            Line(name="F1", points=f1, style=0, marked=False),
            Line(name="exact match", points=exact, style=1, marked=False),
        ),
        rule=None if tuned is None else (tuned, f"chosen: {tuned:.2f}"),
        note="Above the threshold “no answer” is predicted",
        is_fitted=True,
    )


def _examples(questions: Sequence[_Question]) -> Examples:
    """Returns the worst predictions, the most confident first, and a few correct ones."""
    wrong = sorted(
        (question for question in questions if not question.exact),
        key=lambda question: (question.f1, -question.prediction.score),
    )
    correct = [question for question in questions if question.exact][:_CORRECT_EXAMPLES]
    lead = (
        f"Questions without an exact match: {len(wrong):,} of {len(questions):,}. The worst come first and, among "
        "equals, the most confident. Some correct questions follow."
    )
    items = [_example(question) for question in [*wrong[: MOST_QUESTIONS - len(correct)], *correct]]
    return Examples(word="Questions", title="Questions", lead=lead, items=tuple(items))


def _example(question: _Question) -> Example:
    row, prediction = question.row, question.prediction
    labels = " / ".join(cut(text, 120) for text in dict.fromkeys(question.labels))
    answer = cut(prediction.answer, 200)
    return Example(
        line=row.get("line"),
        row=row,
        texts=(cut(row["question"]),),
        excerpt=_excerpt(question),
        remarks=(
            Remark(name="label", value=labels if question.labels else "no answer"),
            Remark(
                name="prediction",
                value=answer if answer else "no answer",
                tone="good" if question.f1 == 1 else "bad",
            ),
            Remark(name="F1", value=float(question.f1)),
            Remark(name="probability", value=prediction.score),
        ),
        candidates=tuple((cut(span.text, 120), span.score) for span in prediction.n_best[:_BEST]),
    )


def _excerpt(question: _Question) -> tuple[Segment, ...]:
    """Returns the context, cut where the label and the prediction begin and end."""
    context: str = question.row["context"]
    label: tuple[int, int] | None = None
    if question.labels:
        start = question.row["answers"]["answer_start"][0]
        label = start, start + min(len(question.labels[0]), MOST_CHARACTERS)
    prediction = (question.prediction.start, question.prediction.end) if question.prediction.answer else None
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
        cuts = sorted({low, end, *(offset for span in marked for offset in span if low < offset < end)})
        segments += [
            Segment(text=context[a:b], label=_mark(label, a, b), prediction=_mark(prediction, a, b))
            for a, b in pairwise(cuts)
        ]
    return (*segments, Segment(text=" …")) if end < len(context) else tuple(segments)


def _mark(span: tuple[int, int] | None, start: int, end: int) -> str:
    return "answer" if span is not None and span[0] <= start and end <= span[1] else ""
