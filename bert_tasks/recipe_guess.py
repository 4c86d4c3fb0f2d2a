"""Which task a table of rows seems to be for, and why.

Owns the rules that turn columns into a task with its columns and settings, and the reasons for people. Must not know
files, models or how a recipe is written.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

from bert_tasks.data.columns import Kind
from bert_tasks.data.tags import detect_scheme, entities, to_iob2
from bert_tasks.data.values import BadValueError, canonical
from bert_tasks.errors import DataError
from bert_tasks.recipe_profile import Profile, listed, percentile, pieces, profile

Rows = Sequence[Mapping[str, Any]]

_COMPARED_ROWS = 1000  # where two columns must fit together
_MOST_TAGS = 200
_LEAST_CONTEXT = 10  # words on average
_FOUND = 0.9  # share of the answers that must stand in their context

# Column names that people use, in lower case.
_TARGETS = (
    *("label", "labels", "class", "category", "target", "gold_label", "y", "score", "similarity", "rating"),
    *("sentiment", "intent", "topic", "relation", "relevant", "is_duplicate"),
)
_WORDS = ("words", "tokens", "form")
_TAGS = ("tags", "ner_tags", "upos", "pos_tags", "chunk_tags", "labels", "slots")
_QUESTIONS = ("question", "query")
_CONTEXTS = ("context", "passage", "paragraph")
_ANSWERS = ("answers", "answer", "answer_text")
_PAIRS = (
    ("text", "text_pair"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("premise", "hypothesis"),
    ("first", "second"),
    ("text_a", "text_b"),
    ("text1", "text2"),
    ("#1 string", "#2 string"),
    *((one, other) for one in _QUESTIONS for other in ("candidate", "passage", "sentence", "document", "answer")),
)


@dataclass(frozen=True, kw_only=True)
class Guess:
    """A task that fits.

    Attributes:
        columns: the task's columns -> those of the rows.
        settings: what the rows say of the task's fields.
        words: what 95 of 100 rows have at most, of all texts that are read together.
        labels: the different labels seen, sorted.
        reasons: what was seen and what follows from it.
        alternatives: other readings; none where there is no doubt.
        spare: (task's column, column, remark) of columns that could be read instead or as well.
    """

    task: str
    columns: Mapping[str, str]
    words: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    alternatives: tuple[str, ...] = ()
    spare: tuple[tuple[str, str, str], ...] = ()


def guess_task(rows: Rows) -> Guess:
    """The task that fits the rows best.

    Raises:
        DataError: there is nothing to read or nothing to learn from; it says what there is.
    """
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name.strip()]
    profiles = [profile(name, [row.get(name) for row in rows]) for name in names]
    for rule in (_tagged_words, _spans, _texts):
        guess = rule(profiles, rows)
        if guess is not None:
            return guess
    has_text = any(column.is_text for column in profiles)
    missing = "no column to learn (labels, numbers, tags or answers)" if has_text else "no column of texts"
    seen = "".join(f"\n  {column.name!r}: {column.described()}" for column in profiles)
    raise DataError(f"{missing}; there are{seen}\n  write a recipe by hand, which names its columns in [data.columns]")


# One tag for each word


def _tagged_words(profiles: Sequence[Profile], rows: Rows) -> Guess | None:
    some = rows[:_COMPARED_ROWS]
    pair = next((pair for pair in _word_columns(profiles) if _are_tagged(some, *pair)), None)
    if pair is None:
        return None
    words, tags = pair
    sentences = [_cell(row, tags, "tags") for row in rows]
    tagged = [names for names in sentences if names is not None]
    labels = tuple(sorted({name for names in tagged for name in to_iob2(names)}))
    return Guess(
        task="token-classification",
        columns={"words": words, "tags": tags},
        words=percentile([sum(map(pieces, _listed_cell(row, words, "words"))) for row in rows]),
        labels=labels,
        reasons=(
            f"{words}, {tags}: as many words as tags in every row -> a tag for each word",
            _tags_seen(tags, tagged),
        ),
        spare=tuple(_other_tags(profiles, some, words, tags)),
    )


def _word_columns(profiles: Sequence[Profile]) -> Iterator[tuple[str, str]]:
    """Columns that may be words and their tags: by their names, then any two columns of lists."""
    by_name = {column.known: column.name for column in profiles}
    yield from ((by_name[w], by_name[t]) for w in _WORDS for t in _TAGS if w in by_name and t in by_name)
    lists = [column.name for column in profiles if column.nested > 0]
    yield from permutations(lists, 2)


def _are_tagged(rows: Rows, words: str, tags: str) -> bool:
    """Whether there are as many tags as words; columns that are not called so also need fewer different tags."""
    pairs = [(_listed_cell(row, words, "words"), _cell(row, tags, "tags")) for row in rows]
    known = [(sentence, names) for sentence, names in pairs if names is not None]
    vocabulary = {word for sentence, _ in known for word in sentence}
    found = {name for _, names in known for name in names}
    if not found or any(len(sentence) != len(names) for sentence, names in known):
        return False
    is_named = words.strip().lower() in _WORDS and tags.strip().lower() in _TAGS
    are_numbers = all(name.isdecimal() for name in found)
    return is_named or (len(found) <= _MOST_TAGS and len(found) < len(vocabulary) and not are_numbers)


def _tags_seen(column: str, sentences: Sequence[Sequence[str]]) -> str:
    scheme = detect_scheme(sentences)
    if scheme == "raw":
        return f"{column}: {listed(sorted({tag for tags in sentences for tag in tags}))} -> classes of words"
    types = sorted({entity.type for tags in sentences for entity in entities(tags)})
    return f"{column}: tags in {scheme} of the types {listed(types)} -> entities"


def _other_tags(profiles: Sequence[Profile], rows: Rows, words: str, tags: str) -> Iterator[tuple[str, str, str]]:
    for column in profiles:
        alike = all(row.get(column.name) in (row.get(words), row.get(tags)) for row in rows)
        if column.name in (words, tags) or alike or not _are_tagged(rows, words, column.name):
            continue
        found = sorted({name for row in rows for name in _listed_cell(row, column.name, "tags")})
        yield "tags", column.name, f"{len(found)} different tags: {listed(found)}"


def _listed_cell(row: Mapping[str, Any], column: str, kind: Kind) -> list[str]:
    names = _cell(row, column, kind)
    return [] if names is None else names


def _cell(row: Mapping[str, Any], column: str, kind: Kind) -> Any:
    """The cell in canonical form; None where it is missing or of another kind."""
    try:
        return canonical(row.get(column), kind)
    except BadValueError:
        return None


def _pieces(row: Mapping[str, Any], columns: Sequence[str]) -> int:
    return sum(pieces(row[name]) for name in columns if isinstance(row.get(name), str))


# Answers that stand in a text


def _spans(profiles: Sequence[Profile], rows: Rows) -> Guess | None:
    found = next(_span_columns(profiles, rows[:_COMPARED_ROWS]), None)
    if found is None:
        return None
    question, context, answers = found
    texts = [_cell(row, answers, "answers") for row in rows]
    none = sum(given is not None and not given["text"] for given in texts)
    reasons = [
        f"{context}, {answers}: the answers stand in the texts -> spans of {context} that answer {question}",
    ]
    reasons += [f"{answers}: {none} of {len(rows)} are empty -> questions without an answer"] if none else []
    return Guess(
        task="span-extraction",
        columns={"question": question, "context": context, "answers": answers},
        words=percentile([_pieces(row, (question, context)) for row in rows]),
        settings={"version_2_with_negative": none > 0},
        reasons=tuple(reasons),
    )


def _span_columns(profiles: Sequence[Profile], rows: Rows) -> Iterator[tuple[str, str, str]]:
    """Columns that may be question, context and answers, best first."""
    texts = sorted((c for c in profiles if c.is_text or c.known in _CONTEXTS), key=lambda column: -column.words)
    for context in sorted(texts, key=lambda column: column.known not in _CONTEXTS):
        others = [column for column in profiles if column is not context]
        asking = (c for c in others if c.is_text or c.known in _QUESTIONS)
        questions = sorted(asking, key=lambda column: column.known not in _QUESTIONS)
        for answers in sorted(others, key=lambda column: column.known not in _ANSWERS):
            question = next((column for column in questions if column is not answers), None)
            if question is not None and _is_answered(context, answers, rows):
                yield question.name, context.name, answers.name


def _is_answered(context: Profile, answers: Profile, rows: Rows) -> bool:
    named = context.known in _CONTEXTS and answers.known in _ANSWERS
    plain = context.words >= _LEAST_CONTEXT and not answers.is_classes and answers.words < context.words / 2
    if not (named or (plain and answers.distinct > 1)):
        return False
    given = [(row.get(context.name), _cell(row, answers.name, "answers")) for row in rows]
    found = [text in str(place) for place, cell in given if cell is not None for text in cell["text"]]
    return bool(found) and sum(found) >= _FOUND * len(found)


# A label, several, or a number for each text or pair of texts


def _texts(profiles: Sequence[Profile], rows: Rows) -> Guess | None:
    targets = _targets(profiles)
    for target in targets:
        texts = _text_columns([column for column in profiles if column is not target])
        if texts:
            return _classified(texts, target, [other for other in targets if other is not target], rows)
    return None


def _targets(profiles: Sequence[Profile]) -> list[Profile]:
    """Columns that may be the target, likeliest first: a telling name, then sets, classes and decimals, then place."""
    there = [column for column in profiles if column.filled > column.rows / 2 or _is_named(column)]
    fitting = [c for c in there if c.is_sets or c.is_classes or c.is_amount or (c.is_repeated and _is_named(c))]
    place = {column.name: position for position, column in enumerate(profiles)}
    plain = {column.name: column.is_sets or column.is_classes or column.decimals for column in fitting}
    return sorted(fitting, key=lambda c: (_is_named(c), plain[c.name], place[c.name]), reverse=True)


def _is_named(column: Profile) -> bool:
    return column.known in _TARGETS


def _text_columns(profiles: Sequence[Profile]) -> list[Profile]:
    """One column or two: two that are called a pair, else all longer texts, else the column with most to tell."""
    by_name = {column.known: column for column in profiles if column.nested == 0 and not column.is_number}
    pair = next((pair for pair in _PAIRS if by_name.keys() >= set(pair)), None)
    if pair is not None:
        return [by_name[name] for name in pair]
    texts = [column for column in profiles if column.is_text]
    if texts:
        return texts
    short = [column for column in by_name.values() if column.distinct > column.rows / 2]
    return sorted(short, key=lambda column: (column.is_id, -column.words))[:1]


def _classified(texts: list[Profile], target: Profile, others: Sequence[Profile], rows: Rows) -> Guess:
    chosen = texts if len(texts) < 2 else sorted(texts, key=lambda column: -column.words)[:2]
    chosen = [column for column in texts if column in chosen]  # in the order of the file, or of the pair's names
    problem, reason = _problem(target)
    is_pair = len(chosen) == 2
    columns = dict(zip(("text", "text_pair"), (column.name for column in chosen), strict=False))
    several = problem == "multi_label_classification"
    labels = target.names if several else tuple(sorted(value for value, _ in target.common))
    return Guess(
        task="pair-classification" if is_pair else "sequence-classification",
        columns=columns | {"labels" if several else "label": target.name},
        words=percentile([_pieces(row, [column.name for column in chosen]) for row in rows]),
        settings={"problem_type": problem},
        labels=() if problem == "regression" else labels,
        reasons=(*_texts_seen(chosen), reason, *_missing(target, several=several)),
        alternatives=tuple(_alternatives(texts, chosen, target, others)),
        spare=_group(chosen, target) if is_pair else (),
    )


def _problem(target: Profile) -> tuple[str, str]:
    """The problem type, and the reason for it."""
    if target.is_sets:
        what = f"{len(target.names)} names, several in a cell ({listed(target.names)})"
        return "multi_label_classification", f"{target.name}: {what} -> any number of labels per row"
    if target.is_amount and not (target.is_repeated and _is_count_of_classes(target)):
        kind = "with decimals" if target.decimals else f"{target.distinct} different"
        numbers = f"numbers from {target.low:g} to {target.high:g}, {kind}"
        return "regression", f"{target.name}: {numbers} -> regression"
    what = f"{target.distinct} distinct values in {target.rows} rows ({target.counts()})"
    return "single_label_classification", f"{target.name}: {what} -> one label per row"


def _is_count_of_classes(target: Profile) -> bool:
    """Class numbers 0, 1, 2, ... without a gap, in a column that is called so."""
    return _is_named(target) and target.low == 0 and target.high == target.distinct - 1


def _texts_seen(chosen: Sequence[Profile]) -> Iterator[str]:
    for column in chosen:
        yield f"{column.name}: texts of {column.words:.0f} words on average"
    if len(chosen) == 2:
        yield f"{chosen[0].name}, {chosen[1].name}: two texts in a row -> a pair"


def _missing(target: Profile, *, several: bool) -> Iterator[str]:
    count = target.rows - target.filled
    if count and several:
        yield f"{target.name}: {count} empty cells -> rows without any label"
    elif count:
        yield f"{target.name}: {count} empty cells, which `check` will name; fill them in or take the rows out"


def _alternatives(
    texts: Sequence[Profile], chosen: Sequence[Profile], target: Profile, others: Sequence[Profile]
) -> Iterator[str]:
    names = tuple(column.known for column in chosen)
    if len(chosen) == 2 and names not in _PAIRS:
        for column in texts:
            yield f'task = "sequence-classification" with text = "{column.name}"'
    if target.is_number and target.is_classes and target.distinct > 2:
        yield 'settings.problem_type = "regression", if the numbers are amounts'
    if target.is_amount and not target.decimals and target.is_repeated:
        yield 'settings.problem_type = "single_label_classification", if the numbers are classes'
    for column in others:
        if _is_named(column) or not _is_named(target):
            yield f'label = "{column.name}" ({column.described()})'


def _group(chosen: Sequence[Profile], target: Profile) -> tuple[tuple[str, str, str], ...]:
    """The first text, where it comes back with one of two labels each time."""
    first = chosen[0]
    if first.distinct > first.rows / 2 or target.distinct != 2:
        return ()
    return (("group", first.name, "ranks the rows of each, by the second label, and reports map and mrr"),)
