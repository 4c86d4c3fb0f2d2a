"""Windows of a question and a long context, cut as transformers' ``only_second``.

Owns where windows begin and end, which characters their tokens cover, in which window a token has the most context, and
which tokens an answer lies on. A question and a context are tokenised each for itself, because contexts come back with
every question, and windows of a context differ only in where it is cut. Must not know rows, settings or logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bert_tasks.outputs.span_search import CONTEXT, MAX_CONTEXT, NOT_CONTEXT
from bert_tasks.tasks.windows.texts import tokenized

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Numbers = npt.NDArray[np.int64]

_SPACE = "▁"  # the piece of SentencePiece for a space, which it also puts before the first word
NOWHERE = -1  # instead of the characters of a token that is not from the context


@dataclass(frozen=True, kw_only=True)
class ContextTokens:
    """A tokenised context.

    Attributes:
        ids: Token ids without special tokens.
        starts, ends: The characters that each token covers, without white space around them, because some tokenizers
            count the space before a word to it. They are equal for a token of white space only, also if it stands for
            the start of a word and the tokenizer gives it that word's first character.
    """

    ids: list[int]
    starts: Numbers
    ends: Numbers


def tokenized_contexts(contexts: Sequence[str], tokenizer: "PreTrainedTokenizerBase") -> dict[str, ContextTokens]:
    """Tokenises each different text once."""
    texts = list(dict.fromkeys(contexts))
    encoding = tokenized(texts, tokenizer, offsets=True)
    space = tokenizer.backend_tokenizer.token_to_id(_SPACE)
    pieces = {}
    for text, ids, offsets in zip(texts, encoding["input_ids"], encoding["offset_mapping"], strict=True):
        spans: list[tuple[int, int]] = []
        for token, (start, end) in zip(ids, offsets, strict=True):
            # The piece for a space may have the first character of the next word, which its own token covers.
            if token == space and _SPACE not in text[start:end]:
                spans.append((start, start))
            else:
                spans.append(_trimmed(text, start, end))
        trimmed = np.array(spans, dtype=np.int64).reshape(-1, 2)
        pieces[text] = ContextTokens(ids=ids, starts=trimmed[:, 0], ends=trimmed[:, 1])
    return pieces


def _trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """Returns the characters of a token without white space around them."""
    while start < end and text[start].isspace():
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    return start, end


def window_offsets(
    context: ContextTokens, window: range, richest: npt.NDArray[np.bool_], *, before: int, after: int
) -> list[int]:
    """Returns first character, last character + 1 and role in answers of each token.

    Args:
        context: The tokens of the whole context.
        window: The tokens that are in the window.
        richest: ``[window]`` True for each of its tokens that has the most context in this window.
        before, after: Tokens of the window that are no context.
    """
    inside = slice(window.start, window.stop)
    starts, ends = context.starts[inside], context.ends[inside]
    # Question and special tokens keep what no token of the context has, so that no answer lies on them.
    table = np.full((before + len(window) + after, 3), (NOWHERE, NOWHERE, NOT_CONTEXT))
    piece = table[before : before + len(window)]
    role = np.where(richest, MAX_CONTEXT, CONTEXT)
    visible = ends > starts  # white space neither begins nor ends an answer
    piece[visible] = np.stack([starts, ends, role], axis=1)[visible]
    flat: list[int] = table.ravel().tolist()
    return flat


def answer_characters(context: ContextTokens, start: int, end: int) -> tuple[int, int] | None:
    """Returns the characters of an answer that belong to tokens, or None.

    The answer is trimmed at both ends as tokens are. Otherwise an answer with white space around it, or with characters
    that the tokenizer drops, would seem to begin in the token before and to end in the token after.
    """
    visible = context.ends > context.starts  # without tokens of white space alone
    starts, ends = context.starts[visible], context.ends[visible]
    first = int(np.searchsorted(ends, start, side="right"))  # the first token that ends after start
    last = int(np.searchsorted(starts, end, side="left")) - 1  # the last token that begins before end
    if first > last:
        return None
    return max(start, int(starts[first])), min(end, int(ends[last]))


def answer_tokens(context: ContextTokens, window: range, start: int, end: int) -> tuple[int, int] | None:
    """Returns first and last token of the characters ``start`` to ``end``, or None.

    Tokens are counted in the window. None means that not all characters are inside. The characters come from
    ``answer_characters``. As in transformers' example the first is the last token that begins at ``start`` or before,
    the last is the earliest that ends at ``end`` or after. Only if several tokens share characters (the bytes of an
    emoji) can that be the wrong way round, an answer that no model could predict. Then they change places.
    """
    if not window or context.starts[window.start] > start or context.ends[window.stop - 1] < end:
        return None
    inside = slice(window.start, window.stop)
    first = int(np.searchsorted(context.starts[inside], start, side="right")) - 1
    last = int(np.searchsorted(context.ends[inside], end, side="left"))
    return min(first, last), max(first, last)
