"""Span extraction: loss, decoding, metrics, files and folders, against transformers and plain Python.

Shape legend: B windows, T tokens of a window.
"""

import json
import math
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bert_tasks.cli import main
from bert_tasks.data.features import Truncation
from bert_tasks.errors import DataError
from bert_tasks.init.columns import UserHints
from bert_tasks.init.readings import best_reading
from bert_tasks.model.task_model import TaskModel
from bert_tasks.outputs.answer import SpanPrediction
from bert_tasks.outputs.features import Feature
from bert_tasks.outputs.span_search import Span
from bert_tasks.tasks.features import collate
from bert_tasks.tasks.span_extraction import SpanExtraction
from support.hf_models import hf_class, hf_config, hf_model, widen
from support.parity import ours_from
from support.small_tokenizers import LINES

V1 = SpanExtraction.of(max_length=40, doc_stride=12, max_query_length=10, n_best_size=6, max_answer_length=5)
V2 = SpanExtraction.of(
    max_length=40,
    doc_stride=12,
    max_query_length=10,
    n_best_size=6,
    max_answer_length=5,
    version_2_with_negative=True,
)
CONTEXT = " ".join(LINES[:5])
QUESTION = "when does the ferry leave"
Answer = tuple[str, int]


def row(context: str = CONTEXT, *answers: Answer, question: str = QUESTION, **more: Any) -> dict[str, Any]:
    texts, starts = [text for text, _ in answers], [start for _, start in answers]
    return {"question": question, "context": context, "answers": {"text": texts, "answer_start": starts}, **more}


def predicted(
    text: str, *, null_odds: float | None = None, name: str | None = None, answer: str | None = None
) -> SpanPrediction:
    """A prediction whose best span is ``text`` and whose answer is that too, unless stated."""
    best = Span(text=text, start=0, end=len(text), start_logit=1.5, end_logit=1.0, score=0.75)
    reply = text if answer is None else answer
    return SpanPrediction(
        id=name, answer=reply, start=0, end=len(reply), score=0.75, n_best=(best,), best=best, null_odds=null_odds
    )


def windows_of(lengths: Sequence[int], labels: Sequence[tuple[int, int] | None]) -> list[Feature]:
    return [
        Feature(
            row=number,
            input_ids=[2] * length,
            token_type_ids=[0] * length,
            labels=None if label is None else [float(position) for position in label],
        )
        for number, (length, label) in enumerate(zip(lengths, labels, strict=True))
    ]


