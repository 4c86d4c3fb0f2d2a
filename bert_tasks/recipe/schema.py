"""The typed, closed schema of recipes, read from TOML with overrides.

A section of a recipe is a pydantic model, whose fields are the keys. The schema is closed, because a key with a slip of
spelling would otherwise be a setting that silently does not apply. Sections check what concerns them alone, ``Recipe``
what concerns several, and ``_checked`` the settings of tasks, which are fields of the tasks' classes.

Importing this module loads neither torch nor a task.
"""

import dataclasses
import importlib
import inspect
import json
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from bert_tasks.data.formats import FORMATS
from bert_tasks.data.issues import did_you_mean
from bert_tasks.data.splits import DataSpec
from bert_tasks.encoder.config import LoraTarget
from bert_tasks.errors import CheckpointError, RecipeError, UsageError, argument
from bert_tasks.families import new_hf_config
from bert_tasks.model.hf_names import hf_hint
from bert_tasks.recipe.errors import (
    KnownKeys,
    Problem,
    missing_key,
    recipe_error,
    schema_problems,
    unknown_key,
)
from bert_tasks.recipe.search import SearchSection, changed, checked_space, not_searchable
from bert_tasks.recipe.toml import (
    DATA_SOURCES,
    Document,
    KeyPath,
    Override,
    combined,
    literal,
    parse_override,
    parse_text,
    read_text,
    section_of,
)
from bert_tasks.recipe.values import IMPORTED, as_tuple, check_repeats, known_metric, no_limit
from bert_tasks.tasks import TASKS, named_task
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.settings import required_settings
from bert_tasks.tasks.several import ENTRIES, SEVERAL, HeadTask, head_tasks

# The texts below the fields are shown in the JSON schema and in docs/reference/recipe.md.
_CLOSED = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True, use_attribute_docstrings=True)

_IN_MEMORY = "in memory"  # the task, the model and the rows of ``fit``, which are objects and have no names

# Word -> ``module:name`` of a function or class that takes parameter groups. None for AdamW of training/optim.py.
OPTIMIZERS: dict[str, str | None] = {"adamw": None}


def _known_optimizer(name: str) -> str:
    """Returns the name of an optimizer, which is imported only when a run begins."""
    if name not in OPTIMIZERS and not IMPORTED.fullmatch(name):
        raise ValueError(
            f"'{name}' is neither {', '.join(map(repr, OPTIMIZERS))} nor 'module:name', such as 'torch.optim:SGD'"
        )
    return name


@dataclass(frozen=True)
class OnResume:
    """The effect of another value of a setting on a resumed run.

    A run with another value of a setting without this mark is rejected.

    Attributes:
        effect: With "silent" the run says nothing, because neither the samples of a batch nor the expected gradient
            depend on the setting. With "noted" the run says that it continues differently. "extending" is like "noted",
            and also resumes a finished run.
    """

    effect: Literal["silent", "noted", "extending"]


Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Seeds = Annotated[tuple[Seed, ...], Field(min_length=1), AfterValidator(check_repeats)]
LearningRateSchedule = Literal["linear", "cosine", "constant", "wsd"]
TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]
Layers = Literal["every-other"] | tuple[Annotated[int, Field(ge=0, lt=2**31)], ...]
LoraTargets = Annotated[
    tuple[LoraTarget, ...], Field(min_length=1), BeforeValidator(as_tuple), AfterValidator(check_repeats)
]
Trackers = Annotated[tuple[TrackerName, ...], BeforeValidator(as_tuple), AfterValidator(check_repeats)]
Names = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(as_tuple), AfterValidator(check_repeats)
]
# A name, or for ``fit`` also a function or a module of evaluate, which no recipe holds.
MetricSource = Annotated[Any, AfterValidator(known_metric), WithJsonSchema({"type": "string"})]
MetricsOfTask = Annotated[tuple[MetricSource, ...], BeforeValidator(as_tuple), AfterValidator(check_repeats)]
MetricSources = MetricsOfTask | dict[str, MetricsOfTask]
Norm = Annotated[
    Positive | None,
    BeforeValidator(no_limit),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, {"const": "none"}]}),
]


