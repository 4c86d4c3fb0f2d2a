"""TOML as text: which line a key stands on, and how plain values are written.

Owns what the standard library's reader leaves out: it gives no line numbers and writes nothing. Must not know
what the keys of a recipe mean.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from datetime import date, time
from typing import Any

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
_TOO_DEEP = f"tables and lists are nested more than {_DEEPEST} deep"
_TOO_LARGE = "an integer has more than 64 bits, which no setting takes"
_LONG_INTEGER = re.compile(r"[0-9][0-9_]{4299,}")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


class TOMLLimitError(tomllib.TOMLDecodeError):
    """A valid TOML text with more in it than is read; ``line`` is None where it is not known."""

    def __init__(self, message: str, line: int | None) -> None:
        super().__init__(message)
        self.line = line


def parse_document(text: str) -> dict[str, Any]:
    """The document of a TOML text.

    Raises:
        TOMLLimitError: it is nested too deeply, or an integer has more than the 64 bits that TOML asks for.
        tomllib.TOMLDecodeError: it is no TOML.
    """
    try:
        document = tomllib.loads(text)
    except RecursionError:
        raise TOMLLimitError(_TOO_DEEP, None) from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python converts no integer of so many digits
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
    """The 1-based line of every table and key of a valid TOML text; keys of inline tables are left out."""
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
    """Key-value pairs and table headers with the line they begin on; comments and blank lines are dropped."""
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
    return _only_path(parse_document(f"{text.strip()} = 0"))


def _only_path(document: Mapping[str, Any]) -> tuple[str, ...]:
    if len(document) != 1:
        raise tomllib.TOMLDecodeError("expected one key")
    ((key, value),) = document.items()
    return (key, *_only_path(value)) if isinstance(value, Mapping) else (key,)


def parse_value(text: str) -> Any:
    """A TOML literal if the text is one, else the text itself. Dates stay text: no setting is one.

    Raises:
        RecipeError: it is a literal with more in it than is read.
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
    """The document as TOML; values are strings, numbers, booleans and lists, tuples or mappings of them."""
    return "\n".join(_table_lines(document, ())) + "\n"


def _table_lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    if path:
        yield f"\n[{'.'.join(map(_key, path))}]"
    for key, value in table.items():
        if not isinstance(value, Mapping):
            yield f"{_key(key)} = {literal(value)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _table_lines(value, (*path, key))


def literal(value: object) -> str:
    """One value as it would stand in a TOML file."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return _quoted(value)
        case list() | tuple():
            return f"[{', '.join(map(literal, value))}]"
        case Mapping():
            return "{" + ", ".join(f"{_key(key)} = {literal(item)}" for key, item in value.items()) + "}"
    raise TypeError(f"no TOML literal for {type(value).__name__}")


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _quoted(key)


def _quoted(text: str) -> str:
    """JSON's escapes are a subset of TOML's; TOML also wants DEL escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
