"""Makes a run from a recipe.

Owns the order in which data, labels, task and model are made, because they depend on each other, and the dry run. The
labels are found in the rows, the task needs the labels, the head of the model needs the task, and the teacher needs the
model.
"""

from dataclasses import dataclass
from pathlib import Path

from bert_tasks.data.checks import DataReport
from bert_tasks.data.splits import trained_names, trained_reading
from bert_tasks.distributed import broadcast_from_main, main_process_first, make_accelerator
from bert_tasks.errors import RecipeError, UsageError, argument
from bert_tasks.model.encoder_with_heads import check_parameters, draw_new_head
from bert_tasks.model.features import training_samples
from bert_tasks.model.multitask import AnyModel, MultiTaskModel, new_model, pretrained_model
from bert_tasks.model.task_model import TaskModel
from bert_tasks.recipe.check import LoadedRecipe, prepare, report_on
from bert_tasks.recipe.schema import Recipe, TeacherSection, load_recipe, resolved_toml
from bert_tasks.tables import Result
from bert_tasks.training import files as outputs
from bert_tasks.training.checkpoints import checkpoints
from bert_tasks.training.distillation import Distillation, check_teachable, load_teacher
from bert_tasks.training.distillation_of_several import DistillationOfSeveral, Teacher, load_teachers
from bert_tasks.training.loop import Callback, Trainer
from bert_tasks.training.objectives import Objective, Supervised
from bert_tasks.training.optim import count_trained, make_adapters
from bert_tasks.training.progress import check_installed
from bert_tasks.training.replaced_tokens import ReplacedTokenDetection, make_generator
from bert_tasks.training.sampling import SampleOrder
from bert_tasks.training.state import FitResult
from bert_tasks.training.step import StepPlan


def build_trainer(prepared: LoadedRecipe, callback: Callback | None = None) -> Trainer:
    """Returns the run of a recipe, with its model and rows loaded, and with a teacher if the recipe names one."""
    recipe = prepared.recipe
    section, heads, seed = recipe.model, prepared.heads, recipe.run.seed
    # A file with a configuration makes a new model with random weights, and a name loads a pre-trained one.
    if section.config is not None:
        model = new_model(section.config, heads, tokenizer=str(section.tokenizer), seed=seed)
    else:
        model = pretrained_model(str(section.name), heads, revision=section.revision)
    if section.layers is not None or section.family is not None:
        model = model.with_layers(section.layers, family=section.family)
    prepare_model(model, seed=seed)
    model.columns, model.reading = trained_names(recipe.data, model.row_columns), trained_reading(recipe.data)
    return Trainer(
        objective=make_objective(model, recipe.teacher, seed=seed),
        splits=prepared.splits,
        optim=recipe.optim,
        run=recipe.run,
        model_settings=recipe.model.model_dump(),
        recipe_text=resolved_toml(recipe),
        callback=callback,
    )


def prepare_model(model: AnyModel, *, seed: int) -> None:
    """Makes a model ready for a run. The weights of a new head are drawn from the seed of the run.

    Raises:
        UsageError: The model cannot be trained and saved, because it is exported, wrapped by another library, or no
            ``TaskModel``.
    """
    if not isinstance(model, AnyModel):
        raise UsageError(
            f"expected a TaskModel, got a {type(model).__name__}. If another library has wrapped the model, pass "
            "the TaskModel inside. Merge adapters of peft with model = peft_model.merge_and_unload()"
        )
    if model.no_weights_reason:
        raise UsageError(f"it cannot be trained, because {model.no_weights_reason}")
    check_parameters(model)
    # Otherwise the weights of a new head would depend on whatever random numbers the program has drawn before.
    draw_new_head(model, seed)


def make_objective(
    model: AnyModel, section: TeacherSection | None, teacher: Teacher | None = None, *, seed: int
) -> Objective:
    """Returns the objective of a run, which is the loss of the labels, of a teacher, or of a generator.

    Args:
        model: The model that is trained.
        section: The section ``[teacher]``, with the name of the teacher and how it teaches. None if there is none.
        teacher: The teacher, instead of the name in the section. It is a model, or for some of several tasks a mapping
            from their names to a model or its name.
        seed: Seed of the weights of a generator.

    Raises:
        CheckpointError: The teacher's folder has no trained head for the task and its labels.
        UsageError: See ``Distillation`` and ``DistillationOfSeveral``.
    """
    if isinstance(model, MultiTaskModel):
        if section is None:
            return Supervised(model)
        if teacher is None:
            teacher = section.name
        teachers = load_teachers(model.tasks, teacher, revision=section.revision)
        return DistillationOfSeveral(model, teachers, section)
    if model.task.generator() is not None:
        if section is not None:
            check_teachable(model.task)  # which raises the error, because no task with a generator can be taught
        return ReplacedTokenDetection(model, make_generator(model, seed=seed))
    if section is None:
        return Supervised(model)
    if isinstance(section.name, dict):
        raise UsageError(f"[teacher] has tasks ({', '.join(section.name)}), but the model has one. Name one teacher")
    if isinstance(teacher, MultiTaskModel):
        raise UsageError(f"the teacher has the tasks {', '.join(teacher.models)}. Pass the one of the model")
    if not isinstance(teacher, TaskModel):
        teacher = load_teacher(section.name, model.task, revision=section.revision)
    return Distillation(model, teacher, section)


