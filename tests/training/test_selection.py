"""Which model is the best: directions and sets are data, ties are decided by the loss."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_tasks import fit
from bert_tasks.errors import UsageError
from bert_tasks.recipe.schema import RunSection
from bert_tasks.report.charts import loss_chart
from bert_tasks.report.collect import gather
from bert_tasks.tasks.sequence_classification import SequenceClassification
from bert_tasks.tasks.token_classification import TokenClassification
from bert_tasks.training.evaluation import metric_metadata, rank_of
from bert_tasks.training.state import TrainerState
from support.training_runs import TASK, load_model, make_rows

TAGGER = TokenClassification.of(labels=("O", "B-loss", "B-invalid_transitions"))
SETS = ("dev", "dev_strict")


def rank(metrics, metric=None, *, task=TASK, sets=("",)):
    return rank_of(metrics, metric_metadata({"": task}, RunSection(metric_for_best_model=metric), sets))


@pytest.mark.parametrize(
    ("metric", "task", "less"),
    [
        ("loss", TASK, True),
        ("accuracy", TASK, False),
        ("f1_loss", SequenceClassification.of(labels=("gain", "loss")), False),
        ("recall_x_loss", SequenceClassification.of(labels=("gain", "x_loss")), False),
        ("loss_f1", TAGGER, False),
        ("invalid_transitions", TAGGER, True),
        ("invalid_transitions_f1", TAGGER, False),
    ],
)
@pytest.mark.parametrize("name", ["", *SETS])
def test_the_direction_of_a_metric_is_that_of_its_task(metric, task, less, name):
    key, sets = (f"{name}/{metric}", SETS) if name else (metric, ("",))
    high, low = (rank({key: value}, key, task=task, sets=sets) for value in (0.9, 0.1))
    assert (low > high) == less
    assert (high > low) != less


def test_the_loss_that_decides_is_that_of_the_metrics_own_set():
    metrics = {"dev/loss": 1.0, "dev_strict/loss": 2.0, "dev/f1": 0.5, "dev_strict/f1": 0.25}
    assert rank(metrics, "dev_strict/f1", sets=SETS)[1] == 2.0
    assert rank({**metrics, "dev/accuracy": 0.5}, sets=SETS)[1] == 1.0


VALUES = st.sampled_from([0.0, 0.25, 0.5, math.nan])
LOSSES = st.sampled_from([0.1, 0.2, math.nan])


@given(st.lists(st.tuples(VALUES, LOSSES), min_size=1, max_size=8))
def test_the_best_has_the_highest_value_then_the_lowest_loss_then_came_first(evaluations):
    state = TrainerState(tasks={"": TASK})
    for step, (value, loss) in enumerate(evaluations):
        state.step = step
        metrics = {"accuracy": value, "loss": loss}
        state.add_evaluation(metrics, rank(metrics), tasks={"": TASK}, collapse=str(step))
    worst = (-math.inf, math.inf)
    numbers = [tuple(w if math.isnan(x) else x for x, w in zip(pair, worst, strict=True)) for pair in evaluations]
    assert state.best_step == min(range(len(numbers)), key=lambda step: (-numbers[step][0], numbers[step][1], step))
    assert state.best_collapse == str(state.best_step)


def test_sets_whose_names_begin_alike_are_told_apart_in_the_run_and_its_report(checkpoint, tmp_path):
    rows = {"dev": make_rows(6, seed=1), "dev_strict": make_rows(5, seed=2)}
    settings = {"epochs": 1, "batch_size": 8, "progress": False, "metric_for_best_model": "dev_strict/accuracy"}
    result = fit(load_model(checkpoint), make_rows(16), rows, output_dir=tmp_path, **settings)
    (run,) = gather([tmp_path])
    assert run.best_metric == ("dev_strict", "accuracy")
    assert run.sets == SETS
    assert [run.metrics_of(name)["accuracy"] for name in SETS] == [result.metrics[f"{name}/accuracy"] for name in SETS]
    assert len(run.metrics) == 2 * len(run.metrics_of("dev"))
    assert [line.name for line in loss_chart(run).lines] == ["training", "validation dev", "validation dev_strict"]


@pytest.mark.parametrize("name", ["dev/strict", ""])
def test_ambiguous_names_of_sets_are_refused_before_training(checkpoint, tmp_path, name):
    sets = {"dev": make_rows(3), name: make_rows(3)}
    with pytest.raises(UsageError, match=f"validation sets are .'dev', '{name}'., expected .*without '/' in names"):
        fit(load_model(checkpoint), make_rows(8), sets, output_dir=tmp_path / "run", epochs=1, progress=False)
    assert not (tmp_path / "run").exists()


def test_a_state_without_values_comes_back_from_json() -> None:
    """A run may have no best model yet, or metrics without a value. JSON has neither NaN nor infinity."""
    state = TrainerState(tasks={"": TASK}, step=3, best={"f1": math.nan, "accuracy": 0.5}, last={"loss": math.nan})
    stored = json.loads(json.dumps(state.to_json(), allow_nan=False))
    again = TrainerState.of_checkpoint(stored, {"": TASK})
    assert (again.step, again.best_value, again.best_loss, again.best_collapse) == (3, -math.inf, math.inf, None)
    assert again.best == pytest.approx({"f1": math.nan, "accuracy": 0.5}, nan_ok=True)
    assert again.last == pytest.approx({"loss": math.nan}, nan_ok=True)
    assert again.add_evaluation({"f1": 0.1}, (-1e9, 1e9), tasks={"": TASK}, collapse=None)  # whatever comes is better


@pytest.mark.parametrize(
    "tuned", [{"temperature": 2.0}, {"fitted": 5}, {"fitted": {"topic": 5}}, {"fitted": {"other": {}}}]
)
def test_damaged_values_of_several_tasks_are_refused(tuned: dict[str, Any]) -> None:
    tasks = {"topic": TASK, "slots": TAGGER}
    stored = TrainerState(tasks=tasks).to_json() | {"tuned": tuned}
    with pytest.raises(ValueError, match="tuned has other"):
        TrainerState.of_checkpoint(stored, tasks)


@pytest.mark.parametrize("name", ["step", "best_value", "tuned"])
def test_a_state_that_lacks_a_field_is_refused(name: str) -> None:
    stored = TrainerState(tasks={"": TASK}).to_json()
    del stored[name]
    with pytest.raises(ValueError, match=f"{name} = .*, Field required"):
        TrainerState.of_checkpoint(stored, {"": TASK})


@pytest.mark.parametrize("stored", [None, 5, "x", []])
def test_a_state_that_is_no_object_is_refused(stored: object) -> None:
    with pytest.raises(ValueError, match="expected an object"):
        TrainerState.of_checkpoint(stored, {"": TASK})


def test_values_of_several_tasks_come_back() -> None:
    tasks = {"topic": TASK.with_settings(temperature=2.0), "slots": TAGGER}
    stored = json.loads(json.dumps(TrainerState(tasks=tasks).to_json()))
    again = TrainerState.of_checkpoint(stored, {"topic": TASK, "slots": TAGGER})
    assert again.tasks == tasks
