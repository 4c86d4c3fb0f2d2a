"""``init`` on the files that people have: its recipe says what the readers need, so that ``check`` accepts it."""

import csv
import gzip
import io
import json
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest

from bert_tasks.data.checks import DataReport
from bert_tasks.errors import DataError, UsageError
from bert_tasks.init import RecipeDraft, init_recipe
from bert_tasks.init.recipe import DETECTABLE
from bert_tasks.init.text import recipe_text
from bert_tasks.recipe.check import check
from bert_tasks.recipe.schema import load_recipe
from bert_tasks.tasks import TASK_NAMES
from support.small_tokenizers import LINES

MOODS = ("calm", "glad", "sad")
SINGLE, SEVERAL = "single_label_classification", "multi_label_classification"
ROWS = 30
Init = Callable[..., tuple[RecipeDraft, DataReport]]


@pytest.fixture
def init(base: str, tmp_path: Path) -> Init:
    """``init`` on a file with this content, and ``check`` on its recipe."""

    def run(content: str | bytes, name: str, **options: Any) -> tuple[RecipeDraft, DataReport]:
        file, recipe = tmp_path / name, tmp_path / "made.toml"
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        recipe.unlink(missing_ok=True)
        draft = init_recipe(file, output=recipe, model=base, **options)
        return draft, check(load_recipe(recipe))

    return run


def table(rows: Sequence[Mapping[str, Any]], *, delimiter: str = ",", header: bool = True) -> str:
    file = io.StringIO()
    writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")
    writer.writerows([rows[0]] if header else [])
    writer.writerows(row.values() for row in rows)
    return file.getvalue()


def text(number: int) -> str:
    return f"{LINES[number % len(LINES)]} {number}"


def moods() -> list[dict[str, str]]:
    return [{"source": f"gj{i // 9}", "text": f"{text(i)}, or; not", "label": MOODS[i % 3]} for i in range(ROWS)]


LAYOUTS = [*product(("rows.csv", "rows.tsv", "rows.csv.gz"), (",", ";", "\t", "|"), (True, False))]
SOME_LAYOUTS = random.Random(1).sample(LAYOUTS, 6)


@pytest.mark.parametrize(
    ("name", "delimiter", "header"),
    [pytest.param(*layout, marks=() if layout in SOME_LAYOUTS else pytest.mark.slow) for layout in LAYOUTS],
)
def test_tables_of_any_layout(name: str, delimiter: str, header: bool, init: Init) -> None:
    content = table(moods(), delimiter=delimiter, header=header).encode()
    draft, report = init(gzip.compress(content) if name.endswith(".gz") else content, name)
    names = {"text": "text", "label": "label"} if header else {"text": "1", "label": "2"}
    assert (draft.columns, draft.labels, draft.sample.count) == (names, MOODS, ROWS)
    assert load_recipe(draft.path).data.header is header
    assert sum(split.rows for split in report.splits) == ROWS


def test_a_name_that_comes_twice_in_the_header_is_an_error(init: Init) -> None:
    rows = [{"a": MOODS[i % 3], "b": text(i), "c": MOODS[i % 3]} for i in range(ROWS)]
    with pytest.raises(DataError, match="the header names 'a' more than once"):
        init("a,b,a\n" + table(rows, header=False).replace("calm,", "quiet,"), "rows.csv")


def test_a_header_may_be_stated(init: Init) -> None:
    """Nothing in this file shows that the first line is a row."""
    content = table([{"a": f"{text(i)} and so on", "b": i + 0.5} for i in range(ROWS)], header=False)
    assert "--no-header" in "\n".join(init(content, "rows.csv")[0].lines())
    draft, report = init(content, "rows.csv", header=False)
    assert sum(split.rows for split in report.splits) == draft.sample.count == ROWS


@pytest.mark.parametrize(("first", "index"), [(0, True), (1, False)])
def test_columns_may_be_numbered(first: int, index: bool, init: Init) -> None:
    """pandas calls columns without names 0, 1, ...; an index has the empty name. The numbers come back as labels."""
    rows = [({"": i} if index else {}) | {f"{first}": text(i), f"{first + 1}": i % 3} for i in range(ROWS)]
    draft, report = init(table(rows), "rows.csv")
    assert load_recipe(draft.path).data.header is True
    assert draft.columns == {"text": f"{first}", "label": f"{first + 1}"}
    assert sum(split.rows for split in report.splits) == draft.sample.count == ROWS
    assert "--no-header" not in "\n".join(draft.lines())


