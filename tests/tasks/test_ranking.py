"""Ranking losses against their papers in plain Python, groups as samples, and ``rank`` against CrossEncoder."""

import itertools
import json
import math
import random
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bert_tasks import MultiTaskModel, TaskModel
from bert_tasks.cli import main
from bert_tasks.data.reading import read
from bert_tasks.data.rows import Rows
from bert_tasks.errors import UsageError
from bert_tasks.model.features import training_samples
from bert_tasks.outputs.classes import Classes
from bert_tasks.outputs.logits import NO_LOGIT
from bert_tasks.outputs.number import NumberPrediction
from bert_tasks.outputs.ranking_loss import RankingLoss, ranking_count, ranking_loss
from bert_tasks.tasks import PairClassification
from bert_tasks.tasks.features import collate
from support import training_runs
from support.meta_device import META, on_meta_device
from support.process_scenarios import graded
from support.small_checkpoints import save_checkpoint
from support.training_runs import batches, distance, load_model, make_steps, walk, weights_of

LIBRARY = "sentence_transformers"
LOSSES: tuple[RankingLoss, ...] = ("ranknet", "listnet", "lambda")
Groups = list[tuple[list[float], list[float]]]  # the scores and the grades of each


def ranking_task(name: RankingLoss, **settings: Any) -> PairClassification:
    return PairClassification.of(problem_type="regression", ranking_loss=name, max_length=40, **settings)


def random_groups(seed: int) -> Groups:
    """Groups of 1 to 7 rows with equal scores and grades among them, one of equal grades alone."""
    draw = random.Random(seed)
    sizes = [1, *(draw.randint(2, 7) for _ in range(5))]
    groups = [
        ([draw.choice([draw.gauss(0, 3), 0.5]) for _ in range(n)], [float(draw.randint(0, 3)) for _ in range(n)])
        for n in sizes
    ]
    return [*groups, ([0.1, 0.7], [2.0, 2.0])]


def padded(groups: Groups) -> tuple[Tensor, Tensor]:
    """``[G, C]`` the scores, which need a gradient, and the grades."""
    longest = max(len(scores) for scores, _ in groups)
    scores = [[*scores, *[NO_LOGIT] * (longest - len(scores))] for scores, _ in groups]
    grades = [[*grades, *[-1.0] * (longest - len(grades))] for _, grades in groups]
    return torch.tensor(scores, dtype=torch.float64, requires_grad=True), torch.tensor(grades, dtype=torch.float64)


def pairs_of(grades: list[float]) -> list[tuple[int, int]]:
    return [(i, j) for i, j in itertools.permutations(range(len(grades)), 2) if grades[i] > grades[j]]


