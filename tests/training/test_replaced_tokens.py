"""ELECTRA's objective: the losses of transformers' classes, tied embeddings, fair draws, files, and exact resuming."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sklearn.metrics import precision_score, recall_score, roc_auc_score
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from bert_tasks import TaskModel, evaluate, fit
from bert_tasks.data.reading import read
from bert_tasks.encoder.heads import VocabularyOutput
from bert_tasks.errors import UsageError
from bert_tasks.inference import evaluated_predictions
from bert_tasks.metrics.formulas import area_under_curve, replaced_token_measure
from bert_tasks.model.encoder_with_heads import draw_new_head
from bert_tasks.tasks import ReplacedTokens
from bert_tasks.tasks.base import FeatureKeys
from bert_tasks.tasks.features import collate
from bert_tasks.tasks.masking import MaskingRule
from bert_tasks.training.replaced_tokens import ReplacedTokenDetection, make_generator
from support.hf_models import hf_config, widen
from support.meta_device import META, on_meta_device
from support.parity import loss_curve
from support.small_checkpoints import edit_config, save_checkpoint
from support.task_examples import TEXTS
from support.training_runs import batches, make_steps

ROWS = [{"text": text} for text in TEXTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, bpe_tokenizer: PreTrainedTokenizerBase) -> Path:
    path = tmp_path_factory.mktemp("electra")
    save_checkpoint(path, "electra", bpe_tokenizer)
    return path


def objective_of(folder: Path, **settings: Any) -> ReplacedTokenDetection:
    model = TaskModel.from_pretrained(folder, task=ReplacedTokens.of(max_length=24, **settings))
    draw_new_head(model, 1)
    return ReplacedTokenDetection(model, make_generator(model, seed=1))


def batch_of(objective: ReplacedTokenDetection, rows: list[dict[str, str]] = ROWS, *, epoch: int = 0) -> Any:
    task, tokenizer = objective.model.task, objective.model.require_tokenizer()
    features = task.features(rows, tokenizer)
    keys = FeatureKeys(seed=3, epoch=epoch, numbers=range(len(features)))
    prepared = task.prepare(features, keys, features, tokenizer)
    return features, prepared, collate(prepared, position_offset=0)


def padded(sequences: list[list[int]]) -> tuple[Tensor, Tensor]:
    length = max(map(len, sequences))
    ids = torch.tensor([sequence + [0] * (length - len(sequence)) for sequence in sequences])
    mask = torch.tensor([[1] * len(sequence) + [0] * (length - len(sequence)) for sequence in sequences])
    return ids, mask


def test_losses_and_gradients_are_those_of_transformers_classes(folder: Path, tmp_path: Path) -> None:
    objective = objective_of(folder).double()
    widen(objective, seed=2)
    objective.eval()
    features, prepared, batch = batch_of(objective)
    output = objective.output_of(batch)
    terms = {term.name: term for term in objective(batch)}
    assert {name: (term.weight, term.count.item()) for name, term in terms.items()} == {
        "generator": (1.0, sum(len(feature["labels"]) for feature in prepared)),
        "discriminator": (50.0, sum(len(feature["input_ids"]) for feature in prepared)),
    }
    assert objective.counts(prepared) == {name: term.count.item() for name, term in terms.items()}
    objective.model.save_pretrained(tmp_path / "model")
    objective.generator.save_pretrained(tmp_path / "generator")
    generator, report = transformers.ElectraForMaskedLM.from_pretrained(
        tmp_path / "generator", output_loading_info=True, dtype=torch.float64, attn_implementation="eager"
    )
    assert not any(report.values())
    discriminator, report = transformers.ElectraForPreTraining.from_pretrained(
        tmp_path / "model", output_loading_info=True, dtype=torch.float64, attn_implementation="eager"
    )
    assert not any(report.values())
    generator.eval()
    discriminator.eval()

    ids, mask = padded([feature["input_ids"] for feature in prepared])
    original, _ = padded([feature["input_ids"] for feature in features])
    labels = torch.full_like(ids, -100)
    for row, feature in enumerate(prepared):
        labels[row, feature["gather_positions"]] = torch.tensor(feature["labels"]).long()
        assert torch.equal(original[row, feature["gather_positions"]], labels[row, feature["gather_positions"]])
    masked_loss = generator(input_ids=ids, attention_mask=mask, labels=labels).loss
    assert (terms["generator"].total / terms["generator"].count).item() == pytest.approx(masked_loss.item(), rel=1e-12)

    # The inputs of the discriminator: the original tokens, but for those that the generator drew.
    drawn = output.generator.sample(batch.fields["uniform"])
    inputs = original.clone()
    inputs[labels != -100] = drawn
    replaced = (inputs != original)[mask.bool()]
    assert torch.equal(output.replaced.bool(), replaced)
    assert torch.equal(output.masked.bool(), (labels != -100)[mask.bool()])
    assert 0 < replaced.sum() <= len(drawn)
    logits = discriminator(input_ids=inputs, attention_mask=mask).logits[mask.bool()]
    expected = F.binary_cross_entropy_with_logits(logits, replaced.double())
    loss = terms["discriminator"].total / terms["discriminator"].count
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)

    total = terms["generator"].total / terms["generator"].count + 50 * loss
    total.backward()
    (masked_loss + 50 * expected).backward()
    tables = objective.model.encoder.embeddings
    for name, ours in (("word", tables.word), ("position", tables.position), ("token_type", tables.token_type)):
        theirs = [
            getattr(model.electra.embeddings, f"{name}_embeddings").weight.grad for model in (generator, discriminator)
        ]
        size = max(float(gradient.abs().max()) for gradient in theirs)
        torch.testing.assert_close(ours.weight.grad, theirs[0] + theirs[1], rtol=0, atol=1e-9 * size)
    for ours, theirs in (
        (objective.model.head.dense, discriminator.discriminator_predictions.dense),
        (objective.generator.head.dense, generator.generator_predictions.dense),
        (objective.generator.encoder.embeddings.projection, generator.electra.embeddings_project),
    ):
        torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-9, atol=1e-12)


def test_embeddings_are_one_and_no_gradient_goes_through_the_draw(folder: Path) -> None:
    objective = objective_of(folder)
    embeddings, theirs = objective.model.encoder.embeddings, objective.generator.encoder.embeddings
    for name in ("word", "position", "token_type", "norm"):
        assert getattr(embeddings, name) is getattr(theirs, name)
    assert objective.generator.config.hidden_size == 9
    assert objective.model.task.rule == MaskingRule(mask_replace_prob=0.85, random_replace_prob=0.0)
    assert len(objective.generator.encoder.layers) == len(objective.model.encoder.layers)
    _, _, batch = batch_of(objective)
    terms = objective(batch)
    terms[1].total.backward()
    assert all(value.grad is None for name, value in objective.named_parameters() if name.startswith("generator."))
    names = objective.checkpoint_parameters()
    assert not any(name.startswith("objective.generator.stack.embeddings.word") for name in names)


def test_a_token_that_is_drawn_again_is_not_replaced(folder: Path) -> None:
    objective = objective_of(folder).eval()
    _, _, batch = batch_of(objective)
    ((token, count),) = Counter(batch.labels.long().tolist()).most_common(1)
    with torch.no_grad():
        objective.generator.head.get_parameter("bias")[token] = 1e4
    output = objective.output_of(batch)
    assert output.replaced[output.masked.bool()].tolist() == (batch.labels != token).long().tolist()
    assert output.replaced.sum() == len(batch.labels) - count


def test_draws_follow_the_distribution_and_depend_on_their_numbers_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 12, generator=generator)
    uniforms = torch.rand(60_000, generator=generator, dtype=torch.float64)
    output = VocabularyOutput.of_logits(logits.expand(len(uniforms), -1))
    drawn = output.sample(uniforms)
    expected = logits.double().softmax(1)[0] * len(uniforms)
    counts = Counter(drawn.tolist())
    statistic = sum((counts[number] - float(size)) ** 2 / float(size) for number, size in enumerate(expected))
    assert statistic < 36  # chi-square with 11 degrees of freedom: p = 1e-4 at 37
    subset = torch.tensor([7, 500, 3])
    assert torch.equal(VocabularyOutput.of_logits(logits.expand(3, -1)).sample(uniforms[subset]), drawn[subset])
    edges = VocabularyOutput.of_logits(torch.tensor([[0.0, -torch.inf, 0.0]]).expand(3, -1))
    assert edges.sample(torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)).tolist() == [0, 2, 2]


def test_tokens_do_not_depend_on_the_batch(folder: Path) -> None:
    objective = objective_of(folder).double().eval()
    _, prepared, batch = batch_of(objective)
    whole = objective.output_of(batch)
    alone = [objective.output_of(collate([feature], position_offset=0)) for feature in prepared]
    assert torch.equal(whole.replaced, torch.cat([output.replaced for output in alone]))
    torch.testing.assert_close(whole.logits, torch.cat([output.logits for output in alone]), rtol=0, atol=1e-12)
    _, later, _ = batch_of(objective, epoch=1)
    # Each window of each epoch has numbers of its own.
    assert len({feature["fields"]["uniform"][0] for feature in (*prepared, *later)}) == 2 * len(prepared)


def test_a_step_never_waits_for_the_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objective = objective_of(folder)
    steps = make_steps(objective.model, ROWS, objective=objective, batch_size=8, micro_batch_tokens=30)
    with on_meta_device(steps, monkeypatch):
        result = steps.update(0, next(batches(steps)), steps.backward(0, next(batches(steps))))
    assert result.values.device.type == "cpu"
    assert {parameter.device for parameter in steps.objective.parameters()} == {META}


def run(folder: Path, output: Path, **options: Any) -> Any:
    model = TaskModel.from_pretrained(folder, task=ReplacedTokens.of(max_length=24))
    settings = {"epochs": 3, "batch_size": 4, "learning_rate": 1e-3, "seed": 5, "progress": False, "report": False}
    return fit(model, ROWS, ROWS, output_dir=output, **{**settings, **options})


def test_a_run_saves_both_models_and_resumes_exactly(folder: Path, tmp_path: Path) -> None:
    whole = run(folder, tmp_path / "whole")
    assert set(whole.metrics) == {"loss", "auc", "precision", "recall", "generator_accuracy"}
    count = 0

    def interrupt(record: dict[str, Any]) -> None:
        nonlocal count
        count += record["event"] == "evaluation"
        if count == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(folder, tmp_path / "parts", callback=interrupt)
    resumed = run(folder, tmp_path / "parts")
    assert resumed.metrics == whole.metrics
    for name in ("model", "generator"):
        both = [(tmp_path / run_name / name / "model.safetensors").read_bytes() for run_name in ("whole", "parts")]
        assert both[0] == both[1]
    config = json.loads((tmp_path / "whole" / "generator" / "config.json").read_text())
    assert (config["architectures"], config["hidden_size"]) == (["ElectraForMaskedLM"], 9)
    model = TaskModel.from_pretrained(tmp_path / "whole")
    (prediction,) = model.predict("the ferry leaves at seven")
    assert len(prediction.tokens) == len(prediction.scores) >= 5
    assert evaluate(tmp_path / "whole", ROWS) == pytest.approx(whole.metrics, abs=1e-6)
    assert evaluate(tmp_path / "whole" / "model", ROWS) == evaluate(tmp_path / "whole", ROWS)
    with pytest.raises(UsageError, match=r"with its generator, which is not known .* Evaluate the output folder"):
        evaluate(TaskModel(model.hf_config, model.task, tokenizer=model.tokenizer), ROWS)
    (tmp_path / "parts" / "model").rename(tmp_path / "alone")
    with pytest.raises(UsageError, match=r"with its generator, but .*generator does not exist\. Evaluate the output"):
        evaluate(tmp_path / "alone", ROWS)
    run(folder, tmp_path / "other", seed=6, epochs=1)
    (tmp_path / "other" / "generator").rename(tmp_path / "generator")
    with pytest.raises(UsageError, match=r"with its generator, but the generator in .* belongs to other weights"):
        evaluate(tmp_path / "alone", ROWS)


def test_a_report_shows_replaced_tokens(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path, epochs=1, report=True)
    model = TaskModel.from_pretrained(tmp_path)
    task, table = model.task, read(ROWS, model.task.columns, require_labels=False)
    predictions = evaluated_predictions(model, table)[""]
    sections = task.output.report(predictions, list(table), task.texts)
    assert sections.measure.values() == pytest.approx(task.output.metrics(predictions, ROWS), abs=1e-12)
    seen = np.array([token for prediction in predictions for token in prediction.measured])
    assert task.output.metrics(predictions, ROWS)["auc"] == pytest.approx(
        roc_auc_score(seen[:, 1], seen[:, 0]), abs=1e-12
    )
    assert sections.figures == {"tokens": len(seen), "masked": seen[:, 2].sum(), "replaced": seen[:, 1].sum()}
    tokenizer = model.require_tokenizer()
    for row, prediction in zip(ROWS, predictions, strict=True):
        originals = tokenizer(row["text"], add_special_tokens=False)["input_ids"]
        assert list(prediction.originals) == originals
        assert tokenizer.mask_token_id not in prediction.ids
        changed = [token != original for token, original in zip(prediction.ids, originals, strict=True)]
        assert sum(changed) == sum(replaced for _, replaced, _ in prediction.measured)
        assert sum(segment.label != "" for segment in prediction.example.excerpt) == sum(changed)
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "Texts with the worst mistakes" in page
    assert " instead of " in page


def test_rows_with_equal_errors_have_as_many_examples_as_others(bpe_tokenizer: PreTrainedTokenizerBase) -> None:
    token = 300
    # Original id, is a word, logit, is replaced, is masked, input id: one replaced token in each of 30 rows.
    compact = [torch.tensor([[float(token + 1), 1.0, 2.0, 1.0, 1.0, float(token)]]) for _ in range(30)]
    rows = [{"text": "room", "line": line} for line in range(30)]
    output = ReplacedTokens.of().output
    predictions = output.decode(compact, [{"row": line} for line in range(30)], rows, bpe_tokenizer)
    examples = output.report(predictions, rows, ("text",)).examples
    assert examples is not None
    assert [example.line for example in examples.items] == list(range(20))


def test_areas_of_resampled_rows_are_scikit_learns() -> None:
    chance = np.random.default_rng(1)
    sizes = chance.integers(0, 40, size=80)
    replaced = chance.random(sizes.sum()) < 0.15
    scores = chance.normal(size=len(replaced)) + 1.5 * replaced - 1
    masked = replaced | (chance.random(len(replaced)) < 0.05)
    measure = replaced_token_measure(sizes.tolist(), scores, replaced, masked)
    assert measure.values()["auc"] == pytest.approx(roc_auc_score(replaced, scores), abs=1e-12)
    for _ in range(5):
        counts = chance.multinomial(len(sizes), np.full(len(sizes), 1 / len(sizes)))
        weights = np.repeat(counts, sizes)
        groups = np.bincount(measure.statistics.group_of_row, weights=counts)
        areas = dict(zip(measure.names, measure.formula(measure.statistics.sums(groups[None]))[0], strict=True))
        expected = {
            "auc": roc_auc_score(replaced, scores, sample_weight=weights),
            "precision": precision_score(replaced, scores > 0, sample_weight=weights),
            "recall": recall_score(replaced, scores > 0, sample_weight=weights),
            "generator_accuracy": 1 - (weights * replaced).sum() / (weights * masked).sum(),
        }
        assert areas == pytest.approx(expected, abs=1e-3)
        del expected["auc"]
        assert {name: areas[name] for name in expected} == pytest.approx(expected, abs=1e-12)


def test_other_families_are_refused_by_name(
    tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    save_checkpoint(tmp_path, "bert", bpe_tokenizer)
    with pytest.raises(UsageError, match="bert models have no head of the kind 'replaced-token'"):
        TaskModel.from_pretrained(tmp_path, task=ReplacedTokens.of(max_length=24))
    with pytest.raises(ValueError, match=r"generator_size is 0\.0, expected a share"):
        ReplacedTokens.of(generator_size=0.0)
    objective = objective_of(folder)
    other = TaskModel(hf_config("electra").to_dict(), objective.generator.task.with_settings(max_length=24))
    with pytest.raises(UsageError, match="the generator's word embeddings are not of the model's size"):
        ReplacedTokenDetection(objective.model, other)


def test_area_under_the_curve_is_scikit_learns() -> None:
    generator = np.random.default_rng(0)
    for _ in range(20):
        labels, scores = generator.random(50) < 0.3, generator.integers(8, size=50).astype(np.float64)
        assert area_under_curve(labels, scores) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    assert np.isnan(area_under_curve(np.ones(3, dtype=bool), np.zeros(3)))


def plain_step(generator: Any, discriminator: Any, prepared: Any, features: Any) -> Tensor:
    """The loss of a step of ELECTRA with transformers' classes, on a padded batch."""
    ids, mask = padded([feature["input_ids"] for feature in prepared])
    inputs, _ = padded([feature["input_ids"] for feature in features])
    labels = torch.full_like(ids, -100)
    for row, feature in enumerate(prepared):
        labels[row, feature["gather_positions"]] = torch.tensor(feature["labels"]).long()
    output = generator(input_ids=ids, attention_mask=mask, labels=labels)
    is_masked, original = labels != -100, inputs.clone()
    sums = output.logits.detach()[is_masked].softmax(1).cumsum(1)  # [R, V]
    uniforms = torch.tensor(
        [number for feature in prepared for number in feature["fields"]["uniform"]], dtype=torch.float64
    )
    inputs[is_masked] = torch.searchsorted(sums, uniforms[:, None] * sums[:, -1:], right=True).squeeze(1)
    logits = discriminator(input_ids=inputs, attention_mask=mask).logits[mask.bool()]
    replaced = (inputs != original)[mask.bool()].to(logits.dtype)
    loss: Tensor = output.loss + 50 * F.binary_cross_entropy_with_logits(logits, replaced)
    return loss


