"""Pair classification of two texts read together, or a number for them.

Owns the second text and the groups in which rows are ranked. ``TextClassification`` does everything else. A pair that
is longer than ``max_length`` is truncated, the longer text first, as in transformers.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from bert_tasks.data.columns import Column, Row
from bert_tasks.data.rows import Rows
from bert_tasks.errors import DataError
from bert_tasks.outputs.label_set import LabelSet
from bert_tasks.outputs.ranking import GROUP, RankedClasses, Ranking
from bert_tasks.outputs.ranking_loss import RankingLoss, ranking_count
from bert_tasks.outputs.settings import require
from bert_tasks.tasks.text_classification import PROBLEMS, TextClassification

_EXAMPLES: tuple[Row, ...] = (
    {"text": "A man is playing a guitar on stage.", "text_pair": "Someone is making music."},
    {"text": "The shop closes at six.", "text_pair": "The shop is open all night."},
    {"text": "Two dogs run through the snow.", "text_pair": "Animals are outdoors."},
)

# Names that people give to the first text and to the second.
_FIRST = ("text", "sentence1", "question1", "premise", "first", "text_a", "text1", "#1 string", "question", "query")
_SECOND = (
    *("text_pair", "sentence2", "question2", "hypothesis", "second", "text_b", "text2", "#2 string"),
    *("candidate", "passage", "sentence", "document", "answer"),
)


@dataclass(frozen=True, kw_only=True)
class PairClassification(TextClassification):
    """Pairs of texts with a label, labels or a number.

    It suits natural language inference, paraphrases, semantic similarity and reranking. The model reads both texts
    together (a cross-encoder), which is usually more accurate than comparing two embeddings, but costs a forward pass
    for each pair.

    With a column ``group`` (a query, a question) the rows of each group are ranked, by the probability of the second of
    two labels, or by the number of ``problem_type = "regression"``. Then ``map``, ``mrr`` and ``ndcg@10`` are reported.
    With a ``ranking_loss`` a sample is a group.

    Examples:
        >>> model = TaskModel.from_pretrained(base, task=PairClassification.of(problem_type="regression"))
        >>> model.predict([("A man sings.", "Somebody sings.")])[0].score
    """

    name: ClassVar[str] = "pair-classification"
    outputs = (RankedClasses, LabelSet, Ranking)
    texts: ClassVar[tuple[str, ...]] = ("text", "text_pair")
    row_shapes: ClassVar[tuple[tuple[str, ...], ...]] = (("text", "text_pair", "label"),)
    row_needs: ClassVar[str] = "two texts and a label or number"
    usual_names: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({"text": _FIRST, "text_pair": _SECOND})
    problems: ClassVar[Mapping[str, str]] = PROBLEMS

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.max_length >= 5, f"max_length is {self.max_length}, a pair needs at least 5")

    @property
    def columns(self) -> tuple[Column, ...]:
        return (*super().columns, Column(name=GROUP, kind="id", required=False))

    @property
    def example_rows(self) -> Sequence[Row]:
        return _EXAMPLES

    @property
    def _ranking_loss(self) -> RankingLoss:
        """The loss that compares the rows of a group. ``none`` also if the output is no ranking."""
        if not isinstance(self.output, Ranking):
            return "none"
        return self.output.ranking_loss

    @property
    def sample(self) -> Literal["row", "window", "group"]:
        return "row" if self._ranking_loss == "none" else "group"

    def groups(self, rows: Rows) -> Sequence[Any]:
        return rows.rows.values(GROUP)

    def check_split(self, rows: Rows, source: str) -> None:
        """Checks that a ranking loss has groups of rows with different grades.

        Raises:
            DataError: It has none, or a row has no group or a grade below 0.
        """
        name = self._ranking_loss
        if name == "none":
            return
        start = f"{source}: settings.ranking_loss = {name!r}"
        require(GROUP in rows.rows.column_names, f"{start} needs the column {GROUP!r}, such as a query", DataError)
        grades_by_group: dict[Any, list[float]] = defaultdict(list)
        for row in rows:
            grade, group = row.get("label"), row[GROUP]
            line = f"{start}: line {row['line']}"  # of the file, for messages
            require(group not in (None, ""), f"{line} has no {GROUP}", DataError)
            if grade is not None:
                require(grade >= 0, f"{line} has the grade {grade:g}, expected a number from 0", DataError)
                grades_by_group[group].append(grade)
        # A group whose rows all have the same grade has no pair of rows to compare, so it counts nothing in the loss.
        can_compare = any(ranking_count(name, grades) for grades in grades_by_group.values())
        if grades_by_group and not can_compare:
            raise DataError(f"{start} compares rows of one {GROUP}, and no {GROUP} has rows with different grades")
