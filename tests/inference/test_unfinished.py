"""Completed lines survive whatever ends an attempt, and any number of them."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bert_tasks.inference.output import ROWS, partial_output, unfinished_folder

METADATA = {"input": "x"}


def interrupted(output: Path, lines: Sequence[bytes], *, on_disk: int) -> int:
    """Writes lines in an attempt that is interrupted once the disk holds a number of lines.

    Looks at the disk while the attempt goes on, as a kill would find it.
    """
    resumed = -1
    with suppress(KeyboardInterrupt), partial_output(output, METADATA) as partial:
        resumed = partial.rows
        partial.keep(partial.rows)
        for line in lines:
            partial.append(line)
        assert (unfinished_folder(output) / ROWS).read_bytes().count(b"\n") == on_disk
        raise KeyboardInterrupt
    return resumed


def test_an_attempt_that_ends_before_its_first_line_loses_none(tmp_path: Path) -> None:
    output = tmp_path / "a.jsonl"
    assert interrupted(output, [b"0\n", b"1\n"], on_disk=2) == 0
    assert interrupted(output, [], on_disk=2) == 2
    assert interrupted(output, [b"2\n", b"3"], on_disk=3) == 2
    with partial_output(output, METADATA) as partial:
        assert partial.rows == 3  # the last line is not complete
        partial.keep(2)
        assert partial.path.read_bytes() == b"0\n1\n"
    assert not unfinished_folder(output).exists()
