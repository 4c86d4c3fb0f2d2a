"""Converts entities from characters of a text, as annotation tools write, to tags of words.

A tagger predicts one tag for each word, so a span of characters becomes the words that it touches, in IOB2.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bert_tasks.data.cells import label_name
from bert_tasks.data.issues import CellError, shortened

_EXAMPLE = 'Write spans such as [[0, 5, "PER"]].'
# Keys of a span in prodigy, spaCy and transformers, in doccano, and in Label Studio.
_START, _END = ("start", "start_offset"), ("end", "end_offset")
_LABEL = ("label", "label_name", "entity_group", "labels")


class Span(NamedTuple):
    """An entity.

    Attributes:
        start, end: Characters from ``start`` to ``end - 1``.
        label: Type of the entity.
        text: The characters, if the source repeats them.
    """

    start: int
    end: int
    label: str
    text: str | None = None


def parse_spans(value: Any) -> list[Span]:
    """Returns the spans of a cell.

    Args:
        value: A list of ``[start, end, label]`` or of objects with these keys, ``{type: {text: [[start, last]]}}`` as
            CLUENER has it (https://github.com/CLUEbenchmark/CLUENER2020, the last character is part of the span), or a
            JSON text of one of them.

    Raises:
        CellError: The value has another form.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise CellError("not JSON", _EXAMPLE) from None
    if isinstance(value, Mapping):
        return list(_by_type(value))
    if not isinstance(value, list | tuple):
        raise CellError("not a list of spans", _EXAMPLE)
    return [_span(number, item) for number, item in enumerate(value, start=1)]


def _span(number: int, item: Any) -> Span:
    """Returns the span of a list or an object. ``number`` names it in messages."""
    text = None
    if isinstance(item, Mapping):
        start, end, label = _first_value(item, _START), _first_value(item, _END), _first_value(item, _LABEL)
        text = item.get("text")
        if not isinstance(text, str):
            text = None
        if isinstance(label, list | tuple) and len(label) == 1:
            label = label[0]
    elif isinstance(item, list | tuple) and len(item) == 3:
        start, end, label = item
    else:
        raise CellError(f"span {number} is not [start, end, label]", _EXAMPLE)
    if type(start) is not int or type(end) is not int:  # True is an int for isinstance
        raise CellError(f"span {number} has no whole numbers as start and end", _EXAMPLE)
    if not 0 <= start < end:
        raise CellError(f"span {number} is from {start} to {end}", "The end is the character after the last one.")
    return Span(start, end, label_name(label), text)


def _first_value(item: Mapping[str, Any], keys: Sequence[str]) -> Any:
    """Returns the value of the first key that an object has, or None."""
    for key in keys:
        if key in item:
            return item[key]
    return None


def _by_type(value: Mapping[str, Any]) -> Iterator[Span]:
    """Yields the spans of CLUENER's form, whose last characters are part of the spans."""
    try:
        for label, texts in value.items():
            for text, places in texts.items():
                for start, last in places:
                    yield Span(start, last + 1, label_name(label), text)
    except (AttributeError, TypeError, ValueError):
        raise CellError("not spans by type and text", 'Write {"PER": {"Ada": [[0, 2]]}}.') from None


def word_tags(spans: Sequence[Span], words: Sequence[tuple[int, int]], text: str) -> tuple[list[str], int]:
    """Returns the IOB2 tag of each word, and the number of spans within a word.

    A span that begins or ends within a word is moved to the borders of its words.

    Args:
        spans: Entities of the text.
        words: Start and end of each word.
        text: The text.

    Raises:
        CellError: A span is outside the text or has no word, or two spans share a word.
    """
    tags = ["O"] * len(words)
    holders: dict[int, Span] = {}
    moved = 0
    for span in sorted((_in_characters(span, text) for span in spans), key=lambda span: span.start):
        # The words that overlap the span. Annotators often take a part of a word, or a space beside it.
        inside = [number for number, (start, end) in enumerate(words) if start < span.end and span.start < end]
        name = f"{shortened(text[span.start : span.end])} ({span.label})"
        if not inside:
            raise CellError(f"the span {name} has no word", "Remove it.")
        other = next((holders[number] for number in inside if number in holders), None)
        if other is not None:
            pair = f"{shortened(text[other.start : other.end])} ({other.label}) and {name}"
            raise CellError(f"the spans {pair} share a word", "Keep one of them, because a word has one tag.")
        moved += words[inside[0]][0] < span.start or span.end < words[inside[-1]][1]
        holders |= dict.fromkeys(inside, span)
        tags[inside[0]] = f"B-{span.label}"
        for number in inside[1:]:
            tags[number] = f"I-{span.label}"
    return tags, moved


def _in_characters(span: Span, text: str) -> Span:
    """Returns the span with offsets in characters.

    Tools in a browser count a character outside the basic plane twice (UTF-16). The span's text shows it.
    """
    if span.text is None or text[span.start : span.end] == span.text:
        if span.end > len(text):
            raise CellError(f"a span that ends at {span.end}", f"The text has {len(text)} characters.")
        return span
    units = text.encode("utf-16-le", "surrogatepass")  # two bytes for each unit
    start = len(units[: 2 * span.start].decode("utf-16-le", "replace"))
    end = len(units[: 2 * span.end].decode("utf-16-le", "replace"))
    if text[start:end] == span.text:
        return span._replace(start=start, end=end)
    hint = f"The text has {shortened(text[span.start : span.end])} there, but the span says {shortened(span.text)}."
    raise CellError("a misplaced span", hint)
