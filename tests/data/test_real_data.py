"""The published data sets, where BERT_TASKS_DATA names a folder that holds them: nothing lost, nothing refused."""

import csv
import os
from collections import Counter
from pathlib import Path

import pytest

from bert_tasks.data.checks import infer_labels
from bert_tasks.data.columns import Column
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.reading import read as read_rows
from bert_tasks.data.rows import Rows
from bert_tasks.init import init_recipe
from bert_tasks.recipe.check import prepare
from bert_tasks.recipe.schema import load_recipe

TAGGED = (Column(name="words", kind="words"), Column(name="tags", kind="tags", required=False))
TEXTS = (Column(name="text", kind="text"), Column(name="text_pair", kind="text"))
ASKED = (
    Column(name="id", kind="id", required=False),
    Column(name="question", kind="text"),
    Column(name="context", kind="text"),
    Column(name="answers", kind="answers", required=False),
)

pytestmark = pytest.mark.skipif("BERT_TASKS_DATA" not in os.environ, reason="BERT_TASKS_DATA is not set")


def read(tmp_path: Path, name: str, columns: tuple[Column, ...], format: str | None = None) -> Rows:
    return read_rows(
        Path(os.environ["BERT_TASKS_DATA"]) / name, columns, ReadOptions(format=format), cache_dir=tmp_path
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sentences", "words"), [("train", 14041, 203621), ("valid", 3250, 51362), ("test", 3453, 46435)]
)
def test_conll_2003(tmp_path: Path, name: str, sentences: int, words: int) -> None:
    table = read(tmp_path, f"conll2003/{name}.txt", TAGGED)
    assert len(table) == sentences
    assert sum(len(row["words"]) for row in table) == words
    types = ("LOC", "MISC", "ORG", "PER")
    assert infer_labels(table, TAGGED) == (*(f"{p}-{entity_type}" for p in "BI" for entity_type in types), "O")


@pytest.mark.slow
def test_squad(tmp_path: Path) -> None:
    table = read(tmp_path, "squad/dev-v2.0.part.json", ASKED)
    counts = Counter(len(row["answers"]["text"]) > 0 for row in table)
    assert counts == {True: 6078 - 3168, False: 3168}
    assert len(set(table.rows.values("id"))) == 6078
    xquad = read(tmp_path, "squad/xquad.en.json", ASKED)
    assert Counter(len(row["answers"]["text"]) for row in xquad) == {1: 1190}


@pytest.mark.slow
def test_init_leaves_answers_out_that_are_not_verbatim(tmp_path: Path) -> None:
    rows = read(tmp_path, "squad/xquad.en.json", ASKED)
    with (tmp_path / "asked.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["question", "context", "answer"])
        for number, row in enumerate(rows):
            answer = row["answers"]["text"][0]
            writer.writerow([row["question"], row["context"], f"It is {answer}!" if number % 5 == 0 else answer])
    draft = init_recipe(tmp_path / "asked.csv", output=tmp_path / "recipe.toml", task="span-extraction")
    assert (draft.task, draft.columns["answers"]) == ("span-extraction", "answer")
    recipe = load_recipe(draft.path)
    assert (recipe.data.on_error, draft.left_out) == ("skip", 238)
    splits = prepare(recipe).splits
    assert len(splits.train) + len(splits.validation[""]) == 1190 - 238
    assert "238 of 1190 rows (20%) cannot be used and will be skipped" in draft.path.read_text("utf-8")


@pytest.mark.parametrize(
    ("folder", "format", "label_kind", "train", "dev"),
    [("STS-B", "glue/stsb", "number", 5749, 1500), ("RTE", "glue/rte", "label", 2490, 277)],
)
def test_glue_pairs(tmp_path: Path, folder: str, format: str, label_kind: str, train: int, dev: int) -> None:
    label = Column(name="label", kind="number" if label_kind == "number" else "label", required=False)
    tables = [read(tmp_path, f"glue/{folder}/{name}.tsv", (*TEXTS, label), format) for name in ("train", "dev")]
    assert [len(table) for table in tables] == [train, dev]
    values = set(tables[0].rows.values("label"))
    assert (
        values == {"entailment", "not_entailment"}
        if label_kind == "label"
        else (min(values), max(values)) == (0.0, 5.0)
    )
