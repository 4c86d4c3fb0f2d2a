"""Owns the fixtures that write a file and read it, and the tables of cases that ``test_messages`` and
``test_canonical_rows`` read.

The functions of the package that read rows are called in ``read`` and ``read_case`` alone.
"""

import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from bert_tasks.data.checks import check_splits
from bert_tasks.data.columns import RECORD, REJECT, Column, Columns, HeadColumns, as_rows, head_column
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.reading import read as read_rows
from bert_tasks.data.reading import valid_rows
from bert_tasks.data.rows import Rows
from bert_tasks.data.splits import DataSpec, Splits, load_tables
from bert_tasks.model.inputs import load_table

READ_OPTIONS = {"names": "columns"} | {
    name: name
    for name in (
        *("format", "encoding", "delimiter", "header", "label_separator", "document"),
        *("split_column", "split"),
    )
}
TEXT_AND_LABEL = (Column(name="text", kind="text"), Column(name="label", kind="label", required=False))
KINDS = {"sentences": "texts", "context": "text"}  # of columns that are not called as their kind is


@dataclass(frozen=True, kw_only=True)
class Case:
    """A case of a table, whose first line has the input and whose indented lines have the result.

    Attributes:
        line: Line of the case in the table.
        name: Name of the file or folder. "rows" are rows in memory, and "predict" are rows of ``TaskModel.predict``.
        columns: The columns that are read, such as ``text,label?`` or ``label:choice?``. "-" is the column of the tasks
            in the option "tasks".
        options: How the content is written and read. See ``read_case``.
        content: The content. A text is a file. An object has several files or the sheets of a workbook. A list has
            rows.
        result: The lines of the result.
    """

    line: int
    name: str
    columns: str
    options: dict[str, Any]
    content: Any
    result: tuple[str, ...]


def blocks(table: Path) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """Yields the number and the text of each first line in a table of cases, and the indented lines below it."""
    number, head, below = 0, "", list[str]()
    for place, line in enumerate([*table.read_text("utf-8").split("\n"), "end"], start=1):
        if line.startswith("    "):
            below.append(line[4:])
        elif line and not line.startswith("#"):
            if head:
                yield number, head, tuple(below)
            number, head, below = place, line, []


def is_source(name: str) -> bool:
    """Returns True for a file, a folder or rows in memory, and False for a kind of column."""
    return "." in name or "/" in name or name in ("rows", "predict")


def cases(table: Path) -> Iterator[Case]:
    """Yields the cases of a table, apart from those of single values."""
    for number, head, below in blocks(table):
        name, _, rest = head.partition(" ")
        if not is_source(name):
            continue
        columns, _, rest = rest.partition(" ")
        options, end = json.JSONDecoder().raw_decode(rest)
        content = json.loads(rest[end:])
        yield Case(line=number, name=name, columns=columns, options=options, content=content, result=below)


