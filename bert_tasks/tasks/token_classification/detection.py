"""Detects rows of words with a tag for each."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import permutations, product
from typing import ClassVar

from bert_tasks.data.cells import list_in_cell
from bert_tasks.data.checks import imbalance_hint
from bert_tasks.data.columns import Column, Row, complete_row
from bert_tasks.data.conll import detect_scheme, entities, to_iob2
from bert_tasks.data.kinds import KINDS
from bert_tasks.data.problems import RowError, counted
from bert_tasks.data.profile import ColumnProfile, listed, percentile, pieces
from bert_tasks.errors import DataError
from bert_tasks.tasks.shared.detection import (
    COMPARED_ROWS,
    Detection,
    Suggestion,
    TaskGuess,
    UserHints,
    cell_value,
    count_pieces,
    other_columns,
    several_tasks,
    suggested_length,
)

_MOST_TAGS = 200
_MOST_UNEVEN = 0.1  # share of rows with another number of tags than of words, which a run reports or skips

# Column names that people use, in lower case.
_WORDS = ("words", "tokens", "form")
_SPANS = ("entities", "spans")
_TAGS = ("tags", "ner_tags", "upos", "pos_tags", "chunk_tags", "labels", "slots")


class TokenDetection(Detection):
    """Detects rows of token classification for ``init``."""

    row_needs: ClassVar[str] = "as many words as tags in every row, or a text and spans of it"
    has_dense_labels: ClassVar[bool] = True

    def guess(self, profiles: Sequence[ColumnProfile], rows: Sequence[Row], hints: UserHints) -> TaskGuess | None:
        spans = self._guess_spans(profiles, rows, hints)
        guess = self._guess_tags(profiles, rows, hints) if spans is None else spans
        if guess is None or hints.task is not None or hints.label is not None:
            return guess
        text, label = guess.columns.values()
        unlike = (text, label, KINDS["tags"].group_column)
        classes = [column.name for column in profiles if column.is_classes and column.name not in unlike]
        return replace(guess, alternatives=(*guess.alternatives, *several_tasks(label, classes)))

    def _guess_spans(
        self, profiles: Sequence[ColumnProfile], rows: Sequence[Row], hints: UserHints
    ) -> TaskGuess | None:
        """Detects a text, and a column of entities by its characters."""
        texts = [column.name for column in profiles if column.is_text or column.known == "text"]
        lists = [column for column in profiles if column.nested > 0 or column.lists > 0]
        names = [column.name for column in sorted(lists, key=lambda column: column.known not in _SPANS)]
        for text, spans in product(hints.texts or texts, names if hints.label is None else [hints.label]):
            columns = {"text": text, "entities": spans}
            tagged = _span_tags(rows[:COMPARED_ROWS], columns, self.task.columns)
            types = sorted({entity.type for tags in tagged for entity in entities(tags)})
            if types:
                return TaskGuess(
                    task=self.task.name,
                    columns=columns,
                    words=percentile([count_pieces(row, [text]) for row in rows]),
                    labels=tuple(sorted({tag for tags in tagged for tag in tags})),
                    reasons=(
                        f"{text}, {spans}: spans of characters with entities of the types {listed(types)}",
                        *_imbalance(spans, tagged, hints.name),
                    ),
                    precedence=2,
                )
        return None

    def _guess_tags(self, profiles: Sequence[ColumnProfile], rows: Sequence[Row], hints: UserHints) -> TaskGuess | None:
        """Words, and a tag for each."""
        compared = rows[:COMPARED_ROWS]
        if hints.task is not None and hints.label is not None and len(hints.texts) == 1:
            hinted = (hints.texts[0], hints.label)
            pairs = [hinted] if _are_tagged(compared, *hinted, is_usual=True) else []
        else:  # by their names, then any two columns of lists
            by_name = {column.known: column.name for column in profiles}
            usual = [(by_name[w], by_name[t]) for w, t in product(_WORDS, _TAGS) if w in by_name and t in by_name]
            lists = [column.name for column in profiles if column.nested > 0]
            pairs = [
                (words, tags)
                for words, tags in [*usual, *permutations(lists, 2)]
                if hints.texts in ((), (words,)) and hints.label in (None, tags) and _are_tagged(compared, words, tags)
            ]
        if not pairs:
            return None
        if hints.label is None:
            pairs = _with_names(pairs, compared)
        words, tags = pairs[0]
        spare = []
        for column in (column.name for column in profiles if column.name not in pairs[0]):
            is_copy = all(row.get(column) in (row.get(words), row.get(tags)) for row in compared)
            if not is_copy and _are_tagged(compared, words, column):
                different = sorted({tag for row in compared for tag in _names(row, column, "tags")})
                spare.append(("tags", column, f"{counted(len(different), 'different tag')}: {listed(different)}"))
        # Rows of tags are rows of words for coarser tags, but not if they are tags of the chosen words.
        unlike = {words, *(column for _, column, _ in spare)}
        alike = [w for w, t in pairs if t == tags and _is_usual(w, _WORDS) == _is_usual(words, _WORDS)]
        tagged = [names for row in rows if (names := cell_value(row, tags, "tags")) is not None]
        uneven = sum(len(sentence) != len(names) for sentence, names in _sentences(rows, words, tags))
        evenly = f"all but {counted(uneven, 'row')}" if uneven else "every row"
        scheme = detect_scheme(tagged)
        if scheme == "raw":
            seen = f"{listed(sorted({tag for names in tagged for tag in names}))} are classes of words"
        else:
            types = sorted({entity.type for names in tagged for entity in entities(names)})
            seen = f"entity tags in {scheme} of the types {listed(types)}"
        columns = {"words": words, "tags": tags}
        return TaskGuess(
            task=self.task.name,
            columns=columns,
            words=percentile([sum(map(pieces, _names(row, words, "words"))) for row in rows]),
            labels=tuple(sorted({name for names in tagged for name in to_iob2(names)})),
            reasons=(
                f"{words}, {tags}: as many words as tags in {evenly}, so each word has a tag",
                f"{tags}: {seen}",
                *_imbalance(tags, tagged, hints.name),
            ),
            precedence=2,
            spare=tuple(spare),
            alternatives=other_columns(
                columns, [{"words": name, "tags": tags} for name in alike if name not in unlike], profiles
            ),
        )

    def settings(self, words: int, longest: int) -> list[Suggestion]:
        overlap = min(self.task.doc_stride, suggested_length(words, longest) // 4)
        comment = "OVERLAP in tokens of two windows of a sentence"
        return [*super().settings(words, longest), Suggestion("doc_stride", overlap, comment)]


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
    hint = imbalance_hint(Counter(tag for tags in tagged for tag in to_iob2(tags)), task, are_tags=True)
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
    vocabulary = {word for sentence, _ in tagged for word in sentence}
    different = {name for _, names in tagged for name in names}
    if not different or uneven > _MOST_UNEVEN * len(tagged):
        return False
    if is_usual or (_is_usual(words, _WORDS) and _is_usual(tags, _TAGS)):
        return True
    are_numbers = all(name.isdecimal() for name in different)
    return len(different) <= min(_MOST_TAGS, len(vocabulary) - 1) and not are_numbers
