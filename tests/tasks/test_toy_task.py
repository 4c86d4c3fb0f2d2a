"""A task that is written in one file and registered as ``module:Class``: a number for every word.

It keeps the whole contract, trains through the command line, and is read back by those who pass it.
"""

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import httpx2
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bert_tasks.cli import main
from bert_tasks.data.columns import Column, Row
from bert_tasks.encoder.config import EncoderConfig, HeadKind
from bert_tasks.encoder.heads import PerTokenHead
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import CheckpointError
from bert_tasks.metrics.classification import pearson
from bert_tasks.model.task_model import TaskModel
from bert_tasks.outputs.base import LossTerm, Output, labelled, no_loss
from bert_tasks.outputs.features import Feature
from bert_tasks.outputs.hf_config import label_config
from bert_tasks.outputs.prediction import Prediction
from bert_tasks.tasks import Task
from bert_tasks.tasks.windows.words import WindowRules, document_windows, split_words
from support.runs import PATIENCE
from support.servers import Serving
from support.small_checkpoints import save_checkpoint
from support.small_tokenizers import LINES
from support.task_contract import Example, TaskContract


@dataclass(frozen=True, kw_only=True)
class WordNumbers(Prediction):
    words: tuple[str, ...]
    numbers: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class WordScores(Output[WordNumbers]):
    """Settings of the output. ``scale``: what a number is divided by before it is learnt."""

    name: ClassVar[str] = "words"
    prediction: ClassVar[type[Prediction]] = WordNumbers
    has_labels: ClassVar[bool] = False
    head_kind: ClassVar[HeadKind | None] = "token"  # token classification with one output
    column: ClassVar[Column] = Column(name="tags", kind="tags", required=False)
    size: ClassVar[int] = 1
    no_teacher_reason: ClassVar[str | None] = None
    primary_metric: ClassVar[str] = "pearson"
    scale: float = 1.0

    def hf_config(self) -> dict[str, Any]:
        return label_config(("LABEL_0",))

    def encode(self, row: Row) -> list[float] | None:
        tags = row.get("tags")
        return None if tags is None else [float(tag) / self.scale for tag in tags]

    def loss(self, logits: Tensor, batch: PackedBatch) -> tuple[LossTerm]:
        parts = torch.split(logits.squeeze(1), list(batch.layout.gather_counts))
        with_labels = [row_logits for row_logits, count in zip(parts, batch.label_counts, strict=True) if count]
        if not with_labels:
            return (no_loss(self.name, logits),)
        guesses = torch.cat(with_labels)
        total = (guesses - batch.labels).square().sum()
        return (LossTerm(name=self.name, total=total, count=logits.new_full((), len(guesses))),)

    def divergence(
        self, student: Tensor, teacher: Tensor, batch: PackedBatch, temperature: float
    ) -> tuple[Tensor, float]:
        return (student - teacher).square().sum(), float(len(student))

    def divergence_count(self, features: Sequence[Feature]) -> float:
        return float(sum(len(feature.get("gather_positions") or ()) for feature in features))

    def decode(
        self,
        compact: Sequence[Tensor],
        features: Sequence[Feature],
        rows: Sequence[Row],
        tokenizer: PreTrainedTokenizerBase,
    ) -> list[WordNumbers]:
        numbers_by_row: list[list[float]] = [[] for _ in rows]
        for logits, feature in zip(compact, features, strict=True):
            numbers_by_row[feature["row"]] += (logits.squeeze(1) * self.scale).tolist()
        return [
            WordNumbers(words=tuple(row["words"]), numbers=tuple(numbers))
            for row, numbers in zip(rows, numbers_by_row, strict=True)
        ]

    def metrics(self, predictions: Sequence[WordNumbers], rows: Sequence[Row]) -> dict[str, float]:
        pairs = labelled(rows, predictions, "tags")
        actual = [float(tag) for row, _ in pairs for tag in row["tags"]]
        return {"pearson": pearson(actual, [number for _, answer in pairs for number in answer.numbers])}


