"""When a run is told that its threads outnumber the cores, and what of the machine that rests on."""

import os
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bert_tasks import fit
from bert_tasks.distributed import CPUUse, cpu_use, thread_hint
from bert_tasks.training import start
from support.training_runs import load_model, make_rows


@pytest.mark.parametrize(
    ("threads", "processes", "cores", "load", "said"),
    [
        (2, 1, 2, 0.0, None),
        (2, 1, 2, 1.4, None),  # less than half a core is busy with other programs
        (2, 1, 2, None, None),
        (8, 1, 8, 1.0, None),
        (1, 1, 1, 9.0, None),
        (1, 1, 2, 9.0, None),
        (1, 2, 2, 9.0, None),
        (2, 1, 2, 3.4, "2 threads share 2 cores, on which other programs are busy (load 3.4), .* OMP_NUM_THREADS=1$"),
        (8, 1, 8, 5.0, "8 threads share 8 cores, on which .* OMP_NUM_THREADS=4$"),
        (4, 2, 8, 6.0, "2 x 4 threads share 8 cores, on which .* OMP_NUM_THREADS=2$"),
        (64, 1, 2, None, "64 threads share 2 cores, which can slow .* OMP_NUM_THREADS=2$"),
        (2, 1, 1.5, None, "2 threads share 1.5 cores, which can slow .* OMP_NUM_THREADS=1$"),
        (2, 2, 2, 0.0, "2 x 2 threads share 2 cores, which can slow .* OMP_NUM_THREADS=1$"),
        (1, 4, 2, 0.0, "4 x 1 threads share 2 cores, which slows training down: start at most 2 processes$"),
    ],
)
def test_the_hint(threads, processes, cores, load, said):
    hint = thread_hint(CPUUse(threads=threads, processes=processes, cores=cores, load=load))
    if said is None:
        assert hint is None
    else:
        assert hint is not None
        assert re.match(said.replace("(", r"\(").replace(")", r"\)"), hint)


counts = st.integers(1, 64)


@given(counts, counts, st.floats(1, 128), st.none() | st.floats(0, 200))
def test_who_follows_the_hint_gets_none(threads, processes, cores, load):
    use = CPUUse(threads=threads, processes=processes, cores=cores, load=load)
    hint = thread_hint(use)
    assert (hint is not None) >= (threads * processes > cores)
    if hint is not None and "OMP_NUM_THREADS=" in hint:
        fewer = int(hint.rpartition("=")[2])
        assert 1 <= fewer < threads
        again = thread_hint(CPUUse(threads=fewer, processes=processes, cores=cores, load=load))
        assert again is None or "start at most" in again


def kernel(folder, *, load=None, group="/", quotas=None):
    """Files as the kernel shows them."""
    proc, cgroups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(f"1:name=systemd:/x\n0::{group}\n", "utf-8")
    if load is not None:
        (proc / "loadavg").write_text(load, "utf-8")
    for place, text in ({} if quotas is None else quotas).items():
        (cgroups / place).mkdir(parents=True, exist_ok=True)
        (cgroups / place / "cpu.max").write_text(text, "utf-8")
    return {"proc": proc, "cgroups": cgroups}


@pytest.fixture
def eight_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


@pytest.mark.parametrize(
    ("group", "quotas", "cores"),
    [
        ("/", {}, 8.0),
        ("/", {"": "max 100000\n"}, 8.0),
        ("/", {"": "150000 100000\n"}, 1.5),
        ("/", {"": "1600000 100000\n"}, 8.0),
        ("/", {"": "20000 100000\n"}, 1.0),
        ("/a/b", {"": "max 100000", "a": "300000 100000", "a/b": "400000 100000"}, 3.0),
        ("/a/b", {"a/b": "damaged", "a": "0 0"}, 8.0),
        ("/gone", {}, 8.0),
    ],
)
def test_a_quota_of_any_group_around_the_process_counts(eight_cores, tmp_path, group, quotas, cores):
    found = cpu_use(threads=3, processes=2, **kernel(tmp_path, load="5.5 1 1 7/99 1", group=group, quotas=quotas))
    assert found == CPUUse(threads=3, processes=2, cores=cores, load=5.5 if cores == 8 else None)


def test_the_cores_that_the_process_is_bound_to_count(eight_cores, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5}, raising=False)
    found = cpu_use(threads=8, processes=1, **kernel(tmp_path, load="5.5 1 1 7/99 1"))
    assert (found.cores, found.load) == (2.0, None)  # the load may be on the other six


@pytest.mark.parametrize(
    ("text", "load"), [("6.5 1 1 3/99 1\n", 3.0), ("0.5 1 1 9/99 1\n", 0.5), ("", None), ("x y", None), (None, None)]
)
def test_the_load_is_what_lasted_and_is_there_now(eight_cores, tmp_path, text, load):
    assert cpu_use(threads=1, processes=1, **kernel(tmp_path, load=text)).load == load


def test_a_machine_that_tells_nothing_is_no_error(tmp_path, monkeypatch):
    nothing = {"proc": tmp_path / "proc", "cgroups": tmp_path / "cgroup"}
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert cpu_use(threads=4, processes=1, **nothing).load is None
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cpu_use(threads=4, processes=1, **nothing) == CPUUse(threads=4, processes=1, cores=1.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="only a run on the CPU is told")
@pytest.mark.parametrize(("load", "times"), [(0.0, 0), (3.0, 1)])
def test_a_run_is_told_once_at_its_start(checkpoint, tmp_path, monkeypatch, capfd, load, times):
    asked = []

    def busy(*, threads, processes):
        asked.append((threads, processes))
        return CPUUse(threads=2, processes=1, cores=2.0, load=load)

    monkeypatch.setattr(start, "cpu_use", busy)
    fit(load_model(checkpoint), make_rows(4), make_rows(2), output_dir=tmp_path / "run", epochs=1)
    assert asked == [(torch.get_num_threads(), 1)]
    assert capfd.readouterr().err.count("set the environment variable OMP_NUM_THREADS=1\n") == times
