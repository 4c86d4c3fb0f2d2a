"""Splits a text into words for taggers that were trained on words.

A tagger learns from corpora whose words are already separate, in which punctuation is a word of its own. A text to
predict is split in the same way here, before the model's tokenizer splits the words into sub-words.
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from itertools import accumulate

# A regular expression over classes of characters. It matches an abbreviation (U.S.), a word, with marks between letters
# or digits (state-of-the-art, 3.5, O'Neill), a Chinese or Japanese character, or one character of punctuation.
_WORD = re.compile(r"(?:lp){2,}(?![lmw])|[lmw]+(?:[jp][lmw]+)*|cm*|[^s]")
# Han, Hiragana and Katakana have no spaces between words. Corpora such as WikiANN annotate each character.
_CJK = re.compile(
    "[\u3005\u3007\u3040-\u3098\u309b-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f"
    "\U00020000-\U0003ffff]"
)
_JOINING = "'\u2019-"
_CLASSES = {"L": "l", "M": "m", "N": "w"}  # Unicode's letters, marks and numbers -> their classes
# As in the Penn Treebank and CoNLL-2003, for example Luigi 's and did n't.
_CLITIC = re.compile(r"(?<=.)(?:n['\u2019]t|['\u2019](?:s|re|ve|ll|d|m))$", re.IGNORECASE | re.DOTALL)


def word_spans(text: str) -> list[tuple[int, int]]:
    """Returns start and end of each word of a text, in characters.

    Every character but white space is in one word.

    Examples:
        >>> text = "Luigi's 3.5%"
        >>> [text[start:end] for start, end in word_spans(text)]
        ['Luigi', "'s", '3.5', '%']
    """
    spans: list[tuple[int, int]] = []
    # One class for each character, so that a match in the classes has the same positions as in the text.
    for match in _WORD.finditer("".join(map(_class_of, text))):
        start, end = match.span()
        clitic = _CLITIC.search(text[start:end])
        if clitic is None:
            spans.append((start, end))
        else:
            cut = start + clitic.start()
            spans += [(start, cut), (cut, end)]
    return spans


def place_words(words: Sequence[str], text: str) -> list[tuple[int, int]] | None:
    """Returns the position of each word in the text, or None if a word is missing.

    The search for a word begins behind the one before, because the same word may occur several times.
    """
    spans: list[tuple[int, int]] = []
    end = 0
    for word in words:
        start = text.find(word, end)
        if start < 0:
            return None
        end = start + len(word)
        spans.append((start, end))
    return spans


def located_words(words: Sequence[str], text: str | None) -> tuple[str, str, list[tuple[int, int]]]:
    """Returns a text that has the words of a row, and the position of each word in it.

    Returns:
        The column of the text, which is "text", or "words" if the row has no text with these words. Then the text is
        all words with a space between them. The text and the positions of the words follow.
    """
    if text is not None:
        places = place_words(words, text)
        if places is not None:
            return "text", text, places
    starts = accumulate((len(word) + 1 for word in words), initial=0)
    places = [(start, start + len(word)) for start, word in zip(starts, words, strict=False)]
    return "words", " ".join(words), places


def context_texts(row: Mapping[str, object]) -> dict[str, str]:
    """Returns what a tagger reads before the words of a row, by column: its question, if any, and its context.

    A row whose context is missing or blank has nothing before its words. A question is read only before a context.

    Examples:
        >>> context_texts({"words": ["At", "nine", "."], "question": "When?", "context": "The shop opens at ten."})
        {'question': 'When?', 'context': 'The shop opens at ten.'}
    """
    texts: dict[str, str] = {}
    for name in ("question", "context"):
        text = row.get(name)
        if isinstance(text, str) and text.strip() != "":
            texts[name] = text
    if "context" not in texts:
        return {}
    return texts


def _class_of(character: str) -> str:
    """Returns the class of a character, for example l for a letter and w for a digit."""
    if character.isspace():
        return "s"
    if _CJK.match(character):
        return "c"
    category = unicodedata.category(character)[0]  # its first letter is the major class, such as L for all letters
    if category in _CLASSES:
        return _CLASSES[category]
    if character == ".":
        return "p"
    if character in _JOINING:
        return "j"
    return "o"