def random_logits(rows: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(rows, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class TestLoss:
    LENGTHS = (7, 3, 12, 3, 1)
    LABELS = ((2, 6), (0, 0), (11, 11), (1, 2), (0, 0))

    def test_is_cross_entropy_over_the_tokens_of_each_window(self) -> None:
        logits = random_logits(sum(self.LENGTHS))
        expected = 0.0
        for window_logits, label in zip(logits.split(self.LENGTHS), self.LABELS, strict=True):
            for column, position in enumerate(label):
                scores = window_logits[:, column].tolist()
                expected += math.log(sum(map(math.exp, scores))) - scores[position]
        (loss,) = V1.output.loss(logits, collate(windows_of(self.LENGTHS, self.LABELS), position_offset=0))
        assert loss.total.item() == pytest.approx(expected, rel=1e-12)
        assert loss.count.item() == 2 * len(self.LENGTHS)

    @pytest.mark.slow
    @pytest.mark.parametrize("family", ["bert", "roberta", "albert"])
    def test_a_hundred_steps_give_transformers_loss_curve(self, family: str) -> None:
        none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = hf_config(family, num_hidden_layers=2, num_labels=2, **none)
        theirs = hf_model(family, "span", config=config).train()
        ours = ours_from(theirs, "span").train()
        assert isinstance(ours, TaskModel)
        generator = torch.Generator().manual_seed(3)
        ids = torch.randint(3, 100, (5, 4, 12), generator=generator)
        places = torch.randint(0, 12, (5, 4, 2), generator=generator)

        def hf_loss(step: int) -> Tensor:
            start, end = places[step % 5].unbind(1)
            loss: Tensor = theirs(ids[step % 5], start_positions=start, end_positions=end).loss
            return loss

        def our_loss(step: int) -> Tensor:
            features = windows_of([12] * 4, [tuple(label) for label in places[step % 5].tolist()])
            rows = ids[step % 5].tolist()
            features = [{**feature, "input_ids": tokens} for feature, tokens in zip(features, rows, strict=True)]
            batch = collate(features, position_offset=ours.config.position_offset)
            (loss,) = V1.output.loss(ours(batch), batch)
            return loss.total / loss.count

        expected, curve = loss_curve(theirs, hf_loss), loss_curve(ours, our_loss)
        assert max(abs(loss - other) for loss, other in zip(expected, curve, strict=True)) <= 1e-9
        assert sum(expected[-5:]) < 0.5 * sum(expected[:5])


def loss_curve(model: torch.nn.Module, loss_of: Callable[[int], Tensor]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, foreach=True)
    curve = []
    for step in range(100):
        loss = loss_of(step)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        curve.append(loss.item())
    return curve


def logits_for(features: Sequence[Feature], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [4 * torch.randn(len(feature["input_ids"]), 2, generator=generator) for feature in features]


def decoded(
    task: SpanExtraction, rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, seed: int
) -> list[SpanPrediction]:
    """The predictions for rows whose logits are drawn with this seed."""
    features = task.features(rows, tokenizer)
    compact = task.output.compact(logits_for(features, seed), features)
    return task.output.decode(compact, features, rows, tokenizer)


class TestDecode:
    @settings(max_examples=10, deadline=None)
    @given(
        context=st.text(st.sampled_from("ab é\u0301港口😀👩\u200d\n\u3000.7"), max_size=70),
        seed=st.integers(0, 1000),
        negative=st.booleans(),
    )
    def test_offsets_give_the_exact_substring(
        self, by_kind: dict[str, PreTrainedTokenizerBase], context: str, seed: int, negative: bool
    ) -> None:
        base = V2 if negative else V1
        task = base.with_settings(n_best_size=V1.max_length)  # all starts and ends are paired
        rows = [row(context, id="x")]
        for tokenizer in (by_kind[kind] for kind in ("wordpiece", "bpe", "multilingual")):
            (guess,) = decoded(task, rows, tokenizer, seed)
            assert context[guess.start : guess.end] == guess.answer == guess.answer.strip()
            for span in guess.n_best:
                assert 0 <= span.start <= span.end <= len(context)
                assert context[span.start : span.end] == span.text == span.text.strip()
                assert span.text or span.start == span.end == 0
            assert guess.id == "x"
            assert guess.best.text or not any(map(str.isalnum, context))

    def test_the_threshold_decides_about_no_answer(self, wordpiece_tokenizer: PreTrainedTokenizerBase) -> None:
        (guess,) = decoded(V2, [row()], wordpiece_tokenizer, 0)
        assert guess.null_odds is not None
        assert guess.best.text
        for shift, empty in ((-0.01, True), (0.0, False), (0.01, False)):
            task = SpanExtraction.of(**V2.settings(), null_threshold=guess.null_odds + shift)
            (again,) = decoded(task, [row()], wordpiece_tokenizer, 0)
            assert (again.answer == "") == empty
            assert (again.n_best, again.best, again.null_odds) == (guess.n_best, guess.best, guess.null_odds)
            spans = [span for span in again.n_best if (span.text, span.start) == (again.answer, again.start)]
            assert again.score in [span.score for span in spans]
            assert (again.start, again.end) == ((0, 0) if empty else (guess.best.start, guess.best.end))

    def test_summaries_are_small_and_sent_alone(self, wordpiece_tokenizer: PreTrainedTokenizerBase) -> None:
        features = V2.features([row(" ".join(LINES))], wordpiece_tokenizer)
        assert len(features) > 10
        summaries = V2.output.compact(logits_for(features, 0), features)
        assert [summary.shape for summary in summaries] == [(7, 4)] * len(features)
        assert {summary.dtype for summary in summaries} == {torch.float32}
        whole = len(pickle.dumps(list(summaries)))
        assert whole < 3 * len(pickle.dumps(torch.stack(list(summaries)))) + 500 * len(features)


class TestMetrics:
    def test_second_version_scores_the_answers_whatever_the_threshold(self) -> None:
        guesses = [
            predicted("harbour", null_odds=-2.0),
            predicted("ferry", null_odds=1.0, answer=""),
            predicted("wind", null_odds=3.0, answer=""),
            predicted("rain", null_odds=2.0, answer=""),
        ]
        rows = [row("", ("harbour", 0)), row("", ("ferry", 0)), row(), row()]
        metrics = V2.output.metrics(guesses, rows)
        assert metrics["f1"] == metrics["exact"] == 75.0
        assert (metrics["HasAns_f1"], metrics["NoAns_f1"], metrics["total"]) == (50.0, 100.0, 4)
        assert (metrics["best_f1"], metrics["best_f1_thresh"]) == (100.0, 1.0)
        fitted = V2.output.tune(guesses, rows)
        assert fitted.null_threshold == 1.5  # the middle between the odds of a right answer and of a wrong one
        assert fitted.metrics(guesses, rows) == metrics
        decided = [guesses[0], predicted("ferry", null_odds=1.0), *guesses[2:]]  # as the tuned threshold does
        assert V2.output.metrics(decided, rows)["f1"] == metrics["best_f1"]
        fitted_task = replace(V2, output=fitted)
        assert fitted_task.without_fitted_values() == V2
        assert fitted_task.settings() == V2.settings()
        assert V1.output.tune(guesses, rows) is V1.output
        assert V2.output.tune(guesses[:1], [{"question": "", "context": ""}]) is V2.output

    def test_what_no_window_holds_is_told(self) -> None:
        assert V2.cut_notes(Truncation(rows=200, cut_rows=0)) == ()
        cut, lost = V2.cut_notes(Truncation(rows=200, cut_rows=3, lost_answers=1))
        limit = f"max_query_length = {V2.max_query_length} tokens"
        assert cut == f"3 of 200 (1.5%) questions are longer than {limit} and were truncated"
        assert lost.startswith("1 of 200 (0.5%) questions has an answer that no window of max_length = ")

    def test_first_version_refuses_unanswerable_questions(self) -> None:
        rows = [row("", ("a", 0)), row(id="q7")]
        message = r"row 1 \(id 'q7'\): the question has no answer.* Set version_2_with_negative = true"
        with pytest.raises(DataError, match=message):
            V1.fit_rows(rows)
        with pytest.raises(DataError, match=message):
            V1.output.metrics([predicted("a"), predicted("a")], rows)
        assert V1.fit_rows([*rows[:1], {"question": "", "context": "", "answers": None}]) == V1
        assert V2.fit_rows(rows) == V2


class TestRender:
    def files(self, task: SpanExtraction, guesses: Sequence[SpanPrediction]) -> dict[str, Any]:
        texts = task.output.files[".json"].render(task.output, ".json", guesses, [{} for _ in guesses])
        return {name: json.loads(text) for name, text in texts.items()}

    def test_official_files(self) -> None:
        guesses = [predicted("harbour", null_odds=-2.5, name="a"), predicted("é", null_odds=4.0, answer="")]
        files = self.files(V2, guesses)
        entry = {"text": "harbour", "probability": 0.75, "start_logit": 1.5, "end_logit": 1.0}
        assert files[""] == {"a": "harbour", "1": ""}
        assert files["nbest.json"]["a"] == [entry]
        assert files["nbest.json"]["1"][0]["text"] == "é"
        assert files["null_odds.json"] == {"a": -2.5, "1": 4.0}
        assert list(self.files(V1, guesses)) == ["", "nbest.json"]
        assert self.files(V2, []) == {"": {}, "nbest.json": {}, "null_odds.json": {}}

    def test_an_id_names_one_row(self) -> None:
        with pytest.raises(DataError, match="id '1' appears 2 times"):
            self.files(V1, [predicted("a", name="1"), predicted("b")])
        check = V1.output.files[".json"].check
        for rows in ([{"id": "1"}, {}], [{"id": "a"}, {"id": "b"}, {"id": "a"}], [{"id": "2"}, {"id": None}, {}]):
            with pytest.raises(DataError, match="appears 2 times"):
                check(V1.output, ".json", rows)
        assert check(V1.output, ".json", [{"id": "0"}, {}, {"id": "2"}]) == ()


class TestSettings:
    @pytest.mark.parametrize("usable", [6, 7, 10, 48, 128, 384, 512, 4096])
    def test_fit_small_models(self, usable: int) -> None:
        implied = SpanExtraction.hf_settings({}, ("a", "b", "c"))
        task = SpanExtraction.of(**implied, **SpanExtraction.limited(usable))
        assert task.max_length == min(384, usable)
        assert task.max_length - task.max_query_length - 4 > task.doc_stride
        if usable >= 384:
            assert task == SpanExtraction.of()


@pytest.fixture
def stock_folder(wordpiece_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> tuple[Path, PreTrainedModel]:
    """A question-answering model as transformers saves it."""
    folder = tmp_path / "stock"
    config = hf_config("bert", vocab_size=len(wordpiece_tokenizer), num_hidden_layers=2, num_labels=2)
    model = hf_class("bert", "span")(config).eval()
    widen(model, seed=5)
    model.save_pretrained(folder)
    wordpiece_tokenizer.save_pretrained(folder)
    return folder, model


class TestFolders:
    @pytest.mark.slow
    def test_a_stock_folder_is_evaluated_by_the_rules_of_version_2(
        self,
        stock_folder: tuple[Path, PreTrainedModel],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        tmp_path: Path,
    ) -> None:
        """transformers' config does not say whether questions may have no answer: the user does."""
        lines = [row(LINES[0], (LINES[0][:3], 0)), row(LINES[1])]
        (tmp_path / "dev.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        command = ["bert-tasks", "evaluate", str(stock_folder[0]), str(tmp_path / "dev.jsonl"), "--json"]

        def run(*options: str) -> tuple[int, str, str]:
            monkeypatch.setattr(sys, "argv", [*command, *options])
            with pytest.raises(SystemExit) as end:
                main()
            printed = capsys.readouterr()
            return (0 if end.value.code is None else int(end.value.code)), printed.out, printed.err

        code, out, _ = run("--set", "version_2_with_negative=true", "--set", "settings.null_threshold=-1e9")
        assert (code, json.loads(out)["NoAns_exact"]) == (0, 100.0)
        assert run()[0] == 3
        code, _, err = run("--set", "version_2_with_negativ=true")
        assert (code, "did you mean 'version_2_with_negative'?" in err) == (2, True)
        assert run("--set", "doc_stride")[0] == 2
        for wrong in ("version_2_with_negative=yes", "doc_stride=x"):
            code, _, err = run("--set", wrong)
            assert code == 2
            assert f"{wrong.partition('=')[0]} is '{wrong.partition('=')[2]}'. Input should be a valid" in err


def spans_of(rows: Sequence[dict[str, str]]) -> dict[str, str] | None:
    """The columns of a question, its context and answers that ``init`` finds."""
    try:
        reading, _ = best_reading(rows, UserHints())
    except DataError:
        return None
    return reading.column_names if reading.task is SpanExtraction else None


@pytest.mark.parametrize(("copied", "is_found"), [(19, True), (17, False)])
def test_columns_are_spans_if_nine_in_ten_answers_are_in_their_context(copied: int, is_found: bool) -> None:
    rows = [
        {"asked": f"what is in line {i}?", "read": f"{i} {CONTEXT}", "given": f"{i} {line}" if i < copied else str(-i)}
        for i, line in enumerate([LINES[0]] * 20)
    ]
    assert spans_of(rows) == ({"question": "asked", "context": "read", "answers": "given"} if is_found else None)


@pytest.mark.parametrize(("share", "is_found"), [(0.4, True), (0.6, False), (0.9, False)])
def test_an_answer_is_shorter_than_half_of_its_context(share: float, is_found: bool) -> None:
    """A column that repeats most of another one, as the lead of an article does, answers nothing."""
    words = CONTEXT.split()
    rows = [
        {
            "asked": f"what is in line {i}?",
            "read": " ".join([str(i), *words]),
            "given": " ".join([str(i), *words][: round(share * (len(words) + 1))]),
        }
        for i in range(20)
    ]
    assert (spans_of(rows) is not None) == is_found
