"""Heads of pre-training, exported: the same predictions and metrics, and int8 refused by name."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from bert_tasks import TaskModel, evaluate, predict
from bert_tasks.errors import UsageError
from bert_tasks.export import export
from bert_tasks.tasks import MaskedLanguageModeling, ReplacedTokens, Task
from support.small_checkpoints import edit_config, save_checkpoint, tokenizer_of
from support.task_contract import numbers
from support.task_examples import MASKED, TEXTS

pytestmark = pytest.mark.slow  # each test exports a graph


def test_predictions_and_metrics_are_the_models(checkpoint: Path, tmp_path: Path) -> None:
    model = TaskModel.from_pretrained(checkpoint, task=MaskedLanguageModeling.of(max_length=24))
    torch.nn.init.normal_(model.encoder.embeddings.word.weight, std=0.5)
    rows = [dict(row) for row in MASKED]
    exported = export(model, to="onnx", output=tmp_path / "onnx", data=rows)
    assert exported.record["outputs"] == ["logits"]
    for expected, prediction in zip(model.predict(rows), predict(tmp_path / "onnx", rows), strict=True):
        assert [candidate.token for candidate in expected.masks[0]] == [
            candidate.token for candidate in prediction.masks[0]
        ]
        assert prediction.masks[0][0].score == pytest.approx(expected.masks[0][0].score, abs=1e-5)
    assert evaluate(tmp_path / "onnx", rows) == pytest.approx(evaluate(model, rows), rel=1e-5)
    with pytest.raises(UsageError, match="int8 is not supported for masked-language-modeling"):
        export(model, to="int8", output=tmp_path / "int8", data=rows)


@pytest.mark.parametrize(("family", "is_tied"), [("eurobert", True), ("eurobert", False), ("ultrabert", True)])
def test_tied_and_untied_tables(
    family: str, is_tied: bool, by_kind: dict[str, PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    """EuroBERT's head has no parameters if its decoder is the table of words."""
    save_checkpoint(tmp_path / "model", family, tokenizer_of(family, by_kind), wide=True)
    edit_config(tmp_path / "model", tie_word_embeddings=is_tied)
    torch.manual_seed(0)
    model = TaskModel.from_pretrained(tmp_path / "model", task=MaskedLanguageModeling.of(max_length=24))
    rows = [dict(row) for row in MASKED]
    export(model, to="onnx", output=tmp_path / "onnx", data=rows)
    assert numbers(predict(tmp_path / "onnx", rows)) == pytest.approx(numbers(model.predict(rows)), abs=1e-4)
    assert evaluate(tmp_path / "onnx", rows)["perplexity"] == pytest.approx(
        evaluate(model, rows)["perplexity"], rel=1e-4
    )


@pytest.mark.parametrize(
    ("family", "task"),
    [
        ("albert", MaskedLanguageModeling.of(max_length=24, sentence_objective="sop")),
        ("electra", ReplacedTokens.of(max_length=24)),
    ],
)
def test_other_models_of_pretraining(
    family: str, task: Task, unigram_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """Predictions read no pairs of sentences, and need no generator."""
    save_checkpoint(tmp_path / "model", family, unigram_tokenizer, wide=True)
    model = TaskModel.from_pretrained(tmp_path / "model", task=task)
    rows = [dict(row) for row in MASKED] if isinstance(task, MaskedLanguageModeling) else [{"text": t} for t in TEXTS]
    export(model, to="onnx", output=tmp_path / "onnx", data=rows)
    expected = model.predict(rows)
    assert numbers(predict(tmp_path / "onnx", rows)) == pytest.approx(numbers(expected), abs=1e-5)
    assert len(numbers(expected)) >= 5 * len(rows)
    if isinstance(task, MaskedLanguageModeling):
        metrics = evaluate(model, rows)
        assert evaluate(tmp_path / "onnx", rows)["perplexity"] == pytest.approx(metrics["perplexity"], rel=1e-5)
