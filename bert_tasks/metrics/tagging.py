"""Metrics of tagged words: entities where the tags are IOB2, classes of words where they are raw.

Owns keys, scales (0 to 1) and what is counted; seqeval finds and counts the entities. Must not know sub-words, models
or other schemes: sentences come as the tags of words, already in IOB2 or raw. A ratio 0/0 counts as 0.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from bert_tasks.errors import DataError
from bert_tasks.metrics import classification
from bert_tasks.metrics.tables import MetricTable, merged, metric_table

Sentences = Sequence[Sequence[str]]

_NUMBER = "number"
_IOB2 = re.compile(r"O|[BI]-.+", re.DOTALL)
# What is reported besides the numbers of each name.
_WORD_KEYS = ("overall_accuracy", "macro_f1")
_ENTITY_KEYS = (
    *("overall_precision", "overall_recall", "overall_f1", "overall_accuracy"),
    *("strict_overall_precision", "strict_overall_recall", "strict_overall_f1", "invalid_transitions"),
)
_OTHER_CHUNKS = re.compile(r"[ELMSU]-.+", re.DOTALL)


def tagging_metrics(references: Sentences, predictions: Sentences, *, raw: bool | None = None) -> dict[str, float]:
    """Metrics over the words of all sentences.

    IOB2 tags: ``overall_precision``, ``overall_recall``, ``overall_f1`` and, for each type, ``TYPE_precision``,
    ``_recall``, ``_f1`` and ``_number`` (entities in the references), counted as conlleval and seqeval's default do:
    an I- with nothing to continue starts an entity. ``strict_overall_...``: strict IOB2, where it starts none.
    ``overall_accuracy`` is that of words. ``invalid_transitions`` counts such I- in the predictions; for a model that
    speaks another scheme count them before its tags become IOB2.

    Raw tags: ``overall_accuracy``, ``macro_f1`` and for each tag ``TAG_precision``, ``_recall``, ``_f1``, ``_number``.

    Args:
        references: the true tags, sentence by sentence.
        predictions: the predicted tags, as many.
        raw: whether tags are classes of words. By default they are if any of them is no chunk tag; state it where the
            labels are known, since a file may happen to hold only ``O``.

    Raises:
        DataError: if sentences differ in number or length, no word is given, a tag is not IOB2 where it has to be, or
            the name of a type or tag gives it the key of another metric, such as the type "overall".
    """
    _check_lengths(references, predictions)
    is_raw = _looks_raw(references, predictions) if raw is None else raw
    if is_raw:
        return _word_metrics(list(chain.from_iterable(references)), list(chain.from_iterable(predictions)))
    for name, sentences in (("references", references), ("predictions", predictions)):
        _check_iob2(name, sentences)
    return _entity_metrics([list(tags) for tags in references], [list(tags) for tags in predictions])


def tagging_table(metrics: Mapping[str, float], *, word: str) -> MetricTable:
    """The metrics above as a table with a row for each type or tag."""
    names = [name.removesuffix(f"_{_NUMBER}") for name in metrics if name.endswith(f"_{_NUMBER}")]
    return metric_table(metrics, names, lambda name, score: f"{name}_{score}", word=word, support=_NUMBER)


def check_names(tags: Iterable[str], *, raw: bool) -> None:
    """Refuses tags whose names would give them the key of another metric, such as the entity type "overall".

    Raises:
        DataError: naming the keys.
    """
    names = sorted(set(tags)) if raw else _types([list(tags)])
    merged(
        _per_name(names, *([0.0] * len(names) for _ in range(4))),
        dict.fromkeys(_WORD_KEYS if raw else _ENTITY_KEYS, 0.0),
    )


def _check_lengths(references: Sentences, predictions: Sentences) -> None:
    if len(references) != len(predictions):
        raise DataError(
            f"Tagging metrics: {len(references)} sentences of references and {len(predictions)} of predictions, "
            "expected equally many."
        )
    for number, (actual, predicted) in enumerate(zip(references, predictions, strict=True), start=1):
        if len(actual) != len(predicted):
            raise DataError(
                f"Tagging metrics: sentence {number} has {len(actual)} reference tags and {len(predicted)} predicted "
                "ones, expected one of each per word."
            )
    if not any(references):
        raise DataError("Tagging metrics: no words to compare; expected at least one word with a tag.")


def _looks_raw(*sides: Sentences) -> bool:
    seen = set(chain.from_iterable(chain.from_iterable(sides)))
    return not all(_IOB2.fullmatch(tag) or _OTHER_CHUNKS.fullmatch(tag) for tag in seen)


def _check_iob2(name: str, sentences: Sentences) -> None:
    wrong = {tag for tag in set(chain.from_iterable(sentences)) if _IOB2.fullmatch(tag) is None}
    if not wrong:
        return
    number, word, tag = next(
        (number, word, tag)
        for number, tags in enumerate(sentences, start=1)
        for word, tag in enumerate(tags, start=1)
        if tag in wrong
    )
    raise DataError(
        f"Tagging metrics: {name}, sentence {number}, word {word}: {tag!r}, expected O, B-TYPE or I-TYPE; "
        "convert other schemes to IOB2 first."
    )


def _word_metrics(references: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    names = sorted({*references, *predictions})
    place = {name: index for index, name in enumerate(names)}
    actual, predicted = [place[tag] for tag in references], [place[tag] for tag in predictions]
    scores = classification.precision_recall_f1(actual, predicted, class_count=len(names))
    numbers = Counter(references)
    return merged(
        _per_name(names, scores.precision, scores.recall, scores.f1, [numbers[name] for name in names]),
        {
            "overall_accuracy": classification.accuracy(actual, predicted),
            "macro_f1": classification.macro_f1(actual, predicted),
        },
    )


def _entity_metrics(references: list[list[str]], predictions: list[list[str]]) -> dict[str, float]:
    # Imported here: seqeval brings scikit-learn, which is slow to load and not wanted for other metrics.
    from seqeval.metrics import sequence_labeling, v1
    from seqeval.scheme import IOB2

    both = references, predictions
    count_entities = sequence_labeling.precision_recall_fscore_support
    per_type = count_entities(*both, average=None, zero_division=0)
    overall = count_entities(*both, average="micro", zero_division=0)
    strict = v1.precision_recall_fscore_support(*both, average="micro", scheme=IOB2, zero_division=0)
    return merged(
        _per_name(_types(*both), *per_type),
        {
            **_scored("overall", *overall[:3]),
            "overall_accuracy": float(sequence_labeling.accuracy_score(*both)),
            **_scored("strict_overall", *strict[:3]),
            "invalid_transitions": float(_unopened(predictions, sequence_labeling.get_entities(predictions))),
        },
    )


def _types(*sides: list[list[str]]) -> list[str]:
    """In seqeval's order. By default every type that has a tag has an entity."""
    tags = set(chain.from_iterable(chain.from_iterable(sides)))
    return sorted({tag[2:] for tag in tags if tag != "O"})


def _unopened(sentences: list[list[str]], found: Sequence[object]) -> int:
    """How many of the entities found begin with I-: all that no B- begins."""
    return len(found) - sum(tag.startswith("B-") for tag in chain.from_iterable(sentences))


def _scored(name: str, precision: float, recall: float, f1: float) -> dict[str, float]:
    return {f"{name}_precision": float(precision), f"{name}_recall": float(recall), f"{name}_f1": float(f1)}


def _per_name(names: Sequence[str], *scores: Iterable[float]) -> dict[str, float]:
    """Precision, recall, F1 and number of each name."""
    metrics: dict[str, float] = {}
    for name, precision, recall, f1, number in zip(names, *scores, strict=True):
        metrics |= {**_scored(name, precision, recall, f1), f"{name}_{_NUMBER}": float(number)}
    return metrics
