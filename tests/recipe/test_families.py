"""The header of each recipe says with which families it was tried: here it is, for two steps on small random models."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from bert_tasks.data.columns import Row, head_column, head_rows
from bert_tasks.families import FAMILIES as DATA
from bert_tasks.model.multitask import pretrained_model
from bert_tasks.recipe.schema import Recipe, build_heads, build_task, load_recipe
from bert_tasks.tasks.several import HeadTask, with_labels
from bert_tasks.training.objectives import Objective
from bert_tasks.training.run import make_objective
from support.hf_models import FAMILIES
from support.small_checkpoints import save_checkpoint, tokenizer_of
from support.small_tokenizers import LINES
from support.task_examples import CHOICES, CLASSES, LABELS, MASKED, NUMBERS, PAIRS, QUESTIONS, SENTENCES, SETS
from support.training_runs import make_steps, walk

REPOSITORY = Path(os.environ.get("BERT_TASKS_REPOSITORY", Path(__file__).parents[2]))
RECIPES = sorted((REPOSITORY / "recipes").rglob("*.toml"))
TRIED = re.compile(
    r"^# Tried with (.+?), for two steps on small random models \(tests/recipe/test_families\.py\)", re.MULTILINE
)


def tried(recipe: Path) -> list[str]:
    """The families that a recipe names."""
    header = recipe.read_text("utf-8").partition("\ntask = ")[0]
    (named,) = TRIED.findall(header)
    return list(FAMILIES) if named == "all families" else named.split(" and ")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_names_families(recipe: Path) -> None:
    assert set(tried(recipe)) <= set(FAMILIES)
    config = load_recipe(recipe).model.config
    assert config is None or tried(recipe) == [config["family"]]


def tasks_and_rows(recipe: Recipe) -> tuple[dict[str, HeadTask], Sequence[Row]]:
    """The recipe's tasks with labels, and rows that fit them; of several tasks the rows of each."""
    heads = build_heads(recipe)
    if "" in heads:
        rows, labels = rows_of(recipe)
        return {"": HeadTask(task=build_task(recipe, labels))}, rows
    alone = {name: {"task": head["task"], "settings": dict(head)} for name, head in recipe.settings["heads"].items()}
    by_task = {name: rows_of(recipe.model_copy(update=update)) for name, update in alone.items()}
    columns = [[{head_column(name): row} for row in rows] for name, (rows, _) in by_task.items()]
    joined = [{name: row for cell in parts for name, row in cell.items()} for parts in zip(*columns, strict=True)]
    return with_labels(heads, {name: labels for name, (_, labels) in by_task.items()}), joined


def rows_of(recipe: Recipe) -> tuple[Sequence[Row], tuple[str, ...]]:
    """Rows that fit the recipe's task, and their labels."""
    problem = recipe.settings.get("problem_type")
    match recipe.task:
        case "sequence-classification" if problem == "multi_label_classification":
            return SETS, ("x", "y", "z")
        case "sequence-classification" | "pair-classification" if problem == "regression":
            pairs = enumerate(zip(PAIRS, NUMBERS, strict=True))
            return [{**pair, **row, "label": 1 + row["label"], "group": str(i % 5)} for i, (pair, row) in pairs], ()
        case "sequence-classification" | "pair-classification":
            labels = tuple(recipe.settings.get("labels", ("low", "mid", "high")))
            rows: Sequence[Row] = CLASSES if recipe.task == "sequence-classification" else PAIRS
            return [{**row, "label": labels[number % len(labels)]} for number, row in enumerate(rows)], labels
        case "token-classification":
            return SENTENCES, LABELS
        case "span-extraction":
            return QUESTIONS, ()
        case "multiple-choice":
            return CHOICES, ()
        case "masked-language-modeling" if "sentence_objective" in recipe.settings:
            documents = [LINES[start : start + 2] for start in range(0, 16, 2)]
            return [{"text": "\n".join(lines), "sentences": lines} for lines in documents], ()
    return MASKED, ()


def fitted(heads: Mapping[str, HeadTask], rows: Sequence[Row]) -> dict[str, HeadTask]:
    """The tasks, fitted to the rows of each."""
    tasks = {}
    for name, head in heads.items():
        _, rows_of_head = head_rows(rows, name, head.task.columns)
        tasks[name] = replace(head, task=head.task.fit_rows(rows_of_head))
    return tasks


def objective_of(recipe: Recipe, heads: Mapping[str, HeadTask], folder: Path, teacher: Path) -> Objective:
    """What the recipe trains, on a small checkpoint in place of its own, and on one of BERT in place of its teacher."""
    model = pretrained_model(str(folder), heads, revision=None)
    model.tasks = {name: head.task for name, head in heads.items()}
    if recipe.teacher is None:
        return make_objective(model, None, seed=0)
    teaching = pretrained_model(str(teacher), heads, revision=None)
    if recipe.model.layers is not None:
        model = teaching.with_layers([0], family=recipe.model.family)
    return make_objective(model, recipe.teacher, teaching, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_recipes_run_with_the_families_that_they_name(
    family: str, by_kind: dict[str, PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    """Each set of settings once: the recipes of GLUE share theirs."""
    tokenizer = tokenizer_of(family, by_kind)
    small = tokenizer if len(tokenizer) < 1000 else by_kind["mpnet"]
    save_checkpoint(tmp_path / "model", family, small, positions=512)
    save_checkpoint(tmp_path / "teacher", "bert", small, positions=512)
    seen: set[str] = set()
    for path in RECIPES:
        if family not in tried(path):
            continue
        recipe = load_recipe(path)
        labelled, rows = tasks_and_rows(recipe)
        if "" in labelled and labelled[""].task.head_kind not in (None, *DATA[family].heads):
            continue
        heads = fitted(labelled, rows)
        settings = f"{heads!r} {recipe.teacher!r}"
        if settings in seen:
            continue
        seen.add(settings)
        sizes: dict[str, Any] = {"epochs": 1, "batch_size": 4, "batch_tokens": None, "max_steps": None}
        objective = objective_of(recipe, heads, tmp_path / "model", tmp_path / "teacher")
        assert ("distillation" in objective.counts([])) == (recipe.teacher is not None)
        optim = {**vars(recipe.optim), **sizes}
        logs = walk(make_steps(objective.model, list(rows), objective=objective, **optim))
        assert len(logs) >= 2, path.name
        assert all(math.isfinite(log.loss) for log in logs), path.name
    assert len(seen) > 5