class ModelSection(BaseModel):
    """The checkpoint to start from, or the configuration of a new model."""

    model_config = _CLOSED
    name: Annotated[str, Field(min_length=1)] | None = None
    """A hub id, a folder, or `package:NAME/PATH` for weights inside an installed package."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    # DistilBERT begins so, with one of two layers of its teacher (https://arxiv.org/abs/1910.01108).
    layers: Layers | None = None
    """Train a student with only these layers of the checkpoint, counted from 0. "every-other" keeps 0, 2, 4, ...."""
    family: Annotated[str, Field(min_length=1)] | None = None
    """Train the checkpoint as a model of another family that computes the same, such as "distilbert" of a BERT."""
    config: dict[str, Any] | None = None
    """Train a new model instead of `name`, with random weights drawn from `run.seed`. The table has `family` and fields
    of transformers' configuration of that family, such as `hidden_size`. Other fields have the defaults of
    transformers. `vocab_size` and the ids of special tokens are the tokenizer's."""
    tokenizer: Annotated[str, Field(min_length=1)] | None = None
    """The tokenizer of a new model, as a folder or a hub id."""
    gradient_checkpointing: Annotated[bool, OnResume("silent")] = False
    """Recompute activations in the backward pass to save memory."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        """Checks that the section names a checkpoint or describes a new model, and has no keys of the other."""
        if (self.name is None) == (self.config is None):  # both or none of them
            problem = "Both are set" if self.name is not None else "Neither is set"
            raise ValueError(f"needs either name (a checkpoint) or config (a new model). {problem}")
        if self.config is None:
            if self.tokenizer is not None:
                raise ValueError("tokenizer belongs to config. A checkpoint has its own tokenizer")
            return self
        if self.tokenizer is None:
            raise ValueError("config needs tokenizer. Set a folder, such as `bert-tasks tokenizer` writes, or a hub id")
        others = [key for key in ("revision", "layers", "family") if getattr(self, key) is not None]
        if others:
            raise ValueError(f"{others[0]} belongs to name, and config is set")
        try:
            # Only transformers knows the fields of a family, so the configuration is made once to see that it is valid.
            new_hf_config(self.config)
        except CheckpointError as error:
            raise ValueError(f"config is invalid. {error}") from None
        return self


class TeacherSection(BaseModel):
    """A trained model of the same task to learn from in addition to the labels."""

    model_config = _CLOSED
    name: Annotated[str, Field(min_length=1)] | Annotated[dict[str, str], Field(min_length=1)]
    """A folder, the output folder of a run, a hub id, or `package:NAME/PATH`. For several tasks a model that has them,
    or a model for each of some tasks, for example `{intent = "runs/intent"}`."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    # Hinton et al. 2015, https://arxiv.org/abs/1503.02531.
    temperature: Positive = 2.0
    """Divisor of the logits of classes. A higher temperature gives unlikely classes more weight."""
    weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the teacher's logits in the loss, which is (1 - weight) x labels + weight x teacher."""
    hidden: Literal["none", "cosine", "mse"] = "none"
    """Also compare the last layer's states of all tokens, by angle ("cosine") or mean squared difference ("mse")."""
    hidden_weight: NotNegative = 1.0
    """Weight of the states in the loss."""
    # Wang et al. 2020, https://arxiv.org/abs/2012.15828.
    relations: bool | Count = False
    """Also compare the relations between tokens in the last layer's queries, keys and values, in this number of heads
    (MiniLMv2). `true` uses the number of the teacher's attention heads. Widths and heads of the models may differ."""
    relations_weight: NotNegative = 1.0
    """Weight of the relations in the loss."""
    cache_logits: bool = False
    """Compute the teacher's logits once and keep them in the cache, instead of running the teacher in each step."""


