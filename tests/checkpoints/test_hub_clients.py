"""Models and data sets of a hub on loopback, through the real clients: revisions, broken downloads, tokens, offline."""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from huggingface_hub import ModelCard
from pyarrow import parquet
from safetensors.torch import load_file, save
from transformers import PreTrainedTokenizerBase

from support.hub_client import ask
from support.hub_server import READER, HubServer
from support.small_checkpoints import save_checkpoint
from support.training_runs import make_rows

# They start processes.
pytestmark = pytest.mark.slow

CHUNK = 10 * 2**20  # bytes that the client writes at once; what it has of the next chunk is lost with the connection
CARD = """---
license: cc0-1.0
configs:
{configs}---
Rows that were made for a test.
"""
RECIPE = """
task = "sequence-classification"
[model]
name = "org/model"
revision = "v1"
[settings]
max_length = 40
[data]
{data}
[optim]
epochs = 1
batch_size = 8
"""


def write_rows(path: Path, count: int, *, seed: int) -> None:
    rows = make_rows(count, seed=seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(["text,label", *(f"{r['text']},{r['label']}" for r in rows)]) + "\n", "utf-8")


def data_sets(root: Path) -> dict[str, Path]:
    """One of csv files by split, and one of parquet files with two configurations and a page."""
    for split, seed in (("train", 0), ("validation", 1), ("test", 2)):
        write_rows(root / "plain" / f"{split}.csv", 16, seed=seed)
        for number, config in enumerate(("small", "large")):
            name = root / "tables" / config / f"{split}-00000-of-00001.parquet"
            write_rows(name, 12 + 8 * number, seed=10 + 3 * number + seed)
    configs = "".join(
        f"- config_name: {config}\n  data_files:\n"
        + "".join(f"  - split: {split}\n    path: {config}/{split}-*\n" for split in ("train", "validation", "test"))
        for config in ("small", "large")
    )
    (root / "tables" / "README.md").write_text(CARD.format(configs=configs), "utf-8")
    return {"org/plain": root / "plain", "org/tables": root / "tables"}


@dataclass(frozen=True)
class Session:
    """What a client saw of the hub, then offline of its cache with the hub gone. By name of the thing."""

    hub: HubServer
    folder: Path
    home: Path
    online: Mapping[str, Any]
    offline: Mapping[str, Any]
    printed: str


def changed_weights(file: Path) -> bytes:
    return save({name: tensor * 1.5 for name, tensor in load_file(file).items()}, {"format": "pt"})


def recipes(folder: Path) -> dict[str, Path]:
    data = {
        "csv": 'dataset = "org/plain"\nrevision = "v1"',
        "parquet": 'dataset = "org/tables"\nconfig = "small"\nvalidation = "test"',
        "hidden": 'dataset = "org/hidden_rows"',
    }
    paths = {name: folder / f"{name}.toml" for name in data}
    for name, path in paths.items():
        path.write_text(RECIPE.format(data=data[name]), "utf-8")
    return paths


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory, wordpiece_tokenizer: PreTrainedTokenizerBase) -> Session:
    folder = tmp_path_factory.mktemp("clients")
    save_checkpoint(folder / "model", "bert", wordpiece_tokenizer, head="sequence", labels=("negative", "positive"))
    sets = data_sets(folder)
    models = dict.fromkeys(("org/model", "org/hidden"), folder / "model") | {"org/broken": folder / "broken"}
    (folder / "broken").mkdir()
    (folder / "broken" / "model.safetensors").write_bytes(random.Random(0).randbytes(CHUNK + 2**20))
    hub = HubServer(
        models,
        datasets={**sets, "org/hidden_rows": sets["org/plain"]},
        gated=("org/gated",),
        private=("org/hidden", "org/hidden_rows"),
    )
    repository = hub.repositories["model", "org/model"]
    first = repository.refs["v1"]
    repository.add({"model.safetensors": changed_weights(folder / "model" / "model.safetensors")})
    rows = hub.repositories["dataset", "org/plain"]
    rows.add({"train.csv": (folder / "plain" / "test.csv").read_bytes()})
    hub.cuts["model.safetensors"] = CHUNK + 1000
    paths, home = recipes(folder), folder / "home"
    things: dict[str, list[object]] = {
        "broken": ["folder", "org/broken"],
        "encoder": ["encoder", "org/model", None],
        "main": ["model", "org/model", None],
        "tag": ["model", "org/model", "v1"],
        "commit": ["model", "org/model", first],
        "no revision": ["model", "org/model", "v9"],
        "csv": ["train", paths["csv"], folder / "csv"],
        "parquet": ["train", paths["parquet"], folder / "parquet"],
        "no config": ["train", paths["parquet"], folder / "x", "data.config=huge"],
        "no split": ["train", paths["parquet"], folder / "x", "data.validation=dev"],
        "gated": ["model", "org/gated", None],
        "hidden without token": ["model", "org/hidden", None],
        "hidden rows": ["train", paths["hidden"], folder / "x"],
        "_1": ["token", "hf_wrong_0123456789"],
        "wrong token": ["model", "org/hidden", None],
        "_2": ["token", READER],
        "hidden": ["model", "org/hidden", None],
    }
    with hub:
        online, printed = ask(hub.environment(home), list(things.values()), cwd=folder)
    again: dict[str, list[object]] = {
        **{name: things[name] for name in ("encoder", "main", "tag", "commit", "hidden")},
        "csv": ["train", paths["csv"], folder / "csv_again"],
        "parquet": ["train", paths["parquet"], folder / "parquet_again"],
        "other rows": ["train", paths["csv"], folder / "y", "data.revision=main"],
        "not there": ["model", "org/other", None],
    }
    offline, more = ask(hub.environment(home, offline=True), list(again.values()), cwd=folder)
    return Session(
        hub=hub,
        folder=folder,
        home=home,
        online=dict(zip(things, online, strict=True)),
        offline=dict(zip(again, offline, strict=True)),
        printed=printed + more,
    )