def values(table: Path) -> Iterator[tuple[str, str, str]]:
    """Yields the kind, the value as JSON and the message of each case of a single value."""
    for _, head, below in blocks(table):
        kind, rest = head.split(" ", 1)
        if not is_source(kind):
            yield kind.replace("-", " "), rest, "\n".join(below)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives each test with an argument ``case`` or ``value_case`` the cases of the table ``TABLE`` of its module."""
    table = getattr(metafunc.module, "TABLE", None)
    if table is None:
        return
    path = Path(metafunc.module.__file__).with_name(table)
    if "case" in metafunc.fixturenames:
        found = list(cases(path))
        metafunc.parametrize("case", found, ids=[f"{case.line}-{case.name}" for case in found])
    if "value_case" in metafunc.fixturenames:
        of_values = list(values(path))
        metafunc.parametrize("value_case", of_values, ids=[f"{kind} {value:.40}" for kind, value, _ in of_values])


def columns_of(names: str) -> tuple[Column, ...]:
    """Returns the columns of ``NAME:KIND?``. A question mark makes a column optional, and the kind may be its name."""
    columns = []
    for entry in names.split(","):
        called, _, kind = entry.removesuffix("?").partition(":")
        kind = kind.replace("-", " ") if kind else KINDS.get(called, called)
        columns.append(Column(name=called, kind=kind, required="?" not in entry))
    return tuple(columns)


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rows]:
    """``read(content, name, **options)`` in an empty current folder, with ``cache/`` below it."""
    monkeypatch.chdir(tmp_path)

    def write_and_read(content: str | bytes, name: str = "rows.csv", **options: Any) -> Rows:
        data = content.encode() if isinstance(content, str) else content
        (tmp_path / name).write_bytes(data)
        options.setdefault("columns", TEXT_AND_LABEL)
        how = {field: options.pop(name) for name, field in READ_OPTIONS.items() if name in options}
        return read_rows(name, options=ReadOptions(**how), cache_dir=tmp_path / "cache", **options)

    return write_and_read


@pytest.fixture
def read_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Case], tuple[list[dict[str, Any]], Any]]:
    """Writes the content of a case into an empty current folder, and returns its rows and notes.

    These options say how the content is written: "encoded" (a codec, or gzip), "classes" (columns of class ids -> the
    names of the classes), and "held" (frame, arrow or dataset, the form of rows in memory, or a saved data set).

    These say by what it is read: "spec" (the fields of a ``DataSpec``, whose training rows it is), "checked" (true
    means that the labels are checked as before training), and "tasks" (the name of each of several tasks -> its
    columns, names and labels). All other options are those of ``ReadOptions`` and ``read``.
    """
    monkeypatch.chdir(tmp_path)

    def written_and_read(case: Case) -> tuple[list[dict[str, Any]], Any]:
        options = dict(case.options)
        writing = {name: options.pop(name) for name in ("encoded", "classes", "held") if name in options}
        spec, checked, tasks = (options.pop(name, None) for name in ("spec", "checked", "tasks"))
        columns: Columns = columns_of(case.columns) if tasks is None else heads_of(tasks)
        names_of_tasks = () if tasks is None else tuple(tasks)
        reading = ReadOptions(**{READ_OPTIONS[name]: options.pop(name) for name in READ_OPTIONS if name in options})
        if case.name == "predict":
            rows = as_rows(in_memory(case.content, **writing), columns)
            names = {} if reading.columns is None else reading.columns
            return [described(row, names_of_tasks) for row in valid_rows(rows, columns, names=names)], ()
        options["columns"] = columns
        if case.name == "rows":
            required = "required" if options.pop("require_labels", True) else "optional"
            options |= {"labels": required, "known_labels": options.pop("labels", ())}
            table = load_table(in_memory(case.content, **writing), reading=reading, **options)
        else:
            write(Path(case.name), case.content, **writing)
            options["cache_dir"] = tmp_path / "cache"
            if spec is None:
                table = read_rows(case.name, options=reading, **options)
            else:
                table = load_tables(DataSpec(train=case.name, **spec), **options).train
        if checked:
            labels = case.options.get("labels", ())
            check_splits(Splits(train=table, validation={}), columns=columns, labels=labels)
        return [described(row, names_of_tasks) for row in table], table.notes

    return written_and_read


def heads_of(tasks: dict[str, dict[str, Any]]) -> dict[str, HeadColumns]:
    heads = {}
    for name, task in tasks.items():
        labels = tuple(task.get("labels", ()))
        heads[name] = HeadColumns(columns=columns_of(task["columns"]), names=task.get("names", {}), labels=labels)
    return heads


def described(row: Mapping[str, Any], tasks: Sequence[str]) -> dict[str, Any]:
    """Returns a row with names for the columns that are no columns of a task, whose names no user sees."""
    named = {RECORD: "record", REJECT: "reject"} | {head_column(task): f"task {task}" for task in tasks}
    found = {named.get(name, name): value for name, value in row.items()}
    for name in ("record", "reject"):
        if found.get(name) is not None:
            found[name] = json.loads(found[name])
    return found


def write(path: Path, content: Any, *, encoded: str = "utf-8", classes: Any = None, held: str = "") -> None:
    """Writes the content of a case. See ``Case`` and ``read_case``."""
    if isinstance(content, str):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded_text(content, encoded))
    elif path.suffix == ".xlsx":
        write_workbook(path, content)
    elif path.suffix == ".spacy":
        write_documents(path, content)
    elif path.suffix == ".parquet" and classes is None:
        from pyarrow import Table, parquet

        parquet.write_table(Table.from_pylist(content), path)
    elif path.suffix == ".parquet":
        data_set(content, classes).to_parquet(path)
    elif held == "dataset":
        data_set(content, classes).save_to_disk(path)
    else:
        if path.suffix == "":
            path.mkdir()
        for name, text in content.items():
            write(Path(name), text, encoded=encoded)


def encoded_text(text: str, codec: str) -> bytes:
    """Returns the bytes of a text, in which a lone surrogate is an undecodable byte."""
    if codec == "gzip":
        return gzip.compress(text.encode("utf-8", "surrogateescape"), mtime=0)
    return text.encode(codec, "surrogateescape")


def in_memory(content: Any, *, held: str = "", classes: Any = None) -> Any:
    """Returns rows in the form ``held``. Texts in a list within the list of rows are a tuple."""
    if held == "frame":
        from pandas import DataFrame

        return DataFrame(content)
    if held == "arrow":
        from pyarrow import Table

        return Table.from_pylist(content)
    if held == "dataset":
        return data_set(content, classes)
    if not isinstance(content, list):
        return content
    return [tuple(row) if isinstance(row, list) else row for row in content]


def data_set(rows: list[dict[str, Any]], classes: dict[str, list[str]] | None) -> Any:
    from datasets import ClassLabel, Dataset, List

    data = Dataset.from_list(rows)
    for name, names in ({} if classes is None else classes).items():
        label = ClassLabel(names=names)
        data = data.cast_column(name, List(label) if isinstance(rows[0][name], list) else label)
    return data


def write_workbook(path: Path, sheets: dict[str, list[list[Any]]]) -> None:
    """Writes a workbook. A sheet whose name begins with "Hidden" is hidden, and ``{"date": "..."}`` is a date."""
    from openpyxl import Workbook

    book = Workbook()
    book.remove(book.active)
    for title, rows in sheets.items():
        sheet = book.create_sheet(title)
        sheet.sheet_state = "hidden" if title.startswith("Hidden") else "visible"
        for row in rows:
            sheet.append([date.fromisoformat(cell["date"]) if isinstance(cell, dict) else cell for cell in row])
    book.save(path)


def write_documents(path: Path, documents: list[dict[str, Any]]) -> None:
    """Writes spaCy's binary documents of texts with entities and scores of labels."""
    from spacy import blank
    from spacy.tokens import DocBin

    nlp, packed = blank("xx"), DocBin()
    for content in documents:
        document = nlp(content["text"])
        document.set_ents([document.char_span(start, end, label) for start, end, label in content["ents"]])
        document.cats = content.get("cats", {})
        packed.add(document)
    packed.to_disk(path)
