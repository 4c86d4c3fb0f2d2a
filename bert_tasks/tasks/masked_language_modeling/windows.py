"""Windows of a corpus: how the tokens of documents are cut into the sequences that a model is trained on.

Owns where windows begin and end, as arithmetic of token ids and word numbers. It knows neither texts nor masks.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from bert_tasks.tasks.masked_language_modeling.masking import NO_WORD
from bert_tasks.tasks.shared.windows import WindowRules


@dataclass(frozen=True, kw_only=True)
class DocumentTokens:
    """The tokens of a document, without special tokens, and the number of the word that each is of, which rise."""

    ids: Sequence[int]
    words: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Window:
    """A sequence as the model gets it.

    Attributes:
        document: the number of the document that its first token is of.
        ids: with special tokens.
        word_ids: the word of each token, ``NO_WORD`` for special tokens. A window of one document has the document's
            numbers; in one of several documents words are numbered from 0.
    """

    document: int
    ids: list[int] = field(default_factory=list)
    word_ids: list[int] = field(default_factory=list)


def cut_documents(
    documents: Iterable[DocumentTokens], rules: WindowRules, *, separator: int | None = None
) -> Iterator[Window]:
    """Windows that hold every token of the documents once, in order.

    Each is as full as whole words allow; only a word that is longer than a window is cut. Documents are read one by
    one, so memory holds one of them.

    Args:
        documents: the documents.
        rules: the special tokens around a window and the room between them; windows neither overlap nor share context.
        separator: the token between two documents of a window, which continues after the end of a document (the
            FULL-SENTENCES of RoBERTa, Liu et al., arXiv:1907.11692, section 4.2); a window neither begins nor ends with
            one. None: each window is of one document, and a document without tokens is a window without any.

    Yields:
        The windows; at least one for each document, or with a separator at least one for all.
    """
    window: Window | None = None
    for number, document in enumerate(documents):
        if window is None or separator is None or not window.ids:
            window = Window(document=number)
        elif document.ids:
            window.ids.append(separator)
            window.word_ids.append(NO_WORD)
        starts, first = _starts(document.words, rules.room), 0
        while starts[first] < len(document.ids):
            end = bisect_right(starts, starts[first] + rules.room - len(window.ids)) - 1
            if end <= first:  # no word fits any more
                yield _finished(window, rules)
                window = Window(document=number)
                continue
            window.ids.extend(document.ids[starts[first] : starts[end]])
            window.word_ids.extend(document.words[starts[first] : starts[end]])
            first = end
        if separator is None:
            yield _finished(window, rules)
    if window is not None and separator is not None:
        yield _finished(window, rules)


def _starts(words: Sequence[int], room: int) -> list[int]:
    """Where windows may begin, and the number of tokens: at each word, and within a word longer than a window."""
    numbers = np.asarray(words, dtype=np.int64)
    starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
    cut = [place for start, end in pairwise(starts) for place in range(start, end, room)]
    return [*cut, len(numbers)]


def _finished(window: Window, rules: WindowRules) -> Window:
    """The window with its special tokens, without a separator at its end; words of documents are numbered together."""
    ids, words = window.ids, window.word_ids
    if words[-1:] == [NO_WORD]:
        ids, words = ids[:-1], words[:-1]
    if NO_WORD in words:
        given = np.asarray(words)
        numbers = np.cumsum((np.diff(given, prepend=NO_WORD) != 0) & (given != NO_WORD)) - 1
        words = np.where(given == NO_WORD, NO_WORD, numbers).tolist()
    return Window(
        document=window.document,
        ids=[*rules.prefix, *ids, *rules.suffix],
        word_ids=[NO_WORD] * len(rules.prefix) + words + [NO_WORD] * len(rules.suffix),
    )
