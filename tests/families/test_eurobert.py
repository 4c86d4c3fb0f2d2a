"""How EuroBERT's sequence head pools, and its head over the vocabulary, which is one table or none.

UltraBERT's table over the vocabulary is tied by the same field.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM, PreTrainedTokenizerBase

from bert_tasks import TaskModel, fit, predict
from bert_tasks.checkpoints.inspect import inspect_checkpoint
from bert_tasks.errors import CheckpointError
from bert_tasks.tasks import MaskedLanguageModeling, SequenceClassification
from support.hf_models import hf_config, hf_model, random_batch
from support.parity import ours_from, packed_difference, shaped_difference
from support.small_checkpoints import edit_config, save_checkpoint, tokenizer_of
from support.task_contract import numbers
from support.task_examples import MASKED


@pytest.mark.parametrize("pooling", ["late", "bos", "mean"])
def test_every_pooling_is_that_of_transformers(pooling: str) -> None:
    theirs = hf_model("eurobert", "sequence", config=hf_config("eurobert", classifier_pooling=pooling))
    ours, batch = ours_from(theirs, "sequence"), random_batch("eurobert")
    assert shaped_difference(theirs, ours, batch) <= 1e-10
    assert packed_difference(theirs, ours, batch) <= 1e-10


DECODERS = {"eurobert": "lm_head.weight", "ultrabert": "cls.weight"}
TABLES = {"eurobert": "model.embed_tokens.weight", "ultrabert": "ultrabert.embed_tokens.weight"}
ROWS = [dict(row) for row in MASKED]
TASK = MaskedLanguageModeling.of(max_length=24)


# UltraBERT differs in the names of the table alone.
@pytest.fixture(params=["eurobert", pytest.param("ultrabert", marks=pytest.mark.slow)])
def base(
    request: pytest.FixtureRequest, by_kind: dict[str, PreTrainedTokenizerBase], tmp_path: Path
) -> tuple[str, Path]:
    folder = tmp_path / "base"
    save_checkpoint(folder, request.param, tokenizer_of(request.param, by_kind), wide=True)
    return request.param, folder


@pytest.mark.every_family
@pytest.mark.parametrize("is_tied", [True, False])
def test_the_table_over_the_vocabulary_is_tied_as_the_config_says(
    is_tied: bool, base: tuple[str, Path], tmp_path: Path
) -> None:
    """It is trained, saved, read by transformers and predicted with; other tasks drop it."""
    family, folder = base
    edit_config(folder, tie_word_embeddings=is_tied)
    model = TaskModel.from_pretrained(folder, task=TASK)
    assert ("head.decoder.weight" in model.state_dict()) != is_tied
    assert len(model.load_report.new) == (2 if family == "ultrabert" else 0) + (not is_tied)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fit(model, ROWS, ROWS, output_dir=tmp_path / "run", epochs=1, progress=False)
    assert not any(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    saved = tmp_path / "run" / "model"
    assert (DECODERS[family] in load_file(saved / "model.safetensors")) != is_tied
    theirs, report = AutoModelForMaskedLM.from_pretrained(saved, output_loading_info=True)
    assert not any(report.values())
    assert (theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight) == is_tied
    batch = model.tokenizer(["the ferry"], return_tensors="pt")
    with torch.no_grad():
        expected = theirs.eval()(batch["input_ids"]).logits
        torch.testing.assert_close(model.eval()(batch["input_ids"]), expected, rtol=0, atol=1e-4)
    assert numbers(predict(saved, ROWS)) == pytest.approx(numbers(predict(model, ROWS)), abs=1e-5)
    other = TaskModel.from_pretrained(saved, task=SequenceClassification.of(labels=("a", "b"), max_length=24))
    assert len(other.load_report.dropped) == (2 if family == "ultrabert" else 0) + (not is_tied)


@pytest.mark.every_family
def test_a_file_may_hold_a_tied_table_if_it_is_the_table_of_words(base: tuple[str, Path], tmp_path: Path) -> None:
    family, folder = base
    edit_config(folder, tie_word_embeddings=True)
    saved = tmp_path / "saved"
    TaskModel.from_pretrained(folder, task=TASK).save_pretrained(saved)
    tensors = load_file(saved / "model.safetensors")
    tensors[DECODERS[family]] = tensors[TABLES[family]].clone()
    save_file(tensors, saved / "model.safetensors")
    assert len(TaskModel.from_pretrained(saved).load_report.ignored) == 1
    assert len(inspect_checkpoint(saved).report.ignored) == 1
    tensors[DECODERS[family]][3, 2] += 1
    save_file(tensors, saved / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"differs from .*, to which the head's decoder is tied"):
        TaskModel.from_pretrained(saved)
    assert len(inspect_checkpoint(saved).problems) == 1
    other = TaskModel.from_pretrained(saved, task=SequenceClassification.of(labels=("a", "b"), max_length=24))
    assert len(other.load_report.dropped) == (3 if family == "ultrabert" else 1)


@pytest.mark.slow  # it trains
def test_a_student_has_the_head_and_learns_from_its_teacher(base: tuple[str, Path], tmp_path: Path) -> None:
    model = TaskModel.from_pretrained(base[1], task=TASK)
    student = model.with_layers([0])
    for name, value in student.head.state_dict().items():
        assert torch.equal(value, model.head.state_dict()[name])
    result = fit(student, ROWS, ROWS, output_dir=tmp_path / "run", teacher=model, epochs=1, progress=False)
    assert result.steps > 0
