"""Masking: which tokens are predicted and what replaces them, against what the stated rule leads to expect."""

import json
from itertools import groupby

import numpy as np
import pytest
from scipy.stats import chi2
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from bert_tasks.data.arrow import ArrowRows
from bert_tasks.tasks.base import FeatureKeys
from bert_tasks.tasks.masking import (
    MaskingIds,
    MaskingRule,
    mask_feature,
    mask_features,
    masked_positions,
    select_units,
    token_weights,
    word_numbers,
)
from support.small_tokenizers import LINES

MASK, ORDINARY = 3, 4  # ids outside RANDOM, so that every replacement shows
RANDOM = np.arange(10, 510)
IDS = MaskingIds(mask_id=MASK, random_ids=RANDOM, vocab_size=510)


def windows(count, *, seed=0, longest=254, shortest=1, word_sizes=(1, 1, 1, 1, 2, 2, 3, 5)):
    """Word numbers of windows with special tokens at both ends, and some with one in the middle."""
    chance = np.random.default_rng(seed)
    result = []
    for size in chance.integers(shortest, longest, endpoint=True, size=count):
        sizes = chance.choice(word_sizes, size=size)
        words = np.repeat(np.arange(size), sizes)[:size]
        if size > 20 and chance.random() < 0.3:
            words[chance.integers(5, size - 5)] = -1
        result.append(np.concatenate([[-1], words, [-1]]))
    return result


def generator(i, epoch=0, seed=1):
    return FeatureKeys(seed=seed, epoch=epoch, numbers=(i,)).generator(0)


def within(value, expected, variance, deviations=4.0):
    assert abs(value - expected) <= deviations * variance**0.5, (value, expected, variance**0.5)


def chi_square_p(counts, expected):
    counts, expected = np.asarray(counts, float), np.asarray(expected, float)
    return chi2.sf(((counts - expected) ** 2 / expected).sum(), len(counts) - 1)


def masked(all_words, rule, ids=IDS, epoch=0):
    features = []
    for i, words in enumerate(all_words):
        feature = {"row": i, "input_ids": [ORDINARY] * len(words), "token_type_ids": [], "word_ids": words.tolist()}
        features.append(mask_feature(feature, generator(i, epoch), rule, ids))
    return features


@pytest.fixture(scope="module")
def words():
    result = windows(4000)
    assert sum((window >= 0).sum() for window in result) > 400_000
    return result


class TestShares:
    """Over 400,000 candidates, within 4 standard deviations of what the rule leads to expect."""

    @pytest.mark.parametrize(("rate", "mask", "random"), [(0.15, 0.8, 0.1), (0.07, 0.5, 0.25)])
    def test_of_single_tokens(self, words, rate, mask, random):
        rule = MaskingRule(mlm_probability=rate, mask_replace_prob=mask, random_replace_prob=random)
        features = masked(words, rule)
        sizes = np.array([(window >= 0).sum() for window in words])
        mask_counts = np.array([len(feature["gather_positions"]) for feature in features])
        assert mask_counts.min() >= 1
        assert all(
            np.all(window[feature["gather_positions"]] >= 0) for window, feature in zip(words, features, strict=True)
        )
        expected = rate * sizes
        rest = expected - np.floor(expected)
        assert np.all(np.abs(mask_counts - np.maximum(expected, 1)) < 1)
        large = expected >= 1
        for some in (large & (rest < 0.5), large & (rest >= 0.5)):  # a number that is rounded differs in both
            within(mask_counts[some].sum(), expected[some].sum(), (rest * (1 - rest))[some].sum())
        assert np.all(mask_counts[~large] == 1)

        replaced = self.replaced(features, mask=mask, random=random)
        if random:
            counts = np.bincount(replaced[replaced >= RANDOM[0]] - RANDOM[0], minlength=len(RANDOM))
            assert counts.min() > 0
            assert chi_square_p(counts, np.full(len(RANDOM), counts.sum() / len(RANDOM))) > 1e-4

    @staticmethod
    def replaced(features, *, mask, random):
        """What is read in place of the chosen tokens, of which these shares are masks and random tokens."""
        tokens = np.concatenate([np.take(feature["input_ids"], feature["gather_positions"]) for feature in features])
        total = len(tokens)
        for share, expected in (
            ((tokens == MASK).sum(), mask),
            (np.isin(tokens, RANDOM).sum(), random),
            ((tokens == ORDINARY).sum(), 1 - mask - random),
        ):
            within(share, total * expected, total * expected * (1 - expected) + 1e-6)
        return tokens

    def test_of_whole_words(self, words):
        words = words[:1000]
        sizes = np.array([(window >= 0).sum() for window in words])
        features = masked(words, MaskingRule(whole_word_mask=True))
        self.replaced(features, mask=0.8, random=0.1)
        masks = [np.array(feature["gather_positions"]) for feature in features]
        counts = np.array([len(positions) for positions in masks])
        assert counts.min() >= 1
        large = sizes >= 40  # in shorter windows the one word that is always masked counts
        # The two words at the ends of the arc have up to 5 tokens each.
        within(counts[large].sum(), 0.15 * sizes[large].sum(), ((counts - 0.15 * sizes)[large] ** 2).sum())
        assert np.abs(counts - np.maximum(0.15 * sizes, 1)).max() <= 6
        for positions, numbers in zip(masks, words, strict=True):
            parts = np.split(np.arange(len(numbers)), np.flatnonzero(np.diff(numbers)) + 1)
            assert {len(set(word) & set(positions.tolist())) in (0, len(word)) for word in parts} == {True}
            assert np.all(numbers[positions] >= 0)


