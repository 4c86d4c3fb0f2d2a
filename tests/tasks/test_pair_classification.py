"""Two texts: the tokens that transformers makes of them, labels by name, ranking within groups."""

import math
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from bert_tasks.data.columns import Row
from bert_tasks.model.task_model import TaskModel
from bert_tasks.outputs.classes import ClassPrediction
from bert_tasks.tasks import PairClassification
from bert_tasks.tasks.features import collate
from support.hf_models import FAMILIES, WITHOUT_SEGMENTS
from support.small_checkpoints import save_checkpoint, tokenizer_of
from support.small_tokenizers import LINES

NLI = ("entailment", "neutral", "contradiction")
TASK = PairClassification.of(labels=NLI, max_length=32)
PAIRS = [
    *zip(LINES[:6], LINES[6:12], strict=True),
    (" ".join(LINES[:5]), LINES[3]),
    (LINES[3], " ".join(LINES[:5])),
    (" ".join(LINES[:4]), " ".join(LINES[4:8])),
    ("", LINES[0]),
    (LINES[0], ""),
    ("", ""),
]
ROWS: list[Row] = [{"text": first, "text_pair": second} for first, second in PAIRS]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(
    family: str, tmp_path: Path, by_kind: dict[str, PreTrainedTokenizerBase]
) -> None:
    tokenizer = tokenizer_of(family, by_kind)
    theirs = save_checkpoint(tmp_path, family, tokenizer, head="sequence", labels=NLI, wide=True)
    ours = TaskModel.from_pretrained(tmp_path, task=TASK)
    batch = collate(TASK.features(ROWS, tokenizer), position_offset=ours.config.position_offset)
    first, second = zip(*PAIRS, strict=True)
    tokens = tokenizer(
        list(first),
        list(second),
        truncation=True,
        max_length=32,
        padding=True,
        return_tensors="pt",
        return_token_type_ids=family not in WITHOUT_SEGMENTS,
    )
    with torch.no_grad():
        assert (ours(batch) - theirs(**tokens).logits).abs().max() < 5e-5


@pytest.mark.parametrize(
    "saved", [("contradiction", "entailment", "neutral"), ("CONTRADICTION", "NEUTRAL", "ENTAILMENT")]
)
def test_labels_are_mapped_by_name(
    saved: tuple[str, ...], tmp_path: Path, wordpiece_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Google's MNLI models have contradiction first; GLUE's order is another. A published RoBERTa has capitals."""
    save_checkpoint(tmp_path, "bert", wordpiece_tokenizer, head="sequence", labels=saved, wide=True)
    as_saved = TaskModel.from_pretrained(tmp_path, task="pair-classification", max_length=32)
    ours = TaskModel.from_pretrained(tmp_path, task=TASK)
    assert as_saved.task.output.labels == saved
    assert ours.load_report is not None
    assert ours.load_report.new == ()
    assert ours.task.output.labels == NLI
    for left, right in zip(as_saved.predict(ROWS), ours.predict(ROWS), strict=True):
        assert isinstance(left, ClassPrediction)
        assert isinstance(right, ClassPrediction)
        assert str(left.label).lower() == right.label
        scores = {label.lower(): score for label, score in left.scores.items()}
        assert scores == pytest.approx(dict(right.scores), abs=1e-6)


def graded(*scores: float) -> list[ClassPrediction]:
    return [ClassPrediction(label="yes", score=s, scores={"no": 1 - s, "yes": s}) for s in scores]


def test_groups_are_ranked_by_the_second_label() -> None:
    task = PairClassification.of(labels=("no", "yes"))
    labels, groups = ("no", "yes", "no", "yes", "no"), ("q1", "q1", "q1", "q2", "q2")
    rows = [{"label": label, "group": group} for label, group in zip(labels, groups, strict=True)]
    metrics = task.output.metrics(graded(0.9, 0.8, 0.1, 0.7, 0.2), rows)
    assert metrics["map"] == metrics["mrr"] == pytest.approx((0.5 + 1.0) / 2)
    assert metrics["ranked_groups"] == 2
    assert "accuracy" in metrics
    nothing = task.output.metrics(graded(0.9, 0.8), [{"label": "no", "group": "q"}, {"label": "no", "group": "q"}])
    assert math.isnan(nothing["map"])


def test_without_groups_or_two_labels_nothing_is_ranked() -> None:
    rows = [{"label": "yes"}, {"label": "no"}]
    assert "map" not in PairClassification.of(labels=("no", "yes")).output.metrics(graded(0.9, 0.8), rows)
    three = PairClassification.of(labels=("no", "yes", "maybe"))
    with_groups = [{**row, "group": "q"} for row in rows]
    assert "map" not in three.output.metrics(graded(0.9, 0.8), with_groups)
