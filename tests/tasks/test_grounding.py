"""Words tagged beside a context: against transformers' pairs and windows, and what a context must not change."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForTokenClassification, PreTrainedTokenizerBase

from bert_tasks import evaluate, predict
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.reading import read
from bert_tasks.data.splits import row_keys, train_validation_split
from bert_tasks.errors import DataError, UsageError
from bert_tasks.export import export
from bert_tasks.init import init_recipe
from bert_tasks.model.task_model import TaskModel
from bert_tasks.outputs.features import Feature
from bert_tasks.outputs.word_logits import word_places
from bert_tasks.tasks import TokenClassification
from bert_tasks.tasks.features import collate
from bert_tasks.tasks.windows.contexts import ContextTokens, tokenized_contexts
from bert_tasks.tasks.windows.frame import Frame
from bert_tasks.tasks.windows.grounding import Context
from bert_tasks.tasks.windows.words import SubWords
from support.servers import Application, rounded, visit
from support.small_checkpoints import save_checkpoint, tokenizer_of
from support.small_tokenizers import LINES

LABELS = ("O", "B-NEW", "I-NEW")
CONTEXT = LINES[0]
LONG = " ".join(LINES)
TASK = TokenClassification.of(labels=LABELS, max_length=48, doc_stride=8)


def grounded(text: str, context: str | None = CONTEXT, **more: Any) -> dict[str, Any]:
    return {"words": text.split(), "context": context, **more}


@pytest.fixture(scope="module")
def folder(wordpiece_tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grounded")
    save_checkpoint(folder, "bert", wordpiece_tokenizer, head="token", labels=LABELS, wide=True)
    return folder


def stock_logits(folder: Path, encoding: dict[str, Any]) -> torch.Tensor:
    model = AutoModelForTokenClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(**{name: torch.tensor(value) for name, value in encoding.items()}).logits
    return logits


def first_tokens(encoding: Any, window: int = 0) -> list[int]:
    """The first token of each word of the second text."""
    places: dict[int, int] = {}
    sides, words = encoding.sequence_ids(window), encoding.word_ids(window)
    for place, (side, word) in enumerate(zip(sides, words, strict=True)):
        if side == 1:
            places.setdefault(word, place)
    return list(places.values())


class TestAgainstTransformers:
    @pytest.mark.parametrize("question", [None, "who told the baker"])
    def test_a_row_is_the_pair_of_context_and_text(
        self, folder: Path, wordpiece_tokenizer: PreTrainedTokenizerBase, question: str | None
    ) -> None:
        model, text = TaskModel.from_pretrained(folder, max_length=48), LINES[3]
        row = grounded(text, question=question)
        before = CONTEXT if question is None else f"{question}\n\n{CONTEXT}"
        pair = wordpiece_tokenizer([before], text.split(), is_split_into_words=True)
        assert pair["input_ids"] == wordpiece_tokenizer(before, text)["input_ids"]
        (feature,) = model.task.features([row], wordpiece_tokenizer)
        assert feature["input_ids"] == pair["input_ids"]
        assert feature["token_type_ids"] == pair["token_type_ids"]
        logits = stock_logits(folder, {name: [pair[name]] for name in ("input_ids", "token_type_ids")})[0]
        assert feature["gather_positions"] == first_tokens(pair)
        (prediction,) = model.predict([row], logits=True)
        assert prediction.logits is not None
        expected = logits[first_tokens(pair)]
        torch.testing.assert_close(torch.tensor(prediction.logits), expected, atol=5e-5, rtol=0)

    def test_the_loss_is_that_of_the_words_only(
        self, folder: Path, wordpiece_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        model = TaskModel.from_pretrained(folder, max_length=48)
        row = grounded(LINES[3], tags=["B-NEW", *["O"] * (len(LINES[3].split()) - 1)])
        pair = wordpiece_tokenizer([CONTEXT], row["words"], is_split_into_words=True)
        labels = torch.full((len(pair["input_ids"]),), -100)
        labels[first_tokens(pair)] = torch.tensor([LABELS.index(tag) for tag in row["tags"]])
        logits = stock_logits(folder, {name: [pair[name]] for name in ("input_ids", "token_type_ids")})[0]
        features = model.task.features([row], wordpiece_tokenizer)
        batch = collate(features, position_offset=model.config.position_offset)
        (term,) = model.task.output.loss(model.eval()(batch), batch)
        assert model.task.output.counts(features) == {"tags": len(row["words"])}
        expected = torch.nn.functional.cross_entropy(logits, labels)
        torch.testing.assert_close(term.total / term.count, expected, atol=5e-5, rtol=0)

    def test_windows_are_those_of_transformers_and_the_window_that_supports_a_word_most_wins(
        self, folder: Path, wordpiece_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        model, text = TaskModel.from_pretrained(folder, max_length=48, doc_stride=8), LINES[4]
        row = grounded(text, LONG)
        pairs = wordpiece_tokenizer(
            [LONG],
            text.split(),
            is_split_into_words=True,
            truncation="only_first",
            max_length=48,
            stride=8,
            return_overflowing_tokens=True,
            padding=True,
        )
        count = len(pairs["input_ids"])
        features = model.task.features([row], wordpiece_tokenizer)
        theirs = [
            [token for token, mask in zip(ids, masks, strict=True) if mask]
            for ids, masks in zip(pairs["input_ids"], pairs["attention_mask"], strict=True)
        ]
        assert [feature["input_ids"] for feature in features] == theirs
        assert count > 4
        names = ("input_ids", "token_type_ids", "attention_mask")
        logits = stock_logits(folder, {name: pairs[name] for name in names})
        of_windows = [logits[window][first_tokens(pairs, window)] for window in range(count)]
        words = torch.stack(of_windows, dim=1)  # words, windows, labels
        best = words.softmax(-1)[..., LABELS.index("O")].argmax(1)
        assert len(set(best.tolist())) > 1
        expected = torch.stack([of_word[window] for of_word, window in zip(words, best.tolist(), strict=True)])
        (prediction,) = model.predict([row], logits=True)
        torch.testing.assert_close(torch.tensor(prediction.logits), expected, atol=5e-5, rtol=0)
        assert list(prediction.tags) == [LABELS[index] for index in expected.argmax(1).tolist()]

    @pytest.mark.parametrize("family", ["roberta", "deberta-v2", "modernbert"])
    def test_families_with_other_special_tokens(
        self, family: str, by_kind: dict[str, PreTrainedTokenizerBase], tmp_path: Path
    ) -> None:
        tokenizer = tokenizer_of(family, by_kind)
        save_checkpoint(tmp_path, family, tokenizer, head="token", labels=LABELS, wide=True)
        model = TaskModel.from_pretrained(tmp_path, max_length=48)
        context, row = "a cold wind", grounded("the baker was told nothing", "a cold wind")
        (feature,) = model.task.features([row], tokenizer)
        alone = tokenizer(context, add_special_tokens=False)["input_ids"]
        shift = feature["input_ids"].index(alone[0])
        assert feature["input_ids"][shift : shift + len(alone)] == alone
        assert min(feature["gather_positions"] or ()) >= shift + len(alone) + 1
        (prediction,) = model.predict([row], logits=True)
        logits = stock_logits(tmp_path, {"input_ids": [feature["input_ids"]]})[0]
        expected = logits[feature["gather_positions"]]
        torch.testing.assert_close(torch.tensor(prediction.logits), expected, atol=1e-4, rtol=0)


def numbered_context(*, question: int, context: int, room: int, overlap: int) -> Context:
    """A context whose tokens are numbers, those of the question from 0 on and its own from 1,000 on."""
    nothing = torch.zeros(0, dtype=torch.int64).numpy()
    return Context(
        frame=Frame(special=((-1,), (-2, -2), (-3,)), types=(0, 0, 0, 1, 1)),
        room=room,
        overlap=overlap,
        texts={},
        tokens=ContextTokens(ids=[], starts=nothing, ends=nothing),
        question=range(question),
        ids=range(1000, 1000 + context),
    )


WORDS = st.lists(st.integers(1, 4) | st.integers(20, 40), max_size=14)


@settings(max_examples=150, deadline=None)
@given(lengths=WORDS, context=st.integers(0, 90), question=st.integers(0, 20), room=st.integers(10, 60))
def test_every_word_meets_every_token_of_the_context(
    lengths: list[int], context: int, question: int, room: int
) -> None:
    row = numbered_context(question=question, context=context, room=room, overlap=6)
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + min(length, row.longest_word))
    text = SubWords(ids=range(2000, 2000 + starts[-1]), starts=starts, lost=0)
    met: dict[int, set[int]] = {}
    windows = list(row.windows(text))
    for window in windows:
        assert len(window.ids) == len(window.token_type_ids) <= room + 4
        assert [token for token in window.ids if 0 <= token < 1000] == list(row.kept_question(text))
        for word, span in zip(window.words, window.spans, strict=True):
            assert [window.ids[place] for place in span] == list(text.ids[starts[word] : starts[word + 1]])
            met.setdefault(word, set()).update(token for token in window.ids if 1000 <= token < 2000)
    assert list(met) == list(range(len(lengths)))
    assert all(tokens == set(row.ids) for tokens in met.values())
    if starts[-1] <= room - question - row.quarter:
        assert all(list(text.ids) == [token for token in window.ids if token >= 2000] for window in windows)
    if question + context + starts[-1] <= room:
        assert len(windows) == 1
    assert len(windows) <= max(1, (8 * context // room + 2)) * max(1, 8 * starts[-1] // room + 2)


@pytest.mark.parametrize(("overlap", "texts"), [(8, [2000, 2006, 2012, 2018]), (2, [2000, 2010, 2020])])
def test_windows_overlap_by_half_of_their_room_at_most(overlap: int, texts: list[int]) -> None:
    """With a room of 20, a question of 3, and a quarter for the context, parts of the text have 12 tokens."""
    row = numbered_context(question=3, context=30, room=20, overlap=overlap)
    text = SubWords(ids=range(2000, 2030), starts=range(31), lost=0)
    parts: dict[int, list[int]] = {}  # the first token of a part of the text -> those of the context beside it
    for window in row.windows(text):
        first = min(token for token in window.ids if token >= 2000)
        parts.setdefault(first, []).append(min(token for token in window.ids if 1000 <= token < 2000))
    assert list(parts) == texts
    assert parts[2000] == list(range(1000, 1030, 3))  # parts of 5 tokens, of which neighbours share 2


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    words=st.lists(st.sampled_from(LONG.split()), max_size=60),
    blank=st.sampled_from([{}, {"context": None}, {"context": "  "}, {"context": "", "question": "who"}]),
)
def test_a_row_without_a_context_is_a_row_of_the_plain_task(
    wordpiece_tokenizer: PreTrainedTokenizerBase, words: list[str], blank: dict[str, Any]
) -> None:
    (*plain,) = TASK.features([{"words": words}], wordpiece_tokenizer)
    mixed = TASK.features([grounded(LINES[0], LONG), {"words": words, **blank}], wordpiece_tokenizer)
    assert [{**feature, "row": 0} for feature in mixed if feature["row"] == 1] == plain
    assert not any(segment for feature in plain for segment in feature["token_type_ids"])


class TestMerging:
    def feature(self, row: int, words: Sequence[int]) -> Feature:
        return Feature(row=row, input_ids=[], token_type_ids=[], word_ids=list(words))

    def test_one_window_that_supports_a_word_is_enough(self) -> None:
        unsure, supports, denies = [0.0, 0.1], [3.0, 0.0], [0.0, 5.0]
        features = [self.feature(0, [0, 0, 1]), self.feature(0, [0, 0, 1]), self.feature(1, [0])]
        compact = [torch.tensor(rows) for rows in ([denies, supports, denies], [unsure, denies, denies], [denies])]
        # The second sub-word of the first word does not count, and of equal windows the first is read.
        assert word_places(compact, features, ("O", "B-NEW")) == [(1, 0), (0, 2), (2, 0)]
        reordered = [logits.flip(1) for logits in compact]
        assert word_places(reordered, features, ("B-NEW", "O")) == [(1, 0), (0, 2), (2, 0)]

    def test_metrics_of_long_contexts_are_by_words_and_not_by_windows(self, folder: Path) -> None:
        model = TaskModel.from_pretrained(folder, max_length=32, doc_stride=4)
        rows = [grounded(line, LONG, tags=["O"] * len(line.split())) for line in LINES[:3]]
        right = [tag == "O" for prediction in model.predict(rows) for tag in prediction.tags]
        assert evaluate(model, rows)["overall_accuracy"] == pytest.approx(sum(right) / len(right))
        assert len(right) == sum(len(row["words"]) for row in rows)


class TestData:
    ROWS = (
        {"question": "Who?", "context": "Ada sang in May.", "text": "Ada sang in Rome.", "entities": [[9, 16, "NEW"]]},
        {"question": "When?", "context": "Ada sang in May.", "text": "In May, she said.", "entities": []},
        {"question": "", "context": "", "text": "Nobody came.", "entities": []},
    )
    COLUMNS = TASK.columns

    def file(self, folder: Path, extension: str) -> Path:
        path = folder / f"rows{extension}"
        if extension == ".jsonl":
            lines = [json.dumps(row) for row in self.ROWS]
        else:
            quoted = [[json.dumps(str(row[name])) for name in ("question", "context", "text")] for row in self.ROWS]
            spans = ['"[[9, 16, ""NEW""]]"', "[]", "[]"]
            lines = ["question,context,text,entities"]
            lines += [",".join([*cells, span]) for cells, span in zip(quoted, spans, strict=True)]
        path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
        return path

    @pytest.mark.parametrize("extension", [".jsonl", ".csv"])
    def test_spans_count_characters_of_the_text(self, tmp_path: Path, extension: str) -> None:
        rows = list(read(self.file(tmp_path, extension), self.COLUMNS, ReadOptions()))
        assert [row["tags"] for row in rows] == [["O", "O", "B-NEW", "I-NEW", "O"], ["O"] * 6, ["O"] * 3]
        assert [row["context"] for row in rows] == ["Ada sang in May.", "Ada sang in May.", ""]
        assert TASK.fit_rows(rows).output.reads_context
        assert not TASK.fit_rows(rows[2:]).output.reads_context

    def test_rows_on_one_context_stay_together_and_differ_by_it(self, tmp_path: Path) -> None:
        lines = [{**self.ROWS[number % 2], "context": f"Context {number // 2}."} for number in range(20)]
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in lines))
        table = read(path, self.COLUMNS, ReadOptions())
        train, validation = train_validation_split(table, self.COLUMNS, 0.3, 1)
        contexts = [{row["context"] for row in part} for part in (train, validation)]
        assert not contexts[0] & contexts[1]
        assert len(set(row_keys(table, self.COLUMNS)["text"].tolist())) == 20

    def test_init_detects_the_columns(self, tmp_path: Path, repository: Path) -> None:
        draft = init_recipe(
            repository / "recipes" / "data" / "custom" / "grounded.jsonl", output=tmp_path / "recipe.toml"
        )
        assert draft.task == "token-classification"
        assert draft.columns == {
            "text": "answer",
            "entities": "unsupported",
            "question": "question",
            "context": "context",
        }
        assert not draft.alternatives
        assert "unsupported: 15 rows without a span" in draft.reasons


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"crf": True}, "crf = true scores all words of a row once, but the training rows have contexts"),
            ({"context_tokens": 8}, "context_tokens reads the rows around, but the training rows have contexts"),
        ],
    )
    def test_settings_that_cannot_be_combined_with_a_context(
        self,
        changes: dict[str, Any],
        message: str,
        folder: Path,
        tmp_path: Path,
        wordpiece_tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        task = TASK.with_settings(**changes)
        row = {**grounded(LINES[0], LONG), "document": "1"}
        with pytest.raises(UsageError, match=message):
            task.fit_rows([row])
        model = TaskModel.from_pretrained(folder)
        model.task = model.task.fit_rows([row])
        model.save_pretrained(tmp_path)
        with pytest.raises(UsageError, match=message):  # and not in silence a model that ignores contexts
            TaskModel.from_pretrained(tmp_path, **changes)
        without = {name: value for name, value in row.items() if name not in ("question", "context")}
        assert task.features([row], wordpiece_tokenizer) == task.features([without], wordpiece_tokenizer)

    def test_what_a_context_cannot_be_combined_with(self, wordpiece_tokenizer: PreTrainedTokenizerBase) -> None:
        cases: list[tuple[dict[str, Any], type[Exception], str]] = [
            ({"max_length": 6, "doc_stride": 0}, UsageError, "a context and a text need 7 tokens or more"),
            ({"labels": ("OK", "BAD")}, DataError, "the label 'O', which the model does not have"),
        ]
        for changes, error, message in cases:
            task = TASK.with_settings(**changes)
            with pytest.raises(error, match=message):
                task.features([grounded(LINES[0], LONG)], wordpiece_tokenizer)
            assert task.features([{"words": LINES[0].split()}], wordpiece_tokenizer)
        short = TASK.with_settings(labels=("OK", "BAD"))  # one window needs no label by which windows are compared
        assert len(short.features([grounded("at six", "a cup")], wordpiece_tokenizer)) == 1

    def test_too_many_windows(self) -> None:
        TASK.check_rows([grounded("word " * 200, "text " * 10_000)])
        with pytest.raises(DataError, match="the words are read with each part of the context"):
            TASK.check_rows([grounded("word " * 20_000, "text " * 10_000)])

    def test_a_long_question_is_truncated_and_counted(self, wordpiece_tokenizer: PreTrainedTokenizerBase) -> None:
        features = TASK.features([grounded(LINES[0], LONG, question=LONG)], wordpiece_tokenizer)
        tokens = tokenized_contexts([LONG], wordpiece_tokenizer)[LONG].ids
        assert sum(feature.get("lost_tokens", 0) for feature in features) == len(tokens) - 45 // 4
        assert max(len(feature["input_ids"]) for feature in features) <= 48


class TestUse:
    def test_each_token_has_the_characters_that_it_stands_for(
        self, wordpiece_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        context = " ".join(line for line in LINES if line.isascii())  # tokens of these models have no accents
        row = grounded(LINES[3], context, question="who told the baker")
        texts = {**row, "words": " ".join(row["words"])}
        features = TASK.features([row], wordpiece_tokenizer)
        spans = TASK.token_spans([row], wordpiece_tokenizer)
        for feature, of_window in zip(features, spans, strict=True):
            tokens = wordpiece_tokenizer.convert_ids_to_tokens(feature["input_ids"])
            for token, span in zip(tokens, of_window, strict=True):
                if token in ("[CLS]", "[SEP]"):
                    assert span is None
                    continue
                assert span is not None
                characters = texts[span.column][span.start : span.end].lower()
                if span.column == "words":  # whole words for sub-words
                    assert token.removeprefix("##") in characters
                else:
                    assert token.removeprefix("##") == characters

    def test_explanations_have_the_words_of_all_texts(self, folder: Path) -> None:
        model = TaskModel.from_pretrained(folder, max_length=48, doc_stride=8)
        row = grounded(LINES[4], LONG, question="who told the baker")
        plain, (explained,) = model.predict([row]), model.predict([row], explain=True)
        assert explained.tags == plain[0].tags
        assert explained.entities
        for entity in explained.entities:
            assert entity.explanation is not None
            assert entity.explanation.is_complete
            words: dict[str, list[str]] = {}
            for word in entity.explanation.words:
                words.setdefault(word.column, []).append(word.word)
            assert words["words"] == row["words"]
            for column in ("question", "context"):  # a point behind a word is a word of its own
                assert "".join(words[column]) == row[column].replace(" ", "")

    def test_a_model_trained_with_contexts_shows_one_in_its_examples(self, folder: Path, tmp_path: Path) -> None:
        model = TaskModel.from_pretrained(folder)
        assert not any("context" in row for row in model.task.example_rows)
        model.task = model.task.fit_rows([grounded(LINES[0])])
        model.save_pretrained(tmp_path)
        task = TaskModel.from_pretrained(tmp_path).task
        (first, *_) = task.example_rows
        before, words = task.pipeline_inputs(first)
        assert before == [f"{first['question']}\n\n{first['context']}"]
        assert words == first["words"]

    def test_a_request_may_have_a_context(self, folder: Path) -> None:
        model = TaskModel.from_pretrained(folder, max_length=48, doc_stride=8)
        model.task = model.task.fit_rows([grounded(LINES[0])])
        row = {"text": LINES[4], "context": LONG, "question": "who told the baker"}
        (expected,) = model.predict([row])

        async def ask(served: Application) -> list[Any]:
            about = await served.client.get("/model")
            return [about.json()["examples"], (await served.post(row)).json()]

        examples, answer = visit(model, ask)
        assert all("context" in example for example in examples)
        assert answer == rounded(expected.to_json())

    @pytest.mark.slow
    def test_an_exported_model_reads_contexts(self, folder: Path, tmp_path: Path) -> None:
        pytest.importorskip("onnxruntime")
        row = grounded(LINES[4], LONG)
        export(folder, to="onnx", output=tmp_path / "onnx", data=[row])
        (ours,), (theirs,) = predict(folder, [row]), predict(tmp_path / "onnx", [row])
        assert theirs.tags == ours.tags
        assert theirs.scores == pytest.approx(ours.scores, abs=1e-4)
