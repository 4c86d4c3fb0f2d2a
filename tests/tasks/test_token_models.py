"""Whole taggers: trained, run on rows of any shape, saved and evaluated, beside transformers' token classification."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from bert_tasks.distributed import make_accelerator
from bert_tasks.errors import UsageError
from bert_tasks.inference import evaluate
from bert_tasks.model.inputs import load_table
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks.shared.features import collate
from bert_tasks.tasks.token_classification.task import TokenClassification
from bert_tasks.training.evaluation import check_metric
from support.hf_models import hf_config, hf_model
from support.parity import ours_from
from support.small_tokenizers import LINES
from support.taggers import LABELS, save_tagger, tagged, transformers_labels

TASK = TokenClassification(labels=LABELS, max_length=48, doc_stride=8)


@pytest.fixture(scope="module")
def reference(bpe_folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer as transformers' examples load it for pre-split words."""
    return AutoTokenizer.from_pretrained(bpe_folder, add_prefix_space=True)


@pytest.fixture(scope="module")
def checkpoint(bpe_tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tagger(tmp_path_factory.mktemp("tagger"), bpe_tokenizer)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> TaskModel:
    """A folder saved by transformers, with a window that tests can fill."""
    return TaskModel.from_pretrained(checkpoint, task=TASK)


def padded(
    rows: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, labels: Sequence[str]
) -> dict[str, Tensor]:
    batch = tokenizer([row["words"] for row in rows], is_split_into_words=True, padding=True, return_tensors="pt")
    targets = torch.full(batch["input_ids"].shape, -100)
    for position, row in enumerate(rows):
        found = transformers_labels(row, tokenizer, labels)
        targets[position, : len(found)] = torch.tensor(found)
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": targets}


def loss_curve(model: nn.Module, losses: Callable[[int], Tensor], *, steps: int = 100) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.01)
    curve = []
    for step in range(steps):
        loss = losses(step % 4)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        curve.append(loss.item())
    return curve


@pytest.mark.slow
def test_a_hundred_steps_give_transformers_loss_curve(
    bpe_tokenizer: PreTrainedTokenizerBase, reference: PreTrainedTokenizerBase
) -> None:
    labels = ("O", "B-PER", "I-PER")
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = hf_config("roberta", vocab_size=len(bpe_tokenizer), num_hidden_layers=2, **none)
    theirs = hf_model("roberta", "token", config=config).train()
    ours = ours_from(theirs, "token").train()
    assert isinstance(ours, TaskModel)
    ours.task = TokenClassification(labels=labels, max_length=48, doc_stride=0)
    lines = [" ".join(line.split()[: 3 + number % 6]) for number, line in enumerate(LINES[:12])]
    rows = tagged(lines, labels)
    parts = [rows[start : start + 3] for start in range(0, 12, 3)]
    batches = [padded(part, reference, labels) for part in parts]
    packed = [
        collate(ours.task.features(part, bpe_tokenizer), position_offset=ours.config.position_offset) for part in parts
    ]

    def our_loss(part: int) -> Tensor:
        (loss,) = ours.task.loss(ours(packed[part]), packed[part])
        return loss.total / loss.count

    expected = loss_curve(theirs, lambda part: theirs(**batches[part]).loss)
    curve = loss_curve(ours, our_loss)
    assert max(abs(one - other) for one, other in zip(expected, curve, strict=True)) <= 1e-9
    assert sum(expected[-4:]) < 0.5 * sum(expected[:4])


def test_rows_without_words_alone_in_a_batch(model: TaskModel) -> None:
    assert [prediction.tags for prediction in model.predict([{"words": []}] * 2)] == [(), ()]
    assert model.tokenizer is not None
    features = TASK.features([{"words": [], "tags": []}] * 2, model.tokenizer)
    batch = collate(features, position_offset=model.config.position_offset)
    (loss,) = TASK.loss(model(batch), batch)
    assert (loss.total.item(), loss.count.item()) == (0.0, 0.0)
    loss.total.backward()
    model.zero_grad()


def test_context_changes_answers_and_batches_do_not(checkpoint: Path) -> None:
    task = TokenClassification(labels=LABELS, max_length=48, doc_stride=8, context_tokens=12)
    model = TaskModel.from_pretrained(checkpoint, task=task)
    rows: list[dict[str, Any]] = [{"words": line.split()[:5], "document": str(n // 3)} for n, line in enumerate(LINES)]
    scores = [prediction.scores for prediction in model.predict(rows)]
    assert model.predict(rows[1:2])[0].scores != pytest.approx(scores[1], abs=1e-3)
    by_document = [p.scores for first in range(0, len(rows), 3) for p in model.predict(rows[first : first + 3])]
    assert [s for row in by_document for s in row] == pytest.approx([s for row in scores for s in row], abs=2e-6)
    assert model.tokenizer is not None
    features = task.features(rows, model.tokenizer)
    wide, narrow = (model.forward_windows(features, max_tokens=limit) for limit in (10_000, 1))
    assert max(float((a - b).abs().max()) for a, b in zip(wide, narrow, strict=True)) < 1e-4


def test_evaluation(model: TaskModel) -> None:
    rows = [*tagged(LINES[:8]), {"words": [], "tags": []}, {"words": ["a", "b"], "tags": ["B-ORG", "O"]}]
    found = evaluate(model, rows)
    assert found["ORG_number"] == 1
    assert found["overall_accuracy"] > 0
    again = TASK.metrics(model.predict(rows), rows)
    assert {key: value for key, value in found.items() if key != "loss"} == again
    assert found["loss"] == pytest.approx(evaluate(model, rows[:8])["loss"], rel=1e-9)


def test_the_best_model_may_be_chosen_by_a_metric_that_the_first_row_does_not_have(model: TaskModel) -> None:
    table = load_table([{"words": [], "tags": []}, *tagged(LINES[:3])], model.task)
    for metric in ("overall_f1", "PER_f1"):
        check_metric(model, metric, {"": table}, make_accelerator())
    with pytest.raises(UsageError, match=r"'PERS_f1': there are .*PER_f1"):
        check_metric(model, "PERS_f1", {"": table}, make_accelerator())
