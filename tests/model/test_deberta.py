"""DeBERTa's own: the variants of its configs, exact buckets, its convolution, and faults that parity must not miss."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM, DebertaV2ForMaskedLM, PreTrainedTokenizerBase
from transformers.models.deberta_v2 import modeling_deberta_v2 as stock

from bert_tasks.encoder import positions
from bert_tasks.encoder.layers import Convolution
from bert_tasks.encoder.packing import Packed, Padded
from bert_tasks.encoder.positions import DisentangledScores, log_buckets
from bert_tasks.errors import CheckpointError
from bert_tasks.families import encoder_config
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks import MaskedLanguageModeling, SequenceClassification
from support.hf_models import (
    STOCK_ROOT_OF_SIZE,
    Head,
    HFBatch,
    hf_config,
    hf_model,
    random_batch,
    widen,
    with_current_names,
)
from support.meta_device import META, NoWaiting
from support.parity import in_our_names, ours_from, packed_batch, packed_difference, shaped_difference
from support.small_checkpoints import edit_config, save_checkpoint
from support.stopped_runs import digests, events, run, stopped

FAMILY = "deberta-v2"
TOLERANCE = 1e-10
# 48 is the most that the small models have positions for; near and equal lengths share a group.
LENGTHS = (17, 1, 48, 9, 2, 46, 17, 30, 16)
CONVOLUTION = {"conv_kernel_size": 3, "conv_act": "gelu"}
VARIANTS: dict[str, dict[str, Any]] = {
    "v3": {},
    "large v2": CONVOLUTION,
    "a wide convolution with the default activation": {"conv_kernel_size": 5},
    "content to position": {"pos_att_type": "c2p"},
    "position to content": {"pos_att_type": "P2C"},
    "own layers for distances": {"share_att_key": False},
    "own keys": {"share_att_key": False, "pos_att_type": ["c2p"]},
    "own queries": {"share_att_key": False, "pos_att_type": ["p2c"]},
    "distances not normalised": {"norm_rel_ebd": "none"},
    "every distance by itself": {"position_buckets": -1},
    "distances up to 20": {"position_buckets": -1, "max_relative_positions": 20},
    "buckets up to 30": {"max_relative_positions": 30},
    "absolute positions, too": {"position_biased_input": True},
    "segments": {"type_vocab_size": 2},
    "narrow embeddings": {"embedding_size": 20},
    "no relative attention": {
        "relative_attention": False,
        "position_biased_input": True,
        "pos_att_type": None,
        "norm_rel_ebd": "none",
    },
    "all at once": {
        **CONVOLUTION,
        "share_att_key": False,
        "position_biased_input": True,
        "type_vocab_size": 2,
        "embedding_size": 20,
        "hidden_act": "gelu_new",
    },
}

# The others take the long tests.
SHORT = ("v3", "large v2", "all at once")
LONG = pytest.mark.slow


def batch_of(lengths: tuple[int, ...] = LENGTHS, **options: Any) -> HFBatch:
    """As ``random_batch``, with two segments, which only some variants read."""
    batch = random_batch(FAMILY, lengths=lengths, **options)
    return HFBatch(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        token_type_ids=batch.attention_mask * (torch.arange(batch.input_ids.shape[1]) % 2),
    )


def pair(head: Head = "token", **changes: Any) -> tuple[Any, Any]:
    """transformers' model and ours with its weights."""
    config = hf_config(FAMILY, num_labels=2 if head == "span" else 3, **changes)
    config.problem_type = "single_label_classification"  # else the class rounds logits to float32
    theirs = hf_model(FAMILY, head, config=config)
    return theirs, ours_from(theirs, head)


@pytest.mark.parametrize("name", [name if name in SHORT else pytest.param(name, marks=LONG) for name in VARIANTS])
@pytest.mark.parametrize("head", ["token", pytest.param("sequence", marks=LONG)])
def test_variants(name: str, head: Head) -> None:
    """Lengths of up to 8 tokens take the embeddings of their distances alone, longer ones the whole table."""
    theirs, ours = pair(head, **VARIANTS[name])
    for lengths in (LENGTHS, (8, 3, 7), (1, 1)):
        batch = batch_of(lengths)
        assert shaped_difference(theirs, ours, batch) <= TOLERANCE
        assert packed_difference(theirs, ours, batch) <= TOLERANCE


@pytest.mark.parametrize("name", [pytest.param("v3", marks=LONG), "large v2", pytest.param("all at once", marks=LONG)])
def test_left_padding_and_holes(name: str) -> None:
    """A convolution reads zeros at padding and in holes, where transformers sets embeddings to zero."""
    theirs, ours = pair(**VARIANTS[name])
    assert shaped_difference(theirs, ours, batch_of(side="left")) <= TOLERANCE
    batch = batch_of((17, 1, 30, 9))
    mask = batch.attention_mask.clone()
    mask[0, 5:8] = mask[2, 4:9] = mask[2, 20] = mask[3, 4] = 0
    holed = HFBatch(input_ids=batch.input_ids, attention_mask=mask, token_type_ids=batch.token_type_ids)
    assert shaped_difference(theirs, ours, holed) <= TOLERANCE


