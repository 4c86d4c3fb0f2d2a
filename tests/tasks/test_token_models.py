"""Whole taggers: trained, run on rows of any shape, saved and evaluated, beside transformers' token classification."""

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from bert_tasks.distributed import make_accelerator
from bert_tasks.errors import UsageError
from bert_tasks.model.inputs import load_table
from bert_tasks.model.task_model import TaskModel
from bert_tasks.model.windows import forward_windows
from bert_tasks.recipe.schema import RunSection
from bert_tasks.tasks.features import collate
from bert_tasks.tasks.token_classification import TokenClassification
from bert_tasks.training.evaluation import check_metrics
from support.small_tokenizers import LINES
from support.taggers import LABELS, save_tagger, tagged

TASK = TokenClassification.of(labels=LABELS, max_length=48, doc_stride=8)


@pytest.fixture(scope="module")
def checkpoint(bpe_tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tagger(tmp_path_factory.mktemp("tagger"), bpe_tokenizer)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> TaskModel:
    """A folder saved by transformers, with a window that tests can fill."""
    return TaskModel.from_pretrained(checkpoint, task=TASK)


def test_rows_without_words_alone_in_a_batch(model: TaskModel) -> None:
    assert [prediction.tags for prediction in model.predict([{"words": []}] * 2)] == [(), ()]
    assert model.tokenizer is not None
    features = TASK.features([{"words": [], "tags": []}] * 2, model.tokenizer)
    batch = collate(features, position_offset=model.config.position_offset)
    (loss,) = TASK.output.loss(model(batch), batch)
    assert (loss.total.item(), loss.count.item()) == (0.0, 0.0)
    loss.total.backward()
    model.zero_grad()


def test_context_changes_answers_and_batches_do_not(checkpoint: Path) -> None:
    task = TokenClassification.of(labels=LABELS, max_length=48, doc_stride=8, context_tokens=12)
    model = TaskModel.from_pretrained(checkpoint, task=task)
    rows: list[dict[str, Any]] = [{"words": line.split()[:5], "document": str(n // 3)} for n, line in enumerate(LINES)]
    scores = [prediction.scores for prediction in model.predict(rows)]
    assert model.predict(rows[1:2])[0].scores != pytest.approx(scores[1], abs=1e-3)
    by_document = [p.scores for first in range(0, len(rows), 3) for p in model.predict(rows[first : first + 3])]
    assert [s for row in by_document for s in row] == pytest.approx([s for row in scores for s in row], abs=2e-6)
    assert model.tokenizer is not None
    features = task.features(rows, model.tokenizer)
    wide, narrow = (forward_windows(model, features, max_tokens=limit) for limit in (10_000, 1))
    assert max(float((a - b).abs().max()) for a, b in zip(wide, narrow, strict=True)) < 1e-4


def test_the_best_model_may_be_chosen_by_a_metric_that_the_first_row_does_not_have(model: TaskModel) -> None:
    table = load_table([{"words": [], "tags": []}, *tagged(LINES[:3])], model.row_columns)
    for metric in ("overall_f1", "PER_f1"):
        check_metrics(model, RunSection(metric_for_best_model=metric), (), {"": table}, make_accelerator())
    with pytest.raises(UsageError, match=r"'PERS_f1', expected one of .*PER_f1"):
        check_metrics(model, RunSection(metric_for_best_model="PERS_f1"), (), {"": table}, make_accelerator())
