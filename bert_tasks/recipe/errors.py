"""The errors of a recipe, one per key, with the line or option that set it."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from bert_tasks.data.issues import nearest_or_all
from bert_tasks.errors import RecipeError
from bert_tasks.model.hf_names import hf_hint
from bert_tasks.recipe.toml import KeyPath, key_lines

# Section -> its keys. The empty string has the keys of the top level.
KnownKeys = Mapping[str, Sequence[str]]

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_EXPECTED = {
    "missing": "a value",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a string",
    "bool_type": "true or false",
    "dict_type": "a table",
    "model_type": "a table",
    "dataclass_type": "a table",
    "list_type": "a list",
    "tuple_type": "a list",
    "literal_error": "{expected}",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
}
_LONGEST_VALUE = 60


class Problem(NamedTuple):
    """An error at a key. ``path`` may end in a key that is missing."""

    path: KeyPath
    text: str


def recipe_error(problems: Iterable[Problem], *, file: str, text: str, options: Mapping[KeyPath, str]) -> RecipeError:
    """Returns one error of all problems, each with the line or option of its key."""
    sources = {path: (line, f"{file}:{line}") for path, line in key_lines(text).items()}
    sources |= {path: (sys.maxsize, option) for path, option in options.items()}
    lines = []
    for path, message in problems:
        tables = (path[:length] for length in range(len(path), 0, -1))
        line, name = next((sources[table] for table in tables if table in sources), (0, file))
        lines.append((line, f"{name}: {message}"))
    return RecipeError("\n".join(message for _, message in sorted(lines, key=itemgetter(0))))


def schema_problems(error: ValidationError, value: Any, prefix: KeyPath, known_keys: KnownKeys) -> Iterator[Problem]:
    """Yields one problem per key of a value that pydantic rejected.

    A value of a union type fails once for each type. These failures become one problem at the deepest key, because the
    type that matches the value furthest is probably the intended one.
    """
    located: list[tuple[KeyPath, ErrorDetails]] = []
    for details in error.errors():
        path, inside = list(prefix), value
        for piece in details["loc"]:  # the keys that lead to the failure, and names of the types that pydantic tried
            if piece in inside if isinstance(inside, Mapping) else isinstance(piece, int):
                inside = inside[piece]
            elif details["type"] != "missing":
                continue
            path.append(piece)
        located.append((tuple(path), details))
    for _, field in groupby(located, key=lambda pair: pair[0][:2]):
        failures = list(field)
        deepest = max(len(path) for path, _ in failures)
        for key in dict.fromkeys(key for key, _ in failures if len(key) == deepest):
            yield _problem(key, [details for other, details in failures if other == key], known_keys)


def _problem(path: KeyPath, failures: Sequence[ErrorDetails], known_keys: KnownKeys) -> Problem:
    first = failures[0]
    if first["type"] in _UNKNOWN:
        return Problem(path, unknown_key(path, known_keys, is_table=isinstance(first["input"], Mapping)))
    if first["type"] == "missing":
        return Problem(path, missing_key(path, known_keys))
    if first["type"] == "value_error":
        return Problem(path, f"{f'[{_dotted(path)}] ' if path else ''}{first['ctx']['error']}")
    expected: dict[str, None] = {}
    for details in failures:
        wording = _EXPECTED.get(details["type"])
        quotes = " without quotes" if details["type"] == "float_type" and isinstance(details["input"], str) else ""
        expected[details["msg"] if wording is None else wording.format(**details.get("ctx", {})) + quotes] = None
    # The key inside its section. A number after it is an index in a list.
    key = _dotted(path[1:]) if len(path) > 1 and isinstance(path[1], str) else _dotted(path)
    value = str(first["input"]).lower() if isinstance(first["input"], bool) else repr(first["input"])
    value = value if len(value) <= _LONGEST_VALUE else f"{value[:_LONGEST_VALUE]}..."
    return Problem(path, f"{key} is {value}, expected {' or '.join(expected)}")


def unknown_key(path: KeyPath, known_keys: KnownKeys, *, is_table: bool = False) -> str:
    """Returns the message for an unknown key, with the key that was probably meant."""
    section, key = _dotted(path[:-1]), str(path[-1])
    home = next((name for name, keys in known_keys.items() if key in keys and name != section), None)
    if home is not None:
        return f"'{key}' belongs in [{home}]" if home else f"'{key}' belongs at the top, before the first section"
    if is_table and not section:
        return f"unknown section [{key}]{nearest_or_all(key, filter(None, known_keys))}"
    hint = hf_hint(key, known_keys.get(section, ()), known_keys)
    return f"unknown key '{key}'{f' in [{section}]' if section else ''}{hint}"


def missing_key(path: KeyPath, known_keys: KnownKeys) -> str:
    """Returns the message for a key that is missing."""
    if len(path) > 1:
        return f"missing key '{path[-1]}' in [{path[0]}]"
    return f"missing section [{path[0]}]" if path[0] in known_keys else f"missing key '{path[0]}'"


def _dotted(path: KeyPath) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")
