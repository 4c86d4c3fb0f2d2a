"""Which tokens of a window are masked, and what replaces them.

Owns the rule of masking, as arithmetic of a window, a rule and a source of random numbers, and what a word is. It knows
neither seeds nor batches.

Positions are drawn in units: single tokens, whole words, or n-grams of whole words.

Shape legend: N tokens of a window, C candidates (tokens that may be masked), U units, W words, V vocabulary.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from bert_tasks.tasks.base import Feature, FeatureKeys

NO_WORD = -1  # the word number of tokens that the tokenizer's post-processor added
_BATCH = 1000

# Scripts that set no spaces between words: Thai, Lao, Tibetan, Burmese, Khmer, Chinese and Japanese.
_WITHOUT_SPACES = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff66-\uff9d\U00020000-\U000323af]"
)

_SPACE = re.compile(r"\s")

Numbers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class MaskingRule:
    """How tokens are chosen and replaced, with the words of transformers' DataCollatorForLanguageModeling.

    Attributes:
        mlm_probability: the share of the candidates that is predicted.
        mask_replace_prob: of these, the share that the mask token replaces.
        random_replace_prob: the share that random tokens replace; the remaining ones stay as they are.
        whole_word_mask: choose whole words.
        max_ngram: choose n-grams of up to this number of whole words, of n words with a probability proportional to 1/n
            (ALBERT, Lan et al., arXiv:1909.11942, section 4.1).
        mask_smoothing: draw a token that the training data hold ``count`` times with the weight
            ``max(count, 1) ** -mask_smoothing``, so that rare tokens are predicted more often (XLM, Lample and Conneau,
            arXiv:1901.07291; DistilBERT uses 0.7); 0: all alike. Evaluation ignores it and draws all alike, so that
            the masks of a window depend neither on the training data nor on the other rows.
    """

    mlm_probability: float = 0.15
    mask_replace_prob: float = 0.8
    random_replace_prob: float = 0.1
    whole_word_mask: bool = False
    max_ngram: int = 1
    mask_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.mlm_probability <= 1:
            raise ValueError(f"mlm_probability is {self.mlm_probability}, expected a share above 0 and at most 1")
        for name in ("mask_replace_prob", "random_replace_prob"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected a share from 0 to 1")
        if self.mask_replace_prob + self.random_replace_prob > 1 + 1e-9:
            raise ValueError("mask_replace_prob + random_replace_prob: expected at most 1, shares of predicted tokens")
        if self.max_ngram < 1:
            raise ValueError(f"max_ngram is {self.max_ngram}, expected 1 or more words")
        if self.max_ngram > 1 and not self.whole_word_mask:
            raise ValueError(f"max_ngram = {self.max_ngram} masks n-grams of whole words: set whole_word_mask = true")
        if self.mask_smoothing < 0:
            raise ValueError(f"mask_smoothing is {self.mask_smoothing}, expected 0 or more")
        if self.mask_smoothing and self.whole_word_mask:
            raise ValueError("mask_smoothing weights single tokens: it excludes whole_word_mask")


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskingIds:
    """The ids of a vocabulary as masking needs them.

    Attributes:
        mask_id: of the mask token.
        random_ids: the ids from which random tokens are drawn: all but special and added tokens.
        vocab_size: V, one more than the largest id.
        weights: ``[V]`` the weight of each id in the draw of positions; None: all alike.
    """

    mask_id: int
    random_ids: Numbers
    vocab_size: int
    weights: NDArray[np.float64] | None = None

    @classmethod
    @lru_cache(maxsize=8)
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "MaskingIds":
        """The ids of a tokenizer, without weights."""
        excluded = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
        vocabulary = set(tokenizer.get_vocab().values())
        return cls(
            mask_id=tokenizer.mask_token_id,
            random_ids=np.asarray(sorted(vocabulary - excluded), dtype=np.int64),
            vocab_size=max(vocabulary) + 1,
        )


def token_weights(corpus: Sequence[Mapping[str, Any]], *, vocab_size: int, smoothing: float) -> NDArray[np.float64]:
    """``[V]`` ``max(count, 1) ** -smoothing`` of each id, where ``count`` is how often the features hold it."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    if hasattr(corpus, "with_format"):  # memory-mapped: no lists are made
        for batch in corpus.with_format("arrow").iter(batch_size=_BATCH):
            ids = batch.column("input_ids").combine_chunks().flatten().to_numpy()
            counts += np.bincount(ids, minlength=vocab_size)
    else:
        for feature in corpus:
            counts += np.bincount(np.asarray(feature["input_ids"], dtype=np.int64), minlength=vocab_size)
    return np.maximum(counts, 1).astype(np.float64) ** -smoothing


