"""Every family and head on the device against transformers on the same device."""

from dataclasses import replace

import pytest
import torch

from support.gpu import DEVICE, needs_cuda
from support.hf_models import EVERY_HEAD, Head, HFBatch, hf_config, hf_model, random_batch, tolerance_float32
from support.parity import difference, hf_output, ours_from, packed_output, shaped_output

CASES = [*EVERY_HEAD, ("bert", "choice"), ("roberta", "choice")]
SIZES = {"hidden_size": 64, "num_attention_heads": 4}


def batch_on_device(family: str) -> HFBatch:
    batch = random_batch(family)
    return replace(batch, **{name: tensor.to(DEVICE) for name, tensor in vars(batch).items()})


@pytest.mark.every_family
@pytest.mark.parametrize(("family", "head"), CASES)
@torch.no_grad()
def test_float32_logits_are_those_of_transformers(family: str, head: Head) -> None:
    config = hf_config(family, num_labels=2 if head == "span" else 3, **SIZES)
    theirs = hf_model(family, head, dtype=torch.float32, config=config).to(DEVICE)
    ours, batch = ours_from(theirs, head).to(DEVICE), batch_on_device(family)
    expected = hf_output(theirs, batch)
    limit = tolerance_float32(family) * max(1.0, float(expected.abs().max()))
    assert difference(expected, packed_output(ours, batch), batch.attention_mask) < limit
    assert difference(expected, shaped_output(ours, batch), batch.attention_mask) < limit


@needs_cuda
@pytest.mark.every_family
@pytest.mark.parametrize(("family", "head"), CASES)
@torch.no_grad()
def test_bfloat16_logits_are_as_exact_as_those_of_transformers(family: str, head: Head) -> None:
    """Both under autocast, against transformers in float32."""
    config = hf_config(family, num_labels=2 if head == "span" else 3, **SIZES)
    theirs = hf_model(family, head, dtype=torch.float32, config=config).to(DEVICE)
    ours, batch = ours_from(theirs, head).to(DEVICE), batch_on_device(family)
    expected = hf_output(theirs, batch)
    with torch.autocast("cuda", torch.bfloat16):
        errors = [
            difference(expected, output.float(), batch.attention_mask) / float(expected.abs().max())
            for output in (hf_output(theirs, batch), packed_output(ours, batch))
        ]
    assert errors[1] < 2 * errors[0] + 0.02
