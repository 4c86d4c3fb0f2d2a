"""Distillation, in which a student learns from a teacher and from the labels.

Owns the loss of a student with one teacher, the checks that a teacher fits its student, and the cache of the teacher's
logits. The loss with several teachers is in distillation_of_several.py.

Shape legend: N tokens, B sequences, T tokens of a group's longest sequence, H hidden, A relation heads, D their size.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import pyarrow
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional as F

from bert_tasks.checkpoints.tokenizers import same_token_ids
from bert_tasks.data.arrow import ArrowRows, cache_folder, store, with_progress, write_batches
from bert_tasks.data.features import longest_first
from bert_tasks.data.issues import counted
from bert_tasks.encoder.attention import pad_groups
from bert_tasks.encoder.packing import Packed, PackedBatch
from bert_tasks.errors import CheckpointError, DataError, UsageError
from bert_tasks.inference import evaluate_samples
from bert_tasks.inference.precision import float32
from bert_tasks.model.features import tokenized
from bert_tasks.model.multitask import AnyModel
from bert_tasks.model.task_model import TaskModel
from bert_tasks.model.windows import batch_tokens, in_evaluation, pack_features
from bert_tasks.outputs.base import LossTerm
from bert_tasks.outputs.features import Feature
from bert_tasks.outputs.logits import DISTILLATION
from bert_tasks.outputs.settings import require
from bert_tasks.recipe.schema import TeacherSection
from bert_tasks.storage import sha256, sha256_file, sha256_json
from bert_tasks.tasks.base import FeatureKeys, Task, is_dynamic
from bert_tasks.tasks.windows.frame import Frame
from bert_tasks.training.evaluation import Validation
from bert_tasks.training.objectives import Objective, weights_digest

LOGITS = "teacher_logits"  # the field of features with logits from the cache
_CACHE_VERSION = 1
# The score of padding. With minus infinity both logarithms would be minus infinity there, and their difference in the
# divergence would be NaN.
_MASKED = -1e30


class TaughtObjective(Objective):
    """What the distillation of one task and of several have in common.

    Teacher and student read the same inputs. The teacher is not trained, is not stored in checkpoints, and stays in
    evaluation mode, because dropout in the teacher would add noise to what the student learns.

    Attributes:
        teachers: The teacher of each task that has one, by the name of its head. A plain mapping keeps their weights
            out of ``parameters`` and ``train``, which torch would apply to registered modules.
        section: The settings that say how the teachers teach.
    """

    teachers: Mapping[str, TaskModel]

    def __init__(self, model: AnyModel, section: TeacherSection | None) -> None:
        super().__init__(model)
        self.section = TeacherSection(name="teacher") if section is None else section
        self._cached: ArrowRows | None = None

    @property
    def _options(self) -> dict[str, Any]:
        """The settings that say how the teachers teach, without those that say who they are."""
        return self.section.model_dump(exclude={"name", "revision"})

    @property
    def notes(self) -> tuple[str, ...]:
        """The sizes of each teacher and of the student, in whole sentences."""
        student_size = _model_size(self.model)
        notes: list[str] = []
        for task, teacher in self.teachers.items():
            of_task = f"of {task} " if task else ""
            notes.append(
                f"teacher {of_task}{teacher_name(teacher)} has {_model_size(teacher)}, and the model has {student_size}"
            )
        return tuple(notes)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves the teachers with the student, to a device or a precision."""
        for teacher in self.teachers.values():
            teacher._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch
        return self

    def begin(self, features: ArrowRows, device: torch.device) -> None:
        """Computes the logits of the teachers for all training rows, or finds them in the cache, if they are kept."""
        if self.section.cache_logits:
            for teacher in self.teachers.values():
                teacher.to(device)
            self._cached = cached_logits(self.teachers, features, self._of_teacher)

    def prepare(
        self, features: Sequence[Feature], keys: FeatureKeys, corpus: Sequence[Mapping[str, Any]]
    ) -> Sequence[Feature]:
        """Returns the features as both models read them, with the logits from the cache if they are kept."""
        prepared = [self._of_teacher(feature) for feature in super().prepare(features, keys, corpus)]
        if self._cached is None:
            return prepared
        taught: list[Feature] = []
        for feature, row in zip(prepared, self._cached[keys.numbers], strict=True):
            fields = {**feature.get("fields", {}), LOGITS: row["logits"]}
            taught.append({**feature, "fields": fields})
        return taught

    def _batch_of(self, teacher: AnyModel, batch: PackedBatch) -> PackedBatch:
        """Returns the batch with the position ids of the teacher's family.

        RoBERTa counts positions from the id of its padding token plus 1, most others from 0.
        """
        shift = teacher.config.position_offset - self.model.config.position_offset
        if not shift:
            return batch
        return replace(batch, position_ids=batch.position_ids + shift)

    def _of_teacher(self, feature: Feature) -> Feature:
        """Returns the feature with the segments of BERT if the teacher reads them and the student does not.

        They are 0 up to the first separator and 1 after it.
        """
        teacher = self.teachers.get(head_of(feature))
        if self.model.config.type_vocab_size or teacher is None:
            return feature
        if not any(Frame.of(teacher.require_tokenizer(), texts=2).types):
            return feature
        ids, separator = feature["input_ids"], self.model.require_tokenizer().sep_token_id
        first = len(ids)
        if separator in ids:
            first = ids.index(separator) + 1
        return {**feature, "token_type_ids": [0] * first + [1] * (len(ids) - first)}


