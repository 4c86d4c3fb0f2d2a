"""A soak of the server on loopback: good, bad, slow, idle and vanishing clients at once, for as long as wanted.

    PYTHONPATH=tests:campaigns python -m serve_soak MODEL --seconds 600

The model classifies texts, or pairs with two labels. Every good client compares its answer with the model's own: a
request without one is lost, one with another's exchanged. A bomb is a request of long texts within all limits. Printed
at the end, as JSON: requests by kind, the slowest /healthz, the median and the 99th percentile of the seconds of good
requests, answers with status 500 and above other than 503, lost and exchanged answers, the server's largest memory, and
its memory and open files after every tenth of the time but the last.
"""

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from bert_tasks import TaskModel

FIELDS = "HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
HEAD = f"POST /predict {FIELDS}"
TEXTS = [f"The room was number {number} and the staff were kind." for number in range(40)]
BAD = [
    b"{",
    b"[" * 50_000,
    b'{"text":5}',
    b'{"inputs":[' + b"1," * 200_000 + b"1]}",
    b" " * 2_000_000,
    b'{"text":"\\ud800"}',
]
TOLERANCE = 1e-4
BOMBS = {
    1: ("/predict", {"inputs": [{"text": "b " * 7000}] * 64}),
    2: ("/rerank", {"query": "q " * 5000, "texts": ["b " * 7000] * 64}),
}
LONGEST_WAIT = 60.0
IDLE = 5.0


@dataclass(kw_only=True)
class Findings:
    """What a soak found."""

    requests: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    slowest_health: float = 0.0
    good_seconds: list[float] = field(default_factory=list)
    lost: int = 0
    exchanged: int = 0
    largest_memory_mib: float = 0.0
    memory_mib: list[float] = field(default_factory=list)
    open_files: list[int] = field(default_factory=list)

    @property
    def failures(self) -> int:
        return sum(count for status, count in self.statuses.items() if status >= 500 and status != 503)

    def to_json(self) -> dict[str, object]:
        percentiles = dict(enumerate(statistics.quantiles(self.good_seconds, n=100), 1))
        content = {**vars(self), "good_seconds": {"p50": percentiles[50], "p99": percentiles[99]}}
        return {**content, "failures": self.failures}


class Soak:
    """Clients of one server, until their time is over."""

    def __init__(
        self, *, port: int, rows: list[dict[str, str]], scores: list[dict[str, float]], end: float, seed: int = 0
    ) -> None:
        self.port, self.rows, self.scores, self.end = port, rows, scores, end
        self.random, self.found = random.Random(seed), Findings()

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request)
            async with asyncio.timeout(LONGEST_WAIT):
                answer = await reader.read(-1)
        finally:
            writer.close()
        head, _, content = answer.partition(b"\r\n\r\n")
        status = int(head.split()[1])
        self.found.statuses[status] += 1
        return status, content

    async def good(self) -> None:
        number = self.random.randrange(len(self.rows))
        body = json.dumps(self.rows[number])
        started = time.perf_counter()
        try:
            status, content = await self.ask(f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        except (OSError, TimeoutError, IndexError):
            self.found.lost += 1
            return
        if status == 200:
            self.found.good_seconds.append(time.perf_counter() - started)
            scores = json.loads(content)["scores"]
            expected = self.scores[number]
            self.found.exchanged += any(abs(scores[label] - score) > TOLERANCE for label, score in expected.items())
        else:
            self.found.lost += status not in (429, 503)

    async def bad(self) -> None:
        body = self.random.choice(BAD)
        try:
            await self.ask(f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        except (OSError, TimeoutError, IndexError):
            return  # refused while the body was on its way

    async def bomb(self) -> None:
        path, content = BOMBS[len(self.rows[0])]
        body = json.dumps(content)
        try:
            await self.ask(f"POST {path} {FIELDS}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        except (OSError, TimeoutError, IndexError):
            self.found.lost += 1

    async def slow(self) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for character in f"{HEAD}Content-Length: 30\r\n\r\n{{":
                writer.write(character.encode())
                await writer.drain()
                await asyncio.sleep(0.02)
        except OSError:
            return
        finally:
            writer.close()

    async def idle(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            async with asyncio.timeout(IDLE):
                await reader.read(-1)
        except OSError:
            return
        finally:
            writer.close()

    async def vanishing(self) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        body = json.dumps(self.random.choice(self.rows))
        writer.write(f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}"[: self.random.randrange(10, 200)].encode())
        await asyncio.sleep(self.random.random() / 50)
        writer.transport.abort()

    async def health(self) -> None:
        started = time.perf_counter()
        status, _ = await self.ask(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        self.found.slowest_health = max(self.found.slowest_health, time.perf_counter() - started)
        self.found.lost += status != 200
        await asyncio.sleep(0.05)

    async def client(self, request: str) -> None:
        while time.monotonic() < self.end:
            self.found.requests[request] += 1
            await getattr(self, request)()

    async def watch(self, process: int, seconds: float) -> None:
        """The server's memory and open files, after every tenth of the time but the last."""
        for _ in range(9):
            await asyncio.sleep(seconds / 10)
            self.found.open_files.append(len(os.listdir(f"/proc/{process}/fd")))
            status = Path(f"/proc/{process}/status").read_text("utf-8")
            memory = dict(re.findall(r"(VmRSS|VmHWM):\s+(\d+)", status))
            self.found.memory_mib.append(round(int(memory["VmRSS"]) / 1024, 1))
            self.found.largest_memory_mib = round(int(memory["VmHWM"]) / 1024, 1)


CLIENTS = {"good": 25, "bad": 4, "slow": 6, "idle": 22, "vanishing": 4, "health": 1, "bomb": 2}


def soak(
    port: int, process: int, rows: list[dict[str, str]], scores: list[dict[str, float]], seconds: float
) -> Findings:
    """What the clients of a running server find."""

    async def run() -> Findings:
        session = Soak(port=port, rows=rows, scores=scores, end=time.monotonic() + seconds)
        clients = [session.client(name) for name, count in CLIENTS.items() for _ in range(count)]
        await asyncio.gather(session.watch(process, seconds), *clients)
        return session.found

    return asyncio.run(run())


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model")
    options.add_argument("--seconds", type=float, default=600.0)
    args = options.parse_args()
    model = TaskModel.from_pretrained(args.model)
    columns = [column.name for column in model.task.columns if column.required]
    rows = [dict.fromkeys(columns, text) for text in TEXTS]
    scores = [prediction.to_json()["scores"] for prediction in model.predict(rows)]
    command = [sys.executable, "-m", "bert_tasks", "serve", args.model, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = "" if server.stdout is None else server.stdout.readline()
        result = soak(
            int(line.split("http://")[1].split()[0].rpartition(":")[2]), server.pid, rows, scores, args.seconds
        )
    finally:
        server.terminate()
        server.wait(LONGEST_WAIT)
    print(json.dumps(result.to_json(), indent=2))


if __name__ == "__main__":
    main()
