"""Heads and pooling: packed equals padded equals one sequence at a time; a head computes only the rows it reads."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bert_tasks.encoder.config import EncoderConfig, HeadConfig, TokenPooling
from bert_tasks.encoder.heads import (
    CRFHead,
    Head,
    PerTokenHead,
    SequenceHead,
    VocabularyHead,
    VocabularyOutput,
    select_first_tokens,
    vocabulary,
)
from bert_tasks.encoder.heads.pooled import softmax_rows
from bert_tasks.encoder.layers import Layer, TransformerEncoder, initialize
from bert_tasks.encoder.packing import Packed, Padded, Selection, pack

LENGTHS = (5, 1, 7, 3, 7, 16, 15)
POOLINGS = get_args(TokenPooling)
CONFIG = EncoderConfig(
    vocab_size=50,
    hidden_size=12,
    embedding_size=12,
    project_embeddings=False,
    num_attention_heads=2,
    intermediate_size=16,
    hidden_act="gelu",
    layer_order=(0, 1, 2),
    max_position_embeddings=32,
    position_offset=0,
    type_vocab_size=2,
    pad_token_id=0,
    layer_norm_eps=1e-12,
    hidden_dropout_prob=0.1,
    attention_output_dropout=0.1,
    feed_forward_dropout=0.1,
    attention_probs_dropout_prob=0.1,
    initializer_range=0.3,
    head=HeadConfig(activation="tanh", sequence_dropout=0.1, token_dropout=0.1),
)
TABLE = torch.zeros(50, 12)  # word embeddings, which these heads do not use


def packed_layout(lengths: Sequence[int] = LENGTHS) -> Packed:
    ids = [[0] * length for length in lengths]
    return pack(ids, ids, position_offset=0).layout


def states(lengths: Sequence[int] = LENGTHS, *, seed: int = 0) -> list[Tensor]:
    """Hidden states of each sequence, in the caller's order."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, 12, generator=generator, dtype=torch.float64) for length in lengths]


def packed_rows(sequences: Sequence[Tensor], layout: Packed) -> Tensor:
    places = layout.caller_order.tolist()
    return torch.cat([sequences[places.index(number)] for number in range(len(sequences))])


def padded_rows(sequences: Sequence[Tensor], *, side: str = "right") -> tuple[Tensor, Padded]:
    """Rows with rubbish at padding, which nothing may read."""
    longest = max(len(rows) for rows in sequences)
    rectangle = torch.full((len(sequences), longest, 12), 1e3, dtype=torch.float64)
    mask = torch.zeros(len(sequences), longest, dtype=torch.bool)
    for i, rows in enumerate(sequences):
        first = 0 if side == "right" else longest - len(rows)
        rectangle[i, first : first + len(rows)] = rows
        mask[i, first : first + len(rows)] = True
    return rectangle.flatten(0, 1), Padded(batch=len(sequences), length=longest, mask=mask)


def wide(module: torch.nn.Module) -> None:
    torch.manual_seed(3)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.4)


def pooling_head(pooling: TokenPooling) -> SequenceHead:
    head = SequenceHead(CONFIG, 3, pooling=pooling).double().eval()
    wide(head)
    return head


