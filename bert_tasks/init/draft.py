"""A recipe for a file of rows, before it is written as text."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_tasks.data.issues import counted
from bert_tasks.data.splits import DataSpec
from bert_tasks.init.readings import Reading
from bert_tasks.init.sample import FileSample
from bert_tasks.tables import Result
from bert_tasks.tasks.several import SEVERAL


@dataclass(frozen=True, kw_only=True)
class TaskDraft:
    """A task of a recipe.

    Attributes:
        name: The name of the task if it is one of several, else empty.
        reading: The columns that it reads.
        labels: The different labels that the rows seem to have, sorted.
        words: The number of words that 95 of 100 rows have at most, over all texts that are read together.
        reasons: A sentence for each column that is read, and for what is unusual in it.
    """

    name: str
    reading: Reading
    labels: tuple[str, ...]
    words: int
    reasons: tuple[str, ...]

    def entry(self) -> dict[str, Any]:
        """Returns the task as one of several in a recipe."""
        columns = {column: name for column, name in self.reading.column_names.items() if column != name}
        entry: dict[str, Any] = {"task": self.reading.task.name}
        if columns:
            entry["columns"] = columns
        return {**entry, **self.reading.settings}


@dataclass(frozen=True, kw_only=True)
class RecipeDraft(Result):
    """A recipe for a data file.

    Attributes:
        path: The file of the recipe.
        model: The model that it trains.
        output_dir: The folder of the run. None stands for a folder in ``runs`` beside the recipe.
        sample: The rows from which it was made, with notes on all rows of the file.
        tasks: The only task, or several.
        spec: The section ``[data]`` of the recipe.
        rows, left_out: The number of all rows, and of unusable rows, which the recipe skips.
    """

    path: Path
    model: str
    output_dir: str | None
    sample: FileSample
    tasks: tuple[TaskDraft, ...]
    spec: DataSpec
    rows: int
    left_out: int

    @property
    def task(self) -> str:
        """The name of the task, or of several tasks."""
        if len(self.tasks) > 1:
            return SEVERAL
        return self.tasks[0].reading.task.name

    @property
    def columns(self) -> Mapping[str, str]:
        """The column of the file for each of the task's. It is empty for several tasks, which have their own."""
        if len(self.tasks) > 1:
            return {}
        return self.tasks[0].reading.column_names

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings that follow from the rows."""
        if len(self.tasks) == 1:
            return self.tasks[0].reading.settings
        return {"heads": {task.name: task.entry() for task in self.tasks}}

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels that the rows of the only task seem to have."""
        if len(self.tasks) > 1:
            return ()
        return self.tasks[0].labels

    @property
    def alternatives(self) -> tuple[str, ...]:
        """Other readings that are as good, in words. It is empty if there is no doubt."""
        if len(self.tasks) == 1:
            return self.tasks[0].reading.alternatives
        alternatives = []
        for task in self.tasks:
            for other in task.reading.alternatives:
                alternatives.append(f"tasks.{task.name}: {other.removeprefix('settings.')}")
        return tuple(alternatives)

    @property
    def reasons(self) -> tuple[str, ...]:
        """What was found in the file and its columns."""
        reasons = [*self.sample.notes]
        for task in self.tasks:
            reasons += task.reasons
        return tuple(dict.fromkeys(reasons))

    def to_json(self) -> dict[str, Any]:
        """Returns what was detected, and the next commands."""
        return {
            "recipe": str(self.path),
            "rows": self.sample.count,
            "task": self.task,
            "rows_left_out": self.left_out,
            "settings": dict(self.settings),
            "columns": dict(self.columns),
            "reasons": list(self.reasons),
            "alternatives": list(self.alternatives),
            "next": next_commands(self.path),
        }

    def lines(self) -> list[str]:
        """Returns the lines for a terminal."""
        commands = [f"  {command}" for command in next_commands(self.path)]
        return [*self.findings(), f"recipe: {self.path}", "next:", *commands]

    def findings(self) -> Iterator[str]:
        """Yields what was detected in the rows, for people."""
        sample = self.sample
        drawn = ""
        if len(sample.rows) < sample.count:
            drawn = f", {len(sample.rows)} of them sampled"
        noun = "line" if sample.format.has_documents else "row"
        yield f"{sample.path.name}: {counted(sample.count, noun)}{drawn}"
        if sample.faults:
            yield f"  {len(sample.faults)} more cannot be read ({sample.faults[0]})"
        heading = f"task: {self.task}"
        if len(self.tasks) > 1:
            heading = "tasks: " + ", ".join(f"{task.name} ({task.reading.task.name})" for task in self.tasks)
        if self.alternatives:
            heading = f"{heading}, most likely"
        yield heading
        for reason in self.reasons:
            yield f"  {reason}"
        if self.alternatives:
            yield "not sure, it could also be:"
            for other in self.alternatives:
                yield f"  {other}"


def next_commands(recipe: Path) -> list[str]:
    """Returns the commands that a user runs next, quoted for a shell."""
    path = str(recipe)
    if path.startswith("-"):  # a command would take the file for an option
        path = f"./{path}"
    name = shlex.quote(path)
    return [f"bert-tasks check {name}", f"bert-tasks train {name} --dry-run", f"bert-tasks train {name}"]
