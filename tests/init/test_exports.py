"""Files as people and programs have them: ``init`` finds the task, and the run reads the same rows."""

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pyarrow
import pytest
from datasets import ClassLabel, Dataset, DatasetDict
from openpyxl import Workbook
from pyarrow import parquet

from bert_tasks import TaskModel, predict
from bert_tasks.errors import DataError, UsageError
from bert_tasks.init import RecipeDraft, init_recipe
from bert_tasks.init.text import recipe_text
from bert_tasks.recipe.check import prepare
from bert_tasks.recipe.schema import build_task, load_recipe
from support.small_tokenizers import LINES
from support.training_runs import load_model

Rows = Sequence[Mapping[str, Any]]

TEXTS = [re.sub("[^ -~]|[;,|]", "", LINES[i % len(LINES)]) + f" {i}" for i in range(40)]
REVIEWS = [{"text": text, "label": ("calm", "glad")[i % 2]} for i, text in enumerate(TEXTS)]
SETS = [{"text": text, "labels": (["calm"], ["loud"], ["calm", "loud"])[i % 3]} for i, text in enumerate(TEXTS)]


@pytest.fixture
def draft(base: str, tmp_path: Path) -> Callable[..., RecipeDraft]:
    """Returns the recipe for a file, made with the options."""
    return lambda file, **options: init_recipe(file, model=base, output=tmp_path / "made.toml", **options)


def delimited(mark: str, *, first: str = "", names: Sequence[str] = ("text", "label")) -> str:
    return first + "".join(f"{row[0]}{mark}{row[1]}\n" for row in (names, *map(tuple, map(dict.values, REVIEWS))))


def fasttext(rows: Rows) -> str:
    pairs = ((row["text"], row["labels"] if "labels" in row else [row["label"]]) for row in rows)
    return "".join(" ".join([*(f"__label__{name}" for name in names), text]) + "\n" for text, names in pairs)


def write_workbook(path: Path) -> None:
    book = Workbook()
    for cells in (("text", "label"), *(tuple(row.values()) for row in REVIEWS)):
        book.active.append(cells)
    book.create_sheet("notes").append(["not", "read"])
    book.save(path)


def dataset() -> Dataset:
    rows = Dataset.from_list([{**row, "label": ("calm", "glad").index(row["label"])} for row in REVIEWS])
    return rows.cast_column("label", ClassLabel(names=["calm", "glad"]))


NESTED = [{"document": {"text": row["text"]}, "meta": {"label": row["label"]}} for row in REVIEWS]
FILES: Mapping[str, str | Callable[[Path], object]] = {
    "tabs.txt": delimited("\t", names=("review", "mood")),
    "excel.csv": delimited(";", first="sep=;\r\n"),
    "quoted_excel.csv": delimited("\t", first='"sep=\t"\n'),
    "nested.jsonl": "".join(json.dumps(row) + "\n" for row in NESTED),
    "nested.parquet": lambda path: parquet.write_table(pyarrow.Table.from_pylist(NESTED), path),
    "dataset": lambda path: dataset().save_to_disk(path),
    "dataset_dict": lambda path: DatasetDict(
        train=dataset().select(range(30)), validation=dataset().select(range(30, 40))
    ).save_to_disk(path),
}


def write(name: str, content: str | Callable[[Path], object], folder: Path) -> Path:
    path = folder / name
    if isinstance(content, str):
        path.write_bytes(content.encode())
    else:
        content(path)
    return path


def read(draft: RecipeDraft) -> list[dict[str, Any]]:
    """The rows of all splits, as a run reads them, with the columns that the task learns from."""
    splits = prepare(load_recipe(draft.path)).splits
    rows = [row for table in (splits.train, *splits.validation.values()) for row in table]
    return sorted(({k: v for k, v in row.items() if k != "line"} for row in rows), key=lambda row: str(row))


def expected(rows: Rows) -> list[dict[str, Any]]:
    return sorted(map(dict, rows), key=str)


@pytest.mark.parametrize(("name", "content"), FILES.items(), ids=FILES)
def test_reviews_of_any_program(
    name: str, content: str | Callable[[Path], object], draft: Callable[..., RecipeDraft], tmp_path: Path
) -> None:
    assert read(draft(write(name, content, tmp_path))) == expected(REVIEWS)


