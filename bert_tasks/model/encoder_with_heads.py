"""``EncoderWithHeads``, the common base of the models of one task and of several.

It owns the forward pass over a packed batch, or over padded tensors as transformers' models take them, the pass over
windows of any lengths, and the files of the weights. The subclasses know the tasks.

Shape legend: N tokens, B sequences, T padded length, H hidden, L labels, R tokens that the head reads.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor

from bert_tasks.checkpoints.adapters import model_weights
from bert_tasks.checkpoints.hub import Origin
from bert_tasks.checkpoints.load import CheckpointMatch, checked_tensors, match_weights
from bert_tasks.checkpoints.save import file_tensors, hf_tensors, read_head_tensors, save_folder
from bert_tasks.checkpoints.stored_tokenizers import open_tokenizer
from bert_tasks.data.columns import Columns, Row, as_rows, input_rows
from bert_tasks.data.problems import first_few
from bert_tasks.data.readers import Frame, is_frame, rows_in_memory
from bert_tasks.data.splits import Splits
from bert_tasks.data.table import filled_batches, filling_order
from bert_tasks.data.trained_reading import TrainedReading
from bert_tasks.data.validator import valid_rows
from bert_tasks.encoder.config import HeadKind
from bert_tasks.encoder.cpu import map_batches
from bert_tasks.encoder.heads import Head
from bert_tasks.encoder.layers import initialize
from bert_tasks.encoder.lora import AdapterWeights
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.families import converted_config, copies_of_tied, family_of, parameter_map
from bert_tasks.model.label_order import with_label_order
from bert_tasks.model.pretrained import CheckpointFolder
from bert_tasks.model.pretrained_module import PaddedInputs, PretrainedModule, padded_inputs
from bert_tasks.model.shared_heads import features_of_head
from bert_tasks.outputs.base import LossTerm
from bert_tasks.outputs.features import Feature
from bert_tasks.outputs.prediction import Prediction
from bert_tasks.tasks.base import FeatureKeys, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# One row or several: mappings, texts, or tuples of the texts that a row needs.
Inputs = Row | str | tuple[str, ...] | Iterable[Row | str | tuple[str, ...]] | Frame
ForwardFn = Callable[[PackedBatch], Any]  # a batch's logits: [B, L], or [R, L] of a head with logits per token

CHUNK_ROWS = 1024
EXPLAINED_ROWS = 32  # in a chunk, because an explanation takes as long as 100 predictions
BATCH_TOKENS = 32768
CPU_BATCH_TOKENS = 1024  # the activations of two such batches stay in a processor's cache
_BATCH_LOGITS = 2**25


def _head_tensors(folder: CheckpointFolder) -> dict[str, Tensor] | None:
    """Returns the tensors of task_head.safetensors under names of the loaded head."""
    tensors = read_head_tensors(folder.path)
    if tensors is None or folder.head_name is None:
        return tensors
    start = f"head.heads.{folder.head_name}."
    return {key.replace(start, "head.", 1): value for key, value in tensors.items() if key.startswith(start)}


def predictions_of_row(by_head: Mapping[str, Sequence[Prediction | None]], number: int) -> dict[str, Prediction]:
    """Returns the predictions of the heads that have an input in a row."""
    of_row = {name: predictions[number] for name, predictions in by_head.items()}
    return {name: prediction for name, prediction in of_row.items() if prediction is not None}


def predictions_of_rows(by_head: Mapping[str, Sequence[Prediction | None]]) -> list[Any]:
    """Returns the predictions of rows as ``predict_rows`` yields them, of several tasks as mappings by their names."""
    if "" in by_head:
        return list(by_head[""])
    count = len(next(iter(by_head.values())))
    return [predictions_of_row(by_head, number) for number in range(count)]


class EncoderWithHeads(PretrainedModule, ABC):
    """An encoder with the head of one task, or the heads of several.

    Attributes:
        head: The head, or the module of all heads.
        head_kind: The head of transformers with the parameters of the head. None if there is none.
        origin: The name that the model was loaded by, and the hub's commit, or None.
        columns: The columns of the only task -> their names in the training data, if they differ.
        reading: How the file of the training rows was read. It is saved with the model, and applies to files with the
            same extension.
        adapters: The low-rank adapters that the last run trained, which are in the weights, too, or None.
    """

    head: Head
    head_kind: HeadKind | None

    def __init__(self, hf_config: Mapping[str, Any], *, tokenizer: "PreTrainedTokenizerBase | None" = None) -> None:
        super().__init__(hf_config)
        self.tokenizer = tokenizer
        self.origin: Origin | None = None
        self.columns: Mapping[str, str] = {}
        self.reading = TrainedReading()
        self.adapters: AdapterWeights | None = None
        self._encoder_shapes = {f"encoder.{name}": value.shape for name, value in self.encoder.state_dict().items()}
        # Parameters and buffers that no file contained, with their initial values.
        self._drawn: dict[str, Tensor] = {}
        initialize(self.encoder, self.config)

    # What a subclass knows of its tasks

    @property
    @abstractmethod
    def tasks(self) -> dict[str, Task]:
        """The task of each head by its name. An only head is called "". Training sets tasks with fitted values."""

    @tasks.setter
    def tasks(self, tasks: Mapping[str, Task]) -> None: ...

    @abstractmethod
    def new_head(self) -> Head:
        """Returns the head, or the module of all heads, with weights from torch's global generator."""

    @abstractmethod
    def with_config(self, hf_config: Mapping[str, Any]) -> Self:
        """Returns a model of the same tasks with random weights."""

    @property
    @abstractmethod
    def task_name(self) -> str:
        """The name of the task for people and run.json."""

    @property
    @abstractmethod
    def labels(self) -> tuple[str, ...]:
        """The labels of the only task, without labels that were assumed. Empty for several tasks."""

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The settings of the tasks, as files hold them."""

    @abstractmethod
    def saved_config(self) -> dict[str, Any]:
        """Returns config.json of the saved model."""

    @property
    @abstractmethod
    def has_assumed_labels(self) -> bool:
        """True if nobody has named the labels, so that ``fit`` takes the labels of the training rows."""

    @abstractmethod
    def require_labels(self) -> None:
        """Raises UsageError if labels are not known yet."""

    @abstractmethod
    def read_labels(self, splits: Splits, *, unlabelled: bool) -> None:
        """Checks that the splits can be trained on, and adopts their labels if needed.

        Raises:
            DataError: See ``check_splits``.
        """

    @property
    @abstractmethod
    def row_columns(self) -> Columns:
        """The columns that are read of a row."""

    @property
    @abstractmethod
    def input_columns(self) -> Columns:
        """``row_columns`` without labels, which a prediction reads."""

    @abstractmethod
    def features(self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase") -> list[Feature]:
        """Returns the checked windows of rows. See ``Task.features``."""

    @abstractmethod
    def prepare(
        self, features: Sequence[Feature], keys: FeatureKeys, corpus: Sequence[Mapping[str, Any]]
    ) -> Sequence[Feature]:
        """Returns the features as a step sees them. See ``Task.prepare``."""

    @abstractmethod
    def collate(self, features: Sequence[Feature], *, position_offset: int, pad_groups: bool) -> PackedBatch:
        """Packs features into a batch."""

    def copies(self, feature: Feature, tokenizer: "PreTrainedTokenizerBase") -> Iterable[Feature]:
        """Returns what the model reads to predict for a feature. See ``Task.copies``."""
        return (feature,)

    @abstractmethod
    def counts(self, features: Sequence[Feature]) -> dict[str, float]:
        """Returns the count of each loss term. See ``Output.counts``."""

    @abstractmethod
    def loss(self, logits: Any, batch: PackedBatch) -> tuple[LossTerm, ...]:
        """Returns the loss terms of all heads. See ``Output.loss``."""

    @abstractmethod
    def reduce(self, batch: PackedBatch, logits: Any, features: Sequence[Feature]) -> tuple[Tensor, ...]:
        """Returns the result of ``Output.compact`` for each feature, on the CPU."""

    @abstractmethod
    def predict_by_head(
        self, rows: Sequence[Row], *, forward_fn: ForwardFn | None = None, logits: bool = False, explain: bool = False
    ) -> "tuple[dict[str, list[Prediction | None]], Sequence[Feature]]":
        """Returns a prediction of each head for each of some valid rows, and the features of these rows.

        A prediction is None if the row has no input for the head. See ``TaskModel.predict``.

        Raises:
            DataError: The prediction of a row would be too long.
            UsageError: The model has no tokenizer, no logits or no explanations, or an id has no embedding.
            CheckpointError: The logits are not finite.
        """

    @property
    @abstractmethod
    def can_save_adapter(self) -> bool:
        """True if peft can open adapters. Needs a folder and a head of transformers."""

    @abstractmethod
    def save_adapter(self, folder: str | Path) -> None:
        """Writes the adapters of the last run, and the head, in the format of peft.

        ``from_pretrained`` and ``PeftModel`` open the folder. Both need the model that the run began with.

        Raises:
            CheckpointError: The folder cannot be written.
            UsageError: No run has trained adapters of this model, transformers has no such head, or the model has
                several tasks.
        """

    # What follows from the heads

    @property
    def needs_document_context(self) -> bool:
        """True if the features of a row depend on the rows around it."""
        return any(task.needs_document for task in self.tasks.values())

    @property
    def libraries(self) -> tuple[str, ...]:
        """The libraries on whose versions the features depend."""
        return tuple(library for task in self.tasks.values() for library in task.libraries)

    def chunk_rows(self, *, explain: bool) -> int | None:
        """Number of rows to predict together. None if a row's features depend on others."""
        if self.needs_document_context:
            return None
        per_row = max(task.windows_per_row for task in self.tasks.values())
        return max(1, (EXPLAINED_ROWS if explain else CHUNK_ROWS) // per_row)

    def given_rows(self, inputs: Inputs) -> Iterable[Row]:
        """Returns the rows of the argument of ``predict`` in their order."""
        given: Any = rows_in_memory(inputs) if is_frame(inputs) else inputs
        return as_rows(given, self.input_columns)

    def predict_rows(
        self,
        rows: Iterable[Row],
        *,
        forward_fn: ForwardFn | None = None,
        logits: bool = False,
        explain: bool = False,
    ) -> Iterator[Any]:
        """Yields predictions as a stream, of several tasks as mappings by the names of the tasks. See ``predict``.

        Args:
            rows: Mappings with the columns of the task or of the training data.
            forward_fn: Computes a batch's logits instead of the model (``model.precision.logits_of``).
            logits, explain: See ``predict``.

        Raises:
            DataError: A row lacks a column or a value is of the wrong kind.
            CheckpointError, UsageError: See ``predict_by_head``.
        """
        valid = valid_rows(rows, self.input_columns, names=self.columns)
        while chunk := list(islice(valid, self.chunk_rows(explain=explain))):
            by_head, _ = self.predict_by_head(chunk, forward_fn=forward_fn, logits=logits, explain=explain)
            yield from predictions_of_rows(by_head)

    def decode(
        self, compact: Sequence[Tensor], features: Sequence[Feature], rows: Sequence[Row], tasks: Mapping[str, Task]
    ) -> dict[str, list[Prediction | None]]:
        """Returns a prediction of each head for each row, or None if the row has no input for the head.

        Args:
            compact: The result of ``forward_windows``.
            features: The features of the rows.
            rows: The rows.
            tasks: The task of each head that decodes.
        """
        tokenizer, by_head = self.require_tokenizer(), {}
        for name, task in tasks.items():
            cells = input_rows(rows, name)
            of_head, windows = features_of_head(name, list(cells), features, compact)
            decoded = task.output.decode(windows, of_head, list(cells.values()), tokenizer)
            predictions: list[Prediction | None] = [None] * len(rows)
            for number, prediction in zip(cells, decoded, strict=True):
                predictions[number] = prediction
            by_head[name] = predictions
        return by_head

    # Files

    def load_folder(self, folder: CheckpointFolder, *, head_may_be_new: bool) -> None:
        """Loads the weights of a folder into a model on the device "meta"."""
        matched = self.match(folder, head_may_be_new=head_may_be_new)
        self.head = self.new_head()  # with the initial weights that its constructor gives it
        for is_head in (False, True):  # copied to the head, whose parameters may be tied
            tensors = {key: value for key, value in matched.tensors.items() if key.startswith("head.") == is_head}
            self.load_state_dict(tensors, strict=False, assign=not is_head)
        state = self.state_dict()
        self._drawn = {name: value.clone() for name, value in state.items() if name not in matched.tensors}
        self.load_report = matched.report

    def read_folder(self, folder: CheckpointFolder, origin: Origin) -> None:
        """Reads what a folder holds besides the weights."""
        self.origin, self.columns, self.reading = origin, folder.columns, folder.reading
        self.tokenizer = open_tokenizer(
            folder.tokenizer_path, vocab_size=self.config.vocab_size, second=self.config.second_segment
        )

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
        self.check_parameters()
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
        student = self.with_config(config)
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
        student._drawn = {name: new_state[name].clone() for name in (self._drawn if same_head else of_head)}
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
        self.check_parameters()
        self.require_labels()
        state, names, family = self.state_dict(), self._hf_names(), family_of(self.hf_config)
        head_state = {key: value for key, value in state.items() if key not in names}
        has_prefix = self.head_kind is not None  # transformers' base models have none
        prefix = "" if has_prefix else family.prefix
        save_folder(
            Path(folder),
            config=self.saved_config(),
            tensors=file_tensors(hf_tensors({key: state[key] for key in names}, names, strip_prefix=prefix), family),
            tokenizer=self._tokenizer,
            head_tensors=hf_tensors(head_state, {key: (key,) for key in head_state}) if head_state else None,
        )

    def share_weights(self, other: "EncoderWithHeads") -> None:
        """Shares the memory of equal weights with another model on the same device."""
        weights = dict(other.named_parameters())
        for name, weight in self.named_parameters():
            if name in weights and weights[name].shape == weight.shape and torch.equal(weights[name], weight):
                weight.data = weights[name].data

    def restore(self, folder: str | Path) -> None:
        """Loads all weights from a folder. Raises CheckpointError if they do not fit."""
        self.check_parameters()
        dtype = self.encoder.embeddings.word.weight.dtype
        opened = CheckpointFolder.open(Path(folder))
        self.load_state_dict(self.match(opened, head_may_be_new=False, dtype=dtype, copy=False).tensors)

    def match(
        self, folder: CheckpointFolder, *, head_may_be_new: bool, dtype: torch.dtype = torch.float32, copy: bool = True
    ) -> CheckpointMatch:
        """Returns the folder's tensors for every parameter, but no other kind of head.

        Raises:
            CheckpointError: Tensors are missing, unknown, of another shape or not finite. The message lists them.
            UsageError: The head lacks a parameter of transformers' head for the task.
        """
        state, names, head_kind = self.state_dict(), self._hf_names(), self.head_kind
        if unknown := sorted(names.keys() - state.keys()):
            raise UsageError(
                f"{self.task_name}: Task.head_kind is {head_kind!r}, but the head has no {first_few(unknown, 3)}. Set "
                "head_kind of the task or of its output to None for a head that transformers lacks"
            )
        if folder.head_name is not None:  # the heads of several tasks are in task_head.safetensors
            names = {key: hf_names for key, hf_names in names.items() if not key.startswith("head.")}
        shapes, family = {key: state[key].shape for key in names}, family_of(self.hf_config)
        matched = match_weights(
            model_weights(folder.path, family, folder.base),
            names,
            shapes=shapes,
            family=family,
            copies=copies_of_tied(family, self.config, names, head=head_kind),
            head_may_be_new=head_may_be_new,
            ignore_head=folder.head != head_kind and not self.head.reads_embeddings,  # whose keys no other head has
            dtype=dtype,
            copy=copy,
        )
        report = matched.report
        # Parameters that transformers has no name for are in task_head.safetensors.
        head_state = {key: value for key, value in state.items() if key not in names}
        if head_state:
            saved, expected = _head_tensors(folder), {key: value.shape for key, value in head_state.items()}
            if saved is not None and {key: value.shape for key, value in saved.items()} == expected:
                saved = checked_tensors(saved, {key: value.dtype for key, value in head_state.items()})
                report = replace(report, loaded=tuple(sorted([*report.loaded, *head_state])))
                matched = CheckpointMatch(tensors=matched.tensors | saved, report=report)
            elif head_may_be_new:
                matched = replace(matched, report=replace(report, new=tuple(sorted([*report.new, *head_state]))))
            else:
                raise CheckpointError(f"{folder.path}: task_head.safetensors is missing or does not fit the task")
        return with_label_order(matched, folder.labels, self.labels, self.head.label_dims, names)

    def _hf_names(self) -> dict[str, tuple[str, ...]]:
        """Returns parameter -> transformers' names, without heads that transformers lacks."""
        kind = "base" if self.head_kind is None else self.head_kind
        return parameter_map(family_of(self.hf_config), self.config, head=kind, pooler=False)

    def check_parameters(self) -> None:
        """Raises UsageError if a library (peft, pruning) has wrapped or renamed modules.

        Its weights would have no names in a saved folder.
        """
        with torch.device("meta"):
            head = self.new_head()
        head_shapes = {f"head.{name}": value.shape for name, value in head.state_dict().items()}
        actual = {name: value.shape for name, value in self.state_dict().items()}
        differing = dict((self._encoder_shapes | head_shapes).items() ^ actual.items())
        if differing:
            raise UsageError(
                "the model can be neither trained nor saved, because its parameters do not fit its configuration and "
                f"task ({first_few(sorted(differing), 3)}). A library has wrapped or replaced modules. Undo that "
                "first. Merge adapters of peft with model = peft_model.merge_and_unload()"
            )

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def require_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Returns the tokenizer, or raises UsageError if there is none."""
        if self._tokenizer is None:
            raise UsageError("the model has no tokenizer. Load a model with tokenizer files, or set model.tokenizer")
        return self._tokenizer

    @torch.no_grad()
    def draw_new_head(self, seed: int) -> None:
        """Draws the weights of a new head again, unless they were trained or set."""
        state = self.state_dict()
        if any(not torch.equal(state[name].to(drawn), drawn) for name, drawn in self._drawn.items()):
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            head = self.new_head().state_dict()
        for name in self._drawn:
            state[name].copy_(head[name.removeprefix("head.")])
        self._drawn = {name: state[name].clone() for name in self._drawn}

    def parameter_depths(self) -> dict[str, int]:
        """Returns the depth of each parameter, 0 for embeddings and i + 1 for layer i.

        The depth of a shared layer is its last use. The head is one deeper than the last layer.
        """
        order = self.encoder.layer_order
        depths = {"encoder.embeddings": 0, "encoder.positions": 0, "encoder.convolution": 1}
        depths |= {f"encoder.layers.{index}": depth for depth, index in enumerate(order, start=1)}
        depths |= {"encoder.norm": len(order), "head": len(order) + 1}
        return {
            name: next(depth for prefix, depth in depths.items() if name.startswith(f"{prefix}."))
            for name, _ in self.named_parameters()
        }

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
        if isinstance(input_ids, PackedBatch):
            return self.packed_logits(input_ids)
        inputs = padded_inputs(self.config, input_ids, attention_mask, token_type_ids, position_ids, output_attentions)
        logits = self._logits(inputs)
        if not self.head.per_token:
            return logits
        if isinstance(logits, tuple):  # logits of tokens and of sequences
            return inputs.rectangle(logits[0]), logits[1]
        return inputs.rectangle(logits)

    def _logits(self, batch: PackedBatch | PaddedInputs) -> Any:
        selection, ids = self.head.select(batch.layout), (batch.input_ids, batch.position_ids, batch.token_type_ids)
        hidden = self.encoder(*ids, batch.layout, selection=selection, depth=self.head.depth)
        return self.head(hidden, batch.layout, self.encoder.embeddings.word.weight)

    def logits_and_states(self, batch: PackedBatch) -> tuple[Tensor, Sequence[Tensor]]:
        """Returns a batch's logits and ``[N, H]`` states of the embeddings and each layer."""
        states: list[Tensor] = []
        hidden = self.encoder(
            batch.input_ids, batch.position_ids, batch.token_type_ids, batch.layout, hidden_states=states
        )
        selection = self.head.select(batch.layout)
        if selection is not None:
            hidden = hidden.index_select(0, selection.rows)
        return self.head(hidden, batch.layout, self.encoder.embeddings.word.weight), states

    def packed_logits(self, batch: PackedBatch) -> Any:
        """Returns the logits of a packed batch, from their graph for exported models."""
        return self._logits(batch)

    def forward_windows(
        self, features: Sequence[Feature], *, max_tokens: int | None = None, forward_fn: ForwardFn | None = None
    ) -> list[Tensor]:
        """Returns the inputs of decoding for each feature, in order, on the CPU.

        ``max_tokens`` of windows of any lengths are run together, by default ``batch_tokens``. Dropout is off
        meanwhile.
        """
        tokenizer = self.require_tokenizer()
        most = self.batch_tokens if max_tokens is None else max_tokens
        order = filling_order([len(feature["input_ids"]) for feature in features], max_tokens=most)
        inputs = ((i, feature) for i in order for feature in self.copies(features[i], tokenizer))
        batches = filled_batches(inputs, lambda pair: len(pair[1]["input_ids"]), max_tokens=most)
        parts: list[list[Tensor]] = [[] for _ in features]

        def compact(batch: Sequence[tuple[int, Feature]]) -> Iterator[tuple[tuple[int, Feature], Tensor]]:
            return zip(batch, self.forward_batch([feature for _, feature in batch], forward_fn=forward_fn), strict=True)

        with self.in_evaluation():
            for results in map_batches(compact, batches, device=self.device):
                for (i, _), window in results:
                    parts[i].append(window)
        return [chunks[0] if len(chunks) == 1 else torch.cat(chunks) for chunks in parts]

    def forward_batch(self, features: Sequence[Feature], *, forward_fn: ForwardFn | None = None) -> tuple[Tensor, ...]:
        """``forward_windows`` of features that are run together."""
        return self.reduce(*self.batch_logits(features, forward_fn=forward_fn), features)

    @property
    def batch_tokens(self) -> int:
        """Number of tokens to run together, fewer for a CRF with its matrix of logits."""
        most = CPU_BATCH_TOKENS if self.device.type == "cpu" else BATCH_TOKENS
        return max(1, min(most, _BATCH_LOGITS // self.head.outputs_per_token))

    def batch_logits(
        self, features: Sequence[Feature], *, forward_fn: ForwardFn | None = None
    ) -> tuple[PackedBatch, Any]:
        """Returns a packed batch and its float32 logits on the device, without dropout."""
        with self.in_evaluation(), torch.inference_mode():
            batch = self.packed(features)
            return batch, (self.packed_logits(batch) if forward_fn is None else forward_fn(batch)).float()

    def packed(self, features: Sequence[Feature]) -> PackedBatch:
        """Returns the features as one batch on the model's device."""
        # A CPU is faster with more calls of attention than with copies of the rows.
        pad_groups, offset = self.device.type != "cpu", self.config.position_offset
        batch = self.collate(features, position_offset=offset, pad_groups=pad_groups)
        return batch.to(self.device)
