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
    assert module.app.rich_markup_mode in ("markdown", None)  # "rich" swallows [brackets]
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
        assert not re.search(r"<\w+|[<=]=?x", page)  # neither types nor ranges: metavars name the units
        options = {option for parameter in command.params for option in parameter.opts + parameter.secondary_opts}
        words = set(re.split(r"[\s,/|]+", page))
        assert {option for option in options if option.startswith("-")} | set(getattr(command, "commands", ())) <= words
        shown = re.sub(r"[│`\s]+", "", page)
        texts = [command.help, *(getattr(parameter, "help", None) or "" for parameter in command.params)]
        assert [word for word in " ".join(texts).replace("`", "").split() if word not in shown] == []


def test_commands_are_listed_in_groups(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(module.app, "rich_markup_mode", "markdown")
    group: Any = typer.main.get_command(module.app)
    group.main(["--help"], prog_name="bert-tasks", standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split()[1] for line in lines if re.match(r"╭─ (?!Options)|│ [a-z]", line)]
    assert shown == [word for panel, names in module.GROUPS.items() for word in (panel, *names)]
    assert set(group.commands) == {name for names in module.GROUPS.values() for name in names}


READING = {"format", "column", "delimiter", "encoding", "header", "label_separator", "split_column", "document"}
DEVICES = {"dtype", "dist_timeout"}


def test_options_have_short_helps_units_and_the_same_panel_in_every_command() -> None:
    group: Any = typer.main.get_command(module.app)
    panels: dict[str, set[str | None]] = {}
    for name, command in group.commands.items():
        for parameter in command.params:
            words = f"{name} {parameter.name}"
            assert len(parameter.help) <= 60, words
            assert re.fullmatch(r"[A-Z][^;]+\.", parameter.help.replace("';'", "")), words
            if not getattr(parameter, "is_flag", False) and not parameter.type_descriptor.is_choice:
                assert parameter.metavar, words
            panels.setdefault(parameter.name, set()).add(parameter.rich_help_panel)
    assert {panel for name in READING for panel in panels[name]} == {"Reading options"}
    assert {panel for name in DEVICES for panel in panels[name]} == {"Devices and processes"}
    assert {name for name, each in panels.items() if each == {"Reading options"}} == READING


def test_what_commands_share_is_written_once() -> None:
    """An option of several commands has one declaration, so that they cannot come to differ."""
    texts: list[str] = []
    for source in package_sources():
        if source.name.startswith("cli"):
            for node in ast.walk(source.tree):
                keywords = node.keywords if isinstance(node, ast.Call) else []
                helps = [keyword.value for keyword in keywords if keyword.arg == "help"]
                texts += [text.value for text in helps if isinstance(text, ast.Constant)]
    assert len(texts) > 50
    assert sorted(text for text in set(texts) if texts.count(text) > 1) == []
