"""Messages speak the language of their reader: arguments in Python, options at the command line."""

import pytest

from bert_tasks.errors import BertTasksError, DataError, argument, messages_with_options


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


def test_a_notebook_shows_the_message_alone() -> None:
    error = DataError("train: no column 'lable'\n  the columns are: 'label'")
    assert error._render_traceback_() == ["DataError: train: no column 'lable'", "  the columns are: 'label'"]


def test_a_cell_with_an_error_shows_its_message_alone(capsys: pytest.CaptureFixture[str]) -> None:
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell()
    cell = "from bert_tasks import evaluate\nevaluate('no-such-folder/x/y', [{'text': 'a'}])"
    result = shell.run_cell(cell)
    assert isinstance(result.error_in_exec, BertTasksError)
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1].startswith("CheckpointError: no-such-folder/x/y: no such folder")
    assert not any("Traceback" in line or "bert_tasks/" in line for line in shown)
    assert shell.run_cell("1 / 0").error_in_exec is not None
    assert "Traceback" in capsys.readouterr().out  # as every other error
