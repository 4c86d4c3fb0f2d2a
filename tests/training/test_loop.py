"""``fit``: what a run records, keeps and refuses, on one process."""

import json
import math
import signal
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

import bert_tasks.training.evaluation as selection
import bert_tasks.training.loop as loop
from bert_tasks import TaskModel, evaluate, fit
from bert_tasks.data.reading import read
from bert_tasks.errors import BertTasksError, DivergedError, StoppedError, UsageError
from bert_tasks.inference import Evaluation, evaluate_samples, evaluation
from bert_tasks.inference.evaluation import Score
from bert_tasks.tasks.sequence_classification import SequenceClassification
from bert_tasks.training.objectives import parameter_depths
from bert_tasks.training.step import OptimizerSteps
from support.sampling import slow_except
from support.training_runs import KEYWORDS, LABELS, TASK, distance, load_model, make_rows, make_steps, weights_of

SMALL = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 64}
QUICK = {"epochs": 2, "batch_size": 8, "learning_rate": 1e-3, "progress": False}


def events(folder, name):
    lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


def short_fit(model, folder, *, rows=None, **changes):
    data = make_rows(24) if rows is None else rows
    return fit(model, data, make_rows(9, seed=1), output_dir=folder, **{**QUICK, **changes})


def watch_backward(monkeypatch, then=lambda count: None):
    """A list that grows with each step whose gradients are computed."""
    computed, backward = [], OptimizerSteps.backward

    def watched(*arguments):
        computed.append(arguments)
        then(len(computed))
        return backward(*arguments)

    monkeypatch.setattr(OptimizerSteps, "backward", watched)
    return computed


def test_a_number_of_steps_replaces_the_epochs(checkpoint, tmp_path):
    """Of 4 steps an epoch: fewer than one epoch, and an end within the second."""
    options = {"batch_size": 6, "learning_rate": 2e-4, "logging_steps": 1, "lr_scheduler_type": "constant"}

    def recorded(folder):
        return [(event["loss"], event["learning_rate"]) for event in events(folder, "step")]

    short_fit(load_model(checkpoint), tmp_path / "whole", epochs=2, **options)
    for steps, evaluated in ((3, [3]), (7, [4, 7])):
        folder = tmp_path / str(steps)
        assert short_fit(load_model(checkpoint), folder, max_steps=steps, **options).steps == steps
        assert recorded(folder) == recorded(tmp_path / "whole")[:steps]
        assert [event["step"] for event in events(folder, "evaluation")] == evaluated


def test_a_step_has_the_tokens_of_its_time(checkpoint, tmp_path, monkeypatch):
    """A step is recorded when the next one has been computed: both count, or neither."""
    computed = watch_backward(monkeypatch)

    monkeypatch.setattr(loop, "Clock", partial(loop.Clock, lambda: len(computed)))
    rows = [{**make_rows(1)[0], "label": LABELS[number % 2]} for number in range(24)]  # all of one length
    short_fit(load_model(checkpoint), tmp_path, rows=rows, logging_steps=1, save_steps=2)
    (speed,) = {event["tokens_per_second"] for event in events(tmp_path, "step")}
    assert speed % QUICK["batch_size"] == 0


def test_one_process_stops_after_the_step_in_which_the_signal_came(checkpoint, tmp_path, monkeypatch):
    computed = watch_backward(monkeypatch, lambda count: count == 2 and signal.raise_signal(signal.SIGTERM))
    with pytest.raises(StoppedError, match="after step 2 of 6"):
        short_fit(load_model(checkpoint), tmp_path)
    assert len(computed) == 2


def test_a_run_that_is_to_stop_begins_no_evaluation(checkpoint, tmp_path, monkeypatch):
    """Step 3 ends the epoch, after which the resumed run evaluates."""
    whole = short_fit(load_model(checkpoint), tmp_path / "whole")
    evaluated = []
    with monkeypatch.context() as patch:
        watch_backward(patch, lambda count: count == 3 and signal.raise_signal(signal.SIGTERM))
        patch.setattr(loop, "evaluate_all", lambda *arguments, **options: evaluated.append(arguments))
        with pytest.raises(StoppedError, match="after step 3 of 6"):
            short_fit(load_model(checkpoint), tmp_path / "run")
    assert evaluated == []
    assert short_fit(load_model(checkpoint), tmp_path / "run").metrics == whole.metrics
    assert events(tmp_path / "run", "evaluation") == events(tmp_path / "whole", "evaluation")


# Non-finite steps


def poison(model, step):
    """Makes one gradient NaN in the backward pass of a step (from 0; one micro-batch a step)."""
    calls = iter(range(1000))
    parameter = next(model.head.parameters())
    parameter.register_hook(lambda gradient: gradient * (math.nan if next(calls) == step else 1.0))


