"""Two processes on a CPU give what one gives, by torchrun; and what other launchers do. test_steps.py simulates two."""

import json
import re
import sys
from collections import Counter

import pytest
import torch

from support import process_scenarios, runs
from support.process_scenarios import DTYPES, EVALUATED, SEVERAL_TERMS, several_terms
from support.training_runs import distance, make_rows

pytestmark = pytest.mark.slow  # real processes
TOLERANCE = {"torch.float64": 1e-12, "torch.float32": 1e-6}


@pytest.fixture(scope="module")
def single_process(checkpoint, wide_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return process_scenarios.scenarios(checkpoint, wide_checkpoint, folder) | {"folder": folder / "run"}


@pytest.fixture(scope="module")
def two(checkpoint, wide_checkpoint, tmp_path_factory):
    """The results of both processes."""
    folder = tmp_path_factory.mktemp("two")
    command = [*runs.TORCHRUN[:-1], "support.process_scenarios", checkpoint, wide_checkpoint, folder]
    ended = runs.run(command, folder=folder)
    assert ended.code == 0, ended.err
    ranks = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]
    groups = [(folder / f"group{rank}.txt").read_text() for rank in (0, 1)]
    return [
        rank | {"folder": folder / "run", "stderr": ended.err, "group": group}
        for rank, group in zip(ranks, groups, strict=True)
    ]


def test_both_processes_take_part_and_leave_their_group_and_the_second_is_silent(single_process, two):
    assert [single_process["world"], two[0]["world"], two[1]["world"]] == [1, 2, 2]
    assert [rank["group"] for rank in two] == ["left", "left"]
    assert two[0]["stderr"].count("step 12/12  epoch 3") == 1


@pytest.mark.parametrize("dtype", [str(dtype) for dtype in DTYPES])
def test_two_processes_train_the_weights_of_one(single_process, two, dtype):
    single = single_process["steps"][dtype]
    assert len(single["logs"]) == 12
    for rank in two:
        assert distance(single["weights"], rank["steps"][dtype]["weights"]) <= TOLERANCE[dtype]
        for left, right in zip(single["logs"], rank["steps"][dtype]["logs"], strict=True):
            assert left == pytest.approx(right, rel=TOLERANCE[dtype] * 1000)


def test_both_processes_hold_the_same_weights(two):
    for name in ("few", "uneven", "terms", "teacher", "masks", "tokens", "own table", "adapters", "trained"):
        assert distance(two[0][name]["weights"], two[1][name]["weights"]) == 0


def test_two_processes_train_some_rows_of_the_embeddings_as_they_train_all(two):
    for rank in two:
        assert distance(rank["few"]["weights"], rank["all rows"]["weights"]) <= 1e-12
        norms = [[log["grad_norm"] for log in rank[name]["logs"]] for name in ("few", "all rows")]
        assert norms[0] == pytest.approx(norms[1], rel=1e-12)
        assert min(norms[0]) > 0.1  # they were clipped


def test_every_sample_is_read_once_an_epoch(two):
    read = [rank["steps"]["torch.float64"]["seen"] for rank in two]
    assert Counter(read[0] + read[1]) == dict.fromkeys(range(21), 4)
    assert min(map(len, read)) > 36


@pytest.mark.parametrize(
    "name", ["few", "all rows", "own table", "uneven", "terms", "teacher", "masks", "tokens", "adapters"]
)
def test_processes_with_fewer_rows_or_none_do_no_harm(single_process, two, name):
    assert distance(single_process[name]["weights"], two[0][name]["weights"]) <= 1e-12
    losses = [[log["loss"] for log in rank[name]["logs"]] for rank in (single_process, *two)]
    assert losses[1] == losses[2]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


@pytest.mark.parametrize("name", SEVERAL_TERMS)
def test_each_term_has_the_count_of_the_whole_batch(single_process, two, wide_checkpoint, name):
    """One batch, micro-batches, and two processes give the same weights, although no two of them have equal counts."""
    whole = several_terms(name, wide_checkpoint, micro_batch_tokens=16384)
    assert len(whole["logs"]) == 5
    for other in (single_process, *two):
        rank = other["several terms"][name]
        assert distance(whole["weights"], rank["weights"]) <= 1e-12
        for left, right in zip(whole["logs"], rank["logs"], strict=True):
            assert left == pytest.approx(right, rel=1e-9)


@pytest.mark.parametrize("count", EVALUATED)
def test_evaluation_gives_the_same_digits(single_process, two, count):
    single = single_process["evaluations"][count]
    assert len(single["predictions"]) == count
    assert single_process["evaluated masks"]["metrics"]["perplexity"] > 1
    for rank in two:
        assert rank["evaluations"][count] == single
        assert rank["evaluated masks"] == single_process["evaluated masks"]  # the same tokens are masked


