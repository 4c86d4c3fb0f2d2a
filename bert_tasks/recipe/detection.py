"""Which task a table of rows seems to be for, and why.

Owns the rules that turn columns into a task with its columns and settings, and the reasons for people. Must not know
files, models or how a recipe is written.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from types import MappingProxyType
from typing import Any

from bert_tasks.data.checks import imbalance_hint
from bert_tasks.data.columns import LABEL_SEPARATOR, BadValueError, Kind, canonical
from bert_tasks.data.conll import detect_scheme, entities, to_iob2
from bert_tasks.data.problems import did_you_mean
from bert_tasks.errors import DataError
from bert_tasks.recipe.profile import Profile, listed, percentile, pieces, profile

Rows = Sequence[Mapping[str, Any]]

_COMPARED_ROWS = 1000  # where two columns must fit together
_MOST_TAGS = 200
_LEAST_CONTEXT = 10  # words on average
_FOUND = 0.9  # share of the answers that must stand in their context
_FOUND_IF_NAMED = 0.3  # where the columns are called so
_FOUND_IF_STATED = 0.0  # where the user says so; one at least

# Column names that people use, in lower case.
_TARGETS = (
    *("label", "labels", "class", "category", "target", "gold_label", "y", "score", "similarity", "rating"),
    *("sentiment", "intent", "topic", "relation", "relevant", "is_duplicate"),
    *("quality", "emotion", "stance", "topics", "tags", "categories", "classes", "intents", "emotions"),
)
_NEEDS = {
    "token-classification": "as many words as tags in every row",
    "span-extraction": "a question, its context, and answers that are copied from it",
    "sequence-classification": "a text and a label or number",
    "pair-classification": "two texts and a label or number",
}
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
        separator: what stands between several labels in a cell.
    """

    task: str
    columns: Mapping[str, str]
    words: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    alternatives: tuple[str, ...] = ()
    spare: tuple[tuple[str, str, str], ...] = ()
    separator: str = LABEL_SEPARATOR


@dataclass(frozen=True, kw_only=True)
class Stated:
    """What is known of the rows before anyone looks at them; what is not stated is found out.

    Attributes:
        task: a name of the task.
        texts: columns: one text or two, the words, or the question and its context.
        label: the column of the labels, numbers, tags or answers.
        separator: what stands between several labels in a cell of it.
    """

    task: str | None = None
    texts: tuple[str, ...] = ()
    label: str | None = None
    separator: str | None = None


def guess_task(rows: Rows, stated: Stated = Stated()) -> Guess:  # it is frozen
    """The task that fits the rows best.

    Args:
        rows: A sample of the file's.
        stated: What the caller knows.

    Returns:
        The task, with other tasks that fit among the alternatives.

    Raises:
        DataError: There is nothing to read or nothing to learn from; it says what there is.
    """
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name.strip()]
    for name in (*stated.texts, *([] if stated.label is None else [stated.label])):
        if name not in names:
            raise DataError(f"no column {name!r}{did_you_mean(name, names)}; there are {', '.join(map(repr, names))}")
    profiles = [
        profile(name, [row.get(name) for row in rows], stated.separator if name == stated.label else None)
        for name in names
    ]
    rules = [rule for rule, tasks in _RULES.items() if stated.task is None or stated.task in tasks]
    guesses = [guess for rule in rules for guess in [rule(profiles, rows, stated)] if guess is not None]
    if not guesses:
        raise _nothing_fits(profiles, stated)
    best, *others = guesses
    known = stated.task is not None or (stated.label is not None and stated.texts)
    doubts = [] if known else [_described(other) for other in others if _may_be_meant(other, best)]
    return replace(best, alternatives=(*best.alternatives, *doubts))


def _may_be_meant(other: Guess, best: Guess) -> bool:
    """Whether the other task learns a column of its own that is called as labels are."""
    target, taken = list(other.columns.values())[-1], set(best.columns.values())
    return target not in taken and target.strip().lower() in _TARGETS


def _described(guess: Guess) -> str:
    columns = ", ".join(f'{column} = "{name}"' for column, name in guess.columns.items())
    return f'task = "{guess.task}" with {columns}'


def _nothing_fits(profiles: Sequence[Profile], stated: Stated) -> DataError:
    has_text = any(column.is_text for column in profiles)
    missing = "no column to learn (labels, numbers, tags or answers)" if has_text else "no column of texts"
    if stated.task is not None or stated.texts or stated.label is not None:
        task = "no task that init knows" if stated.task is None else stated.task
        missing = f"the columns do not fit {task}: {_NEEDS.get(task, missing)}"
    seen = "".join(f"\n  {column.name!r}: {column.described()}" for column in profiles)
    return DataError(
        f"{missing}; there are{seen}\n  name the columns with --text and --label, or write a recipe by hand"
    )


