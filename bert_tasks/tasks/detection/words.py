"""Detects rows of words with a tag for each."""

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, permutations, product

from bert_tasks.data.cells import list_in_cell
from bert_tasks.data.checks import imbalance_hint
from bert_tasks.data.columns import Column, Row, complete_row
from bert_tasks.data.conll import detect_scheme, entities, to_iob2
from bert_tasks.data.kinds import KINDS
from bert_tasks.data.problems import RowError, counted
from bert_tasks.data.profile import ColumnProfile, listed, percentile, pieces
from bert_tasks.errors import DataError
from bert_tasks.tasks.detection.base import (
    COMPARED_ROWS,
    TaskGuess,
    UserHints,
    cell_value,
    count_pieces,
    other_columns,
    several_tasks,
)

_MOST_TAGS = 200
_MOST_UNEVEN = 0.1  # share of rows with another number of tags than of words, which a run reports or skips

# Column names that people use, in lower case.
_WORDS = ("words", "tokens", "form")
_SPANS = ("entities", "spans")
_TAGS = ("tags", "ner_tags", "upos", "pos_tags", "chunk_tags", "labels", "slots")


def guess_words(
    task: str,
    task_columns: Sequence[Column],
    profiles: Sequence[ColumnProfile],
    rows: Sequence[Row],
    hints: UserHints,
) -> TaskGuess | None:
    """Returns the columns of words and tags, or of a text and its entities. None if there are none.

    Args:
        task: The name of the task.
        task_columns: The columns that the task reads.
        profiles, rows, hints: See ``Task.guess``.
    """
    guess = _guess_spans(task, task_columns, profiles, rows, hints)
    if guess is None:
        guess = _guess_tags(task, profiles, rows, hints)
    if guess is None or hints.task is not None or hints.label is not None:
        return guess
    text, label = guess.columns.values()
    unlike = (text, label, KINDS["tags"].group_column)
    classes = [column.name for column in profiles if column.is_classes and column.name not in unlike]
    return replace(guess, alternatives=(*guess.alternatives, *several_tasks(label, classes)))


def _guess_spans(
    task: str,
    task_columns: Sequence[Column],
    profiles: Sequence[ColumnProfile],
    rows: Sequence[Row],
    hints: UserHints,
) -> TaskGuess | None:
    """Detects a text, and a column of entities by its characters."""
    texts = [column.name for column in profiles if column.is_text or column.known == "text"]
    if hints.texts:
        texts = [*hints.texts]
    lists = [column for column in profiles if column.nested > 0 or column.lists > 0]
    lists.sort(key=lambda column: column.known not in _SPANS)
    names = [column.name for column in lists]
    if hints.label is not None:
        names = [hints.label]
    for text, spans in product(texts, names):
        columns = {"text": text, "entities": spans}
        tagged = _span_tags(rows[:COMPARED_ROWS], columns, task_columns)
        types = _entity_types(tagged)
        if types:
            return TaskGuess(
                task=task,
                columns=columns,
                words=percentile([count_pieces(row, [text]) for row in rows]),
                labels=tuple(_different(tagged)),
                reasons=(
                    f"{text}, {spans}: spans of characters with entities of the types {listed(types)}",
                    *_imbalance(spans, tagged, hints.name),
                ),
                precedence=2,
            )
    return None


def _guess_tags(
    task: str, profiles: Sequence[ColumnProfile], rows: Sequence[Row], hints: UserHints
) -> TaskGuess | None:
    """Detects words, and a column with a tag for each."""
    compared = rows[:COMPARED_ROWS]
    pairs = _tagged_pairs(profiles, compared, hints)
    if not pairs:
        return None
    if hints.label is None:
        pairs = _with_names(pairs, compared)
    words, tags = pairs[0]
    columns = {"words": words, "tags": tags}
    spare = _spare_tags(words, tags, profiles, compared)
    # Rows of tags are rows of words for coarser tags, but not if they are tags of the chosen words.
    unlike = {words, *(column for _, column, _ in spare)}
    alike = []
    for other, of_other in pairs:
        if of_other == tags and other not in unlike and _is_usual(other, _WORDS) == _is_usual(words, _WORDS):
            alike.append({"words": other, "tags": tags})
    sentences = _sentences(rows, words, tags)
    tagged = [names for _, names in sentences]
    uneven = sum(len(sentence) != len(names) for sentence, names in sentences)
    evenly = f"all but {counted(uneven, 'row')}" if uneven else "every row"
    return TaskGuess(
        task=task,
        columns=columns,
        words=percentile([sum(map(pieces, _names(row, words, "words"))) for row in rows]),
        labels=tuple(_different([to_iob2(names) for names in tagged])),
        reasons=(
            f"{words}, {tags}: as many words as tags in {evenly}, so each word has a tag",
            f"{tags}: {_described(tagged)}",
            *_imbalance(tags, tagged, hints.name),
        ),
        precedence=2,
        spare=tuple(spare),
        alternatives=other_columns(columns, alike, profiles),
    )


def _tagged_pairs(profiles: Sequence[ColumnProfile], rows: Sequence[Row], hints: UserHints) -> list[tuple[str, str]]:
    """Returns the columns that may be words and their tags, by their names, then any two columns of lists."""
    if hints.task is not None and hints.label is not None and len(hints.texts) == 1:
        hinted = (hints.texts[0], hints.label)
        return [hinted] if _are_tagged(rows, *hinted, is_usual=True) else []
    by_name = {column.known: column.name for column in profiles}
    usual = [(by_name[w], by_name[t]) for w, t in product(_WORDS, _TAGS) if w in by_name and t in by_name]
    lists = [column.name for column in profiles if column.nested > 0]
    pairs = []
    for words, tags in [*usual, *permutations(lists, 2)]:
        is_hinted = hints.texts in ((), (words,)) and hints.label in (None, tags)
        if is_hinted and _are_tagged(rows, words, tags):
            pairs.append((words, tags))
    return pairs


