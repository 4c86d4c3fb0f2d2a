"""Parsing of SQuAD's nested JSON, versions 1.1 and 2.0, into one record a question.

Owns the nesting and what ``is_impossible`` says. Must not know tasks, nor judge whether answers stand in their
context.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bert_tasks.data.records import Record, Records, open_text
from bert_tasks.errors import DataError

# An object whose members before a list "data" of objects are plain values, as SQuAD's "version" is.
_START = re.compile(r'\s*\{\s*(?:"[^"]*"\s*:\s*(?:"[^"]*"|[\w.+-]+)\s*,\s*)*"data"\s*:\s*\[\s*\{')
_LOOKED_AT = 4096


def looks_like_squad(path: Path) -> bool:
    """Whether a .json file begins as SQuAD's do; false for a file that cannot be read."""
    try:
        with open_text(path, encoding="utf-8", newline="\n") as file:
            start = file.read(_LOOKED_AT)
    except (OSError, DataError):
        return False
    return _START.match(start) is not None


@contextmanager
def squad_records(path: Path, *, encoding: str) -> Iterator[Records]:
    """One record a question: id, title, question, context and answers, numbered from 1 in file order.

    Questions without ``answers`` (test data) have none. Those that are impossible have an empty list.

    Raises:
        DataError: naming the place in the file where the nesting is not SQuAD's.
    """
    with open_text(path, encoding=encoding, newline="\n") as file:
        try:
            content = json.load(file)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{error.lineno}: not valid JSON at column {error.colno}: {error.msg}") from error
        except RecursionError as error:
            raise DataError(f"{path}: nested too deeply to be SQuAD's JSON") from error
    yield Records(None, _questions(content, str(path)))


def _questions(content: Any, path: str) -> Iterator[Record]:
    number = 0
    for article, place in _members(content, "data", path, ""):
        title = {"title": article["title"]} if "title" in article else {}
        for paragraph, inside in _members(article, "paragraphs", path, place):
            shared = title | ({"context": paragraph["context"]} if "context" in paragraph else {})
            for question, _ in _members(paragraph, "qas", path, inside):
                number += 1
                yield _question(number, question, shared)


def _members(parent: Any, name: str, path: str, place: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The objects in a list of the parent, each with its place, such as ``data[0].paragraphs[3]``."""
    inside = f"{place}.{name}" if place else name
    if not isinstance(parent, dict) or not isinstance(parent.get(name), list):
        hint = "" if place else "; read one object a line, such as {\"question\": ...}, as format = 'jsonl'"
        raise DataError(f"{path}: no list {inside!r}, which SQuAD's JSON has{hint}")
    for number, member in enumerate(parent[name]):
        if not isinstance(member, dict):
            raise DataError(f"{path}: {inside}[{number}]: expected an object, not {member!r:.60}")
        yield member, f"{inside}[{number}]"


def _question(number: int, question: dict[str, Any], shared: dict[str, Any]) -> Record:
    cells = shared | {name: question[name] for name in ("question", "answers") if name in question}
    name = str(question["id"]) if "id" in question else None
    if name is not None:
        cells["id"] = name
    if question.get("is_impossible") is True:
        if cells.get("answers"):
            return Record(number, {}, "it has answers, but is_impossible is true; correct one of them", name=name)
        cells["answers"] = []
    return Record(number, cells, name=name)