def test_a_revision_is_pinned_and_its_commit_known(session: Session) -> None:
    refs = session.hub.repositories["model", "org/model"].refs
    main, tag, commit = (session.online[name] for name in ("main", "tag", "commit"))
    assert main["origin"] == {"name": "org/model", "revision": None, "commit": refs["main"]}
    assert tag["origin"] == {"name": "org/model", "revision": "v1", "commit": refs["v1"]}
    assert commit["origin"] == {"name": "org/model", "revision": refs["v1"], "commit": refs["v1"]}
    assert tag["score"] == commit["score"] != main["score"]
    assert "no such revision" in session.online["no revision"]["error"]


def test_a_broken_download_goes_on_where_it_broke(session: Session) -> None:
    """The rest is asked for by Range, and the file is the one on the hub to the last byte."""
    assert session.hub.ranges[0] == ("model.safetensors", f"bytes={CHUNK}-")
    file = Path(session.online["broken"]) / "model.safetensors"
    stored = session.hub.repositories["model", "org/broken"].commits
    (files,) = stored.values()
    assert sha256(file.read_bytes()).hexdigest() == files["model.safetensors"].sha256


def test_rows_of_the_hub_train(session: Session) -> None:
    refs = {name: session.hub.repositories["dataset", name].refs for name in ("org/plain", "org/tables")}
    csv, tables = session.online["csv"]["data"], session.online["parquet"]["data"]
    assert {name: facts["rows"] for name, facts in csv.items()} == {"train": 16, "validation": 16}
    assert {name: facts["rows"] for name, facts in tables.items()} == {"train": 12, "validation": 12}
    assert csv["train"]["hub"] == {
        "dataset": "org/plain",
        "config": None,
        "split": "train",
        "commit": refs["org/plain"]["v1"],
        "licence": None,
    }
    assert tables["validation"]["hub"] == {
        "dataset": "org/tables",
        "config": "small",
        "split": "test",
        "commit": refs["org/tables"]["main"],
        "licence": "cc0-1.0",
    }
    model = session.hub.repositories["model", "org/model"]
    assert session.online["csv"]["model"] == {"name": "org/model", "revision": "v1", "commit": model.refs["v1"]}


def test_the_card_names_what_came_from_the_hub(session: Session) -> None:
    card = ModelCard.load(session.folder / "parquet" / "model" / "README.md")
    assert (card.data.base_model, card.data.datasets) == ("org/model", ["org/tables"])
    result = card.data.eval_results[0]
    assert (result.dataset_type, result.dataset_config, result.dataset_split) == ("org/tables", "small", "test")
    assert result.dataset_revision == session.hub.repositories["dataset", "org/tables"].refs["main"]
    assert "| cc0-1.0 |" in card.text


def test_the_cache_serves_all_of_it_when_the_hub_is_gone(session: Session) -> None:
    for name in ("encoder", "main", "tag", "commit", "hidden"):
        assert session.offline[name] == session.online[name]
    for name in ("csv", "parquet"):
        assert session.offline[name]["model"] == session.online[name]["model"]
        for split, facts in session.online[name]["data"].items():
            assert session.offline[name]["data"][split] == facts
        again, first = (session.folder / f"{name}{end}" / "metrics.json" for end in ("_again", ""))
        assert json.loads(again.read_text("utf-8"))["metrics"] == json.loads(first.read_text("utf-8"))["metrics"]
    assert "HF_HUB_OFFLINE is set" in session.offline["not there"]["error"]


def test_offline_other_rows_than_those_asked_for_are_refused(session: Session) -> None:
    """`datasets` would take the newest commit in its cache, whatever the revision."""
    error = session.offline["other rows"]
    assert error["kind"] == "DataError"
    assert error["error"].startswith("org/plain (revision main): HF_HUB_OFFLINE is set")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gated", "access is restricted. Accept its conditions on the hub"),
        ("hidden without token", "no such model on the hub. Check the spelling. For a private model"),
        ("wrong token", "The hub does not accept the token (401)"),
        ("hidden rows", "org/hidden_rows: the data set cannot be loaded"),
        ("no config", "org/tables (config 'huge'): the data set cannot be loaded"),
        ("no split", "org/tables (config 'small'): the data set cannot be loaded"),
    ],
)
def test_what_the_hub_refuses_is_said_in_one_line(name: str, message: str, session: Session) -> None:
    error = session.online[name]["error"]
    assert message in error
    assert "\n" not in error
    assert len(error) < 500


def test_a_token_opens_what_is_private_and_is_never_shown(session: Session) -> None:
    assert session.online["hidden"]["score"] == session.online["tag"]["score"]
    said = session.printed + json.dumps([session.online, session.offline])
    assert READER not in said
    assert "hf_wrong" not in said
    files = [
        path
        for path in session.folder.rglob("*")
        if path.is_file() and path.suffix in (".json", ".md", ".toml", ".jsonl")
    ]
    assert not [path for path in files if READER in path.read_text("utf-8", errors="replace")]