def weights_before_each_update(monkeypatch):
    """Copies of the weights as every call of ``update`` finds them."""
    snapshots = []
    take = OptimizerSteps.update

    def update(steps, *arguments, **options):
        steps.optimizer.update_weights()
        snapshots.append(weights_of(steps.objective.model))
        return take(steps, *arguments, **options)

    monkeypatch.setattr(OptimizerSteps, "update", update)
    return snapshots


@pytest.mark.parametrize("step", slow_except([0, 3, 5], 3, 5))  # the first, one in an epoch, the last
def test_a_run_that_diverges_stops_with_the_weights_before_that_step(checkpoint, tmp_path, monkeypatch, step):
    model = load_model(checkpoint)
    poison(model, step)
    snapshots = weights_before_each_update(monkeypatch)
    with pytest.raises(DivergedError, match=f"^step {step + 1}: the loss is") as error:
        short_fit(model, tmp_path, logging_steps=1)
    assert error.value.exit_code == 5
    (event,) = events(tmp_path, "diverged")
    assert (event["step"], event["grad_norm"]) == (step + 1, None)
    assert f"rows {', '.join(map(str, event['rows']))} (the first" in str(error.value)
    assert all(torch.equal(snapshots[step][name], value) for name, value in weights_of(model).items())
    assert not (tmp_path / "metrics.json").exists()
    if step:
        assert [event["step"] for event in events(tmp_path, "step")] == list(range(1, step + 1))
    for file in tmp_path.rglob("*.safetensors"):
        assert all(torch.isfinite(tensor).all() for tensor in load_file(file).values())
    assert not model.training


def test_a_poisoned_row_is_named(checkpoint, tmp_path):
    model = load_model(checkpoint, SequenceClassification.of(problem_type="regression", max_length=40))
    rows = [{"text": "a ferry", "label": 0.5} for _ in range(12)]
    rows[7]["label"] = 1e300
    with pytest.raises(DivergedError, match=r"has the rows (\d+, )*8[, ]"):
        fit(model, rows, rows[:3], output_dir=tmp_path, **{**QUICK, "batch_size": 3})


# The best model


def scripted(monkeypatch, values, *, key="accuracy"):
    """Lets each evaluation report the next value; the weights it saw are kept."""
    seen, script = [], iter(values)

    def evaluation(model, samples, table, accelerator, *, tune=False, forward_fn=None, stop=None, metrics=()):
        seen.append(weights_of(model))
        metrics = {"loss": 1.0, "accuracy": 0.5, key: next(script)}
        return Evaluation(
            metrics=metrics, scores={"": Score(metrics=metrics, rows=[], predictions=[], task=model.task)}
        )

    monkeypatch.setattr(selection, "evaluate_samples", evaluation)
    return seen


def test_the_best_model_is_kept_on_disk_and_in_memory(checkpoint, tmp_path, monkeypatch):
    seen = scripted(monkeypatch, [0.2, 0.7, 0.7, 0.3])
    model = load_model(checkpoint)
    result = short_fit(model, tmp_path, epochs=4)
    assert (result.best_step, result.steps) == (6, 12)
    assert result.metrics["accuracy"] == 0.7
    stored = weights_of(TaskModel.from_pretrained(tmp_path / "model"))
    for weights in (weights_of(model), stored):
        assert all(torch.equal(seen[1][name], value) for name, value in weights.items())
    assert distance(seen[1], seen[3]) > 1e-5
    summary = json.loads((tmp_path / "metrics.json").read_text("utf-8"))
    assert (summary["best_step"], summary["steps"], summary["stopped_early"]) == (6, 12, False)
    assert (summary["metrics"]["accuracy"], summary["last_metrics"]["accuracy"]) == (0.7, 0.3)


@pytest.mark.parametrize(
    ("values", "steps", "options"),
    [
        ([0.2, 0.5, 0.4, 0.5], 12, {"epochs": 6, "early_stopping_patience": 2}),
        ([math.nan, -1.0, math.nan, -2.0], 12, {"epochs": 4}),
        # the first value answers the check that the metric exists
        ([9.0, 0.8, 0.4, 0.6], 9, {"epochs": 3, "metric_for_best_model": "loss"}),
    ],
    ids=["patience", "not a number", "less loss"],
)
def test_which_evaluation_is_the_best(checkpoint, tmp_path, monkeypatch, values, steps, options):
    key = options.get("metric_for_best_model", "accuracy")
    seen = scripted(monkeypatch, values, key=key)
    result = short_fit(load_model(checkpoint), tmp_path, **options)
    assert (len(seen), result.best_step, result.steps) == (4, 6, steps)
    assert result.metrics[key] == values[2 if key == "loss" else 1]
    recorded = [event["metrics"][key] for event in events(tmp_path, "evaluation")]
    assert recorded == [None if math.isnan(value) else value for value in values[4 - len(recorded) :]]
    summary = json.loads((tmp_path / "metrics.json").read_text("utf-8"))
    assert summary["stopped_early"] is ("early_stopping_patience" in options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"early_stopping_patience": 2}, "stopped early without a better model in 2 evaluations"),
        ({"callback": lambda record: record.get("epoch") == 3}, "the callback asked to stop"),
    ],
)
def test_a_run_that_ends_before_its_last_step_says_why(checkpoint, tmp_path, monkeypatch, capsys, options, said):
    scripted(monkeypatch, [0.2, 0.5, 0.4, 0.3])
    short_fit(load_model(checkpoint), tmp_path, epochs=6, progress=True, **options)
    assert said in capsys.readouterr().err


