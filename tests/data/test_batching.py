"""Features grouped into samples: the arrays agree with a plain count, whatever the windows."""

from itertools import accumulate, groupby
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_tasks.data.arrow import ArrowRows
from bert_tasks.data.features import Samples, Truncation, cached_features, filling_order, longest_first, token_batches
from bert_tasks.data.rows import Rows

# For each row the tokens of its windows.
WINDOWS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), max_size=12)
FEW = settings(max_examples=12, deadline=None, database=None, derandomize=True)


def stored(windows: list[list[int]], lost: int = 0) -> ArrowRows:
    pairs = [(row, tokens) for row, sizes in enumerate(windows) for tokens in sizes]
    columns = {
        "row": [row for row, _ in pairs],
        "input_ids": [list(range(tokens)) for _, tokens in pairs],
        "token_type_ids": [[0] * tokens for _, tokens in pairs],
        **{
            name: [None] * len(pairs)
            for name in ("labels", "gather_positions", "word_ids", "offsets", "sentence_starts", "head")
        },
        "lost_tokens": [lost if row % 2 else 0 for row, _ in pairs],
        "lost_answers": [0] * len(pairs),
    }
    nothing = cached_features(Rows.unchecked([]), features=lambda rows, tokenizer: [], tokenizer=None, key={})
    return ArrowRows.from_columns(columns, nothing.table().schema)


@FEW
@given(WINDOWS, st.sampled_from(["row", "window"]))
def test_samples_count_as_a_plain_loop_does(windows: list[list[int]], unit: Literal["row", "window"]) -> None:
    samples = Samples.of(stored(windows), unit)
    parts = windows if unit == "row" else [[tokens] for sizes in windows for tokens in sizes]
    assert samples.lengths.tolist() == [sum(sample) for sample in parts]
    assert samples.starts.tolist() == list(accumulate(map(len, parts), initial=0))
    assert samples.row_starts.tolist() == list(accumulate(map(len, windows), initial=0))
    assert samples.tokens.tolist() == [tokens for sizes in windows for tokens in sizes]


def test_features_of_samples() -> None:
    samples = Samples.of(stored([[3, 2], [4], [1, 1]]))
    features = samples.features_of([2, 0])
    assert [row for row, _ in groupby(feature["row"] for feature in features)] == [2, 0]
    assert [len(feature["input_ids"]) for feature in features] == [1, 1, 3, 2]
    assert [feature["row"] for feature in samples.decoded_rows(1, 3)] == [0, 1, 1]


def test_every_column_of_the_features_is_read_by_training_decoding_or_counting() -> None:
    samples = Samples.of(stored([[3, 2], [4]]))
    read = {*samples.trained.column_names, *samples.decoded.column_names, "lost_tokens", "lost_answers"}
    assert read == set(samples.features.column_names)


def test_a_row_of_several_windows_is_truncated_once() -> None:
    windows = [[1], [2, 2], [3], [4]]
    assert Truncation.of(stored(windows), rows=4).cut_rows == 0
    assert Truncation.of(stored(windows, lost=5), rows=4) == Truncation(rows=4, cut_rows=2, lost_answers=0)


@pytest.mark.parametrize("lengths", [[], [5], [2, 7, 7, 1, 7, 2]])
def test_the_longest_come_first_and_equals_stay_in_order(lengths: list[int]) -> None:
    order = [index for batch in longest_first(lengths, max_tokens=8) for index in batch]
    assert order == sorted(range(len(lengths)), key=lambda index: -lengths[index])


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 64))
@FEW
def test_the_filling_order_is_cut_into_full_batches(lengths: list[int], max_tokens: int) -> None:
    order = filling_order(lengths, max_tokens=max_tokens)
    assert sorted(order) == list(range(len(lengths)))
    batches = token_batches(order, lengths, max_tokens=max_tokens)
    left = set(order)
    for batch in batches:
        assert lengths[batch[0]] == max(lengths[index] for index in left), "the longest come first"
        left -= set(batch)
        room = max_tokens - sum(lengths[index] for index in batch)
        assert all(lengths[index] > room for index in left), "what fits was left out"


def test_batches_of_many_lengths_have_one_size() -> None:
    lengths = [1 + (7 * number) % 50 for number in range(400)]
    batches = token_batches(filling_order(lengths, max_tokens=256), lengths, max_tokens=256)
    assert {sum(lengths[index] for index in batch) for batch in batches[:-1]} == {256}
