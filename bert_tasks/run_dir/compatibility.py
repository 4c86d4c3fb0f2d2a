"""Which settings may differ when a run is resumed: some silently, some with a notice; all others are refused."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.errors import UsageError
from bert_tasks.recipe.schema import OptimSection, RunSection
from bert_tasks.tasks.base import Task

# Neither the samples of a batch nor the expected gradient depend on these, only the masks of dropout.
SILENT = (
    "optim.micro_batch_tokens",
    "model.gradient_checkpointing",
    "run.logging_steps",
    "run.save_steps",
    "run.keep_last",
    "run.trackers",
    "run.project",
)
# The rest of the run differs from what it would have been, as the user asked.
NOTED = (
    "optim.epochs",
    "optim.learning_rate",
    "optim.head_learning_rate",
    "optim.layerwise_lr_decay",
    "optim.warmup_ratio",
    "optim.weight_decay",
    "optim.max_grad_norm",
    "optim.adam_beta1",
    "optim.adam_beta2",
    "optim.adam_epsilon",
    "run.eval_steps",
    "run.early_stopping_patience",
)
# Only these extend a finished run.
EXTENDING = ("optim.epochs", "run.early_stopping_patience")
_ABSENT = "not set"


@dataclass(frozen=True, kw_only=True)
class Change:
    """A setting that differs from the run's."""

    name: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name} = {_shown(self.now)} (was {_shown(self.before)})"


def stated_settings(model: Mapping[str, Any], optim: OptimSection, run: RunSection) -> dict[str, Any]:
    """The settings that a recipe states, as flat JSON: ``section.name`` -> value."""
    of_run = {key: value for key, value in run.model_dump().items() if key not in ("output_dir", "seeds")}
    return _flat({"model": model, "optim": optim.model_dump(), "run": of_run})


def found_settings(task: Task, config: EncoderConfig, data: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The settings that follow from data and model. ``data``: split -> its ``fingerprint``."""
    return {
        "task": type(task).__name__,
        **_flat(
            {
                "settings": {**task.settings(), "labels": list(task.labels)},
                "encoder": {field.name: getattr(config, field.name) for field in fields(config)},
                "data": {name: split["fingerprint"] for name, split in data.items()},
            }
        ),
    }


def changes(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any], *, finished: bool) -> list[Change]:
    """The settings that differ from those of the run in the folder, except those that may differ silently.

    A finished run is not trained again with other settings, unless one of them extends it.

    Raises:
        UsageError: settings differ that must not; the message names them.
    """
    found = [
        Change(name=name, before=before.get(name, _ABSENT), now=now.get(name, _ABSENT))
        for name in sorted({*before, *now} - {*SILENT})
        if before.get(name, _ABSENT) != now.get(name, _ABSENT)
    ]
    refused = [change for change in found if change.name not in NOTED]
    if finished and not any(change.name in EXTENDING for change in found):
        refused = found
    if refused:
        state = "a finished" if finished else "an unfinished"
        raise UsageError(
            f"{folder} holds {state} run with other settings: {'; '.join(_lines(refused))}. "
            "Choose another folder, or --overwrite to replace the run"
        )
    return found


def _lines(found: Sequence[Change], most: int = 6) -> Iterator[str]:
    for change in found[:most]:
        section, _, name = change.name.partition(".")
        yield f"the rows of {name} changed" if section == "data" else str(change)
    if len(found) > most:
        yield f"and {len(found) - most} more"


def _flat(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{part}.{name}": _plain(value) for part, values in parts.items() for name, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def _shown(value: Any) -> str:
    text = str(value) if value == _ABSENT else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
