"""The n best answer spans of each window, then of each question over its windows.

Owns the search, which returns the n-best list, probabilities and null odds of transformers' question-answering example
(utils_qa with its max-context map), and cuts answers out of the contexts. Must not know about tokenizers, rows,
thresholds or metrics. Logits must be finite.

Among equals the search prefers the first. In a window this is the lower token, between spans of a window the one whose
start (then end) logit is larger, then the earlier window, and "no answer" last. So results depend neither on the batch
nor on the device. (numpy's argsort, which transformers' example uses, leaves the order of equal logits open.)

Shape legend: W windows, M windows of a question, T tokens of the longest window, K = n_best, k = min(K, T) tokens or
spans that are considered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import rnn

# What a token may be: part of a question or special, inside an answer only, or also its first token.
NOT_CONTEXT, CONTEXT, MAX_CONTEXT = 0, 1, 2
START, END, START_LOGIT, END_LOGIT = range(4)  # columns of candidates


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a context, ``context[start:end]``. "No answer" is "" at 0.

    Attributes:
        score: Probability among the best spans of the question.
    """

    text: str
    score: float
    start: int
    end: int
    start_logit: float
    end_logit: float


class RankedSpans(NamedTuple):
    """The answers to one question.

    Attributes:
        n_best: The best spans in order, never empty. "No answer", if it is allowed, is in its place by score, or one
            more at the end if n others are better. Probabilities are a softmax over this list.
        best_at: Index in ``n_best`` of the best span with a text, or of "no answer" if there is none.
        null_at: Index of "no answer", with the smallest score over the windows. None if it is not allowed. Then, and
            without any span, "" with logits and probability 0 is all of ``n_best``.
        null_odds: The score of "no answer" minus the score of the best span, in float32. The score of "no answer"
            itself if no span has a text. None if "no answer" is not allowed.
    """

    n_best: tuple[Span, ...]
    best_at: int
    null_at: int | None
    null_odds: float | None

    @property
    def best(self) -> Span:
        """The best span with a text, or "no answer" if there is none."""
        return self.n_best[self.best_at]

    @property
    def null(self) -> Span | None:
        """The entry of "no answer" in ``n_best``, or None if it is not allowed."""
        if self.null_at is None:
            return None
        return self.n_best[self.null_at]

    def answer(self, null_threshold: float) -> Span:
        """Returns "no answer" if the null odds exceed the threshold, else the best span."""
        if self.null_at is None or self.null_odds is None or self.null_odds <= null_threshold:
            return self.best
        return self.n_best[self.null_at]


