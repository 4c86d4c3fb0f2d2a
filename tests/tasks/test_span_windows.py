"""How questions and contexts become windows: against transformers' own truncation and its example's labels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase, XLMRobertaTokenizer

from bert_tasks.checkpoints.tokenizers import load_tokenizer
from bert_tasks.errors import UsageError
from bert_tasks.outputs.features import Feature
from bert_tasks.tasks.span_extraction import SpanExtraction
from bert_tasks.tasks.windows.contexts import tokenized_contexts
from bert_tasks.tasks.windows.words import cut, richest_windows
from support.small_tokenizers import LINES

KINDS = ("wordpiece_tokenizer", "bpe_tokenizer", "untrimmed_tokenizer", "unigram_tokenizer", "loaded_tokenizer")
SMALL = SpanExtraction.of(max_length=40, doc_stride=9, max_query_length=12)
LONG = " ".join(LINES[:4])
QUESTIONS = (
    ("when does it leave?", LONG),
    ("  who was told?", "The café\u0301 is   closed \n\n today."),
    ("", LINES[3]),
    ("why", ""),
    ("何時", "渡轮早上七点离开旧港口 😀👩‍👩‍👧 e\u0301nd"),
    ("a [SEP]?", "a[SEP]b</s>c <s> [CLS]"),
    ("where", LONG),
)
# What tokenizers treat in their own ways: case, accents, combining marks, wide characters, several code points in one
# picture, white space of many kinds, control and zero-width characters, special tokens.
PIECES = (
    "The",
    "ferry",
    "é",
    "e\u0301",
    "\u0301",
    "港",
    "口",
    "😀",
    "👩‍👩‍👧",
    "ﬁ",
    "½",
    "İ",
    "2.50",
    "can't",
    "[SEP]",
    "</s>",
)
GAPS = (" ", " ", "  ", "\n", "\t ", "\u00a0", "\u3000", "\u200b", "\x07", "", "")
Context = st.lists(st.tuples(st.sampled_from(PIECES), st.sampled_from(GAPS)), max_size=60).map(
    lambda parts: "".join(piece + gap for piece, gap in parts)
)


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    value: PreTrainedTokenizerBase = request.getfixturevalue(request.param)
    return value


@pytest.fixture(scope="module")
def untrimmed_tokenizer(bpe_folder: Path) -> PreTrainedTokenizerBase:
    """The byte-level BPE whose words begin with the space before them, also in characters."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(bpe_folder, trim_offsets=False)
    assert tokenizer("a  b", return_offsets_mapping=True)["offset_mapping"][1:-1] == [(0, 1), (1, 2), (2, 4)]
    return tokenizer


@pytest.fixture(scope="module")
def loaded_tokenizer(
    multilingual_tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory
) -> PreTrainedTokenizerBase:
    """XLM-RoBERTa's, in which a special token written in a text is no piece."""
    folder = tmp_path_factory.mktemp("loaded")
    multilingual_tokenizer.save_pretrained(folder)
    tokenizer = load_tokenizer(folder, vocab_size=len(multilingual_tokenizer))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def tokenizers(
    wordpiece_tokenizer: PreTrainedTokenizerBase,
    untrimmed_tokenizer: PreTrainedTokenizerBase,
    unigram_tokenizer: PreTrainedTokenizerBase,
    loaded_tokenizer: PreTrainedTokenizerBase,
) -> tuple[PreTrainedTokenizerBase, ...]:
    return wordpiece_tokenizer, untrimmed_tokenizer, unigram_tokenizer, loaded_tokenizer


def row(question: str, context: str, *answers: tuple[str, int]) -> dict[str, Any]:
    texts, starts = [text for text, _ in answers], [start for _, start in answers]
    return {"question": question, "context": context, "answers": {"text": texts, "answer_start": starts}}


def theirs(rows: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, task: SpanExtraction) -> Any:
    """The call of transformers' question-answering example."""
    return tokenizer(
        [row["question"].lstrip() for row in rows],
        [row["context"] for row in rows],
        truncation="only_second",
        max_length=task.max_length,
        stride=task.doc_stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        return_token_type_ids=True,
        split_special_tokens=True,
        padding=False,
    )


