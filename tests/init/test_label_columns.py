"""``init`` for a file with several columns of labels: several tasks on one encoder."""

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from bert_tasks import train
from bert_tasks.cli import main
from bert_tasks.errors import UsageError
from bert_tasks.init import RecipeDraft, init_recipe
from bert_tasks.init.text import recipe_text
from bert_tasks.recipe.check import check
from bert_tasks.recipe.schema import load_recipe
from bert_tasks.tasks.several import SEVERAL
from support.small_tokenizers import LINES

MOODS = ("calm", "glad", "sad")
TEXTS = [f"{LINES[i % len(LINES)]} {i}" for i in range(24)]
Rows = Sequence[Mapping[str, Any]]
# Texts with two columns of classes. Some cells of the second column are empty.
TICKETS: Rows = [
    {"text": text, "intent": MOODS[i % 3], "sentiment": ["", "good", "bad"][i % 3]} for i, text in enumerate(TEXTS)
]
# Words with a tag each, and a class of the sentence.
TAGGED: Rows = [
    {"words": text.split(), "tags": ["B-X", *["O"] * (len(text.split()) - 1)], "mood": MOODS[i % 3], "number": i}
    for i, text in enumerate(TEXTS)
]


def write(rows: Rows, folder: Path) -> Path:
    if any(isinstance(cell, list) for cell in rows[0].values()):
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        return folder / "rows.jsonl"
    with (folder / "rows.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return folder / "rows.csv"


def draft_of(rows: Rows, folder: Path, *labels: str, **options: Any) -> RecipeDraft:
    path = write(rows, folder)
    (folder / "recipe.toml").unlink(missing_ok=True)
    return init_recipe(path, output=folder / "recipe.toml", label=labels if labels else None, **options)


def heads(draft: RecipeDraft) -> Mapping[str, Mapping[str, Any]]:
    recipe = load_recipe(draft.path)
    assert recipe.task == SEVERAL
    return recipe.settings["heads"]


def test_columns_of_classes_are_tasks(tmp_path: Path, base: str) -> None:
    draft = draft_of(TICKETS, tmp_path, "intent", "sentiment", model=base)
    tasks = heads(draft)
    assert list(tasks) == ["intent", "sentiment"]
    for name, task in tasks.items():
        assert (task["task"], task["columns"]["label"]) == ("sequence-classification", name)
        assert task["problem_type"] == "single_label_classification"
    assert tasks["intent"]["max_length"] == tasks["sentiment"]["max_length"]
    assert "sentiment: 8 rows without a label" in draft.reasons
    assert "tasks: intent (sequence-classification), sentiment (sequence-classification)" in draft.lines()
    assert draft.to_json()["task"] == "multi-task"
    assert "linear_probe" not in recipe_text(draft)  # which has one task
    loaded = load_recipe(draft.path, overrides=["optim.epochs=1"], output_dir=tmp_path / "run")
    assert sum(split.rows for split in check(loaded).splits) == 24
    assert {"intent.accuracy", "sentiment.accuracy"} <= train(loaded, progress=False).metrics.keys()


def test_tags_and_a_class_are_tasks(tmp_path: Path, base: str) -> None:
    draft = draft_of(TAGGED, tmp_path, "mood", "tags", model=base, validation=tmp_path / "rows.jsonl")
    tasks = heads(draft)
    assert tasks["tags"]["task"] == "token-classification"
    assert (tasks["mood"]["task"], tasks["mood"]["columns"]) == (
        "sequence-classification",
        {"text": "words", "label": "mood"},
    )
    assert list(check(load_recipe(draft.path)).splits[0].tasks["tags"].label_counts) == ["B-X", "O"]
    longer = [{**row, "words": row["words"] * 4, "tags": row["tags"] * 4} for row in TAGGED]
    longer_tasks = heads(draft_of(longer, tmp_path, "mood", "tags", model=base, text="words"))
    assert longer_tasks["mood"]["max_length"] == longer_tasks["tags"]["max_length"] > tasks["tags"]["max_length"]


def test_several_tasks_are_proposed_with_their_options(tmp_path: Path, base: str) -> None:
    proposal = "2 tasks on one encoder (--label intent --label sentiment)"
    draft = draft_of(TICKETS, tmp_path, model=base)
    assert draft.alternatives[-1] == proposal
    assert f"#   {proposal}" in recipe_text(draft).splitlines()
    tagged = draft_of(TAGGED, tmp_path, model=base)
    assert tagged.alternatives == ()


@pytest.mark.parametrize(
    "rows",
    [
        [{"text": text, "calm": i % 2, "loud": i // 2 % 2} for i, text in enumerate(TEXTS)],
        [{"text": text, "source": MOODS[i % 2], "label": MOODS[i % 3]} for i, text in enumerate(TEXTS)],
        [{"text": text, "score": i * 0.7, "label": MOODS[i % 3]} for i, text in enumerate(TEXTS)],
        [{"words": row["words"], "tags": row["tags"], "document": str(i % 2)} for i, row in enumerate(TAGGED)],
    ],
    ids=["flags", "source", "numbers", "documents"],
)
def test_several_tasks_are_proposed_only_for_good_columns(rows: Rows, tmp_path: Path, base: str) -> None:
    assert "encoder (" not in recipe_text(draft_of(rows, tmp_path, model=base))


@pytest.mark.parametrize(
    ("column", "name"), [("type", "label_type"), ("1st class", "label_1st_class"), ("état", "état"), ("a.b", "a_b")]
)
def test_names_of_tasks_can_be_written_and_stored(column: str, name: str, tmp_path: Path, base: str) -> None:
    rows = [{**row, column: row["intent"]} for row in TICKETS]
    draft = draft_of(rows, tmp_path, column, "sentiment", model=base)
    assert heads(draft)[name]["columns"]["label"] == column
    loaded = load_recipe(draft.path, overrides=["optim.max_steps=1"], output_dir=tmp_path / "run")
    assert f"{name}.accuracy" in train(loaded, progress=False).metrics


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (("intent", "sentimnt"), "rows.csv: no column 'sentimnt', did you mean 'sentiment'?"),
        (("intent", "intent"), "--label intent appears more than once. Name each column of labels once."),
        (("intent", "text"), "rows.csv: --label intent cannot be a separate task, because "),
        (("intent", "many"), "--label many: several tasks need ';' between labels, not '|'. Change the file."),
    ],
)
def test_wrong_columns_are_named(
    labels: Sequence[str],
    message: str,
    tmp_path: Path,
    base: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [{**row, "many": ["a|b", "a", "b|c", "c", "a|c"][i % 5]} for i, row in enumerate(TICKETS)]
    path = write(rows, tmp_path)
    options = [argument for label in labels for argument in ("--label", label)]
    target = tmp_path / "recipe.toml"
    monkeypatch.setattr(sys, "argv", ["bert-tasks", "init", str(path), "-o", str(target), "--model", base, *options])
    with pytest.raises(SystemExit) as stopped:
        main()
    error = capsys.readouterr().err
    assert stopped.value.code == UsageError.exit_code
    assert message in error
    assert "Traceback" not in error
    assert not target.exists()
