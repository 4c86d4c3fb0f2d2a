"""A step does not depend on how its batch is cut, and one that is not finite leaves the weights alone."""

import ast
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from bert_tasks import TaskModel
from bert_tasks.errors import DivergedError
from bert_tasks.model.windows import pack_features
from bert_tasks.outputs.base import LossTerm
from bert_tasks.outputs.classes import Classes
from bert_tasks.tasks.sequence_classification import SequenceClassification
from bert_tasks.training.objectives import Supervised
from bert_tasks.training.optim import set_sparse_gradients
from bert_tasks.training.sampling import learning_rate_factor
from bert_tasks.training.step import MOST_OVERFLOWS, StepPlan, StepResult, read_step_metrics
from support.hf_models import hf_config
from support.sampling import slow_except
from support.small_checkpoints import tokenizer_of
from support.sources import package_sources
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

# Each operator whose backward pass could add in another order, once: tables of word, position and segment embeddings,
# attention of every kind, gated and shared layers. The other families have no operators of their own.
OWN_OPERATORS = ("bert", "roberta", "albert", "modernbert", "deberta-v2", "mpnet", "ernie", "roformer")
OWN_OPERATORS += ("eurobert", "gte")


@dataclass(frozen=True, kw_only=True)
class MeanOfMeansClasses(Classes):
    """The usual mistake: micro-batches count alike, whatever they hold."""

    def loss(self, logits, batch):
        (loss,) = super().loss(logits, batch)
        total = loss.total / loss.count.clamp(min=1e-9)
        return (LossTerm(name=loss.name, total=total, count=torch.ones_like(loss.count)),)


class MeanOfMeans(SequenceClassification):
    outputs = (MeanOfMeansClasses,)


def trained(checkpoint, *, micro_batch_tokens, dtype=torch.float64, task=WEIGHTED_TASK):
    model = load_model(checkpoint, task).to(dtype)
    rows = make_rows(37, unlabelled=UNLABELLED)
    steps = make_steps(model, rows, micro_batch_tokens=micro_batch_tokens, **TWENTY_STEPS)
    logs = walk(steps)
    assert len(logs) == 20
    assert sorted(steps.samples.seen) == sorted(list(range(37)) * 4)
    return weights_of(model), [log.loss for log in logs]


@pytest.mark.parametrize("family", slow_except(OWN_OPERATORS, "bert"))
def test_gradients_of_two_threads_are_the_same_bits_each_time(by_kind, two_threads, family):
    """With dropout wherever a family has it: embeddings, attention of every kind, feed-forward, heads."""
    tokenizer = tokenizer_of(family, by_kind)
    config = hf_config(family, vocab_size=len(tokenizer), num_hidden_layers=2).to_dict()
    config |= {name: 0.3 for name, value in config.items() if "dropout" in name and isinstance(value, float)}

    def gradients(seed=0):
        torch.manual_seed(0)
        model = TaskModel(config, TASK, tokenizer=tokenizer)
        steps = make_steps(model, make_rows(12), batch_size=12, vocabulary_rows="all", seed=seed)
        (term,) = steps.backward(0, next(batches(steps)))
        return [term.total, *(parameter.grad.to_dense() for parameter in model.parameters())]

    first = gradients()
    assert all(torch.equal(gradient, other) for gradient, other in zip(first, gradients(), strict=True))
    assert not torch.equal(first[0], gradients(seed=1)[0])


def test_the_steps_of_an_epoch_and_of_the_warm_up_are_rounded_up(wide_checkpoint):
    steps = make_steps(load_model(wide_checkpoint), make_rows(9), batch_size=8, epochs=3, warmup_ratio=0.2)
    assert steps.plan == StepPlan(total=6, warmup=2, decay=1)


