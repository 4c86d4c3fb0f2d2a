"""``EncoderWithHeads``, the common base of the models of one task and of several.

It owns the forward pass over a packed batch, or over padded tensors as transformers' models take them, and what follows
from the parameters. The subclasses know the tasks. ``windows`` runs rows, and ``loading`` reads folders.

Shape legend: N tokens, B sequences, T padded length, H hidden, L labels, R tokens that the head reads.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor

from bert_tasks.checkpoints.hub import Origin
from bert_tasks.checkpoints.save import file_tensors, hf_tensors, save_folder
from bert_tasks.data.checks import labelled_splits
from bert_tasks.data.columns import Columns, Row, without_labels
from bert_tasks.data.issues import first_few
from bert_tasks.data.reading import Frame
from bert_tasks.data.splits import Splits
from bert_tasks.data.trained_reading import TrainedReading
from bert_tasks.encoder.config import EncoderConfig, HeadKind
from bert_tasks.encoder.heads import Head
from bert_tasks.encoder.layers import initialize
from bert_tasks.encoder.lora import AdapterWeights
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import UsageError
from bert_tasks.families import converted_config, family_of, parameter_map
from bert_tasks.model.pretrained import saved_config
from bert_tasks.model.pretrained_module import PaddedInputs, PretrainedModule, padded_inputs
from bert_tasks.model.shared_heads import SharedHeads
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.several import HeadTask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# One row or several: mappings, texts, or tuples of the texts that a row needs.
Inputs = Row | str | tuple[str, ...] | Iterable[Row | str | tuple[str, ...]] | Frame
ForwardFn = Callable[[PackedBatch], Any]  # a batch's logits: [B, L], or [R, L] of a head with logits per token


class EncoderWithHeads(PretrainedModule, ABC):
    """An encoder with the head of one task, or the heads of several.

    Attributes:
        head: The head, or the module of all heads.
        head_kind: The head of transformers with the parameters of the head. None if there is none.
        weights: Name of each head -> the weight of its loss.
        drawn: Parameters and buffers that no file contained, with their initial values.
        has_assumed_labels: True if nobody has named the labels of the only task, so that ``fit`` takes the labels of
            the training rows.
        origin: The name that the model was loaded by, and the hub's commit, or None.
        columns: The columns of the only task -> their names in the training data, if they differ.
        reading: How the file of the training rows was read. It is saved with the model, and applies to files with the
            same extension.
        adapters: The low-rank adapters that the last run trained, which are in the weights, too, or None.
    """

    head: Head
    head_kind: HeadKind | None
    weights: Mapping[str, float]
    has_assumed_labels = False

    def __init__(self, hf_config: Mapping[str, Any], *, tokenizer: "PreTrainedTokenizerBase | None" = None) -> None:
        super().__init__(hf_config)
        self.tokenizer = tokenizer
        self.origin: Origin | None = None
        self.columns: Mapping[str, str] = {}
        self.reading = TrainedReading()
        self.adapters: AdapterWeights | None = None
        self.encoder_shapes = {f"encoder.{name}": value.shape for name, value in self.encoder.state_dict().items()}
        self.drawn: dict[str, Tensor] = {}
        initialize(self.encoder, self.config)

    # What a subclass knows of its tasks

    @property
    @abstractmethod
    def heads(self) -> Mapping[str, "EncoderWithHeads"]:
        """The model of each task by its name. A model of one task is its own only head, under the name ""."""

    @property
    @abstractmethod
    def tasks(self) -> dict[str, Task]:
        """The task of each head by its name. Training sets tasks with fitted values."""

    @tasks.setter
    def tasks(self, tasks: Mapping[str, Task]) -> None: ...

    @property
    @abstractmethod
    def head_tasks(self) -> dict[str, HeadTask]:
        """The task of each head with its columns and the weight of its loss, as files hold them."""

    def adopt_heads(self) -> None:
        """Takes over heads that the models in ``heads`` have replaced."""

    @abstractmethod
    def _with_config(self, hf_config: Mapping[str, Any]) -> Self:
        """Returns a model of the same tasks with random weights."""

    @property
    @abstractmethod
    def labels(self) -> tuple[str, ...]:
        """The labels of the only task, without labels that were assumed. Empty for several tasks."""

    @property
    @abstractmethod
    def row_columns(self) -> Columns:
        """The columns that are read of a row."""

    @property
    def input_columns(self) -> Columns:
        """``row_columns`` without labels, which a prediction reads."""
        return without_labels(self.row_columns)

    @abstractmethod
    def save_adapter(self, folder: str | Path) -> None:
        """Writes the adapters of the last run, and the head, in the format of peft.

        ``from_pretrained`` and ``PeftModel`` open the folder. Both need the model that the run began with.

        Raises:
            CheckpointError: The folder cannot be written.
            UsageError: No run has trained adapters of this model, transformers has no such head, or the model has
                several tasks.
        """

    # Files

    def with_layers(
        self, layers: Sequence[int] | Literal["every-other"] | None = None, *, family: str | None = None
    ) -> Self:
        """Returns a smaller model with copies of some layers, the embeddings and the head.

        Args:
            layers: Layers, counted from 0, in any order, or "every-other" for 0, 2, 4 and so on. Default: all.
            family: Another family, such as "distilbert" for a BERT. If it has no segments, segment 0 is added to its
                positions. A head that differs between families is new.

        Raises:
            UsageError: There is no such layer or family, the layers share their weights, or the family does not fit.

        Example:
            >>> student = model.with_layers("every-other")
        """
        check_parameters(self)
        count, model_type = len(self.config.layer_order), self.hf_config["model_type"]
        if layers is None or layers == "every-other":
            layers = range(0, count, 1 if layers is None else 2)
        kept = [int(layer) for layer in layers]
        if len(set(self.config.layer_order)) < count:
            raise UsageError(f"the layers of this {model_type} share their weights, so none of them can be removed")
        if not kept or not all(0 <= layer < count for layer in kept):
            raise UsageError(f"layers are {kept}, expected numbers from 0 to {count - 1}, the layers of the checkpoint")
        if not self.config.first_norm and (kept[0] != 0 or 0 in kept[1:]):
            raise UsageError(
                f"layers are {kept}, but layer 0 of {model_type} has no norm before attention, so it must be the first"
            )
        config = converted_config(self.hf_config, layers=kept, family=family)
        student = self._with_config(config)
        new_state, state = student.state_dict(), self.state_dict()
        same_head = self.head.per_token or student.config.head.activation == self.config.head.activation
        of_head = {name for name in new_state if name.startswith("head.")}
        for name, tensor in new_state.items():
            layer = re.match(r"encoder\.layers\.(\d+)\.", name)
            if layer is not None:
                tensor.copy_(state[f"encoder.layers.{kept[int(layer[1])]}.{name[layer.end() :]}"])
            elif same_head or name not in of_head:
                tensor.copy_(state[name])
        if "encoder.embeddings.token_type.weight" in state.keys() - new_state.keys():
            new_state["encoder.embeddings.position.weight"] += state["encoder.embeddings.token_type.weight"][0]
        student.drawn = {name: new_state[name].clone() for name in (self.drawn if same_head else of_head)}
        student.origin, student.load_report = self.origin, self.load_report
        student.columns, student.reading = self.columns, self.reading
        if self.load_report is not None:
            note = f"layers {', '.join(map(str, kept))} of {count}{'' if family is None else f', as {family}'}"
            student.load_report = replace(self.load_report, notes=(*self.load_report.notes, note))
        return student.to(self.device, self.encoder.embeddings.word.weight.dtype).eval()

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes a folder that ``from_pretrained`` and transformers open.

        A head that transformers lacks goes to ``task_head.safetensors``. To transformers the folder is then the base
        model.

        Raises:
            CheckpointError: The folder cannot be written.
            UsageError: A library (peft, ...) has wrapped or replaced modules of the model.
        """
        check_parameters(self)
        require_labels(self)
        state, names, family = self.state_dict(), hf_names(self), family_of(self.hf_config)
        head_state = {key: value for key, value in state.items() if key not in names}
        has_prefix = self.head_kind is not None  # transformers' base models have none
        prefix = "" if has_prefix else family.prefix
        save_folder(
            Path(folder),
            config=saved_config(self.hf_config, self.head_tasks, self.reading),
            tensors=file_tensors(hf_tensors({key: state[key] for key in names}, names, strip_prefix=prefix), family),
            tokenizer=self._tokenizer,
            head_tensors=hf_tensors(head_state, {key: (key,) for key in head_state}) if head_state else None,
        )

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def require_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Returns the tokenizer, or raises UsageError if there is none."""
        if self._tokenizer is None:
            raise UsageError("the model has no tokenizer. Load a model with tokenizer files, or set model.tokenizer")
        return self._tokenizer

    def forward(
        self,
        input_ids: Tensor | PackedBatch,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        output_attentions: bool = False,
    ) -> Any:
        """Returns the logits of a packed batch, or of transformers' padded tensors.

        A packed batch has one row of logits for each sequence or token that the head reads. For ``[B, T]`` tensors the
        logits are shaped as in transformers: ``[B, L]``, or ``[B, T, L]`` with zeros at padding (for spans, L = 2,
        start and end).

        Raises:
            ValueError: A mask is not ``[B, T]``, an input is too long, or an id has no embedding.
        """
        inputs: PackedBatch | PaddedInputs
        if isinstance(input_ids, PackedBatch):
            inputs = input_ids
        else:
            inputs = padded_inputs(
                self.config, input_ids, attention_mask, token_type_ids, position_ids, output_attentions
            )
        selection, ids = self.head.select(inputs.layout), (inputs.input_ids, inputs.position_ids, inputs.token_type_ids)
        hidden = self.encoder(*ids, inputs.layout, selection=selection, depth=self.head.depth)
        logits = self.head(hidden, inputs.layout, self.encoder.embeddings.word.weight)
        if isinstance(inputs, PackedBatch) or not self.head.per_token:
            return logits
        if isinstance(logits, tuple):  # logits of tokens and of sequences
            return inputs.rectangle(logits[0]), logits[1]
        return inputs.rectangle(logits)

    def forward_states(self, batch: PackedBatch) -> tuple[Tensor, Sequence[Tensor]]:
        """Returns a batch's logits and ``[N, H]`` states of the embeddings and each layer."""
        states: list[Tensor] = []
        hidden = self.encoder(
            batch.input_ids, batch.position_ids, batch.token_type_ids, batch.layout, hidden_states=states
        )
        selection = self.head.select(batch.layout)
        if selection is not None:
            hidden = hidden.index_select(0, selection.rows)
        return self.head(hidden, batch.layout, self.encoder.embeddings.word.weight), states