@pytest.mark.parametrize("layers", [1, pytest.param(2, marks=LONG)])
def test_a_convolution_after_the_layer_that_selects_tokens(layers: int) -> None:
    theirs, ours = pair("sequence", **CONVOLUTION, num_hidden_layers=layers)
    assert packed_difference(theirs, ours, batch_of()) <= TOLERANCE


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=LONG) for name in ("v3", "large v2", "own layers for distances")] + ["all at once"],
)
def test_gradients_of_variants(name: str) -> None:
    """In units of the largest value."""
    theirs, ours = pair(**VARIANTS[name])
    batch = batch_of((17, 1, 30, 9, 2, 16))
    real = batch.attention_mask.bool()
    theirs(**batch.inputs(FAMILY)).logits[real].square().sum().backward()
    ours(packed_batch(ours, batch)).square().sum().backward()
    expected = in_our_names({key: value.grad for key, value in theirs.named_parameters()}, theirs, "token")
    gradients = {key: value.grad for key, value in ours.named_parameters()}
    assert gradients.keys() == expected.keys()
    largest = max(float(value.abs().max()) for value in expected.values())
    assert max(float((gradients[key] - expected[key]).abs().max()) for key in gradients) <= 1e-9 * largest


def test_stock_transformers_rounds_one_factor_to_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests lift this rounding; with it, logits differ by what float32 explains, and no more."""
    theirs, ours = pair()
    batch = batch_of()
    assert shaped_difference(theirs, ours, batch) <= TOLERANCE
    monkeypatch.setattr(stock, "scaled_size_sqrt", STOCK_ROOT_OF_SIZE)
    assert TOLERANCE < shaped_difference(theirs, ours, batch) <= 1e-6


@pytest.mark.parametrize(("buckets", "greatest"), [(256, 512), (256, 1024), (16, 48), (16, 512), (64, 100), (32, 4096)])
def test_buckets_are_those_of_transformers(buckets: int, greatest: int) -> None:
    """The published models have 256 buckets for distances up to 512; inputs may be longer."""
    length = greatest + 200
    distances = torch.arange(-length, length)
    expected = stock.make_log_bucket_position(distances, buckets, greatest).long()
    assert torch.equal(log_buckets(distances, buckets=buckets, max_distance=greatest), expected)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_gradients_are_the_same_bits_twice(threads: int) -> None:
    torch.set_num_threads(threads)
    try:
        _, ours = pair(**CONVOLUTION)
        ours = ours.float().train()
        batch = packed_batch(ours, batch_of(LENGTHS * 2))

        def gradients() -> tuple[Tensor, ...]:
            torch.manual_seed(5)
            return torch.autograd.grad(ours(batch).square().sum(), list(ours.parameters()))

        first = gradients()
        assert all(torch.equal(gradient, other) for gradient, other in zip(first, gradients(), strict=True))
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pos_att_type": "c2p|p2p"}, "pos_att_type = 'c2p|p2p' is not supported, only c2p and p2c are"),
        ({"pos_att_type": 3}, "pos_att_type = 3, expected a list of c2p and p2c"),
        ({"pos_att_type": None}, "relative_attention = True with pos_att_type = None is not supported"),
        ({"relative_attention": False}, "relative_attention = False with pos_att_type = .* is not supported"),
        ({"relative_attention": "yes"}, "relative_attention = 'yes', expected true or false"),
        ({"position_buckets": 2.5}, "position_buckets = 2.5, expected an integer"),
        ({"position_buckets": 1}, "position_buckets = 1 for distances up to 48 is not supported"),
        ({"max_relative_positions": 8}, "position_buckets = 16 for distances up to 8 is not supported"),
        ({"conv_kernel_size": 4}, "conv_kernel_size = 4, expected an odd number"),
        ({"conv_kernel_size": 3, "conv_act": "swish"}, "conv_act = 'swish'"),
        ({"max_relative_positions": 10**400}, "max_relative_positions = 1000.* expected at most 2147483647"),
        ({"embedding_size": 10**9}, "embedding_size = 1000000000, expected at most 1048576"),
        ({"conv_groups": 2}, "conv_groups = 2 is not supported, only 1 is"),
        ({"pooler_hidden_act": "tanh"}, "pooler_hidden_act = 'tanh' is not supported, only 'gelu' is"),
        ({"pooler_hidden_size": 20}, "pooler_hidden_size = 20 is not supported, only 36 is"),
        ({"attention_head_size": 8}, "attention_head_size = 8 is not supported, only 9 is"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        encoder_config(hf_config(FAMILY).to_dict() | changes)


def changed(**fields: Any) -> Callable[[TaskModel, pytest.MonkeyPatch], None]:
    """The options of distances read wrongly."""

    def edit(model: TaskModel, monkeypatch: pytest.MonkeyPatch) -> None:
        module = model.encoder.positions
        module.config = replace(module.config, **fields)

    return edit


def patched(name: str, change: Callable[[Any], Any]) -> Callable[[TaskModel, pytest.MonkeyPatch], None]:
    """A function of encoder/positions.py that gives something else."""
    return lambda model, monkeypatch: monkeypatch.setattr(positions, name, change(getattr(positions, name)))


def scaled_as_bert(model: TaskModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in model.encoder.layers:
        layer.attention.scale = None


def projections_exchanged(model: TaskModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of distances in the place of their queries."""
    original = DisentangledScores.apply

    def exchanged(self: DisentangledScores, attention: Any, qkv: Tensor) -> Any:
        def swapped(rows: Tensor) -> Tensor:
            query, key, value = attention.project(rows).unbind(1)
            return torch.stack([key, query, value], dim=1)

        return original(self, SimpleNamespace(project=swapped, heads=attention.heads), qkv)

    monkeypatch.setattr(DisentangledScores, "apply", exchanged)


