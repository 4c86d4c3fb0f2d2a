"""A student that learns from a teacher: the loss and its gradient, what stays as it was, and runs that are stopped."""

import copy
import dataclasses
import json

import pytest
import torch
from torch.nn import functional as F

from bert_tasks import TaskModel, fit, load_recipe
from bert_tasks.encoder.heads import VocabularyOutput
from bert_tasks.errors import StoppedError, UsageError
from bert_tasks.outputs.logits import softmax_divergence
from bert_tasks.recipe.schema import TeacherSection
from bert_tasks.report import make_report
from bert_tasks.tasks import PairClassification, TokenClassification
from bert_tasks.tasks.base import FeatureKeys
from bert_tasks.tasks.features import collate
from bert_tasks.training.distillation import Distillation
from bert_tasks.training.objectives import Supervised
from bert_tasks.training.run import dry_run
from bert_tasks.training.step import OptimizerSteps
from support.hf_models import hf_class, hf_config, widen
from support.meta_device import on_meta_device
from support.recipes import write_with_data
from support.runs import digests, events
from support.sampling import slow_except
from support.small_checkpoints import save_checkpoint
from support.stopped_runs import signalling
from support.task_contract import changed
from support.task_examples import EXAMPLES
from support.training_runs import (
    LABELS,
    TASK,
    TWENTY_STEPS,
    UNLABELLED,
    WEIGHTED_TASK,
    distance,
    load_model,
    make_rows,
    make_steps,
    walk,
    weights_of,
)


