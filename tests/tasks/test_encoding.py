"""Texts and pairs cut to a maximum length, against the truncation of transformers' tokenizers."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from bert_tasks.errors import UsageError
from bert_tasks.tasks.windows.texts import (
    EncodedText,
    kept_tokens,
    long_text_ids,
    text_windows,
    token_characters,
    truncated_texts,
)
from support.small_tokenizers import LINES, MULTILINGUAL_LINES, REPLACED

KINDS = ("wordpiece", "bpe", "unigram", "multilingual", "french", "mpnet", "modern", "deberta", "llama", "gemma")
SIDES = ("right", "left")  # in turn
FAST = ("wordpiece", "bpe", "unigram")
TOKENIZERS = [
    pytest.param((kind, side), marks=() if kind in FAST else pytest.mark.slow, id=f"{kind}-{side}")
    for kind, side in zip(KINDS, cycle(SIDES), strict=False)
]
PIECES = [
    *(word for line in (*LINES, *MULTILINGUAL_LINES) for word in line.split()),
    *REPLACED,
    *("[SEP]", "[CLS]", "<s>", "</s>", "<mask>", "[MASK]", "<|end_of_text|>", "<bos>"),
    *("😀", "👩‍👩‍👧", "é", "e\u0301", "\u200d", "x" * 120, "co-op", "7.5%", "\n", "\t", "▁", "_"),
]
SEPARATORS = ("", " ", " ", " ", "  ", "\n")
TEXTS = 30


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(
    request: pytest.FixtureRequest, by_kind: dict[str, PreTrainedTokenizerBase]
) -> Iterator[PreTrainedTokenizerBase]:
    kind, side = request.param
    tokenizer = by_kind[kind]
    usual, tokenizer.truncation_side = tokenizer.truncation_side, side
    yield tokenizer
    tokenizer.truncation_side = usual


def random_text(chance: random.Random) -> str:
    words = chance.choice((0, 1, 2, 5, 12))
    return "".join(chance.choice(PIECES) + chance.choice(SEPARATORS) for _ in range(words))


def random_texts(count: int, seed: int) -> list[str]:
    chance = random.Random(seed)
    return [random_text(chance) for _ in range(count)]


def stock(tokenizer: PreTrainedTokenizerBase, *texts: list[str], **options: Any) -> Any:
    """What transformers' tokenizer makes of texts."""
    return tokenizer(
        *texts,
        return_token_type_ids=True,
        return_attention_mask=False,
        return_offsets_mapping=True,
        split_special_tokens=True,
        verbose=False,
        **options,
    )


def stock_characters(encoding: Any) -> Iterator[list[tuple[int, int, int] | None]]:
    for number, spans in enumerate(encoding["offset_mapping"]):
        sides = encoding.sequence_ids(number)
        yield [None if side is None else (side, *span) for side, span in zip(sides, spans, strict=True)]


def compare(encoded: list[EncodedText], expected: Any) -> None:
    assert [window.input_ids for window in encoded] == expected["input_ids"]
    assert [window.token_type_ids for window in encoded] == expected["token_type_ids"]


