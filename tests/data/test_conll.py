"""Sentences with one word a line: CoNLL columns and CoNLL-U."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_tasks.data.columns import Column
from bert_tasks.data.formats import FORMATS
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.rows import Rows
from bert_tasks.outputs.tag_prediction import TokenPrediction
from bert_tasks.tasks.token_classification import TokenClassification

WORDS = Column(name="words", kind="words")
TAGS = Column(name="tags", kind="tags", required=False)
COLUMNS = (WORDS, TAGS, Column(name="document", kind="id", required=False))

Read = Callable[..., Rows]


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
@settings(max_examples=30, deadline=None)
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
@settings(max_examples=40, deadline=None)
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
@settings(max_examples=25, deadline=None)
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
