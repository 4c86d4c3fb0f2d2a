"""TOML as text: what is written can be read, and every key is found on its line."""

import tomllib
from typing import Any

import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_tasks.recipe.toml import key_lines, parse_value

SCALARS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.booleans(),
)
KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_every_table_and_key_has_its_line(document: dict[str, Any]) -> None:
    text = tomli_w.dumps(document)
    assert tomllib.loads(text) == document
    lines, numbers = text.split("\n"), key_lines(text)
    for path in paths_of(document):
        line = lines[numbers[path] - 1]
        line += "]" if line.endswith(" = [") else ""  # the items of a list are in lines of their own
        assert tomllib.loads(line) != {}
        assert line.startswith("[") or tomllib.loads(line).keys() == {path[-1]}


def paths_of(table: dict[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    paths = [(*prefix, key) for key in table]
    for key, value in table.items():
        if isinstance(value, dict):
            paths += paths_of(value, (*prefix, key))
    return paths


def test_lines_of_keys_around_strings_arrays_and_comments() -> None:
    text = "\n".join(
        [
            "# [comment] = 1",
            'a = """',
            "[no]",
            'b = 2 \\""" still',
            'c"""" # "[',
            "d = [ # [no]",
            '  "]", \'[\', # "',
            "  [1,",
            "2]]",
            "e.f.\"g.h\" = 'x # = ['",
            '[ t . "u v" ]  # = [',
            "k = '''",
            "[no]",
            "x = 1'''' # '[",
            'l = {m = 1, n = "}"}',
            "[[array]]",
            'o = "\\\\\\""',
        ]
    )
    tomllib.loads(text)
    assert key_lines(text) == {
        ("a",): 2,
        ("d",): 6,
        ("e",): 10,
        ("e", "f"): 10,
        ("e", "f", "g.h"): 10,
        ("t",): 11,
        ("t", "u v"): 11,
        ("t", "u v", "k"): 12,
        ("t", "u v", "l"): 15,
        ("array",): 16,
        ("array", "o"): 17,
    }
    assert key_lines(text.replace("\n", "\r\n")) == key_lines(text)


def test_values_of_overrides() -> None:
    assert parse_value("3") == 3
    assert parse_value("[1, 'x']") == [1, "x"]
    assert parse_value("1\nother = 2") == "1\nother = 2"
    assert parse_value("") == ""
    assert parse_value("2024-01-01") == "2024-01-01"
    assert parse_value('"quoted"') == "quoted"
