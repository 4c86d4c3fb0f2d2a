"""Outputs equal transformers' for every family and head, padded and packed, at weights where errors show.

In float64 two correct implementations differ by rounding alone; tests/model/test_mutations.py shows that the tolerance
leaves no room for a fault.
"""

import csv
import os
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedTokenizerBase

from support.hf_models import (
    AFTER_PADDING,
    EVERY_HEAD,
    FAMILIES,
    Head,
    HFBatch,
    hf_config,
    hf_model,
    random_batch,
    tolerance_float32,
)
from support.parity import (
    Model,
    difference,
    hf_output,
    ours_from,
    packed_difference,
    packed_output,
    shaped_difference,
    shaped_output,
)
from support.sampling import one_of_each, slow_except

TOLERANCE = 1e-10
Side = Literal["left", "right"]
# 48 is the most that these models have positions for; near and equal lengths share a group.
LENGTHS = (17, 1, 48, 9, 2, 46, 17, 30, 16)
BOTH = pytest.mark.parametrize("family", slow_except(FAMILIES, "bert", "roberta"))
ALL_HEADS = pytest.mark.parametrize(("family", "head"), one_of_each(EVERY_HEAD))


def to_the_left(batch: HFBatch) -> HFBatch:
    """The same sequences with their padding moved to the left."""
    shifts = (batch.attention_mask.shape[1] - batch.attention_mask.sum(1)).tolist()

    def roll(rows: Tensor) -> Tensor:
        return torch.stack([row.roll(shift) for row, shift in zip(rows, shifts, strict=True)])

    return HFBatch(
        input_ids=roll(batch.input_ids),
        attention_mask=roll(batch.attention_mask),
        token_type_ids=roll(batch.token_type_ids),
    )


@pytest.mark.every_family
@pytest.mark.parametrize(("family", "head"), one_of_each(EVERY_HEAD, every_family=True))
def test_right_padding(family: str, head: Head) -> None:
    theirs = hf_model(family, head)
    ours = ours_from(theirs, head)
    batch = random_batch(family, lengths=LENGTHS)
    assert shaped_difference(theirs, ours, batch) <= TOLERANCE
    assert packed_difference(theirs, ours, batch) <= TOLERANCE


@pytest.mark.parametrize(("family", "head"), one_of_each([case for case in EVERY_HEAD if case[1] != "sequence"]))
def test_left_padding(family: str, head: Head) -> None:
    theirs = hf_model(family, head)
    batch = random_batch(family, lengths=LENGTHS, side="left")
    assert shaped_difference(theirs, ours_from(theirs, head), batch) <= TOLERANCE


@BOTH
def test_the_sequence_head_reads_the_first_real_token_under_left_padding(family: str) -> None:
    """transformers reads column 0, which holds padding; with equal positions ours gives the right-padded logits."""
    first = {"classifier_pooling": "bos"} if family == "eurobert" else {}
    theirs = hf_model(family, "sequence", config=hf_config(family, **first))
    ours = ours_from(theirs, "sequence")
    right = random_batch(family, lengths=LENGTHS)
    left = to_the_left(right)
    offset = ours.config.position_offset
    positions = (left.attention_mask.cumsum(1) - 1).clamp(min=0) + offset
    with torch.no_grad():
        expected = hf_output(theirs, right)
        logits = shaped_output(ours, left, position_ids=positions)
        assert difference(expected, logits, right.attention_mask) <= TOLERANCE
        assert difference(hf_output(theirs, left), logits, left.attention_mask) > 1e-3


def test_roberta_packs_left_padding_too() -> None:
    """RoBERTa counts tokens, not columns, so that packing changes no position."""
    theirs = hf_model("roberta", "token")
    batch = random_batch("roberta", lengths=LENGTHS, side="left")
    assert packed_difference(theirs, ours_from(theirs, "token"), batch) <= TOLERANCE


@ALL_HEADS
@pytest.mark.parametrize("side", ["right", "left"])
def test_masks_with_holes(family: str, head: Head, side: Side) -> None:
    theirs = hf_model(family, head)
    batch = random_batch(family, lengths=(17, 1, 30, 9), side=side)
    mask = batch.attention_mask.clone()
    mask[0, -12:-9] = mask[2, 4:9] = mask[2, 20] = mask[3, -5] = 0
    if head == "sequence":  # keeps the token that transformers' head reads
        mask[:, 0] = 1
    holed = HFBatch(input_ids=batch.input_ids, attention_mask=mask, token_type_ids=batch.token_type_ids)
    assert shaped_difference(theirs, ours_from(theirs, head), holed) <= TOLERANCE


@ALL_HEADS
def test_float32(family: str, head: Head) -> None:
    theirs = hf_model(family, head, dtype=torch.float32)
    ours = ours_from(theirs, head)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.float32}
    batch, tolerance = random_batch(family, lengths=LENGTHS), tolerance_float32(family)
    assert shaped_difference(theirs, ours, batch) <= tolerance
    assert packed_difference(theirs, ours, batch) <= tolerance


@BOTH
@torch.no_grad()
def test_hidden_states(family: str) -> None:
    theirs = hf_model(family)
    ours = ours_from(theirs, "base")
    batch = random_batch(family)
    expected = theirs(**batch.inputs(family), output_hidden_states=True).hidden_states
    last, states = ours(batch.input_ids, batch.attention_mask, batch.token_type_ids, output_hidden_states=True)
    assert len(states) == len(expected) == 5
    assert torch.equal(last, states[-1])
    for ours_at, theirs_at in zip(states, expected, strict=True):
        assert difference(theirs_at, ours_at, batch.attention_mask) <= TOLERANCE