def test_the_rest_of_a_feature_stays():
    feature = {"row": 7, "input_ids": [0, 5, 6, 1], "token_type_ids": [0] * 4, "word_ids": [-1, 0, 1, -1], "extra": 1}
    before = json.dumps(feature)
    result = mask_feature(
        feature, generator(0), MaskingRule(mlm_probability=1.0, mask_replace_prob=1.0, random_replace_prob=0.0), IDS
    )
    assert json.dumps(feature) == before
    assert result == {**feature, "input_ids": [0, MASK, MASK, 1], "gather_positions": [1, 2], "labels": [5.0, 6.0]}
    nothing = mask_feature({**feature, "word_ids": [-1] * 4}, generator(0), MaskingRule(), IDS)
    assert nothing == {**feature, "word_ids": [-1] * 4, "gather_positions": [], "labels": []}


def test_positions_are_uniform_and_differ_between_epochs():
    words = np.concatenate([[-1], np.arange(60), [-1]])
    draws = 3000
    first, second = (
        np.array(
            [np.isin(np.arange(62), masked_positions(words, generator(i, epoch), MaskingRule())) for i in range(draws)]
        )
        for epoch in (0, 1)
    )
    counts = first.sum(axis=0)
    assert counts[0] == counts[-1] == 0
    assert chi2.sf(((counts[1:-1] - draws * 0.15) ** 2 / (draws * 0.15 * 0.85)).sum() * 59 / 60, 59) > 1e-4
    assert np.all(first.sum(axis=1) == 9)
    # Hypergeometric: 9 of 60, and 9 of 60 again.
    within((first & second).sum(), draws * 9 * 0.15, draws * 9 * 0.15 * 0.85 * 51 / 59)
    again = [masked_positions(words, generator(i, 1), MaskingRule()).tolist() for i in range(0, draws, 500)]
    assert again == [np.flatnonzero(second[i]).tolist() for i in range(0, draws, 500)]


def test_every_word_is_as_likely_whatever_its_length():
    sizes = np.array([1, 1, 2, 3, 5, 8, 1, 1, 2, 13, 1, 2])
    draws, count = 8000, 12
    chance = np.random.default_rng(3)
    is_masked = np.array([select_units(sizes, count, chance) for _ in range(draws)])
    share = count / sizes.sum()
    for number in is_masked.sum(axis=0):
        within(number, draws * share, draws * share * (1 - share))
    # neighbours no more often together than others
    together = [(is_masked[:, 0] & is_masked[:, other]).mean() for other in (1, 6, 7, 10)]
    assert max(together) - min(together) <= 4 * (2 * max(together) / draws) ** 0.5
    tokens = is_masked @ sizes
    within(tokens.sum(), draws * count, ((tokens - count) ** 2).sum())
    assert {int(unit) for unit in select_units(np.array([2, 3]), 5, chance)} == {1}


@pytest.mark.parametrize("seed", range(5))
def test_a_window_with_words_has_one_masked_word_at_least(seed):
    is_masked = select_units(np.array([9, 30, 4]), 1, np.random.default_rng(seed))
    assert is_masked.sum() == 1


