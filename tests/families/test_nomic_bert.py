"""NomicBERT's published configurations, and files with the names of published ones and of transformers' modules."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, NomicBertModel, PreTrainedModel

from bert_tasks.errors import CheckpointError
from bert_tasks.families import encoder_config
from bert_tasks.model.encoder import Encoder
from support.hf_models import hf_config, hf_model, random_batch
from support.parity import ours_from, packed_difference, shaped_difference

# nomic-embed-text-v1.5, without fields that say nothing about what is computed.
PUBLISHED = {
    "model_type": "nomic_bert",
    "activation_function": "swiglu",
    "causal": False,
    "layer_norm_epsilon": 1e-12,
    "n_embd": 768,
    "n_head": 12,
    "n_inner": 3072,
    "n_layer": 12,
    "n_positions": 8192,
    "parallel_block": False,
    "prenorm": False,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "type_vocab_size": 2,
    "use_rms_norm": False,
    "vocab_size": 30528,
}


def test_published_configs() -> None:
    config = encoder_config(PUBLISHED)
    assert config == encoder_config(AutoConfig.for_model(**PUBLISHED).to_dict())
    assert (config.rotary_theta, config.usable_length) == ((1000.0,) * 12, 2048)
    with torch.device("meta"):
        encoder = Encoder(PUBLISHED)
    assert sum(parameter.numel() for parameter in encoder.parameters()) == pytest.approx(137e6, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_emb_base": 10000}, "rotary_emb_base = 10000 is not supported, only 1000 is"),
        ({"n_head": 16}, "n_head = 16 is not supported, only 12 is"),
        ({"activation_function": "gelu"}, "activation_function = 'gelu' is not supported, only 'swiglu' is"),
        ({"num_experts": 8}, "num_experts = 8 is not supported, only 0 is"),
        ({"rope_scaling": {"type": "ntk"}}, "rope_scaling = {'type': 'ntk'} is not supported, only None is"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type = 'yarn' is not supported, only 'default' is"),
        ({"rope_parameters": {"type": "dynamic"}}, "rope_type = 'dynamic' is not supported, only 'default' is"),
        ({"rope_parameters": [1]}, r"rope_parameters = \[1\], expected one object for all layers"),
        ({"head_dim": 3}, "rotary positions need heads of an even size, not 3"),
    ],
)
def test_what_is_not_computed_is_rejected_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        encoder_config(PUBLISHED | changes)


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
    again, report = NomicBertModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
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
