"""``init``: which task a file seems to be for, what it says about that, and that the recipe can be used."""

import codecs
import csv
import importlib.util
import json
import re
import resource
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_tasks.data.profile import percentile, pieces, profile
from bert_tasks.errors import CheckpointError, DataError, UsageError
from bert_tasks.init import RecipeDraft, init_recipe
from bert_tasks.init import sample as file_sample
from bert_tasks.init.columns import UserHints
from bert_tasks.init.draft import next_commands
from bert_tasks.init.findings import findings, labels_found
from bert_tasks.init.readings import best_reading
from bert_tasks.init.text import EMBEDDED_MODEL, USUAL_MODEL, recipe_text
from bert_tasks.recipe.check import check
from bert_tasks.recipe.schema import build_task, load_recipe
from bert_tasks.training.run import train
from support.small_tokenizers import LINES

MOODS = ("calm", "glad", "sad")
SINGLE, SEVERAL = "single_label_classification", "multi_label_classification"


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]], delimiter: str = ",") -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", "utf-8")
    return path


def labelled(count: int = 24, **more: Any) -> list[dict[str, Any]]:
    return [{"text": f"{LINES[i % len(LINES)]} {i}", "label": MOODS[i % 3], **more} for i in range(count)]


def draft_of(file: Path, tmp_path: Path, **options: Any) -> RecipeDraft:
    return init_recipe(file, output=tmp_path / "made.toml", **options)


NO_HINTS = UserHints()


@dataclass(frozen=True)
class Guess:
    task: str
    columns: Mapping[str, str]
    settings: Mapping[str, Any]
    labels: tuple[str, ...]
    reasons: Sequence[str]
    alternatives: tuple[str, ...]


def guess_task(rows: Sequence[Mapping[str, Any]], hints: UserHints = NO_HINTS) -> Guess:
    """The best reading of rows, with what ``init`` says about it."""
    reading, read = best_reading(rows, hints)
    return Guess(
        reading.task.name,
        reading.column_names,
        reading.settings,
        labels_found(reading, read),
        list(findings(reading, read)),
        reading.alternatives,
    )


# The data sets that come with the recipes

SHIPPED = [
    ("reviews.csv", "sequence-classification", {"problem_type": SINGLE}, {"text": "review", "label": "rating"}),
    ("tickets.csv", "sequence-classification", {"problem_type": SEVERAL}, {"text": "text", "labels": "labels"}),
    (
        "pairs.csv",
        "pair-classification",
        {"problem_type": SINGLE},
        {"text": "first", "text_pair": "second", "label": "relation"},
    ),
    (
        "answers.csv",
        "pair-classification",
        {"problem_type": SINGLE},
        {"text": "question", "text_pair": "candidate", "label": "relevant"},
    ),
    ("entities.conll", "token-classification", {}, {"words": "words", "tags": "tags"}),
    ("slots.jsonl", "token-classification", {}, {"words": "words", "tags": "tags"}),
    (
        "questions.csv",
        "span-extraction",
        {"version_2_with_negative": True},
        {"question": "question", "context": "context", "answers": "answer"},
    ),
]


@pytest.mark.parametrize(("name", "task", "settings", "columns"), SHIPPED, ids=[row[0] for row in SHIPPED])
def test_shipped_data_are_recognised(
    name: str, task: str, settings: dict[str, Any], columns: dict[str, str], repository: Path, tmp_path: Path, base: str
) -> None:
    file = repository / "recipes" / "data" / "custom" / name
    draft = draft_of(file, tmp_path, model=base)
    assert (draft.task, draft.settings, draft.columns) == (task, settings, columns)
    assert draft.alternatives == ()
    assert len(draft.reasons) >= 2
    recipe = load_recipe(draft.path)
    assert (recipe.task, recipe.model.name, recipe.data.train) == (task, base, str(file))
    assert recipe.settings["max_length"] <= 48
    assert {key: recipe.settings[key] for key in settings} == settings
    assert sum(split.rows for split in check(recipe).splits) == draft.sample.count


