"""Samples of parameters such as family x head: `make test` runs a few of them, and `make test-slow` all others."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from support.hf_models import LONG_FAMILIES


def one_of_each(pairs: Sequence[tuple[Any, Any]], *, every_family: bool = False) -> list[ParameterSet]:
    """Parameters for all pairs, of which the fast suite has each first and each second value once.

    The second value rotates, so that equal second values do not always meet the same first one.

    Args:
        pairs: hashable values in a fixed order.
        every_family: sample the long families, too, for a test with the mark `every_family`.
    """
    usual = [pair for pair in pairs if every_family or not set(pair) & set(LONG_FAMILIES)]
    seconds_of: dict[Any, list[Any]] = {}
    for first, second in usual:
        seconds_of.setdefault(first, []).append(second)
    quick = {(first, seconds[number % len(seconds)]) for number, (first, seconds) in enumerate(seconds_of.items())}
    for first, second in usual:
        if second not in {known for _, known in quick}:
            quick.add((first, second))
    return [pytest.param(*pair, marks=() if pair in quick else pytest.mark.slow) for pair in pairs]


def slow_except(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Parameters for all values, of which the fast suite has those that are named."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]
