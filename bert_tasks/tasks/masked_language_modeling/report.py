"""What a report shows of masked language modelling: perplexity, accuracy, and masked tokens with their candidates."""

from collections.abc import Sequence
from typing import Any, ClassVar

from bert_tasks.data.columns import Row
from bert_tasks.errors import DataError
from bert_tasks.metrics.formulas import MetricFormula, masked_token_measure
from bert_tasks.tasks.shared.report import (
    MOST_EXAMPLES,
    Example,
    Examples,
    Remark,
    Report,
    ReportSections,
    RowResult,
    Segment,
)


def measure(predictions: Sequence[Any]) -> MetricFormula:
    """Perplexity and accuracy over the masked tokens of all rows."""
    masks = [one.measured for one in predictions]
    return masked_token_measure(
        [len(one) for one in masks],
        [-sum(mask.log_probability for mask in one) for one in masks],
        [sum(mask.is_correct for mask in one) for one in masks],
    )


class MaskedReport(Report):
    """What a report shows of masked language modelling."""

    lower_is_better: ClassVar[frozenset[str]] = frozenset({"perplexity"})

    def decisions(self, prediction: Any) -> Sequence[int]:
        """For each mask the best candidate."""
        masks = (*prediction.masks, *(mask.candidates for mask in prediction.measured))
        return [candidates[0].token for candidates in masks]

    def same(self, predictions: Sequence[Any], others: Sequence[Any]) -> list[bool]:
        """Raises DataError if no text has a mask."""
        agreements = super().same(predictions, others)
        if not agreements:
            raise DataError("no text has a mask ([MASK] or <mask>), so that the predictions cannot be compared")
        return agreements

    def sections(self, predictions: Sequence[Any], rows: Sequence[Row]) -> ReportSections:
        pairs = [(row, one) for row, one in zip(rows, predictions, strict=True) if one.measured]
        return ReportSections(
            measure=measure([one for _, one in pairs]),
            unit="texts",
            headline=("perplexity", "accuracy"),
            results=tuple(
                RowResult(
                    row=row,
                    label=[mask.label_str for mask in one.measured],
                    prediction=[mask.candidates[0].token_str for mask in one.measured],
                    score=max((mask.candidates[0].score for mask in one.measured if not mask.is_correct), default=0.0),
                    is_correct=all(mask.is_correct for mask in one.measured),
                )
                for row, one in pairs
            ),
            examples=_examples(pairs),
        )


def _examples(pairs: Sequence[tuple[Row, Any]]) -> Examples | None:
    """The least probable masked tokens of the rows, with the tokens that the model found more probable."""
    masks = [(row, mask) for row, one in pairs for mask in one.measured if mask.before or mask.after]
    items = tuple(
        Example(
            line=row.get("line"),
            excerpt=(
                Segment(text=f"{mask.before} "),
                Segment(text=mask.label_str.strip(), label="masked"),
                Segment(text=f" {mask.after}"),
            ),
            remarks=(Remark(name="masked token", value=mask.label_str, tone="good" if mask.is_correct else "bad"),),
            candidates=tuple((candidate.token_str, candidate.score) for candidate in mask.candidates),
        )
        for row, mask in sorted(masks, key=lambda pair: pair[1].log_probability)[:MOST_EXAMPLES]
    )
    return (
        None
        if not items
        else Examples(
            word="Masked tokens",
            title="Masked tokens that the model found least probable",
            lead="One of each text, as the model saw it, with the tokens that it found most probable.",
            items=items,
        )
    )