def test_damaged_files_are_named(draft: Callable[..., RecipeDraft], tmp_path: Path) -> None:
    book, damaged = tmp_path / "book.xlsx", tmp_path / "damaged.xlsx"
    write_workbook(book)
    with ZipFile(book) as source, ZipFile(damaged, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            target.writestr(name, content[: len(content) // 2] if "sheet1" in name else content)
    (tmp_path / "text.xlsx").write_text("no workbook", "utf-8")
    dataset().save_to_disk(tmp_path / "dataset")
    (tmp_path / "dataset" / "state.json").write_text("{", "utf-8")
    for path, message in (
        (damaged, "cannot be read as xlsx"),
        (tmp_path / "text.xlsx", "not a workbook of Excel"),
        (tmp_path / "dataset", "cannot be read as datasets"),
    ):
        with pytest.raises(DataError, match=f"{path.name}: {message}"):
            draft(path)


def test_several_labels_of_fasttext(draft: Callable[..., RecipeDraft], tmp_path: Path) -> None:
    assert read(draft(write("sets.txt", fasttext(SETS), tmp_path))) == expected(SETS)


def test_windows_text_is_told_by_its_bytes(draft: Callable[..., RecipeDraft], tmp_path: Path) -> None:
    rows = [{**row, "text": f"\u201ccaf\u00e9\u201d \u2013 {row['text']} \u20ac"} for row in REVIEWS]
    content = "text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in rows)
    result = draft(write("reviews.csv", lambda path: path.write_bytes(content.encode("cp1252")), tmp_path))
    assert load_recipe(result.path).data.encoding == "cp1252"
    assert read(result) == expected(rows)


@pytest.mark.parametrize("encoding", ["cp1251", "latin-1", "shift_jis", "cp437"])
def test_other_encodings_are_not_taken_for_windows(
    encoding: str, draft: Callable[..., RecipeDraft], tmp_path: Path
) -> None:
    word = {"cp1251": "\u201e\u043c\u043e\u0440\u0435\u201c", "shift_jis": "\u6d77\u3067\u3059", "cp437": "caf\u00e9"}
    text = word.get(encoding, "caf\u00e9")
    content = "text,label\n" + "".join(f"{f'{text} ' * 9}{row['text']},{row['label']}\n" for row in REVIEWS)
    path = write("reviews.csv", lambda path: path.write_bytes(content.encode(encoding)), tmp_path)
    with pytest.raises(DataError, match=r"bytes that are not utf-8. Name the file's encoding with --encoding") as error:
        draft(path)
    assert "latin-1" not in str(error.value)


# Choices

COLOURS = ("red", "blue", "green")
ITEMS = [
    {"context": f"What is the colour of item {i}?", "choices": [f"{colour} {i}" for colour in COLOURS], "label": i % 3}
    for i in range(30)
]
CHOICES: Mapping[str, tuple[Sequence[str], Callable[[int], object] | None]] = {
    "letters": (("A", "B", "C"), lambda right: "ABC"[right]),
    "letters after a name": (("choice_a", "choice_b", "choice_c"), lambda right: "abc"[right]),
    "numbers from one": (("option1", "option2", "option3"), lambda right: right + 1),
    "texts": (("option_a", "option_b", "option_c"), None),
}


@pytest.mark.parametrize("form", CHOICES)
def test_choices_in_columns(form: str, draft: Callable[..., RecipeDraft], tmp_path: Path) -> None:
    names, name_of = CHOICES[form]
    with (tmp_path / "items.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["question", *names, "answer"])
        for item in ITEMS:
            right = item["choices"][item["label"]] if name_of is None else name_of(item["label"])
            writer.writerow([item["context"], *item["choices"], right])
    result = draft(tmp_path / "items.csv")
    assert result.task == "multiple-choice"
    assert read(result) == expected(ITEMS)


# Labels in columns

FLAGS = [{"text": row["text"], **{name: int(name in row["labels"]) for name in ("calm", "loud")}} for row in SETS]


def sources(path: Path) -> Iterator[Path]:
    """The same rows with 0 and 1 as texts, as numbers, as booleans and as floats with a missing row."""
    for name, cell in (("text.csv", str), ("int.jsonl", int), ("bool.parquet", bool), ("float.parquet", float)):
        rows = [{**row, "calm": cell(row["calm"]), "loud": cell(row["loud"])} for row in FLAGS]
        if name.endswith("parquet"):
            parquet.write_table(pyarrow.Table.from_pylist(rows), path / name)
        elif name.endswith("jsonl"):
            (path / name).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        else:
            with (path / name).open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        yield path / name


def test_columns_of_zero_and_one_are_labels(draft: Callable[..., RecipeDraft], tmp_path: Path) -> None:
    for source in sources(tmp_path):
        for label in (None, ["calm", "loud"]):
            result = draft(source, label=label)
            assert 'labels = ["calm", "loud"]' in recipe_text(result)
            assert result.alternatives == ()
            assert read(result) == expected(SETS)
            result.path.unlink()


def test_a_cell_that_is_neither_is_named(draft: Callable[..., RecipeDraft], tmp_path: Path) -> None:
    rows = [{**row, "loud": 2 if i == 3 else row["loud"]} for i, row in enumerate(FLAGS)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    with pytest.raises(DataError, match=r"neither 0 nor 1.*'loud'.*Several columns of labels must hold 0 and 1"):
        draft(path, label=["calm", "loud"])
    with pytest.raises(UsageError, match=r"no column 'lout', did you mean 'loud'"):
        draft(path, label=["calm", "lout"])


def test_a_model_remembers_columns_that_stand_for_one(
    checkpoint: Path, draft: Callable[..., RecipeDraft], tmp_path: Path
) -> None:
    """A file with the columns of the training file is predicted without an option, and so are rows."""
    path = tmp_path / "nested.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in NESTED), "utf-8")
    recipe = load_recipe(draft(path).path)
    model = load_model(checkpoint, build_task(recipe, ("calm", "glad")))
    model.columns = {"text": "document.text", "label": "meta.label"}
    model.save_pretrained(tmp_path / "model")
    opened = TaskModel.from_pretrained(tmp_path / "model")
    plain = opened.predict([row["text"] for row in REVIEWS])
    table = write("tabs.txt", str(FILES["tabs.txt"]).replace("review\tmood", "text\tmood"), tmp_path)
    assert predict(opened, table) == predict(opened, REVIEWS)
    assert list(opened.predict(NESTED)) == list(predict(opened, path)) == list(plain)


def test_a_problem_may_be_stated_instead_of_a_task(draft: Callable[..., RecipeDraft], tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text,grade\n" + "".join(f"{text},{i % 5}\n" for i, text in enumerate(TEXTS)), "utf-8")
    result = draft(path, task="regression")
    assert (result.task, result.settings) == ("sequence-classification", {"problem_type": "regression"})
    assert result.alternatives == ()
    result.path.unlink()
    path.write_text("text,grade\n" + "".join(f"{text},{'a|b' if len(text) % 2 else 'a'}\n" for text in TEXTS), "utf-8")
    several = draft(path, task="multi-label-classification", label="grade", label_separator="|")
    assert (several.labels, several.settings["problem_type"]) == (("a", "b"), "multi_label_classification")
