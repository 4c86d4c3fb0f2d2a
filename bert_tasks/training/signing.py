"""Texts in a run's folder that this package wrote, told from those that a person has changed since.

Owns the line at their end that says so. Must not know what the texts are about.
"""

import hashlib
import re

_SIGNED = re.compile(r"\n<!-- bert_tasks wrote this card \(sha256 of the above: ([0-9a-f]{64})\)\. [^\n]*-->\n\Z")


def signed(text: str) -> str:
    """The card with the line at its end."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    end = "Once it is edited, it is no longer replaced. -->"
    return f"{text}\n<!-- bert_tasks wrote this card (sha256 of the above: {digest}). {end}\n"


def is_ours(text: str) -> bool:
    """Whether this package wrote a card and nobody has changed it."""
    found = _SIGNED.search(text)
    return found is not None and hashlib.sha256(text[: found.start()].encode()).hexdigest() == found[1]
