"""The checks of single values of a recipe, with which ``schema`` declares its keys.

pydantic calls them before or after it has checked the type of a value. A ValueError becomes a problem of the key, with
its line (``errors``).
"""

import re
from typing import Any, TypeVar

from bert_tasks.recipe.toml import EVALUATE_MODULE

Item = TypeVar("Item")
IMPORTED = re.compile(r"\w+(\.\w+)*:\w+")  # module:name


def as_tuple(value: Any) -> Any:
    """Returns a list as a tuple, and any other value as it is.

    The sections are frozen, but a list in them could still be changed, and strict pydantic takes no list for a tuple.
    """
    if isinstance(value, list):
        return tuple(value)
    return value


def check_repeats(values: tuple[Item, ...]) -> tuple[Item, ...]:
    """Returns the values, which must differ from each other. They may be unhashable."""
    repeated = next((value for value in values if values.count(value) > 1), None)
    if repeated is not None:
        raise ValueError(f"{repeated} appears more than once")
    return values


def known_metric(source: Any) -> Any:
    """Returns a metric, whose name has a valid form, or which can be called.

    Only the form is checked. Importing the metric would run foreign code while a recipe is read.
    """
    if isinstance(source, str):
        if EVALUATE_MODULE.fullmatch(source) is None and IMPORTED.fullmatch(source) is None:
            raise ValueError(f"'{source}' is neither 'evaluate:NAME_OR_PATH' nor 'module:function'")
    elif not callable(source) and not hasattr(source, "compute"):  # a module of evaluate has a method ``compute``
        raise ValueError(
            f"{source!r} is no metric. Expected 'evaluate:NAME_OR_PATH', 'module:function', a function or a module of "
            "evaluate"
        )
    return source


def no_limit(value: Any) -> Any:
    """Returns None for 0 and "none", which disable a limit, because TOML has no null."""
    if value == "none" or (value == 0 and value is not False):  # False equals 0 in Python, but is no number in TOML
        return None
    return value
