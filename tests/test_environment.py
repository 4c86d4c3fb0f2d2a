"""What `bert-tasks env` and the file of an internal error show, and that neither shows a secret."""

import base64
import json
import os
import platform
import string
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_tasks import environment as module
from bert_tasks.cli import entry as crash
from bert_tasks.environment import (
    environment,
    environment_lines,
    limit_spinning,
    masked,
    masked_arguments,
    shown_variables,
)

SECRETS = {
    "HF_TOKEN": "hf_abcdefghijklmnopqrstuvwxyz",
    "HF_TOKEN_PATH": "/home/ann/token-of-mine",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "MLFLOW_TRACKING_PASSWORD": "hunter2hunter2",
    "MLFLOW_TRACKING_USERNAME": "annabel-lee",
    "TRACKIO_WRITE_TOKEN": "trackio-write-me",
    "HUGGING_FACE_HUB_TOKEN": "hf_zyxwvutsrqponmlkjihgfedcba",
    "NCCL_MY_SECRET": "raven-nevermore",
    "MLFLOW_TRACKING_URI": "https://ann:pendulum@tracker.example/path?api_key=usher-fall",
    "HTTPS_PROXY": "ann:amontillado@proxy.example:3128",
    "https_proxy": "http://cask@proxy.example:3128",
    "WANDB_BASE_URL": "postgres://ann:p:ligeia@db.example/x",
    "HF_ENDPOINT": "hf_inthevalueabcdefghijklm",
    "AWS_SECRET_ACCESS_KEY": "masque-of-red",  # not of interest, and so not even its name
}
HIDDEN = (
    *(
        "hf_abc",
        "token-of-mine",
        "0123456789abcdef",
        "hunter2",
        "annabel",
        "write-me",
        "hf_zyx",
        "nevermore",
        "pendulum",
    ),
    *("usher", "amontillado", "cask", "ligeia", "hf_inthe", "masque", "AWS_SECRET"),
)
OPEN = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "0,1"}


def test_secrets_are_masked_and_the_rest_is_shown() -> None:
    shown = shown_variables({**SECRETS, **OPEN, "EDITOR": "vi"})
    text = json.dumps(shown)
    assert [word for word in HIDDEN if word in text] == []
    assert {name: shown[name] for name in OPEN} == OPEN
    assert shown["HF_TOKEN"] == shown["WANDB_API_KEY"] == "(set)"
    assert shown["MLFLOW_TRACKING_URI"] == "https://***@tracker.example/path?api_key=***"
    assert shown["HTTPS_PROXY"] == "***@proxy.example:3128"
    assert shown.keys() == SECRETS.keys() - {"AWS_SECRET_ACCESS_KEY"} | OPEN.keys()


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["train", "a.toml", "--set", "optim.epochs=1"], ["train", "a.toml", "--set", "optim.epochs=1"]),
        (["push", "--token", "hf_x"], ["push", "--token", "***"]),
        (["push", "--token=hf_x"], ["push", "--token=***"]),
        (["--set", "data.secret=x"], ["--set", "data.secret=***"]),
        (["serve", "--api-key", "abc", "m"], ["serve", "--api-key", "***", "m"]),
        (["predict", "https://u:p@h/x"], ["predict", "https://***@h/x"]),
        (["predict", "https://u:p@ss@h/x"], ["predict", "https://***@h/x"]),
        (["predict", "https://u:p/ss@h/x"], ["predict", "https://***@h/x"]),
        (["--set=run.token=X"], ["--set=run.token=***"]),
        (["--set=data.train=a.csv"], ["--set=data.train=a.csv"]),
        (["--column=text=my=secret=X"], ["--column=text=my=secret=***"]),
        (["--data=https://u:p@h/x"], ["--data=https://***@h/x"]),
    ],
)
def test_a_command_line_without_secrets(given: list[str], shown: list[str]) -> None:
    assert masked_arguments(given) == shown


_SAFE = string.ascii_letters + string.digits