@pytest.mark.parametrize(
    ("dtype", "tolerance", "micro_batch_tokens", "gamma"),
    [
        (torch.float64, 1e-12, 40, 2.0),
        pytest.param(torch.float64, 1e-12, 1, 0.0, marks=pytest.mark.slow),
        pytest.param(torch.float32, 1e-6, 40, 0.0, marks=pytest.mark.slow),
    ],
)
def test_micro_batches_change_no_weight(wide_checkpoint, dtype, tolerance, micro_batch_tokens, gamma):
    options = {"dtype": dtype, "task": WEIGHTED_TASK.with_settings(focal_gamma=gamma)}
    whole, losses = trained(wide_checkpoint, micro_batch_tokens=16384, **options)
    cut, losses_cut = trained(wide_checkpoint, micro_batch_tokens=micro_batch_tokens, **options)
    assert distance(whole, cut) <= tolerance
    assert losses_cut == pytest.approx(losses, abs=tolerance * 100)


def test_micro_batches_in_bfloat16_give_almost_the_same_gradient(wide_checkpoint):
    gradients = []
    for tokens in (16384, 40):
        model = load_model(wide_checkpoint, WEIGHTED_TASK)
        steps = make_steps(model, make_rows(20), micro_batch_tokens=tokens, batch_size=20, vocabulary_rows="all")
        with torch.autocast("cpu", torch.bfloat16):
            steps.backward(0, range(20))
        gradients.append(torch.cat([parameter.grad.to_dense().flatten() for parameter in model.parameters()]))
    whole, cut = gradients
    assert whole.dtype == torch.float32
    assert 0 < (whole - cut).norm() <= 0.02 * whole.norm()


def test_the_mean_of_micro_batch_means_would_show(wide_checkpoint):
    task = MeanOfMeans.of(labels=LABELS, max_length=40, class_weights=(0.3, 1.7))
    whole, _ = trained(wide_checkpoint, micro_batch_tokens=16384)
    assert distance(whole, trained(wide_checkpoint, micro_batch_tokens=16384, task=task)[0]) <= 1e-12
    assert distance(whole, trained(wide_checkpoint, micro_batch_tokens=40, task=task)[0]) > 1e-4


