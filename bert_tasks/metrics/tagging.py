"""Metrics of tagged words, as entities for IOB2 tags and as classes for raw tags.

seqeval finds the entities. Keys and values are seqeval's and scikit-learn's, on a scale of 0 to 1. A ratio 0/0 counts
as 0. Sentences are the tags of words (not of sub-words), already in IOB2 or raw.

Shape legend: L entity types, or tags of words.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np

from bert_tasks.errors import DataError
from bert_tasks.metrics.classification import class_counts
from bert_tasks.metrics.formulas import WORD_SCORES, LabelCounts, Score, entity_f1, entity_scores, label_metrics
from bert_tasks.metrics.tables import CLASS_SCORES, merged

Sentences = Sequence[Sequence[str]]

_NUMBER = "number"
# The keys besides the keys of each name.
_ENTITY_KEYS = (*entity_scores("overall"), *entity_scores("strict_overall"), "overall_accuracy", "invalid_transitions")


def tagging_metrics(labels: Sentences, predictions: Sentences, *, raw: bool = False) -> dict[str, float]:
    """Returns metrics over the words of all sentences.

    For IOB2 tags, they are ``overall_precision``, ``overall_recall``, ``overall_f1`` and, for each type,
    ``TYPE_precision``, ``_recall``, ``_f1`` and ``_number`` (entities in the labels), counted as by conlleval and
    seqeval's default. There an I- with nothing to continue starts an entity. In strict IOB2, ``strict_overall_...``, it
    starts none. ``overall_accuracy`` counts words. ``invalid_transitions`` counts such I- in the predictions. For a
    model with another scheme, count them before its tags are converted to IOB2.

    For raw tags, they are ``overall_accuracy``, ``macro_f1`` and, for each tag, ``TAG_precision``, ``_recall``, ``_f1``
    and ``_number``.

    Args:
        labels: Tags in the data, sentence by sentence.
        predictions: Predicted tags, as many.
        raw: True if tags are classes of words, so that they mark no entities.

    Raises:
        DataError: There is no word, or the name of a type or tag gives it the key of another metric, such as the type
            "overall".
    """
    if not any(labels):
        raise DataError("there are no words to compare. Tagging metrics need at least one word with a tag.")
    if raw:
        return _word_metrics(list(chain.from_iterable(labels)), list(chain.from_iterable(predictions)))
    return _entity_metrics([list(tags) for tags in labels], [list(tags) for tags in predictions])


def check_names(tags: Iterable[str], *, raw: bool) -> None:
    """Raises DataError for tags whose metric would have the key of another metric.

    An example is the entity type "overall". The message names the keys.
    """
    if raw:
        names = set(tags)
        other_keys: Iterable[str] = WORD_SCORES
    else:
        names = _types_of(tags)
        other_keys = _ENTITY_KEYS
    label_keys: list[str] = []
    for name in sorted(names):
        label_keys += [f"{name}_{score}" for score in (*CLASS_SCORES, _NUMBER)]
    merged(dict.fromkeys(label_keys, 0.0), dict.fromkeys(other_keys, 0.0))


def _types_of(tags: Iterable[str]) -> set[str]:
    """Returns the entity types of IOB2 tags, which stand behind the prefixes B- and I-."""
    return {tag[2:] for tag in tags if tag != "O"}


def _word_metrics(labels: list[str], predictions: list[str]) -> dict[str, float]:
    """Returns the metrics of raw tags, which are the classes of words."""
    names = sorted({*labels, *predictions})
    index_of = {name: index for index, name in enumerate(names)}
    true = [index_of[tag] for tag in labels]
    predicted = [index_of[tag] for tag in predictions]
    counts = class_counts(true, predicted, len(names))
    by_tag = label_metrics(counts, names, "{}_{}".format, support=_NUMBER)
    return merged(by_tag, _scores_of(counts, WORD_SCORES))


def _scores_of(counts: LabelCounts, scores: Mapping[str, Score]) -> dict[str, float]:
    return {name: float(score(counts)) for name, score in scores.items()}


def _entity_metrics(labels: list[list[str]], predictions: list[list[str]]) -> dict[str, float]:
    """Returns the metrics of entities, which are right if their type and both ends are right."""
    # Imported here, because seqeval brings scikit-learn, which is slow to load and not needed for other metrics.
    from seqeval.metrics import sequence_labeling
    from seqeval.scheme import IOB2, Entities

    types = sorted(_types_of(chain.from_iterable((*labels, *predictions))))
    # Entities as conlleval counts them, each a tuple (type, first word, last word) over the words of all sentences.
    true = set(sequence_labeling.get_entities(labels))
    predicted = set(sequence_labeling.get_entities(predictions))
    tallies = []
    for side in (true, predicted, true & predicted):
        tally = Counter(name for name, _, _ in side)
        tallies.append(np.array([tally[name] for name in types], dtype=np.int64))  # [L]
    counts = LabelCounts(*tallies)
    # Entities as the definition of IOB2 counts them. An I- that continues nothing belongs to none.
    strict = set(chain.from_iterable(Entities(labels, IOB2).entities))
    strict_predicted = set(chain.from_iterable(Entities(predictions, IOB2).entities))
    strict_counts = LabelCounts(
        support=np.array([len(strict)]),
        predicted=np.array([len(strict_predicted)]),
        both=np.array([len(strict & strict_predicted)]),
    )
    begun = sum(tag.startswith("B-") for tag in chain.from_iterable(predictions))
    by_type = label_metrics(counts, types, "{}_{}".format, support=_NUMBER, label_f1=entity_f1)
    overall = _scores_of(counts, entity_scores("overall"))
    overall["overall_accuracy"] = float(sequence_labeling.accuracy_score(labels, predictions))
    overall |= _scores_of(strict_counts, entity_scores("strict_overall"))
    overall["invalid_transitions"] = float(len(predicted) - begun)  # every other entity begins with I-
    return merged(by_type, overall)
