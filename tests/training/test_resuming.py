"""A run that was stopped goes on as if nothing had happened, and says what stands in its way."""

import json
import math
import os
import shutil
import signal
from dataclasses import replace
from functools import partial
from typing import get_args

import pytest
import torch

from bert_tasks import api as runs
from bert_tasks import fit
from bert_tasks.encoder.cpu import MatmulLibrary, matmul_library
from bert_tasks.errors import StoppedError, UsageError
from bert_tasks.training import loop, sampling
from bert_tasks.training.checkpoints import read_weights
from bert_tasks.training.state import RunFolder, load_state
from support.largest_tensor import LargestTensor
from support.runs import digests, events
from support.small_checkpoints import save_checkpoint, tokenizer_of
from support.stopped_runs import KINDS, SETTINGS, STEPS, run, stopped
from support.task_examples import EXAMPLES
from support.training_runs import load_model, weights_of


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def assert_same_bits(folder, whole):
    assert digests(folder) == digests(whole)
    assert events(folder) == events(whole)


def assert_resumes(folder, *arguments, step=4, **options):
    """A run that is stopped and goes on in ``run`` ends as one in ``whole`` that is not."""
    run(folder / "whole", *arguments, **options)
    stopped(step, folder / "run", *arguments, **options)
    run(folder / "run", *arguments, head_seed=5, **options)
    assert_same_bits(folder / "run", folder / "whole")


@pytest.fixture(scope="module")
def straight(dropout_checkpoint, tmp_path_factory):
    """Uninterrupted runs: kind -> folder and result."""
    results = {}

    def find(case):
        if case not in results:
            folder = tmp_path_factory.mktemp("straight") / "run"
            results[case] = folder, run(folder, dropout_checkpoint, case)[1]
        return results[case]

    return find


def kinds_and_steps():
    """All pairs: `make test` stops some kinds, which differ in what a checkpoint holds, after one step each."""
    fast = {("single", 1), ("several", 2), ("adapters", 3), ("masked", 5)}
    for case in KINDS:
        for step in range(1, STEPS):
            yield pytest.param(case, step, marks=() if (case, step) in fast else pytest.mark.slow)


@pytest.mark.parametrize(("case", "step"), list(kinds_and_steps()))
def test_a_stopped_run_ends_with_the_same_bits(straight, dropout_checkpoint, tmp_path, record_property, case, step):
    whole, result = straight(case)
    folder = tmp_path / "run"
    error = stopped(step, folder, dropout_checkpoint, case)
    edited = json.loads((folder / "run.json").read_text("utf-8")) | {"started": "2020-01-01 00:00"}
    (folder / "run.json").write_text(json.dumps(edited), "utf-8")
    assert error.exit_code == 143
    assert f"stopped by SIGTERM after step {step} of " in str(error)
    assert f"ckpt-{step}" in names(folder)
    model, again = run(folder, dropout_checkpoint, case, head_seed=5)
    assert_same_bits(folder, whole)
    assert (again.metrics, again.best_step, again.reused) == (result.metrics, result.best_step, False)
    metadata = json.loads((folder / "run.json").read_text("utf-8"))
    assert (metadata["resumed_at"], metadata["started"]) == ([step], "2020-01-01 00:00")
    saved = weights_of(type(model).from_pretrained(folder / "model", task=type(model.task)))
    assert all(torch.equal(saved[name], value) for name, value in weights_of(model).items())
    record_property("stopped on one process", 1)


def test_the_other_matrix_library_ends_with_the_same_bits(straight, dropout_checkpoint, tmp_path, monkeypatch):
    """As its own run; as the default library within rounding, which shows that another one was there."""
    default, _ = straight("single")
    (other,) = set(get_args(MatmulLibrary)) - {matmul_library()}
    monkeypatch.setattr("bert_tasks.encoder.cpu.matmul_library", lambda: other)
    assert_resumes(tmp_path, dropout_checkpoint)
    assert digests(tmp_path / "run") != digests(default)
    losses, of_default = (
        [event["loss"] for event in events(folder) if "loss" in event] for folder in (tmp_path / "run", default)
    )
    assert losses == pytest.approx(of_default, rel=1e-5)