class OptimSection(BaseModel):
    """The optimizer, its schedule, and the size of a step."""

    model_config = _CLOSED
    optimizer: Annotated[str, AfterValidator(_known_optimizer)] = "adamw"
    """AdamW, or `module:name` of a class or function that takes parameter groups (each with `params`, `lr` and
    `weight_decay`) and returns an optimizer of torch, such as `torch.optim:SGD`."""
    learning_rate: Annotated[Positive, OnResume("noted")] = 5e-5
    """The highest learning rate, after the warm-up."""
    # "wsd" (warm-up, stable, decay) is the schedule of MiniCPM, https://arxiv.org/abs/2404.06395. A run of it can go on
    # without a number of steps that was fixed before.
    lr_scheduler_type: Annotated[LearningRateSchedule, OnResume("noted")] = "linear"
    """The learning rate after the warm-up. It falls to 0 linearly or like a cosine, or is constant. With "wsd" it is
    constant and falls linearly to 0 over the last `decay_ratio` of the steps."""
    epochs: Annotated[int, Field(ge=1, le=100_000), OnResume("extending")] = 3
    """Number of times that each sample is used."""
    max_steps: Annotated[Count | None, OnResume("extending")] = None
    """Number of optimizer steps instead of `epochs`."""
    batch_size: Count | None = 32
    """Samples per optimizer step, over all devices."""
    batch_tokens: Count | None = None
    """Maximum number of tokens per optimizer step, over all devices, instead of `batch_size`. A step has samples of
    similar length, at least one. Needs `max_steps`, because epochs then differ in their number of steps."""
    sampling: Literal["proportional", "equal"] | Annotated[float, Field(ge=1)] = "proportional"
    """Rate at which tasks that have their own rows (`[tasks.NAME.data]`) are drawn. "proportional" draws them in
    proportion to their rows, "equal" equally often, and a temperature in proportion to rows ** (1 / temperature). An
    epoch has as many samples as there are rows in all."""
    warmup_ratio: Annotated[float, Field(ge=0, le=1), OnResume("noted")] = 0.0
    """Share of the steps in which the learning rate rises from 0."""
    decay_ratio: Annotated[float, Field(gt=0, le=1), OnResume("noted")] = 0.1
    """Share of the steps, the last ones, in which "wsd" lowers the learning rate."""
    # Decoupled from the gradient, as in AdamW (https://arxiv.org/abs/1711.05101).
    weight_decay: Annotated[NotNegative, OnResume("noted")] = 0.0
    """Weight decay of all weights except layer norms and biases."""
    max_grad_norm: Annotated[Norm, OnResume("noted")] = 1.0
    """Larger gradients are scaled to this norm. 0 or "none" sets no limit."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1), OnResume("noted")] = 0.9
    """AdamW's first decay rate."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1), OnResume("noted")] = 0.999
    """AdamW's second decay rate."""
    adam_epsilon: Annotated[Positive, OnResume("noted")] = 1e-8
    """Constant that AdamW adds to the denominator."""
    # Without it, fine-tuning on few rows is less stable (https://arxiv.org/abs/2006.05987).
    bias_correction: bool = True
    """Correct AdamW's moments for their start at 0. Google trained BERT and ELECTRA without it."""
    mixed_precision: Literal["no", "fp16", "bf16"] = "no"
    """Number format of the matrix products. "fp16" needs a GPU."""
    vocabulary_rows: Annotated[Literal["in_data", "all"], OnResume("silent")] = "in_data"
    """Word embeddings that gradients and AdamW cover, those of tokens in the training rows or all. The results are the
    same, because the other rows get their weight decay later. If a head reads the whole table, all are covered."""
    head_learning_rate: Annotated[Positive | None, OnResume("noted")] = None
    """Learning rate of the task's head, if it has its own."""
    # ELECTRA is fine-tuned so (https://arxiv.org/abs/2003.10555).
    layerwise_lr_decay: Annotated[Annotated[float, Field(gt=0, le=1)] | None, OnResume("noted")] = None
    """Factor of the learning rate from each layer to the layer below it."""
    # What is frozen changes the parameters that the optimizer has states for, so no resumed run may change it.
    freeze_embeddings: bool = False
    """Do not train the embeddings."""
    freeze_layers: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Number of layers, counted from the embeddings, that are not trained."""
    linear_probe: bool = False
    """Fit only the last layer of the head, with scikit-learn, to the vectors of the frozen encoder, which are computed
    once. The other keys of this section then have no effect."""
    # Hu et al. 2021, https://arxiv.org/abs/2106.09685.
    lora_rank: Count | None = None
    """Train low-rank adapters (LoRA) of this rank and the task's head, instead of all weights. The saved model has the
    adapters in its weights."""
    lora_alpha: Positive | None = None
    """Numerator of `lora_alpha / lora_rank`, the factor of the adapters' changes. Default: `lora_rank`."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability of dropping an input of an adapter."""
    lora_targets: LoraTargets = ("query", "value")
    """The linear layers that have adapters. "query", "key" and "value" belong to attention, "attention_output" follows
    it, and "intermediate" and "output" are the first and the second layer of the feed-forward."""
    micro_batch_tokens: Annotated[Count, OnResume("silent")] = 16384
    """Tokens that a device processes at once. Changes memory and, unless dropout is 0, the masks that dropout draws."""

    @model_validator(mode="before")
    @classmethod
    def _one_size(cls, section: Any) -> Any:
        """Removes the default of ``batch_size`` if ``batch_tokens`` replaces it, and rejects both together."""
        if not isinstance(section, Mapping) or section.get("batch_tokens") is None:
            return section
        if section.get("batch_size") is not None:
            raise ValueError("batch_tokens replaces batch_size. Remove one of them")
        if section.get("max_steps") is None:
            raise ValueError("batch_tokens needs max_steps, because epochs then differ in their number of steps")
        return {**section, "batch_size": None}

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        """Checks that keys have an effect beside the others."""
        # ``model_fields_set`` would also have keys that are stated with their defaults, as in a resolved recipe.
        changed = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
        if self.batch_size is None and self.batch_tokens is None:
            raise ValueError("batch_size has no value. Set it to a whole number from 1, or set batch_tokens")
        for name in changed:
            if self.optimizer != "adamw" and name.startswith(("adam_", "bias_")):
                raise ValueError(f"{name} belongs to AdamW, but optimizer is '{self.optimizer}'. Remove {name}")
            if self.lora_rank is None and name.startswith("lora_"):
                raise ValueError(f"{name} needs lora_rank, such as lora_rank = 8")
            if self.lora_rank is not None and name.startswith(("freeze_", "linear_")):
                raise ValueError(f"lora_rank freezes the whole encoder already. Remove {name}")
        return self


