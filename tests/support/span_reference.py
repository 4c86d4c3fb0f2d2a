"""Plain Python references: the n best spans as transformers' question-answering example finds them, SQuAD's rules.

Slow and without tensors. Must not know bert_tasks. Floats that stand for logits are float32 values.
"""

import math
import string
import struct
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import NamedTuple


class Token(NamedTuple):
    """One token of a window. ``characters``: which part of the context it is, None if it is none of it."""

    start_logit: float
    end_logit: float
    characters: tuple[int, int] | None
    may_start: bool = True


class LoadedCheckpoint(NamedTuple):
    text: str
    start: int
    end: int
    start_logit: float
    end_logit: float
    probability: float


class Expected(NamedTuple):
    """The n-best list of a question, and the rank in it of the best span and of "no answer"."""

    n_best: list[LoadedCheckpoint]
    best_at: int
    null_at: int | None
    null_odds: float | None


class _Entry(NamedTuple):
    score: float
    start: int
    end: int
    start_logit: float
    end_logit: float
    is_null: bool


def float32(value: float) -> float:
    """The nearest float32. A sum of two float32 values, rounded so, is float32's sum."""
    nearest: float = struct.unpack("f", struct.pack("f", value))[0]
    return nearest


def expected_answers(
    context: str, windows: Sequence[Sequence[Token]], *, n_best: int, max_answer_length: int, with_null: bool
) -> Expected:
    """All windows' candidates in one list, sorted, cut to ``n_best``; "no answer" comes back if it was cut off."""
    spans = [span for window in windows for span in window_spans(window, n_best, max_answer_length)]
    null = min((_null_entry(window[0]) for window in windows), key=lambda entry: entry.score)
    entries = [*spans, null] if with_null else spans
    kept = sorted(entries, key=lambda entry: -entry.score)[:n_best]
    if with_null and null not in kept:
        kept.append(null)
    if not kept:
        return Expected([LoadedCheckpoint("", 0, 0, 0.0, 0.0, 0.0)], 0, None, None)
    weights = [math.exp(entry.score - kept[0].score) for entry in kept]
    total = math.fsum(weights)
    candidates = [
        LoadedCheckpoint(context[entry.start : entry.end], *entry[1:5], weight / total)
        for entry, weight in zip(kept, weights, strict=True)
    ]
    with_text = [index for index, span in enumerate(candidates) if span.text]
    if not with_null:
        return Expected(candidates, with_text[0] if with_text else 0, None, None)
    null_at = kept.index(null)
    if not with_text:
        return Expected(candidates, null_at, null_at, null.score)
    best = kept[with_text[0]]
    return Expected(candidates, with_text[0], null_at, float32(float32(null.score - best.start_logit) - best.end_logit))


def window_spans(window: Sequence[Token], n_best: int, max_answer_length: int) -> list[_Entry]:
    """The allowed spans among the best starts and ends of a window, best start first, then best end first."""
    tokens = range(len(window))
    starts = sorted(tokens, key=lambda token: -window[token].start_logit)[:n_best]
    ends = sorted(tokens, key=lambda token: -window[token].end_logit)[:n_best]
    return [
        _span_entry(window[start], window[end])
        for start in starts
        for end in ends
        if window[start].characters is not None and window[end].characters is not None
        if window[start].may_start and start <= end < start + max_answer_length
    ]


def _span_entry(first: Token, last: Token) -> _Entry:
    assert first.characters is not None
    assert last.characters is not None
    score = float32(first.start_logit + last.end_logit)
    return _Entry(score, first.characters[0], last.characters[1], first.start_logit, last.end_logit, False)


def _null_entry(token: Token) -> _Entry:
    return _Entry(float32(token.start_logit + token.end_logit), 0, 0, token.start_logit, token.end_logit, True)


def plain_normalized(text: str) -> str:
    """Lower case; ASCII punctuation goes; "a", "an", "the" between characters that are no letters or digits go."""
    kept = [character for character in text.lower() if character not in string.punctuation]
    runs = ["".join(run) for _, run in groupby(kept, key=str.isalnum)]
    return " ".join("".join(" " if run in ("a", "an", "the") else run for run in runs).split())


def plain_exact(gold: str, guess: str) -> int:
    return 1 if plain_normalized(gold) == plain_normalized(guess) else 0


def plain_f1(gold: str, guess: str) -> float:
    """Of version 2.0: an empty side agrees with an empty one only."""
    left, right = plain_normalized(gold).split(), plain_normalized(guess).split()
    if not left or not right:
        return int(left == right)
    return _overlap_f1(left, right)


def _overlap_f1(gold: list[str], guess: list[str]) -> float:
    rest, common = list(gold), 0
    for word in guess:
        if word in rest:
            rest.remove(word)
            common += 1
    if common == 0:
        return 0
    precision, recall = common / len(guess), common / len(gold)
    return 2 * precision * recall / (precision + recall)


def plain_v1(golds: Sequence[Sequence[str]], guesses: Sequence[str]) -> dict[str, float]:
    """Version 1.1: best over the golds; without a common word F1 is 0."""
    exact, f1 = 0, 0.0
    for texts, guess in zip(golds, guesses, strict=True):
        exact += max(plain_exact(text, guess) for text in texts)
        words = plain_normalized(guess).split()
        f1 += max(_overlap_f1(plain_normalized(text).split(), words) for text in texts)
    return {"exact_match": 100.0 * exact / len(golds), "f1": 100.0 * f1 / len(golds)}


def plain_v2(
    golds: Sequence[Sequence[str]], guesses: Sequence[str], null_odds: Sequence[float] | None, threshold: float
) -> dict[str, float]:
    """Version 2.0. A question has an answer if it has golds; of these only those that are not empty are compared."""
    rows = range(len(golds))
    not_empty = [[text for text in texts if plain_normalized(text)] for texts in golds]
    accepted = [texts if texts else [""] for texts in not_empty]
    raw = {
        "exact": [max(plain_exact(text, guesses[row]) for text in accepted[row]) for row in rows],
        "f1": [max(plain_f1(text, guesses[row]) for text in accepted[row]) for row in rows],
    }
    blank = [null_odds is not None and null_odds[row] > threshold for row in rows]
    final = {
        name: [float(not golds[row]) if blank[row] else values[row] for row in rows] for name, values in raw.items()
    }
    metrics: dict[str, float] = {}
    groups = {
        "": rows,
        "HasAns_": [row for row in rows if golds[row]],
        "NoAns_": [row for row in rows if not golds[row]],
    }
    for prefix, members in groups.items():
        if members:
            metrics |= {
                f"{prefix}{name}": 100.0 * sum(values[row] for row in members) / len(members)
                for name, values in final.items()
            }
            metrics[f"{prefix}total"] = len(members)
    if null_odds is not None:
        for name, values in raw.items():
            best, threshold = _scan(golds, guesses, null_odds, values)
            metrics |= {f"best_{name}": best, f"best_{name}_thresh": threshold}
    return metrics


def _scan(
    golds: Sequence[Sequence[str]], guesses: Sequence[str], null_odds: Sequence[float], scores: Sequence[float]
) -> tuple[float, float]:
    """The best total over 0, 1, 2, ... answered questions, least null odds first; the fewest among equals."""
    order = sorted(range(len(golds)), key=lambda row: null_odds[row])
    gains = [scores[row] if golds[row] else -int(guesses[row] != "") for row in order]
    totals = list(accumulate(gains, initial=sum(not texts for texts in golds)))
    answered = totals.index(max(totals))
    return 100.0 * max(totals) / len(golds), 0.0 if answered == 0 else null_odds[order[answered - 1]]
