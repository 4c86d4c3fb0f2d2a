"""Workbooks as Excel itself writes them, with the texts in a part of their own, and with edits of single parts."""

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

from openpyxl import Workbook

SHEET, STRINGS = "xl/worksheets/sheet1.xml", "xl/sharedStrings.xml"
_INLINE = re.compile(r't="inlineStr"><is><t>(.*?)</t></is>')
_TYPE = "application/vnd.openxmlformats-officedocument.spreadsheetml.sharedStrings+xml"


def workbook(rows: Iterable[Sequence[Any]], edits: Mapping[str, Callable[[str], str]] = MappingProxyType({})) -> bytes:
    """Returns a workbook of one sheet. ``edits`` change the XML of parts, by their names."""
    book = Workbook()
    for row in rows:
        book.active.append(row)
    written = io.BytesIO()
    book.save(written)
    with ZipFile(written) as source:
        parts = {name: source.read(name).decode() for name in source.namelist()}
    texts: list[str] = []

    def number(match: re.Match[str]) -> str:
        texts.append(match[1])
        return f't="s"><v>{len(texts) - 1}</v>'

    parts[SHEET] = _INLINE.sub(number, parts[SHEET])
    items = "".join(f"<si><t>{text}</t></si>" for text in texts)
    parts[STRINGS] = f'<sst xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main">{items}</sst>'
    override = f'<Override PartName="/{STRINGS}" ContentType="{_TYPE}" />'
    parts["[Content_Types].xml"] = parts["[Content_Types].xml"].replace("</Types>", f"{override}</Types>")
    for name, edit in edits.items():
        parts[name] = edit(parts[name])
    packed = io.BytesIO()
    with ZipFile(packed, "w", ZIP_DEFLATED) as target:
        for name, text in parts.items():
            target.writestr(name, text)
    return packed.getvalue()
