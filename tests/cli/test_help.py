"""Help on terminals of any width: no word is cut, names of options least of all."""

import ast
import re
from typing import Annotated, Any

import pytest
import typer

from bert_tasks.cli import app as module
from bert_tasks.cli import main as main  # adds the commands
from support.sources import package_sources

GROUP: Any = typer.main.get_command(module.app)


def page(name: str | None, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    group: Any = typer.main.get_command(module.app)
    group.main(["--help"] if name is None else [name, "--help"], prog_name="bert-tasks", standalone_mode=False)
    return capsys.readouterr().out


@pytest.mark.parametrize("width", [20, 30, 40, 41, 47, 53, 60, 72, 80, 100, 200])
def test_nothing_is_cut(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, command in [(None, GROUP), *GROUP.commands.items()]:
        text = page(name, width, monkeypatch, capsys)
        assert module.CUT not in text
        words = set(re.split(r"[\s,/|]+", text))
        for option in (option for parameter in command.params for option in parameter.opts + parameter.secondary_opts):
            assert option in words or not option.startswith("-"), f"{name} {option} at {width}"
        for other in getattr(command, "commands", ()):
            assert other in words


@pytest.mark.parametrize("width", [40, 100])
def test_help_shows_every_word_of_its_texts(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Brackets too, which rich reads as markup. The list of commands on a narrow plain page only begins their texts."""
    for name, command in [(None, GROUP), *GROUP.commands.items()]:
        text = re.sub(r"[│\s]+", "", page(name, width, monkeypatch, capsys))
        listed = getattr(command, "commands", {}).values() if width > 80 else ()
        texts = [command.help, *(other.help.split("\n\n")[0] for other in listed)]
        texts += [getattr(parameter, "help", None) or "" for parameter in command.params]
        for word in " ".join(texts).split():
            assert word in text, f"{name}: {word}"


def test_help_shows_brackets(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    application = module._App(cls=module._Group)

    @application.command()
    def one(name: Annotated[str, typer.Option(help="A key of [folds], such as [a-z].")] = "") -> None:
        """Read [search] and [/b]."""

    @application.command()
    def two() -> None:
        """Nothing."""

    group: Any = typer.main.get_command(application)
    for arguments, words in ((["--help"], "Read [search] and [/b]."), (["one", "--help"], "A key of [folds], such as")):
        group.main(arguments, standalone_mode=False)
        assert words in capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 120])
def test_pages_are_in_boxes_on_usual_terminals(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (None, *GROUP.commands):
        assert "╭─ Options" in page(name, width, monkeypatch, capsys), name


def test_plain_pages_keep_to_the_width(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (None, *GROUP.commands):
        lines = page(name, 40, monkeypatch, capsys).splitlines()
        assert max(len(line) for line in lines if " " in line.strip()) <= 40


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
