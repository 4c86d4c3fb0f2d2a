"""The n best answer spans: of each window from its start and end logits, then of each question over its windows.

Owns the search, which gives the n-best list, probabilities and null odds of transformers' question-answering example
(utils_qa with its max-context map), and cuts answers out of the contexts. Must not know about tokenizers, rows,
thresholds or metrics. Logits must be finite.

Among equals the search prefers the first: in a window the lower token, between spans of a window the one whose
start (then end) logit is larger, then the earlier window, and "no answer" last. So results depend neither on the batch
nor on the device. (numpy's argsort, which transformers' example uses, leaves the order of equal logits open.)

Shape legend: W windows, Q questions, M windows of a question, T tokens of the longest window, K = n_best,
k = min(K, T) tokens or spans that are considered.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# What a token may be: part of a question or special, inside an answer only, or also its first token.
NOT_CONTEXT, CONTEXT, MAX_CONTEXT = 0, 1, 2
START, END, START_LOGIT, END_LOGIT = range(4)  # columns of candidates
FAR = 2**40  # farther than any window is long


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a context in characters, ``context[start:end] == text``; "no answer" is "" at 0.

    Attributes:
        score: its probability among the best spans of the question.
    """

    text: str
    score: float
    start: int
    end: int
    start_logit: float
    end_logit: float


class SpanList(Sequence[Span]):
    """Spans of one context. A span is made when it is read, because most of an n-best list never is.

    Args:
        characters: start and end of the first span, of the second, and so on; (-1, -1) for "no answer".
        numbers: ``[spans or more, 3]``: start logit, end logit, probability.
    """

    __slots__ = ("_characters", "_context", "_numbers")

    def __init__(self, context: str, characters: tuple[int, ...], numbers: npt.NDArray[np.float64]) -> None:
        self._context, self._characters, self._numbers = context, characters, numbers

    def __len__(self) -> int:
        return len(self._characters) // 2

    @overload
    def __getitem__(self, place: int) -> Span: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Span, ...]: ...
    def __getitem__(self, place: int | slice) -> Span | tuple[Span, ...]:
        chosen = range(len(self))[place]
        if isinstance(chosen, range):
            return tuple(self[number] for number in chosen)
        start, end = (max(0, character) for character in self._characters[2 * chosen : 2 * chosen + 2])
        start_logit, end_logit, score = self._numbers[chosen].tolist()
        return Span(self._context[start:end], score, start, end, start_logit, end_logit)

    def __iter__(self) -> Iterator[Span]:
        starts, ends = ([max(0, character) for character in self._characters[side::2]] for side in (0, 1))
        texts = map(self._context.__getitem__, map(slice, starts, ends))
        start_logits, end_logits, scores = self._numbers[: len(self)].T.tolist()
        return map(Span, texts, scores, starts, ends, start_logits, end_logits)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SpanList) and tuple(self) == tuple(other)

    def __repr__(self) -> str:
        return f"SpanList({list(self)})"


