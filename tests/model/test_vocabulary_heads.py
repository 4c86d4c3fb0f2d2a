"""Heads over the vocabulary: losses, gradients, training and files are transformers' ForMaskedLM and ForPreTraining."""

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from bert_tasks.checkpoints.load import match_weights
from bert_tasks.encoder.config import EncoderConfig, HeadKind
from bert_tasks.encoder.heads import Head, PretrainingHead, ReplacedTokenHead
from bert_tasks.encoder.packing import PackedBatch, pack
from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.families import copies_of_tied, encoder_config, family_of, parameter_map
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks import MaskedLanguageModeling, SequenceClassification
from support import parity
from support.hf_models import FAMILIES, PREFIX, HFBatch, hf_config, random_batch, widen, with_current_names
from support.sampling import one_of_each
from support.small_checkpoints import save_checkpoint

LENGTHS = (17, 2, 30, 9, 3, 16)
PAIRS = (0, 1, 1, 0, 1, 0)
MASKED = [(family, "masked-lm") for family in FAMILIES]
PAIRED = ("bert", "albert", "ernie")
KINDS = [*MASKED, *((family, "pretraining") for family in PAIRED), ("electra", "replaced-token")]
CLASSES = {"masked-lm": "ForMaskedLM", "pretraining": "ForPreTraining", "replaced-token": "ForPreTraining"}
DECODERS = {
    *("generator_lm_head", "vocab_projector", "decoder", "lm_head"),
    *(f"{name}.decoder" for name in ("cls.predictions", "lm_head", "predictions", "head")),
}
# Families whose decoder is a table of its own, and is tied to the word embeddings if the config says so.
TIED_BY_CONFIG = ("eurobert", "ultrabert")
EVERY_HEAD = pytest.mark.parametrize(("family", "head"), one_of_each(KINDS))


class HeadTask(MaskedLanguageModeling):
    """A task with one of the three heads, which the tests call themselves."""

    head_kind: HeadKind = "masked-lm"

    def head(self, config: EncoderConfig) -> Any:
        heads: Mapping[str, type[Head]] = {"pretraining": PretrainingHead, "replaced-token": ReplacedTokenHead}
        return heads[self.head_kind](config) if self.head_kind in heads else super().head(config)


def task_of(head: str) -> MaskedLanguageModeling:
    return type("Task", (HeadTask,), {"head_kind": head}).of(max_length=48)


def hf_model(family: str, head: str, config: PretrainedConfig | None = None, **changes: Any) -> PreTrainedModel:
    """A reference model in float64 with wide weights, a decoder that is tied, and eager attention."""
    if config is None:
        config = hf_config(family, num_labels=2, **changes)
    config._attn_implementation = "eager"
    model: PreTrainedModel = getattr(transformers, PREFIX[family] + CLASSES[head])(config).double().eval()
    widen(model, seed=0)
    return model


def ours_from(theirs: PreTrainedModel, head: str) -> TaskModel:
    model: TaskModel = parity.ours_from(theirs, head, task_of(head))
    return model


def masked(batch: HFBatch, *, seed: int = 0) -> tuple[Tensor, list[list[int]]]:
    """Labels as transformers takes them, -100 where nothing is predicted, and the positions of each sequence.

    The second sequence has no masked token.
    """
    generator = torch.Generator().manual_seed(seed)
    is_masked = (torch.rand(batch.input_ids.shape, generator=generator) < 0.4) & batch.attention_mask.bool()
    is_masked[1] = False
    labels = torch.randint(3, 120, batch.input_ids.shape, generator=generator).where(is_masked, -100)
    return labels, [row.nonzero().flatten().tolist() for row in is_masked]


def packed(model: TaskModel, batch: HFBatch, positions: list[list[int]] | None) -> PackedBatch:
    lengths = batch.attention_mask.sum(1).tolist()
    cut = [
        [ids[:length].tolist() for ids, length in zip(tensor, lengths, strict=True)]
        for tensor in (batch.input_ids, batch.token_type_ids)
    ]
    return pack(*cut, position_offset=model.config.position_offset, gather_positions=positions)


def replaced(batch: HFBatch, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, batch.input_ids.shape, generator=generator)


