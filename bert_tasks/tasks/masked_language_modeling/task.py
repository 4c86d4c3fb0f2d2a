"""Masked language modelling: a model predicts the tokens that were masked, in training and where a text asks for it.

Owns the settings, windows, loss, predictions and metrics of the task. Which tokens are masked is in masking.py.

Shape legend: B windows, R masked tokens, V vocabulary, K candidates of a masked token.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import groupby, islice
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase

from bert_tasks.data.columns import Column, Row
from bert_tasks.data.profile import ColumnProfile, percentile
from bert_tasks.data.table import RowTable
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.heads import PretrainingHead, PretrainingOutput, VocabularyHead, VocabularyOutput
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import DataError, UsageError
from bert_tasks.tasks.base import NOT_WRITTEN, Feature, FeatureKeys, LossTerm, OutputKind, Part, Prediction
from bert_tasks.tasks.masked_language_modeling.masking import mask_features
from bert_tasks.tasks.masked_language_modeling.report import MaskedReport, measure
from bert_tasks.tasks.masked_language_modeling.scoring import Score, TextScore, scored_copies, text_score
from bert_tasks.tasks.masked_language_modeling.sentences import (
    NO_PAIR,
    PAIR,
    SPLITTER,
    pair_feature,
    sentence_windows,
    split_sentences,
)
from bert_tasks.tasks.masked_language_modeling.windows import DocumentTokens, Window, cut_documents
from bert_tasks.tasks.shared.card import Card
from bert_tasks.tasks.shared.corpus import MASK, CorpusTask, mask_token_id, tokenized_texts, window_feature
from bert_tasks.tasks.shared.detection import Detection, Suggestion, TaskGuess, UserHints, count_pieces
from bert_tasks.tasks.shared.fitting import Fitting
from bert_tasks.tasks.shared.hf_config import HFConfig
from bert_tasks.tasks.shared.outputs import vocabulary_output
from bert_tasks.tasks.shared.rendering import Rendering
from bert_tasks.tasks.shared.windows import PairFrame, Windows

MASKED_LM = "masked_lm"  # the term of the loss
PAIR_TERMS = {"nsp": "next_sentence", "sop": "sentence_order"}
_SHORTEST_PAIR = 8
_FEWEST_WORDS = 2  # of a text, on average; less are names
_LANGUAGE = re.compile(r"[a-z]{2,3}([-_][A-Za-z]+)*")
_CONTEXT = 8  # tokens on both sides of a masked token that a report shows
_NO_TOKEN = -1


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A token for a masked one, with the field names of transformers' fill-mask pipeline.

    Attributes:
        score: its probability.
        token: its id.
        token_str: its text.
        sequence: the text of the row with it instead of the mask; "" where a text has no mask and tokens were masked
            to measure the model.
    """

    score: float
    token: int
    token_str: str
    sequence: str


@dataclass(frozen=True, kw_only=True)
class MaskedToken:
    """What is predicted for a token that was masked to measure the model.

    Attributes:
        candidates: the most probable tokens, best first.
        label: the id of the token that was masked.
        log_probability: of the label.
        context: ids of the tokens before and after it, as the model saw them.
        label_str, before, after: the texts of both, the latter two of one masked token of a row only.
    """

    candidates: tuple[Candidate, ...]
    label: int
    log_probability: float = 0.0
    context: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    label_str: str = ""
    before: str = ""
    after: str = ""

    @property
    def is_correct(self) -> bool:
        """Whether the best candidate is the token that was masked."""
        return self.candidates[0].token == self.label


