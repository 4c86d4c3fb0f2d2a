"""The section ``[search]`` of a recipe, with the keys of a hyper-parameter search.

A search tries values of some keys, so that its section has other keys for each recipe. What a key may be is known only
by the key itself: the space is valid if the recipe is valid with each of its limits or choices (``checked_space``). A
search over night must not end because one of the trials has an impossible value.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from bert_tasks.data.issues import did_you_mean
from bert_tasks.recipe.errors import KnownKeys, Problem
from bert_tasks.recipe.toml import Document, KeyPath, literal, section_of
from bert_tasks.recipe.values import as_tuple

_MOST_COMBINATIONS = 10_000
_FORMS = "needs {low = ..., high = ...}, with log = true if you like, or {choices = [...]}"
_CLOSED = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True, use_attribute_docstrings=True)


def _check_repeats(choices: Sequence[Any]) -> None:
    """Raises ValueError for equal choices. They are compared as TOML, because True equals 1 in Python."""
    texts = list(map(literal, choices))
    repeated = next((text for text in texts if texts.count(text) > 1), None)
    if repeated is not None:
        raise ValueError(f"choices has {repeated} twice")


Check = Callable[[Document], tuple[BaseModel | None, list[Problem]]]  # of a recipe
Count = Annotated[int, Field(ge=1, lt=2**31)]
Sampler = Literal["tpe", "random", "grid"]


# A range has two keys, because a list of two numbers could as well be two choices.
class Space(BaseModel):
    """The values of a key in a search, as a range of numbers or as choices."""

    model_config = _CLOSED
    low: int | float | None = None
    """The lowest number. Two whole numbers are a range of whole numbers, unless the key accepts others, too, and the
    sampler is not "grid"."""
    high: int | float | None = None
    """The highest number."""
    log: bool = False
    """Draw the logarithm evenly, which suits learning rates."""
    choices: Annotated[tuple[Any, ...] | None, BeforeValidator(as_tuple)] = None
    """The values themselves, instead of low and high."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        """Checks that the space is either a range or a list of choices."""
        bounds = (self.low, self.high)
        if self.choices is not None:
            if bounds != (None, None) or self.log:
                raise ValueError("choices is set, so remove low, high and log")
            if len(self.choices) < 2:
                raise ValueError("choices needs at least two values")
            _check_repeats(self.choices)
            return self
        if self.low is None or self.high is None:
            raise ValueError(_FORMS)
        if not self.low < self.high:
            raise ValueError(f"low = {literal(self.low)} must be less than high = {literal(self.high)}")
        if self.log and self.low <= 0:
            raise ValueError(f"low is {literal(self.low)}, but log = true needs a number above 0")
        return self

    @property
    def size(self) -> int | None:
        """The number of values. None if it has no end."""
        if self.choices is not None:
            return len(self.choices)
        if isinstance(self.low, int) and isinstance(self.high, int):
            return self.high - self.low + 1
        return None

    @property
    def values(self) -> Sequence[Any]:
        """All values, if there is an end of them."""
        if isinstance(self.low, int) and isinstance(self.high, int):
            return range(self.low, self.high + 1)
        if self.choices is None:
            return ()
        return self.choices

    def __contains__(self, value: Any) -> bool:
        if self.choices is not None:
            return value in self.choices
        # A range of 0 to 1 has no True, which is an int of 1 for Python.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and self.low is not None and self.high is not None and self.low <= value <= self.high

    @property
    def probes(self) -> tuple[Any, ...]:
        """Values that the key must accept if it accepts all of them."""
        if self.choices is None:
            return (self.low, self.high)
        return self.choices

    def with_probes(self, probes: Sequence[Any], *, is_grid: bool) -> Self:
        """Returns the space with the key's type. Raises ValueError for equal choices."""
        if self.choices is not None:
            _check_repeats(probes)
            return self.model_copy(update={"choices": tuple(probes)})
        if is_grid:  # which uses whole numbers one by one, also for a key that takes fractions
            return self
        low, high = probes
        return self.model_copy(update={"low": low, "high": high})


