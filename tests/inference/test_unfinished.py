"""Finished parts survive whatever ends an attempt, and any number of them."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bert_tasks.data.unknown_tokens import UnknownTokens
from bert_tasks.inference.output import LOG, ROWS, Chunk, unfinished_folder, unfinished_output

FACTS = {"input": "x"}


def part(number: int) -> Chunk:
    return Chunk(content=b'{"row": %d}\n' % number, rows=1, truncated=0, rejected=0, unknown=UnknownTokens())


def on_disk(output: Path) -> tuple[int, int]:
    rows, notes = ((unfinished_folder(output) / name).read_bytes().count(b"\n") for name in (ROWS, LOG))
    return rows, notes


def broken_off(output: Path, parts: Sequence[Chunk], *, after: tuple[int, int]) -> int:
    """An attempt that ends once the disk holds so many lines of rows and of notes; how many rows it began with."""
    resumed = -1
    with suppress(KeyboardInterrupt), unfinished_output(output, FACTS) as found:
        resumed = found.resumed
        found.append(parts)
        assert on_disk(output) == after
        raise KeyboardInterrupt
    return resumed


def test_an_attempt_that_ends_before_its_first_part_loses_none(tmp_path: Path) -> None:
    """Looks at the disk while an attempt goes on, as a kill would find it."""
    output = tmp_path / "a.jsonl"
    assert broken_off(output, [part(0), part(1)], after=(2, 2)) == 0
    assert broken_off(output, [], after=(2, 2)) == 2
    assert broken_off(output, [part(2)], after=(3, 3)) == 2
    with unfinished_output(output, FACTS) as found:
        assert sum(entry.rows for entry in found.entries) == 3
    assert not unfinished_folder(output).exists()