def triples(feature: Feature) -> list[tuple[int, ...]]:
    """Start character, end character and role of each token."""
    flat = feature["offsets"]
    assert flat is not None
    assert len(flat) == 3 * len(feature["input_ids"])
    return list(zip(flat[::3], flat[1::3], flat[2::3], strict=True))


def example_label(
    offsets: Sequence[tuple[int, int]], sides: Sequence[int | None], row: dict[str, Any]
) -> tuple[int, int]:
    """The rule of transformers' example: start and end token of the first answer, (0, 0) if not all inside.

    But for one slip in it: for an answer that begins with a window's last token its scan for the start runs on over
    special tokens and padding, whose offsets are 0. Here it ends with the context.
    """
    if not row["answers"]["text"] or 1 not in sides:
        return 0, 0
    start, text = row["answers"]["answer_start"][0], row["answers"]["text"][0]
    inside = [i for i, side in enumerate(sides) if side == 1]
    first, last = inside[0], inside[-1]
    if offsets[first][0] > start or offsets[last][1] < start + len(text):
        return 0, 0
    while first < len(offsets) and first <= inside[-1] and offsets[first][0] <= start:
        first += 1
    while last >= inside[0] and offsets[last][1] >= start + len(text):
        last -= 1
    return first - 1, last + 1


class TestWindows:
    @pytest.mark.parametrize(("max_length", "doc_stride"), [(40, 0), (40, 23), (24, 7), (400, 128)])
    def test_are_those_of_transformers(
        self, tokenizer: PreTrainedTokenizerBase, max_length: int, doc_stride: int
    ) -> None:
        task = SpanExtraction.of(max_length=max_length, doc_stride=doc_stride, max_query_length=12)
        rows = [row(question, context) for question, context in QUESTIONS]
        assert max(len(ids) for ids in tokenizer([r["question"] for r in rows])["input_ids"]) - 2 <= 12
        features, expected = task.features(rows, tokenizer), theirs(rows, tokenizer, task)
        assert [feature["input_ids"] for feature in features] == expected["input_ids"]
        segments = [feature["token_type_ids"] for feature in features]
        if isinstance(tokenizer, XLMRobertaTokenizer):  # it gives later windows others than the first
            assert {segment for window in segments for segment in window} == {0}
        else:
            assert segments == expected["token_type_ids"]
        assert [feature["row"] for feature in features] == expected["overflow_to_sample_mapping"]
        assert len(features) > len(rows) or max_length == 400
        for number, (feature, offsets) in enumerate(zip(features, expected["offset_mapping"], strict=True)):
            context = rows[feature["row"]]["context"]
            tokens = tokenizer.convert_ids_to_tokens(feature["input_ids"])
            for token, (start, end, role), side, (a, b) in zip(
                tokens, triples(feature), expected.sequence_ids(number), offsets, strict=True
            ):
                assert (role > 0) == (side == 1 and token != "▁" and context[a:b].strip() != "")
                assert (context[start:end] == context[a:b].strip()) if role else (start, end) == (-1, -1)

    def test_questions_are_cut_and_counted_once(self, tokenizer: PreTrainedTokenizerBase) -> None:
        rows = [row(LONG, LONG), row("who", LONG), row(LINES[0], "")]
        features = SMALL.features(rows, tokenizer)
        for number, question in enumerate((LONG, "who", LINES[0])):
            ids = tokenizer(question, add_special_tokens=False)["input_ids"]
            question_features = [feature for feature in features if feature["row"] == number]
            first, *others = [feature["lost_tokens"] for feature in question_features]
            assert first == max(0, len(ids) - 12)
            assert set(others) <= {0}
            assert all(feature["input_ids"][1:13] == ids[:12] for feature in question_features) or number == 1
            assert max(len(feature["input_ids"]) for feature in question_features) <= 40
        assert features[0]["lost_tokens"] > 0

    @pytest.mark.parametrize(("question", "context"), [("", ""), ("who", ""), ("", "here"), (" ", "\n \u3000")])
    def test_empty_texts_have_one_window(self, tokenizer: PreTrainedTokenizerBase, question: str, context: str) -> None:
        (feature,) = SMALL.features([row(question, context, ("here", 0))], tokenizer)
        assert len(feature["input_ids"]) >= 3
        assert feature["input_ids"][0] == tokenizer.cls_token_id
        visible = [context[start:end] for start, end, role in triples(feature) if role]
        assert "".join(visible) == context.strip()
        assert (feature["labels"] == [0.0, 0.0]) == (context.strip() == "")

    def test_settings_are_checked_with_the_tokenizers_special_tokens(self, tokenizer: PreTrainedTokenizerBase) -> None:
        task = SpanExtraction.of(max_length=40, max_query_length=12, doc_stride=24)
        if tokenizer.num_special_tokens_to_add(pair=True) == 4:
            with pytest.raises(UsageError, match="12 and 4 special tokens can overlap by 0 to 23 tokens"):
                task.features([row(LONG, LONG)], tokenizer)
        else:
            assert len(task.features([row(LONG, LONG)], tokenizer)) > 20


