"""The mutation campaign: which faults it puts in, which tests it runs, and that it tells killed from survived."""

import time
import tomllib
from pathlib import Path

import pytest

from campaigns import mutants
from campaigns.mutants import Copy, Mutant, Result, draw, own_tests, report, sources_of, stages, time_limit, unit_of
from campaigns.mutations import mutations_of

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
    sources = sources_of(["encoder", "metrics.squad"])
    assert {unit_of(file) for file in sources} == {"encoder", "metrics"}
    drawn = draw(sources, count=60, seed=3)
    assert drawn == draw(sources, count=60, seed=3)
    assert drawn != draw(sources, count=60, seed=4)
    assert len(set(drawn)) == 60
    assert len(draw({"a.py": "x = 1 < 2"}, count=60, seed=0)) == 3


def test_every_module_has_tests() -> None:
    """Of its own or of a neighbour; and the tests that are named as neighbours exist."""
    files = sources_of([])
    assert [file for file in files if not stages(file)] == []
    assert all(path.is_file() for file in files for stage in stages(file) for path in stage)
    assert {"encoder", "data", "training"} <= {unit_of(file) for file in files if own_tests(unit_of(file))}


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Copy:
    """A copy of a package of one function with a test that notices some of its faults."""
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "sizes.py").write_text("def largest(a, b):\n    return a if a > b else b\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_sizes.py").write_text(
        "from toy.sizes import largest\n\ndef test_largest():\n    assert largest(1, 2) == largest(2, 1) == 2\n"
    )
    equivalent = tmp_path / "equivalent.toml"
    equivalent.write_text(
        "[[mutant]]\nfile = 'sizes.py'\nfunction = 'largest'\nchange = 'a > b -> (a >= b)'\nreason = 'equal'\n"
    )
    monkeypatch.setattr(mutants, "PACKAGE", tmp_path / "toy")
    monkeypatch.setattr(mutants, "TESTS", tmp_path / "tests")
    monkeypatch.setattr(mutants, "EQUIVALENT", equivalent)
    monkeypatch.setattr(mutants, "equivalent", mutants.equivalent.__wrapped__)
    (tmp_path / "copies").mkdir()
    return Copy(tmp_path / "copies")


@pytest.mark.slow
def test_a_fault_is_killed_or_equivalent_or_survives(toy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    by_operator = {mutant.mutation.operator: mutant for mutant in draw(sources_of([]), count=10, seed=0)}
    limits = {"sizes": time_limit("sizes", toy)}
    wrong = toy.test(by_operator["negated condition"], limits)
    assert (wrong.verdict, wrong.reason.rpartition("::")[2]) == ("killed", "test_largest")
    assert toy.test(by_operator["return value"], limits).verdict == "killed"
    same = toy.test(by_operator["comparison"], limits)
    assert (same.verdict, same.reason) == ("equivalent", "equal")
    monkeypatch.setattr(mutants, "equivalent", dict)
    assert toy.test(by_operator["comparison"], limits).verdict == "survived"
    assert toy.run(own_tests("sizes"), 60.0) is None  # the fault is gone


def test_a_fault_that_never_ends_is_killed(toy: Copy) -> None:
    assert toy.run(own_tests("sizes"), 0.1) == "time limit"


@pytest.mark.slow
def test_programs_that_a_fault_left_running_are_ended(toy: Copy, tmp_path: Path) -> None:
    (mutants.TESTS / "test_sizes.py").write_text(
        "import subprocess, sys, time\nfrom pathlib import Path\n\ndef test_slow():\n"
        "    sleeper = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "    started = subprocess.Popen(sleeper, start_new_session=True)\n"
        f"    Path({str(tmp_path / 'pid')!r}).write_text(str(started.pid))\n    time.sleep(60)\n"
    )
    assert toy.run(own_tests("sizes"), 15.0) == "time limit"
    state = Path("/proc") / (tmp_path / "pid").read_text() / "stat"
    end = time.monotonic() + 10
    while state.exists() and state.read_text().split()[2] != "Z" and time.monotonic() < end:
        time.sleep(0.1)
    assert time.monotonic() < end


def test_tests_that_fail_without_a_fault_end_the_campaign(toy: Copy) -> None:
    (mutants.TESTS / "test_sizes.py").write_text("def test_wrong():\n    assert False\n")
    with pytest.raises(SystemExit, match="test_wrong"):
        time_limit("sizes", toy)


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


def test_equivalent_faults_are_faults_of_the_package() -> None:
    """One whose code has changed is to be judged again."""
    entries = tomllib.loads(mutants.EQUIVALENT.read_text("utf-8"))["mutant"]
    keys = {Mutant(file, fault).key for file, text in sources_of([]).items() for fault in mutations_of(text)}
    assert [key for key in mutants.equivalent() if key not in keys] == []
    assert all(len(entry["reason"]) > 20 for entry in entries)
