"""Metrics of tagged words, as entities for IOB2 tags and as classes for raw tags.

seqeval finds the entities. Keys and values are seqeval's and scikit-learn's, on a scale of 0 to 1. A ratio 0/0 counts
as 0. Sentences are the tags of words (not of sub-words), already in IOB2 or raw.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from bert_tasks.errors import DataError
from bert_tasks.metrics.classification import class_counts
from bert_tasks.metrics.formulas import WORD_SCORES, LabelCounts, entity_f1, entity_scores, label_metrics
from bert_tasks.metrics.tables import merged

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
    model with another scheme count them before its tags are converted to IOB2.

    For raw tags, they are ``overall_accuracy``, ``macro_f1`` and for each tag ``TAG_precision``, ``_recall``, ``_f1``,
    ``_number``.

    Args:
        labels: Tags in the data, sentence by sentence.
        predictions: Predicted tags, as many.
        raw: Tags are classes of words.

    Raises:
        DataError: There is no word, or the name of a type or tag gives it the key of another metric, such as the type
            "overall".
    """
    if not any(labels):
        raise DataError("there are no words to compare. Tagging metrics need at least one word with a tag.")
    if raw:
        true, predicted = list(chain.from_iterable(labels)), list(chain.from_iterable(predictions))
        names = sorted({*true, *predicted})
        index_of = {name: index for index, name in enumerate(names)}
        counts = class_counts([index_of[tag] for tag in true], [index_of[tag] for tag in predicted], len(names))
        return merged(
            label_metrics(counts, names, "{}_{}".format, support=_NUMBER),
            {name: float(score(counts)) for name, score in WORD_SCORES.items()},
        )
    return _entity_metrics([list(tags) for tags in labels], [list(tags) for tags in predictions])


def check_names(tags: Iterable[str], *, raw: bool) -> None:
    """Raises DataError for tags whose metric would have the key of another metric.

    An example is the entity type "overall". The message names the keys.
    """
    names = sorted(set(tags) if raw else {tag[2:] for tag in tags if tag != "O"})
    label_keys = (f"{name}_{score}" for name in names for score in ("precision", "recall", "f1", _NUMBER))
    merged(dict.fromkeys(label_keys, 0.0), dict.fromkeys(WORD_SCORES if raw else _ENTITY_KEYS, 0.0))


def _entity_metrics(labels: list[list[str]], predictions: list[list[str]]) -> dict[str, float]:
    # Imported here, because seqeval brings scikit-learn, which is slow to load and not needed for other metrics.
    from seqeval.metrics import sequence_labeling
    from seqeval.scheme import IOB2, Entities

    types = sorted({tag[2:] for tag in chain.from_iterable((*labels, *predictions)) if tag != "O"})
    true, predicted = (set(sequence_labeling.get_entities(side)) for side in (labels, predictions))
    tallies = (Counter(name for name, _, _ in side) for side in (true, predicted, true & predicted))
    counts = LabelCounts(*(np.array([tally[name] for name in types], dtype=np.int64) for tally in tallies))
    strict, strict_predicted = (
        set(chain.from_iterable(Entities(side, IOB2).entities)) for side in (labels, predictions)
    )
    strict_counts = LabelCounts(
        *(np.array([len(side)]) for side in (strict, strict_predicted, strict & strict_predicted))
    )
    begun = sum(tag.startswith("B-") for tag in chain.from_iterable(predictions))
    return merged(
        label_metrics(counts, types, "{}_{}".format, support=_NUMBER, label_f1=entity_f1),
        {
            **{name: float(score(counts)) for name, score in entity_scores("overall").items()},
            "overall_accuracy": float(sequence_labeling.accuracy_score(labels, predictions)),
            **{name: float(score(strict_counts)) for name, score in entity_scores("strict_overall").items()},
            "invalid_transitions": float(len(predicted) - begun),  # every other entity begins with I-
        },
    )
