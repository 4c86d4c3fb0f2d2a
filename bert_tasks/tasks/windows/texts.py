"""Texts and pairs of texts as token ids, cut to a maximum length as transformers cuts them.

Each text is tokenized alone and whole, and its ids are cut here. The truncation of the library ``tokenizers`` also
builds what it cuts off, for a pair every combination of the parts of both texts. That takes time and memory with the
product of their lengths: two texts of 10,000 characters took 2 seconds and 860 MB.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from bert_tasks.data.features import filled_batches
from bert_tasks.errors import UsageError
from bert_tasks.outputs.features import Feature
from bert_tasks.tasks.windows.frame import Frame
from bert_tasks.tasks.windows.words import cut

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Strategy = Literal["longest_first", "only_first"]

# Texts of one call of the tokenizer, whose objects are about 100 bytes per token until they are cut.
_CHARACTERS = 2**20
# Characters of a piece of a longer text, and of the text around it that is read with it.
_PIECE, _CONTEXT = 2**18, 200
_SPACE_BETWEEN_WORDS = re.compile(r"(?<=\w) (?=\w)")


class EncodedText(NamedTuple):
    """A window of a text, or of a pair of texts.

    ``truncated_texts`` returns them, and ``feature`` makes a feature for ``Task.features`` of one.

    Attributes:
        row: The number of the text or pair.
        input_ids: The ids of its tokens, with special tokens.
        token_type_ids: The segment of each token.
        lost_tokens: Number of tokens of the row that were cut off.
        parts: The tokens of each text that are in the window, by their positions in the whole text.
    """

    row: int
    input_ids: list[int]
    token_type_ids: list[int]
    lost_tokens: int
    parts: tuple[range, ...]

    def feature(self, *, row: int | None = None, labels: list[float] | None = None) -> Feature:
        """Returns the window as a feature.

        Args:
            row: The row of the feature, if the texts of several windows come from one row. Default: ``row``.
            labels: The labels of the row, or None.
        """
        if row is None:
            row = self.row
        return Feature(
            row=row,
            input_ids=self.input_ids,
            token_type_ids=self.token_type_ids,
            labels=labels,
            lost_tokens=self.lost_tokens,
        )


class _Tokens(NamedTuple):
    """The tokens of a text that a window may hold, from position ``start`` on, of ``total`` tokens."""

    ids: list[int]
    start: int
    total: int

    def piece(self, part: range) -> list[int]:
        """Returns the tokens at these positions of the whole text."""
        if len(part) == len(self.ids):
            return self.ids
        return self.ids[part.start - self.start : part.stop - self.start]


def tokenized(texts: Sequence[str], tokenizer: "PreTrainedTokenizerBase", *, offsets: bool = False) -> Any:
    """Returns tokens without special tokens. Those written in a text stay characters."""
    return tokenizer(
        list(texts),
        add_special_tokens=False,
        truncation=False,
        padding=False,
        return_token_type_ids=False,
        return_attention_mask=False,
        return_offsets_mapping=offsets,
        split_special_tokens=True,
        verbose=False,
    )


def truncated_texts(
    texts: Sequence[Sequence[str]],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_length: int,
    strategy: Strategy = "longest_first",
) -> list[EncodedText]:
    """Returns texts, or pairs, of at most ``max_length`` tokens.

    The ids are those of transformers' tokenizers with ``truncation=strategy``. Special tokens written in a text stay
    plain characters.

    Args:
        texts: The texts, or the first and the second texts of the pairs.
        tokenizer: The tokenizer. Its ``truncation_side`` decides which end of a text is cut off.
        max_length: Maximum length in tokens, including special tokens.
        strategy: Cut the longer text of each pair first, or the first text only.

    Raises:
        UsageError: The special tokens, or the second text with ``only_first``, leave no room.

    Examples:
        >>> (window,) = truncated_texts([["Cold soup."]], tokenizer, max_length=4)
        >>> window.lost_tokens
        1
    """
    frame = Frame.of(tokenizer, texts=len(texts))
    room = frame.room(max_length)
    is_left = tokenizer.truncation_side == "left"  # the beginning of a text is cut off, not its end
    tokens = _tokens_by_text(chain.from_iterable(texts), tokenizer, most=room)
    encoded = []
    for row, sides in enumerate(zip(*texts, strict=True)):
        whole = [tokens[text] for text in sides]
        counts = [text.total for text in whole]
        kept = kept_tokens(counts, room, strategy)
        parts: list[range] = []
        pieces: list[list[int]] = []
        for text_tokens, length in zip(whole, kept, strict=True):
            part = range(length)
            if is_left:
                part = range(text_tokens.total - length, text_tokens.total)
            parts.append(part)
            pieces.append(text_tokens.piece(part))
        ids, types = frame.join(*pieces)
        encoded.append(EncodedText(row, ids, types, sum(counts) - sum(kept), tuple(parts)))
    return encoded


def text_windows(
    texts: Sequence[str], tokenizer: "PreTrainedTokenizerBase", *, max_length: int, overlap: int
) -> list[EncodedText]:
    """Returns the windows of each text, which hold every token.

    They are those of transformers' tokenizers with ``return_overflowing_tokens`` and a ``stride`` of ``overlap``.

    Args:
        texts: The texts.
        tokenizer: The tokenizer. If its ``truncation_side`` is left, the first window is at the end of a text.
        max_length: Maximum length of a window in tokens, including special tokens.
        overlap: Number of tokens that neighbouring windows of a text share.

    Raises:
        UsageError: The special tokens leave no room for the overlap.
    """
    frame = Frame.of(tokenizer, texts=1)
    room, is_left = frame.room(max_length), tokenizer.truncation_side == "left"
    if overlap >= room:
        raise UsageError(f"windows of {max_length} tokens, {frame.size} of them special, cannot overlap by {overlap}")
    tokens = _tokens_by_text(texts, tokenizer, most=None)
    encoded = []
    for row, text in enumerate(texts):
        whole = tokens[text]
        for part in cut(range(whole.total + 1), room=room, overlap=overlap):
            if is_left:  # the windows are counted from the end
                part = range(whole.total - part.stop, whole.total - part.start)
            ids, types = frame.join(whole.piece(part))
            encoded.append(EncodedText(row, ids, types, 0, (part,)))
    return encoded


def token_characters(
    encoded: Sequence[EncodedText], texts: Sequence[Sequence[str]], tokenizer: "PreTrainedTokenizerBase"
) -> Iterator[list[tuple[int, int, int] | None]]:
    """Yields for each token of each window its text (0 or 1), and the start and end of its characters.

    A special token has None.

    Args:
        encoded: Windows of these texts.
        texts: The texts, or the first and the second texts of the pairs.
        tokenizer: The tokenizer.
    """
    special = Frame.of(tokenizer, texts=len(texts)).special
    # Characters are those of whole texts, because the library trims the first token of a piece in another way.
    offsets: dict[str, Any] = {}
    for group in _groups(chain.from_iterable(texts)):
        offsets.update(zip(group, tokenized(group, tokenizer, offsets=True)["offset_mapping"], strict=True))
    for window in encoded:
        characters: list[tuple[int, int, int] | None] = [None] * len(special[0])
        for side, part in enumerate(window.parts):
            spans = offsets[texts[side][window.row]][part.start : part.stop]
            characters += [(side, start, end) for start, end in spans]
            characters += [None] * len(special[side + 1])
        yield characters


def kept_tokens(counts: Sequence[int], room: int, strategy: Strategy = "longest_first") -> list[int]:
    """Returns how many tokens of each text are kept.

    Follows ``truncate_encodings`` of the library tokenizers
    (https://github.com/huggingface/tokenizers/blob/main/tokenizers/src/utils/truncation.rs): a text that fills at most
    half of the room stays whole. Otherwise each text gets half, and an odd token goes to the longer one, or to the
    second of two texts of the same length.

    Args:
        counts: The number of tokens of the text, or of both texts.
        room: The number of tokens to keep, if there are as many.
        strategy: See ``truncated_texts``.

    Raises:
        UsageError: The second text leaves no room for the first with ``only_first``.

    Examples:
        >>> kept_tokens([90, 40], 75)
        [38, 37]
    """
    if sum(counts) <= room:
        return list(counts)
    if len(counts) == 1:
        return [room]
    first, second = counts
    if strategy == "only_first":
        if second >= room:
            raise UsageError(f"the second text of a pair has {second} tokens, but there is room for {room} in both")
        return [room - second, second]
    shorter = min(first, second, room // 2)
    if first > second:
        return [room - shorter, shorter]
    return [shorter, room - shorter]


def _tokens_by_text(
    texts: Iterable[str], tokenizer: "PreTrainedTokenizerBase", *, most: int | None
) -> dict[str, _Tokens]:
    """Returns the tokens of each different text, at most so many from the side that is not cut off."""
    is_left, tokens = tokenizer.truncation_side == "left", dict[str, _Tokens]()
    for group in _groups(texts):
        for text, ids in zip(group, _ids(group, tokenizer), strict=True):
            total, start = len(ids), 0
            # What no window can hold is dropped at once, so that one long text does not stay in memory as a list.
            if most is not None and total > most:
                if is_left:
                    start = total - most
                ids = ids[start : start + most]
            tokens[text] = _Tokens(ids, start, total)
    return tokens


def _ids(texts: Sequence[str], tokenizer: "PreTrainedTokenizerBase") -> list[list[int]]:
    """Returns the token ids of each text, of a long text piece by piece."""
    if len(texts) == 1 and len(texts[0]) > _CHARACTERS:
        return [long_text_ids(texts[0], tokenizer, size=_PIECE)]
    ids: list[list[int]] = tokenized(texts, tokenizer)["input_ids"]
    return ids


def long_text_ids(text: str, tokenizer: "PreTrainedTokenizerBase", *, size: int) -> list[int]:
    """Returns the token ids of a text, which is tokenized in pieces, so that few objects of the library exist at once.

    A piece ends at a space between two words, where no tokenizer joins characters. It is read together with the words
    around it, because some tokenizers treat the beginning of a text in a special way, and of its tokens those are kept
    that begin in the piece. So the ids are those of the whole text.

    Args:
        text: The text.
        tokenizer: The tokenizer.
        size: Number of characters after which a piece ends at the next space between two words.
    """
    ids: list[int] = []
    start = 0
    while start < len(text):
        end = _end_of_piece(text, start + size)
        before, after = max(0, start - _CONTEXT), min(len(text), end + _CONTEXT)
        encoding = tokenized([text[before:after]], tokenizer, offsets=True)
        for token, (first, _) in zip(encoding["input_ids"][0], encoding["offset_mapping"][0], strict=True):
            if start <= before + first < end:
                ids.append(token)
        start = end
    return ids


def _end_of_piece(text: str, earliest: int) -> int:
    """Returns the position of the first space between two words from ``earliest`` on, or the length of the text."""
    match = _SPACE_BETWEEN_WORDS.search(text, earliest)
    if match is None or len(text) - match.start() < _CONTEXT:  # a short rest is not worth a piece of its own
        return len(text)
    return match.start()


def _groups(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yields the different texts in groups for one call of the tokenizer."""
    return filled_batches(dict.fromkeys(texts), len, max_tokens=_CHARACTERS)
