"""Whether rows seem to be words with a tag for each."""

from collections.abc import Iterator, Sequence
from itertools import permutations

from bert_tasks.data.columns import Row
from bert_tasks.data.conll import detect_scheme, entities, to_iob2
from bert_tasks.data.problems import counted
from bert_tasks.data.profile import ColumnProfile, listed, percentile, pieces
from bert_tasks.tasks.shared.detection import COMPARED_ROWS, TaskGuess, UserHints, cell_value, other_columns

_MOST_TAGS = 200

# Column names that people use, in lower case.
_WORDS = ("words", "tokens", "form")
_TAGS = ("tags", "ner_tags", "upos", "pos_tags", "chunk_tags", "labels", "slots")


def detect_tags(
    name: str, profiles: Sequence[ColumnProfile], rows: Sequence[Row], hints: UserHints
) -> TaskGuess | None:
    """Returns a guess if one column holds words, and another as many tags in every row.

    Args:
        name: of the task.
    """
    some = rows[:COMPARED_ROWS]
    named = hints.task is not None and hints.label is not None and len(hints.texts) == 1
    if named:
        tried = [(hints.texts[0], str(hints.label))]
    else:
        tried = [
            (words, tags)
            for words, tags in _word_columns(profiles)
            if hints.texts in ((), (words,)) and hints.label in (None, tags)
        ]
    pairs = [pair for pair in tried if _are_tagged(some, *pair, is_stated=named)]
    if not pairs:
        return None
    words, tags = pairs[0]
    spare = tuple(_other_tags(profiles, some, words, tags))
    # Rows of tags are rows of words for coarser tags, but not if they are tags of the chosen words.
    unlike = {words, *(column for _, column, _ in spare)}
    same = [w for w, t in pairs if t == tags and w not in unlike and _is_word_name(w) == _is_word_name(words)]
    others = [{"words": other, "tags": tags} for other in same]
    sentences = [cell_value(row, tags, "tags") for row in rows]
    tagged = [names for names in sentences if names is not None]
    labels = tuple(sorted({name for names in tagged for name in to_iob2(names)}))
    scheme = detect_scheme(tagged)
    if scheme == "raw":
        seen = f"{listed(sorted({tag for names in tagged for tag in names}))} -> classes of words"
    else:
        types = sorted({entity.type for names in tagged for entity in entities(names)})
        seen = f"tags in {scheme} of the types {listed(types)} -> entities"
    return TaskGuess(
        task=name,
        columns={"words": words, "tags": tags},
        words=percentile([sum(map(pieces, _listed_cell(row, words, "words"))) for row in rows]),
        labels=labels,
        reasons=(
            f"{words}, {tags}: as many words as tags in every row -> a tag for each word",
            f"{tags}: {seen}",
        ),
        precedence=2,
        spare=spare,
        alternatives=other_columns({"words": words, "tags": tags}, others, profiles),
    )


def _is_word_name(name: str) -> bool:
    return name.strip().lower() in _WORDS


def _word_columns(profiles: Sequence[ColumnProfile]) -> Iterator[tuple[str, str]]:
    """Columns that may be words and their tags: by their names, then any two columns of lists."""
    by_name = {column.known: column.name for column in profiles}
    yield from ((by_name[w], by_name[t]) for w in _WORDS for t in _TAGS if w in by_name and t in by_name)
    lists = [column.name for column in profiles if column.nested > 0]
    yield from permutations(lists, 2)


def _are_tagged(rows: Sequence[Row], words: str, tags: str, *, is_stated: bool = False) -> bool:
    """Whether there are as many tags as words; columns that are not called so also need fewer different tags."""
    pairs = [(_listed_cell(row, words, "words"), cell_value(row, tags, "tags")) for row in rows]
    known = [(sentence, names) for sentence, names in pairs if names is not None]
    vocabulary = {word for sentence, _ in known for word in sentence}
    found = {name for _, names in known for name in names}
    if not found or any(len(sentence) != len(names) for sentence, names in known):
        return False
    is_named = is_stated or (_is_word_name(words) and tags.strip().lower() in _TAGS)
    are_numbers = all(name.isdecimal() for name in found)
    return is_named or (len(found) <= _MOST_TAGS and len(found) < len(vocabulary) and not are_numbers)


def _other_tags(
    profiles: Sequence[ColumnProfile], rows: Sequence[Row], words: str, tags: str
) -> Iterator[tuple[str, str, str]]:
    for column in profiles:
        alike = all(row.get(column.name) in (row.get(words), row.get(tags)) for row in rows)
        if column.name in (words, tags) or alike or not _are_tagged(rows, words, column.name):
            continue
        found = sorted({name for row in rows for name in _listed_cell(row, column.name, "tags")})
        yield "tags", column.name, f"{counted(len(found), 'different tag')}: {listed(found)}"


def _listed_cell(row: Row, column: str, kind: str) -> list[str]:
    names = cell_value(row, column, kind)
    return [] if names is None else names
