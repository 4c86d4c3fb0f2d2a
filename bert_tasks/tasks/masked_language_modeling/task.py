"""Masked language modelling of tokens masked in training or open in a text.

Shape legend: B windows, R masked tokens, V vocabulary, K candidates of a masked token.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from bert_tasks.data.columns import Column, Row
from bert_tasks.data.profile import ColumnProfile, percentile
from bert_tasks.data.table import RowTable
from bert_tasks.encoder import heads
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.heads import Head
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import DataError, UsageError
from bert_tasks.tasks.base import Feature, FeatureKeys, LossTerm, OutputKind, Part, Prediction, require
from bert_tasks.tasks.masked_language_modeling.masking import mask_features
from bert_tasks.tasks.masked_language_modeling.predictions import (
    MASK,
    Candidate,
    MaskedReport,
    MaskedToken,
    MaskPrediction,
    Score,
    TextScore,
    check_masks,
    measure,
    scored_copies,
    text_score,
    with_texts,
)
from bert_tasks.tasks.masked_language_modeling.windows import (
    NO_PAIR,
    PAIR,
    SPLITTER,
    DocumentTokens,
    Window,
    cut_documents,
    pair_feature,
    sentence_windows,
    split_sentences,
)
from bert_tasks.tasks.shared.card import Card
from bert_tasks.tasks.shared.corpus import CorpusTask, mask_token_id, tokenized_texts, window_feature
from bert_tasks.tasks.shared.detection import Detection, Suggestion, TaskGuess, UserHints, count_pieces
from bert_tasks.tasks.shared.fitting import Fitting
from bert_tasks.tasks.shared.hf_config import HFConfig
from bert_tasks.tasks.shared.outputs import vocabulary_output
from bert_tasks.tasks.shared.rendering import Rendering
from bert_tasks.tasks.shared.special_tokens import Frame
from bert_tasks.tasks.shared.windows import Windows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MASKED_LM = "masked_lm"  # the term of the loss
PAIR_TERMS = {"nsp": "next_sentence", "sop": "sentence_order"}
_SHORTEST_PAIR = 8
_FEWEST_WORDS = 2  # in a text on average, because shorter texts are names
_LANGUAGE = re.compile(r"[a-z]{2,3}([-_][A-Za-z]+)*|")
_CONTEXT = 8  # tokens on both sides of a masked token that a report shows
_NO_TOKEN = -1


class MaskedDetection(Detection):
    """Detects rows of masked language modelling for ``init``."""

    task: "MaskedLanguageModeling"
    row_needs: ClassVar[str] = "one column of texts, and no other"

    def guess(self, profiles: Sequence[ColumnProfile], rows: Sequence[Row], hints: UserHints) -> TaskGuess | None:
        columns = [column for column in profiles if column.name in hints.texts]
        if not hints.texts:  # ids and constants say nothing about a text
            columns = [column for column in profiles if not column.is_id and column.distinct > 1]
        if hints.label is not None or len(columns) != 1 or (hints.texts and hints.task is None):
            return None
        (column,) = columns
        if column.is_number or column.nested or column.distinct < 2 or column.words < _FEWEST_WORDS:
            return None
        return TaskGuess(
            task=self.task.name,
            columns={"text": column.name},
            words=percentile([count_pieces(row, [column.name]) for row in rows]),
            reasons=(f"{column.name}: texts of {column.words:.0f} words on average, and nothing to learn beside them",),
        )

    def settings(self, words: int, longest: int) -> list[Suggestion]:
        length = min(self.task.max_length, longest)
        return [
            Suggestion("max_length", length, "tokens of a window. Longer texts have several windows"),
            Suggestion("whole_word_mask", True, "masks whole words instead of single tokens", is_active=False),
        ]


class MaskedFormats(Card, Rendering, HFConfig):
    """Masked language modelling on cards, in prediction files and HF configs."""

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

    def with_texts(self, predictions: Sequence[Any], tokenizer: "PreTrainedTokenizerBase") -> Sequence[Any]:
        return with_texts(predictions, tokenizer) if self.task.score == "none" else predictions

    def check_rows(self, rows: Sequence[Row]) -> None:
        if self.task.score == "none":
            check_masks([row["text"] for row in rows], self.task.top_k)

    @property
    def head(self) -> Literal["masked-lm", "pretraining"]:
        return "masked-lm" if self.task.sentence_objective == "none" else "pretraining"


class MaskedFitting(Fitting, Windows):
    """Training of masked language modelling, and the inputs of prediction."""

    task: "MaskedLanguageModeling"
    sample: ClassVar[Literal["row", "window"]] = "window"

    def check_split(self, rows: RowTable, source: str) -> None:
        if self.task.sentence_language:
            split_sentences((), self.task.sentence_language)
        if self.task.sentence_objective == "nsp" and len(rows) < 2:
            raise DataError(
                f"{source}: next sentence prediction needs at least two documents, because a sentence that does not "
                'follow comes from another one. Add documents, or set sentence_objective = "sop"'
            )

    @property
    def libraries(self) -> tuple[str, ...]:
        return (SPLITTER,) if self.task.sentence_language else ()

    def copies(self, feature: Feature, tokenizer: "PreTrainedTokenizerBase") -> Iterable[Feature]:
        if self.task.score == "none":
            return (feature,)
        return scored_copies(feature, mask_id=mask_token_id(tokenizer, self.task.name), score=self.task.score)


@dataclass(frozen=True, kw_only=True)
class MaskedLanguageModeling(CorpusTask[Any]):
    """Documents whose tokens are masked and predicted.

    Attributes:
        mask_smoothing: Mask rare tokens more often in training. A token that occurs ``count`` times has the weight
            ``max(count, 1) ** -mask_smoothing``. Evaluation ignores it.
        masking: ``dynamic`` masks other tokens in each epoch, ``static`` always the same ones.
        fill: ``document`` ends a window at the end of a document. ``across`` continues it with a separator and the next
            document (RoBERTa's FULL-SENTENCES), except for texts with a mask.
        sentence_objective: Objective for two sentences, in addition to the masked tokens. ``nsp`` is whether the second
            follows the first (BERT), and ``sop`` which of them is the first (ALBERT). Windows then hold whole
            sentences, which are the row's ``sentences`` or the lines of its text.
        sentence_language: Code of a language, such as ``en``, if rows are not cut into sentences. The library sentencex
            (extra ``sentences``) then cuts each of the row's ``sentences``, or each line of its text, into sentences.
        top_k: candidates for each mask.
        score: what ``predict`` returns for a text instead of candidates for its masks: ``pppl``, its pseudo-perplexity,
            or ``pll-word-l2r``, its pseudo-log-likelihood. Each token takes a forward pass of its window.

    Example:
        >>> TaskModel.from_pretrained(base, task=MaskedLanguageModeling).predict("The soup was [MASK].")
    """

    name: ClassVar[str] = "masked-language-modeling"
    output_kind: ClassVar[OutputKind] = "vocabulary"
    primary_metric: ClassVar[str] = "perplexity"
    parts: ClassVar[tuple[type[Part], ...]] = (MaskedDetection, MaskedFormats, MaskedFitting, MaskedReport)
    mask_smoothing: float = 0.0
    masking: Literal["dynamic", "static"] = "dynamic"
    fill: Literal["document", "across"] = "document"
    sentence_objective: Literal["none", "nsp", "sop"] = "none"
    sentence_language: str = ""
    top_k: int = 5
    score: Score = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.top_k >= 1, f"top_k is {self.top_k}, expected at least 1")
        language = self.sentence_language
        if self.sentence_objective == "none":
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

    @property
    def columns(self) -> tuple[Column, ...]:
        if self.sentence_objective == "none":
            return super().columns
        return (*super().columns, Column(name="sentences", kind="texts", required=False))

    def head(self, config: EncoderConfig) -> Head:
        """Returns the head of masked tokens, with pairs if there is a sentence objective.

        Raises:
            UsageError: Models of this family are not trained with the sentence objective.
        """
        if self.sentence_objective == "none":
            return heads.VocabularyHead(config)
        objectives = config.head.pair_objectives
        if objectives and self.sentence_objective not in objectives:
            raise UsageError(
                f'{self.name}: sentence_objective = "{self.sentence_objective}" does not suit the head of this family. '
                f"Set it to {' or '.join(map(repr, objectives))}, or to 'none'"
            )
        return heads.PretrainingHead(config)

    # Features.

    def features(self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase") -> list[Feature]:
        if self.sentence_objective == "none":
            return super().features(rows, tokenizer)
        rules, mask_id = self.window_rules(tokenizer), mask_token_id(tokenizer, self.name)
        room, features = Frame.of(tokenizer, texts=2).room(self.max_length), list[Feature]()
        sentences = [_sentences(row, self.sentence_language) for row in rows]
        tokens = iter(tokenized_texts([sentence for row in sentences for sentence in row], tokenizer))
        for number, row in enumerate(sentences):
            for window in sentence_windows(list(islice(tokens, len(row))), document=number, room=room):
                starts = [len(rules.prefix) + start for start in window.starts]
                features.append({**window_feature(window, rules, mask_id), "sentence_starts": starts})
        return features

    def windows(
        self, documents: Sequence[DocumentTokens], room: int, tokenizer: "PreTrainedTokenizerBase"
    ) -> Iterator[Window]:
        """Yields the windows of neighbouring documents, of single texts in prediction."""
        if self.fill == "document" or self.score != "none":
            yield from cut_documents(documents, room=room)
            return
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
        if self.score != "none":
            raise UsageError(f'score = "{self.score}" is for predictions. Set score = "none" to train or to evaluate')
        make_pair = None
        if self.sentence_objective != "none":
            make_pair = partial(
                pair_feature,
                corpus=corpus,
                frame=Frame.of(tokenizer, texts=2),
                objective=self.sentence_objective,
                max_length=self.max_length,
            )
        static = self.masking == "static"
        return mask_features(features, keys, corpus, tokenizer, self.rule, static=static, make_pair=make_pair)

    # The loss.

    def loss(self, logits: Any, batch: PackedBatch) -> tuple[LossTerm, ...]:
        vocabulary, counts = vocabulary_output(logits), batch.layout.gather_counts
        if not all(batch.label_counts):  # windows that were not prepared have the masks of their texts
            kept = [count if labels else 0 for count, labels in zip(counts, batch.label_counts, strict=True)]
            sizes = [size for count, labels in zip(counts, kept, strict=True) for size in (labels, count - labels)]
            vocabulary = heads.VocabularyOutput.cat(vocabulary.split(sizes)[::2])
        total = vocabulary.cross_entropy(batch.labels.long())
        masked = LossTerm(name=MASKED_LM, total=total, count=total.new_full((), len(vocabulary)).detach())
        # A teacher's head may have pairs that its student does not learn, or none.
        if self.sentence_objective == "none" or not isinstance(logits, heads.PretrainingOutput):
            return (masked,)
        labels = batch.fields.get(PAIR, logits.pairs.new_full((len(logits.pairs),), NO_PAIR))
        total = F.cross_entropy(logits.pairs, labels.long(), ignore_index=int(NO_PAIR), reduction="sum")
        count = (labels != NO_PAIR).sum().to(total.dtype)
        return masked, LossTerm(name=PAIR_TERMS[self.sentence_objective], total=total, count=count)

    def counts(self, features: Sequence[Feature]) -> dict[str, float]:
        masked = {MASKED_LM: super().counts(features)[self.name]}
        if self.sentence_objective == "none":
            return masked
        pairs = sum(_pair_label(feature) != NO_PAIR for feature in features)
        return masked | {PAIR_TERMS[self.sentence_objective]: float(pairs)}

    # Predictions.

    def compact_logits(self, logits: Sequence[Any], features: Sequence[Feature]) -> Sequence[Tensor]:
        """Returns ``[R, 2 + 2 K + context]`` for each window.

        The columns are the label, its log-probability, the best ids, and their probabilities. The ids around the token
        follow if it has a label. With a sentence objective the first row is the label and the prediction of the pair. A
        score needs ``[R]`` log-probabilities only.
        """
        outputs = [vocabulary_output(each) for each in logits]
        whole, sizes = heads.VocabularyOutput.cat(outputs), [len(output) for output in outputs]
        notes = [note for feature, size in zip(features, sizes, strict=True) for note in _notes(feature, size)]
        table = torch.tensor(notes, dtype=torch.int64).view(len(whole), 2 + 2 * _CONTEXT).to(whole.device)
        labels, rows = table[:, 0], []
        if self.score != "none":
            return torch.split(whole.log_probabilities(labels), sizes)
        for scores, ids in zip(whole.log_softmax(), torch.split(labels, whole.chunk_rows), strict=True):
            best = scores.topk(min(self.top_k, scores.shape[1]), dim=1)
            of_label = scores.gather(1, ids.clamp(min=0).unsqueeze(1))
            rows.append(torch.cat([of_label, best.indices.to(scores.dtype), best.values.exp()], dim=1))
        context = table.to(rows[0].dtype)
        windows = torch.split(torch.cat([context[:, :1], torch.cat(rows), context[:, 1:]], dim=1), sizes)
        if self.sentence_objective == "none":
            return windows
        return [
            torch.cat([_pair_row(each, feature, window), window])
            for each, feature, window in zip(logits, features, windows, strict=True)
        ]

    def decode(
        self, compact: Sequence[Tensor], features: Sequence[Feature], rows: Sequence[Row]
    ) -> list[MaskPrediction | TextScore]:
        counts = Counter(feature["row"] for feature in features)  # none if a row is in the window of another one
        remaining = (window.tolist() for window in compact)
        predictions: list[MaskPrediction | TextScore] = []
        for number, row in enumerate(rows):
            windows, pairs = list(islice(remaining, counts[number])), []
            if self.score != "none":
                values = [value for window in windows for value in window]
                predictions.append(TextScore(score=text_score(values, self.score), tokens=len(values)))
                continue
            if self.sentence_objective != "none":
                pairs = [(int(window[0][0]), int(window[0][1])) for window in windows if window[0][0] != NO_PAIR]
                windows = [window[1:] for window in windows]
            tokens = [_masked_token(values) for window in windows for values in window]
            predictions.append(
                MaskPrediction(
                    masks=tuple(token.candidates for token in tokens if token.label == _NO_TOKEN),
                    row_text=row["text"],
                    measured=tuple(token for token in tokens if token.label != _NO_TOKEN),
                    pairs=tuple(pairs),
                )
            )
        return predictions

    def metrics(self, predictions: Sequence[MaskPrediction], rows: Sequence[Row]) -> dict[str, float]:
        """Returns the perplexity and accuracy of masked tokens, and the accuracy of pairs.

        The perplexity is exp of the mean cross entropy.

        Raises:
            DataError: No token was masked.
        """
        if not any(prediction.measured for prediction in predictions):
            raise DataError("no token was masked, because the texts are empty")
        values = measure(predictions).values()
        metrics = {name: math.inf if value is None else value for name, value in values.items()}
        if pairs := [label == predicted for prediction in predictions for label, predicted in prediction.pairs]:
            metrics[f"{PAIR_TERMS[self.sentence_objective]}_accuracy"] = sum(pairs) / len(pairs)
        return metrics


def _sentences(row: Row, language: str) -> Sequence[str]:
    """Returns a row's sentences, or its lines, because only the text can hold masks."""
    sentences: Sequence[str] | None = row.get("sentences")
    if sentences is None or MASK.search(row["text"]):
        sentences = row["text"].splitlines()
    return split_sentences(sentences, language) if language else sentences


def _pair_label(feature: Feature) -> float:
    return feature.get("fields", {}).get(PAIR, (NO_PAIR,))[0]


def _pair_row(logits: Any, feature: Feature, window: Tensor) -> Tensor:
    """Returns ``[1, width of the window's rows]`` with a pair's label and prediction."""
    row = window.new_zeros(1, window.shape[1])
    row[0, 0] = NO_PAIR
    if isinstance(logits, heads.PretrainingOutput):
        row[0, 0], row[0, 1] = _pair_label(feature), logits.pairs.argmax()
    return row


def _notes(feature: Feature, count: int) -> list[list[int]]:
    """Returns the label of each of ``count`` tokens, and the ids around labels."""
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
    """Reads a row of ``compact_logits``."""
    around = 2 * _CONTEXT + 1
    best, window = values[2:-around], list(map(int, values[-around:]))
    scores = zip(best[: len(best) // 2], best[len(best) // 2 :], strict=True)
    before, after = (
        tuple(token for token in side if token != _NO_TOKEN) for side in (window[:_CONTEXT], window[_CONTEXT + 1 :])
    )
    return MaskedToken(
        candidates=tuple(
            Candidate(score=score, token=int(token), token_str="", sequence="") for token, score in scores
        ),
        label=int(values[0]),
        log_probability=values[1],
        context=(before, after),
    )
