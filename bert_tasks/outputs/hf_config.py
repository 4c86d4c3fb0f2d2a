"""Names of the outputs of a head in transformers' config."""

from collections.abc import Sequence
from typing import Any

# For people, about a saved model whose head transformers lacks.
NO_HF_HEAD = (
    "transformers lacks this model's head. Use the folder with bert_tasks. Pipelines of transformers end in an error "
    "or return other predictions, with LABEL_0, LABEL_1, ... instead of the labels."
)


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
