"""``fit`` and ``train`` for users, which write the model card and the report behind a run.

This module owns what ``fit`` accepts as rows and as settings. The run itself is in ``training``.
"""

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Unpack

from typing_extensions import TypeIs

from bert_tasks.cards.card import write_card
from bert_tasks.checkpoints.hub import RUN_SUMMARY
from bert_tasks.data.columns import Columns, has_labels
from bert_tasks.data.issues import RowIssues
from bert_tasks.data.options import ReadingArguments, ReadOptions
from bert_tasks.data.reading import Frame, column_values, given_rows
from bert_tasks.data.rows import Rows
from bert_tasks.data.split_column import count_splits
from bert_tasks.data.splits import (
    VALIDATION_NAMES,
    Splits,
    joined_splits,
    sampled,
    split_notes,
    train_validation_split,
)
from bert_tasks.data.trained_reading import TrainedReading, training_names
from bert_tasks.distributed import is_main_process, main_process_first, make_accelerator
from bert_tasks.errors import BertTasksError, DataError, UsageError
from bert_tasks.model.encoder_with_heads import draw_new_head, read_labels
from bert_tasks.model.hf_names import hf_hint
from bert_tasks.model.inputs import Data, load_table
from bert_tasks.model.multitask import AnyModel
from bert_tasks.recipe.arguments import FitArguments
from bert_tasks.recipe.schema import MetricSources, Recipe, fit_keys, recipe_of_arguments
from bert_tasks.report import make_report
from bert_tasks.report.collect import GivenRows
from bert_tasks.tasks.several import choose_one
from bert_tasks.training import run as training
from bert_tasks.training.distillation_of_several import Teacher
from bert_tasks.training.files import MODEL, REPORT
from bert_tasks.training.loop import Callback, Trainer
from bert_tasks.training.optim import OptimizerFactory
from bert_tasks.training.progress import check_installed
from bert_tasks.training.run import make_objective, prepare_model
from bert_tasks.training.state import FitResult

_LOG = logging.getLogger(__name__)


