"""The HF-shaped call: what it refuses, and what stands at padding."""

from typing import Any

import pytest
import torch

from bert_tasks.model.encoder import Encoder
from bert_tasks.model.task_model import TaskModel
from support.hf_models import EVERY_HEAD, FAMILIES, HEADS, Head, hf_config, random_batch
from support.parity import Model, shaped_output, task_for
from support.sampling import one_of_each, slow_except


def model(family: str, head: Head = "base") -> Model:
    config = hf_config(family).to_dict()
    return (Encoder(config) if head == "base" else TaskModel(config, task_for(head))).eval()


IDS = torch.ones(2, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": IDS, "output_attentions": True}, "output_attentions is not supported"),
        ({"input_ids": IDS[0]}, r"input_ids has shape \[3\], expected \[batch, length\]"),
        (
            {"input_ids": IDS, "attention_mask": torch.ones(2, 3, 3)},
            r"shape \[2, 3, 3\], expected \[2, 3\]\. 3-D masks are not supported",
        ),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 4)}, r"shape \[2, 4\], expected \[2, 3\]"),
    ],
)
def test_inputs_of_another_form_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    for head in HEADS:
        with pytest.raises(ValueError, match=message):
            model("bert", head)(**arguments)


@pytest.mark.parametrize("family", slow_except(FAMILIES, "bert", "roberta"))
def test_the_longest_input(family: str) -> None:
    """48 tokens fit every family; RoBERTa's table has 50 rows for them."""
    encoder = model(family)
    assert encoder.config.usable_length == 48
    assert encoder(torch.full((1, 48), 5)).shape == (1, 48, 36)
    with pytest.raises(ValueError, match="the input has 49 tokens, this checkpoint has positions for 48"):
        encoder(torch.full((1, 49), 5))


@pytest.mark.parametrize(("family", "head"), one_of_each([case for case in EVERY_HEAD if case[1] != "sequence"]))
@torch.no_grad()
def test_padding_is_zeros(family: str, head: Head) -> None:
    batch = random_batch(family, lengths=(7, 3, 1), side="left")
    output = shaped_output(model(family, head), batch)
    real = batch.attention_mask.bool()
    assert torch.equal(output[~real], torch.zeros_like(output[~real]))
    assert (output[real] != 0).any(dim=-1).all()


@torch.no_grad()
def test_padding_is_zeros_in_all_hidden_states() -> None:
    batch = random_batch("albert", lengths=(7, 3))
    _, states = model("albert")(batch.input_ids, batch.attention_mask, batch.token_type_ids, output_hidden_states=True)
    assert all(torch.count_nonzero(state[1, 3:]) == 0 for state in states)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
@torch.no_grad()
def test_masks_of_any_type(dtype: torch.dtype) -> None:
    batch = random_batch("bert", lengths=(7, 3))
    encoder = model("bert")
    expected = encoder(batch.input_ids, batch.attention_mask)
    assert torch.equal(encoder(batch.input_ids, batch.attention_mask.to(dtype)), expected)


@torch.no_grad()
def test_a_sequence_of_nothing_but_padding_leaves_the_others_alone() -> None:
    batch = random_batch("bert", lengths=(7, 3))
    encoder = model("bert")
    mask = batch.attention_mask.clone()
    mask[1] = 0
    output = encoder(batch.input_ids, mask)
    assert torch.equal(output[0], encoder(batch.input_ids, batch.attention_mask)[0])
    assert torch.count_nonzero(output[1]) == 0


def test_one_row_of_positions_serves_all_sequences() -> None:
    encoder = model("bert")
    ids, positions = torch.full((2, 4), 5), torch.tensor([[3, 2, 1, 0]])
    assert torch.equal(encoder(ids, position_ids=positions), encoder(ids, position_ids=positions.repeat(2, 1)))


@pytest.mark.parametrize("family", slow_except(FAMILIES, "bert", "distilbert"))
@pytest.mark.parametrize("head", ["base", "sequence"])
def test_ids_without_an_embedding_are_refused_by_name(head: Head, family: str) -> None:
    called = model(family, head)
    ids = torch.full((2, 3), 5)
    sizes = {
        "input_ids": called.config.vocab_size,
        "token_type_ids": called.config.type_vocab_size,
        "position_ids": called.config.max_position_embeddings if called.config.absolute_positions else 0,
    }
    for name, size in sizes.items():
        for outside in (-1, size) if size else ():
            wrong = torch.zeros_like(ids)
            wrong[1, 2] = outside
            message = f"{name} holds {outside}, this checkpoint has embeddings for 0 to {size - 1}"
            with pytest.raises(ValueError, match=message):
                called(**{"input_ids": ids, name: wrong})
