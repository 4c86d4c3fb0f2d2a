"""The pictures of the README show what the commands print today."""

import html
import re
from pathlib import Path

import pytest

from images import terminal
from support.documents import agrees


def text_of(picture: Path) -> str:
    """Returns the lines of text of the terminal in an SVG image."""
    lines: dict[float, str] = {}
    matrix = picture.read_text(encoding="utf-8").partition('class="terminal-matrix"')[2]
    for height, text in re.findall(r'<text[^>]* y="([\d.]+)"[^>]*>(.*?)</text>', matrix):
        lines[float(height)] = lines.get(float(height), "") + html.unescape(text).replace("\xa0", " ")
    return "\n".join(lines[height].rstrip() for height in sorted(lines))


@pytest.mark.slow
def test_the_picture_of_the_terminal_is_current(tmp_path: Path) -> None:
    """The lines are compared and not the numbers, because this run is shorter than that of the picture."""
    shorter = [command.replace("--quiet", "--quiet --set optim.epochs=1") for command in terminal.COMMANDS]
    fresh = tmp_path / "terminal.svg"
    fresh.write_text(terminal.drawn(terminal.printed(shorter)), encoding="utf-8")
    expected = re.sub(r"\d[\d.]*", "...", text_of(terminal.PICTURE))
    assert agrees(text_of(fresh), expected), text_of(fresh)


def test_the_text_of_a_picture_is_read(tmp_path: Path) -> None:
    picture = tmp_path / "x.svg"
    picture.write_text(terminal.drawn(["accuracy 0.97\n", "a\n  b\n", ""]), encoding="utf-8")
    text = text_of(picture)
    assert [line for line in text.splitlines() if not line.startswith("$")] == ["accuracy 0.97", "a", "  b"]
    assert text.splitlines()[0] == f"$ {terminal.COMMANDS[0]}"
    assert "url(http" not in picture.read_text(encoding="utf-8").replace('"', "")  # no font of another server
