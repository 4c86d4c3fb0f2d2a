"""SQuAD 1.1 and 2.0 scores, digit for digit those of the official scripts evaluate-v1.1 and evaluate-v2.0.

Owns the normalisation of answers, exact match, token F1 and the scan for the best no-answer threshold; scores of a
data set are on a scale of 0 to 100. Must not know about tokens, logits or files. Sums run in row order over the same
kinds of numbers as in the scripts (Python's sum rounds differently over ints and floats), so the last digit agrees.
"""

import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import inf, isinf, isnan, nextafter
from typing import NamedTuple

from bert_tasks.errors import DataError
from bert_tasks.metrics.tables import MetricTable, metric_table

ARTICLES = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


class AnswerScores(NamedTuple):
    """One number per question: exact match (0 or 1) and F1 (0 to 1), the best over its gold answers."""

    exact: list[float]
    f1: list[float]


def normalize_answer(text: str) -> str:
    """Lower case, without ASCII punctuation and English articles, words separated by one space."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_score(gold: str, guess: str) -> int:
    """1 if both are equal once normalised, else 0."""
    return int(normalize_answer(gold) == normalize_answer(guess))


def f1_score(gold: str, guess: str) -> float:
    """F1 over normalised words as in evaluate-v2.0: two empty answers agree (1), an empty one and another do not."""
    return _words_f1(normalize_answer(gold).split(), normalize_answer(guess).split(), both_empty=1)


def squad_v1_metrics(golds: Sequence[Sequence[str]], guesses: Sequence[str]) -> dict[str, float]:
    """``exact_match`` and ``f1`` of evaluate-v1.1.

    Two answers that are empty once normalised ("the", "?") match exactly but have an F1 of 0, as in that script.

    Args:
        golds: the accepted answers of each question, at least one.
        guesses: one answer per question.

    Raises:
        DataError: there is no question, a question has no gold answer, or the lengths differ.
    """
    _check_lengths(golds, guesses)
    unanswerable = [row for row, texts in enumerate(golds) if not texts]
    if unanswerable:
        raise DataError(
            f"SQuAD 1.1 metrics: question {unanswerable[0]} (of {len(golds)}, from 0) has no gold answer, expected "
            "at least one; drop such questions or use the SQuAD 2.0 metrics"
        )
    scores = _answer_scores(map(_normalized, golds), guesses, both_empty=0)
    total_f1 = 0.0
    for value in scores.f1:  # one by one: sum() compensates rounding errors since Python 3.12, the script does not
        total_f1 += value
    return {"exact_match": 100.0 * sum(scores.exact) / len(golds), "f1": 100.0 * total_f1 / len(golds)}


def squad_v2_metrics(
    golds: Sequence[Sequence[str]],
    guesses: Sequence[str],
    null_odds: Sequence[float] | None,
    *,
    threshold: float = 0.0,
) -> dict[str, float]:
    """The scores of evaluate-v2.0, under its keys.

    ``exact``, ``f1``, ``total`` and the same with ``HasAns_`` and ``NoAns_`` (absent without such questions) count a
    question as answered by "" if its null odds exceed the threshold. ``best_exact``, ``best_f1`` and their
    ``_thresh`` come from scanning all thresholds; they say something only if ``guesses`` are the best answers that
    are NOT empty, whatever the threshold: a guess blanked beforehand cannot be won back by a higher threshold.
    The script gives the same for ``guesses`` as predictions, ``null_odds`` as --na-prob-file and ``threshold`` as
    --na-prob-thresh (whose default there is 1.0).

    Args:
        golds: the accepted answers of each question; none for an unanswerable one.
        guesses: one answer per question.
        null_odds: per question the score of "no answer" minus that of the guess. None: guesses are final, no scan.
        threshold: a guess counts as "" iff its null odds are greater.

    Raises:
        DataError: there is no question, the lengths differ, or null odds are not a number.
    """
    _check_lengths(golds, guesses, null_odds)
    answerable = [bool(texts) for texts in golds]
    raw = _answer_scores(map(_normalized_v2, golds), guesses, both_empty=1)
    final = raw if null_odds is None else _blanked(raw, answerable, null_odds, threshold)
    groups = {"": range(len(golds))} | {
        prefix: [row for row, has_answer in enumerate(answerable) if has_answer is wanted]
        for prefix, wanted in (("HasAns_", True), ("NoAns_", False))
    }
    metrics = {key: value for prefix, rows in groups.items() if rows for key, value in _means(final, rows, prefix)}
    if null_odds is not None:
        for name, scores in (("exact", raw.exact), ("f1", raw.f1)):
            best = _best_threshold(scores, answerable, guesses, null_odds)
            metrics[f"best_{name}"], metrics[f"best_{name}_thresh"] = best
    return metrics


def squad_table(metrics: Mapping[str, float]) -> MetricTable:
    """The metrics above as a table with a row for each kind of question; one kind alone is all questions."""
    kinds = [kind for kind in ("HasAns", "NoAns") if f"{kind}_total" in metrics]
    key = "{}_{}".format
    table = metric_table(metrics, kinds, key, word="questions", columns=("exact", "f1"), support="total")
    if len(kinds) == 1:
        return MetricTable(overall=table.overall)
    return table


def tune_null_threshold(golds: Sequence[Sequence[str]], guesses: Sequence[str], null_odds: Sequence[float]) -> float:
    """The threshold of the best F1 that ``squad_v2_metrics`` can report for these answers; arguments as there.

    The official ``best_f1_thresh`` is not such a threshold: its scan also stops between questions with equal odds,
    which no threshold separates, and it prints 0.0 where answering no question is best, whatever the odds are.

    Returns:
        A finite number: the middle between two neighbouring odds, or one beyond the smallest or the largest; the
        smallest among equally good ones, as in the official scan.

    Raises:
        DataError: see ``squad_v2_metrics``.
    """
    _check_lengths(golds, guesses, null_odds)
    scores = _answer_scores(map(_normalized_v2, golds), guesses, both_empty=1).f1
    gains: dict[float, float] = {}  # what answering the questions of these odds adds to the total F1
    for texts, score, odds in zip(golds, scores, null_odds, strict=True):
        gains[odds] = gains.get(odds, 0.0) + score - float(not texts)
    ordered = sorted(gains)
    totals = list(accumulate((gains[odds] for odds in ordered), initial=0.0))
    # -inf is answered and inf is not, whatever the finite threshold: such odds allow no step beyond them.
    stops = range(int(ordered[0] == -inf), len(totals) - int(ordered[-1] == inf))
    answered = max(stops, key=totals.__getitem__)
    return _between([-inf, *ordered][answered], [*ordered, inf][answered])


def _between(low: float, high: float) -> float:
    """A finite threshold that lets odds up to ``low`` be answered, and not those from ``high``."""
    if isinf(low) and isinf(high):
        return 0.0
    if isinf(low):
        return min(high - 1.0, nextafter(high, -inf))
    if isinf(high):
        return low + 1.0
    middle = low / 2 + high / 2
    return middle if low < middle < high else low


def _check_lengths(
    golds: Sequence[Sequence[str]], guesses: Sequence[str], null_odds: Sequence[float] | None = None
) -> None:
    if not golds:
        raise DataError("SQuAD metrics: there is no question, expected at least one")
    if len(golds) != len(guesses) or (null_odds is not None and len(null_odds) != len(golds)):
        odds = "" if null_odds is None else f" and {len(null_odds)} null odds"
        raise DataError(f"SQuAD metrics: {len(golds)} questions have {len(guesses)} answers{odds}, expected one each")
    if null_odds is not None and any(map(isnan, null_odds)):
        raise DataError("SQuAD metrics: null odds hold nan, expected numbers; look for nan in the model's logits")


def _normalized(golds: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(map(normalize_answer, golds)))


def _normalized_v2(golds: Sequence[str]) -> list[str]:
    """Gold answers that are empty once normalised are skipped; the only right answer without gold ones is ""."""
    kept = [gold for gold in _normalized(golds) if gold]
    return kept if kept else [""]


def _answer_scores(golds: Iterable[list[str]], guesses: Sequence[str], *, both_empty: int) -> AnswerScores:
    """Scores against normalised golds."""
    scores = AnswerScores(exact=[], f1=[])
    for texts, guess in zip(golds, map(normalize_answer, guesses), strict=True):
        words = guess.split()
        scores.exact.append(int(guess in texts))
        scores.f1.append(max(_words_f1(text.split(), words, both_empty=both_empty) for text in texts))
    return scores


def _words_f1(gold: list[str], guess: list[str], *, both_empty: int) -> float:
    if not gold and not guess:
        return both_empty
    common = (Counter(gold) & Counter(guess)).total()
    if common == 0:
        return 0
    precision, recall = common / len(guess), common / len(gold)
    return (2 * precision * recall) / (precision + recall)


def _blanked(
    scores: AnswerScores, answerable: Sequence[bool], null_odds: Sequence[float], threshold: float
) -> AnswerScores:
    """The scores if "" is answered wherever the null odds exceed the threshold."""

    def blank(values: list[float]) -> list[float]:
        rows = zip(values, answerable, null_odds, strict=True)
        return [float(not has_answer) if odds > threshold else value for value, has_answer, odds in rows]

    return AnswerScores(exact=blank(scores.exact), f1=blank(scores.f1))


def _means(scores: AnswerScores, rows: Sequence[int], prefix: str) -> list[tuple[str, float]]:
    return [
        (f"{prefix}exact", 100.0 * sum(scores.exact[row] for row in rows) / len(rows)),
        (f"{prefix}f1", 100.0 * sum(scores.f1[row] for row in rows) / len(rows)),
        (f"{prefix}total", len(rows)),
    ]


def _best_threshold(
    scores: Sequence[float], answerable: Sequence[bool], guesses: Sequence[str], null_odds: Sequence[float]
) -> tuple[float, float]:
    """The best mean score (0 to 100) over all thresholds, and its threshold.

    The script's scan, its quirks included: it starts with all questions unanswered and lets them answer one by one,
    least null odds first, equal odds in row order; only a strictly better score counts, also amid equal odds.
    """
    current: float = answerable.count(False)
    best, threshold = current, 0.0
    for row in sorted(range(len(null_odds)), key=null_odds.__getitem__):
        if answerable[row]:
            current += scores[row]
        elif guesses[row]:
            current -= 1
        if current > best:
            best, threshold = current, null_odds[row]
    return 100.0 * best / len(scores), threshold
