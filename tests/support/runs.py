"""Owns runs of the installed console script in processes of their own: a small recipe, and ways to disturb them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from support import training_runs

CONSOLE = (str(Path(sys.executable).with_name("bert-tasks")),)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "bert_tasks")
TESTS = Path(__file__).parents[1]  # where processes find `support`
PATIENCE = 120.0  # seconds for what takes one on an idle machine


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


def _hear_interrupts() -> None:
    """Tests that run in the background of a shell ignore SIGINT, and so would the programs that they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Program:
    """A running command."""

    def __init__(self, arguments: Sequence[object], *, folder: Path, **environment: str) -> None:
        path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        extra = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
        self.out, self.err = folder / "out.txt", folder / "err.txt"
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                list(map(str, arguments)),
                stdout=out,
                stderr=err,
                env=os.environ | extra,
                start_new_session=True,
                preexec_fn=_hear_interrupts,
            )

    def wait(self, seconds: float = PATIENCE) -> Ended:
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise
        return Ended(code, self.out.read_text("utf-8"), self.err.read_text("utf-8", errors="replace"))

    def until(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
        """Waits for a condition while the program runs."""
        end = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None or time.monotonic() > end:
                os.killpg(self.process.pid, signal.SIGKILL) if self.process.poll() is None else None
                raise AssertionError(f"it did not come to that:\n{self.err.read_text('utf-8', errors='replace')}")
            time.sleep(0.005)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


def run(arguments: Sequence[object], *, folder: Path, seconds: float = PATIENCE, **environment: str) -> Ended:
    return Program(arguments, folder=folder, **environment).wait(seconds)


def write_recipe(
    folder: Path, checkpoint: Path, *, task: str = "sequence-classification", rows: int = 40, epochs: int = 3
) -> Path:
    """A recipe of small rows in batches of 4, evaluated after each epoch; its run goes to ``folder/run``."""
    for name, count, seed in (("train", rows, 0), ("dev", 12, 1)):
        lines = [f"{row['text']},{row['label']}" for row in training_runs.make_rows(count, seed=seed)]
        (folder / f"{name}.csv").write_text("\n".join(["text,label", *lines]) + "\n", "utf-8")
    path = folder / "recipe.toml"
    path.write_text(
        f'task = "{task}"\n[model]\nname = "{checkpoint}"\n[settings]\nmax_length = 40\n'
        '[data]\ntrain = "train.csv"\nvalidation = "dev.csv"\n'
        f"[optim]\nepochs = {epochs}\nbatch_size = 4\nwarmup_ratio = 0.2\nlearning_rate = 1e-3\n"
        'micro_batch_tokens = 30\n[run]\noutput_dir = "run"\nlogging_steps = 1\nkeep_checkpoints = true\n',
        "utf-8",
    )
    return path


def steps_done(folder: Path) -> int:
    """Optimizer steps in the log of a run, which may be writing it."""
    path = folder / "metrics.jsonl"
    return path.read_text("utf-8").count('"event": "step"') if path.exists() else 0


def events(folder: Path) -> list[dict[str, object]]:
    """The logged lines but for the speed, which differs from run to run."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text("utf-8").splitlines())
    return [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in lines]


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("ckpt-*"), key=lambda path: int(path.name.removeprefix("ckpt-")))


def digests(folder: Path) -> dict[str, str]:
    """What a run ended with: the last checkpoint's weights and moments, and the best model."""
    last = newest(folder)
    files = [last / "weights.safetensors", last / "optimizer.safetensors", folder / "model" / "model.safetensors"]
    return {file.name: sha256(file.read_bytes()).hexdigest() for file in files}
