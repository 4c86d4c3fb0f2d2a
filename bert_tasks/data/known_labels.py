"""Known labels, in the spelling of a model.

The same label is written in several ways: as its id, as ``1`` by one tool and as ``true`` or ``1.0`` by another. This
module owns the spellings that rows may have instead, values that mean "no label", and the problems of labels that a
model does not know.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from bert_tasks.data.cells import HIDDEN_LABELS, label_value
from bert_tasks.data.conll import is_chunk_tag
from bert_tasks.data.issues import CellError, RowIssue, first_few, suggestion
from bert_tasks.data.kinds import ColumnKind, Label, Labels, Tags


class KnownLabels:
    """The labels of a model, which the labels of rows must be.

    Args:
        labels: The labels. Empty if they are not known, so that any label is right.
        names_of_ids: Ids of labels in the files of a format -> the names of the labels.
    """

    def __init__(self, labels: Iterable[str], names_of_ids: Mapping[str, str] = MappingProxyType({})) -> None:
        self.labels = tuple(dict.fromkeys(labels))
        self._names_of_ids = names_of_ids
        # A number that one label alone spells -> the label, such as true for 1 and 2.0 for 2. With the labels "1" and
        # "01" the number 1 stands for neither.
        counts = Counter(map(label_value, self.labels))
        self._by_number: dict[float | None, str] = {}
        for label in self.labels:
            number = label_value(label)
            if number is not None and counts[number] == 1:
                self._by_number[number] = label

    @property
    def may_be_spelled_otherwise(self) -> bool:
        """True if a value of a row may stand for a label that is spelled otherwise, or for no label."""
        return len(self._names_of_ids) > 0 or len(self.labels) > 0

    def spelled(self, kind: ColumnKind, value: Any) -> Any:
        """Returns a value with the known spelling of its labels, or None if its label is hidden.

        pandas and JSON do not preserve the spelling of 1 or true in a file.

        Raises:
            CellError: The format has names for the ids of labels, and the value is neither an id nor a name.
        """
        if isinstance(kind, Labels):
            return [self._spelled_name(name) for name in value]
        if not isinstance(kind, Label):
            return value
        name = self._spelled_name(value)
        if self.labels and name in HIDDEN_LABELS and name not in self.labels:
            return None
        return name

    def _spelled_name(self, name: str) -> str | None:
        """Returns one label in its known spelling, or None for the id -1, which means hidden."""
        names = self._names_of_ids
        if names and name not in names.values():
            if name not in names and name != "-1":
                hint = f"Expected one of {', '.join(names)}, or {', '.join(names.values())}."
                raise CellError("unknown label", hint)
            return names.get(name)
        if name in self.labels:
            return name
        return self._by_number.get(label_value(name), name)

    def unknown(self, kind: ColumnKind, names: Iterable[str], *, is_training: bool = False) -> Iterator[RowIssue]:
        """Yields an issue for each name that is no known label. Its ``value`` is the name.

        Tags may be of types that the labels do not have, except in training rows (``is_training``). Then they are
        counted as errors of a model.
        """
        if not isinstance(kind, Tags):
            for name in names:
                if name not in self.labels:
                    yield _unknown("label", name, self.labels)
        elif is_training:
            known = known_tags(self.labels)
            for name in names:
                if name not in known:
                    yield _unknown("tag", name, known)
        elif all(map(is_chunk_tag, self.labels)):
            for name in dict.fromkeys(names):
                if not is_chunk_tag(name):
                    hint = "Expected O or a tag such as B-TYPE."
                    yield RowIssue(what="unknown tag", hint=hint, value=name, severity="unknown label")


def _unknown(noun: str, name: str, names: Collection[str]) -> RowIssue:
    """Returns the issue of an unknown label, with a suggestion."""
    meant = suggestion(name, names)
    hint = f"Did you mean {meant!r}?"
    if meant is None:
        hint = f"Expected one of {first_few(names, 10)}."
    return RowIssue(what=f"unknown {noun}", hint=hint, value=name, severity="unknown label")


def known_tags(labels: Sequence[str]) -> tuple[str, ...]:
    """Returns the labels, and their types in IOB2, whatever the scheme is."""
    if not all(map(is_chunk_tag, labels)):
        return tuple(labels)
    # The rows are converted to IOB2 before they are compared, whatever letters the labels of the model have.
    types = dict.fromkeys(label.partition("-")[2] for label in labels if "-" in label)
    tags = dict.fromkeys(labels)
    for entity in types:
        tags |= {f"B-{entity}": None, f"I-{entity}": None}
    return tuple(tags)
