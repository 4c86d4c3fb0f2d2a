"""Windows of a corpus: how the tokens of documents are cut into the sequences that a model is trained on.

Owns where windows begin and end, as arithmetic of token ids and word numbers. It knows neither texts nor masks.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from bert_tasks.tasks.masked_language_modeling.masking import NO_WORD
from bert_tasks.tasks.shared.windows import cut


@dataclass(frozen=True, kw_only=True)
class DocumentTokens:
    """The tokens of a document, without special tokens, and the number of the word that each is of, which rise."""

    ids: Sequence[int]
    words: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Window:
    """A sequence as the model gets it, without the special tokens around it.

    Attributes:
        document: The number of the document that its first token is of.
        ids: The tokens.
        words: The word of each token, ``NO_WORD`` for separators. A window of one document has the document's numbers.
            In a window of several documents words are numbered from 0.
        starts: If windows hold whole sentences, where these begin.
    """

    document: int
    ids: Sequence[int]
    words: Sequence[int]
    starts: Sequence[int] = ()


def cut_documents(documents: Iterable[DocumentTokens], *, room: int, separator: int | None = None) -> Iterator[Window]:
    """Windows that hold every token of the documents once, in order.

    Each is as full as whole words allow. Only a word that is longer than a window is cut. Documents are read one by
    one, so memory holds one of them.

    Args:
        documents: The documents.
        room: Number of tokens that a window can hold.
        separator: The token between two documents of a window, which continues after the end of a document (the
            FULL-SENTENCES of RoBERTa, Liu et al., arXiv:1907.11692, section 4.2). A window neither begins nor ends with
            one. None: each window is of one document, and a document without tokens is a window without any.

    Yields:
        The windows; at least one for each document, or with a separator at least one for all.
    """
    row, ids, words = 0, list[int](), list[int]()
    for number, document in enumerate(documents):
        starts, first = fitting_starts(document.words, room), 0
        if separator is None:
            for held in cut(starts, room=room, overlap=0):
                tokens = slice(starts[held.start], starts[held.stop])
                yield Window(document=number, ids=document.ids[tokens], words=document.words[tokens])
            continue
        if not ids:
            row = number
        elif document.ids:
            ids.append(separator)
            words.append(NO_WORD)
        while starts[first] < len(document.ids):
            end = bisect_right(starts, starts[first] + room - len(ids)) - 1
            if end <= first:  # no word fits any more
                yield _join_words(row, ids, words)
                row, ids, words = number, [], []
            else:
                ids += document.ids[starts[first] : starts[end]]
                words += document.words[starts[first] : starts[end]]
                first = end
    if separator is not None:
        yield _join_words(row, ids, words)


def fitting_starts(words: Sequence[int], room: int) -> list[int]:
    """Where windows may begin, and the number of tokens: at each word, and within a word longer than a window."""
    starts = [*word_starts(words), len(words)]
    return [*(place for start, end in pairwise(starts) for place in range(start, end, room)), len(words)]


def word_starts(words: Sequence[int]) -> list[int]:
    """Where words begin."""
    return np.flatnonzero(np.diff(np.asarray(words, dtype=np.int64), prepend=NO_WORD - 1)).tolist()


def _join_words(row: int, ids: list[int], words: list[int]) -> Window:
    """A window without a separator at its end, whose words are numbered together if they are of several documents."""
    if words[-1:] == [NO_WORD]:
        ids, words = ids[:-1], words[:-1]
    if NO_WORD in words:
        numbers = np.asarray(words)
        is_start = (np.diff(numbers, prepend=NO_WORD) != 0) & (numbers != NO_WORD)
        words = np.where(numbers == NO_WORD, NO_WORD, np.cumsum(is_start) - 1).tolist()
    return Window(document=row, ids=ids, words=words)
