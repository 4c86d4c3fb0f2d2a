"""Training with two threads, which computes two parts of a batch at the same time: the same samples, gradients of the
same sums, and the same bits each time.
"""

import threading
from dataclasses import dataclass

import pytest
import torch

from bert_tasks import TaskModel
from bert_tasks.tasks.sequence_classification.task import SequenceClassification
from bert_tasks.training import step as step_module
from bert_tasks.training.objectives import Supervised
from bert_tasks.training.step import OptimizerSteps
from support.hf_models import FAMILIES, hf_config
from support.small_checkpoints import tokenizer_of
from support.stopped_runs import digests, run, stopped
from support.task_examples import EXAMPLES
from support.training_runs import (
    LABELS,
    TASK,
    TWENTY_STEPS,
    UNLABELLED,
    WEIGHTED_TASK,
    LengthAndLabel,
    batches,
    distance,
    load_model,
    make_rows,
    make_steps,
    walk,
    weights_of,
)


@pytest.fixture(autouse=True)
def any_number_of_tokens(monkeypatch):
    """Batches as small as those of these tests are divided, too."""
    monkeypatch.setattr(step_module, "_LEAST_DIVIDED_TOKENS", 0)


@pytest.fixture
def parts(monkeypatch):
    """The threads and the number of features of all batches that are computed."""
    seen = []
    original = OptimizerSteps._gradients

    def recorded(steps, features, *arguments):
        seen.append((threading.current_thread().name, len(features)))
        return original(steps, features, *arguments)

    monkeypatch.setattr(OptimizerSteps, "_gradients", recorded)
    return seen


