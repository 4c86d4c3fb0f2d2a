"""Explanations equal integrated gradients computed one row at a time with transformers' models, add up to the
difference of the logits, and name words of the user's texts."""

import csv
import logging
import os
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerBase,
)

from bert_tasks.data.conll import entities
from bert_tasks.data.words import word_spans
from bert_tasks.errors import NotFiniteScoresError, UsageError
from bert_tasks.model import explanation
from bert_tasks.model.prediction import predict_rows
from bert_tasks.model.task_model import TaskModel
from bert_tasks.outputs.explanation import Explanation, TextWords, TokenSpan, word_contributions
from bert_tasks.tasks import (
    MultipleChoice,
    PairClassification,
    SequenceClassification,
    SpanExtraction,
    Task,
    TokenClassification,
)
from support.hf_models import FAMILIES, WITH_CHOICE, WITH_SPAN, WITHOUT_TYPES, with_families
from support.sampling import slow_except
from support.small_checkpoints import save_checkpoint, tokenizer_of
from support.small_tokenizers import LINES, MULTILINGUAL_LINES

LABELS = ("low", "mid", "high")
TEXTS = ("The ferry leaves, and nobody's late!", "", "rain", "A cold wind from the north brought rain, then sleet")
PAIRS = (("Is this seat free?", "It was, an hour ago."), ("rain", "a cold wind from the north"))
QUESTIONS = (
    {"question": "  Who told the baker?", "context": "Nobody had told the baker that the oven was broken."},
    {"question": "What rose?", "context": " ".join(LINES[12:14])},
)
# Every family explains texts, and in turn one other kind of rows, if transformers has the head for it. What differs
# between families is the encoder, which all kinds share.
OTHER_KINDS = {
    "pairs": FAMILIES[3::4],
    "span": [family for family in FAMILIES[1::4] if family in WITH_SPAN],
    "choice": [family for family in FAMILIES[2::4] if family in WITH_CHOICE],
    "tags": FAMILIES[0::4],
}
TOKENIZERS = ("wordpiece", "bpe", "unigram", "multilingual", "french", "mpnet", "modern", "deberta", "llama", "gemma")


def explanations(model: TaskModel, rows: Sequence[Any]) -> list[Explanation]:
    return [prediction.explanation for prediction in model.predict(rows, explain=True)]


def direct(stock: Any, feature: Any, spans: Sequence[Any], logit: Any, *, steps: int) -> Tensor:
    """``[T]`` integrated gradients of one row by transformers' model, one point of the path after the other.

    Special tokens, which have no span, are the same in the baseline.
    """
    table = stock.get_input_embeddings().weight.detach()
    row = table[torch.tensor(feature["input_ids"])]
    padding = table[stock.config.pad_token_id].expand_as(row)
    baseline = torch.where(torch.tensor([span is None for span in spans])[:, None], row, padding)
    has_types = stock.config.model_type not in WITHOUT_TYPES and stock.config.type_vocab_size > 1
    extra = {"token_type_ids": torch.tensor([feature["token_type_ids"]])} if has_types else {}
    total = torch.zeros_like(row)
    for node, weight in zip(*np.polynomial.legendre.leggauss(steps), strict=True):
        point = (baseline + (node + 1) / 2 * (row - baseline)).requires_grad_()
        (slope,) = torch.autograd.grad(logit(stock(inputs_embeds=point[None], **extra)), point)
        total += weight / 2 * slope
    return (total * (row - baseline)).sum(1)


def by_characters(explanation: Explanation, column: str) -> dict[tuple[int, int], float]:
    return {(word.start, word.end): word.contribution for word in explanation.words if word.column == column}


