"""The predictions of masked language modelling, scores of texts, and their report."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from bert_tasks.data.columns import Row
from bert_tasks.errors import DataError
from bert_tasks.metrics.formulas import MetricFormula, masked_token_measure
from bert_tasks.tasks.base import NOT_WRITTEN, Feature, Prediction
from bert_tasks.tasks.masked_language_modeling.masking import NO_WORD
from bert_tasks.tasks.shared.rendering import MOST_CHARACTERS
from bert_tasks.tasks.shared.report import (
    MOST_EXAMPLES,
    Example,
    Examples,
    Remark,
    Report,
    ReportSections,
    RowResult,
    Segment,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MASK = re.compile(r"\[MASK\]|<mask>")  # the mask in a text, whatever the tokenizer's mask token is called
Score = Literal["none", "pppl", "pll-word-l2r"]
_MOST = 700.0  # exp of more is infinite


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


def check_masks(texts: Sequence[str], top_k: int) -> None:
    """Raises an error if the texts have too many masks for their length.

    Each candidate for a mask repeats its text, so a text of masks only would have an answer that is as long as the
    square of the text.

    Args:
        texts: The texts of a row, or of all rows of a request.
        top_k: The number of candidates for each mask.

    Raises:
        DataError: The texts of all candidates together are longer than ``MOST_CHARACTERS``.
    """
    masks, characters, repeated = 0, 0, 0
    for text in texts:
        of_text = sum(1 for _ in MASK.finditer(text))
        masks += of_text
        characters += len(text)
        repeated += of_text * len(text) * top_k
    if masks > 1 and repeated > MOST_CHARACTERS:
        subject = "a text" if len(texts) == 1 else f"{len(texts)} texts"
        raise DataError(
            f"{subject} of {characters:,} characters with {masks:,} masks: each of the {top_k} candidates for a mask "
            f"repeats its text, which is {repeated:,} characters in total, and at most {MOST_CHARACTERS:,} are "
            "returned. Use fewer masks, shorter texts or a lower top_k"
        )


def with_texts(predictions: Sequence[MaskPrediction], tokenizer: "PreTrainedTokenizerBase") -> Sequence[MaskPrediction]:
    """Returns predictions with texts of tokens and of a row's least probable token."""
    text = lru_cache(maxsize=None)(lambda token: str(tokenizer.decode([token])))

    def with_names(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
        return tuple(replace(candidate, token_str=text(candidate.token)) for candidate in candidates)

    results = []
    for prediction in predictions:
        masks = tuple(map(with_names, prediction.masks))
        if not prediction.measured:
            masks = _with_sequences(prediction.row_text, masks, tokenizer)
        hardest = min(prediction.measured, key=lambda mask: mask.log_probability, default=None)
        measured = []
        for mask in prediction.measured:
            before, after = (str(tokenizer.decode(list(ids))) if mask is hardest else "" for ids in mask.context)
            names, label = with_names(mask.candidates), text(mask.label)
            measured.append(replace(mask, candidates=names, label_str=label, before=before, after=after))
        results.append(replace(prediction, masks=masks, measured=tuple(measured)))
    return results


def _with_sequences(
    text: str, masks: Sequence[Sequence[Candidate]], tokenizer: "PreTrainedTokenizerBase"
) -> tuple[tuple[Candidate, ...], ...]:
    """Returns the candidates for the masks of a text, each with the text that it completes."""
    completed = []
    for match, candidates in zip(MASK.finditer(text), masks, strict=False):
        sequences = [_filled(match, candidate, tokenizer) for candidate in candidates]
        pairs = zip(candidates, sequences, strict=True)
        completed.append(tuple(replace(candidate, sequence=sequence) for candidate, sequence in pairs))
    return tuple(completed)


def _filled(match: re.Match[str], candidate: Candidate, tokenizer: "PreTrainedTokenizerBase") -> str:
    """Returns the text with the candidate. A piece within a word has no space."""
    before, after = match.string[: match.start()], match.string[match.end() :]
    piece = str(tokenizer.convert_ids_to_tokens(candidate.token))
    if piece.startswith("##"):  # of WordPiece
        return before.rstrip() + piece[2:] + after
    return before + candidate.token_str.strip() + after


# Scores of texts.


@dataclass(frozen=True, kw_only=True)
class TextScore(Prediction):
    """The score of a text (``settings.score``), and its number of tokens."""

    score: float | None
    tokens: int


def scored_copies(feature: Feature, *, mask_id: int, score: Score) -> Iterator[Feature]:
    """Yields copies of a window, each with one token of its words masked as the label.

    ``pll-word-l2r`` masks the later tokens of the same word, too, so that they do not tell what the token is (Kauf and
    Ivanova, arXiv:2305.10588). A window without words is one copy in which nothing is read.
    """
    ids, words = feature["input_ids"], [] if feature["word_ids"] is None else feature["word_ids"]
    tokens = [token for token, word in enumerate(words) if word != NO_WORD]
    if not tokens:
        yield {**feature, "gather_positions": [], "labels": []}
    for token in tokens:
        end = token + 1
        while score == "pll-word-l2r" and end < len(ids) and words[end] == words[token]:
            end += 1
        masked = [*ids[:token], *[mask_id] * (end - token), *ids[end:]]
        yield {**feature, "input_ids": masked, "gather_positions": [token], "labels": [float(ids[token])]}


def text_score(log_probabilities: Sequence[float], score: Score) -> float | None:
    """Returns the score of a text from the log-probabilities of its tokens.

    ``pppl`` is the pseudo-perplexity, exp of the mean negative logarithm (Salazar et al., arXiv:1910.14659), which is
    lower for more probable texts, and None for a text without tokens. ``pll-word-l2r`` is the sum of the logarithms.
    """
    if score == "pll-word-l2r":
        return math.fsum(log_probabilities)
    if not log_probabilities:
        return None
    return math.exp(min(-math.fsum(log_probabilities) / len(log_probabilities), _MOST))


# The report.


def measure(predictions: Sequence[Any]) -> MetricFormula:
    """Returns perplexity and accuracy over the masked tokens of all rows."""
    rows = [prediction.measured for prediction in predictions]
    return masked_token_measure(
        [len(masks) for masks in rows],
        [-sum(mask.log_probability for mask in masks) for masks in rows],
        [sum(mask.is_correct for mask in masks) for masks in rows],
    )


class MaskedReport(Report):
    """The report of masked language modelling."""

    lower_is_better: ClassVar[frozenset[str]] = frozenset({"perplexity"})

    def decisions(self, prediction: Any) -> Sequence[int]:
        """Returns the best candidate for each mask."""
        masks = (*prediction.masks, *(mask.candidates for mask in prediction.measured))
        return [candidates[0].token for candidates in masks]

    def collapse(self, predictions: Sequence[Any], rows: Sequence[Row]) -> str | None:
        """Compares the tokens that evaluation masked, and the pairs that it made."""
        masks = [mask for prediction in predictions for mask in prediction.measured]
        labels = {mask.label for mask in masks}
        best = {mask.candidates[0].token: mask.candidates[0].token_str for mask in masks}
        if len(labels) > 1 and len(best) == 1:
            return f"predicts {best.popitem()[1]!r} for every masked token"
        pairs = [pair for prediction in predictions for pair in prediction.pairs]
        pair_labels, pair_classes = {label for label, _ in pairs}, {predicted for _, predicted in pairs}
        if len(pair_labels) > 1 and len(pair_classes) == 1:
            return f"predicts class {pair_classes.pop()} for every pair of sentences"
        return None

    def same(self, predictions: Sequence[Any], others: Sequence[Any]) -> list[bool]:
        agreements = super().same(predictions, others)
        if not agreements:
            raise DataError("no text has a mask ([MASK] or <mask>), so that the predictions cannot be compared")
        return agreements

    def sections(self, predictions: Sequence[Any], rows: Sequence[Row]) -> ReportSections:
        pairs = [(row, each.measured) for row, each in zip(rows, predictions, strict=True) if each.measured]
        shown = [(row, mask) for row, masks in pairs for mask in masks if mask.before or mask.after]
        shown.sort(key=lambda pair: pair[1].log_probability)
        examples = Examples(
            word="Masked tokens",
            title="Masked tokens that the model found least probable",
            lead="One of each text, as the model saw it, with the tokens that it found most probable.",
            items=tuple(_example(row, mask) for row, mask in shown[:MOST_EXAMPLES]),
        )
        return ReportSections(
            measure=measure([each for each in predictions if each.measured]),
            unit="texts",
            headline=("perplexity", "accuracy"),
            results=tuple(
                RowResult(
                    row=row,
                    label=[mask.label_str for mask in masks],
                    prediction=[mask.candidates[0].token_str for mask in masks],
                    score=max((mask.candidates[0].score for mask in masks if not mask.is_correct), default=0.0),
                    is_correct=all(mask.is_correct for mask in masks),
                )
                for row, masks in pairs
            ),
            examples=examples if shown else None,
        )


def _example(row: Row, mask: MaskedToken) -> Example:
    return Example(
        line=row.get("line"),
        excerpt=(
            Segment(text=f"{mask.before} "),
            Segment(text=mask.label_str.strip(), label="masked"),
            Segment(text=f" {mask.after}"),
        ),
        remarks=(Remark(name="masked token", value=mask.label_str, tone="good" if mask.is_correct else "bad"),),
        candidates=tuple((candidate.token_str, candidate.score) for candidate in mask.candidates),
    )
