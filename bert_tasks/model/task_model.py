"""``TaskModel``, which trains, saves, loads and runs encoder, head and task.

The forward pass takes a packed batch, or padded tensors as transformers' models do. Prediction reads rows in chunks, so
that memory does not depend on the number of rows.

Shape legend: N tokens, B sequences, T padded length, H hidden, L labels, R tokens that the head reads.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, cast

import torch
from torch import Tensor

from bert_tasks.checkpoints.adapters import adapter_files, adapter_folder, no_adapters
from bert_tasks.checkpoints.hub import origin, resolve
from bert_tasks.checkpoints.save import hf_tensors, save_folder
from bert_tasks.checkpoints.stored_tokenizers import config_with_tokenizer, new_tokenizer
from bert_tasks.checkpoints.tokenizers import with_segments
from bert_tasks.data.columns import Column, Columns, Row, first_column, without_labels
from bert_tasks.data.readers import index_of
from bert_tasks.data.splits import Splits
from bert_tasks.data.trained_reading import TrainedReading
from bert_tasks.encoder.heads import Head
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import CheckpointError, NoHeadError, UsageError
from bert_tasks.families import encoder_config, family_of
from bert_tasks.model.encoder_with_heads import EncoderWithHeads, ForwardFn, Inputs
from bert_tasks.model.explanation import check_explainable, explained
from bert_tasks.model.pretrained import (
    CheckpointFolder,
    check_fits,
    folder_task,
    log_unfinished,
    saved_config,
)
from bert_tasks.model.pretrained_module import finite
from bert_tasks.outputs.base import LossTerm
from bert_tasks.outputs.features import Feature
from bert_tasks.outputs.notebook import Predictions
from bert_tasks.outputs.prediction import Prediction, PredictionT
from bert_tasks.tasks.base import FeatureKeys, Task
from bert_tasks.tasks.features import checked_features, collate
from bert_tasks.tasks.reranking import rank_documents, ranking_task
from bert_tasks.tasks.zero_shot import HYPOTHESIS, TextPrediction, zero_shot_task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ASSUMED = ("LABEL_0", "LABEL_1")  # until the labels are known


def _task_fields(settings: Mapping[str, Any], labels: Sequence[str] | None) -> Mapping[str, Any]:
    """Returns the fields of a task that a caller passes."""
    if labels is None:
        return settings
    return {**settings, "labels": labels if isinstance(labels, str) else tuple(labels)}


class TaskModel(EncoderWithHeads, Generic[PredictionT]):
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

    has_assumed_labels: bool = False

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        task: Task[PredictionT],
        *,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
    ) -> None:
        super().__init__(hf_config, tokenizer=tokenizer)
        check_fits(task, hf_config, self.config)
        self.task = task
        self.head_kind = task.head_kind
        self.head = self.new_head()
        is_tied = self.head.reads_embeddings and self.config.output_embedding_size is None
        if is_tied and hf_config.get("tie_word_embeddings") is False:
            raise CheckpointError(
                f"config.json: tie_word_embeddings = false is not supported by {task.name}, because the decoder of its "
                "head is the table of word embeddings"
            )

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
                task, whose head must be complete. A folder of several tasks has no default, so pass the name of one of
                them, or open all of them with ``MultiTaskModel.from_pretrained``.
            labels: Names of the classes in order. A head with the same labels in another order is reordered. Default:
                the folder's labels, else ``fit`` takes the labels of the training rows.
            revision: Branch, tag or commit of a hub id.
            adapter: A folder of peft whose adapters are added to the weights of ``name``. It also has the task and the
                head.
            settings: Fields of the task. Default: as the folder stores them, else as its config.json implies.

        Raises:
            CheckpointError: Files are missing or damaged, the family is not supported, or a key does not fit.
            UsageError: A task or setting is unknown, ``labels`` is a text, or the folder has several tasks and none is
                named.
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
        model.read_folder(folder, origin(name if adapter is None else adapter, folder.path, revision=revision))
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
        needs_labels = classes is not None and built.output.has_labels and not built.output.labels
        has_assumed_labels = needs_labels and not isinstance(task, Task)
        if has_assumed_labels:
            built = built.with_settings(labels=_ASSUMED)
        with torch.device("meta"):
            model = cls(folder.hf_config, cast("Task[PredictionT]", built))
        model.load_folder(folder, head_may_be_new=not is_own)
        model.has_assumed_labels = has_assumed_labels
        return model

    @property
    def heads(self) -> Mapping[str, "TaskModel[PredictionT]"]:
        """This model under the name "", as models of several tasks have a model for each."""
        return {"": self}

    def one_task(self) -> "TaskModel[PredictionT]":
        """Returns this model, where a model of several tasks raises UsageError."""
        return self

    @property
    def tasks(self) -> dict[str, Task]:
        return {"": self.task}

    @tasks.setter
    def tasks(self, tasks: Mapping[str, Task]) -> None:
        self.task = tasks[""]

    def new_head(self) -> Head:
        return self.task.head(self.config)

    def with_config(self, hf_config: Mapping[str, Any]) -> Self:
        return type(self)(hf_config, self.task, tokenizer=self._tokenizer)

    @property
    def task_name(self) -> str:
        return self.task.name

    @property
    def labels(self) -> tuple[str, ...]:
        return () if self.has_assumed_labels else self.task.output.labels

    @property
    def settings(self) -> dict[str, Any]:
        return self.task.settings()

    def saved_config(self) -> dict[str, Any]:
        return saved_config(self.hf_config, self.task, self.columns, self.reading)

    @property
    def row_columns(self) -> Sequence[Column]:
        return self.task.columns

    @property
    def input_columns(self) -> Columns:
        return without_labels(self.task.columns)

    def features(self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase") -> list[Feature]:
        return checked_features(self.task, rows, tokenizer, self.config)

    def prepare(
        self, features: Sequence[Feature], keys: FeatureKeys, corpus: Sequence[Mapping[str, Any]]
    ) -> Sequence[Feature]:
        return self.task.prepare(features, keys, corpus, self.require_tokenizer())

    def collate(self, features: Sequence[Feature], *, position_offset: int, pad_groups: bool) -> PackedBatch:
        return collate(features, position_offset=position_offset, pad_groups=pad_groups)

    def copies(self, feature: Feature, tokenizer: "PreTrainedTokenizerBase") -> Iterable[Feature]:
        return self.task.copies(feature, tokenizer)

    def counts(self, features: Sequence[Feature]) -> dict[str, float]:
        return self.task.output.counts(features)

    def loss(self, logits: Any, batch: PackedBatch) -> tuple[LossTerm, ...]:
        return self.task.output.loss(logits, batch)

    def reduce(self, batch: PackedBatch, logits: Any, features: Sequence[Feature]) -> tuple[Tensor, ...]:
        with torch.inference_mode():
            parts = logits.split(list(batch.layout.gather_counts)) if self.head.per_token else logits.unbind()
            return tuple(tensor.cpu() for tensor in self.task.output.compact(parts, features))

    @property
    def can_save_adapter(self) -> bool:
        has_head = self.task.has_hf_head and not self.head.reads_embeddings
        return has_head and self.origin is not None

    def save_adapter(self, folder: str | Path) -> None:
        names, target = self._hf_names(), Path(folder)
        if self.adapters is None or self.head_kind is None or self.origin is None or not self.can_save_adapter:
            raise no_adapters(self.task.name)
        state, base = self.state_dict(), Path(self.origin.name).expanduser()
        of_head = {key: names[key] for key in names if key.startswith("head.")}
        config, tensors = adapter_files(
            self.adapters,
            {key.removeprefix("encoder."): name for key, name in names.items()},
            hf_tensors({key: state[key] for key in of_head}, of_head),
            prefix=family_of(self.hf_config).prefix,
            head_kind=self.head_kind,
            base=str(base.absolute()) if base.is_dir() else self.origin.name,
        )
        save_folder(
            target, config=self.saved_config(), tensors=tensors, tokenizer=self._tokenizer, adapter_config=config
        )

    def require_labels(self) -> None:
        """Raises UsageError if the labels are not known yet."""
        if self.has_assumed_labels:
            raise UsageError(
                f"{self.task.name} needs labels, e.g. labels=['negative', 'positive']. Pass them to from_pretrained, "
                "or call fit, which takes the labels of the training rows"
            )

    def read_labels(self, splits: Splits, *, unlabelled: bool) -> None:
        task = self.task.with_settings(labels=self.labels)  # without labels that were assumed
        labelled = task.with_labels_of(splits, labels=task.output.labels, unlabelled=unlabelled)
        if self.has_assumed_labels:
            self.set_labels(labelled.output.labels)

    def set_labels(self, labels: Sequence[str]) -> None:
        """Replaces assumed labels, and the part of the head that depends on them."""
        before = {name: value for name, value in self.head.state_dict().items() if f"head.{name}" not in self._drawn}
        self.task = self.task.with_settings(labels=tuple(labels))
        self.head = self.task.head(self.config).to(self.device)
        self.head.load_state_dict(before, strict=False)
        new = {name: value for name, value in self.head.state_dict().items() if name not in before}
        self._drawn = {f"head.{name}": value.clone() for name, value in new.items()}
        self.has_assumed_labels = False

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
        predictions = self.predict([(query, document) for document in documents])
        ranked = rank_documents(pairs, predictions, self.hf_config)[:top_k]
        return [{**entry, "text": documents[entry["corpus_id"]]} if return_documents else entry for entry in ranked]

    def zero_shot(
        self, labels: Sequence[str] | str, *, hypothesis: str = HYPOTHESIS, multi_label: bool = False
    ) -> "TaskModel[TextPrediction]":
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
        task = zero_shot_task(self.task, self.hf_config, labels, hypothesis=hypothesis, multi_label=multi_label)
        task.features((), self.require_tokenizer())  # checks the length of hypotheses
        model = cast("TaskModel[TextPrediction]", copy.copy(self))
        names = [column.name for column in task.columns]
        model.task, model.columns = task, {name: self.columns[name] for name in names if name in self.columns}
        model.reading = TrainedReading()  # the rows have other columns than the training file
        return model

    def predict_by_head(
        self, rows: Sequence[Row], *, forward_fn: ForwardFn | None = None, logits: bool = False, explain: bool = False
    ) -> tuple[dict[str, list[Prediction | None]], Sequence[Feature]]:
        self.require_labels()
        tokenizer, task = self.require_tokenizer(), self.task
        if explain:
            check_explainable(self, task)
        for row in rows:
            task.check_rows([row])
        features = self.features(rows, tokenizer)
        compact = self.forward_windows(
            features,
            forward_fn=lambda batch: finite(self.packed_logits(batch) if forward_fn is None else forward_fn(batch)),
        )
        predictions = task.output.decode(compact, features, rows, tokenizer)
        if logits and predictions:
            predictions = task.output.with_logits(predictions, compact, features)
        if explain:
            explained_logits = task.output.explained_logits(predictions, compact, features, rows, task.texts)
            spans = task.token_spans(rows, tokenizer)
            explanations = explained(self, self.head, explained_logits, features, spans)
            predictions = task.output.with_explanations(predictions, explanations)
        return {"": [*predictions]}, features
