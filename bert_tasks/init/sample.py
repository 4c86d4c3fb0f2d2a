"""A sample of a data file, with the reading options for a recipe.

This module owns what is detected before columns are looked at: the encoding, the delimiter, whether there is a header,
and whether the file has the shape that its name promises. Files that are not what their author means are refused with
what to do about it, because a wrong guess would only show in the quality of the model.
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from bert_tasks.data import limits
from bert_tasks.data.batch import Record
from bert_tasks.data.cells import ENCODING_EXAMPLE, is_encodable
from bert_tasks.data.formats import FORMATS, Format, file_format
from bert_tasks.data.formats.excel import ExcelFormat
from bert_tasks.data.issues import first_few, shortened
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.parsers import TEXT, RowLines, open_text
from bert_tasks.data.reading import column_names, existing_file, matching_files
from bert_tasks.errors import DataError, argument
from bert_tasks.init.columns import LABEL_NAMES
from bert_tasks.init.encodings import shown_encoding

_MOST_ROWS = 20_000
_LONGEST_HEADER = 5  # words
_MOST_ROWS_PER_CLASS = 100  # a name in fewer of them is no class
_UNKNOWN_BYTE = re.compile("[\udc80-\udcff]")  # as surrogateescape decodes it
# Other delimiters than the usual one, likeliest first. Texts hold commas, so a comma comes last.
_DELIMITERS = (";", "\t", "|", ",")
_FIRST_LINES = 200  # of a file
_FEWEST_LINES = 10  # that say which delimiter a file has
_START = 2**14  # characters of a file
_NO_HEADER = 'the first line is a row like the others, so there is no header and the columns are named "0", "1", ...'

Options = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class FileSample:
    """A data file and a sample of its rows.

    Attributes:
        path, format: The file, and its format.
        columns: The names of the columns.
        rows: Rows evenly drawn from all ``count`` rows of the file, in order. ``faults`` could not be read.
        options: Reading options that a recipe must set, for the reasons in ``notes``.
        has_stated_format: True if the user named the format, whose columns are then the columns of the task.
    """

    path: Path
    format: Format
    columns: tuple[str, ...]
    rows: Sequence[Mapping[str, Any]]
    count: int
    faults: Sequence[str]
    options: Options
    notes: tuple[str, ...] = ()
    has_stated_format: bool = False

    @property
    def reading(self) -> ReadOptions:
        """The options with which the readers return the same rows."""
        return ReadOptions(**{"format": self.format.name, **self.options})

    @property
    def cost(self) -> tuple[bool, int]:
        """Rates these options by a table's number of columns and of broken rows. The lowest is the best."""
        width = len(self.columns)
        if self.options.get("header") is False and self.rows:
            width = len(self.rows[0])
        is_single = width < 2 or len(self.faults) * 2 > self.count
        # A cell with several lines often is the rest of the file behind a quote that does not open a cell.
        broken = len(self.faults)
        for row in self.rows:
            broken += sum("\n" in str(value) for value in row.values())
        return is_single, broken


def read_sample(path: Path, reading: ReadOptions) -> FileSample:
    """Reads a file once, or once for each likely delimiter, and keeps a sample of its rows.

    Args:
        path: A file, or a pattern that stands for several files.
        reading: The options that the user set. The others are detected.

    Raises:
        DataError: The file does not exist, or most of it is not in the format of its name.
    """
    files = [existing_file(file) for file in matching_files(path)]
    layout = file_format(reading.format, files[0])
    options: dict[str, Any] = {}
    for name in ("format", "delimiter", "encoding", "header"):
        value = getattr(reading, name)
        if value not in (None, "utf-8"):
            options[name] = value
    notes: tuple[str, ...] = ()
    shown = None
    if layout.is_text and reading.encoding is None:
        texts: list[Path] = []
        for file in files:
            texts += layout.files(file)
        shown = shown_encoding(texts)
    if shown is not None:
        options["encoding"], reason = shown
        notes = (reason,)
    # A .txt file is read as texts, but many tables are called so, too.
    if layout.has_documents and reading.format is None:
        table = _table_in_text(files[0], options)
        if table is not None:
            layout = FORMATS[table["format"]]
            options |= table
            notes = (*notes, f"its lines are rows of a table, so the format is {layout.name}")
    # Only tables with quotes have a delimiter and a header to detect.
    if not layout.quoted:
        sample = _read(path, layout, options)
        if isinstance(layout, ExcelFormat) and _is_row_of_values(sample):
            first = "the first row of the table is a row like the others, so it does not name the columns"
            raise DataError(f"{path}: {first}. Insert a row of names above it, such as text and label")
    elif reading.header is None:
        sample = _detect_header(path, layout, options)
    else:
        sample = _detect_delimiter(path, layout, options)
    if layout.has_documents:
        sample = _detect_documents(sample)
    if sample.count == 0 and not sample.faults:
        header = ". Choose a file that is not empty"
        if sample.format.delimiter is not None:
            header = f", only a header with {', '.join(map(repr, sample.columns))}. Write rows below it"
        raise DataError(f"{path}: it has no rows{header}")
    if len(sample.faults) >= sample.count:
        advice = _advice(sample.faults[0], path)
        raise DataError(f"{path}: cannot be read as {sample.format.name} ({sample.faults[0]}). {advice}")
    shape = _wrong_shape(sample, files[0])
    if shape is not None:
        raise DataError(f"{path}: {shape}")
    # The reader decodes wrong bytes to halves of surrogate pairs, so that it can report their place.
    for row in sample.rows:
        for name, value in row.items():
            if not is_encodable(name) or _UNKNOWN_BYTE.search(str(value)):
                raise DataError(
                    f"{path}: column {name!r} has bytes that are not {options.get('encoding', 'utf-8')}. "
                    f"Name the file's encoding with --encoding, {ENCODING_EXAMPLE}"
                )
    return replace(sample, notes=(*notes, *sample.notes), has_stated_format=reading.format is not None)