class SearchSection(BaseModel):
    """A search for better values of some keys, by `bert-tasks search`.

    Set a key of `[optim]` by its name, as in `learning_rate = {low = 1e-5, high = 1e-4, log = true}`. Set a key of
    `[settings]` or `[model]` with its section, as in `settings.max_length = {choices = [64, 128]}`.
    """

    model_config = _CLOSED | ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Space]
    trials: Count = 20
    """Number of runs with values of their own."""
    hours: Annotated[float, Field(gt=0)] | None = None
    """Begin no trial after this duration, even if there are fewer than `trials`. The same command goes on."""
    sampler: Sampler = "tpe"
    """Optuna's method that suggests values. "tpe" learns from the trials so far, and "random" draws values. Both begin
    with the values of the recipe as it is, where the space has them. "grid" tries all combinations in random order."""
    pruner: Literal["none", "median", "halving"] = "median"
    """Optuna's rule that ends trials early. With "median" it ends trials below the median of the others after as many
    evaluations. With "halving" it ends all but the best third after 1, 3, 9, ... evaluations (successive halving)."""
    optim: dict[str, Space] = {}
    """Keys of `[optim]`, which you may also set without the section."""
    settings: dict[str, Space] = {}
    """Keys of `[settings]`."""
    model: dict[str, Space] = {}
    """Keys of `[model]`."""

    @model_validator(mode="after")
    def _is_searchable(self) -> Self:
        if not self.space:
            raise ValueError("no key to vary. Add one, such as learning_rate = {low = 1e-5, high = 1e-4, log = true}")
        twice = next((name for name in self.__pydantic_extra__ if name in self.optim), None)
        if twice is not None:
            raise ValueError(f"{twice} and optim.{twice} are the same key. Remove one of them")
        if self.sampler == "grid" and self.grid_size() > _MOST_COMBINATIONS:
            size, most = self.grid_size(), _MOST_COMBINATIONS
            raise ValueError(f'sampler = "grid" has {size:,} combinations, expected at most {most:,}')
        return self

    @property
    def space(self) -> dict[str, Space]:
        """The keys to vary, as ``section.key``, and the values of each."""
        tables = {"optim": {**self.__pydantic_extra__, **self.optim}, "settings": self.settings, "model": self.model}
        spaces = {}
        for section, table in tables.items():
            for name, space in table.items():
                spaces[f"{section}.{name}"] = space
        return spaces

    def with_space(self, space: Mapping[str, Space]) -> Self:
        """Returns the section with other values for its keys."""
        # The section is frozen, so it is copied. Keys without a section go to [optim], where they belong.
        tables: dict[str, dict[str, Space]] = {"optim": {}, "settings": {}, "model": {}}
        for key in self.space:
            section, name = key.split(".", 1)
            tables[section][name] = space[key]
        result = self.model_copy(update=tables)
        result.__pydantic_extra__.clear()
        return result

    def grid_size(self) -> int:
        """Returns the number of combinations of all values. Raises ValueError if a key has no end of them."""
        size = 1
        for key, space in self.space.items():
            if space.size is None:
                raise ValueError(f'sampler = "grid" needs choices or whole numbers, but {key} has neither')
            size *= space.size
        return size


def changed(document: Document, values: Mapping[str, Any]) -> Document:
    """Returns a document with other values of ``section.key``."""
    result = dict(document)
    for key, value in values.items():
        section, _, name = key.partition(".")
        result[section] = {**section_of(result, section), name: value}
    return result


def not_searchable(name: str, known_keys: KnownKeys) -> str:
    """Returns the message for a key that is not of ``[search]`` or ``[optim]``."""
    if name in ("seed", "run"):
        return f"'{name}' cannot be searched, because all trials have the same seed"
    section = next((section for section in ("settings", "model") if name in known_keys[section]), None)
    if section is not None:
        return f"'{name}' is a key of [{section}]. Write {section}.{name}"
    if name in known_keys:
        return f"'{name}' cannot be searched. Choose keys of [optim], [settings] and [model]"
    keys = (*SearchSection.model_fields, *known_keys["optim"])
    return f"unknown key '{name}' in [search]{did_you_mean(name, keys)}"


def checked_space(search: SearchSection, document: Document, check: Check) -> tuple[dict[str, Space], list[Problem]]:
    """Returns the space, and the keys that are unknown or reject some of their values.

    Each value is tried alone, in the recipe as it is. Whole numbers become fractions for a key that accepts these, but
    a grid uses those between low and high one by one.
    """
    # Without [search], or each check would check the space again.
    alone = {name: value for name, value in document.items() if name != "search"}
    stated = section_of(document, "search")
    space, problems = dict(search.space), list[Problem]()
    for key, values in search.space.items():
        section, name = key.split(".", 1)
        path: KeyPath = ("search", section, name)
        if name in stated:  # a key of [optim], which needs no section
            path = ("search", name)
        try:
            typed = [_typed(key, value, alone, check) for value in values.probes]
        except ValueError as error:
            problems.append(Problem(path, f"[search] {error}"))
            continue
        try:
            space[key] = values.with_probes(typed, is_grid=search.sampler == "grid")
        except ValueError as error:
            problems.append(Problem(path, f"[{'.'.join(map(str, path))}] {error}"))
    return space, problems


def _typed(key: str, value: Any, document: Document, check: Check) -> Any:
    """Returns a value with the type of its key. Raises ValueError if the key rejects it."""
    recipe, wrong = check(changed(document, {key: value}))
    if recipe is None or wrong:
        raise ValueError(wrong[0].text)
    section, name = key.split(".", 1)
    # JSON's 1 is a valid float, and the key has converted it. Optuna must know that it may draw fractions.
    taken = recipe.model_dump(include={section})[section].get(name)
    if isinstance(taken, float):
        return float(value)
    return value