GLUE = {
    "mrpc": (
        "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
        lambda i: f'{i % 2}\t{702876 + i // 2}\t{702977 + i}\t"{text(i)}; he said\t{text(i + 1)}; {text(i)}"; {i}',
        "pair-classification",
        {"text": "#1 String", "text_pair": "#2 String", "label": "Quality"},
    ),
    "cola": (
        None,
        lambda i: f'gj0{i % 4}\t{i % 2}\t{"*" if i % 2 else ""}\t"{text(i)}',
        "sequence-classification",
        {"text": "sentence", "label": "label"},
    ),
    "rte": (
        "index\tsentence1\tsentence2\tlabel",
        lambda i: f"{i}\t{text(i)}\t{text(i + 1)}\t{('entailment', 'not_entailment')[i % 2]}",
        "pair-classification",
        {"text": "sentence1", "text_pair": "sentence2", "label": "label"},
    ),
}


@pytest.mark.parametrize(
    ("name", "file", "has_format"),
    [
        *(("mrpc", "rows.tsv", True), ("mrpc", "rows.csv", False)),
        *(("cola", "rows.tsv", True), ("cola", "rows.tsv", False)),
        ("rte", "rows.tsv", False),
    ],
)
def test_glue_files(name: str, file: str, has_format: bool, init: Init) -> None:
    header, line, task, columns = GLUE[name]
    content = "\n".join([*([] if header is None else [header]), *map(line, range(ROWS))]) + "\n"
    draft, report = init(content, file, **({"format": f"glue/{name}"} if has_format else {}))
    expected = {"text": "3", "label": "1"} if header is None and not has_format else columns
    assert (draft.task, draft.columns) == (task, expected)
    assert draft.settings == {"problem_type": SINGLE}
    assert sum(split.rows for split in report.splits) == ROWS


JOINED: dict[str, Callable[[list[str]], str]] = {
    ";": ";".join,
    "|": "|".join,
    ",": ",".join,
    ", ": ", ".join,
    "json": json.dumps,
    "python": repr,
}


@pytest.mark.parametrize(("name", "join"), [*zip(cycle(("labels", "anything")), JOINED, strict=False)])
def test_several_labels_in_a_cell(join: str, name: str, init: Init) -> None:
    sets = [[mood for j, mood in enumerate(MOODS) if (i % 6 + 1) >> j & 1] for i in range(ROWS)]
    rows = [{"text": text(i), name: JOINED[join](names)} for i, names in enumerate(sets)]
    draft, report = init(table(rows), "rows.csv")
    assert draft.settings == {"problem_type": SEVERAL}
    assert draft.labels == MOODS
    counts = [sum(split.label_counts[mood] for split in report.splits) for mood in MOODS]
    assert counts == [sum(mood in names for names in sets) for mood in MOODS]


@pytest.mark.parametrize("lists", [json.dumps, repr])
def test_lists_of_one_label_each(lists: Callable[[list[str]], str], init: Init) -> None:
    draft, _ = init(table([{"text": text(i), "label": lists([MOODS[i % 3]])} for i in range(ROWS)]), "rows.csv")
    assert (draft.settings["problem_type"], draft.labels) == (SINGLE, MOODS)


@pytest.mark.parametrize(
    "names",
    [
        ("Bern, Switzerland", "Paris, France", "Rome, Italy"),
        ("rent; water", "other"),
        ("1,5", "2,5", "1,0", "2,0"),
        ("and/or", "neither"),
    ],
)
def test_marks_inside_a_label_do_not_part_it(names: tuple[str, ...], init: Init) -> None:
    rows = [{"text": text(i), "label": names[i % len(names)]} for i in range(ROWS)]
    draft, _ = init(table(rows), "rows.csv")
    assert (draft.settings["problem_type"], set(draft.labels)) == (SINGLE, set(names))
    if ", " in names[0]:
        parted, _ = init(table(rows), "rows.csv", label_separator=",", label="label")
        assert len(parted.labels) == 6


def test_columns_and_task_may_be_stated(init: Init) -> None:
    rows = [
        {"a": f"{text(i)} first", "b": f"{text(i)} and a second", "c": MOODS[i % 3], "label": i % 2}
        for i in range(ROWS)
    ]
    pair, _ = init(table(rows), "rows.csv")
    assert (pair.task, pair.columns["label"]) == ("pair-classification", "label")
    assert any("sequence-classification" in other for other in pair.alternatives)
    draft, _ = init(table(rows), "rows.csv", text="a", label="c")
    assert (draft.task, draft.columns) == ("sequence-classification", {"text": "a", "label": "c"})
    assert draft.alternatives == ()
    both, _ = init(table(rows), "rows.csv", text=["b", "a"], label="c")
    assert both.columns == {"text": "b", "text_pair": "a", "label": "c"}
    single, _ = init(table(rows), "rows.csv", task="sequence-classification")
    assert single.task == "sequence-classification"
    assert single.columns["label"] == "label"