def _wrong_shape(sample: FileSample, file: Path) -> str | None:
    """Returns why the rows of a file are not what their author means, and what to do, or None."""
    if "json" in sample.format.name and sample.count == 1:
        first: Mapping[str, Any] = sample.rows[0] if sample.rows else {}
        if not any(isinstance(value, str) for value in first.values()):
            names = first_few([repr(name) for name in first], 5)
            return f"one JSON object with {names}, and no rows. Write the list of the rows into a file of its own"
    if not sample.format.quoted:
        return None
    if sample.columns[:1] and sample.columns[0].startswith("# "):
        return "its first line is a comment. Remove the lines above the names of the columns"
    for number, name in enumerate(sample.columns[1:], start=2):
        if not name.strip() and any(row.get(name) not in (None, "") for row in sample.rows):
            return f"column {number} has no name in the first line. Name it, or remove the lines above the names"
    # A header without a delimiter makes a single column of each line.
    for mark in _DELIMITERS:
        counts = {str(row.get(sample.columns[0])).count(mark) for row in sample.rows}
        if len(sample.columns) == 1 and len(counts) == 1 and 0 not in counts and sample.count >= _FEWEST_LINES:
            return f"its first line names one column, but each line below has a {mark!r}. Name all columns in that line"
    with open_text(file, encoding=sample.options.get("encoding"), newline="\n") as opened:
        start = opened.read(_START)
    for format in (FORMATS["fasttext"], FORMATS["conll"]):
        if format.matches(start, None) and (format.name == "fasttext" or "\n\n" in start):
            return f"lines of {format.name}. Add {argument('format', format.name)}, or name the file .txt"
    return None


def _advice(fault: str, path: Path) -> str:
    """Returns what to do about a file of which most rows have faults such as the first."""
    if "expected an object" not in fault:
        return "Name its format with --format"
    if ", not [" in fault:
        program = "'.[] | {text: .[0], label: .[1]}'"
        return f"Name the values of each list, for example with `jq -c {program} {path.name} > rows.jsonl`"
    return f"Write a text on each line of a .txt file, for example with `jq -r '.[]' {path.name} > texts.txt`"


def _table_in_text(path: Path, options: Options) -> dict[str, Any] | None:
    """Returns the options of a table if all lines of a text file have tabs, or the first one has a usual name."""
    with open_text(path, encoding=options.get("encoding"), newline="\n") as file:
        first_lines = islice(RowLines(file, path, limits.LARGEST_ROW), _FIRST_LINES)
        lines = [line.rstrip("\r\n") for line in first_lines if line.strip()]
    if len(lines) < 2:
        return None
    for mark in _DELIMITERS:
        counts = {line.count(mark) for line in lines}
        names = {cell.strip(' "').lower() for cell in lines[0].split(mark)}
        if 0 in counts:
            continue
        # Sentences have commas and semicolons, too, so these need a header. They rarely have equally many tabs.
        if mark == "\t" and (len(counts) == 1 or names.intersection(LABEL_NAMES)):
            return {"format": "tsv"}
        if mark != "\t" and names.intersection(LABEL_NAMES):
            return {"format": "csv", "delimiter": mark}
    return None


def _detect_documents(sample: FileSample) -> FileSample:
    """Decides whether documents are separated by blank lines, or are lines."""
    if any(not str(row[TEXT]).strip() for row in sample.rows):
        return replace(sample, notes=("blank lines separate documents",))
    note = "no line is blank, so each line is a document"
    return replace(sample, options={**sample.options, "document": "line"}, notes=(note,))