class RunSection(BaseModel):
    """Evaluation, saving and logging. Each evaluation also writes a checkpoint."""

    model_config = _CLOSED
    seed: Seed = 42
    """Seed of the new head, the order of the samples and dropout."""
    seeds: Seeds | None = None
    """Train once per seed, each in its own folder inside `output_dir`. `seed` is then not used."""
    output_dir: str | None = None
    """The run's folder."""
    eval_steps: Annotated[Count | None, OnResume("noted")] = None
    """Evaluate after that many steps. Default: after each epoch."""
    early_stopping_patience: Annotated[Count | None, OnResume("extending")] = None
    """Stop after that many evaluations without a better model."""
    metric_for_best_model: str | None = None
    """The metric that picks the best model, written `SET/METRIC` for several validation sets. Default: the task's
    primary metric. Each metric knows whether higher or lower is better. Ties are decided by the lower validation loss,
    then by the earlier step."""
    metrics: Annotated[MetricSources, OnResume("noted")] = ()
    """Metrics of your own, which are reported behind those of the task. `evaluate:NAME_OR_PATH` is a module of Hugging
    Face's evaluate, if it needs a configuration `evaluate:NAME_OR_PATH:CONFIGURATION`. `module:function` is a function
    that takes lists of predictions and of references, and returns numbers by their names. They are for all tasks, or
    for some of several, for example `{intent = ["evaluate:f1"]}`."""
    lower_is_better: Names = ()
    """Names of `metrics`, as they are reported, for which lower is better. A function or a module can also name them
    itself in its attribute `lower_is_better`, and brier_score, mae, mape, mase, mse and smape of evaluate need neither.
    For all others higher is better."""
    logging_steps: Annotated[Count, OnResume("silent")] = 10
    """Write a record to metrics.jsonl after that many steps."""
    save_steps: Annotated[Count | None, OnResume("silent")] = None
    """Write a checkpoint after that many steps, in addition to those at evaluations."""
    keep_last: Annotated[Count, OnResume("silent")] = 2
    """Number of checkpoints to keep, in addition to the best one."""
    keep_checkpoints: Annotated[bool, OnResume("silent")] = False
    """Keep the checkpoints when the run is finished, so that more epochs can continue it. Each takes three times the
    space of the model."""
    save_adapter: Annotated[bool, OnResume("silent")] = False
    """Also write the low-rank adapters of the best model to `adapter/`, in the format of the library peft."""
    trackers: Annotated[Trackers, OnResume("silent")] = ()
    """Services that also receive the records of metrics.jsonl. Each needs its package."""
    project: Annotated[str, Field(min_length=1), OnResume("silent")] = "bert-tasks"
    """The project's name at the trackers."""