def compare(result: Explanation, tokens: Sequence[tuple[TokenSpan | None, float]], *, tolerance: float) -> None:
    """Each word has the sum of the tokens that begin in it, found here from the characters alone."""
    size = max(abs(number) for _, number in tokens) + 1e-6
    for word in result.words:
        parts = [
            number
            for span, number in tokens
            if span is not None and span.column == word.column and word.start <= max(span.start, 0) < word.end
        ]
        assert word.contribution == pytest.approx(sum(parts), abs=tolerance * size), word


@pytest.fixture
def folder(tmp_path: Path, by_kind: dict[str, PreTrainedTokenizerBase]) -> Any:
    def make(family: str, head: Any = "sequence", **options: Any) -> Path:
        save_checkpoint(tmp_path, family, tokenizer_of(family, by_kind), head=head, **options)
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("family", "pair"),
    with_families(
        {"texts": False, "pairs": True},
        families=lambda pair: OTHER_KINDS["pairs"] if pair else FAMILIES,
        every=False,
    ),
)
def test_classifiers_of_every_family_equal_the_direct_computation(family: str, pair: bool, folder: Any) -> None:
    """In float64, with the same points of the path: all else is equal to rounding."""
    path = folder(family, labels=LABELS)
    task: type[Task] = PairClassification if pair else SequenceClassification
    model = TaskModel.from_pretrained(path, task=task, max_length=40).double()
    stock: Any = AutoModelForSequenceClassification.from_pretrained(path).double().eval()
    tokenizer = model.require_tokenizer()
    for row, result in zip(PAIRS if pair else TEXTS, explanations(model, PAIRS if pair else TEXTS), strict=True):
        texts = row if isinstance(row, tuple) else (row,)
        encoded, spans = encoded_spans(tokenizer, *texts)
        target = LABELS.index(str(result.label))
        contributions = direct(
            stock, encoded, spans, lambda output, target=target: output.logits[0, target], steps=result.steps
        )
        spans = visible(spans, dict(zip(("text", "text_pair"), texts, strict=False)))
        compare(result, list(zip(spans, contributions.tolist(), strict=True)), tolerance=1e-9)
        assert result.is_complete
        total = sum(word.contribution for word in result.words)
        assert total == pytest.approx(result.logit - result.baseline_logit, rel=0.0101, abs=1e-6)


def encoded_spans(tokenizer: Any, *texts: str) -> tuple[Any, list[TokenSpan | None]]:
    """The ids of texts, and where each token is in them."""
    encoded = tokenizer(*texts, return_offsets_mapping=True, return_token_type_ids=True)
    pairs = zip(encoded.sequence_ids(0), encoded["offset_mapping"], strict=True)
    return encoded, [
        None if side is None else TokenSpan(("text", "text_pair")[side], *offsets) for side, offsets in pairs
    ]


def visible(spans: Sequence[TokenSpan | None], texts: Any) -> list[TokenSpan | None]:
    """The tokens without white space at their start."""
    return [span and TokenSpan(span.column, *stripped(texts[span.column], *span[1:])) for span in spans]


def stripped(text: str, start: int, end: int) -> tuple[int, int]:
    """The characters of a token without white space at its start; of nothing else, the place of the next word."""
    start += len(text[start:]) - len(text[start:].lstrip())
    return start, max(start, end)


@pytest.mark.parametrize(
    ("family", "head"), with_families({"span": "span"}, families=OTHER_KINDS.__getitem__, every=False)
)
def test_answers_of_every_family_equal_the_direct_computation(family: str, head: str, folder: Any) -> None:
    path = folder(family, head)
    task = SpanExtraction.of(max_length=48, max_query_length=16, doc_stride=4)
    model = TaskModel.from_pretrained(path, task=task).double()
    stock: Any = AutoModelForQuestionAnswering.from_pretrained(path).double().eval()
    tokenizer = model.require_tokenizer()
    for row, prediction in zip(QUESTIONS, model.predict(QUESTIONS, explain=True), strict=True):
        features = task.features([row], tokenizer)
        spans = task.token_spans([row], tokenizer)
        best, result = prediction.n_best[0], prediction.explanation
        assert result.label == prediction.answer
        assert result.logit == pytest.approx(best.start_logit + best.end_logit, abs=1e-5)
        window = min(range(len(features)), key=lambda i: distance(stock, features[i], model, best))
        feature, token_spans = features[window], spans[window]
        places = distances(stock, feature, model, best).view(2, -1).argmin(1).tolist()
        contributions = direct(
            stock,
            feature,
            token_spans,
            lambda output, places=places: output.start_logits[0, places[0]] + output.end_logits[0, places[1]],
            steps=result.steps,
        )
        compare(result, list(zip(visible(token_spans, row), contributions.tolist(), strict=True)), tolerance=1e-8)
        assert result.is_complete