def test_rare_tokens_are_predicted_more_often():
    corpus = [{"input_ids": [0, *[5] * 15, 1]}, {"input_ids": [0, 6, 1]}]
    weights = token_weights(corpus, 8, 0.5)
    assert weights.tolist() == pytest.approx([2**-0.5, 2**-0.5, 1, 1, 1, 15**-0.5, 1, 1])
    words = np.array([-1, 0, 1, 2, -1])
    of_window = weights[[0, 5, 6, 5, 1]]
    draws = 4000
    rule = MaskingRule(mlm_probability=0.3, mask_smoothing=0.5)
    rare = sum(masked_positions(words, generator(i), rule, of_window).tolist() == [2] for i in range(draws))
    share = 1 / (1 + 2 * 15**-0.5)
    within(rare, draws * share, draws * share * (1 - share))
    # Two of three, one after another: both frequent ones with this probability.
    two = MaskingRule(mlm_probability=2 / 3 + 1e-9, mask_smoothing=0.5)
    both = sum(masked_positions(words, generator(i), two, of_window).tolist() == [1, 3] for i in range(draws))
    frequent = 15**-0.5
    share = 2 * frequent / (1 + 2 * frequent) * frequent / (1 + frequent)
    within(both, draws * share, draws * share * (1 - share))


class TestPreparing:
    """Masks follow the feature: neither its batch nor its place in it."""

    @staticmethod
    def features(tokenizer):
        features = []
        for row, text in enumerate(LINES):
            encoding = tokenizer(text, return_offsets_mapping=True)
            numbers = word_numbers(text, encoding.word_ids(), encoding["offset_mapping"])
            ids = encoding["input_ids"]
            features.append({"row": row, "input_ids": ids, "token_type_ids": [0] * len(ids), "word_ids": numbers})
        return features

    @pytest.mark.parametrize(
        "rule",
        [
            MaskingRule(),
            MaskingRule(whole_word_mask=True),
            MaskingRule(mask_smoothing=0.7),
        ],
        ids=["tokens", "words", "smoothed"],
    )
    def test_masks_are_those_of_the_feature_in_any_batch(self, wordpiece_tokenizer, rule):
        features = self.features(wordpiece_tokenizer)

        def masked_in(numbers, epoch=3, static=False, seed=5):
            keys = FeatureKeys(seed=seed, epoch=epoch, numbers=numbers)
            subset = [features[number] for number in numbers]
            result = mask_features(subset, keys, features, wordpiece_tokenizer, rule, static=static)
            return {feature["row"]: feature for feature in result}

        whole = masked_in(range(20))
        assert whole == {row: feature for number in range(20) for row, feature in masked_in([number]).items()}
        assert whole == masked_in([*range(19, 9, -1)]) | masked_in([4, 2, 0, 9, 1, 3, 8, 6, 5, 7])
        for other in (masked_in(range(20), epoch=4), masked_in(range(20), seed=6)):
            assert sum(other[row] == whole[row] for row in range(20)) <= 2
        static = masked_in(range(20), static=True)
        assert static == masked_in(range(20), epoch=9, static=True)
        assert static != masked_in(range(20), static=True, seed=6)

    def test_smoothing_counts_the_tokens_of_the_corpus(self, wordpiece_tokenizer):
        features = self.features(wordpiece_tokenizer)
        rule = MaskingRule(mask_smoothing=2.0, mlm_probability=0.3)
        keys = FeatureKeys(seed=1, epoch=0, numbers=range(20))
        result = mask_features(features, keys, features, wordpiece_tokenizer, rule)
        stored = ArrowRows.from_columns({name: [feature[name] for feature in features] for name in features[0]})
        assert result == mask_features(features, keys, stored, wordpiece_tokenizer, rule)
        assert result == mask_features(features, keys, stored, wordpiece_tokenizer, rule)
        the = wordpiece_tokenizer.convert_tokens_to_ids("the")
        assert sum(feature["labels"].count(the) for feature in result) == 0
        assert sum(feature["input_ids"].count(the) for feature in features) > 10


def test_random_tokens_are_neither_special_nor_added(by_kind):
    for tokenizer in by_kind.values():
        ids = MaskingIds.of(tokenizer)
        assert ids.mask_id == tokenizer.mask_token_id
        assert len(ids.random_ids) == len(tokenizer) - len(tokenizer.get_added_vocab())
        assert not set(ids.random_ids.tolist()) & set(tokenizer.all_special_ids)
    wordpiece = PreTrainedTokenizerFast(tokenizer_object=small("wordpiece", LINES), mask_token="[MASK]")
    wordpiece.add_tokens(["newword"])
    assert wordpiece.convert_tokens_to_ids("newword") not in MaskingIds.of(wordpiece).random_ids


