"""GTE's configurations, and files with the names of published ones and of transformers' modules."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedTokenizerBase

from bert_tasks.errors import CheckpointError
from bert_tasks.families import encoder_config
from bert_tasks.model.encoder import Encoder
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks import SequenceClassification
from support.hf_models import hf_class, hf_config, hf_model, random_batch
from support.parity import ours_from, packed_difference, shaped_difference
from support.small_checkpoints import save_checkpoint
from support.task_examples import TEXTS

# gte-multilingual-base, with fields that only the code reads that it came with.
PUBLISHED = {
    "model_type": "gte",
    "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
    "max_position_embeddings": 8192,
    "pack_qkv": True,
    "position_embedding_type": "rope",
    "vocab_size": 250048,
}


def test_published_configs() -> None:
    config = encoder_config(PUBLISHED)
    assert config == encoder_config(AutoConfig.for_model(**PUBLISHED).to_dict())
    assert (config.rotary_theta, config.second_segment) == ((160000.0,) * 12, 0)
    with torch.device("meta"):
        encoder = Encoder(PUBLISHED)
    assert sum(parameter.numel() for parameter in encoder.parameters()) == pytest.approx(305e6, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "ntk", "factor": 8.0}}, "rope_scaling = {.*} is not supported, only None is"),
        ({"rope_parameters": {"type": "ntk"}}, "rope_type = 'ntk' is not supported, only 'default' is"),
        ({"layer_norm_type": "rms_norm"}, "layer_norm_type = 'rms_norm' is not supported, only 'layer_norm' is"),
        ({"logn_attention_scale": True}, "logn_attention_scale = True is not supported, only False is"),
        ({"position_embedding_type": "absolute"}, "position_embedding_type = 'absolute' is not supported"),
        ({"pack_qkv": False}, "pack_qkv = False is not supported, only True is"),
    ],
)
def test_what_is_not_computed_is_rejected_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        encoder_config(PUBLISHED | changes)


@pytest.mark.parametrize("types", [0, 1])
@torch.no_grad()
def test_tables_of_one_segment_or_none(types: int) -> None:
    theirs = hf_model("gte", "token", config=hf_config("gte", type_vocab_size=types, num_labels=3))
    batch = random_batch("gte")
    batch.token_type_ids.zero_()
    ours = ours_from(theirs, "token")
    assert shaped_difference(theirs, ours, batch) <= 1e-10
    assert packed_difference(theirs, ours, batch) <= 1e-10


@pytest.mark.parametrize(
    ("save", "prefix"),
    [({}, "gte."), ({"save_original_format": False}, "new."), ({"max_shard_size": "20KB"}, "new.")],
)
def test_all_names_of_tensors_are_read(
    save: dict[str, Any], prefix: str, multilingual_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """Published files have another prefix, which transformers puts before all names when it saves them again."""
    stock = save_checkpoint(tmp_path / "stock", "gte", multilingual_tokenizer, head="sequence", wide=True)
    path, task = (
        tmp_path / "stock" / "model.safetensors",
        SequenceClassification.of(labels=("a", "b", "c"), max_length=16),
    )
    if prefix == "new.":
        tensors = {name.replace("gte.", prefix): tensor for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
        stock = hf_class("gte", "sequence").from_pretrained(tmp_path / "stock").eval()
    stock.save_pretrained(tmp_path / "again", **save)
    multilingual_tokenizer.save_pretrained(tmp_path / "again")
    with torch.no_grad():
        expected = [stock(**multilingual_tokenizer(text, return_tensors="pt")).logits[0] for text in TEXTS]
    model = TaskModel.from_pretrained(tmp_path / "again", task=task)
    logits = torch.tensor([prediction.logits for prediction in model.predict(TEXTS, logits=True)])
    assert (logits - torch.stack(expected)).abs().max() < 1e-4
    model.save_pretrained(tmp_path / "ours")
    saved = load_file(tmp_path / "ours" / "model.safetensors")
    assert {"gte.encoder.layer.0.mlp.up_gate_proj.weight", "classifier.bias"} < saved.keys()
    _, report = hf_class("gte", "sequence").from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
