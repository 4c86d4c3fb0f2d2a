"""The errors of a recipe, one per key, with the line or option that set it.

pydantic reports each failure of each type of a union, in its own words and without lines. This module turns its report
into one sentence for each key, in the words of TOML, and names the line of the file or the option that set the key.
"""

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
        # A key that is missing, or inside of a value, has no line. That of its section is the nearest.
        tables = [path[:length] for length in range(len(path), 0, -1)]
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
            is_key = isinstance(piece, int)  # an index of a list
            if isinstance(inside, Mapping):
                is_key = piece in inside
            if is_key:
                inside = inside[piece]
            elif details["type"] != "missing":
                continue
            path.append(piece)
        located.append((tuple(path), details))
    # A key is a section and a name, so that all failures inside of one value are together.
    for _, field in groupby(located, key=lambda pair: pair[0][:2]):
        failures = list(field)
        deepest = max(len(path) for path, _ in failures)
        for key in dict.fromkeys(key for key, _ in failures if len(key) == deepest):
            yield _problem(key, [details for other, details in failures if other == key], known_keys)


def _problem(path: KeyPath, failures: Sequence[ErrorDetails], known_keys: KnownKeys) -> Problem:
    """Returns the problem of a key, whose value failed once for each type that it may have."""
    first = failures[0]
    if first["type"] in _UNKNOWN:
        return Problem(path, unknown_key(path, known_keys, is_table=isinstance(first["input"], Mapping)))
    if first["type"] == "missing":
        return Problem(path, missing_key(path, known_keys))
    if first["type"] == "value_error":  # of a validator of ours, whose text is already a sentence
        text = str(first["ctx"]["error"])
        if path:
            text = f"[{_dotted(path)}] {text}"
        return Problem(path, text)
    expected: dict[str, None] = {}  # in the order of the types, each wording once
    for details in failures:
        wording = details["msg"]
        if details["type"] in _EXPECTED:
            wording = _EXPECTED[details["type"]].format(**details.get("ctx", {}))
            if details["type"] == "float_type" and isinstance(details["input"], str):
                wording += " without quotes"
        expected[wording] = None
    # The key inside its section. A number after it is an index in a list.
    key = _dotted(path)
    if len(path) > 1 and isinstance(path[1], str):
        key = _dotted(path[1:])
    value = repr(first["input"])
    if isinstance(first["input"], bool):
        value = value.lower()  # as TOML writes it
    if len(value) > _LONGEST_VALUE:
        value = f"{value[:_LONGEST_VALUE]}..."
    return Problem(path, f"{key} is {value}, expected {' or '.join(expected)}")


def unknown_key(path: KeyPath, known_keys: KnownKeys, *, is_table: bool = False) -> str:
    """Returns the message for an unknown key, with the key that was probably meant."""
    section, key = _dotted(path[:-1]), str(path[-1])
    # A key in the wrong section is the usual mistake, also in TOML's own way: a key below a section belongs to it.
    home = next((name for name, keys in known_keys.items() if key in keys and name != section), None)
    if home == "":
        return f"'{key}' belongs at the top, before the first section"
    if home is not None:
        return f"'{key}' belongs in [{home}]"
    if is_table and not section:
        return f"unknown section [{key}]{nearest_or_all(key, filter(None, known_keys))}"
    hint = hf_hint(key, known_keys.get(section, ()), known_keys)
    if not section:
        return f"unknown key '{key}'{hint}"
    return f"unknown key '{key}' in [{section}]{hint}"


def missing_key(path: KeyPath, known_keys: KnownKeys) -> str:
    """Returns the message for a key that is missing."""
    if len(path) > 1:
        return f"missing key '{path[-1]}' in [{path[0]}]"
    if path[0] in known_keys:
        return f"missing section [{path[0]}]"
    return f"missing key '{path[0]}'"


def _dotted(path: KeyPath) -> str:
    """Returns a path as a user writes it, such as ``optim.lora_targets[1]``."""
    dotted = ""
    for key in path:
        if isinstance(key, int):
            dotted += f"[{key}]"
        else:
            dotted += f".{key}"
    return dotted.removeprefix(".")
