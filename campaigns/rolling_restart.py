"""Rolling restarts of two servers on loopback, under clients that keep their connections.

    PYTHONPATH=tests:campaigns python -m rolling_restart MODEL --restarts 10 --requests 50000

Again and again a new server is started, and when it is ready the oldest one gets SIGTERM, while clients still use it.
A client whose connection is refused goes to the other server. A connection that ends before its answer has arrived is a
reset. Printed at the end, as JSON: see ``Findings``.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from asyncio.subprocess import Process
from collections import Counter
from dataclasses import dataclass, field

BODY = b'{"text": "The room was clean and the staff were kind."}'
HEAD = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}\r\n"
REQUEST = f"{HEAD}\r\n".encode() + BODY
MOST_REQUESTS = 500  # on one connection
LONGEST_START = 120.0  # seconds
LONGEST_WAIT = 60.0  # seconds for an answer


@dataclass(kw_only=True)
class Findings:
    """What the clients and the servers saw.

    Attributes:
        requests: Requests that were sent.
        resets: Requests whose connection ended before the answer had arrived.
        refused: Connections that were refused, after which a client took another server.
        statuses: Statuses of the answers.
        exit_codes: Exit codes of the servers that were stopped.
        slowest_connection: The longest time that a connection took, in seconds.
    """

    requests: int = 0
    resets: int = 0
    refused: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    exit_codes: list[int] = field(default_factory=list)
    slowest_connection: float = 0.0


@dataclass(kw_only=True)
class Server:
    process: Process
    port: int

    async def stop(self) -> int:
        self.process.terminate()
        async with asyncio.timeout(LONGEST_WAIT):
            return await self.process.wait()


async def started(command: list[str]) -> Server:
    """Starts a server, and returns it when its line says that it is ready."""
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    async with asyncio.timeout(LONGEST_START):
        line = await process.stdout.readline()
    address = line.decode().split("http://")[1].split()[0]
    return Server(process=process, port=int(address.rpartition(":")[2]))


class Restarts:
    """Clients and the servers that they know, the newest last."""

    def __init__(self, *, seed: int = 0) -> None:
        self.servers: list[Server] = []
        self.is_over = False
        self.random, self.found = random.Random(seed), Findings()

    async def client(self) -> None:
        """Sends requests, on one connection as long as the server keeps it."""
        while not self.is_over:
            server = self.random.choice(self.servers)
            begun = time.perf_counter()
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            except ConnectionRefusedError:
                self.found.refused += 1
                await asyncio.sleep(0.01)
                continue
            self.found.slowest_connection = max(self.found.slowest_connection, time.perf_counter() - begun)
            try:
                await self.ask_until_closed(reader, writer)
            except (OSError, EOFError):
                self.found.resets += 1
            finally:
                writer.close()

    async def ask_until_closed(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(self.random.randrange(1, MOST_REQUESTS)):
            self.found.requests += 1
            writer.write(REQUEST)
            async with asyncio.timeout(LONGEST_WAIT):
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = head.split(b"content-length: ")[1].split(b"\r\n")[0]
                await reader.readexactly(int(length))
            self.found.statuses[int(head.split()[1])] += 1
            if b"connection: close" in head or self.is_over:
                return

    async def restart(self, command: list[str]) -> None:
        """Starts a server, and stops the oldest one, which clients know until it has ended."""
        self.servers.append(await started(command))
        oldest = self.servers[0]
        self.found.exit_codes.append(await oldest.stop())
        self.servers.remove(oldest)


async def roll(command: list[str], *, restarts: int, requests: int, clients: int, seconds: float) -> Findings:
    """Returns what clients find during restarts.

    Args:
        command: Starts a server on a free port.
        restarts: Number of restarts.
        requests: The clients send at least this number of requests, unless the time is over.
        clients: Number of clients.
        seconds: The longest time.
    """
    session = Restarts()
    try:
        async with asyncio.timeout(seconds):
            for _ in range(2):
                session.servers.append(await started(command))
            running = [asyncio.create_task(session.client()) for _ in range(clients)]
            for _ in range(restarts):
                await session.restart(command)
            while session.found.requests < requests:
                await asyncio.sleep(0.1)
            session.is_over = True
            await asyncio.gather(*running)
    finally:
        for server in session.servers:
            await server.stop()
    return session.found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model")
    options.add_argument("--restarts", type=int, default=10)
    options.add_argument("--requests", type=int, default=50_000)
    options.add_argument("--clients", type=int, default=64)
    options.add_argument("--seconds", type=float, default=3600.0)
    args = options.parse_args()
    command = [sys.executable, "-m", "bert_tasks", "serve", args.model, "--port", "0"]
    settings = {name: value for name, value in vars(args).items() if name != "model"}
    found = asyncio.run(roll(command, **settings))
    print(json.dumps(vars(found), indent=2))


if __name__ == "__main__":
    main()
