"""SQuAD 1.1 and 2.0 scores, digit for digit as the official scripts.

The scripts are evaluate-v1.1 and evaluate-v2.0. The scores of a data set are on a scale of 0 to 100. Sums run in row
order over the same types of numbers as in the scripts (Python's sum rounds differently over ints and floats), so that
the last digit agrees.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from math import inf, isinf, isnan, nextafter
from typing import NamedTuple

from bert_tasks.errors import DataError
from bert_tasks.metrics.formulas import percentage

ARTICLES = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


class AnswerScores(NamedTuple):
    """Exact match (0 or 1) and F1 (0 to 1) per question, for its best accepted answer."""

    exact: list[float]
    f1: list[float]


def normalize_answer(text: str) -> str:
    """Lowers case, and removes ASCII punctuation, English articles and extra spaces."""
    # In this order, as in the scripts: an article that stands beside punctuation is a word only without it.
    letters = text.lower().translate(PUNCTUATION)
    return " ".join(ARTICLES.sub(" ", letters).split())


def answer_scores(labels: Sequence[Sequence[str]], predictions: Sequence[str], *, version_2: bool) -> AnswerScores:
    """Returns the scores of each question.

    SQuAD 2.0 skips accepted answers that are empty once normalised. If no answer remains, "" is the only correct
    prediction, and two empty answers have an F1 of 1. In SQuAD 1.1 they match exactly but have an F1 of 0.

    Args:
        labels: Accepted answers of each question, in SQuAD 1.1 at least one each.
        predictions: One answer per question.
        version_2: Score as evaluate-v2.0 does, else as evaluate-v1.1.
    """
    scores = AnswerScores(exact=[], f1=[])
    for texts, prediction in zip(labels, predictions, strict=True):
        predicted = normalize_answer(prediction)
        accepted = list(dict.fromkeys(normalize_answer(text) for text in texts))
        if version_2:
            accepted = [text for text in accepted if text]
            if not accepted:
                accepted = [""]
        words = predicted.split()
        of_answers = [_word_f1(text.split(), words, both_empty=int(version_2)) for text in accepted]
        scores.exact.append(int(predicted in accepted))
        scores.f1.append(max(of_answers))
    return scores


def _word_f1(label: list[str], prediction: list[str], *, both_empty: int) -> float:
    """Returns the F1 of the words of an answer, which count as often as they occur.

    The ints are those of the scripts, in which sums of scores begin as ints.
    """
    if not label and not prediction:
        return both_empty
    common = (Counter(label) & Counter(prediction)).total()
    if common == 0:
        return 0
    precision, recall = common / len(prediction), common / len(label)
    return (2 * precision * recall) / (precision + recall)


def squad_v1_metrics(labels: Sequence[Sequence[str]], predictions: Sequence[str]) -> dict[str, float]:
    """Returns ``exact_match`` and ``f1`` of evaluate-v1.1.

    Args:
        labels: Accepted answers of each question, at least one.
        predictions: One answer per question.

    Raises:
        DataError: There is no question, or a question has no accepted answer.
    """
    _check(labels)
    unanswerable = [row for row, texts in enumerate(labels) if not texts]
    if unanswerable:
        raise DataError(
            f"question {unanswerable[0]} (of {len(labels)}, from 0) has no answer in the data, but SQuAD 1.1 metrics "
            "need at least one. Remove such questions, or use the SQuAD 2.0 metrics"
        )
    scores = answer_scores(labels, predictions, version_2=False)
    total_f1 = 0.0
    for value in scores.f1:  # one by one, because sum() compensates rounding since Python 3.12, the script does not
        total_f1 += value
    return {"exact_match": percentage(sum(scores.exact), len(labels)), "f1": percentage(total_f1, len(labels))}


def squad_v2_metrics(
    labels: Sequence[Sequence[str]],
    predictions: Sequence[str],
    null_odds: Sequence[float] | None,
) -> dict[str, float]:
    """Returns the scores of evaluate-v2.0, under its keys.

    ``exact``, ``f1``, ``total`` and the same with ``HasAns_`` and ``NoAns_`` (absent without such questions) count a
    prediction as "" if its null odds exceed 0. ``best_exact``, ``best_f1`` and their ``_thresh`` come from scanning all
    thresholds. They need the best answers that are NOT empty as ``predictions``, because a higher threshold cannot
    recover a prediction that was blanked before. The script computes the same if ``null_odds`` is --na-prob-file and
    --na-prob-thresh is 0.

    Args:
        labels: Accepted answers of each question. Empty for an unanswerable question.
        predictions: One answer per question.
        null_odds: Score of "no answer" minus score of the prediction, per question. None means that the predictions are
            final, without a scan.

    Raises:
        DataError: There is no question, or null odds are not a number.
    """
    if null_odds is None:
        _check(labels)
    else:
        _check(labels, null_odds)
    answerable = [bool(texts) for texts in labels]
    scanned = final = answer_scores(labels, predictions, version_2=True)
    if null_odds is not None:
        final = _with_blanks(scanned, answerable, null_odds)
    metrics: dict[str, float] = {}
    for prefix, kinds in (("", (True, False)), ("HasAns_", (True,)), ("NoAns_", (False,))):
        exact: list[float] = []
        f1: list[float] = []
        for row, has_answer in enumerate(answerable):
            if has_answer in kinds:
                exact.append(final.exact[row])
                f1.append(final.f1[row])
        if exact:
            metrics[f"{prefix}exact"] = percentage(sum(exact), len(exact))
            metrics[f"{prefix}f1"] = percentage(sum(f1), len(f1))
            metrics[f"{prefix}total"] = len(exact)
    if null_odds is not None:
        for name, scores in (("exact", scanned.exact), ("f1", scanned.f1)):
            best = _best_threshold(scores, answerable, predictions, null_odds)
            metrics[f"best_{name}"], metrics[f"best_{name}_thresh"] = best
    return metrics


def _with_blanks(scores: AnswerScores, answerable: Sequence[bool], null_odds: Sequence[float]) -> AnswerScores:
    """Returns the scores with "" as the answer to every question whose null odds exceed 0."""
    final = AnswerScores(exact=[], f1=[])
    pairs = zip(scores.exact, scores.f1, strict=True)
    for (exact, f1), is_answerable, odds in zip(pairs, answerable, null_odds, strict=True):
        if odds > 0:  # "" is right if the question has no answer, and wrong otherwise
            exact = f1 = float(not is_answerable)
        final.exact.append(exact)
        final.f1.append(f1)
    return final


def _best_threshold(
    scores: Sequence[float], answerable: Sequence[bool], predictions: Sequence[str], null_odds: Sequence[float]
) -> tuple[float, float]:
    """Returns the best mean score (0 to 100) over all thresholds, and its threshold.

    The scan has the quirks of the script. It starts with all questions unanswered and adds one question after another,
    least null odds first, equal odds in row order. Only a strictly better score counts, also amid equal odds.
    """
    current: float = answerable.count(False)
    best, threshold = current, 0.0
    ascending = sorted(range(len(null_odds)), key=null_odds.__getitem__)
    for row in ascending:
        if answerable[row]:
            current += scores[row]
        elif predictions[row]:
            current -= 1
        if current > best:
            best, threshold = current, null_odds[row]
    return percentage(best, len(scores)), threshold


def tune_null_threshold(
    labels: Sequence[Sequence[str]], predictions: Sequence[str], null_odds: Sequence[float]
) -> float:
    """Returns the threshold of the best F1 that ``squad_v2_metrics`` can report.

    The arguments are as in ``squad_v2_metrics``. The official ``best_f1_thresh`` is not such a threshold. Its scan also
    stops between questions with equal odds, which no threshold separates. It prints 0.0 if answering no question is
    best, whatever the odds are.

    Returns:
        A finite number. It is the midpoint between two neighbouring odds, or a number beyond the smallest or the
        largest. Among equally good thresholds it is the smallest, as in the official scan.

    Raises:
        DataError: See ``squad_v2_metrics``.
    """
    _check(labels, null_odds)
    scores = answer_scores(labels, predictions, version_2=True).f1
    gains: dict[float, float] = {}  # gain of the total F1 from answering the questions of these odds
    for texts, score, odds in zip(labels, scores, null_odds, strict=True):
        gains[odds] = gains.get(odds, 0.0) + score - float(not texts)
    ordered = sorted(gains)
    ordered_gains = [gains[odds] for odds in ordered]
    totals = list(accumulate(ordered_gains, initial=0.0))  # the gain if the first 0, 1, 2, ... odds are answered
    # -inf is answered and inf is not, whatever the finite threshold, so no step goes beyond such odds.
    fewest = int(ordered[0] == -inf)
    stops = range(fewest, len(totals) - int(ordered[-1] == inf))
    answered = max(stops, key=totals.__getitem__)  # max returns the first of equals, which is the lowest threshold
    last_answered = [-inf, *ordered][answered]
    first_refused = [*ordered, inf][answered]
    return _between(last_answered, first_refused)


def _between(low: float, high: float) -> float:
    """Returns a finite threshold that accepts odds up to ``low``, not from ``high``."""
    if isinf(low) and isinf(high):
        return 0.0
    if isinf(low):
        return min(high - 1.0, nextafter(high, -inf))  # 1 less than a huge number is the same number
    if isinf(high):
        return low + 1.0
    middle = low / 2 + high / 2  # halves first, because the sum of two large numbers is infinite
    return middle if low < middle < high else low  # neighbouring floats have no number between them


def _check(labels: Sequence[Sequence[str]], null_odds: Sequence[float] = ()) -> None:
    """Raises DataError if there is no question, or if null odds are not a number."""
    if not labels:
        raise DataError("there is no question, but SQuAD metrics need at least one")
    if any(isnan(odds) for odds in null_odds):
        raise DataError("null odds hold nan, expected numbers. Look for nan in the model's logits")
