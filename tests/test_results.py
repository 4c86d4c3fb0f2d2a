"""How results are shown: as a table in a terminal and in a notebook, and as JSON."""

import json
from dataclasses import dataclass
from pathlib import Path

from bert_tasks.tables import Html, Result, Table

TABLE = Table(columns=("label", "f1", "support"), rows=[("a <b>", "0.5000", "12"), ("long name", "-", "3")])


def test_texts_are_aligned_to_the_left_and_numbers_to_the_right() -> None:
    assert TABLE.lines() == [
        "label      f1      support",
        "a <b>      0.5000  12",
        "long name  -       3",
    ]
    numbers = Table(columns=TABLE.columns, rows=TABLE.rows, has_numbers=True)
    assert numbers.lines() == [
        "label          f1  support",
        "a <b>      0.5000       12",
        "long name       -        3",
    ]
    assert Table(columns=("label", ""), rows=[]).lines() == ["label"]


def test_only_cells_that_are_html_stay_html() -> None:
    page = Table(columns=("<i>",), rows=[("a <b>",), (Html("<b>c</b>"),)]).html()
    assert page.startswith('<table><tr><th style="text-align: left">&lt;i&gt;</th></tr>')
    assert '<td style="text-align: left">a &lt;b&gt;</td>' in page
    assert '<td style="text-align: left"><b>c</b></td>' in page


@dataclass(frozen=True, kw_only=True)
class Part:
    file: Path


@dataclass(frozen=True, kw_only=True)
class Written(Result):
    parts: tuple[Part, ...]

    def lines(self) -> list[str]:
        return [str(part.file) for part in self.parts]


def test_the_content_of_a_result_is_its_fields_with_texts_for_paths() -> None:
    result = Written(parts=(Part(file=Path("a/b")),))
    assert json.loads(json.dumps(result.to_json())) == {"parts": [{"file": "a/b"}]}
    assert result.lines() == ["a/b"]
