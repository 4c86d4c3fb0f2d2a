"""Predicted tags in the files of CoNLL and CoNLL-U.

Owns the form in which tags are compared, which is IOB2. Metrics compare the tags that a file holds, so conlleval finds
the same numbers in the file.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from bert_tasks.data.columns import RECORD, Row
from bert_tasks.data.conll import label_scheme, to_iob2
from bert_tasks.data.issues import shortened
from bert_tasks.errors import DataError
from bert_tasks.outputs.files import FileFormat
from bert_tasks.outputs.tag_prediction import TokenPrediction


def compared_tags(tags: Sequence[str], labels: Sequence[str]) -> list[str]:
    """Returns the tags of a row in IOB2, or unchanged if the model's labels are raw."""
    if label_scheme(labels) == "raw":
        return list(tags)
    return to_iob2(tags)


def compared_predictions(tags: Sequence[str], labels: Sequence[str]) -> list[str]:
    """Returns predicted tags in IOB2. Tags of an IOB2 model keep their errors."""
    # conlleval reads an I- that continues nothing as the start of an entity. A conversion would hide that the model
    # predicted one.
    scheme = label_scheme(labels)
    has_plain_prefixes = all(label == "O" or label.startswith(("B-", "I-")) for label in labels)
    if scheme == "raw" or (has_plain_prefixes and scheme == "IOB2"):
        return list(tags)
    return to_iob2(tags)


def check_columns(output: Any, extension: str, rows: Iterable[Row]) -> tuple[str, ...]:
    """Counts words that the columns of a file cannot hold as they are. Changed tags would be other classes.

    Raises:
        DataError: A label, or a tag of the rows, has white space, which would split it into columns.
    """
    tags = dict.fromkeys(output.labels)
    count = 0
    changed = Counter[str]()
    for row in rows:
        if row.get("tags") is not None:
            tags |= dict.fromkeys(row["tags"])
        count += len(row["words"])
        changed.update(word for word in row["words"] if _column(word) != word)
    for tag in tags:
        if _column(tag) != tag:
            raise DataError(
                f"the tag {tag!r} has white space, which separates the columns of {extension}. Write .jsonl"
            )
    if not changed:
        return ()
    example = next(iter(changed))
    return (
        f"{changed.total()} of {count} words have white space or are empty, which columns cannot hold. They have "
        f"_ in {extension} ({_column(example)} for {shortened(example)}, ...). Write .jsonl to keep the words",
    )


def render_conll(
    output: Any, extension: str, predictions: Sequence[TokenPrediction], rows: Sequence[Row]
) -> Mapping[str, str]:
    """Returns the columns of conlleval, with entities in IOB2.

    They are word, its tag if all rows have tags, and predicted tag. A blank line ends each row. White space within a
    word, which would separate columns, becomes ``_``, as does an empty word. ``check_columns`` says how many.
    """
    with_tags = all(row.get("tags") is not None for row in rows)
    lines: list[str] = []
    for prediction, row in zip(predictions, rows, strict=True):
        columns = [[_column(word) for word in prediction.words]]
        if with_tags:
            columns.append(compared_tags(row["tags"], output.labels))
        columns.append(compared_predictions(prediction.tags, output.labels))
        for cells in zip(*columns, strict=True):
            lines.append(" ".join(cells))
        lines.append("")
    return {"": "".join(f"{line}\n" for line in lines)}


def render_conllu(
    output: Any, extension: str, predictions: Sequence[TokenPrediction], rows: Sequence[Row]
) -> Mapping[str, str]:
    """Returns the columns of CoNLL-U, with the predicted tag as ``UPOS`` and _ in other columns.

    The comments of a row stand above its words. Words are changed as in ``render_conll``.
    """
    lines: list[str] = []
    for prediction, row in zip(predictions, rows, strict=True):
        lines += _comments(row)
        for number, (word, tag) in enumerate(zip(prediction.words, prediction.tags, strict=True), start=1):
            # ID, FORM, LEMMA and UPOS, then six columns that the model does not predict.
            lines.append("\t".join([str(number), _column(word), "_", tag, *["_"] * 6]))
        lines.append("")
    return {"": "".join(f"{line}\n" for line in lines)}


def _comments(row: Row) -> list[str]:
    """Returns the comments that CoNLL-U's reader found. Rows in memory may have anything in a column of this name."""
    given = row.get(RECORD, {})
    if isinstance(given, str):
        given = json.loads(given)
    comments = given.get("comments")
    if not isinstance(comments, list):
        return []
    kept: list[str] = []
    for text in comments:
        # A comment that spans lines, or has no #, would be read as words.
        if isinstance(text, str) and re.fullmatch(r"#[^\r\n]*", text):
            kept.append(text)
    return kept


def _column(word: str) -> str:
    """Returns a word as one column of a line, with _ for white space, and for an empty word."""
    return re.sub(r"\s+|^$", "_", word)


_CONLL = FileFormat(render=render_conll, check=check_columns, with_labels=True)
_CONLLU = FileFormat(render=render_conllu, check=check_columns, with_labels=True, with_other_columns=True)
# The formats of ``Tags``, by the extension of a file.
TAG_FILES: Mapping[str, FileFormat] = MappingProxyType({".conll": _CONLL, ".conllu": _CONLLU, ".txt": _CONLL})
