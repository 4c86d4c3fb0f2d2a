"""The mutation campaign puts in real faults, draws the same ones for a seed, and counts what its tests noticed."""

import pytest

from mutants import Result, draw, report, sources_of, unit_of
from mutations import mutations_of

LEFT_ALONE = '''
"""A docstring."""
from __future__ import annotations
from typing import TYPE_CHECKING, Literal
if TYPE_CHECKING:
    LIMIT = 1
__all__ = ["half"]
Kind = Literal["a", "b"]
Number = int | float

@mark(limit=3)
def half(value: Literal["c"], *rest: tuple[int, ...]) -> dict["d", 1]:
    """Half of it."""
    raise_message = "it has no half"
    zip(value, rest, strict=True)
    f"{value} is {1}"

class A:
    """A class."""
    def __repr__(self):
        return 1
'''


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("a < b", {"a < b -> (a <= b)"}),
        ("a <= b < c", {"a <= b < c -> (a < b < c)", "a <= b < c -> (a <= b <= c)"}),
        ("x = a + b", {"a + b -> (a - b)"}),
        ("x = a and b", {"a and b -> (a or b)"}),
        ("x = not a", {"not a -> (a)"}),
        ("x = 1", {"1 -> (2)"}),
        ("x = 0.5", {"0.5 -> (1.0)"}),
        ("x = 0.0", {"0.0 -> (1.0)"}),
        ("x = True", {"True -> (False)"}),
        ("x = 'key'", {"'key' -> ('keyX')"}),
        ("if a: b", {"a -> (not a)"}),
        ("x = [a for a in b if a]", {"a -> (not a)"}),
        ("if a is None: b", {"a is None -> (a is not None)"}),
        ("f(a)", {"f(a) -> pass"}),
        ("self.a = b", {"self.a = b -> pass"}),
        ("a += b", {"a += b -> pass"}),
        ("def f(a):\n    return a", {"return a -> return None"}),
        ("def f(a=0): return", {"0 -> (1)"}),
        ("def f(a):\n    raise a", {"raise a -> pass"}),
        ("for a in b: continue", {"continue -> pass"}),
    ],
)
def test_faults_of_a_text(text: str, changes: set[str]) -> None:
    assert {mutation.change for mutation in mutations_of(text)} == changes


def test_what_nobody_should_notice_is_left_alone() -> None:
    changes = {mutation.change for mutation in mutations_of(LEFT_ALONE)}
    assert changes == {"zip(value, rest, strict=True) -> pass"}


def test_a_fault_replaces_its_own_place_only() -> None:
    text = 'ä = "ü", 1\n\ndef f(x):\n    return (x\n        + 1)  # é\n'
    applied = {mutation.operator: mutation.apply(text) for mutation in mutations_of(text)}
    assert applied["operator"] == 'ä = "ü", 1\n\ndef f(x):\n    return ((x - 1))  # é\n'
    assert applied["return value"] == 'ä = "ü", 1\n\ndef f(x):\n    return None  # é\n'
    assert {mutation.function for mutation in mutations_of(text)} == {"", "f"}


def test_a_default_is_told_from_other_constants() -> None:
    text = "class A:\n    rate: float = 0.1\n    def f(self, key='a'):\n        return self.f(key='b')\n"
    kinds = {
        mutation.before: mutation.operator for mutation in mutations_of(text) if mutation.operator != "return value"
    }
    assert kinds == {"0.1": "default", "'a'": "default", "'b'": "constant"}


def test_the_sample_is_that_of_its_seed_and_holds_no_fault_twice() -> None:
    sources = sources_of(["encoder.heads", "metrics.squad"])
    assert {unit_of(file) for file in sources} == {"encoder", "metrics"}
    drawn = draw(sources, count=20, seed=3)
    assert drawn == draw(sources, count=20, seed=3)
    assert drawn != draw(sources, count=20, seed=4)
    assert len(set(drawn)) == 20
    assert len(draw({"a.py": "x = 1 < 2"}, count=20, seed=0)) == 3


def test_equivalent_faults_are_not_counted() -> None:
    first, second, third = draw({"a/b.py": "x = 1 < 2"}, count=3, seed=0)
    results = [
        Result(mutant=first, verdict="killed", reason="test", seconds=1.0),
        Result(mutant=second, verdict="survived", reason="", seconds=1.0),
        Result(mutant=third, verdict="equivalent", reason="equal", seconds=1.0),
    ]
    summary = report(results)
    assert {key: summary[key] for key in ("cases", "failures", "skipped")} == {"cases": 2, "failures": 1, "skipped": 1}
    assert summary["details"] == {"a": "1 of 2"}
    assert [entry["verdict"] for entry in summary["not_killed"]] == ["survived", "equivalent"]