def distances(stock: Any, feature: Any, model: TaskModel, best: Any) -> Tensor:
    """``[2 T]`` how far the start logits, then the end logits, of a window are from those of an answer."""
    types = {"token_type_ids": torch.tensor([feature["token_type_ids"]])} if model.config.type_vocab_size > 1 else {}
    with torch.no_grad():
        output = stock(torch.tensor([feature["input_ids"]]), **types)
    starts, ends = output.start_logits[0] - best.start_logit, output.end_logits[0] - best.end_logit
    return torch.cat([starts, ends]).abs()


def distance(stock: Any, feature: Any, model: TaskModel, best: Any) -> float:
    return float(distances(stock, feature, model, best).view(2, -1).amin(1).sum())


@pytest.mark.parametrize(
    ("family", "head"), with_families({"choice": "choice"}, families=OTHER_KINDS.__getitem__, every=False)
)
def test_the_most_probable_choice_equals_the_direct_computation(family: str, head: str, folder: Any) -> None:
    path = folder(family, head)
    task = MultipleChoice.of(max_length=40)
    model = TaskModel.from_pretrained(path, task=task).double()
    stock: Any = AutoModelForMultipleChoice.from_pretrained(path).double().eval()
    row = {"context": "Is this seat free?", "question": "She asked", "choices": ["an hour ago.", "the baker."]}
    for asked in (row, {name: value for name, value in row.items() if name != "question"}):
        (prediction,) = model.predict([asked], explain=True, logits=True)
        features, spans = (
            task.features([asked], model.require_tokenizer()),
            task.token_spans([asked], model.require_tokenizer()),
        )
        feature, choice_spans = features[prediction.label], spans[prediction.label]

        class OneChoice(nn.Module):
            """The call of other classes: a sequence is a row."""

            config = stock.config
            get_input_embeddings = stock.get_input_embeddings

            def forward(self, **inputs: Tensor) -> Any:
                return stock(**{name: tensor[None] for name, tensor in inputs.items()}).logits

        steps = prediction.explanation.steps
        contributions = direct(OneChoice(), feature, choice_spans, lambda logits: logits[0, 0], steps=steps)
        texts = {**asked, "choices": prediction.answer}
        tokens = list(zip(visible(choice_spans, texts), contributions.tolist(), strict=True))
        compare(prediction.explanation, tokens, tolerance=1e-8)
        assert prediction.explanation.is_complete
        for word in prediction.explanation.words:
            assert word.word == texts[word.column][word.start : word.end]
        columns = [word.column for word in prediction.explanation.words]
        assert list(dict.fromkeys(columns)) == list(asked)
        assert prediction.explanation.logit == pytest.approx(max(prediction.logits), abs=1e-6)


ENTITY_LABELS = ("O", "B-WHO", "I-WHO")
SENTENCES = (
    {"words": ["Don't", "tell", "the", "state-of-the-art", "baker", "", "3.5", "New York"]},
    {"words": []},
    {"words": ["Is", "n't", "it", "late"], "text": "  Isn't it\tlate?"},
    {"text": "Nobody had told O'Neill's baker."},
    {"words": ["rain", "sleet"], "text": "another text"},
)


