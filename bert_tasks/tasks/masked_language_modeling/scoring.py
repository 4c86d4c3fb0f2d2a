"""Scores of whole texts: how probable each token is to a masked language model that sees the others.

Owns which tokens are masked while one of them is scored, and what the scores of a text add up to.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from bert_tasks.tasks.base import Feature, Prediction
from bert_tasks.tasks.masked_language_modeling.masking import NO_WORD

Score = Literal["none", "pppl", "pll-word-l2r"]
_MOST = 700.0  # exp of more is infinite


@dataclass(frozen=True, kw_only=True)
class TextScore(Prediction):
    """The score of a text, and the number of tokens that it is made of; see ``text_score``."""

    score: float | None
    tokens: int


def scored_copies(feature: Feature, *, mask_id: int, score: Score) -> Iterator[Feature]:
    """A copy of the window for each of its words' tokens, in which that token is masked and is the label.

    ``pll-word-l2r`` masks the later tokens of the same word, too, so that they do not tell what the token is (Kauf and
    Ivanova, arXiv:2305.10588). A window without words is one copy in which nothing is read.
    """
    ids, words = feature["input_ids"], feature["word_ids"]
    places = [] if words is None else [position for position, word in enumerate(words) if word != NO_WORD]
    if words is None or not places:
        yield {**feature, "gather_positions": [], "labels": []}
        return
    for position in places:
        end = position + 1
        while score == "pll-word-l2r" and end < len(ids) and words[end] == words[position]:
            end += 1
        masked = [*ids[:position], *[mask_id] * (end - position), *ids[end:]]
        yield {**feature, "input_ids": masked, "gather_positions": [position], "labels": [float(ids[position])]}


def text_score(log_probabilities: Sequence[float], score: Score) -> float | None:
    """The score of a text from the logarithms of the probabilities of its tokens.

    Returns:
        ``pppl``: the pseudo-perplexity, exp of the mean negative logarithm (Salazar et al., arXiv:1910.14659), which is
        lower for more probable texts; None for a text without tokens. ``pll-word-l2r``: the sum of the logarithms,
        which is higher for more probable texts.
    """
    if score == "pll-word-l2r":
        return math.fsum(log_probabilities)
    if not log_probabilities:
        return None
    return math.exp(min(-math.fsum(log_probabilities) / len(log_probabilities), _MOST))
