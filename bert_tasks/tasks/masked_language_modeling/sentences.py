"""Pairs of segments: what next sentence prediction and sentence order prediction are learnt from.

Owns how a document's sentences become windows, and how a window becomes a pair. A window holds sentences of one
document that follow each other; each epoch cuts it into two segments elsewhere.

The labels are transformers': 0 where the second segment follows the first, 1 where it does not.
"""

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np

from bert_tasks.errors import DataError, UsageError
from bert_tasks.tasks.base import Feature
from bert_tasks.tasks.masked_language_modeling.masking import NO_WORD
from bert_tasks.tasks.masked_language_modeling.windows import DocumentTokens, Window, fitting_starts, word_starts
from bert_tasks.tasks.shared.windows import PairFrame, cut

PAIR = "pair"  # the name in ``Feature.fields``
IN_ORDER, NOT_IN_ORDER, NO_PAIR = 0.0, 1.0, -1.0
SPLITTER = "sentencex"  # the library that cuts texts into sentences
_TRIES = 10_000


def split_sentences(texts: Sequence[str], language: str) -> list[str]:
    """The sentences of texts, as the library sentencex finds them.

    Args:
        texts: each ends a sentence.
        language: its code, such as "en"; the library has rules for English where it does not know the language.

    Raises:
        UsageError: the library is not installed.
    """
    if find_spec(SPLITTER) is None:
        raise UsageError(
            f"{SPLITTER} not installed, needed for sentence_language = {language!r}: pip install "
            "'.[sentences]', or give the sentences themselves"
        )
    from sentencex import segment

    return [stripped for text in texts for sentence in segment(language, text) if (stripped := sentence.strip())]


def sentence_windows(sentences: Sequence[DocumentTokens], *, document: int, room: int) -> Iterator[Window]:
    """The sentences of a document in windows of at most ``room`` tokens: every token once, in order.

    A window holds as many whole sentences as fit. A sentence that is longer than a window is cut between words. A
    document without tokens is one window without any.
    """
    ids, words, starts, number = list[int](), list[int](), list[int](), 0
    for sentence in sentences:
        units = fitting_starts(sentence.words, room)
        if sentence.ids:
            starts += [len(ids) + units[part.start] for part in cut(units, room=room, overlap=0)]
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
    frame: PairFrame,
    *,
    objective: Literal["nsp", "sop"],
    max_length: int,
) -> Feature:
    """The window as a pair of segments.

    It is cut between two of its sentences, each place being as likely; a window of one sentence is cut between two of
    its words. With probability 1/2 the pair is not in order: ``sop`` swaps the two segments, and ``nsp`` replaces the
    second by a segment of another document, which begins as the window is cut, at a sentence or within one. A window of
    one word cannot be cut: it has no pair and counts for masked tokens only.

    Args:
        feature: with ``sentence_starts``.
        generator: of the feature.
        corpus: all features of the split, for segments of other documents.
        frame: The special tokens around a pair.
        objective: what is learnt.
        max_length: of the pair, with special tokens.

    Returns:
        The feature of the pair, whose ``fields`` hold its label.

    Raises:
        DataError: the corpus has no other document.
    """
    ids, words, starts = _inner(feature)
    are_sentences = len(starts) > 1
    places = starts[1:] if are_sentences else word_starts(words)[1:]
    if not places:
        return {**feature, "fields": {PAIR: [NO_PAIR]}}
    cut, chance = places[generator.integers(len(places))], generator.random()
    first, second = (ids[:cut], words[:cut]), (ids[cut:], words[cut:])
    label = NOT_IN_ORDER if chance < 0.5 else IN_ORDER
    if label == NOT_IN_ORDER and objective == "sop":
        first, second = second, first
    elif label == NOT_IN_ORDER:
        other = _inner(_of_another_document(feature, corpus, generator))
        room = max_length - frame.size - len(first[0])
        second = _segment(other, generator, at_sentence=are_sentences, length=len(second[0]), room=room)
    input_ids, types = frame.join(first[0], second[0])
    before, between, after = ([NO_WORD] * len(part) for part in (frame.before, frame.between, frame.after))
    word_ids = [*before, *first[1], *between, *second[1], *after]
    return {
        **feature,
        "input_ids": input_ids,
        "token_type_ids": types,
        "word_ids": word_ids,
        "fields": {PAIR: [label]},
    }


_Inner = tuple[list[int], list[int], list[int]]
_Segment = tuple[list[int], list[int]]


def _inner(feature: Mapping[str, Any]) -> _Inner:
    """The tokens of a window without the special token at each end, their words, and where sentences begin."""
    starts = [start - 1 for start in feature["sentence_starts"]]
    return feature["input_ids"][1:-1], feature["word_ids"][1:-1], starts


def _of_another_document(
    feature: Feature, corpus: Sequence[Mapping[str, Any]], generator: np.random.Generator
) -> Mapping[str, Any]:
    """A window with tokens of another row, each being as likely."""
    if corpus[0]["row"] != corpus[len(corpus) - 1]["row"]:  # rows ascend
        for _ in range(_TRIES):
            other = corpus[int(generator.integers(len(corpus)))]
            if other["row"] != feature["row"] and len(other["input_ids"]) > 2:
                return other
    raise DataError(
        "next sentence prediction needs a second document with text, from which sentences that do not follow are "
        'taken; give more documents, or set sentence_objective = "sop"'
    )


def _segment(window: _Inner, generator: np.random.Generator, *, at_sentence: bool, length: int, room: int) -> _Segment:
    """Whole sentences of a window from a random place on, until they have the wanted length and as far as they fit."""
    ids, words, starts = window
    word_places = word_starts(words)
    places = starts if at_sentence else word_places
    first = places[generator.integers(len(places))]
    ends = [*(start for start in starts if start > first), len(ids)]
    end = next((place for place in ends if place - first >= length), ends[-1])
    if end - first > room:
        whole = [place for place in ends if place - first <= room]
        between = [place for place in word_places if first < place <= first + room]
        end = max(whole, default=max(between, default=first + room))
    return ids[first:end], words[first:end]
