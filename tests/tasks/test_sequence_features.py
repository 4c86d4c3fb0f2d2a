"""How texts and pairs become windows of tokens, against what the tokenizer does without limits."""

from itertools import pairwise
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from bert_tasks.data.features import Samples, cached_features
from bert_tasks.data.rows import Rows
from bert_tasks.errors import DataError
from bert_tasks.tasks import SequenceClassification, SpanExtraction, TokenClassification
from bert_tasks.tasks.base import Task
from support.small_tokenizers import LINES

LABELS = ("negative", "neutral", "positive")
SINGLE = SequenceClassification.of(labels=LABELS)
SEVERAL = SequenceClassification.of(labels=LABELS, problem_type="multi_label_classification")
NUMBER = SequenceClassification.of(problem_type="regression")
LONG = " ".join(LINES[:4])


class TestFeatures:
    def test_only_the_first_window_bears_the_label(self, wordpiece_tokenizer: PreTrainedTokenizerBase) -> None:
        task = SequenceClassification.of(labels=LABELS, max_length=16, long_texts="windows", doc_stride=4)
        rows = [{"text": LONG, "label": "positive"}, {"text": "a", "label": "neutral"}, {"text": LONG}]
        features = task.features(rows, wordpiece_tokenizer)
        labels = {row: [f["labels"] for f in features if f["row"] == row] for row in range(3)}
        assert labels[0][0] == [2.0]
        assert set(map(type, labels[0][1:])) == {type(None)}
        assert labels[1] == [[1.0]]
        assert set(labels[2]) == {None}
        windows = [feature["input_ids"][1:-1] for feature in features if feature["row"] == 0]
        assert all(before[-4:] == after[:4] for before, after in pairwise(windows))

    def test_targets(self, wordpiece_tokenizer: PreTrainedTokenizerBase) -> None:
        def targets(task: SequenceClassification, row: dict[str, Any]) -> list[float] | None:
            (feature,) = task.features([{"text": "a", **row}], wordpiece_tokenizer)
            return feature["labels"]

        assert targets(SINGLE, {"label": "positive"}) == [2.0]
        assert targets(SequenceClassification.of(labels=LABELS[::-1]), {"label": "positive"}) == [0.0]
        assert targets(SEVERAL, {"labels": ["positive", "negative"]}) == [1.0, 0.0, 1.0]
        assert targets(SEVERAL, {"labels": []}) == [0.0, 0.0, 0.0]
        assert targets(NUMBER, {"label": 2}) == [2.0]
        assert targets(SINGLE, {}) is None
        assert targets(SINGLE, {"label": None}) is None
        with pytest.raises(DataError, match=r"unknown label 'bad'\. The labels are 'negative', 'neutral', 'positive'"):
            targets(SINGLE, {"label": "bad"})


LONG_ROWS: list[tuple[Task, dict[str, Any], bool]] = [
    (
        SequenceClassification.of(labels=LABELS, max_length=40, long_texts="windows", doc_stride=8),
        {"text": LONG},
        True,
    ),
    (TokenClassification.of(labels=("O", "B-A"), max_length=40, doc_stride=8), {"words": LONG.split()}, False),
    (
        SpanExtraction.of(max_length=40, doc_stride=8, max_query_length=12),
        {"question": "when?", "context": LONG},
        False,
    ),
]


@pytest.mark.parametrize(("task", "row", "is_one"), LONG_ROWS, ids=[task.name for task, _, _ in LONG_ROWS])
def test_the_windows_of_a_long_text_are_one_sample(
    task: Task, row: dict[str, Any], is_one: bool, wordpiece_tokenizer: PreTrainedTokenizerBase
) -> None:
    """``batch_size`` counts samples: a text has one loss, but each window has words, or the span of an answer."""
    table = Rows.unchecked([row, row])
    features = cached_features(table, features=task.features, tokenizer=wordpiece_tokenizer, key={})
    assert len(features) >= 4
    assert len(Samples.of(features, task.sample)) == (2 if is_one else len(features))
