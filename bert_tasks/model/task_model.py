"""``TaskModel``, which trains, saves, loads and runs encoder, head and task.

The forward pass takes a packed batch, or padded tensors as transformers' models do. Prediction reads rows in chunks, so
that memory does not depend on the number of rows.

Shape legend: N tokens, B sequences, T padded length, H hidden, L labels, R tokens that the head reads.
"""

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, cast

import torch
from torch import Tensor

from bert_tasks.checkpoints.adapters import adapter_files, adapter_folder, model_weights, no_adapters
from bert_tasks.checkpoints.hub import Origin, origin, resolve
from bert_tasks.checkpoints.load import CheckpointMatch, checked_tensors, match_weights
from bert_tasks.checkpoints.save import file_tensors, hf_tensors, read_head_tensors, save_folder
from bert_tasks.checkpoints.stored_tokenizers import config_with_tokenizer, new_tokenizer, open_tokenizer
from bert_tasks.checkpoints.tokenizers import with_segments
from bert_tasks.data.columns import Row, as_rows, first_column
from bert_tasks.data.problems import first_few
from bert_tasks.data.readers import Frame, index_of, is_frame, rows_in_memory
from bert_tasks.data.splits import Splits
from bert_tasks.data.table import filled_batches, filling_order
from bert_tasks.data.trained_reading import TrainedReading
from bert_tasks.data.validator import valid_rows
from bert_tasks.encoder.cpu import map_batches
from bert_tasks.encoder.layers import initialize
from bert_tasks.encoder.lora import AdapterWeights
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import CheckpointError, NoHeadError, UsageError
from bert_tasks.families import converted_config, copies_of_tied, encoder_config, family_of, parameter_map
from bert_tasks.model.explanation import explainable_task, explained
from bert_tasks.model.label_order import with_label_order
from bert_tasks.model.pretrained import (
    CheckpointFolder,
    check_fits,
    check_one_task,
    folder_task,
    log_unfinished,
    saved_config,
)
from bert_tasks.model.pretrained_module import PaddedInputs, PretrainedModule, finite, padded_inputs
from bert_tasks.tasks.base import Feature, PredictionT, Task
from bert_tasks.tasks.reranking import rank_documents, ranking_task
from bert_tasks.tasks.shared.features import checked_features
from bert_tasks.tasks.shared.fitting import Fitting
from bert_tasks.tasks.shared.hf_config import HFConfig
from bert_tasks.tasks.shared.notebook import Predictions
from bert_tasks.tasks.shared.outputs import with_logits
from bert_tasks.tasks.shared.rendering import Rendering
from bert_tasks.tasks.shared.windows import Windows
from bert_tasks.tasks.zero_shot import HYPOTHESIS, SequencePrediction, zero_shot_task

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
_ASSUMED = ("LABEL_0", "LABEL_1")  # until the labels are known


def _head_tensors(folder: CheckpointFolder) -> dict[str, Tensor] | None:
    """Returns the tensors of task_head.safetensors under names of the loaded head."""
    tensors = read_head_tensors(folder.path)
    if tensors is None or folder.head_name is None:
        return tensors
    start = f"head.heads.{folder.head_name}."
    return {key.replace(start, "head.", 1): value for key, value in tensors.items() if key.startswith(start)}


def _task_fields(settings: Mapping[str, Any], labels: Sequence[str] | None) -> Mapping[str, Any]:
    """Returns the fields of a task that a caller passes."""
    if labels is None:
        return settings
    return {**settings, "labels": labels if isinstance(labels, str) else tuple(labels)}


