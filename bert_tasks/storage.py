"""One run at a time in an output folder.

Owns the lock file: who holds it is written in it, and the kernel frees it with the process, however that ends. Must not
know what a run writes.

What all writing of weights shares: flushing to the disk, and saying in words why it failed.

Must not know what is written.
"""

import errno
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from safetensors import SafetensorError
from torch import Tensor

from bert_tasks.errors import UsageError
from bert_tasks.paths import exists

LOCK = "run.lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the folder for this process; makes it, and takes it away again if nothing was put there.

    On a file system without locks nothing is held.

    Raises:
        UsageError: another process holds it (its number and machine are named), or the folder cannot be made.
    """
    made = _make(folder)
    try:
        file = _acquired(folder)
        try:
            yield
        finally:
            (folder / LOCK).unlink(missing_ok=True)  # before it is freed: the next one makes a file of its own
            file.close()
    finally:
        for path in made:
            with suppress(OSError):  # it is not empty, or another process has just come
                path.rmdir()


def _make(folder: Path) -> list[Path]:
    """Makes the folder; returns what was missing, the innermost first."""
    missing = [path for path in (folder.absolute(), *folder.absolute().parents) if not exists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be made ({error.strerror}): choose another output folder") from error
    return missing


def _acquired(folder: Path) -> IO[str]:
    path = folder / LOCK
    while True:
        try:
            file = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{path}: cannot be written ({error.strerror}): choose another output folder") from error
        if _is_current(file, path):
            break
        file.close()
    file.seek(0)
    file.truncate()
    with suppress(OSError):  # a full disk: the lock holds, its holder is not named
        os.write(file.fileno(), json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode() + b"\n")
    return file


def _is_current(file: IO[str], path: Path) -> bool:
    """Takes the lock; False if the one who held it before has removed the file in between."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return True
        holder = _holder(file)
        file.close()
        raise UsageError(
            f"{path.parent} is in use by another run ({holder}): wait for it, or choose another folder"
        ) from None
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _holder(file: IO[str]) -> str:
    file.seek(0)
    try:
        who = json.loads(file.read(1000))
        return f"process {int(who['pid'])} on {who['host']}"
    except (ValueError, KeyError, TypeError):
        return "its process is not known yet"


def sync(path: Path) -> None:
    """Flushes a file's or folder's content to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def failure(error: OSError | SafetensorError, folder: Path, tensors: Iterable[Tensor]) -> str:
    """Why tensors could not be written to a folder; of a full disk the bytes needed and free."""
    return reason(error, folder, sum(tensor.numel() * tensor.element_size() for tensor in tensors))


def reason(error: OSError | SafetensorError, folder: Path, needed: int) -> str:
    """The same where the number of bytes is known."""
    text = str(error)
    full = error.errno == errno.ENOSPC if isinstance(error, OSError) else f"os error {errno.ENOSPC}" in text
    if full:
        return f"no space left: {needed} bytes of weights needed, {shutil.disk_usage(folder).free} free"
    if isinstance(error, FileExistsError | NotADirectoryError):
        return "a file is in the way; expected a folder"
    return text
