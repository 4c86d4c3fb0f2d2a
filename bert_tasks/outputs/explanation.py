"""Explanations of predictions by the contributions of a row's words to a logit.

Owns the words over which the contributions of tokens are summed. Tasks say which characters a token stands for
(``Task.token_spans``), outputs which logits are explained, and model/explanation.py computes the gradients. A word is a
span of ``word_spans``. Tokenizers cut texts at other characters, so words that share a token are one word in an
explanation. A token never belongs to two.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from bert_tasks.data.words import word_spans

TOLERANCE = 0.01  # error of the contributions, as a share of the difference of the logits


class TokenSpan(NamedTuple):
    """A token's characters ``start`` to ``end - 1`` in the text of a column.

    Explanations sum the contributions of tokens over the words that have these characters.
    """

    column: str
    start: int
    end: int


# The span of each token of each feature. None for a special token.
TokenSpans = Sequence[Sequence[TokenSpan | None]]


@dataclass(frozen=True, kw_only=True)
class ExplainedLogit:
    """The number of an explanation, which is a weighted sum of a row's logits.

    ``Output.explained_logits`` returns it, one for each explanation. Most outputs explain the mean of one logit over
    the windows of a row, so their terms have the weight 1 / number of windows.

    Attributes:
        label: The predicted label, the answer or the type of an entity, whose logit it is. None for a number.
        texts: column -> text, of all columns in which the row's tokens are.
        terms: (feature, place, weight) with the index of a feature, the position among its logits, row after row, and
            the factor. A feature may have several terms or none.
        words: The positions of the words in the text of a column, if the row itself has words there. Default: see
            ``word_spans``.
    """

    label: str | None
    texts: Mapping[str, str]
    terms: tuple[tuple[int, int, float], ...]
    words: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class WordContribution:
    """A word, its contribution, column and characters ``start`` to ``end - 1``."""

    column: str
    word: str
    start: int
    end: int
    contribution: float


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The contribution of each word to a logit, by integrated gradients.

    Source: Sundararajan, Taly and Yan, "Axiomatic Attribution for Deep Networks" (https://arxiv.org/abs/1703.01365).

    Attributes:
        label: The predicted label, the answer or the type of an entity, whose logit is explained. None for a number.
        logit: The logit of the unchanged row. For a span, the sum of its start and end logit. For an entity, the mean
            over its words.
        baseline_logit: The logit of the row with every token replaced by the baseline's, special tokens excepted.
        words: The words of all texts in their order. Words that the model did not read have contributed 0.
        completeness_error: The difference of the sum of the contributions from ``logit - baseline_logit``, as a share
            of it. A difference below 0.0001 counts as 0.0001.
        steps: Number of evaluated points on the path from the baseline to the row.
    """

    label: str | None
    logit: float
    baseline_logit: float
    words: tuple[WordContribution, ...]
    completeness_error: float
    steps: int

    @property
    def is_complete(self) -> bool:
        """Returns True if the contributions add up to the difference of the logits within 1 %."""
        return self.completeness_error <= TOLERANCE


class TextWords:
    """The words of a text, and the word of each token.

    Args:
        text: The text.
        spans: The characters of the tokens that were read.
        words: The positions of the words. Default: see ``word_spans``.
    """

    def __init__(
        self, text: str, spans: Iterable[tuple[int, int]], words: Sequence[tuple[int, int]] | None = None
    ) -> None:
        self._text = text
        if words is None:
            words = word_spans(text)
        read = set(words)
        for first, stop in spans:
            visible = self._visible(first, stop)
            if visible is not None:
                read.add(visible)
        self.spans: list[tuple[int, int]] = []
        for start, end in sorted(read):
            if self.spans and start < self.spans[-1][1]:  # a token has characters of both
                self.spans[-1] = (self.spans[-1][0], max(end, self.spans[-1][1]))
            else:
                self.spans.append((start, end))
        if not self.spans:  # white space that the model reads, if anything
            self.spans = [(0, len(text))]
        self._starts = [start for start, _ in self.spans]

    def _visible(self, start: int, end: int) -> tuple[int, int] | None:
        """Returns the span without white space around it, or None if nothing is left."""
        piece = self._text[start:end]
        if not piece.strip():
            return None
        leading = len(piece) - len(piece.lstrip())
        return start + leading, start + len(piece.rstrip())

    def word_of(self, start: int, end: int) -> int:
        """Returns the number of a token's word, for white space the next or last word."""
        visible = self._visible(start, end)
        if visible is not None:
            return bisect_right(self._starts, visible[0]) - 1
        index = max(0, bisect_right(self._starts, start) - 1)
        is_over = self.spans[index][1] <= start and index + 1 < len(self.spans)
        return index + is_over  # the next word if the white space is behind the word


def word_contributions(
    texts: Mapping[str, str],
    tokens: Sequence[tuple[TokenSpan, float]],
    places: Mapping[str, Sequence[tuple[int, int]]] = MappingProxyType({}),
) -> tuple[WordContribution, ...]:
    """Sums contributions of tokens over words. Overlapping windows repeat tokens.

    Args:
        texts: The text of each column.
        tokens: The span of each token, and its contribution.
        places: The positions of the words in the text of a column. Default: see ``word_spans``.
    """
    contributions: list[WordContribution] = []
    for column, text in texts.items():
        column_tokens = [(span, contribution) for span, contribution in tokens if span.column == column]
        words = TextWords(text, [(span.start, span.end) for span, _ in column_tokens], places.get(column))
        sums = [0.0] * len(words.spans)
        for span, contribution in column_tokens:
            sums[words.word_of(span.start, span.end)] += contribution
        for (start, end), total in zip(words.spans, sums, strict=True):
            if text[start:end].strip() or total:  # an empty text has no word
                word = WordContribution(column=column, word=text[start:end], start=start, end=end, contribution=total)
                contributions.append(word)
    return tuple(contributions)