# One tag for each word


def _tagged_words(profiles: Sequence[Profile], rows: Rows, stated: Stated) -> Guess | None:
    some = rows[:_COMPARED_ROWS]
    named = stated.task is not None and stated.label is not None and len(stated.texts) == 1
    asked = ((words, tags) for words, tags in _word_columns(profiles) if _is_asked((words,), tags, stated))
    tried = [(stated.texts[0], str(stated.label))] if named else asked
    pair = next((pair for pair in tried if _are_tagged(some, *pair, is_stated=named)), None)
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


def _is_asked(texts: tuple[str, ...], label: str, stated: Stated) -> bool:
    """Whether the columns are those that are stated, as far as any are."""
    return (not stated.texts or stated.texts == texts) and stated.label in (None, label)


def _are_tagged(rows: Rows, words: str, tags: str, *, is_stated: bool = False) -> bool:
    """Whether there are as many tags as words; columns that are not called so also need fewer different tags."""
    pairs = [(_listed_cell(row, words, "words"), _cell(row, tags, "tags")) for row in rows]
    known = [(sentence, names) for sentence, names in pairs if names is not None]
    vocabulary = {word for sentence, _ in known for word in sentence}
    found = {name for _, names in known for name in names}
    if not found or any(len(sentence) != len(names) for sentence, names in known):
        return False
    is_named = is_stated or (words.strip().lower() in _WORDS and tags.strip().lower() in _TAGS)
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


def _spans(profiles: Sequence[Profile], rows: Rows, stated: Stated) -> Guess | None:
    found = next(_span_columns(profiles, rows[:_COMPARED_ROWS], stated), None)
    if found is None:
        return None
    question, context, answers = found
    texts = [_cell(row, answers, "answers") for row in rows]
    none = sum(given is not None and not given["text"] for given in texts)
    bad = sum(_is_elsewhere(row.get(context), given) for row, given in zip(rows, texts, strict=True))
    where = "the answers stand in the texts" if bad == 0 else "most answers stand in the texts"
    reasons = [
        f"{context}, {answers}: {where} -> spans of {context} that answer {question}",
    ]
    if bad:
        share = f"{bad} of {len(rows)} rows ({bad / len(rows):.0%})"
        reasons.append(f"{answers}: in {share} the answer is not in {context} letter for letter")
    reasons += [f"{answers}: {none} of {len(rows)} are empty -> questions without an answer"] if none else []
    return Guess(
        task="span-extraction",
        columns={"question": question, "context": context, "answers": answers},
        words=percentile([_pieces(row, (question, context)) for row in rows]),
        settings={"version_2_with_negative": none > 0},
        reasons=tuple(reasons),
    )


def _is_elsewhere(context: Any, answers: Any) -> bool:
    return answers is not None and any(text not in str(context) for text in answers["text"])


def _span_columns(profiles: Sequence[Profile], rows: Rows, stated: Stated) -> Iterator[tuple[str, str, str]]:
    """Columns that may be question, context and answers, best first."""
    asked, read = stated.texts if len(stated.texts) == 2 else (None, *stated.texts, None)[:2]
    longest = sorted(profiles, key=lambda column: (column.known not in _CONTEXTS, -column.words))
    contexts = [c for c in longest if c.name == read or (read is None and (c.is_text or c.known in _CONTEXTS))]
    for context in contexts:
        others = [column for column in profiles if column is not context]
        asking = [c for c in others if c.name == asked or (asked is None and (c.is_text or c.known in _QUESTIONS))]
        questions = sorted(asking, key=lambda column: column.known not in _QUESTIONS)
        learnt = [column for column in others if stated.label in (None, column.name)]
        for answers in sorted(learnt, key=lambda column: column.known not in _ANSWERS):
            question = next((column for column in questions if column is not answers), None)
            if question is not None and _is_answered(context, answers, rows, stated):
                yield question.name, context.name, answers.name


