"""Optimizer steps on the device: the losses of the CPU, and a host that never waits."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from bert_tasks import TaskModel
from bert_tasks.model.encoder_with_heads import draw_new_head
from bert_tasks.model.multitask import MultiTaskModel
from bert_tasks.recipe.schema import TeacherSection
from bert_tasks.tasks import MaskedLanguageModeling, ReplacedTokens
from bert_tasks.training.distillation import Distillation
from bert_tasks.training.optim import freeze_encoder
from bert_tasks.training.replaced_tokens import ReplacedTokenDetection, make_generator
from bert_tasks.training.step import OptimizerSteps
from support.gpu import DEVICE, device_of_runs, make_device_steps, needs_cuda, run_steps, save_checkpoint
from support.hf_models import FAMILIES
from support.task_examples import CLASSES, EXAMPLES, LABELS, SENTENCES, TEXTS

TEXT_ROWS = [{"text": text} for text in TEXTS]
WINDOWED = {**EXAMPLES, "masking": EXAMPLES["masked"]}
# Ways to train the same rows.
VARIANTS: dict[str, dict[str, Any]] = {
    "micro-batches": {"micro_batch_tokens": 20},
    "adapters": {"lora_rank": 4},
    "all vocabulary rows": {"vocabulary_rows": "all"},
    "gradient checkpointing": {"checkpointing": True},
    "teacher": {"teacher": True},
    "layer-wise rates": {"layerwise_lr_decay": 0.8, "head_learning_rate": 1e-3},
}
# Two tasks on the same texts; a row has no label of one of them, another row of the other.
TASKS: dict[str, dict[str, Any]] = {
    "topic": {"task": "sequence-classification", "labels": ["low", "mid", "high"], "max_length": 32},
    "slots": {"task": "token-classification", "labels": list(LABELS), "max_length": 32, "doc_stride": 6},
}
TWO_LABELS: list[dict[str, Any]] = [
    {"words": tagged["words"], "text": row["text"], "label": row["label"], "tags": tagged["tags"]}
    for row, tagged in zip(CLASSES, SENTENCES, strict=True)
]
Make = Callable[..., OptimizerSteps]


def steps_of(checkpoint: Path, name: str, *, precision: str = "no", **variant: Any) -> OptimizerSteps:
    """Returns the steps of an example. ``masking`` trains on texts that are masked anew in each step."""
    torch.manual_seed(0)
    checkpointing, has_teacher = variant.pop("checkpointing", False), variant.pop("teacher", False)
    if name == "masking":
        model = TaskModel.from_pretrained(checkpoint, task=MaskedLanguageModeling.of(max_length=24))
        return make_device_steps(model, TEXT_ROWS, precision=precision, **variant)
    model = TaskModel.from_pretrained(checkpoint, task=EXAMPLES[name].task)
    draw_new_head(model, 1)
    model.encoder.gradient_checkpointing = checkpointing
    objective = None
    if has_teacher:
        teacher = copy.deepcopy(model)
        objective = Distillation(model, teacher, TeacherSection(name="teacher", hidden="cosine", relations=True))
    if "lora_rank" in variant:
        from bert_tasks.training.objectives import Supervised

        objective = Supervised(model)
        steps = make_device_steps(model, EXAMPLES[name].rows, precision=precision)
        freeze_encoder(objective, steps.optim.model_copy(update=variant))
    return make_device_steps(model, EXAMPLES[name].rows, objective=objective, precision=precision, **variant)


def electra_steps(checkpoint: Path, *, precision: str = "no") -> OptimizerSteps:
    model = TaskModel.from_pretrained(checkpoint, task=ReplacedTokens.of(max_length=24))
    draw_new_head(model, 1)
    objective = ReplacedTokenDetection(model, make_generator(model, seed=1))
    return make_device_steps(model, TEXT_ROWS, objective=objective, precision=precision)


def steps_of_tasks(checkpoint: Path, *, precision: str = "no") -> OptimizerSteps:
    torch.manual_seed(0)
    model = MultiTaskModel.from_pretrained(checkpoint, tasks=TASKS)
    draw_new_head(model, 1)
    return make_device_steps(model, TWO_LABELS, precision=precision)


def losses(make: Make, device: torch.device, **options: Any) -> list[float]:
    with device_of_runs(device):
        steps = make(**options)
        assert steps.accelerator.device.type == device.type
        return [log.loss for log in run_steps(steps)]


def check_losses(make: Make) -> None:
    """30 steps on the device have the CPU's losses."""
    expected = losses(make, torch.device("cpu"))
    assert len(expected) == 30
    assert max(expected) - min(expected) > 1e-3 * expected[0]  # something is learned
    for precision, limit in {"no": 1e-4, "bf16": 2e-2}.items():
        values = losses(make, DEVICE, precision=precision)
        differences = [abs(value - other) for value, other in zip(values, expected, strict=True)]
        assert max(differences) < limit * max(expected), precision


