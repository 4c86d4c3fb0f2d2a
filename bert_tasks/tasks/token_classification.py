"""Token classification with one tag for every word.

Examples are named entities, slots, chunks and parts of speech, and words of an answer that its context does not
support. Owns which sub-words are trained and read. A long row is read in windows, and every word is read in exactly
one, or with a context in one for each part of the context. Windows are made in windows/words.py and
windows/grounding.py, and what the logits mean is in outputs/tags.py.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from bert_tasks.data.columns import Column, Row
from bert_tasks.data.conll import continuation_label
from bert_tasks.data.features import Truncation
from bert_tasks.data.words import context_texts, located_words
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.heads import CRFHead, Head, PerTokenHead
from bert_tasks.errors import DataError, UsageError
from bert_tasks.outputs.base import Output
from bert_tasks.outputs.explanation import TokenSpan, TokenSpans
from bert_tasks.outputs.features import Feature, word_starts
from bert_tasks.outputs.settings import require
from bert_tasks.outputs.tags import Tags, TokenPrediction
from bert_tasks.tasks.base import MOST_CHARACTERS, Task
from bert_tasks.tasks.suggestions import Suggestion, suggested_length
from bert_tasks.tasks.windows.grounding import Context, contexts_of, joined
from bert_tasks.tasks.windows.words import (
    SubWords,
    WindowRules,
    WordWindow,
    document_windows,
    documents,
    split_words,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_EXAMPLES: tuple[Row, ...] = (
    {"words": ["Ada", "Lovelace", "met", "Charles", "Babbage", "in", "London", "in", "1833", "."]},
    {"words": ["The", "European", "Commission", "met", "in", "Brussels", "on", "Monday", "."]},
    {"words": ["Please", "book", "a", "table", "at", "Luigi", "'s", "for", "four", "on", "Friday", "evening", "."]},
)
_NOTICE = "The pool is open from six to nine on weekdays and from eight to five on Sundays. It is closed in August."
_GROUNDED_EXAMPLES: tuple[Row, ...] = (
    {
        "question": "When does the pool open?",
        "words": ["At", "six", "on", "weekdays", "and", "at", "ten", "on", "Sundays"],
    },
    {"question": "Is the pool open in August?", "words": ["No", ",", "it", "is", "closed", "for", "repairs", "."]},
    {"question": "Until when can I swim on a Sunday?", "words": ["The", "pool", "closes", "at", "five", "."]},
)


@dataclass(frozen=True, kw_only=True)
class TokenClassification(Task[TokenPrediction]):
    """Words with a tag each, such as named entities.

    It suits named entities, slots, chunks and parts of speech. Rows have the words of a sentence with their tags, or a
    text with the spans of its entities. ``Tags`` says what the tags mean, and whether a CRF scores them.

    A row may also have a ``context``, for tags that depend on it, such as the parts of an answer that the passages
    behind it do not support (hallucination detection, as in LettuceDetect, https://arxiv.org/abs/2502.17125). The model
    reads the context and the words as a pair of texts, and tags the words only. A ``question``, if the row has one, is
    read before its context, with an empty line between them. LettuceDetect's prompts begin with the question, too
    (https://github.com/KRLabsOrg/LettuceDetect/blob/main/lettucedetect/datasets/hallucination_dataset.py). A long
    context is read in windows, each with the question and all words (``windows/grounding.py``). A word has the tag of
    the window that supports it most, the one in which "O" is most probable, because one passage that supports a word is
    enough (``word_places``). LettuceDetect does the opposite
    (https://github.com/KRLabsOrg/LettuceDetect/blob/main/lettucedetect/detectors/transformer.py): it takes a word for
    supported only if all parts of the context say so. A row without a context is read as if it had neither column. A
    model that was trained without contexts reads the context of a row, too, because published models such as
    LettuceDetect do not say in their config.json that they read contexts.

    Attributes:
        labelling: The sub-words of a word that are trained. ``first`` trains the first one, ``all`` trains all, and
            ``continuation`` trains all with I- instead of B- after the first. A word's tag is always the tag of its
            first sub-word.
        doc_stride: The OVERLAP of two neighbouring windows in tokens, at most, as in transformers. Windows are cut
            between words, and a context between its tokens.
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
        Column(name="question", kind="text", required=False),  # before the context
        Column(name="context", kind="text", required=False),  # read before the words, not tagged
    )
    sample: ClassVar[Literal["window"]] = "window"
    row_shapes: ClassVar[tuple[tuple[str, ...], ...]] = (("words", "tags"), ("text", "entities"))
    row_needs: ClassVar[str] = "as many words as tags in every row, or a text and spans of it"
    usual_names: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {
            "words": ("words", "tokens", "form"),
            "tags": ("tags", "ner_tags", "upos", "labels", "slots"),
            "text": ("text", "answer", "response"),
            "entities": ("entities", "spans"),
            "question": ("question", "query"),
            "context": ("context", "passage", "evidence"),
        }
    )
    has_dense_labels: ClassVar[bool] = True
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
        if self.output.reads_context:  # a model that was trained with contexts may be opened with other settings
            reason = "but the training rows have contexts, of which several windows may read one word"
            require(not self.output.crf, f"crf = true scores all words of a row once, {reason}", UsageError)
            reason = "but the training rows have contexts of their own"
            require(self.context_tokens == 0, f"context_tokens reads the rows around, {reason}", UsageError)

    def fit_rows(self, rows: Iterable[Row]) -> Self:
        """Returns the task with an output that is fitted to the training rows (``Tags.fit_rows``).

        Raises:
            DataError: ``context_tokens`` is set and no row has a document, or the output cannot be fitted.
            UsageError: A row has a context, with which the settings cannot be combined.
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

    @property
    def example_rows(self) -> Sequence[Row]:
        if not self.output.reads_context:
            return _EXAMPLES
        return [{**row, "context": _NOTICE} for row in _GROUNDED_EXAMPLES]

    def pipeline_inputs(self, row: Row) -> Sequence[list[str]]:
        """Returns the words of a row, behind its context as a list of one text, if it has one."""
        texts = context_texts(row)
        if not texts:
            return [row["words"]]
        return [[joined(texts)], row["words"]]

    def check_rows(self, rows: Sequence[Row]) -> None:
        repeated = 0
        for row in rows:
            # The words are read with each part of the context, of which there are more if windows are shorter.
            context = len(joined(context_texts(row)))
            repeated += context * len(" ".join(row["words"])) // self.max_length
        if repeated > MOST_CHARACTERS:
            raise DataError(
                f"the words are read with each part of the context, which repeats about {repeated:,} characters, and "
                f"at most {MOST_CHARACTERS:,} are read. Use a shorter context or fewer words"
            )

    # Windows

    def features(self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase") -> list[Feature]:
        """Returns windows with ``gather_positions`` of all or the first sub-words.

        Rows with a tag that the model has no label for have no labels, so they are not trained, only counted in
        metrics.

        Raises:
            DataError: The labels are unnamed (LABEL_0, ...) and no tag is one of them.
        """
        if not self.output.has_names:
            tagged = [row["tags"] for row in rows if row.get("tags") is not None]
            self.output.check_known(tagged)
        numbers = {label: float(index) for index, label in enumerate(self.output.labels)}
        rules = self.window_rules(tokenizer)
        contexts = self._contexts(rows, tokenizer)
        split = self._split(rows, contexts, tokenizer)
        features: list[Feature] = []
        for row, windows in enumerate(self._windows(self._documents(rows), split, contexts, rules)):
            self._check_merging(windows)
            names = self.output.word_labels(rows[row])
            lost_tokens = _lost_tokens(split[row], contexts[row])
            for window in windows:
                gather_positions, word_ids = window.gather_positions(first=self.labelling == "first")
                feature = Feature(
                    row=row,
                    input_ids=window.ids,
                    token_type_ids=window.token_type_ids,
                    labels=self._token_labels(names, word_ids, numbers),
                    gather_positions=gather_positions,
                    word_ids=word_ids,
                    lost_tokens=lost_tokens,
                )
                features.append(feature)
                lost_tokens = 0  # the first window counts for the row
        return features

    def _contexts(self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase") -> list[Context | None]:
        """Returns the context of each row, or None for a row without one.

        Settings that cannot be combined with a context read none. Rows of several tasks may have one for another task.
        """
        if self.output.crf or self.context_tokens > 0:
            return [None] * len(rows)
        texts = [context_texts(row) for row in rows]
        return contexts_of(texts, tokenizer, max_length=self.max_length, overlap=self.doc_stride)

    def _split(
        self, rows: Sequence[Row], contexts: Sequence[Context | None], tokenizer: "PreTrainedTokenizerBase"
    ) -> list[SubWords]:
        """Returns the sub-words of each row, of which every word fits into a window."""
        longest = self.window_rules(tokenizer).room
        split = split_words([row["words"] for row in rows], tokenizer, longest=longest)
        for row, context in enumerate(contexts):
            if context is not None:
                split[row] = split[row].shortened(context.longest_word)
        return split

    def _windows(
        self,
        all_documents: Sequence[range],
        split: Sequence[SubWords],
        contexts: Sequence[Context | None],
        rules: WindowRules,
    ) -> Iterator[list[WordWindow]]:
        """Yields the windows of each row, document by document, because a window may hold tokens of the rows around."""
        for document in all_documents:
            context = contexts[document.start]
            if context is None:
                yield from document_windows([split[row] for row in document], rules)
            else:  # a row with a context of its own is a document of its own
                yield list(context.windows(split[document.start]))

    def _check_merging(self, windows: Sequence[WordWindow]) -> None:
        """Raises DataError if windows read the same words, and the label by which they are compared does not exist."""
        if "O" in self.output.labels:
            return
        parts = {window.words for window in windows}  # of the text
        if len(parts) < len(windows):
            raise DataError(
                f"a context is too long for max_length = {self.max_length}, and its windows are compared by the label "
                "'O', which the model does not have. Raise max_length, shorten the context, or name the label of "
                "supported words 'O'"
            )

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
        if self.output.reads_context:
            return (
                f"{cuts.share(cuts.cut_rows)} rows {have} a question, or a word, that is too long for {limit} beside "
                "its context. Only its beginning is read",
            )
        return (
            f"{cuts.share(cuts.cut_rows)} rows {have} a word that alone is longer than {limit}. Only the beginning of "
            "such words is read, and each of them is tagged",
        )

    def token_spans(self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase") -> TokenSpans:
        """Returns whole words for tokens, and None for tokens of neighbouring rows."""
        contexts = self._contexts(rows, tokenizer)
        split = self._split(rows, contexts, tokenizer)
        rules = self.window_rules(tokenizer)
        # Windows with the index of each token in ``tokens`` instead of ids, and -1 for a special token.
        rules = replace(rules, prefix=(-1,) * len(rules.prefix), suffix=(-1,) * len(rules.suffix))
        spans: list[list[TokenSpan | None]] = []
        for document in self._documents(rows):
            tokens: list[tuple[int, TokenSpan]] = []  # of the whole document, with their rows
            numbered: list[SubWords] = []
            context = contexts[document.start]
            if context is not None:
                tokens += [(document.start, span) for span in context.spans]
                context = context.numbered()
            for row in document:
                first = len(tokens)
                tokens += [(row, span) for span in _sub_word_spans(rows[row], split[row])]
                numbered.append(replace(split[row], ids=range(first, len(tokens))))
            whole = range(len(document))
            for row, windows in zip(document, self._windows([whole], numbered, [context], rules), strict=True):
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


def _lost_tokens(text: SubWords, context: Context | None) -> int:
    """Returns the number of tokens of a row's words and question that no window holds."""
    if context is None:
        return text.lost
    return text.lost + len(context.question) - len(context.kept_question(text))


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
