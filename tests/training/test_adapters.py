"""Runs with low-rank adapters: what is trained, what checkpoints hold, and that the saved model is an ordinary one."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bert_tasks import TaskModel, evaluate, fit
from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.recipe.schema import OptimSection
from bert_tasks.tasks import MaskedLanguageModeling, ReplacedTokens
from bert_tasks.training.objectives import Supervised
from bert_tasks.training.optim import freeze_encoder
from bert_tasks.training.step import OptimizerSteps
from support.meta_device import on_meta_device
from support.process_scenarios import SMALL
from support.runs import run as run_program
from support.sampling import slow_except
from support.stopped_runs import ADAPTERS, run, stopped
from support.task_examples import EXAMPLES
from support.training_runs import TASK, distance, load_model, make_rows, make_steps, walk, weights_of

ROWS = make_rows(12)
OPTIM = {"epochs": 2, "batch_size": 6, "learning_rate": 1e-2, "weight_decay": 0.1, "lora_rank": 4}


def trained(checkpoint: Path, *, checkpointing: bool = False, **changes: object) -> dict[str, Tensor]:
    """The weights after some steps, with large gradients."""
    model = load_model(checkpoint).double()
    model.encoder.gradient_checkpointing = checkpointing
    walk(adapted_steps(model, ROWS, adam_epsilon=1e-4, **changes))
    return weights_of(model)


@pytest.fixture(scope="module")
def folder(dropout_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to its end."""
    path = tmp_path_factory.mktemp("adapters") / "run"
    run(path, dropout_checkpoint, "adapters")
    return path


def test_the_saved_model_is_an_ordinary_one_with_changes_in_the_targets_alone(
    folder: Path, dropout_checkpoint: Path
) -> None:
    before, after = weights_of(load_model(dropout_checkpoint)), weights_of(TaskModel.from_pretrained(folder / "model"))
    assert before.keys() == after.keys()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    targets = {f"encoder.layers.{i}.{name}.weight" for i in (0, 1) for name in ("attention.qkv", "output")}
    assert changed == targets | {name for name in after if name.startswith("head.")}
    for name in (name for name in targets if "qkv" in name):
        of_query, of_key, of_value = (after[name] - before[name]).chunk(3)
        assert of_key.count_nonzero() == 0
        ranks = [int(torch.linalg.matrix_rank(change, atol=1e-6)) for change in (of_query, of_value)]
        assert max(ranks) <= ADAPTERS["lora_rank"]


def test_checkpoints_hold_the_adapters_and_the_head(folder: Path) -> None:
    stored = load_file(folder / "checkpoints" / "ckpt-6" / "weights.safetensors")
    adapters = {name for name in stored if ".lora_A." in name or ".lora_B." in name}
    assert len(adapters) == 2 * 2 * 3
    assert {name for name in stored if not name.startswith("head.")} == adapters
    metadata = json.loads((folder / "run.json").read_text("utf-8"))
    assert metadata["trained_parameters"] == sum(value.numel() for value in stored.values())
    assert metadata["settings"]["optim.lora_rank"] == 4
    moments = load_file(folder / "checkpoints" / "ckpt-6" / "optimizer.safetensors")
    assert {name.rpartition("/")[0] for name in moments} == stored.keys()


def test_metrics_are_those_of_the_saved_model_and_the_model_in_memory_has_its_weights(
    dropout_checkpoint: Path, tmp_path: Path
) -> None:
    model = load_model(dropout_checkpoint)
    result = fit(model, ROWS, ROWS, output_dir=tmp_path, progress=False, **OPTIM)
    saved = TaskModel.from_pretrained(tmp_path / "model")
    assert distance(weights_of(saved), weights_of(model)) == 0
    assert all(parameter.requires_grad for parameter in model.parameters())
    metrics = evaluate(saved, ROWS)
    assert {name: metrics[name] for name in result.metrics} == result.metrics
    model.save_pretrained(tmp_path / "again")  # no module is another one


