"""Tasks and families, exported: the graph in onnxruntime is transformers' call of the model, at every length.

A family has one of two tasks, in turn: one with a state per sequence or one with logits per token. ModernBERT has the
first and one with two outputs, because its graph has the most branches.

The lengths, batches and the tolerance are those that ``bert-tasks export`` promises. Here they are checked once more,
on padded rectangles of the test's own making, against the padded call.

Shape legend: B sequences, T padded length.
"""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bert_tasks.export import TOLERANCE, Export, export
from bert_tasks.inference import predict
from bert_tasks.model.task_model import TaskModel
from support.hf_models import FAMILIES, WITHOUT_OWN_GRAPH, WITHOUT_SEGMENTS, Head, has_head
from support.small_checkpoints import save_checkpoint, tokenizer_of

pytestmark = pytest.mark.slow

IN_TURN = ("sequence-classification", "masked-language-modeling")
# BERT is exported with published weights below, and the others in tests/model/test_onnx.py.
EXPORTED_ELSEWHERE = ("bert", "distilbert", "electra")
MODERNBERT_TASKS = ("sequence-classification", "span-extraction")
FEW = 15  # rows with which an export of random weights is compared: two batches of 7 and one of 1
LENGTHS = (1, 2, 3, 127, 128, 511, 512)
TASKS: dict[str, tuple[Head, dict[str, Any]]] = {
    "sequence-classification": ("sequence", {"labels": ("calm", "glad", "sad")}),
    "span-extraction": ("span", {}),
    "masked-language-modeling": ("base", {}),
}


@pytest.fixture(scope="module")
def texts(repository: Path) -> list[str]:
    with (repository / "recipes/data/feedback/train.csv").open(encoding="utf-8", newline="") as file:
        return [row["text"] for row in csv.DictReader(file)][:200]


def rows_of(task: str, texts: list[str]) -> list[dict[str, Any]]:
    if task == "span-extraction":
        return [{"question": a, "context": f"{a} {b}"} for a, b in zip(texts, reversed(texts), strict=True)]
    return [{"text": text} for text in texts]


def rectangles(model: TaskModel) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """``[B, T]`` ids, mask and segments: one length alone, then all together; the last seven padded on the left.

    The export compares every length alone.
    """
    config = model.config
    generator = torch.Generator().manual_seed(3)
    for lengths, left in [(LENGTHS[3:4], False), (LENGTHS, False), (LENGTHS, True)]:
        shape = (len(lengths), max(lengths))
        ids = torch.full(shape, config.pad_token_id)
        mask, segments = torch.zeros_like(ids), torch.zeros_like(ids)
        for row, length in enumerate(lengths):
            real = slice(shape[1] - length, None) if left else slice(length)
            ids[row, real] = torch.randint(5, config.vocab_size, (length,), generator=generator)
            mask[row, real] = 1
            if config.type_vocab_size > 1:
                segments[row, real] = torch.arange(length) * 2 // length
        yield ids, mask, segments


def check(exported: Export, model: TaskModel, *, rows: int) -> None:
    """The file's graph against the padded call, and what the export itself found."""
    parity = exported.record["parity"]
    assert (parity["rows"], parity["shortest"], parity["longest"]) == (rows, 1, 512)
    assert parity["max_difference"] <= TOLERANCE * max(1.0, parity["largest_logit"])
    session = onnxruntime.InferenceSession(exported.folder / "onnx/model.onnx")
    names = [node.name for node in session.get_inputs()]
    for batch in rectangles(model):
        feed = dict(zip(("input_ids", "attention_mask", "token_type_ids"), batch, strict=True))
        outputs = [torch.from_numpy(array) for array in session.run(None, {name: feed[name].numpy() for name in names})]
        with torch.inference_mode():
            expected = model(*batch)
        logits = outputs[0] if len(outputs) == 1 else torch.stack(outputs, dim=-1)
        assert logits.shape == expected.shape
        assert (logits - expected).abs().max() <= TOLERANCE * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize(
    ("family", "task"),
    [
        (family, task)
        for number, family in enumerate(FAMILIES)
        if family not in (*WITHOUT_OWN_GRAPH, *EXPORTED_ELSEWHERE)
        for task in (MODERNBERT_TASKS if family == "modernbert" else IN_TURN[number % 2 : number % 2 + 1])
        if has_head(family, TASKS[task][0])
    ],
)
def test_every_family(
    family: str, task: str, texts: list[str], by_kind: dict[str, PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    head, settings = TASKS[task]
    tokenizer, labels = tokenizer_of(family, by_kind), settings.get("labels", ())
    save_checkpoint(tmp_path / "model", family, tokenizer, head=head, labels=labels, positions=512)
    model = TaskModel.from_pretrained(tmp_path / "model", task=task, **settings)
    rows = rows_of(task, texts[:FEW])
    exported = export(model, to="onnx", output=tmp_path / "onnx", data=rows)
    check(exported, model, rows=FEW)
    segments = [] if family in WITHOUT_SEGMENTS else ["token_type_ids"]
    assert exported.record["inputs"] == ["input_ids", "attention_mask", *segments]
    assert exported.record["outputs"] == (["start_logits", "end_logits"] if head == "span" else ["logits"])
    assert len(predict(tmp_path / "onnx", rows[:5])) == 5


@pytest.mark.parametrize(("task", "count"), [("sequence-classification", 200), ("span-extraction", FEW)])
def test_published_weights(task: str, count: int, texts: list[str], embedded_model: Path, tmp_path: Path) -> None:
    """All-MiniLM-L6-v2 with heads as wide as trained ones, so that logits are not near 0."""
    torch.manual_seed(0)
    model = TaskModel.from_pretrained(embedded_model, task=task, **TASKS[task][1])
    with torch.no_grad():
        for weights in model.head.parameters():
            weights.normal_(std=0.2)
    exported = export(model, to="onnx", output=tmp_path / "onnx", data=rows_of(task, texts[:count]))
    assert exported.record["parity"]["largest_logit"] > 1
    check(exported, model, rows=count)