@given(
    st.one_of(
        st.tuples(
            st.sampled_from(
                ["hf_", "ghp_", "gho_", "ghs_", "ghu_", "ghr_", "github_pat_", "glpat-", "gsk_", "sk-", "sk-proj-"]
            ),
            st.text(_SAFE, min_size=20, max_size=40),
        ),
        st.tuples(st.just("AIza"), st.text(_SAFE + "_-", min_size=35, max_size=35)),
        st.tuples(st.just("ya29."), st.text(_SAFE, min_size=20)),
        st.tuples(st.sampled_from(["AKIA", "ASIA"]), st.text(string.ascii_uppercase, min_size=16, max_size=16)),
    ),
    st.sampled_from(["{}", "key {} refused", "'{}'", "token={}", "x:{},", "--set=data.train={}"]),
)
def test_keys_are_masked_wherever_they_are(key: tuple[str, str], around: str) -> None:
    text = around.format("".join(key))
    assert key[1] not in masked(text)
    assert key[1] not in " ".join(masked_arguments([text]))


@given(
    st.dictionaries(st.sampled_from(["sub", "exp", "iss"]), st.text(_SAFE, max_size=9), min_size=1),
    st.text(_SAFE, max_size=43),
)
def test_web_tokens_are_masked(payload: dict[str, str], signature: str) -> None:
    parts = [json.dumps(part).encode() for part in ({"alg": "HS256", "typ": "JWT"}, payload)]
    encoded = [base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts]
    shown = masked(f"Authorization failed for {'.'.join([*encoded, signature])} at 12:30")
    assert shown == "Authorization failed for *** at 12:30"


def test_ordinary_text_is_left_alone() -> None:
    text = 'File "/a/b.py", line 3, in f: KeyError: "label", see https://example.org/a?page=2 (12:30, me@example.org)'
    assert masked(text) == text


def test_it_says_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "yes")
    found = environment()
    assert found["versions"]["torch"] == version("torch")
    assert found["torch"]["threads"] == 1
    assert found["torch"]["devices"] == ["cpu"] or found["torch"]["devices"][0].startswith("cuda:0 ")
    assert found["offline"] is True
    assert found["folders"]["HF_HOME"].startswith(f"{tmp_path / 'hub'} (does not exist yet, ")
    assert found["cpu"]["usable_cores"] <= found["cpu"]["cores"]
    assert found["memory"]["total"].endswith(" GiB")
    lines = environment_lines(found)
    assert ["torch", version("torch")] in [line.split() for line in lines]


def test_values_are_shown_in_words() -> None:
    found = {"flags": {"on": True, "off": False}, "many": ["a", "b"], "unknown": None, "count": 0}
    assert [line.split() for line in environment_lines(found)] == [
        ["flags:"],
        ["on", "yes"],
        ["off", "no"],
        ["many", "a;", "b"],
        ["unknown", "-"],
        ["count", "0"],
    ]


def test_the_commit_of_a_checkout_only(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "__file__", str(tmp_path / "site-packages" / "bert_tasks" / "environment.py"))
    assert environment(devices=False)["commit"] is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *command], check=True)
    (tmp_path / "pyproject.toml").write_text("", "utf-8")
    monkeypatch.setattr(module, "__file__", str(tmp_path / "bert_tasks" / "environment.py"))
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert environment(devices=False)["commit"] == head


def test_missing_pieces_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*arguments: object) -> None:
        raise OSError("libcudart.so: cannot open shared object file")

    monkeypatch.setattr(module, "_torch", broken)
    monkeypatch.setattr(module, "_memory", broken)
    monkeypatch.setattr(module, "_commit", broken)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = environment()
    assert found["torch"] == "not known (OSError: libcudart.so: cannot open shared object file)"
    assert found["memory"] == found["commit"] == found["torch"]
    assert environment_lines(found)


def test_the_command_prints_no_secret() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bert_tasks", "env", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, **SECRETS},
    )
    assert json.loads(done.stdout)["versions"]["bert-tasks"] == version("bert-tasks")
    assert [word for word in HIDDEN if word in done.stdout] == []
    assert done.stderr == ""