class FoldsSection(BaseModel):
    """Cross-validation, in which each row is predicted by a model that did not see it."""

    model_config = _CLOSED
    count: Annotated[int, Field(ge=2, le=1000)] = 5
    """Number of folds. Each is one run, in `output_dir/fold-N`."""
    group: Annotated[str, Field(min_length=1)] | None = None
    """A column of the training rows, for example with the author. Rows with the same value are in one fold, and a row
    without a value is a group of its own. Without it, questions on one article or context and sentences of one document
    stay together. Rows with the same texts also stay together. If too many groups share texts, they do not, and the
    summary reports it."""
    seed: Seed = 42
    """Decides which rows are in which fold, apart from `run.seed`."""
    fold: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Train this fold only, as an ordinary run in `output_dir`."""

    @model_validator(mode="after")
    def _has_fold(self) -> Self:
        """Checks that the only fold to train exists."""
        if self.fold is not None and self.fold > self.count:
            raise ValueError(f"fold is {self.fold}, but there are {self.count} folds")
        return self


class Recipe(BaseModel):
    """One run."""

    model_config = _CLOSED
    task: str
    """The task's name, or `module:Class` for your own task. Do not set it with `[tasks.NAME]`."""
    tasks: dict[str, dict[str, Any]] | None = None
    """Several tasks on one encoder, instead of `task` and `[settings]`. `[tasks.NAME]` has the `task` of each, its
    settings, its `columns` in the data, and the `weight` of its loss. `[tasks.NAME.data]` has its own rows, with the
    keys of `[data]`."""
    model: ModelSection
    """The checkpoint to start from."""
    settings: dict[str, Any] = {}
    """The settings of the task."""
    data: DataSpec
    """The source of the rows."""
    optim: OptimSection = OptimSection()
    """The optimizer."""
    run: RunSection = RunSection()
    """Evaluation, saving and logging."""
    teacher: TeacherSection | None = None
    """A trained model to learn from."""
    folds: FoldsSection | None = None
    """Cross-validation instead of one run."""
    search: SearchSection | None = None
    """A search for better values of some keys."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        """Checks what concerns several sections."""
        if self.folds is not None and self.run.seeds is not None:
            raise ValueError("run.seeds and [folds] exclude each other. Remove one of them")
        if self.optim.lora_rank is not None and self.model.config is not None:
            raise ValueError("optim.lora_rank needs a trained encoder. Remove it to train a new model, model.config")
        if self.optim.sampling != "proportional" and not self.data.tasks:
            raise ValueError(
                "optim.sampling needs tasks with their own rows. Write [tasks.NAME.data], or pass rows by task to fit"
            )
        return self


_SECTIONS: Mapping[str, type[BaseModel]] = MappingProxyType(
    {
        "model": ModelSection,
        "optim": OptimSection,
        "run": RunSection,
        "teacher": TeacherSection,
        "folds": FoldsSection,
        "search": SearchSection,
    }
)


def load_recipe(path: str | Path, *, overrides: Sequence[str] = (), output_dir: str | Path | None = None) -> Recipe:
    """Reads and checks a recipe, and makes its paths absolute.

    Args:
        path: The TOML file. Relative paths in it start at its folder.
        overrides: Texts ``section.key=value``, where the value is a TOML literal or else a string. Relative paths in
            them start at the current folder. An override of the source of the data removes other sources.
        output_dir: Replaces ``run.output_dir``. It is relative to the current folder.

    Returns:
        The recipe, with a default for each key that the file leaves out.

    Raises:
        RecipeError: The file is missing, is no TOML or does not fit the schema. The message names all errors.

    Examples:
        >>> load_recipe("recipe.toml", overrides=["optim.epochs=1"]).optim.epochs
        1
    """
    file = Path(path)
    text = read_text(file)
    changes = [parse_override(option) for option in overrides]
    if output_dir is not None:
        option = argument("output_dir", str(output_dir))
        changes.append(Override(option, ("run", "output_dir"), str(output_dir)))
    document = combined(parse_text(text, file), file.parent, changes)
    return _validated(document, str(file), text, {change.path: change.option for change in changes})


def resolved_toml(recipe: Recipe) -> str:
    """Returns the recipe as TOML, which ``load_recipe`` reads in any folder."""
    return tomli_w.dumps(_document(recipe))


def with_values(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """Returns a trial's recipe with other ``section.key`` values and no search."""
    document = _document(recipe, only_stated=True)
    document.pop("search", None)
    name = "the recipe with " + ", ".join(f"{key} = {literal(value)}" for key, value in values.items())
    return _validated(changed(document, values), name)


def _document(recipe: Recipe, *, only_stated: bool = False) -> Document:
    """Returns the tables of a recipe as TOML has them, with all keys or those that are stated."""
    document = recipe.model_dump(exclude_none=True, exclude_unset=only_stated)  # TOML has no null, so the key is absent
    if recipe.optim.max_grad_norm is None:
        document.setdefault("optim", {})["max_grad_norm"] = "none"
    # In a recipe the rows of a task are a section of the task, and in memory a part of the data.
    of_tasks = document["data"].pop("tasks", {})
    if "heads" in recipe.settings:  # see ``_of_several_tasks``
        others = {key: value for key, value in document.items() if key not in ("task", "settings")}
        sections: Document = {}
        for name, head in recipe.settings["heads"].items():
            sections[name] = dict(head)
            if name in of_tasks:
                sections[name]["data"] = of_tasks[name]
        if of_tasks.keys() == sections.keys():
            del others["data"]
        document = {"tasks": sections, **others}
    return document


