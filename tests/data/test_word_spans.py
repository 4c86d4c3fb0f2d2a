"""Texts in place of words: every character but white space is in one word, and words stand where they were found."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_tasks.data.words import place_words, word_spans


@given(text=st.text())
def test_words_cover_a_text_in_order(text: str) -> None:
    spans = word_spans(text)
    covered = [position for start, end in spans for position in range(start, end)]
    assert covered == sorted(set(covered))
    assert "".join(text[position] for position in covered) == "".join(letter for letter in text if not letter.isspace())
    assert all(start < end for start, end in spans)
    assert place_words([text[start:end] for start, end in spans], text) == spans


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Ada met Luigi's son in the U.S. on Monday.", "Ada met Luigi 's son in the U.S. on Monday ."),
        ("He didn\u2019t pay $3.50, (really)!", "He did n\u2019t pay $ 3.50 , ( really ) !"),
        ("state-of-the-art O'Neill", "state-of-the-art O'Neill"),
        (
            "na\u0131\u0308ve \u0939\u093f\u0928\u094d\u0926\u0940 \U0001f600 \u4f60\u597d",
            "na\u0131\u0308ve \u0939\u093f\u0928\u094d\u0926\u0940 \U0001f600 \u4f60 \u597d",
        ),
        ("东京タワー、2003年。", "东 京 タ ワ ー 、 2003 年 。"),
        ("か\u3099く", "か\u3099 く"),
        ("زارت القاهرةَ، يوم الثلاثاء.", "زارت القاهرةَ ، يوم الثلاثاء ."),
        ("Die Straße („Ring“) nach Köln-Mülheim", "Die Straße ( „ Ring “ ) nach Köln-Mülheim"),
        (" \n\t", ""),
    ],
)
def test_words_are_those_of_annotated_corpora(text: str, words: str) -> None:
    assert [text[start:end] for start, end in word_spans(text)] == words.split()


def test_words_that_are_not_those_of_the_text() -> None:
    assert place_words(["b", "a"], "a b") is None
    assert place_words([], "a b") == []