def widened(model, seed):
    """Heads are drawn small; logits near 0 would show no fault."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


def pair(checkpoint, objective_class=Distillation, task=WEIGHTED_TASK, **options):
    student, teacher = (widened(load_model(checkpoint, task, seed=seed), seed) for seed in (0, 3))
    return objective_class(student, teacher, TeacherSection(name="teacher", **options)).double()


def batch_of(model, rows):
    return collate(model.task.features(rows, model.tokenizer), position_offset=model.config.position_offset)


def first_step(objective, rows, **options):
    """The loss and gradients of one step over all rows."""
    sizes = {"batch_size": len(rows), "max_grad_norm": None, "micro_batch_tokens": 16384, "vocabulary_rows": "all"}
    steps = make_steps(objective.model, rows, objective=objective, **{**sizes, **options})
    _, batch = next(steps.batches())
    terms = steps.backward(0, batch)
    gradients = {name: parameter.grad for name, parameter in objective.named_parameters()}
    loss = steps.update(0, batch, terms).values[0].item()
    return loss, {name: gradient.to_dense().clone() for name, gradient in gradients.items() if gradient is not None}


def plain(objective, rows, *, temperature, weight):
    """The documented loss from one row after another, without packing: ``(1 - w)`` labels ``+ w`` teacher."""
    student, teacher = objective.model, objective.teacher
    labelled, weights, divergences = [], [], []
    for row in rows:
        (feature,) = student.task.features([row], student.tokenizer)
        batch = collate([feature], position_offset=student.config.position_offset)
        student_logits = student(batch)
        with torch.no_grad():
            teacher_logits = copy.deepcopy(teacher).eval()(batch)
        soft = [F.log_softmax(logits / temperature, dim=-1) for logits in (teacher_logits, student_logits)]
        divergences.append((soft[0].exp() * (soft[0] - soft[1])).sum() * temperature**2)
        if row["label"] is not None:
            index = LABELS.index(row["label"])
            labelled.append(-student_logits.log_softmax(-1)[0, index] * WEIGHTED_TASK.output.class_weights[index])
            weights.append(WEIGHTED_TASK.output.class_weights[index])
    return (1 - weight) * sum(labelled) / sum(weights) + weight * sum(divergences) / len(rows)


@pytest.mark.parametrize(("temperature", "weight"), [(1.0, 0.9), (5.0, 0.1)])
def test_loss_and_gradient_are_those_of_the_documented_formula(wide_checkpoint, temperature, weight):
    rows = make_rows(9, unlabelled=(2, 5))
    objective = pair(wide_checkpoint, temperature=temperature, weight=weight)
    reference = copy.deepcopy(objective)
    expected = plain(reference, rows, temperature=temperature, weight=weight)
    expected.backward()
    for tokens in (16384, 30):
        loss, gradients = first_step(copy.deepcopy(objective), rows, micro_batch_tokens=tokens)
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        for name, parameter in reference.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(gradients[name], parameter.grad.to_dense(), rtol=1e-9, atol=1e-12)


class TrainingTeacher(Distillation):
    """The usual mistake: the teacher follows the student into training mode."""

    def train(self, mode=True):
        self.teacher.train(mode)
        return super().train(mode)


class PaddingCounted(Distillation):
    """Another one: the mean divides by places, not by rows."""

    def counts(self, features):
        counts = super().counts(features)
        return {**counts, "distillation": counts["distillation"] * 1.5}

    def forward(self, batch):
        *others, term = super().forward(batch)
        return (*others, dataclasses.replace(term, count=term.count * 1.5))


def without_square(student, teacher, temperature):
    return softmax_divergence(student, teacher, temperature) / temperature**2


def other_direction(student, teacher, temperature):
    return softmax_divergence(teacher, student, temperature)


@pytest.mark.parametrize("fault", [PaddingCounted, without_square, other_direction], ids=lambda fault: fault.__name__)
def test_the_formula_would_show_the_usual_mistakes(wide_checkpoint, monkeypatch, fault):
    objective_class = fault if isinstance(fault, type) else Distillation
    if objective_class is Distillation:
        monkeypatch.setattr("bert_tasks.outputs.classes.softmax_divergence", fault)
    rows = make_rows(9, unlabelled=(2, 5))
    objective = pair(wide_checkpoint, objective_class, temperature=3.0)
    expected = plain(copy.deepcopy(objective), rows, temperature=3.0, weight=0.5).item()
    assert abs(first_step(objective, rows)[0] - expected) > 1e-3 * expected


def test_the_teacher_has_no_dropout_and_the_student_has(dropout_checkpoint):
    objective, faulty = (
        pair(dropout_checkpoint, objective_class).train() for objective_class in (Distillation, TrainingTeacher)
    )
    batch = batch_of(objective.model, make_rows(4))

    def differs(objective):
        return len({objective(batch)[1].total.item() for _ in range(2)}) == 2

    assert objective.model.training
    assert not any(module.training for module in objective.teacher.modules())
    assert differs(objective)
    for each in (objective, faulty):
        each.model.eval()
    assert (differs(objective), differs(faulty)) == (False, True)


def test_the_teacher_is_moved_but_neither_trained_nor_stored(wide_checkpoint):
    objective = pair(wide_checkpoint)
    before = weights_of(objective.teacher)
    assert all(parameter.dtype == torch.float64 for parameter in objective.teacher.parameters())
    walk(make_steps(objective.model, make_rows(8), objective=objective, batch_size=4, epochs=1, learning_rate=1e-2))
    assert distance(before, weights_of(objective.teacher)) == 0
    assert all(parameter.grad is None for parameter in objective.teacher.parameters())
    assert list(objective.checkpoint_parameters()) == list(Supervised(objective.model).checkpoint_parameters())
    assert objective.to("meta").teacher.device.type == "meta"


def test_micro_batches_change_no_weight(wide_checkpoint):
    runs = []
    for tokens in (16384, 1):
        objective = pair(wide_checkpoint, hidden="mse", relations=True, relations_weight=0.5)
        rows = make_rows(37, unlabelled=UNLABELLED)
        options = {**TWENTY_STEPS, "epochs": 2, "micro_batch_tokens": tokens}
        logs = walk(make_steps(objective.model, rows, objective=objective, **options))
        runs.append((weights_of(objective), logs))
    (whole, logs), (parts, others) = runs
    assert distance(whole, parts) <= 1e-12
    weights = {"classes": 0.5, "distillation": 0.5, "hidden": 1.0, "relations": 0.5}
    for log, other in zip(logs, others, strict=True):
        assert other.terms == pytest.approx(log.terms, rel=1e-9)
        assert log.terms.keys() == weights.keys()
        assert log.loss == pytest.approx(sum(weights[name] * mean for name, mean in log.terms.items()), rel=1e-12)


def test_rows_without_labels_teach(wide_checkpoint):
    rows = make_rows(6, unlabelled=range(6))
    objective = pair(wide_checkpoint)
    teacher = objective.teacher
    before = softmax_divergence(objective.model(batch_of(teacher, rows)), teacher(batch_of(teacher, rows)), 2.0).item()
    logs = walk(make_steps(objective.model, rows, objective=objective, batch_size=3, epochs=8, learning_rate=1e-3))
    assert all(log.terms.keys() == {"distillation"} for log in logs)
    objective.model.eval()
    after = softmax_divergence(objective.model(batch_of(teacher, rows)), teacher(batch_of(teacher, rows)), 2.0).item()
    assert after < before / 2


# Teachers that cannot teach


def refused(checkpoint, teacher, **changes):
    student = load_model(checkpoint, TASK.with_settings(**changes))
    with pytest.raises(UsageError) as error:
        Distillation(student, teacher)
    return str(error.value)


def test_a_teacher_that_does_not_fit_is_refused_by_name(checkpoint, unigram_tokenizer, tmp_path):
    teacher = load_model(checkpoint, TASK)
    save_checkpoint(tmp_path, "albert", unigram_tokenizer)
    assert "positive, negative" in refused(checkpoint, teacher, labels=("positive", "negative"))
    assert "other settings" in refused(checkpoint, teacher, problem_type="multi_label_classification")
    other = load_model(checkpoint, PairClassification.of(labels=LABELS, max_length=40))
    assert "pair-classification" in refused(checkpoint, other)
    assert "another tokenizer" in refused(checkpoint, TaskModel.from_pretrained(tmp_path, task=TASK))
    student = load_model(checkpoint)
    with pytest.raises(UsageError, match="the model itself"):
        Distillation(student, student)


def test_a_crf_neither_teaches_nor_learns(checkpoint):
    tasks = [TokenClassification.of(labels=("O", "B-x"), max_length=40, crf=is_crf) for is_crf in (True, False)]
    crf, single = (load_model(checkpoint, task) for task in tasks)
    with pytest.raises(UsageError, match="crf = true scores sequences of tags"):
        Distillation(single, crf)
    with pytest.raises(UsageError, match=r"^crf = true scores sequences of tags"):
        Distillation(crf, single)


def test_a_teacher_counts_positions_as_its_family_does(mpnet_tokenizer, tmp_path):
    """BERT's count from 0, MPNet's from behind the padding id."""
    models = []
    for family in ("bert", "mpnet"):
        save_checkpoint(tmp_path / family, family, mpnet_tokenizer, wide=True)
        models.append(widened(load_model(tmp_path / family), 1))
    objective, rows = Distillation(*models).double().eval(), make_rows(5)
    student, teacher = (model(batch_of(model, rows)) for model in models)
    expected = softmax_divergence(student, teacher, 2.0).item()
    assert objective(batch_of(models[0], rows))[1].total.item() == pytest.approx(expected, rel=1e-12)
    wrong = models[1](batch_of(models[0], rows))
    assert abs(softmax_divergence(student, wrong, 2.0).item() - expected) > 1e-3 * expected


def test_a_student_without_segments_leaves_them_to_the_teacher(wordpiece_tokenizer, tmp_path):
    save_checkpoint(tmp_path, "bert", wordpiece_tokenizer)
    task = PairClassification.of(labels=LABELS, max_length=40)
    teacher = TaskModel.from_pretrained(tmp_path, task=task)
    student = teacher.with_layers(family="distilbert")
    rows = [{"text": "a b", "text_pair": "c"}, {"text": "", "text_pair": "d e f"}]
    (expected, ours) = (model.task.features(rows, model.tokenizer) for model in (teacher, student))
    assert any(
        feature["token_type_ids"] != other["token_type_ids"] for feature, other in zip(expected, ours, strict=True)
    )
    objective = Distillation(student, teacher)
    keys = FeatureKeys(seed=0, epoch=0, numbers=(0, 1))
    features = objective.prepare(ours, keys, ours)
    assert [feature["token_type_ids"] for feature in features] == [feature["token_type_ids"] for feature in expected]
    assert (
        Distillation(teacher, TaskModel.from_pretrained(tmp_path, task=task)).prepare(expected, keys, ours) == expected
    )


# Runs


@pytest.fixture(scope="module")
def teacher_folder(dropout_checkpoint, tmp_path_factory):
    """Saved with its labels in another order: they are compared by name."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    task = TASK.with_settings(labels=LABELS[::-1])
    widened(load_model(dropout_checkpoint, task, seed=3), 3).save_pretrained(folder)
    return folder


