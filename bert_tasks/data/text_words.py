"""The words of a text: where a tagger that was trained on words is given a text.

Owns how texts are split, as annotated corpora of English are: at white space and punctuation. Must not know tasks.
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from bert_tasks.data.columns import Column, column_of

# Over the classes of characters: an abbreviation of letters (U.S.), a word, in which single marks may stand between
# letters or digits (state-of-the-art, 3.5, O'Neill), or one character of punctuation.
_WORD = re.compile(r"(?:lp){2,}(?![lw])|[lw]+(?:[jp][lw]+)*|[^s]")
_JOINING = "'\u2019-"
# As in the Penn Treebank and CoNLL-2003: Luigi 's, did n't.
_CLITIC = re.compile(r"(?<=.)(?:n['\u2019]t|['\u2019](?:s|re|ve|ll|d|m))$", re.IGNORECASE | re.DOTALL)


def word_spans(text: str) -> list[tuple[int, int]]:
    """Where each word of a text begins and ends, in characters. Every character but white space is in one word."""
    spans: list[tuple[int, int]] = []
    for found in _WORD.finditer("".join(map(_class_of, text))):
        start, end = found.span()
        clitic = _CLITIC.search(text[start:end])
        cut = end if clitic is None else start + clitic.start()
        spans += [(start, cut)] if cut == end else [(start, cut), (cut, end)]
    return spans


def place_words(words: Sequence[str], text: str) -> list[tuple[int, int]] | None:
    """Where the words stand in the text, one behind the other; None if they do not."""
    spans: list[tuple[int, int]] = []
    end = 0
    for word in words:
        start = text.find(word, end)
        if start < 0:
            return None
        end = start + len(word)
        spans.append((start, end))
    return spans


def with_words(cells: Mapping[str, Any], columns: Sequence[Column], names: Mapping[str, str]) -> Mapping[str, Any]:
    """The cells, with the words of the text where there is a text and no words.

    Args:
        names: the task's columns -> those of the cells, where they differ.
    """
    words, text = text_of_words(columns)
    if words is None or text is None:
        return cells
    words_name, value = names.get(words.name, words.name), cells.get(names.get(text.name, text.name))
    if cells.get(words_name) is not None or not isinstance(value, str):
        return cells
    return {**cells, words_name: [value[start:end] for start, end in word_spans(value)]}


def text_of_words(columns: Sequence[Column]) -> tuple[Column | None, Column | None]:
    """The column of words, and that of the text that may stand in its place, of a task that has both."""
    words, text = column_of(columns, "words"), column_of(columns, "text")
    return (None, None) if words is None or text is None else (words, text)


def _class_of(character: str) -> str:
    """l letter, w other part of a word, s white space, p full stop, j mark that joins, o other."""
    if character.isspace():
        return "s"
    kind = unicodedata.category(character)[0]
    if kind in "LMN":
        return "l" if kind == "L" else "w"
    return "p" if character == "." else "j" if character in _JOINING else "o"