def test_a_stopped_run_in_bfloat16_ends_with_the_same_bits(dropout_checkpoint, tmp_path):
    assert_resumes(tmp_path, dropout_checkpoint, mixed_precision="bf16")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["single", "masked"])
def test_a_stopped_run_with_two_threads_ends_with_the_same_bits(dropout_checkpoint, tmp_path, two_threads, case):
    assert_resumes(tmp_path, dropout_checkpoint, case)


def test_epochs_of_different_numbers_of_steps_end_with_the_same_bits(dropout_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "BUCKET_BATCHES", 1)  # eight rows are a single bucket otherwise
    tokens = {"batch_size": None, "batch_tokens": 23, "max_steps": 11}
    run(tmp_path / "whole", dropout_checkpoint, **tokens)
    for step in (4, 10):
        stopped(step, tmp_path / "run", dropout_checkpoint, **tokens)
    run(tmp_path / "run", dropout_checkpoint, head_seed=5, **tokens)
    assert_same_bits(tmp_path / "run", tmp_path / "whole")
    # Evaluated when all samples of an epoch have been used: after four steps, then after five.
    evaluations = [event for event in events(tmp_path / "run") if event["event"] == "evaluation"]
    assert [(event["step"], event["epoch"]) for event in evaluations] == [(4, 1), (9, 2), (11, 3)]
    manifest = json.loads((tmp_path / "run" / "checkpoints" / "ckpt-11" / "manifest.json").read_text("utf-8"))
    assert (manifest["epoch"], manifest["samples"] // 8) == (2.5, 2)
    with pytest.raises(UsageError, match=r"optim\.batch_tokens = 50 \(was 23\)"):
        run(tmp_path / "run", dropout_checkpoint, **{**tokens, "batch_tokens": 50})


def test_without_the_moments_the_weights_differ(straight, dropout_checkpoint, tmp_path, monkeypatch):
    """The negative control of the test above."""
    stopped(4, tmp_path / "run", dropout_checkpoint)
    monkeypatch.setattr(loop, "load_state", lambda loaded, *rest: load_state(replace(loaded, optimizer={}), *rest))
    run(tmp_path / "run", dropout_checkpoint)
    assert digests(tmp_path / "run")["weights.safetensors"] != digests(straight("single")[0])["weights.safetensors"]


def test_the_best_model_is_written_again_without_a_copy_of_the_weights(dropout_checkpoint, tmp_path, monkeypatch):
    stopped(4, tmp_path / "run", dropout_checkpoint)
    rewind, seen = RunFolder.rewind, LargestTensor()

    def watched(*arguments):
        with seen:
            return rewind(*arguments)

    monkeypatch.setattr(RunFolder, "rewind", watched)
    model, _ = run(tmp_path / "run", dropout_checkpoint)
    table = model.encoder.embeddings.word.weight.numel()
    assert seen.copied < table <= seen.elements


def test_a_run_may_stop_at_every_step(straight, dropout_checkpoint, tmp_path, monkeypatch):
    whole, _ = straight("single")
    for step in range(1, STEPS):
        stopped(step, tmp_path / "run", dropout_checkpoint)
    run(tmp_path / "run", dropout_checkpoint)
    assert_same_bits(tmp_path / "run", whole)
    assert json.loads((tmp_path / "run" / "run.json").read_text("utf-8"))["resumed_at"] == [1, 2, 3, 4, 5]


def test_a_signal_during_evaluation_saves_before_it(straight, dropout_checkpoint, tmp_path, monkeypatch):
    whole, _ = straight("single")
    original = loop.evaluate_all

    def evaluate_all(*arguments, **options):
        os.kill(os.getpid(), signal.SIGINT)
        return original(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "evaluate_all", evaluate_all)
        with pytest.raises(StoppedError, match="stopped by SIGINT after step 3 of 6") as error:
            run(tmp_path / "run", dropout_checkpoint)
    assert error.value.exit_code == 130
    assert not [event for event in events(tmp_path / "run") if event["event"] == "evaluation"]
    run(tmp_path / "run", dropout_checkpoint)
    assert_same_bits(tmp_path / "run", whole)


def test_a_signal_during_the_last_evaluation_saves_and_finishes_the_run(
    straight, dropout_checkpoint, tmp_path, monkeypatch
):
    whole, _ = straight("single")
    original, saved = loop.evaluate_all, []

    def evaluate_all(*arguments, stop=None, **options):
        saved.append(sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("ckpt-*")))
        if len(saved) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments, **options, **({} if stop is None else {"stop": stop}))

    monkeypatch.setattr(loop, "evaluate_all", evaluate_all)
    run(tmp_path / "run", dropout_checkpoint)
    assert saved == [[], ["ckpt-3"], ["ckpt-3", "ckpt-6"]]
    assert_same_bits(tmp_path / "run", whole)


