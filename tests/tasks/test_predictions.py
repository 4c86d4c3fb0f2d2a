"""The JSON of each task's prediction: its keys, their order, and which of them only some predictions have."""

import json
from collections.abc import Sequence

import numpy as np
import pytest

from bert_tasks.data.columns import Row
from bert_tasks.errors import DataError
from bert_tasks.outputs.answer import SpanPrediction
from bert_tasks.outputs.choice import ChoicePrediction
from bert_tasks.outputs.classes import ClassPrediction
from bert_tasks.outputs.explanation import Explanation, WordContribution
from bert_tasks.outputs.label_set import LabelSetPrediction
from bert_tasks.outputs.number import NumberPrediction
from bert_tasks.outputs.prediction import Prediction
from bert_tasks.outputs.replaced import ReplacedTokenPrediction
from bert_tasks.outputs.span_search import Span
from bert_tasks.outputs.tag_prediction import EntitySpan, TokenPrediction
from bert_tasks.outputs.text_score import TextScorePrediction
from bert_tasks.outputs.vector import EmbeddingPrediction
from bert_tasks.outputs.vocabulary import Candidate, MaskPrediction
from support.task_examples import EXAMPLES

WORD = WordContribution(column="text", word="fine", start=2, end=6, contribution=0.5)
EXPLANATION = Explanation(label="good", logit=1.5, baseline_logit=1.0, words=(WORD,), completeness_error=0.0, steps=16)
OF_NUMBER = Explanation(label=None, logit=1.5, baseline_logit=1.0, words=(), completeness_error=0.0, steps=16)
EXPLANATION_JSON = (
    '"explanation": {"label": "good", "logit": 1.5, "baseline_logit": 1.0, "words": [{"column": "text", "word": "fine",'
    ' "start": 2, "end": 6, "contribution": 0.5}], "completeness_error": 0.0, "steps": 16}'
)
SPAN = Span("at", 0.75, 3, 5, 2.0, 1.5)
SPAN_JSON = '{"text": "at", "score": 0.75, "start": 3, "end": 5, "start_logit": 2.0, "end_logit": 1.5}'
SCORES = {"bad": 0.25, "good": 0.75}
ENTITY = EntitySpan(entity_group="LOC", score=0.5, word="Bonn", start=1, end=2)
CANDIDATE = Candidate(score=0.5, token=7, token_str="x", sequence="a x")
LINES = [
    (
        ClassPrediction(label="good", score=0.75, scores=SCORES),
        '{"label": "good", "score": 0.75, "scores": {"bad": 0.25, "good": 0.75}}',
    ),
    (
        LabelSetPrediction(
            label="good", score=0.75, scores=SCORES, labels=(), logits=(0.0, 1.0), explanation=EXPLANATION
        ),
        '{"label": "good", "labels": [], "score": 0.75, "scores": {"bad": 0.25, "good": 0.75}, "logits": [0.0, 1.0], '
        f"{EXPLANATION_JSON}}}",
    ),
    (
        NumberPrediction(score=1.5, logits=(1.5,), explanation=OF_NUMBER),
        '{"score": 1.5, "logits": [1.5], "explanation": {"label": null, "logit": 1.5, "baseline_logit": 1.0, '
        '"words": [], "completeness_error": 0.0, "steps": 16}}',
    ),
    (
        ChoicePrediction(label=1, answer="b", score=0.75, scores=(0.25, 0.75), explanation=EXPLANATION),
        f'{{"label": 1, "answer": "b", "score": 0.75, "scores": [0.25, 0.75], {EXPLANATION_JSON}}}',
    ),
    (
        SpanPrediction(id=None, answer="at", start=3, end=5, score=0.75, n_best=(SPAN,), best=SPAN),
        f'{{"answer": "at", "start": 3, "end": 5, "score": 0.75, "n_best": [{SPAN_JSON}]}}',
    ),
    (
        SpanPrediction(
            id="q", answer="", start=0, end=0, score=0.5, n_best=(SPAN,), best=SPAN, null_score=1.0, null_odds=-2.5
        ),
        '{"id": "q", "answer": "", "start": 0, "end": 0, "score": 0.5, "null_score": 1.0, "null_odds": -2.5, '
        f'"n_best": [{SPAN_JSON}]}}',
    ),
    (
        TokenPrediction(words=("in", "Bonn"), tags=("O", "B-LOC"), scores=(0.5, 0.5), entities=(ENTITY,)),
        '{"words": ["in", "Bonn"], "tags": ["O", "B-LOC"], "scores": [0.5, 0.5], "entities": [{"entity_group": "LOC", '
        '"score": 0.5, "word": "Bonn", "start": 1, "end": 2}]}',
    ),
    (
        TokenPrediction(words=("in",), tags=("O",), scores=(0.5,), entities=(), logits=((0.5, 1.0),)),
        '{"words": ["in"], "tags": ["O"], "scores": [0.5], "entities": [], "logits": [[0.5, 1.0]]}',
    ),
    (
        MaskPrediction(row_text="a [MASK]", masks=((CANDIDATE,),)),
        '{"masks": [[{"score": 0.5, "token": 7, "token_str": "x", "sequence": "a x"}]]}',
    ),
    (MaskPrediction(row_text="a", masks=()), '{"masks": []}'),
    (TextScorePrediction(score=None, tokens=0), '{"score": null, "tokens": 0}'),
    (ReplacedTokenPrediction(tokens=("a", "b"), scores=(0.25, 0.5)), '{"tokens": ["a", "b"], "scores": [0.25, 0.5]}'),
    (EmbeddingPrediction(embedding=np.array([0.1, -2.0], np.float32)), '{"embedding": [0.100000001, -2.0]}'),
]


@pytest.mark.parametrize(("prediction", "line"), LINES)
def test_a_written_line_has_these_keys_in_this_order(prediction: Prediction, line: str) -> None:
    assert json.dumps(prediction.to_json()) == line


REPEATED = [
    ("masked", [{"text": "[MASK] " * 500}], None),
    ("masked", [{"text": "[MASK]" + "a" * 30_000_000}], None),
    (
        "masked",
        [{"text": "<mask> " * 600}],
        "a text of 4,200 characters with 600 masks: each of the 5 candidates for a mask repeats its text, which is "
        "12,600,000 characters in total, and at most 10,000,000 are returned. Use fewer masks",
    ),
    ("masked", [{"text": "[MASK] " * 400}] * 2, "2 texts of 5,600 characters with 800 masks: each of the 5"),
    ("choice", [{"context": "a" * 30_000_000, "choices": ["a"] * 9}], None),
    ("choice", [{"context": "a", "question": "a" * 9_000, "choices": ["a"] * 1_000}], None),
    (
        "choice",
        [{"context": "a", "question": "a" * 20_000, "choices": ["a"] * 1_001}],
        "each choice is read behind the question, which repeats 20,000,000 characters, and at most 10,000,000 are",
    ),
]


@pytest.mark.parametrize(("name", "rows", "message"), REPEATED)
def test_rows_that_would_be_repeated_too_often(name: str, rows: Sequence[Row], message: str | None) -> None:
    task = EXAMPLES[name].task
    if message is None:
        task.check_rows(rows)
        return
    with pytest.raises(DataError) as caught:
        task.check_rows(rows)
    assert str(caught.value).startswith(message)
