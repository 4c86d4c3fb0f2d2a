"""Masks of an evaluation follow the content of a window: neither its place in the file nor the other rows."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from bert_tasks.data.columns import Row
from bert_tasks.data.reading import read
from bert_tasks.distributed import make_accelerator
from bert_tasks.inference import evaluate, evaluate_samples
from bert_tasks.inference.replaced_tokens import replaced_token_output
from bert_tasks.model.features import tokenized
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks import MaskedLanguageModeling, ReplacedTokens, Task
from bert_tasks.training.replaced_tokens import make_generator
from support.sampling import slow_except
from support.small_checkpoints import save_checkpoint
from support.small_tokenizers import LINES

# Documents of one to four sentences, in windows of 24 tokens; one of them twice.
DOCUMENTS = [LINES[start : start + 1 + start % 4] for start in range(16)]
ROWS: list[Row] = [{"text": "\n".join(lines), "sentences": lines} for lines in [*DOCUMENTS, DOCUMENTS[3]]]
SUBSET = [0, 3, 9, 14, 16]
MASKED: dict[str, dict[str, Any]] = {
    "tokens": {},
    "smoothed": {"mask_smoothing": 0.7},
    "words": {"whole_word_mask": True},
    "static": {"masking": "static"},
    "sop": {"sentence_objective": "sop"},
}
TASKS: dict[str, Task] = {name: MaskedLanguageModeling.of(max_length=24, **options) for name, options in MASKED.items()}
TASKS["replaced"] = ReplacedTokens.of(max_length=24)
TASKS["nsp"] = MaskedLanguageModeling.of(max_length=24, sentence_objective="nsp")  # pairs with other documents


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, wordpiece_tokenizer: PreTrainedTokenizerBase) -> Path:
    path = tmp_path_factory.mktemp("models")
    for family in ("bert", "electra"):
        save_checkpoint(path / family, family, wordpiece_tokenizer, wide=True)
    return path


def model_of(folder: Path, task: Task) -> TaskModel:
    torch.manual_seed(0)
    return TaskModel.from_pretrained(folder / ("electra" if task.generator() else "bert"), task=task)


def evaluated(model: TaskModel, rows: list[Row]) -> list[Any]:
    """The prediction of each row, from which its masks and its loss are read."""
    run = None
    if model.task.generator() is not None:
        generator = make_generator(model, seed=1).eval()
        run = partial(replaced_token_output, generator=generator, discriminator=model)
    table = read(rows, model.row_columns, require_labels=False)
    return (
        evaluate_samples(model, tokenized(table, model), table, make_accelerator(), forward_fn=run)
        .scores[""]
        .predictions
    )


def masks(prediction: Any) -> Any:
    """What was masked of a row, and with which tokens around it."""
    if hasattr(prediction, "pairs"):
        labels = [label for label, _ in prediction.pairs]
        return labels, [(mask.label, mask.context) for mask in prediction.measured]
    return prediction.ids, prediction.originals, [flags for _, *flags in prediction.measured]


def loss(prediction: Any) -> list[float]:
    """The part of each masked token, or the logit of each token."""
    if hasattr(prediction, "pairs"):
        return [mask.log_probability for mask in prediction.measured]
    return [logit for logit, *_ in prediction.measured]


def check_equal(outputs: list[Any], expected: list[Any]) -> None:
    for output, other in zip(outputs, expected, strict=True):
        assert masks(output) == masks(other)
        assert loss(output) == pytest.approx(loss(other), abs=1e-5)


@pytest.mark.parametrize("name", slow_except(list(TASKS), "tokens", "replaced"))
def test_neither_order_nor_other_rows_change_masks_and_loss(name: str, folder: Path) -> None:
    model = model_of(folder, TASKS[name])
    whole = evaluated(model, ROWS)
    for seed in range(2):
        order = np.random.default_rng(seed).permutation(len(ROWS)).tolist()
        check_equal(evaluated(model, [ROWS[number] for number in order]), [whole[number] for number in order])
    if name == "nsp":  # whose pairs are those of the other rows
        assert {label for prediction in whole for label, _ in prediction.pairs} == {0, 1}
        return
    assert len({str(masks(prediction)) for prediction in whole}) == len(DOCUMENTS)
    check_equal([whole[3]], [whole[16]])
    check_equal(evaluated(model, [ROWS[number] for number in SUBSET]), [whole[number] for number in SUBSET])
    check_equal(evaluated(model, [ROWS[3]]), [whole[3]])


def test_models_with_and_without_smoothing_see_the_same_masks(folder: Path) -> None:
    plain, smoothed = (evaluated(model_of(folder, TASKS[name]), ROWS) for name in ("tokens", "smoothed"))
    check_equal(plain, smoothed)


def test_the_mean_of_evaluations_of_parts_is_that_of_the_whole(folder: Path) -> None:
    model = model_of(folder, TASKS["smoothed"])
    parts = ROWS[:5], ROWS[5:]
    counts = [sum(len(prediction.measured) for prediction in evaluated(model, rows)) for rows in parts]
    losses = [evaluate(model, rows)["loss"] for rows in parts]
    assert evaluate(model, ROWS)["loss"] == pytest.approx(np.average(losses, weights=counts), abs=1e-5)