def test_a_finished_run_has_no_checkpoints_unless_they_are_to_be_kept(dropout_checkpoint, tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loop, "remove_checkpoints", killed)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "run", dropout_checkpoint, keep_checkpoints=False)
    assert (tmp_path / "run" / "checkpoints").is_dir()
    assert run(tmp_path / "run", dropout_checkpoint)[1].reused
    assert (tmp_path / "run" / "checkpoints").is_dir()
    assert run(tmp_path / "run", dropout_checkpoint, keep_checkpoints=False)[1].reused
    assert not (tmp_path / "run" / "checkpoints").exists()
    with pytest.raises(UsageError, match=r"without checkpoints, .* \(run\.keep_checkpoints keeps"):
        run(tmp_path / "run", dropout_checkpoint, epochs=3)


def test_the_second_signal_ends_the_process_at_once(monkeypatch):
    killed = []
    monkeypatch.setattr("bert_tasks.distributed.os.kill", lambda *arguments: killed.append(arguments))
    before = signal.getsignal(signal.SIGTERM)
    with loop.stop_signals() as signals:
        signal.raise_signal(signal.SIGTERM)
        assert (signals.received, killed) == (signal.SIGTERM, [])
        signal.raise_signal(signal.SIGINT)
        assert killed == [(os.getpid(), signal.SIGINT)]
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_killed_run_goes_on_from_its_newest_checkpoint(straight, dropout_checkpoint, tmp_path, monkeypatch):
    """What a kill leaves: lines after the checkpoint, one of them torn, half a checkpoint, a newer model."""
    whole, _ = straight("single")
    folder = tmp_path / "run"
    stopped(5, folder, dropout_checkpoint)
    shutil.rmtree(folder / "checkpoints" / "ckpt-5")
    shutil.copytree(folder / "checkpoints" / "ckpt-3", folder / "checkpoints" / "ckpt-5.tmp-77")
    (folder / "model" / "model.safetensors").write_bytes(b"torn")
    (folder / ".run.json.tmp-77").write_text("{", "utf-8")
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"event": "step", "st')
    run(folder, dropout_checkpoint)
    assert_same_bits(folder, whole)
    assert names(folder) == names(whole)
    assert not list(folder.glob(".*"))


def test_a_damaged_checkpoint_is_skipped_and_named(dropout_checkpoint, straight, tmp_path, capfd):
    whole, _ = straight("single")
    folder = tmp_path / "run"
    stopped(4, folder, dropout_checkpoint)
    weights = folder / "checkpoints" / "ckpt-4" / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    run(folder, dropout_checkpoint, progress=True)
    told = capfd.readouterr().err
    assert "NOT USED: " in told
    assert "ckpt-4" in told
    assert "resumed after step 3" in told
    assert_same_bits(folder, whole)


def test_a_run_without_a_checkpoint_starts_again(straight, dropout_checkpoint, tmp_path, monkeypatch, capfd):
    whole, _ = straight("single")
    stopped(2, tmp_path / "run", dropout_checkpoint)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    run(tmp_path / "run", dropout_checkpoint, progress=True)
    assert "has no checkpoint and starts again from the beginning" in capfd.readouterr().err
    assert events(tmp_path / "run") == events(whole)


def test_the_best_of_every_checkpoint_that_stays_stays(dropout_checkpoint, tmp_path, monkeypatch):
    values = iter([0.5, 0.1, 0.9])
    monkeypatch.setattr(loop, "rank_of", lambda *_: (next(values), 1.0))
    folder = tmp_path / "run"
    run(folder, dropout_checkpoint, epochs=3)
    assert names(folder) == ["best", "ckpt-3", "ckpt-6", "ckpt-9", "latest"]
    (folder / "checkpoints" / "ckpt-9" / "weights.safetensors").write_bytes(b"")
    values = iter([0.2, 0.1])
    monkeypatch.setattr(loop, "rank_of", lambda *_: (next(values), 1.0))
    _, result = run(folder, dropout_checkpoint, epochs=4)
    assert result.best_step == 3