@pytest.mark.parametrize("objective", [Supervised, LengthAndLabel])
def test_two_threads_train_the_weights_of_one(wide_checkpoint, parts, objective):
    found, losses = [], []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            model = load_model(wide_checkpoint, WEIGHTED_TASK).double()
            rows = make_rows(37, unlabelled=UNLABELLED)
            steps = make_steps(model, rows, objective=objective(model), **TWENTY_STEPS)
            losses.append([log.loss for log in walk(steps)])
            found.append(weights_of(model))
            assert sorted(steps.samples.seen) == sorted(list(range(37)) * 4)
        finally:
            torch.set_num_threads(1)
    names = {name for name, _ in parts}
    assert len(names) == 3, "one thread, then two others"
    assert distance(*found) <= 1e-10  # AdamW magnifies how sums are rounded
    assert losses[1] == pytest.approx(losses[0], abs=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_is_the_same_bits_each_time(by_kind, two_threads, parts, family):
    """Whatever drops: embeddings, attention of every kind, feed-forward, heads."""
    tokenizer = tokenizer_of(family, by_kind)
    known = hf_config(family, vocab_size=len(tokenizer)).to_dict()
    known |= {name: 0.3 for name, value in known.items() if "dropout" in name and isinstance(value, float)}

    def gradients(seed=0):
        torch.manual_seed(0)
        model = TaskModel(known, TASK, tokenizer=tokenizer)
        steps = make_steps(model, make_rows(24), batch_size=24, vocabulary_rows="all", seed=seed)
        batch = next(batches(steps))
        torch.rand(len(parts))  # whatever else drew random numbers
        sums = steps.accumulate(0, batch)
        return {"loss": sums, **{name: parameter.grad.to_dense() for name, parameter in model.named_parameters()}}

    first, second, another = gradients(), gradients(), gradients(seed=1)
    assert len(parts) == 6
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert not torch.equal(first["loss"], another["loss"])


def test_both_parts_of_a_batch_have_as_many_tokens(wide_checkpoint, two_threads, monkeypatch):
    tokens, original = [], OptimizerSteps._gradients

    def recorded(steps, features, *arguments):
        tokens.append(sum(len(one["input_ids"]) for one in features))
        return original(steps, features, *arguments)

    monkeypatch.setattr(OptimizerSteps, "_gradients", recorded)
    rows = [{"text": "the " * words, "label": LABELS[0]} for words in range(1, 17)]
    make_steps(load_model(wide_checkpoint), rows, batch_size=16).accumulate(0, range(16))
    assert len(tokens) == 2
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("vocabulary_rows", ["all", "in_data"])
def test_the_half_that_is_first_does_not_count(wide_checkpoint, two_threads, monkeypatch, vocabulary_rows):
    """Tokens that are in both halves several times, so that their sums would differ in another order."""
    original = OptimizerSteps._gradients

    def gradients(slower):
        other_is_done = threading.Event()

        def one_after_the_other(steps, features, *arguments):
            has_longest = max(len(one["input_ids"]) for one in features) == longest
            if has_longest == (slower == "the longer half"):
                assert other_is_done.wait(60)
            found = original(steps, features, *arguments)
            other_is_done.set()
            return found

        monkeypatch.setattr(OptimizerSteps, "_gradients", one_after_the_other)
        rows = [*make_rows(30), {"text": "the ferry " * 15, "label": LABELS[0]}]
        steps = make_steps(load_model(wide_checkpoint), rows, batch_size=31, vocabulary_rows=vocabulary_rows)
        longest = int(steps.samples.lengths.max())
        steps.accumulate(0, range(31))
        return [parameter.grad.to_dense() for parameter in steps.parameters]

    found = [gradients(slower) for slower in ("the longer half", "the shorter half")]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_the_parts_of_a_batch_drop_other_elements(dropout_checkpoint, two_threads):
    """Eight times the same text: without dropout all logits are equal, and with equal masks both halves would be."""
    logits = []

    class Keeping(Supervised):
        def forward(self, batch):
            logits.append(self.model(batch).detach())
            return super().forward(batch)

    model = load_model(dropout_checkpoint)
    rows = [{"text": "the old ferry", "label": LABELS[0]}] * 8
    make_steps(model, rows, objective=Keeping(model), batch_size=8).accumulate(0, range(8))
    first, second = logits
    assert first.shape == second.shape == (4, 2)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("kind", ["single", "several", "token crf", "span v2", "masked"])
def test_a_stopped_run_ends_with_the_same_bits(dropout_checkpoint, tmp_path, two_threads, parts, kind):
    whole = {"micro_batch_tokens": 16384}
    run(tmp_path / "whole", dropout_checkpoint, kind, **whole)
    assert len({name for name, _ in parts}) > 1
    stopped(3, tmp_path / "cut", dropout_checkpoint, kind, **whole)
    run(tmp_path / "cut", dropout_checkpoint, kind, head_seed=5, **whole)
    assert digests(tmp_path / "cut") == digests(tmp_path / "whole")


@dataclass(frozen=True, kw_only=True)
class OwnTask(SequenceClassification):
    """A task of somebody else, whose head may draw random numbers."""


@pytest.mark.parametrize("kind", ["own task", "computed again", "one sample"])
def test_batches_that_are_not_divided(dropout_checkpoint, two_threads, parts, kind):
    """The first two may draw from the generator that all threads share."""
    task = OwnTask(labels=LABELS, max_length=40) if kind == "own task" else TASK
    model = load_model(dropout_checkpoint, task)
    model.encoder.gradient_checkpointing = kind == "computed again"
    count = 1 if kind == "one sample" else 8
    steps = make_steps(model, make_rows(count), batch_size=8)
    first = steps.accumulate(0, range(count))
    assert torch.equal(first, steps.accumulate(0, range(count)))
    assert parts == [(threading.current_thread().name, count)] * 2


def test_only_batches_of_many_tokens_are_divided(dropout_checkpoint, two_threads, parts, monkeypatch):
    steps = make_steps(load_model(dropout_checkpoint), make_rows(8), batch_size=8)
    tokens = int(steps.samples.lengths.sum())
    for least, sizes in ((tokens, [4, 4]), (tokens + 1, [8])):
        monkeypatch.setattr(step_module, "_LEAST_DIVIDED_TOKENS", least)
        parts.clear()
        steps.accumulate(0, range(8))
        assert [size for _, size in parts] == sizes


def test_several_micro_batches_are_not_divided(dropout_checkpoint, two_threads, parts):
    """Their gradients are added in an order of their own: more than two numbers have other sums in another order."""
    steps = make_steps(load_model(dropout_checkpoint), make_rows(8), batch_size=8, micro_batch_tokens=30)
    steps.accumulate(0, range(8))
    assert len(parts) > 2
    assert {name for name, _ in parts} == {threading.current_thread().name}


def test_predictions_do_not_depend_on_the_threads(wide_checkpoint):
    example = EXAMPLES["single"]
    model = load_model(wide_checkpoint, example.task).double()
    rows = [{"text": row["text"]} for row in make_rows(60)]
    features = model.task.features(rows, model.tokenizer)
    one = model.forward_windows(features, max_tokens=30)
    torch.set_num_threads(2)
    try:
        two = model.forward_windows(features, max_tokens=30)
    finally:
        torch.set_num_threads(1)
    assert all(torch.allclose(left, right, rtol=0, atol=1e-5) for left, right in zip(one, two, strict=True))
    assert not model.training
    model.train()
    model.forward_windows(features, max_tokens=30)
    assert all(module.training for module in model.modules())
