"""Tag schemes: detection, conversion both ways, entities, and what each scheme forbids."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_tasks.data.conll import (
    Entity,
    continuation_label,
    detect_scheme,
    entities,
    from_iob2,
    invalid_transitions,
    label_scheme,
    to_iob2,
    to_labels,
)

quick = settings(max_examples=30, deadline=None, database=None)
TYPES = ["X", "Y", "per-nam"]
CHUNK_SCHEMES = ["IOB1", "IOB2", "BIOES"]
BILOU = str.maketrans("ES", "LU")
BMES = str.maketrans("I", "M")


@st.composite
def spans(draw):
    """The length of a sentence and its entities; short gaps make neighbours of one type common."""
    position, result = 0, []
    for gap, length, label in draw(
        st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.sampled_from(TYPES)), max_size=6)
    ):
        result.append(Entity(type=label, start=position + gap, end=position + gap + length))
        position += gap + length
    return position + draw(st.integers(0, 2)), result


def written(length, annotations, scheme):
    """The sentence in a scheme, from the scheme's definition."""
    tags = ["O"] * length
    for entity in annotations:
        before = tags[entity.start - 1][2:] if entity.start > 0 else ""
        first = "I" if scheme == "IOB1" and before != entity.type else "B"
        roles = first + "I" * (entity.end - entity.start - 1)
        if scheme == "BIOES":
            roles = "S" if len(roles) == 1 else roles[:-1] + "E"
        tags[entity.start : entity.end] = [f"{role}-{entity.type}" for role in roles]
    return tags


def respelt(tags, letters):
    return [tag[0].translate(letters) + tag[1:] for tag in tags]


any_tags = st.lists(
    st.sampled_from(["O", *(f"{prefix}-{entity_type}" for prefix in "BIESLUM" for entity_type in TYPES)]), max_size=8
)


@quick
@given(spans())
def test_each_scheme_is_written_as_defined_and_read_back(sentence):
    length, annotations = sentence
    iob2 = written(length, annotations, "IOB2")
    for scheme in CHUNK_SCHEMES:
        tags = written(length, annotations, scheme)
        assert from_iob2(iob2, scheme) == tags
        assert to_iob2(tags) == iob2
        assert entities(tags) == annotations
        assert invalid_transitions(tags, scheme) == 0


@quick
@given(spans())
def test_other_letters_of_bioes_are_read(sentence):
    tags = written(*sentence, "BIOES")
    for letters in (BILOU, BMES):
        assert to_iob2(respelt(tags, letters)) == written(*sentence, "IOB2")
        assert invalid_transitions(respelt(tags, letters), "BIOES") == 0


@quick
@given(any_tags)
def test_conversion_is_idempotent_and_valid_whatever_comes_in(tags):
    iob2 = to_iob2(tags)
    assert to_iob2(iob2) == iob2
    assert invalid_transitions(iob2) == 0
    assert [tag[1:] for tag in iob2] == [tag[1:] for tag in tags]
    for scheme in CHUNK_SCHEMES:
        assert to_iob2(from_iob2(iob2, scheme)) == iob2
        assert invalid_transitions(from_iob2(iob2, scheme), scheme) == 0
        assert entities(from_iob2(tags, scheme)) == entities(tags)


@quick
@given(st.lists(spans(), max_size=4), st.sampled_from(CHUNK_SCHEMES))
def test_detected_scheme_reads_the_file(sentences, scheme):
    """Where two schemes write a file alike either may be named; the entities are the same."""
    tagged = [written(*sentence, scheme) for sentence in sentences]
    alike = {
        other: [from_iob2(written(*sentence, "IOB2"), other) for sentence in sentences] == tagged
        for other in CHUNK_SCHEMES
    }
    assert alike[detect_scheme(iter(tagged))]


@pytest.mark.parametrize(
    ("sentences", "scheme"),
    [
        ([["I-X", "O"], ["I-Y", "I-X", "B-X"]], "IOB1"),
        ([["O", "I-X", "I-X"]], "IOB1"),
        ([["I-X", "O"], ["B-X", "O"]], "IOB2"),  # an invalid start within IOB2
        ([["I-X", "B-Y"]], "IOB2"),  # B- after another type parts nothing
        ([["B-X", "I-X", "O"]], "IOB2"),
        ([["B-X", "B-X"]], "IOB2"),
        ([["B-X", "I-X"], ["S-X"]], "BIOES"),
        ([["B-X", "E-X"]], "BIOES"),
        ([["I-X", "O", "U-X"]], "BIOES"),
        ([["B-X", "L-X"]], "BIOES"),
        ([["O", "O"], []], "IOB2"),
        ([], "IOB2"),
        ([["B-X", "O"], ["NOUN"]], "raw"),
        ([["B", "I", "O"]], "raw"),
        ([["B-", "O"]], "raw"),
        ([["X-PER", "O"]], "raw"),
        ([["b-X"]], "raw"),
        ([[""]], "raw"),
    ],
)
def test_scheme_of_a_file(sentences, scheme):
    assert detect_scheme(sentences) == scheme


@pytest.mark.parametrize("scheme", [*CHUNK_SCHEMES, "raw"])
def test_raw_sentences_are_left_alone(scheme):
    raw = ["DET", "NOUN", "I-X", "O"]
    assert to_iob2(raw) == from_iob2(raw, scheme) == to_labels(raw, ["O", "B-X", "I-X"]) == raw
    assert entities(raw) == []
    assert invalid_transitions(raw, scheme) == 0


