"""int8 by torchao against float32 and int8 by onnxruntime: SST-2's dev rows, texts in, labels out, one thread.

    pip install torchao==0.18.0
    BERT_TASKS_DATA=DIR python benchmarks/int8_torchao.py --model MODEL --rows 24 --repeats 3

The sides take turns in one process; making them is not counted. Printed: median processor seconds, how many times as
fast as float32, the share of float32's labels, and the load average. torchao is no dependency: this is why.
"""

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

from bert_tasks.model.precision import logits_of
from bert_tasks.model.task_model import TaskModel


def quantized(model: TaskModel) -> TaskModel:
    """A copy whose linear layers, all but the head's, are torchao's."""
    made = copy.deepcopy(model)
    quantize_(
        made,
        Int8DynamicActivationInt8WeightConfig(),
        filter_fn=lambda part, name: isinstance(part, torch.nn.Linear) and not name.startswith("head"),
    )
    return made


def labels(rows: list[dict[str, str]], model: TaskModel, run: Callable[..., torch.Tensor] | None = None) -> list[str]:
    return [str(prediction.to_json()["label"]) for prediction in model.predict_rows(rows, forward_fn=run)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = (Path(os.environ["BERT_TASKS_DATA"]) / "glue/SST-2/dev.tsv").read_text("utf-8").split("\n")
    rows = [{"text": line.split("\t")[0]} for line in lines[1 : given.rows + 1]]
    model = TaskModel.from_pretrained(given.model)
    sides = {
        "float32": partial(labels, rows, model),
        "torchao int8": partial(labels, rows, quantized(model)),
        "onnxruntime int8": partial(labels, rows, model, logits_of(model, "int8")),
    }
    found = {name: side() for name, side in sides.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(given.repeats):
        for name, side in sides.items():
            start = time.process_time()
            side()
            seconds[name].append(time.process_time() - start)
    for name, times in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(seconds["float32"], times, strict=True))
        equal = statistics.fmean(a == b for a, b in zip(found["float32"], found[name], strict=True))
        print(f"{name:18} {statistics.median(times):7.2f} s {ratio:6.2f} times float32, {equal:.2%} of its labels")
    print("load average", os.getloadavg())


if __name__ == "__main__":
    main()
