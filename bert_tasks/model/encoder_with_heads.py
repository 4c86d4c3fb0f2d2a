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

        Such a folder is small, because it lacks the weights of the encoder: ``from_pretrained`` of this package and
        ``PeftModel`` of the library peft open it, and both need the model that the run began with. Use
        ``save_pretrained`` for a folder that is complete.

        Args:
            folder: A new folder, or one whose files are replaced.

        Raises:
            CheckpointError: The folder cannot be written.
            UsageError: No run has trained adapters of this model, transformers has no such head, or the model has
                several tasks.

        Examples:
            >>> result = fit(model, "train.csv", output_dir="runs/x", epochs=1, lora_rank=2)
            >>> model.save_adapter("adapter")
            >>> TaskModel.from_pretrained("adapter").task == model.task
            True
        """

    # Files

    def with_layers(
        self, layers: Sequence[int] | Literal["every-other"] | None = None, *, family: str | None = None
    ) -> Self:
        """Returns a smaller model with copies of some layers, the embeddings and the head.

        It is the usual start of knowledge distillation: DistilBERT was initialised with every other layer of BERT
        (Sanh et al. 2019, https://arxiv.org/abs/1910.01108). The copies share no memory with this model. A student is
        faster in proportion to its layers, but it has to be trained before it predicts well.

        Args:
            layers: Layers, counted from 0, in any order, or "every-other" for 0, 2, 4 and so on. Default: all.
            family: Another family, such as "distilbert" for a BERT. If it has no segments, segment 0 is added to its
                positions. A head that differs between families is new. Default: the family of this model.

        Returns:
            The student, on the device and in the precision of this model, in evaluation mode. Its ``load_report`` has a
            note of the layers.

        Raises:
            UsageError: There is no such layer or family, the layers share their weights, or the family does not fit.

        Examples:
            >>> student = model.with_layers("every-other")
            >>> len(student.config.layer_order) < len(model.config.layer_order)
            True
        """
        check_parameters(self)
        count, model_type = len(self.config.layer_order), self.hf_config["model_type"]
        if layers is None:
            layers = range(count)
        elif layers == "every-other":
            layers = range(0, count, 2)
        kept = [int(layer) for layer in layers]
        if len(set(self.config.layer_order)) < count:  # as in ALBERT, whose layers are one module that runs repeatedly
            raise UsageError(f"the layers of this {model_type} share their weights, so none of them can be removed")
        if not kept or not all(0 <= layer < count for layer in kept):
            raise UsageError(f"layers are {kept}, expected numbers from 0 to {count - 1}, the layers of the checkpoint")
        if not self.config.first_norm and (kept[0] != 0 or 0 in kept[1:]):
            raise UsageError(
                f"layers are {kept}, but layer 0 of {model_type} has no norm before attention, so it must be the first"
            )
        config = converted_config(self.hf_config, layers=kept, family=family)
        student = self._with_config(config)
        # The tensors of a state dict are those of the module, so copying into them sets the student's weights.
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
            # Each token gets the sum of its word, position and segment. A family without segments, such as DistilBERT,
            # gives the same sum for texts of one segment if segment 0 is a part of the positions.
            new_state["encoder.embeddings.position.weight"] += state["encoder.embeddings.token_type.weight"][0]
        drawn = self.drawn if same_head else of_head
        student.drawn = {name: new_state[name].clone() for name in drawn}
        # What is not a weight comes along, so that a run of the student records where it came from.
        student.origin, student.load_report = self.origin, self.load_report
        student.columns, student.reading = self.columns, self.reading
        if self.load_report is not None:
            note = f"layers {', '.join(map(str, kept))} of {count}"
            if family is not None:
                note += f", as {family}"
            student.load_report = replace(self.load_report, notes=(*self.load_report.notes, note))
        return student.to(self.device, self.encoder.embeddings.word.weight.dtype).eval()

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes a folder that ``from_pretrained`` and transformers open.

        The folder has the weights in float32 or the precision of the model, ``config.json`` with the task, its settings
        and labels, and the files of the tokenizer. A head that transformers lacks goes to ``task_head.safetensors``. To
        transformers the folder is then the base model. Opened here, the folder gives the same predictions.

        Args:
            folder: A new folder, or one whose model files are replaced. It appears whole or not at all.

        Raises:
            CheckpointError: The folder cannot be written.
            UsageError: A library (peft, ...) has wrapped or replaced modules of the model, or its labels are not known.

        Examples:
            >>> model.save_pretrained("my_model")
            >>> TaskModel.from_pretrained("my_model").task == model.task
            True
        """
        check_parameters(self)
        require_labels(self)
        state, names, family = self.state_dict(), hf_names(self), family_of(self.hf_config)
        head_state = {key: value for key, value in state.items() if key not in names}
        head_tensors: dict[str, Tensor] | None = None
        if head_state:
            head_tensors = hf_tensors(head_state, {key: (key,) for key in head_state})
        # With a head transformers' keys begin with the name of the encoder ("bert."), without one they do not.
        prefix = "" if self.head_kind is not None else family.prefix
        known_state = {key: state[key] for key in names}
        save_folder(
            Path(folder),
            config=saved_config(self.hf_config, self.head_tasks, self.reading),
            tensors=file_tensors(hf_tensors(known_state, names, strip_prefix=prefix), family),
            tokenizer=self._tokenizer,
            head_tensors=head_tensors,
        )

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def require_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Returns the tokenizer, or raises UsageError if there is none."""
        if self._tokenizer is None:  # ``self.tokenizer`` would build the tokenizer of transformers, which takes long
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

        Call it with padded tensors to replace a model of transformers in existing code. Training and prediction call it
        with a packed batch, which has the tokens of all sequences behind one another, so that the layers compute no
        padding.

        Args:
            input_ids: A packed batch, or ``[B, T]`` ids of tokens. The other arguments belong to ids.
            attention_mask: ``[B, T]``, 1 for tokens and 0 for padding. Default: all ones.
            token_type_ids: ``[B, T]`` segments. Default: all zeros.
            position_ids: ``[B, T]`` positions. Default: the positions that transformers computes for the family.
            output_attentions: Must be False, because attention weights are never computed as a whole.

        Returns:
            For a packed batch one row of logits for each sequence or token that the head reads. For ``[B, T]`` tensors
            the logits are shaped as in transformers: ``[B, L]``, or ``[B, T, L]`` with zeros at padding (for spans, L
            = 2, start and end). They are probabilities only after a softmax or sigmoid.

        Raises:
            ValueError: A mask is not ``[B, T]``, an input is too long, or an id has no embedding.

        Examples:
            >>> inputs = model.tokenizer(["Cold soup.", "Kind staff."], padding=True, return_tensors="pt")
            >>> tuple(model(**inputs).shape) == (2, len(model.task.output.labels))
            True
        """
        inputs: PackedBatch | PaddedInputs
        if isinstance(input_ids, PackedBatch):
            inputs = input_ids
        else:
            inputs = padded_inputs(
                self.config, input_ids, attention_mask, token_type_ids, position_ids, output_attentions
            )
        # The last layer computes only the rows that the head reads, for example the first token of each sequence.
        selection = self.head.select(inputs.layout)
        ids = (inputs.input_ids, inputs.position_ids, inputs.token_type_ids)
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
        if selection is not None:  # all rows were computed, because the states of all of them are returned
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
    with torch.device("meta"):  # only the shapes are needed, and no random numbers are drawn there
        head = new_head(model.tasks, model.config)
    expected |= {f"head.{name}": value.shape for name, value in head.state_dict().items()}
    actual = {name: value.shape for name, value in model.state_dict().items()}
    differing = dict(expected.items() ^ actual.items())  # names that only one side has, or with two shapes
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
    """Draws the weights of a new head again, unless they were trained or set.

    A run calls it with its seed, so that the run does not depend on what the process drew before.
    """
    state = model.state_dict()
    for name, drawn in model.drawn.items():
        if not torch.equal(state[name].to(drawn), drawn):
            return
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers go on as if nothing had been drawn
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
    # What a file contained stays, for example the dense layer of a head whose output layer is new.
    before = {name: value for name, value in model.head.state_dict().items() if f"head.{name}" not in model.drawn}
    model.tasks = {"": model.tasks[""].with_settings(labels=tuple(labels))}
    model.head = new_head(model.tasks, model.config).to(model.device)
    model.head.load_state_dict(before, strict=False)
    new = {name: value for name, value in model.head.state_dict().items() if name not in before}
    model.drawn = {f"head.{name}": value.clone() for name, value in new.items()}
    model.has_assumed_labels = False