def run(folder, checkpoint, teacher, *, head_seed=0, **changes):
    student = load_model(checkpoint, TASK, seed=head_seed)
    settings = {"epochs": 2, "batch_size": 3, "learning_rate": 1e-3, "micro_batch_tokens": 30, "logging_steps": 1}
    options = {"output_dir": folder, "teacher": teacher, "keep_checkpoints": True, "progress": False}
    fit(student, make_rows(8, unlabelled=(2,)), make_rows(6, seed=1), **options, **settings, **changes)
    return student


@pytest.fixture(scope="module")
def straight(dropout_checkpoint, teacher_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("distilled") / "run"
    run(folder, dropout_checkpoint, teacher_folder)
    return folder


def test_a_stopped_run_ends_with_the_same_bits(straight, dropout_checkpoint, teacher_folder, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OptimizerSteps, "update", signalling(OptimizerSteps.update, 4))
        with pytest.raises(StoppedError):
            run(tmp_path, dropout_checkpoint, teacher_folder)
    run(tmp_path, dropout_checkpoint, teacher_folder, head_seed=5)
    assert digests(tmp_path) == digests(straight)
    assert events(tmp_path) == events(straight)


def test_a_run_records_its_teacher_and_each_loss_term(straight, teacher_folder, tmp_path):
    settings = json.loads((straight / "run.json").read_text("utf-8"))["settings"]
    assert settings["teacher.name"] == str(teacher_folder)
    assert len(settings["teacher.digest"]) == 64
    assert (settings["teacher.temperature"], settings["teacher.weight"]) == (2.0, 0.5)
    steps = [event for event in events(straight) if event["event"] == "step"]
    assert all(event["terms"].keys() == {"classes", "distillation"} for event in steps)
    assert all(event["loss"] == pytest.approx(sum(event["terms"].values()) / 2) for event in steps)
    loaded = TaskModel.from_pretrained(straight / "model")
    assert loaded.task.output.labels == LABELS
    rows = [{"text": row["text"]} for row in make_rows(6, seed=1)]
    labels = [
        [prediction.label for prediction in model.predict(rows)]
        for model in (loaded, TaskModel.from_pretrained(teacher_folder))
    ]
    same = sum(student == teacher for student, teacher in zip(*labels, strict=True)) / 6
    assert events(straight)[-1] == {"event": "agreement", "step": 6, "agreement": {"": same}}
    make_report(straight, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "training, distillation" in page
    assert "predictions as the teacher" in page


def test_another_teacher_is_another_run(straight, dropout_checkpoint, teacher_folder):
    teacher = TaskModel.from_pretrained(teacher_folder, task=TASK)
    with pytest.raises(UsageError, match=r"teacher.temperature = 3.0 \(was 2.0\)"):
        run(straight, dropout_checkpoint, teacher, teacher_temperature=3.0)
    with torch.no_grad():
        teacher.head.output.bias += 1e-3
    with pytest.raises(UsageError, match=r"teacher\.digest"):
        run(straight, dropout_checkpoint, teacher)


def test_a_recipe_names_the_layers_and_the_teacher(checkpoint, teacher_folder, tmp_path):
    (tmp_path / "teacher").symlink_to(teacher_folder)
    teacher = '[teacher]\nname = "./teacher"\ntemperature = 1.5'
    path = write_with_data(tmp_path, checkpoint, optim="", run="", sections=teacher)
    recipe = load_recipe(path, overrides=["model.layers=every-other"])
    assert (recipe.model.layers, recipe.teacher.temperature, recipe.teacher.weight) == ("every-other", 1.5, 0.5)
    assert recipe.teacher.name == str(tmp_path / "teacher")
    assert "Layers 0 of 2" in dry_run(recipe).load_summary
    with pytest.raises(UsageError, match=r"layers are \[2\], expected numbers from 0 to 1"):
        dry_run(load_recipe(path, overrides=["model.layers=[2]"]))


# Hidden states and relations


def states_of(model, row):
    """Embeddings and layers of one row, unpadded."""
    (feature,) = model.task.features([row], model.tokenizer)
    batch = collate([feature], position_offset=model.config.position_offset)
    return model.forward_states(batch)[1]


def plain_relations(student, teacher, row, heads):
    """One row, one head, one pair of tokens after another."""
    total = 0.0
    projections = []
    for model in (student, teacher):
        inputs, layer = states_of(model, row)[-2], model.encoder.layers[model.encoder.layer_order[-1]]
        query, key, value = F.linear(inputs, layer.attention.qkv.weight, layer.attention.qkv.bias).chunk(3, dim=-1)
        projections.append((query, key, value))
    for states, targets in zip(*projections, strict=True):
        for state, other in zip(states.chunk(heads, dim=-1), targets.chunk(heads, dim=-1), strict=True):
            q, p = ((vectors @ vectors.T / vectors.shape[1] ** 0.5).softmax(-1) for vectors in (state, other))
            total += (p * (p.log() - q.log())).sum(-1).mean() / (3 * heads)
    return total


def wider(checkpoint, folder, tokenizer):
    """A teacher of another width, with other heads and one layer more."""
    config = hf_config("roberta", vocab_size=len(tokenizer), num_hidden_layers=3, hidden_size=48, num_attention_heads=6)
    model = hf_class("roberta", "base")(config, add_pooling_layer=False)
    widen(model, seed=5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return widened(load_model(folder, WEIGHTED_TASK, seed=3), 3)


@pytest.mark.parametrize("heads", slow_except([True, 12], True))
def test_relations_of_models_of_any_width_are_those_of_unpadded_rows(wide_checkpoint, bpe_tokenizer, tmp_path, heads):
    teacher = wider(wide_checkpoint, tmp_path, bpe_tokenizer)
    student = widened(load_model(wide_checkpoint, WEIGHTED_TASK), 0)
    objective = Distillation(student, teacher, TeacherSection(name="teacher", relations=heads)).double()
    assert objective.relation_heads == (6 if heads is True else heads)
    rows = make_rows(9, unlabelled=(2, 5))
    features = student.task.features(rows, student.tokenizer)
    batch = collate(features, position_offset=student.config.position_offset)
    assert batch.layout.regroup is not None  # rows are padded
    term = objective(batch)[-1]
    expected = sum(plain_relations(student, teacher, row, objective.relation_heads) for row in rows)
    assert (term.name, term.count.item()) == ("relations", 9)
    assert term.total.item() == pytest.approx(expected.item(), rel=1e-12)
    assert objective.counts(features)["relations"] == 9


@pytest.mark.parametrize("loss_type", ["cosine", "mse"])
def test_hidden_states_of_all_tokens_are_compared(wide_checkpoint, loss_type):
    objective = pair(wide_checkpoint, hidden=loss_type, hidden_weight=0.3)
    with torch.no_grad():
        objective.teacher.encoder.layers[0].output.weight.mul_(1.5)
    rows = make_rows(9, unlabelled=(2, 5))
    batch = batch_of(objective.model, rows)
    term = objective(batch)[-1]
    states = [[states_of(model, row)[-1] for row in rows] for model in (objective.model, objective.teacher)]
    student, teacher = (torch.cat(model_states) for model_states in states)
    cosine = (student * teacher).sum(-1) / student.norm(dim=-1) / teacher.norm(dim=-1)
    expected = (1 - cosine).sum() if loss_type == "cosine" else (student - teacher).square().sum() / student.shape[1]
    assert (term.name, term.weight, term.count.item()) == ("hidden", 0.3, len(student))
    assert term.total.item() == pytest.approx(expected.item(), rel=1e-12)
    assert term.total.item() > 1e-3


def test_reading_all_states_changes_no_logit(wide_checkpoint):
    model = widened(load_model(wide_checkpoint), 0).double()
    batch = batch_of(model, make_rows(9))
    logits, states = model.forward_states(batch)
    torch.testing.assert_close(logits, model(batch), rtol=0, atol=1e-12)
    assert [tuple(state.shape) for state in states] == [(len(batch.input_ids), 36)] * 3


@pytest.mark.parametrize("relations", slow_except([False, 3], 3))
def test_checkpointed_layers_give_the_same_gradients(dropout_checkpoint, relations):
    rows, steps = make_rows(9), []
    for checkpointing in (False, True):
        objective = pair(dropout_checkpoint, hidden="cosine", relations=relations)
        objective.model.encoder.gradient_checkpointing = checkpointing
        steps.append(first_step(objective, rows))
    assert steps[0][0] == steps[1][0]
    assert all(torch.equal(gradient, steps[1][1][name]) for name, gradient in steps[0][1].items())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hidden": "cosine"}, "the teacher has 48 and the model 36"),
        ({"relations": 7}, "Choose a divisor of 12"),
        ({"relations": True, "cache_logits": True}, "stores only logits"),
    ],
)
def test_what_two_models_do_not_share_is_refused(wide_checkpoint, bpe_tokenizer, tmp_path, options, said):
    teacher = wider(wide_checkpoint, tmp_path, bpe_tokenizer)
    with pytest.raises(UsageError, match=said):
        Distillation(load_model(wide_checkpoint, WEIGHTED_TASK), teacher, TeacherSection(name="teacher", **options))
    with pytest.raises(UsageError, match="masked-language-modeling changes its inputs in each epoch"):
        pair(wide_checkpoint, task=EXAMPLES["masked"].task, cache_logits=True)


# Masked tokens


@pytest.mark.parametrize("rows_at_once", slow_except([1000, 3], 3))
def test_masked_tokens_are_compared_over_the_whole_vocabulary(wide_checkpoint, monkeypatch, rows_at_once):
    """The logits of some tokens at a time give the loss and the gradients of all at once."""
    monkeypatch.setattr(VocabularyOutput, "chunk_rows", rows_at_once)
    objective = pair(wide_checkpoint, task=EXAMPLES["masked"].task, temperature=1.5)
    reference, seen = copy.deepcopy(objective), []
    objective.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    _, gradients = first_step(objective, list(EXAMPLES["masked"].rows))
    (batch,) = seen
    labelled, distilled = reference(batch)
    assert (labelled.name, distilled.name) == ("masked_lm", "distillation")
    student, teacher = (model(batch).logits() for model in (reference.model, reference.teacher))
    expected = softmax_divergence(student, teacher.detach(), 1.5)
    assert distilled.count == labelled.count == len(student) > 3
    assert distilled.total.item() == pytest.approx(expected.item(), rel=1e-12)
    entropy = F.cross_entropy(student, batch.labels.long(), reduction="sum")
    ((entropy + expected) / 2 / len(student)).backward()
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad.to_dense(), rtol=1e-9, atol=1e-12)


