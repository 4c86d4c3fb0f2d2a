"""TOML (https://toml.io) with the line of each key, plain values, and overrides of a recipe.

Python's ``tomllib`` parses documents, but knows neither lines of keys nor limits. This module adds both, and joins a
file with the options of the command line. Paths become absolute here, because a path in a file starts at the file, and
one that is typed starts at the current folder.
"""

import copy
import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, time
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from bert_tasks.data.issues import missing_path
from bert_tasks.errors import RecipeError
from bert_tasks.storage import check_path

Document = dict[str, Any]
KeyPath = tuple[str | int, ...]

_SHOWN = 40  # characters
_DEEPEST = 50
_MOST_BYTES = 2**22  # size of the largest recipe
_LIMITS = f"an integer has more than 64 bits, or tables and lists are nested more than {_DEEPEST} deep"
# Keys with paths -> whether only the name of a folder that exists is one.
_PATHS = {
    ("run", "output_dir"): False,
    ("model", "name"): True,
    ("model", "tokenizer"): True,
    ("teacher", "name"): True,
    ("search", "model", "name"): True,
    ("search", "model", "tokenizer"): True,
}
_DATA_PATHS = {"dir": False, "train": False, "validation": False, "dataset": True}
DATA_SOURCES = ("dataset", "dir", "train")
# A module of Hugging Face's evaluate, such as evaluate:glue:mrpc with its configuration.
EVALUATE_MODULE = re.compile(r"evaluate:(?P<path>.+?)(:(?P<configuration>[\w-]+))?")
_SOURCE_KEYS = (*DATA_SOURCES, "config", "revision", "validation")


def parse_document(text: str) -> Document:
    """Parses TOML. Raises TOMLDecodeError also for huge integers and deep nesting."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except (RecursionError, ValueError):  # Python does not convert integers of more than 4,300 digits
        raise tomllib.TOMLDecodeError(_LIMITS) from None
    if not _is_within_limits(document, 0):
        raise tomllib.TOMLDecodeError(_LIMITS)
    return document


def _is_within_limits(value: object, depth: int) -> bool:
    """Returns True if a value has no integer of more than 64 bits and no deep nesting."""
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    items: Iterable[object] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, list):
        items = value
    return depth < _DEEPEST and all(_is_within_limits(item, depth + 1) for item in items)


def key_lines(text: str) -> dict[KeyPath, int]:
    """Returns the 1-based line of every table and key of a valid TOML text.

    Lines are added to a statement until it can be parsed alone, which is the case for each header of a table and each
    key with its value.
    """
    lines: dict[KeyPath, int] = {}
    table: tuple[str, ...] = ()
    statement, begin = "", 1
    for number, line in enumerate(text.split("\n"), start=1):
        if not statement:
            begin = number
        statement += f"{line}\n"
        try:
            path = _first_path(tomllib.loads(statement))
        except tomllib.TOMLDecodeError:  # the value goes on in the next line
            continue
        if statement.lstrip().startswith("["):
            table = path
        elif path:
            path = (*table, *path)
        for length in range(1, len(path) + 1):
            lines.setdefault(path[:length], begin)
        statement = ""
    return lines


def _first_path(document: Document) -> tuple[str, ...]:
    """Returns the keys of nested tables with one key each."""
    path, value = list[str](), document
    while isinstance(value, dict) and len(value) == 1:
        ((key, value),) = value.items()
        path.append(key)
    return tuple(path)


def parse_value(text: str) -> Any:
    """Returns the value of a TOML literal, or the text if it is none or a date."""
    try:
        document = parse_document(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if str(error) == _LIMITS:
            raise RecipeError(f"{text[:_SHOWN]}...: {error}") from None
        return text
    value = document["value"]
    if len(document) > 1 or isinstance(value, date | time):  # a text such as "1\nepochs = 2", or 2020-01-01
        return text
    return value


def literal(value: object) -> str:
    """Returns a value as TOML writes it, in one line."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, Mapping):
        # A document with one key shows how the key is quoted, and below how a value is.
        items = [tomli_w.dumps({key: 0}).removesuffix("0\n") + literal(item) for key, item in value.items()]
        return f"{{{', '.join(items)}}}"
    return tomli_w.dumps({"value": value})[len("value = ") : -1]


class Override(NamedTuple):
    """A key that an option sets. ``option`` is what the user wrote."""

    option: str
    path: tuple[str, ...]
    value: Any


def read_text(file: Path) -> str:
    """Returns a recipe's text. Raises RecipeError if it is unreadable or too large."""
    check_path(file, RecipeError)
    try:
        with file.open("rb") as opened:
            content = opened.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise RecipeError(f"{file}: more than {_MOST_BYTES:,} bytes. Expected a recipe, a TOML file")
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except FileNotFoundError:
        raise RecipeError(f"{file}: {missing_path(file, pattern='*.toml')}") from None
    except (UnicodeDecodeError, OSError) as error:
        raise RecipeError(f"{file} cannot be read ({error}). Expected a TOML file in UTF-8") from None