def word_numbers(text: str, word_ids: Sequence[int | None], offsets: Sequence[tuple[int, int]]) -> list[int]:
    """The word of each token of a text, for whole words and for ``Feature.word_ids``.

    Words are the pre-tokenizer's (``BatchEncoding.word_ids``), with two corrections: a word ends at
    a space, also where a pre-tokenizer splits nothing, and in scripts that set no spaces between words each token is a
    word, as in ALBERT's and fairseq's masking, because a word of the pre-tokenizer may be a whole sentence there. The
    tokens of one character stay together.

    Args:
        text: the text.
        word_ids: of the tokens; None for those that the post-processor added.
        offsets: of the tokens, in characters.

    Returns:
        Numbers that rise by 1 from each word to the next; ``NO_WORD`` for tokens that the post-processor added.
    """
    numbers: list[int] = []
    number, word, end, has_letters, was_unspaced = -1, None, 0, False, False  # of the last token and its word
    has_unspaced = _WITHOUT_SPACES.search(text) is not None
    for token_word, (first, after) in zip(word_ids, offsets, strict=True):
        if token_word is None:
            numbers.append(NO_WORD)
            continue
        letters = text[first:after].strip()
        is_unspaced = has_unspaced and _WITHOUT_SPACES.search(letters) is not None
        begins = token_word != word
        if has_letters and first >= end:  # neither behind the sign of a space nor within a character
            begins |= is_unspaced or was_unspaced or _SPACE.search(text, end, first + 1) is not None
        number += begins
        numbers.append(number)
        word, end, was_unspaced = token_word, after, is_unspaced
        has_letters = bool(letters) or (has_letters and not begins)
    return numbers


def mask_features(
    features: Sequence[Feature],
    keys: FeatureKeys,
    corpus: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    rule: MaskingRule,
    *,
    static: bool = False,
    paired: Callable[[Feature, np.random.Generator], Feature] | None = None,
) -> list[Feature]:
    """The features as masked language modelling sees them; for ``Task.prepare``, whose arguments they are.

    Args:
        rule: what is masked.
        static: mask the same tokens in every epoch.
        paired: what makes a pair of a window before it is masked, from the same random numbers.
    """
    ids = MaskingIds.of(tokenizer)
    if rule.mask_smoothing and not keys.is_evaluation:
        weights = _weights_of if isinstance(corpus, Hashable) else _weights_of.__wrapped__
        ids = replace(ids, weights=weights(corpus, ids.vocab_size, rule.mask_smoothing))
    if static:
        keys = replace(keys, epoch=0)
    masked = []
    for i, feature in enumerate(features):
        generator = keys.generator(i)
        seen = feature if paired is None else paired(feature, generator)
        masked.append(mask_feature(seen, generator, rule, ids))
    return masked


@lru_cache(maxsize=2)
def _weights_of(corpus: Sequence[Mapping[str, Any]], vocab_size: int, smoothing: float) -> NDArray[np.float64]:
    return token_weights(corpus, vocab_size=vocab_size, smoothing=smoothing)


def mask_feature(feature: Feature, generator: np.random.Generator, rule: MaskingRule, ids: MaskingIds) -> Feature:
    """The feature as masked language modelling sees it.

    Args:
        feature: with ``word_ids``, one for each token; tokens without a word are never masked.
        generator: of the feature.
        rule: what is masked.
        ids: of the vocabulary.

    Returns:
        The feature with the masked ``input_ids``, with the positions to predict as ``gather_positions``, ascending, and
        with the original ids at these positions as ``labels``. Without candidates there are no positions.
    """
    tokens = np.asarray(feature["input_ids"], dtype=np.int64)  # [N]
    weights = None if ids.weights is None else ids.weights[tokens]
    words = feature["word_ids"]
    if words is None:
        raise ValueError("the feature has no word_ids, which say what may be masked")
    positions = masked_positions(words, generator, rule, weights)
    labels = tokens[positions]
    draws, randoms = generator.random(len(labels)), generator.integers(len(ids.random_ids), size=len(labels))
    replaced = np.where(draws < rule.mask_replace_prob + rule.random_replace_prob, ids.random_ids[randoms], labels)
    tokens[positions] = np.where(draws < rule.mask_replace_prob, ids.mask_id, replaced)
    return {
        **feature,
        "input_ids": tokens.tolist(),
        "gather_positions": positions.tolist(),
        "labels": labels.astype(np.float64).tolist(),
    }


