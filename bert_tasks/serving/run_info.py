"""What the run of a served model has recorded of its training, for ``/model`` and for the page to try the model."""

import math
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

from bert_tasks.errors import BertTasksError
from bert_tasks.metrics.tables import metric_key
from bert_tasks.model.multitask import AnyModel
from bert_tasks.tasks.embedding import Embedding
from bert_tasks.training import files
from bert_tasks.training.records import RunRecord, SummaryRecord, read_record


def run_info(model: AnyModel) -> dict[str, Any] | None:
    """Returns what the run of a model has recorded, or None if the model was not loaded from the folder of a run.

    It is also None for an encoder that embeds texts, because the score of the run is that of a head.

    Returns:
        The ``base_model`` that was fine-tuned, the time in UTC when the run ``started``, and the ``score``: the primary
        ``metric`` of the best model with its ``value``, and the name (``data``) and the number of ``rows`` of the first
        validation set. A value that is not known is None.
    """
    if model.origin is None or isinstance(model.tasks.get(""), Embedding):
        return None
    run = _run_folder(Path(model.origin.name).expanduser())
    if run is None:
        return None
    # A server can predict without these files, so a damaged one is no reason to end.
    with suppress(BertTasksError, OSError):
        metadata = read_record(run / files.RUN, RunRecord, remedy="train again")
        summary = files.read_summary(run)
        name = metadata.model.get("name")
        return {
            "base_model": None if name is None else short_name(name),
            "started": metadata.started,
            "score": None if summary is None else _score(metadata, summary),
        }
    return None


def short_name(name: str | Path) -> str:
    """Returns a hub id, or the end of a path. Visitors of the server need not see where a folder is."""
    return "/".join(PurePath(name).parts[-2:])


def _run_folder(folder: Path) -> Path | None:
    """Returns the folder of the run that a model's folder belongs to, or None."""
    if (folder / files.RUN).is_file():
        return folder
    resolved = folder.resolve()  # so that "." has a name and a parent
    if resolved.name in (files.MODEL, files.ADAPTER) and (resolved.parent / files.RUN).is_file():
        return resolved.parent
    return None


def _score(metadata: RunRecord, summary: SummaryRecord) -> dict[str, Any] | None:
    name = metadata.metrics.sets[0]
    value = summary.metrics.get(metric_key(name, metadata.metrics.primary))
    split_name = f"validation_{name}" if name else "validation"
    split = metadata.data.get(split_name)
    if value is None or split is None or not math.isfinite(value):
        return None
    data = split.source
    if split.hub is None:
        data = PurePath(data).name
    return {"metric": metadata.metrics.primary, "value": value, "data": data, "rows": split.rows}
