"""Sentences with one word a line: CoNLL columns and CoNLL-U."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_tasks.data.checks import infer_labels
from bert_tasks.data.columns import Column
from bert_tasks.data.formats import FORMATS
from bert_tasks.data.issues import RowIssues
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.rows import Rows
from bert_tasks.errors import DataError
from bert_tasks.outputs.tag_prediction import TokenPrediction
from bert_tasks.tasks.token_classification import TokenClassification

WORDS = Column(name="words", kind="words")
TAGS = Column(name="tags", kind="tags", required=False)
COLUMNS = (WORDS, TAGS, Column(name="document", kind="id", required=False))

Read = Callable[..., Rows]


def sentences(table: Rows) -> list[tuple[list[str], list[str]]]:
    return [(row["words"], row["tags"]) for row in table]


def lines(error: pytest.ExceptionInfo[RowIssues]) -> list[str]:
    return str(error.value).splitlines()[1:]


TWO = [(["EU", "rejects"], ["B-ORG", "O"]), (["No"], ["O"])]


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("EU\tB-ORG\nrejects\tO\n\nNo\tO\n", id="tabs"),
        pytest.param("EU B-ORG\nrejects   O\n\nNo \t O \n", id="runs of spaces"),
        pytest.param("EU NNP B-NP B-ORG\nrejects VBZ B-VP O\n\nNo DT O O\n", id="four columns"),
        pytest.param("EU\tNNP\tB-NP\tB-ORG\nrejects\tVBZ\tB-VP\tO\n\nNo\tDT\tO\tO\n", id="four columns, tabs"),
        pytest.param("EU\tB-ORG\r\nrejects\tO\r\n\r\nNo\tO\r\n", id="crlf"),
        pytest.param("EU\tB-ORG\nrejects\tO\n\nNo\tO", id="no last line end"),
        pytest.param("\n\nEU\tB-ORG\nrejects\tO\n\n \n\t\nNo\tO\n\n\n", id="blank lines"),
        pytest.param("\ufeffEU\tB-ORG\nrejects\tO\n\nNo\tO\n", id="byte order mark"),
        pytest.param("# id = 1\nEU\tB-ORG\nrejects\tO\n\n# text = No\nNo\tO\n", id="comments, tabs"),
        pytest.param("# id I-1\nEU B-ORG\nrejects O\n\n# two\nNo O\n", id="comments, spaces"),
    ],
)
def test_the_same_sentences_in_every_layout(read: Read, content: str) -> None:
    table = read(content, "rows.conll", columns=COLUMNS)
    assert sentences(table) == TWO
    assert "document" not in table[0]


def test_rows_carry_the_line_of_their_first_word(read: Read) -> None:
    table = read("# one\nEU\tO\nrejects\tO\n\n\n# two\nNo\tO\n", "rows.txt", columns=COLUMNS)
    assert [row["line"] for row in table] == [2, 7]


def test_documents(read: Read) -> None:
    content = "a\tO\n-DOCSTART- -X- -X- O\n\nb\tO\n\nc\tO\n-DOCSTART-\td\te\nd\tO\n"
    table = read(content, "rows.bio", columns=COLUMNS)
    assert [(row["words"], row["document"]) for row in table] == [
        (["a"], None),
        (["b"], "0"),
        (["c"], "0"),
        (["d"], "1"),
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param("#\tO\na\tO\n", ["#", "a"], id="first, tabs"),
        pytest.param("# O\na O\n", ["#", "a"], id="first, spaces"),
        pytest.param("a O\n# O\n", ["a", "#"], id="spaces"),
        pytest.param("a NN\n# x\n# one two\n", ["a", "#"], id="within a sentence"),
        pytest.param("# #\na NN\n", ["#", "a"], id="Penn's tag"),
        pytest.param("# #\n", ["#"], id="alone"),
        pytest.param("#\tx\na\ty\n", ["#", "a"], id="any tag after a tab"),
        pytest.param("# of O\n# O\na O\n", ["#", "a"], id="a comment that ends in a tag"),
        pytest.param("-DOCSTART-s O\na O\n", ["-DOCSTART-s", "a"], id="a longer word than -DOCSTART-"),
        pytest.param("#tag O\n## O\n", ["#tag", "##"], id="more than a hash"),
        pytest.param("a\tO\n# b\tO\n", ["a", "# b"], id="a hash in a longer word"),
        pytest.param(
            "\u200b\tO\n\tO\n\u00a0\tO\nNew York\tO\n\u2028\tO\n",
            ["\u200b", "", "\u00a0", "New York", "\u2028"],
            id="odd",
        ),
        pytest.param("\u00a0 O\na\u3000b O\n", ["\u00a0", "a\u3000b"], id="only spaces and tabs part columns"),
    ],
)
def test_words_that_could_be_taken_for_something_else(read: Read, content: str, words: list[str]) -> None:
    assert read(content, "rows.iob", columns=COLUMNS)[0]["words"] == words


def test_columns_by_number(read: Read) -> None:
    content = "EU NNP B-NP B-ORG\nrejects VBZ B-VP O\n"
    tags = {number: read(content, "rows.conll", columns=COLUMNS, names={"tags": number})[0]["tags"] for number in "123"}
    assert tags == {"1": ["NNP", "VBZ"], "2": ["B-NP", "B-VP"], "3": ["B-ORG", "O"]}
    with pytest.raises(DataError, match=r"no column '4'\n.*columns are: '0', '1', '2', '3', 'tags', 'words'"):
        read(content, "rows.conll", columns=COLUMNS, names={"tags": "4"})


def test_words_alone_are_enough_for_prediction(read: Read) -> None:
    content = "# one\nEU\nrejects\n\n#\n"
    table = read(content, "rows.txt", columns=COLUMNS, require_labels=False)
    assert list(table) == [{"words": ["EU", "rejects"], "line": 2}, {"words": ["#"], "line": 5}]
    with pytest.raises(DataError, match=r"rows.txt: no column 'tags'"):
        read(content, "rows.txt", columns=COLUMNS)


def test_faults_are_named_by_line(read: Read) -> None:
    content = "EU\tB-ORG\nrejects O\nNew\tYork\tO\n\nno\t\nway\tO\n\nlast\tO\n"
    with pytest.raises(RowIssues) as error:
        read(content, "rows.conll", columns=COLUMNS)
    assert lines(error) == [
        "  rows.conll:2: 1 column where the file's first word has 2 columns, separated by tabs: 'rejects O'",
        "  rows.conll:3: 3 columns where the file's first word has 2 columns, separated by tabs: 'New\\tYork\\tO'",
        "  rows.conll:5: empty tag (tag 1) in column 'tags': ['', 'O']. Write 'O' for a word that is part of nothing.",
    ]


def test_numbers_among_tags_are_refused_when_they_are_inferred(read: Read) -> None:
    content = "a B-PER\nb O\n\nc 0\nd O\n"
    with pytest.raises(RowIssues, match=r"rows.txt:4: number among names in column 'tags': '0'"):
        infer_labels(read(content, "rows.txt", columns=COLUMNS), COLUMNS)
    with pytest.raises(RowIssues, match=r"rows.txt:4: unknown tag in column 'tags': '0'. Expected O or a tag such as"):
        read(content, "rows.txt", columns=COLUMNS, labels=("O", "B-LOC"))
    assert len(read(content, "rows.txt", columns=COLUMNS, labels=("O", "B-PER", "0"))) == 2


def test_files_without_sentences(read: Read) -> None:
    for content in ("", "\n\n", "# nothing\n", "-DOCSTART- O\n\n"):
        with pytest.raises(DataError, match=r"rows.txt: no rows$"):
            read(content, "rows.txt", columns=COLUMNS)


def read_back(content: str) -> list[list[tuple[str, str]]]:
    """(word, tag) of each sentence of a file."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rows.conll"
        path.write_bytes(content.encode())
        with FORMATS["conll"].open(path, ReadOptions()) as opened:
            return [
                list(zip(words, tags, strict=True))
                for batch in opened.batches
                for words, tags in zip(batch.cells["words"], batch.cells["tags"], strict=True)
            ]


