"""A store of Arrow files that checks itself: `<key>.json` names an Arrow file, its row count and its sha256.

Owns where cached tables lie and how they are written and verified. Must not know what the rows mean. A
damaged, truncated or deleted file counts as absent. Files are written under a temporary name and moved into
place, data first, so that concurrent writers and readers never meet a half-written one.
"""

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bert_tasks.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset


class Stored(NamedTuple):
    rows: "Dataset"
    content: str  # sha256 of the Arrow file


def cache_folder(cache_dir: Path | None, part: str) -> Path:
    if cache_dir is None:
        import datasets

        cache_dir = Path(datasets.config.HF_DATASETS_CACHE)
    folder = cache_dir / "bert_tasks" / part
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, error) from error
    return folder


def digest(*parts: Any) -> str:
    """sha256 over plain values; mappings count by content, not by order."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_or_write(folder: Path, key: str, write: Callable[[Path], None]) -> "Dataset":
    """The rows stored under a key, written by ``write`` if they are not there or not sound."""
    rows = open_sound(folder, key)
    return rows if rows is not None else store(folder, key, write).rows


def open_sound(folder: Path, key: str) -> "Dataset | None":
    from datasets import Dataset

    try:
        note = json.loads((folder / f"{key}.json").read_text())
        path = folder / Path(note["file"]).name
        if file_digest(path) != note["sha256"]:
            return None
        rows = Dataset.from_file(str(path))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return rows if len(rows) == note["rows"] else None


def store(folder: Path, key: str | None, write: Callable[[Path], None]) -> Stored:
    """Writes rows through ``write(path)`` and opens them; without a key they are kept by content only."""
    from datasets import Dataset

    with _temporary(folder) as temporary:
        write(temporary)
        content = file_digest(temporary)
        path = folder / f"{content}.arrow"
        os.replace(temporary, path)
    rows = Dataset.from_file(str(path))
    if key is not None:
        with _temporary(folder) as temporary:
            temporary.write_text(json.dumps({"file": path.name, "rows": len(rows), "sha256": content}))
            os.replace(temporary, folder / f"{key}.json")
    return Stored(rows, content)


@contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    path = folder / f".{uuid.uuid4().hex}.part"
    try:
        yield path
    except OSError as error:
        raise _unusable(folder, error) from error
    finally:
        path.unlink(missing_ok=True)


def _unusable(folder: Path, error: OSError) -> DataError:
    return DataError(f"{folder}: the cache cannot be written ({error}); set HF_DATASETS_CACHE to a folder with room")