# Logits that are kept


@pytest.mark.parametrize("case", slow_except(["single", "windows", "several", "token", "span"], "windows", "token"))
def test_kept_logits_are_those_of_the_teacher(wide_checkpoint, monkeypatch, case):
    example = EXAMPLES[case]
    objectives = [pair(wide_checkpoint, task=example.task, cache_logits=kept) for kept in (False, True)]
    rows = [*example.rows, changed(example, "word " * 60)]
    losses = []
    for objective in objectives:
        steps = make_steps(objective.model, rows, objective=objective, batch_size=4, epochs=2, learning_rate=1e-3)
        objective.begin(steps.samples.features, torch.device("cpu"))
        if objective.section.cache_logits:
            monkeypatch.setattr(objective.teacher, "forward", None)  # it is not run again
        losses.append([log.loss for log in walk(steps)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_kept_logits_are_found_again_and_belong_to_one_teacher(wide_checkpoint, monkeypatch):
    objective = pair(wide_checkpoint, cache_logits=True)
    features = make_steps(objective.model, make_rows(6), objective=objective).samples.features
    device = torch.device("cpu")
    objective.begin(features, device)
    first = objective._cached.values("logits")
    with torch.no_grad():
        objective.teacher.head.output.bias += 1
    objective.begin(features, device)
    torch.testing.assert_close(torch.tensor(objective._cached.values("logits")), torch.tensor(first) + 1)
    monkeypatch.setattr(TaskModel, "forward", None)
    objective.begin(features, device)


# Devices and precisions


@pytest.mark.parametrize("options", [{"hidden": "cosine", "relations": True}, {"cache_logits": True}], ids=str)
def test_a_step_on_a_device_never_waits(wide_checkpoint, monkeypatch, options):
    objective = pair(wide_checkpoint, **options).float()
    steps = make_steps(objective.model, make_rows(9), objective=objective, batch_size=9, micro_batch_tokens=60)
    objective.begin(steps.samples.features, torch.device("cpu"))
    _, batch = next(steps.batches())
    with on_meta_device(steps, monkeypatch):
        result = steps.update(0, batch, steps.backward(0, batch))
    assert len(result.values) == 4 + len(result.terms)


def test_all_parts_of_the_loss_are_float32_under_bfloat16(wide_checkpoint):
    objective = pair(wide_checkpoint, hidden="mse", relations=True).float()
    batch = batch_of(objective.model, make_rows(9))
    exact = objective(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = objective(batch)
    for reference, other in zip(exact, rounded, strict=True):
        assert other.total.dtype == torch.float32
        assert other.total.item() == pytest.approx(reference.total.item(), rel=0.2)