word = st.text(st.characters(codec="utf-8", exclude_characters="\t\n\r\ufeff"), max_size=4).map(
    lambda text: text.strip(" ")
)
tag = st.sampled_from(["O", "B-PER", "I-PER", "S-a-b"])


@given(
    text=st.lists(st.lists(st.tuples(word, tag), min_size=1, max_size=4), max_size=4),
    end=st.sampled_from(["\n", "\r\n"]),
)
@settings(max_examples=60, deadline=None)
def test_what_is_written_with_tabs_comes_back(text: list[list[tuple[str, str]]], end: str) -> None:
    content = end.join(end.join("\t".join(cells) for cells in sentence) + end for sentence in text)
    assert read_back(content) == text


hashes = st.lists(st.sampled_from(["#", "##", "#a", "a", "b"]), min_size=1, max_size=4)
penn = st.sampled_from(["#", "$", "NN", "SYM", "O", "B-X", "x"])
comments = st.lists(st.sampled_from(["# one", "# a b c d e f", "# text = # #", "# id 7"]), max_size=2)


@given(
    text=st.lists(st.tuples(comments, hashes, st.data()), min_size=1, max_size=4),
    between=st.sampled_from(["\t", " "]),
    more=st.sampled_from([(), ("_", "B-NP")]),
)
@settings(max_examples=100, deadline=None)
def test_no_word_is_lost_to_a_comment(
    text: list[tuple[list[str], list[str], st.DataObject]], between: str, more: tuple[str, ...]
) -> None:
    """Every tag is that of an earlier word without a hash, which is how a reader knows it."""
    sentences = [(above, [(word, data.draw(penn)) for word in words]) for above, words, data in text]
    used = sorted({tag for _, rows in sentences for _, tag in rows})
    sentences.insert(0, ([], [("w", tag) for tag in used]))
    blocks = [[*above, *(between.join([word, *more, tag]) for word, tag in rows)] for above, rows in sentences]
    content = "".join("\n".join(block) + "\n\n" for block in blocks)
    assert read_back(content) == [rows for _, rows in sentences]


