"""TOML: the line of each key, the text of plain values, and a recipe's document with overrides.

Owns what tomllib lacks (line numbers and writing), where relative paths start, and which keys an override of the data's
source replaces.
"""

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from pathlib import Path
from typing import Any

import tomli_w

from bert_tasks.data.problems import missing_path
from bert_tasks.errors import RecipeError

_SHOWN = 40  # characters
KeyPath = tuple[str | int, ...]

_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}'  # multi-line strings may end with up to two quotes of their own
    r"|'''.*?'{3,5}"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
    r"|\#[^\n]*"
    r"|[\[\]{}=\n]"
    r"""|[^"'\#\[\]{}=\n]+""",
    re.DOTALL,
)
_DEEPEST = 50
_MOST_BYTES = 2**22  # of a recipe
_TOO_DEEP = f"tables and lists are nested more than {_DEEPEST} deep"
_TOO_LARGE = "an integer has more than 64 bits, which no setting takes"
_LONG_INTEGER = re.compile(r"[0-9][0-9_]{4299,}")


class TOMLLimitError(tomllib.TOMLDecodeError):
    """A valid TOML text beyond the limits of this reader; ``line`` is None if it is not known."""

    def __init__(self, message: str, line: int | None) -> None:
        super().__init__(message)
        self.line = line


def parse_document(text: str) -> dict[str, Any]:
    """Parses a TOML text.

    Raises:
        TOMLLimitError: it is nested too deeply, or an integer has more than the 64 bits that TOML requires.
        tomllib.TOMLDecodeError: it is no TOML.
    """
    try:
        document = tomllib.loads(text)
    except RecursionError:
        raise TOMLLimitError(_TOO_DEEP, None) from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python does not convert integers of more than 4,300 digits
        digits = _LONG_INTEGER.search(text)
        line = None if digits is None else text.count("\n", 0, digits.start()) + 1
        raise TOMLLimitError(_TOO_LARGE, line) from None
    found = next(_beyond_limits(document, ()), None)
    if found is not None:
        path, reason = found
        lines = {} if reason == _TOO_DEEP else key_lines(text)
        raise TOMLLimitError(
            reason, next((lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in lines), None)
        )
    return document


