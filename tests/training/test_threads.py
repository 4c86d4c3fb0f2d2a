"""What the processes of a run are told: that their threads outnumber the cores, and what they disagree on."""

import os
import re
from types import SimpleNamespace

import pytest
import torch

from bert_tasks import distributed, fit
from bert_tasks.distributed import broadcast_from_main, disagreements, thread_hint, usable_cores
from bert_tasks.errors import CheckpointError, DataError, UsageError
from bert_tasks.training import state
from support.training_runs import load_model, make_rows


@pytest.mark.parametrize(
    ("threads", "processes", "cores", "said"),
    [
        (2, 1, 2, None),
        (1, 1, 1, None),
        (1, 2, 2, None),
        (64, 1, 2, "1 x 64 threads share 2 cores, which can slow .* OMP_NUM_THREADS=2$"),
        (2, 1, 1.5, "1 x 2 threads share 1.5 cores, which can slow .* OMP_NUM_THREADS=1$"),
        (2, 2, 2, "2 x 2 threads share 2 cores, which can slow .* OMP_NUM_THREADS=1$"),
        (1, 4, 2, "4 x 1 threads share 2 cores, which slows training down. Start at most 2 processes$"),
    ],
)
def test_the_hint(threads, processes, cores, said):
    hint = thread_hint(threads, processes, cores)
    assert hint is None if said is None else re.match(said, hint)


@pytest.mark.parametrize(
    ("quota", "cores"),
    [(None, 8.0), ("max 100000\n", 8.0), ("150000 100000\n", 1.5), ("1600000 100000", 8.0), ("20000 100000", 1.0)],
)
def test_the_quota_of_a_container_counts(tmp_path, monkeypatch, quota, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota, "utf-8")
    assert usable_cores(tmp_path / "cpu.max") == cores


@pytest.mark.skipif(torch.cuda.is_available(), reason="only a run on the CPU is told")
@pytest.mark.parametrize(("cores", "times"), [(8.0, 0), (0.5, 1)])
def test_a_run_is_told_once_at_its_start(checkpoint, tmp_path, monkeypatch, capfd, cores, times):
    monkeypatch.setattr(state, "usable_cores", lambda: cores)
    fit(load_model(checkpoint), make_rows(4), make_rows(2), output_dir=tmp_path / "run", epochs=1)
    assert capfd.readouterr().err.count("threads share 0.5 cores") == times


def test_differences_are_named_with_the_processes_that_have_them():
    settings = [
        {"settings.labels": "[0, 1]", "seed": "1"},
        {"settings.labels": "[1, 0]", "seed": "1", "new": "2" * 90},
        {"settings.labels": "[1, 0]", "seed": "1"},
    ]
    assert disagreements(settings) == {
        "settings.labels": "settings.labels ([0, 1] on process 0, but [1, 0] on processes 1, 2)",
        "new": f"new (not set on processes 0, 2, but {'2' * 77}... on process 1)",
    }
    assert disagreements(settings[1:2] * 3) == {}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (DataError("a row"), DataError),
        (CheckpointError("a file"), CheckpointError),
        (OSError(28, "No space left on device", "run.json"), UsageError),
    ],
    ids=repr,
)
def test_an_error_of_the_main_process_is_raised_by_all(monkeypatch, error, expected):
    sent = []

    def broadcast(outcome):
        if sent:
            outcome[:] = sent[0]
        sent.append(list(outcome))

    def work():
        raise error

    monkeypatch.setattr(distributed, "broadcast_object_list", broadcast)
    for is_main in (True, False):
        with pytest.raises(expected) as raised:
            broadcast_from_main(SimpleNamespace(is_main_process=is_main, num_processes=2), work)
        assert type(raised.value) is expected
        assert raised.value.collective