@pytest.mark.parametrize("written", ["run.json", "recipe.toml"])
def test_a_death_while_the_folder_is_opened_is_no_obstacle(dropout_checkpoint, tmp_path, monkeypatch, written):
    """The process dies after it has written a file under its temporary name, and after the file before."""

    class Death(BaseException):
        pass

    def replace(path, target):
        if target.name == written:
            raise Death
        return original(path, target)

    original = os.replace
    with monkeypatch.context() as patch:
        patch.setattr(runs, "Trainer", partial(loop.Trainer, recipe_text="task"))
        patch.setattr(os, "replace", replace)
        patch.setattr("bert_tasks.storage.Path.unlink", lambda path, missing_ok=False: None)
        with pytest.raises(Death):
            run(tmp_path / "run", dropout_checkpoint)
    assert list((tmp_path / "run").glob(f".{written}.tmp-*"))
    _, result = run(tmp_path / "run", dropout_checkpoint)
    assert result.steps == STEPS
    assert not list((tmp_path / "run").glob(".*.tmp-*"))


@pytest.mark.parametrize(
    ("ranks", "best_step"),
    [
        ([(0.9, 1.0), (0.1, 1.0)], 3),
        # Equal values are decided by the loss.
        ([(0.5, 0.1), (0.5, 0.5)], 3),
        ([(0.5, math.inf), (0.5, 0.5)], 6),
    ],
)
def test_the_best_of_the_first_part_is_remembered(dropout_checkpoint, tmp_path, monkeypatch, ranks, best_step):
    script = iter(ranks)
    monkeypatch.setattr(loop, "rank_of", lambda *_: next(script))
    stopped(4, tmp_path / "run", dropout_checkpoint)
    _, result = run(tmp_path / "run", dropout_checkpoint)
    assert (result.best_step, result.steps) == (best_step, STEPS)


def test_a_damaged_best_checkpoint_leaves_the_model_as_it_is(dropout_checkpoint, tmp_path, monkeypatch, capfd):
    values = iter([0.9, 0.1])
    monkeypatch.setattr(loop, "rank_of", lambda *_: (next(values), 1.0))
    folder = tmp_path / "run"
    stopped(5, folder, dropout_checkpoint)
    before = (folder / "model" / "model.safetensors").read_bytes()
    (folder / "checkpoints" / "ckpt-3" / "weights.safetensors").write_bytes(b"")
    _, result = run(folder, dropout_checkpoint, progress=True)
    assert result.best_step == 3
    assert (folder / "model" / "model.safetensors").read_bytes() == before
    assert "The best model so far remains in model/" in capfd.readouterr().err


def test_a_finished_run_is_not_repeated(dropout_checkpoint, tmp_path):
    first, result = run(tmp_path / "run", dropout_checkpoint, "several")
    again, reused = run(tmp_path / "run", dropout_checkpoint, "several", head_seed=3, logging_steps=5)
    assert reused.reused
    assert reused.metrics == result.metrics
    assert again.task == first.task
    assert all(torch.equal(weights_of(again)[name], value) for name, value in weights_of(first).items())


def test_more_epochs_extend_a_finished_run_and_fewer_are_refused(dropout_checkpoint, tmp_path, capfd):
    run(tmp_path / "run", dropout_checkpoint)
    with pytest.raises(UsageError, match=r"holds 6 steps, more than the 3 of this run\. Raise optim\.epochs"):
        run(tmp_path / "run", dropout_checkpoint, epochs=1)
    _, result = run(tmp_path / "run", dropout_checkpoint, epochs=3, progress=True)
    assert (result.steps, result.reused) == (9, False)
    assert "changed since the run began: optim.epochs = 3 (was 2)" in capfd.readouterr().err
    assert [event["step"] for event in events(tmp_path / "run") if event["event"] == "step"] == list(range(1, 10))


