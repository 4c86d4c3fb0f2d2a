"""Masked language modelling of tokens masked in training or open in a text.

Owns the windows of whole sentences for pairs of them, and the copies of a window with which texts are scored.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby, islice
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from bert_tasks.data.columns import Column, Row
from bert_tasks.data.rows import Rows
from bert_tasks.encoder import heads
from bert_tasks.encoder.config import EncoderConfig, HeadKind
from bert_tasks.encoder.heads import Head
from bert_tasks.errors import DataError, UsageError
from bert_tasks.outputs.base import Output
from bert_tasks.outputs.features import NO_WORD, Feature
from bert_tasks.outputs.settings import require
from bert_tasks.outputs.text_score import TextScore
from bert_tasks.outputs.vocabulary import MASK, Vocabulary
from bert_tasks.tasks.base import MOST_CHARACTERS, FeatureKeys
from bert_tasks.tasks.corpus import CorpusTask, mask_token_id, tokenized_texts, window_feature
from bert_tasks.tasks.masking import mask_features
from bert_tasks.tasks.suggestions import Suggestion
from bert_tasks.tasks.windows.corpus import (
    SPLITTER,
    DocumentTokens,
    Window,
    cut_documents,
    pair_feature,
    sentence_windows,
    split_sentences,
)
from bert_tasks.tasks.windows.frame import Frame

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHORTEST_PAIR = 8  # tokens of a window for a pair of sentences, which has up to four special tokens
_LANGUAGE = re.compile(r"[a-z]{2,3}([-_][A-Za-z]+)*|")  # a code such as pt-br, or nothing


@dataclass(frozen=True, kw_only=True)
class MaskedLanguageModeling(CorpusTask[Any]):
    """Documents whose tokens are masked and predicted.

    It serves three purposes: continued pre-training of an encoder on your own texts (before fine-tuning for another
    task), filling masks in texts, and scoring texts (``score``). Rows need no labels. The masks are drawn as in
    transformers' ``DataCollatorForLanguageModeling``, and ``MaskingRule`` explains their settings.

    Attributes:
        mask_smoothing: Mask rare tokens more often in training. A token that occurs ``count`` times has the weight
            ``max(count, 1) ** -mask_smoothing``. Evaluation ignores it.
        masking: ``dynamic`` masks other tokens in each epoch, ``static`` always the same ones.
        fill: ``document`` ends a window at the end of a document. ``across`` continues it with a separator and the next
            document (RoBERTa's FULL-SENTENCES), except for texts with a mask.
        sentence_language: Code of a language, such as ``en``, if rows are not cut into sentences. The library sentencex
            (extra ``sentences``) then cuts each of the row's ``sentences``, or each line of its text, into sentences.

    Examples:
        >>> TaskModel.from_pretrained(base, task=MaskedLanguageModeling).predict("The soup was [MASK].")
    """

    name: ClassVar[str] = "masked-language-modeling"
    outputs: ClassVar[tuple[type[Output[Any]], ...]] = (Vocabulary, TextScore)
    row_shapes: ClassVar[tuple[tuple[str, ...], ...]] = (("text",),)
    row_needs: ClassVar[str] = "one column of texts, and no other"
    example_rows: ClassVar[Sequence[Row]] = (
        {"text": "Paris is the capital of [MASK]."},
        {"text": "We waited an hour and the soup was [MASK]."},
        {"text": "The [MASK] leaves at nine from platform [MASK]."},
    )
    output: Vocabulary | TextScore
    mask_smoothing: float = 0.0
    masking: Literal["dynamic", "static"] = "dynamic"
    fill: Literal["document", "across"] = "document"
    sentence_language: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        language = self.sentence_language
        if self.output.sentence_objective == "none":
            require(
                not language, "sentence_language cuts texts into sentences for pairs of them. Set sentence_objective"
            )
            return
        require(self.fill == "document", 'sentence_objective makes pairs inside a document. Set fill = "document"')
        require(
            _LANGUAGE.fullmatch(language) is not None,
            f"sentence_language is {language!r}, expected a code such as 'en' or 'pt-br'",
        )
        require(
            self.max_length >= _SHORTEST_PAIR,
            f"max_length is {self.max_length}, expected at least {_SHORTEST_PAIR} for pairs of sentences",
        )

    @classmethod
    def output_class(cls, settings: Mapping[str, Any]) -> type[Output[Any]]:
        """Returns the output with candidates for masks, or with scores of texts. See ``Task.output_class``."""
        known = cls.settings_by_name()["score"]
        score, choices = settings.get("score", known.default), get_args(known.hint)
        if not isinstance(score, str) or score not in choices:
            expected = ", ".join(repr(choice) for choice in choices)
            raise ValueError(f"score is {score!r}, expected one of {expected}")
        return Vocabulary if score == "none" else TextScore

    @classmethod
    def choice_of(cls, output: type[Output[Any]]) -> str:
        choices = [repr(choice) for choice in get_args(output.own_settings()["score"].hint)]
        return f"score = {' or '.join(choices)}"

    # Rows

    @property
    def columns(self) -> tuple[Column, ...]:
        if self.output.sentence_objective == "none":
            return super().columns
        return (*super().columns, Column(name="sentences", kind="texts", required=False))

    def check_split(self, rows: Rows, source: str) -> None:
        if self.sentence_language:
            split_sentences((), self.sentence_language)  # raises an error now if the library is not installed
        if self.output.sentence_objective == "nsp" and len(rows) < 2:
            raise DataError(
                f"{source}: next sentence prediction needs at least two documents, because a sentence that does not "
                'follow comes from another one. Add documents, or set sentence_objective = "sop"'
            )

    def check_rows(self, rows: Sequence[Row]) -> None:
        if isinstance(self.output, Vocabulary):
            check_masks([row["text"] for row in rows], self.output.top_k)

    # Windows

    @property
    def libraries(self) -> tuple[str, ...]:
        return (SPLITTER,) if self.sentence_language else ()

    def features(self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase") -> list[Feature]:
        """Returns windows that fill ``max_length``, of whole sentences if there is a sentence objective."""
        if self.output.sentence_objective == "none":
            return super().features(rows, tokenizer)
        rules, mask_id = self.window_rules(tokenizer), mask_token_id(tokenizer, self.name)
        room = Frame.of(tokenizer, texts=2).room(self.max_length)
        sentences = [_sentences(row, self.sentence_language) for row in rows]
        # All sentences in one call of the tokenizer.
        tokens = iter(tokenized_texts(list(chain.from_iterable(sentences)), tokenizer))
        features: list[Feature] = []
        for number, of_row in enumerate(sentences):
            sentence_tokens = list(islice(tokens, len(of_row)))
            for window in sentence_windows(sentence_tokens, document=number, room=room):
                starts = [len(rules.prefix) + start for start in window.starts]
                features.append({**window_feature(window, rules, mask_id), "sentence_starts": starts})
        return features

    def windows(
        self, documents: Sequence[DocumentTokens], room: int, tokenizer: "PreTrainedTokenizerBase"
    ) -> Iterator[Window]:
        """Yields the windows of neighbouring documents, of single texts for scores."""
        if self.fill == "document" or isinstance(self.output, TextScore):
            yield from cut_documents(documents, room=room)
            return
        # A text with a mask keeps windows of its own, because its prediction must not depend on other rows.
        first = 0
        for has_mask, group in groupby(documents, key=lambda document: tokenizer.mask_token_id in document.ids):
            neighbours = list(group)
            separator = None if has_mask else tokenizer.sep_token_id
            for window in cut_documents(neighbours, room=room, separator=separator):
                yield replace(window, document=first + window.document)
            first += len(neighbours)

    def prepare(
        self,
        features: Sequence[Feature],
        keys: FeatureKeys,
        corpus: Sequence[Mapping[str, Any]],
        tokenizer: "PreTrainedTokenizerBase",
    ) -> Sequence[Feature]:
        """Returns features with masked tokens, which are pairs of segments if there is a sentence objective.

        Raises:
            UsageError: The output is for predictions only.
        """
        if isinstance(self.output, TextScore):
            raise UsageError(self.output.no_training_reason)
        make_pair = None
        objective = self.output.sentence_objective
        if objective != "none":
            frame = Frame.of(tokenizer, texts=2)
            make_pair = partial(
                pair_feature, corpus=corpus, frame=frame, objective=objective, max_length=self.max_length
            )
        static = self.masking == "static"
        return mask_features(features, keys, corpus, tokenizer, self.rule, static=static, make_pair=make_pair)

    def copies(self, feature: Feature, tokenizer: "PreTrainedTokenizerBase") -> Iterable[Feature]:
        """Returns the feature, or for scores its copies with one masked token each."""
        if isinstance(self.output, Vocabulary):
            return (feature,)
        mask_id = mask_token_id(tokenizer, self.name)
        return scored_copies(feature, mask_id=mask_id, masks_rest_of_word=self.output.score == "pll-word-l2r")

    # The model

    def head(self, config: EncoderConfig) -> Head:
        """Returns the head of masked tokens, with pairs if there is a sentence objective.

        Raises:
            UsageError: Models of this family are not trained with the sentence objective.
        """
        objective = self.output.sentence_objective
        if objective == "none":
            return heads.VocabularyHead(config)
        objectives = config.head.pair_objectives
        if objectives and objective not in objectives:
            suitable = " or ".join(repr(other) for other in objectives)
            raise UsageError(
                f'{self.name}: sentence_objective = "{objective}" does not suit the head of this family. '
                f"Set it to {suitable}, or to 'none'"
            )
        return heads.PretrainingHead(config)

    @property
    def head_kind(self) -> HeadKind | None:
        if self.output.sentence_objective == "none":
            return self.output.head_kind
        return "pretraining"

    # For init

    @classmethod
    def suggested(cls, words: int, longest: int) -> list[Suggestion]:
        length = min(cls.max_length, longest)
        return [
            Suggestion("max_length", length, "tokens of a window. Longer texts have several windows"),
            Suggestion("whole_word_mask", True, "masks whole words instead of single tokens", is_active=False),
        ]


def check_masks(texts: Sequence[str], top_k: int) -> None:
    """Raises an error if the texts have too many masks for their length.

    Each candidate for a mask repeats its text, so a text of masks only would have an answer that is as long as the
    square of the text.

    Args:
        texts: The texts of a row, or of all rows of a request.
        top_k: The number of candidates for each mask.

    Raises:
        DataError: The texts of all candidates together are longer than ``MOST_CHARACTERS``.
    """
    masks, characters, repeated = 0, 0, 0
    for text in texts:
        of_text = sum(1 for _ in MASK.finditer(text))
        masks += of_text
        characters += len(text)
        repeated += of_text * len(text) * top_k
    if masks > 1 and repeated > MOST_CHARACTERS:
        subject = "a text" if len(texts) == 1 else f"{len(texts)} texts"
        raise DataError(
            f"{subject} of {characters:,} characters with {masks:,} masks: each of the {top_k} candidates for a mask "
            f"repeats its text, which is {repeated:,} characters in total, and at most {MOST_CHARACTERS:,} are "
            "returned. Use fewer masks, shorter texts or a lower top_k"
        )


def scored_copies(feature: Feature, *, mask_id: int, masks_rest_of_word: bool) -> Iterator[Feature]:
    """Yields copies of a window, each with one token of its words masked as the label.

    A window without words is one copy in which nothing is read.

    Args:
        feature: The window.
        mask_id: The id of the mask token.
        masks_rest_of_word: Mask the later tokens of the same word, too, so that they do not tell what the token is
            (Kauf and Ivanova, arXiv:2305.10588).
    """
    ids, words = feature["input_ids"], feature["word_ids"]
    if words is None:
        words = []
    tokens = [token for token, word in enumerate(words) if word != NO_WORD]
    if not tokens:
        yield {**feature, "gather_positions": [], "labels": []}
    for token in tokens:
        end = token + 1
        while masks_rest_of_word and end < len(ids) and words[end] == words[token]:
            end += 1
        masked = [*ids[:token], *[mask_id] * (end - token), *ids[end:]]
        yield {**feature, "input_ids": masked, "gather_positions": [token], "labels": [float(ids[token])]}


def _sentences(row: Row, language: str) -> Sequence[str]:
    """Returns a row's sentences, or its lines, because only the text can hold masks."""
    sentences: Sequence[str] | None = row.get("sentences")
    if sentences is None or MASK.search(row["text"]):
        sentences = row["text"].splitlines()
    if not language:
        return sentences
    return split_sentences(sentences, language)
