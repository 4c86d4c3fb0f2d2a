"""The n best answer spans against a plain Python search, and what the module promises about ties and edges."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bert_tasks.outputs.span_search import (
    CONTEXT,
    MAX_CONTEXT,
    NOT_CONTEXT,
    RankedSpans,
    Span,
    merge_windows,
    window_candidates,
)
from support.span_reference import Expected, Token, expected_answers, float32

COARSE = (-1.0, -0.0, 0.0, 0.5, 0.5, 2.0)  # many ties, also of sums
FILLER = -9.0
INF = float("inf")


class Question(NamedTuple):
    context: str
    windows: list[list[Token]]


class Limits(NamedTuple):
    n_best: int = 20
    max_answer_length: int = 30
    with_null: bool = False


V1, V2 = Limits(), Limits(with_null=True)


def logits_of(window: Sequence[Token]) -> Tensor:
    return torch.tensor([token[:2] for token in window])


def role(token: Token) -> int:
    if token.characters is None:
        return NOT_CONTEXT
    return MAX_CONTEXT if token.may_start else CONTEXT


def origins_of(window: Sequence[Token]) -> list[int]:
    return [number for token in window for number in (*(token.characters or (-1, -1)), role(token))]


def candidates(windows: Sequence[Sequence[Token]], limits: Limits) -> Tensor:
    return window_candidates(
        [logits_of(window) for window in windows],
        [bytes(map(role, window)) for window in windows],
        n_best=limits.n_best,
        max_answer_length=limits.max_answer_length,
    )


def search(questions: Sequence[Question], limits: Limits) -> list[RankedSpans]:
    """Both steps over the windows of all questions at once."""
    windows = [window for question in questions for window in question.windows]
    return merge_windows(
        candidates(windows, limits).unbind(),
        [origins_of(window) for window in windows],
        [len(question.windows) for question in questions],
        [question.context for question in questions],
        n_best=limits.n_best,
        with_null=limits.with_null,
    )


def check(result: RankedSpans, expected: Expected) -> None:
    assert [replace(span, score=0.0) for span in result.n_best] == [
        Span(span.text, 0.0, span.start, span.end, span.start_logit, span.end_logit) for span in expected.n_best
    ]
    shares = [span.probability for span in expected.n_best]
    assert [span.score for span in result.n_best] == pytest.approx(shares, rel=1e-9)
    assert (result.best_at, result.null_at, result.null_odds) == expected[1:]


class Maker:
    """Random questions. Tokens of a context may touch, share characters or be invisible."""

    def __init__(self, seed: int, *, ties: bool) -> None:
        self.random, self.ties = random.Random(seed), ties

    def logit(self) -> float:
        return self.random.choice(COARSE) if self.ties else float32(self.random.gauss(0.0, 3.0))

    def token(self, characters: tuple[int, int] | None) -> Token:
        seen = None if self.random.random() < 0.1 else characters
        return Token(self.logit(), self.logit(), seen, may_start=self.random.random() < 0.8)

    def question(self, windows: int, most_tokens: int) -> Question:
        places, end = [], 0
        for _ in range(self.random.randint(0, most_tokens)):
            start = max(0, end + self.random.randint(-1, 2))
            end = max(end, start + self.random.randint(1, 3))
            places.append((start, end))
        return Question(
            "".join(self.random.choices("abcdefghij é😀", k=end)), [self.window(places) for _ in range(windows)]
        )

    def window(self, places: Sequence[tuple[int, int]]) -> list[Token]:
        first, last = sorted(self.random.choices(range(len(places) + 1), k=2))
        around = [None] * self.random.randint(1, 3)
        return [self.token(offsets) for offsets in (*around, *places[first:last], None)]


LIMITS = st.builds(Limits, st.integers(1, 30), st.integers(1, 30), st.booleans())


class TestPlainSearch:
    @settings(max_examples=100, deadline=None, database=None)
    @given(
        limits=LIMITS,
        windows=st.lists(st.integers(1, 3), min_size=1, max_size=4),
        most_tokens=st.sampled_from((0, 2, 9, 30)),
        ties=st.booleans(),
        seed=st.integers(0, 2**32),
    )
    def test_finds_the_same(self, limits: Limits, windows: list[int], most_tokens: int, ties: bool, seed: int) -> None:
        maker = Maker(seed, ties=ties)
        questions = [maker.question(count, most_tokens) for count in windows]
        for result, question in zip(search(questions, limits), questions, strict=True):
            check(result, expected_answers(*question, **limits._asdict()))

    @pytest.mark.parametrize("ties", [False, True])
    def test_finds_the_same_in_long_windows(self, ties: bool) -> None:
        maker = Maker(5, ties=ties)
        questions = [maker.question(count, 400) for count in (3, 2, 3, 1)]
        assert max(len(window) for question in questions for window in question.windows) > 150
        for limits in (V1, V2):
            for result, question in zip(search(questions, limits), questions, strict=True):
                check(result, expected_answers(*question, **limits._asdict()))

    @settings(max_examples=20, deadline=None, database=None)
    @given(limits=LIMITS, ties=st.booleans(), seed=st.integers(0, 2**32))
    def test_does_not_depend_on_the_batch(self, limits: Limits, ties: bool, seed: int) -> None:
        maker = Maker(seed, ties=ties)
        windows = [window for most in (30, 3, 12) for window in maker.question(2, most).windows]
        together = candidates(windows, limits)
        assert together.shape == (6, limits.n_best + 1, 4)
        for window, rows in zip(windows, together, strict=True):
            assert torch.equal(candidates([window], limits)[0], rows)


def words(
    context: str, starts: dict[str, float], ends: dict[str, float], *, null: float = 0.0, only: str = ""
) -> Question:
    """One window, a token for each word; words not named have low logits. Answers may begin with words of ``only``."""
    places, at = [], 0
    for word in context.split():
        at = context.index(word, at)
        places.append((at, at + len(word)))
        at += len(word)
    tokens = [
        Token(starts.get(word, FILLER), ends.get(word, FILLER), (start, end), not only or word in only.split())
        for start, end in places
        for word in [context[start:end]]
    ]
    around = Token(FILLER, FILLER, None)
    return Question(context, [[Token(null, null, None), around, *tokens, around]])


FERRY = "the ferry leaves at seven"


def texts(result: RankedSpans) -> list[str]:
    return [span.text for span in result.n_best]


class TestNBest:
    def test_by_hand(self) -> None:
        question = words(FERRY, {"at": 3.0, "ferry": 2.0}, {"seven": 4.0, "at": 1.0}, null=0.5)
        (result,) = search([question], Limits(n_best=3, with_null=True))
        assert texts(result) == ["at seven", "ferry leaves at seven", "at", ""]
        best, second = result.n_best[:2]
        assert best == Span("at seven", best.score, 17, 25, 3.0, 4.0)
        assert result.best == best
        assert result.null == Span("", result.n_best[3].score, 0, 0, 0.5, 0.5)
        assert result.null_odds == 1.0 - 7.0
        assert best.score / second.score == pytest.approx(torch.tensor(1.0).exp().item())
        assert sum(span.score for span in result.n_best) == pytest.approx(1.0)

    def test_only_the_best_starts_and_ends_are_paired(self) -> None:
        question = words(FERRY, {"at": 5.0, "ferry": 1.0}, {"ferry": 5.0, "at": 0.5, "the": -1.0})
        assert texts(search([question], Limits(n_best=1))[0]) == [""]
        assert texts(search([question], Limits(n_best=2))[0]) == ["ferry", "at"]
        question.windows[0][0] = Token(9.0, 9.0, None)  # tokens outside the context are counted among the best
        assert texts(search([question], Limits(n_best=2))[0]) == [""]
        assert texts(search([question], Limits(n_best=3))[0]) == ["ferry", "at", "ferry leaves at"]


class TestNoSpan:
    EMPTY = Question("", [[Token(1.0, 2.0, None), Token(0.0, 0.0, None)]])

    def test_without_no_answer(self) -> None:
        (result,) = search([self.EMPTY], V1)
        assert list(result.n_best) == [Span("", 0.0, 0, 0, 0.0, 0.0)]
        assert result.best == result.answer(0.0) == Span("", 0.0, 0, 0, 0.0, 0.0)
        assert (result.null, result.null_odds) == (None, None)

    def test_with_no_answer(self) -> None:
        (result,) = search([self.EMPTY], V2)
        assert list(result.n_best) == [Span("", 1.0, 0, 0, 1.0, 2.0)]
        assert result.best == result.null == result.answer(-INF) == result.answer(INF)
        assert result.null_odds == 3.0

    def test_a_span_without_text_is_never_the_best(self) -> None:
        tokens = [Token(0.0, 0.0, None), Token(2.0, 1.0, (3, 5)), Token(1.0, 2.0, (0, 2))]  # characters run backwards
        (result,) = search([Question("ab cd", [tokens])], V2)
        assert texts(result) == ["", "cd", "ab", ""]
        assert (result.best_at, result.best.text, result.null_at, result.null_odds) == (1, "cd", 3, -3.0)
        (result,) = search([Question("ab cd", [tokens])], Limits(n_best=1))
        assert (texts(result), result.best_at) == ([""], 0)
        (result,) = search([Question("ab cd", [tokens])], Limits(n_best=1, with_null=True))
        assert (texts(result), result.best_at, result.null_at, result.null_odds) == (["", ""], 1, 1, 0.0)


class TestLogits:
    WINDOW = words(FERRY, {"at": 3.0, "ferry": -2.5}, {"seven": 4.0, "at": 1.5}).windows[0]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_of_other_types(self, dtype: torch.dtype) -> None:
        logits, roles = logits_of(self.WINDOW), bytes(map(role, self.WINDOW))
        expected = window_candidates([logits], [roles], n_best=5, max_answer_length=4)
        assert expected.dtype == torch.float32
        assert torch.equal(window_candidates([logits.to(dtype)], [roles], n_best=5, max_answer_length=4), expected)

    def test_may_be_views_need_gradients_and_stay_as_they_are(self) -> None:
        logits, roles = logits_of(self.WINDOW), list(map(role, self.WINDOW))
        columns = logits.t().contiguous().requires_grad_()
        result = window_candidates([columns.t()], [roles], n_best=5, max_answer_length=4)
        assert torch.equal(result, window_candidates([logits], [bytes(roles)], n_best=5, max_answer_length=4))
        assert not result.requires_grad
        assert torch.equal(columns.detach().t(), logits)


class TestAnswer:
    QUESTION = words(FERRY, {"at": 3.0}, {"seven": 4.0}, null=4.0)

    def test_depends_on_the_threshold(self) -> None:
        (result,) = search([self.QUESTION], V2)
        assert (result.null_odds, result.null_at, result.best_at) == (1.0, 0, 1)
        assert [result.answer(threshold).text for threshold in (-INF, 0.0, 0.99)] == [""] * 3
        assert [result.answer(threshold).text for threshold in (1.0, 1.01, INF)] == ["at seven"] * 3


def test_nothing() -> None:
    assert candidates([], Limits(n_best=3)).shape == (0, 4, 4)
    assert search([], V2) == []
