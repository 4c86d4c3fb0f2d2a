"""Edits of workbooks, DocBins and parquet files that reach behind their compression: inside, not only outside.

Owns valid files of each, and what draws an edited one. A random byte of a compressed file only fails its checksum.
"""

import io
import struct
import warnings
import zlib
from collections.abc import Callable, Mapping
from zipfile import ZIP_DEFLATED, ZipFile

import pyarrow
import srsly.msgpack
from hypothesis import strategies as st
from pyarrow import parquet

from support.workbooks import workbook

ROWS = [("a film", "a"), ("no", "b"), ("Zoë", "a"), ("so so", "b")]
Edit = Callable[[st.DrawFn, bytes], bytes]  # some edits of plain bytes

# What breaks readers of XML, of msgpack and of thrift more often than single bytes do.
XML_TOKENS = (
    *(b'r="999999999"', b'r="XFD1048576"', b't="s"', b't="d"', b't="n"', b't="b"', b't="inlineStr"', b"<v>-1</v>"),
    *(
        b"<v>1e999</v>",
        b"<v>99999999999</v>",
        b"<c/>" * 30,
        b"<row/>",
        b"</row>",
        b"<is><t>x</t></is>",
        b"&a;",
        b"&#0;",
    ),
    *(b'<!DOCTYPE x [<!ENTITY a "aaaa">]>', b"<!--", b"]]>", b"<![CDATA[", b"\xff\xfe", b's="7"', b's="x"'),
    *(b'<dimension ref="A1:XFD1048576"/>', b"../../etc/passwd", b'encoding="utf-16"', b"nan", b'count="-1"'),
)
MSGPACK_TOKENS = (
    *(b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc0", b"\xc1", b"\x90", b"\x80"),
    *(b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00", b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\x00" * 7, b"\x91" * 600),
    *(b"\xff" * 8, b"\x00" * 8, b"\xa3abc", b"\xc4\x00", b"\xc7\x00\x05"),
)
VALUES = (None, 0, -1, 2**40, "x", b"", b"\xff" * 8, [], [None], [[]], {}, [{}] * 9, [70000], [80, 0, 73])
THRIFT_TOKENS = (
    *(b"\xff\xff\xff\xff\x0f", b"\xfe\xff\xff\xff\x0f", b"\x80\x80\x80\x80\x08", b"\x00", b"\x15\x02", b"\x19\x1c"),
    *(b"\x00" * 9, b"\xff" * 9, b"\xf9\xff\xff\xff\xff\x0f", b"PAR1", b"\x15\x0e"),
)


def excel() -> bytes:
    return workbook([("text", "label"), *ROWS])


def docbin() -> bytes:
    import spacy
    from spacy.tokens import DocBin, Span

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        language = spacy.blank("xx")
        documents = DocBin(store_user_data=True)
        for text, label in ROWS[:3]:
            document = language(text)
            document.cats = {"a": float(label == "a"), "b": float(label == "b")}
            document.set_ents([Span(document, 0, 1, label="PER")])
            documents.add(document)
        return documents.to_bytes()


def parquet_file() -> bytes:
    texts, labels = zip(*ROWS, strict=True)
    table = pyarrow.table({"text": texts * 20, "label": labels * 20, "words": [["a", "b"], [], None, ["c"]] * 20})
    with io.BytesIO() as file:
        parquet.write_table(table, file, compression="zstd", row_group_size=40)
        return file.getvalue()


@st.composite
def edited_workbook(draw: st.DrawFn, valid: bytes, edit: Edit) -> bytes:
    """One file inside the archive is edited and packed again, or the archive itself is edited."""
    if draw(st.integers(0, 9)) == 0:
        return edit(draw, valid)
    with ZipFile(io.BytesIO(valid)) as source:
        files = {name: source.read(name) for name in source.namelist()}
    sheets = [name for name in files if "sheet" in name or "Strings" in name]
    name = draw(st.sampled_from([*files, *sheets * 4]))
    content = _with_token(draw, files[name], XML_TOKENS) if draw(st.booleans()) else edit(draw, files[name])
    with io.BytesIO() as packed:
        with ZipFile(packed, "w", ZIP_DEFLATED) as target:
            for other, unchanged in files.items():
                target.writestr(other, content if other == name else unchanged)
        return packed.getvalue()


@st.composite
def edited_docbin(draw: st.DrawFn, valid: bytes, edit: Edit) -> bytes:
    """A field, or the bytes of msgpack, are edited and compressed again."""
    way = draw(st.integers(0, 9))
    if way == 0:
        return edit(draw, valid)
    content = zlib.decompress(valid)
    if way < 2:
        return zlib.compress(_with_token(draw, content, MSGPACK_TOKENS))
    if way < 3:
        return zlib.compress(edit(draw, content))
    fields = srsly.msgpack.unpackb(content)
    name = draw(st.sampled_from(sorted(fields)))
    value = fields[name]
    if isinstance(value, bytes) and draw(st.integers(0, 3)):
        at = draw(st.integers(0, max(0, len(value) - 8)))
        value = value[:at] + draw(st.binary(min_size=1, max_size=8)) + value[at + draw(st.integers(0, 8)) :]
    else:
        value = draw(
            st.sampled_from([None, 0, -1, 2**40, "x", b"", b"\xff" * 8, [], [None], [[]], {}, [{}] * 9, [70000]])
        )
    return zlib.compress(srsly.msgpack.packb({**fields, name: value}))


@st.composite
def edited_parquet(draw: st.DrawFn, valid: bytes, edit: Edit) -> bytes:
    """The metadata at the end is edited, with its new length behind it, or a page before it is."""
    length = struct.unpack("<I", valid[-8:-4])[0]
    pages, metadata = valid[: -8 - length], valid[-8 - length : -8]
    way = draw(st.integers(0, 9))
    if way == 0:
        return edit(draw, valid)
    if way < 5:
        metadata = _with_token(draw, metadata, THRIFT_TOKENS) if way < 3 else _with_bytes(draw, metadata)
    else:
        pages = _with_token(draw, pages, THRIFT_TOKENS) if way < 7 else _with_bytes(draw, pages)
    return pages + metadata + struct.pack("<I", len(metadata)) + b"PAR1"


def _with_token(draw: st.DrawFn, content: bytes, tokens: tuple[bytes, ...]) -> bytes:
    at = draw(st.integers(0, len(content)))
    token = draw(st.sampled_from(tokens))
    return content[:at] + token + content[at + draw(st.sampled_from([0, len(token), 3])) :]


def _with_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """Some bytes have other values. None is put in, so that what follows is read as before."""
    edited = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        edited[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    return bytes(edited)


EDITS: Mapping[str, Callable[[bytes, Edit], st.SearchStrategy[bytes]]] = {
    "xlsx": edited_workbook,
    "docbin": edited_docbin,
    "parquet": edited_parquet,
}
VALID: Mapping[str, Callable[[], bytes]] = {"xlsx": excel, "docbin": docbin, "parquet": parquet_file}
