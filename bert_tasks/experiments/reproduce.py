"""Trains again from a saved run and compares the results bit for bit.

Owns what is compared. Times are not, because they differ on any machine. The second run is an ordinary run with a
folder of its own.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from bert_tasks.data.problems import missing_path
from bert_tasks.distributed import broadcast_from_main, main_process_first, make_accelerator
from bert_tasks.errors import DataError, UsageError
from bert_tasks.experiments.group import format_table, with_changes
from bert_tasks.recipe.check import prepare
from bert_tasks.recipe.schema import load_recipe
from bert_tasks.storage import sha256_file
from bert_tasks.terminal import write_message
from bert_tasks.training import files as outputs
from bert_tasks.training.loop import Trainer
from bert_tasks.training.objectives import weights_digest
from bert_tasks.training.run import build_trainer
from bert_tasks.training.state import run_environment

_TIMES = ("train_seconds", "tokens_per_second")
_SHOWN = 20  # differences in a table for people


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A value that differs. ``where`` is a key, or a place in a file."""

    where: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.where}: {_text(self.before)} before, {_text(self.now)} now"


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """A run and its repetition.

    Attributes:
        surroundings: Differences before training began. They may be the cause of ``differences``.
        compared: Names of the compared values.
    """

    run: Path
    output_dir: Path
    surroundings: tuple[Difference, ...]
    compared: tuple[str, ...]
    differences: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        return not self.differences

    def to_json(self) -> dict[str, Any]:
        return {"equal": self.equal, **asdict(self), "run": str(self.run), "output_dir": str(self.output_dir)}

    def lines(self) -> list[str]:
        """Returns a table for people."""
        compared = f"compared: {', '.join(self.compared)}"
        if self.equal:
            return [f"equal, bit for bit: {self.run} and {self.output_dir}", compared]
        rows = [("what", "the run", "now")]
        rows += [(each.where, _text(each.before), _text(each.now)) for each in self.differences[:_SHOWN]]
        more = len(self.differences) - _SHOWN
        return [
            f"not equal: {self.run} and {self.output_dir}",
            compared,
            *(f"surroundings differ: {each}" for each in self.surroundings),
            *format_table(rows),
            *([f"and {more} more (--json lists all)"] if more > 0 else []),
        ]


def reproduce(run: str | Path, *, output_dir: str | Path | None = None, progress: bool = True) -> Reproduction:
    """Repeats a finished run from its folder, and compares the results.

    The number of threads is set to the run's while it trains. Trackers are not used. Call it again to resume an
    interrupted repetition, or to compare a finished repetition again. It raises the errors of ``train``.

    Args:
        run: The folder of a finished run of a recipe.
        output_dir: The folder of the second run. Default: the folder of the run with ``-reproduced`` at its end.
        progress: Report on standard error, including the differences before training begins.
    """
    folder = Path(run)
    metadata = _metadata(folder)
    named = folder if folder.name not in ("", "..") else folder.resolve()
    home = named.with_name(f"{named.name}-reproduced") if output_dir is None else Path(output_dir)
    if home.resolve() == folder.resolve():
        raise UsageError(f"--output-dir {home} is the run itself. Choose another folder")
    recipe = load_recipe(folder / outputs.RECIPE, output_dir=home)
    recipe = with_changes(recipe, run={"trackers": (), "seeds": None})
    accelerator = make_accelerator(recipe.optim.mixed_precision)
    broadcast_from_main(accelerator, outputs.check_folder, home)
    before = torch.get_num_threads()
    torch.set_num_threads(metadata.get("threads", before))
    try:
        with main_process_first(accelerator):
            prepared = prepare(recipe)
        for name, now in outputs.data_metadata(prepared.splits).items():
            expected = metadata["data"].get(name, now)["fingerprint"]
            if now["fingerprint"] != expected:
                raise DataError(
                    f"{now['source']}: the rows of {name} differ from the run's (fingerprint "
                    f"{now['fingerprint'][:12]}, expected {expected[:12]}). Restore the file as it was"
                )
        trainer = build_trainer(prepared)
        surroundings = tuple(_environment_differences(metadata, trainer))
        if progress and accelerator.is_main_process:
            same = f"versions, machine, {metadata.get('threads', '?')} threads, data and weights are the run's"
            notes = [f"differs: {each}" for each in surroundings]
            for line in [*notes, "the result may differ in its last digits or more"] if notes else [same]:
                write_message(line)
        trainer.train(progress=progress)
    finally:
        torch.set_num_threads(before)
    return broadcast_from_main(accelerator, _compare, folder, home, surroundings)


