"""The last layer of a head, fitted by scikit-learn to the vectors that it reads (a linear probe).

Owns how strongly the models of scikit-learn are regularised. The right strength depends on the length of the vectors
and on the number of rows, so it is chosen by cross-validation. The vectors are not standardised, because encoders have
dimensions that are nearly constant, whose noise would become as large as the other dimensions.

Shape legend: R rows with labels, H hidden, L labels, C classes.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from bert_tasks.errors import DataError

_STRENGTHS = (0.01, 0.1, 1.0, 10.0, 100.0)  # C of logistic regression, and 1 / alpha of ridge regression
_MOST_FOLDS = 5
_MOST_ITERATIONS = 10_000  # of L-BFGS, which needs more than its default of 100 for vectors that are not standardised
Numbers = NDArray[np.float64]
LinearLayer = tuple[Numbers, Numbers]  # the weight, [L, H], and the bias, [L]


@runtime_checkable
class LinearlyFitted(Protocol):
    """An output whose logits are those of logistic or ridge regression."""

    def fit_linear(self, vectors: Numbers, labels: Numbers, *, seed: int) -> LinearLayer:
        """Returns the last layer of the head, fitted to the vectors ``[R, H]`` that it reads.

        ``labels`` are those of the rows, as ``Output.encode`` makes them. It raises a DataError if a label has no rows.
        """


def fit_classes(
    vectors: Numbers, classes: Numbers, labels: Sequence[str], weights: Sequence[float] | None, *, seed: int
) -> LinearLayer:
    """Fits logistic regression to the class of each row, ``[R]``.

    Two classes have one decision function d in scikit-learn. Their logits are -d / 2 and d / 2, because the softmax of
    these is the sigmoid of d.
    """
    meanings = [f"has the label {label!r}" for label in labels]
    model = _logistic_regression(vectors, classes, meanings, weights, seed=seed)
    weight, bias = model.coef_, model.intercept_
    if len(labels) == 2:
        weight, bias = np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2
    return weight, bias


def fit_label_set(
    vectors: Numbers, flags: Numbers, labels: Sequence[str], weights: Sequence[float] | None, *, seed: int
) -> LinearLayer:
    """Fits logistic regression for each label, whose logit is the decision function.

    ``flags`` is ``[R, L]``, 1 for each label that a row has. ``weights`` are those of rows with the label.
    """
    layers = []
    for index, label in enumerate(labels):
        meanings = [f"is without the label {label!r}", f"has the label {label!r}"]
        of_label = None if weights is None else (1.0, weights[index])
        model = _logistic_regression(vectors, flags[:, index], meanings, of_label, seed=seed)
        layers.append((model.coef_, model.intercept_))
    weights_of_labels, biases = zip(*layers, strict=True)
    return np.concatenate(weights_of_labels), np.concatenate(biases)


def fit_number(vectors: Numbers, numbers: Numbers) -> LinearLayer:
    """Fits ridge regression to the number of each row, ``[R]``. Leaving out each row in turn chooses its alpha."""
    linear_model, _ = _scikit_learn()
    model = linear_model.RidgeCV(alphas=[1 / strength for strength in _STRENGTHS]).fit(vectors, numbers)
    return model.coef_[None], np.array([model.intercept_])


def _logistic_regression(
    vectors: Numbers, classes: Numbers, meanings: Sequence[str], weights: Sequence[float] | None, *, seed: int
) -> Any:
    """Returns a ``LogisticRegression``, whose C has the lowest log loss in stratified cross-validation.

    Each fold needs each class, so there are at most as many folds as the rarest class has rows. If it has one row, C is
    the default of scikit-learn, 1. ``meanings`` is ``[C]``, what is said of the rows of a class in messages.
    """
    counts = np.bincount(classes.astype(np.int64), minlength=len(meanings)).tolist()
    for meaning, count in zip(meanings, counts, strict=True):
        if count == 0:
            raise DataError(f"optim.linear_probe: no training row {meaning}. Add such rows, or remove the label")
    class_weight = None if weights is None else dict(enumerate(weights))
    linear_model, model_selection = _scikit_learn()
    model = linear_model.LogisticRegression(class_weight=class_weight, max_iter=_MOST_ITERATIONS)
    folds = min(_MOST_FOLDS, *counts)
    if folds == 1:
        return model.fit(vectors, classes)
    splitter = model_selection.StratifiedKFold(folds, shuffle=True, random_state=seed)
    search = model_selection.GridSearchCV(model, {"C": _STRENGTHS}, scoring="neg_log_loss", cv=splitter)
    return search.fit(vectors, classes).best_estimator_


def _scikit_learn() -> tuple[Any, Any]:
    """Returns modules of scikit-learn. They are imported late, because they load slowly and only probes need them."""
    from sklearn import linear_model, model_selection

    return linear_model, model_selection
