"""How words become sub-words and windows, against transformers' own splitting and against what windows promise."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from bert_tasks.errors import DataError
from bert_tasks.outputs.features import word_starts
from bert_tasks.tasks.windows.words import (
    SubWords,
    WindowRules,
    context_sizes,
    cut,
    document_windows,
    documents,
    read_words,
    split_words,
)
from support.small_tokenizers import LINES

KINDS = ("wordpiece", "bpe", "unigram")
SENTENCE = LINES[1].split()
ODD_WORDS = [
    "",
    "\u200b",
    "日本",
    "😀x",
    "café",
    "<s>",
    "[SEP]",
    "<unk>",
    "a\u00a0b",
    "   ",
    " x",
    "\x00",
    "doesn't",
    "C++",
]

LENGTHS = st.lists(st.integers(1, 7), max_size=40)


@pytest.fixture(scope="module", params=KINDS)
def name(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


@pytest.fixture(scope="module")
def tokenizer(name: str, by_kind: dict[str, PreTrainedTokenizerBase]) -> PreTrainedTokenizerBase:
    return by_kind[name]


@pytest.fixture(scope="module")
def reference(name: str, by_kind: dict[str, PreTrainedTokenizerBase], bpe_folder: str) -> PreTrainedTokenizerBase:
    """What transformers' examples use for pre-split words: byte-level BPE is loaded with ``add_prefix_space``."""
    return AutoTokenizer.from_pretrained(bpe_folder, add_prefix_space=True) if name == "bpe" else by_kind[name]


def aligned(words: Sequence[str], reference: PreTrainedTokenizerBase) -> list[list[int]]:
    """The sub-words of each word by transformers' ``word_ids``, the unknown token where there are none."""
    encoding = reference(words, is_split_into_words=True, add_special_tokens=False, split_special_tokens=True)
    tokens_by_word: list[list[int]] = [[] for _ in words]
    for token, word in zip(encoding["input_ids"], encoding.word_ids(), strict=True):
        tokens_by_word[word].append(token)
    return [piece if piece else [reference.unk_token_id] for piece in tokens_by_word]


def pieces(split: SubWords) -> list[list[int]]:
    return [list(split.ids[start:end]) for start, end in pairwise(split.starts)]


