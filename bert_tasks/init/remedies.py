"""What tables are that no task fits as they are, with the lines that fix them.

Each function returns a message, or None if the rows are not of its kind.
"""

import csv
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_tasks.data.formats import FORMATS, Format
from bert_tasks.data.problems import RowError, counted, first_few
from bert_tasks.data.spans import parse_spans, word_tags
from bert_tasks.data.words import word_spans
from bert_tasks.errors import argument

Rows = Sequence[Mapping[str, Any]]

_WORD_NAMES = ("word", "words", "token", "tokens")
_TAG_NAMES = ("tag", "tags", "label", "labels", "ner_tag", "ner_tags")
_TRIPLETS = (("anchor", "positive", "negative"), ("query", "positive", "negative"), ("query", "pos", "neg"))
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
_NUMBER = re.compile(r"[+-]?\d+(?:,\d+)?")
_LOOKED_AT = 200  # rows
_DELIMITERS = (",", ";", "\t", "|")
_MOST_ROWS = 0.9  # share of the rows that have the same number of cells


def remedy(rows: Rows, path: Path, reading: str) -> str | None:
    """Returns what the rows of a file are and how to fix them, or None for rows of an unknown kind.

    Args:
        rows: A sample of the rows.
        path: The file.
        reading: A call of pandas that reads the file.
    """
    rows = rows[:_LOOKED_AT]
    for kind in (words_remedy, _triplets, _decimal_commas):
        message = kind(rows, reading)
        if message is not None:
            return message
    return _unusable_spans(rows, path.name)


def pandas_call(path: Path, layout: Format, options: Mapping[str, Any]) -> str:
    """Returns the call of pandas that reads a file as the options say."""
    name = json.dumps(path.name)
    if layout.name == "parquet":
        return f"pandas.read_parquet({name})"
    if layout.delimiter is None:
        is_excel = layout.name.startswith("xlsx")
        return f"pandas.read_excel({name})" if is_excel else f"pandas.read_json({name}, lines=True)"
    delimiter = options.get("delimiter", layout.delimiter)
    encoding = options.get("encoding", "utf-8")
    return f"pandas.read_csv({name}, sep={delimiter!r}, encoding={encoding!r}, keep_default_na=False)"


def doubtful_table(start: str, name: str, delimiter: str) -> str | None:
    """Returns why a file with a single named column is no list of texts, or None.

    Args:
        start: The first characters of the file.
        name: Name of the file.
        delimiter: The usual delimiter of such a file.
    """
    lines = start.splitlines()[:_LOOKED_AT]
    if start.lstrip().lower().startswith(("<!doctype html", "<html")):
        return "a web page. Download the file itself, not the page that shows it"
    if start.lstrip().startswith("__label__"):
        return f"lines of fastText. Add {argument('format', 'fasttext')}, or name the file .txt"
    if "" in map(str.strip, lines) and FORMATS["conll"].matches(start, None):
        return f"a word on each line, as in CoNLL files. Add {argument('format', 'conll')}"
    filled = [(number, line) for number, line in enumerate(lines, start=1) if line.strip() and line[0] != "#"]
    for mark in dict.fromkeys((delimiter, *_DELIMITERS)):
        message = _title_lines(filled, name, mark)
        if message is not None:
            return message
    return None


def _title_lines(lines: Sequence[tuple[int, str]], name: str, delimiter: str) -> str | None:
    """Returns why the first line does not name the columns that a delimiter gives to almost all lines, or None."""
    rows = [next(csv.reader([line], delimiter=delimiter), []) for _, line in lines]
    widths = [len(row) for row in rows]
    width = max(set(widths), key=widths.count, default=0)
    full = [len(row) == width and all(cell.strip() for cell in row) for row in rows]
    if width < 2 or widths.count(width) < _MOST_ROWS * len(rows) or not any(full):
        return None
    first = full.index(True)
    if first == 0 and lines[0][0] == 1:
        return f"its {width} columns cannot be read, because quoted cells have quotes inside. Write these twice"
    if first > 0 and widths[first - 1] not in (1, width):
        hint = f"Put a cell that holds {delimiter!r} in double quotes"
        return f"its header has {counted(widths[first - 1], 'column')}, but most rows have {width} cells. {hint}"
    number = lines[first][0]
    advice = f"Remove the lines above, for example with `tail -n +{number} {name} > table.csv`"
    return f"its first line is no header of the {width} columns below, which begin in line {number}. {advice}"


def object_remedy(rows: Rows, path: Path) -> str | None:
    """Returns what a file with one JSON object is, or None if the object may be a row."""
    if len(rows) != 1 or any(isinstance(value, str) for value in rows[0].values()):
        return None
    (row,) = rows
    names = first_few(map(repr, row), 5)
    lists = {name: value for name, value in row.items() if isinstance(value, list)}
    lengths = set(map(len, lists.values()))
    has_objects = any(isinstance(value[0], dict) for value in lists.values() if value)
    if len(lists) == len(row) > 1 and len(lengths) == 1 and not has_objects:
        code = _rewritten(path.name, "[dict(zip(d, row)) for row in zip(*d.values())]")
        return f'one object with a list for each of the columns {names}. Write a list of rows:\n  python -c "{code}"'
    name = next(iter(lists), next(iter(row), ""))
    code = _rewritten(path.name, f"d['{name}']")
    return (
        f"one JSON object with {names}, and no rows. If {name!r} is the list of the rows, write it to a file of its "
        f'own:\n  python -c "{code}"'
    )


