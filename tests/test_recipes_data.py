"""The small data sets under recipes/data: as their README describes them.

Reads the files with the standard library only, so that a fault in the package's readers cannot hide one in the data.
That answers, tags and labels are valid is for `check`, which tests/init runs on them.
"""

import csv
import json
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "recipes" / "data"
RECIPES = sorted(FOLDER.parent.rglob("*.toml"))
FILES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.glob("*/*"))
TAGGED = ("custom/entities.conll", "custom/slots.jsonl")
GROUNDED = ("custom/grounded.jsonl", "custom/grounded_validation.jsonl")
MARKED = {**dict.fromkeys(GROUNDED, ("answer", "unsupported")), "custom/personal.jsonl": ("text", "entities")}


def text_of(name: str) -> str:
    return (FOLDER / name).read_bytes().decode("utf-8")


def csv_rows(name: str) -> list[dict[str, str]]:
    with (FOLDER / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, strict=True))


def sentences(name: str) -> list[tuple[list[str], list[str]]]:
    """The words and the tags of each sentence."""
    if name.endswith(".jsonl"):
        return [(row["words"], row["tags"]) for row in map(json.loads, text_of(name).splitlines())]
    tables = [[line.split("\t") for line in block.splitlines()] for block in text_of(name).split("\n\n")]
    rows = [tuple(map(list, zip(*table, strict=True))) for table in tables if table and table[0][0] != "-DOCSTART-"]
    return [(words, tags) for words, tags in rows]


def row_count(name: str) -> int:
    if name.endswith(".txt"):
        return len(text_of(name).split("\n\n"))
    if name in MARKED:
        return len(text_of(name).splitlines())
    return len(sentences(name)) if name in TAGGED else len(csv_rows(name))


def described() -> dict[str, tuple[int, tuple[str, ...], str]]:
    """The README's table: rows, columns and description of each file."""
    lines = re.findall(r"^\| `(.+?)` \| (\d+) \| (.+?) \| (.+) \|$", text_of("README.md"), flags=re.MULTILINE)
    return {
        name: (int(rows), tuple(columns.strip("`").split(",")), description)
        for name, rows, columns, description in lines
    }


def stated_counts(name: str) -> Counter[str]:
    """What the description of a file counts as "`name` (number)"."""
    return Counter({word: int(n) for word, n in re.findall(r"`([\w-]+)` \((\d+)\)", described()[name][2])})


def test_the_readme_lists_exactly_the_files_and_their_rows() -> None:
    assert {name: rows for name, (rows, _, _) in described().items()} == {name: row_count(name) for name in FILES}


@pytest.mark.parametrize("name", FILES)
def test_files_are_utf8_with_line_feeds_and_without_stray_blanks(name: str) -> None:
    content = text_of(name)
    assert content.endswith("\n")
    assert not re.search(r"\r|\t\n|[ \u00a0]\n|\ufeff|\ufffd", content)


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".csv")])
def test_csv_files_have_the_columns_and_labels_of_the_readme(name: str) -> None:
    optional = {"custom/questions.csv": {"answer"}}.get(name, {"labels"})
    rows, counts = csv_rows(name), stated_counts(name)
    for row in rows:
        assert tuple(row) == described()[name][1]
        assert all(cell == cell.strip() for cell in row.values()), row
        assert {column for column, cell in row.items() if not cell} <= optional, row
    assert not counts or counts in [Counter(row[column] for row in rows if row[column]) for column in rows[0]]


@pytest.mark.parametrize("name", TAGGED)
def test_tags_are_counted_in_the_readme(name: str) -> None:
    counts = Counter(tag[2:] for _, tags in sentences(name) for tag in tags if tag.startswith("B-"))
    assert counts == stated_counts(name)
    assert f"{counts.total()} " in described()[name][2]


@pytest.mark.parametrize("name", MARKED)
def test_marked_parts_are_whole_words_and_counted_in_the_readme(name: str) -> None:
    text, marks = MARKED[name]
    counts, without = Counter[str](), 0
    for row in map(json.loads, text_of(name).splitlines()):
        assert tuple(row) == described()[name][1]
        without += not row[marks]
        for start, end, label in row[marks]:
            assert re.fullmatch(r"\w.*[\w.]", row[text][start:end])
            assert re.fullmatch(r"(.*\W)?", row[text][:start])
            assert re.fullmatch(r"(\W.*)?", row[text][end:])
            counts[label] += 1
    assert counts == stated_counts(name)
    assert re.search(rf"\b{without} (answers|texts) have none", described()[name][2])


def test_the_two_files_of_grounded_answers_share_no_context() -> None:
    train, validation = ({json.loads(line)["context"] for line in text_of(name).splitlines()} for name in GROUNDED)
    assert not train & validation


@pytest.mark.parametrize(("name", "column"), [("answers", "question"), ("search", "query")])
def test_the_two_files_of_groups_share_no_question(name: str, column: str) -> None:
    train, validation = (csv_rows(f"custom/{file}.csv") for file in (name, f"{name}_validation"))
    assert not {row[column] for row in train} & {row[column] for row in validation}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_columns_that_a_recipe_names_are_in_its_csv_files(recipe: Path) -> None:
    document = tomllib.loads(recipe.read_text(encoding="utf-8"))
    data = document["data"]
    columns = [section.get("columns", {}) for section in (data, *document.get("tasks", {}).values())]
    for file in (data[key] for key in ("train", "validation") if str(data.get(key)).endswith(".csv")):
        header = csv_rows(str((recipe.parent / file).resolve().relative_to(FOLDER.resolve())))[0]
        assert {name for names in columns for name in names.values()} <= set(header)


def test_every_data_file_is_used_by_a_recipe() -> None:
    """Files of rows that are held out stand in the commands of a recipe's comment."""
    recipes = [recipe.read_text(encoding="utf-8") for recipe in RECIPES]
    assert [name for name in FILES if not any(f"data/{name}" in recipe for recipe in recipes)] == []
