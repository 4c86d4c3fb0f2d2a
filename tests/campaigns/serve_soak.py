"""A soak of the server on loopback: good, bad, slow, idle and vanishing clients at once, for as long as wanted.

    PYTHONPATH=tests python -m campaigns.serve_soak MODEL --seconds 600

Every good client compares its answer with the model's own: a request without one is lost, one with another's exchanged.
Printed at the end, as JSON: requests by kind, the slowest /healthz, answers with status 500 and above other than 503,
lost and exchanged answers, and the server's memory and open files after every tenth of the time but the last.
"""

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from bert_tasks import TaskModel

HEAD = "POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
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
LONGEST_WAIT = 60.0
IDLE = 5.0


@dataclass(kw_only=True)
class Findings:
    """What a soak found."""

    requests: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    slowest_health: float = 0.0
    lost: int = 0
    exchanged: int = 0
    memory_mib: list[float] = field(default_factory=list)
    open_files: list[int] = field(default_factory=list)

    @property
    def failures(self) -> int:
        return sum(count for status, count in self.statuses.items() if status >= 500 and status != 503)

    def to_json(self) -> dict[str, object]:
        return {**vars(self), "failures": self.failures}


class Soak:
    """Clients of one server, until their time is over."""

    def __init__(self, *, port: int, scores: list[dict[str, float]], end: float, seed: int = 0) -> None:
        self.port, self.scores, self.end = port, scores, end
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
        number = self.random.randrange(len(TEXTS))
        body = json.dumps({"text": TEXTS[number]})
        try:
            status, content = await self.ask(f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        except (OSError, TimeoutError, IndexError):
            self.found.lost += 1
            return
        if status == 200:
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
        body = json.dumps({"text": self.random.choice(TEXTS)})
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
            resident = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process}/status").read_text("utf-8"))
            if resident is not None:
                self.found.memory_mib.append(round(int(resident[1]) / 1024, 1))


CLIENTS = {"good": 8, "bad": 2, "slow": 4, "idle": 20, "vanishing": 2, "health": 1}


def soak(port: int, process: int, scores: list[dict[str, float]], seconds: float) -> Findings:
    """What the clients of a running server find."""

    async def run() -> Findings:
        session = Soak(port=port, scores=scores, end=time.monotonic() + seconds)
        clients = [session.client(name) for name, count in CLIENTS.items() for _ in range(count)]
        await asyncio.gather(session.watch(process, seconds), *clients)
        return session.found

    return asyncio.run(run())


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model")
    options.add_argument("--seconds", type=float, default=600.0)
    args = options.parse_args()
    predictions = TaskModel.from_pretrained(args.model).predict([{"text": text} for text in TEXTS])
    scores = [prediction.to_json()["scores"] for prediction in predictions]
    command = [sys.executable, "-m", "bert_tasks", "serve", args.model, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = "" if server.stdout is None else server.stdout.readline()
        result = soak(int(line.split("http://")[1].split()[0].rpartition(":")[2]), server.pid, scores, args.seconds)
    finally:
        server.terminate()
        server.wait(LONGEST_WAIT)
    print(json.dumps(result.to_json(), indent=2))


if __name__ == "__main__":
    main()