class RankedSpans(NamedTuple):
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
    sizes = list(map(len, logits))
    if sizes != list(map(len, roles)):
        raise ValueError("logits and roles: expected one role for each token of each window")
    if not sizes:
        return torch.empty(0, n_best + 1, 4)
    padded, places = _padded(logits, roles, sizes)  # [2, W, T] both
    tokens = _best(padded, n_best)  # [2, W, k]
    values = padded.gather(2, tokens)  # [2, W, k]
    scores = (values[0].unsqueeze(2) + values[1].unsqueeze(1)).flatten(1)  # [W, k * k], ends change fastest
    starts, ends = places.gather(2, tokens)  # [W, k] both
    distance = ends.unsqueeze(1) - starts.unsqueeze(2)  # [W, k, k]
    is_no_span = ((max_answer_length - 1 - distance).bitwise_or_(distance) < 0).flatten(1)  # one of them is negative
    chosen = _best(scores, n_best, excluded=is_no_span)  # [W, k]
    missing, width = chosen == scores.shape[1], tokens.shape[2]
    pairs = torch.stack((chosen // width, chosen % width)).clamp_(max=width - 1)  # [2, W, k]
    spans = torch.cat((tokens.gather(2, pairs).float(), values.gather(2, pairs))).masked_fill_(missing, -torch.inf)
    found = padded.new_full((len(sizes), n_best + 1, 4), -torch.inf)
    found[:, 0, :START_LOGIT] = 0.0
    found[:, 0, START_LOGIT:] = padded[:, :, 0].t()
    found[:, 1 : 1 + chosen.shape[1]] = spans.permute(1, 2, 0)
    return found


def _padded(logits: Sequence[Tensor], roles: Sequence[Sequence[int]], sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """``[2, W, T]`` logits, and the same of the places in the window at which a span may start and end.

    Where a window has no token logits are -inf. Where no span may start or end places are too far away for any span.
    """
    flat = torch.cat(list(logits)).detach()
    values = torch.full((2, len(flat) + 1), -torch.inf, device=flat.device)
    torch.add(flat.t(), 0.0, out=values[:, :-1])  # the sum turns -0.0 into 0.0
    role = np.frombuffer(b"".join(map(bytes, roles)) + bytes([NOT_CONTEXT]), dtype=np.uint8)
    lengths, column = np.array(sizes)[:, None], np.arange(max(sizes))
    source = np.where(column < lengths, lengths.cumsum()[:, None] - lengths + column, len(role) - 1)  # [W, T]
    role = role[source]
    places = np.stack((np.where(role == MAX_CONTEXT, column, FAR), np.where(role == NOT_CONTEXT, -FAR, column)))
    index = torch.from_numpy(source.ravel()).to(flat.device)
    return values.index_select(1, index).view(2, *source.shape), torch.from_numpy(places).to(flat.device)


def merge_windows(
    candidates: Sequence[Tensor],
    offsets: Sequence[Sequence[int]],
    windows: Sequence[int],
    contexts: Sequence[str],
    *,
    n_best: int,
    with_null: bool,
) -> list[RankedSpans]:
    """The best spans of every question over all of its windows.

    Args:
        candidates: ``[K + 1, 4]`` for each window, as ``window_candidates`` gives them, on the CPU.
        offsets: for each window three numbers per token; the first two are the characters of the context at which it
            begins and ends, -1 for token 0; the third is not read here.
        windows: how many windows each question has, at least 1; those of a question are neighbours.
        contexts: the text of each question.
        with_null: whether "no answer" is an answer (SQuAD 2.0).
    """
    if len(candidates) != len(offsets) or sum(windows) != len(offsets) or len(windows) != len(contexts):
        raise ValueError("candidates and offsets: expected one for each window; windows and contexts: one per question")
    if not windows:
        return []
    table, sizes = torch.stack(list(candidates)), torch.tensor([len(numbers) for numbers in offsets])
    counts = torch.tensor(windows)
    firsts = counts.cumsum(0) - counts
    results: dict[int, RankedSpans] = {}
    for count in set(windows):
        questions = (counts == count).nonzero().squeeze(1)
        own = firsts[questions].unsqueeze(1) + torch.arange(count)  # [Q, M] windows of each question
        begins = sizes[own].cumsum(1) - sizes[own]  # where the offsets of each window start among the question's
        ranking = _rank(table[own], begins, n_best=n_best, with_null=with_null)
        ranked = zip(questions.tolist(), own[:, 0].tolist(), *ranking, strict=True)
        for question, first, found, places, numbers, null_at, odds in ranked:
            context = contexts[question]
            if not found:
                results[question] = RankedSpans(SpanList("", (0, 0), np.zeros((1, 3))), 0, None, None)
                continue
            joined = offsets[first] if count == 1 else list(chain(*offsets[first : first + count]))
            characters = itemgetter(*places[: 2 * found])(joined)
            with_text = (place for place in range(found) if characters[2 * place] < characters[2 * place + 1])
            best_at = next(with_text, 0 if null_at is None else null_at)
            null_odds = None if null_at is None else float(odds[best_at])
            results[question] = RankedSpans(SpanList(context, characters, numbers), best_at, null_at, null_odds)
    return [results[question] for question in range(len(windows))]


class _Ranking(NamedTuple):
    """The n-best lists of questions with equally many windows: an item for each question.

    Attributes:
        counts: how many entries of each list are real.
        places: of an entry's first and last character among the offsets of all windows of the question, ``2 k``.
        numbers: as in ``SpanList``, ``[Q, k, 3]``.
        nulls: where "no answer" is; None where it is not allowed.
        odds: the null odds for each entry, if that is the best span, ``[Q, k]``; "no answer" has its score there.
    """

    counts: list[int]
    places: list[list[int]]
    numbers: npt.NDArray[np.float64]
    nulls: list[int] | list[None]
    odds: npt.NDArray[np.float32]


def _rank(table: Tensor, begins: Tensor, *, n_best: int, with_null: bool) -> _Ranking:
    """``table [Q, M, K + 1, 4]``, ``begins [Q, M]`` -> at most ``n_best`` entries, or one more."""
    null_scores, lowest = (table[:, :, 0, START_LOGIT] + table[:, :, 0, END_LOGIT]).min(1)  # [Q], the first of equals
    null = table[:, :, 0].gather(1, lowest.view(-1, 1, 1).expand(-1, 1, 4))
    entries = torch.cat([table[:, :, 1:].flatten(1, 2), null], dim=1)  # [Q, M * K + 1, 4]
    last = entries.shape[1] - 1
    missing = entries[:, :, START] < 0
    missing[:, last] = not with_null
    scores = entries[:, :, START_LOGIT] + entries[:, :, END_LOGIT]
    chosen = _best(scores, n_best, excluded=missing)  # [Q, k]
    if with_null:
        dropped = (chosen != last).all(1, keepdim=True)
        chosen = torch.cat([chosen, torch.where(dropped, last, last + 1)], dim=1)
    missing, taken = chosen > last, chosen.clamp(max=last)
    found = entries.gather(1, taken.unsqueeze(-1).expand(-1, -1, 4))  # [Q, k, 4]
    window = taken.div(table.shape[2] - 1, rounding_mode="floor").clamp_(max=table.shape[1] - 1)
    tokens = found[:, :, :START_LOGIT].clamp(min=0).long()  # [Q, k, 2]
    places = begins.gather(1, window).unsqueeze(-1) + 3 * tokens + torch.tensor([0, 1])
    probabilities = scores.gather(1, taken).double().masked_fill(missing, -torch.inf).softmax(1)
    is_null = chosen == last
    odds = null_scores.unsqueeze(1) - found[:, :, START_LOGIT] - found[:, :, END_LOGIT]
    return _Ranking(
        counts=(~missing).sum(1).tolist(),
        places=places.flatten(1).tolist(),
        numbers=torch.cat([found[:, :, START_LOGIT:].double(), probabilities.unsqueeze(-1)], dim=2).numpy(),
        nulls=is_null.long().argmax(1).tolist() if with_null else [None] * len(table),
        odds=torch.where(is_null, null_scores.unsqueeze(1), odds).numpy(),
    )


def _best(scores: Tensor, count: int, *, excluded: Tensor | None = None) -> Tensor:
    """Indices of the ``count`` highest (or all) scores of the last dimension, best first, then lowest index first.

    The dimension's size fills up where fewer than ``count`` are not excluded. Scores are float32 without -0.0.
    Score and index share one integer, so that no two are equal: topk alone leaves the order of equal scores open.
    """
    size = scores.shape[-1]
    shift = size.bit_length()
    bits = scores.view(torch.int32)
    ranks = (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)  # integers in the order of the scores
    keys = torch.arange(size, device=scores.device).sub(ranks, alpha=1 << shift)  # the best is the smallest
    if excluded is not None:
        keys = torch.where(excluded, 1 << 62 | size, keys)
    count = min(count, size)
    if keys.device.type == "cpu":  # there numpy is 3 times as fast as topk
        smallest = np.partition(keys.numpy(), count - 1, axis=-1)[..., :count]
        return torch.from_numpy(np.sort(smallest, axis=-1)).bitwise_and_((1 << shift) - 1)
    return keys.topk(count, dim=-1, largest=False).values.bitwise_and_((1 << shift) - 1)