def masked_positions(
    word_ids: Sequence[int],
    generator: np.random.Generator,
    rule: MaskingRule,
    weights: NDArray[np.float64] | None = None,
) -> Numbers:
    """The positions of a window that are predicted, ascending: n of its candidates without replacement.

    With C candidates and u uniform in [0, 1), n is ``max(1, floor(mlm_probability * C + u))``, so that the expected
    share is ``mlm_probability`` unless that is less than one token.

    Args:
        word_ids: ``[N]`` the word of each token, ``NO_WORD`` for tokens that are no candidates.
        generator: of the window.
        rule: what is masked.
        weights: ``[N]`` in the draw of single tokens; None: all alike.
    """
    words = np.asarray(word_ids, dtype=np.int64)
    candidates = np.flatnonzero(words != NO_WORD)  # [C]
    size = len(candidates)
    if size == 0:
        return candidates
    count = min(size, max(1, int(rule.mlm_probability * size + generator.random())))
    if rule.whole_word_mask:
        starts = unit_starts(candidates, words[candidates], generator, max_ngram=rule.max_ngram)
        sizes = np.diff(starts, append=size)
        masked = np.flatnonzero(np.repeat(chosen_units(sizes, count, generator), sizes))
    elif weights is None:
        masked = generator.choice(size, count, replace=False, shuffle=False)
        masked.sort()
    else:
        # The first events of Poisson processes with these rates: sampling without replacement, one after another.
        masked = np.sort(np.argpartition(generator.exponential(size=size) / weights[candidates], count - 1)[:count])
    return candidates[masked]


def unit_starts(positions: Numbers, words: Numbers, generator: np.random.Generator, *, max_ngram: int) -> Numbers:
    """``[U]`` where units of whole words begin among the candidates.

    Neighbouring words are cut into n-grams from the first to the last, each of n words with a probability proportional
    to 1/n among the lengths that are left. No unit goes beyond a token that is no candidate.

    Args:
        positions, words: ``[C]`` of the candidates.
    """
    gaps = np.diff(positions, prepend=-1) != 1
    gaps[0] = True
    starts = np.flatnonzero(gaps | (np.diff(words, prepend=NO_WORD) != 0))  # [W]
    if max_ngram == 1:
        return starts
    limits = list(accumulate(1 / length for length in range(1, max_ngram + 1)))
    ends = [*np.flatnonzero(gaps[starts])[1:].tolist(), len(starts)]
    kept, position = [], 0
    for end in ends:
        while position < end:
            kept.append(position)
            room = min(max_ngram, end - position)
            position += 1 + bisect_right(limits, generator.random() * limits[room - 1], hi=room - 1)
    return starts[kept]


def chosen_units(sizes: Numbers, count: int, generator: np.random.Generator) -> NDArray[np.bool_]:
    """``[U]`` which units are masked: as near ``count`` tokens as whole units allow, and ``count`` in expectation.

    The units lie on a circle in random order, and an arc of ``count`` tokens begins at a random token. Units inside the
    arc are chosen; the two at its ends with a probability of the share that it covers, so that every unit, long or
    short, is chosen with the probability ``count / sum(sizes)``. If that chooses none, the first one is taken.

    Args:
        sizes: ``[U]`` tokens of each unit.
        count: at most their sum.
    """
    order = generator.permutation(len(sizes))
    lengths = sizes[order]
    ends = np.cumsum(lengths)
    starts, total = ends - lengths, ends[-1]
    first, chance = generator.integers(total), generator.random()
    last = first + count
    covered = np.clip(np.minimum(ends, last) - np.maximum(starts, first), 0, None)
    covered += np.clip(np.minimum(ends, last - total) - starts, 0, None)  # the arc goes beyond the end of the list
    is_covered = covered == lengths
    cut = np.flatnonzero((covered > 0) & ~is_covered)  # two at most
    shares = covered[cut] / lengths[cut]
    # One random number for both: where their shares add up to 1, exactly one of them is chosen.
    is_covered[cut[:1]] = chance < shares[:1]
    is_covered[cut[1:]] = chance >= 1 - shares[1:]
    if not is_covered.any():
        is_covered[np.searchsorted(ends, first, side="right")] = True
    result = np.empty(len(sizes), dtype=np.bool_)
    result[order] = is_covered
    return result