# When and on what to evaluate


@pytest.mark.parametrize(
    ("options", "logged", "evaluated"),
    [
        ({"epochs": 3}, [10, 15], [(5, 1), (10, 2), (15, 3)]),
        ({"epochs": 2, "eval_steps": 4, "logging_steps": 3}, [3, 6, 9, 10], [(4, 1), (8, 2), (10, 2)]),
    ],
)
def test_when_a_run_logs_and_evaluates(checkpoint, tmp_path, options, logged, evaluated):
    short_fit(load_model(checkpoint), tmp_path, batch_size=5, **options)
    recorded = events(tmp_path, "step")
    assert [(event["step"], event["epoch"]) for event in recorded] == [(step, 1 + (step - 1) // 5) for step in logged]
    assert all(event["tokens_per_second"] > 0 and event["grad_norm"] > 0 for event in recorded)
    assert [(event["step"], event["epoch"]) for event in events(tmp_path, "evaluation")] == evaluated


def test_named_validation_sets_prefix_their_metrics(checkpoint, tmp_path):
    sets = {"home": make_rows(7, seed=1), "away": make_rows(5, seed=2)}
    model = load_model(checkpoint)
    result = fit(model, make_rows(16), sets, output_dir=tmp_path, metric_for_best_model="away/loss", **QUICK)
    assert {"home/accuracy", "away/accuracy", "home/loss", "away/loss"} <= result.metrics.keys()
    assert "accuracy" not in result.metrics
    data = json.loads((tmp_path / "run.json").read_text("utf-8"))["data"]
    assert len({table["fingerprint"] for table in data.values()}) == 3
    assert data.keys() == {"train", "validation_home", "validation_away"}
    recorded = [event["metrics"]["away/loss"] for event in events(tmp_path, "evaluation")]
    assert result.metrics["away/loss"] == min(recorded)
    assert evaluate(model, sets["home"])["accuracy"] == result.metrics["home/accuracy"]


# Which weights learn


def test_frozen_weights_do_not_move_and_freezing_ends_with_the_run(checkpoint, tmp_path):
    model = load_model(checkpoint)
    model.head.output.bias.requires_grad_(False)  # the user's own choice stays
    before, depths = weights_of(model), parameter_depths(model)
    short_fit(model, tmp_path, freeze_embeddings=True, freeze_layers=1, weight_decay=0.1)
    moved = {depths[name] for name, value in weights_of(model).items() if not torch.equal(before[name], value)}
    assert moved == {2, 3}
    assert [name for name, weight in model.named_parameters() if not weight.requires_grad] == ["head.output.bias"]
    assert not model.encoder.embeddings.word.sparse  # nor does a loop of the user's own get sparse gradients
    assert json.loads((tmp_path / "run.json").read_text("utf-8"))["vocabulary_rows"] is None


def test_gradient_checkpointing_changes_nothing(dropout_checkpoint, tmp_path):
    plain, saving = load_model(dropout_checkpoint), load_model(dropout_checkpoint)
    short_fit(plain, tmp_path / "plain")
    short_fit(saving, tmp_path / "saving", gradient_checkpointing=True)
    assert distance(weights_of(plain), weights_of(saving)) == 0
    assert not saving.encoder.gradient_checkpointing


# Precision


def test_bf16_trains_and_the_process_may_go_on_in_fp32(checkpoint, tmp_path):
    rows = make_rows(16)
    model, exact = load_model(checkpoint), load_model(checkpoint)
    short_fit(exact, tmp_path / "full", rows=rows)
    result = short_fit(model, tmp_path / "half", rows=rows, mixed_precision="bf16")
    assert {value.dtype for value in weights_of(model).values()} == {torch.float32}
    assert 0 < distance(weights_of(model), weights_of(exact)) < 1e-2
    saved = load_saved(tmp_path / "half")
    assert model.predict(rows[:1])[0].score == saved.predict(rows[:1])[0].score
    assert evaluate(model, make_rows(9, seed=1))["loss"] == pytest.approx(result.metrics["loss"], rel=0.02)


@pytest.mark.parametrize("supported", slow_except([True, False], False))
def test_bf16_where_it_is_slower_is_reported(checkpoint, tmp_path, monkeypatch, capfd, supported):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    capabilities = {"architecture": "x86_64", "avx512_bf16": supported, "amx_bf16": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    fit(load_model(checkpoint), make_rows(8), make_rows(8), output_dir=tmp_path, mixed_precision="bf16", epochs=1)
    assert ("bf16 is slower than float32 here" in capfd.readouterr().err) is not supported


def test_fp16_without_a_gpu_is_refused(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="'fp16' needs a GPU"):
        short_fit(load_model(checkpoint), tmp_path / "run", mixed_precision="fp16")
    assert not (tmp_path / "run").exists()


def test_another_number_of_processes_than_launched_is_refused(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="started 2 processes, but accelerate uses 1") as error:
        short_fit(load_model(checkpoint), tmp_path / "run")
    assert error.value.exit_code == 2


# What the data fixes


def load_saved(folder):
    return TaskModel.from_pretrained(folder / "model")


def test_thresholds_are_tuned_on_the_first_validation_set_and_stored(checkpoint, tmp_path):
    task = SequenceClassification.of(labels=LABELS, problem_type="multi_label_classification", max_length=40)
    rows = [{"text": row["text"], "labels": [row["label"]]} for row in make_rows(24)]
    rows.append({"text": " ".join(KEYWORDS.values()), "labels": list(LABELS)})
    swapped = [{"text": row["text"], "labels": ["negative"]} for row in rows[:8]]
    model = load_model(checkpoint, task)
    result = fit(model, rows, {"first": rows[:12], "second": swapped}, output_dir=tmp_path, **QUICK)
    stored = json.loads((tmp_path / "model" / "config.json").read_text("utf-8"))["bert_tasks"]["thresholds"]
    assert len(stored) == 2
    assert stored != [0.5, 0.5]
    assert list(model.task.output.thresholds) == list(load_saved(tmp_path).task.output.thresholds) == stored
    assert result.metrics["first/f1"] >= result.metrics["first/untuned_f1"]
    assert "second/untuned_f1" not in result.metrics
    assert evaluate(tmp_path / "model", rows[:12])["f1"] == result.metrics["first/f1"]
    assert evaluate(model, swapped)["f1"] == result.metrics["second/f1"]


def test_a_second_training_run_fits_to_its_own_rows(checkpoint, tmp_path):
    """Nothing that the first run's data set is left: neither in the weights of the loss nor as a threshold."""
    task = TASK.with_settings(class_weights="balanced", problem_type="multi_label_classification")
    single = [{"text": row["text"], "labels": [row["label"]]} for row in make_rows(24)]  # 8 of 24 are positive
    both = [*single, *({"text": "x", "labels": list(LABELS)} for _ in range(8))]
    first = fit(load_model(checkpoint, task), single, single[:12], output_dir=tmp_path / "first", **QUICK)
    again = load_saved(tmp_path / "first")
    assert again.task.output.balanced_weights == (8 / 16, 16 / 8)
    assert first.metrics["f1"] == evaluate(again, single[:12])["f1"]  # carried for prediction
    assert "untuned_f1" in first.metrics
    second = fit(again, both, single[:12], output_dir=tmp_path / "second", **{**QUICK, "learning_rate": 1e-12})
    assert type(task).of(**again.task.settings(), labels=again.task.output.labels) == task
    assert again.task.output.balanced_weights == (8 / 24, 16 / 16)
    assert second.metrics["untuned_f1"] == first.metrics["untuned_f1"]  # that of thresholds of 0.5, not of the first


# Evaluation on one process


@pytest.mark.parametrize("damage", ["lost", "twice"])
def test_a_sample_that_is_lost_or_doubled_is_never_hidden(checkpoint, monkeypatch, damage):
    whole = evaluation.longest_first

    def broken(lengths, *, max_tokens):
        batches = whole(lengths, max_tokens=max_tokens)
        return batches[:-1] if damage == "lost" else [*batches, batches[0][:1]]

    monkeypatch.setattr(evaluation, "longest_first", broken)
    with pytest.raises(BertTasksError, match="evaluation saw"):
        evaluate(load_model(checkpoint), make_rows(4))


def test_evaluation_leaves_the_mode_alone(checkpoint):
    model = load_model(checkpoint)
    steps = make_steps(model, make_rows(4))
    table = read(make_rows(4), TASK.columns, require_labels=False)
    evaluate_samples(model, steps.samples, table, steps.accelerator)
    assert model.training
