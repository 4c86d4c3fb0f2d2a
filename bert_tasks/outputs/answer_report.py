"""What a report shows of answers: metrics by kind of question, the null threshold, and questions."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from bert_tasks.data.columns import Row
from bert_tasks.metrics.calibration import calibration
from bert_tasks.metrics.formulas import MetricFormula, answer_measure
from bert_tasks.metrics.squad import answer_scores
from bert_tasks.metrics.tables import MetricTable, metric_table
from bert_tasks.outputs.row_sections import right_predictions
from bert_tasks.outputs.sections import (
    MOST_CHARACTERS,
    RIGHT,
    WRONG,
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
    per_cent,
    thinned,
)

MOST_QUESTIONS = 12
_AROUND = 130  # characters of the context on both sides of an answer
_BEST = 5  # answers on a page
_CORRECT_EXAMPLES = 3
_LONGEST_ANSWER = 60  # characters of an answer in a note

Pairs = Sequence[tuple[Row, Any]]  # rows with answers, each with its prediction


class _Question(NamedTuple):
    """A row with its accepted answers, its prediction, and the exact match (0 or 1) and F1 (0 to 1) of both."""

    row: Row
    labels: Sequence[str]
    prediction: Any
    exact: float
    f1: float


def exact_match_name(*, version_2: bool) -> str:
    """Returns the name that the official script of SQuAD 2.0 or 1.1 gives to the exact match."""
    return "exact" if version_2 else "exact_match"


def answer_table(metrics: Mapping[str, float]) -> MetricTable:
    """Returns metrics for people, with rows for SQuAD 2.0's questions with and without answer."""
    kinds = [name for name in ("HasAns", "NoAns") if f"{name}_total" in metrics]
    key = "{}_{}".format
    table = metric_table(metrics, kinds, key, word="questions", columns=("exact", "f1"), support="total")
    if len(kinds) == 1:  # one kind alone is all questions
        return MetricTable(overall=table.overall)
    return table


def degenerate_answers(pairs: Pairs) -> str | None:
    """Returns what a model predicts for every question although the answers differ, or None.

    Answers with one text, or at one position of different contexts, are equal.

    Args:
        pairs: The rows that have answers, each with its prediction.
    """
    labels = [row["answers"] for row, _ in pairs]
    has_answers = any(label["text"] for label in labels)
    if len(pairs) < 2 or not has_answers:
        return None
    answers = {prediction.answer for _, prediction in pairs}
    if answers == {""}:
        return 'predicts "no answer" for every question'
    if len(answers) == 1:
        (answer,) = answers
        if all(answer in label["text"] for label in labels):
            return None
        return f"predicts {cut(answer, _LONGEST_ANSWER)!r} for every question"
    starts = {prediction.start for _, prediction in pairs}
    first_starts = {min(label["answer_start"], default=None) for label in labels}
    if len(starts) == 1 and "" not in answers and len(first_starts) > 1:
        return f"predicts an answer that starts at character {starts.pop()} for every question"
    return None


def answer_sections(pairs: Pairs, *, version_2: bool, null_threshold: float | None) -> ReportSections:
    """Returns what a report shows of answers.

    Args:
        pairs: The rows that have answers, each with its prediction.
        version_2: True if questions may have no answer (SQuAD 2.0).
        null_threshold: The null odds above which the prediction is "no answer". None if they were not tuned.
    """
    labels: list[Sequence[str]] = []
    answers: list[str] = []
    confidences: list[float] = []
    for row, prediction in pairs:
        labels.append(row["answers"]["text"])
        answers.append(prediction.answer)
        confidences.append(prediction.score)
    scores = answer_scores(labels, answers, version_2=version_2)
    questions = []
    for (row, prediction), exact, f1 in zip(pairs, scores.exact, scores.f1, strict=True):
        questions.append(_Question(row, row["answers"]["text"], prediction, exact, f1))
    results = [_result(question) for question in questions]
    exact_name = exact_match_name(version_2=version_2)
    without_model = ""
    if version_2 and questions:
        unanswerable = sum(not question.labels for question in questions)
        without_model = f"never answering would give {per_cent(unanswerable, len(questions))}"
    groups: dict[str, MetricFormula] = {}
    charts: tuple[Chart, ...] = ()
    figures: Mapping[str, Any] = {}
    if version_2:
        groups = _answerable_groups(questions, exact_name)
        points = _threshold_scores(questions)
        charts = (_threshold_chart(points, null_threshold),)
        figures = {"curve": {"points": points, "chosen": null_threshold}}
    return ReportSections(
        measure=_measure(questions, exact_name),
        unit="questions",
        headline=("f1", exact_name),
        results=tuple(results),
        summary=right_predictions(results, without_model, right="exactly right"),
        percent=True,
        groups=groups,
        calibration=calibration(confidences, scores.exact),
        confidence_in="answer",
        charts=charts,
        examples=_examples(questions),
        figures=figures,
    )