@dataclass(frozen=True, kw_only=True)
class WordRegression(Task[WordNumbers]):
    """A number for every word."""

    name: ClassVar[str] = "word-regression"
    outputs: ClassVar[tuple[type[Output[Any]], ...]] = (WordScores,)
    columns: ClassVar[tuple[Column, ...]] = (Column(name="words", kind="words"), WordScores.column)

    def head(self, config: EncoderConfig) -> PerTokenHead:
        return PerTokenHead(config, self.output.size, dropout=config.head.token_dropout)

    def features(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[Feature]:
        rules = WindowRules.of(tokenizer, max_length=self.max_length, overlap=0)
        split = split_words([row["words"] for row in rows], tokenizer, longest=rules.room)
        features = []
        for number, (row, words) in enumerate(zip(rows, split, strict=True)):
            labels = self.output.encode(row)
            (windows,) = document_windows([words], rules)
            for window in windows:
                gather_positions, word_ids = window.gather_positions(first=True)
                feature = Feature(
                    row=number,
                    input_ids=window.ids,
                    token_type_ids=[0] * len(window.ids),
                    labels=None if labels is None else [labels[word] for word in word_ids],
                    gather_positions=gather_positions,
                    word_ids=word_ids,
                    lost_tokens=0,
                )
                features.append(feature)
        return features


def row(line: str) -> dict[str, Any]:
    """Words with numbers that follow from their letters."""
    words = line.split()
    return {"words": words, "tags": [str((len(word) % 4) / 2 - 0.75) for word in words]}


class TestContract(TaskContract):
    # The layouts of segments and positions; the tasks of the package meet every family.
    families: ClassVar[Sequence[str]] = ("bert", "roberta", "modernbert", "deberta-v2")
    examples: ClassVar[Mapping[str, Example]] = {
        "toy": Example(
            task=WordRegression.of(max_length=24, scale=0.5),
            rows=tuple(row(" ".join(line.split()[:5])) for line in LINES[:8]),
            column="words",
            windows=True,
        )
    }


@pytest.fixture
def recipe(wordpiece_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "base", "bert", wordpiece_tokenizer)
    for name in ("train", "dev"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row(line)) + "\n" for line in LINES))
    settings = {
        "model": {"name": "base"},
        "settings": {"max_length": 32, "scale": 0.5},
        "data": {"train": "train.jsonl", "validation": "dev.jsonl"},
        "optim": {"learning_rate": 3e-3, "epochs": 25, "batch_size": 8},
        "run": {"seed": 1, "output_dir": "run"},
    }
    sections = [
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in entries.items())
        for name, entries in settings.items()
    ]
    path = tmp_path / "recipe.toml"
    path.write_text("\n".join([f'task = "{__name__}:WordRegression"\n', *sections]))
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["bert-tasks", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return 0 if end.value.code is None else int(end.value.code)


@pytest.mark.slow
def test_trains_through_the_command_line(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "check", recipe) == 0
    assert run(monkeypatch, "train", recipe, "--quiet", "--json") == 0
    metrics = json.loads((recipe.parent / "run" / "metrics.json").read_text())["metrics"]
    assert metrics["pearson"] > 0.9
    folder, dev = recipe.parent / "run" / "model", recipe.parent / "dev.jsonl"
    capsys.readouterr()
    options = ("--task", f"{__name__}:WordRegression")
    assert run(monkeypatch, "evaluate", folder, dev, "--json", *options) == 0
    assert json.loads(capsys.readouterr().out)["pearson"] == pytest.approx(metrics["pearson"], abs=1e-6)
    output = recipe.parent / "answers.jsonl"
    assert run(monkeypatch, "predict", folder, dev, "--output", output, "--keep-columns", "none", *options) == 0
    written = [json.loads(line) for line in output.read_text().splitlines()]
    rows = [row(line) for line in LINES]
    assert [answer["words"] for answer in written] == [example["words"] for example in rows]
    model = TaskModel.from_pretrained(folder, task=WordRegression)
    assert model.task == WordRegression.of(max_length=32, scale=0.5)
    assert [answer.to_json() for answer in model.predict(rows)] == written
    # What one does with a finished run.
    assert run(monkeypatch, "report", recipe.parent / "run", "--output", recipe.parent / "own.html") == 0
    assert "pearson" in (recipe.parent / "own.html").read_text("utf-8")
    (folder / "README.md").unlink()
    assert run(monkeypatch, "push", recipe.parent / "run", "me/x", "--dry-run", "--language", "en") == 0
    card = (folder / "README.md").read_text("utf-8")
    assert "AutoModelForTokenClassification" in card
    assert "pearson" in card
    for graph in ("onnx", "int8"):
        exported = recipe.parent / graph
        assert run(monkeypatch, "export", folder, "--to", graph, "--output", exported, "--data", dev, *options) == 0
        assert run(monkeypatch, "evaluate", exported, dev, *options) == 0
    here = Path(__file__)
    monkeypatch.setenv("PYTHONPATH", str(here.parent), prepend=os.pathsep)
    served = Serving(folder, "--task", f"{here.stem}:WordRegression", folder=recipe.parent)
    try:
        examples = httpx2.get(f"{served.url}/model", timeout=PATIENCE).json()["examples"]
        assert examples == list(model.task.example_rows)
        answer = httpx2.post(f"{served.url}/predict", json={"inputs": examples}, timeout=PATIENCE)
        assert [len(prediction["numbers"]) for prediction in answer.json()["predictions"]] == [
            len(example["words"]) for example in examples
        ]
    finally:
        served.program.send(signal.SIGTERM)
        ended = served.program.wait()
    assert (ended.code, ended.err) == (0, "")


def test_models_agree_on_an_answer_if_all_but_its_numbers_is_equal() -> None:
    answer = WordNumbers(words=("a", "b"), numbers=(0.5, 1.0))
    others = [replace(answer, numbers=(0.25, 1.0)), replace(answer, words=("a", "c"))]
    assert WordRegression.of().output.agreements([answer, answer], others) == [True, False]


def test_a_folder_alone_runs_no_code(
    wordpiece_tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    save_checkpoint(tmp_path / "base", "bert", wordpiece_tokenizer)
    TaskModel.from_pretrained(tmp_path / "base", task=WordRegression, max_length=32).save_pretrained(tmp_path / "own")
    (tmp_path / "dev.jsonl").write_text(json.dumps(row("a b")) + "\n")
    assert run(monkeypatch, "evaluate", tmp_path / "own", tmp_path / "dev.jsonl") == 4
    assert f"'{__name__}:WordRegression', which is not built in" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="task=YourTask"):
        TaskModel.from_pretrained(tmp_path / "own")