def hf_loss(model: PreTrainedModel, head: str, batch: HFBatch, *, seed: int = 0) -> Tensor:
    inputs = batch.inputs(model.config.model_type)
    if head == "replaced-token":  # transformers computes the loss itself with labels in float32
        real = batch.attention_mask.bool()
        logits, labels = model(**inputs).logits[real], replaced(batch, seed=seed)[real]
        return nn.functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
    if model.config.model_type in ("modernbert", *TIED_BY_CONFIG):  # where transformers computes the loss in float32
        labels = masked(batch, seed=seed)[0].flatten()
        return nn.functional.cross_entropy(model(**inputs).logits.flatten(0, 1), labels)
    inputs["labels"] = masked(batch, seed=seed)[0]
    if head == "pretraining":
        name = "sentence_order_label" if model.config.model_type == "albert" else "next_sentence_label"
        inputs[name] = torch.tensor(PAIRS)
    loss: Tensor = model(**inputs).loss
    return loss


def our_loss(model: TaskModel, head: str, batch: HFBatch, *, seed: int = 0) -> Tensor:
    if head == "replaced-token":
        logits = model(packed(model, batch, None)).squeeze(-1)
        labels = replaced(batch, seed=seed)[batch.attention_mask.bool()]
        return nn.functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
    table, positions = masked(batch, seed=seed)
    output = model(packed(model, batch, positions))
    vocabulary = output.vocabulary if head == "pretraining" else output
    labels = table[table != -100]
    loss: Tensor = vocabulary.cross_entropy(labels) / len(labels)
    return loss + nn.functional.cross_entropy(output.pairs, torch.tensor(PAIRS)) if head == "pretraining" else loss


def gradients_apart(theirs: PreTrainedModel, ours: TaskModel, head: str, batch: HFBatch) -> float:
    """The largest difference of the gradients, in units of the largest."""
    for model, loss in ((theirs, hf_loss(theirs, head, batch)), (ours, our_loss(ours, head, batch))):
        model.zero_grad()
        torch.autograd.backward(loss)
    named = theirs.named_parameters(remove_duplicate=False)  # XLM-RoBERTa's classes list the decoder before the table
    gradients = {name: value.grad for name, value in named if value.grad is not None}
    expected = parity.in_our_names(gradients, theirs, head)
    by_name = {name: value.grad for name, value in ours.named_parameters() if value.grad is not None}
    assert by_name.keys() == expected.keys() == dict(ours.named_parameters()).keys()
    largest = max(float(value.abs().max()) for value in expected.values())
    return max(float((expected[name] - by_name[name]).abs().max()) for name in expected) / largest


@EVERY_HEAD
def test_loss_and_gradients(family: str, head: str) -> None:
    theirs = hf_model(family, head)
    ours, batch = ours_from(theirs, head), random_batch(family, lengths=LENGTHS)
    expected = hf_loss(theirs, head, batch).item()
    assert our_loss(ours, head, batch).item() == pytest.approx(expected, rel=1e-12)
    assert gradients_apart(theirs, ours, head, batch) <= 1e-9


@pytest.mark.parametrize(("family", "activation"), one_of_each([*product(FAMILIES, ["relu", "gelu_new"])]))
def test_activation_of_the_head(family: str, activation: str) -> None:
    """RoBERTa and ELECTRA ignore ``hidden_act`` there."""
    changes = {"activation" if family == "distilbert" else "hidden_act": activation}
    if family == "distilbert" and activation == "gelu_new":
        pytest.skip("transformers has gelu and relu only")
    theirs = hf_model(family, "masked-lm", **changes)
    ours, batch = ours_from(theirs, "masked-lm"), random_batch(family, lengths=LENGTHS)
    expected = hf_loss(theirs, "masked-lm", batch).item()
    assert our_loss(ours, "masked-lm", batch).item() == pytest.approx(expected, rel=1e-12)


