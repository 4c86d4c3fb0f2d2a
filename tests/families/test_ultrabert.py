"""UltraBERT's configurations in both forms, its windows, the names of files, and heads without a dense layer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, PreTrainedTokenizerBase

from bert_tasks import TaskModel, fit
from bert_tasks.errors import UsageError
from bert_tasks.families import converted_config, encoder_config
from bert_tasks.model.encoder import Encoder
from bert_tasks.tasks import SequenceClassification
from support.hf_models import hf_config, hf_model, lacks, random_batch
from support.parity import ours_from, packed_difference, shaped_difference
from support.small_checkpoints import edit_config, save_checkpoint
from support.task_examples import CLASSES

pytestmark = pytest.mark.skipif(lacks("ultrabert"), reason="transformers has it since 5.20")
LENGTHS = (17, 1, 48, 9, 2, 46, 17, 30, 16)
PUBLISHED: dict[str, Any] = {
    "model_type": "ultrabert",
    "hidden_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 2048,
}
# As files from before transformers 5.23 have them.
LISTS = {"attention_windows": [0, 64, 64, 0, 64, None], "rope_theta": [1e6, 5e3, 5e3, 1e6, 5e3, 1e6]}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_dim": 32, "num_key_value_heads": None, "sliding_window": 5, "tie_word_embeddings": True},
        {"num_hidden_layers": 2},
        {"layer_types": ["full_attention"] * 6},
        LISTS,
        {"attention_windows": [0] * 6, "rope_theta": [7e4] * 6},
        {"attention_windows": LISTS["attention_windows"], "layer_types": ["sliding_attention"] * 6},
    ],
)
def test_both_forms_of_the_config_are_read_as_in_transformers(changes: dict[str, Any]) -> None:
    published = PUBLISHED | changes
    assert encoder_config(published) == encoder_config(AutoConfig.for_model(**published).to_dict())


def test_lists_of_older_files() -> None:
    config = encoder_config(PUBLISHED | LISTS)
    assert config.attention_window == (None, 64, 64, None, 64, None)
    assert config.rotary_theta == tuple(LISTS["rope_theta"])


@pytest.mark.parametrize("changes", [{}, LISTS])
def test_layers_that_are_kept_stay_global_or_local(changes: dict[str, Any]) -> None:
    config = converted_config(PUBLISHED | changes, layers=[1, 2, 5], family=None)
    whole, kept = encoder_config(PUBLISHED | changes), encoder_config(config)
    for field in ("attention_window", "rotary_theta"):
        assert getattr(kept, field) == tuple(getattr(whole, field)[layer] for layer in (1, 2, 5))
    assert kept == encoder_config(AutoConfig.for_model(**config).to_dict())


def test_no_other_family_computes_the_same() -> None:
    with pytest.raises(UsageError, match="cannot be converted to eurobert, which computes with "):
        converted_config(PUBLISHED, layers=[0], family="eurobert")


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_every_pooling_is_that_of_transformers(pooling: str) -> None:
    theirs = hf_model("ultrabert", "sequence", config=hf_config("ultrabert", classifier_pooling=pooling))
    ours, batch = ours_from(theirs, "sequence"), random_batch("ultrabert", lengths=LENGTHS)
    assert {name for name, _ in ours.head.named_parameters()} == {"output.weight", "output.bias"}
    assert shaped_difference(theirs, ours, batch) <= 1e-10
    assert packed_difference(theirs, ours, batch) <= 1e-10


def edit_attention(**values: object) -> Callable[[Any], None]:
    def edit(model: Any) -> None:
        for layer in model.encoder.layers:
            if layer.attention.window is not None:
                vars(layer.attention).update(values)

    return edit


def eps(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.eps = 1e-5


@pytest.mark.parametrize(
    "edit",
    [edit_attention(window=2), edit_attention(window=4), edit_attention(window=None), edit_attention(theta=1e3), eps],
)
def test_faults_are_seen(edit: Callable[[Any], None]) -> None:
    theirs = hf_model("ultrabert", "token")
    ours, batch = ours_from(theirs, "token"), random_batch("ultrabert", lengths=LENGTHS)
    assert packed_difference(theirs, ours, batch) <= 1e-10
    edit(ours)
    assert packed_difference(theirs, ours, batch) > 1e-9
    assert shaped_difference(theirs, ours, batch) > 1e-9


@pytest.mark.parametrize("original", [True, False])
def test_both_names_of_tensors_are_read(
    original: bool, wordpiece_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """What is saved has the names of published files."""
    head = AutoModelForMaskedLM.from_config(hf_config("ultrabert", vocab_size=len(wordpiece_tokenizer)))
    head.save_pretrained(tmp_path / "stock", save_original_format=original)
    wordpiece_tokenizer.save_pretrained(tmp_path / "stock")
    stock = load_file(tmp_path / "stock" / "model.safetensors")
    assert ("cls.weight" in stock, "ultrabert.norm.weight" in stock) == (original, original)
    masked = TaskModel.from_pretrained(tmp_path / "stock")
    assert (masked.load_report.new, masked.load_report.dropped, masked.load_report.ignored) == ((), (), ())
    masked.save_pretrained(tmp_path / "ours")
    saved = load_file(tmp_path / "ours" / "model.safetensors")
    assert {"cls.weight", "ultrabert.norm.weight", "head.linear1.weight"} < saved.keys()
    again, report = AutoModelForMaskedLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    assert all(torch.equal(value, head.state_dict()[name]) for name, value in again.state_dict().items())
    encoder = Encoder.from_pretrained(tmp_path / "stock")
    assert encoder.load_report is not None
    assert len(encoder.load_report.dropped) == 3
    encoder.save_pretrained(tmp_path / "encoder")
    _, report = AutoModel.from_pretrained(tmp_path / "encoder", output_loading_info=True)
    assert not any(report.values())


@pytest.mark.slow  # it trains
def test_a_published_config_survives_a_run(wordpiece_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """The lists of layers stay in config.json, and transformers reads the same model from them."""
    save_checkpoint(tmp_path / "base", "ultrabert", wordpiece_tokenizer, wide=True)
    lists = {"attention_windows": [3, 0], "rope_theta": [100.0, 1000.0]}
    edit_config(tmp_path / "base", layer_types=None, rope_parameters=None, **lists)
    task = SequenceClassification.of(labels=("calm", "glad", "sad"), max_length=24)
    model = TaskModel.from_pretrained(tmp_path / "base", task=task)
    rows = [{"text": row["text"], "label": task.output.labels[i % 3]} for i, row in enumerate(CLASSES)]
    fit(model, rows, rows, output_dir=tmp_path / "run", epochs=1, progress=False, report=False)
    folder = tmp_path / "run" / "model"
    assert AutoConfig.from_pretrained(folder).layer_types == ["sliding_attention", "full_attention"]
    student = TaskModel.from_pretrained(folder).with_layers([1])
    student.save_pretrained(tmp_path / "student")
    config = AutoConfig.from_pretrained(tmp_path / "student")
    assert (config.layer_types, config.rope_parameters["full_attention"]["rope_theta"]) == (["full_attention"], 1000.0)
