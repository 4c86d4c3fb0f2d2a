"""The JSON files of runs, seeds and folds: an edit of any field is read or refused."""

import json
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import pytest

from bert_tasks import load_recipe, train
from bert_tasks.cards.card import card_text, read_run
from bert_tasks.errors import BertTasksError, CheckpointError, UsageError
from bert_tasks.experiments.folds import train_folds
from bert_tasks.experiments.seeds import train_seeds
from bert_tasks.recipe.schema import Recipe
from bert_tasks.report import make_report
from support.damage import REFUSED, exit_code, field_edits
from support.training_runs import make_rows

# Every fourth edit is tried. 4 and the number of values have no common divisor, so each field gets one value or two,
# and each value comes up equally often.
VALUES = (None, 0, "x", [], {}, 1e308, "\ud800")
INTERVAL = 4
SECTIONS = {
    "run": "",
    "seeds": "seeds = [1, 2]\n",
    "folds": "[folds]\ncount = 2\n",
}
STATE = "checkpoints/ckpt-2/state.json"


@dataclass(frozen=True)
class Experiments:
    folder: Path

    def recipe(self, name: str, copy: Path, *overrides: str) -> Recipe:
        return load_recipe(self.folder / f"{name}.toml", overrides=[f"run.output_dir={copy}", *overrides])


@pytest.fixture(scope="module")
def finished(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Experiments:
    """A run, and each kind of experiment, all finished; read-only."""
    folder = tmp_path_factory.mktemp("experiments")
    for name, count in (("train", 16), ("dev", 6)):
        lines = [f"{row['text']},{row['label']}" for row in make_rows(count)]
        (folder / f"{name}.csv").write_text("\n".join(["text,label", *lines]) + "\n", "utf-8")
    for name, section in SECTIONS.items():
        validation = "" if name == "folds" else 'validation = "dev.csv"\n'
        (folder / f"{name}.toml").write_text(
            f'task = "sequence-classification"\n[model]\nname = "{checkpoint}"\n[settings]\nmax_length = 40\n'
            f'[data]\ntrain = "train.csv"\n{validation}[optim]\nepochs = 1\nbatch_size = 8\nlearning_rate = 1e-3\n'
            f'[run]\noutput_dir = "{name}"\nkeep_checkpoints = true\n{section}',
            "utf-8",
        )
    train(folder / "run.toml", progress=False)
    train_seeds(load_recipe(folder / "seeds.toml"), progress=False)
    train_folds(folder / "folds.toml", progress=False)
    return Experiments(folder)


def commands(finished: Experiments, name: str) -> Mapping[str, Callable[[Path], object]]:
    """What reads the files of a folder, in an order in which the quickest comes first."""

    def resume(copy: Path) -> object:
        return train(finished.recipe("run", copy, "optim.epochs=2"), progress=False)

    of_run: dict[str, Callable[[Path], object]] = {
        "card": lambda copy: card_text(read_run(copy), {}),
        "report": make_report,
        "train": lambda copy: train(finished.recipe(name, copy), progress=False),
    }
    return {
        "run": of_run,
        "resumed": {"resume": resume},
        "seeds": {"report": make_report},
        "folds": {"report": make_report},
    }[name]


def sign(copy: Path) -> None:
    """Makes the manifest of the checkpoint that of its edited state."""
    path = copy / Path(STATE).with_name("manifest.json")
    manifest = json.loads(path.read_text("utf-8"))
    manifest["files"]["state.json"]["sha256"] = sha256((copy / STATE).read_bytes()).hexdigest()
    path.write_text(json.dumps(manifest), "utf-8")


def outcomes(
    finished: Experiments,
    folder: str,
    file: str,
    values: tuple[object, ...],
    copy: Path,
    *,
    interval: int = 1,
    sample: int | None = None,
) -> dict[str, int]:
    """The exit code of the first command that refuses each edit, or 0.

    ``interval``: try every so many edits. ``sample``: try this number of them.
    """
    source = finished.folder / ("run" if folder == "resumed" else folder)
    is_lines = file.endswith(".jsonl")
    lines = (source / file).read_text("utf-8").splitlines() if is_lines else [(source / file).read_text("utf-8")]
    shutil.copytree(source, copy)
    for call in commands(finished, folder).values():  # without an edit
        call(copy)
    codes: dict[str, int] = {}
    edits = [(number, *edit) for number, line in enumerate(lines) for edit in field_edits(json.loads(line), values)]
    edits = edits[::interval]
    if sample is not None:
        edits = random.Random(0).sample(edits, sample)
    for number, name, content in edits:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(source, copy)
        edited = [*lines[:number], json.dumps(content), *lines[number + 1 :]]
        (copy / file).write_text("\n".join(edited) + "\n", "utf-8")
        if file == STATE:
            sign(copy)
        for call in commands(finished, folder).values():
            code = exit_code(lambda call=call: call(copy))  # type: ignore[misc]  # mypy infers no lambda with a default
            codes[f"{number}: {name}"] = code
            if code:
                break
    return codes


FILES = [
    ("run", "run.json"),
    ("run", "metrics.json"),
    ("run", "metrics.jsonl"),
    ("resumed", "run.json"),
    ("resumed", STATE),
    ("resumed", "checkpoints/ckpt-2/manifest.json"),
    ("seeds", "seeds.json"),
    ("folds", "folds.json"),
]


@pytest.mark.parametrize(("folder", "file"), [("run", "run.json"), ("resumed", STATE), ("folds", "folds.json")])
def test_some_edits_of_a_field_are_read_or_refused(
    folder: str, file: str, finished: Experiments, tmp_path: Path
) -> None:
    codes = outcomes(finished, folder, file, ({},), tmp_path / "copy", sample=6)
    assert {name: code for name, code in codes.items() if code not in (0, *REFUSED)} == {}
    assert set(codes.values()) & set(REFUSED)


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "file"), [*FILES, ("resumed", "metrics.jsonl")])
def test_edits_of_every_field_are_read_or_refused(
    folder: str, file: str, finished: Experiments, tmp_path: Path
) -> None:
    codes = outcomes(finished, folder, file, VALUES, tmp_path / "copy", interval=INTERVAL)
    assert {name: code for name, code in codes.items() if code not in (0, *REFUSED)} == {}


