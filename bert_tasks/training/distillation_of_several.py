"""Distillation of several tasks, each with its own labels and its own teacher.

The teachers are the heads of one model of several tasks, or models of one task each, for some of the tasks. Owns the
loss, and the loading of such teachers. What it has in common with a single teacher is in distillation.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.inference.precision import float32
from bert_tasks.metrics.tables import metric_key
from bert_tasks.model.features import tokenized
from bert_tasks.model.inputs import open_model
from bert_tasks.model.multitask import AnyModel, MultiTaskModel
from bert_tasks.model.shared_heads import HeadBatch, SharedOutput
from bert_tasks.model.task_model import TaskModel
from bert_tasks.model.windows import count_terms, loss_terms
from bert_tasks.outputs.base import LossTerm
from bert_tasks.outputs.features import Feature
from bert_tasks.outputs.logits import DISTILLATION
from bert_tasks.outputs.settings import require
from bert_tasks.recipe.schema import TeacherSection
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.several import task_name
from bert_tasks.training.distillation import (
    LOGITS,
    Distillation,
    TaughtObjective,
    check_teacher,
    divergence_term,
    load_teacher,
    teacher_name,
)
from bert_tasks.training.evaluation import Validation
from bert_tasks.training.objectives import weights_digest

Teacher = AnyModel | str | Path | Mapping[str, TaskModel | str | Path]


class DistillationOfSeveral(TaughtObjective):
    """The losses of several tasks and the distances of their logits from teachers.

    The terms of a task with a teacher are the terms of ``Distillation``, times the weight of the task. A task without a
    teacher learns from its labels only. States and relations are not compared.
    """

    model: MultiTaskModel

    def __init__(
        self, model: MultiTaskModel, teacher: AnyModel | Mapping[str, TaskModel], section: TeacherSection
    ) -> None:
        """Checks that the teachers can teach the model.

        Args:
            model: The student.
            teacher: A model with these tasks, or a model for some of the tasks.
            section: A recipe's ``[teacher]``.

        Raises:
            UsageError: A teacher does not fit its task (see ``Distillation``), or the model of several tasks that is to
                teach lacks one of them.
        """
        super().__init__(model, section)
        self.teachers = self._checked(teacher)

    def _checked(self, teacher: AnyModel | Mapping[str, TaskModel]) -> Mapping[str, TaskModel]:
        """Returns the teacher of each task in evaluation mode. Raises the errors of the constructor."""
        students, reject = self.model.heads, partial(require, error=UsageError)
        reject(
            self.section.hidden == "none" and not self.section.relations,
            "[teacher] of several tasks teaches only logits. Set teacher.hidden to 'none' and teacher.relations to "
            "false",
        )
        # A teacher with exactly the tasks of the model, whose encoder then runs once for all of them. A tuple, because
        # torch would register a module as a part of this one, with its weights in checkpoints.
        self._shared: tuple[AnyModel, ...] = ()
        if isinstance(teacher, AnyModel):
            models = teacher.heads
            missing = [name for name in students if name not in models]
            has = ", ".join(models)
            if "" in models:
                has = f"only {task_name(teacher.tasks)}"
            reject(
                not missing,
                f"the teacher {teacher_name(teacher)} has no task {', '.join(missing)} (it has {has}). Name a teacher "
                'for each task that has one, for example {TASK = "FOLDER"}',
            )
            if len(models) == len(students):
                self._shared = (teacher.eval(),)
            teacher = {name: models[name] for name in students}
        for name, model in teacher.items():
            try:
                check_teacher(model, students[name])
            except UsageError as error:
                raise UsageError(f"[teacher] of task {name}: {error}") from None
        return {name: teacher[name].eval() for name in sorted(teacher)}

    @property
    def settings(self) -> dict[str, Any]:
        teachers = self.teachers.items()
        names = ", ".join(f"{name}: {teacher_name(teacher)}" for name, teacher in teachers)
        weights: dict[str, Tensor] = {}
        for name, each in teachers:
            weights |= {f"{name}.{key}": value for key, value in each.state_dict().items()}
        return {"teacher": {"name": names, "digest": weights_digest(weights), **self._options}}

    def agreement(self, validation: Validation, accelerator: Accelerator) -> dict[str, float]:
        """Returns the fraction of predictions that equal the teacher's, by validation set and task."""
        students = self.model.heads
        agreements: dict[str, float] = {}
        for name, teacher in self.teachers.items():
            student, of_task = students[name], {}
            for key, (_, table) in validation.items():
                rows = table.of_head(name).labelled(student.task.columns)
                if len(rows):
                    of_task[metric_key(key, name)] = (tokenized(rows, student), rows)
            agreements |= Distillation(student, teacher, self.section).agreement(of_task, accelerator)
        return agreements

    def counts(self, features: Sequence[Feature]) -> dict[str, float]:
        counts = count_terms(self.model, features)
        for name in self.teachers:
            members = [feature for feature in features if feature.get("head") == name]
            output = self.model.heads[name].task.output
            counts[f"{name}/{DISTILLATION}"] = output.divergence_count(members)
        return counts

    def forward(self, batch: PackedBatch) -> tuple[LossTerm, ...]:
        model, section = self.model, self.section
        student: SharedOutput = float32(model(batch))
        batches = dict(zip(model.heads, student.batches, strict=True))
        with torch.no_grad():
            teacher_logits = self._teacher_logits(batch, batches, student)
        terms = []
        with torch.autocast(batch.input_ids.device.type, enabled=False):
            for term in loss_terms(model, student, batch):
                # The name of a term begins with its task, and a task without a teacher learns from its labels alone.
                fraction = 1.0
                if term.name.partition("/")[0] in self.teachers:
                    fraction = 1 - section.weight
                terms.append(replace(term, weight=term.weight * fraction))
            for name, logits in teacher_logits.items():
                task = model.heads[name].task
                term = divergence_term(task, student.logits[name], logits, batches[name], section.temperature)
                # A head without rows in the batch reads the first sequence, so that every parameter has a gradient. Its
                # term has to be there, too, and must not count.
                present = float(len(batches[name].numbers) > 0)
                total, weight = term.total * present, section.weight * model.weights[name]
                name = f"{name}/{DISTILLATION}"
                terms.append(LossTerm(name=name, total=total, count=term.count * present, weight=weight))
        return tuple(terms)

    def _teacher_logits(
        self, batch: PackedBatch, batches: Mapping[str, HeadBatch], student: SharedOutput
    ) -> dict[str, Tensor]:
        """Returns the logits of each task's teacher for the rows of the task."""
        if self._cached is not None:
            logits: dict[str, Tensor] = {}
            for name in self.teachers:
                logits[name] = like = student.logits[name]
                if batches[name].numbers:
                    logits[name] = batches[name].fields[LOGITS].to(like.dtype).view_as(like)
            return logits
        for teacher in self._shared:
            return dict(float32(teacher(self._batch_of(teacher, batch))).logits)
        return {
            name: float32(teacher(self._batch_of(teacher, batches[name]))) for name, teacher in self.teachers.items()
        }


