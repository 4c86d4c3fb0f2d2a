"""How texts and pairs become windows of tokens, against what the tokenizer does without limits."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from bert_tasks.data.features import Samples, cached_features
from bert_tasks.data.rows import Rows
from bert_tasks.errors import DataError
from bert_tasks.tasks import PairClassification, SequenceClassification, SpanExtraction, TokenClassification
from bert_tasks.tasks.base import Task
from support.small_tokenizers import LINES

LABELS = ("negative", "neutral", "positive")
SINGLE = SequenceClassification.of(labels=LABELS)
SEVERAL = SequenceClassification.of(labels=LABELS, problem_type="multi_label_classification")
NUMBER = SequenceClassification.of(problem_type="regression")
LONG = " ".join(LINES[:4])
KINDS = ("wordpiece_tokenizer", "bpe_tokenizer", "unigram_tokenizer")


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    value: PreTrainedTokenizerBase = request.getfixturevalue(request.param)
    return value


def content(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """A window's tokens between the special ones."""
    assert ids[0] == tokenizer.cls_token_id
    assert ids[-1] == tokenizer.sep_token_id
    return list(ids[1:-1])


class TestFeatures:
    def test_short_texts_are_what_the_tokenizer_makes(self, tokenizer: PreTrainedTokenizerBase) -> None:
        rows = [{"text": line} for line in (*LINES[:5], "", " ")]
        features = SequenceClassification.of(labels=LABELS, max_length=400).features(rows, tokenizer)
        expected = tokenizer([row["text"] for row in rows], return_token_type_ids=True)
        assert [feature["input_ids"] for feature in features] == expected["input_ids"]
        assert [feature["token_type_ids"] for feature in features] == expected["token_type_ids"]
        assert {feature["lost_tokens"] for feature in features} == {0}

    @pytest.mark.parametrize("max_length", [3, 12, 40])
    def test_lost_tokens_are_exact(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        texts = [LONG, "", LINES[0], "a", LONG[:60]]
        task = SequenceClassification.of(labels=LABELS, max_length=max_length)
        features = task.features([{"text": text} for text in texts], tokenizer)
        full = [tokenizer(text)["input_ids"] for text in texts]
        for feature, ids in zip(features, full, strict=True):
            kept = feature["input_ids"]
            assert content(kept, tokenizer) == ids[1 : len(kept) - 1]
            assert feature["lost_tokens"] == len(ids) - len(kept)

    @pytest.mark.parametrize("doc_stride", [0, 4, 13])
    def test_windows_hold_every_token_and_overlap_by_doc_stride(
        self, tokenizer: PreTrainedTokenizerBase, doc_stride: int
    ) -> None:
        task = SequenceClassification.of(labels=LABELS, max_length=16, long_texts="windows", doc_stride=doc_stride)
        texts = [LONG, "short", LINES[3]]
        features = task.features([{"text": text} for text in texts], tokenizer)
        for row, text in enumerate(texts):
            windows = [content(f["input_ids"], tokenizer) for f in features if f["row"] == row]
            for left, right in pairwise(windows):
                assert len(left) == 14
                assert left[len(left) - doc_stride :] == right[:doc_stride]
            joined = windows[0] + [token for window in windows[1:] for token in window[doc_stride:]]
            assert joined == content(tokenizer(text)["input_ids"], tokenizer)
        assert sum(feature["row"] == 0 for feature in features) > 3
        assert {feature["lost_tokens"] for feature in features} == {0}

    def test_only_the_first_window_bears_the_label(self, wordpiece_tokenizer: PreTrainedTokenizerBase) -> None:
        task = SequenceClassification.of(labels=LABELS, max_length=16, long_texts="windows", doc_stride=4)
        rows = [{"text": LONG, "label": "positive"}, {"text": "a", "label": "neutral"}, {"text": LONG}]
        features = task.features(rows, wordpiece_tokenizer)
        labels = {row: [f["labels"] for f in features if f["row"] == row] for row in range(3)}
        assert labels[0][0] == [2.0]
        assert set(map(type, labels[0][1:])) == {type(None)}
        assert labels[1] == [[1.0]]
        assert set(labels[2]) == {None}

    @pytest.mark.parametrize("text", ["[SEP] [CLS] [MASK]", "</s> <s> <mask>", "a[SEP]b</s>c"])
    def test_special_tokens_in_a_text_stay_text(self, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
        for mode in ("truncate", "windows"):
            task = SequenceClassification.of(labels=LABELS, max_length=64, long_texts=mode)
            (feature,) = task.features([{"text": text}], tokenizer)
            special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
            assert not special.intersection(content(feature["input_ids"], tokenizer))
            assert feature["lost_tokens"] == 0

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


class TestPairs:
    TEXTS = (LONG, "short", LINES[0], "", LINES[2], "")
    PAIRS = (" ".join(LINES[4:7]), "brief", LONG, LINES[1], "", "")

    @pytest.mark.parametrize("max_length", [17, 40, 512])
    def test_are_cut_as_the_tokenizer_cuts_them(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        rows = [{"text": text, "text_pair": pair} for text, pair in zip(self.TEXTS, self.PAIRS, strict=True)]
        features = PairClassification.of(labels=LABELS, max_length=max_length).features(rows, tokenizer)
        cut = tokenizer(
            list(self.TEXTS), list(self.PAIRS), truncation=True, max_length=max_length, return_token_type_ids=True
        )
        full = tokenizer(list(self.TEXTS), list(self.PAIRS))["input_ids"]
        assert [feature["row"] for feature in features] == list(range(6))
        assert [feature["input_ids"] for feature in features] == cut["input_ids"]
        assert [feature["token_type_ids"] for feature in features] == cut["token_type_ids"]
        lost = [len(ids) - len(feature["input_ids"]) for ids, feature in zip(full, features, strict=True)]
        assert [feature["lost_tokens"] for feature in features] == lost

    @pytest.mark.parametrize(
        ("tokenizer_name", "separators", "segments"),
        [("wordpiece_tokenizer", 1, {0, 1}), ("bpe_tokenizer", 2, {0}), ("unigram_tokenizer", 1, {0, 1})],
    )
    def test_separators_and_segments(
        self, request: pytest.FixtureRequest, tokenizer_name: str, separators: int, segments: set[int]
    ) -> None:
        tokenizer: PreTrainedTokenizerBase = request.getfixturevalue(tokenizer_name)
        row = {"text": "the ferry", "text_pair": "the oven"}
        (feature,) = PairClassification.of(labels=LABELS).features([row], tokenizer)
        ids = feature["input_ids"]
        assert ids.count(tokenizer.sep_token_id) == separators + 1
        assert set(feature["token_type_ids"]) == segments


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