def tagger(path: Path, **fields: Any) -> tuple[TaskModel, Any]:
    """A tagger in float64 and the same model of transformers."""
    task = TokenClassification.of(labels=ENTITY_LABELS, **fields)
    stock: Any = AutoModelForTokenClassification.from_pretrained(path).double().eval()
    return TaskModel.from_pretrained(path, task=task).double(), stock


def compare_entities(model: TaskModel, stock: Any, prediction: Any) -> int:
    """Compares each entity of a row with the direct computation by transformers' model, one window after the other."""
    tokenizer, words = model.require_tokenizer(), list(prediction.words)
    whole = TokenClassification.of(
        labels=ENTITY_LABELS, max_length=40, labelling="all"
    )  # reads all sub-words of a word
    sizes = [len(whole.features([{"words": [word]}], tokenizer)[0]["word_ids"]) for word in words]
    starts = list(accumulate(sizes, initial=0))[:-1]  # of each word, among the sub-words of the row
    labels = [ENTITY_LABELS.index(tag) for tag in prediction.tags]
    features = model.task.with_settings(labelling="first").features([{"words": words}], tokenizer)
    for span, entity in zip(entities(prediction.tags), prediction.entities, strict=True):
        inside, result, sums = range(span.start, span.end), entity.explanation, [0.0] * len(words)
        assert result.label == entity.entity_group
        logits = [prediction.logits[word][labels[word]] for word in inside]
        assert result.logit == pytest.approx(np.mean(logits), abs=1e-6)
        for feature in features:
            tokens = dict(zip(feature["word_ids"], feature["gather_positions"], strict=True))
            terms = [(tokens[word], labels[word]) for word in inside if word in tokens]
            if not terms:
                continue
            last = len(feature["input_ids"]) - 1
            contributions = direct(
                stock,
                feature,
                [None if token in (0, last) else token for token in range(last + 1)],
                lambda output, terms=terms: sum(output.logits[0, token, label] for token, label in terms),
                steps=result.steps,
            )
            word, first = next(iter(tokens.items()))
            for token, number in enumerate(contributions.tolist()[1:-1], start=1):
                sums[bisect_right(starts, starts[word] + token - first) - 1] += number / len(inside)
        for word in range(len(words)):
            if words[word] == "":  # it has no place, so the next word has its contribution
                sums[word + 1] += sums[word]
        expected = [(word, number) for word, number in zip(words, sums, strict=True) if word]
        assert [word.word for word in result.words] == [word for word, _ in expected]
        numbers = [number for _, number in expected]
        assert [word.contribution for word in result.words] == pytest.approx(numbers, abs=1e-8 * max(map(abs, numbers)))
        assert result.is_complete
        assert sum(numbers) == pytest.approx(result.logit - result.baseline_logit, rel=0.0101, abs=1e-6)
    return len(prediction.entities)


@pytest.mark.parametrize(
    ("family", "labelling"),
    [
        *with_families({"first": "first"}, families=lambda _: OTHER_KINDS["tags"], every=False),
        *with_families({"continuation": "continuation", "all": "all"}, families=lambda _: ["bert"], every=False),
    ],
)
def test_entities_of_every_family_equal_the_direct_computation(family: str, labelling: Any, folder: Any) -> None:
    path = folder(family, "token", labels=ENTITY_LABELS)
    model, stock = tagger(path, max_length=40, labelling=labelling, doc_stride=4)
    rows = [dict(row) for row in SENTENCES]
    if model.require_tokenizer().unk_token_id is None:  # nothing stands for an empty word
        rows = [row | {"words": [word for word in row["words"] if word]} if "words" in row else row for row in rows]
    predictions = model.predict(rows, explain=True, logits=True)
    assert sum(compare_entities(model, stock, prediction) for prediction in predictions) > 3
    assert predictions[1].entities == ()
    texts = ["", "", str(SENTENCES[2]["text"]), str(SENTENCES[3]["text"]), "rain sleet"]
    for prediction, text, column in zip(predictions, texts, ("words", "", "text", "text", "words"), strict=True):
        for word in (word for entity in prediction.entities for word in entity.explanation.words):
            assert word.column == column
            assert text in ("", text[: word.start] + word.word + text[word.end :])


