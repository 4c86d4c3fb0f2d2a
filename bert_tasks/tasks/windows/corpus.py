"""Windows of a corpus, and pairs of segments for the objectives of two sentences.

A window with sentences holds sentences of one document that follow each other. Each epoch cuts it into two segments at
another position. The labels are those that transformers uses, 0 if the second segment follows the first, else 1.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from bert_tasks.errors import DataError, UsageError
from bert_tasks.outputs.features import NO_WORD, Feature
from bert_tasks.outputs.vocabulary import NO_PAIR, PAIR
from bert_tasks.tasks.windows.frame import Frame
from bert_tasks.tasks.windows.words import cut

IN_ORDER, NOT_IN_ORDER = 0.0, 1.0
SPLITTER = "sentencex"  # the library that cuts texts into sentences
_TRIES = 10_000  # draws of another document, which fail only if almost all windows are of one document


@dataclass(frozen=True, kw_only=True)
class DocumentTokens:
    """The tokens of a document without special tokens, and each token's word number."""

    ids: Sequence[int]
    words: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Window:
    """A sequence as the model gets it, without the special tokens around it.

    Attributes:
        document: The number of the document of its first token.
        ids: The tokens.
        words: The word of each token, ``NO_WORD`` for separators. A window of several documents numbers words from 0.
        starts: The first token of each sentence, if windows hold whole sentences.
    """

    document: int
    ids: Sequence[int]
    words: Sequence[int]
    starts: Sequence[int] = ()


def cut_documents(documents: Iterable[DocumentTokens], *, room: int, separator: int | None = None) -> Iterator[Window]:
    """Yields windows with every token of the documents once, in order.

    Windows are as full as whole words allow. Only a word that is longer than a window is cut. Without a separator, each
    window is of one document, and a document without tokens is an empty window.

    Args:
        documents: The documents.
        room: Number of tokens that a window can hold.
        separator: The token between two documents of a window, which continues after the end of a document (the
            FULL-SENTENCES of RoBERTa, Liu et al., arXiv:1907.11692, section 4.2). A window neither begins nor ends with
            a separator.
    """
    row, ids, words = 0, list[int](), list[int]()  # the window that is being filled
    for number, document in enumerate(documents):
        starts, first = fitting_starts(document.words, room), 0
        if separator is None:
            for units in cut(starts, room=room, overlap=0):
                span = slice(starts[units.start], starts[units.stop])
                yield Window(document=number, ids=document.ids[span], words=document.words[span])
            continue
        if not ids:  # a window belongs to the document of its first token
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
    """Returns starts of words and of pieces of long words, and the number of tokens."""
    starts: list[int] = []
    for start, end in pairwise([*word_starts(words), len(words)]):
        starts += range(start, end, room)  # one start, unless the word is longer than a window
    return [*starts, len(words)]


def word_starts(words: Sequence[int]) -> list[int]:
    """Returns the first token of each word."""
    # Before the first token stands a number that no word has, so that it begins a word, too.
    return np.flatnonzero(np.diff(np.asarray(words, dtype=np.int64), prepend=NO_WORD - 1)).tolist()


def _join_words(row: int, ids: list[int], words: list[int]) -> Window:
    """Returns the window of these tokens, without a separator at the end, with its words numbered from 0."""
    if words[-1:] == [NO_WORD]:
        ids, words = ids[:-1], words[:-1]
    if NO_WORD in words:
        numbers = np.asarray(words)
        is_start = (np.diff(numbers, prepend=NO_WORD) != 0) & (numbers != NO_WORD)
        words = np.where(numbers == NO_WORD, NO_WORD, np.cumsum(is_start) - 1).tolist()
    return Window(document=row, ids=ids, words=words)


def split_sentences(texts: Sequence[str], language: str) -> list[str]:
    """Returns the sentences of texts, as the library sentencex finds them.

    Args:
        texts: Texts that each end a sentence.
        language: The code of the language, such as "en". The library uses English rules for unknown languages.

    Raises:
        UsageError: The library is not installed.
    """
    if find_spec(SPLITTER) is None:
        raise UsageError(
            f"{SPLITTER} not installed, needed for sentence_language = {language!r}. Run `pip install "
            "'.[sentences]'`, or pass the sentences themselves"
        )
    from sentencex import segment

    sentences: list[str] = []
    for text in texts:
        stripped = [sentence.strip() for sentence in segment(language, text)]
        sentences += [sentence for sentence in stripped if sentence]
    return sentences


def sentence_windows(sentences: Sequence[DocumentTokens], *, document: int, room: int) -> Iterator[Window]:
    """Yields windows with as many whole sentences as fit into ``room`` tokens.

    Every token occurs once, in order. A sentence that is longer than a window is cut between words. A document without
    tokens is an empty window.
    """
    ids, words, starts = list[int](), list[int](), list[int]()
    number = 0  # of the first word of the next sentence, because each sentence numbers its words from 0
    for sentence in sentences:
        units = fitting_starts(sentence.words, room)
        # A sentence that is longer than a window begins several times, and each piece fits into a window.
        if sentence.ids:
            starts += [len(ids) + units[piece.start] for piece in cut(units, room=room, overlap=0)]
        ids += sentence.ids
        words += (word + number for word in sentence.words)
        number += max(sentence.words, default=-1) + 1
    starts.append(len(ids))
    for held in cut(starts, room=room, overlap=0):
        first, end = starts[held.start], starts[held.stop]
        inside = [start - first for start in starts[held.start : held.stop]]
        yield Window(document=document, ids=ids[first:end], words=words[first:end], starts=inside)