@pytest.mark.parametrize(
    ("folder", "file", "field", "value", "message"),
    [
        ("run", "run.json", "steps", "x", r"run\.json is damaged \(steps = 'x', .*integer\). Choose another folder"),
        ("run", "run.json", "metrics", {"sets": []}, r"run\.json is damaged \(metrics\.sets = \[\], "),
        ("run", "metrics.json", "best_step", "x", r"metrics\.json is damaged \(best_step = 'x'"),
        ("run", "metrics.json", "notes", ["\ud800"], r"metrics\.json is damaged \(a text holds '.ud800'"),
        ("run", "metrics.json", "more", 1, r"metrics\.json is damaged \(more = 1, Extra inputs"),
        ("seeds", "seeds.json", "runs", [{"seed": "x", "failure": None}], r"seeds\.json is damaged \(runs\.0\.seed"),
        ("folds", "folds.json", "rows", "x", r"folds\.json is damaged \(rows = 'x', .* Run the command again"),
    ],
)
def test_the_field_is_named(
    folder: str, file: str, field: str, value: object, message: str, finished: Experiments, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished.folder / folder, copy)
    content = json.loads((copy / file).read_text("utf-8")) | {field: value}
    (copy / file).write_text(json.dumps(content), "utf-8")
    with pytest.raises(UsageError, match=message):
        make_report(copy)


def test_the_line_and_the_checkpoint_are_named(finished: Experiments, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished.folder / "run", copy)
    state = json.loads((copy / STATE).read_text("utf-8"))
    state["course"]["tuned"] = {"thresholds": ["x"]}
    (copy / STATE).write_text(json.dumps(state), "utf-8")
    sign(copy)
    with pytest.raises(CheckpointError, match=r"ckpt-2 is damaged \(.*thresholds.* overwrite=True"):
        commands(finished, "resumed")["resume"](copy)
    first, second = (copy / "metrics.jsonl").read_text("utf-8").splitlines()
    (copy / "metrics.jsonl").write_text(f'{first}\n{second[:-1]}, "metrics": 1}}\n', "utf-8")
    with pytest.raises(BertTasksError, match=r"metrics\.jsonl:2 is damaged \(metrics = 1, .* Remove the line"):
        make_report(copy)
