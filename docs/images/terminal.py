"""Makes terminal.svg, the picture in the README: a csv file, the commands, and what they print.

    python docs/images/terminal.py

The commands run in a temporary folder that holds the recipes. tests/test_pictures.py compares the text of the picture
with what the commands print today.
"""

import io
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "images" / "terminal.svg"
WIDTH = 100
COMMANDS = (
    "bert-tasks init recipes/data/feedback/train.csv --output feedback.toml",
    "bert-tasks train feedback.toml --output-dir runs/feedback --quiet",
    "bert-tasks evaluate runs/feedback recipes/data/feedback/validation.csv",
)


def printed(commands: Sequence[str] = COMMANDS) -> list[str]:
    """Returns what each command prints, on standard output and standard error."""
    outputs = []
    with tempfile.TemporaryDirectory() as name:
        shutil.copytree(ROOT / "recipes", Path(name) / "recipes")
        for command in commands:
            arguments = [sys.executable, "-m", "bert_tasks", *command.split()[1:]]
            done = subprocess.run(arguments, cwd=name, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode != 0:
                sys.exit(f"{command}:\n{done.stdout}")
            outputs.append(done.stdout)
    return outputs


def drawn(outputs: Sequence[str]) -> str:
    """Returns an SVG image of a terminal with the commands and their outputs."""
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    for command, output in zip(COMMANDS, outputs, strict=True):
        console.print(Text(f"$ {command}", style="bold green"))
        console.print(Text(output))
    image = console.export_svg(title="bert-tasks", unique_id="terminal")
    return re.sub(r"@font-face \{.*?\}", "", image, flags=re.DOTALL)  # fonts of another server


if __name__ == "__main__":
    PICTURE.write_text(drawn(printed()), encoding="utf-8")