def _spare_tags(
    words: str, tags: str, profiles: Sequence[ColumnProfile], rows: Sequence[Row]
) -> list[tuple[str, str, str]]:
    """Returns further columns with a tag for each of the words, for ``TaskGuess.spare``."""
    spare = []
    for column in [profile.name for profile in profiles if profile.name not in (words, tags)]:
        is_copy = all(row.get(column) in (row.get(words), row.get(tags)) for row in rows)
        if not is_copy and _are_tagged(rows, words, column):
            different = _different([_names(row, column, "tags") for row in rows])
            spare.append(("tags", column, f"{counted(len(different), 'different tag')}: {listed(different)}"))
    return spare


def _described(tagged: Sequence[Sequence[str]]) -> str:
    """Returns what the tags of a column are."""
    scheme = detect_scheme(tagged)
    if scheme == "raw":
        return f"{listed(_different(tagged))} are classes of words"
    return f"entity tags in {scheme} of the types {listed(_entity_types(tagged))}"


def _different(tagged: Iterable[Sequence[str]]) -> list[str]:
    """Returns the different tags of sentences, sorted."""
    return sorted(set(chain.from_iterable(tagged)))


def _entity_types(tagged: Sequence[Sequence[str]]) -> list[str]:
    """Returns the types of the entities that tags mark, sorted."""
    found = chain.from_iterable(entities(tags) for tags in tagged)
    return sorted({entity.type for entity in found})


def _span_tags(rows: Sequence[Row], names: Mapping[str, str], columns: Sequence[Column]) -> list[Sequence[str]]:
    """Returns the tags of spans in each row, or nothing if over 10 % are unreadable."""
    tagged: list[Sequence[str]] = []
    for row in rows:
        try:
            cells = complete_row({name: row.get(name) for name in names.values()}, columns, names)
        except RowError:
            continue
        tagged.append(cells.get("tags", ()))
    return tagged if len(tagged) >= 0.9 * len(rows) else []


def _imbalance(column: str, tagged: Sequence[Sequence[str]], task: str) -> tuple[str, ...]:
    """Returns the note on a tag that almost all words have."""
    counts = Counter(chain.from_iterable(to_iob2(tags) for tags in tagged))
    hint = imbalance_hint(counts, task, are_tags=True)
    return () if hint is None else (f"{column}: {hint}",)


def _names(row: Row, column: str, kind_name: str) -> list[str]:
    names = cell_value(row, column, kind_name)
    return [] if names is None else names


def _is_usual(name: str, names: Sequence[str]) -> bool:
    return name.strip().lower() in names


def _sentences(rows: Sequence[Row], words: str, tags: str) -> list[tuple[list[str], list[str]]]:
    """Returns the words and the tags of each row that has tags."""
    cells = [(_names(row, words, "words"), cell_value(row, tags, "tags")) for row in rows]
    return [(sentence, names) for sentence, names in cells if names is not None]


def _with_names(pairs: Sequence[tuple[str, str]], rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Returns the pairs of words and tags whose tags are names.

    Raises:
        DataError: The tags are numbers. Entities have no types then, and predictions say nothing to a reader.
    """
    numbered = {tags: _tag_numbers(rows, tags) for _, tags in pairs}
    named = [(words, tags) for words, tags in pairs if not numbered[tags]]
    if named:
        return named
    words, tags = pairs[0]
    numbers = numbered[tags]
    raise DataError(
        f"the tags in {tags!r} are numbers from {min(numbers)} to {max(numbers)}, and the file does not have their "
        "names, such as 'B-PER'. Write the names into the file, in datasets with\n"
        f"  names = data.features[{tags!r}].feature.names\n"
        f"  data = data.map(lambda row: {{{tags!r}: [names[tag] for tag in row[{tags!r}]]}})\n"
        "or save it with save_to_disk or to_parquet, which keep the names. To train on the numbers as they are, add "
        f"--text {shlex.quote(words)} --label {shlex.quote(tags)}"
    )


def _tag_numbers(rows: Sequence[Row], column: str) -> set[int]:
    """Returns the different tags of a column if they are whole numbers."""
    numbers = set[int]()
    for row in rows:
        cell = row.get(column)
        tags = list_in_cell(cell) if isinstance(cell, str) else cell
        if tags is None:
            continue
        if not isinstance(tags, list) or not all(isinstance(tag, int) for tag in tags):
            return set()
        numbers.update(tags)
    return numbers


def _are_tagged(rows: Sequence[Row], words: str, tags: str, *, is_usual: bool = False) -> bool:
    """Returns True for as many tags as words. Unnamed columns need few tags."""
    tagged = _sentences(rows, words, tags)
    uneven = sum(len(sentence) != len(names) for sentence, names in tagged)
    vocabulary = set(chain.from_iterable(sentence for sentence, _ in tagged))
    different = _different([names for _, names in tagged])
    if not different or uneven > _MOST_UNEVEN * len(tagged):
        return False
    if is_usual or (_is_usual(words, _WORDS) and _is_usual(tags, _TAGS)):
        return True
    are_numbers = all(name.isdecimal() for name in different)
    return len(different) <= min(_MOST_TAGS, len(vocabulary) - 1) and not are_numbers