def test_another_machine_is_reported(dropout_checkpoint, tmp_path, capfd):
    stopped(4, tmp_path / "run", dropout_checkpoint)
    before = json.loads((tmp_path / "run" / "run.json").read_text("utf-8"))
    of_old_version = {name: value for name, value in before.items() if name != "matmul_library"}
    for metadata in (before | {"matmul_library": "other"}, of_old_version):
        folder = tmp_path / str(len(metadata))
        shutil.copytree(tmp_path / "run", folder)
        (folder / "run.json").write_text(json.dumps(metadata), "utf-8")
        run(folder, dropout_checkpoint, progress=True)
    change = f"matmul_library = '{before['matmul_library']}' (was 'other')"
    assert capfd.readouterr().err.count(f"changed since the run began: {change}") == 1
    changes = [
        json.loads((folder / "run.json").read_text("utf-8"))["changes"] for folder in sorted(tmp_path.glob("[0-9]*"))
    ]
    assert changes == [[], [{"step": 4, "change": change}]]


def test_more_patience_goes_on_with_a_run_that_stopped_early(dropout_checkpoint, tmp_path):
    patient = {"epochs": 5, "learning_rate": 1e-30}  # too small to change a weight, so no evaluation is better
    _, first = run(tmp_path / "run", dropout_checkpoint, early_stopping_patience=1, **patient)
    assert first.stopped_early
    _, second = run(tmp_path / "run", dropout_checkpoint, early_stopping_patience=3, **patient)
    assert second.steps > first.steps


def test_other_settings_rows_labels_or_models_are_refused(dropout_checkpoint, checkpoint, tmp_path):
    folder, example = tmp_path / "run", EXAMPLES["single"]
    stopped(2, folder, dropout_checkpoint)
    relabelled = example.task.with_settings(labels=("mid", "low", "high"))
    for difference, base, task, rows, changes in (
        (r"optim\.batch_size = 4 \(was 3\)", dropout_checkpoint, example.task, example.rows, {"batch_size": 4}),
        (r"run\.seed = 7 \(was 42\)", dropout_checkpoint, example.task, example.rows, {"seed": 7}),
        (
            r"run\.metric_for_best_model = 'loss' \(was None\)",
            dropout_checkpoint,
            example.task,
            example.rows,
            {"metric_for_best_model": "loss"},
        ),
        ("the rows of train", dropout_checkpoint, example.task, example.rows[1:], {}),
        (
            r"settings\.labels = \['mid', 'low', 'high'\] \(was \['low', 'mid', 'high'\]\)",
            dropout_checkpoint,
            relabelled,
            example.rows,
            {},
        ),
        (r"encoder\.hidden_dropout_prob = 0\.0 \(was 0\.2\)", checkpoint, example.task, example.rows, {}),
    ):
        with pytest.raises(UsageError, match=f"unfinished run that differs in .*{difference}.*overwrite=True"):
            fit(load_model(base, task), rows, example.rows, output_dir=folder, **{**SETTINGS, **changes})
    assert "ckpt-2" in names(folder)


def test_the_newest_and_the_best_checkpoints_are_kept(dropout_checkpoint, tmp_path, monkeypatch):
    values = iter([0.1, 0.2, 0.9, 0.3, 0.3])
    monkeypatch.setattr(loop, "rank_of", lambda *_: (next(values), 1.0))
    run(tmp_path / "run", dropout_checkpoint, epochs=5, batch_size=8, keep_last=1)
    assert names(tmp_path / "run") == ["best", "ckpt-3", "ckpt-5", "latest"]
    pointers = [(tmp_path / "run" / "checkpoints" / name).read_text("utf-8") for name in ("best", "latest")]
    assert pointers == ["ckpt-3\n", "ckpt-5\n"]
    for step in (3, 5):
        assert read_weights(tmp_path / "run" / "checkpoints", step)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["xlm-roberta", "camembert", "mpnet"])
def test_other_families_end_with_the_same_bits(by_kind, tmp_path, family):
    """With dropout; ModernBERT and DeBERTa have tests of their own."""
    save_checkpoint(tmp_path / "base", family, tokenizer_of(family, by_kind))
    assert_resumes(tmp_path, tmp_path / "base", step=3)


def test_save_steps_saves_between_evaluations(dropout_checkpoint, tmp_path):
    run(tmp_path / "run", dropout_checkpoint, save_steps=2, keep_last=9)
    assert names(tmp_path / "run") == ["best", "ckpt-2", "ckpt-3", "ckpt-4", "ckpt-6", "latest"]
