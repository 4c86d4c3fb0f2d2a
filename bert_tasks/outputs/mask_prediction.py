"""Predictions of masked tokens, and the texts of their tokens.

Shape legend: K candidates of a masked token.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

from bert_tasks.outputs.prediction import NOT_WRITTEN, Prediction

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MASK = re.compile(r"\[MASK\]|<mask>")  # the mask in a text, whatever the tokenizer's mask token is called


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A token for a masked token, with the fields of transformers' fill-mask pipeline.

    Attributes:
        score: Its probability.
        token: Its id.
        token_str: Its text.
        sequence: The text of the row with the token instead of the mask. Empty in evaluation.
    """

    score: float
    token: int
    token_str: str
    sequence: str


@dataclass(frozen=True, kw_only=True)
class MaskedToken:
    """The prediction for a token that evaluation masked.

    Attributes:
        candidates: The most probable tokens, best first.
        label: The id of the token that was masked.
        log_probability: The log-probability of the label.
        context: Ids of the tokens before and after it, as the model saw them.
        label_str, before, after: Texts of the label and, for the least probable token of a row only, of the context.
    """

    candidates: tuple[Candidate, ...]
    label: int
    log_probability: float = 0.0
    context: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    label_str: str = ""
    before: str = ""
    after: str = ""

    @property
    def is_correct(self) -> bool:
        """True if the most probable token is the one that was masked."""
        return self.candidates[0].token == self.label


@dataclass(frozen=True, kw_only=True)
class MaskPrediction(Prediction):
    """The prediction for one row.

    Attributes:
        masks: The most probable tokens for each mask of the text, best first.
        row_text: The text of the row.
        measured: The tokens that evaluation masked.
        pairs: The label and the prediction of each window that evaluation made a pair.
    """

    masks: tuple[tuple[Candidate, ...], ...]
    row_text: str = field(default="", metadata=NOT_WRITTEN)
    measured: tuple[MaskedToken, ...] = field(default=(), metadata=NOT_WRITTEN)
    pairs: tuple[tuple[int, int], ...] = field(default=(), metadata=NOT_WRITTEN)


def with_texts(predictions: Sequence[MaskPrediction], tokenizer: "PreTrainedTokenizerBase") -> list[MaskPrediction]:
    """Returns predictions with texts of tokens and of a row's least probable token."""

    @cache  # the same few tokens are candidates again and again
    def text_of(token: int) -> str:
        return str(tokenizer.decode([token]))

    def named(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
        return tuple(replace(candidate, token_str=text_of(candidate.token)) for candidate in candidates)

    results = []
    for prediction in predictions:
        masks = tuple(named(candidates) for candidates in prediction.masks)
        if not prediction.measured:  # evaluation replaces tokens, so that no text is left to complete
            masks = _with_sequences(prediction.row_text, masks, tokenizer)
        hardest = min(prediction.measured, key=lambda mask: mask.log_probability, default=None)
        measured = []
        for mask in prediction.measured:
            before, after = "", ""
            if mask is hardest:
                before = str(tokenizer.decode(list(mask.context[0])))
                after = str(tokenizer.decode(list(mask.context[1])))
            label = text_of(mask.label)
            shown = replace(mask, candidates=named(mask.candidates), label_str=label, before=before, after=after)
            measured.append(shown)
        results.append(replace(prediction, masks=masks, measured=tuple(measured)))
    return results


def _with_sequences(
    text: str, masks: Sequence[Sequence[Candidate]], tokenizer: "PreTrainedTokenizerBase"
) -> tuple[tuple[Candidate, ...], ...]:
    """Returns the candidates for the masks of a text, each with the text that it completes."""
    completed = []
    for match, candidates in zip(MASK.finditer(text), masks, strict=False):
        with_sequences: list[Candidate] = []
        for candidate in candidates:
            with_sequences.append(replace(candidate, sequence=_filled(match, candidate, tokenizer)))
        completed.append(tuple(with_sequences))
    return tuple(completed)


def _filled(match: re.Match[str], candidate: Candidate, tokenizer: "PreTrainedTokenizerBase") -> str:
    """Returns the text with the candidate. A piece within a word has no space."""
    before, after = match.string[: match.start()], match.string[match.end() :]
    piece = str(tokenizer.convert_ids_to_tokens(candidate.token))
    if piece.startswith("##"):  # of WordPiece
        return before.rstrip() + piece[2:] + after
    return before + candidate.token_str.strip() + after
