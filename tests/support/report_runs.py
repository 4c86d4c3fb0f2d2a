"""Owns small finished runs of every task to report on: a few rows, hostile texts among them, trained for two epochs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from bert_tasks.recipe.schema import load_recipe
from bert_tasks.training.run import train
from support.task_examples import CHOICES, CLASSES, NUMBERS, PAIRS, SENTENCES, SETS, SOME_WITHOUT_ANSWER, SPANS

HOSTILE = "<script>document.title = 'owned'</script><img src=x onerror=alert(1)>"
MARK = "</style><b id=broken>"


@dataclass(frozen=True)
class Kind:
    """A task, its rows, and what its page must say."""

    task: str
    rows: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    texts: tuple[str, ...] = ()
    charts: int = 3


KINDS = {
    "classes": Kind(
        "sequence-classification",
        # The same text with two labels: one of them is a mistake, whatever is learned.
        [*CLASSES, {"text": HOSTILE, "label": MARK}, {"text": HOSTILE, "label": "low"}],
        texts=("accuracy", "macro F1", "Confusion", "Most confident mistakes", "Expected calibration error", HOSTILE),
    ),
    "labels": Kind(
        "sequence-classification",
        [*SETS, {"text": HOSTILE, "labels": ["x", "z"]}],
        {"problem_type": "multi_label_classification"},
        texts=("micro F1", "confidence in the label"),
    ),
    "numbers": Kind(
        "sequence-classification",
        [*NUMBERS, {"text": HOSTILE, "label": 3.5}],
        {"problem_type": "regression"},
        texts=("Pearson", "Residuals", "Largest errors", HOSTILE),
        charts=4,
    ),
    "pairs": Kind(
        "pair-classification",
        [*PAIRS, {"text": HOSTILE, "text_pair": MARK, "label": "no"}],
        texts=("accuracy", "Confusion"),
    ),
    "choices": Kind(
        "multiple-choice",
        # Two of these labels are mistakes, whatever is learned.
        [
            *CHOICES,
            *(
                {"context": HOSTILE, "question": MARK, "choices": ["a cup", HOSTILE, MARK], "label": label}
                for label in range(3)
            ),
        ],
        texts=("accuracy", "Most confident mistakes", "Expected calibration error", HOSTILE),
    ),
    "tags": Kind(
        "token-classification",
        [*SENTENCES, {"words": [HOSTILE, MARK, "cup"], "tags": ["B-WHO", "O", "B-THING"]}],
        texts=("overall F1", "Sentences", "missed", HOSTILE),
    ),
    "spans": Kind(
        "span-extraction",
        [
            *SOME_WITHOUT_ANSWER,
            {"question": HOSTILE, "context": f"{MARK} {HOSTILE}", "answers": {"text": [], "answer_start": []}},
        ],
        {**SPANS, "version_2_with_negative": True},
        texts=("exact match", "Threshold", "Best predictions", "without an answer"),
        charts=4,
    ),
    "masks": Kind(
        "masked-language-modeling",
        [*({"text": row["text"]} for row in CLASSES), {"text": f"{MARK} {HOSTILE}"}],
        texts=("perplexity", "accuracy", "Masked tokens", "Best predictions"),
        charts=2,
    ),
}


def kinds(*slow: str) -> list[ParameterSet]:
    """The names of all kinds, as parameters of a test that `make test` runs on all but some."""
    return [pytest.param(name, marks=pytest.mark.slow if name in slow else ()) for name in KINDS]


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def write_recipe(folder: Path, checkpoint: Path, case: Kind, *, epochs: int = 2) -> Path:
    """A recipe beside its rows, validated on those that it trains on; its run goes to ``folder/run``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "dev"):
        write_rows(folder / f"{name}.jsonl", case.rows)
    settings = "".join(f"{name} = {json.dumps(value)}\n" for name, value in {"max_length": 48, **case.settings}.items())
    path = folder / "recipe.toml"
    path.write_text(
        f'task = "{case.task}"\n[model]\nname = "{checkpoint}"\n[settings]\n{settings}'
        '[data]\ntrain = "train.jsonl"\nvalidation = "dev.jsonl"\n'
        f"[optim]\nepochs = {epochs}\nbatch_size = 4\nlearning_rate = 1e-3\n"
        '[run]\noutput_dir = "run"\nlogging_steps = 1\n',
        "utf-8",
    )
    return path


def trained(folder: Path, checkpoint: Path, case: Kind, *, seed: int = 1) -> Path:
    """The folder of a finished run."""
    recipe = load_recipe(write_recipe(folder, checkpoint, case), overrides=[f"run.seed={seed}"])
    return train(recipe, progress=False).output_dir