def test_what_is_stated_must_fit(init: Init) -> None:
    content = table(moods())
    for task in set(DETECTABLE) - {"sequence-classification"}:
        with pytest.raises(DataError, match=f"columns do not fit {task}, which needs .*. The columns are:\n  'source'"):
            init(content, "rows.csv", task=task)
    with pytest.raises(UsageError, match=r"rows\.csv: no column 'tekst', did you mean 'text'"):
        init(content, "rows.csv", text="tekst")
    with pytest.raises(UsageError, match="unknown task 'span-extractoin', did you mean 'span-extraction'"):
        init(content, "rows.csv", task="span-extractoin")
    with pytest.raises(UsageError, match="3 columns of texts"):
        init(content, "rows.csv", text=["a", "b", "c"])
    with pytest.raises(UsageError, match="must be a visible character"):
        init(content, "rows.csv", label_separator=" ")


def test_the_names_of_the_hubs_pipelines_state_a_task(init: Init) -> None:
    for name, task in TASK_NAMES.items():
        if task.name == "sequence-classification":
            draft, _ = init(table(moods()), "rows.csv", task=f" {name} ")
            assert draft.task == task.name
        elif not task.row_needs:
            with pytest.raises(UsageError, match=f"init writes recipes for .*, not for '{task.name}'"):
                init(table(moods()), "rows.csv", task=name)
        else:
            with pytest.raises(DataError, match=f"the columns do not fit {task.name}, which needs "):
                init(table(moods()), "rows.csv", task=name)


def asked(i: int, answer: str) -> dict[str, str]:
    said = f"The ferry {i} leaves the old harbour of Oslo at seven in the morning and returns late at night"
    return {"question": f"What about number {i}?", "context": said, "answer": answer}


@pytest.mark.parametrize("suffix", ["csv", "json.gz", "jsonl.gz"])
def test_questions_in_every_kind_of_file(suffix: str, init: Init) -> None:
    rows = [asked(i, f"ferry {i}") for i in range(ROWS)]
    content = table(rows) if "csv" in suffix else json.dumps(rows) if "json" in suffix else ""
    if "jsonl" in suffix:
        content = "\n".join(map(json.dumps, rows))
    draft, report = init(gzip.compress(content.encode()) if suffix.endswith("gz") else content, f"rows.{suffix}")
    assert draft.task == "span-extraction"
    assert draft.columns == {"question": "question", "context": "context", "answers": "answer"}
    assert sum(split.rows for split in report.splits) == ROWS


@pytest.mark.parametrize(("share", "hidden"), [(0.0, True), (0.05, False), (0.21, True), (0.6, False)])
def test_answers_that_are_not_verbatim_are_left_out(share: float, hidden: bool, init: Init) -> None:
    altered = {round(i / share) for i in range(round(100 * share))} if share else set()
    rows = [
        asked(i, f"Ferry no. {i}" if i in altered else "" if hidden and i % 3 == 0 else f"ferry {i}")
        for i in range(100)
    ]
    options = {}
    if share > 0.1:
        with pytest.raises(DataError, match=r"misplaced answer in column 'answer'.*\n  To leave these rows out, name"):
            init(table(rows), "rows.csv")
        options["task"] = "span-extraction"
    draft, report = init(table(rows), "rows.csv", **options)
    bad = len(altered)
    assert (draft.task, draft.columns["answers"]) == ("span-extraction", "answer")
    assert draft.settings == {"version_2_with_negative": hidden}
    assert load_recipe(draft.path).data.on_error == ("skip" if bad else "fail")
    assert (sum(split.rows for split in report.splits), draft.to_json()["rows_left_out"]) == (100 - bad, bad)
    printed = "\n".join(draft.lines())
    assert (
        f"rows.csv: {bad} of 100 rows ({bad}%) cannot be used and will be skipped. The first is in line 2" in printed
    ) == (bad > 0)
    assert (f"{bad} of 100 rows ({bad}%)" in recipe_text(draft).partition("on_error")[2]) == (bad > 0)


UNUSABLE: dict[str, Mapping[str, Any]] = {
    "no label": {"text": "a", "label": ""},
    "no text": {"text": None, "label": "glad"},
    "half a character": {"text": "\ud800", "label": "glad"},
    "a text of another kind": {"text": 5, "label": "glad"},
}