def norm_skipped(model: TaskModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model.encoder.positions.norm = nn.Identity()


def other_neighbours(change: Callable[[Tensor], Tensor]) -> Callable[[TaskModel, pytest.MonkeyPatch], None]:
    """The convolution with its weights in another order."""

    def edit(model: TaskModel, monkeypatch: pytest.MonkeyPatch) -> None:
        convolution = model.encoder.convolution.convolution
        convolution.weight = nn.Parameter(change(convolution.weight.detach()))

    return edit


def neighbours_of_other_sequences(model: TaskModel, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Convolution.forward

    def one_sequence(self: Convolution, embedded: Tensor, hidden: Tensor, layout: Any, selection: Any = None) -> Tensor:
        if isinstance(layout, Packed):
            layout = replace(layout, sequence_of_row=torch.zeros_like(layout.sequence_of_row))
        else:
            layout = Padded(batch=1, length=len(hidden), mask=torch.ones(1, len(hidden), dtype=torch.bool))
        return original(self, embedded, hidden, layout, selection)

    monkeypatch.setattr(Convolution, "forward", one_sequence)


def after_the_second_layer(model: TaskModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The convolution reads the first layer's output and comes after the second one."""
    convolution, states = model.encoder.convolution, []
    model.encoder.convolution = None
    model.encoder.layers[0].register_forward_hook(lambda module, inputs, output: states.append((output, inputs[1])))
    model.encoder.layers[1].register_forward_hook(
        lambda module, inputs, output: convolution(states[-1][0], output, states[-1][1])
    )


FAULTS: dict[str, Callable[[TaskModel, pytest.MonkeyPatch], None]] = {
    "scores scaled as BERT's": scaled_as_bert,
    "no keys of distances": changed(content_to_position=False),
    "no queries of distances": changed(position_to_content=False),
    "half as many buckets of their own": patched(
        "log_buckets", lambda right: lambda distances, **of: right(distances, **(of | {"buckets": 8}))
    ),
    "a bucket begins one later": patched(
        "log_buckets", lambda right: lambda distances, **of: right(distances, **(of | {"max_distance": 49}))
    ),
    "buckets rounded down": patched(
        "log_buckets",
        lambda right: lambda distances, **of: right(distances, **of) - (distances.abs() > 9) * distances.sign(),
    ),
    "distances with the other sign": patched(
        "log_buckets", lambda right: lambda distances, **of: -right(distances, **of)
    ),
    "distances not shared in buckets": patched("log_buckets", lambda right: lambda distances, **of: distances),
    "products not moved below each other": patched(
        "gather_relative", lambda right: lambda content, indices: right(content, indices.roll(1, -1))
    ),
    "products of the other tokens": patched(
        "gather_relative", lambda right: lambda content, indices: right(content, indices).transpose(2, 3)
    ),
    "keys and queries of distances exchanged": projections_exchanged,
    "distances not normalised": norm_skipped,
    "neighbours reversed": other_neighbours(lambda weight: weight.flip(2)),
    "inputs and outputs of the convolution exchanged": other_neighbours(lambda weight: weight.transpose(0, 1)),
    "neighbours of other sequences": neighbours_of_other_sequences,
    "convolution after the second layer": after_the_second_layer,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each makes parity fail by ten times its tolerance or more, padded and packed."""
    theirs, ours = pair(**CONVOLUTION)
    FAULTS[name](ours, monkeypatch)
    batch = batch_of()
    assert not shaped_difference(theirs, ours, batch) <= 10 * TOLERANCE
    assert not packed_difference(theirs, ours, batch) <= 10 * TOLERANCE


def saved_as_published(folder: Path, tokenizer: PreTrainedTokenizerBase) -> DebertaV2ForMaskedLM:
    """A folder like those of v3: pytorch_model.bin in half precision, with the head over the vocabulary under the names
    that its config does not state, the discriminator, and a table of positions that is not used.
    """
    config = hf_config(FAMILY, vocab_size=len(tokenizer), num_hidden_layers=2, legacy=False)
    model = DebertaV2ForMaskedLM(config).half()
    widen(model, seed=3)
    config.save_pretrained(folder)
    edit_config(folder, legacy=True, architectures=None, pos_att_type="p2c|c2p")
    tokenizer.save_pretrained(folder)
    hidden = torch.zeros(36, 36).half()
    further = {
        "deberta.embeddings.position_embeddings.weight": hidden,
        "deberta.embeddings.position_ids": torch.arange(48)[None],
        "mask_predictions.dense.weight": hidden,
        "mask_predictions.LayerNorm.weight": hidden[0],
        "mask_predictions.classifier.bias": hidden[0, :1],
    }
    torch.save(model.state_dict() | further, folder / "pytorch_model.bin")
    return model.float().eval()


@with_current_names
@torch.no_grad()
def test_files_as_they_are_published(tmp_path: Path, deberta_tokenizer: PreTrainedTokenizerBase) -> None:
    """The head over the vocabulary has two sets of names; what is saved has those that its config states."""
    published = tmp_path / "published"
    published.mkdir()
    theirs = saved_as_published(published, deberta_tokenizer)
    ids = torch.tensor([deberta_tokenizer("the ferry leaves the harbour")["input_ids"]])
    ours = TaskModel.from_pretrained(published, task=MaskedLanguageModeling.of(max_length=16))
    assert ours.load_report.new == ()
    assert ours.load_report.ignored == ("deberta.embeddings.position_ids",)
    assert [name.rpartition(".")[0] for name in ours.load_report.dropped] == [
        "deberta.embeddings.position_embeddings",
        *(f"mask_predictions.{module}" for module in ("LayerNorm", "classifier", "dense")),
    ]
    expected = theirs(ids).logits
    torch.testing.assert_close(ours(ids), expected, rtol=0, atol=1e-3)
    ours.save_pretrained(tmp_path / "saved")
    names = load_file(tmp_path / "saved" / "model.safetensors").keys()
    assert "cls.predictions.transform.dense.weight" in names
    again, report = AutoModelForMaskedLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(report.values())
    torch.testing.assert_close(again.eval()(ids).logits, expected, rtol=0, atol=1e-3)

    edit_config(published, legacy=False)
    current = TaskModel.from_pretrained(published, task=MaskedLanguageModeling.of(max_length=16))
    assert torch.equal(current(ids), ours(ids))
    current.save_pretrained(tmp_path / "current")
    again, report = AutoModelForMaskedLM.from_pretrained(tmp_path / "current", output_loading_info=True)
    assert not any(report.values())
    torch.testing.assert_close(again.eval()(ids).logits, expected, rtol=0, atol=1e-3)
    other = TaskModel.from_pretrained(published, task=SequenceClassification.of(labels=("a", "b"), max_length=16))
    assert {name.rpartition(".")[0] for name in other.load_report.new} == {"pooler.dense", "classifier"}


def test_a_training_step_waits_for_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device a copy to the host, or a tensor that was left there, is an error."""
    _, ours = pair("sequence", **VARIANTS["all at once"])
    batch = packed_batch(ours, batch_of(), labels=[[float(i % 3)] for i in range(len(LENGTHS))])
    ours = ours.float().train().to(META)
    with NoWaiting():
        moved = batch.to(META)
        (loss,) = ours.task.output.loss(ours(moved).float(), moved)
        loss.total.backward()
    assert all(parameter.grad is not None for parameter in ours.parameters())


@pytest.mark.slow
def test_a_stopped_run_with_every_dropout_ends_with_the_same_bits(
    tmp_path: Path, deberta_tokenizer: PreTrainedTokenizerBase
) -> None:
    save_checkpoint(tmp_path / "base", FAMILY, deberta_tokenizer)
    edit_config(tmp_path / "base", pooler_dropout=0.1, cls_dropout=0.1)
    run(tmp_path / "whole", tmp_path / "base")
    stopped(3, tmp_path / "run", tmp_path / "base")
    run(tmp_path / "run", tmp_path / "base", head_seed=5)
    assert digests(tmp_path / "run") == digests(tmp_path / "whole")
    assert events(tmp_path / "run") == events(tmp_path / "whole")