def fit_keys() -> dict[str, tuple[str, str]]:
    """Returns the arguments of ``fit`` that are keys, each with its section and key."""
    # One run has one seed, and its output folder, model and rows are arguments of their own.
    return {
        **{name: ("optim", name) for name in OptimSection.model_fields},
        **{name: ("run", name) for name in RunSection.model_fields if name not in ("seeds", "output_dir")},
        "gradient_checkpointing": ("model", "gradient_checkpointing"),
        **{name: ("data", name) for name in ("document", "validation_share", "max_rows", "on_error")},
        **{f"teacher_{name}": ("teacher", name) for name in TeacherSection.model_fields if name != "name"},
    }


def option_hint(option: str, value: str) -> str:
    """Returns how to set a key of recipes that was typed as an option, or an empty text for another option.

    Args:
        option: The option, such as ``--epochs`` or transformers' ``--num_train_epochs``.
        value: Its value as typed.

    Examples:
        >>> option_hint("--epochs", "1")
        'Use --set optim.epochs=1'
    """
    name = option.lstrip("-").replace("-", "_")
    sections: dict[str, Collection[str]] = {section: model.model_fields for section, model in _SECTIONS.items()}
    sections["data"] = [each.name for each in dataclasses.fields(DataSpec)]
    settings: dict[str, None] = {}
    for task in TASKS.values():
        settings |= dict.fromkeys(task.stated_settings())
    sections["settings"] = settings
    for section, keys in sections.items():
        if name in keys:
            return f"Use --set {shlex.quote(f'{section}.{name}={value}')}"
    hint = hf_hint(name, (), sections).removeprefix(". ")
    if hint.startswith("Use "):
        return hint.replace("Use ", "Use --set ", 1)
    return hint


def recipe_of_arguments(
    arguments: Mapping[str, object], *, teacher: str | dict[str, str] | None, output_dir: str, tasks: Iterable[str] = ()
) -> Recipe:
    """Returns the recipe of the arguments of ``fit``.

    Its task, model and data are only placeholders.

    Args:
        arguments: The keyword arguments.
        teacher: The name of the teacher. None if there is no teacher.
        output_dir: The folder of the run.
        tasks: The names of tasks with their own rows.
    """
    keys = fit_keys()
    document: dict[str, Any] = {"optim": {}, "run": {"output_dir": output_dir}}
    data: dict[str, Any] = {"train": _IN_MEMORY}
    document |= {"task": _IN_MEMORY, "model": {"name": _IN_MEMORY}}
    document["data"] = dict(data)
    if tasks:
        document["data"]["tasks"] = dict.fromkeys(tasks, data)
    if teacher is not None:
        document["teacher"] = {"name": teacher}
    for name, value in arguments.items():
        section, key = keys[name]
        if section in document:  # arguments of a teacher do nothing without a teacher
            document[section][key] = value
    try:
        return Recipe.model_validate(document)
    except ValidationError as error:
        problems = schema_problems(error, document, (), {})
        raise RecipeError("\n".join(problem.text for problem in problems)) from None


def resume_effects() -> dict[str, str]:
    """Returns ``section.key`` -> the effect (`OnResume`) of settings that may change."""
    effects: dict[str, str] = {}
    for section, model in _SECTIONS.items():
        for name, field in model.model_fields.items():
            for mark in field.metadata:
                if isinstance(mark, OnResume):
                    effects[f"{section}.{name}"] = mark.effect
    return effects


def silent_settings() -> frozenset[str]:
    """Returns settings that change no batch's samples and no expected gradient."""
    return frozenset(name for name, effect in resume_effects().items() if effect == "silent")


def import_name(name: str, label: str, *, example: str) -> Any:
    """Imports ``module:name``, the value of a setting, which runs the code of the module.

    Args:
        name: The value, such as ``torch.optim:SGD``.
        label: Name of the setting in messages.
        example: What was expected, in messages.

    Raises:
        RecipeError: The value has another form, the module cannot be imported, or it has no such name.
    """
    if not IMPORTED.fullmatch(name):
        raise RecipeError(f"{label} is '{name}', expected {example}")
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        raise RecipeError(f"cannot import {label} '{name}' ({error}). Is '{module_name}' on PYTHONPATH?") from error
    if not hasattr(module, attribute):
        raise RecipeError(f"the module of {label} '{name}' has no '{attribute}'{did_you_mean(attribute, vars(module))}")
    return getattr(module, attribute)


