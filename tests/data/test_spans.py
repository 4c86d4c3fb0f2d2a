"""Entities by their characters in a text: the forms that are read, the tags that they become, and their errors."""

import json
import random
from collections.abc import Callable
from typing import Any

from bert_tasks.data.conll import entities
from bert_tasks.data.rows import Rows
from bert_tasks.data.spans import parse_spans, word_tags
from bert_tasks.data.words import word_spans
from bert_tasks.tasks import TokenClassification

Read = Callable[..., Rows]
COLUMNS = TokenClassification.columns
ALPHABET = "ab 'é中文日عربي𝒞😀\u0301\r\n.-1"


def read_rows(read: Read, *rows: dict[str, Any], **options: Any) -> Rows:
    return read("".join(json.dumps(row) + "\n" for row in rows), "rows.jsonl", columns=COLUMNS, **options)


def test_offsets_of_a_browser_are_told_by_the_text_of_the_span() -> None:
    """JavaScript counts a character outside the basic plane as two."""
    spans = parse_spans([{"start": 5, "end": 8, "label": "PER", "text": "Ada"}])
    assert word_tags(spans, word_spans("😀😀 Ada"), "😀😀 Ada") == (["O", "O", "B-PER"], 0)


def test_spans_come_back_from_the_tags() -> None:
    """Any words of any text are an entity that its tags give back, with the same characters."""
    generator = random.Random(0)
    for _ in range(200):
        text = "".join(generator.choices(ALPHABET, k=generator.randrange(1, 40)))
        words = word_spans(text)
        bounds = sorted(generator.sample(range(len(words) + 1), k=min(len(words) + 1, generator.randrange(6))))
        ranges = list(zip(bounds[::2], bounds[1::2], strict=False))
        spans = [[words[first][0], words[end - 1][1], generator.choice("AB")] for first, end in ranges]
        tags, moved = word_tags(parse_spans(spans), words, text)
        read = [[words[entity.start][0], words[entity.end - 1][1], entity.type] for entity in entities(tags)]
        assert (read, moved) == (spans, 0)


def test_words_without_a_text_are_counted_with_a_space_between_them(read: Read) -> None:
    """As predictions of words count them, which may be corrected and read again."""
    (row,) = read_rows(read, {"words": ["Ada", "Love lace", "!"], "entities": [[4, 13, "PER"]]})
    assert row["tags"] == ["O", "B-PER", "O"]
