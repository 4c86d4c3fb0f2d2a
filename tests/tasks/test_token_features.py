"""How rows of words and tags become features, against transformers' own example."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from bert_tasks.data.features import Truncation
from bert_tasks.errors import DataError
from bert_tasks.tasks.token_classification import TokenClassification
from support.small_tokenizers import LINES
from support.taggers import LABELS, tagged, transformers_labels

TASK = TokenClassification.of(labels=LABELS, max_length=48, doc_stride=8)
GRANDMOTHER = {"words": ["My", "grandmother", "kept", "bees"], "tags": ["B-PER", "I-PER", "O", "B-LOC"]}


@pytest.fixture(scope="module")
def reference(bpe_folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer as transformers' examples load it for pre-split words."""
    return AutoTokenizer.from_pretrained(bpe_folder, add_prefix_space=True)


class TestFeatures:
    @pytest.mark.parametrize("labelling", ["first", "continuation", "all"])
    def test_labels_are_those_of_transformers_example(
        self, labelling: Any, bpe_tokenizer: PreTrainedTokenizerBase, reference: PreTrainedTokenizerBase
    ) -> None:
        rows = tagged(LINES[:6])
        task = TokenClassification.of(labels=LABELS, max_length=400, labelling=labelling)
        for feature, row in zip(task.features(rows, bpe_tokenizer), rows, strict=True):
            expected = transformers_labels(row, reference, LABELS, labelling)
            positions, labels, words = feature["gather_positions"], feature["labels"], feature["word_ids"]
            assert positions == [token for token, label in enumerate(expected) if label != -100]
            assert labels == [label for label in expected if label != -100]
            word_ids = reference(row["words"], is_split_into_words=True).word_ids()
            assert positions is not None
            assert words == [word_ids[token] for token in positions]
            assert feature["input_ids"] == reference(row["words"], is_split_into_words=True)["input_ids"]
            assert feature["token_type_ids"] == [0] * len(feature["input_ids"])

    def test_continuation_without_an_inner_label_keeps_the_words_label(
        self, bpe_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        task = TokenClassification.of(labels=("O", "B-PER"), labelling="continuation")
        (feature,) = task.features([{"words": ["grandmother"], "tags": ["B-PER"]}], bpe_tokenizer)
        assert feature["labels"] == [1.0] * len(feature["input_ids"][1:-1])
        assert len(feature["labels"]) > 1

    @pytest.mark.parametrize(
        ("labels", "tags", "expected"),
        [
            (("O", "B-A", "I-A"), ["I-A", "I-A", "O", "I-A", "B-A"], [1, 2, 0, 1, 1]),
            (("O", "I-A", "B-A"), ["S-A", "O", "B-A", "E-A", "O"], [2, 0, 2, 1, 0]),
            (("O", "B-A", "I-A", "E-A", "S-A"), ["B-A", "I-A", "I-A", "B-A", "O"], [1, 2, 3, 4, 0]),
            (("O", "I-A", "I-B"), ["B-A", "I-A", "B-B", "O", "B-A"], [1, 1, 2, 0, 1]),
            (("NOUN", "VERB"), ["VERB", "NOUN", "VERB", "VERB", "NOUN"], [1, 0, 1, 1, 0]),
        ],
    )
    def test_tags_of_any_scheme_become_the_models_labels(
        self, labels: tuple[str, ...], tags: list[str], expected: list[int], bpe_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        row = {"words": ["a", "b", "c", "d", "e"], "tags": tags}
        (feature,) = TokenClassification.of(labels=labels).features([row], bpe_tokenizer)
        assert feature["labels"] == expected

    def test_rows_whose_tags_no_label_can_say_are_not_trained(self, bpe_tokenizer: PreTrainedTokenizerBase) -> None:
        rows = [
            GRANDMOTHER,
            {"words": ["a", "b"], "tags": ["O", "B-ORG"]},
            {"words": ["a"], "tags": None},
            {"words": []},
        ]
        features = TASK.features(rows, bpe_tokenizer)
        assert [feature["labels"] for feature in features] == [[1, 2, 0, 3], None, None, None]
        assert [
            feature["gather_positions"] is not None and len(feature["gather_positions"]) for feature in features
        ] == [4, 2, 1, 0]

    def test_unnamed_labels_need_names(self, bpe_tokenizer: PreTrainedTokenizerBase) -> None:
        task = TokenClassification.of(labels=("LABEL_0", "LABEL_1"))
        with pytest.raises(DataError, match=r"labels are 'LABEL_0', 'LABEL_1', and none of the rows' tags, 'B-LOC'"):
            task.features([GRANDMOTHER], bpe_tokenizer)
        (feature,) = task.features([{"words": ["a", "b"], "tags": ["LABEL_1", "LABEL_0"]}], bpe_tokenizer)
        assert feature["labels"] == [1, 0]
        assert len(task.features([{"words": ["a", "b"]}], bpe_tokenizer)) == 1

    def test_a_row_without_words_is_one_window(self, bpe_tokenizer: PreTrainedTokenizerBase) -> None:
        (feature,) = TASK.features([{"words": [], "tags": []}], bpe_tokenizer)
        special = [bpe_tokenizer.cls_token_id, bpe_tokenizer.sep_token_id]
        assert feature == {
            "row": 0,
            "input_ids": special,
            "token_type_ids": [0, 0],
            "labels": [],
            "gather_positions": [],
            "word_ids": [],
            "lost_tokens": 0,
        }

    @pytest.mark.parametrize("labelling", ["first", "all"])
    def test_long_rows_are_read_in_windows(self, labelling: Any, bpe_tokenizer: PreTrainedTokenizerBase) -> None:
        rows = [GRANDMOTHER, *tagged([" ".join(LINES)]), {"words": ["x" * 900, "y"], "tags": ["O", "B-LOC"]}]
        task = TokenClassification.of(labels=LABELS, max_length=24, doc_stride=8, labelling=labelling)
        wide = TokenClassification.of(labels=LABELS, max_length=4000, labelling=labelling)
        features, (_, whole, _) = task.features(rows, bpe_tokenizer), wide.features(rows, bpe_tokenizer)
        assert max(len(feature["input_ids"]) for feature in features) <= 24
        of_long = [feature for feature in features if feature["row"] == 1]
        assert len(of_long) > 10
        for key in ("labels", "word_ids"):
            assert [value for feature in of_long for value in feature[key]] == whole[key]
        assert [f["input_ids"][token] for f in of_long for token in f["gather_positions"] or ()] == [
            whole["input_ids"][token] for token in whole["gather_positions"] or ()
        ]
        last = [feature for feature in features if feature["row"] == 2]
        assert sum(feature["lost_tokens"] for feature in last) > 200
        assert sum(feature["lost_tokens"] for feature in features if feature["row"] < 2) == 0
        assert {word for feature in last for word in feature["word_ids"] or ()} == {0, 1}
        rows_cut = {feature["row"] for feature in features if feature["lost_tokens"]}
        (note,) = task.cut_notes(Truncation(rows=len(rows), cut_rows=len(rows_cut)))
        assert note.startswith("1 of 3 (33.3%) rows has a word that alone is longer than max_length = 24 tokens")
        assert task.cut_notes(Truncation(rows=3, cut_rows=0)) == ()

    def test_context_is_of_the_same_document(self, bpe_tokenizer: PreTrainedTokenizerBase) -> None:
        task = TokenClassification.of(labels=LABELS, max_length=128, context_tokens=5)
        rows = [{**row, "document": name} for row, name in zip(tagged(LINES[:4]), "aaba", strict=True)]
        alone = TASK.features(rows, bpe_tokenizer)
        together = task.features(rows, bpe_tokenizer)
        inner = [feature["input_ids"][1:-1] for feature in alone]
        special = alone[0]["input_ids"][0], alone[0]["input_ids"][-1]
        expected = [inner[0] + inner[1][:5], inner[0][-5:] + inner[1], inner[2], inner[3]]
        assert [feature["input_ids"] for feature in together] == [[special[0], *ids, special[1]] for ids in expected]
        assert together[1]["gather_positions"] == [token + 5 for token in alone[1]["gather_positions"] or ()]
        assert [feature["labels"] for feature in together] == [feature["labels"] for feature in alone]
        without = task.features([{"words": row["words"]} for row in rows], bpe_tokenizer)
        assert [feature["input_ids"] for feature in without] == [feature["input_ids"] for feature in alone]
        with pytest.raises(DataError, match="context_tokens = 5, but no row has a document"):
            task.fit_rows([{"words": row["words"], "tags": row["tags"]} for row in rows])
        assert task.fit_rows(iter(rows)) == task.fit_rows(rows)
        assert task.fit_rows(rows).output.scheme == "IOB2"
        assert (task.needs_document, TASK.needs_document) == (True, False)