@pytest.mark.parametrize(("fault", "in_validation"), [*zip(UNUSABLE, cycle((False, True)), strict=False)])
def test_rows_that_cannot_be_used_are_left_out(fault: str, in_validation: bool, init: Init, tmp_path: Path) -> None:
    good = [{"text": text(i), "label": MOODS[i % 3]} for i in range(ROWS)]
    bad = [UNUSABLE[fault]] * 2
    (tmp_path / "dev.jsonl").write_text("\n".join(map(json.dumps, [*good, *(bad if in_validation else [])])))
    content = "\n".join(map(json.dumps, [*good, *([] if in_validation else bad)]))
    draft, report = init(content, "rows.jsonl", validation=tmp_path / "dev.jsonl")
    assert [split.rows for split in report.splits] == [ROWS, ROWS]
    name = "dev" if in_validation else "rows"
    assert any(f"{name}.jsonl: 2 of 32 rows (6%) cannot be used" in line for line in draft.lines())
    assert any("2 of 32 rows cannot be used and were left out (line 31, 32)" in line for line in report.lines())


@pytest.mark.parametrize("odd", [("Calm",), ("7",), ("Calm", "7", "")])
def test_labels_that_cannot_be_taken_from_the_rows_are_stated(odd: Sequence[str], init: Init) -> None:
    rows = [{"text": text(i), "label": (*MOODS, *odd)[i % (3 + len(odd))]} for i in range(60)]
    draft, report = init(table(rows), "rows.csv")
    assert set(load_recipe(draft.path).settings["labels"]) == {*MOODS, *odd} - {""}
    assert sum(split.rows for split in report.splits) == sum(row["label"] != "" for row in rows)
    assert "settings.labels is set, because" in recipe_text(draft)


def test_rows_that_cannot_be_trained_on_make_no_recipe(init: Init, tmp_path: Path) -> None:
    rows = [{"text": f"It rained on day {i % 3}", "label": MOODS[i % 3]} for i in range(9)]
    with pytest.raises(DataError, match="too few rows to split off validation rows"):
        init(table(rows), "rows.csv")
    assert not (tmp_path / "made.toml").exists()


def test_of_two_tasks_the_one_whose_columns_fit_each_other_wins(init: Init) -> None:
    rows = [{**asked(i, f"ferry {i}"), "topic": MOODS[i % 3]} for i in range(ROWS)]
    draft, _ = init(table(rows), "rows.csv")
    assert draft.task == "span-extraction"
    assert draft.alternatives == ()
    explicit_draft, _ = init(table(rows), "rows.csv", task="pair-classification")
    assert explicit_draft.columns["label"] == "topic"


def test_a_validation_file_must_have_the_columns(init: Init, tmp_path: Path) -> None:
    (tmp_path / "dev.csv").write_text(table([{"txt": text(i), "label": MOODS[i % 3]} for i in range(ROWS)]))
    with pytest.raises(DataError, match=r"dev.csv: no column 'text', which .*rows.csv has, did you mean 'txt'"):
        init(table(moods()), "rows.csv", validation=tmp_path / "dev.csv")


@pytest.mark.parametrize(("rare", "is_hinted"), [(3, True), (8, False), (15, False)])
def test_rare_labels_are_mentioned(rare: int, is_hinted: bool, init: Init) -> None:
    rows = [{"text": text(i), "label": "ny"[i % (ROWS // rare) == 0]} for i in range(ROWS)]
    draft, report = init(table(rows), "rows.csv", validation=None)
    hints = [line for line in (*draft.lines(), *report.lines()) if "imbalanced: 'n'" in line]
    assert len(hints) == (1 if is_hinted else 0)
    for hint in hints:
        assert 'settings.class_weights = "balanced"' in hint
        assert "macro_f1" in hint


@pytest.mark.parametrize(("spacing", "is_hinted"), [(4, True), (1, False)])
def test_a_tag_of_almost_all_words_is_mentioned(spacing: int, is_hinted: bool, init: Init) -> None:
    sentences = [text(i).split() for i in range(ROWS)]
    tags = [["B-X" if i % spacing == 0 and n < 2 else "O" for n in range(len(s))] for i, s in enumerate(sentences)]
    rows = [json.dumps({"words": words, "tags": names}) for words, names in zip(sentences, tags, strict=True)]
    draft, report = init("\n".join(rows), "rows.jsonl", validation=None)
    hints = [line for line in (*draft.lines(), *report.lines()) if "imbalanced: 'O' has" in line]
    assert len(hints) == (1 if is_hinted else 0)
    assert all('settings.class_weights = "balanced" or settings.focal_gamma = 2.0' in hint for hint in hints)