def hf_names(model: EncoderWithHeads) -> dict[str, tuple[str, ...]]:
    """Returns parameter -> transformers' names, without heads that transformers lacks."""
    kind = "base" if model.head_kind is None else model.head_kind
    return parameter_map(family_of(model.hf_config), model.config, head=kind, pooler=False)


def check_parameters(model: EncoderWithHeads) -> None:
    """Checks that a model has the parameters of its configuration and its tasks, so that all of them can be saved.

    Raises:
        UsageError: The model is an exported one, or a library (peft, pruning) has wrapped or renamed modules.
    """
    if model.no_weights_reason:
        raise UsageError(f"it can be neither trained nor saved, because {model.no_weights_reason}")
    expected = dict(model.encoder_shapes)
    with torch.device("meta"):
        head = new_head(model.tasks, model.config)
    expected |= {f"head.{name}": value.shape for name, value in head.state_dict().items()}
    actual = {name: value.shape for name, value in model.state_dict().items()}
    differing = dict(expected.items() ^ actual.items())
    if differing:
        raise UsageError(
            "the model can be neither trained nor saved, because its parameters do not fit its configuration and "
            f"task ({first_few(sorted(differing), 3)}). A library has wrapped or replaced modules. Undo that "
            "first. Merge adapters of peft with model = peft_model.merge_and_unload()"
        )


