"""Completed lines survive whatever ends an attempt, and any number of them."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bert_tasks.inference.output import PartialOutput, unfinished_folder


def opened(output: Path, *, chunk: int = 1) -> PartialOutput:
    return PartialOutput(output, {"input": "x"}, chunk=chunk, total=9)


def interrupted(output: Path, lines: Sequence[bytes], *, on_disk: int) -> int:
    """Writes lines in an attempt that is interrupted once the disk holds a number of lines.

    Looks at the disk while the attempt goes on, as a kill would find it.
    """
    resumed = -1
    with suppress(KeyboardInterrupt), opened(output) as partial:
        resumed = partial.rows
        for line in lines:
            partial.append(line)
        assert partial.path.read_bytes().count(b"\n") == on_disk
        raise KeyboardInterrupt
    return resumed


def test_an_attempt_that_ends_before_its_first_line_loses_none(tmp_path: Path) -> None:
    output = tmp_path / "a.jsonl"
    assert interrupted(output, [b"0\n", b"1\n"], on_disk=2) == 0
    assert interrupted(output, [], on_disk=2) == 2
    assert interrupted(output, [b"2\n", b"3"], on_disk=3) == 2
    with opened(output, chunk=2) as partial:  # neither the incomplete line nor the incomplete chunk counts
        assert partial.rows == 2
        assert partial.path.read_bytes() == b"0\n1\n"
    assert not unfinished_folder(output).exists()
