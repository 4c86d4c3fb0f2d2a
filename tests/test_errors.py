"""Messages speak the language of their reader: arguments in Python, options at the command line."""

import pytest

from bert_tasks.errors import argument, messages_with_options


@pytest.mark.parametrize(
    ("name", "value", "python", "option"),
    [
        ("overwrite", True, "overwrite=True", "--overwrite"),
        ("on_error", "skip", "on_error='skip'", "--on-error skip"),
        ("delimiter", ";", "delimiter=';'", "--delimiter ';'"),
        ("columns", {"text": "NAME"}, "columns={'text': 'NAME'}", "--column text=NAME"),
    ],
)
def test_an_argument_is_spelt_for_its_reader(name: str, value: object, python: str, option: str) -> None:
    with messages_with_options():
        assert argument(name, value) == option
    assert argument(name, value) == python
