"""The prediction files of SQuAD's official scripts, which hold the answers by the ids of the questions."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bert_tasks.data.columns import Row
from bert_tasks.errors import DataError
from bert_tasks.outputs.files import FileFormat
from bert_tasks.outputs.span_search import Span


def check_ids(output: Any, extension: str, rows: Iterable[Row]) -> tuple[str, ...]:
    """Checks that the official files have one answer for each id.

    Raises:
        DataError: Two rows have the same id.
    """
    _file_ids(row.get("id") for row in rows)
    return ()


def render_answers(output: Any, extension: str, predictions: Sequence[Any], rows: Sequence[Row]) -> Mapping[str, str]:
    """Returns answers by id, ``nbest.json`` and, for 2.0 only, ``null_odds.json``.

    These are the official files. Rows without an id have their number, from 0.

    Args:
        output: The output with its setting ``version_2_with_negative``.
        extension: The extension of the file.
        predictions: Predictions of ``Answer.decode``.
        rows: As many rows.

    Raises:
        DataError: Two rows have the same id.
    """
    names = _file_ids(prediction.id for prediction in predictions)
    answers: dict[str, str] = {}
    n_best: dict[str, list[dict[str, Any]]] = {}
    null_odds: dict[str, float | None] = {}
    for name, prediction in zip(names, predictions, strict=True):
        answers[name] = prediction.answer
        n_best[name] = [_official(span) for span in prediction.n_best]
        null_odds[name] = prediction.null_odds
    files: dict[str, Mapping[str, Any]] = {"": answers, "nbest.json": n_best}
    if output.version_2_with_negative:
        files["null_odds.json"] = null_odds
    texts: dict[str, str] = {}
    for suffix, content in files.items():
        texts[suffix] = json.dumps(content, indent=4) + "\n"  # the indent of the official scripts
    return texts


def _official(span: Span) -> dict[str, Any]:
    """Returns a span with the official names of its values."""
    return {
        "text": span.text,
        "probability": span.score,
        "start_logit": span.start_logit,
        "end_logit": span.end_logit,
    }


def _file_ids(ids: Iterable[str | None]) -> list[str]:
    """Returns the ids of rows in the official files, or their numbers without ids."""
    names: list[str] = []
    for number, row_id in enumerate(ids):
        if row_id is None:
            row_id = str(number)
        names.append(row_id)
    # A row's number can be the id of another row.
    for name, count in Counter(names).most_common(1):
        if count > 1:
            raise DataError(
                f"id {name!r} appears {count} times (a row without an id has its number, from 0), but a .json file has "
                "one answer for each id. Change the ids, or write .jsonl, which has a line for each row"
            )
    return names


SQUAD_FILES = FileFormat(render=render_answers, check=check_ids)