class TestSubWords:
    def test_are_those_of_transformers(
        self, tokenizer: PreTrainedTokenizerBase, reference: PreTrainedTokenizerBase
    ) -> None:
        sentences = [[], *[line.split() for line in LINES[:6]], ODD_WORDS, SENTENCE[:1]]
        tokens_by_word = split_words(sentences, tokenizer, longest=100)
        for words, split in zip(sentences, tokens_by_word, strict=True):
            assert pieces(split) == (aligned(words, reference) if words else [])
            assert split.lost == 0

    @settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(words=st.lists(st.text(max_size=6), min_size=1, max_size=6))
    def test_every_word_has_some(
        self, tokenizer: PreTrainedTokenizerBase, reference: PreTrainedTokenizerBase, words: list[str]
    ) -> None:
        (split,) = split_words([words], tokenizer, longest=100)
        assert pieces(split) == aligned(words, reference)

    @pytest.mark.parametrize("name", ["bpe", "modern", "llama", "gemma"])
    def test_of_sentences_are_those_of_their_text(self, name: str, by_kind: dict[str, PreTrainedTokenizerBase]) -> None:
        """Tokenizers for which a space belongs to the word behind it, with and without ``add_prefix_space``."""
        tokenizer = by_kind[name]
        sentences = [line.split() for line in LINES]
        for line, row in zip(LINES, split_words(sentences, tokenizer, longest=50), strict=True):
            assert row.ids == tokenizer(f" {line}", add_special_tokens=False)["input_ids"]
            stock = tokenizer(line.split(), is_split_into_words=True, add_special_tokens=False)["input_ids"]
            assert row.ids != stock  # where each word is the start of a text

    def test_longer_words_are_cut_and_counted(self, tokenizer: PreTrainedTokenizerBase) -> None:
        words = ["a", "mushrooms" * 4, "", "grandmother" * 5]
        (full,), (short,) = (split_words([words], tokenizer, longest=longest) for longest in (1000, 6))
        assert pieces(short) == [piece[:6] for piece in pieces(full)]
        assert short.lost == len(full.ids) - len(short.ids) > 0
        assert full.lost == 0

    def test_a_tokenizer_without_unknown_token_is_refused_where_it_is_needed(
        self, bpe_folder: str, wordpiece_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        lacking = AutoTokenizer.from_pretrained(bpe_folder)
        lacking.unk_token = None
        assert split_words([["the"]], lacking, longest=9)[0].lost == 0
        with pytest.raises(DataError, match="word 2, '', has no sub-words, and the tokenizer has no unknown token"):
            split_words([["the", ""]], lacking, longest=9)


def starts_of(lengths: Sequence[int]) -> list[int]:
    return list(accumulate(lengths, initial=0))


class TestCut:
    @settings(max_examples=30, deadline=None)
    @given(LENGTHS, st.integers(7, 20), st.integers(0, 19))
    def test_windows_fit_overlap_and_hold_all_words(self, lengths: list[int], room: int, overlap: int) -> None:
        starts = starts_of(lengths)
        windows = cut(starts, room=room, overlap=overlap)
        assert windows[0].start == 0
        assert windows[-1].stop == len(lengths)
        for window in windows:
            assert starts[window.stop] - starts[window.start] <= room
        for before, after in pairwise(windows):
            assert before.start < after.start <= before.stop < after.stop
            assert starts[before.stop] - starts[after.start] <= overlap
            one_more = sum(lengths[before.start : before.stop + 1])
            assert one_more > room
            earlier = after.start - 1  # it would have overlapped too much, or not held the next word
            assert starts[before.stop] - starts[earlier] > overlap or starts[before.stop + 1] - starts[earlier] > room
        if sum(lengths) <= room:
            assert windows == [range(len(lengths))]

    @settings(max_examples=30, deadline=None)
    @given(LENGTHS, st.integers(7, 20), st.integers(0, 19))
    def test_each_word_is_read_once_where_it_has_most_context(
        self, lengths: list[int], room: int, overlap: int
    ) -> None:
        starts = starts_of(lengths)
        windows = cut(starts, room=room, overlap=overlap)
        read = read_words(starts, windows)
        assert [word for words in read for word in words] == list(range(len(lengths)))
        for window, words in zip(windows, read, strict=True):
            for word in words:
                sides = {
                    other: min(starts[word] - starts[other.start], starts[other.stop] - starts[word + 1])
                    for other in windows
                    if word in other
                }
                best = max(sides.values())
                assert window == next(other for other in windows if sides.get(other) == best)


class TestContext:
    @settings(max_examples=30, deadline=None)
    @given(st.integers(0, 50), st.integers(0, 20), st.integers(0, 50), st.integers(0, 30), st.integers(0, 30))
    def test_sizes(self, first: int, held: int, after: int, spare: int, context: int) -> None:
        left, right = context_sizes(
            first, first + held, length=first + held + after, room=held + spare, context=context
        )
        assert 0 <= left <= min(context, first)
        assert 0 <= right <= min(context, after)
        assert left + right == min(spare, min(context, first) + min(context, after))
        if min(context, first) >= spare // 2 and min(context, after) >= (spare + 1) // 2:
            assert left == spare // 2

    def test_documents(self) -> None:
        assert documents(["a", "a", "b", None, None, "a"], alone=False) == [
            range(2),
            range(2, 3),
            range(3, 4),
            range(4, 5),
            range(5, 6),
        ]
        assert documents(["a", "a"], alone=True) == [range(1), range(1, 2)]
        assert documents([], alone=False) == []

    @settings(max_examples=25, deadline=None)
    @given(st.lists(LENGTHS, min_size=1, max_size=5), st.integers(7, 16), st.integers(0, 12), st.integers(0, 20))
    def test_windows_are_slices_of_the_document(
        self, rows: list[list[int]], room: int, overlap: int, context: int
    ) -> None:
        """Tokens are numbered over the document, so that each window says where it comes from."""
        offsets = starts_of([sum(lengths) for lengths in rows])
        document = [
            SubWords(ids=range(offset, offset + sum(lengths)), starts=starts_of(lengths), lost=0)
            for offset, lengths in zip(offsets, rows, strict=False)
        ]
        rules = WindowRules(prefix=(-1,), suffix=(-2,), room=room, overlap=overlap, context=context)
        by_row = list(document_windows(document, rules))
        assert len(by_row) == len(rows)
        for windows, row, offset in zip(by_row, document, offsets, strict=False):
            assert [word for window in windows for word in window.words] == list(range(len(row.starts) - 1))
            assert len(windows) >= 1
            for window in windows:
                assert (window.ids[0], window.ids[-1]) == (-1, -2)
                inner = window.ids[1:-1]
                assert len(inner) <= room
                assert inner == list(range(inner[0], inner[0] + len(inner))) if inner else True
                for word, span in zip(window.words, window.spans, strict=True):
                    assert window.ids[span.start : span.stop] == list(row.ids[row.starts[word] : row.starts[word + 1]])
                if not context and inner:
                    assert offset <= inner[0] <= inner[-1] < offset + len(row.ids)

    def test_nearest_tokens_of_the_neighbours_fill_the_window(self) -> None:
        document = [
            SubWords(ids=range(start, start + size), starts=range(size + 1), lost=0)
            for start, size in ((0, 10), (10, 4), (14, 20))
        ]
        rules = WindowRules(prefix=(-1,), suffix=(-2,), room=12, overlap=2, context=6)
        by_row = list(document_windows(document, rules))
        assert [window.ids for window in by_row[0]] == [[-1, *range(12), -2]]
        (middle,) = by_row[1]
        assert middle.ids == [-1, *range(6, 18), -2]
        assert middle.gather_positions(first=False) == ([5, 6, 7, 8], [0, 1, 2, 3])
        assert [window.ids[1] for window in by_row[2]] == [14, 22]
        assert by_row[2][-1].ids == [-1, *range(22, 34), -2]


def test_word_starts() -> None:
    assert word_starts([0, 0, 1, 3, 3, 3]) == [True, False, True, True, False, False]
    assert word_starts([4]) == [True]
    assert word_starts([]) == word_starts(None) == []