def window_candidates(
    logits: Sequence[Tensor], roles: Sequence[Sequence[int]], *, n_best: int, max_answer_length: int
) -> Tensor:
    """Returns the best spans of every window.

    As in transformers' example, only the ``n_best`` best starts and ends of a window (among all of its tokens) are
    paired. A span lies in the context, begins at a token whose role is MAX_CONTEXT, and holds at most
    ``max_answer_length`` tokens.

    Args:
        logits: ``[tokens, 2]`` for each window, start and end logits, on one device.
        roles: NOT_CONTEXT, CONTEXT or MAX_CONTEXT for each token of each window.

    Returns:
        ``[W, K + 1, 4]`` float32 on the device of the logits, with start token, end token, start logit and end logit.
        Row 0 is token 0, "no answer". The others are spans, best first by the sum of their logits. Rows of -inf fill
        up.
    """
    if not logits:
        return torch.empty(0, n_best + 1, 4)
    padded = rnn.pad_sequence(list(logits), batch_first=True, padding_value=-torch.inf).detach().float()
    values = padded.permute(2, 0, 1)  # [2, W, T]
    # NOT_CONTEXT is 0, the padding of pad_sequence, so that no span reaches beyond the end of a window.
    of_windows = [torch.frombuffer(bytearray(of_window), dtype=torch.uint8) for of_window in roles]
    role = rnn.pad_sequence(of_windows, batch_first=True).to(values.device)  # [W, T]
    # Stable sorts instead of topk, which leaves the order of equal logits open.
    tokens = values.argsort(dim=2, descending=True, stable=True)[:, :, :n_best]  # [2, W, k]
    values, (starts, ends) = values.gather(2, tokens), tokens
    distance = ends.unsqueeze(1) - starts.unsqueeze(2)  # [W, k, k]
    is_start = role.gather(1, starts) == MAX_CONTEXT
    is_end = role.gather(1, ends) != NOT_CONTEXT
    is_span = is_start.unsqueeze(2) & is_end.unsqueeze(1) & (distance >= 0) & (distance < max_answer_length)
    scores = values[0].unsqueeze(2) + values[1].unsqueeze(1)
    scores = scores.masked_fill(~is_span, -torch.inf).flatten(1)  # [W, k * k], ends change fastest
    best = scores.argsort(dim=1, descending=True, stable=True)[:, :n_best]  # [W, k]
    pairs = torch.stack((best // ends.shape[1], best % ends.shape[1]))  # [2, W, k]
    spans = torch.cat((tokens.gather(2, pairs).float(), values.gather(2, pairs)))
    spans = spans.masked_fill(scores.gather(1, best) == -torch.inf, -torch.inf)
    candidates = values.new_full((len(logits), n_best + 1, 4), -torch.inf)
    candidates[:, 0, :START_LOGIT] = 0.0
    candidates[:, 0, START_LOGIT:] = padded[:, 0]
    candidates[:, 1 : 1 + best.shape[1]] = spans.permute(1, 2, 0)
    return candidates


def merge_windows(
    candidates: Sequence[Tensor],
    offsets: Sequence[Sequence[int]],
    windows: Sequence[int],
    contexts: Sequence[str],
    *,
    n_best: int,
    with_null: bool,
) -> list[RankedSpans]:
    """Returns the best spans of every question over all of its windows.

    Args:
        candidates: ``[K + 1, 4]`` for each window, from ``window_candidates``, on the CPU.
        offsets: Three numbers per token for each window. The first two are the characters of the context at which the
            token begins and ends, -1 for token 0. The third is not read.
        windows: Number of windows of each question, at least 1. The windows of a question are neighbours.
        contexts: The text of each question.
        with_null: True if "no answer" is an answer (SQuAD 2.0).
    """
    results: list[RankedSpans] = []
    first = 0
    for count, context in zip(windows, contexts, strict=True):
        end = first + count
        table = torch.stack(list(candidates[first:end]))  # [M, K + 1, 4]
        results.append(_rank(table, offsets[first:end], context, n_best=n_best, with_null=with_null))
        first = end
    return results


def _rank(
    table: Tensor, offsets: Sequence[Sequence[int]], context: str, *, n_best: int, with_null: bool
) -> RankedSpans:
    """Returns the best spans of one question.

    Args:
        table: ``[M, K + 1, 4]`` the candidates of its windows.
        offsets: The offsets of the tokens of each window.
        context: The text.
        n_best: Number of spans to return.
        with_null: True if "no answer" is an answer.
    """
    all_scores, rows = table[:, :, START_LOGIT:].sum(dim=2).numpy(), table.tolist()  # [M, K + 1]
    null_scores = all_scores[:, 0]  # [M]
    scores = all_scores[:, 1:].ravel()  # [M * K], window after window
    lowest = int(null_scores.argmin())  # a window that is least sure that it has no answer decides for the question
    found = int((scores > -np.inf).sum())
    order = np.argsort(-scores, kind="stable")[: min(n_best, found)]
    entries: list[tuple[int, float, float, float, float]] = []
    for index in order.tolist():
        window, row = divmod(index, table.shape[1] - 1)
        entries.append((window, *rows[window][row + 1]))
    best_scores, null_at = scores[order], None
    if with_null:
        null_at = int((best_scores >= null_scores[lowest]).sum())  # behind spans with the same score
        entries.insert(null_at, (lowest, *rows[lowest][0]))
        best_scores = np.insert(best_scores, null_at, null_scores[lowest])[: max(n_best, null_at + 1)]
    if not entries:
        return RankedSpans((Span("", 0.0, 0, 0, 0.0, 0.0),), 0, None, None)
    shares = np.exp(best_scores.astype(np.float64) - best_scores.max())
    probabilities = (shares / shares.sum()).tolist()
    spans = []
    # There may be one entry more than probabilities, which "no answer" has displaced.
    for entry, probability in zip(entries, probabilities, strict=False):
        window, first, last, start_logit, end_logit = entry
        start = max(0, offsets[window][3 * int(first)])  # -1 for token 0, "no answer"
        end = max(0, offsets[window][3 * int(last) + 1])
        spans.append(Span(context[start:end], probability, start, end, start_logit, end_logit))
    best_at = 0 if null_at is None else null_at
    for index, span in enumerate(spans):
        if span.text:
            best_at = index
            break
    null_odds = None
    if null_at is not None:
        odds = null_scores[lowest]
        # One float32 subtraction after the other, whose digits differ from those of a difference of sums.
        if best_at != null_at:
            odds = odds - np.float32(spans[best_at].start_logit) - np.float32(spans[best_at].end_logit)
        null_odds = float(odds)
    return RankedSpans(tuple(spans), best_at, null_at, null_odds)
