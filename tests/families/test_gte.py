"""GTE's tables of segments, and files with the names of published ones and of transformers' modules."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks import SequenceClassification
from support.hf_models import hf_class, hf_config, hf_model, random_batch
from support.parity import ours_from, packed_difference, shaped_difference
from support.small_checkpoints import save_checkpoint
from support.task_examples import TEXTS


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
