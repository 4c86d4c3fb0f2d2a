"""Training some rows of the word embeddings gives the weights of training all of them, bit for bit on one process."""

import json
import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from bert_tasks import TaskModel, fit
from bert_tasks.data.arrow import ArrowRows
from bert_tasks.errors import CheckpointError
from bert_tasks.tasks import MaskedLanguageModeling
from bert_tasks.tasks.replaced_token_detection import ReplacedTokens
from bert_tasks.tasks.sequence_classification import SequenceClassification
from bert_tasks.training import vocabulary
from bert_tasks.training.distillation import Distillation
from bert_tasks.training.objectives import Supervised
from bert_tasks.training.run import make_objective
from bert_tasks.training.vocabulary import TrainedVocabulary, remap_moment, token_ids
from support.sampling import slow_except
from support.stopped_runs import run, stopped
from support.training_runs import LABELS, load_model, make_rows, make_steps, walk, weights_of

ROWS = make_rows(21)
UNSEEN = [{"text": text, "label": "positive"} for text in ("zebras quickly jump", "vex big dwarfs", "queer fjord bank")]
SETTINGS = {"epochs": 3, "batch_size": 6, "learning_rate": 1e-3, "weight_decay": 0.1, "warmup_ratio": 0.3}
TABLE = "encoder.embeddings.word.weight"


def trained(checkpoint, rows="in_data", *, objective=Supervised, dtype=torch.float32, **changes):
    model = load_model(checkpoint).to(dtype)
    steps = make_steps(model, ROWS, objective=objective(model), vocabulary_rows=rows, **{**SETTINGS, **changes})
    assert (steps.optimizer.vocabulary is None) == (rows == "all")
    logs = walk(steps)
    return weights_of(model), [(log.loss, log.grad_norm) for log in logs]


def same(left, right):
    return all(torch.equal(left[name], value) for name, value in right.items())


def distil(model):
    return Distillation(model, load_model(model.origin.name, seed=3).to(model.encoder.embeddings.word.weight.dtype))


@pytest.mark.parametrize(
    "changes",
    [
        {"max_grad_norm": 0.1, "micro_batch_tokens": 30, "layerwise_lr_decay": 0.5, "head_learning_rate": 1e-2},
        {"bias_correction": False, "lr_scheduler_type": "wsd", "decay_ratio": 0.5},
        pytest.param({"dtype": torch.float64, "lr_scheduler_type": "cosine"}, marks=pytest.mark.slow),
        pytest.param({"objective": distil, "max_grad_norm": None}, marks=pytest.mark.slow),
    ],
    ids=lambda changes: ", ".join(changes),
)
def test_all_weights_are_those_of_training_all_rows(wide_checkpoint, changes):
    some, logs = trained(wide_checkpoint, **changes)
    every, expected = trained(wide_checkpoint, "all", **changes)
    assert same(some, every)
    assert logs == expected


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), pytest.param(torch.float32, 1e-6, marks=pytest.mark.slow)]
)
def test_gradients_of_whole_tables_are_clipped_by_the_same_norm(wide_checkpoint, monkeypatch, dtype, tolerance):
    monkeypatch.setattr(
        "bert_tasks.training.optim.set_sparse_gradients", lambda *_: None
    )  # as on a GPU or several processes
    options = {"dtype": dtype, "max_grad_norm": 0.1, "adam_epsilon": 1e-4}
    (some, logs), (every, expected) = (trained(wide_checkpoint, rows, **options) for rows in ("in_data", "all"))
    assert max((some[name] - value).abs().max() for name, value in every.items()) <= tolerance
    assert all(norm > 0.1 for _, norm in logs)
    for log, other in zip(logs, expected, strict=True):
        assert log == pytest.approx(other, rel=tolerance * 10)


def test_it_does_not_matter_when_the_table_is_brought_up_to_date(wide_checkpoint):
    expected, _ = trained(wide_checkpoint)
    model = load_model(wide_checkpoint)
    steps = make_steps(model, ROWS, **SETTINGS)
    for step, batch in steps.batches():
        steps.update(step, batch, steps.backward(step, batch))
        for _ in range(step % 3):
            steps.optimizer.update_weights()
    steps.optimizer.update_weights()
    assert same(weights_of(model), expected)


