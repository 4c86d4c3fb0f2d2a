"""The keys of metrics in what a run records: which validation set a metric belongs to.

Owns how a set's name and a metric's name make one key, and that no metric is recorded over another. Must not know which
metrics there are, other than the two that evaluation itself adds.

A run with one unnamed set records ``accuracy``; a run with the sets dev and dev_strict records ``dev/accuracy`` and
``dev_strict/accuracy``. A set's name holds no "/": the first one in a key ends it, whatever labels are called.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from bert_tasks.errors import DataError, UsageError

LOSS = "loss"  # of the evaluated rows; less of it is better, whatever the task
_SEPARATOR = "/"
Value = TypeVar("Value")  # a number, or None where a file has null for what is not a number


def metric_key(name: str, metric: str) -> str:
    """The key of a metric on the validation set ``name``; empty for the only one, which has no name."""
    return f"{name}{_SEPARATOR}{metric}" if name else metric


def split_key(key: str, sets: Sequence[str]) -> tuple[str, str]:
    """The validation set and the metric of a key, where ``sets`` are those of the run."""
    if not any(sets):
        return "", key
    name, _, metric = key.partition(_SEPARATOR)
    return name, metric


def metrics_of_set(metrics: Mapping[str, Value], name: str) -> dict[str, Value]:
    """The metrics of one validation set, without its name."""
    start = metric_key(name, "")
    return {key.removeprefix(start): value for key, value in metrics.items() if key.startswith(start)}


def metrics_by_set(metrics: Mapping[str, Value], sets: Sequence[str]) -> dict[str, dict[str, Value]]:
    """Validation set -> its metrics, without its name."""
    return {name: metrics_of_set(metrics, name) for name in sets}


def untuned(metric: str) -> str:
    """The name of a metric as it was before the thresholds were tuned."""
    return f"untuned_{metric}"


def merged(*parts: Mapping[str, float]) -> dict[str, float]:
    """All metrics together.

    Raises:
        DataError: two of them have the same key, which a label's name can cause.
    """
    found: dict[str, float] = {}
    for part in parts:
        repeated = sorted(found.keys() & part.keys())
        if repeated:
            raise DataError(
                f"metrics: {', '.join(map(repr, repeated))} would be reported twice, once for a label of that name; "
                "rename the label in the rows"
            )
        found |= part
    return found


def check_set_names(names: Iterable[str]) -> None:
    """Refuses names of validation sets that would make keys ambiguous.

    Raises:
        UsageError: a name holds "/", or one of several sets has no name.
    """
    sets = list(names)
    wrong = [name for name in sets if _SEPARATOR in name]
    if wrong:
        raise UsageError(f"validation set {wrong[0]!r}: a name without {_SEPARATOR!r} was expected; rename the set")
    if len(sets) > 1 and "" in sets:
        raise UsageError(f"{len(sets)} validation sets, one of them without a name: name each of them")
