"""Pushing a model: what goes and what stays, and every refusal in one line without the token."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, Response
from huggingface_hub.utils import get_session
from transformers import PreTrainedTokenizerBase

from bert_tasks.cards.push import push
from bert_tasks.errors import BertTasksError, CheckpointError, UsageError
from support.hub_commands import Ended, run_commands
from support.hub_server import READER, WRITER, HubServer
from support.small_checkpoints import copied, save_checkpoint

MODEL = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md", "LICENSE.txt"}
OTHERS = {"run.json", "metrics.jsonl", ".env", ".cache", "checkpoints", "train.csv", "optimizer.safetensors", "evil.py"}
PLAIN = {"HF_HUB_DISABLE_XET": "1"}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, wordpiece_tokenizer: PreTrainedTokenizerBase) -> Path:
    folder = tmp_path_factory.mktemp("push") / "model"
    save_checkpoint(folder, "bert", wordpiece_tokenizer, head="sequence", labels=("no", "yes"))
    return folder


@pytest.fixture(scope="session")
def full(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with much else in it, which a run's folder also might get from a user."""
    folder = copied(model, tmp_path_factory.mktemp("full") / "model")
    (folder / "checkpoints" / "ckpt-1").mkdir(parents=True)
    (folder / "checkpoints" / "ckpt-1" / "weights.safetensors").write_text("x")
    (folder / ".cache").mkdir()
    for name in ("README.md", "LICENSE.txt", *OTHERS - {"checkpoints", ".cache"}):
        (folder / name).write_text(f"{name}\n")
    return folder


def test_only_the_model_and_its_card_go(full: Path) -> None:
    plan = push(full, "org/name", dry_run=True)
    assert set(plan.files) == MODEL
    assert set(plan.left_out) == OTHERS
    assert plan.files["model.safetensors"] == (full / "model.safetensors").stat().st_size
    assert (plan.public, plan.url, plan.branch) == (False, None, "main")


def test_graphs_go_with_the_model(model: Path, tmp_path: Path) -> None:
    folder = copied(model, tmp_path / "model")
    (folder / "onnx").mkdir()
    for name in ("model.onnx", "model.onnx.data", "model_quantized.onnx", "notes.txt"):
        (folder / "onnx" / name).write_text(name)
    plan = push(folder, "org/name", dry_run=True)
    graphs = {"onnx/model.onnx", "onnx/model.onnx.data", "onnx/model_quantized.onnx"}
    assert set(plan.files) - set(push(model, "org/name", dry_run=True).files) == graphs
    assert plan.left_out == ("onnx/notes.txt",)


def test_a_finished_run_means_its_model(model: Path, tmp_path: Path) -> None:
    copied(model, tmp_path / "model")
    (tmp_path / "run.json").write_text(json.dumps({"settings": {}}))
    with pytest.raises(UsageError, match="the run is not finished"):
        push(tmp_path, "org/name", dry_run=True)
    summary = {"metrics": {}, "last_metrics": {}, "best_step": 1, "steps": 1, "train_seconds": 0.5}
    (tmp_path / "metrics.json").write_text(json.dumps({**summary, "stopped_early": False, "notes": []}))
    assert push(tmp_path, "org/name", dry_run=True).folder == tmp_path / "model"


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (shutil.rmtree, UsageError, "no such folder"),
        (lambda folder: (shutil.rmtree(folder), folder.touch()), UsageError, "a file. Expected the folder"),
        (lambda folder: (folder / "config.json").unlink(), UsageError, r"has no config\.json\. Expected a folder"),
        (
            lambda folder: (folder / "README.md").symlink_to("/etc/hostname"),
            UsageError,
            r"is a link\. Push a copy of the folder \(`cp -rL",
        ),
        (
            lambda folder: (folder / "pytorch_model.bin").write_bytes(b"x"),
            UsageError,
            r"holds pickled weights\. Load the model and save it",
        ),
        (lambda folder: os.truncate(folder / "model.safetensors", 500), CheckpointError, r"model\.safetensors"),
        (lambda folder: (folder / "model.safetensors").unlink(), CheckpointError, "no weights"),
    ],
    ids=["gone", "file", "empty", "link", "pickle", "cut", "missing"],
)
def test_a_folder_that_is_no_good_model_is_refused(
    damage: Callable[[Path], object], error: type[BertTasksError], message: str, model: Path, tmp_path: Path
) -> None:
    folder = copied(model, tmp_path / "model")
    damage(folder)
    with pytest.raises(error, match=message):
        push(folder, "org/name", dry_run=True)


@pytest.mark.parametrize("repo", ["", "name", "a/b/c", "org/na me"])
def test_a_name_that_no_repository_can_have(repo: str, model: Path) -> None:
    with pytest.raises(UsageError, match="expected OWNER/NAME"):
        push(model, repo, dry_run=True)


def test_offline_nothing_is_pushed(model: Path) -> None:
    with pytest.raises(UsageError, match="HF_HUB_OFFLINE is set"):
        push(model, "org/name")


@pytest.fixture(scope="module")
def hub(model: Path) -> Iterator[HubServer]:
    with HubServer({"org/public": model, "org/hidden": model}, private=("org/hidden",)) as server:
        yield server


