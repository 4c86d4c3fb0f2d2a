"""Owns which of several parameters of a test belong to the fast suite."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_except(values: Iterable[Any], *fast: Any) -> list[Any]:
    """The values as parameters of a test, of which all but some are slow."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]
