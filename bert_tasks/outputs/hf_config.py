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

    An output calls it in ``hf_config``, so that a saved folder shows the same labels in transformers and on the Hugging
    Face Hub (https://huggingface.co/docs/transformers/main_classes/configuration).

    Args:
        labels: The names, in the order of the logits.

    Returns:
        ``id2label`` and ``label2id``. The keys of ``id2label`` are texts, because JSON has no other keys.

    Examples:
        >>> label_config(("no", "yes"))["id2label"]
        {'0': 'no', '1': 'yes'}
    """
    id2label: dict[str, str] = {}
    label2id: dict[str, int] = {}
    for index, label in enumerate(labels):
        id2label[str(index)] = label
        label2id[label] = index
    return {"id2label": id2label, "label2id": label2id}


def label_places(file_labels: Sequence[str], labels: Sequence[str]) -> list[int] | None:
    """Returns the index of each label in a file's labels, ignoring case, or None."""
    # As they are first, because labels may differ in nothing but case.
    as_written = (list(file_labels), list(labels))
    without_case = ([label.casefold() for label in file_labels], [label.casefold() for label in labels])
    for names, targets in (as_written, without_case):
        has_repeated = len(set(names)) < len(names)
        if sorted(names) == sorted(targets) and not has_repeated:
            return [names.index(label) for label in targets]
    return None