@dataclass(frozen=True, kw_only=True)
class MaskPrediction(Prediction):
    """The prediction for one row.

    Attributes:
        masks: for each mask of the text, in its order, the most probable tokens, best first.
        row_text: the text of the row.
        measured: the tokens that were masked to measure the model.
        pairs: of each window that was made a pair to measure the model, its label and the prediction.
    """

    masks: tuple[tuple[Candidate, ...], ...]
    row_text: str = field(default="", metadata=NOT_WRITTEN)
    measured: tuple[MaskedToken, ...] = field(default=(), metadata=NOT_WRITTEN)
    pairs: tuple[tuple[int, int], ...] = field(default=(), metadata=NOT_WRITTEN)


class MaskedDetection(Detection):
    """How ``init`` recognises rows of masked language modelling."""

    task: "MaskedLanguageModeling"
    row_needs: ClassVar[str] = "one column of texts, and no other"

    def guess(self, profiles: Sequence[ColumnProfile], rows: Sequence[Row], hints: UserHints) -> TaskGuess | None:
        candidates = [one for one in profiles if one.name in hints.texts] if hints.texts else list(profiles)
        if hints.label is not None or len(candidates) != 1 or (hints.texts and hints.task is None):
            return None
        (column,) = candidates
        if column.is_number or column.nested or column.distinct < 2 or column.words < _FEWEST_WORDS:
            return None
        return TaskGuess(
            task=self.task.name,
            columns={"text": column.name},
            words=percentile([count_pieces(row, [column.name]) for row in rows]),
            reasons=(f"{column.name}: texts of {column.words:.0f} words on average, and nothing to learn beside them",),
        )

    def settings(self, words: int, longest: int) -> list[Suggestion]:
        return [
            Suggestion(
                "max_length", min(self.task.max_length, longest), "tokens of a window; longer texts are several"
            ),
            Suggestion("whole_word_mask", True, "masks whole words instead of single tokens", is_active=False),
        ]


class MaskedFormats(Card, Rendering, HFConfig):
    """Masked language modelling on cards, in files of predictions and in a config of transformers."""

    task: "MaskedLanguageModeling"
    default_head: ClassVar[Literal["masked-lm"]] = "masked-lm"
    has_labels: ClassVar[bool] = False
    pipeline_tag: ClassVar[str] = "fill-mask"

    example_rows: ClassVar[Sequence[Row]] = [
        {"text": "Paris is the capital of [MASK]."},
        {"text": "We waited an hour and the soup was [MASK]."},
        {"text": "The [MASK] leaves at nine from platform [MASK]."},
    ]

    @property
    def prediction_type(self) -> type[Prediction]:
        return MaskPrediction if self.task.score == "none" else TextScore

    def with_texts(
        self, predictions: Sequence[Any], tokenizer: PreTrainedTokenizerBase
    ) -> Sequence[MaskPrediction | TextScore]:
        """The same with the texts of tokens; of those that were masked, the least probable one of a row gets its."""
        if self.task.score != "none":
            return predictions
        text = lru_cache(maxsize=None)(lambda token: str(tokenizer.decode([token])))
        return [_with_texts(prediction, tokenizer, text) for prediction in predictions]

    @property
    def head(self) -> Literal["masked-lm", "pretraining"]:
        return "masked-lm" if self.task.sentence_objective == "none" else "pretraining"


class MaskedFitting(Fitting, Windows):
    """What training needs to know of masked language modelling, and what the model reads for its predictions."""

    task: "MaskedLanguageModeling"
    sample: ClassVar[Literal["row", "window"]] = "window"

    def check_split(self, rows: RowTable, source: str) -> None:
        if self.task.sentence_language:
            split_sentences((), self.task.sentence_language)
        if self.task.sentence_objective == "nsp" and len(rows) < 2:
            raise DataError(
                f"{source}: next sentence prediction needs at least two documents, because a sentence that does not "
                'follow comes from another one; give more documents, or set sentence_objective = "sop"'
            )

    @property
    def libraries(self) -> tuple[str, ...]:
        return (SPLITTER,) if self.task.sentence_language else ()

    def copies(self, feature: Feature, tokenizer: PreTrainedTokenizerBase) -> Iterable[Feature]:
        if self.task.score == "none":
            return (feature,)
        return scored_copies(feature, mask_id=mask_token_id(tokenizer, self.task.name), score=self.task.score)


