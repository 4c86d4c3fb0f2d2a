"""Settings of a task and of its output are one flat list for users, and each of them belongs to one side."""

import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any, Literal, get_args, get_origin

import pytest

from bert_tasks.outputs.base import Output
from bert_tasks.recipe.json_schema import setting_descriptions
from bert_tasks.tasks import TASKS, SequenceClassification, Task
from support.sources import package_sources

LABELS = ("low", "mid", "high")


def own(owner: type[Any]) -> set[str]:
    return {field.name for field in fields(owner)}


def other_value(default: Any, hint: Any) -> Any:
    """A value of a setting that differs from its default."""
    if get_origin(hint) is Literal:
        return next(choice for choice in get_args(hint) if choice != default)
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + 1
    if isinstance(default, str):
        return f"{default}x"
    return (1.0, 2.0, 3.0)


def settings_elsewhere() -> Iterator[tuple[type[Task], type[Output[Any]], str]]:
    """A task, one of its outputs, and the name of a setting that only other outputs of the task have."""
    for task in TASKS.values():
        for output in task.outputs:
            names = set().union(*map(own, task.outputs)) - own(output)
            yield from ((task, output, name) for name in sorted(names))


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_a_setting_belongs_to_the_task_or_to_its_outputs(task: type[Task]) -> None:
    of_task = own(task) - {"output"}
    for output in task.outputs:
        assert of_task.isdisjoint(own(output))
    for name in set().union(*map(own, task.outputs)):
        owners = [output for output in task.outputs if name in own(output)]
        settings = [output.own_settings()[name] for output in owners]
        assert len({(each.is_fitted, each.is_per_label) for each in settings}) == 1
        if get_origin(settings[0].hint) is not Literal:  # a name that chooses the output has one value in each
            assert len({each.default for each in settings}) == 1
            assert all(each.hint == settings[0].hint for each in settings)


@pytest.mark.parametrize(("task", "output", "name"), list(settings_elsewhere()))
def test_a_setting_of_another_output_is_refused(task: type[Task], output: type[Output[Any]], name: str) -> None:
    assert task.choice_of(output)
    chosen = {
        each: setting.default for each, setting in output.own_settings().items() if setting.default is not MISSING
    }
    known = task.settings_by_name()[name]
    assert type(task.of(**chosen, **{name: known.default}).output) is output
    with pytest.raises(ValueError, match=f"^{name} does not apply to {re.escape(task.choice_of(output))}, only to "):
        task.of(**chosen, **{name: other_value(known.default, known.hint)})


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_all_settings_are_described_and_survive_their_flat_form(task: type[Task]) -> None:
    assert set(task.stated_settings()) <= set(setting_descriptions(task))
    for output in task.outputs:
        chosen = {name: each.default for name, each in output.own_settings().items()}
        made = task.of(**chosen)
        assert type(made.output) is output
        assert task.of(**made.values()) == made
        assert task.of(labels=made.output.labels, **made.settings(), **made.fitted_values()) == made
        assert not set(made.settings()) & set(made.fitted_values())


def test_labels_in_another_order_reorder_what_belongs_to_each() -> None:
    stored = SequenceClassification.of(labels=LABELS, class_weights=(1.0, 2.0, 3.0)).values()
    changed = SequenceClassification.compatible_settings(stored, {"labels": ("high", "low", "mid")})
    assert changed["class_weights"] == (3.0, 1.0, 2.0)
    assert SequenceClassification.compatible_settings(stored, {"labels": ("a", "b", "c")})["class_weights"] is None


def test_another_output_keeps_only_its_own_settings() -> None:
    stored = SequenceClassification.of(labels=LABELS, calibration="temperature", temperature=2.0).values()
    kept = SequenceClassification.compatible_settings(stored, {"problem_type": "multi_label_classification"})
    assert kept["labels"] == LABELS
    assert not {"calibration", "temperature", "balanced_weights"} & set(kept)
    assert "labels" not in SequenceClassification.compatible_settings(stored, {"problem_type": "regression"})


def test_a_search_for_reports_finds_outputs_only() -> None:
    homes = {source.name.split(".")[0] for source in package_sources() if re.search(r"def report\(", source.text)}
    assert homes == {"outputs"}
    assert not [source.name for source in package_sources() if re.search(r"\bPart\b", source.text)]