def parse_text(text: str, file: Path) -> Document:
    """Returns the document of a recipe's text. Raises RecipeError with the line if it is no TOML."""
    try:
        return parse_document(text)
    except tomllib.TOMLDecodeError as error:
        reason, source = str(error), str(file)
        match = re.fullmatch(r"(.*) \(at line (\d+), column \d+\)", reason, re.DOTALL)
        if match:
            reason, source = match[1], f"{file}:{match[2]}"
        hints = {
            "Cannot overwrite a value": ". The key appears twice",
            "Invalid value": ". Strings need quotes",
        }
        raise RecipeError(f"{source}: no valid TOML ({reason}){hints.get(reason, '')}") from None


def parse_override(text: str) -> Override:
    """Returns the override of ``section.key=value``. Raises RecipeError for another form."""
    key, equals, value = text.partition("=")
    try:
        path = _first_path(parse_document(f"{key} = 0"))
    except tomllib.TOMLDecodeError:
        path = ()
    if not (path and equals):
        raise RecipeError(f"--set {text}: expected section.key=value, such as optim.epochs=3")
    return Override(f"--set {text}", path, parse_value(value.strip()))


def combined(document: Document, folder: Path, changes: Sequence[Override]) -> Document:
    """Returns the file's document with the overrides and absolute paths.

    A path in the file is relative to the file. An override that sets another source of data removes the document's
    source.
    """
    layers = [(copy.deepcopy(document), folder)]  # a document, and the folder at which its paths start
    for change in changes:
        nested = change.value
        for key in reversed(change.path):
            nested = {key: nested}
        layers.append((copy.deepcopy(nested), Path()))
    tasks: set[str] = set()
    for layer, _ in layers:
        tasks.update(section_of(layer, "tasks"))
    for path in (("data",), *(("tasks", name, "data") for name in sorted(tasks))):
        data = section_of(layers[0][0], *path)
        new_sources = [(*path, source) for source in DATA_SOURCES if source not in data]
        if any(change.path in new_sources for change in changes):
            for key in _SOURCE_KEYS:
                data.pop(key, None)
        with_files = any("train" in section_of(layer, *path) for layer, _ in layers)
        for layer, start in layers:
            # With a folder or a data set of the hub, ``validation`` is a name.
            keys = {key: only for key, only in _DATA_PATHS.items() if key != "validation" or with_files}
            _make_absolute(section_of(layer, *path), start, keys)
    result: Document = {}
    for layer, start in layers:
        for (*sections, key), only_folders in _PATHS.items():
            _make_absolute(section_of(layer, *sections), start, {key: only_folders})
        run = section_of(layer, "run")
        if "metrics" in run:
            run["metrics"] = _with_absolute_modules(run["metrics"], start)
        result = _merged(result, layer)
    try:  # what is typed, or the name of the recipe's folder, may be no UTF-8
        json.dumps(result, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        text = error.object[max(0, error.start - _SHOWN) : error.start + 1]
        reason = "a text or path that is not UTF-8, which a recipe cannot hold. Choose another value or file"
        raise RecipeError(f"{text!a}: {reason}") from None
    return result


def section_of(document: Document, *names: str) -> Document:
    """Returns a section of a document or section, or an empty one if there is none."""
    for name in names:
        section = document.get(name)
        if not isinstance(section, dict):  # the schema reports a value where a table was expected
            return {}
        document = section
    return document


def _merged(below: Document, above: Document) -> Document:
    """Returns a document with the keys of another. Tables are merged, and other values, also lists, are replaced."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        if isinstance(under, dict) and isinstance(value, dict):
            value = _merged(under, value)
        merged[key] = value
    return merged


def _make_absolute(section: Document, start: Path, keys: Mapping[str, bool]) -> None:
    """Makes the paths in some keys of a section absolute. The value of a key is as in ``_PATHS``."""
    for key, only_folders in keys.items():
        if key in section:
            section[key] = _absolute(section[key], start, only_folders=only_folders)


def _with_absolute_modules(value: Any, start: Path) -> Any:
    """Returns the names of metrics with absolute paths of the modules of evaluate that are files or folders."""
    if isinstance(value, dict):
        return {key: _with_absolute_modules(item, start) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_absolute_modules(item, start) for item in value]
    if not isinstance(value, str):
        return value
    module = EVALUATE_MODULE.fullmatch(value)
    if module is None:
        return value
    path = Path(os.path.abspath(start / os.path.expanduser(module["path"])))
    if not path.is_file() and not (path / f"{path.name}.py").is_file():  # the name of a module of the hub
        return value
    return value.replace(module["path"], str(path), 1)


def _absolute(value: Any, start: Path, *, only_folders: bool) -> Any:
    """Returns a value with absolute paths, in lists and tables, too."""
    if isinstance(value, dict):
        return {key: _absolute(item, start, only_folders=only_folders) for key, item in value.items()}
    if isinstance(value, list):
        return [_absolute(item, start, only_folders=only_folders) for item in value]
    if not isinstance(value, str) or not value:
        return value
    path = os.path.abspath(start / os.path.expanduser(value))
    if only_folders and not Path(path).is_dir():  # a name on the hub
        return value
    return path