@pytest.fixture(scope="module")
def pushed(hub: HubServer, full: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """What a series of pushes to the hub ended with, by name."""
    writer, bare = {"HF_TOKEN": WRITER}, {"HF_TOKEN": None}
    cases: dict[str, tuple[dict[str, str | None], list[object]]] = {
        "dry": (bare, [full, "org/dry", "--dry-run"]),
        "no token": (bare, [full, "org/none"]),
        "bad token": ({"HF_TOKEN": "hf_wrong_0123456789"}, [full, "org/none"]),
        "read token": ({"HF_TOKEN": READER}, [full, "org/none"]),
        "other owner": (writer, [full, "other/none"]),
        "public": (writer, [full, "org/public"]),
        "new": (writer, ["--debug", full, "org/new", "--message", "First"]),
        "again": (writer, [full, "org/new"]),
        "branch": (writer, [full, "org/new", "--branch", "v2", "--json"]),
        "open": (writer, [full, "org/open", "--public"]),
    }
    home = tmp_path_factory.mktemp("home")
    commands = [(changes, ["push", *arguments]) for changes, arguments in cases.values()]
    return dict(zip(cases, run_commands(hub.environment(home) | PLAIN, commands, cwd=home), strict=True))


@pytest.mark.slow  # each push is a process of its own
def test_no_token_is_ever_shown(pushed: dict[str, Ended]) -> None:
    shown = "".join(ended.out + ended.err for ended in pushed.values())
    assert not [token for token in (WRITER, READER, "hf_wrong") if token in shown]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "code", "message"),
    [
        ("no token", 2, "there is no token. Run `hf auth login`"),
        ("bad token", 4, "The hub does not accept the token (401)"),
        ("read token", 4, "may not write there (403)"),
        ("other owner", 4, "may not write there (403)"),
        ("public", 2, "org/public exists and is public. Pass --public"),
    ],
)
def test_a_refusal_is_one_line(case: str, code: int, message: str, pushed: dict[str, Ended]) -> None:
    ended = pushed[case]
    assert (ended.code, ended.out) == (code, "")
    assert ended.err.startswith("error: ")
    assert message in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.slow
def test_a_dry_run_contacts_nothing(pushed: dict[str, Ended], hub: HubServer) -> None:
    ended = pushed["dry"]
    assert ended.code == 0
    assert all(name in ended.out for name in MODEL)
    assert "left out: .cache, .env, checkpoints" in ended.out
    assert "dry run, which sent nothing to org/dry (private), branch main" in ended.out
    assert ("model", "org/dry") not in hub.repositories
    assert hub.requests[0] == "POST /api/repos/create"  # the bad token's; before it nothing was asked


@pytest.mark.slow
def test_what_is_pushed_is_what_lies_in_the_folder(pushed: dict[str, Ended], hub: HubServer, full: Path) -> None:
    assert pushed["new"].code == 0, pushed["new"].err
    repository = hub.repositories["model", "org/new"]
    files = repository.commits[repository.refs["main"]]
    assert set(files) == MODEL | {".gitattributes"}
    assert {name: files[name].content for name in MODEL} == {name: (full / name).read_bytes() for name in MODEL}
    assert repository.private
    assert repository.messages[:2] == ["initial commit", "First"]
    assert repository.refs["main"] in pushed["new"].out
    assert pushed["again"].code == 0, pushed["again"].err
    assert sum(request.startswith("PUT /lfs/") for request in hub.requests) == 1  # the weights are sent once
    content = json.loads(pushed["branch"].out)
    assert content["url"].endswith(repository.refs["v2"])
    assert set(content["files"]) == MODEL
    assert "org/open (public)" in pushed["open"].out
    assert not hub.repositories["model", "org/open"].private


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of huggingface_hub's own request
def test_a_model_is_sent_and_refusals_are_told(hub: HubServer, full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, as the slow tests do it by commands."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", WRITER)
    sent = push(full, "org/sent", branch="v2", message="First")
    repository = hub.repositories["model", "org/sent"]
    files = repository.commits[repository.refs["v2"]]
    assert {name: files[name].content for name in MODEL} == {name: (full / name).read_bytes() for name in MODEL}
    assert set(files) == MODEL | {".gitattributes"}
    assert repository.private
    assert sent.url is not None
    assert sent.url.endswith(repository.refs["v2"])
    with pytest.raises(UsageError, match=r"org/public exists and is public\. Pass --public"):
        push(full, "org/public")
    monkeypatch.setenv("HF_TOKEN", READER)
    with pytest.raises(CheckpointError, match=r"may not write there \(403\)"):
        push(full, "org/none")


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (False, r"http://127\.0\.0\.1:9 failed \(ConnectError\)"),
        pytest.param(
            *(True, "HF_HUB_DISABLE_XET=1 sends files by plain HTTP"),
            marks=pytest.mark.skipif(
                version("huggingface_hub").startswith("1."), reason="it turns to plain HTTP by itself"
            ),
        ),
    ],
)
def test_ways_to_the_hub_that_fail(
    answers: bool, message: str, hub: HubServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub that is not there, and one that knows no xet when the client wants it."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint if answers else "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", WRITER)
    with pytest.raises(CheckpointError, match=rf"^org/way: bert_tasks published nothing\. .*{message}") as caught:
        push(model, "org/way")
    assert "\n" not in str(caught.value)
    assert WRITER not in str(caught.value)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_the_status_of_a_refusal_is_found_in_the_error_or_in_its_cause(
    is_wrapped: bool, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = get_session().build_request("POST", "http://hub")
    refusal = HfHubHTTPError("refused", response=Response(503, request=request))

    def create_repo(*_: object, **__: object) -> None:
        if is_wrapped:
            raise RuntimeError("the upload failed") from refusal
        raise refusal

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", WRITER)
    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    with pytest.raises(CheckpointError, match=r"bert_tasks published nothing\. The hub .* answered 503\. Try again"):
        push(model, "org/way")
