"""Processes that were given different labels, settings or rows are told so before the first step."""

import pytest

from bert_tasks.distributed import disagreements
from support import runs
from support.training_runs import make_rows

TORCHRUN = runs.TORCHRUN[:-2]


def test_what_differs_is_named_with_the_processes_that_have_it():
    found = [
        {"settings.labels": "[0, 1]", "seed": "1"},
        {"settings.labels": "[1, 0]", "seed": "1", "new": "2"},
        {"settings.labels": "[1, 0]", "seed": "1"},
    ]
    assert disagreements(found) == {
        "settings.labels": "settings.labels is [0, 1] on process 0; [1, 0] on processes 1, 2",
        "new": "new is not set on processes 0, 2; 2 on process 1",
    }
    assert disagreements(found[1:2] * 3) == {}


@pytest.fixture(scope="module")
def launched(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("disagreeing")
    ended = runs.run([*TORCHRUN, "-m", "support.disagreeing", checkpoint, folder], folder=folder)
    assert ended.code == 0, ended.err
    return folder, ended.err


@pytest.mark.parametrize(
    ("what", "kind", "said"),
    [
        (
            "labels",
            "DataError",
            'settings.labels is ["negative", "positive"] on process 0; ["positive", "negative"] on process 1. Start',
        ),
        ("rows", "DataError", "data.train is "),
        ("settings", "UsageError", "optim.learning_rate is 0.001 on process 0; 0.0001 on process 1. Start all"),
    ],
)
def test_processes_that_disagree_do_not_train(launched, what, kind, said):
    folder, told = launched
    message = f"{kind}: the 2 processes of this run were given different things: {said}"
    assert [f"process {rank}, {what}: {message}" in told for rank in (0, 1)] == [True, True], told
    assert not (folder / what / "run.json").exists()


@pytest.mark.slow
def test_labels_of_equal_value_train_the_same_on_all_processes(checkpoint, tmp_path):
    """Each process finds the labels itself, with its own PYTHONHASHSEED."""
    recipe = runs.write_recipe(tmp_path, checkpoint, rows=12, epochs=1)
    names = ("1", "01", "+1", "001", "+01", "0001")
    for file in ("train.csv", "dev.csv"):
        lines = [f"{row['text']},{names[number % 6]}" for number, row in enumerate(make_rows(12))]
        (tmp_path / file).write_text("\n".join(["text,label", *lines]) + "\n", "utf-8")
    ended = runs.run([*runs.TORCHRUN, "train", recipe, "--no-report"], folder=tmp_path, PYTHONHASHSEED="random")
    assert ended.code == 0, ended.err
    assert runs.steps_done(tmp_path / "run") == 3