def pooled_one_by_one(head: SequenceHead, sequences: Sequence[Tensor]) -> Tensor:
    pooled = []
    for rows in sequences:
        if head.pooling == "mean":
            pooled.append(rows.mean(0))
        elif head.pooling == "max":
            pooled.append(rows.max(0).values)
        else:
            pooled.append((torch.softmax(head.score(rows), dim=0) * rows).sum(0))
    logits: Tensor = head.output(torch.stack(pooled))
    return logits


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("lengths", [LENGTHS, (1,)])
def test_pooling_reads_each_sequence_by_itself(pooling: TokenPooling, lengths: tuple[int, ...]) -> None:
    head, sequences = pooling_head(pooling), states(lengths)
    expected = pooled_one_by_one(head, sequences)
    layout = packed_layout(lengths)
    packed = head(packed_rows(sequences, layout), layout, TABLE)
    torch.testing.assert_close(packed, expected, rtol=0, atol=1e-12)
    for side in ("left", "right"):
        torch.testing.assert_close(head(*padded_rows(sequences, side=side), TABLE), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_gradients_of_pooling(pooling: TokenPooling) -> None:
    head, layout = pooling_head(pooling), packed_layout()
    sequences = [rows.requires_grad_() for rows in states()]
    leaves = [*sequences, *head.parameters()]
    expected = torch.autograd.grad(pooled_one_by_one(head, sequences).square().sum(), leaves)
    packed = torch.autograd.grad(head(packed_rows(sequences, layout), layout, TABLE).square().sum(), leaves)
    padded = torch.autograd.grad(head(*padded_rows(sequences), TABLE).square().sum(), leaves)
    for first, two, three in zip(expected, packed, padded, strict=True):
        torch.testing.assert_close(two, first, rtol=0, atol=1e-10)
        torch.testing.assert_close(three, first, rtol=0, atol=1e-10)


def test_attention_weights_survive_large_scores() -> None:
    """exp(800) overflows: the largest score of each sequence is taken off first."""
    layout = packed_layout((3, 2))
    weights = softmax_rows(torch.tensor([800.0, 0.0, -800.0, 900.0, 900.0], dtype=torch.float64), layout)
    assert weights.tolist() == [1.0, 0.0, 0.0, 0.5, 0.5]


def test_rows_of_padding_get_no_weight() -> None:
    mask = torch.tensor([[True, True, False], [False, False, True]])
    weights = softmax_rows(torch.zeros(6, dtype=torch.float64), Padded(batch=2, length=3, mask=mask))
    assert weights.tolist() == [0.5, 0.5, 0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("side", ["left", "right"])
def test_first_tokens(side: str) -> None:
    sequences = states()
    expected = torch.stack([rows[0] for rows in sequences])
    layout = packed_layout()
    assert torch.equal(packed_rows(sequences, layout)[select_first_tokens(layout).rows], expected)
    rows, padded = padded_rows(sequences, side=side)
    assert torch.equal(rows[select_first_tokens(padded).rows], expected)


def stack() -> TransformerEncoder:
    model = TransformerEncoder(CONFIG).double().eval()
    initialize(model, CONFIG)
    return model


def inputs(lengths: Sequence[int] = LENGTHS) -> tuple[Tensor, Tensor, Tensor, Packed]:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, 50, (length,), generator=generator).tolist() for length in lengths]
    batch = pack(ids, [[i % 2 for i in range(length)] for length in lengths], position_offset=0)
    return batch.input_ids, batch.position_ids, batch.token_type_ids, batch.layout


@pytest.mark.parametrize("rows", [[0], [3, 1, 2], [53, 0, 53], list(range(54))])
def test_the_last_layer_computes_the_rows_that_are_read(rows: list[int]) -> None:
    model, selection = stack(), Selection(rows=torch.tensor(rows))
    all_rows = model(*inputs())
    read = model(*inputs(), selection=selection)
    torch.testing.assert_close(read, all_rows[selection.rows], rtol=0, atol=1e-12)
    of_read, of_all = (
        torch.autograd.grad(output.square().sum(), list(model.parameters()), allow_unused=True)
        for output in (read, all_rows[selection.rows])
    )
    for value, other in zip(of_read, of_all, strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=1e-10)


def test_the_rest_of_the_last_layer_is_skipped() -> None:
    model, seen = stack(), []
    for layer in model.layers:
        assert isinstance(layer, Layer)
        layer.intermediate.register_forward_pre_hook(lambda module, arguments: seen.append(len(arguments[0])))
    model(*inputs(), selection=Selection(rows=torch.tensor([4, 2])))
    assert seen == [54, 54, 2]


