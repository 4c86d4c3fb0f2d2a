"""Recipes: the typed, closed schema of a training run, read from TOML with overrides.

Owns the sections, their limits, and the check of a task's settings. What the schema cannot express (files, fitting
labels) is left to ``load_recipe`` and ``check``. Importing this module loads neither torch nor a task.
"""

import dataclasses
import importlib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from bert_tasks.data.splits import DataSpec
from bert_tasks.encoder.config import LoraTarget
from bert_tasks.errors import CheckpointError, RecipeError, UsageError
from bert_tasks.families import new_hf_config
from bert_tasks.recipe.errors import (
    KeySources,
    KnownKeys,
    Problem,
    missing_key,
    nearest_or_all,
    recipe_error,
    schema_problems,
    unknown_key,
)
from bert_tasks.recipe.search import SearchSection, changed, checked_space, not_searchable
from bert_tasks.recipe.toml import (
    Document,
    KeyPath,
    Override,
    combined,
    key_lines,
    literal,
    parse_override,
    parse_text,
    read_text,
    section_of,
    to_toml,
)

if TYPE_CHECKING:
    from bert_tasks.tasks.base import Task

# The texts below the fields are shown in the JSON schema and in docs/reference/recipe.md.
_CLOSED = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True, use_attribute_docstrings=True)


def _without_repeats(seeds: tuple[int, ...]) -> tuple[int, ...]:
    repeated = sorted({seed for seed in seeds if seeds.count(seed) > 1})
    if repeated:
        raise ValueError(f"{', '.join(map(str, repeated))} appears more than once; each seed is one run")
    return seeds


def _known_names(value: object, *, kind: str, known: Sequence[str]) -> object:
    """Checks the names here, because messages of pydantic suggest no similar name. A list is accepted for a tuple."""
    if not isinstance(value, list | tuple):
        return value
    for name in value:
        if isinstance(name, str) and name not in known:
            raise ValueError(f"unknown {kind} '{name}'{nearest_or_all(name, known)}")
    return tuple(dict.fromkeys(value)) if all(isinstance(name, str) for name in value) else tuple(value)


Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Seeds = Annotated[tuple[Seed, ...], Field(min_length=1), AfterValidator(_without_repeats)]
LearningRateSchedule = Literal["linear", "cosine", "constant", "wsd"]
TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]
Layers = Literal["every-other"] | tuple[Annotated[int, Field(ge=0, lt=2**31)], ...]
LoraTargets = Annotated[
    tuple[LoraTarget, ...],
    Field(min_length=1),
    BeforeValidator(partial(_known_names, kind="layer", known=get_args(LoraTarget))),
]
Trackers = Annotated[
    tuple[TrackerName, ...], BeforeValidator(partial(_known_names, kind="tracker", known=get_args(TrackerName)))
]
# TOML has no null: 0 and "none" disable the limit.
Norm = Annotated[
    Positive | None,
    BeforeValidator(lambda value: None if value == "none" or (value == 0 and value is not False) else value),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, {"const": "none"}]}),
]