class Distillation(TaughtObjective):
    """The loss of the task and the distances of the student from a teacher.

    The loss is ``(1 - weight)`` times the loss of the task plus ``weight`` times the distance of the logits (Hinton et
    al., arXiv:1503.02531), plus the distances of hidden states and of relations. Rows without labels have these
    distances, too, so a student can learn from texts that nobody has labelled.

    Attributes:
        model: The student.
        teacher: A model of the same task (see ``check_teacher``).
        relation_heads: Number of heads in which queries, keys and values are compared. They are not compared if it is
            0.
    """

    model: TaskModel

    def __init__(self, model: TaskModel, teacher: TaskModel, section: TeacherSection | None = None) -> None:
        """Checks that the teacher can teach the model.

        Args:
            model: The student.
            teacher: A trained model.
            section: The section ``[teacher]`` of a recipe. Its name and revision are not used, because the teacher is
                loaded already. Default: the defaults of the section.

        Raises:
            UsageError: The teacher has another task, other labels or another tokenizer, the task cannot learn from a
                teacher, or the section asks for what these two models do not have.
        """
        super().__init__(model, section)
        self._check(teacher)
        self.teachers = {"": teacher.eval()}  # torch registers no mapping

    def _check(self, teacher: TaskModel) -> None:
        """Rejects a teacher that the section asks more of than the two models have, and sets ``relation_heads``."""
        model, section = self.model, self.section
        check_teacher(teacher, model)
        reject = partial(require, error=UsageError)
        widths = (teacher.config.hidden_size, model.config.hidden_size)
        heads = int(section.relations)
        if section.relations is True:
            heads = teacher.config.num_attention_heads
        self.relation_heads = heads
        reject(
            section.hidden == "none" or widths[0] == widths[1],
            f"teacher.hidden = {section.hidden!r} needs models of one width, but the teacher has {widths[0]} and "
            f"the model {widths[1]}. Set it to 'none', and use teacher.relations for any widths",
        )
        reject(
            not heads or math.gcd(*widths) % heads == 0,
            f"teacher.relations: {heads} heads do not divide the widths {widths[0]} of the teacher "
            f"and {widths[1]} of the model. Choose a divisor of {math.gcd(*widths)}",
        )
        if section.cache_logits:
            reject(
                not self._reads_states,
                "teacher.cache_logits stores only logits. Set teacher.hidden to 'none' and teacher.relations to false",
            )
            reject(
                not is_dynamic(model.task),
                f"teacher.cache_logits cannot store the logits, because {model.task.name} changes its inputs in each "
                "epoch. Set it to false",
            )

    @property
    def teacher(self) -> TaskModel:
        """The only teacher."""
        return self.teachers[""]

    @property
    def _reads_states(self) -> bool:
        """True if hidden states or relations are compared, which takes more than the logits of both models."""
        return self.section.hidden != "none" or self.relation_heads > 0

    @property
    def settings(self) -> dict[str, Any]:
        origin: dict[str, Any] = {}
        if self.teacher.origin is not None:
            origin = dict(vars(self.teacher.origin))
        return {"teacher": {**origin, "digest": weights_digest(self.teacher.state_dict()), **self._options}}

    def agreement(self, validation: Validation, accelerator: Accelerator) -> dict[str, float]:
        task, teacher_task = self.model.task, self.teacher.task
        agreements: dict[str, float] = {}
        # With the thresholds that were tuned for the student, so that only the logits differ.
        self.teacher.task = task
        try:
            for name, (samples, table) in validation.items():
                of_teacher = tokenized(table, self.teacher)
                student = evaluate_samples(self.model, samples, table, accelerator).scores[""]
                teacher = evaluate_samples(self.teacher, of_teacher, table, accelerator).scores[""]
                with suppress(DataError):
                    same = task.output.agreements(student.predictions, teacher.predictions)
                    agreements[name] = sum(same) / max(1, len(same))
        finally:
            self.teacher.task = teacher_task
        return agreements

    def counts(self, features: Sequence[Feature]) -> dict[str, float]:
        counts = super().counts(features)
        counts |= {DISTILLATION: self.model.task.output.divergence_count(features)}
        if self.section.hidden != "none":
            counts["hidden"] = float(sum(len(feature["input_ids"]) for feature in features))
        if self.relation_heads:
            counts["relations"] = float(len(features))
        return counts

    def forward(self, batch: PackedBatch) -> tuple[LossTerm, ...]:
        task, section = self.model.task, self.section
        student, states = self._outputs(self.model, batch)
        if LOGITS in batch.fields:
            # The cache is used only if no states are compared, so those of the student are none.
            teacher, teacher_states = batch.fields[LOGITS].to(student.dtype).view_as(student), states
        else:
            with torch.no_grad():
                teacher, teacher_states = self._outputs(self.teacher, self._batch_of(self.teacher, batch))
        # In float32, because the logarithms of small probabilities are inexact in half precision.
        with torch.autocast(batch.input_ids.device.type, enabled=False):
            own = task.output.loss(student, batch)
            terms = [replace(term, weight=term.weight * (1 - section.weight)) for term in own]
            distance = divergence_term(task, student, teacher, batch, section.temperature)
            terms.append(replace(distance, weight=section.weight))
            terms += self._state_terms(states, teacher_states, batch.layout)
        return tuple(terms)

    def _outputs(self, model: TaskModel, batch: PackedBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Returns the logits of a model and what is compared besides them.

        That is ``hidden``, the states ``[N, H]`` after the last layer, and ``qkv``, the queries, keys and values
        ``[N, 3, H]`` of the last layer.
        """
        if not self._reads_states:
            return float32(model(batch)), {}
        logits, states = model.forward_states(batch)
        compared = {"hidden": float32(states[-1])}
        if self.relation_heads:
            compared["qkv"] = float32(model.encoder.last_queries_keys_values(states))
        return float32(logits), compared

    def _state_terms(
        self, states: Mapping[str, Tensor], teacher_states: Mapping[str, Tensor], layout: Packed
    ) -> Iterator[LossTerm]:
        """Yields the distances of the states after the last layers, and of the relations in their attention."""
        section = self.section
        if section.hidden != "none":
            student, teacher = states["hidden"], teacher_states["hidden"]
            if section.hidden == "cosine":
                total = (1 - F.cosine_similarity(student, teacher, dim=-1)).sum()
            else:
                total = (student - teacher).square().mean(dim=-1).sum()
            count = student.new_full((), len(student))
            yield LossTerm(name="hidden", total=total, count=count, weight=section.hidden_weight)
        if self.relation_heads:
            total = relation_divergence(states["qkv"], teacher_states["qkv"], layout, heads=self.relation_heads)
            count = total.new_full((), len(layout.lengths)).detach()
            yield LossTerm(name="relations", total=total, count=count, weight=section.relations_weight)


def divergence_term(task: Task, student: Any, teacher: Any, batch: PackedBatch, temperature: float) -> LossTerm:
    """Returns the distance of a student's logits from its teacher's logits. See ``Output.divergence``."""
    total, count = task.output.divergence(student, teacher, batch, temperature)
    return LossTerm(name=DISTILLATION, total=total, count=total.new_full((), count).detach())


def check_teachable(task: Task) -> None:
    """Raises UsageError if a model of this task cannot learn from a teacher."""
    if task.generator() is not None:
        raise UsageError(f"{task.name} cannot learn from a teacher")
    if task.output.no_teacher_reason is not None:
        raise UsageError(task.output.no_teacher_reason)


def head_of(feature: Mapping[str, Any]) -> str:
    """Returns the name of the head that reads a feature, which only features of several tasks hold."""
    name = feature.get("head")
    return "" if name is None else str(name)


def load_teacher(name: str, task: Task, *, revision: str | None) -> TaskModel:
    """Loads a teacher of a task.

    Raises:
        CheckpointError: The folder has no trained head for the task and its labels.
    """
    # The labels of this run decide about the order of the logits, so the folder has to have a head for exactly these.
    options: dict[str, Any] = {}
    if task.output.labels:
        options["labels"] = task.output.labels
    try:
        teacher: TaskModel = TaskModel.from_pretrained(name, task=type(task), revision=revision, **options)
    except CheckpointError as error:
        raise CheckpointError(f"[teacher] {error}") from error
    report = teacher.load_report
    if report is not None and report.new:
        reasons = ", ".join([*report.notes, f"{', '.join(report.new)} would be new"])
        raise CheckpointError(
            f"teacher {name} has no trained head for {type(task).name} with this run's labels "
            f"({reasons}). Train it first, or name another teacher"
        )
    return teacher


def teacher_name(teacher: AnyModel) -> str:
    """Returns the name that a teacher was loaded by."""
    if teacher.origin is None:
        return "in memory"
    return teacher.origin.name


def _model_size(model: AnyModel) -> str:
    """Returns the number of parameters and of layers of a model, for people."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return f"{parameters:,} parameters in {counted(len(model.config.layer_order), 'layer')}"


def check_teacher(teacher: TaskModel, model: TaskModel) -> None:
    """Rejects a teacher whose logits have another meaning than the student's logits.

    Raises:
        UsageError: The teacher is the student itself, has another task, other labels or another tokenizer, or reads
            fewer tokens.
    """
    task, other = model.task, teacher.task
    reject = partial(require, error=UsageError)
    check_teachable(task)
    reject(not teacher.no_weights_reason, f"the teacher cannot teach, because {teacher.no_weights_reason}")
    reject(teacher.encoder is not model.encoder, "the teacher is the model itself. Load the teacher a second time")
    reject(
        type(task) is type(other),
        f"the teacher's task is {other.name}, but the model's is {task.name}. Both need the same task",
    )
    check_teachable(other)
    shown = [", ".join(each.output.labels) if each.output.labels else "none" for each in (task, other)]
    reject(
        task.output.labels == other.output.labels,
        f"the teacher's labels are {shown[1]}, but the model's are {shown[0]}. Both need the same label order",
    )
    reject(
        task.output.hf_config() == other.output.hf_config(),
        "the teacher's logits mean something else, because its task has other settings, such as problem_type",
    )
    reject(
        same_token_ids(teacher.require_tokenizer(), model.require_tokenizer()),
        "the teacher has another tokenizer than the model, but both read the same token ids. Choose a teacher "
        "with the model's tokenizer, or make the student of the teacher's layers",
    )
    length = teacher.config.usable_length
    reject(length >= task.max_length, f"max_length = {task.max_length}, but the teacher has {length} positions")


def relation_divergence(student: Tensor, teacher: Tensor, layout: Packed, *, heads: int) -> Tensor:
    """Returns the divergence of the relations between tokens, as in MiniLMv2 (Wang et al., arXiv:2012.15828).

    Queries, keys and values are cut into ``heads`` relation heads. The relations of a token are the softmax over the
    scaled products of, for example, its query with the queries of all tokens of its sequence. The models need not have
    the same width or the same number of attention heads, because relations have neither.

    Args:
        student, teacher: ``[N, 3, H]``, with widths of their own.
        layout: The sequences of the rows, in groups of similar length.
        heads: Number of relation heads, which divides both widths.

    Returns:
        The 0-dimensional Kullback-Leibler divergence of the student's relations from the teacher's. It is the mean over
        the three relations, the heads and the tokens of a sequence, summed over the sequences.
    """
    sizes = [group.rows for group in layout.groups]
    student_groups = torch.split(pad_groups(student, layout), sizes)
    teacher_groups = torch.split(pad_groups(teacher, layout), sizes)
    total = student.new_zeros(())
    for group, of_student, of_teacher in zip(layout.groups, student_groups, teacher_groups, strict=True):
        logs = []
        for rows in (of_student, of_teacher):
            # Each of queries, keys and values is compared with itself, so their axis stays in front.
            cut = rows.view(group.sequences, group.length, 3, heads, -1).permute(2, 0, 3, 1, 4)  # [3, B, A, T, D]
            scores = cut @ cut.transpose(-1, -2) / math.sqrt(cut.shape[-1])  # [3, B, A, T, T]
            if group.mask is not None:
                scores = scores.masked_fill(~group.mask, _MASKED)
            logs.append(scores.log_softmax(dim=-1))
        # kl_div takes the prediction first and the target second, and computes KL(target || prediction).
        divergence = F.kl_div(logs[0], logs[1], reduction="none", log_target=True)  # [3, B, A, T, T]
        divergence = divergence.sum(dim=-1).mean(dim=(0, 2))  # [B, T]
        if group.mask is None:  # all sequences of the group are equally long
            total = total + divergence.mean(dim=-1).sum()
        else:
            real = group.mask.flatten(1)  # [B, T]
            total = total + ((divergence * real).sum(dim=-1) / real.sum(dim=-1)).sum()
    return total


def cached_logits(
    teachers: Mapping[str, TaskModel], features: ArrowRows, of_teacher: Callable[[Feature], Feature]
) -> ArrowRows:
    """Returns the logits of each feature by its teacher, memory-mapped from the cache.

    The logits are flat and in float32, and empty if the task of the feature has no teacher. The key of the cache
    contains the weights of the teachers and the content of the features, so it never returns logits of others.
    """
    files = [sha256_file(path) for path in features.files]
    digest = sha256(features.column("row").to_numpy().tobytes())  # which ones of those in the files
    weights = [[name, weights_digest(each.state_dict()), each.hf_config] for name, each in teachers.items()]
    key = sha256_json(_CACHE_VERSION, weights, files, digest)

    def compute(stored: Sequence[Feature]) -> dict[str, list[Any]]:
        """Returns the logits of some features, in their order."""
        inputs = [of_teacher(feature) for feature in stored]
        flat: dict[int, list[float]] = {}
        for name, teacher in teachers.items():
            members = [i for i, feature in enumerate(inputs) if head_of(feature) == name]
            lengths = [len(inputs[i]["input_ids"]) for i in members]
            # Batches of sequences of similar length, as in prediction, whatever the order of the rows is.
            for batch_members in longest_first(lengths, max_tokens=batch_tokens(teacher)):
                numbers = [members[i] for i in batch_members]
                batch = pack_features(teacher, [inputs[i] for i in numbers])
                with in_evaluation(teacher), torch.inference_mode():
                    logits = teacher(batch).to(torch.float32)
                if teacher.head.per_token:
                    rows = torch.split(logits, list(batch.layout.gather_counts))
                else:
                    rows = logits.unbind()
                flat |= {i: row.flatten().tolist() for i, row in zip(numbers, rows, strict=True)}
        return {"logits": [flat.get(i, []) for i in range(len(inputs))]}

    def write(path: Path) -> None:
        tables = with_progress(features.tables(), "Logits of the teacher", len(features))
        schema = pyarrow.schema({"logits": pyarrow.list_(pyarrow.float32())})
        write_batches(path, (compute(table.to_pylist()) for table in tables), schema)

    return store(cache_folder(None, "teacher_logits"), key, write).rows