class TestContext:
    @given(tokens=st.integers(0, 90), capacity=st.integers(1, 30), overlap=st.integers(0, 29))
    @example(tokens=310, capacity=300, overlap=150)  # the last window is so much shorter that this decides
    def test_richest_window_is_that_of_the_original_code(self, tokens: int, capacity: int, overlap: int) -> None:
        windows = cut(range(tokens + 1), room=capacity, overlap=overlap % capacity)
        expected = []
        for token in range(tokens):
            best, index = None, None
            for number, window in enumerate(windows):
                if token in window:
                    score = min(token - window.start, window.stop - 1 - token) + 0.01 * len(window)
                    if best is None or score > best:
                        best, index = score, number
            expected.append(index)
        assert richest_windows(range(tokens + 1), windows, bonus=0.01).tolist() == expected

    @settings(max_examples=15, deadline=None)
    @given(context=Context, overlap=st.integers(0, 15))
    def test_every_token_is_scored_once_and_shows_its_characters(
        self, tokenizers: tuple[PreTrainedTokenizerBase, ...], context: str, overlap: int
    ) -> None:
        task = SpanExtraction.of(max_length=24, max_query_length=4, doc_stride=overlap)
        for tokenizer in tokenizers:
            whole = tokenized_contexts([context], tokenizer)[context]
            visible = sum(start < end for start, end in zip(whole.starts, whole.ends, strict=True))
            covered: set[int] = set()
            scored = 0
            for feature in task.features([row("who", context)], tokenizer):
                for start, end, role in triples(feature):
                    assert role in (0, 1, 2)
                    if not role:
                        assert (start, end) == (-1, -1)
                        continue
                    assert 0 <= start < end <= len(context)
                    assert context[start:end].strip() == context[start:end]
                    covered.update(range(start, end))
                    scored += role == 2
            assert scored == visible
            assert {i for i, character in enumerate(context) if character.isalnum()} <= covered