def test_faults_are_seen() -> None:
    """What differs between families, and the tie, are faults of at least 10 times the tolerance elsewhere."""
    theirs = hf_model("bert", "masked-lm", layer_norm_eps=1e-3)
    batch = random_batch("bert", lengths=LENGTHS)
    expected = hf_loss(theirs, "masked-lm", batch).item()

    def error(change: Any) -> float:
        ours = ours_from(theirs, "masked-lm")
        change(ours)
        return abs(our_loss(ours, "masked-lm", batch).item() / expected - 1)

    def eps(model: TaskModel) -> None:
        model.head.norm.eps = 1e-12

    def activation(model: TaskModel) -> None:
        model.head.activation = "gelu_new"

    def bias(model: TaskModel) -> None:
        model.head.bias.data.zero_()

    assert error(lambda model: None) <= 1e-12
    assert min(map(error, (eps, activation, bias))) > 1e-11
    ours = ours_from(theirs, "masked-lm")
    head = ours.head.forward
    ours.head.forward = lambda hidden, layout, table: head(hidden, layout, table.detach())  # type: ignore[method-assign]
    assert gradients_apart(theirs, ours, "masked-lm", batch) > 1e-8


@pytest.mark.slow  # losses and gradients are compared for one step above
@pytest.mark.parametrize(("family", "head"), [("bert", "pretraining"), ("electra", "replaced-token"), *MASKED[1::2]])
def test_a_hundred_steps_give_transformers_loss_curve_and_files(family: str, head: str, tmp_path: Path) -> None:
    """The decoder stays tied: what is saved after training gives stock transformers the same logits.

    test_gradients.py does the same with the other families and the head for classes.
    """
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if family == "distilbert":
        none = {"dropout": 0.0, "attention_dropout": 0.0}
    if family == "albert":
        none |= {"classifier_dropout_prob": 0.0}
    theirs = hf_model(family, head, num_hidden_layers=2, **none).train()
    ours = ours_from(theirs, head).train()
    batches = [random_batch(family, lengths=LENGTHS, seed=seed) for seed in range(5)]
    expected = parity.loss_curve(
        theirs, lambda step: hf_loss(theirs, head, batches[step % 5], seed=step % 5), steps=100
    )
    curve = parity.loss_curve(ours, lambda step: our_loss(ours, head, batches[step % 5], seed=step % 5), steps=100)
    assert max(abs(loss - other) for loss, other in zip(expected, curve, strict=True)) <= 1e-9
    assert sum(expected[-5:]) < 0.9 * sum(expected[:5])
    same_as_stock(ours.eval(), head, tmp_path)


def same_as_stock(ours: TaskModel, head: str, folder: Path) -> None:
    """Saves our model; stock transformers finds every key, none too many, and computes the same logits."""
    ours.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    stock = getattr(transformers, "AutoModelForMaskedLM" if head == "masked-lm" else "AutoModelForPreTraining")
    theirs, report = stock.from_pretrained(folder, output_loading_info=True, dtype=torch.float64)
    assert [type(theirs).__name__] == config["architectures"]
    assert not any(report.values()), report
    theirs.save_pretrained(folder / "again")
    assert load_file(folder / "model.safetensors").keys() == load_file(folder / "again" / "model.safetensors").keys()
    same_logits(theirs.eval(), ours, head, random_batch(config["model_type"], lengths=LENGTHS))


@torch.no_grad()
def same_logits(theirs: PreTrainedModel, ours: TaskModel, head: str, batch: HFBatch, *, of_pairs: bool = True) -> None:
    """Of the padded call, at real tokens."""
    output = theirs(**batch.inputs(theirs.config.model_type))
    predictions = ours(batch.input_ids, batch.attention_mask, batch.token_type_ids)
    if head == "pretraining":
        predictions, pairs = predictions
        expected = output.sop_logits if "sop_logits" in output else output.seq_relationship_logits
        assert not of_pairs or float((pairs - expected).abs().max()) <= 1e-10
        logits = output.prediction_logits
    else:
        logits = output.logits if head == "masked-lm" else output.logits.unsqueeze(-1)
    real = batch.attention_mask.bool()
    torch.testing.assert_close(predictions[real], logits[real], rtol=0, atol=1e-10)


@EVERY_HEAD
def test_logits_under_left_padding(family: str, head: str) -> None:
    """Those of pairs are left out: transformers reads column 0 for them, which is padding."""
    theirs = hf_model(family, head)
    batch = random_batch(family, lengths=LENGTHS, side="left")
    same_logits(theirs, ours_from(theirs, head), head, batch, of_pairs=False)


