"""`make site` builds the documents without a warning, and every link of the site leads to a file and a place in it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest


class Links(HTMLParser):
    """The targets of links, images, styles and scripts of a page, and the places that can be linked."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.places: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value is not None:
                self.targets.add(value)
            elif name in ("id", "name") and value is not None:
                self.places.add(value)


@pytest.fixture(scope="module")
def site(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", repository / "mkdocs.yml"]
    variables = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run([*command, "--site-dir", folder], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def broken(page: Path, pages: dict[Path, Links]) -> Iterator[str]:
    for target in sorted(pages[page].targets):
        parts = urlsplit(target)
        if parts.scheme or parts.netloc:
            continue
        file = (page.parent / unquote(parts.path)).resolve() if parts.path else page
        if not file.is_file():
            yield f"{page.name}: {target}: no such file"
        elif parts.fragment and file in pages and unquote(parts.fragment) not in pages[file].places:
            yield f"{page.name}: {target}: no such place"


@pytest.mark.slow
def test_every_link_of_the_site_leads_somewhere(site: Path) -> None:
    pages = {page.resolve(): Links(page) for page in site.rglob("*.html") if page.name != "404.html"}
    assert len(pages) > 50
    assert [problem for page in pages for problem in broken(page, pages)] == []


@pytest.mark.slow
def test_the_reference_has_types_and_examples(site: Path) -> None:
    text = (site / "reference" / "training.html").read_text(encoding="utf-8")
    assert 'id="bert_tasks.fit"' in text
    assert "FitResult" in text
    assert "&gt;&gt;&gt;" in text


@pytest.mark.slow
def test_the_site_asks_no_other_server(site: Path) -> None:
    loaded = [
        target
        for page in site.rglob("*.html")
        for target in Links(page).targets
        if target.endswith((".css", ".js")) and urlsplit(target).netloc
    ]
    assert loaded == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text('<a id="here"></a><a href="#here"></a><a href="#there"></a><img src="none.png">', encoding="utf-8")
    assert list(broken(page, {page: Links(page)})) == [
        "page.html: #there: no such place",
        "page.html: none.png: no such file",
    ]