def _beyond_limits(value: object, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    if len(path) > _DEEPEST:
        yield path, _TOO_DEEP
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        yield path, _TOO_LARGE
    else:
        items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
        for key, item in items:
            yield from _beyond_limits(item, (*path, key))


def key_lines(text: str) -> dict[KeyPath, int]:
    """The 1-based line of every table and key of a valid TOML text; keys of inline tables are omitted."""
    lines: dict[KeyPath, int] = {}
    table: tuple[str, ...] = ()
    for line, tokens in _statements(text):
        if tokens[0] == "[":
            path = table = parse_key("".join(tokens).strip("[] \t\r"))
        else:
            path = (*table, *parse_key("".join(tokens[: tokens.index("=")])))
        for length in range(1, len(path) + 1):
            lines.setdefault(path[:length], line)
    return lines


def _statements(text: str) -> Iterator[tuple[int, list[str]]]:
    """Key-value pairs and table headers with their first line; comments and blank lines are skipped."""
    tokens: list[str] = []
    line = begin = 1
    depth = 0
    for match in _TOKEN.finditer(text + "\n"):
        token = match.group()
        if token == "\n" and depth == 0 and tokens:
            yield begin, tokens
            tokens = []
        elif token.strip() and not token.startswith("#"):
            if not tokens:
                begin = line
            tokens.append(token)
            depth += (token in ("[", "{")) - (token in ("]", "}"))
        line += token.count("\n")


def parse_key(text: str) -> tuple[str, ...]:
    """The parts of a dotted key, which may be quoted. Raises tomllib.TOMLDecodeError when it is no key."""
    value: Any = parse_document(f"{text.strip()} = 0")
    path: tuple[str, ...] = ()
    while isinstance(value, Mapping):
        if len(value) != 1:
            raise tomllib.TOMLDecodeError("expected one key")
        ((key, value),) = value.items()
        path = (*path, key)
    return path


def parse_value(text: str) -> Any:
    """The value of a TOML literal, or the text itself if it is none. Dates stay text, because no setting is a date.

    Raises:
        RecipeError: it is a literal beyond the limits of this reader.
    """
    try:
        document = parse_document(f"value = {text}")
    except TOMLLimitError as error:
        raise RecipeError(f"{text[:_SHOWN]}...: {error}") from None
    except tomllib.TOMLDecodeError:
        return text
    value = document["value"]
    return text if len(document) > 1 or isinstance(value, date | time) else value


def to_toml(document: Mapping[str, Any]) -> str:
    """Returns the document as TOML."""
    return tomli_w.dumps(document)


def literal(value: object) -> str:
    """Returns a value as TOML writes it, in one line."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(_entry(key, item) for key, item in value.items())}}}"
    return _entry("value", value).removeprefix("value = ")


def _entry(key: str, value: object) -> str:
    if isinstance(value, list | tuple | Mapping):
        return _entry(key, "").removesuffix('""') + literal(value)
    return tomli_w.dumps({key: value}).removesuffix("\n")


Document = dict[str, Any]

_PATHS = (("data", "dir"), ("data", "train"), ("data", "validation"), ("run", "output_dir"))
_NAMES_OR_FOLDERS = (("model", "name"), ("model", "tokenizer"), ("data", "dataset"), ("teacher", "name"))
_SOURCES = ("dataset", "dir", "train")
_SOURCE_KEYS = (*_SOURCES, "config", "revision", "validation")


@dataclass(frozen=True, kw_only=True)
class Override:
    """A key that an option sets; ``option`` is what the user wrote."""

    option: str
    path: tuple[str, ...]
    value: Any


def read_text(file: Path) -> str:
    """The text of a recipe.

    Raises:
        RecipeError: it cannot be read, is not UTF-8, or is larger than any recipe, as a device is.
    """
    try:
        with file.open("rb") as opened:
            content = opened.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise RecipeError(f"{file}: more than {_MOST_BYTES:,} bytes; expected a recipe, a TOML file")
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except FileNotFoundError:
        raise RecipeError(f"no recipe {file}: {missing_path(file, pattern='*.toml')}") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{file}: not UTF-8 (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise RecipeError(f"{file}: cannot be read ({error.strerror}); expected a TOML file") from None


def parse_text(text: str, file: Path) -> Document:
    try:
        return parse_document(text)
    except TOMLLimitError as error:
        raise RecipeError(f"{file if error.line is None else f'{file}:{error.line}'}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        found = re.fullmatch(r"(.*) \(at (?:line (\d+), column \d+|end of document)\)", str(error), re.DOTALL)
        reason, line = found.groups() if found else (str(error), None)
        line = text.count("\n") + 1 if line is None else line
        hints = {
            "Cannot overwrite a value": " (the key appears twice)",
            "Invalid value": " (strings need quotes)",
        }
        raise RecipeError(f"{file}:{line}: no valid TOML: {reason}{hints.get(reason, '')}") from None


def parse_override(text: str) -> Override:
    key, equals, value = text.partition("=")
    try:
        path = parse_key(key)
    except tomllib.TOMLDecodeError:
        path = ()
    if not (path and equals):
        raise RecipeError(f"--set {text}: expected section.key=value, such as optim.epochs=3")
    return Override(option=f"--set {text}", path=path, value=parse_value(value.strip()))


def combined(document: Document, folder: Path, changes: Sequence[Override]) -> Document:
    """The file's document with the overrides; every path becomes absolute from the place where it was written.

    An override that sets another kind of source of data removes the document's.

    Raises:
        RecipeError: a text is not UTF-8.
    """
    data = section_of(document, "data")
    if any(change.path == ("data", source) and source not in data for source in _SOURCES for change in changes):
        document = {**document, "data": {key: value for key, value in data.items() if key not in _SOURCE_KEYS}}
    layers = [(document, folder)]
    for change in changes:
        nested = change.value
        for key in reversed(change.path):
            nested = {key: nested}
        layers.append((nested, Path()))
    with_files = any("train" in section_of(layer, "data") for layer, _ in layers)
    result: Document = {}
    for layer, start in layers:
        for section, key in (*_PATHS, *_NAMES_OR_FOLDERS):
            value = section_of(layer, section).get(key)
            # Beside a folder or a data set of the hub, ``validation`` is a name.
            if value is not None and (key != "validation" or with_files):
                path = _absolute(value, start, only_folders=(section, key) in _NAMES_OR_FOLDERS)
                layer = {**layer, section: {**layer[section], key: path}}
        for key in ("name", "tokenizer"):
            space = section_of(section_of(layer, "search"), "model").get(key)
            if space is not None:
                model = {**layer["search"]["model"], key: _absolute(space, start, only_folders=True)}
                layer = {**layer, "search": {**layer["search"], "model": model}}
        result = _merged(result, layer)
    _check_text(result)
    return result


def _check_text(document: Document) -> None:
    """Checks that TOML can hold the texts: what is typed, or the name of the recipe's folder, may be no UTF-8."""
    try:
        json.dumps(document, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        text = error.object[max(0, error.start - _SHOWN) : error.start + 1]
        raise RecipeError(
            f"{text!a}: a text or path that is not UTF-8, which a recipe cannot hold. Choose another value, or rename "
            "the file or folder"
        ) from None


def section_of(document: Document, name: str) -> Document:
    section = document.get(name)
    return section if isinstance(section, dict) else {}


def _merged(below: Document, above: Document) -> Document:
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = _merged(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged


def _absolute(value: Any, start: Path, *, only_folders: bool) -> Any:
    if isinstance(value, dict):
        return {key: _absolute(item, start, only_folders=only_folders) for key, item in value.items()}
    if isinstance(value, list):
        return [_absolute(item, start, only_folders=only_folders) for item in value]
    if not isinstance(value, str) or not value:
        return value
    path = os.path.abspath(start / os.path.expanduser(value))
    return path if not only_folders or Path(path).is_dir() else value