def ranks_of(scores: list[float]) -> list[int]:
    """From 1, the later one of equals first."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], -i))
    return [order.index(i) + 1 for i in range(len(scores))]


def ndcg(grades: list[float], ranks: list[int]) -> float:
    def dcg(ranked: list[float]) -> float:
        return sum((2**grade - 1) / math.log2(1 + rank) for rank, grade in enumerate(ranked, start=1))

    by_rank = [grade for _, grade in sorted(zip(ranks, grades, strict=True))]
    return dcg(by_rank) / dcg(sorted(grades, reverse=True))


def delta_ndcg(grades: list[float], ranks: list[int], i: int, j: int) -> float:
    """The change of nDCG if i and j exchange their ranks, by exchanging them."""
    swapped = list(ranks)
    swapped[i], swapped[j] = ranks[j], ranks[i]
    return abs(ndcg(grades, ranks) - ndcg(grades, swapped))


def by_the_papers(name: RankingLoss, groups: Groups) -> tuple[float, float]:
    total = count = 0.0
    for scores, grades in groups:
        pairs, ranks = pairs_of(grades), ranks_of(scores)
        if not pairs:
            continue
        count += len(pairs) if name == "ranknet" else 1
        if name == "listnet":
            targets, outputs = ([math.exp(value) for value in values] for values in (grades, scores))
            shares = zip(targets, outputs, strict=True)
            total -= sum(t / sum(targets) * math.log(o / sum(outputs)) for t, o in shares)
        for i, j in pairs if name != "listnet" else ():
            weight = delta_ndcg(grades, ranks, i, j) if name == "lambda" else 1.0
            total += weight * math.log(1 + math.exp(scores[j] - scores[i]))
    return total, count


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", LOSSES)
def test_losses_equal_their_papers(name: RankingLoss, seed: int) -> None:
    groups = random_groups(seed)
    total, count = ranking_loss(name, *padded(groups))
    expected = by_the_papers(name, groups)
    assert total.item() == pytest.approx(expected[0], rel=1e-12)
    assert count.item() == expected[1] == sum(ranking_count(name, grades) for _, grades in groups)


@pytest.mark.parametrize("seed", range(2))
def test_gradient_of_the_lambda_loss_is_burges_lambdas(seed: int) -> None:
    """The weights have no gradient: lambda_ij = -|delta nDCG| / (1 + exp(s_i - s_j))."""
    groups = random_groups(seed)
    scores, grades = padded(groups)
    ranking_loss("lambda", scores, grades)[0].backward()  # type: ignore[no-untyped-call]  # torch
    assert scores.grad is not None
    for row, (values, group_grades) in enumerate(groups):
        lambdas, ranks = [0.0] * len(values), ranks_of(values)
        for i, j in pairs_of(group_grades):
            force = delta_ndcg(group_grades, ranks, i, j) / (1 + math.exp(values[i] - values[j]))
            lambdas[i] -= force
            lambdas[j] += force
        assert scores.grad[row, : len(values)].tolist() == pytest.approx(lambdas, abs=1e-12)
        assert not scores.grad[row, len(values) :].any()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("grades", [[0.0, 1.0, 0.0], [0.0, 2000.0, 1.0], [0.0, 0.0, 0.0], [0.0, 1e-9, 0.0]])
def test_extreme_scores_and_grades_have_finite_gradients(name: RankingLoss, grades: list[float]) -> None:
    scores = torch.tensor([[90.0, -90.0, NO_LOGIT], [3e4, -3e4, 0.0]], requires_grad=True)
    ranked = torch.tensor([[0.0, 1.0, -1.0], grades], dtype=torch.float64)
    total, _ = ranking_loss(name, scores, ranked)
    total.backward()  # type: ignore[no-untyped-call]  # torch
    assert scores.grad is not None
    assert total.isfinite()
    assert scores.grad.isfinite().all()


ROWS = graded(17)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, bpe_tokenizer: PreTrainedTokenizerBase) -> Path:
    return training_runs.save_checkpoint(tmp_path_factory.mktemp("checkpoint"), bpe_tokenizer, wide=True)


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_a_batch_is_the_loss_of_its_groups(checkpoint: Path, name: RankingLoss) -> None:
    """Rows of a group are not neighbours in the table, and some have no grade."""
    model = load_model(checkpoint, ranking_task(name)).double()
    rows = [{**row, "label": None if i in (2, 5) else row["label"]} for i, row in enumerate(ROWS)]
    table = read(rows, model.task.columns, require_labels=False)
    samples = training_samples(table, model)
    features: Any = samples.features_of([4, 0, 3, 1])
    batch = collate(features, position_offset=model.config.position_offset)
    logits = model(batch)
    groups: Groups = []
    for group in "eadb":
        numbers = [i for i, row in enumerate(rows) if row["group"] == group and row["label"] is not None]
        scores = [model.predict([rows[i]])[0].score for i in numbers]
        groups.append((scores, [rows[i]["label"] for i in numbers]))
    (term,) = model.task.output.loss(logits, batch)
    total, count = by_the_papers(name, groups)
    assert term.total.item() == pytest.approx(total, rel=1e-6)  # predictions are float32
    assert term.count.item() == count == model.task.output.counts(features)[term.name]
    assert samples.rows([0, 3]) == [i for i, row in enumerate(rows) if row["group"] in "ad"]


def trained(checkpoint: Path, name: RankingLoss, **options: Any) -> tuple[dict[str, Tensor], list[float]]:
    model = load_model(checkpoint, ranking_task(name)).double()
    settings: dict[str, Any] = {"batch_size": 4, "max_steps": 5, "learning_rate": 1e-3, "adam_epsilon": 1e-4}
    logs = walk(make_steps(model, ROWS, **{**settings, **options}))
    return weights_of(model), [log.loss for log in logs]


@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_change_no_weight(checkpoint: Path, name: RankingLoss) -> None:
    whole, losses = trained(checkpoint, name)
    cut, cut_losses = trained(checkpoint, name, micro_batch_tokens=20)
    assert distance(whole, cut) <= 1e-12
    assert losses == pytest.approx(cut_losses, rel=1e-12)
    assert min(losses) > 0


def test_batch_size_counts_groups_and_a_group_is_never_cut(checkpoint: Path) -> None:
    model = load_model(checkpoint, ranking_task("lambda"))
    steps = make_steps(model, ROWS, batch_size=3, micro_batch_tokens=1)
    assert len(steps.samples) == len({row["group"] for row in ROWS}) == 7
    for batch in itertools.islice(batches(steps), 3):
        for features, sample in zip(steps.cut(0, batch), batch, strict=True):
            assert len(features) == len(steps.samples.rows([sample]))


def test_batches_of_groups_without_different_grades_change_nothing(checkpoint: Path) -> None:
    model = load_model(checkpoint, ranking_task("listnet"))
    before = weights_of(model)
    rows = [{**row, "label": 1.0} for row in ROWS]
    logs = walk(make_steps(model, rows, batch_size=7, max_steps=1, weight_decay=0.0))
    assert logs[0].loss == 0
    assert distance(before, weights_of(model)) == 0


@pytest.mark.parametrize("name", LOSSES)
def test_a_step_does_not_wait_for_the_device(
    checkpoint: Path, name: RankingLoss, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = make_steps(load_model(checkpoint, ranking_task(name)), ROWS, batch_size=7, micro_batch_tokens=60)
    batch = next(batches(steps))
    with on_meta_device(steps, monkeypatch):
        result = steps.update(0, batch, steps.backward(0, batch))
    assert result.values.device.type == "cpu"
    assert {parameter.device for parameter in steps.objective.parameters()} == {META}


def test_files_that_share_groups_are_drawn_together(checkpoint: Path) -> None:
    task = ranking_task("lambda")
    model = load_model(checkpoint, task)
    tables = [read(rows, task.columns, require_labels=False) for rows in (ROWS[:9], ROWS[9:13], ROWS[3:4])]
    samples = training_samples(Rows.joined(tables), model)
    by_table: dict[str, list[int]] = defaultdict(list)
    for number, row in enumerate(ROWS[:13]):
        by_table[row["group"]].append(number)
    assert [samples.rows([i])[0] for i in range(len(samples))] == [numbers[0] for numbers in by_table.values()]
    assert [table.tolist() for table in samples.by_table] == [list(range(len(samples) - 1)), [len(samples) - 1]]


def test_graded_rows_are_ranked_by_the_number() -> None:
    rows = [{"label": label, "group": "q"} for label in (0.0, 2.0, 1.0)] + [{"label": 3.0, "group": None}]
    predictions = [NumberPrediction(score=score) for score in (0.3, 0.9, 0.1, 5.0)]
    for name in ("none", "lambda"):
        metrics = ranking_task(name).output.metrics(predictions, rows)
        assert metrics["ndcg@10"] == pytest.approx((2 + 1 / 2) / (2 + 1 / math.log2(3)))
        assert (metrics["map"], metrics["mrr"]) == (pytest.approx((1 + 2 / 3) / 2), 1.0)
    assert ranking_task("lambda").output.primary_metric == "ndcg@10"
    assert math.isnan(ranking_task("lambda").output.metrics(predictions[-1:] * 2, rows[-1:] * 2)["ndcg@10"])
    assert "ndcg@10" not in ranking_task("none").output.metrics(predictions[-1:] * 2, rows[-1:] * 2)


QUERY = "the ferry leaves"
DOCUMENTS = ["nobody told the baker", "the ferry leaves at seven", "", "bring your own cup", "the old ferry"]


@pytest.mark.slow
@pytest.mark.parametrize("activation", [None, "Identity"])
def test_rank_equals_cross_encoder(
    tmp_path: Path, wordpiece_tokenizer: PreTrainedTokenizerBase, activation: str | None
) -> None:
    save_checkpoint(tmp_path / "base", "bert", wordpiece_tokenizer, wide=True)
    torch.manual_seed(1)
    TaskModel.from_pretrained(tmp_path / "base", task=ranking_task("lambda")).save_pretrained(tmp_path / "saved")
    if activation is not None:
        config = json.loads((tmp_path / "saved" / "config.json").read_text("utf-8"))
        config["sentence_transformers"] = {"activation_fn": f"torch.nn.modules.linear.{activation}"}
        (tmp_path / "saved" / "config.json").write_text(json.dumps(config), "utf-8")
    model = TaskModel.from_pretrained(tmp_path / "saved")
    other = pytest.importorskip(LIBRARY).CrossEncoder(str(tmp_path / "saved"))
    for options in ({}, {"top_k": 2}, {"return_documents": True}):
        ours, theirs = (each.rank(QUERY, DOCUMENTS, **options) for each in (model, other))
        assert [{**entry, "score": 0} for entry in ours] == [{**entry, "score": 0} for entry in theirs]
        assert [entry["score"] for entry in ours] == pytest.approx([entry["score"] for entry in theirs], abs=1e-5)
    outputs = [prediction.score for prediction in model.predict([(QUERY, document) for document in DOCUMENTS])]
    assert (ours[0]["score"] == pytest.approx(max(outputs), abs=1e-6)) == (activation == "Identity")
    assert model.rank(QUERY, []) == []


def test_documents_are_ranked_by_the_probability_and_a_series_by_position(
    tmp_path: Path, wordpiece_tokenizer: PreTrainedTokenizerBase
) -> None:
    save_checkpoint(tmp_path, "bert", wordpiece_tokenizer, head="sequence", labels=("no", "yes"), wide=True)
    model = TaskModel.from_pretrained(tmp_path, task="pair-classification")
    documents = pandas.Series(DOCUMENTS, index=range(len(DOCUMENTS), 0, -1))
    ranked = model.rank(QUERY, DOCUMENTS, return_documents=True)
    assert model.rank(QUERY, documents, return_documents=True) == ranked
    scores = [prediction.scores["yes"] for prediction in model.predict([(QUERY, text) for text in DOCUMENTS])]
    order = sorted(range(len(scores)), key=lambda number: -scores[number])
    assert [entry["corpus_id"] for entry in ranked] == order
    assert [entry["score"] for entry in ranked] == pytest.approx([scores[number] for number in order], abs=1e-6)


def test_what_cannot_rank_is_rejected(tmp_path: Path, wordpiece_tokenizer: PreTrainedTokenizerBase) -> None:
    save_checkpoint(tmp_path, "bert", wordpiece_tokenizer, head="sequence", labels=("a", "b", "c"))
    for task in ("pair-classification", "sequence-classification"):
        with pytest.raises(UsageError, match="rank needs a model of pair-classification"):
            TaskModel.from_pretrained(tmp_path, task=task).rank(QUERY, DOCUMENTS)
    model = TaskModel.from_pretrained(tmp_path, task=ranking_task("none"))
    wrong: Any = DOCUMENTS[0]
    with pytest.raises(UsageError, match="documents is one text"):
        model.rank(QUERY, wrong)
    with pytest.raises(UsageError, match="top_k is 0"):
        model.rank(QUERY, DOCUMENTS, top_k=0)
    model.hf_config = {**model.hf_config, "sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}
    with pytest.raises(UsageError, match=r"'torch\.nn\.Tanh' is not supported"):
        model.rank(QUERY, DOCUMENTS)


def test_one_of_several_tasks_has_no_groups(checkpoint: Path) -> None:
    entry = {"task": "pair-classification", "problem_type": "regression", "ranking_loss": "lambda"}
    with pytest.raises(UsageError, match=r"tasks\.x: a loss over groups of rows cannot be one of several tasks"):
        MultiTaskModel.from_pretrained(checkpoint, tasks={"x": entry})


def test_labels_replace_a_ranking_loss(tmp_path: Path, checkpoint: Path) -> None:
    load_model(checkpoint, ranking_task("lambda")).save_pretrained(tmp_path)
    model = TaskModel.from_pretrained(tmp_path, task="pair-classification", labels=["no", "yes"])
    assert isinstance(model.task, PairClassification)
    assert isinstance(model.task.output, Classes)
    assert model.task.sample == "row"
    assert model.task.settings()["ranking_loss"] == "none"


HEAD = "text,text_pair,label,group"
RECIPE = """\
task = "pair-classification"
[model]
name = "{checkpoint}"
[settings]
max_length = 32
problem_type = "regression"
ranking_loss = "lambda"
[data]
train = "data.csv"
validation = "dev.csv"
[run]
output_dir = "run"
"""
GOOD = f"{HEAD}\na,b,1,q\na,c,0,q\n"


@pytest.mark.parametrize(
    ("data", "changes", "code", "message"),
    [
        ("text,text_pair,label\na,b,1\na,c,0\n", {}, 3, "needs the column 'group'"),
        (f"{HEAD}\na,b,1,q\na,c,0,\n", {}, 3, "line 3 has no group"),
        (f"{HEAD}\na,b,1,q\na,c,-0.5,q\n", {}, 3, "line 3 has the grade -0.5, expected a number from 0"),
        (f"{HEAD}\na,b,1,q\na,c,1,q\nb,a,0,r\n", {}, 3, "no group has rows with different grades"),
    ],
)
def test_wrong_input_is_one_short_message(
    data: str,
    changes: dict[str, str],
    code: int,
    message: str,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data.csv").write_text(data, "utf-8")
    Path("dev.csv").write_text(GOOD, "utf-8")
    Path("recipe.toml").write_text(RECIPE.format(checkpoint=checkpoint), "utf-8")
    settings = [argument for key, value in changes.items() for argument in ("--set", f"{key}={value}")]
    monkeypatch.setattr(sys, "argv", ["bert-tasks", "check", "recipe.toml", *settings])
    with pytest.raises(SystemExit) as end:
        main()
    error = capsys.readouterr().err
    assert end.value.code == code, error
    assert message in error
    assert "Traceback" not in error
