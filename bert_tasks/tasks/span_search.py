"""The n best answer spans: of each window from its start and end logits, then of each question over its windows.

Owns the search, which gives the n-best list, probabilities and null odds of transformers' question-answering example
(utils_qa with its max-context map), and cuts answers out of the contexts. Must not know about tokenizers, rows,
thresholds or metrics. Logits must be finite.

Among equals the search prefers what stands first: in a window the lower token, between spans of a window the one whose
start (then end) logit is larger, then the earlier window, and "no answer" last. So results depend neither on the batch
nor on the device. (numpy's argsort, which transformers' example uses, leaves the order of equal logits open.)

Shape legend: W windows, Q questions, M windows of a question, T tokens of the longest window, K = n_best,
k = min(K, T) tokens or spans that are considered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

# What a token may be: part of a question or special, inside an answer only, or also its first token.
NOT_CONTEXT, CONTEXT, MAX_CONTEXT = 0, 1, 2
START, END, START_LOGIT, END_LOGIT = range(4)  # columns of candidates


class Span(NamedTuple):
    """A part of a context in characters, ``context[start:end] == text``; "no answer" is "" at 0."""

    text: str
    start: int
    end: int
    start_logit: float
    end_logit: float
    probability: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanList(Sequence[Span]):
    """Spans of one context in columns. A span is made when it is read, because most of an n-best list never is."""

    context: str
    starts: list[int]
    ends: list[int]
    start_logits: list[float]
    end_logits: list[float]
    probabilities: list[float]

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, place: int) -> Span: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Span, ...]: ...
    def __getitem__(self, place: int | slice) -> Span | tuple[Span, ...]:
        if isinstance(place, slice):
            return tuple(self[index] for index in range(*place.indices(len(self))))
        start, end = self.starts[place], self.ends[place]
        logits = self.start_logits[place], self.end_logits[place]
        return Span(self.context[start:end], start, end, *logits, self.probabilities[place])


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedSpans:
    """The answers to one question.

    Attributes:
        n_best: best first, never empty. "No answer", where that is allowed, is in its place by score, or one more at
            the end if n others are better. Probabilities are a softmax over this list.
        best_at: where in ``n_best`` the best span with a text is; where "no answer" is, if there is none.
        null_at: where "no answer" is, with the smallest score over the windows; None if it is not allowed. Then, and
            without any span, "" with logits and probability 0 is all of ``n_best``.
        null_odds: the score of "no answer" minus that of the best span, in float32; the score of "no answer" itself
            if no span has a text. None where "no answer" is not allowed.
    """

    n_best: SpanList
    best_at: int
    null_at: int | None
    null_odds: float | None

    @property
    def best(self) -> Span:
        return self.n_best[self.best_at]

    @property
    def null(self) -> Span | None:
        return None if self.null_at is None else self.n_best[self.null_at]

    def answer(self, null_threshold: float) -> Span:
        """ "No answer" if the null odds exceed the threshold, else the best span."""
        if self.null_at is None or self.null_odds is None or self.null_odds <= null_threshold:
            return self.best
        return self.n_best[self.null_at]


def window_candidates(
    logits: Sequence[Tensor], roles: Sequence[Sequence[int]], *, n_best: int, max_answer_length: int
) -> Tensor:
    """The best spans of every window.

    As in transformers' example, only the ``n_best`` best starts and ends of a window (among all of its tokens) are
    paired. A span lies in the context, begins at a token whose role is MAX_CONTEXT, and holds at most
    ``max_answer_length`` tokens.

    Args:
        logits: ``[tokens, 2]`` for each window, start and end logits, on one device.
        roles: for each window one of NOT_CONTEXT, CONTEXT, MAX_CONTEXT per token (``bytes`` are fastest).

    Returns:
        ``[W, K + 1, 4]`` float32 on the device of the logits: start token, end token, start logit, end logit. Row 0
        is token 0, "no answer"; the others are spans, best first by the sum of their logits. Rows of -inf fill up.
    """
    sizes = [len(window) for window in logits]
    if sizes != [len(window) for window in roles]:
        raise ValueError("logits and roles: expected one role for each token of each window")
    if not sizes:
        return torch.empty(0, n_best + 1, 4)
    padded, role = _padded(logits, roles, sizes)  # [2, W, T], [W, T]
    tokens = _best(padded, n_best)  # [2, W, k]
    values = padded.gather(2, tokens)  # [2, W, k]
    scores = (values[0].unsqueeze(2) + values[1].unsqueeze(1)).flatten(1)  # [W, k * k], ends change fastest
    chosen = _best(scores, n_best, mask=_pair_mask(tokens, role, max_answer_length))  # [W, k]
    width = tokens.shape[2]
    pairs = torch.stack((chosen // width, chosen % width)).clamp_(min=0)  # [2, W, k]
    spans = torch.cat((tokens.gather(2, pairs).float(), values.gather(2, pairs)))  # [4, W, k]
    spans.masked_fill_(chosen < 0, -torch.inf)
    found = padded.new_full((len(sizes), n_best + 1, 4), -torch.inf)
    found[:, 0, :START_LOGIT] = 0.0
    found[:, 0, START_LOGIT:] = padded[:, :, 0].t()
    found[:, 1 : 1 + chosen.shape[1]] = spans.permute(1, 2, 0)
    return found


def _padded(logits: Sequence[Tensor], roles: Sequence[Sequence[int]], sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """``[2, W, T]`` logits, -inf where a window has no token, and ``[W, T]`` roles, NOT_CONTEXT there."""
    device = logits[0].device
    nothing = torch.full((1, 2), -torch.inf, device=device)
    flat = torch.cat([*(window.detach() for window in logits), nothing]).float() + 0.0  # the sum turns -0.0 into 0.0
    role = np.frombuffer(b"".join(map(bytes, roles)) + bytes([NOT_CONTEXT]), dtype=np.uint8)
    lengths, column = np.array(sizes)[:, None], np.arange(max(sizes))
    places = np.where(column < lengths, lengths.cumsum()[:, None] - lengths + column, len(role) - 1)  # [W, T]
    index = torch.from_numpy(places.ravel()).to(device)
    padded = flat.t().contiguous().index_select(1, index).view(2, *places.shape)
    return padded, torch.from_numpy(role[places]).to(device)


def _pair_mask(tokens: Tensor, role: Tensor, max_answer_length: int) -> Tensor:
    """``[W, k * k]`` int64, all bits set where two of ``tokens [2, W, k]`` are a span, else 0."""
    first = tokens[0].masked_fill(role.gather(1, tokens[0]) != MAX_CONTEXT, role.shape[1])  # behind every end
    last = tokens[1].masked_fill(role.gather(1, tokens[1]) == NOT_CONTEXT, -1)  # before every start
    distance = last.unsqueeze(1) - first.unsqueeze(2)  # [W, k, k]
    outside = (max_answer_length - 1 - distance).bitwise_or_(distance)  # negative where one of them is
    return outside.bitwise_right_shift_(63).bitwise_not_().flatten(1)


def merge_windows(
    candidates: Sequence[Tensor],
    origins: Sequence[Sequence[int]],
    windows: Sequence[int],
    contexts: Sequence[str],
    *,
    n_best: int,
    with_null: bool,
) -> list[RankedSpans]:
    """The best spans of every question over all of its windows.

    Args:
        candidates: ``[K + 1, 4]`` for each window, as ``window_candidates`` gives them, on the CPU.
        origins: for each window three numbers per token; the first two are the characters of the context at which it
            begins and ends, the third is not read here.
        windows: how many windows each question has, at least 1; those of a question are neighbours.
        contexts: the text of each question.
        with_null: whether "no answer" is an answer (SQuAD 2.0).
    """
    if len(candidates) != len(origins) or sum(windows) != len(origins) or len(windows) != len(contexts):
        raise ValueError("candidates and origins: expected one for each window; windows and contexts: one per question")
    if not windows:
        return []
    table, sizes = torch.stack(list(candidates)), torch.tensor([len(numbers) for numbers in origins])
    counts = torch.tensor(windows)
    firsts = counts.cumsum(0) - counts
    results: dict[int, RankedSpans] = {}
    for count in set(windows):
        questions = (counts == count).nonzero().squeeze(1)
        own = firsts[questions].unsqueeze(1) + torch.arange(count)  # [Q, M] windows of each question
        begins = sizes[own].cumsum(1) - sizes[own]  # where the origins of each window start among the question's
        ranking = _rank(table[own], begins, n_best=n_best, with_null=with_null)
        for item, (question, first) in enumerate(zip(questions.tolist(), own[:, 0].tolist(), strict=True)):
            joined = origins[first] if count == 1 else list(chain(*origins[first : first + count]))
            results[question] = _cut(ranking, item, contexts[question], joined, with_null=with_null)
    return [results[question] for question in range(len(windows))]


class _Ranking(NamedTuple):
    """The n-best lists of questions with equally many windows: an item for each question.

    Only ``counts`` entries of a list are real. ``starts`` and ``ends`` say where the first and the last character
    stand among the origins of all windows of the question. ``odds`` are the null odds if this entry is the best,
    ``null_at`` is the place of "no answer", if that is allowed.
    """

    counts: list[int]
    starts: list[list[int]]
    ends: list[list[int]]
    start_logits: list[list[float]]
    end_logits: list[list[float]]
    probabilities: list[list[float]]
    odds: list[list[float]]
    null_scores: list[float]
    null_at: list[int]


def _rank(table: Tensor, begins: Tensor, *, n_best: int, with_null: bool) -> _Ranking:
    """``table [Q, M, K + 1, 4]``, ``begins [Q, M]`` -> at most ``n_best`` entries, or one more."""
    null_scores, lowest = (table[:, :, 0, START_LOGIT] + table[:, :, 0, END_LOGIT]).min(1)  # [Q], the first of equals
    null = table[:, :, 0].gather(1, lowest.view(-1, 1, 1).expand(-1, 1, 4))
    entries = torch.cat([table[:, :, 1:].flatten(1, 2), null], dim=1)  # [Q, M * K + 1, 4]
    last = entries.shape[1] - 1
    real = entries[:, :, START] >= 0
    real[:, last] = with_null
    scores = entries[:, :, START_LOGIT] + entries[:, :, END_LOGIT]
    chosen = _best(scores, n_best, mask=-real.long())  # [Q, k]
    if with_null:
        dropped = (chosen != last).all(1, keepdim=True)
        chosen = torch.cat([chosen, torch.where(dropped, last, -1)], dim=1)
    missing, taken = chosen < 0, chosen.clamp(min=0)
    window = taken.div(table.shape[2] - 1, rounding_mode="floor").clamp_(max=table.shape[1] - 1)
    first, final, start_logits, end_logits = entries.gather(1, taken.unsqueeze(-1).expand(-1, -1, 4)).unbind(-1)
    places = begins.gather(1, window) + 3 * torch.stack((first, final)).clamp_(min=0).long()
    return _Ranking(
        counts=(~missing).sum(1).tolist(),
        starts=places[0].tolist(),
        ends=(places[1] + 1).tolist(),
        start_logits=start_logits.tolist(),
        end_logits=end_logits.tolist(),
        probabilities=scores.gather(1, taken).double().masked_fill(missing, -torch.inf).softmax(1).tolist(),
        odds=(null_scores.unsqueeze(1) - start_logits - end_logits).tolist(),
        null_scores=null_scores.tolist(),
        null_at=(chosen == last).long().argmax(1).tolist(),
    )


def _cut(ranking: _Ranking, item: int, context: str, origins: Sequence[int], *, with_null: bool) -> RankedSpans:
    """One item of a ranking, with the characters of its spans."""
    count = ranking.counts[item]
    if not count:
        nothing = SpanList(context="", starts=[0], ends=[0], start_logits=[0.0], end_logits=[0.0], probabilities=[0.0])
        return RankedSpans(n_best=nothing, best_at=0, null_at=None, null_odds=None)
    starts = [origins[place] for place in ranking.starts[item][:count]]
    ends = [origins[place] for place in ranking.ends[item][:count]]
    null_at = ranking.null_at[item] if with_null else None
    if null_at is not None:
        starts[null_at] = ends[null_at] = 0
    n_best = SpanList(
        context=context,
        starts=starts,
        ends=ends,
        start_logits=ranking.start_logits[item][:count],
        end_logits=ranking.end_logits[item][:count],
        probabilities=ranking.probabilities[item][:count],
    )
    best_at = next((place for place in range(count) if starts[place] < ends[place]), None)
    if null_at is None:
        return RankedSpans(n_best=n_best, best_at=0 if best_at is None else best_at, null_at=None, null_odds=None)
    if best_at is None:
        return RankedSpans(n_best=n_best, best_at=null_at, null_at=null_at, null_odds=ranking.null_scores[item])
    return RankedSpans(n_best=n_best, best_at=best_at, null_at=null_at, null_odds=ranking.odds[item][best_at])


def _best(scores: Tensor, count: int, *, mask: Tensor | None = None) -> Tensor:
    """Indices of the ``count`` highest (or all) scores of the last dimension, best first, then lowest index first.

    ``mask`` has all bits or none set; -1 fills up where it leaves fewer. Score and index share one integer, so that no
    two are equal: topk alone leaves the order of equal scores open, and numpy's partition is slow among equals.
    """
    size = scores.shape[-1]
    shift = size.bit_length()
    keys = _sortable(scores)
    if mask is not None:
        keys.bitwise_and_(mask)
    keys = keys.bitwise_left_shift_(shift).bitwise_or_(torch.arange(size, 0, -1, device=scores.device))
    best = _largest(keys, min(count, size))
    return (size - (best & ((1 << shift) - 1))).masked_fill_(best < 1 << shift, -1)


def _largest(keys: Tensor, count: int) -> Tensor:
    """The largest integers of the last dimension, in descending order. On the CPU numpy is 3 times as fast as topk."""
    if keys.device.type != "cpu":
        return keys.topk(count, dim=-1).values
    largest = np.partition(keys.numpy(), keys.shape[-1] - count, axis=-1)[..., -count:]
    return torch.from_numpy(np.sort(largest, axis=-1)).flip(-1)


def _sortable(scores: Tensor) -> Tensor:
    """float32 -> int64 from 1 to below 2**32 in the same order; -0.0 must not occur."""
    bits = scores.view(torch.int32)
    return ((bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)).long().add_(2**31)
