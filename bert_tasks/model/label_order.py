"""Brings the outputs of a checkpoint's head into the order of a task's labels."""

import re
from collections.abc import Mapping
from dataclasses import replace

import torch

from bert_tasks.checkpoints.load import CheckpointMatch
from bert_tasks.encoder.heads import reordered
from bert_tasks.outputs.hf_config import label_places

_UNNAMED = re.compile(r"LABEL_\d+")  # transformers' name of a class that nobody has named


def with_label_order(
    matched: CheckpointMatch,
    file_labels: tuple[str, ...],
    labels: tuple[str, ...],
    label_dims: Mapping[str, tuple[int, ...]],
    names: Mapping[str, tuple[str, ...]],
) -> CheckpointMatch:
    """Reorders the tensors of a folder's head from ``file_labels`` to ``labels``.

    ``label_dims`` is that attribute of the head. ``names`` are transformers' names of parameters for the report.
    """
    tensors, report = matched.tensors, matched.report
    dims = {
        key: dim
        for key, dim in ((f"head.{name}", dim) for name, dim in label_dims.items())
        # An own head may have outputs that are no labels.
        if key in tensors and tensors[key].size(dim[-1]) == len(labels)
    }
    if not file_labels:  # transformers leaves the default names of two classes out of the file
        file_labels = tuple(f"LABEL_{index}" for index in range(len(labels)))
    if not dims or not labels or file_labels == labels:
        return matched
    named = file_labels
    if label_places(file_labels, labels) is None:  # unnamed labels (LABEL_1) are the ones that are left, in order
        named_labels = {label.casefold() for label in file_labels if not _UNNAMED.fullmatch(label)}
        left = iter([label for label in labels if label.casefold() not in named_labels])
        named = tuple(next(left, label) if _UNNAMED.fullmatch(label) else label for label in file_labels)
    places = label_places(named, labels)
    if places is None:
        redrawn = [name for key in dims for name in names.get(key, (key,))]
        note = f"the file's head has other labels ({', '.join(file_labels)}), so its last layer is new"
        loaded = tuple(name for name in report.loaded if name not in redrawn)
        report = replace(report, loaded=loaded, new=(*report.new, *redrawn), notes=(*report.notes, note))
        return CheckpointMatch(tensors={key: value for key, value in tensors.items() if key not in dims}, report=report)
    notes = []
    if named != file_labels:
        pairs = [(old, new) for old, new in zip(file_labels, named, strict=True) if old != new]
        unnamed, taken = (", ".join(group) for group in zip(*pairs, strict=True))
        notes.append(f"the file's labels are unnamed ({unnamed}) and taken in the order {taken}")
    if places != sorted(places):
        notes.append(f"head reordered from labels {', '.join(named)} to {', '.join(labels)}")
    moved = {key: reordered(tensors[key], torch.tensor(places), dims[key]) for key in dims}
    return CheckpointMatch(tensors=tensors | moved, report=replace(report, notes=(*report.notes, *notes)))
