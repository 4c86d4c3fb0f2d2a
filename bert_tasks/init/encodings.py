"""Encodings of text files that are not UTF-8.

This module owns the two encodings that a file shows beyond doubt, which are UTF-16 and Windows-1252, and the suggestion
of another one, which a user must confirm. A wrong guess would turn into wrong letters, which no later step notices.
"""

import gzip
import re
import zlib
from collections.abc import Iterable
from pathlib import Path

from charset_normalizer import from_bytes

from bert_tasks.data.issues import shortened
from bert_tasks.data.parsers import GZIP, MARKS, check_is_text
from bert_tasks.errors import DataError

_LOOKED_AT = 2**20  # bytes
# Euro sign, quotes, dots, dashes and trade mark of Windows. The code pages of DOS have letters there.
_WINDOWS_MARKS = frozenset(b"\x80\x84\x85\x91\x92\x93\x94\x95\x96\x97\x99")
_DOS_LETTER = re.compile(rb"[A-Za-z][\x84\x91\x93\x94\x95][A-Za-z]")
# Names of charset_normalizer -> the encoding to name. It does not tell the encodings of Latin letters apart.
_SUGGESTED = {
    **dict.fromkeys(("gb2312", "gbk", "gb18030", "hz"), "gb18030"),
    **dict.fromkeys(("big5", "big5hkscs", "cp950"), "big5"),
    **dict.fromkeys(("shift_jis", "cp932", "shift_jisx0213", "shift_jis_2004"), "cp932"),
    **dict.fromkeys(("euc_jp", "euc_jisx0213", "euc_jis_2004"), "euc_jp"),
    **dict.fromkeys(("euc_kr", "cp949", "johab"), "cp949"),
    **{name: name for name in ("cp1251", "koi8_r", "cp1253", "cp1255", "cp1256", "cp874", "utf_16_le", "utf_16_be")},
}
_USUAL = "cp1252"  # Western European text from Windows


def shown_encoding(files: Iterable[Path]) -> tuple[str, str] | None:
    """Returns the encoding that files show beyond doubt, and the reason.

    Returns:
        The name of the encoding and a sentence, or None for UTF-8 and for files with a byte order mark, which readers
        follow.

    Raises:
        DataError: The files are not UTF-8, but do not show their encoding. The message suggests one.
    """
    for path in files:
        content = _start(path)
        check_is_text(content, path)
        if content.startswith(tuple(mark for mark, _ in MARKS)):
            return None
        order = _byte_order(content)
        if order is not None:
            return order, "every second byte is zero, so the encoding is UTF-16 without a byte order mark"
        if not _is_utf8(content):
            if _is_windows(content):
                reason = "its bytes from 0x80 to 0x9f are quotes, dashes or euro signs of Windows"
                return _USUAL, f"{reason}, so the encoding is {_USUAL}"
            raise DataError(f"{path}: it has bytes that are not utf-8. {encoding_advice(content)}")
    return None


def encoding_advice(content: bytes) -> str:
    """Returns sentences that suggest an encoding, with a line as it reads in it."""
    lines = [line for line in content.splitlines() if not line.isascii()]
    best = from_bytes(b"\n".join(lines[:1000])).best()
    encoding = _USUAL
    if best is not None:
        encoding = _SUGGESTED.get(best.encoding, _USUAL)
    shown = shortened(lines[0].decode(encoding, "replace"))
    return f"Name the file's encoding with --encoding {encoding}, if this reads well: {shown}. Otherwise try another"


def _start(path: Path) -> bytes:
    """Returns the first bytes of a file, which may be compressed."""
    with path.open("rb") as file:
        content = file.read(_LOOKED_AT)
    if not content.startswith(GZIP):
        return content
    try:
        with gzip.open(path) as unpacked:
            return unpacked.read(_LOOKED_AT)
    except (OSError, EOFError, zlib.error):  # the reader reports it
        return b""


def _byte_order(content: bytes) -> str | None:
    """Returns the encoding of UTF-16 text without a mark, which has no zero character, but zero bytes."""
    # The two bytes of a Latin letter are its code and a zero. Their order is that of the encoding.
    halves = {"utf-16-le": (content[0::2], content[1::2]), "utf-16-be": (content[1::2], content[0::2])}
    for name, (low, high) in halves.items():
        if low and low.count(0) == 0 and high.count(0) > 0.1 * len(high):
            return name
    return None


def _is_utf8(content: bytes) -> bool:
    if len(content) == _LOOKED_AT:
        # The file goes on, and the last character may have been cut.
        content = content[: content.rfind(b"\n") + 1]
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _is_windows(content: bytes) -> bool:
    """Returns True for text that is not UTF-8 and has quotes, dashes or euro signs of Windows.

    Other encodings have letters at these bytes, or far more bytes from 0x80 on.
    """
    high = [byte for byte in content if byte >= 0x80]
    controls = [byte for byte in high if byte < 0xA0]
    is_western = set(controls) <= _WINDOWS_MARKS and len(high) < 0.1 * len(content)
    return len(controls) > 0 and is_western and _DOS_LETTER.search(content) is None
