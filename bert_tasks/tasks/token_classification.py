"""Token classification with one tag for every word.

Examples are named entities, slots, chunks and parts of speech. Owns which sub-words are trained and read. A long row is
read in windows, and every word is read in exactly one. Windows are made in windows/words.py, and what the logits mean
is in outputs/tags.py.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from bert_tasks.data.columns import Column, Row
from bert_tasks.data.conll import continuation_label
from bert_tasks.data.features import Truncation
from bert_tasks.data.words import located_words
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.heads import CRFHead, Head, PerTokenHead
from bert_tasks.errors import DataError, UsageError
from bert_tasks.outputs.base import Output
from bert_tasks.outputs.explanation import TokenSpan, TokenSpans
from bert_tasks.outputs.features import Feature, word_starts
from bert_tasks.outputs.settings import require
from bert_tasks.outputs.tags import Tags, TokenPrediction
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.suggestions import Suggestion, suggested_length
from bert_tasks.tasks.windows.words import SubWords, WindowRules, document_windows, documents, split_words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class TokenClassification(Task[TokenPrediction]):
    """Words with a tag each, such as named entities.

    It suits named entities, slots, chunks and parts of speech. Rows have the words of a sentence with their tags, or a
    text with the spans of its entities. ``Tags`` says what the tags mean, and whether a CRF scores them.

    Attributes:
        labelling: The sub-words of a word that are trained. ``first`` trains the first one, ``all`` trains all, and
            ``continuation`` trains all with I- instead of B- after the first. A word's tag is always the tag of its
            first sub-word.
        doc_stride: The OVERLAP of two neighbouring windows in tokens, at most, as in transformers. Windows are cut
            between words.
        context_tokens: Number of tokens of the rows around (those with the same ``document``) that a window may add on
            each side, as far as ``max_length`` allows. They are read, never tagged. Rows without a document have none.

    Examples:
        >>> model = TaskModel.from_pretrained(base, task=TokenClassification, labels=["O", "B-PER", "I-PER"])
        >>> model.predict({"words": ["Ada", "sings"]})[0].tags
    """

    name: ClassVar[str] = "token-classification"
    outputs: ClassVar[tuple[type[Output[Any]], ...]] = (Tags,)
    columns: ClassVar[tuple[Column, ...]] = (
        Column(name="words", kind="words"),
        Tags.column,
        Column(name="entities", kind="spans", required=False),  # instead of the tags
        Column(name="document", kind="id", required=False),
        Column(name="text", kind="text", required=False),  # instead of the words, or the text that they are from
    )
    sample: ClassVar[Literal["window"]] = "window"
    row_shapes: ClassVar[tuple[tuple[str, ...], ...]] = (("words", "tags"), ("text", "entities"))
    row_needs: ClassVar[str] = "as many words as tags in every row, or a text and spans of it"
    usual_names: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {
            "words": ("words", "tokens", "form"),
            "tags": ("tags", "ner_tags", "upos", "labels", "slots"),
            "text": ("text",),
            "entities": ("entities", "spans"),
        }
    )
    has_dense_labels: ClassVar[bool] = True
    example_rows: ClassVar[Sequence[Row]] = (
        {"words": ["Ada", "Lovelace", "met", "Charles", "Babbage", "in", "London", "in", "1833", "."]},
        {"words": ["The", "European", "Commission", "met", "in", "Brussels", "on", "Monday", "."]},
        {"words": ["Please", "book", "a", "table", "at", "Luigi", "'s", "for", "four", "on", "Friday", "evening", "."]},
    )
    output: Tags
    labelling: Literal["first", "continuation", "all"] = "first"
    doc_stride: int = 32
    context_tokens: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            0 <= self.doc_stride < self.max_length - 2,
            f"doc_stride is {self.doc_stride}, but windows of {self.max_length} tokens (two of them special) can "
            f"overlap by 0 to {self.max_length - 3}",
        )
        require(self.context_tokens >= 0, f"context_tokens is {self.context_tokens}, expected 0 (no context) or more")
        require(
            not self.output.crf or self.labelling == "first",
            f"crf = true requires labelling = 'first', not {self.labelling!r}",
        )

    def fit_rows(self, rows: Iterable[Row]) -> Self:
        """Returns the task with an output that is fitted to the training rows (``Tags.fit_rows``).

        Raises:
            DataError: ``context_tokens`` is set and no row has a document, or the output cannot be fitted.
        """
        if self.context_tokens:
            if isinstance(rows, Iterator):  # which can be read only once
                rows = list(rows)
            self._check_documents(rows)
        return super().fit_rows(rows)

    def _check_documents(self, rows: Iterable[Row]) -> None:
        if all(row.get("document") is None for row in rows):
            raise DataError(
                f"context_tokens = {self.context_tokens}, but no row has a document. Name the column that says "
                "which sentences belong together (in CoNLL files the -DOCSTART- lines do), or set context_tokens = 0"
            )

    # Windows

    def features(self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase") -> list[Feature]:
        """Returns windows with ``gather_positions`` of all or the first sub-words.

        Rows with a tag that the model has no label for have no labels, so they are not trained, only counted in
        metrics.

        Raises:
            DataError: The labels are unnamed (LABEL_0, ...) and no tag is one of them.
        """
        rules = self.window_rules(tokenizer)
        split = split_words([row["words"] for row in rows], tokenizer, longest=rules.room)
        if not self.output.has_names:
            tagged = [row["tags"] for row in rows if row.get("tags") is not None]
            self.output.check_known(tagged)
        numbers = {label: float(index) for index, label in enumerate(self.output.labels)}
        features: list[Feature] = []
        # Document by document, because a window may hold tokens of the rows around it.
        for document in self._documents(rows):
            all_windows = document_windows([split[row] for row in document], rules)
            for row, windows in zip(document, all_windows, strict=True):
                names = self.output.word_labels(rows[row])
                lost_tokens = split[row].lost
                for window in windows:
                    gather_positions, word_ids = window.gather_positions(first=self.labelling == "first")
                    feature = Feature(
                        row=row,
                        input_ids=window.ids,
                        token_type_ids=[0] * len(window.ids),
                        labels=self._token_labels(names, word_ids, numbers),
                        gather_positions=gather_positions,
                        word_ids=word_ids,
                        lost_tokens=lost_tokens,
                    )
                    features.append(feature)
                    lost_tokens = 0  # the first window counts for the row
        return features

    def window_rules(self, tokenizer: "PreTrainedTokenizerBase") -> WindowRules:
        """Returns what windows look like."""
        return WindowRules.of(
            tokenizer, max_length=self.max_length, overlap=self.doc_stride, context=self.context_tokens
        )

    def _documents(self, rows: Sequence[Row]) -> list[range]:
        """Returns the rows whose windows may hold tokens of each other."""
        return documents([row.get("document") for row in rows], alone=not self.context_tokens)

    def _token_labels(
        self, names: Sequence[str] | None, word_ids: Sequence[int], numbers: Mapping[str, float]
    ) -> list[float] | None:
        """Returns the labels of the tokens that a window reads. None if the words of the row have no labels."""
        if names is None:
            return None
        if self.labelling != "continuation":
            return [numbers[names[word]] for word in word_ids]
        labels = []
        for word, is_start in zip(word_ids, word_starts(word_ids), strict=True):
            name = names[word]
            if not is_start:
                # The model may lack an I- label that no training word has. Then B- stays.
                name = continuation_label(name, numbers)
            labels.append(numbers[name])
        return labels

    @property
    def needs_document(self) -> bool:
        return self.context_tokens > 0

    def cut_notes(self, cuts: Truncation) -> tuple[str, ...]:
        """Returns a sentence about rows with words of which only the first sub-words are read."""
        if not cuts.cut_rows:
            return ()
        have = "has" if cuts.cut_rows == 1 else "have"
        limit = f"max_length = {self.max_length} tokens"
        return (
            f"{cuts.share(cuts.cut_rows)} rows {have} a word that alone is longer than {limit}. Only the beginning of "
            "such words is read, and each of them is tagged",
        )

    def token_spans(self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase") -> TokenSpans:
        """Returns whole words for tokens, and None for tokens of neighbouring rows."""
        rules = self.window_rules(tokenizer)
        split = split_words([row["words"] for row in rows], tokenizer, longest=rules.room)
        # Windows with the index of each token in ``tokens`` instead of ids, and -1 for a special token.
        rules = replace(rules, prefix=(-1,) * len(rules.prefix), suffix=(-1,) * len(rules.suffix))
        spans: list[list[TokenSpan | None]] = []
        for document in self._documents(rows):
            tokens: list[tuple[int, TokenSpan]] = []  # of the whole document, with their rows
            numbered: list[SubWords] = []
            for row in document:
                first = len(tokens)
                tokens += [(row, span) for span in _sub_word_spans(rows[row], split[row])]
                numbered.append(replace(split[row], ids=range(first, len(tokens))))
            for row, windows in zip(document, document_windows(numbered, rules), strict=True):
                spans += [_spans_of_row(row, window.ids, tokens) for window in windows]
        return spans

    # The model

    def head(self, config: EncoderConfig) -> Head:
        if not self.output.labels:
            raise UsageError("token classification needs labels, e.g. labels=['O', 'B-PER', 'I-PER']")
        head_class = CRFHead if self.output.crf else PerTokenHead  # the same parameters, and transitions for a CRF
        return head_class(config, self.output.size, dropout=config.head.token_dropout)

    @classmethod
    def hf_settings(cls, hf_config: Mapping[str, Any], labels: tuple[str, ...]) -> dict[str, Any]:
        """Returns the labels, or the names that transformers gives to two labels."""
        return {"labels": labels if labels else ("LABEL_0", "LABEL_1")}

    @classmethod
    def limited(cls, usable_length: int) -> dict[str, int]:
        """Returns ``max_length``, and an overlap of at most a quarter of it."""
        limits = super().limited(usable_length)
        return {**limits, "doc_stride": min(cls.doc_stride, limits["max_length"] // 4)}

    # For init

    @classmethod
    def suggested(cls, words: int, longest: int) -> list[Suggestion]:
        overlap = min(cls.doc_stride, suggested_length(words, longest) // 4)
        comment = "OVERLAP in tokens of two windows of a sentence"
        return [*super().suggested(words, longest), Suggestion("doc_stride", overlap, comment)]


def _sub_word_spans(row: Row, split: SubWords) -> list[TokenSpan]:
    """Returns the word of each sub-word of a row, as characters of the text of ``located_words``."""
    column, _, places = located_words(row["words"], row.get("text"))
    spans: list[TokenSpan] = []
    for place, (start, end) in zip(places, pairwise(split.starts), strict=True):
        spans += [TokenSpan(column, *place)] * (end - start)
    return spans


def _spans_of_row(row: int, numbers: Sequence[int], tokens: Sequence[tuple[int, TokenSpan]]) -> list[TokenSpan | None]:
    """Returns the span of each token of a window that is one of the row, else None.

    Args:
        row: The number of the row.
        numbers: The number of each token of the window in its document, -1 for special tokens.
        tokens: The row and the span of each token of the document.
    """
    spans: list[TokenSpan | None] = []
    for number in numbers:
        span: TokenSpan | None = None
        if number >= 0:
            owner, word = tokens[number]
            if owner == row:  # not of a neighbouring row, which is only context
                span = word
        spans.append(span)
    return spans