def require_labels(model: EncoderWithHeads) -> None:
    """Raises UsageError if the labels of a task are not known yet."""
    for name, of_head in model.heads.items():
        if of_head.has_assumed_labels:
            raise UsageError(
                f"{model.tasks[name].name} needs labels, e.g. labels=['negative', 'positive']. Pass them to "
                "from_pretrained, or call fit, which takes the labels of the training rows"
            )


def can_save_adapter(model: EncoderWithHeads) -> bool:
    """Returns True if peft can open adapters of a model. It needs one task, a folder and a head of transformers."""
    only = model.tasks.get("")
    return only is not None and only.has_hf_head and not model.head.reads_embeddings and model.origin is not None


def new_head(tasks: Mapping[str, Task], config: EncoderConfig) -> Head:
    """Returns the head of the only task, or the heads of several, with weights from torch's global generator."""
    if "" in tasks:
        return tasks[""].head(config)
    return SharedHeads({name: task.head(config) for name, task in tasks.items()})


@torch.no_grad()
def draw_new_head(model: EncoderWithHeads, seed: int) -> None:
    """Draws the weights of a new head again, unless they were trained or set."""
    state = model.state_dict()
    if any(not torch.equal(state[name].to(drawn), drawn) for name, drawn in model.drawn.items()):
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = new_head(model.tasks, model.config).state_dict()
    for name in model.drawn:
        state[name].copy_(head[name.removeprefix("head.")])
    model.drawn = {name: state[name].clone() for name in model.drawn}


def read_labels(model: EncoderWithHeads, splits: Splits, *, unlabelled: bool) -> None:
    """Checks that a model can be trained on the splits, which name the labels if nobody has named them.

    Raises:
        DataError: See ``check_splits``.
    """
    tasks = model.tasks
    for name, of_head in model.heads.items():
        rows = splits
        if name:
            rows = labelled_splits(splits, name, tasks[name].columns, of_head.columns)
        task = tasks[name].with_settings(labels=of_head.labels)  # without labels that were assumed
        labels = task.with_labels_of(rows, labels=task.output.labels, unlabelled=unlabelled).output.labels
        if of_head.has_assumed_labels:
            _set_labels(of_head, labels)
    model.adopt_heads()


def _set_labels(model: EncoderWithHeads, labels: tuple[str, ...]) -> None:
    """Replaces the assumed labels of a model of one task, and the part of the head that depends on them."""
    before = {name: value for name, value in model.head.state_dict().items() if f"head.{name}" not in model.drawn}
    model.tasks = {"": model.tasks[""].with_settings(labels=tuple(labels))}
    model.head = new_head(model.tasks, model.config).to(model.device)
    model.head.load_state_dict(before, strict=False)
    new = {name: value for name, value in model.head.state_dict().items() if name not in before}
    model.drawn = {f"head.{name}": value.clone() for name, value in new.items()}
    model.has_assumed_labels = False
