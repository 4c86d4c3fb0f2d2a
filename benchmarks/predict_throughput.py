"""Prediction side by side: texts in, labels out, on SST-2's dev set, ours against other libraries.

    pip install openvino nncf
    BERT_TASKS_DATA=DIR python benchmarks/predict_throughput.py --threads 2 --repeats 5 --json result.json

Sides: ``model.predict(rows)``; the same in bfloat16 and in int8 (300 calibration rows); the same with the float32 graph
in onnxruntime; ``pipeline()`` called with a list at its default batch size; a loop over transformers' model that sorts
by length and pads each batch to its longest; and transformers' exported model in onnxruntime and in OpenVINO, also in
int8 (NNCF, 300 calibration rows), in the same loop. Sides whose library is not installed (OpenVINO and NNCF are no
dependencies) are skipped, and bfloat16 and int8 on a processor without instructions for them. Tokenisation is included
everywhere; loading and exporting are not. Each side has a process of its own, which takes turns with the others, and
one run to warm up.
Without ``--model`` the embedded weights are fine-tuned first, on 2,000 rows of SST-2's train set.

Printed: the processor; rows and tokens a second (median, quartiles); how many times ours in float32 is faster (median
over rounds), or ours in bfloat16 than another one in bfloat16; accuracy, and labels equal to ours; for int8 also on
1,000 rows (dev and the first of test).
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import torch
from predict_sides import CLOCKS, SIDES, count_tokens, measured, train
from result_files import write_results

from bert_tasks.encoder.cpu import matmul_library
from bert_tasks.encoder.int8 import int8_obstacle
from bert_tasks.environment import cpu_name

OURS, BF16, INT8 = "bert_tasks", "bert_tasks bf16", "bert_tasks int8"
HAS_BF16 = torch.cpu.get_capabilities().get("avx512_bf16") or torch.cpu.get_capabilities().get("amx_bf16")
MISSING: list[str] = []
if find_spec("openvino") is None:
    MISSING += ["openvino", "openvino bf16", "openvino int8"]
if find_spec("nncf") is None:
    MISSING += ["openvino int8"]
if not HAS_BF16:
    MISSING += ["bert_tasks bf16", "openvino bf16"]  # without instructions for it 100 times as slow as float32
if int8_obstacle() is not None:
    MISSING += [INT8]
INSTALLED = [name for name in SIDES if name not in MISSING]
LABELS = ("negative", "positive")
TRAINING_ROWS = 2000
COMPARED_ROWS = 1000


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one side did. ``rows_per_second``: first quartile, median, third.

    ``ours_is``: how many times faster ours is, in the same precision (int8: in float32).
    """

    rows_per_second: tuple[float, float, float]
    tokens_per_second: float
    ours_is: float
    accuracy: float
    equal_labels: float


