"""Predictions, one for each row, whose dataclass is the schema of JSON, Arrow and OpenAPI."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypeVar

NOT_WRITTEN: Mapping[str, Any] = MappingProxyType({"exclude": True})  # pydantic's name, so that OpenAPI also lacks it
ON_REQUEST = ("logits", "explanation")  # fields of predictions that only some calls compute


def float_list(vector: NDArray[np.float32]) -> list[float]:
    """Returns the numbers with the nine digits that identify a float32."""
    # tolist() makes float64 numbers, whose shortest text would show up to 17 digits of a float32 that has nine.
    return [float(f"{value:.9g}") for value in vector.tolist()]


@dataclass(frozen=True)
class Prediction:
    """The prediction of a model for one row. The frozen dataclass is its own schema.

    An output of one's own derives a frozen dataclass from it, and names that class in ``Output.prediction``. Its fields
    are what ``predict`` returns, the keys of the written JSON, the Arrow columns, and the server's OpenAPI document.
    JSON has a field with a default only if its value differs from the default. A field with the metadata
    ``NOT_WRITTEN`` is for metrics and reports only.

    Examples:
        >>> ChoicePrediction(label=1, answer="Eat.", score=0.75, scores=(0.25, 0.75)).to_json()
    """

    def to_json(self, *, encode_vector: Callable[[NDArray[np.float32]], Any] = float_list) -> dict[str, Any]:
        """Returns the written fields as plain values, in the order of the fields.

        Args:
            encode_vector: Called with the arrays of vectors. Default: ``float_list``, a list of numbers.

        Returns:
            A dict of texts, numbers, booleans, None, lists and dicts, which ``json.dumps`` accepts.
        """
        content: dict[str, Any] = _plain_value(self, encode_vector)
        return content


def _plain_value(value: Any, encode_vector: Callable[[NDArray[np.float32]], Any]) -> Any:
    """Returns a value of a field as JSON holds it, a dataclass without excluded fields and defaults."""
    if isinstance(value, np.ndarray):
        return encode_vector(value)
    if is_dataclass(value):
        content = {}
        for field in fields(value):
            if field.metadata.get("exclude"):
                continue
            item = getattr(value, field.name)
            default = field.default
            if field.default_factory is not MISSING:
                default = field.default_factory()
            # A field without a default is always written, also if it is None.
            if default is MISSING or item != default:
                content[field.name] = _plain_value(item, encode_vector)
        return content
    if isinstance(value, Mapping):
        return {key: _plain_value(item, encode_vector) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain_value(item, encode_vector) for item in value]
    return value


def without_scores(value: Any) -> Any:
    """Returns a plain value without floating-point numbers, however deep they are in it."""
    if isinstance(value, Mapping):
        return {key: without_scores(item) for key, item in value.items() if not isinstance(item, float)}
    if isinstance(value, list | tuple):
        return [without_scores(item) for item in value if not isinstance(item, float)]
    return value


# What an output predicts. A model that is loaded by a task's name has predictions of any type for a type checker.
PredictionT = TypeVar("PredictionT", bound=Prediction, default=Any)
