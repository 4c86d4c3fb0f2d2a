"""The output folder: whose files are replaced, whose are not, and JSON that is JSON."""

import json
import math

import pytest

from bert_tasks.errors import UsageError
from bert_tasks.training.files import (
    append_event,
    check_folder,
    clear,
    cut_events,
    environment,
    read_run_metadata,
    read_summary,
    remove,
    signed,
    write_json,
)
from bert_tasks.training.records import EventRecord


@pytest.fixture
def run_folder(tmp_path):
    """A finished run, with a file and a folder of the user's."""
    folder = tmp_path / "run"
    folder.mkdir()
    write_json(folder / "run.json", {"settings": {}})
    append_event(folder, EventRecord(event="step", step=1))
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}", "utf-8")
    write_json(folder / "metrics.json", {"metrics": {}, "best_step": 3})
    (folder / "notes.txt").write_text("mine", "utf-8")
    (folder / "figures").mkdir()
    return folder


def test_replacing_a_run_leaves_files_that_are_not_its_own(run_folder):
    check_folder(run_folder)
    clear(run_folder)
    assert sorted(path.name for path in run_folder.iterdir()) == ["figures", "notes.txt", "run.json"]
    assert (run_folder / "notes.txt").read_text("utf-8") == "mine"


@pytest.mark.parametrize(("card", "kept"), [(signed("# a"), False), (signed("# a") + "mine", True), ("# mine", True)])
def test_replacing_a_run_leaves_what_a_person_put_beside_the_model(run_folder, card, kept):
    (run_folder / "model" / "README.md").write_text(card, "utf-8")
    (run_folder / "model" / "LICENSE").write_text("MIT", "utf-8")
    clear(run_folder)
    left = ["LICENSE", "README.md"] if kept else ["LICENSE"]
    assert sorted(path.name for path in (run_folder / "model").iterdir()) == left


@pytest.mark.parametrize("name", ["thesis.tex", "model", "recipe.toml", "metrics.json"])
def test_a_folder_without_a_run_is_refused(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(UsageError, match=rf"contains no run \(it contains {name}\)\. Choose another folder") as error:
        check_folder(tmp_path)
    assert error.value.exit_code == 2


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "run").write_text("", "utf-8")
    for path in (tmp_path / "run", tmp_path / "run" / "deeper"):
        with pytest.raises(UsageError, match="is a file, expected a folder"):
            check_folder(path)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    with pytest.raises(UsageError, match="is not writable"):
        check_folder(tmp_path / "run")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "null", '{"settings": 3}', '{"metrics": []}'])
@pytest.mark.parametrize(("read", "name"), [(read_run_metadata, "run.json"), (read_summary, "metrics.json")])
def test_damaged_files_are_named(tmp_path, read, name, content):
    assert read(tmp_path) is None
    (tmp_path / name).write_text(content, "utf-8")
    with pytest.raises(UsageError, match=rf"{name} is damaged \(.*overwrite=True"):
        read(tmp_path)


def test_an_evaluation_that_will_be_made_again_is_cut(tmp_path):
    first = {"f1_a\u2028b": 0.5, "total": 7, "loss": math.nan}
    append_event(tmp_path, EventRecord(event="evaluation", step=3, metrics=first))
    append_event(tmp_path, EventRecord(event="step", step=6))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    append_event(tmp_path, EventRecord(event="evaluation", step=6, metrics={}))
    cut_events(tmp_path, 6, evaluated_step=3)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    lines = before.decode().split("\n")
    assert [json.loads(line)["event"] for line in lines if line] == ["evaluation", "step"]
    assert json.loads(lines[0])["metrics"] == {"f1_a\u2028b": 0.5, "total": 7, "loss": None}


def test_other_fields_of_records_are_kept(tmp_path):
    """A record has its fields in the order of the model, and whole numbers stay whole."""
    line = '{"event": "step", "step": 1, "loss": 2, "learning_rate": 1e-05, "grad_norm": null, "more": [1]}\n'
    (tmp_path / "metrics.jsonl").write_text(line, "utf-8")
    cut_events(tmp_path, 1, evaluated_step=0)
    assert (tmp_path / "metrics.jsonl").read_text("utf-8") == line


def test_links_are_removed_and_not_followed(run_folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (run_folder / "model" / "config.json").unlink()
    (run_folder / "model").rmdir()
    (tmp_path / "elsewhere" / "kept.txt").touch()
    for name in ("model", "checkpoints", "tensorboard", "wandb"):
        (run_folder / name).symlink_to(tmp_path / "elsewhere")
    clear(run_folder)
    assert (tmp_path / "elsewhere" / "kept.txt").is_file()
    assert not [name for name in ("model", "tensorboard", "wandb") if (run_folder / name).is_symlink()]


def test_a_removed_run_leaves_nothing_but_foreign_files(run_folder, tmp_path):
    remove(run_folder)
    assert sorted(path.name for path in run_folder.iterdir()) == ["figures", "notes.txt", "run.json"]
    (tmp_path / "alone").mkdir()
    write_json(tmp_path / "alone" / "run.json", {"settings": {}})
    remove(tmp_path / "alone")
    remove(tmp_path / "nowhere")
    assert list((tmp_path / "alone").iterdir()) == []


def test_the_environment_says_nothing_of_the_user(monkeypatch):
    monkeypatch.setenv("MY_SECRET", "xyzzy")
    facts = environment()
    assert set(facts) == {"python", "platform", "cpu", "threads", "matmul_library", "versions"}
    assert "xyzzy" not in json.dumps(facts)
    assert {"bert-tasks", "torch", "transformers", "accelerate"} <= facts["versions"].keys()
