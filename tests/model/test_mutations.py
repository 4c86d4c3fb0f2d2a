"""Each deliberate fault makes parity fail by far: what the parity tests would miss stands in this list.

A fault is put into a model that is right without it, into the key map it is loaded with, or into a function of
the package; then the padded call or the packed path must differ from transformers by ten times the tolerance.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from bert_tasks.encoder import attention, positions
from bert_tasks.encoder.config import Activation
from bert_tasks.encoder.heads import pooled
from bert_tasks.encoder.layers import Layer, PreNormLayer
from bert_tasks.encoder.linear import ACTIVATIONS
from bert_tasks.encoder.packing import Layout, Packed, Selection
from bert_tasks.families import parameter_map
from bert_tasks.model import pretrained_module
from bert_tasks.model.task_model import TaskModel
from support import parity
from support.hf_models import AFTER_PADDING, EVERY_HEAD, ROBERTAS, Head, HFBatch, hf_model, random_batch
from support.parity import Model, difference, hf_output, ours_from, packed_output, shaped_output
from support.sampling import one_of_each

DETECTED = 10 * 1e-10
LENGTHS = (17, 1, 48, 9, 2, 46, 17, 30, 16)
# Each differs from the others in more than names; of ModernBERT there are faults in tests/families/test_modernbert.py.
FAMILIES = (
    *("bert", "roberta", "distilbert", "albert", "electra", "deberta-v2", "mpnet"),
    *("megatron-bert", "roberta-prelayernorm", "xlm-roberta-xl"),
)
PRE_NORM = ("roberta-prelayernorm", "xlm-roberta-xl", "megatron-bert")
POST_NORM = tuple(family for family in FAMILIES if family not in PRE_NORM)
WITH_EMBEDDING_NORM = tuple(family for family in FAMILIES if family not in PRE_NORM[1:])
PROJECTED = ("albert", "electra")
# Else these faults end in an error of shapes, or the family has no table of positions.
ABSOLUTE = tuple(family for family in FAMILIES if family not in ("mpnet", "deberta-v2"))
WITH_TABLE = (*ABSOLUTE, "mpnet")

Names = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault in a loaded model, or (with ``patch``) in the package.

    Attributes:
        edit: breaks a model.
        patch: breaks a function of the package.
        families: those that the fault can stand in.
        only: the one path that uses the broken part.
        head: the task head to look at.
    """

    edit: Callable[[TaskModel], None] = lambda model: None
    patch: Callable[[pytest.MonkeyPatch], None] = lambda monkeypatch: None
    families: tuple[str, ...] = FAMILIES
    only: Literal["padded", "packed"] | None = None
    head: Head = "sequence"


def layers(model: TaskModel) -> list[Layer]:
    return [layer for layer in model.encoder.layers if isinstance(layer, Layer)]


def swapped_names(first: str, other: str) -> Callable[[Names], Names]:
    """The key map with the sources of two modules exchanged."""

    def swap(names: Names) -> Names:
        def partner(name: str) -> str:
            return name.replace(first, other) if first in name else name.replace(other, first)

        return {name: names.get(partner(name), sources) for name, sources in names.items()}

    return swap


def reordered_qkv(*order: int) -> Callable[[Names], Names]:
    def reorder(names: Names) -> Names:
        return {
            name: tuple(sources[i] for i in order) if len(sources) == 3 else sources for name, sources in names.items()
        }

    return reorder


KEY_MAP_FAULTS: dict[str, Callable[[Names], Names]] = {
    "attention_norm and output_norm swapped": swapped_names("attention_norm", "output_norm"),
    "query and key swapped": reordered_qkv(1, 0, 2),
    "key and value swapped": reordered_qkv(0, 2, 1),
    "query, key and value rotated": reordered_qkv(1, 2, 0),
    "two layers swapped": swapped_names("layers.0.", "layers.1."),
    "head and attention output swapped": swapped_names("head.dense", "encoder.layers.0.attention.output"),
}


def of_layers(change: Callable[[Any], None]) -> Callable[[TaskModel], None]:
    def edit(model: TaskModel) -> None:
        for layer in layers(model):
            change(layer)

    return edit


def set_activation(module: Any, change: Mapping[Activation, Activation]) -> None:
    module.activation = change[module.activation]


def set_eps(*, after: float, only: str = "") -> Callable[[TaskModel], None]:
    def edit(model: TaskModel) -> None:
        for name, module in model.named_modules():
            if isinstance(module, nn.LayerNorm) and name.endswith(only):
                module.eps = after

    return edit