def _metadata(folder: Path) -> dict[str, Any]:
    """Returns the run.json of a run that can be repeated."""
    metadata = outputs.read_run_metadata(folder)
    if metadata is None:
        reason = f"no {outputs.RUN}. Expected the output folder of one run of `bert-tasks train`"
        raise UsageError(f"{folder}: {reason if folder.exists() else missing_path(folder, 'folder')}")
    if outputs.read_summary(folder) is None:
        raise UsageError(f"{folder} holds a run that is not finished. Run its command again to finish it")
    if not (folder / outputs.RECIPE).is_file():
        raise UsageError(
            f"{folder} has no {outputs.RECIPE}, so it was made by fit(...). Call fit again with the same arguments"
            " and another output_dir"
        )
    return metadata


def _environment_differences(metadata: Mapping[str, Any], trainer: Trainer) -> Iterator[Difference]:
    """Returns the differences before training begins, as far as run.json has them."""
    for change in outputs.environment_changes(metadata, run_environment(trainer.accelerator, trainer.model.task)):
        yield Difference(where=change.name, before=change.before, now=change.now)
    weights = weights_digest(trainer.objective.checkpoint_parameters())
    if metadata.get("initial_weights", weights) != weights:
        yield Difference(where="weights before training", before=metadata["initial_weights"], now=weights)
    teachers = [settings.get("teacher.digest") for settings in (metadata["settings"], trainer.folder.settings)]
    if teachers[0] != teachers[1]:
        yield Difference(where="weights of the teacher", before=teachers[0], now=teachers[1])
    for noted in metadata.get("changes", ()):
        yield Difference(where=f"settings at step {noted['step']}", before=noted["change"], now="set from step 0 on")


def _compare(folder: Path, home: Path, surroundings: tuple[Difference, ...]) -> Reproduction:
    """Compares metrics, weights, and losses, rates and norms of logged steps."""
    nothing: dict[str, Any] = {}
    differences = list(_different(outputs.SUMMARY, *(outputs.read_summary(path) or nothing for path in (folder, home))))
    for before, now in zip_longest(outputs.read_events(folder), outputs.read_events(home), fillvalue=nothing):
        event = before or now
        differences += _different(f"{outputs.EVENTS}, {event['event']} {event['step']}", before, now)
    weights = [path.relative_to(folder) for path in sorted((folder / outputs.MODEL).glob("*.safetensors"))]
    for name in weights:
        digests = [sha256_file(path / name) if (path / name).is_file() else None for path in (folder, home)]
        if digests[0] != digests[1]:
            differences.append(Difference(where=f"{name} (sha256)", before=digests[0], now=digests[1]))
    return Reproduction(
        run=folder,
        output_dir=home,
        surroundings=surroundings,
        compared=(outputs.SUMMARY, outputs.EVENTS, *map(str, weights)),
        differences=tuple(differences),
    )


def _different(where: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    """Yields the differences of two mappings. JSON has every digit of a number."""
    for name in dict.fromkeys((*before, *now)):
        left, right = before.get(name), now.get(name)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            yield from _different(f"{where}, {name}", left, right)
        elif name not in _TIMES and (left != right or (name in before) != (name in now)):
            yield Difference(where=f"{where}: {name}", before=left, now=right)


def _text(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 24 or " " in text else f"{text[:12]}..."
