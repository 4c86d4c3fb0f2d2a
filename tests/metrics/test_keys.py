"""Keys of metrics: what a set and a metric are called never makes two of them one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_tasks.errors import DataError
from bert_tasks.metrics.tables import (
    merged,
    metric_key,
    metrics_by_set,
    metrics_of_set,
    split_key,
)

SETS = st.lists(
    st.text(st.characters(exclude_characters="/"), min_size=1, max_size=4) | st.sampled_from(["dev", "dev_strict"]),
    min_size=1,
    max_size=4,
    unique=True,
)
METRICS = st.dictionaries(st.text(max_size=6) | st.sampled_from(["loss", "strict_loss", "f1_a/b"]), st.floats(0, 1))


@given(SETS, METRICS)
def test_named_sets_keep_their_metrics_apart(sets: list[str], metrics: dict[str, float]) -> None:
    each = {name: {metric: value + offset for metric, value in metrics.items()} for offset, name in enumerate(sets)}
    keyed = [
        {metric_key(name, metric): value for metric, value in set_metrics.items()} for name, set_metrics in each.items()
    ]
    recorded = merged(*keyed)
    assert len(recorded) == len(sets) * len(metrics)
    assert metrics_by_set(recorded, sets) == each == {name: metrics_of_set(recorded, name) for name in sets}
    assert {split_key(key, sets) for key in recorded} == {(name, metric) for name in sets for metric in metrics}


@given(METRICS)
def test_one_set_without_a_name_leaves_metrics_as_they_are(metrics: dict[str, float]) -> None:
    assert {metric_key("", metric): value for metric, value in metrics.items()} == metrics
    assert metrics_of_set(metrics, "") == metrics
    assert [split_key(key, [""]) for key in metrics] == [("", key) for key in metrics]


def test_a_key_that_stands_twice_is_refused() -> None:
    assert merged({"a": 1.0}, {}, {"b": 2.0}) == {"a": 1.0, "b": 2.0}
    with pytest.raises(DataError, match="'a', 'b' would be reported twice"):
        merged({"a": 1.0, "b": 2.0, "c": 3.0}, {"b": 2.0, "a": 1.0})