@pytest.mark.slow
def test_a_hundred_steps_give_the_loss_curve_of_a_plain_loop(tmp_path: Path, bpe_tokenizer: Any) -> None:
    """Five batches, over and over: transformers' two models with tied embeddings, and our objective."""
    save_checkpoint(tmp_path / "base", "electra", bpe_tokenizer)
    edit_config(tmp_path / "base", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    objective = objective_of(tmp_path / "base").double()
    widen(objective, seed=2)
    objective.model.save_pretrained(tmp_path / "model")
    objective.generator.save_pretrained(tmp_path / "generator")
    options: dict[str, Any] = {"dtype": torch.float64, "attn_implementation": "eager"}
    generator = transformers.ElectraForMaskedLM.from_pretrained(tmp_path / "generator", **options).train()
    discriminator = transformers.ElectraForPreTraining.from_pretrained(tmp_path / "model", **options).train()
    embeddings, theirs = discriminator.electra.embeddings, generator.electra.embeddings
    for name in ("word_embeddings", "position_embeddings", "token_type_embeddings", "LayerNorm"):
        setattr(theirs, name, getattr(embeddings, name))
    generator.tie_weights()
    assert generator.generator_lm_head.weight is embeddings.word_embeddings.weight
    seen = [batch_of(objective, epoch=epoch) for epoch in range(5)]

    def ours(step: int) -> Tensor:
        return torch.stack([term.weight * term.total / term.count for term in objective(seen[step % 5][2])]).sum()

    def plain(step: int) -> Tensor:
        features, prepared, _ = seen[step % 5]
        return plain_step(generator, discriminator, prepared, features)

    curve = loss_curve(objective.train(), ours, steps=100)
    expected = loss_curve(nn.ModuleList([discriminator, generator]), plain, steps=100)
    assert curve == pytest.approx(expected, rel=0, abs=1e-9 * expected[0])
    assert sum(curve[-5:]) < 0.9 * sum(curve[:5])