@pytest.mark.parametrize(
    ("family", "head"), one_of_each([case for case in EVERY_HEAD if case[0] not in ("deberta-v2", "roformer")])
)
@torch.no_grad()
def test_explicit_positions(family: str, head: Head) -> None:
    """Positions are used as they are, in any order."""
    theirs = hf_model(family, head)
    ours = ours_from(theirs, head)
    batch = random_batch(family)
    generator = torch.Generator().manual_seed(1)
    positions = torch.randint(2, 48, batch.input_ids.shape, generator=generator)
    output = shaped_output(ours, batch, position_ids=positions)
    assert difference(hf_output(theirs, batch, position_ids=positions), output, batch.attention_mask) <= TOLERANCE
    assert difference(shaped_output(ours, batch), output, batch.attention_mask) > 1e-3


@ALL_HEADS
@torch.no_grad()
def test_what_is_left_out_gets_transformers_defaults(family: str, head: Head) -> None:
    theirs = hf_model(family, head)
    ours = ours_from(theirs, head)
    batch = random_batch(family, lengths=(12, 12, 12))
    everywhere = torch.ones_like(batch.input_ids)
    hf_inputs = HFBatch(
        input_ids=batch.input_ids, attention_mask=everywhere, token_type_ids=torch.zeros_like(everywhere)
    )
    assert difference(hf_output(theirs, hf_inputs), ours(batch.input_ids), everywhere) <= TOLERANCE


@BOTH
@torch.no_grad()
def test_padding_ids_without_a_mask(family: str) -> None:
    """Without a mask padding ids are tokens like others; only RoBERTa counts positions past them."""
    theirs = hf_model(family, "token")
    batch = random_batch(family, lengths=(9, 5))
    expected = theirs(input_ids=batch.input_ids).logits
    ours = ours_from(theirs, "token")(batch.input_ids)
    assert difference(expected, ours, torch.ones_like(batch.input_ids)) <= TOLERANCE


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("bert", {"hidden_act": "gelu_new"}),
        ("roberta", {"hidden_act": "relu", "type_vocab_size": 2}),
        ("distilbert", {"activation": "relu"}),
        ("albert", {"hidden_act": "gelu", "num_hidden_groups": 1, "embedding_size": 36}),
        ("albert", {"num_hidden_layers": 5, "num_hidden_groups": 3}),
        ("electra", {"embedding_size": 36}),
        ("mpnet", {"hidden_act": "gelu_new", "num_attention_heads": 6}),
        ("electra", {"num_attention_heads": 12, "layer_norm_eps": 1e-3}),
    ],
)
def test_other_shapes(family: str, changes: dict[str, int | str | float]) -> None:
    theirs = hf_model(family, "sequence", config=hf_config(family, **changes))
    ours = ours_from(theirs, "sequence")
    batch = random_batch(family)
    assert shaped_difference(theirs, ours, batch) <= TOLERANCE
    assert packed_difference(theirs, ours, batch) <= TOLERANCE


@pytest.mark.parametrize("family", ["bert", "albert", *AFTER_PADDING])
@torch.no_grad()
def test_the_encoder_keeps_the_pooler_of_the_base_model(family: str) -> None:
    theirs = hf_model(family)
    ours = ours_from(theirs, "base")
    batch = random_batch(family)
    expected = theirs(**batch.inputs(family)).pooler_output
    pooled = torch.tanh(ours.pooler(shaped_output(ours, batch)[:, 0]))
    assert float((expected - pooled).abs().max()) <= TOLERANCE


def feedback_texts(repository: Path) -> list[str]:
    files = sorted((repository / "recipes" / "data" / "feedback").glob("*.csv"))
    rows: list[str] = []
    for file in files:
        with file.open(encoding="utf-8", newline="") as lines:
            rows += [row["text"] for row in csv.DictReader(lines)]
    return rows


def sst2_texts(data: Path) -> list[str]:
    lines = (data / "glue" / "SST-2" / "dev.tsv").read_text("utf-8").splitlines()[1:]
    return [line.split("\t")[0] for line in lines]


def padded(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> HFBatch:
    encoding = tokenizer(texts, truncation=True, max_length=128, padding="longest", return_tensors="pt")
    return HFBatch(
        input_ids=encoding["input_ids"],
        attention_mask=encoding["attention_mask"],
        token_type_ids=encoding["token_type_ids"],
    )


@pytest.mark.parametrize("count", [25, pytest.param(200, marks=pytest.mark.slow)])
@torch.no_grad()
def test_published_weights_on_real_texts(
    count: int, embedded_model: Path, wordpiece_tokenizer: PreTrainedTokenizerBase, repository: Path
) -> None:
    """Texts of each source: the packed path in float32 against transformers' padded batches."""
    sources = {"feedback": feedback_texts(repository)}
    if "BERT_TASKS_DATA" in os.environ:
        sources["sst2"] = sst2_texts(Path(os.environ["BERT_TASKS_DATA"]))
    theirs = AutoModel.from_pretrained(embedded_model, attn_implementation="eager", dtype=torch.float32).eval()
    ours: Model = ours_from(theirs, "base")
    for texts in sources.values():
        assert len(texts) >= 200
        by_length = sorted(texts[:count], key=len)
        for start in range(0, count, 25):
            batch = padded(by_length[start : start + 25], wordpiece_tokenizer)
            apart = difference(hf_output(theirs, batch), packed_output(ours, batch), batch.attention_mask)
            assert apart <= 1e-5
