"""Owns which characters a terminal obeys instead of showing them, by the categories of Unicode."""

import unicodedata

# Controls, formats, surrogates, private and unassigned characters, and the separators of lines and paragraphs.
_ACTING = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
# Line feed and tab lay out a message; the joiners are part of words in some scripts and of emoji.
_LEFT = "\n\t\u200c\u200d"


def acting(text: str) -> set[str]:
    """Returns the characters of a text that a terminal would not show but obey."""
    return {character for character in text if character not in _LEFT and unicodedata.category(character) in _ACTING}