def load_task_class(name: str) -> type[Task]:
    """Returns the task class of a name. Raises RecipeError if there is none."""
    if ":" not in name:
        try:
            return named_task(name)
        except UsageError as error:
            raise RecipeError(f"{error} (or 'module:Class' for your own task)") from None
    task = import_name(name, "task", example="'module:Class', such as 'my_package.my_task:MyTask'")
    # A function or an instance can be imported by the same notation, and a subclass may be unfinished.
    if not (isinstance(task, type) and issubclass(task, Task)):
        raise RecipeError(f"task '{name}' is no subclass of Task")
    if inspect.isabstract(task):
        missing = ", ".join(sorted(task.__abstractmethods__))
        raise RecipeError(f"task '{name}' does not define {missing}")
    return task


def build_heads(recipe: Recipe) -> dict[str, HeadTask]:
    """Returns the recipe's task under the name "", or its tasks by their names.

    Raises:
        RecipeError: A task rejects its settings.
    """
    if recipe.task != SEVERAL:
        return {"": HeadTask(task=build_task(recipe))}
    try:
        return head_tasks(recipe.settings["heads"])
    except ValueError as error:
        raise RecipeError(str(error)) from error


def build_task(recipe: Recipe, labels: tuple[str, ...] | None = None) -> Task:
    """Returns the recipe's task. Raises RecipeError if it rejects its settings."""
    settings = recipe.settings
    if labels is not None:
        settings = {**settings, "labels": labels}
    try:
        return load_task_class(recipe.task).of(**settings)
    except ValueError as error:
        raise RecipeError(f"[settings] {error}") from error


def _validated(
    document: Document, file: str, text: str = "", options: Mapping[KeyPath, str] = MappingProxyType({})
) -> Recipe:
    """Returns the recipe of a document, or raises one RecipeError with all of its problems."""
    recipe, problems = _checked(document)
    # The space is checked last, with a recipe for each of its limits, which must be valid without it.
    if recipe is not None and not problems and recipe.search is not None:
        space, problems = checked_space(recipe.search, document, _checked)
        recipe = recipe.model_copy(update={"search": recipe.search.with_space(space)})
    if recipe is None or problems:
        raise recipe_error(problems, file=file, text=text, options=options)
    return recipe


def _checked(document: Document) -> tuple[Recipe | None, list[Problem]]:
    """Returns the recipe and its problems, except problems that a search would change."""
    problems: list[Problem] = []
    task_class, has_several = None, "tasks" in document
    document, wrong = _of_several_tasks(document)
    problems += wrong
    if isinstance(document.get("task"), str) and not has_several and not problems:
        try:
            task_class = load_task_class(document["task"])
        except RecipeError as error:
            problems.append(Problem(("task",), str(error)))
    known_settings: tuple[str, ...] = ()
    if task_class is not None:
        known_settings = tuple(task_class.stated_settings())
    known_keys: KnownKeys = {
        **{name: tuple(section.model_fields) for name, section in _SECTIONS.items()},
        "data": tuple(field.name for field in dataclasses.fields(DataSpec)),
        "settings": known_settings,
        "": ("task",),
    }
    # [search] allows any key, so those that are no keys of [optim] are found here.
    search = section_of(document, "search")
    unknown = [name for name in search if name not in SearchSection.model_fields | OptimSection.model_fields]
    if unknown:
        problems += [Problem(("search", name), not_searchable(name, known_keys)) for name in unknown]
        document = {name: value for name, value in document.items() if name != "search"}
    settings = section_of(document, "settings")
    if task_class is not None:
        settings, wrong = _checked_settings(settings, task_class, known_keys)
        problems += wrong
    recipe = None
    try:  # strict validation takes lists and integers for tuples and floats only when the input is JSON
        recipe = Recipe.model_validate_json(json.dumps(document, default=str), strict=True)
    except ValidationError as error:
        problems += schema_problems(error, document, (), known_keys)
    # Problems of the settings and of the schema are found apart, and reported together.
    if recipe is None:
        return None, problems
    name = recipe.task
    if task_class is not None and ":" not in name:
        name = task_class.name  # instead of an alias, so that a run has one name for its task
    return recipe.model_copy(update={"task": name, "settings": settings}), problems


