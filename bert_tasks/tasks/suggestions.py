"""Settings with which ``init`` starts a recipe, from the lengths of the rows."""

from typing import NamedTuple

_LENGTHS = (32, 48, 64, 96, 128, 192, 256, 384, 512)  # from which a recipe starts
_TOKENS_PER_WORD = 1.3  # a rule of thumb for a language that the tokenizer knows
_SPECIAL_TOKENS = 4  # the most that a tokenizer sets, around a pair of RoBERTa


class Suggestion(NamedTuple):
    """A setting that ``init`` writes into a recipe.

    Attributes:
        comment: The reason, in a few words.
        is_active: False for a line that the user may uncomment.
    """

    name: str
    value: object
    comment: str
    is_active: bool = True


def needed_tokens(words: int) -> float:
    """Returns the number of tokens for words, in a language of the tokenizer."""
    return words * _TOKENS_PER_WORD + _SPECIAL_TOKENS


def suggested_length(words: int, longest: int) -> int:
    """Returns a ``max_length`` for texts of this number of words, at most ``longest``."""
    needed = needed_tokens(words)
    for length in _LENGTHS:
        if length >= needed:
            return min(length, longest)
    return min(_LENGTHS[-1], longest)
