"""Features, which are windows of rows as a model reads them, and how the windows of a row belong together.

Tasks make features (``Task.features``), and outputs read what belongs to logits from them.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NotRequired, TypedDict

NO_WORD = -1  # the word number of tokens that the tokenizer's post-processor added


class Feature(TypedDict):
    """One window of one row, which is flat, so that Arrow stores it as it is.

    ``Task.features`` makes them, the cache keeps them, and ``Output`` reads from them what belongs to logits. A task
    sets only the keys that it needs, because each of them takes space in the cache.

    Attributes:
        row: Index of the row. The features of a row are neighbours.
        input_ids: The ids of the tokens, special tokens included, without padding.
        token_type_ids: The segment of each token, for a pair of texts 0 and 1, if the model has segments.
        labels: The labels as numbers. Absent (or None, from Arrow) if the row has no label.
        gather_positions: The tokens that a head with logits per token reads, ascending. All if absent or None.
        word_ids: For each of these tokens the number of its word in the row, for ``Output.decode``.
        offsets: For ``Output.compact`` and ``Output.decode``, three numbers per token of a span task, which are its
            first character, last character + 1, and role. Training does not load them.
        lost_tokens, lost_answers: Number of the row's tokens, and answers, that no window holds completely.
        sentence_starts: The tokens at which sentences begin, for a task that makes pairs of sentences.
        fields: More numbers for ``Output.loss``, by name. ``Task.prepare`` makes them, and they are never cached.
        head: The name of the task whose head reads the window, if there are several tasks.

    Examples:
        >>> Feature(row=0, input_ids=[101, 7592, 102], token_type_ids=[0, 0, 0], labels=[1.0])
    """

    row: int
    input_ids: list[int]
    token_type_ids: list[int]
    labels: NotRequired[list[float] | None]
    gather_positions: NotRequired[list[int] | None]
    word_ids: NotRequired[list[int] | None]
    offsets: NotRequired[list[int] | None]
    lost_tokens: NotRequired[int]
    lost_answers: NotRequired[int]
    sentence_starts: NotRequired[list[int] | None]
    fields: NotRequired[Mapping[str, Sequence[float]]]
    head: NotRequired[str | None]


def windows_by_row(features: Sequence[Feature]) -> list[list[int]]:
    """Returns the indices of the features of each row."""
    windows: list[list[int]] = []
    row: int | None = None
    for index, feature in enumerate(features):
        if feature["row"] != row:  # the windows of a row are neighbours
            row = feature["row"]
            windows.append([])
        windows[-1].append(index)
    return windows


def word_starts(word_ids: Sequence[int] | None) -> list[bool]:
    """Returns which of the read tokens of a window begin a word, none without them."""
    if word_ids is None:
        return []
    return [word != before for before, word in pairwise([-1, *word_ids])]
