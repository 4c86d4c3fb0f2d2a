"""The head, the labels and implied settings of a task in transformers' config."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from bert_tasks.encoder.config import HeadKind
from bert_tasks.tasks.base import Part

# For people, about a saved model whose head transformers lacks.
NO_HF_HEAD = (
    "transformers lacks this model's head. Use the folder with bert_tasks. Pipelines of transformers end in an error "
    "or return other predictions, with LABEL_0, LABEL_1, ... instead of the labels."
)


class HFConfig(Part):
    """The bridge between a task and a config of transformers.

    Attributes:
        default_head: The head of transformers that models of this task have. None if transformers has none. A folder of
            transformers is read as the first task with its head.
        has_labels: True if the outputs of the head are the labels of the task.

    Example:
        >>> HFConfig.of(task).entries["label2id"]
        {'complaint': 0, 'praise': 1}
    """

    default_head: ClassVar[HeadKind | None] = None
    has_labels: ClassVar[bool] = True

    @property
    def head(self) -> HeadKind | None:
        """The head of transformers that has the parameters of this head. None if there is none."""
        return self.default_head

    @property
    def has_head(self) -> bool:
        """True if transformers computes the same logits from a saved folder.

        Otherwise the folder holds the labels under our key only, so that transformers does not print them beside the
        scores of a head that it draws at random.
        """
        return self.head is not None

    @property
    def entries(self) -> dict[str, Any]:
        """The entries id2label, label2id and problem_type of transformers' config."""
        if self.has_labels:
            return label_config(self.task.labels)
        return {**label_config(("LABEL_0", "LABEL_1")), "problem_type": None}  # transformers' names of two outputs

    def implied_fields(
        self, hf_config: Mapping[str, Any], labels: tuple[str, ...], usable_length: int
    ) -> dict[str, Any]:
        """Returns the settings that a config of transformers implies.

        Args:
            hf_config: The config.
            labels: The labels of its id2label. Empty if it has none.
            usable_length: Number of tokens that the model can read.
        """
        length = {"max_length": min(self.task.max_length, usable_length)}
        return {"labels": labels, **length} if self.has_labels else length

    def compatible_fields(self, stored: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the known fields that remain valid beside the given fields. Default: all that are not given."""
        return {name: value for name, value in stored.items() if name not in options}


def label_config(labels: Sequence[str]) -> dict[str, Any]:
    """Returns the names of the outputs as transformers' config has them.

    Example:
        >>> label_config(("no", "yes"))["id2label"]
        {'0': 'no', '1': 'yes'}
    """
    return {
        "id2label": {str(index): label for index, label in enumerate(labels)},
        "label2id": {label: index for index, label in enumerate(labels)},
    }


def label_places(file_labels: Sequence[str], labels: Sequence[str]) -> list[int] | None:
    """Returns the index of each label in a file's labels, ignoring case, or None."""
    for names, targets in ((file_labels, labels), ([*map(str.casefold, file_labels)], [*map(str.casefold, labels)])):
        if sorted(names) == sorted(targets) and len(set(names)) == len(names):
            return [names.index(label) for label in targets]
    return None