def table_of(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """Reads a tsv file of GLUE, in which quotes have no meaning."""
    lines = path.read_text(encoding="utf-8").split("\n")
    names = lines[0].split("\t")
    rows = [dict(zip(names, line.split("\t"), strict=True)) for line in lines[1:] if line]
    return [{column: row[column] for column in columns} for row in rows]


def labelled(path: Path) -> list[dict[str, str]]:
    rows = table_of(path, ("sentence", "label"))
    return [{"text": row["sentence"], "label": LABELS[int(row["label"])]} for row in rows]


def share(left: Sequence[str], right: Sequence[str]) -> float:
    return statistics.fmean(a == b for a, b in zip(left, right, strict=True))


def machine() -> dict[str, str]:
    """Returns the processor, the instructions that matter here, and the library of our float32 products."""
    capabilities = torch.cpu.get_capabilities()
    further = [name for name in ("avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16") if capabilities.get(name)]
    instructions = " ".join([torch.backends.cpu.get_cpu_capability(), *further])
    return {"processor": cpu_name(), "instructions": instructions, "matmul_library": matmul_library()}


def workers(stack: ExitStack, names: Sequence[str]) -> dict[str, ProcessPoolExecutor]:
    spawn = get_context("spawn")
    return {name: stack.enter_context(ProcessPoolExecutor(max_workers=1, mp_context=spawn)) for name in names}


def results(
    seconds: Mapping[str, Sequence[float]], labels: Mapping[str, Sequence[str]], truth: Sequence[str], tokens: int
) -> dict[str, Result]:
    figures = {}
    for name, times in seconds.items():
        slow, median, quick = (len(truth) / value for value in reversed(statistics.quantiles(times, n=4)))
        ours = seconds[BF16] if name.endswith(" bf16") and name != BF16 and BF16 in seconds else seconds[OURS]
        figures[name] = Result(
            rows_per_second=(slow, median, quick),
            tokens_per_second=median * tokens / len(truth),
            ours_is=statistics.median(a / b for a, b in zip(times, ours, strict=True)),
            accuracy=share(labels[name], truth),
            equal_labels=share(labels[name], labels[OURS]),
        )
    return figures


def show(figures: Mapping[str, Result]) -> None:
    print(f"{'':18} {'rows/s':>8} {'quartiles':>18} {'tokens/s':>9} {'ours is':>8} {'accuracy':>9} {'equal':>7}")
    for name, result in figures.items():
        slow, median, quick = result.rows_per_second
        spread = f"{slow:.1f} to {quick:.1f}"
        print(
            f"{name:18} {median:8.1f} {spread:>18} {result.tokens_per_second:9.0f} {result.ours_is:7.2f}x "
            f"{result.accuracy:9.4f} {result.equal_labels:7.2%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, default=None, help="of the dev set; default: all")
    parser.add_argument("--model", type=Path, default=None, help="a fine-tuned folder; default: train one")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=INSTALLED)
    parser.add_argument(
        "--clock", choices=list(CLOCKS), default="wall", help="processor: on a busy machine, one thread"
    )
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    data = Path(os.environ["BERT_TASKS_DATA"]) / "glue" / "SST-2"
    dev = labelled(data / "dev.tsv")[: options.rows]
    texts, truth = [row["text"] for row in dev], [row["label"] for row in dev]
    more = [row["sentence"] for row in table_of(data / "test.tsv", ("sentence",))]
    names = [OURS, *(name for name in options.sides if name != OURS)]
    with ExitStack() as stack:
        folder = options.model
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run" / "model"
            (trainer,) = workers(stack, ["train"]).values()
            rows = labelled(data / "train.tsv")[:TRAINING_ROWS]
            trainer.submit(train, folder.parent, rows, options.threads).result()
        pools = workers(stack, names)

        def run(name: str, texts: Sequence[str]) -> tuple[float, list[str]]:
            return pools[name].submit(measured, name, folder, options.threads, texts, options.clock).result()

        labels = {name: run(name, texts)[1] for name in names}
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(options.repeats):
            for name in names:
                seconds[name].append(run(name, texts)[0])
        compared = [*texts, *more][:COMPARED_ROWS]
        reference = run(OURS, compared)[1]
        equal = {name: share(reference, run(name, compared)[1]) for name in names if name.endswith("int8")}
        figures = results(seconds, labels, truth, count_tokens(folder, texts))
    about = machine()
    print("; ".join(f"{name}: {value}" for name, value in about.items()))
    show(figures)
    for name, labels_kept in equal.items():
        print(f"{name}: {labels_kept:.2%} of {len(compared)} labels equal ours in float32")
    if MISSING:
        print(f"not measured here: {', '.join(dict.fromkeys(MISSING))}")
    if options.json is not None:
        runs = {"threads": options.threads, "clock": options.clock, "rows": len(texts), "repeats": options.repeats}
        sides = {name: asdict(side) for name, side in figures.items()}
        content = {**about, **runs, "seconds": seconds, "sides": sides, "equal_int8_labels": equal}
        write_results(options.json, content)


if __name__ == "__main__":
    main()
