"""The server as people start it: one line when it answers, a clean end on signals, short errors with their codes."""

import asyncio
import gc
import json
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import fields, replace
from pathlib import Path

import httpx2
import pytest
import uvicorn
from pydantic import TypeAdapter
from starlette.responses import JSONResponse

import rolling_restart
import serve_soak
from bert_tasks import environment, serving
from bert_tasks.cli import main
from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.model.encoder_with_heads import ForwardFn
from bert_tasks.model.task_model import TaskModel
from bert_tasks.outputs.prediction import ON_REQUEST
from bert_tasks.serving import server
from bert_tasks.serving.limits import Limits
from bert_tasks.serving.listener import bound_listener, ignore_new_connections
from bert_tasks.serving.server import host_names
from bert_tasks.tasks import TASKS
from support.runs import CONSOLE, PATIENCE, Program
from support.servers import Serving, listening
from support.small_checkpoints import copied
from support.task_examples import EXAMPLES, FAMILY_EXAMPLES, TEXTS

FolderOf = Callable[[str], Path]


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["bert-tasks", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    assert isinstance(end.value.code, int)
    return end.value.code


@pytest.mark.slow
def test_a_served_model_answers_and_on_sigterm_ends_after_the_running_requests(
    folder_of: FolderOf, tmp_path: Path
) -> None:
    served = Serving(folder_of("single"), "--max-wait", 1000, "--grace", "inf", folder=tmp_path)
    assert served.url.startswith("http://127.0.0.1:")
    body = {"text": TEXTS[0]}
    with httpx2.Client(base_url=served.url, timeout=PATIENCE) as client, ThreadPoolExecutor(3) as pool:
        assert client.get("/readyz").json() == {"status": "ready"}
        large = client.post("/predict", content=b" " * 10_000_000, headers={"content-type": "application/json"})
        assert large.status_code == 413
        assert client.post("/predict", json=body).json()["label"] in EXAMPLES["single"].task.output.labels
        waiting = [pool.submit(httpx2.post, f"{served.url}/predict", json=body, timeout=PATIENCE) for _ in range(3)]
        while "bert_tasks_queue_depth 3.0" not in client.get("/metrics").text:
            assert not all(answer.done() for answer in waiting)
            time.sleep(0.01)
        served.program.send(signal.SIGTERM)
        assert [answer.result().status_code for answer in waiting] == [200] * 3
    ended = served.program.wait()
    assert (ended.code, ended.err) == (0, "")
    assert served.answered() == 4
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(served.url)


@pytest.mark.slow
def test_connections_beyond_the_limit_get_503_and_idle_ones_do_not_use_up_the_grace(
    folder_of: FolderOf, tmp_path: Path
) -> None:
    served = Serving(folder_of("single"), "--grace", 1, "--limit", "connections=9", folder=tmp_path)
    address = ("127.0.0.1", int(served.url.rpartition(":")[2]))
    with ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(socket.create_connection(address, PATIENCE))
        assert httpx2.get(f"{served.url}/healthz", timeout=PATIENCE).status_code == 503
    while httpx2.get(f"{served.url}/healthz", timeout=PATIENCE).status_code != 200:
        time.sleep(0.05)  # the others have to be noticed as closed
    with httpx2.Client(base_url=served.url, timeout=PATIENCE) as client, socket.create_connection(address):
        assert client.get("/healthz").status_code == 200
        served.program.send(signal.SIGTERM)
        ended = served.program.wait()
    assert (ended.code, ended.err) == (0, "")


LOADING_FOR_EVER = """
import sys
import torch
from bert_tasks.cli import main
from bert_tasks.serving import server

def loaded(model, **options):
    print("loading", flush=True)
    while True:
        torch.ones(300, 300) @ torch.ones(300, 300)

server.load_warm = loaded
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_model_is_loaded_ends_the_process(number: signal.Signals, tmp_path: Path) -> None:
    program = Program([sys.executable, "-c", LOADING_FOR_EVER, "serve", "any", "--port", "0"], folder=tmp_path)
    program.until(lambda: program.out.read_text("utf-8") == "loading\n")
    program.send(number)
    ended = program.wait(PATIENCE / 4)
    assert (ended.code, ended.out, ended.err) == (0, "loading\n", "")


@pytest.mark.parametrize(
    ("return_when", "fails"),
    [(asyncio.FIRST_COMPLETED, False), (asyncio.ALL_COMPLETED, False), (asyncio.ALL_COMPLETED, True)],
)
def test_a_signal_before_uvicorn_takes_them_stops_the_server(
    folder_of: FolderOf,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    return_when: str,
    fails: bool,
) -> None:
    """Also where the model has been loaded, or could not be, by the time that the server has stopped."""

    def broken(*_: object, **__: object) -> None:
        raise CheckpointError("no model")

    if fails:
        monkeypatch.setattr(server, "load_warm", broken)
    told, wait = list[str](), asyncio.wait
    monkeypatch.setattr(asyncio, "wait", lambda both, **_: wait(both, return_when=return_when))
    capture = uvicorn.Server.capture_signals

    def late(self: uvicorn.Server) -> AbstractContextManager[None]:
        signal.raise_signal(signal.SIGINT)
        return capture(self)

    monkeypatch.setattr(uvicorn.Server, "capture_signals", late)
    serving.serve(folder_of("single"), port=0, notify=told.append)
    assert told == []
    gc.collect()  # asyncio reports an exception that nobody looked at when its future is deleted
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def test_a_taken_port_and_a_foreign_address_are_told_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert command(monkeypatch, "serve", "no/such-model", "--port", port) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: cannot listen on 127.0.0.1:{port} (Address already in use")
    assert command(monkeypatch, "serve", "no/such-model", "--host", "203.0.113.9") == 2
    assert "cannot listen on 203.0.113.9:8000" in capsys.readouterr().err
    assert command(monkeypatch, "serve", "no/such-model", "--host", "127..0.0.1") == 2
    assert "error: cannot listen on 127..0.0.1:8000 (" in capsys.readouterr().err


def test_a_missing_extra_is_named_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "find_spec", lambda name: None if name == "uvicorn" else object())
    assert command(monkeypatch, "serve", "no/such-model") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: uvicorn not installed")
    assert "pip install '.[serve]'" in error


def test_a_model_that_cannot_be_loaded_ends_the_server_with_code_4(
    folder_of: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = copied(folder_of("single"), tmp_path / "broken")
    (broken / "model.safetensors").write_bytes((broken / "model.safetensors").read_bytes()[:-50])
    assert command(monkeypatch, "serve", broken, "--port", "0") == 4
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "model.safetensors" in error
    assert "Traceback" not in error


def test_a_checkpoint_without_a_head_is_not_served(base: Path) -> None:
    with pytest.raises(CheckpointError, match="no task head"):
        serving.serve(base / "bert", port=0)


def test_a_model_whose_scores_are_not_finite_is_not_served(
    folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nan(model: TaskModel, dtype: str) -> ForwardFn:
        return lambda batch: model(batch) * float("nan")

    monkeypatch.setattr(server, "logits_of", nan)
    with pytest.raises(CheckpointError, match="scores are not finite"):
        serving.serve(folder_of("single"), port=0)


def test_numbers_that_make_no_sense_are_refused() -> None:
    for setting, message in (
        ("rows=0", "--limit rows: Input should be greater than 0"),
        (f"queue={2**53 + 1}", "--limit queue: Input should be less than or equal to"),
        ("timeout=nan", "--limit timeout: Input should be"),
        ("rows=1.5", "--limit rows: Input should be a valid integer"),
        ("timeout", "--limit timeout: Input should be a valid number"),
        ("max_rows=3", "--limit max_rows: Unexpected .*The limits are body_bytes, rows"),
    ):
        with pytest.raises(UsageError, match=message):
            Limits.parse([setting])
    for options in ({"max_wait": -1}, {"max_wait": float("nan")}, {"grace": 0.0}, {"grace": float("nan")}):
        with pytest.raises(UsageError, match=next(iter(options))):
            serving.serve("no/such-model", **options)


def test_hosts_that_are_answered_depend_on_the_address() -> None:
    loopback = {"localhost", "127.0.0.1", "[::1]"}
    for host, bound, allowed, names in (
        ("127.0.0.1", "127.0.0.1", (), loopback),
        ("::1", "::1", ("*.example",), loopback | {"*.example"}),
        ("127.2", "127.0.0.2", (), loopback | {"127.2", "127.0.0.2"}),
        ("0.0.0.0", "0.0.0.0", (), {"*"}),
        ("0.0.0.0", "0.0.0.0", ("a.example",), {"0.0.0.0", "a.example"}),
    ):
        assert set(host_names(host, bound, allowed)) == names
    with pytest.raises(UsageError, match="'a\\*' is not a host name"):
        host_names("::1", "::1", ("a*",))


def test_a_caller_who_hangs_up_mid_body_harms_nobody(model_of: Callable[[str], TaskModel]) -> None:
    with listening([model_of("single")]) as (url,):
        host, port = url.removeprefix("http://").split(":")
        for sent in (
            b"",
            b"POST /predict HTTP/1.1\r\n",
            b"GARBAGE\r\n\r\n",
            b"POST /predict HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 50\r\n\r\n{",
        ):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(sent)
        response = httpx2.post(f"{url}/predict", json={"text": TEXTS[2]}, timeout=PATIENCE)
        assert response.status_code == 200


POST = (
    b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
)
LONG_HEADER = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"a" * 2**14
MANY_HEADERS = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + b"X-Many: a\r\n" * 1700


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        pytest.param(LONG_HEADER, 431, id="headers without an end"),
        pytest.param(MANY_HEADERS + b"\r\n", 431, id="many short headers"),
        pytest.param(b"GET /healthz?" + b"a" * 2**14 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431, id="a long path"),
        pytest.param(POST + b"3e8\r\n" + b" " * 1000 + b"\r\n5\r\n     \r\n0\r\n\r\n", 413, id="chunks too large"),
        pytest.param(POST + b"1\r\n{\r\n", 408, id="a chunk that does not come"),
        pytest.param(POST + b"3\r\n[1]\r\n0\r\n\r\n", 422, id="a whole chunk"),
    ],
)
def test_limits_of_what_a_connection_sends(limited: tuple[str, int], sent: bytes, status: int) -> None:
    with socket.create_connection(limited, PATIENCE) as connection:
        connection.sendall(sent)
        assert int(connection.recv(100).split()[1]) == status


@pytest.fixture(scope="module")
def limited(model_of: Callable[[str], TaskModel]) -> Iterator[tuple[str, int]]:
    """The address of a server with a small limit of the body and a short one of its time."""
    with listening([model_of("single")], limits=Limits(body_bytes=1000, timeout=2)) as (url,):
        yield "127.0.0.1", int(url.rpartition(":")[2])


@pytest.mark.slow
def test_what_still_runs_after_the_grace_time_is_given_up(folder_of: FolderOf, tmp_path: Path) -> None:
    served = Serving(folder_of("single"), "--max-wait", 60_000, "--grace", 1, "--limit", "timeout=100", folder=tmp_path)
    with ThreadPoolExecutor(1) as pool, httpx2.Client(base_url=served.url, timeout=PATIENCE) as client:
        waiting = pool.submit(httpx2.post, f"{served.url}/predict", json={"text": TEXTS[0]}, timeout=PATIENCE)
        while "bert_tasks_queue_depth 1.0" not in client.get("/metrics").text:
            time.sleep(0.01)
        served.program.send(signal.SIGTERM)
        ended = served.program.wait(50)
        assert waiting.result().status_code == 503
    assert ended.code == 0
    assert served.answered() == 0
    assert "Traceback" not in ended.err


@pytest.mark.slow
def test_a_short_soak_loses_nothing_and_uses_no_more_memory_or_files(
    folder_of: FolderOf, model_of: Callable[[str], TaskModel], tmp_path: Path
) -> None:
    served = Serving(folder_of("pair"), folder=tmp_path)
    rows = [{"text": text, "text_pair": text} for text in serve_soak.TEXTS]
    scores = [prediction.to_json()["scores"] for prediction in model_of("pair").predict(rows)]
    port = int(served.url.rpartition(":")[2])
    result = serve_soak.soak(port, served.program.process.pid, rows, scores, 12.0)
    served.program.send(signal.SIGTERM)
    assert served.program.wait().code == 0
    assert (result.failures, result.lost, result.exchanged) == (0, 0, 0)
    assert result.requests["good"] > 100
    assert result.requests["bomb"] > 1
    assert result.slowest_health < 5  # 0.5 s on an idle machine
    assert result.largest_memory_mib < 1500
    assert result.memory_mib[-1] - result.memory_mib[0] < 100
    assert result.open_files[-1] - result.open_files[0] < 60  # as many as there are clients


class StopsAtOnce(server.Server):
    """Stops when connections have been established that it could not accept yet, each with a request."""

    connections: list[socket.socket]

    async def on_tick(self, counter: int) -> bool:
        address = self.servers[0].sockets[0].getsockname()[:2]
        self.connections = [socket.create_connection(address, PATIENCE) for _ in range(20)]
        for connection in self.connections:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return True


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_connections_that_wait_when_the_server_stops_are_answered(host: str) -> None:
    listener = bound_listener(host, 0)
    stopping = StopsAtOnce(uvicorn.Config(JSONResponse("answered"), http="h11", lifespan="off", log_config=None))
    asyncio.run(stopping.serve(sockets=[listener]))
    for connection in stopping.connections:
        with closing(connection), connection.makefile("rb") as response:
            assert response.read().endswith(b'answered"')


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has filters of packets")
def test_no_connection_is_established_after_the_filter_is_set() -> None:
    with (
        bound_listener("127.0.0.1", 0) as listener,
        closing(socket.socket()) as early,
        closing(socket.socket()) as late,
    ):
        early.connect(listener.getsockname())
        ignore_new_connections(listener)
        late.settimeout(0.3)
        with pytest.raises(TimeoutError):
            late.connect(listener.getsockname())
        early.sendall(b"request")
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.recv(10) == b"request"


@pytest.mark.slow
def test_rolling_restarts_reset_no_request(folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = [*CONSOLE, "serve", str(folder_of("single")), "--port", "0"]
    running = rolling_restart.roll(command, restarts=3, requests=2000, clients=64, seconds=10 * PATIENCE)
    found = asyncio.run(running)
    assert (found.resets, found.exit_codes) == (0, [0, 0, 0])
    assert found.statuses == {200: found.requests}
    assert found.requests >= 2000


def test_settings_of_the_command_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, object] = {}
    monkeypatch.setattr(serving, "serve", lambda model, **settings: options.update(settings, model=model))
    monkeypatch.setattr("bert_tasks.cli.models.exit_without_shutdown", sys.exit)
    command(monkeypatch, "serve", "m", "--max-wait", 2, "--batch-tokens", 9, "--limit", "rows=7")
    assert (options["batch_tokens"], options["max_wait"]) == (9, 0.002)
    assert options["limits"] == replace(Limits(), rows=7)
    assert json.dumps(options["allowed_hosts"]) == "[]"


def test_the_guide_states_the_default_of_every_limit(repository: Path) -> None:
    table = re.findall(r"^\| `([a-z_]+)` \| ([\d,]+) ", (repository / "docs/how_to/serve.md").read_text("utf-8"), re.M)
    defaults = {name: int(number.replace(",", "")) for name, number in table}
    assert defaults == {field.name: getattr(Limits(), field.name) for field in fields(Limits)}


def test_the_guide_states_the_columns_and_predictions_of_every_task(repository: Path) -> None:
    text = (repository / "docs/how_to/serve.md").read_text("utf-8")
    rows = {
        name: (row, prediction)
        for name, row, prediction in re.findall(r"^\| `([a-z-]+)` \| (.*) \| (.*) \|$", text, re.M)
    }
    assert set(TASKS) <= set(rows)
    for example in (EXAMPLES | FAMILY_EXAMPLES).values():
        row, prediction = rows[example.task.name]
        for column in example.task.columns:
            assert f"`{column.name}`" in row or column.is_label or not column.required
        fields = TypeAdapter(example.task.output.prediction).json_schema(mode="serialization")["properties"]
        if prediction != "the same":
            assert [name for name in fields if f"`{name}`" not in prediction and name not in ON_REQUEST] == []