def load_teachers(
    tasks: Mapping[str, Task], teacher: Teacher, *, revision: str | None
) -> AnyModel | dict[str, TaskModel]:
    """Returns the teacher of several tasks, or the teachers of some of them.

    Args:
        tasks: The tasks of the student.
        teacher: A model or its name, or for some tasks a model or its name.
        revision: Branch, tag or commit of hub ids.

    Raises:
        CheckpointError: A model cannot be loaded, or has no trained head for its task.
        UsageError: A name is no task of the student.
    """
    if isinstance(teacher, AnyModel):
        return teacher
    if not isinstance(teacher, Mapping):
        try:
            return open_model(teacher, revision=revision)
        except CheckpointError as error:
            raise CheckpointError(f"[teacher] {error}") from error
    unknown = sorted(teacher.keys() - tasks.keys())
    if unknown:
        raise UsageError(f"[teacher] names the unknown task {unknown[0]!r}. Name teachers of {', '.join(tasks)}")
    teachers: dict[str, TaskModel] = {}
    for name, model in teacher.items():
        if isinstance(model, AnyModel):
            teachers[name] = model.one_task()
        else:
            teachers[name] = _load_head(str(model), name, tasks[name], revision)
    return teachers


def _load_head(teacher: str, name: str, task: Task, revision: str | None) -> TaskModel:
    """Loads the teacher of one task from a folder of several tasks, or of this task alone."""
    try:
        return TaskModel.from_pretrained(teacher, task=name, revision=revision)
    except (UsageError, CheckpointError):  # the folder has no task of this name, or cannot be loaded
        return load_teacher(teacher, task, revision=revision)
