"""Checks of the files of a model folder before they are parsed.

A model folder comes from somebody else, so a file may be too large, cut off, a pipe, a web page or a git-lfs pointer.
The module owns these checks and the reading of JSON objects. Every failure names the file and its problem.
"""

import json
import os
import re
import stat
from pathlib import Path
from typing import Any, NoReturn

from bert_tasks.errors import CheckpointError

# A config.json has a few kilobytes, and more only with the names of very many labels. The limit keeps a damaged or
# hostile file from filling the memory.
MAX_CONFIG_BYTES = 16 * 2**20
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# Without these bytes no text of a JSON file holds a surrogate. It is escaped, encoded as if it were a character, or the
# file is in UTF-16 or UTF-32.
_SURROGATES = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]|\0")


def refuse(path: Path, reason: str) -> NoReturn:
    """Raises the error about a file.

    Raises:
        CheckpointError: Always.
    """
    raise CheckpointError(f"{path}: {reason}") from None


def read_json(path: Path, *, max_bytes: int) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises:
        CheckpointError: The file is too large, is not readable or holds something else.
    """
    value = read_json_value(path, max_bytes=max_bytes)
    if not isinstance(value, dict):
        refuse(path, f"expected a JSON object, found a {type(value).__name__}")
    return value


def read_json_value(path: Path, *, max_bytes: int) -> Any:
    """Returns the JSON value in a file, of any type. Raises as ``read_json`` does."""
    try:
        size = path.stat().st_size
        if size > max_bytes:
            refuse(path, f"{size} bytes are too many, expected at most {max_bytes}")
        content = path.read_bytes()
        value = json.loads(content, parse_constant=_refuse_constant)
        if _SURROGATES.search(content):
            # Python's parser accepts half of a pair, but no file or terminal can hold the text. Encoding fails for it.
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError as error:
        code = ascii(error.object[error.start])
        refuse(path, f"a text holds {code}, half of a surrogate pair. Remove it, or write the other half, too")
    except (ValueError, RecursionError) as error:
        refuse(path, f"not valid JSON ({error})")
    except OSError as error:
        refuse(path, f"cannot be read ({error.strerror})")


def checked_file(folder: Path, name: str) -> Path:
    """Returns the path of a regular file (no pipe) that no failed download left.

    Raises:
        CheckpointError: The file is missing, not readable, empty, a git-lfs pointer or a web page.
    """
    path = folder / name
    try:
        mode = path.stat().st_mode
    except OSError as error:
        reason = f"{error.strerror}"
        if isinstance(error, FileNotFoundError) and path.is_symlink():
            reason = "a link to a file that does not exist"
        refuse(path, reason)
    except ValueError:  # a null character
        refuse(folder, f"{name!a} cannot be the name of a file")
    if not stat.S_ISREG(mode):  # reading a pipe would wait for ever
        refuse(path, "not a regular file")
    try:
        with path.open("rb") as file:
            start = file.read(256)
    except OSError as error:
        refuse(path, f"cannot be read ({error.strerror})")
    if start == b"":
        refuse(path, "empty (0 bytes), because a download or copy failed. Download it again")
    if start.startswith(b"version https://git-lfs"):
        refuse(path, "a git-lfs pointer, not the file itself. Run `git lfs pull` in its folder")
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        refuse(path, "a web page (HTML), because a download failed. Download it again")
    return path


def read_config(folder: Path) -> dict[str, Any]:
    """Reads the folder's ``config.json``, including keys that name code as data.

    Raises:
        CheckpointError: The file is missing, too large or not a JSON object, or the folder holds a TensorFlow
            checkpoint.
    """
    has_weights = any((folder / name).exists() for name in _WEIGHTS)
    if not has_weights and any(folder.glob("?*.index")):
        raise CheckpointError(
            f"{folder} holds a TensorFlow checkpoint, which is not supported. Every model of Google is on the hub in "
            "Hugging Face's format, for example google-bert/bert-base-uncased"
        )
    if not os.path.lexists(folder / "config.json"):
        inner = folder / "model"
        hint = ""
        if (inner / "config.json").is_file():
            hint = f". Did you mean {inner}?"
        raise CheckpointError(f"{folder}: no config.json. Expected a folder that `save_pretrained` wrote{hint}")
    return read_json(checked_file(folder, "config.json"), max_bytes=MAX_CONFIG_BYTES)


def _refuse_constant(name: str) -> NoReturn:
    """Refuses NaN and Infinity, which Python's parser accepts although JSON has no such numbers."""
    raise ValueError(f"{name} is not a number in JSON")
