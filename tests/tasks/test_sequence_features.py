"""How texts and pairs become windows of tokens, against what the tokenizer does without limits."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from bert_tasks.data.features import Samples, cached_features
from bert_tasks.data.rows import Rows
from bert_tasks.errors import DataError, UsageError
from bert_tasks.outputs.features import Feature
from bert_tasks.tasks import SequenceClassification, SpanExtraction, TokenClassification
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.features import checked_features
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


class OwnTask:
    """A task that is not built in, with one feature of these ids."""

    def __init__(self, input_ids: list[int], token_type_ids: list[int]) -> None:
        self.feature = Feature(row=0, input_ids=input_ids, token_type_ids=token_type_ids)

    def features(self, rows: Any, tokenizer: Any) -> list[Feature]:
        return [self.feature]


@pytest.mark.parametrize(
    ("input_ids", "token_type_ids", "segments", "message"),
    [
        ([0, 9], [0, 1], 2, None),
        ([0, 10, 12], [0, 0, 0], 2, "the input_ids of a feature hold 12, but the model has embeddings for 0 to 9 only"),
        ([10], [0], 2, "the input_ids of a feature hold 10, but"),
        ([4, -1], [0, 0], 2, "the input_ids of a feature hold -1, but"),
        ([4, 4], [0, 2], 2, "the token_type_ids of a feature hold 2, but the model has embeddings for 0 to 1 only"),
        ([4, 4], [0, 2], 0, None),  # a model without segments ignores their ids
    ],
)
def test_ids_outside_of_the_embeddings_are_named(
    input_ids: list[int], token_type_ids: list[int], segments: int, message: str | None
) -> None:
    task: Any = OwnTask(input_ids, token_type_ids)
    config: Any = SimpleNamespace(vocab_size=10, type_vocab_size=segments)
    if message is None:
        assert checked_features(task, [{}], None, config) == [task.feature]  # type: ignore[arg-type]  # not read
        return
    with pytest.raises(UsageError, match=f"OwnTask: {message}"):
        checked_features(task, [{}], None, config)  # type: ignore[arg-type]  # not read
