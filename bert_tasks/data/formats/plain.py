"""Tables, JSON, text, columns of words and Parquet, and the formats of GLUE.

The files of GLUE (https://gluebenchmark.com/tasks) differ from each other and from the data sets on the hub in the
names of their columns, in their ids of labels, and in whether they have a header. A format states these differences, so
that a recipe need not.
"""

import csv
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bert_tasks.data.batch import MOST_ROWS, Batches, Records
from bert_tasks.data.columns import Column, first_column
from bert_tasks.data.conll import conll_rows, conllu_rows
from bert_tasks.data.formats.base import FORMATS, Format
from bert_tasks.data.formats.parquet import parquet_batches
from bert_tasks.data.kinds import Words
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.parsers import SENTENCES, TEXT, RowLines, Table, json_rows, squad_rows, text_rows
from bert_tasks.errors import DataError, UsageError, argument

_EXCEL_DELIMITER = re.compile(r'"?sep=(.)"?\r?\n')  # the first line of a csv file that Excel is to open
_LARGEST_CELL = 2**31 - 1  # in characters. The limit of a row is lower


@dataclass(frozen=True, kw_only=True)
class TableFormat(Format):
    """Tables in text files, with one row in each line and a delimiter between the cells.

    Attributes:
        headless: Columns of files without a header line (GLUE's test files have one, whose first cell is "index").
        skips_short_rows: Rows with too few cells are skipped and counted, as in other tools.
    """

    headless: tuple[str, ...] = ()
    skips_short_rows: bool = False

    def batches(self, lines: RowLines, path: Path, options: ReadOptions, most: int) -> Batches:
        delimiter = self.delimiter
        if options.delimiter is not None:
            delimiter = options.delimiter
        if delimiter is None or len(delimiter) != 1 or delimiter in '"\r\n':
            raise DataError(
                f"{path}: invalid delimiter {delimiter!r}. Expected one character, but no quote and no line end"
            )
        first_line = 1
        if self.quoted:
            match = _EXCEL_DELIMITER.fullmatch(lines.peek())
            if match is not None:
                delimiter, first_line = match[1], 2
                next(lines)
        table = Table(
            path=path,
            delimiter=delimiter,
            header=options.header is not False,
            quoted=self.quoted,
            headless=self.headless,
            skips_short_rows=self.skips_short_rows,
        )
        return table.batches(lines, most, first_line=first_line)

    @contextmanager
    def open_text(self, path: Path, options: ReadOptions, *, most: int = MOST_ROWS) -> Iterator[Batches]:
        limit = csv.field_size_limit(_LARGEST_CELL)  # it belongs to the whole process, so it is put back afterwards
        try:
            with super().open_text(path, options, most=most) as batches:
                yield batches
        finally:
            csv.field_size_limit(limit)


class JsonFormat(Format):
    """JSON with one object per line, or with an array of objects."""

    def matches(self, start: str, columns: Sequence[Column] | None) -> bool:
        return re.match(r'\s*(\{\s*("|$)|\[\s*(\{|$))', start) is not None

    def records(self, lines: Iterator[str], path: Path, options: ReadOptions) -> Records:
        return Records(None, json_rows(lines, path))


class SquadFormat(Format):
    """JSON in the nesting of SQuAD (https://rajpurkar.github.io/SQuAD-explorer/), or with rows in a list ``data``."""

    can_stream = False
    # An object whose members before a list "data" of objects are plain values, as the "version" of SQuAD is.
    _START = re.compile(r'\s*\{\s*(?:"[^"]*"\s*:\s*(?:"[^"]*"|[\w.+-]+)\s*,\s*)*"data"\s*:\s*\[\s*\{')

    def matches(self, start: str, columns: Sequence[Column] | None) -> bool:
        return self._START.match(start) is not None

    def records(self, lines: Iterator[str], path: Path, options: ReadOptions) -> Records:
        return Records(None, squad_rows(lines, path))


class TextFormat(Format):
    """Plain text, whose lines are texts, or parts of documents that blank lines separate."""

    has_documents = True

    def records(self, lines: Iterator[str], path: Path, options: ReadOptions) -> Records:
        columns: tuple[str, ...] = (TEXT,)
        if options.document in ("blank-line", "file"):  # whose documents have several lines
            columns = (TEXT, SENTENCES)
        return Records(columns, text_rows(lines, options.document))


class ConllFormat(Format):
    """The columns of CoNLL, with one word per line and its tag in the last column."""

    def matches(self, start: str, columns: Sequence[Column] | None) -> bool:
        """Returns True if the task reads words. Without a task, lines need equal columns."""
        if columns is not None:
            return first_column(columns, Words) is not None
        widths = []
        for line in start.split("\n")[:-1]:  # the last line may be cut
            cells = line.split()
            if cells and cells[0] not in ("#", "-DOCSTART-"):
                widths.append(len(cells))
        return len(widths) > 1 and len(set(widths)) == 1 and widths[0] > 1

    def records(self, lines: Iterator[str], path: Path, options: ReadOptions) -> Records:
        return Records(None, conll_rows(lines))


class ConlluFormat(Format):
    """The files of Universal Dependencies, with one word per line and ten columns."""

    def records(self, lines: Iterator[str], path: Path, options: ReadOptions) -> Records:
        return Records(None, conllu_rows(lines))


class ParquetFormat(Format):
    """The files of Apache Parquet, which are read in batches that fit into the memory."""

    is_text = False
    can_stream = False

    @contextmanager
    def parse(
        self, path: Path, options: ReadOptions, *, columns_to_read: Sequence[str] | None = None
    ) -> Iterator[Batches]:
        with parquet_batches(path, columns_to_read=columns_to_read) as batches:
            yield batches


