"""Whole runs on the device: bits, memory, processes, and the answers of the trained model."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bert_tasks import TaskModel, evaluate, fit
from support.gpu import DEVICE, PRECISION, device_of_runs, needs_cuda
from support.stopped_runs import digests, events, run, stopped
from support.task_examples import EXAMPLES
from support.training_runs import make_rows

KINDS = ("single", "span v2", "masked", "adapters")


@pytest.mark.parametrize("case", KINDS)
def test_runs_repeat_and_resume_with_equal_bits(random_checkpoint: Path, tmp_path: Path, case: str) -> None:
    options = {"mixed_precision": PRECISION, "report": False}
    with device_of_runs(DEVICE):
        run(tmp_path / "whole", random_checkpoint, case, **options)
        run(tmp_path / "again", random_checkpoint, case, **options)
        stopped(3, tmp_path / "stopped", random_checkpoint, case, **options)
        run(tmp_path / "stopped", random_checkpoint, case, **options)
    whole = digests(tmp_path / "whole")
    assert whole == digests(tmp_path / "again")
    assert whole == digests(tmp_path / "stopped")
    assert events(tmp_path / "whole") == events(tmp_path / "stopped")


@pytest.mark.parametrize("name", ["single", "several", "token crf", "span v2", "choice", "masked", "windows"])
def test_answers_are_those_of_the_cpu(random_checkpoint: Path, name: str) -> None:
    example = EXAMPLES[name]
    torch.manual_seed(0)
    model = TaskModel.from_pretrained(random_checkpoint, task=example.task)
    answers, metrics = [], []
    for device in (torch.device("cpu"), DEVICE):
        with device_of_runs(device):
            model.to(device)
            answers.append([prediction.to_json() for prediction in model.predict(example.rows)])
            metrics.append(evaluate(model, list(example.rows)))
    assert answers[1] == _approximately(answers[0])
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-4, abs=1e-5)


def _approximately(value: object) -> object:
    """The value, in which numbers may differ by rounding."""
    if isinstance(value, dict):
        return {name: _approximately(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_approximately(item) for item in value]
    return pytest.approx(value, abs=1e-5) if isinstance(value, float) else value


@needs_cuda
def test_memory_is_free_after_a_run(random_checkpoint: Path, tmp_path: Path) -> None:
    with device_of_runs(DEVICE):
        run(tmp_path / "first", random_checkpoint, mixed_precision="bf16", report=False)  # libraries keep workspaces
        gc.collect()
        start = torch.cuda.memory_allocated()
        model, _ = run(tmp_path / "second", random_checkpoint, mixed_precision="bf16", report=False)
        gc.collect()
        used = torch.cuda.memory_allocated() - start
        assert used < 1.1 * sum(parameter.nbytes for parameter in model.parameters()) + 2**16


def test_processes_of_a_launcher_train_the_same_model(random_checkpoint: Path, tmp_path: Path) -> None:
    """One process with a process group, and as many as there are devices (nccl on GPUs)."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in make_rows(24)))
    results = []
    for count in sorted({0, 1, max(1, torch.cuda.device_count())}):
        output = tmp_path / f"run{count}"
        recipe = tmp_path / f"recipe{count}.toml"
        recipe.write_text(
            f'task = "sequence-classification"\n[model]\nname = "{random_checkpoint}"\n'
            f'[settings]\nmax_length = 40\n[data]\ntrain = "{rows}"\nvalidation = "{rows}"\n'
            f'[optim]\nepochs = 2\nbatch_size = 8\nlearning_rate = 1e-3\n[run]\noutput_dir = "{output}"\n'
        )
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"] if count else []
        command = [sys.executable, *launcher, "-m", "bert_tasks", "train", str(recipe)]
        finished = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
        assert finished.returncode == 0, finished.stderr
        results.append(json.loads((output / "metrics.json").read_text()))
    for result in results[1:2]:  # of more processes each drops other elements
        assert result["metrics"] == pytest.approx(results[0]["metrics"], rel=1e-3)


def test_a_fit_on_the_device_leaves_the_model_there(random_checkpoint: Path, tmp_path: Path) -> None:
    with device_of_runs(DEVICE):
        model = TaskModel.from_pretrained(random_checkpoint, task=EXAMPLES["single"].task)
        rows = list(EXAMPLES["single"].rows)
        fit(model, rows, rows, output_dir=tmp_path, epochs=1, progress=False, mixed_precision=PRECISION)
        assert model.device.type == DEVICE.type
        assert len(model.predict(rows)) == len(rows)
        assert json.loads((tmp_path / "run.json").read_text())["device"] == DEVICE.type