@needs_cuda
@pytest.mark.parametrize("name", WINDOWED)
def test_losses_of_a_task_are_those_of_the_cpu(plain_checkpoint: Path, name: str) -> None:
    check_losses(lambda **options: steps_of(plain_checkpoint, name, **options))


@needs_cuda
@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_of_a_variant_are_those_of_the_cpu(plain_checkpoint: Path, variant: str) -> None:
    check_losses(lambda **options: steps_of(plain_checkpoint, "single", **options, **VARIANTS[variant]))


@needs_cuda
def test_losses_of_several_tasks_are_those_of_the_cpu(plain_checkpoint: Path) -> None:
    check_losses(lambda **options: steps_of_tasks(plain_checkpoint, **options))


@needs_cuda
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_of_a_family_are_those_of_the_cpu(
    family: str, tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerBase
) -> None:
    checkpoint = save_checkpoint(tmp_path, family, bpe_tokenizer)
    check_losses(lambda **options: steps_of(checkpoint, "single", **options))


@needs_cuda
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_have_the_gradients_of_the_layers(
    family: str, tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Up to bfloat16's rounding, which differs because products of padded rows are computed by other kernels."""
    checkpoint = save_checkpoint(tmp_path, family, bpe_tokenizer)
    gradients = []
    with device_of_runs(DEVICE):
        for has_graphs in (True, False):
            steps = steps_of(checkpoint, "single", precision="bf16", vocabulary_rows="all")
            encoder = steps.objective.model.encoder
            if steps.objective.model.config.positions in (
                "relative",
                "disentangled",
            ):  # their attention is no flash kernel's
                assert encoder.graphs is None
                return
            if not has_graphs:
                encoder.graphs = None
            step, batch = next(steps.batches())
            steps.backward(step, batch)
            assert (encoder.graphs is not None) == has_graphs
            gradients.append({name: weight.grad.clone() for name, weight in encoder.named_parameters()})
    for name, expected in gradients[1].items():
        difference = (gradients[0][name] - expected).norm()
        assert difference < 0.05 * expected.norm() + 1e-6, name


@needs_cuda
def test_losses_of_replaced_tokens_are_those_of_the_cpu(electra_checkpoint: Path) -> None:
    """In float32 alone: rounding to bfloat16 draws other tokens."""
    checkpoint = electra_checkpoint
    expected, values = (
        losses(lambda **options: electra_steps(checkpoint, **options), device)
        for device in (torch.device("cpu"), DEVICE)
    )
    assert max(abs(value - other) for value, other in zip(values[:5], expected[:5], strict=True)) < 1e-3 * expected[0]


@contextmanager
def errors_for_waiting() -> Iterator[None]:
    if DEVICE.type == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_waiting(steps: OptimizerSteps) -> None:
    run_steps(steps, count=20)  # the first steps allocate memory and capture graphs
    with errors_for_waiting():
        results = [steps.update(step, batch, steps.backward(step, batch)) for step, batch in steps.batches(20)]
    assert len(results) == 10


@needs_cuda
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("name", WINDOWED)
def test_the_host_never_waits_in_a_step(random_checkpoint: Path, name: str, precision: str) -> None:
    with device_of_runs(DEVICE):
        check_waiting(steps_of(random_checkpoint, name, precision=precision, micro_batch_tokens=40))


@needs_cuda
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_host_never_waits_in_a_variant(random_checkpoint: Path, variant: str) -> None:
    with device_of_runs(DEVICE):
        check_waiting(steps_of(random_checkpoint, "single", precision="bf16", **VARIANTS[variant]))


@needs_cuda
@pytest.mark.parametrize("family", FAMILIES)
def test_the_host_never_waits_in_a_family(family: str, tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerBase) -> None:
    checkpoint = save_checkpoint(tmp_path, family, bpe_tokenizer, dropout=0.1)
    with device_of_runs(DEVICE):
        check_waiting(steps_of(checkpoint, "single", precision="bf16"))


@needs_cuda
def test_the_host_never_waits_in_several_tasks(random_checkpoint: Path) -> None:
    with device_of_runs(DEVICE):
        check_waiting(steps_of_tasks(random_checkpoint, precision="bf16"))


@needs_cuda
def test_the_host_never_waits_in_replaced_token_detection(electra_checkpoint: Path) -> None:
    with device_of_runs(DEVICE):
        check_waiting(electra_steps(electra_checkpoint, precision="bf16"))


@needs_cuda
def test_half_precision_runs_the_layers_as_graphs(random_checkpoint: Path) -> None:
    with device_of_runs(DEVICE):
        steps = steps_of(random_checkpoint, "single", precision="bf16")
        run_steps(steps)
        assert steps.objective.model.encoder.graphs._graphs
        assert steps_of(random_checkpoint, "single").objective.model.encoder.graphs is None


@needs_cuda
def test_a_wait_is_an_error(random_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests would see it."""
    update = OptimizerSteps.update

    def waiting(steps: OptimizerSteps, *arguments: Any, **options: Any) -> Any:
        result = update(steps, *arguments, **options)
        float(next(steps.objective.parameters()).sum())
        return result

    with device_of_runs(DEVICE):
        steps = steps_of(random_checkpoint, "single")
        monkeypatch.setattr(OptimizerSteps, "update", waiting)
        with pytest.raises(RuntimeError, match="synchroniz"):
            check_waiting(steps)


@needs_cuda
def test_float16_skips_steps_that_overflow(random_checkpoint: Path) -> None:
    """The scaler starts at 2^16 and comes down."""
    with device_of_runs(DEVICE):
        steps = steps_of(random_checkpoint, "single", precision="fp16")
        steps.accelerator.scaler._init_scale = 2.0**40
        before = [parameter.detach().clone() for parameter in steps.optimizer.parameters]
        results = []
        for step, batch in steps.batches():
            results.append(steps.update(step, batch, steps.backward(step, batch)))
            if step == 0:
                after = steps.optimizer.parameters
                assert all(torch.equal(parameter, other) for parameter, other in zip(before, after, strict=True))
        skipped = [bool(result.values[2]) for result in results if result.ready.synchronize() is None]
        assert skipped[0]
        assert not skipped[-1]
        assert all(parameter.isfinite().all() for parameter in steps.optimizer.parameters)


@needs_cuda
def test_micro_batches_bound_the_peak_of_memory(random_checkpoint: Path) -> None:
    rows = [{"text": " ".join(TEXTS[:4]), "label": "low"}] * 256
    peaks = {}
    for tokens in (16384, 512):
        with device_of_runs(DEVICE):
            torch.manual_seed(0)
            model = TaskModel.from_pretrained(random_checkpoint, task=EXAMPLES["single"].task)
            steps = make_device_steps(model, rows, batch_size=256, micro_batch_tokens=tokens, max_steps=2)
            torch.cuda.synchronize()
            start = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            run_steps(steps)
            peaks[tokens] = torch.cuda.max_memory_allocated() - start
    assert peaks[512] < 0.4 * peaks[16384]
