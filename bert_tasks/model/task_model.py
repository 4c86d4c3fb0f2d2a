"""``TaskModel``, which trains, saves, loads and runs encoder, head and task.

The forward pass takes a packed batch, or padded tensors as transformers' models do. Prediction reads rows in chunks, so
that memory does not depend on the number of rows.

Shape legend: N tokens, B sequences, T padded length, H hidden, L labels, R tokens that the head reads.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, cast

import torch

from bert_tasks.checkpoints.adapters import adapter_files, no_adapters
from bert_tasks.checkpoints.save import hf_tensors, save_folder
from bert_tasks.checkpoints.stored_tokenizers import config_with_tokenizer, new_tokenizer
from bert_tasks.checkpoints.tokenizers import with_segments
from bert_tasks.data.columns import Column
from bert_tasks.data.reading import index_of
from bert_tasks.data.trained_reading import TrainedReading
from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.families import encoder_config, family_of
from bert_tasks.model.encoder_with_heads import (
    EncoderWithHeads,
    Inputs,
    can_save_adapter,
    hf_names,
)
from bert_tasks.model.loading import load_one_task
from bert_tasks.model.prediction import predict_rows
from bert_tasks.model.pretrained import (
    CheckpointFolder,
    folder_task,
    saved_config,
)
from bert_tasks.outputs.notebook import Predictions
from bert_tasks.outputs.prediction import PredictionT
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.reranking import rank_documents, ranking_task
from bert_tasks.tasks.several import HeadTask
from bert_tasks.tasks.zero_shot import HYPOTHESIS, TextPrediction, zero_shot_task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def task_fields(settings: Mapping[str, Any], labels: Sequence[str] | None) -> Mapping[str, Any]:
    """Returns the fields of a task that a caller passes."""
    if labels is None:
        return settings
    if isinstance(labels, str):  # which the task rejects. A tuple of its characters would pass.
        return {**settings, "labels": labels}
    return {**settings, "labels": tuple(labels)}


class TaskModel(EncoderWithHeads, Generic[PredictionT]):
    """An encoder of any family with the head of one task.

    It is what ``fit`` trains, what the folder of a run holds, and what predicts: open a folder or a checkpoint of the
    Hugging Face Hub with ``from_pretrained``, or start with random weights with ``from_config``. For several tasks
    around one encoder use ``MultiTaskModel``, and for vectors without a task ``Encoder``. As a module of torch it can
    be moved to a device, and a call returns logits as transformers' models do.

    Attributes:
        task (Task): The task with its settings. Training replaces it, because it fits values such as thresholds.
        tokenizer: The tokenizer of the checkpoint, which ``predict`` needs. None if the files have none.
        config, hf_config: The configuration of the encoder, and ``config.json`` as loaded.
        load_report: What became of each key of the file, for example which weights of the head are new. None for a
            model that was built from a configuration.
        origin: The name that the model was loaded by, with the commit of the Hub. None for a model from a
            configuration.
        columns: The task's columns -> their names in the training data, if they differ. They are saved with the model.
            Files and rows may use these names.
        reading: How the file of the training rows was read. It is saved with the model, and applies to files with the
            same extension.
        adapters: The low-rank adapters that the last run trained, whose product is added to the weights already. None
            if it trained none.
        has_assumed_labels (bool): True if nobody has named the labels, so that ``fit`` takes the labels of the training
            rows. Until then the model can neither predict nor be saved.

    Examples:
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
        super().__init__(hf_config, tokenizer=tokenizer)
        length, family, head_kind = self.config.usable_length, family_of(hf_config), task.head_kind
        if task.max_length > length:
            raise UsageError(f"max_length = {task.max_length}, but the checkpoint has {length} positions")
        if head_kind is not None and head_kind not in family.heads:
            problem = f"{task.name}: {family.model_type} models have no head of the kind {head_kind!r}"
            reason = family.unsupported_heads.get(head_kind)
            if reason is not None:
                problem += f", because {reason}"
            raise UsageError(problem)
        self.task = task
        self.head_kind = head_kind
        self.weights = {"": 1.0}
        self.head = task.head(self.config)
        # Weight tying (Press and Wolf 2017, https://arxiv.org/abs/1608.05859): the decoder of a language-modelling head
        # is the table of word embeddings, so a checkpoint with a decoder of its own cannot be represented.
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

        There are two uses. To predict with a model that was trained before, here or with transformers, pass its name
        alone: the task, its settings and labels come from the files, and a missing or damaged weight is an error. To
        fine-tune an encoder, pass ``task`` as well: weights that the files lack are then drawn at random, and
        ``load_report`` lists them. A model takes 4 bytes of memory for each parameter. Loading never runs code from the
        files: a file in the pickle format is read by torch's restricted unpickler.

        Args:
            name: A folder, an id on the Hugging Face Hub such as ``"google-bert/bert-base-uncased"``, or
                ``package:NAME/PATH`` for weights inside an installed package. The folder of a run stands for its best
                model, and a folder of the library peft for the model that it names, with its adapters merged into the
                weights.
            task: A task, or its name or class. Then the head may be new, as ``load_report`` says. Default: the folder's
                task, whose head must be complete. A folder of several tasks has no default, so pass the name of one of
                them, or open all of them with ``MultiTaskModel.from_pretrained``.
            labels: Names of the classes in the order of the logits. If the head of the files has the same labels in
                another order, its weights are reordered. If it has other labels, its last layer is new. Default: the
                folder's labels, and if it has none, ``fit`` takes the labels of the training rows.
            revision: Branch, tag or commit of a hub id. Default: the branch ``main``.
            adapter: A folder of peft whose adapters are added to the weights of ``name``. It also has the task and the
                head.
            settings: Fields of the task, such as ``max_length`` (in tokens). Default: as the folder stores them, else
                as its config.json implies, else the defaults of the task.

        Returns:
            The model on the CPU. Move it with ``model.to("cuda")``.

        Raises:
            CheckpointError: Files are missing or damaged, the family is not supported, or a key does not fit.
            UsageError: A task or setting is unknown, ``labels`` is a text, or the folder has several tasks and none is
                named.

        Examples:
            >>> model = TaskModel.from_pretrained(base, task="sequence-classification", labels=["bad", "good"])
            >>> model.labels
            ('bad', 'good')
            >>> TaskModel.from_pretrained("runs/first").labels  # trained before, so the files name the task
            ('complaint', 'praise')
        """
        fields = task_fields(settings, labels)
        return load_one_task(cls, name, task=task, revision=revision, options=fields, adapter=adapter)

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

        Use it to pre-train a model from scratch, for example on texts of a domain or language that no published model
        covers, or for small models in tests. For fine-tuning use ``from_pretrained``, because a model without
        pre-training needs far more labelled rows.

        Args:
            config: ``family``, and fields of transformers' configuration of that family, such as ``hidden_size``.
                A field that is left out has the default of transformers. ``vocab_size`` and the ids of special tokens
                are the tokenizer's.
            task: A task, or its name or class.
            tokenizer: A folder or a hub id with a tokenizer, or the tokenizer itself.
            labels: Names of the classes in the order of the logits.
            seed: Seed of the weights. Default: 42. The state of torch's global generator is not changed.
            settings: Fields of the task.

        Returns:
            The model on the CPU, in float32.

        Raises:
            CheckpointError: A family or field is unknown, a value does not fit, or there is no such tokenizer.
            UsageError: See ``from_pretrained``.

        Examples:
            >>> small = {"family": "bert", "hidden_size": 64, "num_attention_heads": 4}
            >>> model = TaskModel.from_config(small, task="fill-mask", tokenizer=base)
            >>> model.config.hidden_size
            64
        """
        if isinstance(tokenizer, str | Path):
            tokenizer = new_tokenizer(config, tokenizer)
        hf_config = config_with_tokenizer(config, tokenizer)
        tokenizer = with_segments(tokenizer, second=encoder_config(hf_config).second_segment)
        described = CheckpointFolder(path=Path("config"), hf_config=hf_config)  # a folder without weights
        built, _ = folder_task(described, task, task_fields(settings, labels))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = cls(hf_config, cast("Task[PredictionT]", built), tokenizer=tokenizer)
        return model.eval()

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

    @property
    def head_tasks(self) -> dict[str, HeadTask]:
        return {"": HeadTask(task=self.task, columns=self.columns)}

    def _with_config(self, hf_config: Mapping[str, Any]) -> Self:
        return type(self)(hf_config, self.task, tokenizer=self._tokenizer)

    @property
    def labels(self) -> tuple[str, ...]:
        if self.has_assumed_labels:
            return ()
        return self.task.output.labels

    @property
    def row_columns(self) -> Sequence[Column]:
        return self.task.columns

    def save_adapter(self, folder: str | Path) -> None:
        names, target = hf_names(self), Path(folder)
        if self.adapters is None or self.head_kind is None or self.origin is None or not can_save_adapter(self):
            raise no_adapters(self.task.name)
        state, base_folder = self.state_dict(), Path(self.origin.name).expanduser()
        base = self.origin.name
        if base_folder.is_dir():  # a relative path would depend on the folder in which the adapters are opened
            base = str(base_folder.absolute())
        of_head = {key: names[key] for key in names if key.startswith("head.")}
        config, tensors = adapter_files(
            self.adapters,
            {key.removeprefix("encoder."): name for key, name in names.items()},
            hf_tensors({key: state[key] for key in of_head}, of_head),
            prefix=family_of(self.hf_config).prefix,
            head_kind=self.head_kind,
            base=base,
        )
        save_folder(
            target,
            config=saved_config(self.hf_config, self.head_tasks, self.reading),
            tensors=tensors,
            tokenizer=self._tokenizer,
            adapter_config=config,
        )

    def predict(self, inputs: Inputs, *, logits: bool = False, explain: bool = False) -> Predictions[PredictionT]:
        """Returns one prediction for each row, in row order, as a list.

        Use it for rows in memory. ``bert_tasks.predict`` also reads files, and ``predict_file`` writes the predictions
        of data of any size. Rows are tokenized and run in chunks of about 1,000, and within a chunk texts of similar
        lengths run together without padding, so one call with many rows is much faster than a call for each row. The
        prediction of a row does not depend on the rows around it, except in tasks that read whole documents. The model
        runs where it is: call ``model.to("cuda")`` before to use a GPU. Dropout is off during the call.

        Args:
            inputs: One or several rows, each a text (``"a fine film"``), a tuple of the texts that a row needs
                (``("a premise", "a hypothesis")``), or a mapping with the columns of the task or of the training data.
                Also a pandas DataFrame or Series, whose index ``to_frame`` of the result keeps, or a Dataset. Columns
                of labels and further columns are ignored.
            logits: True to compute the ``logits`` of the predictions, in the order of the labels. Default: False.
            explain: True to compute the ``explanation`` of the predictions, which says how much each word adds
                to the label, number, span or entity. Each takes as long as about 100 predictions. Default: False.

        Returns:
            A list of frozen dataclasses, one for each row, also for a single row. Their class depends on the task: a
            classifier returns ``label`` and ``scores``, for example. ``to_json`` of a prediction returns plain values,
            and ``to_frame`` of the list returns a pandas DataFrame.

        Raises:
            DataError: A row lacks a column or a value is of the wrong kind.
            UsageError: The model has no tokenizer, its labels are not known yet, or its task has no logits or no
                explanations.
            CheckpointError: The logits are not finite numbers.

        Examples:
            >>> predictions = model.predict(["Cold soup.", "Kind staff."])
            >>> len(predictions), list(predictions[0].to_json())
            (2, ['label', 'score', 'scores'])
        """
        predictions = predict_rows(self, inputs, logits=logits, explain=explain)
        return Predictions(predictions, index=index_of(inputs))

    def rank(
        self, query: str, documents: Sequence[str], *, top_k: int | None = None, return_documents: bool = False
    ) -> list[dict[str, Any]]:
        """Returns documents by their relevance to a query, the most relevant first.

        This is reranking with a cross-encoder: the model reads the query and one document together, which is more
        accurate than comparing two vectors of ``Encoder.embed`` and needs a forward pass for each document. It
        therefore suits the best hundred documents of a faster search, not a whole collection.

        The model is one of pairs with one number, or with two labels whose second one means "relevant". Scores of a
        number equal sentence-transformers' ``CrossEncoder.rank``. Scores of two labels are probabilities.

        Args:
            query: The first text of each pair.
            documents: The second texts.
            top_k: Maximum number of documents to return, at least 1. Default: all.
            return_documents: True to return the documents themselves, as ``text``. Default: False.

        Returns:
            For each document a dict with ``corpus_id``, its index in ``documents``, and ``score``. Equal scores keep
            the order of the documents.

        Raises:
            UsageError: The model does not rank, ``documents`` is a text, or ``top_k`` is below 1.

        Examples:
            >>> ranked = reranker.rank("When do you open?", ["We open at ten.", "We sell bicycles."], top_k=1)
            >>> list(ranked[0])
            ['corpus_id', 'score']
        """
        pairs = ranking_task(self.task, documents, top_k)  # before a model that cannot rank has predicted anything
        documents = list(documents)  # a Series would be read by its index
        predictions = self.predict([(query, document) for document in documents])
        ranked = rank_documents(pairs, predictions, self.hf_config)[:top_k]
        if not return_documents:
            return ranked
        return [{**entry, "text": documents[entry["corpus_id"]]} for entry in ranked]

    def zero_shot(
        self, labels: Sequence[str] | str, *, hypothesis: str = HYPOTHESIS, multi_label: bool = False
    ) -> "TaskModel[TextPrediction]":
        """Returns this model of pairs as a classifier of texts with any labels.

        Zero-shot classification needs no labelled rows: a model that was trained on natural language inference decides
        whether the text entails a sentence that names the label (Yin et al. 2019, https://arxiv.org/abs/1909.00161).
        The scores equal those of transformers' pipeline ``zero-shot-classification``. A text is run once for each
        label, so the time grows with the number of labels. If you have some hundred labelled rows, a trained classifier
        is usually better, and faster.

        Args:
            labels: Candidate labels, as a list or separated by commas.
            hypothesis: The sentence that the text entails if a label applies, with ``{}`` for the label. Default:
                ``"This example is {}."``.
            multi_label: True if each label is decided alone, as with a single label. Default: one of the labels
                applies.

        Returns:
            A model that shares the weights of this one and uses no further memory for them.

        Raises:
            CheckpointError: The model does not read pairs, or no label begins with "entail".
            UsageError: A label is empty or repeated, or the hypothesis has no ``{}`` or is too long.

        Examples:
            >>> classifier = nli.zero_shot(["sports", "politics"])
            >>> predictions = classifier.predict("The match ended in a draw.")
            >>> len(predictions)
            1
        """
        task = zero_shot_task(self.task, self.hf_config, labels, hypothesis=hypothesis, multi_label=multi_label)
        task.features((), self.require_tokenizer())  # checks the length of hypotheses
        model = cast("TaskModel[TextPrediction]", copy.copy(self))  # a shallow copy, with the same modules
        names = [column.name for column in task.columns]
        model.task = task
        model.columns = {name: self.columns[name] for name in names if name in self.columns}
        model.reading = TrainedReading()  # the rows have other columns than the training file
        return model