def pair_feature(
    feature: Feature,
    generator: np.random.Generator,
    corpus: Sequence[Mapping[str, Any]],
    frame: Frame,
    *,
    objective: Literal["nsp", "sop"],
    max_length: int,
) -> Feature:
    """Returns a window as a pair of segments, with its label in ``fields``.

    The window is cut between two of its sentences, each position being as likely. A window of one sentence is cut
    between two of its words, and a window of one word has no pair. With probability 1/2 the pair is not in order.
    ``sop`` then swaps the two segments, and ``nsp`` replaces the second by a segment of another document, which begins
    as the window is cut, at a sentence or within a sentence.

    Args:
        feature: A feature with ``sentence_starts``.
        generator: The generator of the feature.
        corpus: All features of the split, for segments of other documents.
        frame: The special tokens around a pair.
        objective: The training objective.
        max_length: Maximum length of the pair, with special tokens.

    Raises:
        DataError: The corpus has no other document.
    """
    ids, words, starts = _inner_tokens(feature)
    are_sentences = len(starts) > 1
    if not are_sentences:
        starts = word_starts(words)
    positions = starts[1:]  # where the second segment can begin
    if not positions:
        return {**feature, "fields": {PAIR: [NO_PAIR]}}
    cut = positions[generator.integers(len(positions))]
    chance = generator.random()
    first, second = (ids[:cut], words[:cut]), (ids[cut:], words[cut:])
    # BERT's negatives (nsp) come from another document, ALBERT's (sop) are the same segments in the wrong order, which
    # cannot be told by their topic (Lan et al., arXiv:1909.11942, section 3.1).
    label = NOT_IN_ORDER if chance < 0.5 else IN_ORDER
    if label == NOT_IN_ORDER and objective == "sop":
        first, second = second, first
    elif label == NOT_IN_ORDER:
        other = _inner_tokens(_other_document(feature, corpus, generator))
        room = max_length - frame.size - len(first[0])
        second = _segment(other, generator, at_sentence=are_sentences, length=len(second[0]), room=room)
    input_ids, types = frame.join(first[0], second[0])
    before = [NO_WORD] * len(frame.before)
    between = [NO_WORD] * len(frame.between)
    after = [NO_WORD] * len(frame.after)
    return {
        **feature,
        "input_ids": input_ids,
        "token_type_ids": types,
        "word_ids": [*before, *first[1], *between, *second[1], *after],
        "fields": {PAIR: [label]},
    }


_Inner = tuple[list[int], list[int], list[int]]  # tokens of a window, their words, and the starts of its sentences


def _inner_tokens(feature: Mapping[str, Any]) -> _Inner:
    """Returns tokens without special tokens at the ends, their words and sentences."""
    starts = [start - 1 for start in feature["sentence_starts"]]
    return feature["input_ids"][1:-1], feature["word_ids"][1:-1], starts


def _other_document(
    feature: Feature, corpus: Sequence[Mapping[str, Any]], generator: np.random.Generator
) -> Mapping[str, Any]:
    """Returns a window with tokens of another row, each being as likely."""
    # Drawn again until it fits. A list of all other windows would take memory and time with the size of the corpus.
    if corpus[0]["row"] != corpus[len(corpus) - 1]["row"]:  # rows ascend
        for _ in range(_TRIES):
            other = corpus[int(generator.integers(len(corpus)))]
            if other["row"] != feature["row"] and len(other["input_ids"]) > 2:
                return other
    raise DataError(
        "next sentence prediction needs a second document with text, from which it takes sentences that do not "
        'follow. Add documents, or set sentence_objective = "sop"'
    )


def _segment(
    window: _Inner, generator: np.random.Generator, *, at_sentence: bool, length: int, room: int
) -> tuple[list[int], list[int]]:
    """Returns whole sentences from a random position, of this length if possible."""
    ids, words, starts = window
    positions = starts if at_sentence else word_starts(words)
    first = positions[generator.integers(len(positions))]
    ends = [start for start in starts if start > first]
    ends.append(len(ids))
    long_enough = [end for end in ends if end - first >= length]
    end = min(long_enough, default=ends[-1])
    if end - first <= room:
        return ids[first:end], words[first:end]
    # As many whole sentences as fit, else as many whole words, else a part of a word.
    whole = [end for end in ends if end - first <= room]
    between = [token for token in word_starts(words) if first < token <= first + room]
    end = max(whole, default=max(between, default=first + room))
    return ids[first:end], words[first:end]
