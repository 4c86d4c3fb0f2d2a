"""Explanations of taggers by the contributions of words to predicted entities."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch import Tensor

from bert_tasks.data.columns import Row
from bert_tasks.data.conll import entities, label_scheme
from bert_tasks.data.words import located_words
from bert_tasks.tasks.base import Feature
from bert_tasks.tasks.shared.explanation import Explainable, ExplainedLogit, Explanation, TokenSpan
from bert_tasks.tasks.shared.outputs import windows_by_row
from bert_tasks.tasks.shared.windows import document_windows, documents, split_words, word_starts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenExplainable(Explainable):
    """Explains the logits of each predicted entity of token classification."""

    per_row = False

    @property
    def no_explanations_reason(self) -> str | None:
        if self.task.crf:
            return "a tagger with crf = true scores sequences of tags, not words. Predict without explanations"
        if label_scheme(self.task.labels) == "raw":
            return (
                "a tagger explains entities, and its labels mark none (an entity needs labels such as B-PER and "
                "I-PER). Predict without explanations"
            )
        return None

    def token_spans(
        self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase"
    ) -> Sequence[Sequence[TokenSpan | None]]:
        """Returns whole words for tokens, and None for tokens of neighbouring rows."""
        rules = self.task.window_rules(tokenizer)
        split = split_words([row["words"] for row in rows], tokenizer, longest=rules.room)
        # Windows with the index of each token in ``spans`` instead of ids, and -1 for a special token.
        rules = replace(rules, prefix=(-1,) * len(rules.prefix), suffix=(-1,) * len(rules.suffix))
        result: list[list[TokenSpan | None]] = []
        for document in documents([row.get("document") for row in rows], alone=not self.task.context_tokens):
            spans: list[tuple[int, TokenSpan]] = []
            numbered = []
            for row in document:
                column, _, places = located_words(rows[row]["words"], rows[row].get("text"))
                for word, (start, end) in zip(places, pairwise(split[row].starts), strict=True):
                    spans += [(row, TokenSpan(column, *word))] * (end - start)
                numbered.append(replace(split[row], ids=range(len(spans) - split[row].starts[-1], len(spans))))
            for row, windows in zip(document, document_windows(numbered, rules), strict=True):
                for window in windows:
                    pairs = (spans[number] if number >= 0 else (row, None) for number in window.ids)
                    result.append([span if owner == row else None for owner, span in pairs])
        return result

    def explained_logits(
        self, predictions: Sequence[Any], compact: Sequence[Tensor], features: Sequence[Feature], rows: Sequence[Row]
    ) -> Sequence[ExplainedLogit]:
        """Returns the mean logit of an entity's predicted tags at first sub-words."""
        by_row = zip(predictions, windows_by_row(features), rows, strict=True)
        return [logit for each in by_row for logit in self._entity_logits(*each, features)]

    def _entity_logits(
        self, prediction: Any, windows: Sequence[int], row: Row, features: Sequence[Feature]
    ) -> Iterator[ExplainedLogit]:
        first_tokens = [  # the window of each word, and its index among the tokens that the window reads
            (window, index)
            for window in windows
            for index, is_start in enumerate(word_starts(features[window].get("word_ids")))
            if is_start
        ]
        column, text, places = located_words(row["words"], row.get("text"))
        labels = self.task.labels
        for entity in entities(prediction.tags):
            words = range(entity.start, entity.end)
            tokens = [(*first_tokens[word], labels.index(prediction.tags[word])) for word in words]
            yield ExplainedLogit(
                label=entity.type,
                texts={column: text},
                terms=tuple((window, index * len(labels) + label, 1 / len(words)) for window, index, label in tokens),
                words=tuple(places),
            )

    def with_explanations(self, predictions: Sequence[Any], explanations: Sequence[Explanation]) -> list[Any]:
        remaining = iter(explanations)
        return [
            replace(
                prediction,
                entities=tuple(replace(entity, explanation=next(remaining)) for entity in prediction.entities),
            )
            for prediction in predictions
        ]