def test_a_run_is_not_resumed_on_another_encoder_or_with_other_adapters(
    dropout_checkpoint: Path, wide_checkpoint: Path, tmp_path: Path
) -> None:
    stopped(4, tmp_path / "run", dropout_checkpoint, "adapters")
    with pytest.raises(CheckpointError, match="other weights than at the start of the run"):
        run(tmp_path / "run", wide_dropout(wide_checkpoint, dropout_checkpoint, tmp_path), "adapters")
    for changes in ({"lora_rank": 5}, {"lora_alpha": 2.0}, {"lora_dropout": 0.1}, {"lora_targets": ("key",)}):
        with pytest.raises(UsageError, match=rf"optim\.{next(iter(changes))}"):
            run(tmp_path / "run", dropout_checkpoint, "adapters", **changes)


def wide_dropout(wide_checkpoint: Path, dropout_checkpoint: Path, folder: Path) -> Path:
    """The weights of the one with the configuration of the other."""
    mixed = folder / "mixed"
    mixed.mkdir()
    for file in dropout_checkpoint.iterdir():
        source = wide_checkpoint / file.name if file.suffix == ".safetensors" else file
        (mixed / file.name).write_bytes(source.read_bytes())
    return mixed


def test_a_stopped_run_leaves_the_encoder_as_it_was_and_resumes_with_the_same_model(
    folder: Path, dropout_checkpoint: Path, tmp_path: Path
) -> None:
    before = weights_of(load_model(dropout_checkpoint).encoder)
    models = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "support.stopped_runs.load_model", lambda *a, **k: models.append(load_model(*a, **k)) or models[0]
        )
        stopped(4, tmp_path, dropout_checkpoint, "adapters")
        (model,) = models
        assert distance(weights_of(model.encoder), before) == 0
        run(tmp_path, dropout_checkpoint, "adapters")
    assert distance(weights_of(model), weights_of(TaskModel.from_pretrained(folder / "model"))) == 0


def test_a_resumed_run_writes_the_best_model_again(dropout_checkpoint: Path, tmp_path: Path) -> None:
    stopped(4, tmp_path, dropout_checkpoint, "adapters")
    weights = tmp_path / "model" / "model.safetensors"
    best = weights.read_bytes()
    weights.unlink()
    stopped(5, tmp_path, dropout_checkpoint, "adapters")
    assert weights.read_bytes() == best


def test_micro_batches_and_gradient_checkpointing_change_nothing(wide_checkpoint: Path) -> None:
    whole = trained(wide_checkpoint)
    assert distance(whole, trained(wide_checkpoint, micro_batch_tokens=30)) <= 1e-12
    assert distance(whole, trained(wide_checkpoint, checkpointing=True)) <= 1e-12
    assert distance(whole, trained(wide_checkpoint, lora_alpha=8.0)) > 1e-3  # the factor is 1 by default
    assert distance(whole, trained(wide_checkpoint, lora_alpha=4.0)) == 0


@pytest.mark.parametrize("case", slow_except(EXAMPLES, "token crf", "choice"))
def test_every_task_trains_the_adapters_and_its_head_alone(wide_checkpoint: Path, case: str) -> None:
    example = EXAMPLES[case]
    model = load_model(wide_checkpoint, example.task)
    before, steps = weights_of(model), adapted_steps(model, list(example.rows))
    walk(steps)
    changed = {name for name, value in weights_of(model).items() if not torch.equal(value, before[name])}
    layers = {name for name in before if name.endswith("attention.qkv.weight")}
    assert changed - {name for name in before if name.startswith("head.")} == layers
    assert any(name.startswith("head.") for name in changed)


def adapted_steps(model: TaskModel, rows: list[dict[str, Any]], **changes: object) -> OptimizerSteps:
    objective = Supervised(model)
    freeze_encoder(objective, OptimSection(lora_rank=4))
    return make_steps(model, rows, objective=objective, **{**OPTIM, **changes})


