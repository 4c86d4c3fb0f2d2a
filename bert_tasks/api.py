"""``fit``, ``train`` and ``train_seeds`` as users call them: training, then the card beside each finished model.

Owns the arguments of ``fit``, and what follows a run. It is finished by then, so nothing that fails here loses it: the
failure is logged, and the same call, which finds the run complete, tries again. Must not know what is written.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial, wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, Unpack, get_type_hints

from bert_tasks.cards.card import write_card
from bert_tasks.data.checks import check_splits
from bert_tasks.data.problems import BadRowsError
from bert_tasks.data.readers import ReadOptions
from bert_tasks.data.splits import Splits, train_validation_split
from bert_tasks.data.stored_reading import training_reading
from bert_tasks.data.table import RowTable
from bert_tasks.errors import BertTasksError, UsageError
from bert_tasks.experiments import seeds
from bert_tasks.experiments.summary import SeedsResult
from bert_tasks.inference import is_first_process, main_process_first, make_accelerator
from bert_tasks.model.inputs import Data, load_table, renamed
from bert_tasks.model.task_model import TaskModel
from bert_tasks.paths import exists
from bert_tasks.recipe.schema import OptimSection, RunSection, sections
from bert_tasks.report import make_report
from bert_tasks.report.collect import GivenRows
from bert_tasks.run_dir.files import REPORT
from bert_tasks.training import run
from bert_tasks.training.job import Callback, FitResult, FitSettings, Job, check_keywords, prepare_model
from bert_tasks.training.loop import run_job
from bert_tasks.training.tracking import check_installed

P = ParamSpec("P")
R = TypeVar("R", FitResult, SeedsResult)

_LOG = logging.getLogger(__name__)


def fit(
    model: TaskModel,
    train: Data,
    validation: Data | Mapping[str, Data] | None = None,
    *,
    output_dir: str | Path,
    columns: Mapping[str, str] | None = None,
    format: str | None = None,
    delimiter: str | None = None,
    encoding: str | None = None,
    header: bool | None = None,
    label_separator: str | None = None,
    validation_share: float = 0.1,
    on_error: Literal["fail", "skip"] = "fail",
    overwrite: bool = False,
    progress: bool = True,
    gradient_checkpointing: bool = False,
    report: bool = False,
    callback: Callback | None = None,
    **settings: Unpack[FitSettings],
) -> FitResult:
    """Fine-tunes a model; afterwards it holds the best weights, which ``output_dir/model`` holds too.

    A run that was stopped or killed resumes from its newest checkpoint when it is called again with the same
    settings and rows; a finished one is not repeated. SIGTERM and SIGINT save the run after the step.

    Args:
        model: with a task, whose data-dependent settings (balanced weights, thresholds) are set here. A new head is
            drawn from the seed; one that was trained before is trained further.
        train, validation: files, lists of dicts, pandas DataFrames or data sets of `datasets`; several validation sets
            by name. Without validation rows ``validation_share`` of the training rows is set aside.
        columns: the task's columns -> those of the rows, where they differ.
        format, delimiter, encoding, header, label_separator, on_error: as in a recipe's ``[data]``.
        overwrite: replace an earlier run in ``output_dir`` instead of resuming it.
        gradient_checkpointing: compute layers twice to save memory.
        report: write ``output_dir/report.html`` at the end, as the command ``train`` does.
        callback: called with each record of metrics.jsonl; its true answer to an "evaluation" ends the run.
        settings: the keys of a recipe's ``[optim]`` and ``[run]``: learning_rate, epochs, batch_size, seed, ...

    Raises:
        RecipeError: an impossible setting.
        DataError: rows that cannot be used, all of them named.
        UsageError: an unknown argument, the output folder is in use or holds a run with other settings, the launcher
            does not fit, or a library (peft, ...) has wrapped modules of the model.
        CheckpointError: the run cannot be saved or resumed.
        DivergedError: a loss or gradient was not finite.
        StoppedError: a signal asked the run to stop; it is saved.
    """
    of_files: dict[str, Any] = {
        "delimiter": delimiter,
        "encoding": encoding,
        "header": header,
        "label_separator": label_separator,
    }
    how = ReadOptions(columns=columns, format=format, **of_files)
    load = partial(_splits, model, train, validation, how, validation_share, on_error)
    job = _fit_job(model, load, settings, Path(output_dir), gradient_checkpointing, callback)
    result = run_job(job, overwrite=overwrite, progress=progress)
    _write_beside(result, job, report=report)
    return result


# What help() shows and notebooks complete: the settings by name, with the defaults of recipes.
_SECTIONS = {**OptimSection.model_fields, **RunSection.model_fields}
_OWN = [one for one in signature(fit).parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
_SETTINGS = [
    Parameter(name, Parameter.KEYWORD_ONLY, default=_SECTIONS[name].default, annotation=kind)
    for name, kind in get_type_hints(FitSettings).items()
]
fit.__signature__ = signature(fit).replace(parameters=[*_OWN, *_SETTINGS])  # type: ignore[attr-defined]  # PEP 362


def _fit_job(
    model: TaskModel,
    load: Callable[[int], Splits],
    settings: FitSettings,
    output_dir: Path,
    gradient_checkpointing: bool,
    callback: Callback | None,
) -> Job:
    """What ``fit`` trains; ``load`` gets the seed."""
    check_keywords(settings, [one.name for one in _OWN])
    optim, run = sections(**settings)
    prepare_model(model, seed=run.seed)
    check_installed(run.trackers)
    splits = main_process_first(make_accelerator(optim.mixed_precision), lambda: load(run.seed))
    return Job(
        model=model,
        splits=splits,
        optim=optim,
        run=run,
        output_dir=output_dir,
        gradient_checkpointing=gradient_checkpointing,
        callback=callback,
    )


def _splits(
    model: TaskModel,
    train: Data,
    validation: Data | Mapping[str, Data] | None,
    how: ReadOptions,
    validation_share: float,
    on_error: Literal["fail", "skip"],
    seed: int,
) -> Splits:
    """The rows, checked; the model remembers how they were read."""
    task, skips = model.task, on_error == "skip"
    if on_error not in ("fail", "skip"):
        raise UsageError(f"on_error is {on_error!r}, expected 'fail' or 'skip'")

    def read(data: Data, name: str) -> RowTable:
        given = renamed(data, task, how.columns, name)
        try:
            return load_table(given, task, reading=how, name=name, skips=skips).without_faults()
        except BadRowsError as error:
            raise BadRowsError(error.found, None if skips else 'on_error="skip" leaves such rows out') from None

    rows = read(train, "train")
    if validation is None:
        if not 0 < validation_share < 1:
            raise UsageError(f"validation_share = {validation_share}: expected a share between 0 and 1")
        rows, kept = train_validation_split(rows, task.columns, validation_share, seed)
        tables = {"": kept}
    else:
        sets = validation if isinstance(validation, Mapping) else {"": validation}
        tables = {name: read(data, f"validation {name}".strip()) for name, data in sets.items()}
    splits = Splits(train=rows, validation=tables)
    check_splits(splits, columns=task.columns, labels=task.labels)
    model.reading = training_reading(how, train if isinstance(train, str | Path) else None)
    return splits


def _with_card(work: Callable[P, R]) -> Callable[P, R]:
    @wraps(work)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        result = work(*args, **kwargs)
        if is_first_process():
            for folder in _folders(result):
                _try_card(folder)
        return result

    return call


def _folders(result: FitResult | SeedsResult) -> list[Path]:
    if isinstance(result, FitResult):
        return [result.output_dir]
    return [made.output_dir for made in result.runs if made.result is not None]


def _try_card(folder: Path) -> None:
    try:
        write_card(folder)
    except (BertTasksError, OSError, ValueError, TypeError, LookupError) as error:
        _LOG.warning("the run is complete, but it has no new model card: %s", error)


def _write_beside(result: FitResult, job: Job, *, report: bool) -> None:
    """The card, and the report if it is wanted and not there."""
    folder = result.output_dir
    if is_first_process():
        _try_card(folder)
        if report and not (result.reused and exists(folder / REPORT)):
            _try_report(folder, job)


def _try_report(folder: Path, job: Job) -> None:
    try:
        make_report(folder, given=GivenRows(validation=job.splits.validation, task=type(job.model.task)))
    except (BertTasksError, OSError, ValueError, TypeError, LookupError) as error:
        _LOG.warning("the run is complete, but it has no report: %s", error)


train = _with_card(run.train)
train_seeds = _with_card(seeds.train_seeds)
