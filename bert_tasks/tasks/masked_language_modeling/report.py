"""What a report shows of masked language modelling: perplexity, accuracy, and masked tokens with their candidates."""

from collections.abc import Sequence
from typing import Any

from bert_tasks.data.columns import Row
from bert_tasks.metrics.formulas import MetricFormula, masked_token_measure
from bert_tasks.tasks.shared.report import MOST_EXAMPLES, Example, Examples, Remark, ReportSections, RowResult, Segment

MaskPrediction = Any  # of task.py, which imports this module


def measure(predictions: Sequence[MaskPrediction]) -> MetricFormula:
    """Perplexity and accuracy over the masked tokens of all rows."""
    masks = [one.measured for one in predictions]
    return masked_token_measure(
        [len(one) for one in masks],
        [-sum(mask.log_probability for mask in one) for one in masks],
        [sum(mask.is_correct for mask in one) for one in masks],
    )


def masked_sections(pairs: Sequence[tuple[Row, MaskPrediction]]) -> ReportSections:
    """Figures of the masked tokens, and the least probable one of each of some rows.

    Args:
        pairs: the rows and their predictions.
    """
    kept = [(row, one) for row, one in pairs if one.measured]
    results = tuple(
        RowResult(
            row=row,
            label=[mask.label_str for mask in one.measured],
            prediction=[mask.candidates[0].token_str for mask in one.measured],
            score=max((mask.candidates[0].score for mask in one.measured if not mask.is_correct), default=0.0),
            is_correct=all(mask.is_correct for mask in one.measured),
        )
        for row, one in kept
    )
    return ReportSections(
        measure=measure([one for _, one in kept]),
        unit="texts",
        headline=("perplexity", "accuracy"),
        results=results,
        examples=_examples(kept),
    )


def _examples(pairs: Sequence[tuple[Row, MaskPrediction]]) -> Examples | None:
    """The least probable masked tokens of the rows, with the tokens that the model found more probable."""
    found = [(row, mask) for row, one in pairs for mask in one.measured if mask.before or mask.after]
    found.sort(key=lambda pair: pair[1].log_probability)
    items = tuple(
        Example(
            line=row.get("line"),
            excerpt=(
                Segment(text=f"{mask.before} "),
                Segment(text=mask.label_str.strip(), label="masked"),
                Segment(text=f" {mask.after}"),
            ),
            remarks=(Remark(name="masked token", value=mask.label_str, tone="good" if mask.is_correct else "bad"),),
            candidates=tuple((one.token_str, one.score) for one in mask.candidates),
        )
        for row, mask in found[:MOST_EXAMPLES]
    )
    if not items:
        return None
    return Examples(
        word="Masked tokens",
        title="Masked tokens that the model found least probable",
        lead="One of each text, as the model saw it, with the tokens that it found most probable.",
        items=items,
    )
