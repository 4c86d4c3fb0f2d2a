"""The transformers side of span extraction: windows, labels and answers by the rules of run_qa and utils_qa.

transformers has no span trainer in its package; these are the rules of its question-answering example, with a
max-context map, written for this comparison. Must not know Trainer or the bert_tasks side. T: tokens of a window.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from quality_tasks import Answer, Comparison, Question

Offsets = list[tuple[int, int] | None]  # [T], None: not a token of the context
NO_CANDIDATE = "empty"  # what the example answers when no span is allowed


@dataclass(frozen=True, kw_only=True)
class Window:
    """One model input. ``question``: its index; ``startable``: tokens that have their largest context here."""

    question: int
    inputs: dict[str, list[int]]
    offsets: Offsets
    startable: frozenset[int]


def windows_of(tokenizer: Any, questions: Sequence[Question], task: Comparison) -> list[Window]:
    """Returns all windows, question after question. Consecutive ones share ``doc_stride`` tokens."""
    encoded = tokenizer(
        [question.question.lstrip() for question in questions],
        [question.context for question in questions],
        truncation="only_second",
        max_length=task.max_length,
        stride=task.doc_stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    owners = encoded["overflow_to_sample_mapping"]
    offsets: list[Offsets] = []
    for index, spans in enumerate(encoded["offset_mapping"]):
        sides = encoded.sequence_ids(index)
        offsets.append([span if side == 1 else None for span, side in zip(spans, sides, strict=True)])
    startable = _max_context(offsets, owners)
    names = [name for name in ("input_ids", "token_type_ids", "attention_mask") if name in encoded]
    return [
        Window(
            question=owner,
            inputs={name: encoded[name][index] for name in names},
            offsets=offsets[index],
            startable=startable[index],
        )
        for index, owner in enumerate(owners)
    ]


def _max_context(offsets: Sequence[Offsets], owners: Sequence[int]) -> list[frozenset[int]]:
    """For each window the tokens whose best window it is: most context on the poorer side, the first among equals."""
    best: dict[tuple[int, tuple[int, int]], tuple[float, int, int]] = {}
    for window, (spans, owner) in enumerate(zip(offsets, owners, strict=True)):
        context = [(token, span) for token, span in enumerate(spans) if span is not None]
        for token, span in context:
            # As in Google's run_squad.py: the shorter side decides, and of equal ones the longer window.
            score = min(token - context[0][0], context[-1][0] - token) + 0.01 * len(context)
            key = (owner, span)
            if key not in best or score > best[key][0]:
                best[key] = (score, window, token)
    tokens_by_window: list[set[int]] = [set() for _ in offsets]
    for _, window, token in best.values():
        tokens_by_window[window].add(token)
    return [frozenset(tokens) for tokens in tokens_by_window]


def gold_tokens(window: Window, question: Question) -> tuple[int, int]:
    """Returns the first and last token of the first gold answer, or of the first token if it is not fully inside."""
    context = [(token, *span) for token, span in enumerate(window.offsets) if span is not None]
    if not question.answers:
        return 0, 0
    text, begin = question.answers[0]
    end = begin + len(text)
    if context[0][1] > begin or context[-1][2] < end:
        return 0, 0  # [CLS] stands for "no answer in this window"
    first = max(token for token, start, _ in context if start <= begin)
    last = min(token for token, _, stop in context if stop >= end)
    return first, last


def answers_of(
    windows: Sequence[Window],
    questions: Sequence[Question],
    starts: np.ndarray,
    ends: np.ndarray,
    task: Comparison,
) -> list[Answer]:
    """Returns the best non-empty answer of each question, and its null odds. Logits are [windows, T or more]."""
    groups: list[list[int]] = [[] for _ in questions]
    for index, window in enumerate(windows):
        groups[window.question].append(index)
    answers: list[Answer] = []
    for question, group in zip(questions, groups, strict=True):
        null = min(float(starts[index][0] + ends[index][0]) for index in group)
        spans: list[tuple[float, int, int]] = []
        for index in group:
            spans += _candidates(windows[index], starts[index], ends[index], task)
        if spans:
            score, begin, end = max(spans, key=lambda span: span[0])
            text = question.context[begin:end]
        else:
            score, text = 0.0, NO_CANDIDATE
        answers.append(Answer(key=question.key, text=text, null_odds=null - score))
    return answers


def _candidates(window: Window, start: np.ndarray, end: np.ndarray, task: Comparison) -> list[tuple[float, int, int]]:
    """Returns score, first character and last character + 1 of the allowed spans of best starts and best ends."""
    spans: list[tuple[float, int, int]] = []
    context = {token: span for token, span in enumerate(window.offsets) if span is not None}
    best_ends = [token for token in _largest(end, task.n_best_size) if token in context]  # the trainer pads windows
    for first in _largest(start, task.n_best_size):
        if first not in window.startable:
            continue
        for last in best_ends:
            if first <= last < first + task.max_answer_length:
                score = float(start[first] + end[last])
                spans.append((score, context[first][0], context[last][1]))
    return spans


def _largest(logits: np.ndarray, count: int) -> list[int]:
    return [int(token) for token in np.argsort(logits)[::-1][:count]]