@dataclass(frozen=True, kw_only=True)
class MaskedLanguageModeling(CorpusTask[Any]):
    """Settings of masked language modelling.

    Attributes:
        max_ngram: see ``MaskingRule``.
        mask_smoothing: mask rare tokens more often in training, see ``MaskingRule``. Evaluation ignores it.
        masking: ``dynamic`` masks other tokens in each epoch, ``static`` always the same ones.
        fill: what a window does at the end of a document: ``document`` ends it there; ``across`` continues it with a
            separator and the next document (RoBERTa's FULL-SENTENCES), except for texts with a mask.
        sentence_objective: what is learnt of two sentences beside the masked tokens: nothing, whether the second
            follows the first (``nsp``, BERT), or which of them is the first (``sop``, ALBERT). Windows then hold whole
            sentences: the row's ``sentences``, or the lines of its text.
        sentence_language: the code of a language, such as ``en``, where sentences are not given: the library sentencex
            (extra ``sentences``) then cuts each of the row's ``sentences``, or each line of its text, into sentences.
        top_k: candidates for each mask.
        score: what ``predict`` returns for a text instead of candidates for its masks: ``pppl``, its pseudo-perplexity,
            or ``pll-word-l2r``, its pseudo-log-likelihood (see scoring.py). Each token takes a forward pass of its
            window.
    """

    name: ClassVar[str] = "masked-language-modeling"
    output_kind: ClassVar[OutputKind] = "vocabulary"
    primary_metric: ClassVar[str] = "perplexity"
    parts: ClassVar[tuple[type[Part], ...]] = (MaskedDetection, MaskedFormats, MaskedFitting, MaskedReport)
    max_ngram: int = 1
    mask_smoothing: float = 0.0
    masking: Literal["dynamic", "static"] = "dynamic"
    fill: Literal["document", "across"] = "document"
    sentence_objective: Literal["none", "nsp", "sop"] = "none"
    sentence_language: str = ""
    top_k: int = 5
    score: Score = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}, expected at least 1")
        if self.sentence_objective != "none" and self.fill == "across":
            raise ValueError('sentence_objective makes pairs inside a document: it excludes fill = "across"')
        if self.sentence_language and self.sentence_objective == "none":
            raise ValueError("sentence_language cuts texts into sentences for pairs of them: set sentence_objective")
        if self.sentence_language and not _LANGUAGE.fullmatch(self.sentence_language):
            raise ValueError(
                f"sentence_language is {self.sentence_language!r}, expected a code such as 'en' or 'pt-br'"
            )
        if self.sentence_objective != "none" and self.max_length < _SHORTEST_PAIR:
            raise ValueError(
                f"max_length is {self.max_length}, expected at least {_SHORTEST_PAIR} for pairs of sentences"
            )

    @property
    def columns(self) -> tuple[Column, ...]:
        if self.sentence_objective == "none":
            return super().columns
        return (*super().columns, Column(name="sentences", kind="texts", required=False))

    # The head, here and in transformers.

    def head(self, config: EncoderConfig) -> VocabularyHead:
        """Returns the head of masked tokens, with pairs if there is a sentence objective.

        Raises:
            UsageError: Models of this family are not trained with the sentence objective.
        """
        if self.sentence_objective == "none":
            return VocabularyHead(config)
        objectives = config.head.pair_objectives
        if objectives and self.sentence_objective not in objectives:
            raise UsageError(
                f'{self.name}: sentence_objective = "{self.sentence_objective}" is not what the head of this family of '
                f"models is for; set it to {' or '.join(map(repr, objectives))}, or to 'none'"
            )
        return PretrainingHead(config)

    # Features.

    def features(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[Feature]:
        """With a sentence objective windows hold whole sentences."""
        if self.sentence_objective == "none":
            return super().features(rows, tokenizer)
        rules, mask_id = self.window_rules(tokenizer), mask_token_id(tokenizer, self.name)
        room, features = self.max_length - PairFrame.of(tokenizer).size, list[Feature]()
        sentences = [_sentences(row, self.sentence_language) for row in rows]
        tokens = iter(tokenized_texts([sentence for row in sentences for sentence in row], tokenizer))
        for number, row in enumerate(sentences):
            for window in sentence_windows(list(islice(tokens, len(row))), document=number, room=room):
                starts = [len(rules.prefix) + start for start in window.starts]
                features.append({**window_feature(window, rules, mask_id), "sentence_starts": starts})
        return features

    def windows(
        self, documents: Sequence[DocumentTokens], room: int, tokenizer: PreTrainedTokenizerBase
    ) -> Iterator[Window]:
        """The windows of neighbouring documents; what is predicted for a text depends on no other text."""
        if self.fill == "document" or self.score != "none":
            yield from cut_documents(documents, room=room)
            return
        first = 0
        for has_mask, group in groupby(documents, key=lambda document: tokenizer.mask_token_id in document.ids):
            block = list(group)
            separator = None if has_mask else tokenizer.sep_token_id
            for window in cut_documents(block, room=room, separator=separator):
                yield replace(window, document=first + window.document)
            first += len(block)

    def prepare(
        self,
        features: Sequence[Feature],
        keys: FeatureKeys,
        corpus: Sequence[Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
    ) -> Sequence[Feature]:
        """The features with tokens masked, and these tokens as labels.

        Raises:
            UsageError: a ``score`` is set.
        """
        if self.score != "none":
            raise UsageError(f'score = "{self.score}" is for predictions: set score = "none" to train or to evaluate')
        paired = None
        if self.sentence_objective != "none":
            paired = partial(
                pair_feature,
                corpus=corpus,
                frame=PairFrame.of(tokenizer),
                objective=self.sentence_objective,
                max_length=self.max_length,
            )
        static = self.masking == "static"
        return mask_features(features, keys, corpus, tokenizer, self.rule, static=static, paired=paired)

    # The loss.

    def loss(self, logits: Any, batch: PackedBatch) -> tuple[LossTerm, ...]:
        """Cross entropy of the masked tokens of prepared windows, and of their pairs."""
        vocabulary, counts = vocabulary_output(logits), batch.layout.gather_counts
        if not all(batch.label_counts):
            kept = [count if labels else 0 for count, labels in zip(counts, batch.label_counts, strict=True)]
            sizes = [size for count, part in zip(counts, kept, strict=True) for size in (part, count - part)]
            vocabulary = VocabularyOutput.cat(vocabulary.split(sizes)[::2])
        total = vocabulary.cross_entropy(batch.labels.long())
        masked = LossTerm(name=MASKED_LM, total=total, count=total.new_full((), len(vocabulary)).detach())
        # A teacher's head may have pairs that its student does not learn, or none.
        if self.sentence_objective == "none" or not isinstance(logits, PretrainingOutput):
            return (masked,)
        labels = batch.fields.get(PAIR)
        if labels is None:
            labels = logits.pairs.new_full((len(logits.pairs),), NO_PAIR)
        total = cross_entropy(logits.pairs, labels.long(), ignore_index=int(NO_PAIR), reduction="sum")
        count = (labels != NO_PAIR).sum().to(total.dtype)
        return masked, LossTerm(name=PAIR_TERMS[self.sentence_objective], total=total, count=count)

    def counts(self, features: Sequence[Feature]) -> dict[str, float]:
        """The masked tokens, and the pairs."""
        masked = {MASKED_LM: super().counts(features)[self.name]}
        if self.sentence_objective == "none":
            return masked
        pairs = sum(_pair_label(feature) != NO_PAIR for feature in features)
        return masked | {PAIR_TERMS[self.sentence_objective]: float(pairs)}

    # Predictions.

    def compact_logits(self, logits: Sequence[Any], features: Sequence[Feature]) -> Sequence[Tensor]:
        """``[R, 2 + 2 K + context]`` for each window: label, its log-probability, the best ids, their probabilities.

        The ids around the token follow where it has a label. With a sentence objective the first row is the pair's:
        its label and the prediction.
        """
        outputs = [vocabulary_output(one) for one in logits]
        whole = VocabularyOutput.cat(outputs)
        if self.score != "none":  # [R] for each window
            masked = [one["labels"] for one in features if one["labels"] is not None]
            ids = torch.tensor([label for labels in masked for label in labels], dtype=torch.int64)
            return torch.split(whole.log_probabilities(ids.to(whole.device)), [len(one) for one in outputs])
        notes = [_notes(feature, len(output)) for feature, output in zip(features, outputs, strict=True)]
        table = torch.tensor([row for one in notes for row in one]).view(len(whole), 2 + 2 * _CONTEXT)
        table = table.to(whole.device)
        labels, parts = table[:, 0], []
        for rows, label_ids in zip(whole.log_softmax(), torch.split(labels, whole.chunk_rows), strict=True):
            best = rows.topk(min(self.top_k, rows.shape[1]), dim=1)
            of_label = rows.gather(1, label_ids.clamp(min=0).unsqueeze(1))
            parts.append(torch.cat([of_label, best.indices.to(rows.dtype), best.values.exp()], dim=1))
        columns = torch.cat(parts)
        columns = torch.cat([labels.to(columns.dtype).unsqueeze(1), columns, table[:, 1:].to(columns.dtype)], dim=1)
        of_windows = torch.split(columns, [len(one) for one in outputs])
        if self.sentence_objective == "none":
            return of_windows
        pairs = zip(logits, features, of_windows, strict=True)
        return [torch.cat([_pair_row(one, feature, rows), rows]) for one, feature, rows in pairs]

    def decode(
        self, compact: Sequence[Tensor], features: Sequence[Feature], rows: Sequence[Row]
    ) -> list[MaskPrediction | TextScore]:
        windows = Counter(feature["row"] for feature in features)  # none where a row is in the window of another one
        parts = iter(compact)
        predictions: list[MaskPrediction | TextScore] = []
        for number, row in enumerate(rows):
            count = windows[number]
            if self.score != "none":
                values = [value for _ in range(count) for value in next(parts).tolist()]
                predictions.append(TextScore(score=text_score(values, self.score), tokens=len(values)))
                continue
            of_row, pairs = [next(parts).tolist() for _ in range(count)], []
            if self.sentence_objective != "none":
                pairs = [(int(label), int(found)) for (label, found, *_), *_ in of_row if label != NO_PAIR]
                of_row = [rows[1:] for rows in of_row]
            tokens = [_masked_token(values) for rows in of_row for values in rows]
            predictions.append(
                MaskPrediction(
                    masks=tuple(token.candidates for token in tokens if token.label == _NO_TOKEN),
                    row_text=row["text"],
                    measured=tuple(token for token in tokens if token.label != _NO_TOKEN),
                    pairs=tuple(pairs),
                )
            )
        return predictions

    # Metrics and reports.

    def metrics(self, predictions: Sequence[MaskPrediction], rows: Sequence[Row]) -> dict[str, float]:
        """Perplexity (exp of the mean cross entropy) and accuracy of the masked tokens, and accuracy of the pairs.

        Raises:
            DataError: no token was masked.
        """
        measured = [mask for one in predictions for mask in one.measured]
        if not measured:
            raise DataError("no token was masked: the texts are empty")
        values = measure(predictions).values()
        metrics = {name: math.inf if value is None else value for name, value in values.items()}
        if pairs := [label == predicted for one in predictions for label, predicted in one.pairs]:
            metrics[f"{PAIR_TERMS[self.sentence_objective]}_accuracy"] = sum(pairs) / len(pairs)
        return metrics


def _sentences(row: Row, language: str) -> Sequence[str]:
    """The sentences of a row, or the lines of its text, which alone can tell masks from words that look like them."""
    sentences: Sequence[str] | None = row.get("sentences")
    if sentences is None or MASK.search(row["text"]):
        sentences = row["text"].splitlines()
    return split_sentences(sentences, language) if language else sentences


def _pair_label(feature: Feature) -> float:
    return feature.get("fields", {}).get(PAIR, (NO_PAIR,))[0]


def _pair_row(logits: Any, feature: Feature, rows: Tensor) -> Tensor:
    """``[1, width of rows]`` the label of a pair and the prediction; no label where the logits have no pair."""
    row = rows.new_zeros(1, rows.shape[1])
    if isinstance(logits, PretrainingOutput):
        row[0, 0], row[0, 1] = _pair_label(feature), logits.pairs.argmax()
    else:
        row[0, 0] = NO_PAIR
    return row


def _notes(feature: Feature, count: int) -> list[list[int]]:
    """For each of ``count`` tokens that are read its label and, if it has one, the ids on both sides of it."""
    positions, labels = feature.get("gather_positions"), feature.get("labels")
    if not labels or positions is None:
        return [[_NO_TOKEN] * (2 + 2 * _CONTEXT)] * count
    ends = [_NO_TOKEN] * _CONTEXT
    padded = [*ends, *feature["input_ids"], *ends]
    return [
        [int(label), *padded[position : position + 2 * _CONTEXT + 1]]
        for position, label in zip(positions, labels, strict=True)
    ]


def _masked_token(values: Sequence[float]) -> MaskedToken:
    """From a row of ``compact_logits``."""
    label, log_probability = int(values[0]), values[1]
    around = 2 * _CONTEXT + 1
    best, window = values[2:-around], list(map(int, values[-around:]))
    before, after = (
        tuple(token for token in part if token != _NO_TOKEN) for part in (window[:_CONTEXT], window[_CONTEXT + 1 :])
    )
    pairs = zip(best[: len(best) // 2], best[len(best) // 2 :], strict=True)
    candidates = tuple(Candidate(score=score, token=int(token), token_str="", sequence="") for token, score in pairs)
    return MaskedToken(candidates=candidates, label=label, log_probability=log_probability, context=(before, after))


def _with_texts(prediction: MaskPrediction, tokenizer: PreTrainedTokenizerBase, text: Any) -> MaskPrediction:
    def named(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
        return tuple(replace(candidate, token_str=text(candidate.token)) for candidate in candidates)

    masks = []
    for match, candidates in zip(MASK.finditer(prediction.row_text), prediction.masks, strict=False):
        before, after = prediction.row_text[: match.start()], prediction.row_text[match.end() :]
        masks.append(tuple(replace(one, sequence=_filled(before, one, after, tokenizer)) for one in named(candidates)))
    hardest = min(prediction.measured, key=lambda mask: mask.log_probability, default=None)
    measured = []
    for mask in prediction.measured:
        before, after = (str(tokenizer.decode(list(ids))) if mask is hardest else "" for ids in mask.context)
        label = text(mask.label)
        measured.append(replace(mask, candidates=named(mask.candidates), label_str=label, before=before, after=after))
    return replace(prediction, masks=tuple(masks), measured=tuple(measured))


def _filled(before: str, candidate: Candidate, after: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text with the candidate in it; a piece within a word is set behind what is before it."""
    piece = candidate.token_str.strip()
    whole = str(tokenizer.convert_ids_to_tokens(candidate.token))
    if whole.startswith("##"):  # of WordPiece
        return before.rstrip() + whole[2:] + after
    return before + piece + after
