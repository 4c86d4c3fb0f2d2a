"""Owns the fixture that writes a file and reads it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bert_tasks.data.columns import Column
from bert_tasks.data.readers import ReadOptions, read_table
from bert_tasks.data.table import RowTable

READ_OPTIONS = {"names": "columns"} | {
    name: name for name in ("format", "encoding", "delimiter", "header", "label_separator", "document")
}
TEXT_AND_LABEL = (Column(name="text", kind="text"), Column(name="label", kind="label", required=False))


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RowTable]:
    """``read(content, name, **options)`` in an empty current folder, with ``cache/`` below it."""
    monkeypatch.chdir(tmp_path)

    def write_and_read(content: str | bytes, name: str = "rows.csv", **options: Any) -> RowTable:
        data = content.encode() if isinstance(content, str) else content
        (tmp_path / name).write_bytes(data)
        options.setdefault("columns", TEXT_AND_LABEL)
        how = {field: options.pop(name) for name, field in READ_OPTIONS.items() if name in options}
        return read_table(name, cache_dir=tmp_path / "cache", reading=ReadOptions(**how), **options)

    return write_and_read
