"""Token classification without the CRF: loss, decoding, metrics, output and settings."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bert_tasks.data.columns import RECORD, Row
from bert_tasks.errors import DataError, UsageError
from bert_tasks.families import encoder_config
from bert_tasks.outputs.features import Feature
from bert_tasks.outputs.tags import EntitySpan, Tags, TokenPrediction, entity_spans
from bert_tasks.tasks.token_classification import TokenClassification
from support.hf_models import hf_config
from support.taggers import LABELS

TASK = TokenClassification.of(labels=LABELS, max_length=48, doc_stride=8)


def logits_of(rows: int, labels: int = 5) -> Tensor:
    return torch.randn(rows, labels, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)


def feature_of(row: int, word_ids: list[int]) -> Feature:
    return Feature(row=row, input_ids=[], token_type_ids=[], gather_positions=word_ids, word_ids=word_ids)


class TestDecode:
    def test_best_label_and_its_probability(self, wordpiece_tokenizer: PreTrainedTokenizerBase) -> None:
        logits = logits_of(5).float()
        rows = [{"words": ["a", "b", "c"]}, {"words": []}, {"words": ["d", "e"]}]
        windows = [feature_of(0, [0, 1]), feature_of(0, [2]), feature_of(1, []), feature_of(2, [0, 1])]
        predictions = TASK.output.decode(logits.split([2, 1, 0, 2]), windows, rows, wordpiece_tokenizer)
        best = logits.argmax(1).tolist()
        scores = logits.softmax(1).max(1).values.tolist()
        assert [prediction.words for prediction in predictions] == [("a", "b", "c"), (), ("d", "e")]
        assert [tag for prediction in predictions for tag in prediction.tags] == [LABELS[index] for index in best]
        assert [score for prediction in predictions for score in prediction.scores] == scores
        assert predictions[1] == TokenPrediction(words=(), tags=(), scores=(), entities=())
        assert predictions[1].to_json() == {"words": [], "tags": [], "scores": [], "entities": []}
        assert TASK.output.decode([], [], [], wordpiece_tokenizer) == []

    def test_tag_and_logits_of_a_word_are_those_of_its_first_sub_word(
        self, wordpiece_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        logits = logits_of(6).float()
        task = TokenClassification.of(labels=LABELS, labelling="all")
        windows = [feature_of(0, [0, 0, 1]), feature_of(0, [2]), feature_of(1, [0, 0])]
        rows = [{"words": ["a", "b", "c"]}, {"words": ["d"]}]
        split = logits.split([3, 1, 2])
        predictions = task.output.decode(split, windows, rows, wordpiece_tokenizer)
        expected = [LABELS[index] for index in logits.argmax(1)[[0, 2, 3, 4]].tolist()]
        assert [tag for prediction in predictions for tag in prediction.tags] == expected
        first, second = task.output.with_logits(predictions, split, windows)
        words = [tuple(row) for row in logits[[0, 2, 3, 4]].tolist()]
        assert (first.logits, second.logits) == (tuple(words[:3]), tuple(words[3:]))
        assert task.output.with_logits([], [], []) == []
        of_sequences = TokenClassification.of(labels=LABELS, crf=True).output
        with pytest.raises(UsageError, match="crf = true scores sequences of tags, not words"):
            of_sequences.with_logits(predictions, split, windows)

    def test_entities(self, wordpiece_tokenizer: PreTrainedTokenizerBase) -> None:
        logits = torch.full((4, 5), -20.0)
        for word, label in enumerate([1, 2, 0, 4]):
            logits[word, label] = float(word)
        rows = [{"words": ["Ana", "Maria", "in", "Rom"]}]
        (prediction,) = TASK.output.decode([logits], [feature_of(0, [0, 1, 2, 3])], rows, wordpiece_tokenizer)
        assert prediction.tags == ("B-PER", "I-PER", "O", "I-LOC")
        person, location = prediction.entities
        assert (person.entity_group, person.word, person.start, person.end) == ("PER", "Ana Maria", 0, 9)
        assert (location.entity_group, location.word, location.start, location.end) == ("LOC", "Rom", 13, 16)
        assert person.score == pytest.approx(sum(prediction.scores[:2]) / 2)
        assert prediction.to_json()["entities"][1] == {
            "entity_group": "LOC",
            "score": prediction.scores[3],
            "word": "Rom",
            "start": 13,
            "end": 16,
        }

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.tuples(st.text("aé日本😀 -", max_size=4), st.sampled_from(LABELS)), max_size=12))
    def test_offsets_give_the_exact_words(self, pairs: list[tuple[str, str]]) -> None:
        words, tags = [word for word, _ in pairs], [tag for _, tag in pairs]
        text = " ".join(words)
        entities = entity_spans(words, tags, [0.5] * len(words))
        for entity in entities:
            assert text[entity.start : entity.end] == entity.word
        inside = sum(tag != "O" for tag in tags)
        assert sum(entity.word.count(" ") for entity in entities) + len(entities) == inside + sum(
            word.count(" ") for word, tag in pairs if tag != "O"
        )


def answer(words: Sequence[str], tags: Sequence[str]) -> TokenPrediction:
    entities: tuple[EntitySpan, ...] = ()
    return TokenPrediction(words=tuple(words), tags=tuple(tags), scores=(1.0,) * len(words), entities=entities)


def rendered(output: Tags, answers: Sequence[TokenPrediction], rows: Sequence[Row], extension: str = ".conll") -> str:
    """The only file of a format."""
    (written,) = output.files[extension].render(output, extension, answers, rows).values()
    return written


def checked(output: Tags, rows: Sequence[Row]) -> tuple[str, ...]:
    return output.files[".conll"].check(output, ".conll", rows)


class TestMetrics:
    def test_schemes_are_compared_as_entities(self) -> None:
        rows = [{"tags": ["I-A", "I-A", "B-A"]}, {"tags": ["S-A", "O", "O"]}, {"tags": None}, {}]
        tags = {
            ("O", "B-A", "I-A"): [["B-A", "I-A", "B-A"], ["B-A", "O", "O"]],
            ("O", "B-A", "I-A", "E-A", "S-A"): [["B-A", "E-A", "S-A"], ["S-A", "O", "O"]],
            ("O", "I-A", "I-B", "B-B"): [["I-A", "I-A", "I-A"], ["I-A", "O", "O"]],
        }
        f1 = []
        for labels, predicted in tags.items():
            answers = [answer("abc", row_tags) for row_tags in [*predicted, ["O"] * 3, ["O"] * 3]]
            metrics = TokenClassification.of(labels=labels).output.metrics(answers, rows)
            f1.append(metrics["overall_f1"])
            assert metrics["A_number"] == 3
            assert metrics["invalid_transitions"] == 0
        assert f1 == pytest.approx([1.0, 1.0, 0.4])

    def test_faults_are_counted_not_mended(self) -> None:
        rows = [{"tags": ["B-A", "I-A", "O"]}]
        inside = Tags(labels=("O", "B-A", "I-A")).metrics([answer("abc", ["I-A", "I-A", "O"])], rows)
        assert (inside["overall_f1"], inside["strict_overall_f1"], inside["invalid_transitions"]) == (1.0, 0.0, 1.0)
        labels = ("O", "B-A", "I-A", "E-A", "S-A")
        unclosed = Tags(labels=labels).metrics([answer("abc", ["B-A", "I-A", "O"])], rows)
        assert (unclosed["overall_f1"], unclosed["invalid_transitions"]) == (1.0, 1.0)

    def test_raw_labels_may_look_like_chunk_tags(self) -> None:
        task = TokenClassification.of(labels=("E-MAIL", "NAME", "O"))
        rows = [{"tags": ["E-MAIL", "O"]}, {"tags": ["NAME", "E-MAIL"]}]
        answers = [answer("ab", row["tags"]) for row in rows]
        metrics = task.output.metrics(answers, rows)
        assert (metrics["overall_accuracy"], metrics["macro_f1"]) == (1.0, 1.0)
        assert rendered(task.output, answers, rows).splitlines()[0] == "a E-MAIL E-MAIL"

    def test_tags_of_another_task_are_refused(self) -> None:
        with pytest.raises(DataError, match="none of the rows' tags, 'NOUN', 'VERB', is among them"):
            TASK.output.metrics([answer("ab", ["O", "O"])], [{"tags": ["VERB", "NOUN"]}])
        assert TASK.output.metrics([answer("a", ["O"])], [{"tags": ["O"]}])["overall_accuracy"] == 1.0

    def test_scheme_of_the_training_rows_is_recorded(self) -> None:
        fitted = TASK.fit_rows([{"tags": ["O", "I-PER"]}, {}, {"tags": None}, {"tags": ["I-LOC", "B-LOC"]}])
        assert fitted.output.scheme == "IOB1"
        assert fitted.fit_rows([{"tags": ["NN"]}]).output.scheme == "raw"
        assert fitted.fit_rows([{"words": []}]) == fitted
        names = ("thresholds", "promise", "balanced_weights", "scheme", "temperature", "reads_context")
        assert TokenClassification.fitted_names() == names


class TestRender:
    ROWS = ({"tags": ["I-PER", "O", "O", "O"]}, {"tags": []}, {"tags": ["S-LOC"]})
    ANSWERS = (
        answer(["Ana", "", "New\u00a0York", "\t a  b"], ["B-PER", "O", "I-LOC", "O"]),
        answer([], []),
        answer(["Rom"], ["O"]),
    )

    @pytest.mark.parametrize("extension", [".conll", ".txt"])
    def test_columns_of_conlleval(self, extension: str) -> None:
        expected = "Ana B-PER B-PER\n_ O O\nNew_York O I-LOC\n_a_b O O\n\n\nRom B-LOC O\n\n"
        assert rendered(TASK.output, self.ANSWERS, self.ROWS, extension) == expected

    def test_columns_of_conllu(self) -> None:
        row = {RECORD: '{"comments": ["# text = Ana", "no comment", "# two\\nlines"]}'}
        expected = "# text = Ana\n1\tAna\t_\tB-PER" + "\t_" * 6 + "\n2\t_\t_\tO" + "\t_" * 6 + "\n\n"
        assert rendered(TASK.output, [answer(["Ana", ""], ["B-PER", "O"])], [row], ".conllu") == expected

    def test_without_tags_and_in_another_scheme(self) -> None:
        output = Tags(labels=("O", "B-A", "I-A", "E-A", "S-A"))
        answers = [answer(["a", "b", "c"], ["B-A", "E-A", "S-A"])]
        assert rendered(output, answers, [{"words": ["a", "b", "c"]}]) == "a B-A\nb I-A\nc B-A\n\n"

    @given(words=st.lists(st.text(st.sampled_from("ab_ \t\n\u00a0\u3000"), max_size=4), max_size=6))
    def test_words_that_are_written_otherwise_are_told(self, words: list[str]) -> None:
        """A line has as many columns as it should, and words that differ from the rows' are counted."""
        written = rendered(TASK.output, [answer(words, ["O"] * len(words))], [{"words": words}])
        rows = [line.split() for line in written.splitlines()[: len(words)]]
        assert all(len(cells) == 2 for cells in rows)
        changed = sum(cells[0] != word for cells, word in zip(rows, words, strict=True))
        notes = checked(TASK.output, [{"words": words}])
        assert [note.partition(" words")[0] for note in notes] == ([f"{changed} of {len(words)}"] if changed else [])

    def test_tags_with_white_space_are_refused(self) -> None:
        raw = Tags(labels=("noun", "proper noun"))
        with pytest.raises(DataError, match="the tag 'proper noun' has white space"):
            checked(raw, [{"words": ["a"]}])
        with pytest.raises(DataError, match="the tag 'B-a b' has white space"):
            checked(TASK.output, [{"words": ["a"], "tags": ["B-a b"]}])


class TestSettings:
    @pytest.mark.parametrize("usable", [3, 4, 16, 48, 512])
    def test_settings_implied_by_a_checkpoint_fit_it(self, usable: int) -> None:
        implied = {**TokenClassification.hf_settings({}, LABELS), **TokenClassification.limited(usable)}
        task = TokenClassification.of(**implied)
        assert (task.output.labels, task.max_length) == (LABELS, min(128, usable))
        assert TokenClassification.hf_settings({}, ()) == {"labels": ("LABEL_0", "LABEL_1")}

    def test_a_head_needs_labels(self) -> None:
        config = encoder_config(hf_config("bert").to_dict())
        with pytest.raises(UsageError, match="token classification needs labels"):
            TokenClassification.of().head(config)
