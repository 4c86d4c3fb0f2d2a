"""Windows of a corpus: every token once and in order, as full as whole words allow."""

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_tasks.tasks.masked_language_modeling.masking import NO_WORD
from bert_tasks.tasks.masked_language_modeling.windows import DocumentTokens, Window, cut_documents
from bert_tasks.tasks.word_windows import WindowRules

CLS, SEP = 1, 2


def rules(room: int) -> WindowRules:
    return WindowRules(prefix=(CLS,), suffix=(SEP,), room=room, overlap=0, context=0)


def documents_of(lengths: Sequence[Sequence[int]]) -> list[DocumentTokens]:
    """Documents of words of so many tokens, each token with an id of its own."""
    made, token = [], 10
    for words in lengths:
        ids = list(range(token, token + sum(words)))
        token += len(ids)
        made.append(DocumentTokens(ids=ids, words=[word for word, count in enumerate(words) for _ in range(count)]))
    return made


def content(window: Window) -> list[int]:
    assert (window.ids[0], window.ids[-1], window.word_ids[0], window.word_ids[-1]) == (CLS, SEP, NO_WORD, NO_WORD)
    assert len(window.ids) == len(window.word_ids)
    return window.ids[1:-1]


CORPORA = st.lists(st.lists(st.integers(1, 9), max_size=8), max_size=8)


@given(lengths=CORPORA, room=st.integers(1, 12), across=st.booleans())
def test_windows_hold_every_token_once_and_in_order(lengths: Sequence[Sequence[int]], room: int, across: bool) -> None:
    documents = documents_of(lengths)
    windows = list(cut_documents(documents, rules(room), separator=SEP if across else None))
    held = [content(window) for window in windows]
    assert [token for ids in held for token in ids if token != SEP] == [token for one in documents for token in one.ids]
    assert all(len(ids) <= room for ids in held)
    # Words are whole where they fit, and a window has no room for the first word of the next one.
    word_of = {
        token: (number, word)
        for number, one in enumerate(documents)
        for token, word in zip(one.ids, one.words, strict=True)
    }
    for before, after in pairwise(held):
        if not (before and after) or (not across and word_of[before[0]][0] != word_of[after[0]][0]):
            continue
        word = [token for token in word_of if word_of[token] == word_of[after[0]]]
        if len(word) <= room:
            assert after[0] == word[0]
        joins = word_of[before[-1]][0] != word_of[after[0]][0]
        assert len(before) + joins + min(len(word), room) > room
    for window, ids in zip(windows, held, strict=True):
        if ids:
            assert window.document == word_of[ids[0]][0]
        words = [(word_of[token] if token != SEP else None) for token in ids]
        numbers = window.word_ids[1:-1]
        assert [len(list(group)) for _, group in groupby(words)] == [len(list(group)) for _, group in groupby(numbers)]
        assert all((word is None) == (number == NO_WORD) for word, number in zip(words, numbers, strict=True))
        kept = [number for number in numbers if number != NO_WORD]
        assert kept == sorted(kept)


@given(lengths=CORPORA, room=st.integers(1, 12))
def test_inside_documents_each_has_its_own_windows(lengths: Sequence[Sequence[int]], room: int) -> None:
    documents = documents_of(lengths)
    windows = list(cut_documents(documents, rules(room)))
    assert sorted({window.document for window in windows}) == list(range(len(documents)))
    for window in windows:
        one = documents[window.document]
        assert set(content(window)) <= set(one.ids)
        first = one.ids.index(window.ids[1]) if len(window.ids) > 2 else 0
        assert window.word_ids[1:-1] == list(one.words[first : first + len(window.ids) - 2])


def test_a_separator_stands_between_documents_and_never_at_an_edge() -> None:
    documents = documents_of([[1, 1], [], [2], [1, 1, 1]])  # ids 10 11, none, 12 13, 14 15 16
    cut = [window.ids[1:-1] for window in cut_documents(documents, rules(5), separator=SEP)]
    assert cut == [[10, 11, SEP, 12, 13], [14, 15, 16]]
    wide = list(cut_documents(documents, rules(20), separator=SEP))
    assert [window.ids[1:-1] for window in wide] == [[10, 11, SEP, 12, 13, SEP, 14, 15, 16]]
    assert wide[0].word_ids[1:-1] == [0, 1, NO_WORD, 2, 2, NO_WORD, 3, 4, 5]


@pytest.mark.parametrize("separator", [None, SEP])
def test_a_document_without_tokens_is_a_window_without_any(separator: int | None) -> None:
    empty = documents_of([[], []])
    assert [window.ids for window in cut_documents(empty, rules(4), separator=separator)] == [[CLS, SEP]] * (
        2 if separator is None else 1
    )


def test_documents_are_read_one_by_one() -> None:
    read = []

    def corpus() -> Iterator[DocumentTokens]:
        for number, one in enumerate(documents_of([[1] * 8] * 3)):
            read.append(number)
            yield one

    windows = cut_documents(corpus(), rules(4), separator=SEP)
    next(windows)
    assert read == [0]
