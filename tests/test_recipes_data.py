"""The small data sets under recipes/data: well-formed, without near-duplicates, and as their README describes them.

Reads the files with the standard library only, so that a fault in the package's readers cannot hide one in the data.
"""

import csv
import io
import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "recipes" / "data"
RECIPES = sorted(FOLDER.parent.rglob("*.toml"))
# The texts of a task, which may be spread over files; none may be half another one.
TASK_TEXTS = {
    "feedback": {"feedback/train.csv": ("text",), "feedback/validation.csv": ("text",)},
    "reviews": {"custom/reviews.csv": ("review",)},
    "tickets": {"custom/tickets.csv": ("text",)},
    "pairs": {"custom/pairs.csv": ("first", "second")},
    "questions": {"custom/questions.csv": ("question",)},
    "contexts": {"custom/questions.csv": ("context",)},
    "queries": {"custom/answers.csv": ("question",), "custom/answers_validation.csv": ("question",)},
    "candidates": {"custom/answers.csv": ("candidate",), "custom/answers_validation.csv": ("candidate",)},
}
TAGGED = ("custom/entities.conll", "custom/slots.jsonl")

Tagged = list[tuple[str, str]]  # words with their tags


def text_of(name: str) -> str:
    return (FOLDER / name).read_bytes().decode("utf-8")


def csv_rows(name: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text_of(name), newline=""), strict=True))


def conll_documents(text: str) -> list[list[Tagged]]:
    """The sentences of each document; fails on anything but words with one tag and borders."""
    documents: list[list[Tagged]] = []
    for block in text.split("\n\n"):
        lines = [tuple(line.split("\t")) for line in block.splitlines()]
        if not lines:
            continue
        if lines[0][0] == "-DOCSTART-":
            assert lines == [("-DOCSTART-", "O")]
            documents.append([])
            continue
        assert all(len(line) == 2 and line[0].split() == [line[0]] for line in lines), lines
        documents[-1].append([(word, tag) for word, tag in lines])
    return documents


def tagged(name: str) -> list[Tagged]:
    if name.endswith(".conll"):
        return [sentence for document in conll_documents(text_of(name)) for sentence in document]
    rows = [json.loads(line) for line in text_of(name).splitlines()]
    assert all(set(row) == {"words", "tags"} for row in rows)
    return [list(zip(row["words"], row["tags"], strict=True)) for row in rows]


def iob2_faults(tags: Sequence[str]) -> list[str]:
    """Tags that are not O, B-TYPE, or I-TYPE after B-TYPE or I-TYPE."""
    previous = ("O", *tags)
    return [
        tag
        for before, tag in zip(previous, tags, strict=False)
        if not re.fullmatch(r"O|[BI]-[A-Za-z]+", tag)
        or (tag.startswith("I-") and before not in (f"B-{tag[2:]}", f"I-{tag[2:]}"))
    ]