@pytest.mark.parametrize(
    ("head", "rows"),
    [
        (SequenceHead(CONFIG, 3), len(LENGTHS)),
        (SequenceHead(CONFIG, 3, pooling="mean"), None),
        (PerTokenHead(CONFIG, 3, dropout=0.1), sum(LENGTHS)),
    ],
)
def test_what_heads_read(head: Head, rows: int | None) -> None:
    selection = head.select(packed_layout())
    assert (None if selection is None else len(selection.rows)) == rows


@pytest.mark.parametrize(("lengths", "training"), [(LENGTHS, False), (LENGTHS, True), ((1,), False)])
def test_first_tokens_are_computed_alike_where_the_others_have_no_queries(
    lengths: tuple[int, ...], training: bool
) -> None:
    """The flag chooses how they are computed, whatever tensor holds their rows."""
    model = TransformerEncoder(replace(CONFIG, attention_probs_dropout_prob=0.0)).double().train(training)
    initialize(model, CONFIG)
    arguments = inputs(lengths)
    layout, queries = arguments[-1], []
    model.layers[-1].get_submodule("attention.qkv").register_forward_hook(lambda *call: queries.append(call[2].shape))
    outputs = []
    for selection in (Selection(rows=layout.first_rows.clone(), first_tokens=True), Selection(rows=layout.first_rows)):
        torch.manual_seed(0)
        outputs.append(model(*arguments, selection=selection))
    assert len(queries) == 1  # of the second, whose product is that of all tokens
    if not training:
        torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-12)


def test_a_crf_head_adds_what_a_label_scores_at_the_start_after_each_label_and_at_the_end() -> None:
    head = CRFHead(CONFIG, 3, dropout=0.0)
    assert head.transitions.tolist() == [[0.0] * 3] * 5
    generator = torch.Generator().manual_seed(0)
    torch.nn.init.normal_(head.transitions, generator=generator)
    emissions = torch.randn(4, 3, generator=generator)
    scores = head.with_transitions(emissions)
    assert scores.shape == (4, 5, 3)
    for word, row, label in product(range(4), range(5), range(3)):
        emission = emissions[word, label] if row < 4 else 0.0
        assert scores[word, row, label] == emission + head.transitions[row, label]


