"""Pairs of segments: what next sentence prediction and sentence order prediction are learnt from.

Owns how a document's sentences become windows, and how a window becomes a pair. A window holds sentences of one
document that follow each other; each epoch cuts it into two segments elsewhere.

The labels are those of transformers: 0 where the second segment follows the first, 1 where it does not.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from bert_tasks.errors import DataError, UsageError
from bert_tasks.tasks.base import Feature
from bert_tasks.tasks.masked_language_modeling.masking import NO_WORD
from bert_tasks.tasks.masked_language_modeling.windows import DocumentTokens

PAIR = "pair"  # the name in ``Feature.fields``
IN_ORDER, NOT_IN_ORDER, NO_PAIR = 0.0, 1.0, -1.0
SPLITTER = "sentencex"  # the library that cuts texts into sentences
_TRIES = 10_000


@dataclass(frozen=True, kw_only=True)
class PairTemplate:
    """The special tokens of a pair, and the segment ids of all its tokens.

    Attributes:
        before, between, after: special tokens around the two segments.
        types: segment ids of five parts: ``before``, the first segment, ``between``, the second, and ``after``.
        single: how many special tokens stand before and after a window that is no pair.
    """

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    types: tuple[int, int, int, int, int]
    single: tuple[int, int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "PairTemplate":
        """What the tokenizer makes of a pair."""
        return _template_of(tokenizer)

    @property
    def size(self) -> int:
        """The number of special tokens."""
        return len(self.before) + len(self.between) + len(self.after)


@lru_cache(maxsize=8)
def _template_of(tokenizer: PreTrainedTokenizerBase) -> PairTemplate:
    encoding = tokenizer("a", "a", return_token_type_ids=True, truncation=False, padding=False)
    alone = tokenizer("a", truncation=False, padding=False).sequence_ids(0)
    ids, types, sides = encoding["input_ids"], encoding["token_type_ids"], encoding.sequence_ids(0)
    first, end = sides.index(0), sides.index(1)  # where the first segment begins, and the second
    middle = end - next(place for place, side in enumerate(reversed(sides[:end])) if side == 0)
    last = len(sides) - next(place for place, side in enumerate(reversed(sides)) if side == 1)
    return PairTemplate(
        before=tuple(ids[:first]),
        between=tuple(ids[middle:end]),
        after=tuple(ids[last:]),
        types=tuple([*types, types[end]][place] for place in (0, first, middle, end, last)),
        single=(alone.index(0), alone[::-1].index(0)),
    )


@dataclass(frozen=True, kw_only=True)
class Sentences:
    """Neighbouring sentences of a document: their tokens, the word of each token, and where each sentence begins."""

    ids: list[int]
    words: list[int]
    starts: list[int]


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

    return [found for text in texts for sentence in segment(language, text) if (found := sentence.strip())]


def sentence_windows(sentences: Sequence[DocumentTokens], *, room: int) -> Iterator[Sentences]:
    """The sentences of a document in windows of at most ``room`` tokens: every token once, in order.

    A window holds as many whole sentences as fit. A sentence that is longer than a window is cut between words. A
    document without tokens is one window without any.
    """
    window, number = Sentences(ids=[], words=[], starts=[]), 0
    for sentence in sentences:
        for part in _fitting(sentence, room):
            if window.ids and len(window.ids) + len(part.ids) > room:
                yield window
                window = Sentences(ids=[], words=[], starts=[])
            window.starts.append(len(window.ids))
            window.ids.extend(part.ids)
            window.words.extend(word + number for word in part.words)
        number += max(sentence.words, default=-1) + 1
    yield window


def _fitting(sentence: DocumentTokens, room: int) -> Iterator[DocumentTokens]:
    """The sentence, or parts of it that fit; none if it has no tokens."""
    first, ends = 0, [*word_starts(sentence.words)[1:], len(sentence.ids)]
    while first < len(sentence.ids):
        last = bisect_right(ends, first + room)
        end = ends[last - 1] if last and ends[last - 1] > first else first + room  # within a word longer than a window
        yield DocumentTokens(ids=sentence.ids[first:end], words=sentence.words[first:end])
        first = end


def word_starts(words: Sequence[int]) -> list[int]:
    """Where words begin."""
    return [place for place, (before, word) in enumerate(pairwise([None, *words])) if word != before]


def pair_feature(
    feature: Feature,
    generator: np.random.Generator,
    corpus: Sequence[Mapping[str, Any]],
    template: PairTemplate,
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
        template: of the tokenizer.
        objective: what is learnt.
        max_length: of the pair, with special tokens.

    Returns:
        The feature of the pair, whose ``fields`` hold its label.

    Raises:
        DataError: the corpus has no other document.
    """
    ids, words, starts = _inner(feature, template)
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
        other = _inner(_of_another_document(feature, corpus, generator, template), template)
        room = max_length - template.size - len(first[0])
        second = _segment(other, generator, at_sentence=are_sentences, wanted=len(second[0]), room=room)
    return {**feature, **_joined(first, second, template), "fields": {PAIR: [label]}}


_Inner = tuple[list[int], list[int], list[int]]
_Segment = tuple[list[int], list[int]]


def _inner(feature: Mapping[str, Any], template: PairTemplate) -> _Inner:
    """The tokens of a window without its special tokens, their words, and where sentences begin."""
    before, after = template.single
    end = len(feature["input_ids"]) - after
    starts = [start - before for start in feature["sentence_starts"]]
    return feature["input_ids"][before:end], feature["word_ids"][before:end], starts


def _of_another_document(
    feature: Feature, corpus: Sequence[Mapping[str, Any]], generator: np.random.Generator, template: PairTemplate
) -> Mapping[str, Any]:
    """A window with tokens of another row, each being as likely."""
    if corpus[0]["row"] != corpus[len(corpus) - 1]["row"]:  # rows ascend
        for _ in range(_TRIES):
            other = corpus[int(generator.integers(len(corpus)))]
            if other["row"] != feature["row"] and len(other["input_ids"]) > sum(template.single):
                return other
    raise DataError(
        "next sentence prediction needs a second document with text, from which sentences that do not follow are "
        'taken; give more documents, or set sentence_objective = "sop"'
    )


def _segment(window: _Inner, generator: np.random.Generator, *, at_sentence: bool, wanted: int, room: int) -> _Segment:
    """Whole sentences of a window from a random place on, until they have the wanted length.

    The last ones are left out while they do not fit, and a first one that does not is cut, between words if it can be.
    """
    ids, words, starts = window
    word_places = word_starts(words)
    places = starts if at_sentence else word_places
    first = places[generator.integers(len(places))]
    ends = [*(start for start in starts if start > first), len(ids)]
    end = next((place for place in ends if place - first >= wanted), ends[-1])
    if end - first > room:
        whole = [place for place in ends if place - first <= room]
        between = [place for place in word_places if first < place <= first + room]
        end = max(whole, default=max(between, default=first + room))
    return ids[first:end], words[first:end]


def _joined(first: _Segment, second: _Segment, template: PairTemplate) -> Feature:
    parts = (template.before, first[0], template.between, second[0], template.after)
    words = [
        *(NO_WORD for _ in template.before),
        *first[1],
        *(NO_WORD for _ in template.between),
        *second[1],
        *(NO_WORD for _ in template.after),
    ]
    return Feature(  # type: ignore[typeddict-item]  # the row is that of the window
        input_ids=[token for part in parts for token in part],
        token_type_ids=[kind for part, kind in zip(parts, template.types, strict=True) for _ in part],
        word_ids=words,
    )
