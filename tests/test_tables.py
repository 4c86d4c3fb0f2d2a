"""The pages say what the files in benchmarks/results say, and each of these files is used."""

import json
import re
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PAGES = ("README.md", "docs/benchmarks.md", "docs/comparison.md")
CHART = "docs/images/speed.svg"
Tables = Callable[..., str]


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Tables:
    """Runs the script of a folder, and returns why it ended, or "" if all is well."""

    def run(root: Path, *arguments: str) -> str:
        path = str(root / "benchmarks" / "tables.py")
        monkeypatch.setattr(sys, "argv", [path, *arguments])
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            return str(end.code)
        return ""

    return run


@pytest.fixture(scope="module")
def script(repository: Path) -> dict[str, Any]:
    return runpy.run_path(str(repository / "benchmarks" / "tables.py"))


@pytest.fixture
def pages(repository: Path, tmp_path: Path) -> Path:
    """A folder with the script, the results and the pages."""
    shutil.copytree(repository / "benchmarks" / "results", tmp_path / "benchmarks" / "results")
    shutil.copy(repository / "benchmarks" / "tables.py", tmp_path / "benchmarks")
    (tmp_path / "docs" / "images").mkdir(parents=True)
    for name in (*PAGES, CHART):
        shutil.copy(repository / name, tmp_path / name)
    return tmp_path


def test_pages_show_the_results(repository: Path, tables: Tables) -> None:
    assert tables(repository, "--check") == ""


def test_every_table_is_on_one_page(repository: Path, script: dict[str, Any]) -> None:
    texts = [(repository / name).read_text(encoding="utf-8") for name in PAGES]
    assert sorted(re.findall(r"<!--table:([\w-]+)-->", "\n".join(texts))) == sorted(script["FILES"])


@pytest.mark.parametrize("name", PAGES)
def test_changed_number_fails_and_is_corrected(pages: Path, name: str, tables: Tables) -> None:
    page = pages / name
    text = page.read_text(encoding="utf-8")
    head, marker, tail = text.partition("<!--table:")
    other = re.sub(r"\d", lambda match: str(9 - int(match[0])), tail, count=1)
    page.write_text(head + marker + other, encoding="utf-8")
    assert name in tables(pages, "--check")
    assert tables(pages) == ""
    assert page.read_text(encoding="utf-8") == text


def test_changed_bar_fails_and_is_corrected(pages: Path, tables: Tables) -> None:
    text = (pages / CHART).read_text(encoding="utf-8")
    bars = re.findall(r'<rect x="276" y="\d+" width="(\d+)"', text)
    assert len(bars) >= 4
    (pages / CHART).write_text(text.replace(f'width="{bars[0]}"', 'width="36"'), encoding="utf-8")
    assert CHART in tables(pages, "--check")
    assert tables(pages) == ""
    assert (pages / CHART).read_text(encoding="utf-8") == text


def test_new_result_is_a_new_table(pages: Path, tables: Tables, script: dict[str, Any]) -> None:
    file = pages / "benchmarks" / "results" / script["FILES"]["training"][0]
    result = json.loads(file.read_text(encoding="utf-8"))
    result |= {"date": "2027-01-02", "commit": "0123abc", "cpu_model": "family 25, model 17"}
    result["environment"] |= {"cpu": "Test (AVX512)"}
    result["options"] |= {"threads": 3}
    sides = {"ours": (2.0, 1.0, 3.0), "grouped": (6.0, 7.0, 8.0), "default": (8.0, 9.0, 10.0)}
    figures = {
        side: [{"first_epoch": 3 * value, "steady": value, "tokens": 1000, "peak_rss_mib": 900.0} for value in seconds]
        for side, seconds in sides.items()
    }
    file.write_text(json.dumps({**result, "figures": {"stsb": figures}}), encoding="utf-8")
    assert tables(pages, "--check") != ""
    assert tables(pages) == ""
    text = (pages / "docs/benchmarks.md").read_text(encoding="utf-8")
    assert "[Test, Zen 4, 3 threads, 2027-01-02, 0123abc]" in text
    assert "| STS-B | bert_tasks | 6.0 (3.0 to 9.0) | 2.0 (1.0 to 3.0) |  | 900 |" in text
    assert "|  | Trainer, length-grouped batches | 21 (18 to 24) | 7.0 (6.0 to 8.0) | 3.0 (2.7 to 7.0) | 900 |" in text
    assert "3.0 times as fast as the Trainer with length-grouped batches" in (pages / "README.md").read_text("utf-8")
    chart = (pages / CHART).read_text(encoding="utf-8")
    # The longest line, of 500 tokens/s, has 300 pixels. The medians are 250, 71 and 56.
    assert re.findall(r'<rect x="276" y="\d+" width="(\d+)"', chart) == ["150", "43", "33"]
    assert 'd="M376 ' in chart


@pytest.mark.parametrize(
    ("value", "text"), [(4427.1, "4,400"), (996.0, "1,000"), (9.96, "10"), (2.24, "2.2"), (0.949, "0.95"), (0.0, "0.0")]
)
def test_numbers_have_two_digits(script: dict[str, Any], value: float, text: str) -> None:
    assert script["number"](value) == text


def test_difference_of_means_has_an_interval(script: dict[str, Any]) -> None:
    assert script["difference"]([2.0, 3.0, 4.0], [1.0, 2.0, 3.0]) == "+1.0 [-1.3, +3.3]"
    assert script["difference"]([1.0, 1.1, 1.2], [1.01, 1.11, 1.21]) == "+0.0 [-0.2, +0.2]"


def test_every_result_is_used(repository: Path) -> None:
    sources = [repository / "benchmarks" / name for name in ("tables.py", "LOG.md")]
    texts = [path.read_text(encoding="utf-8") for path in [*sources, *(repository / "docs").rglob("*.md")]]
    files = sorted(path.name for path in (repository / "benchmarks" / "results").iterdir())
    used = set(re.findall(r"\w+\.jsonl?", "\n".join(texts)))
    assert [name for name in files if name not in used] == []


def test_results_record_date_and_commit(repository: Path, tmp_path: Path) -> None:
    write_results = runpy.run_path(str(repository / "benchmarks" / "result_files.py"))["write_results"]
    write_results(tmp_path / "x.json", {"seconds": [1.0]})
    content = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    assert content["seconds"] == [1.0]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", content["date"])
    assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?", content.get("commit", "0123abc"))