def test_an_entity_of_two_windows_adds_them_up(folder: Any) -> None:
    path = folder("bert", "token", labels=ENTITY_LABELS)
    model, stock = tagger(path, max_length=12, doc_stride=4)
    torch.nn.init.zeros_(model.head.output.weight[0])
    model.head.output.bias.data = torch.tensor([-9.0, -9.0, 9.0], dtype=torch.float64)  # all words are one entity
    stock.classifier.load_state_dict(model.head.output.state_dict())
    row = {"words": LINES[0].split()[:20]}
    assert len(model.task.features([row], model.require_tokenizer())) > 2
    (prediction,) = model.predict(row, explain=True, logits=True)
    assert compare_entities(model, stock, prediction) == 1
    assert all(word.contribution for word in prediction.entities[0].explanation.words)


def test_words_of_the_document_around_a_row_stay_as_they_are(folder: Any) -> None:
    model, _ = tagger(folder("bert", "token", labels=ENTITY_LABELS), max_length=40, doc_stride=4, context_tokens=8)
    rows = [{"words": line.split()[:6], "document": "a"} for line in LINES[:3]]
    pairs = zip(rows, model.predict(rows, explain=True), strict=True)
    explained = [(row, entity) for row, prediction in pairs for entity in prediction.entities]
    assert explained
    for row, entity in explained:
        assert [word.word for word in entity.explanation.words] == row["words"]
        assert entity.explanation.is_complete


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"labels": ENTITY_LABELS, "crf": True}, "crf = true scores sequences of tags, not words. Predict without"),
        ({"labels": ("NOUN", "VERB", "X")}, "explains entities, and its labels mark none .*. Predict without"),
    ],
)
def test_taggers_without_entities_or_scores_of_words_say_so(fields: Any, message: str, folder: Any) -> None:
    model = TaskModel.from_pretrained(folder("bert"), task=TokenClassification.of(max_length=40, **fields))
    with pytest.raises(UsageError, match=message):
        model.predict(SENTENCES, explain=True)


def test_other_rows_of_the_batch_change_nothing(folder: Any) -> None:
    model = TaskModel.from_pretrained(folder("bert", labels=LABELS), task=SequenceClassification, max_length=40)
    rows = [*TEXTS, *reversed(TEXTS), "rain"]
    together = explanations(model, rows)
    for row, result in zip(rows, together, strict=True):
        (alone,) = explanations(model, [row])
        assert alone.steps == result.steps
        assert [word.word for word in alone.words] == [word.word for word in result.words]
        contributions = [[word.contribution for word in which.words] for which in (alone, result)]
        assert contributions[0] == pytest.approx(contributions[1], abs=1e-6)


def test_windows_of_a_long_text_add_up(folder: Any) -> None:
    task = SequenceClassification.of(labels=LABELS, long_texts="windows", max_length=24, doc_stride=8)
    model = TaskModel.from_pretrained(folder("bert", wide=True), task=task).double()
    text = " ".join(LINES[:4])
    (prediction,) = model.predict([text], explain=True, logits=True)
    result = prediction.explanation
    assert result.logit == pytest.approx(max(prediction.logits), abs=1e-6)
    assert [(word.start, word.end) for word in result.words][-1][1] == len(text)
    assert all(word.contribution for word in result.words)
    total = sum(word.contribution for word in result.words)
    assert abs(total - (result.logit - result.baseline_logit)) <= 0.01 * abs(result.logit - result.baseline_logit)


