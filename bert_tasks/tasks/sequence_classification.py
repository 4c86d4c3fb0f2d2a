"""Sequence classification with a class, several labels, or a number for a text.

Owns how texts become windows. A text longer than ``max_length`` is truncated, or read in overlapping windows whose
logits the output averages before the loss and before the prediction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal

from bert_tasks.outputs.classes import Classes
from bert_tasks.outputs.label_set import LabelSet
from bert_tasks.outputs.number import Number
from bert_tasks.outputs.settings import require
from bert_tasks.tasks.suggestions import Suggestion, needed_tokens
from bert_tasks.tasks.text_classification import PROBLEMS, TextClassification
from bert_tasks.tasks.windows.texts import EncodedText, text_windows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class SequenceClassification(TextClassification):
    """Texts with one label, several labels or a number.

    It suits topics, intents, sentiments and ratings. ``problem_type`` chooses between a single label, several labels
    and a number (see ``Classes``, ``LabelSet`` and ``Number``). The time for a text grows with its length up to
    ``max_length``, and with windows up to its whole length.

    Attributes:
        long_texts: ``truncate`` shortens texts to ``max_length`` tokens, and ``windows`` reads everything, as the mean
            of the logits of several windows.
        doc_stride: The OVERLAP of two neighbouring windows in tokens, as in transformers.

    Examples:
        >>> model = TaskModel.from_pretrained(base, task=SequenceClassification, labels=["complaint", "praise"])
        >>> model.predict("Cold soup.")[0].score
    """

    name: ClassVar[str] = "sequence-classification"
    outputs = (Classes, LabelSet, Number)
    row_shapes: ClassVar[tuple[tuple[str, ...], ...]] = (("text", "label"),)
    row_needs: ClassVar[str] = "a text and a label or number"
    usual_names: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {"text": ("text", "sentence", "review", "comment", "tweet", "message", "content", "body", "document")}
    )
    problems: ClassVar[Mapping[str, str]] = PROBLEMS
    # A folder of transformers does not say how many texts its classifier reads.
    rejected_columns: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "text_pair": "text_pair is not read, because the model is served as a model of single texts. If it "
            "reads pairs, its operator starts it with --task pair-classification"
        }
    )
    long_texts: Literal["truncate", "windows"] = "truncate"
    doc_stride: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.overlap is None or 0 <= self.overlap < self.max_length - 2,
            f"doc_stride is {self.doc_stride}, but windows of {self.max_length} tokens (two of them special) "
            f"can overlap by 0 to {self.max_length - 3}",
        )

    @property
    def overlap(self) -> int | None:
        if self.long_texts == "truncate":
            return None
        return self.doc_stride

    def _windows(self, texts: Sequence[Sequence[str]], tokenizer: "PreTrainedTokenizerBase") -> list[EncodedText]:
        """Returns the windows of texts. Without an overlap there is one for each row."""
        if self.overlap is None:
            return super()._windows(texts, tokenizer)
        return text_windows(texts[0], tokenizer, max_length=self.max_length, overlap=self.overlap)

    @property
    def limits(self) -> tuple[str, ...]:
        if self.long_texts == "windows":
            return ()
        return ("Longer texts are truncated, not read in windows.",)

    @classmethod
    def suggested(cls, words: int, longest: int) -> list[Suggestion]:
        suggestions = super().suggested(words, longest)
        if needed_tokens(words) > longest:
            comment = "reads all of a long text, which is otherwise truncated"
            suggestions.append(Suggestion("long_texts", "windows", comment, is_active=False))
        return suggestions