def _result(question: _Question) -> RowResult:
    return RowResult(
        row=question.row,
        label=list(question.labels),
        prediction=question.prediction.answer,
        score=question.prediction.score,
        is_correct=bool(question.exact),
    )


def _measure(questions: Sequence[_Question], exact_name: str) -> MetricFormula:
    exact = [question.exact for question in questions]
    f1_scores = [question.f1 for question in questions]
    return answer_measure(exact, f1_scores, exact_name=exact_name)


def _answerable_groups(questions: Sequence[_Question], exact_name: str) -> dict[str, MetricFormula]:
    """Returns the metrics of the questions with and without an answer, if there are such questions."""
    groups = {}
    for name, is_answerable in (("with an answer", True), ("without an answer", False)):
        group = [question for question in questions if bool(question.labels) is is_answerable]
        if group:
            groups[name] = _measure(group, exact_name)
    return groups


def _threshold_scores(questions: Sequence[_Question]) -> list[tuple[float, float, float]]:
    """Returns (threshold, exact match, F1) at thresholds that change a prediction."""
    labels: list[Sequence[str]] = []
    texts: list[str] = []
    null_odds: list[float] = []
    for question in questions:
        labels.append(question.labels)
        texts.append(question.prediction.best.text)
        odds_of_question = question.prediction.null_odds
        if odds_of_question is None:
            odds_of_question = 0.0
        null_odds.append(odds_of_question)
    best = answer_scores(labels, texts, version_2=True)
    is_unanswerable = [float(not of_question) for of_question in labels]
    odds = np.array(null_odds)
    order = np.argsort(odds, kind="stable")
    ordered = odds[order]
    answered = np.array([best.exact, best.f1], dtype=np.float64).T[order]  # [S, 2] if every question is answered
    silent = np.array([is_unanswerable, is_unanswerable]).T[order]  # [S, 2] if none is
    # Row i is the sum of the scores if the i questions with the lowest odds are answered, and the others are not.
    total = np.vstack([np.zeros(2), np.cumsum(answered - silent, axis=0)]) + silent.sum(axis=0)  # [S + 1, 2]
    scores = 100.0 * total / len(questions)
    ends = np.append(np.flatnonzero(np.diff(ordered)) + 1, len(ordered))  # equal odds are answered together
    # A threshold below all odds, at which no question is answered, with a small gap so that the line shows it.
    below_all = float(ordered[0]) - 0.05 * max(1.0, float(ordered[-1] - ordered[0]))
    at_ends = [(float(ordered[end - 1]), *scores[end].tolist()) for end in ends]
    return [(below_all, *scores[0].tolist()), *thinned(at_ends)]


def _threshold_chart(points: Sequence[tuple[float, float, float]], chosen: float | None) -> Chart:
    """Returns the scores by the threshold.

    Args:
        points: (threshold, exact match, F1).
        chosen: The threshold in use. None if it was not tuned.
    """
    exact: list[tuple[float, float]] = []
    f1: list[tuple[float, float]] = []
    scores: list[float] = []
    for threshold, exact_score, f1_score in points:
        exact.append((threshold, exact_score))
        f1.append((threshold, f1_score))
        scores += [exact_score, f1_score]
    ends = [points[0][0], points[-1][0]]
    rule = None
    if chosen is not None:
        ends.append(chosen)
        rule = (chosen, f"chosen: {chosen:.2f}")
    best = max(points, key=lambda point: point[2])
    return Chart(
        title="Threshold of “no answer”",
        description=(
            f"F1 and exact match by the threshold of the null odds. The best F1, {best[2]:.1f}, is at {best[0]:.2f}."
        ),
        x=Axis(name="threshold of the null odds", low=min(ends), high=max(ends)),
        y=Axis.around("score", scores),
        lines=(
            Line(name="F1", points=f1, style=0, marked=False),
            Line(name="exact match", points=exact, style=1, marked=False),
        ),
        rule=rule,
        note="Above the threshold “no answer” is predicted",
        is_fitted=True,
    )


