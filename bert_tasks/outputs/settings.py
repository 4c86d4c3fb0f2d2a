"""Settings as fields of frozen dataclasses.

Tasks and outputs have settings. Users, recipes and config.json see the settings of a task and of its output as one flat
list (``Task.of``).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter

FITTED, PER_LABEL = "fitted", "per label"  # metadata of fields
_LARGEST = 2**31 - 1  # torch, Arrow and tokenizers compute with whole numbers of limited size

ValueT = TypeVar("ValueT")


def fitted(default: ValueT, *, per_label: bool = False) -> ValueT:
    """Returns a field that is fitted to data, so that no user sets it.

    A dataclass of an output uses it for what ``fit_rows``, ``calibrate`` or ``tune`` compute, such as thresholds. The
    value is saved with the model, but neither a recipe nor the reference of the settings has it.

    Args:
        default: Its value until it is fitted.
        per_label: True if it holds a value for each label, so that labels in another order reorder it.

    Examples:
        >>> thresholds: tuple[float, ...] = fitted((), per_label=True)
    """
    value: ValueT = field(default=default, metadata={FITTED: True, PER_LABEL: per_label})
    return value


def per_label(default: ValueT) -> ValueT:
    """Returns a field that a user sets, with a value for each label.

    It marks the field, so that a model that is loaded with its labels in another order gets the values in that order,
    too. With other labels, the field returns to its default.

    Args:
        default: Its default, for example an empty tuple.

    Examples:
        >>> costs: tuple[float, ...] = per_label(())
    """
    value: ValueT = field(default=default, metadata={PER_LABEL: True})
    return value


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting as recipes and config.json have it.

    Attributes:
        name: Its name.
        hint: The type of its value.
        default: Its default, or ``dataclasses.MISSING`` if a user has to set it.
        is_fitted: True if it is fitted to data and no user sets it.
        is_per_label: True if its value has an item for each label.
    """

    name: str
    hint: Any
    default: Any
    is_fitted: bool
    is_per_label: bool

    def typed(self, value: Any) -> Any:
        """Returns a value with the type of the setting, for example a list as a tuple.

        Raises:
            pydantic.ValidationError: It is of another type. Nothing is converted between texts, numbers and booleans.
        """
        # Validated as JSON, because in strict mode only JSON may have a list for a tuple.
        adapter = TypeAdapter[Any](self.hint, config=ConfigDict(allow_inf_nan=False))
        return adapter.validate_json(json.dumps(value, default=str), strict=True)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The base of dataclasses whose fields are settings. It checks the values of a field against its type."""

    def __post_init__(self) -> None:
        for name, setting in self.own_settings().items():
            value, hint = getattr(self, name), setting.hint
            if get_origin(hint) is Literal and value not in get_args(hint):
                choices = ", ".join(repr(choice) for choice in get_args(hint))
                raise ValueError(f"{name} is {value!r}, expected one of {choices}")
            if isinstance(value, int) and value > _LARGEST:
                raise ValueError(f"{name} is {value}, expected at most {_LARGEST}")

    @classmethod
    @cache
    def own_settings(cls) -> Mapping[str, Setting]:
        """Returns the settings of this class by their names."""
        hints = get_type_hints(cls, include_extras=True)  # with the annotations of base classes
        settings = {}
        for each in fields(cls):
            default = each.default
            if each.default_factory is not MISSING:
                default = each.default_factory()
            settings[each.name] = Setting(
                name=each.name,
                hint=hints[each.name],
                default=default,
                is_fitted=bool(each.metadata.get(FITTED)),
                is_per_label=bool(each.metadata.get(PER_LABEL)),
            )
        return MappingProxyType(settings)


def require(condition: bool, message: str, error: Callable[[str], Exception] = ValueError) -> None:
    """Raises an error with this message if the condition does not hold."""
    if not condition:
        raise error(message)