class TaskModel(PretrainedModule, Generic[PredictionT]):
    """An encoder of any family with the head of one task.

    Attributes:
        task: The task with its settings. Training replaces it (fitted thresholds).
        tokenizer: The tokenizer of the checkpoint, which ``predict`` needs.
        config, hf_config: The configuration of the encoder, and ``config.json`` as loaded.
        load_report: The use of each key of the file. None for a model from a configuration.
        origin: The name that the model was loaded by, and the hub's commit, or None.
        columns: The task's columns -> their names in the training data, if they differ. They are saved with the model.
            Files and rows may use these names.
        reading: How the file of the training rows was read. It is saved with the model, and applies to files with the
            same extension.
        adapters: The low-rank adapters that the last run trained, which are in the weights, too, or None.
        has_assumed_labels: True if nobody has named the labels, so that ``fit`` takes the labels of the training rows.
            Until then the model predicts and saves nothing.

    Example:
        >>> labels = ["complaint", "praise"]
        >>> model = TaskModel.from_pretrained(base, task="text-classification", labels=labels)
        >>> len(model.predict(["Cold soup.", "Kind staff."]))
        2
    """

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        task: Task[PredictionT],
        *,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
    ) -> None:
        super().__init__(hf_config)
        check_fits(task, hf_config, self.config)
        self.task = task
        self.tokenizer = tokenizer
        self.origin: Origin | None = None
        self.columns: Mapping[str, str] = {}
        self.reading = TrainedReading()
        self._encoder_shapes = {f"encoder.{name}": value.shape for name, value in self.encoder.state_dict().items()}
        initialize(self.encoder, self.config)
        self.head = task.head(self.config)
        is_tied = self.head.reads_embeddings and self.config.output_embedding_size is None
        if is_tied and hf_config.get("tie_word_embeddings") is False:
            raise CheckpointError(
                f"config.json: tie_word_embeddings = false is not supported by {task.name}, because the decoder of its "
                "head is the table of word embeddings"
            )
        self.has_assumed_labels = False
        self.adapters: AdapterWeights | None = None
        # Parameters and buffers that no file contained, with their initial values.
        self._drawn: dict[str, Tensor] = {}

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        task: str | Task[PredictionT] | type[Task[PredictionT]] | None = None,
        labels: Sequence[str] | None = None,
        revision: str | None = None,
        adapter: str | Path | None = None,
        **settings: Any,
    ) -> Self:
        """Loads a checkpoint in float32, in evaluation mode.

        Args:
            name: A folder, a hub id, or ``package:NAME/PATH`` for weights inside an installed package. The folder of a
                run stands for its model, and a folder of the library peft for the model that it names with its
                adapters.
            task: A task, or its name or class. Then the head may be new, as ``load_report`` says. Default: the folder's
                task, whose head must be complete. For a folder of several tasks also the name of one of them.
            labels: Names of the classes in order. A head with the same labels in another order is reordered. Default:
                the folder's labels, else ``fit`` takes the labels of the training rows.
            revision: Branch, tag or commit of a hub id.
            adapter: A folder of peft whose adapters are added to the weights of ``name``. It also has the task and the
                head.
            settings: Fields of the task. Default: as the folder stores them, else as its config.json implies.

        Raises:
            CheckpointError: Files are missing or damaged, the family is not supported, or a key does not fit.
            UsageError: A task or setting is unknown, or ``labels`` is a text.
        """
        return cls.load(name, task=task, revision=revision, options=_task_fields(settings, labels), adapter=adapter)

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        *,
        task: str | Task[PredictionT] | type[Task[PredictionT]],
        tokenizer: "str | Path | PreTrainedTokenizerBase",
        labels: Sequence[str] | None = None,
        seed: int = 42,
        **settings: Any,
    ) -> Self:
        """Makes a model with random weights, in evaluation mode.

        Args:
            config: ``family``, and fields of transformers' configuration of that family, such as ``hidden_size``.
                A field has the default of transformers. ``vocab_size`` and the ids of special tokens are the
                tokenizer's.
            task: A task, or its name or class.
            tokenizer: A folder, a hub id, or the tokenizer itself.
            labels: Names of the classes in order.
            seed: Seed of the weights. Default: 42.
            settings: Fields of the task.

        Raises:
            CheckpointError: A family or field is unknown, a value does not fit, or there is no such tokenizer.
            UsageError: See ``from_pretrained``.

        Example:
            >>> small = {"family": "bert", "hidden_size": 64, "num_attention_heads": 4}
            >>> model = TaskModel.from_config(small, task="fill-mask", tokenizer=base)
        """
        if isinstance(tokenizer, str | Path):
            tokenizer = new_tokenizer(config, tokenizer)
        hf_config = config_with_tokenizer(config, tokenizer)
        tokenizer = with_segments(tokenizer, second=encoder_config(hf_config).second_segment)
        built, _ = folder_task(
            CheckpointFolder(path=Path("config"), hf_config=hf_config), task, _task_fields(settings, labels)
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = cls(hf_config, cast("Task[PredictionT]", built), tokenizer=tokenizer)
        return model.eval()

    @classmethod
    def load(
        cls,
        name: str | Path,
        *,
        task: str | Task[PredictionT] | type[Task[PredictionT]] | None,
        revision: str | None,
        options: Mapping[str, Any],
        served_as: Callable[[type[Task]], type[Task]] | None = None,
        adapter: str | Path | None = None,
    ) -> Self:
        """Loads as ``from_pretrained``, with all fields of the task in ``options``."""
        path = resolve(name, revision=revision)
        log_unfinished(path)
        folder = (
            CheckpointFolder.open(path)
            if adapter is None
            else CheckpointFolder.open(adapter_folder(adapter, path), base=path)
        ).of_task(task)
        try:
            model = cls._from_folder(folder, task, options, served_as)
        except CheckpointError as error:
            if adapter is None or isinstance(error, NoHeadError):
                raise
            raise CheckpointError(f"{adapter} does not fit the base {name}. {error}") from None
        model.origin = origin(name if adapter is None else adapter, folder.path, revision=revision)
        model.columns, model.reading = folder.columns, folder.reading
        model.tokenizer = open_tokenizer(
            folder.tokenizer_path, vocab_size=model.config.vocab_size, second=model.config.second_segment
        )
        return model.eval()

    @classmethod
    def _from_folder(
        cls,
        folder: CheckpointFolder,
        task: str | Task[PredictionT] | type[Task[PredictionT]] | None,
        options: Mapping[str, Any],
        served_as: Callable[[type[Task]], type[Task]] | None,
    ) -> Self:
        built, is_own = folder_task(folder, task, options, served_as)
        classes = first_column(built.columns, lambda column_type: column_type.has_classes)
        needs_labels = classes is not None and HFConfig.of(built).has_labels and not built.labels
        has_assumed_labels = needs_labels and not isinstance(task, Task)
        if has_assumed_labels:
            built = replace(built, labels=_ASSUMED)
        with torch.device("meta"):
            model = cls(folder.hf_config, cast("Task[PredictionT]", built))
        matched = model.match(folder, head_may_be_new=not is_own)
        model.head = built.head(model.config)  # with the initial weights that its constructor gives it
        for is_head in (False, True):  # copied to the head, whose parameters may be tied
            tensors = {key: value for key, value in matched.tensors.items() if key.startswith("head.") == is_head}
            model.load_state_dict(tensors, strict=False, assign=not is_head)
        state = model.state_dict()
        model._drawn = {name: value.clone() for name, value in state.items() if name not in matched.tensors}
        model.load_report = matched.report
        model.has_assumed_labels = has_assumed_labels
        return model

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
        student = type(self)(config, self.task, tokenizer=self._tokenizer)
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
        has_prefix = HFConfig.of(self.task).head is not None  # transformers' base models have none
        prefix = "" if has_prefix else family.prefix
        save_folder(
            Path(folder),
            config=saved_config(self.hf_config, self.task, self.columns, self.reading),
            tensors=file_tensors(hf_tensors({key: state[key] for key in names}, names, strip_prefix=prefix), family),
            tokenizer=self._tokenizer,
            head_tensors=hf_tensors(head_state, {key: (key,) for key in head_state}) if head_state else None,
        )

    @property
    def can_save_adapter(self) -> bool:
        """Returns True if peft can open adapters. Needs a folder and a head of transformers."""
        has_head = HFConfig.of(self.task).has_head and not self.head.reads_embeddings
        return has_head and self.origin is not None

    def save_adapter(self, folder: str | Path) -> None:
        """Writes the adapters of the last run, and the head, in the format of peft.

        ``from_pretrained`` and ``PeftModel`` open the folder. Both need the model that the run began with.

        Raises:
            CheckpointError: The folder cannot be written.
            UsageError: No run has trained adapters of this model, or transformers has no such head.
        """
        head_kind, names, target = HFConfig.of(self.task).head, self._hf_names(), Path(folder)
        if self.adapters is None or head_kind is None or self.origin is None or not self.can_save_adapter:
            raise no_adapters(self.task.name)
        state, base = self.state_dict(), Path(self.origin.name).expanduser()
        of_head = {key: names[key] for key in names if key.startswith("head.")}
        config, tensors = adapter_files(
            self.adapters,
            {key.removeprefix("encoder."): name for key, name in names.items()},
            hf_tensors({key: state[key] for key in of_head}, of_head),
            prefix=family_of(self.hf_config).prefix,
            head_kind=head_kind,
            base=str(base.absolute()) if base.is_dir() else self.origin.name,
        )
        hf_config = saved_config(self.hf_config, self.task, self.columns, self.reading)
        save_folder(target, config=hf_config, tensors=tensors, tokenizer=self._tokenizer, adapter_config=config)

    def share_weights(self, other: "TaskModel") -> None:
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
        state, names, head_kind = self.state_dict(), self._hf_names(), HFConfig.of(self.task).head
        if unknown := sorted(names.keys() - state.keys()):
            raise UsageError(
                f"{type(self.task).__name__}: HFConfig.head is {head_kind!r}, but the head has no "
                f"{first_few(unknown, 3)}. Set HFConfig.head to None for a head that transformers lacks"
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
        return with_label_order(matched, folder.labels, self.task.labels, self.head.label_dims, names)

    def _hf_names(self) -> dict[str, tuple[str, ...]]:
        """Returns parameter -> transformers' names, without heads that transformers lacks."""
        head_kind = HFConfig.of(self.task).head
        return parameter_map(
            family_of(self.hf_config), self.config, head="base" if head_kind is None else head_kind, pooler=False
        )

    def check_parameters(self) -> None:
        """Raises UsageError if a library (peft, pruning) has wrapped or renamed modules.

        Its weights would have no names in a saved folder.
        """
        with torch.device("meta"):
            head = self.task.head(self.config)
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

    def require_labels(self) -> None:
        """Raises UsageError if the labels are not known yet."""
        if self.has_assumed_labels:
            raise UsageError(
                f"{self.task.name} needs labels, e.g. labels=['negative', 'positive']. Pass them to from_pretrained, "
                "or call fit, which takes the labels of the training rows"
            )

    @property
    def reading_task(self) -> Task[PredictionT]:
        """The task without labels that were assumed, as rows are read."""
        return replace(self.task, labels=()) if self.has_assumed_labels else self.task

    def read_labels(self, splits: Splits, *, unlabelled: bool) -> None:
        """Checks that the splits can be trained on, and adopts their labels if needed.

        Raises:
            DataError: See ``check_splits``.
        """
        task = self.reading_task
        labelled = Fitting.of(task).label(splits, labels=task.labels, unlabelled=unlabelled)
        if self.has_assumed_labels:
            self.set_labels(labelled.labels)

    def set_labels(self, labels: Sequence[str]) -> None:
        """Replaces assumed labels, and the part of the head that depends on them."""
        before = {name: value for name, value in self.head.state_dict().items() if f"head.{name}" not in self._drawn}
        self.task = replace(self.task, labels=tuple(labels))
        self.head = self.task.head(self.config).to(self.device)
        self.head.load_state_dict(before, strict=False)
        new = {name: value for name, value in self.head.state_dict().items() if name not in before}
        self._drawn = {f"head.{name}": value.clone() for name, value in new.items()}
        self.has_assumed_labels = False

    @torch.no_grad()
    def draw_new_head(self, seed: int) -> None:
        """Draws the weights of a new head again, unless they were trained or set."""
        state = self.state_dict()
        if any(not torch.equal(state[name].to(drawn), drawn) for name, drawn in self._drawn.items()):
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            head = self.task.head(self.config).state_dict()
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
            return self._logits(input_ids)
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

    def predict(self, inputs: Inputs, *, logits: bool = False, explain: bool = False) -> Predictions[PredictionT]:
        """Returns one prediction for each row, in row order, as a list.

        Args:
            inputs: One or several rows, each a text (``"a fine film"``), a tuple of the texts that a row needs
                (``("a premise", "a hypothesis")``), or a mapping with the columns of the task or of the training data.
                Also a pandas DataFrame or Series, whose index ``to_frame`` of the result keeps, or a Dataset.
            logits: True to compute the ``logits`` of the predictions, in the order of the labels.
            explain: True to compute the ``explanation`` of the predictions, which says how much each word adds
                to the label, number, span or entity. Each takes as long as about 100 predictions.

        Raises:
            DataError: A row lacks a column or a value is of the wrong kind.
            UsageError: The model has no tokenizer, or its task has no logits or no explanations.
        """
        predictions = self.predict_rows(self.given_rows(inputs), logits=logits, explain=explain)
        return Predictions(predictions, index=index_of(inputs))

    def given_rows(self, inputs: Inputs) -> Iterable[Row]:
        """Returns the rows of the argument of ``predict`` in their order."""
        given: Any = rows_in_memory(inputs) if is_frame(inputs) else inputs
        return as_rows(given, self.task.input_columns)

    def rank(
        self, query: str, documents: Sequence[str], *, top_k: int | None = None, return_documents: bool = False
    ) -> list[dict[str, Any]]:
        """Returns documents by their relevance to a query, the most relevant first.

        The model is one of pairs with one number, or with two labels whose second one means "relevant". Scores of a
        number equal sentence-transformers' ``CrossEncoder.rank``. Scores of two labels are probabilities.

        Args:
            query: The first text of each pair.
            documents: The second texts.
            top_k: Maximum number of documents to return. Default: all.
            return_documents: True to return the documents themselves, as ``text``.

        Returns:
            For each document ``corpus_id``, its index in ``documents``, and ``score``. Equal scores keep their order.

        Raises:
            UsageError: The model does not rank, ``documents`` is a text, or ``top_k`` is below 1.

        Example:
            >>> reranker.rank("When do you open?", ["We open at ten.", "We sell bicycles."], top_k=1)
        """
        pairs = ranking_task(self.task, documents, top_k)
        documents = list(documents)  # a Series would be read by its index
        predictions = cast("list[SequencePrediction]", self.predict([(query, document) for document in documents]))
        ranked = rank_documents(pairs, predictions, self.hf_config)[:top_k]
        return [{**entry, "text": documents[entry["corpus_id"]]} if return_documents else entry for entry in ranked]

    def zero_shot(
        self, labels: Sequence[str] | str, *, hypothesis: str = HYPOTHESIS, multi_label: bool = False
    ) -> "TaskModel[SequencePrediction]":
        """Returns this model of pairs as a classifier of texts with any labels.

        It has the weights of this model, and the scores of transformers' pipeline ``zero-shot-classification``.

        Args:
            labels: Candidate labels, as a list or separated by commas.
            hypothesis: The sentence that the text entails if a label applies, with ``{}`` for the label.
            multi_label: True if each label is decided alone, as with a single label. Default: one of the labels
                applies.

        Raises:
            CheckpointError: The model does not read pairs, or no label begins with "entail".
            UsageError: A label is empty or repeated, or the hypothesis has no ``{}`` or is too long.

        Example:
            >>> nli.zero_shot(["sports", "politics"]).predict("The match ended in a draw.")
        """
        check_one_task(self.task)
        task = zero_shot_task(self.task, self.hf_config, labels, hypothesis=hypothesis, multi_label=multi_label)
        task.features((), self.require_tokenizer())  # checks the length of hypotheses
        model = cast("TaskModel[SequencePrediction]", copy.copy(self))
        names = [column.name for column in task.columns]
        model.task, model.columns = task, {name: self.columns[name] for name in names if name in self.columns}
        model.reading = TrainedReading()  # the rows have other columns than the training file
        return model

    def predict_rows(
        self,
        rows: Iterable[Row],
        *,
        forward_fn: ForwardFn | None = None,
        logits: bool = False,
        explain: bool = False,
    ) -> Iterator[PredictionT]:
        """Yields predictions as a stream. See ``predict``.

        Args:
            rows: Mappings with the columns of the task or of the training data.
            forward_fn: Computes a batch's logits instead of the model (``model.precision.logits_of``).
            logits, explain: See ``predict``.

        Raises:
            DataError: A row lacks a column or a value is of the wrong kind.
            CheckpointError, UsageError: See ``predict_chunk``.
        """
        valid = valid_rows(rows, self.task.input_columns, names=self.columns)
        while chunk := list(islice(valid, self.chunk_rows(explain=explain))):
            yield from self.predict_chunk(chunk, forward_fn=forward_fn, logits=logits, explain=explain)[0]

    def chunk_rows(self, *, explain: bool) -> int | None:
        """Number of rows to predict together. None if a row's features depend on others."""
        windows = Windows.of(self.task)
        if windows.needs_document_context:
            return None
        return max(1, (EXPLAINED_ROWS if explain else CHUNK_ROWS) // windows.per_row)

    def predict_chunk(
        self, rows: Sequence[Row], *, forward_fn: ForwardFn | None = None, logits: bool = False, explain: bool = False
    ) -> tuple[list[PredictionT], Sequence[Feature]]:
        """Returns the predictions of valid rows, and the features of these rows.

        Raises:
            DataError: The prediction of a row would be too long.
            UsageError: The model has no tokenizer, no logits or no explanations, or an id has no embedding.
            CheckpointError: The logits are not finite.
        """
        self.require_labels()
        explainable = explainable_task(self, self.task) if explain else None
        if logits:
            check_one_task(self.task)
        tokenizer, task = self.require_tokenizer(), self.task
        rendering = Rendering.of(task)
        for row in rows:
            rendering.check_rows([row])
        features = checked_features(task, rows, tokenizer, self.config)
        compact = self.forward_windows(
            features,
            forward_fn=lambda batch: finite(self.packed_logits(batch) if forward_fn is None else forward_fn(batch)),
        )
        predictions = rendering.with_texts(task.decode(compact, features, rows), tokenizer)
        if logits:
            predictions = with_logits(task, predictions, compact, features)
        if explainable is not None:
            explained_logits = explainable.explained_logits(predictions, compact, features, rows)
            spans = explainable.token_spans(rows, tokenizer)
            explanations = explained(self, self.head, explained_logits, features, spans)
            predictions = explainable.with_explanations(predictions, explanations)
        return list(predictions), features

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
        inputs = ((i, feature) for i in order for feature in Windows.of(self.task).copies(features[i], tokenizer))
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
        batch = Windows.of(self.task).collate(features, position_offset=offset, pad_groups=pad_groups)
        return batch.to(self.device)

    def reduce(self, batch: PackedBatch, logits: Any, features: Sequence[Feature]) -> tuple[Tensor, ...]:
        """Returns the result of ``Task.compact_logits`` for each feature, on the CPU."""
        with torch.inference_mode():
            parts = logits.split(list(batch.layout.gather_counts)) if self.head.per_token else logits.unbind()
            return tuple(tensor.cpu() for tensor in self.task.compact_logits(parts, features))