def set_layer_order(change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Callable[[TaskModel], None]:
    return lambda model: setattr(model.encoder, "layer_order", change(model.encoder.layer_order))


def replace_module(path: str, module: nn.Module) -> Callable[[TaskModel], None]:
    return lambda model: model.set_submodule(path, module, strict=True)


def zero(*endings: str) -> Callable[[TaskModel], None]:
    """Sets the parameters of these names to 0."""

    def edit(model: TaskModel) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(endings):
                    parameter.zero_()

    return edit


def with_ids(table: str, change: Callable[[Tensor], Tensor]) -> Callable[[TaskModel], None]:
    """Changes the ids that a table of embeddings is asked for."""

    def edit(model: TaskModel) -> None:
        module = getattr(model.encoder.embeddings, table)
        module.register_forward_pre_hook(lambda module, inputs: (change(inputs[0]) % module.num_embeddings,))

    return edit


def positions_from_zero(model: TaskModel) -> None:
    model.config = replace(model.config, position_offset=0)


@torch.no_grad()
def distances_backwards(model: TaskModel) -> None:
    """Keys before the query have the buckets of those after it."""
    bias = model.encoder.positions
    bias.bias.weight.copy_(bias.bias.weight.roll(16, dims=0))


def bucket_starts_early(distance: int) -> Callable[[pytest.MonkeyPatch], None]:
    starts = tuple(start - (start == distance) for start in positions._BUCKET_STARTS)
    return lambda monkeypatch: monkeypatch.setattr(positions, "_BUCKET_STARTS", starts)


def norm_without_residual(norm: str, dense: str) -> Callable[[TaskModel], None]:
    """The norm sees the output of ``dense`` alone."""

    def edit(model: TaskModel) -> None:
        for layer in layers(model):
            seen: list[Tensor] = []
            layer.get_submodule(dense).register_forward_hook(
                lambda module, inputs, output, seen=seen: seen.append(output)
            )
            layer.get_submodule(norm).register_forward_pre_hook(lambda module, inputs, seen=seen: (seen.pop(),))

    return edit


def wrong_layer_forward(
    layer: Layer, hidden: Tensor, layout: Layout, selection: Any = None, positions: Any = None
) -> Tensor:
    """The norms before attention and feed-forward, as in later architectures."""
    context = layer.attention.output(layer.attention(layer.attention_norm(hidden), layout, positions=positions))
    hidden = hidden + context
    hidden = hidden + layer.output(ACTIVATIONS[layer.activation](layer.intermediate(layer.output_norm(hidden))))
    return hidden if selection is None else hidden.index_select(0, selection.rows)


def residual_of_other_rows(
    layer: Layer, hidden: Tensor, layout: Layout, selection: Any = None, positions: Any = None
) -> Tensor:
    """The layer with the residual of the first rows instead of the rows that are read."""
    context = layer.attention(hidden, layout, positions=positions)
    if selection is not None:
        context, hidden = context.index_select(0, selection.rows), hidden[: len(selection.rows)]
    hidden = layer.attention_norm(hidden + layer.attention.output(context))
    hidden = layer.output_norm(hidden + layer.output(ACTIVATIONS[layer.activation](layer.intermediate(hidden))))
    return hidden


def patch_layer(forward: Callable[..., Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: monkeypatch.setattr(Layer, "forward", forward)


def patch_sdpa(**changes: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """Fixes arguments of the attention kernel."""

    def sdpa(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, **{**arguments, **changes})

    fake = SimpleNamespace(scaled_dot_product_attention=sdpa)
    return lambda monkeypatch: monkeypatch.setattr(attention, "F", fake)


def attention_in_single_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    def sdpa(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        mask = arguments.pop("attn_mask")
        if mask is not None and mask.is_floating_point():
            mask = mask.float()
        single = F.scaled_dot_product_attention(query.float(), key.float(), value.float(), attn_mask=mask, **arguments)
        return single.to(query.dtype)

    monkeypatch.setattr(attention, "F", SimpleNamespace(scaled_dot_product_attention=sdpa))


def one_group_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """All packed rows attend to each other, as if they were one sequence."""

    def everything(qkv: Tensor, layout: Packed, *, dropout: float, window: int | None, **added: Any) -> Tensor:
        return attention.attend_padded(qkv, 1, qkv.shape[0], None, dropout, **added)

    monkeypatch.setattr("bert_tasks.encoder.layers.attend", everything)


def never_regrouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Context rows stay in the order of the padded groups, cut to the number of rows."""
    monkeypatch.setattr(attention, "_unpad", lambda rows, scatter: rows[: len(scatter)])


def dropout_in_evaluation(model: TaskModel) -> None:
    torch.manual_seed(0)
    model.train()


@torch.no_grad()
def outputs_reversed(model: TaskModel) -> None:
    model.head.output.weight.copy_(model.head.output.weight.flip(0))


def first_rows_by_length(monkeypatch: pytest.MonkeyPatch) -> None:
    original = pooled.select_first_tokens

    def by_length(layout: Layout) -> Selection:
        return Selection(rows=layout.cu_seqlens[:-1].long()) if isinstance(layout, Packed) else original(layout)

    monkeypatch.setattr(pooled, "select_first_tokens", by_length)


def second_token_read(monkeypatch: pytest.MonkeyPatch) -> None:
    original = pooled.select_first_tokens
    monkeypatch.setattr(pooled, "select_first_tokens", lambda layout: Selection(rows=original(layout).rows.roll(1)))


def pooler_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(head: pooled.SequenceHead, hidden: Tensor, layout: Layout, embeddings: Tensor) -> Tensor:
        logits: Tensor = head.output(hidden)
        return logits

    monkeypatch.setattr(pooled.SequenceHead, "forward", forward)


def columns_as_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        pretrained_module,
        "default_positions",
        lambda config, ids: torch.arange(ids.shape[1])[None] % config.max_position_embeddings,
    )


FAULTS: dict[str, Fault] = {
    "gelu in its other form": Fault(
        edit=of_layers(lambda layer: set_activation(layer, {"gelu": "gelu_new", "gelu_new": "gelu"}))
    ),
    "relu for gelu": Fault(edit=of_layers(lambda layer: set_activation(layer, {"gelu": "relu", "gelu_new": "relu"}))),
    "eps 1e-5 for 1e-12": Fault(
        edit=set_eps(after=1e-5), families=tuple(f for f in FAMILIES if f not in AFTER_PADDING)
    ),
    "eps 1e-12 for 1e-5": Fault(edit=set_eps(after=1e-12), families=AFTER_PADDING),
    "eps 1e-5 in one kind of norm": Fault(edit=set_eps(after=1e-5, only="output_norm"), families=("bert",)),
    "ALBERT's groups alternate": Fault(edit=set_layer_order(lambda order: (0, 1, 0, 1)), families=("albert",)),
    "ALBERT's groups reversed": Fault(edit=set_layer_order(lambda order: order[::-1]), families=("albert",)),
    "ALBERT uses one group": Fault(edit=set_layer_order(lambda order: (0,) * 4), families=("albert",)),
    "the last layer skipped": Fault(edit=set_layer_order(lambda order: order[:-1])),
    "a middle layer skipped": Fault(edit=set_layer_order(lambda order: order[:1] + order[2:])),
    "two neighbours out of order": Fault(edit=set_layer_order(lambda order: (order[0], order[2], order[1], order[3]))),
    "positions ignored": Fault(edit=with_ids("position", torch.zeros_like), families=WITH_TABLE),
    "RoBERTa's positions from 0": Fault(edit=positions_from_zero, families=AFTER_PADDING),
    "RoBERTa's positions are columns": Fault(patch=columns_as_positions, families=AFTER_PADDING, only="padded"),
    "positions run across sequences": Fault(
        edit=with_ids("position", lambda ids: torch.arange(len(ids))), families=WITH_TABLE, only="packed"
    ),
    "scores of distances left out": Fault(edit=zero("positions.bias.weight"), families=("mpnet",)),
    "distances counted backwards": Fault(edit=distances_backwards, families=("mpnet",)),
    "a bucket begins one token early": Fault(patch=bucket_starts_early(12), families=("mpnet",)),
    "the farthest bucket begins one token early": Fault(patch=bucket_starts_early(46), families=("mpnet",)),
    "segments ignored": Fault(edit=with_ids("token_type", torch.zeros_like), families=("bert", "albert", "electra")),
    "the only segment left out": Fault(edit=zero("token_type.weight"), families=ROBERTAS),
    "embeddings not normalised": Fault(
        edit=replace_module("encoder.embeddings.norm", nn.Identity()), families=WITH_EMBEDDING_NORM
    ),
    "the last norm left out": Fault(edit=replace_module("encoder.norm", nn.Identity()), families=PRE_NORM),
    "projection without bias": Fault(edit=zero("projection.bias"), families=PROJECTED),
    "mask ignored": Fault(patch=patch_sdpa(attn_mask=None)),
    "attention not scaled": Fault(patch=patch_sdpa(scale=1.0)),
    "attention is causal": Fault(patch=patch_sdpa(attn_mask=None, is_causal=True)),
    "attention in single precision": Fault(patch=attention_in_single_precision),
    "another number of heads": Fault(
        edit=of_layers(lambda layer: setattr(layer.attention, "heads", 6)), families=ABSOLUTE
    ),
    "value bias left out": Fault(edit=zero("qkv.bias")),
    "no residual around attention": Fault(
        edit=norm_without_residual("attention_norm", "attention.output"), families=POST_NORM
    ),
    "no residual around feed-forward": Fault(edit=norm_without_residual("output_norm", "output"), families=POST_NORM),
    "pre-norm layers": Fault(patch=patch_layer(wrong_layer_forward), families=POST_NORM),
    "post-norm layers": Fault(
        patch=lambda monkeypatch: monkeypatch.setattr(PreNormLayer, "after_attention", Layer.after_attention),
        families=PRE_NORM,
    ),
    "residual of other rows": Fault(patch=patch_layer(residual_of_other_rows)),
    "dropout in evaluation": Fault(edit=dropout_in_evaluation),
    "head activation": Fault(
        edit=lambda model: set_activation(model.head, {"tanh": "gelu", "gelu": "tanh", "relu": "gelu"}),
    ),
    "head gelu in tanh form": Fault(
        edit=lambda model: set_activation(model.head, {"gelu": "gelu_new"}), families=("electra",)
    ),
    "pooler skipped": Fault(patch=pooler_skipped),
    "head reads another sequence": Fault(patch=second_token_read),
    "logits in the order of rows": Fault(patch=first_rows_by_length, only="packed"),
    "packed sequences not separated": Fault(patch=one_group_of_all, families=ABSOLUTE, only="packed"),
    "groups not put back": Fault(patch=never_regrouped, only="packed"),
    "start and end exchanged": Fault(edit=outputs_reversed, head="span"),
    "token bias left out": Fault(edit=zero("head.output.bias"), head="token"),
}
CASES = [(name, family) for name, fault in FAULTS.items() for family in fault.families]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A transformers model with a batch and what it computes for it; shared by all faults, so never changed."""

    model: PreTrainedModel
    batch: HFBatch
    output: Tensor

    @torch.no_grad()
    def differences(self, ours: Model) -> tuple[float, float]:
        """Of the padded call and of the packed path."""
        mask = self.batch.attention_mask
        return (
            difference(self.output, shaped_output(ours, self.batch), mask),
            difference(self.output, packed_output(ours, self.batch), mask),
        )


@cache
def reference(family: str, head: Head) -> Reference:
    model = hf_model(family, head)
    batch = random_batch(family, lengths=LENGTHS)
    with torch.no_grad():
        return Reference(model=model, batch=batch, output=hf_output(model, batch))


def detected(apart: float) -> bool:
    """A difference that is not a number would fail a parity test too."""
    return not apart <= DETECTED


@pytest.mark.parametrize(
    ("family", "head"), one_of_each([case for case in EVERY_HEAD if case[0] in FAMILIES and case[1] != "base"])
)
def test_without_a_fault_there_is_no_difference(family: str, head: Head) -> None:
    right = reference(family, head)
    assert not any(map(detected, right.differences(ours_from(right.model, head))))


@pytest.mark.parametrize(("name", "family"), one_of_each(CASES))
def test_faults_in_the_model(name: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    right = reference(family, fault.head)
    ours = ours_from(right.model, fault.head)
    fault.edit(ours)
    fault.patch(monkeypatch)
    padded, packed = right.differences(ours)
    assert detected(padded) or fault.only == "packed"
    assert detected(packed) or fault.only == "padded"


@pytest.mark.parametrize(("name", "family"), one_of_each([*product(KEY_MAP_FAULTS, FAMILIES)]))
def test_faults_in_the_key_map(name: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = reference(family, "sequence")

    def faulty(*arguments: Any, **settings: Any) -> Names:
        return KEY_MAP_FAULTS[name](parameter_map(*arguments, **settings))

    monkeypatch.setattr(parity, "parameter_map", faulty)
    assert all(map(detected, right.differences(ours_from(right.model, "sequence"))))


@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("bert", {"layer_norm_eps": 1e-5}),
        *((family, {"pad_token_id": 0}) for family in ROBERTAS),
        ("distilbert", {"activation": "relu"}),
        ("albert", {"hidden_act": "gelu"}),
        ("electra", {"num_attention_heads": 6}),
    ],
)
def test_faults_in_the_config(family: str, field: dict[str, Any]) -> None:
    """Ours is built from another config than the reference: what a wrongly read field would do."""
    right = reference(family, "sequence")
    theirs = hf_model(family, "sequence")
    for name, value in field.items():
        assert getattr(theirs.config, name) != value
        setattr(theirs.config, name, value)
    assert all(map(detected, right.differences(ours_from(theirs, "sequence"))))