def conlleval_entities(tags):
    """Chunks of B-, I- and O as conlleval's published rules begin and end them."""
    chunks, start = [], None
    before, kind_before = "O", ""
    for index, tag in enumerate([*tags, "O"]):
        role, _, entity_type = tag.partition("-")
        changed = entity_type != kind_before
        if start is not None and (role in ("B", "O") or changed):
            chunks.append((kind_before, start, index))
            start = None
        if role == "B" or (role == "I" and (before == "O" or changed)):
            start = index
        before, kind_before = role, entity_type
    return chunks


@pytest.mark.parametrize("length", range(6))
def test_entities_are_those_of_conlleval_in_every_sentence(length):
    for tags in product(["O", "B-X", "I-X", "B-Y", "I-Y"], repeat=length):
        chunks = [(entity.type, entity.start, entity.end) for entity in entities(tags)]
        assert chunks == conlleval_entities(tags)


@pytest.mark.parametrize(
    ("scheme", "tags", "count"),
    [
        ("IOB2", ["I-X", "I-X", "O", "I-X"], 2),
        ("IOB2", ["B-X", "I-Y", "I-Y"], 1),
        ("IOB2", ["B-X", "I-X", "B-X", "I-X"], 0),
        ("IOB1", ["B-X", "I-X", "B-X"], 1),
        ("IOB1", ["I-X", "B-Y"], 1),
        ("IOB1", ["I-X", "B-X", "I-Y"], 0),
        ("BIOES", ["B-X"], 1),
        ("BIOES", ["B-X", "O", "I-X"], 3),  # left open; entered inside; left open at the end
        ("BIOES", ["B-X", "I-X", "E-X", "E-X"], 1),
        ("BIOES", ["B-X", "E-Y"], 1),
        ("BIOES", ["S-X", "S-X", "B-Y", "E-Y"], 0),
        ("BIOES", ["U-X", "B-Y", "I-Y", "L-Y"], 0),
        ("BIOES", [], 0),
    ],
)
def test_invalid_transitions(scheme, tags, count):
    assert invalid_transitions(tags, scheme) == count


@pytest.mark.parametrize(
    ("labels", "scheme"),
    [
        (["O", "B-X", "I-X", "B-Y"], "IOB2"),
        (["O", "B-X", "I-X", "I-Y"], "IOB1"),
        (["I-X", "O"], "IOB1"),
        (["O", "B-X", "I-X", "E-X", "S-X"], "BIOES"),
        (["O", "B-X", "L-X"], "BIOES"),
        (["O", "U-X"], "BIOES"),
        (["B-X"], "IOB2"),
        (["O"], "IOB2"),
        (["LABEL_0", "LABEL_1"], "raw"),
        (["O", "B-X", "I-X", "[CLS]"], "raw"),
    ],
)
def test_scheme_of_a_label_set(labels, scheme):
    assert label_scheme(labels) == scheme


def label_set(prefixes):
    return ["O", *(f"{prefix}-{entity_type}" for entity_type in TYPES for prefix in prefixes)]


@quick
@given(spans(), st.sampled_from(["BI", "BIES", "BILU", "BMES", "IE", "BIE", "BIL", "BIS", "BIU"]))
def test_label_sets_say_every_sentence_in_their_own_words(sentence, prefixes):
    """Also those with gaps, such as no label for the only word of an entity."""
    labels = label_set(prefixes)
    iob2 = written(*sentence, "IOB2")
    said = to_labels(iob2, labels)
    assert set(said) <= set(labels)
    assert to_iob2(said) == iob2
    if prefixes not in ("BI", "BIES", "BILU", "BMES"):
        return
    letters = {"BILU": BILOU, "BMES": BMES}.get(prefixes, {})
    assert said == respelt(iob2 if prefixes == "BI" else from_iob2(iob2, "BIOES"), letters)


@pytest.mark.parametrize(
    ("tags", "labels", "expected"),
    [
        (["B-X", "I-X", "B-X", "O"], ["O", "I-X"], ["I-X", "I-X", "I-X", "O"]),
        (["B-X", "B-X", "B-Y", "B-Y"], ["O", "I-X", "I-Y", "B-Y"], ["I-X", "I-X", "I-Y", "B-Y"]),
        (["B-Z", "I-Z"], ["O", "B-X", "I-X"], ["B-Z", "I-Z"]),  # unknown type
        (["B-X", "I-X"], ["O", "B-X"], ["B-X", "I-X"]),  # a second B-X would be another entity
        (["B-X", "I-X"], ["X", "Y"], ["B-X", "I-X"]),
    ],
)
def test_what_a_label_set_cannot_say(tags, labels, expected):
    assert to_labels(tags, labels) == expected


@pytest.mark.parametrize(
    ("label", "continued"),
    [
        ("B-X", "I-X"),
        ("B-per-nam", "I-per-nam"),
        ("I-X", "I-X"),
        ("O", "O"),
        ("S-X", "S-X"),
        ("NOUN", "NOUN"),
        ("B-", "B-"),
        ("B", "B"),
    ],
)
def test_continuation_label(label, continued):
    assert continuation_label(label, {label, continued}) == continued


def test_continuation_label_is_one_of_the_labels():
    assert continuation_label("B-X", {"B-X", "M-X", "E-X"}) == "M-X"
    assert continuation_label("B-X", {"B-X", "I-Y"}) == "B-X"
