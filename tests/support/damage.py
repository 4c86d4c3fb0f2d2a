"""Owns single edits of files: one field of a JSON file gets another value."""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from bert_tasks.errors import BertTasksError
from bert_tasks.terminal import printable

VALUES: tuple[Any, ...] = (None, 0, 1, "x", [], {})
REFUSED = (2, 4)  # exit codes: usage or recipe, model or checkpoint
_MOST_KEYS = 6  # of an object below the file's own


def field_edits(content: Any, values: Iterable[Any] = VALUES) -> Iterator[tuple[str, Any]]:
    """Yields the name of each edit, and the content with it. Of a long list or inner object some items are edited."""
    for path in _paths(content):
        for value in values:
            edited = copy.deepcopy(content)
            node = edited
            for key in path[:-1]:
                node = node[key]
            node[path[-1]] = value
            yield f"{'.'.join(map(str, path))} = {value!r}", edited


def _paths(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    keys = list(content) if isinstance(content, dict) else [0] if isinstance(content, list) and content else []
    if path and len(keys) > _MOST_KEYS:
        keys = [*keys[: _MOST_KEYS // 2], *keys[-_MOST_KEYS // 2 :]]
    for key in keys:
        yield from _paths(content[key], (*path, key))


def exit_code(call: Callable[[], object]) -> int:
    """Returns the exit code of a call, as the command line translates errors; 1 is raised as the error itself."""
    try:
        call()
    except BertTasksError as error:
        printable(str(error)).encode()
        return error.exit_code
    return 0
