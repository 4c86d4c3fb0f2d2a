"""The special tokens that a tokenizer puts around one text, or around and between two."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from bert_tasks.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A tokenizer's special tokens around one text, or around and between two.

    BERT has 2 special tokens for a text and 3 for a pair. RoBERTa has 2 and 4, and one segment.

    Attributes:
        special: The special tokens before the first text, and behind each text.
        types: The segment ids of special tokens and texts in turn, one more than twice the number of texts.

    Examples:
        >>> Frame.of(tokenizer, texts=2).join([7592], [2088])
        ([101, 7592, 102, 2088, 102], [0, 0, 0, 1, 1])
    """

    special: tuple[tuple[int, ...], ...]
    types: tuple[int, ...]

    @classmethod
    @lru_cache(maxsize=16)
    def of(cls, tokenizer: "PreTrainedTokenizerBase", *, texts: int) -> "Frame":
        """Reads the frame off a short text, or a pair of short texts."""
        # No attribute of a tokenizer says where its post-processor puts special tokens, so an example has to show it.
        encoding = tokenizer(*["a"] * texts, return_token_type_ids=True, truncation=False, padding=False)
        ids, types, sides = encoding["input_ids"], encoding["token_type_ids"], encoding.sequence_ids(0)
        special, segments, end = [], [], 0
        for text in range(texts):
            start = sides.index(text)  # what stands before it since the last text is special
            special.append(tuple(ids[end:start]))
            # An empty part has the segment of what follows. No token bears it.
            segments += [types[end], types[start]]
            end = start + sides.count(text)
        special.append(tuple(ids[end:]))
        segments.append(types[-1])
        return cls(special=tuple(special), types=tuple(segments))

    @property
    def before(self) -> tuple[int, ...]:
        """The special tokens before the first text."""
        return self.special[0]

    @property
    def between(self) -> tuple[int, ...]:
        """The special tokens between the two texts of a pair."""
        return self.special[1]

    @property
    def after(self) -> tuple[int, ...]:
        """The special tokens behind the last text."""
        return self.special[-1]

    @property
    def size(self) -> int:
        """The number of special tokens."""
        return sum(map(len, self.special))

    def room(self, max_length: int) -> int:
        """Returns the number of tokens of texts that a window holds.

        Args:
            max_length: Maximum length of a window in tokens, including special tokens.

        Raises:
            UsageError: The special tokens leave no room.
        """
        room = max_length - self.size
        if room < 1:
            message = f"the {self.size} special tokens of this tokenizer leave no room for a text"
            raise UsageError(f"max_length is {max_length}, but {message}. Set max_length to {self.size + 1} or more")
        return room

    def join(self, *texts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns the ids and the segment ids of a window with these tokens.

        Args:
            texts: The tokens of each text, as many texts as the frame is for.
        """
        ids = list(self.special[0])
        types = [self.types[0]] * len(ids)
        for number, text in enumerate(texts, 1):
            behind = self.special[number]
            ids += text
            ids += behind
            types += [self.types[2 * number - 1]] * len(text)
            types += [self.types[2 * number]] * len(behind)
        return ids, types
