"""The file formats by name, and how the published GLUE files differ from plain ones.

Owns the read-only table of formats, and which format a file has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from bert_tasks.data.columns import Column, column_of
from bert_tasks.data.conll import looks_like_conll
from bert_tasks.data.problems import did_you_mean
from bert_tasks.data.records import looks_like_squad
from bert_tasks.errors import DataError

GZIP_EXTENSION = ".gz"


@dataclass(frozen=True, kw_only=True)
class Format:
    """The layout of files of a format.

    Attributes:
        extensions: what a file's name ends with, the usual one first.
        file_names: other names that files of a split have; ``{split}`` is train, dev and so on, ``*`` anything.
        delimiter: what separates cells; None where nothing does.
        quoted: whether the cells follow csv's quoting rules.
        headless: the columns of files without a header line (GLUE's test files have one nevertheless, whose first
            cell is "index").
        skips_short_rows: whether rows with too few cells are skipped and counted, as other tools do; else they are
            faults.
        columns, hub_columns: the task's columns -> those of the files, and of the hub data set.
        label_names: the label ids of the files -> their names, in the order of the hub data set.
        default_passthrough: the columns that prediction keeps if none are named, where these are not all.
        validation, hub_validation: the named validation sets where there is more than one -> their file in a folder,
            and their split on the hub.
    """

    name: str
    extensions: tuple[str, ...]
    file_names: tuple[str, ...] = ()
    delimiter: str | None = None
    quoted: bool = True
    headless: tuple[str, ...] = ()
    skips_short_rows: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)
    hub_columns: Mapping[str, str] = field(default_factory=dict)
    label_names: Mapping[str, str] = field(default_factory=dict)
    default_passthrough: tuple[str, ...] = ()
    validation: Mapping[str, str] = field(default_factory=dict)
    hub_validation: Mapping[str, str] = field(default_factory=dict)


def _glue(
    name: str,
    columns: tuple[str, ...],
    *,
    labels: tuple[str, ...] = (),
    hub_columns: tuple[str, ...] = ("sentence1", "sentence2", "label"),
    headless: tuple[str, ...] = (),
    skips_short_rows: bool = False,
    validation_sets: tuple[str, ...] = (),
) -> Format:
    """A format of GLUE; ``columns`` are those of the files: the text or the two texts of a pair, and the label."""
    ours = ("text", "label") if len(columns) == 2 else ("text", "text_pair", "label")
    return Format(
        name=f"glue/{name}",
        extensions=(".tsv",),
        delimiter="\t",
        quoted=False,
        headless=headless,
        skips_short_rows=skips_short_rows,
        columns=dict(zip(ours, columns, strict=True)),
        hub_columns=dict(zip(ours, hub_columns, strict=True)),
        label_names={str(number): label for number, label in enumerate(labels)},
        validation={part: f"dev_{part}.tsv" for part in validation_sets},
        hub_validation={part: f"validation_{part}" for part in validation_sets},
    )


_ENTAILMENT = ("entailment", "neutral", "contradiction")
_GLUE = (
    _glue("sst2", ("sentence", "label"), hub_columns=("sentence", "label"), labels=("negative", "positive")),
    _glue(
        "cola",
        ("sentence", "label"),
        hub_columns=("sentence", "label"),
        labels=("unacceptable", "acceptable"),
        headless=("source", "label", "mark", "sentence"),
    ),
    _glue("mrpc", ("#1 String", "#2 String", "Quality"), labels=("not_equivalent", "equivalent")),
    _glue("stsb", ("sentence1", "sentence2", "score")),
    _glue(
        "qqp",
        ("question1", "question2", "is_duplicate"),
        hub_columns=("question1", "question2", "label"),
        labels=("not_duplicate", "duplicate"),
        skips_short_rows=True,
    ),
    _glue(
        "mnli",
        ("sentence1", "sentence2", "gold_label"),
        hub_columns=("premise", "hypothesis", "label"),
        labels=_ENTAILMENT,
        validation_sets=("matched", "mismatched"),
    ),
    _glue(
        "qnli",
        ("question", "sentence", "label"),
        hub_columns=("question", "sentence", "label"),
        labels=("entailment", "not_entailment"),
    ),
    _glue("rte", ("sentence1", "sentence2", "label"), labels=("entailment", "not_entailment")),
    _glue("wnli", ("sentence1", "sentence2", "label"), labels=("not_entailment", "entailment")),
    _glue(
        "ax", ("sentence1", "sentence2", "label"), hub_columns=("premise", "hypothesis", "label"), labels=_ENTAILMENT
    ),
)
_ALL = (
    Format(name="csv", extensions=(".csv",), delimiter=","),
    Format(name="tsv", extensions=(".tsv",), delimiter="\t"),
    Format(name="tsv/plain", extensions=(".tsv",), delimiter="\t", quoted=False),
    Format(name="jsonl", extensions=(".jsonl", ".json")),
    Format(name="text", extensions=(".txt", ".text")),
    Format(name="parquet", extensions=(".parquet",)),
    Format(
        name="conll",
        extensions=(".conll", ".txt", ".bio", ".iob"),
        hub_columns={"words": "tokens", "tags": "ner_tags"},
        default_passthrough=("words", "tags", "document"),
    ),
    Format(
        name="conllu",
        extensions=(".conllu",),
        file_names=("*-ud-{split}.conllu",),
        columns={"words": "form", "tags": "upos"},
        hub_columns={"words": "tokens", "tags": "upos"},
    ),
    Format(name="squad", extensions=(".json",), file_names=("{split}-v*.json",)),
    *_GLUE,
)
FORMATS: Mapping[str, Format] = MappingProxyType({row.name: row for row in _ALL})


def named_format(name: str) -> Format:
    if name not in FORMATS:
        raise DataError(f"unknown format {name!r}{did_you_mean(name, FORMATS)}; there are {', '.join(FORMATS)}")
    return FORMATS[name]


def file_format(name: str | None, path: Path, columns: Sequence[Column] | None = None) -> Format:
    """The format asked for, else the one of the file's extension.

    .json is SQuAD's or jsonl, as the file begins. .txt is CoNLL's for a task that reads words, and else text.

    Args:
        name: of the format; None: the extension says it.
        path: of the file.
        columns: that the task reads; None: the task is not known, so that a .txt file is looked at.

    Raises:
        DataError: there is no such format, or none belongs to the extension.
    """
    if name is not None:
        return named_format(name)
    extension = uncompressed(path).suffix.lower()
    if extension == ".json" and looks_like_squad(path):
        return FORMATS["squad"]
    fitting = [row for row in _ALL if extension in row.extensions]
    if extension == ".txt":
        words = None if columns is None else column_of(columns, "words")
        is_conll = looks_like_conll(path) if columns is None else words is not None
        return FORMATS["conll" if is_conll else "text"]
    if not fitting:
        raise DataError(f"{path}: no format belongs to the extension {extension!r}; state one of {', '.join(FORMATS)}")
    return fitting[0]


def uncompressed(path: Path) -> Path:
    """The path without ``.gz``, the extension of a compressed text file."""
    return path.with_suffix("") if path.suffix.lower() == GZIP_EXTENSION else path


def files_of_split(folder: Path, split: str, format: str | None) -> list[Path]:
    """The files in a folder that may hold a split, of the format or of any."""
    rows = _ALL if format is None else (named_format(format),)
    names = list(dict.fromkeys(f"{split}{extension}" for row in rows for extension in row.extensions))
    packed = [f"{name}{GZIP_EXTENSION}" for name in names if not name.endswith(".parquet")]
    plain = [path for path in (folder / name for name in [*names, *packed]) if path.is_file()]
    patterns = dict.fromkeys(pattern.format(split=split) for row in rows for pattern in row.file_names)
    return plain + [path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()]


def expected_files(split: str, format: str | None) -> str:
    """The names that ``files_of_split`` looks for, in words."""
    rows = _ALL if format is None else (named_format(format),)
    plain = [f"{split}{extension}" for row in rows for extension in row.extensions]
    patterns = [pattern.format(split=split) for row in rows for pattern in row.file_names]
    return " or ".join(dict.fromkeys(plain + patterns))
