"""Predictions of taggers: the tag of each word, and the entities that the tags mark."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from bert_tasks.data.columns import Row
from bert_tasks.data.conll import entities
from bert_tasks.data.words import context_texts, located_words
from bert_tasks.metrics.classification import MISSED
from bert_tasks.outputs.explanation import ExplainedLogit, Explanation
from bert_tasks.outputs.prediction import Prediction


@dataclass(frozen=True, kw_only=True)
class EntitySpan:
    """An entity with the field names of transformers' pipeline.

    Attributes:
        score: Mean of its words' scores.
        word: Characters of the row's text from ``start`` to ``end``.
        start, end: Its characters in the row's text. Without a text in all words with a space between them.
        explanation: Explanation of the mean logit of its words' tags. Only on request.
    """

    entity_group: str
    score: float
    word: str
    start: int
    end: int
    explanation: Explanation | None = None


@dataclass(frozen=True, kw_only=True)
class TokenPrediction(Prediction):
    """The prediction for one row of words.

    Attributes:
        words, tags: The words, and one of the model's labels for each word.
        scores: Probability of each tag (with a CRF, over all tag sequences).
        entities: Entities that the tags mark, counted as conlleval does. Empty if labels are raw.
        logits: Logits of each word, in label order. Only on request.
    """

    words: tuple[str, ...]
    tags: tuple[str, ...]
    scores: tuple[float, ...]
    entities: tuple[EntitySpan, ...]
    logits: tuple[tuple[float, ...], ...] | None = None


def entity_candidates(pairs: Iterable[tuple[Row, TokenPrediction]]) -> Iterator[tuple[str, float, bool]]:
    """Yields the candidates of a ``ThresholdOutput``, entities that are right if their words and type are right."""
    for row, prediction in pairs:
        expected, predicted = entities(row["tags"]), entities(prediction.tags)
        for entity, span in zip(predicted, prediction.entities, strict=True):
            yield entity.type, span.score, entity in expected
        for entity in expected:
            if entity not in predicted:
                yield entity.type, MISSED, True


def without_entities(
    tags: Sequence[str], scores: Sequence[float], outside: Sequence[float], limits: Mapping[str, float]
) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Returns tags and their scores with O, of the score ``outside``, for entities below the limit of their tags."""
    kept_tags, kept_scores = list(tags), list(scores)
    for entity in entities(tags):
        words = slice(entity.start, entity.end)
        if fmean(scores[words]) < limits[tags[entity.start]]:
            kept_tags[words] = ["O"] * (entity.end - entity.start)
            kept_scores[words] = outside[words]
    return tuple(kept_tags), tuple(kept_scores)


def entity_spans(
    words: Sequence[str], tags: Sequence[str], scores: Sequence[float], text: str | None = None
) -> tuple[EntitySpan, ...]:
    """Returns the entities of tags, with characters in the text of ``located_words``."""
    _, text, places = located_words(words, text)
    spans = []
    # An entity has the characters from its first to its last word, so the text between them as it was written.
    for entity in entities(tags):
        start, end = places[entity.start][0], places[entity.end - 1][1]
        span = EntitySpan(
            entity_group=entity.type,
            score=fmean(scores[entity.start : entity.end]),
            word=text[start:end],
            start=start,
            end=end,
        )
        spans.append(span)
    return tuple(spans)


def entity_logits(
    prediction: TokenPrediction, row: Row, tokens: Sequence[tuple[int, int]], labels: Sequence[str]
) -> Iterator[ExplainedLogit]:
    """Yields for each entity of a row the mean logit of its words' predicted tags, for explanations.

    Args:
        prediction: The prediction for the row.
        row: The row.
        tokens: The feature of each word, and the token that is read for it there.
        labels: The labels, in the order of the logits.
    """
    column, text, places = located_words(row["words"], row.get("text"))
    for entity in entities(prediction.tags):
        terms = []
        # One weight for all words, so that a long entity is explained on the scale of a short one.
        for word in range(entity.start, entity.end):
            window, token = tokens[word]
            place = token * len(labels) + labels.index(prediction.tags[word])
            terms.append((window, place, 1 / (entity.end - entity.start)))
        yield ExplainedLogit(
            label=entity.type,
            texts={**context_texts(row), column: text},
            terms=tuple(terms),
            words={column: places},
        )
