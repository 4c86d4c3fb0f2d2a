"""What is compared: the table of comparisons, their raw files read in plain Python, and the SQuAD scores.

Both sides read their hyper-parameters here and have their answers scored here. Must not know how either side trains.
"""

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bert_tasks.metrics.squad import squad_v1_metrics, squad_v2_metrics

Kind = Literal["sequence-classification", "regression", "token-classification", "span-extraction"]

HELD_OUT_ARTICLES = ("Imperialism", "Warsaw", "French_and_Indian_War", "Force")
HELD_OUT_QUESTIONS = 1629


@dataclass(frozen=True, kw_only=True)
class Score:
    """A metric that gets a verdict. ``points``: what 1.0 of it is worth; ``margin``: in points."""

    metric: str
    points: float = 100.0
    margin: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One data set with the hyper-parameters that both sides use; ``scores`` name metrics of either side."""

    task_type: Kind
    recipe: str
    folder: str
    scores: tuple[Score, ...]
    epochs: int
    columns: tuple[str, ...] = ()  # of a GLUE file without header
    texts: tuple[str, ...] = ("sentence",)
    label: str = "label"
    seeds: tuple[int, ...] = (1, 2, 3)
    learning_rate: float = 5e-5
    batch_size: int = 32
    max_length: int = 128
    doc_stride: int = 0
    n_best_size: int = 20
    max_answer_length: int = 30


COMPARISONS = {
    "sst2": Comparison(
        task_type="sequence-classification",
        recipe="recipes/glue/sst2.toml",
        folder="glue/SST-2",
        scores=(Score(metric="accuracy"),),
        epochs=1,
    ),
    "cola": Comparison(
        task_type="sequence-classification",
        recipe="recipes/glue/cola.toml",
        folder="glue/CoLA",
        scores=(Score(metric="matthews_correlation"),),
        columns=("source", "label", "mark", "sentence"),
        epochs=3,
    ),
    "stsb": Comparison(
        task_type="regression",
        recipe="recipes/glue/stsb.toml",
        folder="glue/STS-B",
        scores=(Score(metric="pearson"), Score(metric="spearmanr")),
        texts=("sentence1", "sentence2"),
        label="score",
        epochs=3,
    ),
    "conll2003": Comparison(
        task_type="token-classification",
        recipe="recipes/conll2003.toml",
        folder="conll2003",
        scores=(Score(metric="test/overall_f1"),),
        epochs=2,
        learning_rate=1e-4,
        max_length=256,
    ),
    "squad": Comparison(
        task_type="span-extraction",
        recipe="recipes/squad/v2.toml",
        folder="squad",
        scores=tuple(
            Score(metric=metric, points=1.0, margin=1.5) for metric in ("exact", "f1", "exact_match", "v1_f1")
        ),
        epochs=2,
        seeds=(1, 2),
        batch_size=16,
        max_length=384,
        doc_stride=128,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a side's run returns. ``predictions``: plain JSON values of the scored set, in file order."""

    metrics: dict[str, float]
    train_seconds: float
    predictions: list[Any]


def glue_rows(path: Path, task: Comparison) -> tuple[list[list[str]], list[str]]:
    """Returns the texts of each column of the task, and the labels, of a GLUE file. Quotes have no meaning in it."""
    with path.open(encoding="utf-8", newline="") as file:
        names = list(task.columns) if task.columns else None
        rows = list(csv.DictReader(file, fieldnames=names, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [[row[name] for row in rows] for name in task.texts], [row[task.label] for row in rows]


def conll_sentences(path: Path) -> list[tuple[list[str], list[str]]]:
    """Returns (words, tags) of each sentence. A line is word TAB tag, and a blank line ends a sentence."""
    sentences: list[tuple[list[str], list[str]]] = []
    words: list[str] = []
    tags: list[str] = []
    for line in [*path.read_text(encoding="utf-8").splitlines(), ""]:
        if line.strip():
            word, tag = line.split("\t")
            words.append(word)
            tags.append(tag.strip())
        elif words:
            sentences.append((words, tags))
            words, tags = [], []
    return sentences


@dataclass(frozen=True, kw_only=True)
class Question:
    """``answers``: texts with the character where each begins; none if the question has no answer."""

    key: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...]


def squad_splits(folder: Path) -> tuple[list[Any], list[Any]]:
    """Returns the articles to train on, and the last four of the file, which are held out."""
    articles = json.loads((folder / "dev-v2.0.part.json").read_text(encoding="utf-8"))["data"]
    train, held_out = articles[: -len(HELD_OUT_ARTICLES)], articles[-len(HELD_OUT_ARTICLES) :]
    titles, count = tuple(article["title"] for article in held_out), len(questions_of(held_out))
    if titles != HELD_OUT_ARTICLES or count != HELD_OUT_QUESTIONS:
        raise SystemExit(
            f"{folder}: the last articles are {titles} with {count} questions; "
            f"expected {HELD_OUT_ARTICLES} with {HELD_OUT_QUESTIONS}"
        )
    return train, held_out


def questions_of(articles: Sequence[Any]) -> list[Question]:
    """Returns all questions of SQuAD articles, in the order of the file."""
    questions: list[Question] = []
    for article in articles:
        for paragraph in article["paragraphs"]:
            for entry in paragraph["qas"]:
                answers = tuple((answer["text"], answer["answer_start"]) for answer in entry["answers"])
                questions.append(
                    Question(key=entry["id"], question=entry["question"], context=paragraph["context"], answers=answers)
                )
    return questions


@dataclass(frozen=True, kw_only=True)
class Answer:
    """``text``: the best answer that is not empty; ``null_odds``: the null score minus this answer's score."""

    key: str
    text: str
    null_odds: float


def squad_scores(questions: Sequence[Question], answers: Sequence[Answer]) -> dict[str, float]:
    """The official scores, 0 to 100.

    v2 rules over all questions, no answer where the null odds are above 0, under their own names; v1.1 rules over the
    questions with answers, the null score left aside: ``exact_match`` and ``v1_f1``.
    """
    if [question.key for question in questions] != [answer.key for answer in answers]:
        raise SystemExit("the answers are not those of the questions, one each and in their order")
    golds = [[text for text, _ in question.answers] for question in questions]
    guesses = [answer.text for answer in answers]
    v2 = squad_v2_metrics(golds, guesses, [answer.null_odds for answer in answers])
    answerable = [row for row, texts in enumerate(golds) if texts]
    v1 = squad_v1_metrics([golds[row] for row in answerable], [guesses[row] for row in answerable])
    return {**v2, "exact_match": v1["exact_match"], "v1_f1": v1["f1"]}