def fit(
    model: AnyModel,
    train: Data | Mapping[str, Data],
    validation: Data | Mapping[str, Data] | None = None,
    *,
    output_dir: str | Path,
    teacher: Teacher | None = None,
    optimizer: OptimizerFactory | str = "adamw",
    metrics: MetricSources = (),
    callback: Callback | None = None,
    report: bool = False,
    overwrite: bool = False,
    progress: bool = True,
    **settings: Unpack[FitArguments],
) -> FitResult:
    """Fine-tunes a model and saves the best weights in ``output_dir/model``.

    Use it if the rows or the model are Python objects, or in a notebook. A recipe and ``train`` are better for runs
    that others should repeat, because a recipe states everything in one file. Both run the same loop.

    Call it again with the same settings and rows to resume an interrupted run. A finished run is not repeated. SIGTERM
    and SIGINT save the run after the current step.

    Args:
        model: The model to train. Afterwards it holds the best weights. Settings that depend on the data, such as
            balanced class weights, are set here.
        train: Training rows as a file, a list of dicts, a pandas DataFrame or a data set of `datasets`. For a model of
            several tasks also a mapping from the name of each task to its rows. A `DatasetDict` has the training rows
            in its split "train", and the validation rows in "validation", "dev" or "valid", or several sets in splits
            such as "validation_matched". Other splits are not read, which a warning says.
        validation: Validation rows, or several validation sets by name. Default: those of a `DatasetDict`, else
            ``validation_share`` of ``train``. If ``train`` has the rows of each task, so has ``validation``.
        output_dir: The folder of the run.
        teacher: A trained model of the same task, labels and tokenizer, or its name, from which the model also learns
            (distillation), also from rows without a label. For several tasks also a mapping by task.
        optimizer: "adamw", "module:name", or a function that takes parameter groups (each with ``params``, ``lr`` and
            ``weight_decay``) and returns a torch optimizer.
        metrics: Metrics of your own, which are reported behind those of the task and can choose the best model. Each is
            the name of a module of evaluate ("evaluate:NAME_OR_PATH") or of a function ("module:function"), or a module
            or function itself. A function takes two lists, the predictions and the references in the form of
            `Output.metric_inputs`, and returns a number or numbers by their names. For a model of several tasks also a
            mapping by task.
        callback: A function that is called with each record of metrics.jsonl, or a `TrainerCallback`. A true return
            value for an evaluation ends the run.
        report: True to write ``output_dir/report.html`` at the end.
        overwrite: True to replace an earlier run in ``output_dir`` instead of resuming it.
        progress: True to show progress on standard error.
        settings: Keys of a recipe, namely all of ``[optim]`` and ``[run]``, ``gradient_checkpointing``, ``document``,
            ``validation_share``, ``max_rows``, ``on_error``, keys of ``[teacher]`` after ``teacher_``, and fields of
            `ReadOptions`.

    Returns:
        The metrics of the best model, the step of its weights, and the folder of the run.

    Raises:
        RecipeError: A setting has an impossible value.
        DataError: Rows cannot be used. The message names all of them.
        UsageError: An argument is unknown, the folder is in use or holds a run with other settings, the launcher does
            not fit, or a library (peft, ...) has wrapped modules of the model.
        CheckpointError: The run cannot be saved or resumed.
        DivergedError: A loss or gradient was not finite.
        StoppedError: A signal asked the run to stop. It is saved.

    Examples:
        >>> result = fit(model, "train.csv", "dev.csv", output_dir="runs/x", epochs=3, learning_rate=2e-5)
        >>> (result.output_dir / "model" / "config.json").is_file()
        True
    """
    if _is_dataset_dict(train):
        train, validation = _splits_of_dict(train, validation)
    reading, arguments = _split_arguments(settings)
    optimizer_factory = None
    if isinstance(optimizer, str):
        arguments["optimizer"] = optimizer
    else:
        optimizer_factory = optimizer
    arguments["metrics"] = metrics
    tasks = train.keys() if _is_by_task(train) else ()
    recipe = recipe_of_arguments(arguments, teacher=_teacher_names(teacher), output_dir=str(output_dir), tasks=tasks)
    prepare_model(model, seed=recipe.run.seed)
    # Such a model gets its labels from the rows. Its new head is then drawn with the seed of the run.
    has_assumed_labels = any(head.has_assumed_labels for head in model.heads.values())
    check_installed(recipe.run.trackers)
    with main_process_first(make_accelerator(recipe.optim.mixed_precision)):
        splits = _load_splits(model, train, validation, recipe, reading)
    if has_assumed_labels:
        draw_new_head(model, recipe.run.seed)
    trainer = Trainer(
        objective=make_objective(model, recipe.teacher, teacher, seed=recipe.run.seed),
        splits=splits,
        optim=recipe.optim,
        run=recipe.run,
        model_settings={"gradient_checkpointing": recipe.model.gradient_checkpointing},
        callback=callback,
        optimizer=optimizer_factory,
    )
    result = trainer.train(overwrite=overwrite, progress=progress)
    rows = GivenRows(validation=splits.validation, tasks=model.tasks)
    # A finished run that is only looked up keeps its report.
    lacks_report = not (result.reused and (result.output_dir / REPORT).exists())
    write_after_run(result.output_dir, report=report and lacks_report, fit_rows=rows)
    return result


def train(recipe: Recipe | str | Path, *, overwrite: bool = False, progress: bool = True) -> FitResult:
    """Trains a recipe, or resumes the run in its output folder.

    It does what ``bert-tasks train`` does for a single run, except for the report, which ``make_report`` writes.
    ``train_seeds`` trains several seeds, and ``train_folds`` the folds of a cross-validation. Load the recipe with
    ``load_recipe`` first to change keys of it. ``fit`` trains a model on rows that are in memory.

    Args:
        recipe: A recipe, or the path of its TOML file.
        overwrite: True to replace an earlier run. Default: False, so that the result of a finished run is returned.
        progress: True to show progress on standard error.

    Returns:
        The metrics of the best model, the step of its weights, and the folder of the run.

    Raises:
        RecipeError, DataError, CheckpointError, UsageError, DivergedError, StoppedError: As for ``fit``.

    Examples:
        >>> result = train("recipe.toml")
        >>> (result.output_dir / "model" / "config.json").is_file()
        True
    """
    result = training.train(recipe, overwrite=overwrite, progress=progress)
    write_after_run(result.output_dir, report=False)
    return result