class TestLabels:
    @pytest.mark.parametrize("doc_stride", [0, 9, 20])
    def test_are_those_of_transformers_example(self, tokenizer: PreTrainedTokenizerBase, doc_stride: int) -> None:
        task = SpanExtraction.of(max_length=40, doc_stride=doc_stride, max_query_length=12)
        words = [(word, start) for start, word in _words(LONG)]
        answers = [
            *words[::3],
            (LONG[words[4][1] : words[9][1] - 1], words[4][1]),
            (LONG[:9], 0),
            (LONG[-12:], len(LONG) - 12),
        ]
        rows = [row("when does it leave?", LONG, answer, ("no", 99)) for answer in answers]
        rows += [row("who", LONG), row("who", LONG[3:], (LONG[10:14], 7))]
        expected = theirs(rows, tokenizer, task)
        labels = [
            example_label(offsets, expected.sequence_ids(number), rows[source])
            for number, (offsets, source) in enumerate(
                zip(expected["offset_mapping"], expected["overflow_to_sample_mapping"], strict=True)
            )
        ]
        assert [feature["labels"] for feature in task.features(rows, tokenizer)] == [
            list(map(float, pair)) for pair in labels
        ]
        assert sum(label == (0, 0) for label in labels) > len(rows)
        assert sum(label != (0, 0) for label in labels) > len(rows) // 2

    @settings(max_examples=15, deadline=None)
    @given(context=Context, data=st.data())
    def test_what_belongs_to_no_token_changes_no_label(
        self, tokenizers: tuple[PreTrainedTokenizerBase, ...], context: str, data: st.DataObject
    ) -> None:
        """White space around an answer, and characters that the tokenizer drops, are not part of what is trained."""
        for tokenizer in tokenizers:
            (whole,) = SpanExtraction.of(max_length=400).features([row("who", context)], tokenizer)
            spans = [(start, end) for start, end, role in triples(whole) if role]
            if not spans:
                continue
            start = data.draw(st.sampled_from(spans))[0]
            end = data.draw(st.sampled_from([last for _, last in spans if last > start]))
            covered = {position for first, last in spans for position in range(first, last)}
            wide_start, wide_end = start, end
            while wide_start > 0 and wide_start - 1 not in covered:
                wide_start -= 1
            while wide_end < len(context) and wide_end not in covered:
                wide_end += 1
            rows = [row("who", context, (context[a:b], a)) for a, b in ((start, end), (wide_start, wide_end))]
            features = SpanExtraction.of(max_length=24, max_query_length=4, doc_stride=6).features(rows, tokenizer)
            tight, wide = (
                [feature["labels"] for feature in features if feature["row"] == number] for number in range(2)
            )
            assert tight == wide

    @settings(max_examples=15, deadline=None)
    @given(context=Context, data=st.data())
    def test_an_answer_that_no_window_holds_is_counted(
        self, tokenizers: tuple[PreTrainedTokenizerBase, ...], context: str, data: st.DataObject
    ) -> None:
        task = SpanExtraction.of(max_length=16, max_query_length=4, doc_stride=data.draw(st.integers(0, 7)))
        start = data.draw(st.integers(0, len(context)))
        text = context[start : data.draw(st.integers(start, len(context)))]
        rows = [row("who", context), row("who", context, (text, start)), {"question": "who", "context": context}]
        for tokenizer in tokenizers:
            features = task.features(rows, tokenizer)
            windows = [feature for feature in features if feature["row"] == 1]
            held = any(feature["labels"] != [0.0, 0.0] for feature in windows)
            assert [feature["lost_answers"] for feature in windows] == [int(not held), *[0] * (len(windows) - 1)]
            assert sum(feature["lost_answers"] for feature in features) == int(not held)

    def test_of_shared_characters_run_forwards(self, bpe_tokenizer: PreTrainedTokenizerBase) -> None:
        """Every byte of the emoji is a token; the example's rule gives its last byte as start and its first as end."""
        context = "so 😀 then"
        (feature,) = SMALL.features([row("how", context, ("😀", 3))], bpe_tokenizer)
        assert feature["labels"] is not None
        start, end = map(int, feature["labels"])
        spans = triples(feature)
        assert start < end
        assert {context[a:b] for a, b, _ in spans[start : end + 1]} == {"😀"}
        assert [context[a:b] for a, b, _ in spans].count("😀") == end - start + 1

    def test_unlabelled_and_unanswerable_rows(self, wordpiece_tokenizer: PreTrainedTokenizerBase) -> None:
        unknown: dict[str, Any] = {"question": "who", "context": LONG}
        rows = [unknown, unknown | {"answers": None}, row("who", LONG)]
        features = SMALL.features(rows, wordpiece_tokenizer)
        labels = [[feature["labels"] for feature in features if feature["row"] == number] for number in range(3)]
        assert set(labels[0] + labels[1]) == {None}
        assert labels[2] == [[0.0, 0.0]] * len(labels[0])


def _words(text: str) -> list[tuple[int, str]]:
    places, position = [], 0
    for word in text.split(" "):
        places.append((position, word))
        position += len(word) + 1
    return places
