"""Chooses and replaces the masked tokens of a window.

Positions are drawn in units, which are single tokens or whole words.

Shape legend: N tokens of a window, C candidates (tokens that may be masked), U units, W words, V vocabulary.
"""

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bert_tasks.data.arrow import ArrowRows
from bert_tasks.outputs.features import NO_WORD, Feature
from bert_tasks.outputs.settings import require
from bert_tasks.tasks.base import FeatureKeys

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Scripts that set no spaces between words: Thai, Lao, Tibetan, Burmese, Khmer, Chinese and Japanese.
_WITHOUT_SPACES = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff66-\uff9d\U00020000-\U000323af]"
)
_SPACE = re.compile(r"\s")

Numbers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class MaskingRule:
    """How tokens are masked, with the names of transformers' collator.

    Of the predicted tokens most are replaced by the mask token, some by random tokens, and the rest is not changed,
    because a model that is fine-tuned later never sees the mask token (Devlin et al.,
    https://arxiv.org/abs/1810.04805, section 3.1). The default is BERT's: 80, 10 and 10 of 100.

    Attributes:
        mlm_probability: Share of the candidates that is predicted.
        mask_replace_prob: Share of the predicted tokens that the mask token replaces.
        random_replace_prob: Share of the predicted tokens that random tokens replace. The rest is not changed.
        whole_word_mask: True to select whole words.
        mask_smoothing: Exponent of the weight ``max(count, 1) ** -mask_smoothing`` with which a token that occurs
            ``count`` times in the training data is drawn (XLM, Lample and Conneau, arXiv:1901.07291). DistilBERT uses
            0.7. Evaluation ignores it, so that the masks of a window do not depend on other rows.

    Examples:
        >>> MaskingRule(whole_word_mask=True, mask_replace_prob=1.0, random_replace_prob=0.0)
    """

    mlm_probability: float = 0.15
    mask_replace_prob: float = 0.8
    random_replace_prob: float = 0.1
    whole_word_mask: bool = False
    mask_smoothing: float = 0.0

    def __post_init__(self) -> None:
        share = self.mlm_probability
        require(0 < share <= 1, f"mlm_probability is {share}, expected a share above 0 and at most 1")
        for name in ("mask_replace_prob", "random_replace_prob"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"{name} is {value}, expected a share from 0 to 1")
        # The tolerance is for the rounding of the sum.
        require(
            self.mask_replace_prob + self.random_replace_prob <= 1 + 1e-9,
            "mask_replace_prob and random_replace_prob are shares of predicted tokens, expected a sum of at most 1",
        )
        require(self.mask_smoothing >= 0, f"mask_smoothing is {self.mask_smoothing}, expected 0 or more")
        require(
            not (self.mask_smoothing and self.whole_word_mask),
            "mask_smoothing weights single tokens. Do not set whole_word_mask",
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskingIds:
    """The ids of a vocabulary as masking needs them.

    Attributes:
        mask_id: The id of the mask token.
        random_ids: The ids from which random tokens are drawn, which are all except special and added tokens.
        vocab_size: V, one more than the largest id.
        weights: ``[V]`` the weight of each id in the draw of positions. None if all are equal.
    """

    mask_id: int
    random_ids: Numbers
    vocab_size: int
    weights: NDArray[np.float64] | None = None

    @classmethod
    @lru_cache(maxsize=8)
    def of(cls, tokenizer: "PreTrainedTokenizerBase") -> "MaskingIds":
        """Returns the ids of a tokenizer, without weights."""
        excluded = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
        vocabulary = set(tokenizer.get_vocab().values())
        return cls(
            mask_id=tokenizer.mask_token_id,
            random_ids=np.asarray(sorted(vocabulary - excluded), dtype=np.int64),
            vocab_size=max(vocabulary) + 1,
        )


def token_weights(corpus: Sequence[Mapping[str, Any]], vocab_size: int, smoothing: float) -> NDArray[np.float64]:
    """Returns ``[V]`` weights ``max(count, 1) ** -smoothing`` of ids in the features."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    if isinstance(corpus, ArrowRows):  # memory-mapped, so no lists are made
        for rows in corpus.tables(["input_ids"]):
            ids = rows.column(0).combine_chunks().flatten().to_numpy()
            counts += np.bincount(ids, minlength=vocab_size)
    else:
        for feature in corpus:
            ids = np.asarray(feature["input_ids"], dtype=np.int64)
            counts += np.bincount(ids, minlength=vocab_size)
    return np.maximum(counts, 1).astype(np.float64) ** -smoothing


_kept_weights = lru_cache(maxsize=2)(token_weights)


def word_numbers(text: str, word_ids: Sequence[int | None], offsets: Sequence[tuple[int, int]]) -> list[int]:
    """Returns each token's word, for whole words and ``Feature.word_ids``.

    Words are the words of the tokenizer's pre-tokenizer with two corrections. A word ends at a space, even if a
    pre-tokenizer does not split there. In scripts without spaces between words each token is a word, as in ALBERT's and
    fairseq's masking. The tokens of one character stay together.

    Args:
        text: The text.
        word_ids: ``BatchEncoding.word_ids``, None for tokens that the post-processor added.
        offsets: The characters of each token.

    Returns:
        Numbers that rise by 1 with each word, ``NO_WORD`` for tokens that the post-processor added.
    """
    numbers: list[int] = []
    # The last token: the number of its word, its pre-tokenizer's word, its end, whether its word has shown more than a
    # sign of a space, and whether its script has no spaces.
    number, word, end, has_letters, was_unspaced = -1, None, 0, False, False
    # Asked once for the text, because most texts have no such script, and the search in each token takes time.
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
    tokenizer: "PreTrainedTokenizerBase",
    rule: MaskingRule,
    *,
    static: bool = False,
    make_pair: Callable[[Feature, np.random.Generator], Feature] | None = None,
) -> list[Feature]:
    """Returns masked features. The first four arguments are as in ``Task.prepare``.

    Args:
        rule: The rule of masking.
        static: Mask the same tokens in every epoch.
        make_pair: Makes a pair of a window before it is masked, from the same random numbers.
    """
    ids = MaskingIds.of(tokenizer)
    if rule.mask_smoothing and not keys.is_evaluation:
        # The weights of a corpus are kept between steps, if it can be the key of a cache. A list cannot.
        weights_of = _kept_weights if isinstance(corpus, Hashable) else token_weights
        ids = replace(ids, weights=weights_of(corpus, ids.vocab_size, rule.mask_smoothing))
    if static:
        keys = replace(keys, epoch=0)
    masked = []
    for i, feature in enumerate(features):
        generator = keys.generator(i)
        window = feature
        if make_pair is not None:
            window = make_pair(feature, generator)
        masked.append(mask_feature(window, generator, rule, ids))
    return masked


def mask_feature(feature: Feature, generator: np.random.Generator, rule: MaskingRule, ids: MaskingIds) -> Feature:
    """Returns a feature with masked ``input_ids`` and the predicted tokens.

    These are ``gather_positions`` and ``labels``. Tokens without a word are never masked. Without candidates there are
    no positions.
    """
    tokens = np.asarray(feature["input_ids"], dtype=np.int64)  # [N]
    weights = None if ids.weights is None else ids.weights[tokens]
    words = feature["word_ids"]
    if words is None:
        raise ValueError("the feature has no word_ids, which say what may be masked")
    positions = masked_positions(words, generator, rule, weights)
    labels = tokens[positions]
    # Random tokens are drawn for all positions, so that the number of draws does not depend on their values.
    draws = generator.random(len(labels))
    randoms = generator.integers(len(ids.random_ids), size=len(labels))
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
    """Returns the predicted positions of a window, ascending.

    They are n of its candidates without replacement. With C candidates and u uniform in [0, 1), n is ``max(1,
    floor(mlm_probability * C + u))``, so that the expected share is ``mlm_probability`` unless that is less than one
    token.

    Args:
        word_ids: ``[N]`` the word of each token, ``NO_WORD`` for tokens that are no candidates.
        generator: The generator of the window.
        rule: The rule of masking.
        weights: ``[N]`` weights in the draw of single tokens. None if all are equal.
    """
    words = np.asarray(word_ids, dtype=np.int64)
    candidates = np.flatnonzero(words != NO_WORD)  # [C]
    size = len(candidates)
    if size == 0:
        return candidates
    # Rounded up or down at random. Always rounding down would mask far less than 15 % of short texts.
    count = min(size, max(1, int(rule.mlm_probability * size + generator.random())))
    if rule.whole_word_mask:
        starts = word_starts(candidates, words[candidates])
        sizes = np.diff(starts, append=size)
        selected = np.flatnonzero(np.repeat(select_units(sizes, count, generator), sizes))
    elif weights is None:
        selected = np.sort(generator.choice(size, count, replace=False, shuffle=False))
    else:
        # The first events of Poisson processes with these rates: sampling without replacement, one after another.
        times = generator.exponential(size=size) / weights[candidates]
        selected = np.sort(np.argpartition(times, count - 1)[:count])
    return candidates[selected]


def word_starts(positions: Numbers, words: Numbers) -> Numbers:
    """Returns the starts ``[W]`` of whole words among the candidates ``[C]``.

    Args:
        positions: ``[C]`` positions of the candidates. No word goes beyond a token that is no candidate.
        words: ``[C]`` the word of each candidate.
    """
    gaps = np.diff(positions, prepend=-1) != 1
    gaps[0] = True
    changes = np.diff(words, prepend=NO_WORD) != 0
    return np.flatnonzero(gaps | changes)


def select_units(sizes: Numbers, count: int, generator: np.random.Generator) -> NDArray[np.bool_]:
    """Returns the masked units, as near ``count`` tokens as whole units allow.

    The units lie on a circle in random order, and an arc of ``count`` tokens begins at a random token. Units inside the
    arc are selected. The two units at its ends are selected with the probability of their covered share, so that every
    unit, long or short, has the probability ``count / sum(sizes)``. If that selects none, the first unit is selected.
    Sizes and result have the shape ``[U]``.
    """
    order = generator.permutation(len(sizes))
    lengths = sizes[order]
    ends = np.cumsum(lengths)
    starts, total = ends - lengths, ends[-1]
    first, chance = generator.integers(total), generator.random()
    last = first + count
    covered = np.clip(np.minimum(ends, last) - np.maximum(starts, first), 0, None)
    covered += np.clip(np.minimum(ends, last - total) - starts, 0, None)  # the arc goes beyond the end of the list
    selected = covered == lengths
    cut = np.flatnonzero((covered > 0) & ~selected)  # two at most
    shares = covered[cut] / lengths[cut]
    # One random number for both: if their shares add up to 1, exactly one of them is selected.
    selected[cut[:1]] = chance < shares[:1]
    selected[cut[1:]] = chance >= 1 - shares[1:]
    if not selected.any():
        selected[np.searchsorted(ends, first, side="right")] = True
    result = np.empty(len(sizes), dtype=np.bool_)
    result[order] = selected
    return result
