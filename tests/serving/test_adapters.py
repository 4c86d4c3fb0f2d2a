"""Several adapters on one base: each predicts as its folder alone, they share the base's memory, errors are told."""

import asyncio
import json
import shutil
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import pytest
from pydantic import TypeAdapter
from transformers import PreTrainedTokenizerBase
from typer.testing import CliRunner

from bert_tasks import TaskModel, evaluate, fit, predict
from bert_tasks.cli.app import app
from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.serving import serve
from bert_tasks.serving.app import build_app
from bert_tasks.serving.batching import Batcher
from bert_tasks.serving.gate import Gate
from bert_tasks.serving.metrics import ServerMetrics
from bert_tasks.serving.requests import answers_schema
from bert_tasks.serving.server import load_served
from support.servers import SLOW, errors_of
from support.small_checkpoints import save_checkpoint
from support.task_contract import unlabelled
from support.task_examples import EXAMPLES

SETTINGS: dict[str, Any] = {"epochs": 1, "batch_size": 8, "learning_rate": 1e-2, "progress": False}
LOADING: dict[str, Any] = {"task": None, "settings": None, "revision": None, "dtype": "float32"}
TEXTS = [row["text"] for row in EXAMPLES["single"].rows]


@pytest.fixture(scope="module")
def folder(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``base``, ``trained`` with a head of one task, and adapters: ``one`` of its task, ``tags`` of another one."""
    folder = tmp_path_factory.mktemp("adapters")
    shutil.copytree(base / "bert", folder / "base")
    for name, start, case in (("trained", "base", "single"), ("one", "trained", "single"), ("tags", "base", "token")):
        model = TaskModel.from_pretrained(folder / start, task=EXAMPLES[case].task)
        rows = list(EXAMPLES[case].rows)
        lora = {} if name == "trained" else {"lora_rank": 2, "lora_alpha": 8.0, "save_adapter": True}
        fit(model, rows, rows, output_dir=folder / "runs" / name, **SETTINGS, **lora)
        subfolder = "model" if name == "trained" else "adapter"
        shutil.copytree(folder / "runs" / name / subfolder, folder / name)
    return folder


def test_an_adapter_on_a_base_predicts_as_its_folder(folder: Path, tmp_path: Path) -> None:
    """Bit for bit, also where the model that the folder names is not there any more."""
    alone = TaskModel.from_pretrained(folder / "one")
    expected = alone.predict(TEXTS, logits=True)
    base, adapter = shutil.copytree(folder / "trained", tmp_path / "moved"), tmp_path / "adapter"
    shutil.copytree(folder / "one", adapter)
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"base_model_name_or_path": "/gone"}), "utf-8")
    opened = TaskModel.from_pretrained(base, adapter=adapter)
    assert opened.task == alone.task
    assert opened.predict(TEXTS, logits=True) == expected
    assert TaskModel.from_pretrained(base).predict(TEXTS, logits=True) != expected
    assert predict(base, TEXTS, logits=True, adapter=adapter) == expected
    rows = list(EXAMPLES["single"].rows)
    assert evaluate(base, rows, adapter=adapter) == evaluate(alone, rows)
    (path.parent / "config.json").unlink()  # as peft writes it
    task = EXAMPLES["single"].task
    assert TaskModel.from_pretrained(base, task=task, adapter=adapter).predict(TEXTS, logits=True) == expected


def test_the_command_line_reads_them(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows, model = tmp_path / "rows.jsonl", TaskModel.from_pretrained(folder / "one")
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in EXAMPLES["single"].rows), "utf-8")
    options = [str(folder / "trained"), str(rows), "--adapter", str(folder / "one")]
    assert CliRunner().invoke(app, ["predict", *options, "--keep-columns", "none"]).exit_code == 0
    written = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert written == [prediction.to_json() for prediction in model.predict(TEXTS)]
    shown = CliRunner().invoke(app, ["evaluate", *options, "--json"])
    assert json.loads(shown.stdout) == evaluate(model, rows)


def test_errors_name_the_folder_and_what_to_do(
    folder: Path, base: Path, tmp_path: Path, wordpiece_tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(CheckpointError, match=r"trained: no adapter_config\.json\. Name a folder of adapters"):
        TaskModel.from_pretrained(folder / "base", adapter=folder / "trained")
    with pytest.raises(UsageError, match=r"one has adapters, too\. Name the model that they were trained on"):
        TaskModel.from_pretrained(folder / "one", adapter=folder / "tags")
    with pytest.raises(CheckpointError, match=r"(?s)tags does not fit the base .*electra\. .*has shape \[30522, 20\]"):
        TaskModel.from_pretrained(base / "electra", adapter=folder / "tags")
    save_checkpoint(tmp_path, "distilbert", wordpiece_tokenizer)
    with pytest.raises(CheckpointError, match=r"tags does not fit the base .*: .*fits no weight of .*another model"):
        TaskModel.from_pretrained(tmp_path, adapter=folder / "tags")
    with pytest.raises(UsageError, match="settings and adapters are for a model that is loaded from files"):
        predict(TaskModel.from_pretrained(folder / "trained"), TEXTS, adapter=folder / "one")
    with pytest.raises(UsageError, match="the name of an adapter is empty"):
        serve(folder / "base", adapters={"": folder / "tags"})
    twice = ["--adapter", f"a={folder / 'one'}", "--adapter", f"a={folder / 'tags'}"]
    for options, message in ((twice, "have the same name. Rename one"), (["--adapter", "one"], "expected NAME=FOLDER")):
        shown = CliRunner().invoke(app, ["serve", str(folder / "base"), *options])
        assert shown.exit_code == 2
        assert message in " ".join(shown.output.replace("│", "").split())


def test_equal_weights_are_in_memory_once(folder: Path) -> None:
    served = load_served(folder / "trained", {"one": folder / "one", "again": folder / "one"}, **LOADING)
    base, adapter, again = (dict(model.named_parameters()) for model, _ in served.values())
    changed = {name for name, weight in base.items() if not weight.equal(adapter[name])}
    assert changed
    assert all(".attention." in name or name.startswith("head.") for name in changed)
    for name, weight in base.items():
        assert (adapter[name].data_ptr() == weight.data_ptr()) == (name not in changed), name
        assert again[name].data_ptr() == adapter[name].data_ptr()
    expected = TaskModel.from_pretrained(folder / "one").predict(TEXTS, logits=True)
    assert served["one"][0].predict(TEXTS, logits=True) == expected


def test_a_base_without_a_head_is_not_served(folder: Path) -> None:
    assert list(load_served(folder / "base", {"tags": folder / "tags"}, **LOADING)) == ["tags"]
    with pytest.raises(CheckpointError, match="has no task head this package knows"):
        load_served(folder / "base", {}, **LOADING)
    with pytest.raises(CheckpointError, match="no config"):
        load_served(folder / "runs", {"tags": folder / "tags"}, **LOADING)


def responses(folder: Path, base: str, names: Sequence[str], *contents: Any, path: str = "/predict") -> list[Any]:
    """The responses to bodies, or of paths without a body, of a server with the adapters ``names``."""

    async def ask() -> list[httpx2.Response]:
        gate = Gate(limits=SLOW, metrics=ServerMetrics(), draining=lambda: False)
        async with AsyncExitStack() as stack:
            served = {}
            for name, (model, run) in load_served(folder / base, {n: folder / n for n in names}, **LOADING).items():
                batcher = await stack.enter_async_context(Batcher(model, run=run, max_queue=9))
                served[name] = (model, batcher)
            gate.app = build_app(served, gate, name="served")
            client = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=gate), base_url="http://localhost")
            await stack.enter_async_context(client)
            calls: list[Coroutine[Any, Any, httpx2.Response]] = [
                client.get(content) if isinstance(content, str) else client.post("/predict", json=content)
                for content in contents
            ]
            return [await call for call in calls]

    return asyncio.run(ask())


def test_a_request_chooses_an_adapter(folder: Path) -> None:
    text, words = {"text": TEXTS[0]}, unlabelled(EXAMPLES["token"])[0]
    plain, response, empty, several, tags, about, document = responses(
        folder,
        "trained",
        ["one", "tags"],
        text,
        text | {"adapter": "one"},
        text | {"adapter": None},
        {"inputs": [text, text], "adapter": "one"},
        words | {"adapter": "tags"},
        "/model?adapter=tags",
        "/openapi.json",
    )
    base, adapted = (TaskModel.from_pretrained(folder / name) for name in ("trained", "one"))
    tagger = TaskModel.from_pretrained(folder / "trained", adapter=folder / "tags")
    assert plain.json() == empty.json() == base.predict(text)[0].to_json()
    assert response.json() == adapted.predict(text)[0].to_json() != plain.json()
    assert [row["label"] for row in several.json()["predictions"]] == [response.json()["label"]] * 2
    assert tags.json()["tags"] == list(tagger.predict(words)[0].tags)
    assert (about.json()["task"], about.json()["adapters"]) == ("token-classification", ["one", "tags"])
    schema = document.json()["paths"]["/predict"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    jsonschema.Draft202012Validator.check_schema(schema)
    assert json.dumps(schema).count('{"enum": ["one", "tags"], "type": "string"}') == 4  # a row, or rows, of two tasks
    answers = TypeAdapter(answers_schema(base.tasks, tagger.tasks)).json_schema(mode="serialization")
    for answer in (plain, tags, several):
        jsonschema.validate(answer.json(), answers)


def test_a_wrong_adapter_is_a_clean_error_that_lists_the_names(folder: Path) -> None:
    text = {"text": "a"}
    wrong = [{"adapter": "none", **text}, {"adapter": ["one"], **text}, {"adapter": "", **text}]
    *failed, query, inside, first = responses(
        folder,
        "base",
        ["one", "tags"],
        *wrong,
        "/model?adapter=none",
        {"inputs": [{"adapter": "one", **text}]},
        text,
    )
    for response in failed:
        assert response.status_code == 422
        assert errors_of(response) == {"body.adapter": "no such adapter. The adapters are one, tags"}
    assert errors_of(query) == {"query.adapter": "no such adapter. The adapters are one, tags"}
    assert errors_of(inside) == {"body.inputs.0": "adapter is for all rows. Write it beside inputs"}
    assert first.json() == TaskModel.from_pretrained(folder / "base", adapter=folder / "one").predict("a")[0].to_json()