def _of_several_tasks(document: Document) -> tuple[Document, list[Problem]]:
    """Returns a document with ``[tasks.NAME]`` as a multi-task document, and problems."""
    tasks = document.get("tasks")
    if "tasks" in section_of(document, "data"):
        return document, [Problem(("data", "tasks"), "'tasks' does not belong in [data]. Write [tasks.NAME.data]")]
    if not isinstance(tasks, dict) or not tasks:
        return document, []
    # All problems are collected, also where one excludes another, because each of them needs a change of the file.
    both = sorted({"task", "settings"} & document.keys())
    problems = [Problem((name,), f"{name} and [tasks.NAME] exclude each other. Remove one of them") for name in both]
    if section_of(document, "data").get("columns"):
        problems.append(Problem(("data", "columns"), "name the columns of each task in [tasks.NAME], not in [data]"))
    heads: Document = {}
    of_tasks: Document = {}
    for name, entry in tasks.items():
        task_name = None
        if isinstance(entry, dict):
            task_name = entry.get("task")
        try:
            task_class = load_task_class(str(task_name))
        except RecipeError as error:
            problems.append(Problem(("tasks", name), f"[tasks.{name}] {error}"))
            continue
        if "data" in entry:
            of_tasks[name], wrong = _data_of_task(name, entry["data"])
            problems += wrong
            format = FORMATS.get(of_tasks[name].get("format", ""))
            entry = {key: value for key, value in entry.items() if key != "data"}
            # The labels of GLUE have an order, which the task of its own file would not know from sorted names.
            if format is not None and format.label_names:
                entry = {"labels": list(format.label_names.values()), **entry}
        settings = {key: value for key, value in entry.items() if key not in ENTRIES}
        keys: KnownKeys = {"settings": (*task_class.stated_settings(), *ENTRIES, "data")}
        checked, wrong = _checked_settings(settings, task_class, keys)
        for path, text in wrong:
            problems.append(Problem(("tasks", name, *path[1:]), text.replace("[settings]", f"[tasks.{name}]")))
        heads[name] = {**entry, **checked}
        if not wrong:
            try:
                head_tasks({name: heads[name]})
            except ValueError as error:
                problems.append(Problem(("tasks", name), str(error)))
    others = {key: value for key, value in document.items() if key not in ("tasks", "task", "settings")}
    if of_tasks:
        if of_tasks.keys() == tasks.keys() and "data" in others:
            problems.append(Problem(("data",), "each task has its own [tasks.NAME.data]. Remove [data]"))
        without = [name for name in tasks if name not in of_tasks]
        if without and not any(source in section_of(others, "data") for source in DATA_SOURCES):
            text = f"task '{without[0]}' has no rows. Name them in [data] or [tasks.{without[0]}.data]"
            problems.append(Problem(("tasks", without[0]), text))
        others["data"] = {**section_of(others, "data"), "tasks": of_tasks}
    settings = {}
    if not problems:
        settings = {"heads": heads}
    return {**others, "task": SEVERAL, "settings": settings}, problems


def _data_of_task(name: str, section: Any) -> tuple[Document, list[Problem]]:
    """Returns the section ``[tasks.NAME.data]``, and the problems of its keys."""
    path: KeyPath = ("tasks", name, "data")
    keys: KnownKeys = {f"tasks.{name}.data": tuple(each.name for each in dataclasses.fields(DataSpec))}
    try:
        spec = TypeAdapter(DataSpec).validate_json(json.dumps(section, default=str), strict=True)
    except ValidationError as error:
        return {}, list(schema_problems(error, section, path, keys))
    if spec.columns or spec.tasks:
        key = "tasks"
        if spec.columns:
            key = "columns"
        return {}, [Problem((*path, key), f"name the columns in [tasks.{name}], not in [tasks.{name}.data]")]
    return section, []


def _checked_settings(settings: Document, task_class: type[Task], keys: KnownKeys) -> tuple[Document, list[Problem]]:
    """Returns the settings with the types of the task's fields, and the problems."""
    known = task_class.stated_settings()
    checked: Document = {}
    missing = [name for name in required_settings(task_class) if name not in settings]
    problems = [Problem(("settings", name), missing_key(("settings", name), keys)) for name in missing]
    for name, value in settings.items():
        path: KeyPath = ("settings", name)
        if name not in known:
            problems.append(Problem(path, unknown_key(path, keys)))
            continue
        try:
            checked[name] = known[name].typed(value)
        except ValidationError as error:
            problems += schema_problems(error, value, path, keys)
    # Settings that are valid alone may exclude each other, which only the task knows.
    if not problems:
        try:
            task_class.of(**checked)
        except ValueError as error:  # reported at the setting that the message names first
            words = re.findall(r"\w+", str(error))
            named = next((word for word in words if word in checked), None)
            path = ("settings",)
            if named is not None:
                path = ("settings", named)
            problems.append(Problem(path, f"[settings] {error}"))
    return checked, problems
