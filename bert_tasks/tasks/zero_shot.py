"""Zero-shot classification by entailment, without training for the labels.

A model says if a text entails another. Each label becomes a hypothesis, and the model reads the text with every
hypothesis (Yin, Hay and Roth, arXiv:1909.00161). Scores equal the scores of transformers' pipeline
``zero-shot-classification``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from bert_tasks.data.cells import parse_text
from bert_tasks.data.columns import Row
from bert_tasks.data.issues import CellError, first_few
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.heads import Head
from bert_tasks.errors import CheckpointError, UsageError, argument
from bert_tasks.families import CONFIG_KEY
from bert_tasks.outputs.entailment import EntailedClasses, EntailedLabels
from bert_tasks.outputs.features import Feature
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.pair_classification import PairClassification
from bert_tasks.tasks.sequence_classification import SequenceClassification
from bert_tasks.tasks.text_classification import TextClassification
from bert_tasks.tasks.text_classification import TextPrediction as TextPrediction
from bert_tasks.tasks.windows.texts import truncated_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HYPOTHESIS = "This example is {}."  # the default of transformers' pipeline


@dataclass(frozen=True, kw_only=True)
class ZeroShotClassification(TextClassification):
    """Settings of classification by entailment.

    The probability of a label is a softmax of logits of its hypothesis. For one label, it runs over the entailment
    logits of all labels. For several labels, or a single candidate, it runs over entailment and contradiction.

    Attributes:
        hypothesis: The second text of a pair, with ``{}`` for the label.
    """

    name: ClassVar[str] = "zero-shot-classification"
    outputs = (EntailedClasses, EntailedLabels)
    rejected_columns: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"text_pair": "a text with labels has no second text. Remove text_pair"}
    )
    hypothesis: str

    @property
    def windows_per_row(self) -> int:
        return len(self.output.labels)

    def features(self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase") -> list[Feature]:
        """Returns one window for each label. Only the text is truncated, as in the pipeline.

        Raises:
            UsageError: A hypothesis leaves no token for the text.
        """
        hypotheses = [self.hypothesis.replace("{}", label) for label in self.output.labels]
        # Each hypothesis beside an empty text shows how much room it leaves.
        without_text = [""] * len(hypotheses)
        alone = truncated_texts([without_text, hypotheses], tokenizer, max_length=self.max_length)
        longest = max(len(pair.input_ids) for pair in alone)
        if longest >= self.max_length:
            message = f"with a label it leaves no room for the text in max_length = {self.max_length} tokens"
            raise UsageError(f"{argument('hypothesis', None)}: {message}")
        if not rows:
            return []
        texts: list[str] = []
        for row in rows:
            texts += [row["text"]] * len(hypotheses)
        pairs = [texts, hypotheses * len(rows)]
        features = []
        for pair in truncated_texts(pairs, tokenizer, max_length=self.max_length, strategy="only_first"):
            number, label = divmod(pair.row, len(hypotheses))
            labels: list[float] | None = None
            if label == 0:  # the first window of a row has its label
                labels = self.output.encode(rows[number])
            features.append(pair.feature(row=number, labels=labels))
        return features

    def head(self, config: EncoderConfig) -> Head:
        raise UsageError("a model with labels that it was not trained for is neither trained nor saved")


def zero_shot_task(
    task: Task,
    hf_config: Mapping[str, Any],
    labels: Sequence[str] | str,
    *,
    hypothesis: str = HYPOTHESIS,
    multi_label: bool = False,
) -> ZeroShotClassification:
    """Returns the task that predicts other labels with a model of pairs.

    Args:
        task: The task of the model.
        hf_config: Its config.json. A folder of transformers does not say how many texts its classifier reads.
        labels: The candidates, as a list or separated by commas.
        hypothesis: A sentence with ``{}`` for the label.
        multi_label: True if each label is decided alone.

    Raises:
        CheckpointError: The model does not read pairs, or has no label of entailment.
        UsageError: The labels or the hypothesis cannot be used, or the text would be read in windows.
    """
    option = argument("labels", None)
    classes: tuple[type[TextClassification], ...] = PairClassification, SequenceClassification
    if CONFIG_KEY in hf_config:
        classes = (PairClassification,)
    if not isinstance(task, classes):
        raise CheckpointError(f"{option}: the model must be one of {PairClassification.name}, not of {task.name}")
    entailment = _entailment(task.output.labels)
    if entailment is None:
        known_labels = "It has no labels"
        if task.output.labels:
            known_labels = f"Its labels are {first_few(task.output.labels, 5)}"
        raise CheckpointError(f"{option}: the model needs a label that begins with 'entail'. {known_labels}")
    if task.overlap is not None:
        raise UsageError(f"{option}: texts are not read in windows. Set long_texts = 'truncate'")
    try:
        names = _label_names(labels)
        option = argument("hypothesis", None)
        if parse_text(hypothesis).count("{}") != 1:
            raise CellError("it needs {} for the label, once", f"Write it as {HYPOTHESIS!r}.")
    except CellError as error:
        raise UsageError(f"{option}: {error}") from None
    is_single = len(names) > 1 and not multi_label  # a softmax over a single label would always be 1
    output_class: type[EntailedClasses | EntailedLabels] = EntailedClasses if is_single else EntailedLabels
    return ZeroShotClassification(
        output=output_class(labels=names, entailment=entailment),
        max_length=task.max_length,
        pooling=task.pooling,
        hypothesis=hypothesis,
    )


def _entailment(labels: Sequence[str]) -> int | None:
    """Returns the index of the label of entailment, or None."""
    for index, label in enumerate(labels):
        if label.lower().startswith("entail"):  # as transformers' pipeline finds it
            return index
    return None


def _label_names(labels: Sequence[str] | str) -> tuple[str, ...]:
    """Returns the labels, or raises CellError without them if they cannot be used."""
    if isinstance(labels, str):
        labels = [label.strip() for label in labels.split(",") if label.strip()]
    labels = list(labels)
    if not labels:
        raise CellError("there are no labels", "Write them as 'sports,politics'.")
    if not all(parse_text(label).strip() for label in labels):
        raise CellError("a label is empty", "Write them as 'sports,politics'.")
    for number, label in enumerate(labels):
        first = labels.index(label)
        if first < number:
            raise CellError(f"labels {first + 1} and {number + 1} are equal", "Write each label once.")
    return tuple(labels)