def test_rows_without_a_token_decay_by_the_formula(wide_checkpoint):
    model = load_model(wide_checkpoint).double()
    before = model.encoder.embeddings.word.weight.detach().clone()
    steps = make_steps(model, ROWS, **SETTINGS)
    rates = []
    for step, batch in steps.batches():
        rates.append(steps.update(step, batch, steps.backward(step, batch)).learning_rate)
    steps.optimizer.update_weights()
    others = torch.ones(len(before), dtype=torch.bool).index_fill(0, steps.optimizer.vocabulary.ids, False)
    used = {token for feature in steps.samples.features.values("input_ids") for token in feature}
    assert used <= set(steps.optimizer.vocabulary.ids.tolist())
    assert (
        len(used) < len(steps.optimizer.vocabulary.ids) <= len(used) + 20
    )  # special tokens, and up to a multiple of 16
    factor = math.prod(1 - rate * 0.1 for rate in rates)
    assert factor < 1 - 1e-4
    torch.testing.assert_close(
        model.encoder.embeddings.word.weight[others], before[others] * factor, rtol=1e-12, atol=0
    )


def test_special_tokens_are_trained_too():
    """Also those that no training row has, at either end of the vocabulary."""
    model = SimpleNamespace(
        config=SimpleNamespace(vocab_size=1000, pad_token_id=1),
        require_tokenizer=lambda: SimpleNamespace(all_special_ids=[0, 2, 999]),
    )
    ids = token_ids(model, ArrowRows.from_columns({"input_ids": [[500, 7]]})).tolist()
    assert {0, 1, 2, 7, 500, 999} <= set(ids)
    assert ids == sorted(set(ids))
    assert len(ids) == 16


@pytest.mark.parametrize("fault", slow_except(["factor", "rows", "no decay"], "factor"))
def test_faults_would_show(wide_checkpoint, monkeypatch, fault):
    original = TrainedVocabulary.add_step

    def add_step(self, groups, skipped):
        if fault == "factor":
            groups = [{**group, "lr": group["lr"] * 0.9} for group in groups]
        elif fault == "no decay":
            groups = [{**group, "weight_decay": 0.0} for group in groups]
        elif fault == "rows":
            self.ids = self.ids.roll(1)
        original(self, groups, skipped)

    monkeypatch.setattr(TrainedVocabulary, "add_step", add_step)
    some, _ = trained(wide_checkpoint)
    every, _ = trained(wide_checkpoint, "all")
    assert (some[TABLE] - every[TABLE]).abs().max() > 1e-5


def test_a_step_that_is_not_finite_decays_nothing(wide_checkpoint):
    model = load_model(wide_checkpoint)
    before = weights_of(model)
    steps = make_steps(model, ROWS, **{**SETTINGS, "warmup_ratio": 0.0})
    _, batch = next(steps.batches())
    terms = steps.backward(0, batch)
    next(model.head.parameters()).grad.fill_(math.nan)
    assert steps.update(0, batch, terms).values[2] == 1
    steps.optimizer.update_weights()
    assert same(weights_of(model), before)


def test_the_module_keeps_its_hooks_and_gets_its_table_back(wide_checkpoint):
    model = load_model(wide_checkpoint)
    table, whole, padding = (
        model.encoder.embeddings.word,
        model.encoder.embeddings.word.weight,
        model.config.pad_token_id,
    )
    steps = make_steps(model, ROWS, **SETTINGS)
    seen = []
    handle = table.register_forward_hook(lambda *_: seen.append(len(table.weight)))
    _, batch = next(steps.batches())
    steps.backward(0, batch)
    handle.remove()
    assert seen == [len(steps.optimizer.vocabulary.ids)]
    assert len(steps.optimizer.vocabulary.weight) < len(whole) / 2
    with steps.optimizer.vocabulary.attached():
        assert steps.optimizer.vocabulary.ids[table.padding_idx] == padding  # the row without a gradient
    with pytest.raises(RuntimeError, match="stop"), steps.optimizer.vocabulary.attached():
        raise RuntimeError("stop")
    assert (model.encoder.embeddings.word, table.weight, table.padding_idx) == (table, whole, padding)
    assert not table._forward_pre_hooks
    with pytest.raises(IndexError), steps.optimizer.vocabulary.attached():
        table(torch.tensor([next(i for i in range(len(whole)) if i not in steps.optimizer.vocabulary.ids)]))


@dataclass(frozen=True, kw_only=True)
class Drawing(SequenceClassification):
    """Its inputs change in each epoch."""

    def prepare(self, features, keys, corpus, tokenizer):
        return features


@pytest.mark.parametrize(
    "task",
    [
        MaskedLanguageModeling.of(max_length=40),
        ReplacedTokens.of(max_length=40),
        Drawing.of(labels=LABELS, max_length=40),
    ],
    ids=lambda task: task.name,
)
def test_all_rows_are_trained_where_a_step_may_read_all(wide_checkpoint, task):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = TaskModel.from_config({"family": "electra", **sizes}, task=task, tokenizer=wide_checkpoint)
    assert make_steps(model, ROWS, objective=make_objective(model, None, seed=0)).optimizer.vocabulary is None


