"""Samples of parameters such as family x head: `make test` runs a few of them, and `make test-slow` more of them."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from support.hf_models import LONG_FAMILIES


def one_of_each(pairs: Sequence[tuple[Any, Any]], *, every_family: bool = False) -> list[ParameterSet]:
    """Parameters for pairs, of which the fast suite has each first and each second value once.

    The slow suite has two second values with each first one. The second value rotates, so that equal second values do
    not always meet the same first one.

    Args:
        pairs: hashable values in a fixed order.
        every_family: sample the long families, too, for a test with the mark `every_family`. The slow suite then has
            all pairs.
    """
    usual = [pair for pair in pairs if every_family or not set(pair) & set(LONG_FAMILIES)]
    quick = _rotated(usual, 1)
    for first, second in usual:
        if second not in {known for _, known in quick}:
            quick.add((first, second))
    kept = pairs if every_family else [pair for pair in pairs if pair in quick | _rotated(pairs, 2)]
    return [pytest.param(*pair, marks=() if pair in quick else pytest.mark.slow) for pair in kept]


def _rotated(pairs: Iterable[tuple[Any, Any]], count: int) -> set[tuple[Any, Any]]:
    """Pairs of each first value with so many second ones, which begin one place later for each first value."""
    seconds_of: dict[Any, list[Any]] = {}
    for first, second in pairs:
        seconds_of.setdefault(first, []).append(second)
    rotated: set[tuple[Any, Any]] = set()
    for number, (first, seconds) in enumerate(seconds_of.items()):
        rotated |= {(first, seconds[(number + turn) % len(seconds)]) for turn in range(count)}
    return rotated


def slow_except(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Parameters for all values, of which the fast suite has those that are named."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]
