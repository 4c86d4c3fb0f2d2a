"""A head over the vocabulary, exported: the same predictions and metrics, and int8 refused by name."""

from pathlib import Path

import pytest
import torch

from bert_tasks import TaskModel, evaluate, predict
from bert_tasks.errors import UsageError
from bert_tasks.export import export
from bert_tasks.tasks import MaskedLanguageModeling
from support.task_examples import MASKED


@pytest.mark.slow
def test_predictions_and_metrics_are_the_models(checkpoint: Path, tmp_path: Path) -> None:
    model = TaskModel.from_pretrained(checkpoint, task=MaskedLanguageModeling(max_length=24))
    torch.nn.init.normal_(model.stack.embeddings.word.weight, std=0.5)
    rows = [dict(row) for row in MASKED]
    exported = export(model, to="onnx", output=tmp_path / "onnx", data=rows)
    assert exported.record["outputs"] == ["logits"]
    for expected, found in zip(model.predict(rows), predict(tmp_path / "onnx", rows), strict=True):
        assert [one.token for one in expected.masks[0].candidates] == [one.token for one in found.masks[0].candidates]
        assert found.masks[0].candidates[0].score == pytest.approx(expected.masks[0].candidates[0].score, abs=1e-5)
    assert evaluate(tmp_path / "onnx", rows) == pytest.approx(evaluate(model, rows), rel=1e-5)
    with pytest.raises(UsageError, match="int8 is not supported for masked-language-modeling"):
        export(model, to="int8", output=tmp_path / "int8", data=rows)
    with pytest.raises(UsageError, match="int8 is not supported for masked-language-modeling"):
        predict(model, rows, dtype="int8")