def _examples(questions: Sequence[_Question]) -> Examples:
    """Returns the worst predictions, the most confident first, and a few correct ones."""
    wrong = [question for question in questions if not question.exact]
    wrong.sort(key=lambda question: (question.f1, -question.prediction.score))
    correct = [question for question in questions if question.exact][:_CORRECT_EXAMPLES]
    lead = (
        f"Questions without an exact match: {len(wrong):,} of {len(questions):,}. The worst come first and, among "
        "equals, the most confident. Some correct questions follow."
    )
    shown = [*wrong[: MOST_QUESTIONS - len(correct)], *correct]
    items = [_example(question) for question in shown]
    return Examples(word="Questions", title="Questions", lead=lead, items=tuple(items))


def _example(question: _Question) -> Example:
    """Returns a question with the accepted and the predicted answer, marked in the context."""
    row, prediction = question.row, question.prediction
    label = "no answer"
    if question.labels:
        different = dict.fromkeys(question.labels)  # annotators often agree on the same answer
        label = " / ".join(cut(text, 120) for text in different)
    answer = cut(prediction.answer, 200)
    if not answer:
        answer = "no answer"
    tone: Literal["good", "bad"] = "good" if question.exact else "bad"
    candidates = [(cut(span.text, 120), span.score) for span in prediction.n_best[:_BEST]]
    verdict = RIGHT
    if not question.exact:
        verdict = Remark(name="✗ partly right", tone="bad") if question.f1 > 0 else WRONG
    remarks = (
        verdict,
        Remark(name="label", value=label),
        Remark(name="prediction", value=answer, tone=tone),
        Remark(name="F1", value=float(question.f1)),
        Remark(name="probability", value=prediction.score),
    )
    return Example(
        line=row.get("line"),
        row=row,
        texts=(cut(row["question"]),),
        excerpt=_excerpt(question),
        remarks=remarks,
        candidates=tuple(candidates),
    )


def _excerpt(question: _Question) -> tuple[Segment, ...]:
    """Returns the context, cut where the label and the prediction begin and end."""
    context: str = question.row["context"]
    label: tuple[int, int] | None = None
    if question.labels:
        start = question.row["answers"]["answer_start"][0]
        label = start, start + min(len(question.labels[0]), MOST_CHARACTERS)
    prediction: tuple[int, int] | None = None
    if question.prediction.answer:
        prediction = question.prediction.start, question.prediction.end
    marked = [span for span in (label, prediction) if span is not None]
    if not marked:
        return (Segment(text=cut(context)),)
    segments: list[Segment] = []
    end = 0
    for low, high in _surroundings(marked):
        if low > end:
            gap = " … " if end else "… "
            segments.append(Segment(text=gap))
        end = min(high, len(context))
        # A segment between two neighbouring borders is marked as a whole or not at all, also if the spans overlap.
        borders = {low, end}
        for span in marked:
            borders.update(offset for offset in span if low < offset < end)
        for first, stop in pairwise(sorted(borders)):
            segment = Segment(
                text=context[first:stop], label=_mark(label, first, stop), prediction=_mark(prediction, first, stop)
            )
            segments.append(segment)
    if end < len(context):
        segments.append(Segment(text=" …"))
    return tuple(segments)


def _surroundings(marked: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the characters around each span, joined if they overlap."""
    joined: list[tuple[int, int]] = []
    around = [(max(0, start - _AROUND), stop + _AROUND) for start, stop in marked]
    for low, high in sorted(around):
        if joined and low <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    return joined


def _mark(span: tuple[int, int] | None, start: int, end: int) -> str:
    """Returns the mark of the characters ``start`` to ``end - 1``, which is empty if the span does not hold them."""
    if span is None:
        return ""
    is_inside = span[0] <= start and end <= span[1]
    return "answer" if is_inside else ""
