"""Validation sets whose names look like each other's metrics are told apart on the page."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_tasks.metrics.tables import metric_key
from bert_tasks.report.charts import display_name, drawn_metrics, loss_chart, metric_chart, runs_chart
from bert_tasks.report.collect import gather
from bert_tasks.report.page import comparison_page, run_page

NAMES = ("dev", "dev_macro", "dev_loss", "loss", "f1", "accuracy", "macro_f1", "dev_ood")


@pytest.fixture(scope="module")
def run(run_of):
    (result,) = gather([run_of("classes")])
    return result


def with_sets(run, names, best="accuracy"):
    """The run as if it had these sets; set k has accuracy k/100 and loss 10 + k."""
    metrics = {}
    for number, name in enumerate(names):
        set_metrics = {"accuracy": number / 100, "f1": 0.5, "macro_f1": 0.5, "loss": 10.0 + number}
        metrics |= {metric_key(name, metric): value for metric, value in set_metrics.items()}
    about = run.metadata.metrics.model_copy(update={"sets": list(names), "best": metric_key(names[-1], best)})
    metadata = run.metadata.model_copy(update={"metrics": about})
    events = [
        event.model_copy(update={"metrics": metrics}) if event.event == "evaluation" else event for event in run.events
    ]
    return replace(run, metadata=metadata, events=events, summary=run.summary.model_copy(update={"metrics": metrics}))


@settings(max_examples=10, deadline=None)
@given(names=st.lists(st.sampled_from(NAMES), min_size=2, max_size=6, unique=True))
def test_each_set_has_its_own_figures_and_name(run, names):
    shown = with_sets(run, names)
    assert shown.best_metric == (names[-1], "accuracy")
    assert [shown.metrics_of(name)["accuracy"] for name in names] == [index / 100 for index in range(len(names))]
    drawn = drawn_metrics(shown)
    assert sorted(drawn) == sorted(f"{name}/accuracy" for name in names)
    assert {line.name for line in metric_chart(shown).lines} == {f"accuracy on {name}" for name in names}
    assert [line.name for line in loss_chart(shown).lines][-len(names) :] == [f"validation {name}" for name in names]
    assert all(f'<th scope="col">{display_name(key, names)}</th>' in run_page(shown, {}) for key in drawn)
    page = comparison_page([shown, shown], [{}, {}], [])
    assert all(f'<th scope="col">loss on {name}</th>' in page for name in names)


@pytest.mark.parametrize("name", ["dev", "loss", "macro_f1"])
@pytest.mark.parametrize(("metric", "unit"), [("loss", "loss"), ("macro_f1", "score")])
def test_a_chart_of_several_runs_says_what_it_draws(run, name, metric, unit):
    shown = with_sets(run, [name, "other"])
    chart = runs_chart([shown, shown], metric_key(name, metric))
    assert chart.title.endswith(f" on {name}")
    assert chart.y.name == unit
    single = with_sets(run, [""])
    assert runs_chart([single, single], metric).title.endswith(" on the validation rows")