def test_a_student_has_adapters_and_its_teacher_none(wide_checkpoint: Path, tmp_path: Path) -> None:
    student, teacher = (
        load_model(wide_checkpoint),
        load_model(wide_checkpoint, TASK.with_settings(max_length=38), seed=3),
    )
    before, task = weights_of(teacher), teacher.task
    options = {"teacher": teacher, "teacher_hidden": "mse", "teacher_relations": True, "lora_targets": ("key", "value")}
    fit(student, ROWS, ROWS, output_dir=tmp_path, progress=False, **OPTIM, **options)
    assert distance(weights_of(teacher), before) == 0
    assert teacher.task == task  # although it was compared with the student by the task of the student
    saved, base = weights_of(TaskModel.from_pretrained(tmp_path / "model")), weights_of(load_model(wide_checkpoint))
    changed = {name for name, value in saved.items() if not torch.equal(value, base[name])}
    assert {name for name in changed if not name.startswith("head.")} == {
        name for name in base if name.endswith("attention.qkv.weight")
    }


def test_a_step_on_a_device_never_waits(wide_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = adapted_steps(load_model(wide_checkpoint), ROWS, lora_dropout=0.1, micro_batch_tokens=30)
    assert steps.optimizer.adapters is not None
    _, batch = next(steps.batches())
    with steps.optimizer.adapters.attached(), on_meta_device(steps, monkeypatch):
        result = steps.update(0, batch, steps.backward(0, batch))
    assert len(result.values) == 5


def test_a_tied_decoder_keeps_the_word_embeddings(dropout_checkpoint: Path, tmp_path: Path) -> None:
    model = TaskModel.from_pretrained(dropout_checkpoint, task=MaskedLanguageModeling.of(max_length=40))
    before = weights_of(model)
    fit(model, ROWS, ROWS, output_dir=tmp_path, progress=False, **OPTIM)
    changed = {name for name, value in weights_of(model).items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if name.startswith("head.") or name.endswith("attention.qkv.weight")}


def test_what_adapters_are_not_made_for_is_refused(dropout_checkpoint: Path, tmp_path: Path) -> None:
    pair = TaskModel.from_config(
        SMALL[ReplacedTokens], task=ReplacedTokens.of(max_length=40), tokenizer=dropout_checkpoint
    )
    with pytest.raises(UsageError, match="trains two models together"):
        fit(pair, ROWS, ROWS, output_dir=tmp_path, progress=False, **OPTIM)
    with pytest.raises(UsageError, match="lora_rank is 37, expected at most 36"):
        fit(load_model(dropout_checkpoint), ROWS, ROWS, output_dir=tmp_path, lora_rank=37, progress=False)
    for dtype in (torch.bfloat16, torch.float16):
        half = load_model(dropout_checkpoint).to(dtype)
        with pytest.raises(UsageError, match=rf"the model's weights are {dtype}\. Call model\.float\(\)"):
            freeze_encoder(Supervised(half), OptimSection(lora_rank=4))
    assert not (tmp_path / "run.json").exists()


@pytest.mark.slow
def test_the_benchmark_measures_each_side(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)  # the script imports the modules beside it
    options = ["--layers", "1", "--width", "64", "--steps", "1", "--repeats", "1", "--threads", "1"]
    script = repository / "benchmarks" / "adapters.py"
    ended = run_program([sys.executable, script, *options, "--json", tmp_path / "found"], folder=tmp_path)
    assert ended.code == 0, ended.err
    figures = json.loads((tmp_path / "found").read_text("utf-8"))["figures"]
    counts = [figures[side][0]["trained_parameters"] for side in ("adapters", "every", "full")]
    assert counts == sorted(counts)
    assert all(side[0]["peak_rss_mib"] > 100 for side in figures.values())
