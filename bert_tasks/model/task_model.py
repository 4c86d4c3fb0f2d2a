"""``TaskModel``: encoder + head + task + tokenizer, trained, saved and loaded as one thing.

Owns the forward pass of training (a packed batch) and of transformers' call (padded tensors), and the module tree whose
names the family tables map. How a folder becomes a model and back is in pretrained.py.

Shape legend: N tokens, B sequences, T padded length, H hidden, L labels, R rows that the head reads.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Self, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from bert_tasks.checkpoints.hub import Origin
from bert_tasks.checkpoints.load import LoadReport
from bert_tasks.checkpoints.tokenizers import with_segments
from bert_tasks.data.readers import ReadOptions
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.layers import TransformerEncoder, initialize
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import UsageError
from bert_tasks.families.registry import encoder_config, second_segment
from bert_tasks.model.encoder import PaddedInputs, padded_inputs
from bert_tasks.model.predicting import Inputs, as_rows, predict_rows
from bert_tasks.tasks.base import PredictionT, Task


class TaskModel(nn.Module, Generic[PredictionT]):
    """One of the four kinds of task on one of the five families.

    Attributes:
        task: the adapter; its settings are stored with the model. Training replaces it (tuned thresholds).
        tokenizer: of the checkpoint; needed by ``predict``.
        config, hf_config: our view of the configuration, and ``config.json`` as loaded.
        load_report: what became of each key of the file; None for a model made from a configuration.
        origin: the name that the model was loaded by, and the hub's commit; None likewise.
        reading: how the training data were read; saved with the model. Files and rows are read likewise where they
            have the same columns and format, and nothing else is stated.
    """

    def __init__(
        self, hf_config: Mapping[str, Any], task: Task[PredictionT], *, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        super().__init__()
        self.hf_config = dict(hf_config)
        self.config: EncoderConfig = encoder_config(hf_config)
        if task.max_length > self.config.usable_length:
            raise UsageError(
                f"max_length = {task.max_length}, but the checkpoint has {self.config.usable_length} positions"
            )
        self.task = task
        self.tokenizer = tokenizer
        self.load_report: LoadReport | None = None
        self.origin: Origin | None = None
        self.reading = ReadOptions()
        self.stack = TransformerEncoder(self.config)
        initialize(self.stack, std=self.config.initializer_range)
        self.head = task.head(self.config)
        self._drawn: dict[str, Tensor] = {}

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        task: str | Task[PredictionT] | type[Task[PredictionT]] | None = None,
        labels: Sequence[str] | None = None,
        revision: str | None = None,
        **settings: Any,
    ) -> Self:
        """Loads a checkpoint in float32, in evaluation mode.

        Args:
            name: a folder, a hub id, or ``package:NAME/PATH`` for weights inside an installed package. The output
                folder of a run stands for the run's model.
            task: a task's name or class, or a task. Then the head may be new, and ``load_report`` says so, unless it is
                just the folder's own. Without it the folder says what the task is, and its head must be complete.
            labels: the classes in order. A head in the file with the same labels in another order is re-ordered.
            revision: branch, tag or commit of a hub id.
            settings: fields of the task. Those that are not given are the ones stored in the folder, else those that
                its config.json implies, else the defaults.

        Raises:
            CheckpointError: files are missing or damaged, the family is not supported, or a key does not fit.
            UsageError: an unknown task or setting, or one text as the labels, which would be taken for its letters.
        """
        from bert_tasks.model.pretrained import load_task_model  # it builds this class

        if isinstance(labels, str):
            raise UsageError(f"labels is the text {labels!r}, expected a list of names, e.g. labels=['no', 'yes']")
        given = settings if labels is None else {**settings, "labels": tuple(labels)}
        return load_task_model(cls, name, task=task, revision=revision, given=given)

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes a folder that ``from_pretrained`` and stock transformers open.

        A head that transformers lacks goes to ``task_head.safetensors``; the folder is then the base model to others.

        Raises:
            CheckpointError: the folder cannot be written.
            UsageError: a library (peft, ...) has wrapped or replaced modules of the model.
        """
        from bert_tasks.model.pretrained import save_task_model

        save_task_model(self, Path(folder))

    def restore(self, folder: str | Path) -> None:
        """Takes the weights, all of them, from a folder that this model was saved to; task and tokenizer stay.

        Raises:
            CheckpointError: a weight is missing or of another shape.
            UsageError: as for ``save_pretrained``.
        """
        from bert_tasks.model.pretrained import restore_weights

        restore_weights(self, Path(folder))

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def mark_drawn(self, names: Collection[str]) -> None:
        """Remembers parameters (and buffers) that no file has given, with the values they were drawn with."""
        self._drawn = {name: value.detach().clone() for name, value in self.state_dict().items() if name in names}

    @torch.no_grad()
    def draw_new_head(self, seed: int) -> None:
        """Draws the weights of a new head again, from a seed and independent of torch's global generator.

        Weights that were trained or set since the model was loaded stay as they are, and so do weights of a file.
        """
        state = self.state_dict()
        if any(not torch.equal(state[name].to(drawn), drawn) for name, drawn in self._drawn.items()):
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            head = self.task.head(self.config).state_dict()
        for name in self._drawn:
            state[name].copy_(head[name.removeprefix("head.")])
        self.mark_drawn(self._drawn.keys())

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer, with the segment ids of the model's family; setting one that gives others stores a copy."""
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        fits = None if tokenizer is None else with_segments(tokenizer, second=second_segment(self.hf_config))
        self._tokenizer: PreTrainedTokenizerBase | None = fits

    def forward(
        self,
        input_ids: Tensor | PackedBatch,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        output_attentions: bool = False,
    ) -> Tensor:
        """Logits of a packed batch, one row for each sequence or row that the head reads; or transformers' call.

        With ``[B, T]`` tensors the logits are shaped as in transformers: ``[B, L]``, or ``[B, T, L]`` with zeros at
        padding (spans: L = 2, start and end).

        Raises:
            ValueError: a mask that is not ``[B, T]``, an input that is too long, an id that has no embedding, or
                ``output_attentions``.
        """
        if isinstance(input_ids, PackedBatch):
            return self.packed_logits(input_ids)
        inputs = padded_inputs(
            self.config,
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            output_attentions=output_attentions,
        )
        logits = self._logits(inputs)
        return inputs.rectangle(logits) if self.head.per_token else logits

    def packed_logits(self, batch: PackedBatch) -> Tensor:
        """The logits of a packed batch, in the parameters' precision even where training wraps ``forward``."""
        return self._logits(batch)

    def _logits(self, inputs: PackedBatch | PaddedInputs) -> Tensor:
        selection = self.head.select(inputs.layout)
        hidden = self.stack(
            inputs.input_ids, inputs.position_ids, inputs.token_type_ids, inputs.layout, selection=selection
        )
        logits: Tensor = self.head(hidden, inputs.layout, self.stack.embeddings.word.weight)
        return logits

    def predict(self, inputs: Inputs, *, logits: bool = False) -> list[PredictionT]:
        """One prediction per row, in row order; a list of one for one row.

        Args:
            inputs: one or several of: a text (``"a fine film"``), a tuple of the texts that a row of the task needs
                (``("a premise", "a hypothesis")``), or a mapping with the task's columns or with those of the training
                data (``{"text": "a fine film"}``).
            logits: give the predictions their ``logits``, in the order of the labels.

        Raises:
            DataError: a row lacks a column or holds something else than its kind.
            UsageError: the model has no tokenizer, or its task gives no logits.
        """
        columns = [column for column in self.task.columns if not column.is_label]
        return cast("list[PredictionT]", list(predict_rows(self, as_rows(inputs, columns), logits=logits)))

    def parameter_depths(self) -> dict[str, int]:
        """Each parameter's place from the input: embeddings 0, layer i (its last use) i + 1, the head one more."""
        last_use = {index: position + 1 for position, index in enumerate(self.stack.layer_order)}
        head = len(self.stack.layer_order) + 1
        depths = {}
        for name, _ in self.named_parameters():
            parts = name.split(".")
            if parts[0] == "head":
                depths[name] = head
            else:
                depths[name] = last_use[int(parts[2])] if parts[1] == "layers" else 0
        return depths
