"""NomicBERT's heads of another size, and files with the names of published ones and of transformers' modules."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, PreTrainedModel

from bert_tasks.errors import CheckpointError
from bert_tasks.model.encoder import Encoder
from support.hf_models import hf_config, hf_model, random_batch
from support.parity import ours_from, packed_difference, shaped_difference


@torch.no_grad()
def test_heads_of_another_size() -> None:
    theirs = hf_model("nomic_bert", "sequence", config=hf_config("nomic_bert", head_dim=4, num_labels=3))
    ours, batch = ours_from(theirs, "sequence"), random_batch("nomic_bert")
    assert shaped_difference(theirs, ours, batch) <= 1e-10
    assert packed_difference(theirs, ours, batch) <= 1e-10


def saved(folder: Path, **options: object) -> PreTrainedModel:
    model = hf_model("nomic_bert", dtype=torch.float16)
    model.save_pretrained(folder, **options)
    return model


@pytest.mark.parametrize(("original", "options"), [(True, {}), (False, {"max_shard_size": "10KB"})])
def test_both_names_of_tensors_are_read(original: bool, options: dict[str, object], tmp_path: Path) -> None:
    """In half precision and in several files. What is saved has the names of published files."""
    model = saved(tmp_path / "stock", save_original_format=original, **options)
    assert bool(options) == (tmp_path / "stock" / "model.safetensors.index.json").exists()
    encoder = Encoder.from_pretrained(tmp_path / "stock")
    assert encoder.load_report is not None
    assert (encoder.load_report.dropped, encoder.load_report.ignored) == ((), ())
    encoder.save_pretrained(tmp_path / "ours")
    assert "encoder.layers.0.attn.Wqkv.weight" in load_file(tmp_path / "ours" / "model.safetensors")
    again, report = AutoModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value.float()), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda fused: {"layers.1.self_attn.k_proj.weight": fused[:36]}, r"k_proj\.weight appears twice, as layers\.1"),
        (lambda fused: {"encoder.layers.1.attn.Wqkv.weight": fused[0, 0]}, r"q_proj\.weight has shape \[\], expected"),
        (lambda fused: {"encoder.layers.1.attn.Wqkv.weight": fused[:35]}, r"q_proj\.weight has shape \[12, 36\]"),
        (lambda fused: {"encoder.layers.4.attn.Wqkv.weight": fused}, r"unknown key layers\.4\.self_attn\.k_proj\."),
    ],
)
def test_tensors_that_do_not_fit_are_named(change: object, message: str, tmp_path: Path) -> None:
    saved(tmp_path)
    tensors: dict[str, Tensor] = load_file(tmp_path / "model.safetensors")
    assert callable(change)
    save_file(tensors | change(tensors["encoder.layers.1.attn.Wqkv.weight"].clone()), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        Encoder.from_pretrained(tmp_path)
