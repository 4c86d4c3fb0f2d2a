"""The file formats by name, and how the published GLUE files differ from plain ones.

Owns the read-only table of formats. Must not know how a format is parsed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from bert_tasks.data.problems import did_you_mean
from bert_tasks.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Format:
    """How files of a format are laid out.

    ``delimiter`` is None where rows are not cut by one. ``quoted`` files follow csv's quoting rules.
    ``headless`` names the columns of files without a header line (GLUE's test files have one nevertheless,
    whose first cell is "index"). ``columns`` and ``hub_columns`` map a task's columns to those of the files
    and of the hub data set. ``label_names`` maps the label ids of the files to names.
    """

    name: str
    extension: str
    delimiter: str | None = None
    quoted: bool = True
    headless: tuple[str, ...] = ()
    columns: Mapping[str, str] = field(default_factory=dict)
    hub_columns: Mapping[str, str] = field(default_factory=dict)
    label_names: Mapping[str, str] = field(default_factory=dict)


def _glue(name: str, *, columns: dict[str, str], labels: tuple[str, ...], headless: tuple[str, ...] = ()) -> Format:
    return Format(
        name=f"glue/{name}",
        extension=".tsv",
        delimiter="\t",
        quoted=False,
        headless=headless,
        columns=columns,
        hub_columns=columns,
        label_names={str(number): label for number, label in enumerate(labels)},
    )


_SENTENCE = {"text": "sentence", "label": "label"}
_ALL = (
    Format(name="csv", extension=".csv", delimiter=","),
    Format(name="tsv", extension=".tsv", delimiter="\t"),
    Format(name="tsv/plain", extension=".tsv", delimiter="\t", quoted=False),
    Format(name="jsonl", extension=".jsonl"),
    Format(name="parquet", extension=".parquet"),
    _glue("sst2", columns=_SENTENCE, labels=("negative", "positive")),
    _glue(
        "cola",
        columns=_SENTENCE,
        labels=("unacceptable", "acceptable"),
        headless=("source", "label", "mark", "sentence"),
    ),
)
FORMATS: Mapping[str, Format] = MappingProxyType({row.name: row for row in _ALL})


def named_format(name: str) -> Format:
    if name not in FORMATS:
        raise DataError(f"unknown format {name!r}{did_you_mean(name, FORMATS)}; there are {', '.join(FORMATS)}")
    return FORMATS[name]


def file_format(name: str | None, path: Path) -> Format:
    """The format asked for, else the one that the file's extension stands for."""
    if name is not None:
        return named_format(name)
    extension = path.suffix.lower()
    by_extension = {".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
    if extension not in by_extension:
        raise DataError(f"{path}: no format belongs to the extension {extension!r}; state one of {', '.join(FORMATS)}")
    return FORMATS[by_extension[extension]]
