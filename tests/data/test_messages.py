"""What is said of rows and files that cannot be used: each case of messages.txt."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bert_tasks.data.columns import Column
from bert_tasks.data.table import RowTable
from bert_tasks.errors import DataError

# What a row has beside the value: the columns that a kind is read with.
BESIDE: dict[str, dict[str, Any]] = {
    "tags": {"words": ["a", "b"]},
    "answers": {"context": "He went to Paris. Paris is in France."},
    "choice": {"choices": ["dry", "same", "same"]},
}
KINDS = {"sentences": "texts", "context": "text"}  # of columns that are not called as their kind is


def cases(*, files: bool) -> Iterator[tuple[str, ...]]:
    """The words of a case, which are two for a value and four for a file, and its message."""
    head, lines = "", list[str]()
    for line in [*Path(__file__).with_name("messages.txt").read_text("utf-8").splitlines(), "end"]:
        if line.startswith("    "):
            lines.append(line[4:])
        elif line and not line.startswith("#"):
            if head and (" " in head) and head.split(" ")[0].endswith((".csv", ".jsonl", ".tsv")) == files:
                name, _, rest = head.partition(" ")
                names, _, rest = rest.partition(" ") if files else ("", "", rest)
                yield name, names, rest, "\n".join(lines)
            head, lines = line, []


@pytest.mark.parametrize(("kind_name", "names", "value", "message"), list(cases(files=False)))
def test_values(read: Callable[..., RowTable], kind_name: str, names: str, value: str, message: str) -> None:
    beside = BESIDE.get(kind_name, {})
    columns = [*(Column(name=name, kind=KINDS.get(name, name)) for name in beside), Column(name="x", kind=kind_name)]
    with pytest.raises(DataError) as error:
        read(json.dumps({**beside, "x": json.loads(value)}) + "\n", "rows.jsonl", columns=columns)
    heading, line = str(error.value).splitlines()
    assert heading.startswith("1 problem in the data. ")
    assert line == f"  rows.jsonl:1: {message}"


@pytest.mark.parametrize(("name", "names", "how", "message"), list(cases(files=True)))
def test_files(read: Callable[..., RowTable], name: str, names: str, how: str, message: str) -> None:
    columns = []
    for entry in names.split(","):
        called, _, kind_name = entry.removesuffix("?").partition(":")
        columns.append(Column(name=called, kind=kind_name or KINDS.get(called, called), required="?" not in entry))
    options, end = json.JSONDecoder().raw_decode(how)
    with pytest.raises(DataError) as error:
        read(json.loads(how[end:]).encode("utf-8", "surrogateescape"), name, columns=columns, **options)
    assert str(error.value) == message
    assert error.value.exit_code == 3
