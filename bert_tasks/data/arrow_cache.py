"""A store of Arrow files that checks itself: `<key>.json` names an Arrow file, its row count, sha256 and notes.

Owns where cached tables lie and how they are written and verified. Must not know what the rows mean. A
damaged, truncated or deleted file counts as absent. Files are written under a temporary name and moved into
place, data first, so that concurrent writers and readers never meet a half-written one.
"""

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bert_tasks.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset


Write = Callable[[Path], Sequence[str] | None]  # writes the Arrow file; the notes are kept beside it


class Stored(NamedTuple):
    rows: "Dataset"
    path: Path
    content: str  # sha256 of the Arrow file
    notes: tuple[str, ...]


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


def open_or_write(folder: Path, key: str, write: Write) -> "Dataset":
    """The rows stored under a key, written by ``write`` if they are not there or not sound."""
    return kept_or_written(folder, key, write).rows


def kept_or_written(folder: Path, key: str, write: Write) -> Stored:
    """As `open_or_write`, with the notes that were taken when the rows were written."""
    kept = _sound(folder, key)
    return kept if kept is not None else store(folder, key, write)


def open_sound(folder: Path, key: str) -> "Dataset | None":
    kept = _sound(folder, key)
    return None if kept is None else kept.rows


def _sound(folder: Path, key: str) -> Stored | None:
    from datasets import Dataset

    try:
        note = json.loads((folder / f"{key}.json").read_text())
        path = folder / Path(note["file"]).name
        if file_digest(path) != note["sha256"]:
            return None
        rows = Dataset.from_file(str(path))
        kept = Stored(rows, path, note["sha256"], tuple(note["notes"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return kept if len(rows) == note["rows"] else None


def store(folder: Path, key: str | None, write: Write) -> Stored:
    """Writes rows through ``write(path)`` and opens them; without a key they are kept by content only."""
    from datasets import Dataset

    with _temporary(folder) as temporary:
        told = write(temporary)
        notes = () if told is None else tuple(told)
        content = file_digest(temporary)
        path = folder / f"{content}.arrow"
        os.replace(temporary, path)
    rows = Dataset.from_file(str(path))
    if key is not None:
        about = {"file": path.name, "rows": len(rows), "sha256": content, "notes": notes}
        with _temporary(folder) as temporary:
            temporary.write_text(json.dumps(about))
            os.replace(temporary, folder / f"{key}.json")
    return Stored(rows, path, content, notes)


def streamed(path: Path, columns: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    """The rows of an Arrow file in order, in the batches they were written in.

    Read so, a file of any size passes through the memory of one batch; pages of a mapped file would stay until the
    system needs them.
    """
    import pyarrow

    with pyarrow.OSFile(str(path), "rb") as file, pyarrow.ipc.open_stream(file) as batches:
        for batch in batches:
            yield batch.select(columns).to_pylist()


def blocks(
    path: Path, columns: Sequence[str], size: int, wanted: Callable[[int], bool]
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """As ``streamed``, in blocks of ``size`` rows with their numbers; of those that are not wanted nothing is made."""
    import pyarrow

    number, held, room = 0, [], size
    with pyarrow.OSFile(str(path), "rb") as file, pyarrow.ipc.open_stream(file) as batches:
        for batch in batches:
            rest = batch.select(columns)
            while rest.num_rows:
                held.append(rest.slice(0, room))
                rest = rest.slice(held[-1].num_rows)
                room -= held[-1].num_rows
                if room == 0:
                    if wanted(number):
                        yield number, [row for part in held for row in part.to_pylist()]
                    number, held, room = number + 1, [], size
    if held and wanted(number):
        yield number, [row for part in held for row in part.to_pylist()]


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