def test_an_internal_error_leaves_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRETS["HF_TOKEN"])
    monkeypatch.setattr(crash.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["bert-tasks", "train", "r.toml", "--token", "hf_mine"])
    secret = "locals are not shown: hunter2"
    try:
        int("https://ann:pendulum@host", base=len(secret))
    except ValueError as error:
        path = Path(str(crash.write_crash_file(error)))
    text = path.read_text("utf-8")
    assert path.name.startswith("bert-tasks-crash-")
    assert path.stat().st_mode & 0o777 == 0o600
    assert "command: bert-tasks train r.toml --token ***\n" in text
    assert "Traceback (most recent call last)" in text
    assert "in test_an_internal_error_leaves_a_file" in text
    assert ["torch", version("torch")] in [line.split() for line in text.splitlines()]
    assert [word for word in ("hf_abc", "hf_mine", "pendulum@", "not shown: hunter2\n") if word in text] == []
    monkeypatch.setattr(crash.tempfile, "tempdir", str(tmp_path / "not" / "there"))
    assert crash.write_crash_file(ValueError("x")) is None


_FREED = """
import json, resource
from pathlib import Path
from bert_tasks.environment import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    len(b"x" * 2**27)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

def heap_flags():
    maps = Path("/proc/self/smaps").read_text().split("[heap]")[1:]
    return [one.split("VmFlags:")[1].splitlines()[0].split() for one in maps]

found = {}
faults()
found["before"] = faults()
with keep_freed_memory():
    faults()
    found["kept"], found["kept_bytes"], found["flags"] = faults(), resident(), heap_flags()
found["returned_bytes"] = resident()
faults()
found["after"] = faults()
print(json.dumps(found))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc has these parameters")
def test_freed_memory_is_used_again_and_returned_afterwards() -> None:
    run = subprocess.run([sys.executable, "-c", _FREED], capture_output=True, text=True, check=True)
    found = json.loads(run.stdout)
    assert found["kept"] < 8
    assert found["kept_bytes"] - found["returned_bytes"] > 2**26
    assert found["before"] == pytest.approx(found["after"], abs=8)
    if Path("/sys/kernel/mm/transparent_hugepage/enabled").is_file():
        assert "hg" in found["flags"][-1]
    else:
        assert found["before"] > 1000


_HEAPS = """
import ctypes, threading
from pathlib import Path
from bert_tasks.environment import keep_freed_memory

allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(("malloc", ctypes.CDLL(None)))
together, addresses = threading.Barrier(2, timeout=60), []

def work():
    addresses.append(allocate(2**16))
    together.wait()  # the heap of a thread that has ended would be used again

with keep_freed_memory():
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
heaps = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if "[heap]" in line]
print(sum(any(int(start, 16) <= one < int(end, 16) for start, end in heaps) for one in addresses))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc has these parameters")
def test_of_two_threads_one_allocates_from_the_main_heap() -> None:
    run = subprocess.run([sys.executable, "-c", _HEAPS], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["1"], "of the two threads, those in the main heap"


@pytest.mark.skipif(sys.platform != "linux", reason="a limit of Linux")
def test_too_few_addresses_for_huge_pages_are_no_error() -> None:
    lines = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29))\n" + _FREED
    run = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("found", "limit", "reason"),
    [
        ({"avx512_bf16": True, "amx_bf16": False}, None, None),
        ({"avx512_bf16": False, "amx_bf16": True}, "ALL", None),
        ({"avx512_bf16": True}, "AVX512_CORE_BF16", None),
        ({"architecture": "aarch64"}, None, None),
        ({"avx512_bf16": False, "amx_bf16": False}, None, "this processor lacks"),
        ({"avx512_bf16": True, "amx_bf16": True}, "avx2", "ONEDNN_MAX_CPU_ISA=AVX2 excludes"),
    ],
)
def test_where_bfloat16_is_slower_a_note_says_why(monkeypatch, found, limit, reason):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    if limit is not None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"architecture": "x86_64", **found})
    note = module.slow_bfloat16()
    assert note is None if reason is None else reason in note


@pytest.mark.parametrize(
    ("cores", "given", "expected"),
    [(2, {}, "10000"), (3, {}, None), (1, {"GOMP_SPINCOUNT": "7"}, "7"), (2, {"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_of_openmp_wait_less_where_cores_are_few(monkeypatch, cores, given, expected):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "unset")  # so that it is restored
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    limit_spinning()
    assert os.environ.get("GOMP_SPINCOUNT") == expected