class ModelSection(BaseModel):
    """The checkpoint to start from, or the configuration of a new model."""

    model_config = _CLOSED
    name: Annotated[str, Field(min_length=1)] | None = None
    """A hub id, a folder, or `package:NAME/PATH` for weights inside an installed package."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    layers: Layers | None = None
    """Train a student that has only these layers of the checkpoint, counted from 0; "every-other": 0, 2, 4, ...."""
    family: Annotated[str, Field(min_length=1)] | None = None
    """Train the checkpoint as a model of another family that computes the same, such as "distilbert" of a BERT."""
    config: dict[str, Any] | None = None
    """Train a new model, with random weights drawn from `run.seed`, in place of `name`: `family`, and fields of
    transformers' configuration of that family, such as `hidden_size`. Others have the defaults of transformers;
    `vocab_size` and the ids of special tokens are the tokenizer's."""
    tokenizer: Annotated[str, Field(min_length=1)] | None = None
    """The tokenizer of a new model: a folder or a hub id."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.name is None) == (self.config is None):
            stated = "both are given" if self.name is not None else "neither is given"
            raise ValueError(f"expected either name, a checkpoint, or config, a new model; {stated}")
        if self.config is not None and (self.layers is not None or self.family is not None):
            raise ValueError("layers and family are those of a checkpoint: a new model states its own in config")
        if self.config is None and self.tokenizer is not None:
            raise ValueError("tokenizer belongs to config: a checkpoint has its own")
        if self.config is not None:
            if self.tokenizer is None:
                raise ValueError("config needs tokenizer: a folder, such as `bert-tasks tokenizer` writes, or a hub id")
            others = [key for key in ("revision", "layers", "family") if getattr(self, key) is not None]
            if others:
                raise ValueError(f"{others[0]} belongs to name, and config is given")
            try:
                new_hf_config(self.config)
            except CheckpointError as error:
                raise ValueError(f"config: {error}") from None
        return self


class TeacherSection(BaseModel):
    """A trained model of the same task from which the model learns beside the labels (distillation)."""

    model_config = _CLOSED
    name: Annotated[str, Field(min_length=1)]
    """A folder, the output folder of a run, a hub id, or `package:NAME/PATH`."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    temperature: Positive = 2.0
    """Logits of classes are divided by it; a higher one shows more of what the teacher finds less likely."""
    weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the teacher's logits in the loss, which is (1 - weight) x labels + weight x teacher."""
    hidden: Literal["none", "cosine", "mse"] = "none"
    """Also compare the last layer's states of all tokens: by their angle, or by their mean squared difference."""
    hidden_weight: NotNegative = 1.0
    """Weight of the states in the loss."""
    relations: bool | Count = False
    """Also compare the relations between tokens in the last layer's queries, keys and values, in so many heads; true:
    as many as the teacher's attention has. Widths and heads of the models may differ (MiniLMv2)."""
    relations_weight: NotNegative = 1.0
    """Weight of the relations in the loss."""
    cache_logits: bool = False
    """Compute the teacher's logits once and keep them in the cache, in place of running the teacher in each step."""


