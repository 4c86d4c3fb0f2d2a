"""``fit``, ``train``, ``train_seeds`` and ``search`` as users call them: training, then model cards and reports.

Owns the arguments of ``fit``. The card and the report are written after the run is complete: a failure there is logged
and loses nothing, and the same call writes them again.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Never

from bert_tasks.cards.card import write_card
from bert_tasks.data.checks import check_splits
from bert_tasks.data.columns import Document, has_labels
from bert_tasks.data.problems import BadRowsError
from bert_tasks.data.readers import ReadOptions
from bert_tasks.data.splits import Splits, train_validation_split
from bert_tasks.data.table import RowTable
from bert_tasks.distributed import is_main_process, main_process_first, make_accelerator
from bert_tasks.encoder.config import LoraTarget
from bert_tasks.errors import BertTasksError, UsageError
from bert_tasks.experiments import folds
from bert_tasks.experiments import search as searches
from bert_tasks.experiments import seeds as experiments
from bert_tasks.experiments.folds import FoldsResult
from bert_tasks.experiments.search import SearchResult
from bert_tasks.experiments.seeds import SeedsResult
from bert_tasks.model.inputs import Data, load_table, renamed
from bert_tasks.model.task_model import TaskModel
from bert_tasks.recipe.errors import nearest_or_all
from bert_tasks.recipe.schema import (
    LearningRateSchedule,
    OptimSection,
    Recipe,
    RunSection,
    TrackerName,
    sections,
    teacher_section,
)
from bert_tasks.report import make_report
from bert_tasks.report.collect import GivenRows
from bert_tasks.training import run as training
from bert_tasks.training.files import MODEL, REPORT
from bert_tasks.training.loop import Trainer, prepare_model
from bert_tasks.training.progress import Callback, check_installed
from bert_tasks.training.state import FitResult

# The keyword arguments of ``fit`` that are keys of a recipe.
FIT_SETTINGS = tuple(
    name for name in (*OptimSection.model_fields, *RunSection.model_fields) if name not in ("seeds", "output_dir")
)

_LOG = logging.getLogger(__name__)


def fit(
    model: TaskModel,
    train: Data,
    validation: Data | Mapping[str, Data] | None = None,
    *,
    output_dir: str | Path,
    learning_rate: float = 5e-5,
    lr_scheduler_type: LearningRateSchedule = "linear",
    epochs: int = 3,
    max_steps: int | None = None,
    batch_size: int | None = 32,
    batch_tokens: int | None = None,
    warmup_ratio: float = 0.0,
    decay_ratio: float = 0.1,
    weight_decay: float = 0.0,
    max_grad_norm: float | None = 1.0,
    adam_beta1: float = 0.9,
    adam_beta2: float = 0.999,
    adam_epsilon: float = 1e-8,
    bias_correction: bool = True,
    mixed_precision: Literal["no", "fp16", "bf16"] = "no",
    vocabulary_rows: Literal["in_data", "all"] = "in_data",
    head_learning_rate: float | None = None,
    layerwise_lr_decay: float | None = None,
    freeze_embeddings: bool = False,
    freeze_layers: int = 0,
    lora_rank: int | None = None,
    lora_alpha: float | None = None,
    lora_dropout: float = 0.0,
    lora_targets: tuple[LoraTarget, ...] = ("query", "value"),
    micro_batch_tokens: int = 16384,
    seed: int = 42,
    eval_steps: int | None = None,
    early_stopping_patience: int | None = None,
    metric_for_best_model: str | None = None,
    logging_steps: int = 10,
    save_steps: int | None = None,
    keep_last: int = 2,
    trackers: tuple[TrackerName, ...] = (),
    project: str = "bert-tasks",
    columns: Mapping[str, str] | None = None,
    format: str | None = None,
    delimiter: str | None = None,
    encoding: str | None = None,
    header: bool | None = None,
    label_separator: str | None = None,
    document: Document | None = None,
    validation_share: float = 0.1,
    on_error: Literal["fail", "skip"] = "fail",
    overwrite: bool = False,
    progress: bool = True,
    gradient_checkpointing: bool = False,
    teacher: TaskModel | str | Path | None = None,
    teacher_revision: str | None = None,
    temperature: float = 2.0,
    teacher_weight: float = 0.5,
    teacher_hidden: Literal["none", "cosine", "mse"] = "none",
    teacher_relations: bool | int = False,
    cache_teacher_logits: bool = False,
    report: bool = False,
    callback: Callback | None = None,
    **unknown: Never,
) -> FitResult:
    """Fine-tunes a model; afterwards it holds the best weights, which are also saved in ``output_dir/model``.

    Call it again with the same settings and rows to resume an interrupted run; a finished run is not repeated. SIGTERM
    and SIGINT save the run after the current step.

    Args:
        model: the model to train. Settings that depend on the data (balanced class weights, thresholds) are set here.
            A new head is initialised from the seed; trained weights are trained further.
        train: training rows: a file, a list of dicts, a pandas DataFrame or a data set of `datasets`.
        validation: validation rows likewise, or several validation sets by name. Without it ``validation_share`` of the
            training rows is used.
        output_dir: the run's folder.
        learning_rate: the highest learning rate, after the warm-up.
        lr_scheduler_type: the learning rate then falls to 0 ("linear", "cosine"), stays ("constant"), or falls at the
            end only ("wsd", arXiv:2404.06395).
        epochs: how often each sample is used.
        max_steps: number of optimizer steps in place of ``epochs``.
        batch_size: samples per optimizer step, over all devices.
        batch_tokens: tokens per optimizer step, in place of ``batch_size``: as many samples of similar length as fit.
            Needs ``max_steps``.
        warmup_ratio: share of the steps in which the learning rate rises from 0.
        decay_ratio: share of the steps, the last ones, in which "wsd" lowers the learning rate.
        weight_decay: of all weights except those of layer norms and biases.
        max_grad_norm: larger gradients are scaled to this norm; None: no limit.
        adam_beta1, adam_beta2, adam_epsilon: constants of AdamW (Loshchilov and Hutter, arXiv:1711.05101).
        bias_correction: correct its moments for their start at 0.
        mixed_precision: number format of the matrix products; "fp16" needs a GPU.
        vocabulary_rows: word embeddings that gradients and AdamW cover: of the tokens in the training rows, or all.
        head_learning_rate: learning rate of the task's head, if it has its own.
        layerwise_lr_decay: factor of the learning rate from each layer to the layer below it.
        freeze_embeddings: do not train the embeddings.
        freeze_layers: number of layers, counted from the embeddings, that are not trained.
        lora_rank: train low-rank adapters (LoRA) of this rank and the task's head, in place of all weights; the model
            and the saved one then have the adapters in their weights.
        lora_alpha: the changes of adapters are multiplied by ``lora_alpha / lora_rank``; default: ``lora_rank``.
        lora_dropout: probability of dropping an input of an adapter.
        lora_targets: the linear layers that have adapters: "query", "key", "value", "attention_output", and
            "intermediate" and "output" of the feed-forward.
        micro_batch_tokens: tokens that a device processes at once.
        seed: of the new head, the order of the samples and dropout.
        eval_steps: evaluate after that many steps; default: after each epoch.
        early_stopping_patience: stop after that many evaluations without a better model.
        metric_for_best_model: the metric that picks the best model; default: the task's primary metric.
        logging_steps: write a record to metrics.jsonl after that many steps.
        save_steps: write a checkpoint after that many steps, in addition to those at evaluations.
        keep_last: number of checkpoints to keep, in addition to the best one.
        trackers: "tensorboard", "wandb", "mlflow" or "trackio"; each needs its package.
        project: the project's name at the trackers.
        columns: the task's columns -> those of the rows, where the names differ.
        format, delimiter, encoding, header, label_separator, document, on_error: keys of a recipe's ``[data]``.
        validation_share: share of the training rows to validate on, between 0 and 1.
        overwrite: replace an earlier run in ``output_dir`` instead of resuming it.
        progress: show progress on standard error.
        gradient_checkpointing: recompute activations in the backward pass to save memory.
        teacher: a trained model of the same task, labels and tokenizer, or its name, from which the model learns beside
            the labels (distillation); rows without a label then train, too. ``TaskModel.with_layers`` makes a student.
        teacher_revision: of a teacher on the hub.
        temperature: the logits of both models are divided by it before they are compared.
        teacher_weight: share of the teacher's logits in the loss, from 0 to 1; the labels have the rest.
        teacher_hidden: also compare the last layer's states of all tokens.
        teacher_relations: also compare the relations of tokens in the last layer, in so many heads (MiniLMv2,
            arXiv:2012.15828); True: as many as the teacher's attention has.
        cache_teacher_logits: compute the teacher's logits once and keep them in the cache.
        report: write ``output_dir/report.html`` at the end, as the command ``train`` does.
        callback: called with each record of metrics.jsonl; a true return value for an "evaluation" ends the run.
        unknown: not accepted; another argument raises UsageError with the name that was probably meant.

    Returns:
        The metrics of the best model, the number of steps, and what a reader of the metrics should know.

    Raises:
        RecipeError: a setting has an impossible value.
        DataError: rows cannot be used; the message names all of them.
        UsageError: an unknown argument, the output folder is in use or holds a run with other settings, the launcher
            does not fit, or a library (peft, ...) has wrapped modules of the model.
        CheckpointError: the run cannot be saved or resumed.
        DivergedError: a loss or gradient was not finite.
        StoppedError: a signal asked the run to stop; it is saved.
    """
    arguments = locals()
    known = [name for name in arguments if name != "unknown"]
    if unknown:
        wrong = []
        for name in unknown:
            ours = HF_ARGUMENTS.get(name)
            if ours is None:
                hint = nearest_or_all(name, known)
            else:
                hint = f"; {ours[9:]}" if ours.startswith("nothing") else f"; transformers' {name} is {ours}"
            wrong.append(f"unknown argument '{name}'{hint}")
        raise UsageError(f"fit: {'; '.join(wrong)}")
    settings = {name: arguments[name] for name in FIT_SETTINGS}
    if batch_tokens is not None and batch_size == OptimSection.model_fields["batch_size"].default:
        settings["batch_size"] = None
    optim, run = sections(**settings, output_dir=str(output_dir))
    prepare_model(model, seed=run.seed)
    check_installed(run.trackers)
    options = ReadOptions(**{field.name: arguments[field.name] for field in fields(ReadOptions)})
    taught = teacher is not None
    with main_process_first(make_accelerator(optim.mixed_precision)):
        splits = _load_splits(model, train, validation, options, validation_share, on_error, run.seed, taught)
    section = None
    if teacher is not None:
        name = "a model in memory" if isinstance(teacher, TaskModel) else str(teacher)
        section = teacher_section(
            name=name,
            revision=teacher_revision,
            temperature=temperature,
            weight=teacher_weight,
            hidden=teacher_hidden,
            relations=teacher_relations,
            cache_logits=cache_teacher_logits,
        )
    trainer = Trainer(
        model=model,
        splits=splits,
        optim=optim,
        run=run,
        model_settings={"gradient_checkpointing": gradient_checkpointing},
        callback=callback,
        objective=training.make_objective(
            model, section, teacher if isinstance(teacher, TaskModel) else None, seed=run.seed
        ),
    )
    result = trainer.train(overwrite=overwrite, progress=progress)
    _write_after_run("model card", lambda: write_card(result.output_dir))
    if report and not (result.reused and (result.output_dir / REPORT).exists()):
        given = GivenRows(validation=splits.validation, task=type(model.task))
        _write_after_run("report", lambda: make_report(result.output_dir, given=given))
    return result


def train(recipe: Recipe | str | Path, *, overwrite: bool = False, progress: bool = True) -> FitResult:
    """Trains a recipe. An interrupted run in its output folder is resumed, a finished one is only reported.

    Args:
        recipe: a recipe, or the path of its TOML file.
        overwrite: replace an earlier run in the output folder instead of resuming it.
        progress: show progress on standard error.

    Returns:
        The metrics of the best model, the number of steps, and what a reader of the metrics should know.

    Raises:
        RecipeError, DataError, CheckpointError, UsageError, DivergedError, StoppedError: see ``fit``.
    """
    result = training.train(recipe, overwrite=overwrite, progress=progress)
    _write_after_run("model card", lambda: write_card(result.output_dir))
    return result


def train_seeds(
    recipe: Recipe | str | Path, seeds: Iterable[int] | None = None, *, overwrite: bool = False, progress: bool = True
) -> SeedsResult:
    """Trains a recipe once for each seed and compares the runs; see ``experiments.seeds.train_seeds``.

    Args:
        recipe: a recipe, or the path of its TOML file.
        seeds: default: the recipe's ``run.seeds``.
        overwrite: repeat all runs instead of resuming or reusing them.
        progress: show progress on standard error.

    Returns:
        The runs and their summary.

    Raises:
        RecipeError, DataError, CheckpointError, UsageError, StoppedError: see ``fit``.
    """
    result = experiments.train_seeds(recipe, seeds, overwrite=overwrite, progress=progress)
    for made in result.runs:
        if made.result is not None:
            _write_after_run("model card", partial(write_card, made.output_dir))
    return result


def train_folds(recipe: Recipe | str | Path, *, overwrite: bool = False, progress: bool = True) -> FoldsResult:
    """Trains one model per fold and predicts each row without having seen it; see ``experiments.folds.train_folds``.

    Args:
        recipe: a recipe with the section ``[folds]``, or the path of its TOML file.
        overwrite: repeat all runs instead of resuming or reusing them.
        progress: show progress on standard error.

    Returns:
        The runs, the predictions for all rows, and the metrics over them.

    Raises:
        RecipeError, DataError, CheckpointError, UsageError, DivergedError, StoppedError: see ``fit``.
    """
    result = folds.train_folds(recipe, overwrite=overwrite, progress=progress)
    for made in result.runs:
        _write_after_run("model card", partial(write_card, made.output_dir))
    return result


def search(
    recipe: Recipe | str | Path, *, compare_random: bool = False, overwrite: bool = False, progress: bool = True
) -> SearchResult:
    """Searches for better values of the keys in a recipe's ``[search]``; see ``experiments.search.search``.

    Args:
        recipe: a recipe, or the path of its TOML file.
        compare_random: also search with random values in as many trials.
        overwrite: search again instead of resuming the search in the folder.
        progress: show progress on standard error.

    Returns:
        The trials, and the scores of the best values with fresh seeds.

    Raises:
        RecipeError, DataError, CheckpointError, UsageError, StoppedError: see ``fit``.
    """
    result = searches.search(recipe, compare_random=compare_random, overwrite=overwrite, progress=progress)
    several = [*(study.fresh for study in result.studies), result.baseline]
    trained = [run.output_dir for seeds in several if seeds is not None for run in seeds.runs if run.result is not None]
    for folder in [*(study.run for study in result.studies if study.run is not None), *trained]:
        if (folder / MODEL).is_dir():
            _write_after_run("model card", partial(write_card, folder))
    return result


def _load_splits(
    model: TaskModel,
    train: Data,
    validation: Data | Mapping[str, Data] | None,
    options: ReadOptions,
    validation_share: float,
    on_error: Literal["fail", "skip"],
    seed: int,
    unlabelled: bool,
) -> Splits:
    """The checked rows; the model remembers how they were read. ``unlabelled``: training rows may lack labels."""
    task, skips = model.task, on_error == "skip"
    if on_error not in ("fail", "skip"):
        raise UsageError(f"on_error = {on_error!r}: expected 'fail' or 'skip'")
    sets = {} if validation is None else validation if isinstance(validation, Mapping) else {"": validation}
    loaded: list[RowTable] = []
    for name, data in (("train", train), *((f"validation {name}".strip(), data) for name, data in sets.items())):
        given = renamed(data, task, options.columns, name)
        try:
            lacks_labels = unlabelled and name == "train" and has_labels(task.columns)
            labels: Literal["optional", "required"] = "optional" if lacks_labels else "required"
            table = load_table(given, task, reading=options, name=name, skip_faulty=skips, labels=labels)
            loaded.append(table.without_faults())
        except BadRowsError as error:
            raise BadRowsError(error.found, None if skips else 'on_error="skip" leaves such rows out') from None
    rows, tables = loaded[0], dict(zip(sets, loaded[1:], strict=True))
    if validation is None:
        if not 0 < validation_share < 1:
            raise UsageError(f"validation_share = {validation_share}: expected a share between 0 and 1")
        rows, tables[""] = train_validation_split(rows, task.columns, validation_share, seed)
    splits = Splits(train=rows, validation=tables)
    check_splits(splits, columns=task.columns, labels=task.labels, unlabelled=unlabelled)
    model.columns = options.training_names(train if isinstance(train, str | Path) else None, task.columns)
    return splits


def _write_after_run(what: str, write: Callable[[], object]) -> None:
    """Writes a file about a complete run, on the first process; a failure is only logged."""
    if not is_main_process():
        return
    try:
        write()
    except (BertTasksError, OSError, ValueError, TypeError, LookupError) as error:
        _LOG.warning("the run is complete, but its %s could not be written: %s", what, error)


# Arguments of transformers' TrainingArguments and Trainer -> their counterparts here.
HF_ARGUMENTS: Mapping[str, str] = MappingProxyType(
    {
        "num_train_epochs": "epochs",
        "per_device_train_batch_size": "batch_size, which counts samples over all devices",
        "per_gpu_train_batch_size": "batch_size, which counts samples over all devices",
        "train_batch_size": "batch_size, which counts samples over all devices",
        "per_device_eval_batch_size": "nothing: evaluation forms its batches by length",
        "gradient_accumulation_steps": "micro_batch_tokens, which limits what a device holds at once",
        "auto_find_batch_size": "micro_batch_tokens, which limits what a device holds at once",
        "lr": "learning_rate",
        "warmup_steps": "warmup_ratio, a share of the steps",
        "fp16": 'mixed_precision="fp16"',
        "bf16": 'mixed_precision="bf16"',
        "save_total_limit": "keep_last",
        "eval_strategy": "eval_steps; without it after each epoch",
        "evaluation_strategy": "eval_steps; without it after each epoch",
        "save_strategy": "save_steps; with every evaluation in any case",
        "logging_strategy": "logging_steps",
        "logging_dir": "trackers, whose files go to output_dir",
        "report_to": "trackers",
        "run_name": "project",
        "data_seed": "seed",
        "load_best_model_at_end": "nothing: the model ends with the best weights",
        "greater_is_better": "nothing: each metric knows whether higher or lower is better",
        "overwrite_output_dir": "overwrite",
        "resume_from_checkpoint": "nothing: the same call resumes the run in output_dir",
        "train_dataset": "train",
        "eval_dataset": "validation",
        "callbacks": "callback",
        "compute_metrics": "nothing: the task computes its metrics",
        "disable_tqdm": "progress=False",
        "max_seq_length": "the setting max_length of the model's task",
        "max_length": "the setting max_length of the model's task",
        "label_smoothing_factor": "the setting label_smoothing of the model's task",
        "optim": "nothing: the optimizer is AdamW",
    }
)