@with_current_names
@pytest.mark.every_family
@pytest.mark.parametrize(("family", "head"), one_of_each(KINDS, every_family=True))
def test_saved_files_are_transformers(family: str, head: str, tmp_path: Path) -> None:
    same_as_stock(ours_from(hf_model(family, head), head), head, tmp_path)


@pytest.mark.parametrize(
    ("family", "head"),
    one_of_each([case for case in KINDS[:-1] if case[0] != "rembert"]),  # which is never tied
)
def test_published_files_load_with_the_decoder_or_without(family: str, head: str) -> None:
    """Files of older versions hold the decoder, too: it must be the table of embeddings and the bias."""
    tied = {"tie_word_embeddings": True} if family in TIED_BY_CONFIG else {}
    theirs = hf_model(family, head, **tied).float()
    config = theirs.config.to_dict()
    spec, ours = family_of(config), encoder_config(config)
    names = parameter_map(spec, ours, head=head, pooler=False)
    copies = copies_of_tied(spec, ours, names, head=head)
    shapes = {name: value.shape for name, value in TaskModel(config, task_of(head)).state_dict().items()}
    tensors = {name: value.clone() for name, value in theirs.state_dict().items()}
    (decoder,) = {name for name in tensors if name.removesuffix(".weight") in DECODERS}

    def matched(tensors: dict[str, Tensor]) -> Any:
        return match_weights(tensors, names, shapes=shapes, family=spec, copies=copies)

    whole = matched(tensors)
    assert decoder in whole.report.ignored
    assert (whole.report.dropped, whole.report.new) == ((), ())
    saved = {source for sources in names.values() for source in sources}
    assert matched({name: tensors[name] for name in saved}).report.ignored == ()
    tensors[decoder][3, 2] += 1
    with pytest.raises(CheckpointError, match=rf"{decoder} differs from .*, to which the head's decoder is tied"):
        matched(tensors)


def test_other_tasks_drop_the_head_and_this_one_may_start_it_anew(tmp_path: Path, by_kind: Any) -> None:
    folder = tmp_path / "base"
    save_checkpoint(folder, "bert", by_kind["wordpiece"])
    model = TaskModel.from_pretrained(folder, task=MaskedLanguageModeling.of(max_length=16))
    assert [name.rpartition(".")[0] for name in model.load_report.new] == [
        *("cls.predictions.transform.dense",) * 2,
        *("cls.predictions.transform.LayerNorm",) * 2,
        "cls.predictions",
    ]
    model.save_pretrained(tmp_path / "mlm")
    classifier = TaskModel.from_pretrained(
        tmp_path / "mlm", task=SequenceClassification.of(labels=("a", "b"), max_length=16)
    )
    assert sorted(classifier.load_report.dropped) == sorted(model.load_report.new)
    again = TaskModel.from_pretrained(tmp_path / "mlm")
    assert again.task == model.task
    assert again.load_report.new == ()


def test_what_the_head_cannot_compute_is_refused() -> None:
    config = hf_config("bert").to_dict()
    with pytest.raises(CheckpointError, match="tie_word_embeddings = false is not supported by masked-lang"):
        TaskModel({**config, "tie_word_embeddings": False}, task_of("masked-lm"))
    with pytest.raises(UsageError, match="distilbert models have no head of the kind 'pretraining'"):
        TaskModel(hf_config("distilbert").to_dict(), task_of("pretraining"))
    with pytest.raises(UsageError, match="bert models have no head of the kind 'replaced-token'"):
        TaskModel(config, task_of("replaced-token"))
    assert MaskedLanguageModeling.of().with_settings(top_k=3).settings()["top_k"] == 3


@pytest.mark.parametrize("head", ["masked-lm", pytest.param("pretraining", marks=pytest.mark.slow)])
def test_gradients_do_not_depend_on_the_number_of_threads(head: str) -> None:
    theirs = hf_model("bert", head).float()
    batch = random_batch("bert", lengths=LENGTHS)
    gradients = []
    for _ in range(2):
        ours = ours_from(theirs, head)
        torch.set_num_threads(2)
        try:
            torch.autograd.backward(our_loss(ours, head, batch))
        finally:
            torch.set_num_threads(1)
        gradients.append({name: value.grad for name, value in ours.named_parameters()})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