class OptimSection(BaseModel):
    """The optimizer (AdamW), its schedule, and the size of a step."""

    model_config = _CLOSED
    learning_rate: Positive = 5e-5
    """The highest learning rate, after the warm-up."""
    lr_scheduler_type: LearningRateSchedule = "linear"
    """The learning rate after the warm-up: it falls to 0 linearly or like a cosine, stays, or ("wsd") stays and falls
    linearly to 0 over the last `decay_ratio` of the steps."""
    epochs: Annotated[int, Field(ge=1, le=100_000)] = 3
    """How often each sample is used."""
    max_steps: Count | None = None
    """Number of optimizer steps in place of `epochs`."""
    batch_size: Count | None = 32
    """Samples per optimizer step, over all devices."""
    batch_tokens: Count | None = None
    """Tokens per optimizer step, over all devices, in place of `batch_size`: as many samples of similar length as fit,
    one at least. Needs `max_steps`, because epochs then differ in their number of steps."""
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the steps in which the learning rate rises from 0."""
    decay_ratio: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of the steps, the last ones, in which "wsd" lowers the learning rate."""
    weight_decay: NotNegative = 0.0
    """Weight decay of all weights except those of layer norms and biases."""
    max_grad_norm: Norm = 1.0
    """Larger gradients are scaled to this norm; 0 or "none": no limit."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's first decay rate."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """AdamW's second decay rate."""
    adam_epsilon: Positive = 1e-8
    """Constant that AdamW adds to the denominator."""
    bias_correction: bool = True
    """Correct AdamW's moments for their start at 0; without it as Google's BERT and ELECTRA were trained."""
    mixed_precision: Literal["no", "fp16", "bf16"] = "no"
    """Number format of the matrix products; "fp16" needs a GPU."""
    vocabulary_rows: Literal["in_data", "all"] = "in_data"
    """Word embeddings that gradients and AdamW cover: of the tokens in the training rows, or all. The results are the
    same: the other rows get their weight decay later. Where a head reads the whole table, all are covered."""
    head_learning_rate: Positive | None = None
    """Learning rate of the task's head, if it has its own."""
    layerwise_lr_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """Factor of the learning rate from each layer to the layer below it."""
    freeze_embeddings: bool = False
    """Do not train the embeddings."""
    freeze_layers: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Number of layers, counted from the embeddings, that are not trained."""
    lora_rank: Count | None = None
    """Train low-rank adapters (LoRA) of this rank and the task's head, in place of all weights. The saved model has the
    adapters in its weights."""
    lora_alpha: Positive | None = None
    """The changes that adapters make are multiplied by `lora_alpha / lora_rank`; default: `lora_rank`."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability of dropping an input of an adapter."""
    lora_targets: LoraTargets = ("query", "value")
    """The linear layers that have adapters: "query", "key" and "value" of attention, "attention_output" after it, and
    the first ("intermediate") and the second one ("output") of the feed-forward."""
    micro_batch_tokens: Count = 16384
    """Tokens that a device processes at once. Changes memory and, unless dropout is 0, the masks that dropout draws."""

    @model_validator(mode="before")
    @classmethod
    def _one_size(cls, given: Any) -> Any:
        """Leaves ``batch_size`` out where ``batch_tokens`` replaces it.

        Raises:
            ValueError: both are stated, or ``batch_tokens`` without ``max_steps``.
        """
        if not isinstance(given, Mapping) or given.get("batch_tokens") is None:
            return given
        if given.get("batch_size") is not None:
            raise ValueError("batch_tokens replaces batch_size: remove one of them")
        if given.get("max_steps") is None:
            raise ValueError("batch_tokens needs max_steps, because epochs then differ in their number of steps")
        return {**given, "batch_size": None}

    @model_validator(mode="after")
    def _adapters_fit(self) -> Self:
        if self.lora_rank is None:
            options, defaults = ("lora_alpha", "lora_dropout", "lora_targets"), type(self).model_fields
            stated = [name for name in options if getattr(self, name) != defaults[name].default]
            if stated:
                raise ValueError(f"{stated[0]} needs lora_rank, such as lora_rank = 8")
        elif self.freeze_embeddings or self.freeze_layers:
            name = "freeze_embeddings" if self.freeze_embeddings else "freeze_layers"
            raise ValueError(f"lora_rank freezes the whole encoder already: remove {name}")
        return self

    @model_validator(mode="after")
    def _has_size(self) -> Self:
        if self.batch_size is None and self.batch_tokens is None:
            raise ValueError("batch_size: expected a whole number, at least 1, or batch_tokens in its place")
        return self


class RunSection(BaseModel):
    """What is evaluated, saved and logged. A checkpoint is also written at every evaluation."""

    model_config = _CLOSED
    seed: Seed = 42
    """Seed of the new head, the order of the samples and dropout."""
    seeds: Seeds | None = None
    """Train once per seed, each in its own folder inside `output_dir`; `seed` is then not used."""
    output_dir: str | None = None
    """The run's folder."""
    eval_steps: Count | None = None
    """Evaluate after that many steps; default: after each epoch."""
    early_stopping_patience: Count | None = None
    """Stop after that many evaluations without a better model."""
    metric_for_best_model: str | None = None
    """The metric that picks the best model, with several validation sets `SET/METRIC`; default: the task's primary
    metric. Each metric knows whether higher or lower is better. Ties are decided by the lower validation loss, then by
    the earlier step."""
    logging_steps: Count = 10
    """Write a record to metrics.jsonl after that many steps."""
    save_steps: Count | None = None
    """Write a checkpoint after that many steps, in addition to those at evaluations."""
    keep_last: Count = 2
    """Number of checkpoints to keep, in addition to the best one."""
    trackers: Trackers = ()
    """Services that also receive the records of metrics.jsonl; each needs its package."""
    project: Annotated[str, Field(min_length=1)] = "bert-tasks"
    """The project's name at the trackers."""