def near_duplicates(texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Pairs of texts whose sets of words have a Jaccard index of 0.5 or more."""
    sets = [(text, frozenset(re.findall(r"[\w']+", text.lower()))) for text in texts]
    for (one, left), (other, right) in combinations(sets, 2):
        common = len(left & right)
        if 2 * common >= len(left) + len(right) - common:
            yield one, other


def corpus_documents(name: str) -> list[list[str]]:
    return [block.splitlines() for block in text_of(name).split("\n\n")]


def row_count(name: str) -> int:
    if name.endswith(".txt"):
        return len(corpus_documents(name))
    return len(tagged(name)) if name in TAGGED else len(csv_rows(name))


def described() -> dict[str, tuple[int, tuple[str, ...], str]]:
    """The README's table: rows, columns and description of each file."""
    lines = re.findall(r"^\| `(.+?)` \| (\d+) \| (.+?) \| (.+) \|$", text_of("README.md"), flags=re.MULTILINE)
    return {name: (int(rows), tuple(columns.strip("`").split(",")), what) for name, rows, columns, what in lines}


def stated_counts(description: str) -> Counter[str]:
    """What a description counts as "`name` (number)"."""
    return Counter({name: int(number) for name, number in re.findall(r"`([\w-]+)` \((\d+)\)", description)})


def data_files() -> list[str]:
    return sorted(str(path.relative_to(FOLDER)) for path in FOLDER.glob("*/*"))


def test_the_readme_lists_exactly_the_files_and_their_rows() -> None:
    assert sorted(described()) == data_files()
    assert {name: rows for name, (rows, _, _) in described().items()} == {
        name: row_count(name) for name in data_files()
    }


@pytest.mark.parametrize("name", data_files())
def test_files_are_utf8_with_line_feeds_and_without_stray_blanks(name: str) -> None:
    content = text_of(name)
    assert content.endswith("\n")
    assert not re.search(r"\r|\t\n|[ \u00a0]\n|\ufeff|\ufffd", content)


@pytest.mark.parametrize("name", [name for name in data_files() if name.endswith(".csv")])
def test_csv_files_have_the_columns_of_the_readme_and_full_cells(name: str) -> None:
    rows = csv_rows(name)
    optional = {"custom/tickets.csv": {"labels"}, "custom/questions.csv": {"answer"}}.get(name, set())
    for row in rows:
        assert tuple(row) == described()[name][1]
        assert all(isinstance(cell, str) and cell == cell.strip() for cell in row.values()), row
        assert {column for column, cell in row.items() if not cell} <= optional, row


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("feedback/train.csv", "label"),
        ("feedback/validation.csv", "label"),
        ("custom/answers.csv", "relevant"),
        ("custom/answers_validation.csv", "relevant"),
    ],
)
def test_label_counts_are_those_of_the_readme(name: str, column: str) -> None:
    assert Counter(row[column] for row in csv_rows(name)) == stated_counts(described()[name][2])


def test_pairs_and_reviews_hold_thirty_of_each_label() -> None:
    relations = Counter(row["relation"] for row in csv_rows("custom/pairs.csv"))
    assert relations == {"duplicate": 30, "related": 30, "different": 30}
    ratings = Counter(row["rating"] for row in csv_rows("custom/reviews.csv"))
    assert ratings == {"negative": 30, "neutral": 30, "positive": 30}


def test_tickets_without_a_label_are_counted() -> None:
    assert sum(not row["labels"] for row in csv_rows("custom/tickets.csv")) == 6


@pytest.mark.parametrize("name", TAGGED)
def test_tags_are_well_formed_iob2_and_counted_in_the_readme(name: str) -> None:
    sentences = tagged(name)
    assert [sentence for sentence in sentences if iob2_faults([tag for _, tag in sentence])] == []
    begins = Counter(tag[2:] for sentence in sentences for _, tag in sentence if tag.startswith("B-"))
    assert begins == stated_counts(described()[name][2])
    assert f"{begins.total()} " in described()[name][2]


@pytest.mark.parametrize("name", TAGGED)
def test_words_are_not_empty_and_hold_no_blanks(name: str) -> None:
    words = [word for sentence in tagged(name) for word, _ in sentence]
    assert [word for word in words if word.split() != [word]] == []
    assert all(tagged(name))


def test_entities_have_documents_and_words_as_the_readme_says() -> None:
    documents, what = conll_documents(text_of("custom/entities.conll")), described()["custom/entities.conll"][2]
    assert f"{len(documents)} documents" in what
    assert f"{sum(len(sentence) for document in documents for sentence in document)} words" in what
    assert min(len(document) for document in documents) > 1
    attached = [word for document in documents for sentence in document for word, _ in sentence if word[-1] in ",;:?!"]
    assert set(attached) <= set(",;:?!")


def test_commands_are_in_lower_case_and_some_have_no_slot() -> None:
    commands = tagged("custom/slots.jsonl")
    assert [word for command in commands for word, _ in command if word != word.lower()] == []
    assert sum(all(tag == "O" for _, tag in command) for command in commands) == 10