def write_after_run(folder: Path, *, report: bool, **options: Any) -> Path | None:
    """Writes the cards and the report of finished runs, on the first process.

    A failure is only a warning, because the runs are complete and saved. The next call writes the files again.

    Args:
        folder: The output folder of a run, of seeds, of folds or of a search.
        report: True to write the report.
        options: Options of ``make_report``.

    Returns:
        The file of the report, or None if it was not written.
    """
    if not is_main_process():
        return None
    # A folder of seeds, folds or trials has a run in each of its folders.
    for summary in sorted(folder.rglob(RUN_SUMMARY)):
        if (summary.parent / MODEL).is_dir():
            with _failures_logged("card"):
                write_card(summary.parent)
    if report:
        with _failures_logged("report"):
            return make_report(folder, **options).output
    return None


@contextmanager
def _failures_logged(file: str) -> Iterator[None]:
    """Turns any error into a warning, because hours of training must not seem lost for a file about them."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # outer boundary: files about a finished run
        reason = str(error)
        if not isinstance(error, BertTasksError):
            reason = f"{type(error).__name__}: {error}"
        _LOG.warning("the run is complete, but writing the %s failed (%s)", file, reason)


def _teacher_names(teacher: Teacher | None) -> Any:
    """Returns the names of a teacher, or of teachers by task, for a recipe."""
    if teacher is None:
        return None
    if isinstance(teacher, Mapping):
        return {task: _teacher_names(model) for task, model in teacher.items()}
    if isinstance(teacher, AnyModel):
        return "a model in memory"
    return str(teacher)


def _split_arguments(settings: Mapping[str, object]) -> tuple[ReadOptions, dict[str, Any]]:
    """Returns how to read the data, and the other settings of ``fit``.

    Raises:
        UsageError: An argument is unknown. The message suggests a key for an argument of transformers, or a similar
            name.
    """
    keys = fit_keys()
    options = ReadingArguments.__annotations__
    names = [*inspect.signature(fit).parameters, *keys, *options]
    problems = []
    reading: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in keys and name not in options:
            problems.append(f"fit: unknown argument '{name}'{hf_hint(name, names)}")
        # ``document`` is both an option of reading and a key of a recipe.
        if name in options or name == "document":
            reading[name] = value
        if name in keys:
            arguments[name] = value
    if problems:
        raise UsageError("\n".join(problems))
    return ReadOptions(**reading), arguments


def _load_splits(
    model: AnyModel,
    train: Data | Mapping[str, Data],
    validation: Data | Mapping[str, Data] | None,
    recipe: Recipe,
    reading: ReadOptions,
) -> Splits:
    """Returns the checked rows. The model remembers the names of their columns."""
    columns = model.row_columns
    if _is_by_task(train):
        splits = _splits_of_tasks(columns, train, validation, recipe, reading)
    else:
        splits = _splits_of(columns, model.labels, train, validation, recipe, reading)
        file = train if isinstance(train, str | Path) else None  # rows in memory have no format to remember
        model.columns = training_names(reading, file, columns)
        model.reading = TrainedReading.of(reading, file, recipe.data.on_error)
    read_labels(model, splits, unlabelled=recipe.teacher is not None)
    return splits


def _is_dataset_dict(data: object) -> TypeIs[Mapping[str, Frame]]:
    """Returns True for a `DatasetDict`, which maps from splits to data sets."""
    return isinstance(data, Mapping) and type(data).__module__.startswith("datasets.")


def _splits_of_dict(splits: Mapping[str, Frame], validation: Any) -> tuple[Data, Any]:
    """Returns the training and validation rows of a `DatasetDict`. A warning names the splits that are not read.

    Args:
        splits: The splits.
        validation: The validation rows of the caller, which replace those of the splits.

    Raises:
        DataError: There is no split "train".
    """
    if "train" not in splits:
        raise DataError(f"fit: the DatasetDict has no split 'train'. Its splits are {', '.join(map(repr, splits))}")
    used = {"train"}
    if validation is None:
        single = [name for name in VALIDATION_NAMES if name in splits]
        several = [name for name in splits if name.startswith("validation_")]
        if single:
            validation = splits[single[0]]
            used.add(single[0])
        elif several:
            validation = {name.removeprefix("validation_"): splits[name] for name in several}
            used.update(several)
    unused = [name for name in splits if name not in used]
    if unused and is_main_process():
        _LOG.warning("fit: splits of the DatasetDict that are not read: %s", ", ".join(map(repr, unused)))
    return splits["train"], validation


def _is_by_task(train: Data | Mapping[str, Data]) -> TypeIs[Mapping[str, Data]]:
    """Returns True for a mapping from tasks to rows. A DatasetDict maps from splits."""
    return isinstance(train, Mapping) and not _is_dataset_dict(train)


def _splits_of_tasks(
    columns: Columns, train: Mapping[str, Data], validation: Any, recipe: Recipe, reading: ReadOptions
) -> Splits:
    """Returns the rows of all tasks, read from the data of each."""
    if not isinstance(columns, Mapping):
        raise UsageError("fit: train has rows by the names of tasks, but the model has one task. Pass the rows")
    if reading.columns:
        raise choose_one(columns)  # the names of columns belong to a task
    names = list(columns)
    sets = {} if validation is None else validation
    for argument, data in (("train", train), ("validation", sets)):
        has_all_tasks = isinstance(data, Mapping) and sorted(data) == names
        if (data or argument == "train") and not has_all_tasks:
            raise UsageError(f"fit: {argument} needs the rows of each of the tasks {', '.join(names)}, by their names")
    splits = []
    for name in names:
        of_task = {name: columns[name]}
        splits.append(_splits_of(of_task, (), train[name], sets.get(name), recipe, reading, name=f" of {name}"))
    return joined_splits(splits)


def _splits_of(
    columns: Columns,
    known_labels: Sequence[str],
    train: Data,
    validation: Data | Mapping[str, Data] | None,
    recipe: Recipe,
    reading: ReadOptions,
    *,
    name: str = "",
) -> Splits:
    """Returns the rows of one task, or of all tasks that share their rows.

    Args:
        columns: The columns of the task, or of each task.
        known_labels: The labels of the model, if it has any.
        train, validation: The data, as ``fit`` gets them.
        recipe: The settings of the run.
        reading: How files are read.
        name: The end of the rows' name in messages, such as " of slots".
    """
    skips = recipe.data.on_error == "skip"
    sets: Mapping[str, Data] = {}
    if isinstance(validation, Mapping):
        sets = validation
    elif validation is not None:
        sets = {"": validation}
    notes: tuple[str, ...] = ()
    if reading.split_column is not None:
        if validation is not None:
            raise UsageError("fit: split_column divides the rows of train, but validation is given. Remove one of them")
        counts = count_splits(_cells(train, reading, reading.split_column), reading.split_column, "train")
        # The rows of both splits are in ``train``. Reading it as the one or the other chooses them.
        sets = {"": train} if counts["validation"] else {}
        notes = split_notes(counts, reading.split_column)
    tables: list[Rows] = []
    data_of_splits = [("train", train)]
    data_of_splits += [(f"validation {set_name}".strip(), data) for set_name, data in sets.items()]
    for split, data in data_of_splits:
        # Rows without a label are learned from a teacher.
        labels: Literal["optional", "required"] = "required"
        if recipe.teacher is not None and split == "train" and has_labels(columns):
            labels = "optional"
        role: Literal["train", "validation"] = "train" if split == "train" else "validation"
        try:
            table = load_table(
                data,
                columns,
                known_labels=known_labels,
                reading=replace(reading, split=role),
                name=split + name,
                skip_errors=skips,
                labels=labels,
            )
            tables.append(table.without_errors())
        except RowIssues as error:
            error.advice = "" if skips else 'pass on_error="skip" to skip such rows'
            raise
    train_rows = sampled(tables[0], columns, recipe.data.max_rows)
    validation_rows = dict(zip(sets, tables[1:], strict=True))
    train_rows = replace(train_rows, notes=(*train_rows.notes, *notes))
    if validation is None and not sets:
        share = recipe.data.validation_share
        train_rows, validation_rows[""] = train_validation_split(train_rows, columns, share, recipe.run.seed)
    return Splits(train=train_rows, validation=validation_rows)


def _cells(data: Data, reading: ReadOptions, column: str) -> Iterator[Any]:
    """Yields the cells of a column of a file or of rows in memory, and None for a row without it."""
    if isinstance(data, str | Path):
        yield from column_values(Path(data), reading, column)
        return
    rows = data if isinstance(data, Rows) else given_rows(data)
    for row in rows:
        yield row.get(column) if isinstance(row, Mapping) else None