class FoldsSection(BaseModel):
    """Cross-validation: the training rows are divided, and each part is predicted by a model that did not see it."""

    model_config = _CLOSED
    count: Annotated[int, Field(ge=2, le=1000)] = 5
    """Number of folds, each of which is one run, in `output_dir/fold-N`."""
    group: Annotated[str, Field(min_length=1)] | None = None
    """A column of the training rows, such as the author's: rows with the same value there are in one fold, and a row
    without a value is a group of its own. Without it, questions on one article or context and sentences of one document
    stay together. Rows with the same texts stay together, too, unless too many groups share texts: the summary then
    says so."""
    seed: Seed = 42
    """Decides which rows are in which fold, apart from `run.seed`."""
    fold: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Train this fold only, as an ordinary run in `output_dir`."""

    @model_validator(mode="after")
    def _has_fold(self) -> Self:
        if self.fold is not None and self.fold > self.count:
            raise ValueError(f"fold = {self.fold}: there are {self.count} folds")
        return self


class Recipe(BaseModel):
    """One run."""

    model_config = _CLOSED
    task: str
    """The task's name, or `module:Class` for your own."""
    model: ModelSection
    """The checkpoint to start from."""
    settings: dict[str, Any] = {}
    """The settings of the task."""
    data: DataSpec
    """Where the rows are."""
    optim: OptimSection = OptimSection()
    """The optimizer."""
    run: RunSection = RunSection()
    """What is evaluated, saved and logged."""
    teacher: TeacherSection | None = None
    """A trained model to learn from."""
    folds: FoldsSection | None = None
    """Cross-validation in place of one run."""
    search: SearchSection | None = None
    """A search for better values of some keys."""

    @model_validator(mode="after")
    def _one_experiment(self) -> Self:
        if self.folds is not None and self.run.seeds is not None:
            raise ValueError("run.seeds and [folds] exclude each other: remove one of them")
        return self

    @model_validator(mode="after")
    def _adapters_have_weights(self) -> Self:
        if self.optim.lora_rank is not None and self.model.config is not None:
            raise ValueError("optim.lora_rank needs a trained encoder: remove it to train a new model, model.config")
        return self


def load_recipe(path: str | Path, *, overrides: Sequence[str] = (), output_dir: str | Path | None = None) -> Recipe:
    """Reads a recipe from a TOML file and checks it; all paths become absolute.

    Args:
        path: The file; relative paths in it start at its folder.
        overrides: ``section.key=value`` texts, where the value is a TOML literal or else a string. Relative paths in
            them start at the current folder. An override of the source of the data removes other sources.
        output_dir: Replaces ``run.output_dir``; relative to the current folder.

    Returns:
        The recipe.

    Raises:
        RecipeError: The file is missing, is no TOML (the first error is reported) or does not fit the schema (all
            errors are reported).
    """
    file = Path(path)
    text = read_text(file)
    changes = [parse_override(option) for option in overrides]
    if output_dir is not None:
        option = f"--output-dir {output_dir}"
        changes.append(Override(option=option, path=("run", "output_dir"), value=str(output_dir)))
    document = combined(parse_text(text, file), file.parent, changes)
    sources = KeySources(
        file=str(file), lines=key_lines(text), options={change.path: change.option for change in changes}
    )
    return _validated(document, sources)


def resolved_toml(recipe: Recipe) -> str:
    """The recipe as TOML; ``load_recipe`` reads an equal recipe from it, in any folder."""
    return to_toml(_document(recipe))


