"""What the classification of texts, of pairs of texts, and by entailment have in common.

Owns how texts become windows, and which output and which head the settings choose.

Shape legend: B sequences (windows), L labels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from bert_tasks.data.cells import label_name
from bert_tasks.data.columns import Column, Row
from bert_tasks.data.profile import ColumnProfile
from bert_tasks.encoder import heads
from bert_tasks.encoder.config import EncoderConfig, HeadKind, Pooling
from bert_tasks.encoder.heads import Head
from bert_tasks.errors import UsageError
from bert_tasks.outputs.base import Output
from bert_tasks.outputs.classes import Classes, ClassPrediction
from bert_tasks.outputs.explanation import TokenSpan
from bert_tasks.outputs.features import Feature
from bert_tasks.outputs.label_set import LabelSet, LabelSetPrediction
from bert_tasks.outputs.number import Number, NumberPrediction
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.windows.texts import EncodedText, token_characters, truncated_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Names of problems that users of ``init`` may write instead of a task -> the kind of the label column.
PROBLEMS: Mapping[str, str] = MappingProxyType(
    {"regression": "number", "multi-label-classification": "labels", "multi-label": "labels"}
)
_PROBLEM_TYPES = {"label": Classes.problem_type, "labels": LabelSet.problem_type, "number": Number.problem_type}

# What a text has: a class, labels or a number, which the output of the task decides.
TextPrediction = ClassPrediction | LabelSetPrediction | NumberPrediction


@dataclass(frozen=True, kw_only=True)
class TextClassification(Task[TextPrediction]):
    """The common settings of the classification of texts and of pairs of texts.

    Attributes:
        texts: The columns of texts that are read together.
        pooling: ``cls`` is the family's own head. ``mean``, ``max`` and ``attention`` read all tokens of the last
            layer.
    """

    outputs: ClassVar[tuple[type[Classes | LabelSet | Number], ...]]
    texts: ClassVar[tuple[str, ...]] = ("text",)
    output: Classes | LabelSet | Number  # type: ignore[assignment]  # each has one of the predictions
    pooling: Pooling = "cls"

    # Settings

    @classmethod
    def output_class(cls, settings: Mapping[str, Any]) -> type[Classes | LabelSet | Number]:
        """Returns the output that has this ``problem_type``, or the first one if none has a problem type.

        Raises:
            ValueError: No output has it.
        """
        outputs = {}
        for output in cls.outputs:
            problem_type = _problem_type(output)
            if problem_type is not None:
                outputs[problem_type] = output
        chosen = settings.get("problem_type", _problem_type(cls.outputs[0]))
        if chosen is None:
            return cls.outputs[0]
        if not isinstance(chosen, str) or chosen not in outputs:
            expected = ", ".join(repr(problem_type) for problem_type in outputs)
            raise ValueError(f"problem_type is {chosen!r}, expected one of {expected}")
        return outputs[chosen]

    @classmethod
    def choice_of(cls, output: type[Output[Any]]) -> str:
        return f"problem_type = {_problem_type(output)!r}"

    @classmethod
    def hf_settings(cls, hf_config: Mapping[str, Any], labels: tuple[str, ...]) -> dict[str, Any]:
        """Sets regression for one label without a problem type, as transformers does."""
        names = labels if labels else ("LABEL_0", "LABEL_1")  # transformers' default is two classes
        if _problem_type(cls.outputs[0]) is None:  # an output of one's own
            return {"labels": names}
        problem_type = hf_config.get("problem_type")
        if problem_type is None:
            problem_type = Classes.problem_type
            if len(names) == 1:
                problem_type = Number.problem_type
        if problem_type == Number.problem_type:
            return {"problem_type": problem_type}
        return {"problem_type": problem_type, "labels": names}

    @classmethod
    def compatible_settings(cls, stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Drops a stored regression if labels are given, because the model is then a classifier.

        See ``TaskSettings.compatible_settings``.
        """
        if given.get("labels") and stored.get("problem_type") == Number.problem_type:
            given = {"problem_type": Classes.problem_type, **given}
        return super().compatible_settings(stored, given)

    # Windows

    @property
    def overlap(self) -> int | None:
        """Number of tokens that a row's windows share. None cuts a row at ``max_length``."""
        return None

    @property
    def columns(self) -> tuple[Column, ...]:
        texts = [Column(name=name, kind="text") for name in self.texts]
        return (*texts, self.output.column)

    def features(self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase") -> list[Feature]:
        """Returns the windows of each row. Only the first has the labels.

        Special tokens written in a text stay plain characters.
        """
        features: list[Feature] = []
        for window in self._windows(self._row_texts(rows), tokenizer):
            is_first = not features or features[-1]["row"] != window.row
            labels: list[float] | None = None
            if is_first:  # the loss is of the mean of the windows, so that a row has its labels once
                labels = self.output.encode(rows[window.row])
            features.append(window.feature(labels=labels))
        return features

    def token_spans(
        self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase"
    ) -> Sequence[Sequence[TokenSpan | None]]:
        texts = self._row_texts(rows)
        windows = self._windows(texts, tokenizer)
        spans = []
        for characters in token_characters(windows, texts, tokenizer):
            of_window: list[TokenSpan | None] = []
            for token in characters:
                if token is None:  # a special token
                    of_window.append(None)
                    continue
                side, start, end = token
                of_window.append(TokenSpan(self.texts[side], start, end))
            spans.append(of_window)
        return spans

    def _row_texts(self, rows: Sequence[Row]) -> list[list[str]]:
        """Returns the texts of rows, column by column."""
        return [[row[name] for row in rows] for name in self.texts]

    def _windows(self, texts: Sequence[Sequence[str]], tokenizer: "PreTrainedTokenizerBase") -> list[EncodedText]:
        """Returns the windows of texts, one for each row."""
        return truncated_texts(texts, tokenizer, max_length=self.max_length)

    # The model

    def head(self, config: EncoderConfig) -> Head:
        if self.output.size == 0:
            raise UsageError(f"{self.name} needs labels, e.g. labels=['negative', 'positive']")
        return heads.SequenceHead(config, self.output.size, pooling=self.pooling)

    @property
    def head_kind(self) -> HeadKind | None:
        if self.pooling != "cls":  # a head of our own, with other parameters
            return None
        return self.output.head_kind

    # For init

    @classmethod
    def implied_settings(cls, profiles: Mapping[str, ColumnProfile], kind: str) -> dict[str, Any]:
        """Returns ``problem_type``, and the labels if a value says that a row has none.

        With these labels, rows with another value have no label.
        """
        settings: dict[str, Any] = {"problem_type": _PROBLEM_TYPES[kind]}
        label = profiles["label"]
        hidden = label.hidden_value
        if kind == "label" and hidden is not None:
            settings["labels"] = sorted(label_name(value) for value, _ in label.common if value != hidden)
        return settings


def _problem_type(output: type[Output[Any]]) -> str | None:
    """Returns the problem type by which users choose an output. None if it has none."""
    setting = output.own_settings().get("problem_type")
    if setting is None:
        return None
    problem_type: str = setting.default
    return problem_type
