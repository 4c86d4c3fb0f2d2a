"""What `bert-tasks env` and the file of an internal error show, and that neither shows a secret."""

import base64
import json
import string
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from bert_tasks import environment as module
from bert_tasks.cli.app import app
from bert_tasks.environment import (
    environment,
    environment_lines,
    masked,
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


@given(
    st.dictionaries(st.sampled_from(["sub", "exp", "iss"]), st.text(_SAFE, max_size=9), min_size=1),
    st.text(_SAFE, max_size=43),
)
def test_web_tokens_are_masked(payload: dict[str, str], signature: str) -> None:
    parts = [json.dumps(content).encode() for content in ({"alg": "HS256", "typ": "JWT"}, payload)]
    encoded = [base64.urlsafe_b64encode(content).rstrip(b"=").decode() for content in parts]
    shown = masked(f"Authorization failed for {'.'.join([*encoded, signature])} at 12:30")
    assert shown == "Authorization failed for *** at 12:30"


def test_ordinary_text_is_left_alone() -> None:
    text = 'File "/a/b.py", line 3, in f: KeyError: "label", see https://example.org/a?page=2 (12:30, me@example.org)'
    assert masked(text) == text


def test_it_says_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "yes")
    facts = environment()
    assert facts["versions"]["torch"] == version("torch")
    assert facts["torch"]["threads"] == 1
    assert facts["torch"]["devices"] == ["cpu"] or facts["torch"]["devices"][0].startswith("cuda:0 ")
    assert facts["offline"] is True
    assert facts["folders"]["HF_HOME"].startswith(f"{tmp_path / 'hub'} (does not exist yet, ")
    assert facts["cpu"]["usable_cores"] <= facts["cpu"]["cores"]
    assert facts["memory"]["total"].endswith(" GiB")
    assert {"tokenizers", "typer", "fastapi"} <= facts["versions"].keys()
    lines = [line.split() for line in environment_lines({**facts, "unknown": None})]
    for line in (["versions:"], ["torch", version("torch")], ["offline", "yes"], ["unknown", "-"]):
        assert line in lines


def test_missing_pieces_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*arguments: object) -> None:
        raise OSError("libcudart.so: cannot open shared object file")

    monkeypatch.setattr(module, "_torch", broken)
    monkeypatch.setattr(module, "_memory", broken)
    monkeypatch.setenv("PATH", str(tmp_path))
    facts = environment()
    assert facts["torch"] == "not known (OSError: libcudart.so: cannot open shared object file)"
    assert facts["memory"] == facts["torch"]
    assert environment_lines(facts)


def test_the_command_prints_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    ended = CliRunner().invoke(app, ["env", "--json"])
    assert ended.exit_code == 0
    assert json.loads(ended.stdout)["versions"]["bert-tasks"] == version("bert-tasks")
    assert [word for word in HIDDEN if word in ended.output] == []
