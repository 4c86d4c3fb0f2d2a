"""The names of a head's outputs: in a config of transformers, and beside those of another file."""

from collections.abc import Sequence
from typing import Any


def label_config(labels: Sequence[str]) -> dict[str, Any]:
    """The names of the outputs as transformers' config has them."""
    return {
        "id2label": {str(index): label for index, label in enumerate(labels)},
        "label2id": {label: index for index, label in enumerate(labels)},
    }


def unnamed_outputs() -> dict[str, Any]:
    """The config of two outputs without labels: transformers' default names, not those of a fine-tuned model."""
    return {**label_config(("LABEL_0", "LABEL_1")), "problem_type": None}


def label_places(file_labels: Sequence[str], labels: Sequence[str]) -> list[int] | None:
    """The index of each label among those of a file, regardless of case if need be; None if they are not the same."""
    for known, wanted in ((file_labels, labels), ([*map(str.casefold, file_labels)], [*map(str.casefold, labels)])):
        if sorted(known) == sorted(wanted) and len(set(known)) == len(known):
            return [known.index(label) for label in wanted]
    return None