@dataclass(frozen=True, kw_only=True)
class StreamFormat(Format):
    """JSON or lines of text on standard input, as the first line shows.

    Attributes:
        name: Name of the source in messages.
        headers: Names of columns. A first line with one of them is the header of a table.
        texts: Columns of texts that a row needs. Several of them may be in a line, with tabs between them.
    """

    extensions: tuple[str, ...] = ()
    headers: Collection[str] = ()
    texts: tuple[str, ...] = ()

    def detect(self, line: str) -> Format:
        """Returns the format of a stream with this first line.

        Raises:
            UsageError: It is a table or a parquet file, whose format the user must set.
        """
        if line.startswith("PAR1"):
            raise UsageError(f"{self.name} is a parquet file. Add {argument('format', 'parquet')}")
        # A table read as texts would give predictions for its header and its delimiters, without an error.
        for part in re.split(r"[,;\t|]", line):
            header = part.strip().strip('"')
            if header in self.headers:
                raise UsageError(
                    f"{self.name}: the first line names the column {header!r}, as the header of a table does. Add "
                    f"{argument('format', 'csv')}, tsv, ..., or text if every line is a text"
                )
        if FORMATS["jsonl"].matches(line, None):
            return FORMATS["jsonl"]
        if len(self.texts) > 1 and line.count("\t") == len(self.texts) - 1:
            return TableFormat(name="texts", extensions=(), delimiter="\t", headless=self.texts)
        return FORMATS["text"]

    def batches(self, lines: RowLines, path: Path, options: ReadOptions, most: int) -> Batches:
        return self.detect(lines.peek()).batches(lines, path, options, most)


_ENTAILMENT = ("entailment", "neutral", "contradiction")
# Name, columns of the files (the text or the two texts of a pair, and the label), columns on the hub if they differ,
# and labels in the order of their ids.
_GLUE: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("sst2", "sentence|label", "", ("negative", "positive")),
    ("cola", "sentence|label", "", ("unacceptable", "acceptable")),
    ("mrpc", "#1 String|#2 String|Quality", "sentence1|sentence2|label", ("not_equivalent", "equivalent")),
    ("stsb", "sentence1|sentence2|score", "sentence1|sentence2|label", ()),
    ("qqp", "question1|question2|is_duplicate", "question1|question2|label", ("not_duplicate", "duplicate")),
    ("mnli", "sentence1|sentence2|gold_label", "premise|hypothesis|label", _ENTAILMENT),
    ("qnli", "question|sentence|label", "", ("entailment", "not_entailment")),
    ("rte", "sentence1|sentence2|label", "", ("entailment", "not_entailment")),
    ("wnli", "sentence1|sentence2|label", "", ("not_entailment", "entailment")),
    ("ax", "sentence1|sentence2|label", "premise|hypothesis|label", _ENTAILMENT),
)


def _glue(name: str, columns: str, hub_columns: str, labels: Sequence[str]) -> TableFormat:
    """Returns the format of a task of GLUE from a row of ``_GLUE``."""
    names = columns.split("|")
    hub_names = names
    if hub_columns:
        hub_names = hub_columns.split("|")
    ours: tuple[str, ...] = ("text", "text_pair", "label")
    if len(names) == 2:
        ours = ("text", "label")
    sets: tuple[str, ...] = ()
    if name == "mnli":  # genres that the training rows have, and others
        sets = ("matched", "mismatched")
    headless: tuple[str, ...] = ()
    if name == "cola":
        headless = ("source", "label", "mark", "sentence")
    return TableFormat(
        name=f"glue/{name}",
        extensions=(".tsv",),
        delimiter="\t",
        headless=headless,
        skips_short_rows=name == "qqp",
        columns=dict(zip(ours, names, strict=True)),
        hub_columns=dict(zip(ours, hub_names, strict=True)),
        label_names={str(number): label for number, label in enumerate(labels)},
        validation={subset: f"dev_{subset}.tsv" for subset in sets},
        hub_validation={subset: f"validation_{subset}" for subset in sets},
    )


ALL: tuple[Format, ...] = (
    TableFormat(name="csv", extensions=(".csv",), delimiter=",", quoted=True),
    TableFormat(name="tsv", extensions=(".tsv",), delimiter="\t", quoted=True),
    TableFormat(name="tsv/plain", extensions=(".tsv",), delimiter="\t"),
    JsonFormat(name="jsonl", extensions=(".jsonl", ".json", ".ndjson")),
    TextFormat(name="text", extensions=(".txt", ".text")),
    ParquetFormat(
        name="parquet",
        extensions=(".parquet",),
        file_names=("{split}-*-of-*.parquet", "data/{split}-*-of-*.parquet"),
    ),
    ConllFormat(
        name="conll",
        extensions=(".conll", ".txt", ".bio", ".iob"),
        hub_columns={"words": "tokens", "tags": "ner_tags"},
        default_passthrough=("words", "tags", "document"),
    ),
    ConlluFormat(
        name="conllu",
        extensions=(".conllu",),
        file_names=("*-ud-{split}.conllu",),
        columns={"words": "form", "tags": "upos"},
        hub_columns={"words": "tokens", "tags": "upos"},
    ),
    SquadFormat(name="squad", extensions=(".json",), file_names=("{split}-v*.json",)),
    *(_glue(*row) for row in _GLUE),
)
