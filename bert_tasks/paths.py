"""What exists at a path that a user named.

Every question to the file system goes through this module; a test enforces it. The methods of pathlib are not enough:
for a folder that may not be searched or a name that is too long they raise an OSError without advice, and for others
they say that nothing exists.
"""

import os
import stat
from pathlib import Path

from bert_tasks.errors import PathError, UsageError

_LONGEST_SHOWN = 300  # characters


def exists(path: Path) -> bool:
    """Whether anything exists at the path; links are followed.

    Raises:
        PathError: the path cannot be examined: no permission, too long a name, links that form a circle.
    """
    return _mode(path) is not None


def lexists(path: Path) -> bool:
    """Whether anything exists at the path, even a broken link. Raises PathError as ``exists`` does."""
    return _mode(path, follow_links=False) is not None


def is_file(path: Path) -> bool:
    """Whether the path is a regular file. Raises PathError as ``exists`` does."""
    mode = _mode(path)
    return mode is not None and stat.S_ISREG(mode)


def is_folder(path: Path) -> bool:
    """Whether the path is a folder. Raises PathError as ``exists`` does."""
    mode = _mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def is_link(path: Path) -> bool:
    """Whether the path is a symbolic link. Raises PathError as ``exists`` does."""
    mode = _mode(path, follow_links=False)
    return mode is not None and stat.S_ISLNK(mode)


def resolved(path: Path) -> Path:
    """The absolute path without links. Raises PathError as ``exists`` does."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links form a circle, before Python 3.13
        raise PathError(f"{_printable(path)}: {_reason(error)}") from None


def with_home(path: str | Path) -> Path:
    """The path with ``~`` replaced by the home folder. Raises PathError if there is no such user or folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise PathError(f"{_printable(path)}: {error} Write the path without ~") from None


def check_writable(folder: Path) -> None:
    """Checks that files can be written to a folder, which may still have to be created.

    Raises:
        UsageError: a file is in the way, or the folder, or the one to create it in, is not writable.
        PathError: the folder cannot be examined.
    """
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if exists(path))
    if not is_folder(existing):
        raise UsageError(f"{existing} is a file, expected a folder: choose another output folder")
    if not os.access(existing, os.W_OK):
        raise UsageError(f"{existing} is not writable: choose another output folder")


def os_error_message(error: OSError) -> str:
    """An OSError in one line: the file, if it is known, and the reason."""
    reason = str(error) if error.strerror is None else error.strerror
    names = [_printable(os.fsdecode(name)) for name in (error.filename, error.filename2) if _is_path(name)]
    return ": ".join([*[" -> ".join(names)][: len(names)], reason.partition("\n")[0]])


def _is_path(name: object) -> bool:
    return isinstance(name, str | bytes | os.PathLike) and name not in ("", b"")


def _mode(path: Path, *, follow_links: bool = True) -> int | None:
    try:
        return os.stat(path, follow_symlinks=follow_links).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise PathError(
            f"{_printable(path)}: cannot be examined ({_reason(error)}); check the name and the permissions of its "
            "folders"
        ) from None


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror is not None:
        return error.strerror
    return "a symbolic link leads back to itself" if isinstance(error, RuntimeError) else str(error)


def _printable(path: str | Path) -> str:
    """The path with unprintable characters escaped; a very long one is cut."""
    text = "".join(one if one.isprintable() else repr(one)[1:-1] for one in str(path))
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}... ({len(text)} characters)"
