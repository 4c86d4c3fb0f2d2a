"""Help on terminals of any width: no word is cut, names of options least of all."""

import ast
import re
from typing import Any

import pytest
import typer

from bert_tasks.cli import app as module
from bert_tasks.cli import main as main  # adds the commands
from support.sources import package_sources


@pytest.mark.parametrize("width", [20, 79, 80, 200])
def test_help_shows_every_word(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets, too. Long texts are cut only in the list of commands, and only on a narrow terminal."""
    is_wide = width >= module.BOXES
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(module.app, "rich_markup_mode", "markdown" if is_wide else None)
    group: Any = typer.main.get_command(module.app)
    assert "[search]" in group.commands["search"].help
    for name, command in [("", group), *group.commands.items()]:
        group.main([*name.split(), "--help"], prog_name="bert-tasks", standalone_mode=False)
        page = capsys.readouterr().out
        assert ("╭─ Options" in page) == is_wide
        assert "\N{HORIZONTAL ELLIPSIS}" not in page
        assert "<bool>" not in page  # a flag takes no value
        options = {option for parameter in command.params for option in parameter.opts + parameter.secondary_opts}
        words = set(re.split(r"[\s,/|]+", page))
        assert {option for option in options if option.startswith("-")} | set(getattr(command, "commands", ())) <= words
        shown = re.sub(r"[│`\s]+", "", page)
        texts = [command.help, *(getattr(parameter, "help", None) or "" for parameter in command.params)]
        assert [word for word in " ".join(texts).replace("`", "").split() if word not in shown] == []


def test_what_commands_share_is_written_once() -> None:
    """An option of several commands has one declaration, so that they cannot come to differ."""
    texts: list[str] = []
    for source in package_sources():
        if source.name.startswith("cli"):
            for node in ast.walk(source.tree):
                is_declared = isinstance(node, ast.Call) and ast.unparse(node.func) in {
                    "typer.Option",
                    "typer.Argument",
                }
                found = [keyword.value for keyword in node.keywords if keyword.arg == "help"] if is_declared else []
                texts += [text.value for text in found if isinstance(text, ast.Constant)]
    assert len(texts) > 50
    assert sorted(text for text in set(texts) if texts.count(text) > 1) == []
