"""Windows of a context and of the words of a text beside it, such as passages and an answer that is checked by them.

Every word of the text is read with every part of the context, so that no passage behind it is missed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from bert_tasks.errors import UsageError
from bert_tasks.outputs.explanation import TokenSpan
from bert_tasks.tasks.windows.contexts import ContextTokens, tokenized_contexts
from bert_tasks.tasks.windows.frame import Frame
from bert_tasks.tasks.windows.words import SubWords, WordWindow, cut, read_words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LEAST_ROOM = 4  # tokens, of which the question may have one, the context one, and the text two


@dataclass(frozen=True, kw_only=True)
class Context:
    """What is read before a text, a context and perhaps a question before it, and the layout of its windows.

    Attributes:
        frame: The special tokens around and between the context and the text.
        room: The number of tokens of both that a window holds.
        overlap: Maximum number of tokens that neighbouring windows share.
        texts: The text of the question, if there is one, and of the context, by column.
        tokens: The tokens of both, joined by an empty line.
        question, ids: The ids of the tokens of the question, which every window repeats, and of the context.
    """

    frame: Frame
    room: int
    overlap: int
    texts: Mapping[str, str]
    tokens: ContextTokens
    question: Sequence[int]
    ids: Sequence[int]

    @property
    def quarter(self) -> int:
        """The tokens that a window keeps for the context, and the most that a question may have beside more context."""
        return self.room // 4

    @property
    def longest_word(self) -> int:
        """Maximum number of sub-words of a word, so that any word fits beside a question and some context."""
        return self.room - 2 * self.quarter

    @property
    def spans(self) -> list[TokenSpan]:
        """The characters of each token of the question and of the context."""
        shift = len(joined(self.texts)) - len(self.texts["context"])  # where the context begins in the joined text
        spans: list[TokenSpan] = []
        places = zip(self.tokens.starts.tolist(), self.tokens.ends.tolist(), strict=True)
        for number, (start, end) in enumerate(places):
            if number < len(self.question):
                spans.append(TokenSpan("question", start, end))
            else:  # white space between both is no character of the context
                spans.append(TokenSpan("context", max(0, start - shift), max(0, end - shift)))
        return spans

    def numbered(self) -> "Context":
        """Returns the context with the numbers from 0 on for the ids of its tokens, and -1 for special ones."""
        special = tuple((-1,) * len(tokens) for tokens in self.frame.special)
        frame = replace(self.frame, special=special)
        numbers = range(len(self.question) + len(self.ids))
        return replace(self, frame=frame, question=numbers[: len(self.question)], ids=numbers[len(self.question) :])

    def kept_question(self, text: SubWords) -> Sequence[int]:
        """Returns the tokens of the question that windows repeat, all of them if one window holds everything."""
        if len(self.question) + len(self.ids) + len(text.ids) <= self.room:
            return self.question
        return self.question[: self.quarter]

    def windows(self, text: SubWords) -> Iterator[WordWindow]:
        """Yields the windows of a text, for each part of it one with each part of the context.

        If all tokens fit into one window, there is one, with the tokens that transformers' tokenizers give for the
        pair. If not, every window begins with the question, of which it keeps at most a quarter of the room, has as
        much of the context as fits, and ends with the whole text. A text that leaves less than a quarter of the room
        to the context is itself cut between words, and each word is read in the part in which it has most of the text
        around it.

        Args:
            text: The sub-words of the text, of which no word has more than ``longest_word``.
        """
        question = self.kept_question(text)
        room = self.room - len(question)
        text_room = room - min(len(self.ids), self.quarter)
        # An overlap of at most half of the room bounds the number of windows if little room is left.
        parts = cut(text.starts, room=text_room, overlap=min(self.overlap, text_room // 2))
        for words, read in zip(parts, read_words(text.starts, parts), strict=True):
            if len(parts) > 1 and not read:
                continue  # its words have more of the text around them elsewhere
            first, end = text.starts[words.start], text.starts[words.stop]
            context_room = room - (end - first)
            pieces = cut(range(len(self.ids) + 1), room=context_room, overlap=min(self.overlap, context_room // 2))
            for piece in pieces:
                before = [*question, *self.ids[piece.start : piece.stop]]
                ids, types = self.frame.join(before, text.ids[first:end])
                shift = len(self.frame.before) + len(before) + len(self.frame.between) - first
                starts = [text.starts[word] + shift for word in range(read.start, read.stop + 1)]
                spans = [range(start, stop) for start, stop in pairwise(starts)]
                yield WordWindow(ids=ids, token_type_ids=types, words=read, spans=spans)


def joined(texts: Mapping[str, str]) -> str:
    """Returns a question, an empty line and its context, or a context alone, which are one text for the tokenizer."""
    return "\n\n".join(texts.values())


def contexts_of(
    texts: Sequence[Mapping[str, str]], tokenizer: "PreTrainedTokenizerBase", *, max_length: int, overlap: int
) -> list[Context | None]:
    """Returns the tokenised context of each row, or None for a row without one.

    Args:
        texts: The question, if any, and the context of each row by column. Empty for a row without a context.
        tokenizer: The tokenizer.
        max_length: Maximum length of a window in tokens, including special tokens.
        overlap: Maximum number of tokens that neighbouring windows share.

    Raises:
        UsageError: ``max_length`` leaves no room for a context and a text.
    """
    if not any(texts):
        return [None] * len(texts)
    frame = Frame.of(tokenizer, texts=2)
    least = frame.size + _LEAST_ROOM
    if max_length < least:
        raise UsageError(f"max_length is {max_length}, but a context and a text need {least} tokens or more")
    tokens_by_text = tokenized_contexts([joined(of_row) for of_row in texts if of_row], tokenizer)
    contexts: list[Context | None] = []
    for of_row in texts:
        if not of_row:
            contexts.append(None)
            continue
        tokens = tokens_by_text[joined(of_row)]
        question = of_row.get("question", "")
        length = np.count_nonzero(tokens.starts < len(question))  # in tokens
        context = Context(
            frame=frame,
            room=max_length - frame.size,
            overlap=overlap,
            texts=of_row,
            tokens=tokens,
            question=tokens.ids[:length],
            ids=tokens.ids[length:],
        )
        contexts.append(context)
    return contexts
