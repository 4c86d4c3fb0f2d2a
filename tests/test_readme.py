"""The README's code runs, in order, and prints what the README says (numbers by tolerance)."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.documents import Block, Page, agrees, blocks, is_exempt


@pytest.fixture(scope="module")
def readme(repository: Path) -> list[Block]:
    return blocks((repository / "README.md").read_text(encoding="utf-8"))


@pytest.fixture
def workplace(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(repository / "recipes", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def page(workplace: Path) -> Iterator[Page]:
    page = Page("README.md")
    yield page
    page.close()


def test_python_blocks_print_what_the_readme_says(readme: list[Block], page: Page) -> None:
    compared = 0
    for block in readme:
        if block.language != "python":
            continue
        printed = page.run(block)
        if block.following is not None:
            assert agrees(printed, block.following), printed
            compared += 1
    assert compared == 3


@pytest.mark.slow
def test_shell_blocks_run(readme: list[Block], page: Page) -> None:
    tried = [block for block in readme if block.language == "sh" and not is_exempt(block)]
    assert len(tried) == 2
    assert sum(len(block.commands) for block in tried) == 9
    for block in tried:
        page.run(block)
    answers = Path("answers.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(answers) == 86


def test_every_table_of_numbers_stands_beside_its_command(repository: Path) -> None:
    """A table of measurements names the script that made it, and that script exists; nothing is left to fill in."""
    text = (repository / "README.md").read_text(encoding="utf-8")
    measured = text[text.index("## Measured") : text.index("## Development")]
    for task in ("SST-2", "CoLA"):
        assert re.search(rf"^\| {task},.*\d\d\.\d", measured, flags=re.MULTILINE)
    scripts = re.findall(r"python (benchmarks/\S+\.py)", measured)
    assert len(scripts) >= 2
    assert all((repository / script).is_file() for script in scripts)
    assert not re.findall(r"\b[A-Z]{3,}_[A-Z]{3,}\b", text.replace("BERT_TASKS_DATA", "").replace("HF_HUB_OFFLINE", ""))