@pytest.mark.parametrize("name", [row[0] for row in SHIPPED])
def test_a_probe_is_offered_if_the_task_has_one(name: str, repository: Path, tmp_path: Path, base: str) -> None:
    draft = draft_of(repository / "recipes" / "data" / "custom" / name, tmp_path, model=base)
    text = recipe_text(draft)
    if draft.task not in ("sequence-classification", "pair-classification"):
        assert "linear_probe" not in text
        return
    draft.path.write_text(text.replace("# linear_probe", "linear_probe"), "utf-8")
    result = train(load_recipe(draft.path, overrides=["settings.pooling=mean"], output_dir=tmp_path / "run"))
    assert result.steps == 1


# Kinds of files


def test_another_encoding(tmp_path: Path, base: str) -> None:
    rows = [{**row, "text": f"café {row['text']}"} for row in labelled()]
    path = write_csv(tmp_path / "rows.csv", rows)
    path.write_bytes(path.read_text("utf-8").encode("latin-1"))
    with pytest.raises(
        DataError, match=r"it has bytes that are not utf-8\. .* with --encoding cp1252, if this reads well: .*café"
    ):
        draft_of(path, tmp_path)
    draft = draft_of(path, tmp_path, model=base, encoding="latin-1")
    assert load_recipe(draft.path).data.encoding == "latin-1"
    check(load_recipe(draft.path))