@pytest.mark.parametrize("max_length", [3, 12, 31])
def test_a_text_is_cut_as_transformers_cuts_it(tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
    texts = ["", *random_texts(TEXTS, max_length)]
    encoded = truncated_texts([texts], tokenizer, max_length=max_length)
    compare(encoded, stock(tokenizer, texts, truncation=True, max_length=max_length))
    whole = stock(tokenizer, texts)["input_ids"]
    for window, ids in zip(encoded, whole, strict=True):
        assert window.lost_tokens == len(ids) - len(window.input_ids)


@pytest.mark.parametrize("max_length", [5, 6, 13, 32])
def test_a_pair_is_cut_as_transformers_cuts_it(tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
    firsts = ["", "", "a", *random_texts(TEXTS, max_length)]
    seconds = ["", "a", "", *random_texts(TEXTS, max_length + 1)]
    encoded = truncated_texts([firsts, seconds], tokenizer, max_length=max_length)
    compare(encoded, stock(tokenizer, firsts, seconds, truncation=True, max_length=max_length))
    whole = stock(tokenizer, firsts, seconds)["input_ids"]
    for window, ids in zip(encoded, whole, strict=True):
        assert window.lost_tokens == len(ids) - len(window.input_ids)


@pytest.mark.parametrize("max_length", [10, 33])
def test_only_the_first_text_is_cut_as_transformers_cuts_it(
    tokenizer: PreTrainedTokenizerBase, max_length: int
) -> None:
    firsts = ["", *random_texts(TEXTS, max_length)]
    seconds = ["a"] * len(firsts)
    options: Any = {"max_length": max_length}
    encoded = truncated_texts([firsts, seconds], tokenizer, strategy="only_first", **options)
    compare(encoded, stock(tokenizer, firsts, seconds, truncation="only_first", **options))


@pytest.mark.parametrize(("max_length", "overlap"), [(3, 0), (12, 9), (33, 17)])
def test_windows_are_those_of_transformers(tokenizer: PreTrainedTokenizerBase, max_length: int, overlap: int) -> None:
    texts = ["", *random_texts(TEXTS, max_length)]
    options: Any = {"truncation": True, "return_overflowing_tokens": True}
    expected = stock(tokenizer, texts, max_length=max_length, stride=overlap, **options)
    encoded = text_windows(texts, tokenizer, max_length=max_length, overlap=overlap)
    compare(encoded, expected)
    assert [window.row for window in encoded] == expected["overflow_to_sample_mapping"]
    assert {window.lost_tokens for window in encoded} == {0}


def test_characters_are_those_of_transformers(tokenizer: PreTrainedTokenizerBase) -> None:
    firsts, seconds = random_texts(TEXTS, 1), random_texts(TEXTS, 2)
    for texts in ([firsts], [firsts, seconds]):
        encoded = truncated_texts(texts, tokenizer, max_length=500)
        assert [*token_characters(encoded, texts, tokenizer)] == [*stock_characters(stock(tokenizer, *texts))]


def test_a_cut_text_has_the_characters_of_the_whole_text(tokenizer: PreTrainedTokenizerBase) -> None:
    """The library trims the first token of a piece otherwise than the same token within the text."""
    firsts, seconds = random_texts(TEXTS, 1), random_texts(TEXTS, 2)
    whole = [[*stock_characters(stock(tokenizer, texts, add_special_tokens=False))] for texts in (firsts, seconds)]
    encoded = truncated_texts([firsts, seconds], tokenizer, max_length=13)
    for window, characters in zip(encoded, token_characters(encoded, [firsts, seconds], tokenizer), strict=True):
        assert len(characters) == len(window.input_ids)
        for side, part in enumerate(window.parts):
            inside = [token[1:] for token in characters if token is not None and token[0] == side]
            assert inside == [token[1:] for token in whole[side][window.row][part.start : part.stop] if token]


def test_a_long_text_has_the_tokens_of_the_whole_text(tokenizer: PreTrainedTokenizerBase) -> None:
    """Pieces end between words, also after words that tokenizers read in another way at the beginning of a text."""
    for seed, size in enumerate((1, 40, 300, 10**6)):
        text = " ".join([*random_texts(60, seed), *MULTILINGUAL_LINES, *LINES])
        whole = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
        assert long_text_ids(text, tokenizer, size=size) == whole


def test_a_second_text_that_leaves_no_room() -> None:
    with pytest.raises(UsageError, match="the second text of a pair has 9 tokens, but there is room for 9 in both"):
        kept_tokens([1, 9], 9, "only_first")


@pytest.mark.parametrize(("texts", "least"), [(1, 3), (2, 5)])
def test_special_tokens_that_leave_no_room(texts: int, least: int, bpe_tokenizer: PreTrainedTokenizerBase) -> None:
    columns = [["a"]] * texts
    assert len(truncated_texts(columns, bpe_tokenizer, max_length=least)[0].input_ids) == least
    with pytest.raises(UsageError, match=rf"leave no room for a text\. Set max_length to {least} or more"):
        truncated_texts(columns, bpe_tokenizer, max_length=least - 1)


def test_an_overlap_that_leaves_no_room(wordpiece_tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UsageError, match="windows of 8 tokens, 2 of them special, cannot overlap by 6"):
        text_windows(["a"], wordpiece_tokenizer, max_length=8, overlap=6)


def test_no_texts(wordpiece_tokenizer: PreTrainedTokenizerBase) -> None:
    assert truncated_texts([[], []], wordpiece_tokenizer, max_length=8) == []
    assert text_windows([], wordpiece_tokenizer, max_length=8, overlap=0) == []


# Prints by how many MiB the peak memory grows while a process of its own makes features of long texts.
MEMORY = """
import resource, sys
from transformers import AutoTokenizer
from support.task_examples import EXAMPLES

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
texts = dict.fromkeys(("text", "text_pair", "context", "question"), "q " * 8000)
for name in sys.argv[2:]:
    example = EXAMPLES[name]
    task = example.task.with_settings(max_length=128)
    row = {column: value for column, value in example.rows[1].items() if column != "answers"}
    task.features([row], tokenizer)
    before = peak()
    task.features([{column: texts.get(column, value) for column, value in row.items()}] * 3, tokenizer)
    print(peak() - before)
"""


@pytest.mark.slow
def test_memory_is_bounded_by_the_length_of_the_texts(embedded_model: Path) -> None:
    """The library ``tokenizers`` would make 15,000 combinations of the parts of such a pair."""
    names = ("single", "windows", "pair", "choice", "span", "masked")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", MEMORY, str(embedded_model), *names]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    growth = dict(zip(names, map(int, output.split()), strict=True))
    assert max(growth.values()) < 100, growth


# Prints by how many MiB the peak memory grows while a text of three million characters is cut.
LONG_TEXT = """
import resource, sys
from transformers import AutoTokenizer
from bert_tasks.tasks.windows.texts import truncated_texts

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
text = "quick brown foxes " * 170_000
truncated_texts([["a text"]], tokenizer, max_length=128)
before = peak()
truncated_texts([[text]], tokenizer, max_length=128)
print(peak() - before)
"""


@pytest.mark.slow
def test_a_long_text_needs_memory_of_few_times_its_size(embedded_model: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", LONG_TEXT, str(embedded_model)]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert int(output) < 20 * 3  # tokenized whole, it needs hundreds of times its size
