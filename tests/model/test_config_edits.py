"""Every single edit of a saved model's config.json: the model predicts, or the edit is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from bert_tasks import predict_file
from bert_tasks.errors import CheckpointError
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks import SequenceClassification, Task, TokenClassification
from support.damage import REFUSED, exit_code, field_edits
from support.small_checkpoints import copied, edit_config

ROWS = [{"text": "the ferry leaves at seven"}]
# No part of the model and none of the tokenizer depends on them, but transformers refuses the file.
UNUSED = {
    "use_cache": None,
    "layer_norm_eps": 1,
    "initializer_range": 1,
    "tie_word_embeddings": None,
    "bos_token_id": "x",
    "eos_token_id": {},
}


def saved(folder: Path, checkpoint: Path, task: Task) -> Path:
    TaskModel.from_pretrained(checkpoint, task=task).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of texts in windows, which reads all of its settings; read-only."""
    task = SequenceClassification.of(labels=("calm", "glad"), max_length=16, long_texts="windows", doc_stride=4)
    return saved(tmp_path_factory.mktemp("edits"), checkpoint, task)


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 7])
def test_every_edit_predicts_or_is_refused(step: int, folder: Path, tmp_path: Path) -> None:
    changed = copied(folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    allowed = {f"{name} = {value!r}" for name, value in UNUSED.items()}
    codes: dict[str, int] = {}
    for number, (name, content) in enumerate(field_edits(config)):
        if number % step == 0 or name in allowed:
            (changed / "config.json").write_text(json.dumps(content))
            codes[name] = exit_code(lambda: predict_file(changed, ROWS, tmp_path / "out.jsonl"))
    assert {name: code for name, code in codes.items() if code not in (0, *REFUSED)} == {}
    assert {name for name in allowed if codes[name] != 0} == set()


@pytest.mark.slow
def test_every_edit_of_a_tagger_predicts_or_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    changed = saved(
        tmp_path / "model",
        checkpoint,
        TokenClassification.of(labels=("O", "B-X", "I-X"), crf=True, max_length=16, doc_stride=4),
    )
    config, rows = json.loads((changed / "config.json").read_text()), [{"words": ["the", "ferry"]}]
    for name, content in field_edits(config, values=(None, 0, 1, 1.5, "x", "\ud800", [], [None], {}, {"x": 1})):
        (changed / "config.json").write_text(json.dumps(content))
        code = exit_code(lambda: predict_file(changed, rows, tmp_path / "out.jsonl"))
        assert code in (0, *REFUSED), name


@pytest.mark.parametrize(
    "change",
    [
        {"id2label": {"0": "\ud800", "1": "glad"}},
        {"bert_tasks": {"task": "sequence-classification", "settings": {"pooling": "\udfff"}}},
        {"bert_tasks": {"task": "sequence-classification", "reading": {"columns": {"text": "\ud800"}}}},
        {"unknown": ["\udc00"]},
    ],
)
def test_half_of_a_surrogate_pair_is_refused(change: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    """Whether it is escaped or encoded."""
    changed = copied(folder, tmp_path / "model")
    edit_config(changed, **change)
    text = json.dumps(json.loads((changed / "config.json").read_text()), ensure_ascii=False)
    for content in ((changed / "config.json").read_bytes(), text.encode("utf-8", "surrogatepass")):
        (changed / "config.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"a text holds '.ud[89a-f]..', half of a surrogate pair"):
            TaskModel.from_pretrained(changed)


def test_a_whole_pair_is_a_label(folder: Path, tmp_path: Path) -> None:
    changed = copied(folder, tmp_path / "model")
    edit_config(changed, id2label={"0": "\N{GRINNING FACE}", "1": "glad"})
    assert "\\ud83d" in (changed / "config.json").read_text()
    assert TaskModel.from_pretrained(changed).task.output.labels == ("\N{GRINNING FACE}", "glad")


@pytest.mark.parametrize(("name", "value"), [("doc_stride", 1.5), ("max_length", 1e308), ("long_texts", 1)])
def test_settings_have_the_types_of_the_task(name: str, value: Any, folder: Path, tmp_path: Path) -> None:
    changed = copied(folder, tmp_path / "model")
    entry = json.loads((folder / "config.json").read_text())["bert_tasks"]
    entry["settings"][name] = value
    edit_config(changed, bert_tasks=entry)
    with pytest.raises(CheckpointError, match=f"key bert_tasks: sequence-classification: {name} is "):
        TaskModel.from_pretrained(changed)
