"""The runs of an experiment that differ in the seed or in the fold.

Owns the recipe and the folder of each run, the check of all folders before the first run starts, the order of the runs,
and the removal of earlier runs.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

from bert_tasks.distributed import broadcast_from_main, is_main_process, make_accelerator
from bert_tasks.errors import DivergedError, UsageError
from bert_tasks.recipe.schema import Recipe
from bert_tasks.storage import LOCK, check_writable, locked
from bert_tasks.terminal import write_message
from bert_tasks.training import files as outputs
from bert_tasks.training.run import run_folder

Result = TypeVar("Result")


class RunGroup:
    """The runs in the folders ``seed-N`` or ``fold-N`` of one folder.

    Attributes:
        folder: The folder of the experiment, which also holds ``seeds.json`` or ``folds.json``.
        recipes: The seed or the number of the fold -> the recipe of its run.
    """

    def __init__(
        self, recipe: Recipe, word: Literal["seed", "fold"], changes: Mapping[int, Mapping[str, Mapping[str, Any]]]
    ) -> None:
        """Plans the runs, without reading or writing anything.

        ``changes`` maps the number of a run to what differs in its recipe (see ``with_changes``).
        """
        self.accelerator = make_accelerator(recipe.optim.mixed_precision)
        self.folder, self.word = run_folder(recipe), word
        self.recipes: dict[int, Recipe] = {}
        for number, change in changes.items():
            changed = with_changes(recipe, **change)
            self.recipes[number] = with_changes(changed, run={"output_dir": str(self.home(number))})

    def home(self, number: int) -> Path:
        """Returns the folder of a run."""
        return self.folder / f"{self.word}-{number}"

    @property
    def first(self) -> Recipe:
        """The recipe of the first run."""
        return next(iter(self.recipes.values()))

    def existing(self) -> dict[int, Path]:
        """Returns the folders of runs that exist, by number and in the order of the numbers."""
        found: dict[int, Path] = {}
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                # Without leading zeros, because the folder of seed 1 is never called "seed-01".
                match = re.fullmatch(rf"{self.word}-(0|[1-9]\d*)", path.name)
                if match is not None:
                    found[int(match[1])] = path
        return dict(sorted(found.items()))

    def check(self, *, overwrite: bool) -> None:
        """Raises UsageError if the folder holds other files, or runs with other settings.

        All folders are checked before the first run, because a problem in the last one should not show up hours later.
        """
        marks = {path.name for path in self.existing().values()}
        check_experiment_folder(self.folder, {f"{self.word}s.json", *marks})
        for number, recipe in self.recipes.items():
            home = self.home(number)
            outputs.check_folder(home)
            if overwrite:
                continue
            metadata = outputs.read_run_metadata(home)
            if metadata is None:
                continue
            # The settings that follow from the recipe alone. Those of the data are compared when the run reads it.
            settings = outputs.flat_settings(recipe.model.model_dump(), recipe.optim, recipe.run)
            before = {name: value for name, value in metadata.settings.items() if name in settings}
            outputs.changes(home, before, settings, finished=outputs.read_summary(home) is not None)

    def run(
        self, train: Callable[[Recipe], Result], *, progress: bool, remove: Iterable[Path] = ()
    ) -> Iterator[tuple[int, Result | DivergedError]]:
        """Trains one run after the other.

        Args:
            train: Trains a recipe and returns its result.
            progress: True to announce each run on standard error.
            remove: The folders of runs that are removed before the first run. They are removed at once, because whoever
                resumes an interrupted experiment does so without ``overwrite``, and would find old runs among the new.

        Yields:
            The number of a run and its result, or its error if the run diverged. The next run starts when the next item
            is asked for.
        """
        broadcast_from_main(self.accelerator, remove_runs, list(remove))
        for position, (number, recipe) in enumerate(self.recipes.items(), start=1):
            if progress and is_main_process():
                write_message(f"{self.word} {number} (run {position} of {len(self.recipes)})")
            # Whether the other runs are still worth training is for the caller to decide.
            try:
                result: Result | DivergedError = train(recipe)
            except DivergedError as error:
                result = error
            yield number, result


def remove_runs(folders: Iterable[Path]) -> None:
    """Removes the runs in some folders, and the folders that hold nothing else."""
    for home in folders:
        if home.is_dir():
            with locked(home):
                outputs.remove(home)
        with suppress(OSError):  # it holds other files
            home.rmdir()


def check_experiment_folder(folder: Path, marks: set[str]) -> None:
    """Raises UsageError if a folder cannot be written, or holds files but none of the ``marks`` of an experiment."""
    check_writable(folder)
    names: set[str] = set()
    if folder.is_dir():
        names = {path.name for path in folder.iterdir()} - {LOCK}
    # A single run and an experiment in one folder would overwrite each other's reports and recipes.
    if names & {outputs.RUN, outputs.SUMMARY}:
        raise UsageError(f"{folder} holds a single run. Choose another folder for several runs")
    if names and not names & marks:
        raise UsageError(
            f"{folder} is not empty and contains no such runs (it contains {', '.join(sorted(names)[:3])}). Choose "
            "another folder"
        )


def with_changes(recipe: Recipe, **sections: Mapping[str, Any]) -> Recipe:
    """Returns the recipe with other values. Each section is given as a mapping from its keys to values.

    The values are not validated again, so they have to be valid.
    """
    copies = {name: getattr(recipe, name).model_copy(update=dict(values)) for name, values in sections.items()}
    return recipe.model_copy(update=copies)
