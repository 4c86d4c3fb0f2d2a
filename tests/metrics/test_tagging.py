"""Tagging metrics against conlleval's counting in plain Python, against scikit-learn, and at their edges."""

import subprocess
import sys

import pytest
import sklearn.metrics
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_tasks.errors import DataError
from bert_tasks.metrics.tagging import check_names, tagging_metrics

quick = settings(max_examples=40, deadline=None, database=None)
IOB2_TAGS = ["O", "B-X", "I-X", "B-Y", "I-Y"]


@st.composite
def tagged(draw, tags):
    """References and predictions of 1 to 4 sentences, which may be empty but not all."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(any))
    sentence = st.sampled_from(tags)
    return [
        [draw(st.lists(sentence, min_size=length, max_size=length)) for length in lengths] for _ in ("actual", "given")
    ]


def chunk_begins(before, kind_before, role, chunk_type):
    """conlleval's rule for B, I and O."""
    return role == "B" or (role == "I" and (before == "O" or kind_before != chunk_type))


def chunk_ends(before, kind_before, role, chunk_type):
    return before in ("B", "I") and (role in ("B", "O") or kind_before != chunk_type)


def lenient_chunks(tags):
    return _chunks(tags, chunk_begins)


def strict_chunks(tags):
    """As ``lenient_chunks``, but only B begins one: an I- with nothing to continue belongs to none."""
    return _chunks(tags, lambda before, kind_before, role, chunk_type: role == "B")


def _chunks(tags, begins):
    chunks, start = set(), None
    before, kind_before = "O", ""
    for index, tag in enumerate([*tags, "O"]):
        role, _, chunk_type = tag.partition("-")
        if chunk_ends(before, kind_before, role, chunk_type) and start is not None:
            chunks.add((kind_before, start, index))
            start = None
        if begins(before, kind_before, role, chunk_type):
            start = index
        before, kind_before = role, chunk_type
    return chunks


def scores(name, actual, predicted, entity_type=None):
    """Precision, recall and F1 of chunks ``(sentence, type, start, end)``, by the formulas."""
    actual = {chunk for chunk in actual if entity_type in (None, chunk[1])}
    predicted = {chunk for chunk in predicted if entity_type in (None, chunk[1])}
    both = len(actual & predicted)
    precision = both / len(predicted) if predicted else 0.0
    recall = both / len(actual) if actual else 0.0
    f1 = 2 * precision * recall / (precision + recall) if both else 0.0
    return {f"{name}_precision": precision, f"{name}_recall": recall, f"{name}_f1": f1}


def in_file(sentences, chunks):
    return {(number, *chunk) for number, tags in enumerate(sentences) for chunk in chunks(tags)}


def expected_entity_metrics(labels, predictions):
    actual, predicted = (in_file(sentences, lenient_chunks) for sentences in (labels, predictions))
    words = [(a, p) for left, right in zip(labels, predictions, strict=True) for a, p in zip(left, right, strict=True)]
    expected = {
        **scores("overall", actual, predicted),
        **scores("strict_overall", *(in_file(sentences, strict_chunks) for sentences in (labels, predictions))),
        "overall_accuracy": sum(a == p for a, p in words) / len(words),
        "invalid_transitions": sum(predictions[number][start][0] == "I" for number, _, start, _ in predicted),
    }
    for entity_type in {chunk[1] for chunk in actual | predicted}:
        expected |= scores(entity_type, actual, predicted, entity_type)
        expected[f"{entity_type}_number"] = sum(chunk[1] == entity_type for chunk in actual)
    return expected


@quick
@given(tagged(IOB2_TAGS))
def test_entity_metrics_equal_conlleval_counting(sides):
    labels, predictions = sides
    ours = tagging_metrics(labels, predictions)
    assert ours == pytest.approx(expected_entity_metrics(labels, predictions), abs=1e-14)
    assert all(type(value) is float for value in ours.values())


@pytest.mark.parametrize(
    ("tag", "raw", "key"),
    [("B-overall", False, "overall_f1"), ("I-strict_overall", False, "strict_overall_f1"), ("macro", True, "macro_f1")],
)
def test_a_name_that_gives_two_metrics_one_key_is_refused(tag, raw, key):
    for check in (lambda: tagging_metrics([[tag, "O"]], [["O", "O"]], raw=raw), lambda: check_names([tag], raw=raw)):
        with pytest.raises(DataError, match=f"metrics: .*'{key}'.* would be reported twice"):
            check()


NAMES = st.sampled_from(["overall", "strict_overall", "macro", "loss", "f1", "overall_f1", "a/b", "number"])


@quick
@given(st.sets(NAMES, min_size=1), st.booleans())
def test_every_name_has_its_own_four_numbers_or_is_refused(names, raw):
    tags = [[name if raw else f"B-{name}" for name in sorted(names)]]
    reserved = {"macro"} if raw else {"overall", "strict_overall"}
    if names & reserved:
        with pytest.raises(DataError, match="would be reported twice"):
            tagging_metrics(tags, tags, raw=raw)
        return
    check_names(tags[0], raw=raw)
    metrics = tagging_metrics(tags, tags, raw=raw)
    assert len(metrics) == 4 * len(names) + (2 if raw else 8)
    assert all(metrics[f"{name}_{score}"] == 1.0 for name in names for score in ("precision", "recall", "f1", "number"))


@pytest.mark.parametrize(
    ("labels", "predictions", "accuracy"),
    [
        ([["O", "O"]], [["O", "O"]], 1.0),
        ([["O", "O"]], [["O", "B-X"]], 0.5),
        ([["B-X", "O"]], [["O", "O"]], 0.5),
        ([[], ["O"]], [[], ["O"]], 1.0),
    ],
)
def test_no_entity_on_a_side_counts_zero_without_a_warning(labels, predictions, accuracy):
    metrics = tagging_metrics(labels, predictions)
    assert metrics.pop("overall_accuracy") == accuracy
    metrics.pop("X_number", None)
    assert set(metrics.values()) == {0.0}
    assert {"overall_f1", "strict_overall_f1", "invalid_transitions"} <= set(metrics)


@quick
@given(tagged(["NOUN", "VERB", "O", "X-Y"]))
def test_raw_tags_equal_scikit_learn(sides):
    labels, predictions = ([tag for tags in sentences for tag in tags] for sentences in sides)
    names = sorted({*labels, *predictions})
    precision, recall, f1, number = sklearn.metrics.precision_recall_fscore_support(
        labels, predictions, labels=names, zero_division=0
    )
    expected = {
        "overall_accuracy": sklearn.metrics.accuracy_score(labels, predictions),
        "macro_f1": sklearn.metrics.f1_score(labels, predictions, average="macro", zero_division=0),
    }
    for index, name in enumerate(names):
        columns = {"precision": precision, "recall": recall, "f1": f1, "number": number}
        expected |= {f"{name}_{key}": float(values[index]) for key, values in columns.items()}
    ours = tagging_metrics(*sides, raw=True)
    assert ours == pytest.approx(expected, abs=1e-14)
    assert all(type(value) is float for value in ours.values())


@pytest.mark.slow
def test_seqeval_is_loaded_only_when_entities_are_counted():
    code = (
        "import sys; from bert_tasks.metrics.tagging import tagging_metrics\n"
        "tagging_metrics([['NOUN']], [['NOUN']], raw=True)\n"
        "print(sorted({'seqeval', 'sklearn'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("sentences", [[], [[], []]])
def test_no_words_are_an_error(sentences):
    with pytest.raises(DataError, match="no words to compare"):
        tagging_metrics(sentences, sentences)