def _detect_header(path: Path, layout: Format, options: Options) -> FileSample:
    """Reads the first line as the header, or as a row if its class occurs again."""
    sample = _detect_delimiter(path, layout, options)
    names = _names_in_rows(sample.rows)
    # pandas counts columns without names. An index before them has the empty name.
    numbers = [name.strip() for name in names if name.strip()]
    if len(numbers) > 1:
        counted_from_0 = [str(number) for number in range(len(numbers))]
        counted_from_1 = [str(number + 1) for number in range(len(numbers))]
        if numbers in (counted_from_0, counted_from_1):
            return sample
    if _is_row_of_values(sample):
        sample = _detect_delimiter(path, layout, {**options, "header": False})
        return replace(sample, notes=(*sample.notes, _NO_HEADER))
    for name in names:
        if name.strip().isdecimal() or len(name.split()) > _LONGEST_HEADER:
            shown = shortened(name)
            note = f"the name {shown} in the first line looks like a value. If there is no header, add --no-header"
            return replace(sample, notes=(*sample.notes, note))
    return sample


def _names_in_rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the names of the columns of all rows, in the order in which they first occur."""
    names: dict[str, None] = {}
    for row in rows:
        names |= dict.fromkeys(row)
    return list(names)


def _is_row_of_values(sample: FileSample) -> bool:
    """Returns True if a class among the column names occurs again in its column."""
    for name in _names_in_rows(sample.rows):
        if not name.strip():
            continue
        count = sum(row.get(name) == name for row in sample.rows)
        if count > 1 and count * _MOST_ROWS_PER_CLASS > len(sample.rows):
            return True
    return False


def _detect_delimiter(path: Path, layout: Format, options: Options) -> FileSample:
    """Reads a table by the delimiter with several columns and the fewest broken rows.

    The file is read with each delimiter in turn, until one of them leaves no row broken.
    """
    best: FileSample | None = None
    problem: DataError | None = None
    for candidate, changes, notes in _table_layouts(layout, options):
        try:
            sample = replace(_read(path, candidate, {**options, **changes}), notes=notes)
        except DataError as error:  # the header has a name twice, or a quote is never closed
            problem = error if problem is None else problem
            continue
        # Another delimiter than the usual one must give several columns.
        if notes and sample.cost[0]:
            continue
        if best is None or sample.cost < best.cost:
            best = sample
        if best.cost == (False, 0):
            return best
    if best is None or (problem is not None and best.cost[0]):
        raise DataError(str(problem))
    return best


def _table_layouts(layout: Format, options: Options) -> Iterator[tuple[Format, Options, tuple[str, ...]]]:
    """Yields formats with the options to change and the reasons, likeliest first."""
    usual = layout.delimiter
    marks = list(dict.fromkeys((usual, *_DELIMITERS)))
    if "delimiter" in options:
        marks = [options["delimiter"]]
    for mark in marks:
        changes: Options = {}
        notes: tuple[str, ...] = ()
        if mark != usual and "delimiter" not in options:
            changes = {"delimiter": mark}
            notes = (f"the delimiter is {mark!r}",)
        yield layout, changes, notes
        if mark == "\t" and "format" not in options and "delimiter" not in options:
            plain = "quotes are ordinary characters (rows could not be read with csv's rules)"
            yield FORMATS["tsv/plain"], {"format": "tsv/plain"}, (*notes, plain)


def _read(path: Path, layout: Format, options: Options) -> FileSample:
    """Reads the file and keeps a uniform sample of ``_MOST_ROWS`` rows, in order.

    It is a reservoir sample (Vitter 1985, algorithm R), which needs neither the number of rows nor all rows in memory.
    """
    chance = random.Random(0)
    faults: list[str] = []
    kept: list[tuple[int, Mapping[str, Any]]] = []
    count = 0
    notes = dict[str, None]()
    for record in _records(path, layout, options, notes):
        if record.issue is not None:
            if record.issue.severity != "skip":
                place = f"line {record.line}"
                if record.file is not None:
                    place = f"{record.file}, {place}"
                faults.append(f"{place}: {record.issue.text}")
            continue
        if count < _MOST_ROWS:
            kept.append((count, record.cells))
        else:
            # The row with this index is kept with probability _MOST_ROWS / (count + 1), in place of any of the others.
            index = chance.randint(0, count)
            if index < _MOST_ROWS:
                kept[index] = (count, record.cells)
        count += 1
    rows = [cells for _, cells in sorted(kept, key=lambda row: row[0])]
    columns = _names_in_rows(rows)
    if not rows:
        columns = column_names(matching_files(path)[0], ReadOptions(**{**options, "format": layout.name}))
    return FileSample(
        path=path,
        format=layout,
        columns=tuple(columns),
        rows=rows,
        count=count,
        faults=faults,
        options=options,
        notes=tuple(notes),
    )


def _records(path: Path, layout: Format, options: Options, notes: dict[str, None]) -> Iterator[Record]:
    """Yields the rows of all files of a pattern, and adds the notes on their places."""
    for file in matching_files(path):
        with layout.open(file, ReadOptions(**{**options, "format": layout.name})) as batches:
            notes |= dict.fromkeys(batches.notes)
            for batch in batches.batches:
                yield from map(batch.record, range(len(batch)))
