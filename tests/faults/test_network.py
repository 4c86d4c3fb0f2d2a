"""No command reports to anybody: a fresh home, no CI, HF_HUB_OFFLINE=1, each connection recorded."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from bert_tasks.encoder.int8 import int8_obstacle
from bert_tasks.variables import TELEMETRY_OFF, disable_telemetry
from support import network, runs
from support.evaluation_modules import write_module
from support.hub_commands import run_commands

SOCKET = "import socket\ntry: socket.create_connection(('192.0.2.1', 9), 0.2)\nexcept OSError: pass"
NAME = "import socket\ntry: socket.getaddrinfo('example.org', 80)\nexcept OSError: pass"
# Python's own patches do not see what a library of C++ does: a call past the socket module.
NATIVE = """
import ctypes, socket, struct
address = struct.pack("<H", socket.AF_INET) + struct.pack(">H", 53) + socket.inet_aton("192.0.2.1") + bytes(8)
with socket.socket(type=socket.SOCK_DGRAM) as made:
    ctypes.CDLL(None).connect(made.fileno(), address, len(address))
"""
API = """
import sys
import bert_tasks
print(bert_tasks.predict(sys.argv[1], [{"text": "a good day"}])[0].label)
print(len(bert_tasks.evaluate(sys.argv[2], sys.argv[3])))
"""


@pytest.fixture
def watch(tmp_path: Path) -> network.Watched:
    return network.watched(tmp_path / "watched")


@pytest.fixture(scope="module")
def exported(straight: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "onnx"
    data = straight.parent / "dev.csv"
    done = runs.run(
        [*runs.CONSOLE, "export", straight, "--to", "onnx", "--output", folder, "--data", data], folder=folder.parent
    )
    assert done.code == 0, done.err
    return folder


@pytest.mark.parametrize("code", [SOCKET, NAME, NATIVE])
def test_a_connection_is_seen(watch: network.Watched, code: str) -> None:
    if code == NATIVE and not watch.tracer:
        pytest.skip("strace is not there or not allowed")
    subprocess.run([*watch.tracer, sys.executable, "-c", code], env=watch.environment, check=True, timeout=60)
    assert watch.reached()


@pytest.mark.slow
def test_commands_reach_nobody_and_leave_nothing(
    watch: network.Watched, straight: Path, exported: Path, recipe: Path, tmp_path: Path
) -> None:
    data, folder = straight.parent / "dev.csv", tmp_path
    commands = [
        ["train", recipe, "--set", "optim.epochs=1", "--quiet"],
        ["predict", exported, data, "--output", folder / "onnx.jsonl"],
        ["evaluate", exported, data],
        ["export", straight, "--to", "int8", "--data", data, "--output", folder / "int8"],
        ["inspect", straight / "model"],
        ["check", recipe],
        ["init", data, "--output", folder / "new.toml"],
        ["report", folder / "run", "--output", folder / "report.html"],
        ["push", folder / "run", "me/mine", "--dry-run", "--language", "en"],
        ["init", "--schema"],
        ["env"],
    ]
    if int8_obstacle() is None:
        commands += [
            ["quantize", folder / "run", data],
            ["predict", folder / "run", data, "--dtype", "int8", "--output", folder / "int8.jsonl"],
        ]
    ended = run_commands(watch.environment, [({}, command) for command in commands], cwd=tmp_path, tracer=watch.tracer)
    codes = {str(command[0]): done.code for command, done in zip(commands, ended, strict=True)}
    assert {name for name, code in codes.items() if code != 0} == set(), ended
    assert watch.reached() == []
    assert watch.left() == []


@pytest.mark.slow
def test_a_module_of_evaluate_reaches_nobody_and_leaves_nothing(
    watch: network.Watched, straight: Path, tmp_path: Path
) -> None:
    module, place = write_module(tmp_path, "glue"), tmp_path / "place"
    place.mkdir()
    command = ["evaluate", straight, straight.parent / "dev.csv", "--metric", f"evaluate:{module}:mrpc"]
    missing = [*command[:-1], "evaluate:glue"]  # of the hub
    ended = run_commands(watch.environment, [({}, command), ({}, missing)], cwd=place, tracer=watch.tracer)
    assert [done.code for done in ended] == [0, 2], ended
    assert "glue_accuracy" in ended[0].out
    assert "metric 'evaluate:glue' cannot be loaded" in ended[1].err
    assert watch.reached() == []
    assert watch.left() == []
    assert list(place.iterdir()) == []


@pytest.mark.slow
def test_python_reaches_nobody_and_leaves_nothing(watch: network.Watched, straight: Path, exported: Path) -> None:
    done = subprocess.run(
        [*watch.tracer, sys.executable, "-c", API, exported, straight, straight.parent / "dev.csv"],
        env=watch.environment,
        capture_output=True,
        text=True,
        timeout=runs.PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert watch.reached() == []
    assert watch.left() == []


@pytest.mark.slow
def test_serve_reaches_nobody_and_leaves_nothing(watch: network.Watched, exported: Path, tmp_path: Path) -> None:
    out, err = tmp_path / "out.txt", tmp_path / "err.txt"
    command = [*watch.tracer, *runs.CONSOLE, "serve", exported, "--port", "0"]
    with out.open("w") as first, err.open("w") as second:
        server = subprocess.Popen(
            list(map(str, command)), env=watch.environment, stdout=first, stderr=second, start_new_session=True
        )
    try:
        end = time.monotonic() + runs.PATIENCE
        while " on http://" not in out.read_text("utf-8"):
            assert server.poll() is None, err.read_text("utf-8")
            assert time.monotonic() < end
            time.sleep(0.05)
        url = out.read_text("utf-8").split(" on ")[1].split()[0]
        body = json.dumps({"inputs": [{"text": "a good day"}]}).encode()
        asked = urllib.request.Request(f"{url}/predict", body, {"content-type": "application/json"})
        with urllib.request.urlopen(asked, timeout=runs.PATIENCE) as answer:
            assert answer.status == 200
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(runs.PATIENCE)
    assert watch.reached() == []
    assert watch.left() == []


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TELEMETRY_OFF:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ORT_DISABLE_TELEMETRY", "0")
    disable_telemetry()
    assert os.environ["ORT_DISABLE_TELEMETRY"] == "0"
    assert {name: os.environ[name] for name in list(TELEMETRY_OFF)[1:]} == dict(list(TELEMETRY_OFF.items())[1:])