def test_the_gradient_is_that_of_the_weighted_mean_over_labelled_rows(wide_checkpoint):
    rows = make_rows(9, unlabelled=(2, 5))
    model = load_model(wide_checkpoint, WEIGHTED_TASK).double()
    steps = make_steps(model, rows, batch_size=9, max_grad_norm=None, micro_batch_tokens=30, vocabulary_rows="all")
    batch = next(batches(steps))
    terms = steps.backward(0, batch)
    kept = {name: parameter.grad for name, parameter in model.named_parameters()}
    result = steps.update(0, batch, terms)  # scales the gradients in place before the optimizer drops them

    reference = load_model(wide_checkpoint, WEIGHTED_TASK).double()
    labelled = [row for row in rows if row["label"] is not None]
    encoded = reference.tokenizer([row["text"] for row in labelled], padding=True, return_tensors="pt")
    logits = reference(encoded["input_ids"], encoded["attention_mask"])
    targets = torch.tensor([LABELS.index(row["label"]) for row in labelled])
    weight = torch.tensor(WEIGHTED_TASK.output.class_weights, dtype=torch.float64)
    loss = torch.nn.functional.cross_entropy(logits, targets, weight=weight)
    loss.backward()
    assert result.values[0].item() == pytest.approx(loss.item(), rel=1e-12)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(kept[name].to_dense(), parameter.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("size", [1, 3])
def test_a_term_without_a_count_leaves_the_gradient_of_the_other(wide_checkpoint, size):
    """The first of the two terms counts labelled rows, of which there are none, the second one counts 1 or more."""
    model = load_model(wide_checkpoint).double()
    rows = make_rows(size, unlabelled=range(size))
    objective = LengthAndLabel(model, shortest=0).double()
    steps = make_steps(model, rows, objective=objective, batch_size=size, max_grad_norm=None, vocabulary_rows="all")
    batch = next(batches(steps))
    (features,) = steps.cut(0, batch)
    _, term = objective(pack_features(model, features))
    (term.total * term.weight / size).backward()
    squares = [parameter.grad.to_dense().square().sum() for parameter in objective.parameters()]
    expected = float(torch.stack(squares).sum().sqrt())
    objective.zero_grad(set_to_none=True)
    loss, norm, bad, _, *means = steps.update(0, batch, steps.backward(0, batch)).values.tolist()
    assert (norm, bad) == (pytest.approx(expected, rel=1e-9), 0)
    assert loss == pytest.approx(term.total.item() * term.weight / size, rel=1e-9)
    assert expected > 0
    assert math.isnan(means[0])


class WithTable(Supervised):
    """Reads every row of the word embeddings, too, as tied heads do."""

    reads_all_embeddings = True

    def forward(self, batch):
        (term,) = super().forward(batch)
        penalty = self.model.encoder.embeddings.word.weight.square().sum()
        return (replace(term, total=term.total + penalty * term.count),)


@pytest.mark.parametrize("objective", slow_except([Supervised, WithTable], Supervised))
def test_sparse_gradients_of_embeddings_change_no_weight(wide_checkpoint, objective):
    weights, logs = [], []
    for enabled in (True, False):
        model = load_model(wide_checkpoint, WEIGHTED_TASK).double()
        steps = make_steps(
            model, make_rows(37), objective=objective(model), micro_batch_tokens=40, max_grad_norm=0.1, **TWENTY_STEPS
        )
        if not enabled:
            set_sparse_gradients(steps.objective, False)
        logs.append(walk(steps))
        weights.append(weights_of(model))
        tables = list(steps.optimizer._tables.values())
        assert len(tables) == (enabled and objective is Supervised)
        assert not any(table.any() for table in tables)  # a row that is left over would be trained again
    assert distance(*weights) <= 1e-12
    assert [log.grad_norm for log in logs[0]] == pytest.approx([log.grad_norm for log in logs[1]], rel=1e-12)
    assert all(log.grad_norm > 0.1 for log in logs[0])  # they were clipped


def test_rows_that_are_not_finite_do_not_stay_in_the_table(wide_checkpoint):
    model = load_model(wide_checkpoint)
    steps = make_steps(model, make_rows(8), batch_size=4, vocabulary_rows="all")
    word = model.encoder.embeddings.word.weight
    terms = steps.backward(0, next(batches(steps)))
    word.grad._values().fill_(math.nan)
    assert steps.update(0, [0], terms).values[2] == 1
    assert [table.count_nonzero().item() for table in steps.optimizer._tables.values()] == [0]


def test_a_batch_without_any_label_changes_nothing(wide_checkpoint):
    model = load_model(wide_checkpoint)
    before = weights_of(model)
    rows = make_rows(4, unlabelled=range(4))
    logs = walk(make_steps(model, rows, batch_size=4, epochs=1))
    assert (logs[0].loss, logs[0].grad_norm) == (0.0, 0.0)
    assert distance(before, weights_of(model)) == 0


def test_a_process_without_rows_adds_nothing_but_takes_part(wide_checkpoint):
    model = load_model(wide_checkpoint)
    steps = make_steps(model, make_rows(6), vocabulary_rows="all")
    third = SimpleNamespace(
        process_index=2, num_processes=3, device=torch.device("cpu"), backward=lambda loss: loss.backward()
    )
    steps.accelerator = third
    (term,) = steps.backward(0, [4, 5])
    assert (term.total, term.count) == (0, 0)
    assert not any(parameter.grad.to_dense().any() for parameter in model.parameters())


def test_two_processes_have_the_loss_and_the_gradient_of_one(wide_checkpoint):
    """Each computes a part of the batch. DDP takes the mean of the gradients, and the totals and counts are summed."""
    rows, batch = make_rows(9, unlabelled=(2, 5)), list(range(9))

    def steps_of(rank, processes):
        model = load_model(wide_checkpoint, WEIGHTED_TASK).double()
        steps = make_steps(model, rows, batch_size=9, max_grad_norm=0.1, vocabulary_rows="all")
        steps.optimizer.step = lambda *_: None  # the gradients are compared
        steps.accelerator = SimpleNamespace(
            process_index=rank,
            num_processes=processes,
            device=torch.device("cpu"),
            backward=lambda loss: loss.backward(),
        )
        steps.accelerator.reduce = lambda tensor, reduction: tensor
        return steps, steps.backward(0, batch)

    def gradients_of(steps):
        return [parameter.grad.to_dense() for parameter in steps.objective.parameters()]

    single, terms = steps_of(0, 1)
    expected = single.update(0, batch, terms, stop=True).values
    ranks = [steps_of(rank, 2) for rank in (0, 1)]
    (first, of_first), (_, of_second) = ranks
    assert of_first[0].count != of_second[0].count
    for parameter, *gradients in zip(
        first.objective.parameters(), *(gradients_of(each) for each, _ in ranks), strict=True
    ):
        parameter.grad = torch.stack(gradients).mean(dim=0)
    other = torch.stack([of_second[0].total, of_second[0].count, torch.zeros(())])
    first.accelerator.reduce = lambda tensor, reduction: tensor + other
    assert first.update(0, batch, of_first, stop=True).values.tolist() == pytest.approx(expected.tolist(), rel=1e-12)
    assert expected[1] > 0.1  # they were clipped
    for gradient, of_one in zip(gradients_of(first), gradients_of(single), strict=True):
        torch.testing.assert_close(gradient, of_one, rtol=1e-9, atol=1e-15)


def test_groups_follow_the_schedule_from_their_own_rates(checkpoint):
    steps = make_steps(
        load_model(checkpoint),
        make_rows(12),
        batch_size=3,
        epochs=3,
        warmup_ratio=0.25,
        learning_rate=1e-3,
        head_learning_rate=1e-2,
    )
    assert set(steps.optimizer.rates) == {1e-3, 1e-2}
    for step, batch in enumerate(batches(steps)):
        result = steps.update(step, batch, steps.backward(step, batch))
        factor = learning_rate_factor(step, "linear", total_steps=12, warmup_steps=3, decay_steps=2)
        assert [group["lr"] for group in steps.optimizer.accelerated.param_groups] == [
            r * factor for r in steps.optimizer.rates
        ]
        assert result.learning_rate == 1e-2 * factor


@pytest.mark.parametrize("bias_correction", [True, False])
def test_steps_are_those_of_adamw_by_its_formula(wide_checkpoint, bias_correction):
    """Loshchilov and Hutter's Algorithm 2; Google's optimizer leaves out the division by 1 - beta^t."""
    model = load_model(wide_checkpoint).double()
    steps = make_steps(
        model,
        make_rows(12),
        batch_size=4,
        epochs=2,
        learning_rate=1e-3,
        weight_decay=0.01,
        max_grad_norm=None,
        adam_epsilon=1e-6,
        bias_correction=bias_correction,
        vocabulary_rows="all",
    )
    decays = {
        id(parameter): group["weight_decay"]
        for group in steps.optimizer.accelerated.param_groups
        for parameter in group["params"]
    }
    expected = weights_of(model)
    first, second = ({name: torch.zeros_like(weight) for name, weight in expected.items()} for _ in range(2))
    for step, batch in enumerate(batches(steps)):
        terms = steps.backward(step, batch)
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        steps.update(step, batch, terms)  # scales the gradients in place before the optimizer drops them
        rate = steps.optimizer.accelerated.param_groups[0]["lr"]
        correction = [1 - beta ** (step + 1) if bias_correction else 1.0 for beta in (0.9, 0.999)]
        for name, parameter in model.named_parameters():
            first[name] = 0.9 * first[name] + 0.1 * gradients[name]
            second[name] = 0.999 * second[name] + 0.001 * gradients[name] ** 2
            mean, scale = first[name] / correction[0], (second[name] / correction[1]).sqrt() + 1e-6
            expected[name] = expected[name] * (1 - rate * decays[id(parameter)]) - rate * mean / scale
    assert step == 5
    assert distance(weights_of(model), expected) <= 1e-12


def test_dropout_depends_on_seed_and_step_alone(dropout_checkpoint):
    model = load_model(dropout_checkpoint)
    steps = make_steps(model, make_rows(8), batch_size=8)
    batch = next(batches(steps))

    def loss(step):
        torch.rand(7)  # whatever else drew random numbers
        (term,) = steps.backward(step, batch)
        return term.total.item()

    assert loss(3) == loss(3)
    assert loss(3) != loss(4)


@pytest.mark.parametrize("bad_step", [0, 3])
def test_a_gradient_that_is_not_finite_leaves_weights_and_moments(checkpoint, bad_step):
    model = load_model(checkpoint)
    steps = make_steps(model, make_rows(16), batch_size=4, epochs=2, learning_rate=1e-3)
    poisoned = next(model.head.parameters())
    plan = list(enumerate(batches(steps)))
    for step, batch in plan[:bad_step]:
        read_step_metrics(steps.update(step, batch, steps.backward(step, batch)), overflows=0, mixed_precision="no")
    before = weights_of(model)
    states = [{k: v.clone() for k, v in s.items()} for s in steps.optimizer.accelerated.optimizer.state.values()]
    handle = poisoned.register_hook(lambda gradient: gradient * math.nan)
    step, batch = plan[bad_step]
    result = steps.update(step, batch, steps.backward(step, batch))
    handle.remove()
    steps.backward(step + 1, plan[bad_step + 1][1])
    with pytest.raises(DivergedError, match=rf"^step {bad_step + 1}: ") as error:
        read_step_metrics(result, overflows=0, mixed_precision="no")
    assert error.value.exit_code == 5
    assert f"has the rows {', '.join(str(row + 1) for row in sorted(batch))} (the first" in str(error.value)
    assert all(torch.equal(before[name], value) for name, value in weights_of(model).items())
    for old, new in zip(states, steps.optimizer.accelerated.optimizer.state.values(), strict=False):
        assert all(torch.equal(old[key], new[key]) for key in old)


def test_a_step_after_a_skipped_one_is_taken(checkpoint):
    model = load_model(checkpoint)
    steps = make_steps(model, make_rows(8), batch_size=4, learning_rate=1e-3)
    batch = next(batches(steps))
    terms = steps.backward(0, batch)
    next(model.head.parameters()).grad.fill_(math.inf)
    assert steps.update(0, batch, terms).values[2].item() == 1
    before = weights_of(model)
    assert steps.update(1, batch, steps.backward(1, batch)).values[2].item() == 0
    assert distance(before, weights_of(model)) > 1e-5


def skipped(step=4, rows=range(3)):
    values = torch.tensor([0.5, math.inf, 1.0, 0.0], dtype=torch.float64)
    return StepResult(step=step, batch=list(rows), learning_rate=1e-4, values=values, ready=None)


def test_half_precision_may_skip_but_not_for_ever():
    log, overflows = read_step_metrics(skipped(), overflows=0, mixed_precision="fp16")
    assert (log.step, overflows) == (4, 1)
    good = StepResult(step=5, batch=[0], learning_rate=1e-4, values=torch.tensor([0.5, 1.0, 0.0, 0.0]), ready=None)
    assert read_step_metrics(good, overflows=7, mixed_precision="fp16")[1] == 0
    with pytest.raises(DivergedError):
        read_step_metrics(skipped(), overflows=MOST_OVERFLOWS - 1, mixed_precision="fp16")
    # A long batch names its first rows only.
    with pytest.raises(DivergedError, match=r"has the rows 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, \.\.\. \("):
        read_step_metrics(skipped(rows=range(40)), overflows=0, mixed_precision="bf16")


def test_no_number_of_the_host_makes_it_wait_for_the_device() -> None:
    """``torch.tensor(..., device=...)`` and ``new_tensor`` copy and wait, which the meta device does not show."""
    waiting = [
        f"{source.name}:{node.lineno}"
        for source in package_sources()
        if source.name.split(".")[0] in ("encoder", "tasks", "training")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr == "new_tensor"
        or (node.func.attr in ("tensor", "as_tensor") and any(option.arg == "device" for option in node.keywords))
    ]
    assert waiting == []
