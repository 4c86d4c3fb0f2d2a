"""Files as people have them: ``init`` reads each as a run does, or says what it is and how to mend it."""

import bz2
import csv
import datetime
import gzip
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pyarrow
import pytest
from openpyxl import Workbook
from pyarrow import parquet

from bert_tasks.errors import BertTasksError
from bert_tasks.init import RecipeDraft, init_recipe
from bert_tasks.recipe.check import check, prepare
from bert_tasks.recipe.schema import load_recipe

Rows = Sequence[Mapping[str, Any]]
Content = str | bytes | Callable[[Path], object]

SENTENCES = (
    "the old ferry leaves the harbour at seven",
    "a bright morning over the quiet hills",
    "nobody liked the new menu of the inn",
    "the orchestra played far too fast again",
    "rain fell on the market square all day",
    "the teacher praised the careful answers",
)
TEXTS = [f"{SENTENCES[i % len(SENTENCES)]} {i}" for i in range(40)]
REVIEWS = [{"text": text, "label": ("calm", "glad")[i % 2]} for i, text in enumerate(TEXTS)]
CORPUS = [{"text": text} for text in TEXTS]


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        content: The content, or a function that writes the file or folder.
        rows: The rows that a run reads. None means that the file is refused.
        words: Words of what ``init`` prints, or of the error.
    """

    content: Content
    rows: Rows | None
    words: tuple[str, ...] = ()


def workbook(**sheets: Sequence[Sequence[object]]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        book = Workbook()
        book.remove(book.active)
        for name, rows in sheets.items():
            sheet = book.create_sheet(name)
            for row in rows:
                sheet.append(list(row))
        book.save(path)

    return write


def hidden_sheet(path: Path) -> None:
    book = Workbook()
    book.active.append(["code", "meaning"])
    for number in range(99):
        book.active.append([number, f"meaning {number}"])
    book.active.sheet_state = "hidden"
    visible = book.create_sheet("Data")
    for row in TABLE:
        visible.append(row)
    book.active = visible
    book.save(path)


TABLE = [("text", "label"), *(tuple(row.values()) for row in REVIEWS)]
README = [("This workbook has reviews of two hotels",), ("See the sheet Data",)]
CODEBOOK = [("column", "meaning"), ("text", "what a guest wrote"), ("label", "the mood")]
WITH_INDEX = [(None if i == 0 else i, *row) for i, row in enumerate(TABLE)]
WITH_DATES = [
    ("day", None, "text", "label", None) if i == 0 else (datetime.date(2024, 1, 1 + i % 28), None, *row, None)
    for i, row in enumerate(TABLE)
]

EXCEL: Mapping[str, Kind] = {
    "plain.xlsx": Kind(workbook(Data=TABLE), REVIEWS),
    "macros.xlsm": Kind(workbook(Data=TABLE), REVIEWS),
    "readme.xlsx": Kind(workbook(Notes=README, Data=TABLE), REVIEWS, ("sheet 'Data' is read, because the sheets",)),
    "codebook.xlsx": Kind(workbook(Codes=CODEBOOK, Data=TABLE), REVIEWS, ("'Data'", 'format = "xlsx/Codes"')),
    "splits.xlsx": Kind(
        workbook(test=[TABLE[0], *TABLE[31:]], train=TABLE[:31]), REVIEWS[:30], ("'train'", 'format = "xlsx/test"')
    ),
    "title.xlsx": Kind(workbook(Data=[("Reviews of two hotels",), *TABLE]), REVIEWS, ("row 2 of the sheet 'Data'",)),
    "titles.xlsx": Kind(
        workbook(Data=[("Reviews",), (), ("made by", "us"), (), *TABLE]), REVIEWS, ("row 5 of the sheet 'Data'",)
    ),
    "author.xlsx": Kind(
        workbook(
            Data=[("made by", "us"), *(("x", *row, "y") if i else ("a", *row, "b") for i, row in enumerate(TABLE))]
        ),
        REVIEWS,
        ("row 2",),
    ),
    "to_excel.xlsx": Kind(workbook(Data=WITH_INDEX), REVIEWS),
    "dates.xlsx": Kind(workbook(Data=WITH_DATES), REVIEWS),
    "shifted.xlsx": Kind(workbook(Data=[(), (), *((None, *row) for row in TABLE)]), REVIEWS, ("row 3",)),
    "hidden.xlsx": Kind(hidden_sheet, REVIEWS, ("'Data' is read, because the sheets before it are hidden",)),
    "texts.xlsx": Kind(workbook(Data=[("text",), *((text,) for text in TEXTS)]), CORPUS),
    "only_notes.xlsx": Kind(workbook(Notes=README), None, ("no sheet has a table", "'Notes'", "column names")),
    "empty.xlsx": Kind(workbook(Data=[]), None, ("no sheet has a table",)),
    "headless.xlsx": Kind(workbook(Data=TABLE[1:]), None, ("does not name the columns", "Insert a row of names")),
    "twice.xlsx": Kind(
        workbook(Data=[("text", "text", "label"), *((row[0], *row) for row in TABLE[1:])]),
        None,
        ("row 1 of the sheet 'Data' names 'text' more than once",),
    ),
    "formulas.xlsx": Kind(
        workbook(Data=[TABLE[0], *((row[0], "=LOWER(A2)") for row in TABLE[1:])]),
        None,
        ("'label' has formulas without values", "save it"),
    ),
    "password.xlsx": Kind(bytes.fromhex("d0cf11e0a1b11ae1") + bytes(600), None, ("Excel 97", "password", ".csv")),
    "csv.xlsx": Kind("text,label\n", None, ("not a workbook", "name it .csv")),
}


def table(rows: Rows = REVIEWS, *, delimiter: str = ",") -> str:
    file = io.StringIO()
    writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")
    writer.writerow(list(rows[0]))
    writer.writerows(row.values() for row in rows)
    return file.getvalue()


def lines(rows: Rows = REVIEWS) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


LANGUAGES = {
    "zh": ("这家饭店的服务非常好", "今天的天气不太好，大家都留在家里", "这部电影很长但是很有意思"),
    "tw": ("這家飯店的服務非常好我們都很喜歡", "今天的天氣不太好大家都留在家裡", "老師說我們應該多讀書"),
    "ja": ("このホテルの部屋はとても静かでした", "料理が冷めていて残念です", "また来年も行きたいと思います"),
    "ko": ("호텔 방이 아주 조용하고 깨끗했습니다", "음식이 너무 차가워서 실망했어요", "역에서 가까워서 편리합니다"),
    "ru": ("Гостиница была тихая и чистая", "Обслуживание оставляет желать лучшего", "Завтрак был холодный"),
    "de": ("Das Frühstück war schön", "Größe und Lage gefallen uns überhaupt nicht", "Die Tür schließt nicht"),
}


def reviews_in(language: str) -> Rows:
    texts = LANGUAGES[language]
    return [{**row, "text": f"{texts[i % len(texts)]} {i}"} for i, row in enumerate(REVIEWS)]


def encoded(language: str, encoding: str, mark: str = "") -> bytes:
    return (mark + table(reviews_in(language))).encode(encoding)


ENCODINGS: Mapping[str, Kind] = {
    "mark.csv": Kind(encoded("zh", "utf-8", "\ufeff"), reviews_in("zh")),
    "mark.jsonl": Kind("\ufeff" + lines(), REVIEWS),
    "utf16_little.csv": Kind(encoded("ru", "utf-16-le", "\ufeff"), reviews_in("ru")),
    "utf16_big.csv": Kind(encoded("ru", "utf-16-be", "\ufeff"), reviews_in("ru")),
    "utf32.csv": Kind(encoded("ru", "utf-32"), reviews_in("ru")),
    "no_mark_little.csv": Kind(encoded("de", "utf-16-le"), reviews_in("de"), ("UTF-16 without a byte order mark",)),
    "no_mark_big.csv": Kind(encoded("de", "utf-16-be"), reviews_in("de"), ("UTF-16 without a byte order mark",)),
    "compressed.csv.gz": Kind(gzip.compress(encoded("zh", "utf-8")), reviews_in("zh")),
    "gb18030.csv": Kind(encoded("zh", "gb18030"), None, ("not utf-8", "--encoding gb18030", "这家饭店")),
    "gb18030.txt": Kind("\n".join(LANGUAGES["zh"] * 9).encode("gb18030"), None, ("--encoding gb18030", "这家饭店")),
    "gb18030.csv.gz": Kind(gzip.compress(encoded("zh", "gb18030")), None, ("--encoding gb18030", "这家饭店")),
    "big5.csv": Kind(encoded("tw", "big5"), None, ("--encoding big5", "這家飯店")),
    "shift_jis.csv": Kind(encoded("ja", "shift_jis"), None, ("--encoding cp932", "このホテル")),
    "euc_jp.csv": Kind(encoded("ja", "euc_jp"), None, ("--encoding euc_jp", "このホテル")),
    "euc_kr.csv": Kind(encoded("ko", "euc_kr"), None, ("--encoding cp949", "호텔 방이")),
    "cp1251.csv": Kind(encoded("ru", "cp1251"), None, ("--encoding cp1251", "Гостиница")),
    "koi8.csv": Kind(encoded("ru", "koi8_r"), None, ("--encoding koi8_r", "Гостиница")),
    "latin_1.csv": Kind(encoded("de", "latin-1"), None, ("--encoding cp1252", "Das Frühstück")),
}


def zipped(path: Path) -> None:
    with ZipFile(path, "w") as archive:
        archive.writestr("rows.csv", table())


# Files whose names say something else.
OTHERS: Mapping[str, Kind] = {
    "zip.csv": Kind(zipped, None, ("a zip file or a spreadsheet", "Unpack it")),
    "workbook.csv": Kind(workbook(Data=TABLE), None, ("name it .xlsx",)),
    "parquet.csv": Kind(
        lambda path: parquet.write_table(pyarrow.Table.from_pylist(REVIEWS), path), None, ("Name it .parquet",)
    ),
    "document.txt": Kind(b"%PDF-1.7\n" + bytes(range(256)), None, ("a PDF document", "as .txt")),
    "pointer.csv": Kind("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", None, ("git lfs pull",)),
    "packed.csv": Kind(bz2.compress(table().encode()), None, ("bzip2", "Unpack it")),
}


def folder(**contents: str | bytes) -> Callable[[Path], None]:
    """Writes files, whose paths have two underscores for a slash and three for a dot."""

    def write(path: Path) -> None:
        for name, content in contents.items():
            file = path / name.replace("___", ".").replace("__", "/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.encode() if isinstance(content, str) else content)

    return write


def labelled_folders(*splits: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        for split in splits:
            for number, row in enumerate(REVIEWS):
                file = path / split / row["label"] / f"{number}.txt"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(row["text"] + "\n", "utf-8")

    return write


def shards(path: Path) -> None:
    """Writes part-0.csv to part-3.csv beside the pattern."""
    for number in range(4):
        (path.parent / f"part-{number}.csv").write_text(table(REVIEWS[number * 10 :][:10]))


def hub_shards(path: Path) -> None:
    parts = {"train-00000-of-00002": REVIEWS[:15], "train-00001-of-00002": REVIEWS[15:30]}
    parts["validation-00000-of-00001"] = REVIEWS[30:]
    (path / "data").mkdir(parents=True)
    for name, rows in parts.items():
        parquet.write_table(pyarrow.Table.from_pylist(rows), path / "data" / f"{name}.parquet")


FOLDERS: Mapping[str, Kind] = {
    "labels": Kind(labelled_folders("."), REVIEWS),
    "imdb": Kind(labelled_folders("train", "test"), REVIEWS),
    "part-*.csv": Kind(shards, REVIEWS),
    "none-*.csv": Kind(lambda path: None, None, ("no file matches this pattern",)),
    "splits": Kind(
        folder(train___csv=table(REVIEWS[:30]), dev___csv=table(REVIEWS[30:]), README___md="reviews"), REVIEWS
    ),
    "folders_of_splits": Kind(
        folder(
            train__a___csv=table(REVIEWS[:15]), train__b___csv=table(REVIEWS[15:30]), dev__a___csv=table(REVIEWS[30:])
        ),
        REVIEWS,
    ),
    "hub": Kind(hub_shards, REVIEWS),
    "one_file": Kind(folder(reviews___csv=table()), None, ("holds reviews.csv", "Name a file", "*.csv")),
    "nothing": Kind(Path.mkdir, None, ("The folder is empty",)),
}

NAMES = ("Ada", "Grace", "Alan")
SPANS = [[[0, len(NAMES[i % 3]), "PER"]] for i in range(40)]
MEETINGS = [f"{NAMES[i % 3]} met nobody on day {i}" for i in range(40)]
TAGGED = [{"words": text.split(), "tags": ["B-PER", *["O"] * 5]} for text in MEETINGS]
WITH_TEXT = [{**row, "text": text} for row, text in zip(TAGGED, MEETINGS, strict=True)]
NESTED = [{"text": text, "label": [*SPANS[i], [0, len(text), "EVENT"]]} for i, text in enumerate(MEETINGS)]
MISPLACED = [{"text": text, "label": [{"start": 1, "end": 4, "label": "X", "text": "Zoe"}]} for text in MEETINGS]
COLUMNS = {name: [row[name] for row in REVIEWS] for name in ("text", "label")}
TRIPLETS = [{"anchor": TEXTS[i], "positive": TEXTS[i - 6], "negative": TEXTS[i - 1]} for i in range(40)]
SCORES = [{"text": text, "score": f"{i % 7},{i * 7 % 10}{i % 9}"} for i, text in enumerate(TEXTS)]
ONE_WORD = [
    {"Sentence #": f"Sentence: {i}" if place == 0 else "", "Word": word, "Tag": tag}
    for i, row in enumerate(TAGGED)
    for place, (word, tag) in enumerate(zip(row["words"], row["tags"], strict=True))
]


def conll(*, columns: int = 2, mark: str = " ", first: str = "") -> str:
    between = ["NN", "B-NP"][: columns - 2]
    sentences = (
        "".join(f"{mark.join((word, *between, tag))}\n" for word, tag in zip(row["words"], row["tags"], strict=True))
        for row in TAGGED
    )
    return first + "\n".join(sentences)


JSON: Mapping[str, Kind] = {
    "array.json": Kind(json.dumps(REVIEWS, indent=1), REVIEWS),
    "lines.json": Kind(lines(), REVIEWS),
    "lines.ndjson": Kind(lines(), REVIEWS),
    "blank_lines.jsonl": Kind("\n\n" + lines(), REVIEWS),
    "data.json": Kind(json.dumps({"data": REVIEWS}), REVIEWS),
    "items.json": Kind(json.dumps({"items": REVIEWS}), REVIEWS, ("the list 'items'",)),
    "page.json": Kind(json.dumps({"count": 40, "next": None, "rows": REVIEWS}, indent=2), REVIEWS, ("list 'rows'",)),
    "items.jsonl": Kind(json.dumps({"items": REVIEWS}), REVIEWS, ("the list 'items'",)),
    "pandas.json": Kind(
        json.dumps({name: dict(enumerate(cells)) for name, cells in COLUMNS.items()}), REVIEWS, ("pandas",)
    ),
    "pandas_index.json": Kind(json.dumps(dict(enumerate(REVIEWS))), REVIEWS),
    "pandas_split.json": Kind(
        json.dumps({"columns": [*COLUMNS], "index": [*range(40)], "data": [[*row.values()] for row in REVIEWS]}),
        REVIEWS,
    ),
    "pandas_table.json": Kind(
        json.dumps({"schema": {"fields": [{"name": "text"}]}, "data": [*REVIEWS]}), REVIEWS, ("the list 'data'",)
    ),
    "one_row_with_spans.json": Kind(
        json.dumps({**MISPLACED[0], "text": "\u5317\u4eac\u5f88\u5927"}), None, ("a misplaced span",)
    ),
    "no_items.json": Kind(json.dumps({"items": []}), None, ("no rows",)),
    "two_lists.json": Kind(json.dumps({"a": REVIEWS, "b": REVIEWS}), None, ("one JSON object",)),
    "nested.json": Kind(json.dumps({"result": {"items": REVIEWS}}), None, ("one JSON object", "'result'")),
    "columns.json": Kind(json.dumps(COLUMNS), None, ("one JSON object",)),
    "lists.json": Kind(json.dumps([[*row.values()] for row in REVIEWS]), None, ("each list", "jq -c")),
    "texts.json": Kind(json.dumps(TEXTS), None, ("a text on each line", "jq -r")),
    "pretty.jsonl": Kind("\n".join(json.dumps(row, indent=2) for row in REVIEWS), None, ("several lines", "jq -c .")),
    "empty.json": Kind("[]", None, ("no rows",)),
}
TABLES: Mapping[str, Kind] = {
    "blank_first.csv": Kind("\n\n" + table(), REVIEWS),
    "semicolons.csv": Kind(table(delimiter=";"), REVIEWS),
    "bars.txt": Kind(table(delimiter="|"), REVIEWS),
    "old_mac.csv": Kind(table().replace("\n", "\r"), REVIEWS),
    "index.csv": Kind(table([{"": i, **row} for i, row in enumerate(REVIEWS)]), REVIEWS),
    "extra.csv": Kind(table().replace("\n", ",,\n"), REVIEWS),
    "no_header.csv": Kind(table().partition("\n")[2], REVIEWS),
    "title.csv": Kind("Reviews of 2024\n" + table(), None, ("2 cells where the header has 1",)),
    "title_cells.csv": Kind("Reviews,\n,\n" + table(), None, ("column 2 has no name", "remove the lines above")),
    "title_semicolons.csv": Kind(
        "Reviews\n" + table(delimiter=";"), None, ("names one column, but each line below has a ';'",)
    ),
    "comments.csv": Kind("# by us, in 2024\n# now\n" + table(), None, ("its first line is a comment",)),
    "commas.csv": Kind(
        "text,label\n" + "".join(f"{text}, and more,glad\n" for text in TEXTS),
        None,
        ("3 cells where the header has 2",),
    ),
    "escaped.csv": Kind(
        "text,label\n" + "".join(f'"he \\"{text}\\" to",glad\n' for text in TEXTS),
        None,
        ("Double the quotes inside a quoted cell",),
    ),
    "twice.csv": Kind("text,text,label\na,b,c\n", None, ("'text' more than once",)),
    "header.csv": Kind("text,label\n", None, ("no rows, only a header with 'text', 'label'",)),
    "empty.csv": Kind("", None, ("the file is empty",)),
    "empty.txt": Kind("", None, ("no rows",)),
    "blank.txt": Kind("\n \n", None, ("no column of texts",)),
    "words.jsonl": Kind("hello\nworld\n", None, ("cannot be read as jsonl (line 1",)),
    "rows.docx": Kind("hello", None, ("no format belongs to the extension",)),
    "one_bad_row.csv": Kind(table() + "a,b,c,d\n", REVIEWS, ("1 more cannot be read (line 42: 4 cells where",)),
    "page.csv": Kind("<!DOCTYPE html>\n<html>\n<body>a, b</body>\n", None, ("cannot be read as csv",)),
    "decimal_commas.csv": Kind(table(SCORES, delimiter=";"), None, ("decimal comma, such as", "decimal point")),
    "one_word.csv": Kind(table(ONE_WORD), None, ("each row has one word", "a row for each sentence")),
    "triplets.csv": Kind(table(TRIPLETS), None, ("no column to learn",)),
    "rows": Kind(table(), None, ("no format belongs to the extension ''", "format='csv'")),
    "book.xls": Kind("", None, ("'.xls'", "Save it as .xlsx or .csv")),
    "rows.zip": Kind(zipped, None, ("'.zip'", "Unpack it")),
}
ANNOTATED: Mapping[str, Kind] = {
    "two_columns.conll": Kind(conll(), TAGGED),
    "three_columns.txt": Kind(conll(columns=3), TAGGED),
    "documents.conll": Kind(
        conll(columns=4, first="-DOCSTART- -X- -X- O\n\n"), [{**row, "document": "0"} for row in TAGGED]
    ),
    "tabs.bio": Kind(conll(mark="\t"), TAGGED),
    "tabs.tsv": Kind(conll(mark="\t"), None, ("lines of conll", "format='conll'")),
    "spaces.csv": Kind(conll(), None, ("lines of conll", "format='conll'")),
    "python_lists.csv": Kind(table([{name: str(cell) for name, cell in row.items()} for row in TAGGED]), TAGGED),
    "doccano.jsonl": Kind(
        lines([{"text": text, "label": spans} for text, spans in zip(MEETINGS, SPANS, strict=True)]), WITH_TEXT
    ),
    "nested.jsonl": Kind(lines(NESTED), None, ("share a word",)),
    "misplaced.jsonl": Kind(lines(MISPLACED), None, ("a misplaced span", "the span says 'Zoe'")),
    "labels_first.txt": Kind("".join(f"__label__{row['label']} {row['text']}\n" for row in REVIEWS), REVIEWS),
    "labels_last.txt": Kind("".join(f"{row['text']} __label__{row['label']}\n" for row in REVIEWS), REVIEWS),
    "fasttext.csv": Kind("".join(f"__label__a {text}\n" for text in TEXTS), None, ("format='fasttext'",)),
}

KINDS: Mapping[str, Kind] = {**EXCEL, **ENCODINGS, **OTHERS, **FOLDERS, **JSON, **TABLES, **ANNOTATED}


@pytest.fixture
def draft(base: str, tmp_path: Path) -> Callable[..., RecipeDraft]:
    """Returns the recipe for a file, made with the options."""
    return lambda file, **options: init_recipe(file, model=base, output=tmp_path / "made.toml", **options)


def write(name: str, content: Content, folder: Path) -> Path:
    path = folder / name
    if isinstance(content, str | bytes):
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    else:
        content(path)
    return path


def read(draft: RecipeDraft) -> list[dict[str, Any]]:
    """The rows of all splits, as a run reads them, with the columns that the task learns from."""
    splits = prepare(load_recipe(draft.path)).splits
    rows = [row for table in (splits.train, *splits.validation.values()) for row in table]
    return sorted(({name: cell for name, cell in row.items() if name != "line"} for row in rows), key=str)


@pytest.mark.parametrize("name", KINDS)
def test_a_file_is_read_or_refused_with_a_remedy(name: str, draft: Callable[..., RecipeDraft], tmp_path: Path) -> None:
    kind = KINDS[name]
    path = write(name, kind.content, tmp_path)
    if kind.rows is None:
        with pytest.raises(BertTasksError) as error:
            draft(path)
        text = str(error.value)
        assert error.value.exit_code in (2, 3)
        assert len(text.splitlines()) <= 10
    else:
        result = draft(path)
        text = "\n".join(result.lines())
        assert read(result) == sorted(map(dict, kind.rows), key=str)
    for words in kind.words:
        assert words in text


def test_a_sheet_may_be_chosen(draft: Callable[..., RecipeDraft], tmp_path: Path) -> None:
    path = write("splits.xlsx", EXCEL["splits.xlsx"].content, tmp_path)
    result = draft(path, format="xlsx/test")
    assert read(result) == sorted(REVIEWS[30:], key=str)
    assert "is read" not in "\n".join(result.lines())
    result.path.unlink()
    with pytest.raises(BertTasksError, match=r"no sheet 'tests'\. The sheets are 'test', 'train'"):
        draft(path, format="xlsx/tests")


def test_check_says_which_sheet_was_read(draft: Callable[..., RecipeDraft], tmp_path: Path) -> None:
    path = write("readme.xlsx", EXCEL["readme.xlsx"].content, tmp_path)
    report = check(load_recipe(draft(path).path))
    assert any("sheet 'Data' is read" in line for line in report.lines())
