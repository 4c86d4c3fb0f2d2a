"""A value that cannot be used has the same message wherever its row comes from, apart from the place that is named."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pandas as pd
import pytest
from datasets import Dataset
from fastapi import HTTPException
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bert_tasks import evaluate, predict
from bert_tasks.data.batch import Batch, Record
from bert_tasks.data.columns import Column
from bert_tasks.data.conversion import Conversion
from bert_tasks.errors import DataError
from bert_tasks.model.task_model import TaskModel
from bert_tasks.serving.limits import Limits
from bert_tasks.serving.requests import BodyReader
from support.task_examples import EXAMPLES

ModelOf = Callable[[str], TaskModel]

NO_TEXTS: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-9, 9),
    st.floats(allow_nan=False),
    st.just([]),
    st.just({}),
    st.just("\ud800"),
)
NO_WORDS: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-9, 9),
    st.lists(NO_TEXTS, min_size=1, max_size=3),
    st.tuples(st.just("word"), NO_TEXTS).map(list),
)


def message_of(read: Callable[[], object]) -> str:
    with pytest.raises(DataError) as error:
        read()
    return str(error.value)


def request_message(model: TaskModel, row: Mapping[str, Any]) -> str:
    with pytest.raises(HTTPException) as error:
        BodyReader(model.input_columns, Limits(), {}).rows({"inputs": [row]})
    (fault,) = cast("list[dict[str, str]]", error.value.detail)  # starlette declares a text
    return fault["msg"]


@pytest.mark.parametrize(
    ("case", "column", "values"),
    [
        ("single", "text", NO_TEXTS),
        ("pair", "text_pair", NO_TEXTS),
        ("span", "context", NO_TEXTS),
        ("token", "words", NO_WORDS),
    ],
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=8, deadline=None)
@given(data=st.data())
def test_a_bad_value_has_one_message(
    case: str, column: str, values: st.SearchStrategy[Any], data: st.DataObject, model_of: ModelOf, tmp_path: Path
) -> None:
    model, value = model_of(case), data.draw(values)
    inputs = [input_column for input_column in model.task.columns if not input_column.is_label]
    # With another text, a line of JSON whose only list has objects is a row, and not a list of rows.
    row = {input_column.name: "a text" for input_column in inputs if input_column.required}
    row |= {column: value, "note": "a text"}
    (issue,) = Conversion(inputs).convert(Batch.of([Record(1, row)])).issues
    assert issue.column == column
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", "utf-8")
    messages = [
        message_of(lambda: predict(model, tmp_path / "rows.jsonl")),
        message_of(lambda: predict(model, [row])),
        message_of(lambda: model.predict([row])),
    ]
    assert messages[2] == f"row 0: {issue.text}"
    for message in messages[:2]:
        assert message.splitlines()[1].endswith(f":1: {issue.text}")
    assert request_message(model, row) == issue.message


@pytest.mark.parametrize("several", [False, True])
def test_a_fault_that_only_the_conversion_finds_names_its_place(model_of: ModelOf, several: bool) -> None:
    good = {"context": "a b", "choices": ["a", "b"]}
    bad = {"context": "a b", "choices": ["a"]}
    content = {"inputs": [good, bad]} if several else bad
    with pytest.raises(HTTPException) as error:
        BodyReader(model_of("choice").input_columns, Limits(), {}).rows(content)
    location = ["body", *(["inputs", 1] if several else []), "choices"]
    assert error.value.detail == [{"loc": location, "msg": "1 choice. Give at least 2.", "type": "value_error"}]


def test_tables_have_the_messages_of_files(model_of: ModelOf) -> None:
    model, rows = model_of("single"), [{"text": 1}, {"text": 2}]
    said = message_of(lambda: predict(model, rows))
    assert "not a text in column 'text': 1. Write it in quotes." in said
    assert message_of(lambda: predict(model, pd.DataFrame(rows))) == said
    assert message_of(lambda: predict(model, Dataset.from_list(rows))) == said


@pytest.mark.parametrize("use", [evaluate, predict])
def test_columns_that_rows_in_memory_lack_are_named(use: Callable[..., object], model_of: ModelOf) -> None:
    example = EXAMPLES["single"]
    rows = [dict(row) for row in example.rows]
    for columns, said in (
        ({"text": "Text"}, r"rows: no column 'Text', did you mean 'text'\?\n  the columns are: "),
        ({"txt": "text"}, r"the task reads the columns text(, label)?, not 'txt', did you mean 'text'\?"),
    ):
        assert re.match(said, message_of(lambda columns=columns: use(model_of("single"), rows, columns=columns)))


def test_a_stated_label_column_matters_where_labels_are_read(model_of: ModelOf) -> None:
    rows = [dict(row) for row in EXAMPLES["single"].rows]
    assert len(predict(model_of("single"), rows, columns={"label": "stars"})) == len(rows)
    assert message_of(lambda: evaluate(model_of("single"), rows, columns={"label": "stars"})).startswith(
        "rows: no column 'stars'\n  the columns are: "
    )


def test_a_conversion_leaves_the_row_as_it_is() -> None:
    row = {"text": "a b", "words": None}
    columns = (Column(name="words", kind="words"), Column(name="text", kind="text", required=False))
    converted = Conversion(columns).convert(Batch.of([Record(1, row)]))
    assert (converted.row(0), converted.issues) == ({"words": ["a", "b"], "text": "a b"}, [])
    assert row == {"text": "a b", "words": None}
