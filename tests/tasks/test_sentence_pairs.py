"""Pairs of segments for next sentence and sentence order prediction: where they come from, and their labels."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from bert_tasks.errors import DataError
from bert_tasks.outputs.features import NO_WORD
from bert_tasks.outputs.vocabulary import NO_PAIR, PAIR
from bert_tasks.tasks.base import FeatureKeys
from bert_tasks.tasks.masked_language_modeling import MaskedLanguageModeling
from bert_tasks.tasks.windows.corpus import IN_ORDER, NOT_IN_ORDER, DocumentTokens, pair_feature, sentence_windows
from bert_tasks.tasks.windows.frame import Frame

MAX_LENGTH = 43
ROOM = MAX_LENGTH - 3


def windows_of(documents, template, room=ROOM):
    features = []
    for row, sentences in enumerate(documents):
        for window in sentence_windows(sentences, document=row, room=room):
            features.append(
                {
                    "row": row,
                    "input_ids": [*template.before, *window.ids, *template.after],
                    "token_type_ids": [0] * (len(window.ids) + 2),
                    "word_ids": [NO_WORD, *window.words, NO_WORD],
                    "sentence_starts": [start + 1 for start in window.starts],
                }
            )
    return features


def numbered(sizes):
    """Documents of sentences of such lengths; a token's id tells its document and place. Words have 1 or 2 tokens."""
    documents = []
    for row, lengths in enumerate(sizes):
        sentences, offset = [], 0
        for length in lengths:
            ids = [1000 * (row + 1) + offset + i for i in range(length)]
            sentences.append(DocumentTokens(ids=ids, words=[i * 2 // 3 for i in range(length)]))
            offset += length
        documents.append(sentences)
    return documents


@pytest.fixture(scope="module")
def template(wordpiece_tokenizer):
    return Frame.of(wordpiece_tokenizer, texts=2)


@pytest.fixture(scope="module")
def corpus(template):
    chance = np.random.default_rng(2)
    sizes = [chance.integers(1, 30, size=chance.integers(1, 12)).tolist() for _ in range(40)]
    return windows_of(numbered([*sizes, [1], [90], []]), template)


def drawn(corpus, template, objective, *, epoch=0, max_length=MAX_LENGTH):
    keys = FeatureKeys(seed=1, epoch=epoch, numbers=range(len(corpus)))
    return [
        pair_feature(feature, keys.generator(i), corpus, template, objective=objective, max_length=max_length)
        for i, feature in enumerate(corpus)
    ]


def segments(feature, template):
    """The two segments of a pair, read from its segment ids."""
    ids, types = feature["input_ids"], feature["token_type_ids"]
    second = types.index(1)
    assert ids[0] == template.before[0]
    assert ids[second - 1] == template.between[0]
    assert ids[-1] == template.after[0]
    assert types == [0] * second + [1] * (len(ids) - second)
    words = feature["word_ids"]
    assert [position for position, word in enumerate(words) if word == NO_WORD] == [0, second - 1, len(ids) - 1]
    return ids[1 : second - 1], ids[second:-1]


def label_of(feature):
    (label,) = feature["fields"][PAIR]
    return label


def inner(feature):
    return feature["input_ids"][1:-1]


def test_labels_are_those_of_transformers():
    assert (IN_ORDER, NOT_IN_ORDER) == (0, 1)  # in the classes with such a head 1 is "not the next"


def test_windows_hold_every_token_once_in_whole_sentences():
    documents = numbered([[5, 9, 12, 3, 20, 40, 1], [100, 2], [], [7]])
    for sentences in documents:
        windows = list(sentence_windows(sentences, document=0, room=30))
        assert [token for window in windows for token in window.ids] == [
            token for sentence in sentences for token in sentence.ids
        ]
        assert max(len(window.ids) for window in windows) <= 30
        begins = {sentence.ids[0] for sentence in sentences}
        for window in windows:
            assert window.words == sorted(window.words)
            assert window.starts[:1] in ([0], [])
            assert all(window.ids[start] in begins for start in window.starts[1:])
        # a window ends where the next sentence, or the next word of a long one, does not fit
        for window, following in pairwise(windows):
            first = following.ids[: [*following.starts, len(following.ids)][1]]
            assert len(window.ids) + len(first) > 30 or window.ids[-1] // 1000 == 2
    long = list(sentence_windows(documents[1], document=0, room=30))
    assert [len(window.ids) for window in long] == [30, 30, 30, 12]
    words = [word for window in long for word in window.words]
    assert all(window.words[-1] != other.words[0] for window, other in pairwise(long))
    assert len(set(words)) == 67 + 1
    full = list(sentence_windows(numbered([[10, 20, 5]])[0], document=0, room=30))  # what fits exactly is in
    assert [len(window.ids) for window in full] == [30, 5]
    between = list(
        sentence_windows(numbered([[70]])[0], document=0, room=31)
    )  # a word has its tokens 30 and 31: it is not cut
    assert [len(window.ids) for window in between][:2] == [30, 30]
    uncut = DocumentTokens(ids=list(range(70)), words=[0] * 70)
    assert [len(window.ids) for window in sentence_windows([uncut], document=0, room=30)] == [30, 30, 10]


class TestOrder:
    def test_segments_are_swapped_and_never_foreign(self, corpus, template):
        swapped = 0
        for feature, pair in zip(corpus, drawn(corpus, template, "sop"), strict=True):
            if len(set(feature["word_ids"]) - {NO_WORD}) < 2:
                assert pair == {**feature, "fields": {PAIR: [NO_PAIR]}}
                continue
            first, second = segments(pair, template)
            assert first
            assert second
            is_swapped = label_of(pair) == NOT_IN_ORDER
            assert (second + first if is_swapped else first + second) == inner(feature)
            cut = len(second if is_swapped else first)
            places = feature["sentence_starts"][1:]
            assert not places or cut + 1 in places
            swapped += is_swapped
            assert len(pair["input_ids"]) <= MAX_LENGTH
        assert 0 < swapped < len(corpus)

    def test_a_window_is_cut_at_each_place_as_often(self, template):
        """Between two of its sentences; between two words where it has one sentence."""
        for sizes, count in (([5, 6, 7, 8], 3), ([9], 5)):
            (feature,) = windows_of(numbered([sizes]), template)
            cuts = Counter()
            for epoch in range(400):
                (pair,) = drawn([feature], template, "sop", epoch=epoch)
                cuts[len(segments(pair, template)[label_of(pair) == NOT_IN_ORDER])] += 1
            assert len(cuts) == count
            assert all(abs(seen - 400 / count) <= 4 * (400 / count) ** 0.5 for seen in cuts.values())

    def test_a_window_of_one_word_has_no_pair(self, template):
        (feature,) = windows_of([[DocumentTokens(ids=[7, 8], words=[0, 0])]], template)
        for objective in ("nsp", "sop"):
            (pair,) = drawn([feature], template, objective)
            assert pair == {**feature, "fields": {PAIR: [NO_PAIR]}}


class TestNext:
    def test_negatives_are_of_another_document(self, corpus, template):
        rows = {feature["input_ids"][1] // 1000 for feature in corpus if inner(feature)}
        partners = set()
        for epoch in range(4):
            for feature, pair in zip(corpus, drawn(corpus, template, "nsp", epoch=epoch), strict=True):
                if label_of(pair) == NO_PAIR:
                    continue
                first, second = segments(pair, template)
                assert first == inner(feature)[: len(first)]
                assert 0 < len(second) <= ROOM - len(first)
                assert len(pair["input_ids"]) == len(pair["word_ids"]) <= MAX_LENGTH
                (document,) = {token // 1000 - 1 for token in second}
                if label_of(pair) == IN_ORDER:
                    assert first + second == inner(feature)
                    assert document == feature["row"]
                else:
                    assert document != feature["row"]
                    assert second == list(range(second[0], second[0] + len(second)))
                    partners.add(document)
        assert len(partners) > len(rows) / 2

    def test_one_document_is_not_enough(self, corpus, template):
        for sizes in ([[5, 6, 7]], [[5, 6, 7], []]):
            alone = windows_of(numbered(sizes), template)
            with pytest.raises(DataError, match="a second document"):
                _ = [drawn(alone, template, "nsp", epoch=epoch) for epoch in range(20)]

    def test_negatives_begin_and_end_as_the_others_do(self, corpus, template):
        """Otherwise a broken sentence would tell the label."""
        begins = {inner(feature)[start - 1] for feature in corpus for start in feature["sentence_starts"]}
        broken = negatives = within = 0
        for feature, pair in zip(corpus, drawn(corpus, template, "nsp"), strict=True):
            if label_of(pair) == NOT_IN_ORDER:
                _, second = segments(pair, template)
                negatives += 1
                within += len(feature["sentence_starts"]) == 1 and second[0] not in begins
                if len(feature["sentence_starts"]) > 1:
                    assert second[0] in begins
                    broken += second[-1] + 1 not in begins | {
                        inner(window)[-1] + 1 for window in corpus if inner(window)
                    }
        assert broken < negatives / 3
        assert within > 3  # a window of one sentence is cut within it

    def test_negatives_are_whole_sentences_of_the_length_of_what_they_replace(self, corpus, template):
        windows = [
            (inner(feature), [start - 1 for start in feature["sentence_starts"]], feature["word_ids"][1:-1])
            for feature in corpus
        ]
        places, checked, cut = Counter(), 0, 0
        for epoch in range(6):
            for feature, pair in zip(corpus, drawn(corpus, template, "nsp", epoch=epoch), strict=True):
                if label_of(pair) != NOT_IN_ORDER or len(feature["sentence_starts"]) < 2:
                    continue
                first, second = segments(pair, template)
                ids, starts, words = next(window for window in windows if second[0] in window[0])
                begin = ids.index(second[0])
                places[starts.index(begin)] += 1
                lengths = [end - begin for end in (*starts, len(ids)) if end > begin]
                fitting = [length for length in lengths if length <= ROOM - len(first)]
                if not fitting:  # a sentence that does not fit is cut between words
                    ends = range(begin + 1, begin + ROOM - len(first) + 1)
                    between = [end for end in ends if words[end] != words[end - 1]]
                    assert begin + len(second) == max(between, default=ends[-1])
                    cut += 1
                    continue
                room = len(inner(feature)) - len(first)
                enough = [length for length in fitting if length >= room]
                assert len(second) == min(enough, default=max(fitting))
                checked += 1
        assert checked > 100
        assert cut > 10
        assert min(places[0], places[1], places[2]) > 10  # they begin anywhere


@pytest.mark.parametrize("objective", ["nsp", "sop"])
def test_half_of_the_pairs_are_in_order(corpus, template, objective):
    labels = [label_of(pair) for epoch in range(10) for pair in drawn(corpus, template, objective, epoch=epoch)]
    pair_labels = np.array([label for label in labels if label != NO_PAIR])
    assert abs(pair_labels.sum() - len(pair_labels) / 2) <= 4 * (len(pair_labels) / 4) ** 0.5
    assert len(pair_labels) > 1000


def test_pairs_follow_the_feature_and_the_epoch(corpus, template):
    whole = drawn(corpus, template, "nsp")
    assert whole == drawn(corpus, template, "nsp")
    keys = FeatureKeys(seed=1, epoch=0, numbers=(7, 3))
    alone = pair_feature(corpus[3], keys.generator(1), corpus, template, objective="nsp", max_length=MAX_LENGTH)
    assert alone == whole[3]
    other = drawn(corpus, template, "nsp", epoch=1)
    assert sum(pair == other_pair for pair, other_pair in zip(whole, other, strict=True)) < len(corpus) / 2


def test_a_split_of_one_document_is_refused_before_training():
    row = {"text": "One sentence.\nAnother one."}
    with pytest.raises(DataError, match=r"^validation: next sentence prediction needs at least two documents"):
        MaskedLanguageModeling.of(sentence_objective="nsp").check_split([row], "validation")
    MaskedLanguageModeling.of(sentence_objective="nsp").check_split([row, row], "validation")
    MaskedLanguageModeling.of(sentence_objective="sop").check_split([row], "validation")
