"""What each task says of predictions that are the same for every row."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_tasks.outputs.answer import SpanPrediction
from bert_tasks.outputs.choice import ChoicePrediction
from bert_tasks.outputs.classes import ClassPrediction
from bert_tasks.outputs.label_set import LabelSetPrediction
from bert_tasks.outputs.number import NumberPrediction
from bert_tasks.outputs.replaced import ReplacedTokenPrediction
from bert_tasks.outputs.span_search import Span
from bert_tasks.outputs.tag_prediction import TokenPrediction
from bert_tasks.outputs.vocabulary import Candidate, MaskedToken, MaskPrediction
from bert_tasks.tasks import (
    MaskedLanguageModeling,
    MultipleChoice,
    PairClassification,
    ReplacedTokens,
    SequenceClassification,
    SpanExtraction,
    TokenClassification,
)

LABELS = ("calm", "glad", "sad")
CLASSIFIER = SequenceClassification.of(labels=LABELS)
SEVERAL = SequenceClassification.of(labels=LABELS, problem_type="multi_label_classification")
REGRESSION = SequenceClassification.of(problem_type="regression")
TAGGER = TokenClassification.of(labels=("O", "B-PER", "I-PER", "B-LOC"))
QUESTIONS = SpanExtraction.of(version_2_with_negative=True)

classes = st.sampled_from(LABELS)
subsets = st.sets(classes).map(lambda subset: tuple(label for label in LABELS if label in subset))


def of_class(label):
    return ClassPrediction(label=label, score=1.0, scores={label: 1.0})


def of_labels(labels):
    return LabelSetPrediction(label="calm", labels=labels, score=1.0, scores={})


def of_number(number):
    return NumberPrediction(score=number)


def of_tags(tags):
    return TokenPrediction(words=("w",) * len(tags), tags=tuple(tags), scores=(1.0,) * len(tags), entities=())


def of_answer(text):
    span = Span(text=text, start=0, end=len(text), score=1.0, start_logit=0.0, end_logit=0.0)
    return SpanPrediction(id=None, answer=text, start=0, end=len(text), score=1.0, n_best=[span], best=span)


def collapsed(predictions, labels):
    return len(set(predictions)) == 1 and len(set(labels)) > 1


@given(st.lists(st.tuples(classes, classes), max_size=8))
def test_a_classifier_collapses_exactly_if_it_predicts_one_of_several_classes(pairs):
    labels, guesses = [label for label, _ in pairs], [guess for _, guess in pairs]
    expected = f"predicts {guesses[0]!r} for every row" if collapsed(guesses, labels) else None
    rows, answers = [{"label": label} for label in labels], [of_class(guess) for guess in guesses]
    assert CLASSIFIER.output.degeneracy(answers, rows) == expected
    assert PairClassification.of(labels=LABELS).output.degeneracy(answers, rows) == expected


@given(st.lists(st.tuples(subsets, subsets), max_size=8))
def test_a_classifier_of_several_labels_collapses_exactly_if_it_predicts_one_set_of_them(pairs):
    labels, guesses = [label for label, _ in pairs], [guess for _, guess in pairs]
    note = SEVERAL.output.degeneracy(
        [of_labels(guess) for guess in guesses], [{"labels": list(label)} for label in labels]
    )
    assert (note is not None) == collapsed(guesses, labels)
    if note is not None:
        assert all(repr(label) in note for label in guesses[0])
        assert ("no label" in note) == (guesses[0] == ())


def test_a_label_that_is_found_in_all_its_rows_and_in_others_is_no_collapse():
    rows = [{"labels": labels} for labels in (["calm"], ["calm"], [], ["sad"])]
    predictions = [of_labels(labels) for labels in (("calm",), ("calm",), ("calm",), ())]
    assert SEVERAL.output.degeneracy(predictions, rows) is None


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((0.7, 0.7, 0.7), "predicts a number close to 0.7 for every row"),
        ((0.7, 0.701, 0.702), "predicts a number close to 0.701 for every row"),
        ((0.7, 0.7, 0.73), None),
        ((1.0, 2.0, 3.0), None),
    ],
)
def test_numbers_collapse_where_they_hardly_differ_beside_the_labels(numbers, expected):
    rows = [{"label": label} for label in (1.0, 2.0, 3.0)]
    assert REGRESSION.output.degeneracy([of_number(number) for number in numbers], rows) == expected
    assert REGRESSION.output.degeneracy([of_number(number) for number in numbers], [{"label": 1.0}] * 3) is None


tags = st.sampled_from(TAGGER.output.labels)


@given(st.lists(st.lists(st.tuples(tags, tags), max_size=4), max_size=4))
def test_a_tagger_collapses_exactly_if_all_words_have_one_tag(sentences):
    rows = [{"tags": [tag for tag, _ in sentence]} for sentence in sentences]
    answers = [of_tags([tag for _, tag in sentence]) for sentence in sentences]
    labels = [tag for sentence in sentences for tag, _ in sentence]
    guesses = [tag for sentence in sentences for _, tag in sentence]
    expected = f"predicts {guesses[0]!r} for every word" if collapsed(guesses, labels) else None
    assert TAGGER.output.degeneracy(answers, rows) == expected


def test_a_tagger_whose_entities_are_all_wrong_has_not_collapsed():
    assert TAGGER.output.degeneracy([of_tags(["B-LOC", "O"])], [{"tags": ["O", "B-PER"]}]) is None


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=6))
def test_questions_collapse_exactly_if_all_have_one_answer(pairs):
    texts = [["noon"] if has_answer else [] for has_answer, _ in pairs]
    rows = [{"answers": {"text": text, "answer_start": [0] * len(text)}} for text in texts]
    note = QUESTIONS.output.degeneracy([of_answer("noon" if answers else "") for _, answers in pairs], rows)
    answers = {answer for _, answer in pairs}
    expected = None
    if len(pairs) > 1 and any(texts) and answers == {False}:
        expected = 'predicts "no answer" for every question'
    if any(texts) and not all(texts) and answers == {True}:
        expected = "predicts 'noon' for every question"
    assert note == expected


@pytest.mark.parametrize(
    ("starts", "label_starts", "expected"),
    [
        ((4, 4, 4), (4, 0, 9), "predicts an answer that starts at character 4 for every question"),
        ((4, 4, 5), (4, 0, 9), None),
        ((4, 4, 4), (4, 4, 4), None),
    ],
)
def test_answers_at_one_position_collapse(starts, label_starts, expected):
    rows = [{"answers": {"text": [f"word {start}"], "answer_start": [start]}} for start in label_starts]
    predictions = [replace(of_answer(f"text {number}"), start=start) for number, start in enumerate(starts)]
    assert QUESTIONS.output.degeneracy(predictions, rows) == expected
    silent = [*predictions[:2], of_answer("")]
    assert QUESTIONS.output.degeneracy(silent, rows) is None


@given(st.lists(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=4), max_size=4))
def test_replaced_tokens_collapse_exactly_if_all_are_alike(texts):
    predictions = [
        ReplacedTokenPrediction(
            tokens=(), scores=(), measured=tuple((1.0 if guess else -1.0, label, False) for label, guess in text)
        )
        for text in texts
    ]
    tokens = [token for text in texts for token in text]
    labels, guesses = [label for label, _ in tokens], [guess for _, guess in tokens]
    expected = None
    if collapsed(guesses, labels):
        expected = f"predicts {'replaced' if guesses[0] else 'original'!r} for every token"
    assert ReplacedTokens.of().output.degeneracy(predictions, [{}] * len(texts)) == expected


@given(st.lists(st.lists(st.tuples(classes, classes), max_size=4), max_size=4))
def test_masked_tokens_collapse_exactly_if_one_token_fills_all(texts):
    def mask(label, guess):
        best = Candidate(score=1.0, token=LABELS.index(guess), token_str=guess, sequence="")
        return MaskedToken(candidates=(best,), label=LABELS.index(label), log_probability=0.0, context=((), ()))

    predictions = [MaskPrediction(masks=(), measured=tuple(mask(*pair) for pair in text)) for text in texts]
    tokens = [token for text in texts for token in text]
    labels, guesses = [label for label, _ in tokens], [guess for _, guess in tokens]
    expected = f"predicts {guesses[0]!r} for every masked token" if collapsed(guesses, labels) else None
    assert MaskedLanguageModeling.of().output.degeneracy(predictions, [{}] * len(texts)) == expected


def test_pairs_of_sentences_collapse_if_all_have_one_class():
    def note(*pairs):
        return MaskedLanguageModeling.of().output.degeneracy([MaskPrediction(masks=(), pairs=pairs)], [{}])

    assert note((0, 1), (1, 1)) == "predicts class 1 for every pair of sentences"
    assert note((0, 1), (1, 0)) is None
    assert note((1, 1), (1, 1)) is None


def test_choices_collapse_if_one_index_is_right_everywhere():
    rows = [{"context": "a", "choices": ["b", "c"], "label": label} for label in (0, 1, 1)]
    answers = [ChoicePrediction(label=1, answer="c", score=0.9, scores=(0.1, 0.9))] * 3
    assert MultipleChoice.of().output.degeneracy(answers, rows) == "predicts choice 1 for every row"
    assert MultipleChoice.of().output.degeneracy(answers[:2], rows[1:]) is None


def test_rows_without_a_label_do_not_count():
    rows = [{"label": "calm"}, {"label": None}, {"label": "sad"}]
    assert CLASSIFIER.output.degeneracy([of_class("calm"), of_class("sad"), of_class("calm")], rows) is not None
    assert CLASSIFIER.output.degeneracy([of_class("calm")] * 2, rows[:2]) is None


def test_balanced_weights_are_named_where_they_apply_and_are_not_used():
    assert CLASSIFIER.output.remedies == PairClassification.of(labels=LABELS).output.remedies
    assert CLASSIFIER.output.remedies == ('class_weights = "balanced"',)
    assert TAGGER.output.remedies == ('class_weights = "balanced"',)
    weighted = SequenceClassification.of(labels=LABELS, class_weights="balanced")
    chain = TokenClassification.of(labels=TAGGER.output.labels, crf=True)
    assert weighted.output.remedies == REGRESSION.output.remedies == chain.output.remedies == ()
