"""From a recipe to its checked rows, its task and their tokens, without weights.

Everything that can be wrong with a recipe and its data is found here in seconds, before a model of gigabytes is loaded.
Training and ``check`` share ``prepare``, so that both read the same rows in the same order.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from bert_tasks.checkpoints.hub import origin, resolve
from bert_tasks.data.checks import DataReport, TokenCounts, check_splits, data_report, labelled_splits, named_splits
from bert_tasks.data.columns import PassthroughColumns, has_labels
from bert_tasks.data.features import Truncation
from bert_tasks.data.folds import fold_splits, group_column, make_folds
from bert_tasks.data.formats import named_format
from bert_tasks.data.splits import Splits, load_splits, load_tables, unread_splits
from bert_tasks.errors import RecipeError
from bert_tasks.model.features import input_notes, tokenized
from bert_tasks.model.loading import describe
from bert_tasks.model.multitask import AnyModel, model_of_tasks, new_model
from bert_tasks.model.pretrained import CheckpointFolder
from bert_tasks.recipe.schema import ModelSection, Recipe, build_heads
from bert_tasks.tasks.several import HeadTask, labelled_heads, row_columns


@dataclass(frozen=True, kw_only=True)
class LoadedRecipe:
    """The checked data of a recipe, and its task under the name "", or its tasks by their names."""

    recipe: Recipe
    heads: Mapping[str, HeadTask]
    splits: Splits


def prepare(recipe: Recipe, *, passthrough: PassthroughColumns = "none") -> LoadedRecipe:
    """Reads and checks all rows and fixes the order of the labels.

    The labels are the recipe's, else the format's (GLUE's order), else the training rows' labels, sorted.

    Args:
        recipe: The recipe, which says where the rows are.
        passthrough: The columns of their files that the rows carry along (see ``read``).

    Raises:
        DataError: Rows are bad. The message lists all of them, in all files.
        RecipeError: Settings do not fit the labels.
    """
    heads, section = build_heads(recipe), recipe.folds
    columns = row_columns(heads)
    labels: tuple[str, ...] = ()
    if "" in heads:
        labels = heads[""].task.output.labels
        if not labels and recipe.data.format is not None:
            labels = tuple(named_format(recipe.data.format).label_names.values())
    checks: dict[str, Any] = {"columns": columns, "unlabelled": recipe.teacher is not None}
    options = {**checks, "labels": labels, "passthrough": passthrough}
    if section is None:
        splits = load_splits(recipe.data, **options, seed=recipe.run.seed)
    else:
        if not has_labels(columns) or isinstance(columns, Mapping):
            name = recipe.task if isinstance(columns, Mapping) else heads[""].task.name
            raise RecipeError(f"[folds] needs labels to compare predictions with, but {name} has none")
        group, name = group_column(columns, section.group)
        tables = load_tables(recipe.data, **options, group=group, group_name=name)
        # All folds have the labels of all rows, so that their models have the same outputs.
        labels = check_splits(tables, **checks, labels=labels)
        folds = make_folds(tables.train, columns, count=section.count, seed=section.seed)
        fold = 1  # a check of all folds looks at the first
        if section.fold is not None:
            fold = section.fold
        share = recipe.data.validation_share
        splits = fold_splits(tables, columns, folds, fold, share=share, seed=recipe.run.seed)
    try:
        heads = labelled_heads(heads, splits, labels=labels, unlabelled=recipe.teacher is not None)
    except ValueError as error:
        raise RecipeError(f"[settings] {error}") from error
    return LoadedRecipe(recipe=recipe, heads=heads, splits=splits)


def fit_to_splits(model: AnyModel, splits: Splits) -> None:
    """Fits the tasks of a model to the training rows alone.

    Raises:
        DataError, UsageError: Rows do not fit a task.
    """
    tasks = {}
    for name, of_head in model.heads.items():
        rows = splits
        if name:
            rows = labelled_splits(splits, name, of_head.task.columns, of_head.columns)
        for split, table in named_splits(rows):
            of_head.task.check_split(table, f"{split} ({table.source})")
        # A checkpoint may bring values that were fitted to other rows, which must not leak into this run.
        tasks[name] = of_head.task.without_fitted_values().fit_rows(rows.train)
    model.tasks = tasks


def check(recipe: Recipe) -> DataReport:
    """Returns label counts, token lengths, truncation, duplicates and overlap.

    Nothing is trained. The model's configuration and tokenizer are read, its weights are not. ``dry_run`` reads them,
    too.

    Args:
        recipe: The recipe, which says where the rows are.

    Raises:
        DataError, RecipeError, CheckpointError, UsageError: As for ``train`` before it reads the weights.
    """
    prepared = prepare(recipe)
    model = model_without_weights(recipe.model, prepared.heads)
    fit_to_splits(model, prepared.splits)
    report = report_on(prepared.splits, model)
    first, *others = report.splits
    notes = (*first.notes, *unread_splits(recipe.data))
    return replace(report, splits=(replace(first, notes=notes), *others))


def model_without_weights(section: ModelSection, heads: Mapping[str, HeadTask]) -> AnyModel:
    """Returns the model of a recipe on the device "meta", where tensors have shapes and no numbers.

    Only the configuration and the tokenizer are read.

    Raises:
        CheckpointError: Files are missing or damaged, or the family is not supported.
        UsageError: The family does not have the task's head or length.
    """
    # The lengths of the tokens depend on the positions of the model, so that a model is needed, but no weights.
    with torch.device("meta"):
        if section.config is not None:
            return new_model(section.config, heads, tokenizer=str(section.tokenizer))
        name, revision = str(section.name), section.revision
        folder = CheckpointFolder.open(resolve(name, revision=revision, weights=False))
        model = model_of_tasks(folder.hf_config, heads)
    describe(model, folder, origin(name, folder.path, revision=revision))
    return model


def report_on(splits: Splits, model: AnyModel) -> DataReport:
    """Returns the report on the data of a model."""
    tokens = {}
    for name, table in named_splits(splits):
        samples = tokenized(table, model)
        cuts = Truncation.of(samples.features, rows=len(table))
        notes = input_notes(samples, model, rows=len(table))
        tokens[name] = TokenCounts(lengths=samples.tokens, cuts=cuts, notes=notes)
    return data_report(splits, tokens, columns=model.row_columns, labels=model.labels)