def with_values(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """The recipe of a trial: other values for some keys, and nothing to search.

    Args:
        recipe: the recipe.
        values: ``section.key`` -> value.

    Raises:
        RecipeError: the values do not go together.
    """
    document = _document(recipe, only_stated=True)
    document.pop("search", None)
    sources = KeySources(file="the recipe with " + ", ".join(map(_stated, values.items())), lines={}, options={})
    return _validated(changed(document, values), sources)


def _document(recipe: Recipe, *, only_stated: bool = False) -> Document:
    document = recipe.model_dump(exclude_none=True, exclude_unset=only_stated)  # TOML has no null: the key is absent
    if recipe.optim.max_grad_norm is None:
        document.setdefault("optim", {})["max_grad_norm"] = "none"
    return document


def _stated(item: tuple[str, Any]) -> str:
    return f"{item[0]} = {literal(item[1])}"


def sections(**settings: object) -> tuple[OptimSection, RunSection]:
    """The sections ``[optim]`` and ``[run]`` from the keywords of ``fit``.

    Raises:
        RecipeError: naming every value that is not allowed.
    """
    run_fields = tuple(name for name in RunSection.model_fields if name != "seeds")  # keywords are for a single run
    of_run = {name: value for name, value in settings.items() if name in run_fields}
    of_optim = {name: value for name, value in settings.items() if name not in of_run}
    known = {"": (*OptimSection.model_fields, *run_fields)}
    problems: list[Problem] = []
    built: dict[type[BaseModel], Any] = {}
    for kind, given in ((OptimSection, of_optim), (RunSection, of_run)):
        try:
            built[kind] = kind.model_validate(given)
        except ValidationError as error:
            problems += schema_problems(error, given, (), known)
    if problems:
        raise RecipeError("\n".join(problem.text for problem in problems))
    return built[OptimSection], built[RunSection]


def teacher_section(**settings: object) -> TeacherSection:
    """The section ``[teacher]`` from keywords of ``fit``.

    Raises:
        RecipeError: naming every value that is not allowed.
    """
    try:
        return TeacherSection.model_validate(settings)
    except ValidationError as error:
        found = schema_problems(error, settings, (), {"": tuple(TeacherSection.model_fields)})
        raise RecipeError("\n".join(f"teacher: {problem.text}" for problem in found)) from None


def load_task_class(name: str) -> "type[Task]":
    """The task class of a name; ``module:Class`` imports the module, which runs its code.

    Raises:
        RecipeError: there is no such task, or it cannot be imported.
    """
    from bert_tasks.tasks import named_task
    from bert_tasks.tasks.base import Task

    if ":" not in name:
        try:
            return named_task(name)
        except UsageError as error:
            raise RecipeError(f"{error} (your own: 'module:Class')") from None
    if not re.fullmatch(r"\w+(\.\w+)*:\w+", name):
        raise RecipeError(f"task '{name}': expected 'module:Class', such as 'my_package.my_task:MyTask'")
    module_name, _, class_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        raise RecipeError(f"task '{name}': cannot import '{module_name}' ({error}); is it on PYTHONPATH?") from error
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, Task)):
        tasks = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, Task)]
        raise RecipeError(f"task '{name}': no Task class '{class_name}' there{nearest_or_all(class_name, tasks)}")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise RecipeError(f"task '{name}': {class_name} does not define {missing}")
    return found


def build_task(recipe: Recipe, labels: tuple[str, ...] | None = None) -> "Task":
    """The recipe's task; ``labels``, if given, replace those of the settings.

    Raises:
        RecipeError: The task rejects its settings.
    """
    settings = recipe.settings if labels is None else {**recipe.settings, "labels": labels}
    try:
        return load_task_class(recipe.task)(**settings)
    except ValueError as error:
        raise RecipeError(f"[settings] of {recipe.task}: {error}") from error


