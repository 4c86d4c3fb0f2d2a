"""Results of sequence and pair classification: one class, several labels, or a number.

Owns which figures and examples they have. Must not know how they are shown.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np

from bert_tasks.data.columns import Row
from bert_tasks.report.collect import Answers
from bert_tasks.report.results import (
    EXAMPLES,
    MOST_POINTS,
    Confusion,
    Results,
    TextExample,
    Verdict,
    cut,
    estimated,
    label_rows,
)
from bert_tasks.report.statistics import (
    SEED,
    calibration,
    class_measure,
    label_counts,
    multilabel_measure,
    regression_measure,
)
from bert_tasks.tasks.pair_classification import PairClassification
from bert_tasks.tasks.sequence_classification.task import SequenceClassification, SequencePrediction


class _Answer(NamedTuple):
    row: Row
    truth: object
    guess: SequencePrediction


def results(answers: Answers) -> Results:
    """Of the rows that have a target."""
    task = answers.task
    problem = task.problem_type if isinstance(task, SequenceClassification | PairClassification) else ""
    target = next(column.name for column in task.columns if column.is_label)
    guesses = cast("Sequence[SequencePrediction]", answers.predictions)
    given = [
        _Answer(row, row[target], guess)
        for row, guess in zip(answers.rows, guesses, strict=True)
        if row.get(target) is not None
    ]
    if problem == "regression":
        return _numbers(given)
    return _labels(given, task.labels) if problem == "multi_label_classification" else _classes(given, task.labels)


def _classes(given: Sequence[_Answer], labels: tuple[str, ...]) -> Results:
    truths, guesses = [str(one.truth) for one in given], [str(one.guess.label) for one in given]
    measure = class_measure(label_counts([[t] for t in truths], [[g] for g in guesses], labels), labels)
    estimates = estimated(measure)
    right = tuple(truth == guess for truth, guess in zip(truths, guesses, strict=True))
    wrong = sorted((one for one, ok in zip(given, right, strict=True) if not ok), key=lambda one: -one.guess.score)
    table = label_rows(measure, estimates, labels)
    return Results(
        measure=measure,
        estimates=estimates,
        rows=len(given),
        unit="rows",
        headline=("accuracy", "macro_f1"),
        label_word="class",
        table=table,
        left_out=len(labels) - len(table),
        confusion=Confusion.of(truths, guesses, labels, "rows"),
        calibration=calibration([one.guess.score for one in given], right),
        sure_of="answer",
        mistakes=len(wrong),
        texts=tuple(_example(one, str(one.truth), str(one.guess.label), one.guess.score) for one in wrong[:EXAMPLES]),
        right=right,
        verdicts=tuple(
            Verdict(row=one.row, label=truth, prediction=guess, score=one.guess.score, right=truth == guess)
            for one, truth, guess in zip(given, truths, guesses, strict=True)
        ),
    )


def _labels(given: Sequence[_Answer], labels: tuple[str, ...]) -> Results:
    truths = [tuple(cast("Sequence[str]", one.truth)) for one in given]
    guesses = [_chosen(one.guess) for one in given]
    measure = multilabel_measure(label_counts(truths, guesses, labels), labels)
    estimates = estimated(measure)
    right = tuple(set(truth) == set(guess) for truth, guess in zip(truths, guesses, strict=True))
    wrong = sorted(
        ((_surest_mistake(one, labels), one) for one, ok in zip(given, right, strict=True) if not ok),
        key=lambda found: -found[0],
    )
    table = label_rows(measure, estimates, labels)
    sure = [one.guess.scores[label] for one in given for label in labels]
    return Results(
        measure=measure,
        estimates=estimates,
        rows=len(given),
        unit="rows",
        headline=("f1", "micro_f1"),
        label_word="label",
        table=table,
        left_out=len(labels) - len(table),
        calibration=calibration(sure, [label in truth for truth in truths for label in labels]),
        sure_of="label",
        mistakes=len(wrong),
        texts=tuple(
            _example(one, _listed(cast("Sequence[str]", one.truth)), _listed(_chosen(one.guess)), score)
            for score, one in wrong[:EXAMPLES]
        ),
        right=right,
        verdicts=tuple(
            Verdict(
                row=one.row,
                label=list(truth),
                prediction=list(guess),
                score=_surest_mistake(one, labels),
                right=set(truth) == set(guess),
            )
            for one, truth, guess in zip(given, truths, guesses, strict=True)
        ),
    )


def _chosen(guess: SequencePrediction) -> tuple[str, ...]:
    return () if guess.labels is None else guess.labels


def _surest_mistake(one: _Answer, labels: Sequence[str]) -> float:
    """How sure the model is of the label that it is most sure about and wrong."""
    truth, chosen = set(cast("Sequence[str]", one.truth)), set(_chosen(one.guess))
    wrong = [label for label in labels if (label in truth) != (label in chosen)]
    return max(
        (one.guess.scores[label] if label in chosen else 1 - one.guess.scores[label] for label in wrong), default=0.0
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "(none)"


def _numbers(given: Sequence[_Answer]) -> Results:
    truths = [float(cast("float", one.truth)) for one in given]
    guesses = [one.guess.score for one in given]
    measure = regression_measure(truths, guesses)
    far = sorted(given, key=lambda one: -abs(one.guess.score - float(cast("float", one.truth))))
    pairs = list(zip(truths, guesses, strict=True))
    if len(pairs) > MOST_POINTS:
        chosen = np.random.default_rng(SEED).choice(len(pairs), MOST_POINTS, replace=False)
        pairs = [pairs[place] for place in sorted(chosen.tolist())]
    return Results(
        measure=measure,
        estimates=estimated(measure),
        rows=len(given),
        unit="rows",
        headline=measure.names,
        pairs=tuple(pairs),
        texts=tuple(
            _example(one, f"{one.truth:.3g}", f"{one.guess.score:.3g}", one.guess.score) for one in far[:EXAMPLES]
        ),
        verdicts=tuple(
            Verdict(row=one.row, label=truth, prediction=guess, score=abs(guess - truth), right=guess == truth)
            for one, truth, guess in zip(given, truths, guesses, strict=True)
        ),
    )


def _example(one: _Answer, truth: str, answer: str, score: float) -> TextExample:
    pair = one.row.get("text_pair")
    return TextExample(
        line=one.row.get("line"),
        text=cut(one.row["text"]),
        text_pair=None if pair is None else cut(pair),
        truth=cut(truth, 200),
        answer=cut(answer, 200),
        score=score,
    )
