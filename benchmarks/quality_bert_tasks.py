"""The bert_tasks side of quality.py: the installed command alone, on the published recipes.

One recipe and its overrides per comparison; the only evaluation is after the last step, so that the best model is the
last one. Must not know transformers.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quality_tasks import Answer, Comparison, Kind, Outcome, questions_of, squad_scores, squad_splits

REPOSITORY = Path(__file__).resolve().parent.parent
AFTER_LAST_STEP = 10**9  # evaluate every so many steps, and at the end


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of the command in ``folder``, a temporary one."""

    task: Comparison
    data: Path
    folder: Path
    threads: int

    @property
    def model(self) -> str:
        return str(self.folder / "run" / "model")

    def command(self, *arguments: str) -> str:
        """Runs ``bert-tasks``, and returns what it prints."""
        finished = subprocess.run(
            [sys.executable, "-m", "bert_tasks", *arguments],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(self.threads)},
        )
        return finished.stdout


def run_bert_tasks(task: Comparison, data: Path, *, weights: str, seed: int, threads: int) -> Outcome:
    """Trains one comparison, and scores the weights of the last step."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(task=task, data=data / task.folder, folder=Path(folder), threads=threads)
        last, seconds = _train(run, weights=weights, seed=seed)
        metrics, predictions = SCORERS[task.task_type](run, last)
    return Outcome(metrics=metrics, train_seconds=seconds, predictions=predictions)


def _train(run: Run, *, weights: str, seed: int) -> tuple[dict[str, float], float]:
    """Returns the metrics of the last evaluation, and the seconds of training without it."""
    task = run.task
    settings: dict[str, Any] = {
        "model.name": weights,
        "settings.max_length": task.max_length,
        "optim.learning_rate": task.learning_rate,
        "optim.epochs": task.epochs,
        "optim.batch_size": task.batch_size,
        "optim.warmup_ratio": 0.1,
        "optim.weight_decay": 0.01,
        "optim.max_grad_norm": 1.0,
        "run.seed": seed,
        "run.eval_steps": AFTER_LAST_STEP,
    }
    settings |= _span_settings(run) if task.task_type == "span-extraction" else {"data.dir": run.data}
    options: list[str] = []
    for key, value in settings.items():
        options += ["--set", f"{key}={value}"]
    run.command("train", str(REPOSITORY / task.recipe), *options, "--output-dir", str(run.folder / "run"), "--quiet")
    lines = (run.folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    evaluations = [event for event in map(json.loads, lines) if event["event"] == "evaluation"]
    if len(evaluations) != 1:
        raise SystemExit(f"{len(evaluations)} evaluations, expected the one after the last step")
    summary = json.loads((run.folder / "run" / "metrics.json").read_text(encoding="utf-8"))
    return evaluations[0]["metrics"], summary["train_seconds"]


def _span_settings(run: Run) -> dict[str, Any]:
    """Writes the two splits as SQuAD files, and returns the settings that name them."""
    places = {name: run.folder / f"{name}.json" for name in ("train", "validation")}
    for path, articles in zip(places.values(), squad_splits(run.data), strict=True):
        path.write_text(json.dumps({"version": "v2.0", "data": articles}), encoding="utf-8")
    settings = {f"data.{name}": file for name, file in places.items()}
    return settings | {
        "settings.doc_stride": run.task.doc_stride,
        "settings.n_best_size": run.task.n_best_size,
        "settings.max_answer_length": run.task.max_answer_length,
    }


def score_sequence(run: Run, last: dict[str, float]) -> tuple[dict[str, float], list[Any]]:
    """Returns the scores of dev, which is the validation set."""
    return last, []


def score_token(run: Run, last: dict[str, float]) -> tuple[dict[str, float], list[Any]]:
    """Returns the scores of dev, which is the validation set, and of test, which the saved model predicts."""
    test = str(run.data / "test.txt")
    printed = json.loads(run.command("evaluate", run.model, test, "--format", "conll", "--json"))
    metrics = {f"dev/{name}": value for name, value in last.items()}
    return metrics | {f"test/{name}": value for name, value in printed.items()}, []


def score_span(run: Run, last: dict[str, float]) -> tuple[dict[str, float], list[Any]]:
    """Scores the predictions as on the other side, so that the tuned threshold plays no part."""
    questions = questions_of(squad_splits(run.data)[1])
    output = run.folder / "predictions.jsonl"
    held_out = str(run.folder / "validation.json")
    run.command("predict", run.model, held_out, "--format", "squad", "--output", str(output))
    predicted = map(json.loads, output.read_text(encoding="utf-8").splitlines())
    answers = [_answer(question.key, prediction) for question, prediction in zip(questions, predicted, strict=True)]
    recorded = {f"reported_{name}": value for name, value in last.items()}
    return recorded | squad_scores(questions, answers), [asdict(answer) for answer in answers]


def _answer(key: str, prediction: Mapping[str, Any]) -> Answer:
    """Returns the best answer that is not empty. ``n_best`` begins with the best span, and may hold "no answer"."""
    text = next((span["text"] for span in prediction["n_best"] if span["text"]), "")
    return Answer(key=key, text=text, null_odds=prediction["null_odds"])


SCORERS: Mapping[Kind, Callable[[Run, dict[str, float]], tuple[dict[str, float], list[Any]]]] = {
    "sequence-classification": score_sequence,
    "regression": score_sequence,
    "token-classification": score_token,
    "span-extraction": score_span,
}
