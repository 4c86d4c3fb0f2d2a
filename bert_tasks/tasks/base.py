"""The contract of tasks: from rows to logits.

Owns the class that a task derives from. Its settings are in tasks/settings.py.

Shape legend: N tokens, B sequences (windows), H hidden, L labels.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Self

import numpy as np

from bert_tasks.data.checks import check_splits
from bert_tasks.data.columns import Column, Row
from bert_tasks.data.features import Truncation
from bert_tasks.data.kinds import Text
from bert_tasks.data.profile import ColumnProfile
from bert_tasks.data.rows import Rows
from bert_tasks.data.splits import Splits
from bert_tasks.encoder.config import EncoderConfig, HeadKind
from bert_tasks.encoder.heads import Head
from bert_tasks.outputs.explanation import TokenSpans
from bert_tasks.outputs.features import Feature
from bert_tasks.outputs.prediction import PredictionT
from bert_tasks.outputs.settings import require
from bert_tasks.tasks.settings import TaskSettings
from bert_tasks.tasks.suggestions import Suggestion, suggested_length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_CHARACTERS = 10_000_000  # of the repeated texts of a row or a request, see ``Task.check_rows``
# The texts of ``example_rows``. They say little about each other, so that most tasks can predict something for them.
TEXTS = (
    "The room was clean and the staff were kind.",
    "We waited an hour and the soup was cold.",
    "The train leaves at nine from platform two.",
)


@dataclass(frozen=True, kw_only=True)
class FeatureKeys:
    """Sources of random numbers for ``Task.prepare``, one for each feature.

    They do not depend on batch, process and order of steps, so a run on two processes, or a resumed run, masks the same
    tokens as an uninterrupted run on one.

    Attributes:
        seed: The seed of the run.
        epoch: The epoch, from 0. Evaluation uses the same one each time.
        numbers: The number of each feature among all features of its split. In evaluation, a hash of its tokens.
        is_evaluation: True if the features are evaluated. They must look alike in every corpus, so count nothing over
            it.

    Examples:
        >>> keys = FeatureKeys(seed=1, epoch=0, numbers=[7, 8])
        >>> keys.generator(1).random() == FeatureKeys(seed=1, epoch=0, numbers=[8]).generator(0).random()
        True
    """

    seed: int
    epoch: int
    numbers: Sequence[int]
    is_evaluation: bool = False

    def generator(self, i: int) -> np.random.Generator:
        """Returns a generator seeded by seed, epoch and number of the ``i``-th feature.

        Each call returns a new generator at its beginning, so call it once for each feature.

        Args:
            i: The position of the feature among the features that ``Task.prepare`` got, from 0.
        """
        return np.random.default_rng((self.seed, self.epoch, self.numbers[i]))


@dataclass(frozen=True, kw_only=True)
class Task(TaskSettings[PredictionT], Generic[PredictionT]):
    """The base class of tasks, from rows to features and logits. Its output says what the logits mean.

    A subclass is a frozen dataclass with ``name``, ``outputs`` and ``output`` (``TaskSettings``) and the abstract
    members. Its fields are the settings of reading. A recipe may set them, and the settings of the output, under
    ``[settings]``, and ``config.json`` stores them, so they hold plain values. There is one instance for each model.

    Attributes:
        max_length: Maximum length of a window in tokens, including special tokens.
        sample: The unit of one joint loss and of ``batch_size``. It is a row with all of its windows, each window, or a
            group of rows with one window each.
        rejected_columns: Columns that a request to the server must not hold -> the reason.
        row_shapes: The columns by which ``init`` recognises rows of the task, the label last. Several shapes are
            alternatives. Empty if ``init`` writes no recipes for the task.
        row_needs: The rows of ``row_shapes``, in words.
        usual_names: Columns -> names that people give to them, in lower case.
        problems: Names that users of ``init`` may write instead of the task's -> the kind of its label column.
        has_dense_labels: True if a row trains many of its tokens. ``init`` then suggests a higher learning rate and,
            for many rows, fewer epochs.

    Examples:
        >>> task = SequenceClassification.of(labels=("complaint", "praise"))
        >>> task.features([{"text": "Cold soup."}], tokenizer)[0]["token_type_ids"]
        [0, 0, 0, 0, 0]
    """

    rejected_columns: ClassVar[Mapping[str, str]] = MappingProxyType({})
    row_shapes: ClassVar[tuple[tuple[str, ...], ...]] = ()
    row_needs: ClassVar[str] = ""
    usual_names: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})
    problems: ClassVar[Mapping[str, str]] = MappingProxyType({})
    has_dense_labels: ClassVar[bool] = False
    max_length: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.max_length >= 3,
            f"max_length is {self.max_length}, expected at least 3 (two special tokens and one more)",
        )

    # Rows

    @property
    @abstractmethod
    def columns(self) -> tuple[Column, ...]:
        """The columns of a row, including its labels. Recipes may map them to other names."""

    @property
    def texts(self) -> tuple[str, ...]:
        """The columns of the texts that the model reads."""
        return tuple(column.name for column in self.columns if isinstance(column.type, Text))

    @property
    def sample(self) -> Literal["row", "window", "group"]:
        """See the attributes of the class."""
        return "row"

    def groups(self, rows: Rows) -> Sequence[Any]:
        """Returns the group of each row. It is called if a sample is a group.

        Rows of the same group come into the same batch, wherever they are in the file.
        """
        raise NotImplementedError

    def with_labels_of(self, splits: Splits, *, labels: Sequence[str] = (), unlabelled: bool = False) -> Self:
        """Returns the task with its labels, after the checks of ``check_splits``, which has these arguments.

        Raises:
            DataError: The splits cannot be trained with.
            ValueError: The labels do not fit the settings.
        """
        names = check_splits(splits, columns=self.columns, labels=labels, unlabelled=unlabelled)
        if not names:
            return self
        return self.with_settings(labels=names)

    def fit_rows(self, rows: Iterable[Row]) -> Self:
        """Returns the task with an output that is fitted to the training rows (``Output.fit_rows``)."""
        return replace(self, output=self.output.fit_rows(rows))

    def check_split(self, rows: Rows, source: str) -> None:
        """Checks what only all rows of a split can tell, before a run begins.

        Args:
            rows: The training set or a validation set.
            source: The name of the set in messages.

        Raises:
            DataError: The task cannot be trained or evaluated with these rows.
        """

    def check_rows(self, rows: Sequence[Row]) -> None:
        """Checks a row, or the rows of a request, before they are predicted. Default: all rows are accepted.

        A task that repeats a text for each part of its row overrides this method, because the length of the repeated
        texts grows with the square of the row.

        Raises:
            DataError: The repeated texts have more than ``MOST_CHARACTERS``.
        """

    # Windows

    @abstractmethod
    def features(self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase") -> list[Feature]:
        """Returns the windows of rows. They are cached, so they must not depend on chance.

        Args:
            rows: Rows in canonical form. Labels may be missing.
            tokenizer: The tokenizer of the model.

        Returns:
            At least one feature for each row, in row order. ``row`` counts from 0 within ``rows``. If each window is a
            sample, a window may hold several rows and belongs to the first of them.

        Raises:
            DataError: The task cannot read a row.
        """

    def prepare(
        self,
        features: Sequence[Feature],
        keys: FeatureKeys,
        corpus: Sequence[Mapping[str, Any]],
        tokenizer: "PreTrainedTokenizerBase",
    ) -> Sequence[Feature]:
        """Returns the features as a step of training or labelled evaluation sees them. Default: unchanged.

        A task that masks tokens or draws random partners overrides this method.

        Args:
            features: Features of ``features``. The windows of a row are neighbours.
            keys: A source of random numbers for each feature.
            corpus: All features of the split. In evaluation, only their content decides their order.
            tokenizer: The tokenizer of the model, for the ids of special tokens.

        Returns:
            As many features in the same order, each with at most ``max_length`` tokens.
        """
        return features

    def copies(self, feature: Feature, tokenizer: "PreTrainedTokenizerBase") -> Iterable[Feature]:
        """Returns what the model reads to predict for a feature. ``Output.decode`` sees their results together.

        Default: the feature. A task whose model reads a feature several times overrides this method.
        """
        return (feature,)

    @property
    def needs_document(self) -> bool:
        """True if the features of a row depend on the rows around it, so that all rows come in one call."""
        return False

    @property
    def windows_per_row(self) -> int:
        """The number of windows of a short row. Chunks of prediction have fewer rows if it is larger."""
        return 1

    @property
    def libraries(self) -> tuple[str, ...]:
        """Libraries whose versions decide what the features are. The key of the cache contains them."""
        return ()

    def cut_notes(self, cuts: Truncation) -> tuple[str, ...]:
        """Returns sentences about rows that no window holds completely. Default: a sentence about ``max_length``."""
        if not cuts.cut_rows:
            return ()
        limit = f"max_length = {self.max_length} tokens"
        return (f"{cuts.share(cuts.cut_rows)} rows are longer than {limit} and were truncated",)

    def token_spans(self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase") -> TokenSpans:
        """Returns what each token of each feature stands for, in the order of ``features``, for explanations."""
        raise NotImplementedError

    # The model

    @abstractmethod
    def head(self, config: EncoderConfig) -> Head:
        """Returns a new head. Its constructor draws its weights from torch's global generator.

        Args:
            config: The configuration of the encoder, with its width (``hidden_size``).

        Raises:
            UsageError: The settings of the task do not say how many logits the head has, or the model cannot have it.
        """

    @property
    def head_kind(self) -> HeadKind | None:
        """The head of transformers that has the parameters of this head. None if there is none."""
        return self.output.head_kind

    @property
    def has_hf_head(self) -> bool:
        """True if transformers computes the same logits from a saved folder."""
        return self.head_kind is not None and self.output.has_hf_head

    @classmethod
    def hf_settings(cls, hf_config: Mapping[str, Any], labels: tuple[str, ...]) -> dict[str, Any]:
        """Returns the settings that a config of transformers implies, besides lengths.

        Args:
            hf_config: The config.
            labels: The labels of its id2label. Empty if it has none.
        """
        if not cls.outputs[0].has_labels:
            return {}
        return {"labels": labels}

    @classmethod
    def limited(cls, usable_length: int) -> dict[str, int]:
        """Returns the default lengths, made smaller for a model that can read this number of tokens."""
        return {"max_length": min(cls.max_length, usable_length)}

    def generator(self) -> "tuple[Task[Any], float] | None":
        """Returns the task of a smaller model that makes the inputs of training, and its width as a fraction."""
        return None

    # For readers of a card, visitors of the server, and init

    @property
    def example_rows(self) -> Sequence[Row]:
        """Three rows without labels, in plain English."""
        columns = [column for column in self.columns if column.required]
        return [{column.name: column.type.parse(text) for column in columns} for text in TEXTS]

    def pipeline_inputs(self, row: Row) -> Sequence[Any]:
        """Returns the arguments of a tokenizer of transformers for a row, which are texts or lists of texts."""
        return [row[column.name] for column in self.columns if column.required]

    @property
    def limits(self) -> tuple[str, ...]:
        """Sentences about what these settings do not read, in addition to ``max_length``."""
        return ()

    @classmethod
    def implied_settings(cls, profiles: Mapping[str, ColumnProfile], kind: str) -> dict[str, Any]:
        """Returns the settings that the columns of a file imply, for the recipe that ``init`` writes.

        Args:
            profiles: The columns of a row shape -> the profiles of the columns of the file.
            kind: The kind of the label column.
        """
        return {}

    @classmethod
    def suggested(cls, words: int, longest: int) -> list[Suggestion]:
        """Returns the lengths with which ``init`` starts a recipe.

        Args:
            words: Number of words and punctuation marks that 95 of 100 rows have at most.
            longest: Maximum number of tokens that the model reads.
        """
        comment = f"tokens, because 95 of 100 rows have at most {words} words and marks"
        return [Suggestion("max_length", suggested_length(words, longest), comment)]


def is_dynamic(task: Task[Any]) -> bool:
    """Returns True if ``prepare`` is overridden, so that steps may see other tokens."""
    # Functions of classes are compared, because bound methods of two objects always differ.
    return type(task).prepare is not Task.prepare
