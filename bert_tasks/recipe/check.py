"""From a recipe to its checked rows, its task and their tokens, without weights."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from bert_tasks.checkpoints.hub import origin, resolve
from bert_tasks.checkpoints.stored_tokenizers import open_tokenizer
from bert_tasks.data.checks import DataReport, TokenCounts, check_splits, data_report, named_splits
from bert_tasks.data.columns import PassthroughColumns, has_labels
from bert_tasks.data.folds import fold_splits, group_column, make_folds
from bert_tasks.data.formats import named_format
from bert_tasks.data.splits import Splits, load_splits, load_tables, unread_splits
from bert_tasks.data.table import Truncation
from bert_tasks.errors import RecipeError
from bert_tasks.model.features import input_notes, tokenized
from bert_tasks.model.pretrained import CheckpointFolder
from bert_tasks.model.task_model import TaskModel
from bert_tasks.recipe.schema import ModelSection, Recipe, build_task
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.shared.fitting import Fitting


@dataclass(frozen=True, kw_only=True)
class LoadedRecipe:
    """The checked data and the task of a recipe."""

    recipe: Recipe
    task: Task
    splits: Splits


def prepare(recipe: Recipe, *, passthrough: PassthroughColumns = "none") -> LoadedRecipe:
    """Reads and checks all rows and fixes the order of the labels.

    The labels are the recipe's, else the format's (GLUE's order), else the training rows' labels, sorted.

    Args:
        recipe: The recipe, which says where the rows are.
        passthrough: The columns of their files that the rows carry along (see ``read_table``).

    Raises:
        DataError: Rows are bad. The message lists all of them, in all files.
        RecipeError: Settings do not fit the labels.
    """
    draft, section = build_task(recipe), recipe.folds
    labels = draft.labels
    if not labels and recipe.data.format is not None:
        labels = tuple(named_format(recipe.data.format).label_names.values())
    checks: dict[str, Any] = {"columns": draft.row_columns, "unlabelled": recipe.teacher is not None}
    options = {**checks, "labels": labels, "passthrough": passthrough}
    if section is None:
        splits = load_splits(recipe.data, **options, seed=recipe.run.seed)
    else:
        columns = draft.columns
        if not has_labels(columns):
            raise RecipeError(f"[folds] needs labels to compare predictions with, but {draft.name} has none")
        group, name = group_column(columns, section.group)
        tables = load_tables(recipe.data, **options, group=group, group_name=name)
        labels = check_splits(tables, **checks, labels=labels)
        folds = make_folds(tables.train, columns, count=section.count, seed=section.seed)
        fold, share = 1 if section.fold is None else section.fold, recipe.data.validation_share
        splits = fold_splits(tables, columns, folds, fold, share=share, seed=recipe.run.seed)
    try:
        task = Fitting.of(draft).label(splits, labels=labels, unlabelled=recipe.teacher is not None)
    except ValueError as error:
        raise RecipeError(f"[settings] {error}") from error
    return LoadedRecipe(recipe=recipe, task=task, splits=splits)


def fitted_task(task: Task, splits: Splits) -> Task:
    """Returns the task fitted to the training rows alone.

    Raises:
        DataError, UsageError: Rows do not fit the task.
    """
    for name, table in named_splits(splits):
        Fitting.of(task).check_split(table, f"{name} ({table.source})")
    return Fitting.of(Fitting.of(task).drop_fitted_values()).fit_to_train(splits.train)


def check(recipe: Recipe) -> DataReport:
    """Returns label counts, token lengths, truncation, duplicates and overlap.

    Trains nothing. The model's configuration and tokenizer are read, its weights are not. ``dry_run`` reads them, too.

    Raises:
        DataError, RecipeError, CheckpointError, UsageError: As for ``train`` before it reads the weights.
    """
    prepared = prepare(recipe)
    model = model_without_weights(recipe.model, prepared.task)
    model.task = fitted_task(prepared.task, prepared.splits)
    report = report_on(prepared.splits, model)
    first, *others = report.splits
    notes = (*first.notes, *unread_splits(recipe.data))
    return replace(report, splits=(replace(first, notes=notes), *others))


def model_without_weights(section: ModelSection, task: Task) -> TaskModel:
    """Returns the model of a recipe on the device "meta", where tensors have shapes and no numbers.

    Only the configuration and the tokenizer are read.

    Raises:
        CheckpointError: Files are missing or damaged, or the family is not supported.
        UsageError: The family does not have the task's head or length.
    """
    with torch.device("meta"):
        if section.config is not None:
            return TaskModel.from_config(section.config, task=task, tokenizer=str(section.tokenizer))
        name, revision = str(section.name), section.revision
        folder = CheckpointFolder.open(resolve(name, revision=revision, weights=False))
        model: TaskModel = TaskModel(folder.hf_config, task)
    model.origin = origin(name, folder.path, revision=revision)
    model.tokenizer = open_tokenizer(
        folder.tokenizer_path, vocab_size=model.config.vocab_size, second=model.config.second_segment
    )
    return model


def report_on(splits: Splits, model: TaskModel) -> DataReport:
    """Returns the report on the data of a model."""
    task, tokens = model.task, {}
    for name, table in named_splits(splits):
        samples = tokenized(table, task, model)
        cuts = Truncation.of(samples.features, rows=len(table))
        notes = input_notes(samples, model, rows=len(table))
        tokens[name] = TokenCounts(lengths=samples.tokens, cuts=cuts, notes=notes)
    return data_report(splits, tokens, columns=task.row_columns, labels=task.labels)