def test_all_rows_are_trained_where_a_head_reads_the_table_or_the_data_have_most_of_them(wide_checkpoint, monkeypatch):
    model = load_model(wide_checkpoint)
    share = len(make_steps(model, ROWS).optimizer.vocabulary.ids) / model.config.vocab_size
    for largest, has_all in ((share, False), (share - 1e-6, True)):
        monkeypatch.setattr(vocabulary, "_LARGEST_SHARE", largest)
        assert (make_steps(model, ROWS).optimizer.vocabulary is None) == has_all
    monkeypatch.undo()
    monkeypatch.setattr(type(model.head), "reads_embeddings", True)
    assert make_steps(model, ROWS).optimizer.vocabulary is None


def test_evaluation_callbacks_and_saved_models_see_all_rows(wide_checkpoint, tmp_path):
    """The validation rows have tokens that no training row has, and the weight decay is large."""
    seen, logged, saved = {"in_data": [], "all": []}, {}, {}
    for rows, tables in seen.items():
        model, folder = load_model(wide_checkpoint), tmp_path / rows
        table = model.encoder.embeddings.word.weight

        def callback(_, tables=tables, table=table):
            tables.append(table.detach().clone())

        fit(
            model,
            ROWS,
            UNSEEN,
            output_dir=folder,
            progress=False,
            logging_steps=3,  # seldom just before an evaluation, because a callback brings the table up to date, too
            eval_steps=2,
            callback=callback,
            vocabulary_rows=rows,
            **{**SETTINGS, "weight_decay": 20.0},
        )
        lines = map(json.loads, (folder / "metrics.jsonl").read_text("utf-8").splitlines())
        logged[rows] = [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in lines]
        saved[rows] = load_file(folder / "model" / "model.safetensors")
        assert model.encoder.embeddings.word.weight is table
    assert logged["in_data"] == logged["all"]
    assert same(saved["in_data"], saved["all"])
    assert all(torch.equal(*pair) for pair in zip(seen["in_data"], seen["all"], strict=True))
    recorded = json.loads((tmp_path / "in_data" / "run.json").read_text("utf-8"))["vocabulary_rows"]
    assert recorded["trained"] < recorded["all"] / 2 == len(table) / 2


@pytest.mark.parametrize(("first", "then"), [("in_data", "all"), ("all", "in_data")])
def test_a_run_may_be_resumed_the_other_way(dropout_checkpoint, tmp_path, first, then):
    stopped(4, tmp_path / "run", dropout_checkpoint, vocabulary_rows=first, keep_last=9)
    run(tmp_path / "run", dropout_checkpoint, head_seed=5, vocabulary_rows=then, keep_last=9)
    run(tmp_path / "whole", dropout_checkpoint, vocabulary_rows=then)
    last = [folder / "checkpoints" / "ckpt-6" for folder in (tmp_path / "run", tmp_path / "whole")]
    for name in ("weights.safetensors", "optimizer.safetensors"):
        left, right = (load_file(folder / name) for folder in last)
        assert [key for key, value in left.items() if not torch.equal(value, right[key])] == []
    early = load_file(tmp_path / "run" / "checkpoints" / "ckpt-4" / "optimizer.safetensors")
    weights = load_file(tmp_path / "run" / "checkpoints" / "ckpt-4" / "weights.safetensors")
    assert (f"{TABLE}/rows" in early) == (first == "in_data")
    assert len(weights[TABLE]) == json.loads((dropout_checkpoint / "config.json").read_text("utf-8"))["vocab_size"]
    assert (len(early[f"{TABLE}/exp_avg"]) < len(weights[TABLE]) / 2) == (first == "in_data")


def test_rows_of_another_tokenizer_are_refused():
    moment, stored = torch.rand(3, 2), torch.tensor([1, 4, 5])
    whole = remap_moment(moment, stored, None, 7)
    assert whole.nonzero()[:, 0].unique().tolist() == stored.tolist()
    assert torch.equal(remap_moment(whole, None, stored, 7), moment)
    assert torch.equal(remap_moment(moment, stored, torch.tensor([1, 2, 4, 5]), 7)[[0, 2, 3]], moment)
    with pytest.raises(CheckpointError, match=r'optim\.vocabulary_rows = "all"'):
        remap_moment(moment, stored, torch.tensor([1, 4]), 7)
    with pytest.raises(CheckpointError, match="the tokenizer has changed"):
        remap_moment(whole, None, torch.tensor([1, 4, 6]), 7)
