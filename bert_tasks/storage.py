"""Files on disk, written whole or not at all, hashed with sha256, and locked.

No other module does so. A file or folder is written under a temporary name, flushed to the disk and then renamed. So a
reader finds the old content or the new content, whatever is killed when.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from bert_tasks.errors import BertTasksError, UsageError

LOCK = "run.lock"
_NO_LARGER_FILE = "files may not be larger here (ulimit -f, or the file system)"
_LONGEST_NAME, _LONGEST_PATH = 255, 4095  # bytes, of Linux. pathlib raises OSError for longer ones
_SHOWN = 120  # characters of a path in a message
_SAVING = ".saving"  # the hidden folder of ``atomic_files``, all that a killed process leaves of it


def check_path(path: str | Path, error: type[BertTasksError] = UsageError) -> None:
    """Raises an error for a path that no file can have.

    Args:
        path: The path, as the user gave it. It need not exist.
        error: The class of the error.
    """
    text = os.fspath(path)
    shown = repr(text[:_SHOWN])
    if len(text) > _SHOWN:
        shown = f"{shown}... ({len(text)} characters)"
    if "\0" in text:
        raise error(f"the path {shown} has a null character. Remove it")
    try:
        parts = os.fsencode(text).split(b"/")
    except UnicodeEncodeError:
        raise error(f"the path {shown} has half of a surrogate pair. Remove it") from None
    if max(map(len, parts)) > _LONGEST_NAME or sum(map(len, parts)) + len(parts) > _LONGEST_PATH:
        raise error(f"the path {shown} is too long. Names have at most {_LONGEST_NAME} bytes")


@contextmanager
def atomic_path(path: Path, *, folder: Path | None = None, durable: bool = True) -> Iterator[Path]:
    """Yields a temporary path, which replaces ``path`` if the block raises no error.

    Args:
        path: The final name of the file.
        folder: The folder of the temporary file, on the same file system. Default: the folder of ``path``.
        durable: True to flush the file to the disk first. False is for caches that are verified by a digest.
    """
    suffix = f".tmp-{secrets.randbelow(2**32)}"  # processes of several machines may write to one folder
    if folder is None:
        folder = path.parent
    temporary = folder / f".{path.name}{suffix}"
    try:
        yield temporary
        if durable:
            # Without it the new name may reach the disk before the content, and a crash leaves an empty file.
            sync(temporary)
        os.replace(temporary, path)
    except OSError as error:
        explained = explained_disk_full(error, temporary)
        if explained.filename is None:  # the system names no file if a write fails
            explained.filename = str(path)
        raise explained from error.__cause__
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(target: Path, *, staging: Path, replaced: Path) -> Iterator[Path]:
    """Yields the folder ``staging``, which replaces ``target`` if no error occurs.

    A folder that is not empty cannot be replaced by one rename, so the earlier folder is called ``replaced`` between
    two renames. A kill in between leaves it there.
    """
    target = Path(os.path.realpath(target))  # a link stays, and the folder that it leads to is replaced
    shutil.rmtree(staging, ignore_errors=True)
    shutil.rmtree(replaced, ignore_errors=True)
    try:
        staging.mkdir()
        yield staging
        # The content is on the disk before the first rename, and the names are after the last one.
        flush_files(staging)
        if target.exists():
            os.replace(target, replaced)
        os.replace(staging, target)
        sync(target.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if replaced.exists() and not target.exists():
            os.replace(replaced, target)
        shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def new_folder(target: Path, *, suffix: str) -> Iterator[Path]:
    """Yields an ``atomic_folder`` for one process at a time.

    The process works in a hidden folder beside the target. A killed process leaves only this folder, which the next
    removes.

    Args:
        target: The final name of the folder.
        suffix: The end of the hidden folder's name, which identifies its process.

    Raises:
        UsageError: Another process works for the same target, or the folder cannot be created.
    """
    check_path(target)
    target = Path(os.path.realpath(target))
    hidden = target.with_name(f".{target.name}{suffix}")
    try:
        with locked(hidden), atomic_folder(target, staging=hidden / "new", replaced=hidden / "replaced") as folder:
            yield folder
    finally:
        with suppress(OSError):  # another process holds it, or has just come
            hidden.rmdir()


@contextmanager
def atomic_files(folder: Path, *, first: str) -> Iterator[Path]:
    """Yields a hidden folder, whose files then replace those of ``folder``. Other files of ``folder`` stay.

    Each file appears whole or not at all. A killed process leaves the hidden folder, which the next one removes.

    Args:
        folder: The folder, which is created if it is missing.
        first: The suffix of the files that get their names before the others.
    """
    check_path(folder)
    staging = folder / _SAVING
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir()
        yield staging
        flush_files(staging)
        files = [file for file in staging.iterdir() if file.is_file()]
        for file in sorted(files, key=lambda file: (file.suffix != first, file.name)):
            move(file, folder / file.name)
        sync(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def remove_unfinished_files(folder: Path) -> None:
    """Removes what a killed process has left of ``atomic_files``."""
    shutil.rmtree(folder / _SAVING, ignore_errors=True)


def check_new_folder(target: Path) -> None:
    """Raises UsageError if a folder is not empty or its parent is not writable.

    What a killed process has left of ``atomic_files`` does not count.
    """
    check_path(target)
    if target.exists() and (not target.is_dir() or any(path.name != _SAVING for path in target.iterdir())):
        raise UsageError(f"{target} exists and is not an empty folder. Choose another one")
    check_writable(target.absolute().parent)


def flush_files(folder: Path) -> None:
    """Flushes a folder to the disk, and gives its files the mode of the umask.

    A library may have made them with another mode. A new file shows the mode that the user wants, because the umask
    cannot be read without being changed.
    """
    probe = folder / ".mode"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)
        sync(path)
    sync(folder)


def move(source: Path, target: Path) -> None:
    """Flushes a file or folder and renames it. A file at ``target`` is replaced."""
    sync(source)
    os.replace(source, target)


def sync(path: Path) -> None:
    """Flushes a file, or the names in a folder, to the disk. A rename is durable once its folder is flushed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_temporary(name: str, of: Collection[str] | None = None) -> bool:
    """Returns True for the temporary name of a file in ``of``, or of any file if it is None."""
    match = re.fullmatch(r"\.(.+)\.tmp-[0-9]+", name)
    return match is not None and (of is None or match[1] in of)