def _is_answered(context: Profile, answers: Profile, rows: Rows, stated: Stated) -> bool:
    is_stated = stated.task is not None and stated.label is not None
    named = is_stated or (context.known in _CONTEXTS and answers.known in _ANSWERS)
    plain = context.words >= _LEAST_CONTEXT and not answers.is_classes and answers.words < context.words / 2
    if not (named or (plain and answers.distinct > 1 and not answers.is_number)):
        return False
    given = [(row.get(context.name), _cell(row, answers.name, "answers")) for row in rows]
    found = [text in str(place) for place, cell in given if cell is not None for text in cell["text"]]
    least = _FOUND_IF_STATED if is_stated else _FOUND_IF_NAMED if named and not answers.is_classes else _FOUND
    return any(found) and sum(found) >= least * len(found)


# A label, several, or a number for each text or pair of texts


def _texts(profiles: Sequence[Profile], rows: Rows, stated: Stated) -> Guess | None:
    if stated.label is None:
        targets = _targets([column for column in profiles if column.name not in stated.texts])
    else:
        targets = [column for column in profiles if column.name == stated.label]
    wanted = {"sequence-classification": 1, "pair-classification": 2}.get(str(stated.task), 0)
    for target in targets:
        if stated.texts:
            texts = [column for name in stated.texts for column in profiles if column.name == name]
        else:
            texts = _text_columns([column for column in profiles if column is not target])
        if wanted == 1:
            texts = sorted(texts, key=lambda column: -column.words)[:1]
        if texts and len(texts) >= wanted:
            return _classified(texts, target, [other for other in targets if other is not target], rows, stated)
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


def _classified(texts: list[Profile], target: Profile, others: Sequence[Profile], rows: Rows, stated: Stated) -> Guess:
    chosen = texts if len(texts) < 2 else sorted(texts, key=lambda column: -column.words)[:2]
    chosen = [column for column in texts if column in chosen]  # in the order of the file, or of the pair's names
    problem, reason = _problem(target, joined=stated.separator is not None)
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
        reasons=(*_texts_seen(chosen), reason, *_missing(target, several=several), *_imbalance(target, problem)),
        alternatives=tuple(_alternatives(texts, chosen, target, others, stated)),
        spare=_group(chosen, target) if is_pair else (),
        separator=target.separator if several and target.lists < 1 else LABEL_SEPARATOR,
    )


def _problem(target: Profile, *, joined: bool = False) -> tuple[str, str]:
    """The problem type, and the reason for it; ``joined``: someone says that a cell may hold several labels."""
    if target.is_sets or joined:
        joint = "in a list" if target.lists > 0 else f"in a cell, with {target.separator!r} between them"
        what = f"{len(target.names)} names, several {joint} ({listed(target.names)})"
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
        yield f"{target.name}: {count} empty cells -> rows without a label, which cannot be trained on"


def _imbalance(target: Profile, problem: str) -> Iterator[str]:
    hint = imbalance_hint(dict(target.common)) if problem == "single_label_classification" else None
    if hint is not None:
        yield f"{target.name}: {hint}"


def _alternatives(
    texts: Sequence[Profile], chosen: Sequence[Profile], target: Profile, others: Sequence[Profile], stated: Stated
) -> Iterator[str]:
    names = tuple(column.known for column in chosen)
    if target.is_sets and target.separator == "," and target.lists == 0 and stated.separator is None:
        yield 'settings.problem_type = "single_label_classification", if a cell with a comma is one label'
    if len(chosen) == 2 and names not in _PAIRS and not stated.texts and stated.task is None:
        for column in texts:
            yield f'task = "sequence-classification" with text = "{column.name}"'
    if target.is_number and target.is_classes and target.distinct > 2:
        yield 'settings.problem_type = "regression", if the numbers are amounts'
    if target.is_amount and not target.decimals and target.is_repeated:
        yield 'settings.problem_type = "single_label_classification", if the numbers are classes'
    for column in others:
        if _is_named(column) or not _is_named(target):
            yield f'label = "{column.name}" ({column.described()})'


_RULES: Mapping[Callable[[Sequence[Profile], Rows, Stated], Guess | None], tuple[str, ...]] = MappingProxyType(
    {
        _tagged_words: ("token-classification",),
        _spans: ("span-extraction",),
        _texts: ("sequence-classification", "pair-classification"),
    }
)
RECOGNISED = tuple(task for tasks in _RULES.values() for task in tasks)


def _group(chosen: Sequence[Profile], target: Profile) -> tuple[tuple[str, str, str], ...]:
    """The first text, where it comes back with one of two labels each time."""
    first = chosen[0]
    if first.distinct > first.rows / 2 or target.distinct != 2:
        return ()
    return (("group", first.name, "ranks the rows of each, by the second label, and reports map and mrr"),)