def test_predictions_stand_in_row_order(single_process, wide_checkpoint):
    model = process_scenarios.load_model(wide_checkpoint)
    for count in EVALUATED:
        alone = [model.predict([row])[0].score for row in make_rows(count, seed=count)]
        scores = [prediction["score"] for prediction in single_process["evaluations"][count]["predictions"]]
        assert scores == pytest.approx(alone, abs=1e-5)


def test_fit_records_one_run(single_process, two):
    def events(folder):
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]

    assert distance(single_process["trained"]["weights"], two[0]["trained"]["weights"]) <= 1e-6
    assert two[0]["trained"]["metrics"] == two[1]["trained"]["metrics"]
    single, double = events(single_process["folder"]), events(two[0]["folder"])
    assert [(event["event"], event["step"]) for event in single] == [(e["event"], e["step"]) for e in double]
    rates = [[event["learning_rate"] for event in run if event["event"] == "step"] for run in (single, double)]
    assert rates[0] == rates[1]
    assert len(rates[0]) == 12
    facts = [json.loads((run["folder"] / "run.json").read_text("utf-8")) for run in (single_process, two[0])]
    assert [run["processes"] for run in facts] == [1, 2]


def test_tasks_with_their_own_rows_are_trained_the_same(single_process, two):
    """The processes draw the same rows, and the folder of the model is that of one process."""
    assert distance(single_process["trained tasks"]["weights"], two[0]["trained tasks"]["weights"]) <= 1e-6
    assert two[0]["trained tasks"]["metrics"] == two[1]["trained tasks"]["metrics"]
    folders = [run["folder"].parent / "tasks" / "model" for run in (single_process, two[0])]
    names = [sorted(path.name for path in folder.iterdir()) for folder in folders]
    assert names[0] == names[1]
    for name in names[0]:
        if not name.endswith((".safetensors", ".md")):
            assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name


@pytest.mark.parametrize(
    ("topic", "message"),
    [
        (
            "labels",
            'DataError: .*settings.labels (["negative", "positive"] on process 0, but ["positive", "negative"] on '
            "process 1). Start",
        ),
        ("rows", "DataError: .*data.train ("),
        ("settings", "UsageError: .*optim.learning_rate (0.001 on process 0, but 0.0001 on process 1). Start all"),
    ],
)
def test_processes_that_disagree_do_not_train(single_process, two, topic, message):
    prefix, _, difference = message.partition(".*")
    assert single_process["disagreements"][topic] == ""
    for rank in two:
        expected = f"{prefix}the 2 processes of this run disagree on {difference}"
        assert rank["disagreements"][topic].startswith(expected)
    assert not (two[0]["folder"].parent / topic / "run.json").exists()


def test_the_command_line_trains_and_evaluates_on_two_processes(tmp_path, checkpoint):
    """Each process collects the labels, which are equal numbers, with its own PYTHONHASHSEED."""
    recipe = runs.write_recipe(tmp_path, checkpoint, rows=12, epochs=1)
    labels = ("1", "01", "+1", "001", "+01", "0001")
    for file in ("train.csv", "dev.csv"):
        lines = [f"{row['text']},{labels[number % 6]}" for number, row in enumerate(make_rows(12))]
        (tmp_path / file).write_text("\n".join(["text,label", *lines]) + "\n", "utf-8")

    def launch(*command):
        ended = runs.run(command, folder=tmp_path, PYTHONHASHSEED="random")
        assert ended.code == 0, ended.err
        return ended.out

    assert json.loads(launch(*runs.TORCHRUN, "train", recipe, "--json"))["best_step"] == 3
    assert json.loads((tmp_path / "run" / "run.json").read_text("utf-8"))["processes"] == 2
    evaluate = ("evaluate", tmp_path / "run" / "model", tmp_path / "dev.csv", "--json")
    assert launch(*runs.TORCHRUN, *evaluate) == launch(*runs.CONSOLE, *evaluate)
    assert "this run was already complete" in launch(*runs.TORCHRUN, "train", recipe)


def test_two_processes_diverge_together(tmp_path, checkpoint):
    options = ("--set", "optim.learning_rate=1e30", "--set", "optim.epochs=9")
    ended = runs.run([*runs.TORCHRUN, "train", runs.write_recipe(tmp_path, checkpoint), *options], folder=tmp_path)
    assert ended.code == 1  # torchrun's own code
    assert re.search(r"error: step \d+: the loss is", ended.err)
    assert "exitcode  : 5" in ended.err


def test_accelerate_launch_on_a_cpu_starts_one_process(tmp_path, checkpoint):
    """``--num_processes`` is without effect there: the run is a correct one of one process."""
    launcher = (sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "-m", "bert_tasks")
    command = [*launcher, "train", runs.write_recipe(tmp_path, checkpoint, rows=12, epochs=1)]
    assert runs.run(command, folder=tmp_path).code == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text("utf-8"))["processes"] == 1
