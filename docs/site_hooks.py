"""What `make site` adds to MkDocs: the site has the files of the repository to which its pages link.

Owns where a file of the repository stands in the site. README.md is the first page, and docs/README.md the list of all
pages, because a site has one README only. A file outside of docs/ that a page
links to stands below repository/. A folder has no page, so a link to one becomes plain text.
"""

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")


def site_path(file: Path) -> str:
    """Returns the path in the site of a file of the repository."""
    if file == ROOT / "README.md":
        return "index.md"
    if file == DOCS / "README.md":
        return "pages.md"
    if file.is_relative_to(DOCS):
        return file.relative_to(DOCS).as_posix()
    return f"repository/{file.relative_to(ROOT).as_posix()}"


def linked_files(page: Path) -> Iterator[Path]:
    """Yields the files of the repository that a page links to."""
    for link in LINK.finditer(page.read_text(encoding="utf-8")):
        target = Path(os.path.normpath(page.parent / link[2]))
        if target.is_file() and target.is_relative_to(ROOT):
            yield target


def on_files(files: Files, *, config: Any) -> Files:
    """Adds README.md, and the files outside of docs/ that can be reached from it by links."""
    reached: set[Path] = set()
    waiting = [ROOT / "README.md", *DOCS.rglob("*.md")]
    while waiting:
        page = waiting.pop()
        for file in linked_files(page):
            if file not in reached and not file.is_relative_to(DOCS):
                reached.add(file)
                waiting += [file] if file.suffix == ".md" else []
    for file in sorted({ROOT / "README.md", DOCS / "README.md", *reached}):
        files.append(File.generated(config, site_path(file), abs_src_path=str(file)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Writes the links of a page as paths in the site."""
    source = Path(page.file.abs_src_path)

    def in_site(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(source.parent / link[2]))
        if target.is_dir():
            return link[1].lstrip("!")[1:-1]
        if not target.is_file():
            return link[0]  # MkDocs warns
        path = posixpath.relpath(site_path(target), posixpath.dirname(page.file.src_uri))
        return f"{link[1]}({path}{link[3] or ''})"

    return LINK.sub(in_site, markdown)