def test_answers_stand_in_their_context_exactly_once() -> None:
    """So the reader, which looks an answer up, finds the one that is meant, and not a part of a word."""
    for row in csv_rows("custom/questions.csv"):
        answer, context = row["answer"], row["context"]
        if not answer:
            continue
        start = context.find(answer)
        assert context[start : start + len(answer)] == answer
        assert context.find(answer, start + 1) == -1
        assert re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", context), answer


def test_each_context_has_three_answerable_questions_and_one_without_answer() -> None:
    rows = csv_rows("custom/questions.csv")
    assert [row["id"] for row in rows] == [str(number + 1) for number in range(len(rows))]
    blocks = [rows[first : first + 4] for first in range(0, len(rows), 4)]
    assert len({block[0]["context"] for block in blocks}) == len(blocks) == 30
    for block in blocks:
        assert len({row["context"] for row in block}) == 1
        assert [bool(row["answer"]) for row in block] == [True, True, True, False]
        assert 3 <= len(re.findall(r"[.!?](?:\s|$)", block[0]["context"])) <= 6


@pytest.mark.parametrize(("name", "questions"), [("answers", 32), ("answers_validation", 10)])
def test_each_question_has_four_candidates_and_one_or_two_relevant(name: str, questions: int) -> None:
    rows = csv_rows(f"custom/{name}.csv")
    assert set(Counter(row["question"] for row in rows).values()) == {4}
    relevant = Counter(row["question"] for row in rows if row["relevant"] == "yes")
    assert len(relevant) == questions
    assert set(relevant.values()) == {1, 2}


def test_the_two_files_of_answers_share_no_question() -> None:
    train, validation = (csv_rows(f"custom/{name}.csv") for name in ("answers", "answers_validation"))
    assert not {row["question"] for row in train} & {row["question"] for row in validation}


def test_the_corpus_has_whole_sentences_of_its_own() -> None:
    sentences = [line for document in corpus_documents("corpus/workshop.txt") for line in document]
    assert len(sentences) == 72
    assert all(re.fullmatch(r"[A-Z].+[.!?]", sentence) for sentence in sentences)
    assert list(near_duplicates(sentences)) == []


@pytest.mark.parametrize("task", TASK_TEXTS)
def test_no_text_is_half_another_one(task: str) -> None:
    repeated = task in ("contexts", "queries")  # one per question or candidate
    texts = [row[column] for name, columns in TASK_TEXTS[task].items() for row in csv_rows(name) for column in columns]
    assert len(texts) > 30
    assert list(near_duplicates(dict.fromkeys(texts) if repeated else texts)) == []


@pytest.mark.parametrize("name", TAGGED)
def test_no_tagged_sentence_is_half_another_one(name: str) -> None:
    texts = [" ".join(word for word, _ in sentence) for sentence in tagged(name)]
    assert list(near_duplicates(texts)) == []


def test_near_duplicates_are_found() -> None:
    texts = ["one two three four five six seven", "six seven one two three", "eight nine"]
    assert list(near_duplicates(texts)) == [(texts[0], texts[1])]


@pytest.mark.parametrize("tags", [["I-PER"], ["B-PER", "I-LOC"], ["B-PER", "O", "I-PER"], ["PER"], ["b-PER"], [""]])
def test_malformed_tags_are_found(tags: list[str]) -> None:
    assert len(iob2_faults(tags)) == 1


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_columns_that_a_recipe_names_are_in_its_csv_files(recipe: Path) -> None:
    data = tomllib.loads(recipe.read_text(encoding="utf-8"))["data"]
    files = [data[key] for key in ("train", "validation") if str(data.get(key)).endswith(".csv")]
    for file in files:
        header = csv_rows(str((recipe.parent / file).relative_to(FOLDER)))[0]
        assert set(data.get("columns", {}).values()) <= set(header)


def test_every_data_file_is_used_by_a_recipe() -> None:
    recipes = [tomllib.loads(recipe.read_text(encoding="utf-8"))["data"] for recipe in RECIPES]
    used = {str(data.get(key)).removeprefix("../") for data in recipes for key in ("train", "validation")}
    assert {f"data/{name}" for name in data_files()} <= used
