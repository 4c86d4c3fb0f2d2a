"""What the tasks that are trained on a corpus share: texts without labels, cut into windows.

Owns how texts become windows, and the settings of masking that all of these tasks have. Which tokens are masked is in
masked_language_modeling/masking.py, where windows begin and end in its windows.py.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from transformers import PreTrainedTokenizerBase

from bert_tasks.data.columns import Column, Row
from bert_tasks.errors import UsageError
from bert_tasks.tasks.base import Feature, PredictionT, Task
from bert_tasks.tasks.masked_language_modeling.masking import NO_WORD, MaskingRule, word_numbers
from bert_tasks.tasks.masked_language_modeling.windows import DocumentTokens, Window, cut_documents
from bert_tasks.tasks.shared.windows import WindowRules

MASK = re.compile(r"\[MASK\]|<mask>")  # what stands for the tokenizer's mask token in a text, whatever it is called


@dataclass(frozen=True, kw_only=True)
class CorpusTask(Task[PredictionT]):
    """Settings of a task that is trained on a corpus.

    Attributes:
        labels: none; leave it out.
        max_length: of a window: documents are cut into windows of this length in tokens, and nothing is dropped.
        mlm_probability, mask_replace_prob, random_replace_prob, whole_word_mask: see ``MaskingRule``.
    """

    mlm_probability: float = 0.15
    mask_replace_prob: float = 0.8
    random_replace_prob: float = 0.1
    whole_word_mask: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.labels:
            raise ValueError(f"labels do not apply to {self.name.replace('-', ' ')}: leave them out")
        _ = self.rule

    @property
    def rule(self) -> MaskingRule:
        """The settings that decide what is masked."""
        own_fields = {field.name for field in fields(self)}
        values = {field.name: getattr(self, field.name) for field in fields(MaskingRule) if field.name in own_fields}
        return MaskingRule(**values)

    @property
    def columns(self) -> tuple[Column, ...]:
        return (Column(name="text", kind="text"),)

    def features(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[Feature]:
        """Windows that fill ``max_length``. ``[MASK]`` and ``<mask>`` in a text are masks, whatever the tokenizer's is.

        Other special tokens written in a text stay plain characters.

        Raises:
            UsageError: the tokenizer has no mask token.
        """
        rules, mask_id = self.window_rules(tokenizer), mask_token_id(tokenizer, self.name)
        documents = tokenized_texts([row["text"] for row in rows], tokenizer)
        return [window_feature(window, rules, mask_id) for window in self.windows(documents, rules.room, tokenizer)]

    def window_rules(self, tokenizer: PreTrainedTokenizerBase) -> WindowRules:
        """The special tokens around a window, and the room between them."""
        return WindowRules.of(tokenizer, max_length=self.max_length, overlap=0)

    def windows(
        self, documents: Sequence[DocumentTokens], room: int, tokenizer: PreTrainedTokenizerBase
    ) -> Iterator[Window]:
        """The windows of neighbouring documents; by default each window is of one document."""
        return cut_documents(documents, room=room)


def mask_token_id(tokenizer: PreTrainedTokenizerBase, task: str) -> int:
    """The id of the mask token.

    Raises:
        UsageError: the tokenizer has none.
    """
    if tokenizer.mask_token_id is None:
        raise UsageError(f"{task}: the tokenizer has no mask token; take the tokenizer of a masked language model")
    return int(tokenizer.mask_token_id)


def tokenized_texts(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[DocumentTokens]:
    """The tokens of each text, without special tokens except masks."""
    tokens_of: dict[int, DocumentTokens] = {}
    masked = [MASK.search(text) is not None for text in texts]
    for with_masks in (False, True):
        numbers = [number for number, has_mask in enumerate(masked) if has_mask == with_masks]
        if not numbers:
            continue
        masked_texts = [MASK.sub(str(tokenizer.mask_token), texts[number]) for number in numbers]
        encoding = tokenizer(
            masked_texts,
            add_special_tokens=False,
            split_special_tokens=not with_masks,
            return_offsets_mapping=True,
            return_attention_mask=False,
            padding=False,
            verbose=False,
        )
        for position, (number, text) in enumerate(zip(numbers, masked_texts, strict=True)):
            words = word_numbers(text, encoding.word_ids(position), encoding["offset_mapping"][position])
            tokens_of[number] = DocumentTokens(ids=encoding["input_ids"][position], words=words)
    return [tokens_of[number] for number in range(len(texts))]


def window_feature(window: Window, rules: WindowRules, mask_id: int) -> Feature:
    """A window with its special tokens, whose masks are read and are no words that could be masked."""
    ids = [*rules.prefix, *window.ids, *rules.suffix]
    words = [*[NO_WORD] * len(rules.prefix), *window.words, *[NO_WORD] * len(rules.suffix)]
    masks = [position for position, token in enumerate(ids) if token == mask_id]
    for position in masks:
        words[position] = NO_WORD
    return Feature(
        row=window.document,
        input_ids=ids,
        token_type_ids=[0] * len(ids),
        gather_positions=masks,
        word_ids=words,
        lost_tokens=0,
    )
