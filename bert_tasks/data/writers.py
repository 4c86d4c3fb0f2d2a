"""Rows out: JSON Lines, or a table with one column per field.

Owns the output formats and that a file appears whole or not at all. Must not know what the rows mean.
"""

import csv
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_tasks.errors import UsageError

_DELIMITERS = {".csv": ",", ".tsv": "\t"}


def checked_output(path: Path) -> Path:
    """Refuses an output path before any work is done for it.

    Raises:
        UsageError: an unknown extension, a folder, or a folder that does not exist.
    """
    if path.suffix not in (".jsonl", *_DELIMITERS):
        raise UsageError(f"{path}: the output's extension must be .jsonl, .csv or .tsv")
    if path.is_dir():
        raise UsageError(f"{path} is a folder, expected the name of a file")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path}: the folder {path.parent} does not exist")
    return path


def write_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes rows in the format of the extension; nested fields become columns such as ``scores.positive``.

    Raises:
        UsageError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            if path.suffix == ".jsonl":
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            else:
                flat = [dict(_flat(row)) for row in rows]
                names = list(dict.fromkeys(name for row in flat for name in row))
                writer = csv.DictWriter(file, names, delimiter=_DELIMITERS[path.suffix], lineterminator="\n")
                if names:
                    writer.writeheader()
                writer.writerows(flat)
        temporary.replace(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot write the output ({error.strerror})") from None
    finally:
        temporary.unlink(missing_ok=True)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, ";".join(map(str, value)) if isinstance(value, list) else value