def _validated(document: Document, sources: KeySources) -> Recipe:
    recipe, problems = _checked(document)
    if recipe is None or problems:
        raise recipe_error(problems, sources)
    if recipe.search is None:
        return recipe
    space, problems = checked_space(recipe.search, document, _checked)
    if problems:
        raise recipe_error(problems, sources)
    return recipe.model_copy(update={"search": recipe.search.with_space(space)})


def _checked(document: Document) -> tuple[Recipe | None, list[Problem]]:
    """The recipe, and the problems of its keys, without those of what a search would change."""
    problems: list[Problem] = []
    task_class = None
    if isinstance(document.get("task"), str):
        try:
            task_class = load_task_class(document["task"])
        except RecipeError as error:
            problems.append(Problem(path=("task",), text=str(error)))
    known: KnownKeys = {
        "model": tuple(ModelSection.model_fields),
        "optim": tuple(OptimSection.model_fields),
        "run": tuple(RunSection.model_fields),
        "teacher": tuple(TeacherSection.model_fields),
        "folds": tuple(FoldsSection.model_fields),
        "data": tuple(field.name for field in dataclasses.fields(DataSpec)),
        "settings": () if task_class is None else tuple(stated_fields(task_class)),
        "": ("task",),
        "search": tuple(SearchSection.model_fields),
    }
    search = section_of(document, "search")
    unknown = [name for name in search if name not in SearchSection.model_fields | OptimSection.model_fields]
    if unknown:
        problems += [Problem(path=("search", name), text=not_searchable(name, known)) for name in unknown]
        left = {name: value for name, value in search.items() if name not in unknown}
        document = {name: value for name, value in document.items() if name != "search"}
        if left.keys() & {*OptimSection.model_fields, "optim", "settings", "model"}:  # else no key to vary is left
            document["search"] = left
    settings = section_of(document, "settings")
    if task_class is not None:
        settings, wrong = _checked_settings(settings, task_class, known)
        problems += wrong
    recipe = None
    try:  # strict validation takes lists and integers for tuples and floats only when the input is JSON
        recipe = Recipe.model_validate_json(json.dumps(document, default=str), strict=True)
    except ValidationError as error:
        problems += schema_problems(error, document, (), known)
    if recipe is None:
        return None, problems
    name = recipe.task if task_class is None or ":" in recipe.task else task_class.name  # aliases are replaced
    return recipe.model_copy(update={"task": name, "settings": settings}), problems


def stated_fields(task_class: "type[Task]") -> dict[str, dataclasses.Field[Any]]:
    """The fields of a task that a recipe may state."""
    return {
        field.name: field
        for field in dataclasses.fields(task_class)
        if field.init and field.name not in task_class.fitted_fields
    }


def _checked_settings(settings: Document, task_class: "type[Task]", known: KnownKeys) -> tuple[Document, list[Problem]]:
    """The settings, converted to the types of the task's fields, and the problems."""
    from bert_tasks.tasks import typed_setting

    fields = stated_fields(task_class)
    checked: Document = {}
    problems = [
        Problem(path=("settings", name), text=missing_key(("settings", name), known))
        for name, field in fields.items()
        if field.default is field.default_factory is dataclasses.MISSING and name not in settings
    ]
    for name, value in settings.items():
        path: KeyPath = ("settings", name)
        if name not in fields:
            problems.append(Problem(path=path, text=unknown_key(path, known)))
            continue
        try:
            checked[name] = typed_setting(task_class, name, value)
        except ValidationError as error:
            problems += schema_problems(error, value, path, known)
    if not problems:
        try:
            task_class(**checked)
        except ValueError as error:  # reported at the stated setting that the message names first
            words = re.findall(r"\w+", str(error))
            named = min((name for name in checked if name in words), key=words.index, default=None)
            path = ("settings",) if named is None else ("settings", named)
            problems.append(Problem(path=path, text=f"[settings]: {error}"))
    return checked, problems
