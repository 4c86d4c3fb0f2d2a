"""What reports of outputs share that answer once for each row: a summary, mistakes as examples, a chart of coverage."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from bert_tasks.data.issues import counted
from bert_tasks.metrics.calibration import COVERAGES, coverage_curve
from bert_tasks.outputs.sections import (
    MOST_EXAMPLES,
    WRONG,
    Axis,
    Chart,
    Example,
    Examples,
    Line,
    Remark,
    RowResult,
    cut,
    per_cent,
)

_LABEL_CHARACTERS = 200  # of a label above an example
_SUMMARY_CHARACTERS = 80  # of a label in the summary


def right_predictions(results: Sequence[RowResult], without_model: str = "", *, right: str = "right") -> str:
    """Returns how many predictions are right, for ``ReportSections.summary``.

    Args:
        results: The results of all rows.
        without_model: What a rule that reads no text would reach. Default: the summary compares with nothing.
        right: The word for a correct prediction, such as "right in all labels".
    """
    if not results:
        return ""
    count = sum(result.is_correct for result in results)
    verb = "is" if count == 1 else "are"
    summary = f"{counted(count, 'prediction')} {verb} {right} ({per_cent(count, len(results))})"
    if without_model:
        summary = f"{summary}; {without_model}"
    return summary


def most_frequent_label(labels: Sequence[Any]) -> str:
    """Returns what a model reaches that always predicts the most frequent label, for ``right_predictions``.

    A score is good only if it is better than this, which is easy to overlook if one label is in most rows.
    """
    if not labels:
        return ""
    ((label, count),) = Counter(labels).most_common(1)
    text = cut(_label_text(label), _SUMMARY_CHARACTERS)
    return f"always predicting {text!r} would give {per_cent(count, len(labels))}"


def mistakes(
    results: Sequence[RowResult],
    texts: Sequence[str],
    candidates: Sequence[tuple[tuple[str, float], ...]] = (),
) -> Examples:
    """Returns the wrong predictions with the highest confidence.

    Args:
        results: The results of all rows.
        texts: The columns of the texts that the model reads.
        candidates: The best predictions for each row with their probabilities. Default: they are not shown.
    """
    # By their numbers, because the candidates of a row are in a list of their own.
    wrong = [number for number, result in enumerate(results) if not result.is_correct]
    wrong.sort(key=lambda number: -results[number].score)
    items = []
    for number in wrong[:MOST_EXAMPLES]:
        result = results[number]
        label = cut(_label_text(result.label), _LABEL_CHARACTERS)
        prediction = cut(_label_text(result.prediction), _LABEL_CHARACTERS)
        confidence = Remark(name="confidence", value=result.score)
        of_row = candidates[number] if candidates else ()
        items.append(row_example(result, texts, WRONG, label, prediction, confidence, candidates=of_row))
    lead = (
        f"Wrong predictions: {len(wrong):,} of {len(results):,}, the most confident first. Wrong labels in the "
        "data show up here, too."
    )
    return Examples(word="Mistakes", title="Most confident mistakes", lead=lead, items=tuple(items))


def row_example(
    result: RowResult,
    texts: Sequence[str],
    verdict: Remark,
    label: str,
    prediction: str,
    *remarks: Remark,
    candidates: tuple[tuple[str, float], ...] = (),
) -> Example:
    """Returns a row with its texts, its label and a wrong prediction as a report shows them.

    Args:
        result: The result of the row.
        texts: The columns of the texts that the model reads.
        verdict: Whether the prediction is right, or how far it is off.
        label: The label in words.
        prediction: The prediction in words.
        remarks: What is shown behind both.
        candidates: The best predictions with their probabilities.
    """
    row = result.row
    shown_texts = [cut(row[name]) for name in texts if row.get(name)]
    return Example(
        line=row.get("line"),
        texts=tuple(shown_texts),
        remarks=(
            verdict,
            Remark(name="label", value=label),
            Remark(name="prediction", value=prediction, tone="bad"),
            *remarks,
        ),
        candidates=candidates,
        row=row,
    )


def coverage_charts(scores: Sequence[float], correct: Sequence[bool]) -> tuple[Chart, ...]:
    """Returns a chart of the accuracy of the most confident predictions over their fraction of the rows.

    Args:
        scores: The confidence of each prediction.
        correct: Whether each prediction is right.

    Returns:
        No chart if there are no predictions.
    """
    if not scores:
        return ()
    accuracies = [accuracy for _, accuracy in coverage_curve(scores, correct)]
    points = tuple(zip(COVERAGES, accuracies, strict=True))
    share, accuracy = points[len(points) // 2 - 1]  # the more confident half
    spoken = ", ".join(f"{x:.0%} {y:.3f}" for x, y in points)
    chart = Chart(
        title="Accuracy by coverage",
        description=f"Accuracy of the most confident rows: {spoken}",
        x=Axis(name="share of the rows, the most confident first", low=0.0, high=1.0),
        y=Axis.around("accuracy", accuracies),
        lines=(Line(name="accuracy", points=points),),
        note=f"The most confident {share:.0%} of the rows have an accuracy of {accuracy:.3f}.",
    )
    return (chart,)


def _label_text(label: Any) -> str:
    """Returns a label, or several labels, in words."""
    if isinstance(label, str):
        return label
    if not label:
        return "(none)"
    return ", ".join(label)
