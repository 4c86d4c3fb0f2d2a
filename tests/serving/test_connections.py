"""Connections that keep the server waiting are closed, and neither they nor their bodies use up the machine."""

import json
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx2
import pytest

from bert_tasks.errors import UsageError
from bert_tasks.serving import connections
from support.runs import PATIENCE
from support.servers import Serving
from support.task_examples import TEXTS

FolderOf = Callable[[str], Path]
HEAD = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
OPTIONS = ("--header-timeout", 1, "--timeout", 3, "--max-connections", 40, "--max-total-body", 100_000)


@pytest.fixture(scope="module")
def served(folder_of: FolderOf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    found = Serving(folder_of("single"), *OPTIONS, folder=tmp_path_factory.mktemp("limited"))
    yield found
    found.program.process.terminate()
    ended = found.program.wait()
    assert ended.code == 0
    assert "Traceback" not in ended.err


def connect(served: Serving) -> socket.socket:
    port = int(served.url.rpartition(":")[2])
    return socket.create_connection(("127.0.0.1", port), PATIENCE)


def seconds_until_closed(connection: socket.socket) -> float:
    started = time.monotonic()
    with suppress(ConnectionResetError):
        while connection.recv(2**16):
            pass
    return time.monotonic() - started


def healthy(served: Serving) -> bool:
    return httpx2.get(f"{served.url}/healthz", timeout=PATIENCE).status_code == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /pre",
        HEAD,
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea",
        b"GET /healthz HTTP/1.1\r\nHost: evil\r\nContent-Length: 9\r\n\r\n1234",
    ],
    ids=["nothing", "half a line", "half a header", "half a second header", "refused, without its body"],
)
def test_a_client_that_sends_no_request_is_closed(served: Serving, sent: bytes) -> None:
    with connect(served) as connection:
        connection.sendall(sent)
        assert seconds_until_closed(connection) < PATIENCE / 4


def seconds_until_refused(connection: socket.socket, part: bytes) -> float:
    """How long a part may be sent again and again."""
    started = time.monotonic()
    with suppress(OSError):
        while time.monotonic() - started < PATIENCE:
            connection.sendall(part)
            time.sleep(0.02)
    return time.monotonic() - started


def test_a_header_that_comes_byte_by_byte_is_not_waited_for(served: Serving) -> None:
    with connect(served) as connection:
        assert seconds_until_refused(connection, b"X") < PATIENCE / 4


def test_a_reader_who_does_not_take_the_answers_is_closed(served: Serving) -> None:
    """Many requests on one connection, none of whose answers is read."""
    with connect(served) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        part = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100
        assert seconds_until_refused(connection, part) < PATIENCE / 2


def test_connections_beyond_the_limit_are_refused_and_others_let_in_later(served: Serving) -> None:
    with ExitStack() as stack:
        opened = [stack.enter_context(connect(served)) for _ in range(60)]
        refused = [found for found in opened[45:] if found.recv(4096).startswith(b"HTTP/1.1 503")]
        assert refused
    while True:  # the others have to be noticed as closed
        if httpx2.get(f"{served.url}/healthz", timeout=PATIENCE).status_code == 200:
            break


def test_bodies_beyond_the_memory_for_all_of_them_get_503(served: Serving) -> None:
    """Unfinished bodies; a small request is answered as soon as they are given up."""
    body = json.dumps({"text": TEXTS[0]})
    with ExitStack() as stack:
        opened = [stack.enter_context(connect(served)) for _ in range(4)]
        for connection in opened:
            connection.sendall(HEAD + b"Content-Length: 40000\r\n\r\n" + b" " * 39_000)
        time.sleep(0.3)
        full = httpx2.post(f"{served.url}/predict", content=b" " * 30_000, timeout=PATIENCE)
        assert (full.status_code, full.headers["retry-after"]) == (503, "1")
        assert "bodies of other requests" in full.json()["detail"]
        assert healthy(served)
        answers = [connection.recv(100) for connection in opened]  # after --timeout
        assert {answer.split()[1] for answer in answers} == {b"408"}
    found = httpx2.post(
        f"{served.url}/predict", content=body, headers={"content-type": "application/json"}, timeout=PATIENCE
    )
    assert found.status_code == 200


def test_more_connections_than_descriptors_end_in_one_message(folder_of: FolderOf, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        served = Serving(folder_of("single"), "--header-timeout", 2, folder=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    with ExitStack() as stack:
        for _ in range(600):
            stack.enter_context(connect(served))
        time.sleep(1)
    while httpx2.get(f"{served.url}/healthz", timeout=PATIENCE).status_code != 200:
        time.sleep(0.05)
    served.program.process.terminate()
    ended = served.program.wait()
    assert ended.code == 0
    assert "128 connections are open" in ended.err
    assert len(ended.err) < 1000


def test_the_limit_of_open_files_lowers_the_limit_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, allowed in ((resource.RLIM_INFINITY, 512), (20_000, 512), (512, 384), (129, 1)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, files=files: (files, files))
        assert connections.allowed_connections(512) == allowed
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (128, 128))
    with pytest.raises(UsageError, match="only 128 files may be open"):
        connections.allowed_connections(512)
