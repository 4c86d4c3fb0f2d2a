"""The standard streams of a command: each can be written without a crash, whatever the shell made of it.

Owns their state while a command runs. Must not know what is written.
"""

import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from bert_tasks.terminal import message_stream, printable


@contextmanager
def standard_streams() -> Iterator[None]:
    """While a command runs, messages cannot fail, and no character is beyond an encoding.

    A descriptor that the shell closed (``>&-``) is taken, so that no file gets its number: writing to it fails as
    writing to a full disk does. Standard error takes messages only, and loses what cannot be written.
    """
    for number, mode in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        _claim(number, mode)
    if sys.stdout is None:
        sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    before, formatted = sys.stderr, warnings.formatwarning
    sys.stderr, warnings.formatwarning = message_stream(), _printable_warning(formatted)
    try:
        yield
    finally:
        sys.stderr, warnings.formatwarning = before, formatted
        _give_up(before, 2)
        _give_up(sys.stdout, 1)


def forget_stdout() -> None:
    """It cannot be written any more, and Python would complain when it flushes what is left."""
    discard(1)


def discard(descriptor: int) -> None:
    """Sends what is still written to a descriptor nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


class PrintableFormatter(logging.Formatter):
    """Log lines without what would act on a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _claim(number: int, mode: int) -> None:
    try:
        os.fstat(number)
    except OSError:
        opened = os.open(os.devnull, mode)
        if opened != number:
            os.dup2(opened, number)
            os.close(opened)


def _give_up(stream: TextIO | None, descriptor: int) -> None:
    """What a stream still holds and cannot write would make Python's exit code 120."""
    if stream is None:
        return
    try:
        stream.flush()
    except (OSError, ValueError):
        discard(descriptor)
        with suppress(OSError, ValueError):
            stream.flush()


def _printable_warning(formatted: Callable[..., str]) -> Callable[..., str]:
    return lambda *arguments, **options: printable(formatted(*arguments, **options))
