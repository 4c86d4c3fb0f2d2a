"""What the values of a column are like: the figures at which names in a cell count as a set."""

from typing import Any

import pytest

from bert_tasks.data.profile import profile


@pytest.mark.parametrize(
    ("cells", "is_sets"),
    [
        (["a;b", "a", "b"] * 4, True),  # 2 names, the least
        (["a;a", "a"] * 6, False),
        (["a;b", "b;c", "a", "c"] * 4, True),  # 3 names in 16 rows, of which one in five is 3.2
        (["a;b", "b;c", "a", "c"] * 3, False),  # in 12 rows it is 2.4
    ],
)
def test_names_are_sets_if_there_are_two_and_five_rows_for_each(cells: list[str], is_sets: bool) -> None:
    column = profile("topics", cells)
    assert column.is_sets == is_sets


@pytest.mark.parametrize(
    ("cells", "lists", "nested"),
    [
        ([["a"], ["a", "b"]], 1.0, 1.0),
        (['["a"]', "['a', 'b']"], 1.0, 0.0),
        (["a", "a, b"], 0.0, 0.0),
        ([1, 2.5], 0.0, 0.0),
        ([{"a": 1}, {"b": 2}], 0.0, 1.0),
        ([["a"], "a", 1, {"a": 1}], 0.25, 0.5),
    ],
)
def test_lists_are_those_of_json_and_those_that_a_cell_spells(cells: list[Any], lists: float, nested: float) -> None:
    column = profile("topics", cells)
    assert (column.lists, column.nested) == (lists, nested)