def remove_temporaries(folder: Path, of: Collection[str] | None = None) -> None:
    """Removes temporary files that killed processes have left. ``of`` is as in ``is_temporary``."""
    for path in folder.iterdir():
        if is_temporary(path.name, of):
            path.unlink()


def explained_disk_full(error: OSError, partial: Path) -> OSError:
    """Returns the error. For a full disk or a file that may not grow, it says how much of ``partial`` was written."""
    written = partial.stat().st_size if partial.exists() else 0
    if error.errno == errno.EFBIG:
        return OSError(error.errno, f"{_NO_LARGER_FILE} after {written} bytes")
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error
    free = shutil.disk_usage(partial.absolute().parent).free
    return OSError(error.errno, f"no space left after {written} bytes, {free} bytes free")


def weights_write_error(error: Exception, folder: Path, size: int) -> str:
    """Returns why safetensors or the system could not write ``size`` bytes."""
    number = library_errno(error)
    if number in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left for {size} bytes of weights, {shutil.disk_usage(folder).free} bytes free"
    if number == errno.EFBIG:
        return f"{_NO_LARGER_FILE}, with {size} bytes of weights"
    if isinstance(error, FileExistsError | NotADirectoryError):
        return "a file is in the way of the folder"
    return str(error)


def library_errno(error: BaseException) -> int | None:
    """Returns the system's error number, which libraries in Rust put into the text of an error."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    match = re.search(r"os error (\d+)", str(error))
    if match is None:
        return None
    return int(match[1])


def sha256(content: bytes | str | Iterable[bytes | memoryview]) -> str:
    """Returns the digest of bytes, of a text in UTF-8, or of chunks."""
    if isinstance(content, str):
        content = content.encode()
    chunks = [content] if isinstance(content, bytes) else content
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def sha256_file(path: Path) -> str:
    """Returns the digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_json(*values: Any) -> str:
    """Returns the digest of JSON values. The order of keys does not matter."""
    return sha256(json.dumps(values, sort_keys=True, default=str))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds a folder for this process, or raises UsageError.

    The function creates a missing folder, and removes it if it is empty at the end. The kernel releases the lock
    however the process ends. A file system without locks holds nothing.
    """
    check_path(folder)
    # What this call creates it also removes, so that a refused run leaves no empty folders.
    created = [path for path in (folder.absolute(), *folder.absolute().parents) if not path.exists()]
    file = folder / LOCK
    lock = FileLock(file, blocking=False, thread_local=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        holder = ""
        if file.exists():
            holder = file.read_text("utf-8").strip()
        raise UsageError(
            f"{folder} is in use by another run ({holder}). Wait until it ends, or choose another folder"
        ) from None
    except OSError as error:
        if error.errno != errno.ENOLCK:
            raise UsageError(f"{folder}: cannot be created ({error.strerror}). Choose another output folder") from error
    try:
        with suppress(OSError):  # a full disk, so the lock's file does not name the process
            file.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", "utf-8")
        yield
    finally:
        file.unlink(missing_ok=True)  # before the release, because the next process makes a new file
        lock.release()
        for path in created:
            with suppress(OSError):  # it is not empty, or another process has just come
                path.rmdir()


def check_writable(folder: Path) -> None:
    """Raises UsageError if a folder, which need not exist yet, is not writable."""
    check_path(folder)
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UsageError(f"{existing} is a file, expected a folder. Choose another output folder")
    if not os.access(existing, os.W_OK):
        raise UsageError(f"{existing} is not writable. Choose another output folder")


def os_error_message(error: OSError) -> str:
    """Returns an OSError in one line, with the file, if it is known, and the reason."""
    reason = str(error) if error.strerror is None else error.strerror
    files: tuple[object, ...] = (error.filename, error.filename2)  # may also be numbers of open files
    paths = [name for name in files if isinstance(name, str | bytes | os.PathLike) and name not in ("", b"")]
    names = [repr(os.fsdecode(path))[1:-1] for path in paths]  # unprintable characters are escaped
    first_line = reason.partition("\n")[0]
    if not names:
        return first_line
    return f"{' -> '.join(names)}: {first_line}"  # an error of a rename has two names