def _rewritten(name: str, rows: str) -> str:
    """Returns the code that writes rows of the object ``d`` in a file of JSON to another."""
    read = f"import json, pathlib; d = json.loads(pathlib.Path('{name}').read_text('utf-8'))"
    return f"{read}; pathlib.Path('rows.json').write_text(json.dumps({rows}))"


def _named(rows: Rows, names: Sequence[str]) -> str | None:
    """Returns the first column with one of the names, in any case."""
    return next((column for column in rows[0] if column.strip().lower() in names), None) if rows else None


def words_remedy(rows: Rows, reading: str) -> str | None:
    """Returns the message for rows of one word each, with a column that names the sentence."""
    word, tag = _named(rows, _WORD_NAMES), _named(rows, _TAG_NAMES)
    if word is None or tag is None or any(len(str(row.get(word)).split()) > 1 for row in rows):
        return None
    sentence = next((column for column in rows[0] if column.strip().lower().startswith("sent")), None)
    if sentence is None or any(isinstance(row.get(word), list) for row in rows):
        return None
    return (
        f"each row has one word of a sentence, and {sentence!r} names the sentence. Write a row for each sentence:\n"
        "  import pandas\n"
        f"  rows = {reading}\n"
        f'  sentence = rows["{sentence}"].replace("", None).ffill()\n'
        f'  rows.groupby(sentence, sort=False)[["{word}", "{tag}"]].agg(list).to_json("sentences.jsonl", '
        'orient="records", lines=True)\n'
        f"Then run `bert-tasks init sentences.jsonl --text {word} --label {tag}`"
    )


def _triplets(rows: Rows, reading: str) -> str | None:
    present = {column.strip().lower() for row in rows for column in row}
    names = next((names for names in _TRIPLETS if present >= set(names)), None)
    if names is None:
        return None
    anchor, positive, negative = names
    return (
        f"the columns {anchor}, {positive} and {negative} are triplets for sentence embeddings. bert_tasks has no loss "
        "for them, sentence-transformers has. To classify pairs of texts instead, write each triplet as two pairs:\n"
        "  import pandas\n"
        f"  rows = {reading}\n"
        f'  pairs = [rows[["{anchor}", name]].set_axis(["text", "text_pair"], axis=1).assign(label=label)\n'
        f'           for name, label in (("{positive}", "same"), ("{negative}", "other"))]\n'
        '  pandas.concat(pairs).explode("text_pair").to_csv("pairs.csv", index=False)'
    )


def _decimal_commas(rows: Rows, reading: str) -> str | None:
    for column in rows[0] if rows else ():
        cells = [row[column] for row in rows if isinstance(row.get(column), str) and row[column].strip()]
        commas = [cell for cell in cells if _DECIMAL_COMMA.fullmatch(cell.strip())]
        if commas and all(_NUMBER.fullmatch(cell.strip()) for cell in cells):
            return (
                f"the column {column!r} has numbers with a decimal comma, such as {commas[0]!r}. Write a decimal "
                "point:\n"
                "  import pandas\n"
                f"  {reading[:-1]}, decimal=',').to_csv('points.csv', index=False)"
            )
    return None


def _unusable_spans(rows: Rows, name: str) -> str | None:
    """Returns the reason why most spans of a column cannot be tags of words, such as spans inside others."""
    for column in rows[0] if rows else ():
        spans = [row for row in rows if isinstance(row.get(column), list | dict) and row[column]]
        for text in rows[0]:
            errors = [error for row in spans if (error := _span_error(row[column], row.get(text))) is not None]
            if not errors or len(errors) * 2 < len(spans):
                continue
            message = f"the column {column!r} has spans that cannot be tags of the words in {text!r}: {errors[0]}"
            if "share a word" not in str(errors[0]):
                return message
            first, last = _ends(spans[0][column])
            load = f'Path("{name}").read_text("utf-8")'
            loaded = f"[json.loads(line) for line in {load}.splitlines()]"
            if name.endswith(".json"):
                loaded = f"json.loads({load})"
            inside = f"o{first} <= s{first} and s{last} <= o{last} and o != s"
            return (
                f"{message} Nested entities cannot be learned together. To keep the outer ones:\n"
                "  import json\n"
                "  from pathlib import Path\n"
                f"  rows = {loaded}\n"
                "  for row in rows:\n"
                f'      spans = row["{column}"]\n'
                f'      row["{column}"] = [s for s in spans if not any({inside} for o in spans)]\n'
                '  Path("outer.jsonl").write_text("\\n".join(map(json.dumps, rows)))'
            )
    return None


def _ends(spans: Any) -> tuple[str, str]:
    """Returns the code for start and end of a span, which is a list or an object."""
    first = spans[0] if isinstance(spans, list) else None
    if not isinstance(first, Mapping):
        return "[0]", "[1]"
    return ('["start_offset"]', '["end_offset"]') if "start_offset" in first else ('["start"]', '["end"]')


def _span_error(value: object, text: object) -> RowError | None:
    """Returns the error of spans of a text, or None. Values that are no spans have none."""
    if not isinstance(text, str):
        return None
    try:
        spans = parse_spans(value)
    except RowError:
        return None
    try:
        word_tags(spans, word_spans(text), text)
    except RowError as error:
        return error
    return None
