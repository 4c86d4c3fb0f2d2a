"""Windows of a corpus: every token once and in order, as full as whole words allow."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from bert_tasks import TaskModel, evaluate, fit
from bert_tasks.checkpoints.stored_tokenizers import open_tokenizer
from bert_tasks.outputs.features import NO_WORD
from bert_tasks.outputs.vocabulary import MASK
from bert_tasks.tasks.corpus import tokenized_texts
from bert_tasks.tasks.masked_language_modeling import MaskedLanguageModeling
from bert_tasks.tasks.windows.corpus import DocumentTokens, cut_documents
from support.small_checkpoints import save_checkpoint
from support.small_tokenizers import LINES

SEP = 2


def documents_of(lengths: Sequence[Sequence[int]]) -> list[DocumentTokens]:
    """Documents of words of so many tokens, each token with an id of its own."""
    result, token = [], 10
    for words in lengths:
        ids = list(range(token, token + sum(words)))
        token += len(ids)
        result.append(DocumentTokens(ids=ids, words=[word for word, count in enumerate(words) for _ in range(count)]))
    return result


CORPORA = st.lists(st.lists(st.integers(1, 9), max_size=8), max_size=8)


@given(lengths=CORPORA, room=st.integers(1, 12), across=st.booleans())
def test_windows_hold_every_token_once_and_in_order(lengths: Sequence[Sequence[int]], room: int, across: bool) -> None:
    documents = documents_of(lengths)
    windows = list(cut_documents(documents, room=room, separator=SEP if across else None))
    held = [window.ids for window in windows]
    assert [token for ids in held for token in ids if token != SEP] == [
        token for document in documents for token in document.ids
    ]
    assert all(len(ids) <= room for ids in held)
    # Words are whole where they fit, and a window has no room for the first word of the next one.
    word_of = {
        token: (number, word)
        for number, document in enumerate(documents)
        for token, word in zip(document.ids, document.words, strict=True)
    }
    for before, after in pairwise(held):
        if not (before and after) or (not across and word_of[before[0]][0] != word_of[after[0]][0]):
            continue
        word = [token for token in word_of if word_of[token] == word_of[after[0]]]
        if len(word) <= room:
            assert after[0] == word[0]
        joins = word_of[before[-1]][0] != word_of[after[0]][0]
        assert len(before) + joins + min(len(word), room) > room
    for window, ids in zip(windows, held, strict=True):
        if ids:
            assert window.document == word_of[ids[0]][0]
        words = [(word_of[token] if token != SEP else None) for token in ids]
        numbers = window.words
        assert [len(list(group)) for _, group in groupby(words)] == [len(list(group)) for _, group in groupby(numbers)]
        assert all((word is None) == (number == NO_WORD) for word, number in zip(words, numbers, strict=True))
        kept = [number for number in numbers if number != NO_WORD]
        assert kept == sorted(kept)


@given(lengths=CORPORA, room=st.integers(1, 12))
def test_inside_documents_each_has_its_own_windows(lengths: Sequence[Sequence[int]], room: int) -> None:
    documents = documents_of(lengths)
    windows = list(cut_documents(documents, room=room))
    assert sorted({window.document for window in windows}) == list(range(len(documents)))
    for window in windows:
        document = documents[window.document]
        assert set(window.ids) <= set(document.ids)
        first = document.ids.index(window.ids[0]) if window.ids else 0
        assert window.words == list(document.words[first : first + len(window.ids)])


@pytest.mark.parametrize("separator", [None, SEP])
def test_a_document_without_tokens_is_a_window_without_any(separator: int | None) -> None:
    empty = documents_of([[], []])
    assert [window.ids for window in cut_documents(empty, room=4, separator=separator)] == [[]] * (
        2 if separator is None else 1
    )


def test_documents_are_read_one_by_one() -> None:
    read = []

    def corpus() -> Iterator[DocumentTokens]:
        for number, document in enumerate(documents_of([[1] * 8] * 3)):
            read.append(number)
            yield document

    windows = cut_documents(corpus(), room=4, separator=SEP)
    next(windows)
    assert read == [0]


# In the task


TEXTS = [*LINES[:6], "", "The ferry leaves the <mask> at seven.", *LINES[6:9]]


def rows_of(texts: Sequence[str]) -> list[dict[str, str]]:
    return [{"text": text} for text in texts]


def test_windows_across_documents_hold_all_tokens_and_masked_texts_stay_alone(
    bpe_tokenizer: PreTrainedTokenizerBase,
) -> None:
    across = MaskedLanguageModeling.of(max_length=40, fill="across")
    features = across.features(rows_of(TEXTS), bpe_tokenizer)
    plain = MaskedLanguageModeling.of(max_length=40).features(rows_of(TEXTS), bpe_tokenizer)
    added = {bpe_tokenizer.cls_token_id, bpe_tokenizer.sep_token_id}
    held, expected = (
        [t for feature in many for t in feature["input_ids"] if t not in added] for many in (features, plain)
    )
    assert held == expected
    assert len(features) < len(plain)
    assert [feature["row"] for feature in features] == sorted(feature["row"] for feature in features)
    alone = [feature for feature in features if bpe_tokenizer.mask_token_id in feature["input_ids"]]
    assert alone == [feature for feature in plain if feature["row"] == 7]
    (position,) = alone[0]["gather_positions"]
    assert alone[0]["word_ids"][position] == NO_WORD  # training masks no mask
    assert all(len(feature["input_ids"]) <= 40 for feature in features)


@pytest.mark.slow
def test_a_model_is_trained_and_evaluated_with_windows_across_documents(
    bpe_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "model", "roberta", bpe_tokenizer)
    model = TaskModel.from_pretrained(tmp_path / "model", task="fill-mask", fill="across", max_length=40)
    texts = LINES[:5] + [""] * 3
    result = fit(
        model,
        rows_of(texts),
        rows_of([*LINES[5:9], "", ""]),
        output_dir=tmp_path / "run",
        max_steps=3,
        batch_tokens=80,
        progress=False,
    )
    assert result.metrics["perplexity"] > 1
    saved = TaskModel.from_pretrained(tmp_path / "run")
    assert saved.task.fill == "across"
    assert evaluate(saved, rows_of([*LINES[5:9], "", ""])) == result.metrics
    masked = "We <mask> the film."
    together = saved.predict([LINES[0], masked, LINES[1]])
    assert [len(prediction.masks) for prediction in together] == [0, 1, 0]
    assert together[1].masks[0][0].token == saved.predict(masked)[0].masks[0][0].token


WRITTEN = st.lists(
    st.sampled_from(["a", "harbour", " ", "  ", "\n", "😀", "[MASK]", "<mask>", "{sep}", "{cls}", "{pad}", "{unk}"]),
    max_size=9,
)
KINDS = ["wordpiece", "unigram", "llama"]
KINDS += [
    pytest.param(kind, marks=pytest.mark.slow)
    for kind in ("bpe", "multilingual", "french", "mpnet", "modern", "deberta", "gemma")
]


@pytest.fixture(scope="module")
def opened_by_kind(
    by_kind: dict[str, PreTrainedTokenizerBase], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, PreTrainedTokenizerBase]:
    """The tokenizers of a checkpoint, as models open them."""
    opened = {}
    for kind, tokenizer in by_kind.items():
        folder = tmp_path_factory.mktemp(kind)
        tokenizer.save_pretrained(folder)
        opened[kind] = open_tokenizer(folder, vocab_size=40_000, second=0)
    return opened


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=15)  # the first text with both is slow, because the tokenizer is copied
@given(pieces=WRITTEN)
def test_only_masks_are_special_in_a_text(
    kind: str, pieces: list[str], opened_by_kind: Mapping[str, PreTrainedTokenizerBase]
) -> None:
    """A special token beside a mask is split as in a text without a mask, and would end the sequence otherwise."""
    tokenizer = opened_by_kind[kind]
    special = {role: str(getattr(tokenizer, f"{role}_token")) for role in ("sep", "cls", "pad", "unk")}
    text = "".join(pieces).format_map({role: token.replace("None", "") for role, token in special.items()})
    (document,) = tokenized_texts([text], tokenizer)
    mask = str(tokenizer.mask_token)
    assert list(document.ids).count(tokenizer.mask_token_id) == len(MASK.findall(text))
    written = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id, tokenizer.mask_token_id}
    assert written.isdisjoint(document.ids)
    without = "".join(pieces).format_map(dict.fromkeys(special, ""))
    (document,) = tokenized_texts([without], tokenizer)
    assert document.ids == tokenizer(MASK.sub(mask, without), add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_beside_a_mask_have_the_ids_of_their_characters(
    kind: str, opened_by_kind: Mapping[str, PreTrainedTokenizerBase]
) -> None:
    tokenizer = opened_by_kind[kind]
    for token in tokenizer.all_special_tokens:
        if MASK.fullmatch(token) or token == tokenizer.mask_token:
            continue
        plain, masked = tokenized_texts([f"a {token}", f"a {token}[MASK]"], tokenizer)
        assert list(masked.ids) == [*plain.ids, tokenizer.mask_token_id]
