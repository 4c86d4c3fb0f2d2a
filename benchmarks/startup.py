"""Start-up: seconds until ``bert-tasks --help`` has ended, beside Python itself and the imports it avoids.

    python benchmarks/startup.py --repeats 15

Runs are interleaved; medians and the spread (first and third quartile) are printed.
"""

import argparse
import statistics
import subprocess
import sys
import time

COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "bert-tasks --help": [sys.executable, "-m", "bert_tasks", "--help"],
    "import torch": [sys.executable, "-c", "import torch"],
    "import transformers.AutoModel": [sys.executable, "-c", "from transformers import AutoModel"],
}


def seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    for command in COMMANDS.values():
        seconds(command)  # fill the file cache
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(repeats):
        for name, command in COMMANDS.items():
            times[name].append(seconds(command))
    for name, values in times.items():
        low, median, high = statistics.quantiles(values, n=4)
        print(f"{name:30} {median:6.2f} s  ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