@pytest.mark.parametrize("examples", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_no_content_is_an_internal_error(examples: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    names = st.sampled_from(["csv", "tsv", "jsonl", "json", "conll", "conllu", "parquet"])

    @settings(max_examples=examples, deadline=None)
    @given(content=st.binary(max_size=80), name=names)
    def read(content: bytes, name: str) -> None:
        read_bytes(content, name, tmp_path_factory)

    read()


def read_bytes(content: bytes, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Makes a recipe for a file of these bytes behind the beginnings of several formats."""
    folder = tmp_path_factory.mktemp("bytes")
    for start in (b"", codecs.BOM_UTF8, codecs.BOM_UTF16_LE, b"text,label\n", b"[", b"\x1f\x8b\x08"):
        (folder / f"rows.{name}").write_bytes(start + content)
        (folder / "made.toml").unlink(missing_ok=True)
        try:
            draft = draft_of(folder / f"rows.{name}", folder)
        except DataError:
            continue
        assert "\n".join(draft.lines()).encode()  # can be printed


def test_large_files_are_sampled_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_sample, "_MOST_ROWS", 300)
    rows = [{"text": f"row number {i}", "label": "first" if i < 1500 else "second"} for i in range(3000)]
    draft = draft_of(write_csv(tmp_path / "rows.csv", rows), tmp_path)
    numbers = [int(row["text"].split()[-1]) for row in draft.sample.rows]
    assert (draft.sample.count, len(numbers)) == (3000, 300)
    assert numbers == sorted(set(numbers))
    assert 100 < sum(number < 1500 for number in numbers) < 200
    assert "3000 rows, 300 of them sampled" in recipe_text(draft)


# Which task it is


def test_many_whole_numbers_are_amounts_unless_they_count_classes() -> None:
    words = [{"text": f"{LINES[i % 20]} {i}", "label": i % 60 + 100} for i in range(240)]
    assert guess_task(words).settings == {"problem_type": "regression"}
    classes = [{**row, "label": row["label"] - 100} for row in words]
    assert guess_task(classes).settings == {"problem_type": SINGLE}


def test_sets_need_names_that_come_back() -> None:
    cells = ["bill; refund", "bill", "", "login;bill", "refund"] * 4
    guess = guess_task([{"text": text, "topics": cell} for text, cell in zip(LINES, cells, strict=True)])
    assert guess.settings == {"problem_type": SEVERAL}
    assert guess.columns == {"text": "text", "labels": "topics"}
    assert guess.labels == ("bill", "login", "refund")
    lists = [
        {"text": text, "topics": cell.replace(" ", "").split(";")} for text, cell in zip(LINES, cells, strict=True)
    ]
    assert guess_task([row for row in lists if row["topics"] != [""]]).settings == {"problem_type": SEVERAL}
    joined = [{"text": text, "topic": "rent; water" if i % 2 else "other"} for i, text in enumerate(LINES)]
    assert guess_task(joined).labels == ("other", "rent; water")
    semicolons = [{"text": f"{text}; or not", "label": MOODS[i % 3]} for i, text in enumerate(LINES)]
    assert guess_task(semicolons).settings == {"problem_type": SINGLE}


ADJECTIVES, NOUNS = ("old", "green", "narrow", "quiet", "steep"), ("harbour", "ferry", "garden", "station", "bridge")
QUESTIONS = [
    {
        "asked": f"What is it like at place {i} in the town?",
        "review": f"We went out early and the {ADJECTIVES[i % 5]} {NOUNS[i % 5]} number {i} was the best of all.",
        "adjective": f"{ADJECTIVES[i % 5]} {NOUNS[i % 5]} number {i}",
        "span": f"{NOUNS[i % 5]} number {i}",
    }
    for i in range(40)
]
EXAMS = [
    {"story": text, "moral": f"{text} It was told {i} times.", "options": ["yes", "no"], "gold": i % 2, "answer": i % 2}
    for i, text in enumerate(LINES)
]
LISTS = [
    {"plain": text.split(), "lower": text.lower().split(), "pos": ["XY"[len(w) % 2] for w in text.split()]}
    for text in LINES
]


def without(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != name} for row in rows]


@pytest.mark.parametrize(
    ("rows", "hints", "column", "other"),
    [
        (QUESTIONS, UserHints(task="span-extraction"), ("answers", "adjective"), ("answers", "span")),
        (
            [{**row, "adjective": "", "also": f"And what did you like at {i}?"} for i, row in enumerate(QUESTIONS)],
            UserHints(task="span-extraction", label="span"),
            ("question", "asked"),
            ("question", "also"),
        ),
        (EXAMS, UserHints(task="multiple-choice", texts=("story",)), ("label", "gold"), ("label", "answer")),
        (LISTS, UserHints(), ("words", "plain"), ("words", "lower")),
    ],
)
def test_of_columns_that_match_equally_both_are_named(
    rows: list[dict[str, Any]], hints: UserHints, column: tuple[str, str], other: tuple[str, str]
) -> None:
    guess = guess_task(rows, hints)
    names = [column[1], other[1]]
    assert guess.columns[column[0]] in names
    names.remove(guess.columns[column[0]])
    assert [text for text in guess.alternatives if text.startswith(f'{other[0]} = "{names[0]}" (')]
    left = guess_task(without(rows, names[0]), hints)
    assert left.columns == guess.columns
    assert not [text for text in left.alternatives if text.startswith(f"{other[0]} = ")]


def test_short_texts_will_do() -> None:
    names = ["Ida", "Otto", "Mia", "Emil", "Lena", "Karl", "Rosa", "Paul"]
    guess = guess_task([{"name": name, "label": "ab"[i % 2]} for i, name in enumerate(names)])
    assert guess.columns == {"text": "name", "label": "label"}


def test_missing_labels_are_mentioned() -> None:
    rows = [{"text": text, "label": MOODS[i % 3] if i % 5 else ""} for i, text in enumerate(LINES)]
    assert guess_task(rows).reasons[-1] == "label: 4 rows without a label"


# Texts alone


@pytest.mark.parametrize(
    ("content", "document", "rows"),
    [("\n".join(LINES), "line", 20), ("\n\n".join("\n".join(LINES[i : i + 5]) for i in range(0, 20, 5)), None, 4)],
)
def test_a_file_of_text_is_a_corpus(tmp_path: Path, content: str, document: str | None, rows: int) -> None:
    (tmp_path / "corpus.txt").write_text(content + "\n", "utf-8")
    draft = draft_of(tmp_path / "corpus.txt", tmp_path)
    assert (draft.task, draft.columns) == ("masked-language-modeling", {"text": "text"})
    assert draft.sample.options.get("document") == document
    recipe = load_recipe(draft.path)
    assert recipe.data.document == ("blank-line" if document is None else document)
    assert recipe.settings["max_length"] == 128
    assert draft.rows == rows


def test_a_column_of_texts_is_one_where_the_task_is_stated(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "rows.csv", labelled())
    draft = draft_of(path, tmp_path, task="fill-mask", text="text")
    assert draft.columns == {"text": "text"}
    with pytest.raises(DataError, match=r"masked-language-modeling, which needs one column of texts, and no other"):
        init_recipe(path, output=tmp_path / "other.toml", task="masked-language-modeling")


# Words and tags


def test_columns_of_a_conll_file(tmp_path: Path) -> None:
    sentence = "Ida NNP B-NP I-PER\nwalks VBZ B-VP O\nhome NN B-NP O\n. . O O\n\n"
    other = "Rain NN B-NP O\nin IN B-PP O\nOslo NNP B-NP I-LOC\n\n"
    (tmp_path / "rows.txt").write_text((sentence + other) * 6, "utf-8")
    draft = draft_of(tmp_path / "rows.txt", tmp_path)
    assert draft.columns == {"words": "words", "tags": "tags"}
    assert draft.labels == ("B-LOC", "B-PER", "O")
    assert draft.reasons[1] == "tags: a tag for each word, lists of 3 different values (I-LOC, I-PER, O)"


def test_treebanks(tmp_path: Path) -> None:
    line = "{0}\t{1}\t_\t{2}\t{3}\t_\t0\tdep\t_\t_\n"
    words = [("Ida", "PROPN", "NNP"), ("walks", "VERB", "VBZ"), ("home", "NOUN", "NN"), ("rain", "NOUN", "NN")]
    sentences = ["".join(line.format(i, *word) for i, word in enumerate(words[n:], start=1)) for n in range(3)]
    (tmp_path / "rows.conllu").write_text("\n".join(sentences) + "\n", "utf-8")
    draft = draft_of(tmp_path / "rows.conllu", tmp_path)
    assert draft.columns == {"words": "form", "tags": "upos"}
    assert draft.reasons[1] == "upos: a tag for each word, lists of 3 different values (NOUN, PROPN, VERB)"
    assert not re.search(r"^\[data\.columns\]", recipe_text(draft), re.MULTILINE)


def test_words_in_cells_and_other_names() -> None:
    rows = [{"tokens": "Ida walks home", "slots": "B-who O O"}, {"tokens": '["go", "home"]', "slots": '["O", "O"]'}] * 4
    assert guess_task(rows).columns == {"words": "tokens", "tags": "slots"}
    lists = [{"kinds": ["N", "V"], "surface": [f"w{i}", f"v{i}"]} for i in range(9)]
    assert guess_task(lists).columns == {"words": "surface", "tags": "kinds"}
    broken = {"kinds": ["N"], "surface": ["a", "b"]}
    assert "1 of 10 rows cannot be used" in guess_task([*lists, broken]).reasons[-1]
    uneven = [*lists, broken, broken]
    with pytest.raises(DataError, match="no column of texts"):
        guess_task(uneven)


# The recipe


def test_everything_the_recipe_says(tmp_path: Path, base: str) -> None:
    (tmp_path / "data").mkdir()
    rows = [{"review": row["text"], "mood": row["label"]} for row in labelled(90)]
    train = write_csv(tmp_path / "data" / "train.csv", rows)
    dev = write_csv(tmp_path / "data" / "dev.csv", rows[:30])
    draft = draft_of(train, tmp_path, model=base, validation=dev)
    assert 'train = "data/train.csv"' in recipe_text(draft)
    assert 'validation = "data/dev.csv"' in recipe_text(draft)
    recipe = load_recipe(draft.path)
    assert recipe.data.columns == {"text": "review", "label": "mood"}
    assert (recipe.data.train, recipe.data.validation) == (str(train), str(dev))
    assert recipe.run.output_dir == str(tmp_path / "runs" / "data")
    assert [split.rows for split in check(recipe).splits] == [90, 30]
    assert draft.path.read_text("utf-8") == recipe_text(draft)


def test_a_validation_file_beside_the_rows_is_offered(tmp_path: Path) -> None:
    train = write_csv(tmp_path / "train.csv", labelled())
    write_csv(tmp_path / "valid.csv", labelled())
    draft = draft_of(train, tmp_path)
    assert '# validation = "valid.csv"' in recipe_text(draft)
    assert load_recipe(draft.path).data.validation is None


def test_paths_start_at_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str) -> None:
    (tmp_path / "recipes").mkdir()
    write_csv(tmp_path / "rows.csv", labelled())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small").symlink_to(base)
    draft = init_recipe("rows.csv", output="recipes/rows.toml", model="small")
    assert 'train = "../rows.csv"' in recipe_text(draft)
    assert 'name = "../small"' in recipe_text(draft)
    recipe = load_recipe("recipes/rows.toml")
    assert (recipe.data.train, recipe.model.name) == (str(tmp_path / "rows.csv"), str(tmp_path / "small"))


def test_lengths_follow_the_texts_and_the_model(tmp_path: Path, base: str) -> None:
    rows = [{"text": " ".join(["word"] * (200 if i % 10 == 0 else 30)), "label": "ab"[i % 2]} for i in range(100)]
    path = write_csv(tmp_path / "rows.csv", [{**row, "text": f"{row['text']} {i}"} for i, row in enumerate(rows)])
    assert load_recipe(draft_of(path, tmp_path).path).settings["max_length"] == 384
    short = init_recipe(path, output=tmp_path / "short.toml", model=base)
    assert load_recipe(short.path).settings["max_length"] == 48
    assert '# long_texts = "windows"' in recipe_text(short)
    few = write_csv(tmp_path / "few.csv", labelled())
    assert load_recipe(init_recipe(few, output=tmp_path / "few.toml").path).settings["max_length"] <= 48


def test_the_model_is_the_one_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_csv(tmp_path / "rows.csv", labelled())
    first = load_recipe(draft_of(path, tmp_path).path)
    assert first.model.name == EMBEDDED_MODEL
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    second = load_recipe(init_recipe(path, output=tmp_path / "second.toml").path)
    assert second.model.name == USUAL_MODEL
    assert build_task(first, ("a", "b")).has_hf_head  # so that the folder answers in stock transformers, too
    assert build_task(second, ("a", "b")).has_hf_head
    assert second.optim.learning_rate == 2e-5
    with pytest.raises(CheckpointError):
        init_recipe(path, output=tmp_path / "third.toml", model="package:no_such_package/model")
    assert not (tmp_path / "third.toml").exists()


@settings(max_examples=15)
@given(
    names=st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(str.strip),
        min_size=2,
        max_size=2,
        unique_by=lambda name: name.strip().lower(),
    ),
    label=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
        lambda label: label.strip() == label != "other"
    ),
)
def test_any_name_is_written_so_that_it_can_be_read(
    names: list[str], label: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("names")
    rows = [{names[0]: text, names[1]: (label, "other")[i % 2]} for i, text in enumerate(LINES)]
    draft = draft_of(write_jsonl(folder / "rows.jsonl", rows), folder)
    recipe = load_recipe(draft.path)
    columns = {"text": "text", "label": "label"} | recipe.data.columns
    assert columns == draft.columns
    assert sorted(columns.values()) == sorted(names)


def test_the_draft_as_json(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "rows.csv", [{**row, "stars": i % 4} for i, row in enumerate(labelled())])
    draft = init_recipe(path, output=tmp_path / "a recipe.toml")
    lines = draft.lines()
    assert lines[0] == "rows.csv: 24 rows"
    assert "  label: one label for each row, 3 classes (calm 8, glad 8, sad 8)" in lines
    assert lines[-3:] == [
        f"  bert-tasks check '{draft.path}'",
        f"  bert-tasks train '{draft.path}' --dry-run",
        f"  bert-tasks train '{draft.path}'",
    ]
    written = draft.to_json()
    assert (written["task"], written["rows"], written["columns"]["label"]) == ("sequence-classification", 24, "label")
    assert json.loads(json.dumps(written)) == written
    assert all(line.startswith("#") for line in recipe_text(draft).split("\n\n")[0].splitlines())


def test_doubts_stand_in_the_recipe(tmp_path: Path) -> None:
    rows = [{"text": text, "stars": i % 5 + 1} for i, text in enumerate(LINES)]
    draft = draft_of(write_csv(tmp_path / "rows.csv", rows), tmp_path)
    assert "task: sequence-classification, most likely" in draft.lines()
    assert '#   settings.problem_type = "regression"' in recipe_text(draft)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "rows.csv", labelled())
    (tmp_path / "made.toml").write_text("mine", "utf-8")
    with pytest.raises(UsageError, match=r"made\.toml exists already"):
        draft_of(path, tmp_path)
    assert (tmp_path / "made.toml").read_text("utf-8") == "mine"
    with pytest.raises(UsageError, match="does not exist"):
        init_recipe(path, output=tmp_path / "nowhere" / "made.toml")


def test_files_that_are_not_there(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "rows.csv", labelled())
    with pytest.raises(DataError, match=r"no such file, did you mean 'rows\.csv'\?"):
        draft_of(tmp_path / "row.csv", tmp_path)
    with pytest.raises(DataError, match=r"no file train\.csv, .*Name a file"):
        draft_of(tmp_path, tmp_path)
    with pytest.raises(DataError, match=r"dev\.csv: no such file"):
        draft_of(path, tmp_path, validation=tmp_path / "dev.csv")
    assert not (tmp_path / "made.toml").exists()


# Profiles


def test_profile() -> None:
    column = profile("x", ["two words", "", None, "two words", "one"])
    assert (column.rows, column.filled, column.distinct, column.common) == (5, 3, 2, (("two words", 2), ("one", 1)))
    assert column.words == pytest.approx(5 / 3)
    numbers = profile("x", ["1", 2, "-3.5", "1e2"])
    assert (numbers.numbers, numbers.low, numbers.high, numbers.decimals) == (1.0, -3.5, 100.0, True)
    assert not profile("x", ["1.0", "2.0"]).decimals
    assert profile("x", []).described() == "empty"


def test_words_and_marks() -> None:
    assert pieces("Well, it's done.") == 7
    assert pieces("我喜欢猫 and cats") == 6
    assert percentile(list(range(1, 101))) == 95
    assert percentile([7]) == 7


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="this system limits no file's size")
@pytest.mark.parametrize("room", [0, 200])
def test_a_recipe_that_cannot_be_written_is_not_there(room: int, tmp_path: Path, base: str) -> None:
    """A limit of a file's size stands for a full disk: the kernel refuses the write in the same way."""
    data = write_csv(tmp_path / "train.csv", labelled())
    init_recipe(data, model=base, output=tmp_path / "first.toml")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with pytest.raises(UsageError, match=r"made.toml: cannot be written \(files may not be larger here"):
            draft_of(data, tmp_path, model=base)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "made.toml").exists()


@given(
    name=st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=40).filter(
        lambda name: name not in (".", "..")
    )
)
@settings(deadline=None)
def test_the_next_commands_can_be_pasted_into_a_shell(name: str) -> None:
    for command in next_commands(Path(name)):
        _, _, recipe, *_ = arguments = shlex.split(command)
        assert Path(recipe) == Path(name)
        assert not recipe.startswith("-")
        assert len(arguments) == (4 if command.endswith(" --dry-run") and not name.endswith(" --dry-run") else 3)