@given(st.lists(hashes, min_size=1, max_size=4), st.data())
@settings(max_examples=60, deadline=None)
def test_rendered_predictions_come_back(text: list[list[str]], data: st.DataObject) -> None:
    """What ``predict`` writes as CoNLL holds every word of known tags, a sentence's first one too."""
    task = TokenClassification.of(labels=("#", "NN", "SYM"), scheme="raw")
    tags = [[data.draw(st.sampled_from(task.output.labels)) for _ in words] for words in text]
    text, tags = [["w", "w"], *text], [["NN", "SYM"], *tags]
    predictions = [
        TokenPrediction(words=tuple(words), tags=tuple(sentence_tags), scores=(1.0,) * len(words), entities=())
        for words, sentence_tags in zip(text, tags, strict=True)
    ]
    rows = [{"words": words} for words in text]
    content = task.output.files[".conll"].render(task.output, ".conll", predictions, rows)[""]
    assert [[word for word, _ in sentence] for sentence in read_back(content)] == text


UNIVERSAL = """\
# newdoc id = first
# sent_id = 1
# text = Don't.
1-2\tDon't\t_\t_\t_\t_\t_\t_\t_\t_
1\tDo\tdo\tAUX\tVBP\tMood=Ind\t0\troot\t_\t_
2\tn't\tnot\tPART\tRB\t_\t1\tadvmod\t_\tSpaceAfter=No
2.1\tgo\tgo\tVERB\tVB\t_\t_\t_\t_\t_
3\t.\t.\tPUNCT\t.\t_\t1\tpunct\t_\t_

# newdoc
1\t_\t_\tX\t_\t_\t0\troot\t_\t_

# newdocs are something else
1\t#\t#\tSYM\t_\t_\t0\troot\t_\t_
"""


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_universal_dependencies(read: Read, end: str) -> None:
    content = UNIVERSAL.replace("\n", end)
    assert list(read(content, "en-ud-dev.conllu", columns=COLUMNS)) == [
        {"words": ["Do", "n't", "."], "tags": ["AUX", "PART", "PUNCT"], "document": "0", "line": 5},
        {"words": ["_"], "tags": ["X"], "document": "1", "line": 11},
        {"words": ["#"], "tags": ["SYM"], "document": "1", "line": 14},
    ]


def test_other_columns_of_universal_dependencies(read: Read) -> None:
    first = "\n".join(UNIVERSAL.splitlines()[2:8])
    assert read(first, "a.conllu", columns=COLUMNS, names={"tags": "xpos", "words": "lemma"})[0] == {
        "words": ["do", "not", "."],
        "tags": ["VBP", "RB", "."],
        "line": 3,
    }
    with pytest.raises(DataError, match="no column 'upos_', did you mean 'upos'"):
        read(first, "a.conllu", columns=COLUMNS, names={"tags": "upos_"})


def test_tags_that_are_not_told_are_no_targets(read: Read) -> None:
    blind = "1\ta\t_\t_\t_\t_\t_\t_\t_\t_\n2\tb\t_\t_\t_\t_\t_\t_\t_\t_\n"
    assert list(read(blind, "a.conllu", columns=COLUMNS, require_labels=False)) == [{"words": ["a", "b"], "line": 1}]
    with pytest.raises(DataError, match="no column 'upos'"):
        read(blind, "a.conllu", columns=COLUMNS)


def test_faults_of_universal_dependencies(read: Read) -> None:
    with pytest.raises(RowIssues) as error:
        read("1\ta\n\nx\ta\t_\tX\t_\t_\t_\t_\t_\t_\n\n" + UNIVERSAL, "a.conllu", columns=COLUMNS)
    assert lines(error) == [
        "  a.conllu:1: 2 columns where CoNLL-U has 10, separated by tabs: '1\\ta'",
        "  a.conllu:3: the id 'x' where CoNLL-U has 1, a range such as 1-2, or an empty node such as 1.1: "
        r"'x\ta\t_\tX\t_\t_\t_\t_\t_\t_'",
    ]