def vocabulary_output(
    dtype: torch.dtype, *, rows: int = 37, has_bias: bool = True
) -> tuple[VocabularyOutput, Tensor, tuple[Tensor, ...]]:
    """Logits of some rows over 50 words, their labels, and the two or three tensors that get gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, 8), (50, 8), (50,))[: 2 + has_bias]
    parts = tuple(torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes)
    labels = torch.randint(50, (rows,), generator=generator)
    bias = parts[2] if has_bias else None
    return VocabularyOutput(hidden=parts[0], table=parts[1], bias=bias, precision=dtype), labels, parts


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("most", [1, 4000, 2**25], ids=["row by row", "chunks of 10", "at once"])
def test_cross_entropy_over_a_vocabulary_is_torchs(most: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "_CHUNK_BYTES", most)
    output, labels, parts = vocabulary_output(torch.float64, has_bias=has_bias)
    expected = F.cross_entropy(F.linear(*parts), labels, reduction="sum") * 0.25
    expected_gradients = torch.autograd.grad(expected, parts)
    total = output.cross_entropy(labels) * 0.25
    assert total.item() == pytest.approx(expected.item(), rel=1e-13)
    for ours, theirs in zip(torch.autograd.grad(total, parts), expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    logits = F.linear(*parts).detach()
    with torch.no_grad():
        assert output.cross_entropy(labels).item() == pytest.approx(4 * expected.item(), rel=1e-13)
        torch.testing.assert_close(output.logits(), logits)
        scores, ids = output.top_k(3)
        log_probabilities = output.log_probabilities(labels)
    torch.testing.assert_close(scores, logits.softmax(1).topk(3).values)
    assert torch.equal(ids, logits.topk(3).indices)
    torch.testing.assert_close(log_probabilities, logits.log_softmax(1).gather(1, labels[:, None])[:, 0])


def test_a_second_backward_pass_over_cross_entropy_is_an_error() -> None:
    """The first one scales the gradients in place."""
    output, labels, _ = vocabulary_output(torch.float32)
    total = output.cross_entropy(labels) * 0.5
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_cross_entropy_of_no_rows_has_gradients_of_zero() -> None:
    output, labels, parts = vocabulary_output(torch.float32)
    nothing, _ = output.split([0, 37])
    total = nothing.cross_entropy(labels[:0])
    assert total.item() == 0
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in torch.autograd.grad(total, parts))
    assert [len(result) for result in (nothing, nothing.logits(), *nothing.top_k(2))] == [0, 0, 0, 0]


def test_logits_over_a_vocabulary_never_exist_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "_CHUNK_BYTES", 2000)
    sizes: list[int] = []

    def counted(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        product = F.linear(rows, weight, bias)
        sizes.append(product.numel())
        return product

    monkeypatch.setattr(vocabulary, "linear", counted)
    output, labels, _ = vocabulary_output(torch.float32)
    output.cross_entropy(labels).backward()
    output.top_k(3)
    assert max(sizes) <= 500


# Width of the inner layer; dense layer, norm and bias; tied decoder.
@pytest.mark.parametrize(
    "options",
    [
        (None, True, True, True, True),
        (None, True, True, True, False),
        (20, True, False, False, False),
        (20, False, True, False, True),
        (None, False, False, True, True),
    ],
)
def test_a_head_over_a_vocabulary_has_the_layers_of_its_config(
    options: tuple[int | None, bool, bool, bool, bool],
) -> None:
    inner, has_dense, has_norm, has_bias, is_tied = options
    shape = replace(CONFIG.head, vocabulary_dense=has_dense, vocabulary_norm=has_norm, vocabulary_bias=has_bias)
    width = 12 if has_dense or inner is None else inner
    config = replace(CONFIG, head=shape, prediction_head_size=inner, output_embedding_size=None if is_tied else width)
    if is_tied:
        config = replace(config, embedding_size=width)
    head = VocabularyHead(config).double()
    wide(head)
    weights, rows = head.state_dict(), torch.cat(states())
    table = torch.randn(50, width, dtype=torch.float64)
    hidden, expected = rows, set()
    for name, exists in (("inner", inner is not None), ("dense", has_dense)):
        if exists:
            hidden = F.gelu(hidden @ weights[f"{name}.weight"].T + weights[f"{name}.bias"])
            expected |= {f"{name}.weight", f"{name}.bias"}
    if has_norm:
        hidden = F.layer_norm(hidden, (width,), weights["norm.weight"], weights["norm.bias"], eps=1e-12)
        expected |= {"norm.weight", "norm.bias"}
    logits = hidden @ (table if is_tied else weights["decoder.weight"]).T
    if has_bias:
        logits = logits + weights["bias"]
    expected |= {name for name, exists in (("decoder.weight", not is_tied), ("bias", has_bias)) if exists}
    assert weights.keys() == expected
    assert head.num_logits == 50
    torch.testing.assert_close(head.output_of(rows, table).logits(), logits, rtol=0, atol=1e-10)


def test_a_sequence_head_may_be_one_layer() -> None:
    config = replace(CONFIG, head=replace(CONFIG.head, sequence_dense=False))
    head = SequenceHead(config, 3).double().eval()
    wide(head)
    assert head.state_dict().keys() == {"output.weight", "output.bias"}
    layout, sequences = packed_layout(), states()
    logits = head(torch.stack([rows[0] for rows in sequences]), layout, TABLE)
    expected = torch.stack([head.output(rows[0]) for rows in sequences])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["sequence", "token"])
def test_parameters_stand_in_the_order_of_the_calculation(name: str) -> None:
    """The norm of the gradients is summed in this order, so another order changes the bits of a training."""
    config = replace(CONFIG, head=replace(CONFIG.head, prediction_head=True))
    head = SequenceHead(config, 3) if name == "sequence" else PerTokenHead(config, 3, dropout=0.1)
    modules = dict.fromkeys(key.partition(".")[0] for key, _ in head.named_parameters())
    assert list(modules) == ["dense", "norm", "output"]
