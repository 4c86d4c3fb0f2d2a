"""Choices: the columns that may hold them, what a row calls them, and which of them its label means.

Owns columns of single choices and their numbers, and the spellings of the label of multiple choice.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bert_tasks.data.columns import BadValueError, Column, canonical, column_of

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_WHOLE_FLOAT = re.compile(r"-?[0-9]+\.0")  # how pandas writes whole numbers of a column with empty cells


def with_choices(
    cells: Mapping[str, Any], columns: Sequence[Column], names: Mapping[str, str], *, keep_names: bool = False
) -> Mapping[str, Any]:
    """The cells, with a list of choices where each choice has a column of its own.

    Columns after the last choice of a row are empty.

    Args:
        names: the task's columns -> those of the cells, where they differ.
        keep_names: give the object of ``text`` and ``label`` lists instead, which says what the columns are called,
            for cells that are renamed before their label is read.

    Raises:
        BadValueError: see ``check_numbered``.
    """
    choices = column_of(columns, "choices")
    if choices is None:
        return cells
    name = names.get(choices.name, choices.name)
    numbered = [] if cells.get(name) is not None else numbered_columns(name, cells)
    if numbered:
        check_numbered(name, cells)
    parts = [cells[one] for one in numbered]
    while parts and parts[-1] in (None, ""):
        parts.pop()
    if not parts:
        return cells
    return {**cells, name: {"text": parts, "label": numbered[: len(parts)]} if keep_names else parts}


def numbered_columns(name: str, present: Iterable[str]) -> list[str]:
    """The columns that have one choice each, in the order of their numbers: choice0, choice1, ... for ``choices``."""
    return [one for _, one in _numbered(name, present)]


def check_numbered(name: str, present: Iterable[str]) -> None:
    """Refuses columns of single choices whose numbers are not 0, 1, 2, ... or 1, 2, 3, ..., each of them once.

    Else an index could mean another choice than the number of its column says.

    Raises:
        BadValueError: naming the columns.
    """
    found = _numbered(name, present)
    numbers = [number for number, _ in found]
    if found and (numbers[0] > 1 or numbers != list(range(numbers[0], numbers[0] + len(found)))):
        names = ", ".join(repr(one) for _, one in found)
        raise BadValueError(f"the columns of single choices are {names}; number them 0, 1, 2, ... or 1, 2, 3, ...")


def _numbered(name: str, present: Iterable[str]) -> list[tuple[int, str]]:
    stem = re.escape(name.removesuffix("s"))
    matches = ((re.fullmatch(rf"{stem}s?[ _]?([0-9]{{1,3}})", str(one)), one) for one in present)
    found = sorted((int(match[1]), one) for match, one in matches if match is not None)
    return found if len(found) > 1 else []


def choice_names(cells: Mapping[str, Any], name: str) -> list[str]:
    """What a row calls its choices: the keys or columns that its source has for them, else letters.

    Args:
        cells: the row under the source's names.
        name: the source's column of the choices.
    """
    given = cells.get(name)
    if isinstance(given, Mapping) and isinstance(given.get("label"), list | tuple):
        return [str(one) for one in given["label"]]
    numbered = numbered_columns(name, cells)
    return numbered if numbered else list(_LETTERS)


def choice_index(value: int | str, choices: Sequence[str], names: Sequence[str], first: int | None = None) -> int:
    """The index of the right choice, from 0.

    Args:
        value: a number, the text of a choice, what the row calls it, or its letter.
        choices: the texts.
        names: see ``choice_names``.
        first: what number the labels of the source give to the first choice, where the columns of the choices are
            numbered from 1 (see ``label_start``). None: it is not known, so that a number may mean two choices. Other
            choices are always counted from 0.

    Raises:
        BadValueError: there is no such choice, or the value can mean several.
    """
    count = len(choices)
    starts = (0,) if not _from_one(names[:count]) else (0, 1) if first is None else (first,)
    number, named, same = _meanings(value, choices, names)
    if number is not None:
        named = {number - start for start in starts}.intersection(range(count))
    found = sorted(named.union(same))
    if len(found) == 1:
        return found[0]
    if not found:
        if number is None:
            raise BadValueError(
                f"no choice has this text; give the text or the index (0 to {count - 1}) of the right one"
            )
        shown = f"choice {number}" if abs(number) < 10**6 else "such choice"  # 1e300 has 301 digits
        one = f"the columns of the {count} choices are numbered 1 to {count}"
        zero = f"the {count} choices have the indices 0 to {count - 1}"
        raise BadValueError(f"there is no {shown}: {one if starts == (1,) else zero}")
    if number is not None and len(starts) > 1:
        columns = " or ".join(repr(names[place]) for place in found)
        unclear = "no label shows whether they count from 0 or from 1"
        raise BadValueError(f"it can mean {columns}: {unclear}; give the name of the column")
    places = " or ".join(map(str, found))
    raise BadValueError(f"it can mean choice {places}; give the index as a number, or the letter (A is choice 0)")


def label_start(cells: Mapping[str, Any], choices: str, label: str) -> int | None:
    """What number the label of a row gives to the first of choices in columns that are numbered from 1.

    Published data sets differ: the labels of COPA and PIQA count such columns from 0, those of WinoGrande from 1. So 0
    shows the one and the number of the last column the other.

    Args:
        cells: the row under the source's names.
        choices: the source's column of the choices.
        label: the source's column of the right one.

    Returns:
        0 or 1; None where the row does not show it.
    """
    try:
        value = canonical(cells.get(label), "choice")
        given = with_choices(cells, (Column(name=choices, kind="choices"),), {})
        texts = canonical(given.get(choices), "choices")
    except BadValueError:  # validation of the row reports it
        return None
    names = choice_names(cells, choices)[: len(texts)]
    if value is None or not _from_one(names):
        return None
    number, _, same = _meanings(value, texts, names)
    possible = [] if number is None or same else [start for start in (0, 1) if 0 <= number - start < len(texts)]
    return possible[0] if len(possible) == 1 else None


def has_columns_from_one(cells: Mapping[str, Any], choices: str) -> bool:
    """Whether a row has columns of single choices that are numbered from 1."""
    return _from_one(choice_names(cells, choices))


def _from_one(names: Sequence[str]) -> bool:
    """Whether what a row calls its choices ends in 1, 2, ..."""
    pairs = enumerate(names, start=1)
    return len(names) > 0 and all(re.fullmatch(rf".*\D0*{place}", name, re.DOTALL) for place, name in pairs)


def _meanings(value: int | str, choices: Sequence[str], names: Sequence[str]) -> tuple[int | None, set[int], set[int]]:
    """The number that a label is, if it is nothing else; the choices that have it as their name; and as their text."""
    if isinstance(value, int):
        return value, set(), set()
    count, text = len(choices), value.strip()
    if _WHOLE_FLOAT.fullmatch(text) and text not in {*names, *(choice.strip() for choice in choices)}:
        text = text.removesuffix(".0")
    named = {place for place, name in enumerate(names[:count]) if name == text}
    if not named and len(text) == 1 and text in _LETTERS[:count]:
        named = {_LETTERS.index(text)}
    same = {place for place, choice in enumerate(choices) if choice.strip() == text}
    number = int(text) if not named and text.isdecimal() and len(text) <= 3 else None
    return number, named, same
