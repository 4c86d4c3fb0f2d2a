"""Windows of tokens that are cut at word borders, with the document around them.

Shape legend: W words of a row, N tokens of a window.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bert_tasks.errors import DataError
from bert_tasks.tasks.windows.frame import Frame

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class SubWords:
    """The sub-words of a row, at least one per word.

    Attributes:
        ids: The sub-words of all words, one after another.
        starts: ``[W + 1]`` where each word begins in ``ids``, and where the last one ends.
        lost: Number of sub-words that were left out, because their word fits into no window.
    """

    ids: Sequence[int]
    starts: Sequence[int]
    lost: int

    def shortened(self, longest: int) -> "SubWords":
        """Returns the sub-words with at most the first ``longest`` of each word."""
        ids: list[int] = []
        starts = [0]
        for start, end in pairwise(self.starts):
            ids += self.ids[start : min(end, start + longest)]
            starts.append(len(ids))
        return SubWords(ids=ids, starts=starts, lost=self.lost + len(self.ids) - len(ids))


@dataclass(frozen=True, kw_only=True)
class WordWindow:
    """Tokens that are run together, and the words that are read from them.

    Attributes:
        ids: ``[N]`` the tokens, special tokens included.
        token_type_ids: ``[N]`` the segment of each token.
        words: The numbers of the words that are read here, and in no other window of the same context.
        spans: For each of these words, the places of its tokens in ``ids``.
    """

    ids: list[int]
    token_type_ids: list[int]
    words: range
    spans: list[range]

    def gather_positions(self, *, first: bool) -> tuple[list[int], list[int]]:
        """Returns the tokens to read, all or the ``first`` of a word, and their words."""
        tokens: list[int] = []
        word_ids: list[int] = []
        for word, span in zip(self.words, self.spans, strict=True):
            read = span[:1] if first else span
            tokens += read
            word_ids += [word] * len(read)
        return tokens, word_ids


@dataclass(frozen=True, kw_only=True)
class WindowRules:
    """The layout of windows.

    ``document_windows`` cuts the words of rows by it. A word is read in one window, although windows may overlap.

    Attributes:
        prefix, suffix, room: The special tokens around each window, and the number of sub-words between them.
        overlap: Maximum number of sub-words that neighbouring windows of a row share.
        context: Maximum number of sub-words of the document on each side of a window.

    Examples:
        >>> rules = WindowRules.of(tokenizer, max_length=32, overlap=8)
    """

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    room: int
    overlap: int
    context: int

    @classmethod
    def of(
        cls, tokenizer: "PreTrainedTokenizerBase", *, max_length: int, overlap: int, context: int = 0
    ) -> "WindowRules":
        """Returns a tokenizer's rules, with its special tokens before and after a text.

        Args:
            tokenizer: The tokenizer, whose special tokens are read off a short text.
            max_length: Maximum length of a window in tokens, including special tokens.
            overlap: Maximum number of sub-words that neighbouring windows of a row share.
            context: Maximum number of sub-words of the document on each side of a window. Default: none.

        Raises:
            UsageError: The special tokens leave no room.
        """
        frame = Frame.of(tokenizer, texts=1)
        room = frame.room(max_length)
        return cls(prefix=frame.before, suffix=frame.after, room=room, overlap=overlap, context=context)


def split_words(
    sentences: Sequence[Sequence[str]], tokenizer: "PreTrainedTokenizerBase", *, longest: int
) -> list[SubWords]:
    """Returns the sub-words of each word, as transformers splits words behind a space.

    A task of one's own for words begins with it. A word keeps its first ``longest`` sub-words. A word without any, such
    as a control character, gets the unknown token. Special tokens stay plain words.

    Args:
        sentences: The words of each row.
        tokenizer: The tokenizer.
        longest: Maximum number of sub-words of a word, usually ``WindowRules.room``.

    Returns:
        The sub-words of each row, at least one for each word.

    Raises:
        DataError: A word has no sub-words and the tokenizer no unknown token.

    Examples:
        >>> (words,) = split_words([["Cold", "soup"]], tokenizer, longest=30)
    """
    # Byte-level BPE without ``add_prefix_space`` splits a word at the start of a text differently from one behind a
    # space. Pre-split words would all be split as starts of texts, which the model has hardly seen.
    alone = tokenizer("a", add_special_tokens=False)["input_ids"]
    behind = tokenizer(" a", add_special_tokens=False)["input_ids"]
    texts = [list(words) for words in sentences]
    if alone != behind:
        for words_of_row in texts:
            for number, word in enumerate(words_of_row):
                if word != "" and not word.startswith(" "):
                    words_of_row[number] = f" {word}"
    encoding = tokenizer(
        texts,
        is_split_into_words=True,
        add_special_tokens=False,
        split_special_tokens=True,
        return_attention_mask=False,
        padding=False,
        verbose=False,
    )
    rows = []
    for row, words in enumerate(sentences):
        pieces: list[list[int]] = [[] for _ in words]
        for token, word in zip(encoding["input_ids"][row], encoding.word_ids(row), strict=True):
            pieces[word].append(token)
        if not all(pieces) and tokenizer.unk_token_id is None:
            number = pieces.index([])
            raise DataError(
                f"word {number + 1}, {words[number]!r}, has no sub-words, and the tokenizer has no unknown token in "
                "its place. Remove the word, or set the tokenizer's unk_token"
            )
        ids: list[int] = []
        starts = [0]
        lost = 0
        for piece in pieces:
            if piece:
                ids += piece[:longest]
                lost += max(0, len(piece) - longest)
            else:
                ids.append(tokenizer.unk_token_id)
            starts.append(len(ids))
        rows.append(SubWords(ids=ids, starts=starts, lost=lost))
    return rows


def documents(names: Sequence[object], *, alone: bool) -> list[range]:
    """Returns the neighbouring rows of each document, or each row ``alone``."""
    starts: list[int] = []
    previous: object = None
    for row, name in enumerate(names):
        is_same_document = name is not None and name == previous
        if alone or not is_same_document:
            starts.append(row)
        previous = name
    return [range(start, end) for start, end in pairwise([*starts, len(names)])]


def document_windows(document: Sequence[SubWords], rules: WindowRules) -> Iterator[list[WordWindow]]:
    """Returns the windows of each row of a document, in the order of words.

    A window holds whole words of one row, and the words around them in the document, the row's other words first. A row
    that is longer than a window has several windows, and each of its words is read where it has the most context.

    Args:
        document: The sub-words of the rows of a document, or of a single row.
        rules: The layout of windows.

    Examples:
        >>> (windows,) = document_windows([words], rules)
    """
    stream = list(chain.from_iterable(row.ids for row in document))  # the tokens of the whole document
    before = 0  # the tokens of the rows before the present one
    for row in document:
        starts, windows = row.starts, []
        held = cut(starts, room=rules.room, overlap=rules.overlap)
        for words, read in zip(held, read_words(starts, held), strict=True):
            if len(held) > 1 and not read:
                continue  # its words have more context elsewhere
            first, end = before + starts[words.start], before + starts[words.stop]
            left, right = context_sizes(first, end, length=len(stream), room=rules.room, context=rules.context)
            shift = len(rules.prefix) + left - starts[words.start]  # from a place in the row to one in the window
            spans = [range(starts[word] + shift, starts[word + 1] + shift) for word in read]
            ids = [*rules.prefix, *stream[first - left : end + right], *rules.suffix]
            windows.append(WordWindow(ids=ids, token_type_ids=[0] * len(ids), words=read, spans=spans))
        yield windows
        before += len(row.ids)


def cut(starts: Sequence[int], *, room: int, overlap: int) -> list[range]:
    """Returns the units of each window, as many as fit.

    The next window begins at most ``overlap`` tokens before the end of a window.

    Args:
        starts: The start of each word, sentence or token, and the end of the last one. None is longer than ``room``.
    """
    windows, first = [], 0
    while True:
        # The last start that is at most ``room`` after the first one ends the window.
        end = bisect_right(starts, starts[first] + room) - 1
        windows.append(range(first, end))
        if end == len(starts) - 1:
            return windows
        # The next window must also hold the first word that this one could not.
        first = bisect_left(starts, max(starts[end] - overlap, starts[end + 1] - room))


def richest_windows(starts: Sequence[int], windows: Sequence[range], *, bonus: float = 0.0) -> NDArray[np.int64]:
    """Returns for each unit the window with the most context on its poorer side.

    Among equals it is the first window.

    Args:
        starts: As in ``cut``.
        windows: The units of each window.
        bonus: Weight of each token of a window. In the original BERT code it is 0.01.
    """
    places = np.asarray(starts)
    best, owner = np.full(len(places) - 1, -1.0), np.zeros(len(places) - 1, dtype=np.int64)
    # A later window takes a token only if it is better, so the first window wins among equals.
    for number, window in enumerate(windows):
        inside, first, end = slice(window.start, window.stop), places[window.start], places[window.stop]
        poorer_side = np.minimum(places[inside] - first, end - places[1:][inside])
        score = poorer_side + bonus * (end - first)
        better = score > best[inside]
        best[inside][better] = score[better]
        owner[inside][better] = number
    return owner


def read_words(starts: Sequence[int], windows: Sequence[range]) -> list[range]:
    """Returns for each window the words that have most context in it. Together the windows read every word once."""
    if len(windows) == 1:
        return list(windows)
    # The richest window never goes back from one word to the next, so the words of a window are neighbours.
    ends = np.searchsorted(richest_windows(starts, windows), range(len(windows) + 1)).tolist()
    return [range(first, end) for first, end in pairwise(ends)]


def context_sizes(first: int, end: int, *, length: int, room: int, context: int) -> tuple[int, int]:
    """Returns how many context tokens fit before ``first`` and after ``end - 1``."""
    left, right = min(context, first), min(context, length - end)  # what is there
    spare = room - (end - first)
    # Half of the room for each side, and what one side does not need for the other.
    taken = min(left, max(spare // 2, spare - right))
    return taken, min(right, spare - taken)
