"""Two processes on a CPU give what one gives, by torchrun; and what other launchers do."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch

from support import process_scenarios
from support.process_scenarios import DTYPES, EVALUATED, SEVERAL_TERMS, several_terms
from support.runs import TESTS
from support.training_runs import distance, make_rows

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2")
TOLERANCE = {"torch.float64": 1e-12, "torch.float32": 1e-6}


def launch(*command, code=0):
    """Runs a launcher to its end; the tests' folder is on the import path of its processes."""
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def one(checkpoint, wide_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return process_scenarios.scenarios(checkpoint, wide_checkpoint, folder) | {"folder": folder / "run"}


@pytest.fixture(scope="module")
def two(checkpoint, wide_checkpoint, tmp_path_factory):
    """The results of both processes."""
    folder = tmp_path_factory.mktemp("two")
    done = launch(*TORCHRUN, "-m", "support.process_scenarios", checkpoint, wide_checkpoint, folder)
    ranks = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]
    groups = [(folder / f"group{rank}.txt").read_text() for rank in (0, 1)]
    return [
        rank | {"folder": folder / "run", "stderr": done.stderr, "group": group}
        for rank, group in zip(ranks, groups, strict=True)
    ]


def test_both_processes_take_part(one, two):
    assert [one["world"], two[0]["world"], two[1]["world"]] == [1, 2, 2]


def test_both_processes_leave_their_group_before_python_ends(two):
    assert [rank["group"] for rank in two] == ["left", "left"]


@pytest.mark.parametrize("dtype", [str(dtype) for dtype in DTYPES])
def test_two_processes_train_the_weights_of_one(one, two, dtype):
    single = one["steps"][dtype]
    assert len(single["logs"]) == 20
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
    assert Counter(read[0] + read[1]) == dict.fromkeys(range(37), 4)
    assert min(map(len, read)) > 60


@pytest.mark.parametrize(
    "name", ["few", "all rows", "own table", "uneven", "terms", "teacher", "masks", "tokens", "adapters"]
)
def test_processes_with_fewer_rows_or_none_do_no_harm(one, two, name):
    assert distance(one[name]["weights"], two[0][name]["weights"]) <= 1e-12
    losses = [[log["loss"] for log in rank[name]["logs"]] for rank in (one, *two)]
    assert losses[1] == losses[2]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


@pytest.mark.parametrize("name", SEVERAL_TERMS)
def test_each_term_has_the_count_of_the_whole_batch(one, two, wide_checkpoint, name):
    """One batch, micro-batches, and two processes give the same weights, although no two of them have equal counts."""
    whole = several_terms(name, wide_checkpoint, micro_batch_tokens=16384)
    assert len(whole["logs"]) == 8
    for other in (one, *two):
        found = other["several terms"][name]
        assert distance(whole["weights"], found["weights"]) <= 1e-12
        for left, right in zip(whole["logs"], found["logs"], strict=True):
            assert left == pytest.approx(right, rel=1e-9)


@pytest.mark.parametrize("count", EVALUATED)
def test_evaluation_gives_the_same_digits(one, two, count):
    single = one["evaluations"][count]
    assert len(single["predictions"]) == count
    for rank in two:
        assert rank["evaluations"][count] == single


def test_evaluation_masks_the_same_tokens(one, two):
    assert one["evaluated masks"]["metrics"]["perplexity"] > 1
    for rank in two:
        assert rank["evaluated masks"] == one["evaluated masks"]


def test_predictions_stand_in_row_order(one, wide_checkpoint):
    model = process_scenarios.load_model(wide_checkpoint)
    for count in EVALUATED:
        alone = [model.predict([row])[0].score for row in make_rows(count, seed=count)]
        found = [prediction["score"] for prediction in one["evaluations"][count]["predictions"]]
        assert found == pytest.approx(alone, abs=1e-5)


def test_fit_records_one_run(one, two):
    def events(folder):
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]

    assert distance(one["trained"]["weights"], two[0]["trained"]["weights"]) <= 1e-6
    assert two[0]["trained"]["metrics"] == two[1]["trained"]["metrics"]
    single, double = events(one["folder"]), events(two[0]["folder"])
    assert [(event["event"], event["step"]) for event in single] == [(e["event"], e["step"]) for e in double]
    rates = [[event["learning_rate"] for event in run if event["event"] == "step"] for run in (single, double)]
    assert rates[0] == rates[1]
    assert len(rates[0]) == 20
    facts = [json.loads((run["folder"] / "run.json").read_text("utf-8")) for run in (one, two[0])]
    assert [run["processes"] for run in facts] == [1, 2]


def test_the_second_process_is_silent(two):
    assert two[0]["stderr"].count("step 20/20  epoch 5") == 1


def small_recipe(folder, checkpoint, *, rows=3):
    for name, count in (("train", 12), ("validation", rows)):
        lines = [f"{row['text']},{row['label']}" for row in make_rows(count)]
        (folder / f"{name}.csv").write_text("\n".join(["text,label", *lines]) + "\n", "utf-8")
    path = folder / "recipe.toml"
    path.write_text(
        f'task = "sequence-classification"\n[model]\nname = "{checkpoint}"\n[settings]\nmax_length = 40\n'
        '[data]\ntrain = "train.csv"\nvalidation = "validation.csv"\n[optim]\nepochs = 1\nbatch_size = 4\n'
        '[run]\noutput_dir = "run"\n',
        "utf-8",
    )
    return path


@pytest.mark.slow
def test_the_command_line_trains_and_evaluates_on_two_processes(tmp_path, checkpoint):
    recipe = small_recipe(tmp_path, checkpoint)
    done = launch(*TORCHRUN, "-m", "bert_tasks", "train", recipe, "--json")
    assert json.loads(done.stdout)["best_step"] == 3
    assert json.loads((tmp_path / "run" / "run.json").read_text("utf-8"))["processes"] == 2
    command = ("-m", "bert_tasks", "evaluate", tmp_path / "run" / "model", tmp_path / "validation.csv")
    single = launch(sys.executable, *command, "--json")
    assert launch(*TORCHRUN, *command, "--json").stdout == single.stdout
    again = launch(*TORCHRUN, "-m", "bert_tasks", "train", recipe)
    assert "this run was already complete" in again.stdout


@pytest.mark.slow
def test_two_processes_diverge_together(tmp_path, checkpoint):
    recipe = small_recipe(tmp_path, checkpoint)
    options = ("--set", "optim.learning_rate=1e30", "--set", "optim.epochs=9")
    done = launch(*TORCHRUN, "-m", "bert_tasks", "train", recipe, *options, code=1)  # torchrun's own code
    assert "error: step 2: the loss is" in done.stderr
    assert "exitcode  : 5" in done.stderr


@pytest.mark.slow
def test_accelerate_launch_on_a_cpu_starts_one_process(tmp_path, checkpoint):
    """``--num_processes`` is without effect there: the run is a correct one of one process."""
    recipe = small_recipe(tmp_path, checkpoint)
    launch(*ACCELERATE, "-m", "bert_tasks", "train", recipe)
    assert json.loads((tmp_path / "run" / "run.json").read_text("utf-8"))["processes"] == 1
