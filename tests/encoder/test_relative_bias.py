"""Scores by distance, as MPNet has them: the buckets of transformers, on sequences that reach the last of them."""

from collections.abc import Callable

import pytest
import torch
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from bert_tasks.encoder import positions
from bert_tasks.encoder.packing import Padded
from bert_tasks.families import encoder_config
from support.hf_models import hf_config, hf_model, random_batch
from support.parity import ours_from, packed_difference, shaped_difference

LENGTHS = (200, 1, 93, 90, 140, 198)


def test_buckets_are_those_of_transformers() -> None:
    """Their borders are float32 logarithms, which must fall on the same side of every distance."""
    length = 600
    bias = positions.RelativeBias(encoder_config(hf_config("mpnet").to_dict()))
    with torch.no_grad():
        bias.bias.weight[:] = torch.arange(32.0)[:, None]
    layout = Padded(batch=1, length=length, mask=torch.ones(1, length).bool())
    scores = bias(torch.zeros(0), layout).scores  # [1, A, T, T]
    places = torch.arange(length)
    expected = MPNetEncoder.relative_position_bucket(places[None] - places[:, None])
    assert torch.equal(scores[0, 0], expected.float())


@pytest.fixture
def differences() -> Callable[[], float]:
    """Of long sequences, padded and packed."""
    theirs = hf_model("mpnet", "token", config=hf_config("mpnet", max_position_embeddings=202, num_hidden_layers=2))
    batch = random_batch("mpnet", lengths=LENGTHS)

    def measure() -> float:
        ours = ours_from(theirs, "token")
        return max(shaped_difference(theirs, ours, batch), packed_difference(theirs, ours, batch))

    return measure


def test_long_sequences(differences: Callable[[], float]) -> None:
    assert differences() <= 1e-10


def test_a_border_that_is_off_by_one_is_seen(differences: Callable[[], float], monkeypatch: pytest.MonkeyPatch) -> None:
    starts = tuple(start + (start == 91) for start in positions._BUCKET_STARTS)
    monkeypatch.setattr(positions, "_BUCKET_STARTS", starts)
    assert differences() > 1e-9
