"""The keys of a recipe before they are checked: the file's, with overrides on top and every path absolute.

Owns reading the file, parsing overrides, where relative paths start and how an override displaces the file's
source of data. Must not know the limits of a value.
"""

import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_tasks.data.problems import missing_path
from bert_tasks.errors import RecipeError
from bert_tasks.paths import is_folder
from bert_tasks.recipe_toml import TOMLLimitError, parse_document, parse_key, parse_value

Document = dict[str, Any]

_PATHS = (("data", "dir"), ("data", "train"), ("data", "validation"), ("run", "output_dir"))
_NAMES_OR_FOLDERS = (("model", "name"), ("data", "dataset"))
_SOURCES = ("dataset", "dir", "train")
_OF_ONE_SOURCE = (*_SOURCES, "config", "revision", "validation")


@dataclass(frozen=True, kw_only=True)
class Override:
    """A key set from outside the file; ``option`` is what the user wrote."""

    option: str
    path: tuple[str, ...]
    value: Any

    @property
    def document(self) -> Document:
        nested: Document = {self.path[-1]: self.value}
        for key in reversed(self.path[:-1]):
            nested = {key: nested}
        return nested


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
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
            "Cannot overwrite a value": " (the key stands twice)",
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
    """The file's document with the changes on top, every path made absolute from where it was written."""
    document = _without_displaced(document, [change.path for change in changes])
    layers = [(document, folder), *((change.document, Path()) for change in changes)]
    with_files = any("train" in section_of(layer, "data") for layer, _ in layers)
    result: Document = {}
    for layer, start in layers:
        result = _merged(result, _with_absolute_paths(layer, start, with_files=with_files))
    return result


def _without_displaced(document: Document, changed: Sequence[tuple[str, ...]]) -> Document:
    """The file's document without its source of data, if an override sets another kind of source."""
    data = section_of(document, "data")
    if not any(("data", source) in changed and source not in data for source in _SOURCES):
        return document
    return {**document, "data": {key: value for key, value in data.items() if key not in _OF_ONE_SOURCE}}


def section_of(document: Document, name: str) -> Document:
    section = document.get(name)
    return section if isinstance(section, dict) else {}


def _merged(below: Document, above: Document) -> Document:
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = _merged(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged


def _with_absolute_paths(document: Document, start: Path, *, with_files: bool) -> Document:
    """The document with paths joined to ``start``; beside a folder or hub data set, ``validation`` is a name."""
    for section, key in (*_PATHS, *_NAMES_OR_FOLDERS):
        value = section_of(document, section).get(key)
        if value is None or (key == "validation" and not with_files):
            continue
        only_folders = (section, key) in _NAMES_OR_FOLDERS
        document = {**document, section: {**document[section], key: _absolute(value, start, only_folders)}}
    return document


def _absolute(value: Any, start: Path, only_folders: bool) -> Any:
    if isinstance(value, dict):
        return {key: _absolute(item, start, only_folders) for key, item in value.items()}
    if not isinstance(value, str) or not value:
        return value
    path = os.path.abspath(start / os.path.expanduser(value))
    return path if not only_folders or is_folder(Path(path)) else value