def train(
    recipe: Recipe | str | Path,
    *,
    overwrite: bool = False,
    progress: bool = True,
    callback: Callback | None = None,
) -> FitResult:
    """Trains a recipe, or resumes its run.

    It does what the command ``bert-tasks train`` does. Use it if a run should be reproducible from a file, and `fit` to
    train on rows that are in memory, or a model that you have made. A finished run is not trained again, unless a
    setting extends it, such as more epochs. Its result is returned, with ``reused`` set.

    Args:
        recipe: A recipe, or the path of its TOML file.
        overwrite, progress, callback: See ``fit``.

    Returns:
        The metrics of the best model, which is in ``model/`` of the output folder.

    Raises:
        RecipeError, DataError, CheckpointError, UsageError, DivergedError, StoppedError: See ``fit``.
    """
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    if loaded.folds is not None and loaded.folds.fold is None:
        raise RecipeError("the recipe has [folds]. Call train_folds, or set folds.fold to train one of them")
    return run_recipe(loaded, overwrite=overwrite, progress=progress, callback=callback)[1]


def run_recipe(
    recipe: Recipe, *, overwrite: bool = False, progress: bool = True, callback: Callback | None = None
) -> tuple[Trainer, FitResult]:
    """Trains a recipe. Returns the run, with its rows and best model, and its result."""
    check_installed(recipe.run.trackers)
    accelerator = make_accelerator(recipe.optim.mixed_precision)
    # Before the data is read, which may take long.
    broadcast_from_main(accelerator, outputs.check_folder, run_folder(recipe))
    with main_process_first(accelerator):
        loaded = prepare(recipe)
    trainer = build_trainer(loaded, callback)
    return trainer, trainer.train(overwrite=overwrite, progress=progress)


def run_folder(recipe: Recipe) -> Path:
    """Returns the output folder of a recipe. Raises RecipeError if it has none."""
    if recipe.run.output_dir is None:
        raise RecipeError(
            f"no output folder. Set run.output_dir in the recipe, or pass {argument('output_dir', 'FOLDER')}"
        )
    return Path(recipe.run.output_dir)


@dataclass(frozen=True, kw_only=True)
class DryRun(Result):
    """The plan of a run, for people and programs.

    Attributes:
        steps, warmup_steps: The number of optimizer steps, and how many of them belong to the warm-up.
        tokens_per_epoch: The number of tokens in the training rows, with special tokens.
        parameters, trained_parameters: The number of parameters of the model, and of those that are trained.
        load_summary: A sentence about the weights that were loaded and those that are new.
        example: The first row of the first batch, decoded from its tokens.
        output_dir, state: The folder of the run, and what is in it.
        data: The numbers of rows and of labels.
    """

    steps: int
    warmup_steps: int
    tokens_per_epoch: int
    parameters: int
    trained_parameters: int
    load_summary: str
    example: str
    output_dir: str
    state: str
    data: DataReport

    def lines(self) -> list[str]:
        """Returns the lines for a terminal."""
        return [
            *self.data.lines(),
            f"weights: {self.load_summary}",
            f"parameters: {self.parameters:,} ({self.trained_parameters:,} trained)",
            f"steps: {self.steps} ({self.warmup_steps} of warm-up), {self.tokens_per_epoch:,} tokens an epoch",
            f"first row of the first batch: {self.example}",
            f"output folder: {self.output_dir}, {self.state} (the dry run wrote no files)",
        ]


def dry_run(recipe: Recipe, *, overwrite: bool = False) -> DryRun:
    """Does everything that ``train`` does before the first step, but writes no output.

    It loads the data and the model, so it takes as long as the start of a run, and finds the same errors.

    Raises:
        RecipeError, DataError, CheckpointError, UsageError: As for ``train``.
    """
    folder, seed = run_folder(recipe), recipe.run.seed
    outputs.check_folder(folder)
    check_installed(recipe.run.trackers)
    trainer = build_trainer(prepare(recipe))
    trainer.preflight()
    model, objective, optim = trainer.model, trainer.objective, trainer.optim
    existing = None
    if not overwrite:
        existing = trainer.folder.existing_run()
    saved = checkpoints(trainer.folder.checkpoints)
    if existing is None:
        state = "a new run"
    elif existing.summary is not None and not existing.changed:
        state = "this run is complete"
    elif saved:
        state = f"a run to resume from {saved[-1].name}"
    else:
        state = "a run without a checkpoint, which starts again from the beginning"
    samples = training_samples(trainer.splits.train, model)
    order = SampleOrder.of(samples, optim, seed=seed)
    plan, first_row = StepPlan.of(optim, order), order.epoch(0)[0][:1]
    load_summary = "random, of a new model"
    if model.load_report is not None:
        load_summary = model.load_report.summary()
    return DryRun(
        steps=plan.total,
        warmup_steps=plan.warmup,
        tokens_per_epoch=int(samples.lengths.sum()),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trained_parameters=count_trained(objective, make_adapters(objective, optim, seed)),
        load_summary=load_summary,
        example=str(model.require_tokenizer().decode(samples.features_of(first_row)[0]["input_ids"])),
        output_dir=str(folder),
        state=state,
        data=report_on(trainer.splits, model),
    )
