"""The figures that a report shows of the predictions of a task."""

import pytest

from bert_tasks.outputs.number import NumberPrediction
from bert_tasks.outputs.tag_prediction import TokenPrediction
from bert_tasks.outputs.tag_report import MOST_WORDS
from bert_tasks.outputs.vocabulary import Candidate, MaskPrediction
from bert_tasks.tasks import MaskedLanguageModeling, SequenceClassification, TokenClassification


def test_a_number_is_correct_if_it_is_the_label() -> None:
    rows = [{"text": "a", "label": 2.0}, {"text": "b", "label": 2.0}]
    predictions = [NumberPrediction(score=number) for number in (2.0, 3.5)]
    task = SequenceClassification.of(problem_type="regression")
    sections = task.output.report(predictions, rows, task.texts)
    assert sections is not None
    assert [(result.is_correct, result.score) for result in sections.results] == [(True, 0.0), (False, 1.5)]


def test_two_models_agree_on_a_mask_if_their_best_tokens_are_the_same() -> None:
    def prediction(*tokens: int) -> MaskPrediction:
        candidates = (Candidate(token=token, token_str="", score=0.5, sequence="") for token in tokens)
        return MaskPrediction(masks=(tuple(candidates),))

    output = MaskedLanguageModeling.of().output
    others = [prediction(1, 3), prediction(2, 3)]
    assert output.agreements([prediction(1, 2), prediction(1, 3)], others) == [True, False]


def test_a_wrong_tag_is_marked_beside_its_label() -> None:
    words = ("a", "b")
    prediction = TokenPrediction(words=words, tags=("noun", "noun"), scores=(0.9, 0.9), entities=())
    task = TokenClassification.of(labels=("noun", "verb"))
    sections = task.output.report([prediction], [{"words": [*words], "tags": ["noun", "verb"]}], task.texts)
    assert sections is not None
    assert sections.examples is not None
    (example,) = sections.examples.items
    label, predicted = (segments[-1] for _, segments in example.sides)
    assert (label.text, label.label, label.prediction) == ("b", "verb", "")
    assert (predicted.text, predicted.label, predicted.prediction) == ("b", "", "noun")


@pytest.mark.parametrize("edge", ["start", "end"])
@pytest.mark.parametrize("shift", range(-3, 4))
def test_an_excerpt_of_a_sentence_marks_the_entities_that_reach_into_it(edge: str, shift: int) -> None:
    """An entity of two words around either end of the excerpt, which a mistake in the middle of the sentence places."""
    words = [f"w{number}" for number in range(3 * MOST_WORDS)]
    mistake = len(words) // 2
    start = mistake - MOST_WORDS // 3
    end = start + MOST_WORDS
    first = (start if edge == "start" else end) + shift
    tags = ["O"] * len(words)
    tags[first : first + 2] = ["B-x", "I-x"]
    labels = [*tags]
    labels[mistake] = "B-x"
    prediction = TokenPrediction(words=tuple(words), tags=tuple(tags), scores=(1.0,) * len(words), entities=())
    task = TokenClassification.of(labels=("O", "B-x", "I-x"))
    sections = task.output.report([prediction], [{"words": words, "tags": labels}], task.texts)
    assert sections is not None
    assert sections.examples is not None
    (example,) = sections.examples.items
    shown = [word for word in words[first : first + 2] if word in words[start:end]]
    for name, segments in example.sides:
        assert [segments[0].text, segments[-1].text] == ["…", "…"]
        assert " ".join(segment.text for segment in segments[1:-1]) == " ".join(words[start:end])
        marked = [segment.text.split() for segment in segments if segment.label or segment.prediction]
        assert sorted(marked) == sorted([*([shown] if shown else []), *([[words[mistake]]] if name == "label" else [])])
