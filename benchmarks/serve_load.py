"""The server under load on loopback: dynamic batching against one request at a time.

    python benchmarks/serve_load.py runs/first/model --results benchmarks/results/serve_load.json

Two servers of the same model run side by side, one with ``--batch-tokens 1``. They take turns: a round sends
``--requests`` requests of one text over ``--clients`` connections that stay open and send the next request when they
have an answer. Another round begins only while there is time (``--seconds``). Every text is another one, and each
answer is compared with what the model says in this process: a request without one is lost, one with another's wrong.

Printed for each number of clients: requests a second (median over rounds), latency percentiles over all rounds, lost
and wrong answers, and how many times batching is faster (median over rounds).
"""

import argparse
import asyncio
import csv
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from result_files import write_results

from bert_tasks import TaskModel
from bert_tasks.tasks import SequenceClassification

REPOSITORY = Path(__file__).parents[1]
BATCHING, ALONE = "dynamic batching", "one request at a time"
OPTIONS = {BATCHING: (), ALONE: ("--batch-tokens", "1", "--max-wait", "0")}
LONGEST_WAIT = 60.0
HEAD = "POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round of one server; ``latencies`` in milliseconds."""

    requests_per_second: float
    latencies: list[float]
    lost: int
    wrong: int


@dataclass(frozen=True, kw_only=True)
class Result:
    server: str
    clients: int
    rounds: int
    requests: int
    requests_per_second: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    lost: int
    wrong: int


def texts(count: int) -> list[str]:
    with (REPOSITORY / "recipes/data/feedback/train.csv").open(encoding="utf-8", newline="") as file:
        rows = [row["text"] for row in csv.DictReader(file)]
    return [f"{rows[number % len(rows)]} ({number})" for number in range(count)]


@contextmanager
def server(model: str, options: Sequence[str]) -> Iterator[int]:
    """Starts a server in a process of its own, and yields its port."""
    command = [sys.executable, "-m", "bert_tasks", "serve", model, "--port", "0", "--limit", "queue=1000", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        match = re.search(r"http://[^:]+:(\d+)", process.stdout.readline())
        assert match is not None, "the server did not start"
        yield int(match[1])
    finally:
        process.terminate()
        process.wait(LONGEST_WAIT)


def expected_scores(model: str, rows: Sequence[str]) -> list[dict[str, float]]:
    loaded = TaskModel.from_pretrained(model)
    assert isinstance(loaded.task, SequenceClassification), "a model of sequence classification is needed"
    return [dict(answer.scores) for answer in loaded.predict([{"text": text} for text in rows])]


async def client(port: int, work: Iterator[tuple[int, str]], answers: dict[int, tuple[float, dict[str, Any]]]) -> None:
    """Sends one request after another over one connection, for as long as there is work."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for number, text in work:
            body = json.dumps({"text": text}).encode()
            head = f"{HEAD}Content-Length: {len(body)}\r\n\r\n"
            started = time.perf_counter()
            writer.write(head.encode() + body)
            async with asyncio.timeout(LONGEST_WAIT):
                lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = re.search(r"content-length: (\d+)", lines)
                size = int(length[1]) if length else 0
                content = await reader.readexactly(size)
            if lines.startswith("http/1.1 200"):
                answers[number] = (1000 * (time.perf_counter() - started), json.loads(content))
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return  # what it had to send is lost, and counted
    finally:
        writer.close()


async def one_round(port: int, clients: int, rows: Sequence[str], expected: Sequence[dict[str, float]]) -> Round:
    work, answers = iter(enumerate(rows)), dict[int, tuple[float, dict[str, Any]]]()
    started = time.perf_counter()
    await asyncio.gather(*(client(port, work, answers) for _ in range(clients)))
    took = time.perf_counter() - started
    wrong = sum(
        any(abs(answer["scores"][label] - score) > TOLERANCE for label, score in expected[number].items())
        for number, (_, answer) in answers.items()
    )
    return Round(
        requests_per_second=len(answers) / took,
        latencies=[latency for latency, _ in answers.values()],
        lost=len(rows) - len(answers),
        wrong=wrong,
    )


def summary(name: str, clients: int, rounds: Sequence[Round]) -> Result:
    latencies = list(chain(*(turn.latencies for turn in rounds)))
    cuts = statistics.quantiles(latencies, n=100, method="inclusive")
    return Result(
        server=name,
        clients=clients,
        rounds=len(rounds),
        requests=sum(len(turn.latencies) + turn.lost for turn in rounds),
        requests_per_second=round(statistics.median(turn.requests_per_second for turn in rounds), 1),
        p50_ms=round(cuts[49], 1),
        p95_ms=round(cuts[94], 1),
        p99_ms=round(cuts[98], 1),
        lost=sum(turn.lost for turn in rounds),
        wrong=sum(turn.wrong for turn in rounds),
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model")
    options.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64])
    options.add_argument("--requests", type=int, default=256)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--seconds", type=float, default=300.0)
    options.add_argument("--results", type=Path)
    arguments = options.parse_args()
    rows = texts(arguments.requests)
    expected = expected_scores(arguments.model, rows)
    end, load = time.monotonic() + arguments.seconds, os.getloadavg()
    rounds_by_load: dict[tuple[str, int], list[Round]] = {}
    with ExitStack() as stack:
        ports = {name: stack.enter_context(server(arguments.model, extra)) for name, extra in OPTIONS.items()}
        for port in ports.values():
            asyncio.run(one_round(port, 8, rows[:64], expected))  # warm
        for _ in range(arguments.rounds):
            if rounds_by_load and time.monotonic() > end:
                break
            for clients in arguments.clients:
                for name, port in ports.items():
                    measured = asyncio.run(one_round(port, clients, rows, expected))
                    rounds_by_load.setdefault((name, clients), []).append(measured)
    results = [summary(name, clients, rounds) for (name, clients), rounds in rounds_by_load.items()]
    faster = {
        clients: round(
            statistics.median(
                ours.requests_per_second / theirs.requests_per_second
                for ours, theirs in zip(rounds_by_load[BATCHING, clients], rounds_by_load[ALONE, clients], strict=True)
            ),
            2,
        )
        for clients in arguments.clients
    }
    for result in results:
        print(json.dumps(asdict(result)))
    print("batching is faster by", faster)
    if arguments.results is not None:
        machine = {"cpus": os.cpu_count(), "threads": torch.get_num_threads(), "machine": platform.machine()}
        loads = {"load_before": load, "load_after": os.getloadavg()}
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        content = {"results": [asdict(r) for r in results], "batching_is_faster": faster} | machine | loads | versions
        write_results(arguments.results, content)


if __name__ == "__main__":
    main()
