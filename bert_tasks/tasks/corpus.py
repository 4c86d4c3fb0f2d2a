"""Windows of texts without labels and settings of masking, for corpus tasks.

Owns which special tokens in a text are read, which is the mask alone. windows/corpus.py cuts documents into windows,
and masking.py masks their tokens.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from tokenizers import Encoding, Tokenizer

from bert_tasks.data.columns import Column, Row
from bert_tasks.errors import UsageError
from bert_tasks.outputs.features import NO_WORD, Feature
from bert_tasks.outputs.prediction import PredictionT
from bert_tasks.outputs.vocabulary import MASK
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.masking import MaskingRule, word_numbers
from bert_tasks.tasks.windows.corpus import DocumentTokens, Window, cut_documents
from bert_tasks.tasks.windows.words import WindowRules

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class CorpusTask(Task[PredictionT]):
    """Settings of a task that is trained on a corpus.

    Attributes:
        max_length: Maximum length of a window in tokens. Documents are cut into windows, and nothing is dropped.
        mlm_probability: Share of the candidate tokens that is predicted.
        mask_replace_prob: Share of the predicted tokens that the mask token replaces.
        random_replace_prob: Share of the predicted tokens that random tokens replace. The rest is not changed.
        whole_word_mask: Select whole words.
    """

    mlm_probability: float = 0.15
    mask_replace_prob: float = 0.8
    random_replace_prob: float = 0.1
    whole_word_mask: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.rule  # its constructor checks the settings

    @property
    def rule(self) -> MaskingRule:
        """The settings of masking."""
        own = {field.name for field in fields(self)}
        settings: dict[str, Any] = {}
        for field in fields(MaskingRule):
            if field.name in own:  # not every corpus task has every setting of masking
                settings[field.name] = getattr(self, field.name)
        return MaskingRule(**settings)

    @property
    def columns(self) -> tuple[Column, ...]:
        return (Column(name="text", kind="text"),)

    @property
    def sample(self) -> Literal["row", "window", "group"]:
        """Each window, because a document may have any number of them."""
        return "window"

    def features(self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase") -> list[Feature]:
        """Returns windows that fill ``max_length``.

        ``[MASK]`` and ``<mask>`` in a text are masks for every tokenizer. Other special tokens stay plain characters.

        Raises:
            UsageError: The tokenizer has no mask token.
        """
        rules, mask_id = self.window_rules(tokenizer), mask_token_id(tokenizer, self.name)
        documents = tokenized_texts([row["text"] for row in rows], tokenizer)
        windows = self.windows(documents, rules.room, tokenizer)
        return [window_feature(window, rules, mask_id) for window in windows]

    def window_rules(self, tokenizer: "PreTrainedTokenizerBase") -> WindowRules:
        """Returns the special tokens around windows, which do not overlap, so that no token is learned twice."""
        return WindowRules.of(tokenizer, max_length=self.max_length, overlap=0)

    def windows(
        self, documents: Sequence[DocumentTokens], room: int, tokenizer: "PreTrainedTokenizerBase"
    ) -> Iterator[Window]:
        """Yields the windows of neighbouring documents, by default of one document each."""
        return cut_documents(documents, room=room)


def mask_token_id(tokenizer: "PreTrainedTokenizerBase", task: str) -> int:
    """Returns the id of the mask token, or raises UsageError if there is none."""
    if tokenizer.mask_token_id is None:
        raise UsageError(f"{task}: the tokenizer has no mask token. Use the tokenizer of a masked language model")
    return int(tokenizer.mask_token_id)


def tokenized_texts(texts: Sequence[str], tokenizer: "PreTrainedTokenizerBase") -> list[DocumentTokens]:
    """Returns the tokens of each text. Only masks are special tokens, all others are plain characters."""
    plain: list[str] = []
    masked: list[str] = []
    for text in texts:
        if MASK.search(text) is None:
            plain.append(text)
        else:
            masked.append(MASK.sub(str(tokenizer.mask_token), text))
    # Two calls of the tokenizer, because a call reads either all special tokens in its texts or none.
    plain_encodings = iter(_encodings(plain, tokenizer))
    masked_encodings = iter(_masked_encodings(masked, tokenizer))
    masked_texts = iter(masked)
    documents = []
    for text in texts:
        if MASK.search(text) is None:
            encoding = next(plain_encodings)
        else:
            encoding = next(masked_encodings)
            text = next(masked_texts)
        words = word_numbers(text, encoding.word_ids, encoding.offsets)
        documents.append(DocumentTokens(ids=encoding.ids, words=words))
    return documents


def _encodings(
    texts: Sequence[str], tokenizer: "PreTrainedTokenizerBase", *, split_special_tokens: bool = True
) -> list[Encoding]:
    """Returns the tokens of texts, in which special tokens are split into plain characters, unless they are read."""
    if not texts:
        return []
    encoding = tokenizer(
        texts,
        add_special_tokens=False,
        split_special_tokens=split_special_tokens,
        return_attention_mask=False,
        padding=False,
        verbose=False,
    )
    return list(encoding.encodings)


def _masked_encodings(texts: Sequence[str], tokenizer: "PreTrainedTokenizerBase") -> list[Encoding]:
    """Returns the encodings of texts in which the mask, and no other token, is special."""
    encodings = _encodings(texts, tokenizer, split_special_tokens=False)
    mask_id, backend = tokenizer.mask_token_id, tokenizer.backend_tokenizer
    others = set[int]()
    for number, token in backend.get_added_tokens_decoder().items():
        if token.special and number != mask_id:
            others.add(number)
    # The texts that have read another special token, too, which hardly any text has.
    mixed = [index for index, encoding in enumerate(encodings) if not others.isdisjoint(encoding.ids)]
    if not mixed:
        return encodings
    reader = _mask_reader(backend.to_str(), mask_id)
    read = reader.encode_batch([texts[index] for index in mixed], add_special_tokens=False)
    for index, encoding in zip(mixed, read, strict=True):
        encodings[index] = encoding
    return encodings


@lru_cache(maxsize=1)
def _mask_reader(backend: str, mask_id: int) -> Tokenizer:
    """Returns a copy of a tokenizer that reads the mask in a text, but no other special token.

    The library tokenizers can only leave all special tokens of a text unread. So the mask of the copy is an ordinary
    added token, which keeps its treatment of the spaces beside it.

    Args:
        backend: The tokenizer as JSON, which is also what the copy depends on. Making it takes seconds for a large
            vocabulary, so it is made for texts that need it only, and kept.
        mask_id: The id of its mask.
    """
    content = json.loads(backend)
    for token in content["added_tokens"]:
        if token["id"] == mask_id:
            token["special"] = False
    reader = Tokenizer.from_str(json.dumps(content | {"truncation": None, "padding": None}))
    reader.encode_special_tokens = True
    return reader


def window_feature(window: Window, rules: WindowRules, mask_id: int) -> Feature:
    """Returns a window with its special tokens. Its masks are read, but are no words."""
    ids = [*rules.prefix, *window.ids, *rules.suffix]
    word_ids = [*[NO_WORD] * len(rules.prefix), *window.words, *[NO_WORD] * len(rules.suffix)]
    masks = [position for position, token in enumerate(ids) if token == mask_id]
    for position in masks:
        word_ids[position] = NO_WORD
    return Feature(
        row=window.document,
        input_ids=ids,
        token_type_ids=[0] * len(ids),
        gather_positions=masks,
        word_ids=word_ids,
        lost_tokens=0,
    )