def test_words_that_were_cut_have_contributed_nothing(folder: Any) -> None:
    model = TaskModel.from_pretrained(folder("bert", labels=LABELS), task=SequenceClassification, max_length=12)
    (result,) = explanations(model, [LINES[0]])
    read = [word.contribution != 0 for word in result.words]
    assert [is_read for is_read, _ in groupby(read)] == [True, False]
    assert len(read) == len(word_spans(LINES[0]))


@pytest.mark.parametrize(
    ("problem", "label"), [("regression", None), ("multi_label_classification", "high")], ids=["number", "labels"]
)
def test_numbers_and_several_labels(problem: Any, label: str | None, folder: Any) -> None:
    labels = {} if label is None else {"labels": LABELS}
    task = SequenceClassification.of(problem_type=problem, max_length=40, **labels)  # type: ignore[arg-type]  # a str
    model = TaskModel.from_pretrained(folder("bert"), task=task)
    for prediction in model.predict(TEXTS, explain=True, logits=True):
        result = prediction.explanation
        assert result.label == (None if label is None else prediction.label)
        assert result.logit == pytest.approx(max(prediction.logits), abs=1e-5)
        assert prediction.to_json()["explanation"]["words"] == [vars(word) for word in result.words]


def test_no_answer_is_explained_by_its_own_logits(folder: Any) -> None:
    task = SpanExtraction.of(
        max_length=32, max_query_length=8, doc_stride=4, version_2_with_negative=True, null_threshold=-1000.0
    )
    model = TaskModel.from_pretrained(folder("bert", "span"), task=task)
    for prediction in model.predict(QUESTIONS, explain=True):
        assert (prediction.answer, prediction.explanation.label) == ("", "")
        assert prediction.explanation.logit == pytest.approx(prediction.null_score, abs=1e-5)


def test_the_model_is_left_as_it_was(folder: Any) -> None:
    model = TaskModel.from_pretrained(folder("bert", labels=LABELS), task=SequenceClassification, max_length=40)
    model.train()
    plain, asked = model.predict(TEXTS), model.predict(TEXTS, explain=True)
    assert model.training
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())
    for before, after in zip(plain, asked, strict=True):
        content = after.to_json()
        del content["explanation"]
        assert content == before.to_json()


