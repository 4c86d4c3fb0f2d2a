"""Distillation of several tasks, each with its own labels and its own teacher.

The teachers are the heads of one model of several tasks, or models of one task each, for some of the tasks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor

from bert_tasks.encoder.heads import Head
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.metrics.tables import metric_key
from bert_tasks.model.features import tokenized
from bert_tasks.model.multitask import models_of
from bert_tasks.model.precision import float32
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks import MultiTask
from bert_tasks.tasks.base import Feature, LossTerm, require
from bert_tasks.tasks.multitask.head import HeadBatch, SharedHeads, SharedOutput
from bert_tasks.tasks.shared.outputs import DISTILLATION, distillation_count, distillation_loss
from bert_tasks.training.distillation import (
    LOGITS,
    Distillation,
    check_teacher,
    load_teacher,
    teacher_name,
)
from bert_tasks.training.evaluation import Validation
from bert_tasks.training.objectives import weights_digest

Teacher = TaskModel | str | Path | Mapping[str, TaskModel | str | Path]


class MultiTaskDistillation(Distillation):
    """The losses of several tasks and the distances of their logits from teachers.

    The terms of a task with a teacher are the terms of ``Distillation``, times the weight of the task. A task without a
    teacher learns from its labels only. States and relations are not compared.
    """

    def _checked_teachers(self, teacher: TaskModel | Mapping[str, TaskModel]) -> Mapping[Any, TaskModel]:
        students, reject = models_of(self.model), partial(require, error=UsageError)
        reject(
            self.section.hidden == "none" and not self.section.relations,
            "[teacher] of several tasks teaches only logits. Set teacher.hidden to 'none' and teacher.relations to "
            "false",
        )
        self._shared: tuple[TaskModel, ...] = ()  # a teacher with the tasks of the model, whose encoder runs once
        if isinstance(teacher, TaskModel):
            tasks = teacher.task.tasks if isinstance(teacher.task, MultiTask) else {}
            missing = [name for name in students if name not in tasks]
            reject(
                not missing,
                f"the teacher {teacher_name(teacher)} has no task {', '.join(missing)} (it has "
                f"{', '.join(tasks) if tasks else f'only {teacher.task.name}'}). Name a teacher for each task that has "
                'one, for example {TASK = "FOLDER"}',
            )
            self._shared = (teacher.eval(),) if len(tasks) == len(students) else ()
            models = models_of(teacher)
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
        weights = {f"{name}.{key}": value for name, each in teachers for key, value in each.state_dict().items()}
        return {"teacher": {"name": names, "digest": weights_digest(weights), **self._options}}

    def agreement(self, validation: Validation, accelerator: Accelerator) -> dict[str, float]:
        """Returns validation set and task -> share of predictions equal to the teacher's."""
        students, shares = models_of(self.model), dict[str, float]()
        for name, teacher in self.teachers.items():
            student, of_task = students[name], {}
            for key, (_, table) in validation.items():
                rows = table.of_head(name).labelled(student.task.columns)
                if len(rows):
                    of_task[metric_key(key, name)] = (tokenized(rows, student.task, student), rows)
            shares |= Distillation(student, teacher, self.section).agreement(of_task, accelerator)
        return shares

    def counts(self, features: Sequence[Feature]) -> dict[str, float]:
        counts = self._multitask.counts(features)
        for name in self.teachers:
            members = [feature for feature in features if feature.get("head") == name]
            task, head = self._multitask.tasks[name], self._heads[name]
            counts[f"{name}/{DISTILLATION}"] = distillation_count(task, head, members)
        return counts

    def forward(self, batch: PackedBatch) -> tuple[LossTerm, ...]:
        task, section = self._multitask, self.section
        student: SharedOutput = float32(self.model(batch))
        batches = dict(zip(task.tasks, student.batches, strict=True))
        with torch.no_grad():
            teacher_logits = self._teacher_logits(batch, batches, student)
        terms = []
        with torch.autocast(student.device.type, enabled=False):
            for term in task.loss(student, batch):
                share = 1 - section.weight if term.name.partition("/")[0] in self.teachers else 1.0
                terms.append(replace(term, weight=term.weight * share))
            for name, logits in teacher_logits.items():
                inputs = (task.tasks[name], self._heads[name], student.logits[name], logits, batches[name])
                term = distillation_loss(*inputs, section.temperature)
                present = float(len(batches[name].numbers) > 0)  # a head without rows reads the first sequence
                total, weight = term.total * present, section.weight * float(task.heads[name].get("weight", 1.0))
                name = f"{name}/{DISTILLATION}"
                terms.append(LossTerm(name=name, total=total, count=term.count * present, weight=weight))
        return tuple(terms)

    def _teacher_logits(
        self, batch: PackedBatch, batches: Mapping[str, HeadBatch], student: SharedOutput
    ) -> dict[str, Tensor]:
        """Returns the logits of each task's teacher for the rows of the task."""
        if self._cached is not None:
            logits = {name: student.logits[name] for name in self.teachers}
            return {
                name: batches[name].fields[LOGITS].to(like.dtype).view_as(like) if batches[name].numbers else like
                for name, like in logits.items()
            }
        for teacher in self._shared:
            return dict(float32(teacher(self._batch_of(teacher, batch))).logits)
        pairs = ((name, teacher, batches[name]) for name, teacher in self.teachers.items())
        return {name: float32(teacher(self._batch_of(teacher, rows))) for name, teacher, rows in pairs}

    @property
    def _multitask(self) -> MultiTask:
        return cast("MultiTask", self.model.task)

    @property
    def _heads(self) -> dict[str, Head]:
        return dict(cast("SharedHeads", self.model.head).named_heads)


def load_teachers(task: MultiTask, teacher: Teacher, *, revision: str | None) -> TaskModel | dict[str, TaskModel]:
    """Returns the teacher of several tasks, or the teachers of some of them.

    Args:
        task: The task of the student.
        teacher: A model or its name, or for some tasks a model or its name.
        revision: Branch, tag or commit of hub ids.

    Raises:
        CheckpointError: A model cannot be loaded, or has no trained head for its task.
        UsageError: A name is no task of the student.
    """
    if isinstance(teacher, TaskModel):
        return teacher
    if not isinstance(teacher, Mapping):
        try:
            return TaskModel.from_pretrained(teacher, revision=revision)
        except CheckpointError as error:
            raise CheckpointError(f"[teacher] {error}") from error
    unknown = sorted(teacher.keys() - task.tasks.keys())
    if unknown:
        raise UsageError(f"[teacher] names the unknown task {unknown[0]!r}. Name teachers of {', '.join(task.tasks)}")
    return {
        name: model if isinstance(model, TaskModel) else _load_head(str(model), name, task, revision)
        for name, model in teacher.items()
    }


def _load_head(teacher: str, name: str, task: MultiTask, revision: str | None) -> TaskModel:
    """Loads the teacher of one task from a folder of several tasks, or of this task alone."""
    try:
        return TaskModel.from_pretrained(teacher, task=name, revision=revision)
    except (UsageError, CheckpointError):  # the folder has no task of this name, or cannot be loaded
        return load_teacher(teacher, task.tasks[name], revision=revision)