# Words

UNSPACED = """
昨天下午我们去了图书馆。借了三本关于历史的书。
他们决定明天早上坐火车去北京。因为机票太贵了。
今年的冬天比去年冷。河面已经结了厚厚的冰。
昨日の午後、私たちは図書館へ行って本を三冊借りました。
駅の近くの小さな店でコーヒーを飲みながら手紙を書いた。
เมื่อวานนี้เราไปห้องสมุดและยืมหนังสือสามเล่ม
""".strip().splitlines()
KINDS = ("wordpiece", "bpe", "bpe-untrimmed", "unigram", "unigram-whole")


def small(name, lines):
    """A tokenizer of the library ``tokenizers``, trained on a few lines."""
    special = ["[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    options = {"special_tokens": special, "vocab_size": 420, "show_progress": False}
    if name == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(**options)
    elif name.startswith("bpe"):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer, tokenizer.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=True),
            decoders.ByteLevel(),
        )
        trainer = trainers.BpeTrainer(**options, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    else:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(**options, unk_token="[UNK]")
    tokenizer.train_from_iterator(lines, trainer)
    if name == "unigram-whole":  # pieces of words, of texts that nothing splits into words
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    template = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    )
    trim = processors.ByteLevel(trim_offsets=name == "bpe")
    tokenizer.post_processor = processors.Sequence([trim, template]) if name.startswith("bpe") else template
    return tokenizer


@pytest.fixture(scope="module", params=KINDS)
def of_kind(request):
    return request.param, small(request.param, [*LINES, *UNSPACED])


def pieces_of(tokenizer, text):
    """The words of a text, each as its tokens; and the numbers of all tokens."""
    encoding = tokenizer.encode(text)
    numbers = word_numbers(text, encoding.word_ids, encoding.offsets)
    grouped = groupby(zip(numbers, encoding.tokens, encoding.offsets, strict=True), key=lambda piece: piece[0])
    return {number: list(members) for number, members in grouped if number >= 0}, numbers


def test_words_of_text_with_spaces_end_at_spaces(of_kind):
    name, tokenizer = of_kind
    for text in [*LINES, "  two  spaces, and  three "]:
        words, numbers = pieces_of(tokenizer, text)
        assert numbers[0] == numbers[-1] == -1
        assert numbers[1:-1] == sorted(numbers[1:-1])
        assert list(words) == list(range(len(words)))
        read = ["".join(text[slice(*offsets)] for _, _, offsets in members).strip() for members in words.values()]
        assert not any(" " in word for word in read)
        if name.startswith("unigram"):  # punctuation belongs to the word that it touches
            assert len([word for word in read if word]) == len(text.split())
    words, _ = pieces_of(tokenizer, "She read, folded and whistled: grandmother's anthem!")
    tokens = [len(members) for members in words.values()]
    assert max(tokens) >= 3
    if not name.startswith("unigram"):
        assert len(words) == (12 if name == "wordpiece" else 11)


def test_each_token_of_text_without_spaces_is_a_word(of_kind):
    name, tokenizer = of_kind
    for text in UNSPACED:
        words, _ = pieces_of(tokenizer, text)
        assert len(words) >= len(text) / 6
        for members in words.values():
            spans = [offsets for _, _, offsets in members]
            # several tokens only where they are bytes of one character, or the sign of a space
            if len(members) > 1:
                assert max(end for _, end in spans) - min(first for first, _ in spans) <= 2
            assert not name.startswith("unigram") or len(members) <= 2
        if name.startswith("bpe"):  # no character is cut
            cut = [members[0][2][0] for members in words.values()]
            assert cut == sorted(set(cut))


def test_transformers_and_tokenizers_agree_on_words(by_kind):
    text = "Don't like pretraining, unbelievable  <mask> [MASK] café!"
    for name, tokenizer in by_kind.items():
        encoding = tokenizer(text, return_offsets_mapping=True)
        numbers = word_numbers(text, encoding.word_ids(), encoding["offset_mapping"])
        expected = [-1 if word is None else word for word in encoding.word_ids()]
        if name == "gemma":  # which takes texts between special tokens for one word
            assert (max(expected), max(numbers)) == (2, 7)
        else:
            assert numbers == expected
