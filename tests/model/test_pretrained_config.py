"""What config.json of a saved model says of its task, and what of it is believed when it is read."""

import json
import sys
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerBase

from bert_tasks.errors import CheckpointError
from bert_tasks.model.loading import restore
from bert_tasks.model.pretrained import CheckpointFolder, stated_task
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks import SequenceClassification
from support.sampling import slow_except
from support.small_checkpoints import copied, edit_config, save_checkpoint

LABELS = ("calm", "glad", "sad")
PROBLEMS = ("single_label_classification", "multi_label_classification", "regression")
IDS = torch.tensor([[2, 7, 9, 11, 3], [2, 8, 20, 3, 3]])


@pytest.fixture(scope="module")
def folder(unigram_tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sequence classifier of ALBERT's family as transformers saves it; read-only."""
    path = tmp_path_factory.mktemp("albert")
    save_checkpoint(path, "albert", unigram_tokenizer, head="sequence", labels=LABELS, wide=True)
    return path


def albert(folder: Path, **settings: Any) -> TaskModel:
    return TaskModel.from_pretrained(folder, task="sequence-classification", **{"max_length": 40} | settings)


@torch.no_grad()
def logits_of(model: TaskModel) -> Tensor:
    logits: Tensor = model(IDS)
    return logits


def test_what_is_stored(folder: Path, tmp_path: Path) -> None:
    model = albert(folder, class_weights=(1.0, 2.0, 1.0), label_smoothing=0.1)
    model.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    entry = config.pop("bert_tasks")
    assert entry.pop("version").count(".") == 2
    assert entry == {
        "task": "sequence-classification",
        "settings": {
            "max_length": 40,
            "problem_type": "single_label_classification",
            "pooling": "cls",
            "long_texts": "truncate",
            "doc_stride": 32,
            "class_weights": [1.0, 2.0, 1.0],
            "focal_gamma": 0.0,
            "label_smoothing": 0.1,
            "calibration": "none",
        },
        "balanced_weights": [],
        "thresholds": [],
        "promise": "",
        "temperature": 1.0,
    }
    original = json.loads((folder / "config.json").read_text())
    assert config["id2label"] == {"0": "calm", "1": "glad", "2": "sad"}
    assert config["label2id"] == {"calm": 0, "glad": 1, "sad": 2}
    assert config["architectures"] == ["AlbertForSequenceClassification"]
    assert not {"_name_or_path", "num_labels", "torch_dtype"} & set(config)
    assert original.keys() - config.keys() <= {"_name_or_path"}
    assert all(config[key] == original[key] for key in original.keys() & config.keys() - {"problem_type"})
    assert TaskModel.from_pretrained(tmp_path / "saved").task == model.task


def test_thresholds_survive(folder: Path, tmp_path: Path) -> None:
    task = SequenceClassification.of(
        labels=LABELS, max_length=40, problem_type="multi_label_classification", thresholds=(0.1, 0.5, 0.9)
    )
    TaskModel.from_pretrained(folder, task=task).save_pretrained(tmp_path / "saved")
    assert TaskModel.from_pretrained(tmp_path / "saved").task == task
    assert AutoConfig.from_pretrained(tmp_path / "saved").problem_type == "multi_label_classification"


def test_the_problem_type_of_a_former_task_is_forgotten(folder: Path, tmp_path: Path) -> None:
    albert(folder, problem_type="regression").save_pretrained(tmp_path / "scores")
    TaskModel.from_pretrained(tmp_path / "scores", task="span-extraction").save_pretrained(tmp_path / "answers")
    assert AutoConfig.from_pretrained(tmp_path / "answers").problem_type is None


@pytest.mark.parametrize("order", slow_except([*permutations(LABELS)], ("sad", "calm", "glad")))  # not its own inverse
def test_what_belongs_to_a_label_follows_it(order: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    task = SequenceClassification.of(
        labels=LABELS,
        max_length=40,
        problem_type="multi_label_classification",
        class_weights="balanced",
        balanced_weights=(1.0, 2.0, 3.0),
        thresholds=(0.1, 0.5, 0.9),
    )
    model = TaskModel.from_pretrained(folder, task=task)
    model.save_pretrained(tmp_path)
    loaded = TaskModel.from_pretrained(tmp_path, labels=order)
    places = [LABELS.index(label) for label in order]
    assert loaded.task.output.thresholds == tuple(task.output.thresholds[index] for index in places)
    assert loaded.task.output.balanced_weights == tuple(task.output.balanced_weights[index] for index in places)
    torch.testing.assert_close(logits_of(loaded), logits_of(model)[:, places])
    others = TaskModel.from_pretrained(tmp_path, task="text-classification", labels=("a", "b", "c")).task
    assert others == SequenceClassification.of(**task.settings(), labels=("a", "b", "c"))


@pytest.mark.parametrize("problem_type", PROBLEMS)
@pytest.mark.parametrize("stored", PROBLEMS)
def test_another_problem_keeps_what_applies_to_it(stored: str, problem_type: str, folder: Path, tmp_path: Path) -> None:
    is_multi, is_regression = stored == "multi_label_classification", stored == "regression"
    before = SequenceClassification.of(
        labels=() if is_regression else LABELS,
        problem_type=stored,
        max_length=40,
        pooling="max",
        label_smoothing=0.1 if stored == "single_label_classification" else 0.0,
        class_weights=None if is_regression else "balanced",
        balanced_weights=() if is_regression else (1.0, 2.0, 3.0),
        thresholds=(0.1, 0.5, 0.9) if is_multi else (),
    )
    TaskModel.from_pretrained(folder, task=before).save_pretrained(tmp_path)
    settings: dict[str, Any] = {"problem_type": problem_type}
    opened = CheckpointFolder.open(tmp_path)
    if problem_type == stored:
        assert stated_task(opened, None, settings) == before
        return
    settings |= {"labels": LABELS} if is_regression else {}
    after = stated_task(opened, None, settings)
    assert stated_task(opened, "sequence-classification", settings) == after
    assert (after.settings()["problem_type"], after.max_length, after.pooling) == (problem_type, 40, "max")
    assert after.output.labels == (() if problem_type == "regression" else LABELS)
    assert after == SequenceClassification.of(**after.settings(), labels=after.output.labels)


class Own(SequenceClassification):
    """A task that is not registered."""


def test_a_class_named_in_a_file_is_never_imported(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "canary_task.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    changed = copied(folder, tmp_path / "model")
    entry = {"task": "canary_task:Canary", "settings": {}, "version": "0"}
    edit_config(changed, bert_tasks=entry, auto_map={"AutoModel": "canary_task.Canary"})
    with pytest.raises(CheckpointError) as error:
        TaskModel.from_pretrained(changed)
    assert "'canary_task:Canary', which is not built in" in str(error.value)
    assert "TaskModel.from_pretrained(folder, task=YourTask)" in str(error.value)
    assert albert(changed).task.output.labels == LABELS
    assert "canary_task" not in sys.modules


def test_an_unregistered_task_is_stored_by_name_only(folder: Path, tmp_path: Path) -> None:
    task = Own.of(labels=LABELS, max_length=40)
    model = TaskModel.from_pretrained(folder, task=task)
    model.save_pretrained(tmp_path / "saved")
    stored = json.loads((tmp_path / "saved" / "config.json").read_text())["bert_tasks"]["task"]
    assert stored == f"{Own.__module__}:Own"
    with pytest.raises(CheckpointError, match="not built in"):
        TaskModel.from_pretrained(tmp_path / "saved")
    again = TaskModel.from_pretrained(tmp_path / "saved", task=task)
    assert torch.equal(logits_of(again), logits_of(model))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": 3}, "its task is 3"),
        ({"settings": "fast"}, "settings must be an object"),
        ({"settings": {"speed": 1}}, "has no setting 'speed'"),
        ({"settings": {"max_length": "x"}}, "key bert_tasks: sequence-classification"),
        ({"settings": {"pooling": "x"}}, "pooling is 'x'"),
        ({"labels": "ab"}, "key bert_tasks: labels must be a list of texts"),
        ({"thresholds": [0.5]}, "thresholds: one per label, expected 3 numbers instead of 1"),
        ({"reading": 3}, "reading.columns must name columns"),
        ({"reading": {"delimiter": ";;"}}, "reading: delimiter ';;' is not one character"),
        ({"reading": {"delimiter": 3}}, "reading.delimiter: Input should be a valid string"),
        ({"reading": {"encoding": "klingon"}}, "there is no encoding 'klingon'"),
        ({"reading": {"header": "no"}}, "reading.header: Input should be a valid boolean"),
        ({"reading": {"label_separator": ""}}, "label_separator is empty"),
        ({"reading": {"document": "page"}}, "reading.document: "),
        ({"reading": {"on_error": "retry"}}, "reading.on_error: "),
        ({"reading": {"speed": 1}}, "reading.speed: "),
    ],
)
def test_damaged_entries_are_named(change: dict[str, Any], message: str, folder: Path, tmp_path: Path) -> None:
    changed = copied(folder, tmp_path / "model")
    entry = {"task": "sequence-classification", "settings": {"max_length": 40}, "thresholds": []}
    edit_config(changed, bert_tasks=entry)
    assert TaskModel.from_pretrained(changed).task.max_length == 40
    edit_config(changed, bert_tasks=entry | change)
    with pytest.raises(CheckpointError, match=message):
        TaskModel.from_pretrained(changed)


def test_own_head_missing_or_of_another_shape(folder: Path, tmp_path: Path) -> None:
    model = albert(folder, pooling="mean")
    model.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config.keys().isdisjoint({"id2label", "label2id", "problem_type"})
    assert config["bert_tasks"]["labels"] == list(LABELS)
    edit_config(tmp_path / "saved", bert_tasks={**config["bert_tasks"], "labels": ["a", "b"]})
    with pytest.raises(CheckpointError, match=r"task_head\.safetensors is missing or does not fit"):
        TaskModel.from_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "task_head.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"task_head\.safetensors is missing or does not fit"):
        TaskModel.from_pretrained(tmp_path / "saved")


def test_restore_takes_the_weights_back(folder: Path, tmp_path: Path) -> None:
    for pooling in ("cls", "mean"):
        model = albert(folder, pooling=pooling)
        before = logits_of(model)
        model.save_pretrained(tmp_path / pooling)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        assert not torch.equal(logits_of(model), before)
        restore(model, tmp_path / pooling)
        assert torch.equal(logits_of(model), before)
