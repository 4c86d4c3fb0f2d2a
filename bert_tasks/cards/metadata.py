"""What is known of a finished run, for its card.

Owns the reading of the run's files and what of them is nobody's business: paths become names. Must not know Markdown.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from bert_tasks.checkpoints.hub import PACKAGE, model_folder
from bert_tasks.checkpoints.load import read_config
from bert_tasks.errors import BertTasksError, UsageError
from bert_tasks.families.registry import CONFIG_KEY, head_kind
from bert_tasks.metrics.tables import MetricTable, metrics_of_set
from bert_tasks.model.pretrained import stated_task
from bert_tasks.recipe.toml import parse_document
from bert_tasks.run_dir import files as outputs
from bert_tasks.tasks.base import Task


@dataclass(frozen=True, kw_only=True)
class Split:
    """Rows of a run. ``name``: train, validation or validation_NAME; ``hub``: where they are on it, if they are."""

    name: str
    source: str
    rows: int | None
    fingerprint: str
    hub: Mapping[str, Any] | None

    @property
    def validation_set(self) -> str:
        """The name of the validation set; empty for the only one, which has none."""
        return self.name.removeprefix("validation").removeprefix("_")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A finished run and its model.

    Attributes:
        base: name, revision and commit of the weights that training began with, as far as they are known.
        entry: our key of config.json: task, settings, thresholds.
        head: sequence, token or span where transformers has this head; None where it has not.
        metrics: of the best model on the validation rows.
        recipe: the resolved recipe without paths; None for a run that ``fit`` made.
        stated_task: the task with its settings; None where it is not built in.
    """

    task: str
    family: str
    architecture: str
    head: str | None
    base: Mapping[str, Any]
    labels: Sequence[str]
    entry: Mapping[str, Any]
    splits: Sequence[Split]
    metrics: Mapping[str, float | None]
    summary: Mapping[str, Any]
    run: Mapping[str, Any]
    recipe: Mapping[str, Any] | None
    stated_task: Task | None

    @property
    def base_name(self) -> str | None:
        """The base's name where it says something to others: a hub id or a package, never a folder."""
        name = self.base.get("name")
        return str(name) if self.is_hub_base or str(name).startswith(PACKAGE) else None

    @property
    def is_stock_head(self) -> bool:
        """Whether transformers gives the same answers from the model's folder."""
        return self.head is not None and "labels" not in self.entry

    @property
    def pipeline_tag(self) -> str | None:
        """What the hub calls the task."""
        return None if self.stated_task is None else self.stated_task.pipeline_tag

    @property
    def is_hub_base(self) -> bool:
        return self.base.get("commit") is not None

    def overall(self, split: Split) -> dict[str, float | None]:
        """The metrics of a validation set that are over all classes, each number once, without the set's name."""
        found = metrics_of_set(self.metrics, split.validation_set)
        table = self._table(found)
        return {name: value for name, value in found.items() if name in table.overall}

    def by_class(self, split: Split) -> dict[str, float | None]:
        found = metrics_of_set(self.metrics, split.validation_set)
        table = self._table(found)
        return {name: value for name, value in found.items() if name not in {**table.overall, **table.repeated}}

    def is_score(self, metric: str) -> bool:
        """Whether more of a metric over all classes is better: no loss, no count, no threshold."""
        known = self.run["metrics"]
        return metric not in (*known["lower_is_better"], *known["neutral"])

    def _table(self, metrics: Mapping[str, float | None]) -> MetricTable:
        numbers = {name: math.nan if value is None else value for name, value in metrics.items()}
        return MetricTable(overall=numbers) if self.stated_task is None else self.stated_task.metric_table(numbers)


def read_facts(run: Path) -> Facts:
    """What the files of a run say.

    Raises:
        UsageError: the folder holds no finished run, or its files are damaged.
        CheckpointError: its model cannot be read, or the folder holds several runs.
    """
    facts, summary = outputs.read_facts(run), outputs.read_summary(run)
    if facts is None:
        model_folder(run)  # says so if the folder holds several runs
    if facts is None or summary is None:
        raise UsageError(f"{run} holds no finished run: no {outputs.RUN} and {outputs.SUMMARY}; train it to its end")
    config = read_config(run / outputs.MODEL)
    kind = head_kind(config)
    try:
        return Facts(
            task=str(facts["task"]),
            family=str(config["model_type"]),
            architecture=str(config["architectures"][0]),
            head=None if kind == "base" else kind,
            base=_base(facts),
            labels=[str(label) for label in facts["labels"]],
            entry=config.get(CONFIG_KEY, {}),
            splits=[_split(name, data) for name, data in facts["data"].items()],
            metrics=summary["metrics"],
            summary=summary,
            run=facts,
            recipe=_recipe(run / outputs.RECIPE),
            stated_task=_stated_task(run / outputs.MODEL, config, facts["labels"]),
        )
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise UsageError(f"{run}: {outputs.RUN} or {outputs.SUMMARY} is damaged ({error!r}): train again") from None


def _stated_task(model: Path, config: Mapping[str, Any], labels: Sequence[str]) -> Task | None:
    """The model's task with the labels that the run's metrics are named after."""
    try:
        return replace(stated_task(model, config, None, {}), labels=tuple(map(str, labels)))
    except (BertTasksError, ValueError):
        return None


def _base(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Runs of older versions have no entry for the model, but may have its name among the settings."""
    known = {key: facts["settings"].get(f"model.{key}") for key in ("name", "revision")}
    return {"commit": None, **known, **facts.get("model", {})}


def _split(name: str, data: Mapping[str, Any]) -> Split:
    """Of a file only its name is told, not where it lies."""
    hub = data.get("hub")
    source = str(data["source"])
    return Split(
        name=name,
        source=source if hub is not None else PurePath(source.replace("\\", "/")).name,
        rows=data.get("rows"),
        fingerprint=str(data["fingerprint"]),
        hub=hub,
    )


def _recipe(path: Path) -> dict[str, Any] | None:
    """The recipe with file names for paths, and without the folder of its run."""
    try:
        recipe = parse_document(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise UsageError(f"{path} is damaged ({error}): train again") from None
    run = {key: value for key, value in recipe.get("run", {}).items() if key != "output_dir"}
    return {
        **recipe,
        "model": outputs.without_folders(recipe["model"]),
        "data": outputs.without_folders(recipe["data"]),
        "run": run,
    }