def test_what_does_not_add_up_is_told(
    folder: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(explanation, "FEWEST_STEPS", 1)
    monkeypatch.setattr(explanation, "MOST_STEPS", 2)
    model = TaskModel.from_pretrained(
        folder("bert", labels=LABELS, wide=True), task=SequenceClassification, max_length=40
    )
    with caplog.at_level(logging.WARNING, "bert_tasks"):
        results = explanations(model, TEXTS)
    missed = [result for result in results if not result.is_complete]
    assert missed
    assert all(result.steps == 2 for result in missed)
    assert f"{len(missed)} of 4 explanations do not add up" in caplog.text


def small_classifier(folder: Any) -> TaskModel:
    return TaskModel.from_pretrained(folder("bert", labels=LABELS), task=SequenceClassification, max_length=40)


def test_contexts_of_the_caller_change_nothing(folder: Any) -> None:
    model = small_classifier(folder)
    (expected,) = explanations(model, TEXTS[:1])
    for context in (torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")):
        with context():  # weights that are loaded in inference mode take part in no backward pass
            results = [*explanations(model, TEXTS[:1]), *explanations(small_classifier(folder), TEXTS[:1])]
        for result in results:
            assert result.is_complete
            assert result.label == expected.label
            numbers = [[word.contribution for word in attribution.words] for attribution in (result, expected)]
            assert numbers[0] == pytest.approx(numbers[1], abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_half_precision_are_refused(dtype: torch.dtype, folder: Any) -> None:
    with pytest.raises(UsageError, match=r"the model's weights are torch\..*float16\. Call model\.float\(\)"):
        small_classifier(folder).to(dtype).predict(TEXTS[:1], explain=True)


def test_gradients_that_are_no_numbers_are_no_explanation(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explanation, "MOST_STEPS", 32)
    model = small_classifier(folder)
    model.encoder.embeddings.norm.register_full_backward_hook(lambda module, slopes, _: (slopes[0] * float("nan"),))
    with pytest.raises(NotFiniteScoresError, match="not finite numbers"):
        model.predict(TEXTS[:1], explain=True)


def test_few_rows_are_read_before_the_first_explanation(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explanation, "MOST_STEPS", 16)
    rows = iter([{"text": "rain"}] * 100)
    next(predict_rows(small_classifier(folder), rows, explain=True))
    assert len(list(rows)) == 100 - 32


# Of characters that tokenizers drop, split, join or replace.
ODD = (
    "\u200b",
    "\ufeff",
    "½",
    "ﬁ",
    "e\u0301",
    "😀",
    "👩\u200d👧",
    "北京",
    " \t\n",
    "\u3000",
    "O'Neill's",
    "[MASK]",
    "▁",
    "don't",
    "…",
    "100%",
)


@pytest.mark.parametrize("tokenizer_name", slow_except(TOKENIZERS, *TOKENIZERS[:3]))
@settings(max_examples=30)
@given(pieces=st.lists(st.sampled_from([*ODD, *" .,", *LINES[4].split(), *MULTILINGUAL_LINES[5][:4]]), max_size=12))
def test_each_token_is_counted_once_in_a_word_of_the_text(
    tokenizer_name: str, pieces: list[str], by_kind: dict[str, PreTrainedTokenizerBase]
) -> None:
    """Words are parts of the text that follow one another, hold all of it but white space, and cut no token."""
    text, tokenizer = "".join(pieces), by_kind[tokenizer_name]
    task = SequenceClassification.of(labels=LABELS, max_length=500)
    (spans,) = task.token_spans([{"text": text}], tokenizer)
    tokens = [(span, 1.0) for span in spans if span is not None]
    words = word_contributions({"text": text}, tokens)
    assert sum(word.contribution for word in words) == len(tokens)
    assert all(text[word.start : word.end] == word.word for word in words)
    assert all(left.end <= right.start for left, right in pairwise(words))
    outside = set(range(len(text))) - {position for word in words for position in range(word.start, word.end)}
    assert all(text[position].isspace() for position in outside)
    text_words = TextWords(text, [(span.start, span.end) for span, _ in tokens])
    for span, _ in tokens:
        start, end = text_words.spans[text_words.word_of(span.start, span.end)]
        visible = {position for position in range(span.start, span.end) if not text[position].isspace()}
        assert visible <= set(range(start, end))


def test_words_are_finer_than_white_space_and_whole_where_a_token_is() -> None:
    words = word_contributions(
        {"text": "Don't, U.S."},
        [(TokenSpan("text", 0, 3), 1.0), (TokenSpan("text", 3, 6), 2.0), (TokenSpan("text", 6, 8), 4.0)],
    )
    assert [(word.word, word.contribution) for word in words] == [("Don't,", 3.0), ("U.S.", 4.0)]


@pytest.mark.slow  # ten seconds
@pytest.mark.skipif("BERT_TASKS_DATA" not in os.environ, reason="BERT_TASKS_DATA is not set")
def test_published_weights_add_up_within_one_percent(embedded_model: Path) -> None:
    with (Path(os.environ["BERT_TASKS_DATA"]) / "glue" / "SST-2" / "dev.tsv").open(encoding="utf-8") as file:
        rows = [row["sentence"] for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)][:10]
    model = TaskModel.from_pretrained(embedded_model, task="sequence-classification", labels=["negative", "positive"])
    results = explanations(model, rows)
    assert max(result.completeness_error for result in results) <= 0.01
    for result in results:
        total = sum(word.contribution for word in result.words)
        assert total == pytest.approx(result.logit - result.baseline_logit, rel=0.0101, abs=1e-5)
