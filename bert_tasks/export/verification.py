"""Comparison of an ONNX graph with the model it was exported from: the tolerances, and what is compared.

Shape legend: N tokens, B sequences, L labels, R rows that a head reads.
"""

from collections.abc import Sequence
from math import isfinite
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from bert_tasks.data.columns import Row
from bert_tasks.data.features import token_batches
from bert_tasks.encoder.heads import CRFHead
from bert_tasks.errors import CheckpointError, DataError
from bert_tasks.model.onnx import GraphModel, exported_graph, quantized_graph
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks.base import Feature, Prediction, checked_features

TOLERANCE = 1e-5  # for the logits of a float32 graph, times the largest logit if that is above 1
REQUIRED_AGREEMENT = 0.95  # share of predictions that an int8 graph must leave unchanged
LENGTHS = (1, 2, 3, 127, 128)  # of the random sequences; also the model's longest input and one token less
BATCH_SIZES = (1, 7)
_LARGEST_GRAPH = 2**31 - 1  # bytes, the limit of a protobuf file


def verified_graph(model: TaskModel, rows: Sequence[Row], *, int8: bool) -> tuple[bytes, dict[str, Any]]:
    """Exports a model to ONNX and compares the graph with it.

    The float32 graph is always compared by its logits, an int8 graph also by its predictions.

    Args:
        model: the model, in float32.
        rows: rows to compare on, in canonical form; at least one for int8.
        int8: whether to quantize the graph.

    Returns:
        The ONNX file, and what the comparison measured: ``parity``, and for int8 also ``int8``.

    Raises:
        DataError: the model's predictions on ``rows`` cannot tell a good int8 graph from a bad one.
        CheckpointError: the graph is too large, or differs from the model by more than the tolerance.
    """
    expected = list(model.predict_rows(rows)) if int8 else []
    if int8:
        try:
            if not model.task.same_predictions(expected, expected):
                raise DataError(f"the first {len(rows)} rows have nothing to predict: their sentences have no words")
        except DataError as error:
            reason = f"int8 export compares predictions, but {error}; pass a file of other rows (--data)"
            raise DataError(reason) from None
    graph = exported_graph(model)
    if graph.ByteSize() > _LARGEST_GRAPH:
        raise CheckpointError(
            f"the graph has {graph.ByteSize()} bytes, which is more than the 2 GiB that an ONNX file may have"
        )
    content: bytes = graph.SerializeToString()
    windows = checked_features(model.task, rows, model.require_tokenizer(), model.config) if rows else []
    measured = {"parity": _compare_logits(model, GraphModel.of(model, content), windows, rows=len(rows))}
    if int8:
        content = quantized_graph(graph)
        quantized = GraphModel.of(model, content)
        measured["int8"] = _compare_predictions(model, quantized, rows, expected)
        worst = _largest_differences(model, quantized, windows, BATCH_SIZES[-1:])[0]
        if not isfinite(worst):
            raise CheckpointError("the logits of the int8 graph are not finite; nothing was written. Use --to onnx")
        measured["int8"]["max_difference"] = worst
    return content, measured


def _compare_logits(model: TaskModel, graph: GraphModel, windows: Sequence[Feature], *, rows: int) -> dict[str, Any]:
    """Compares logits on random sequences and on all windows of the rows."""
    sequences = [*_random_sequences(model), *windows]
    worst, largest = _largest_differences(model, graph, sequences, BATCH_SIZES)
    allowed = TOLERANCE * max(1.0, largest)
    if not worst <= allowed:  # also if it is NaN
        raise CheckpointError(
            f"the graph does not compute what the model computes: its logits differ by {worst:.2g}, allowed is "
            f"{allowed:.2g}; nothing was written. Please report this with the output of bert-tasks inspect"
        )
    lengths = [len(sequence["input_ids"]) for sequence in sequences]
    return {
        "tolerance": TOLERANCE,
        "max_difference": worst,
        "allowed": allowed,
        "largest_logit": largest,
        "sequences": len(sequences),
        "rows": rows,
        "shortest": min(lengths),
        "longest": max(lengths),
        "batches": list(BATCH_SIZES),
    }


def _compare_predictions(
    model: TaskModel, graph: GraphModel, rows: Sequence[Row], expected: Sequence[Prediction]
) -> dict[str, Any]:
    """Counts how many of the model's predictions the int8 graph leaves unchanged."""
    same = model.task.same_predictions(expected, list(model.predict_rows(rows, run=graph.packed_logits)))
    share = fmean(same)
    if share < REQUIRED_AGREEMENT:
        raise CheckpointError(
            f"int8 changes too many predictions: {share:.1%} of {len(same)} stay the same, required are "
            f"{REQUIRED_AGREEMENT:.0%}; nothing was written. Use --to onnx, or verify with rows like those that the "
            "model was trained on"
        )
    return {"kept": share, "answers": len(same), "required": REQUIRED_AGREEMENT, "rows": len(rows)}


def _random_sequences(model: TaskModel) -> list[Feature]:
    """A sequence of each length to check: any tokens but padding, the second half in segment 1 if the model has it."""
    config = model.config
    longest = config.usable_length
    generator = torch.Generator().manual_seed(0)
    tokens = torch.tensor([token for token in range(config.vocab_size) if token != config.pad_token_id])
    second_segment = min(1, max(0, config.type_vocab_size - 1))
    sequences: list[Feature] = []
    for length in sorted({length for length in (*LENGTHS, longest - 1, longest) if 1 <= length <= longest}):
        chosen = tokens[torch.randint(len(tokens), (length,), generator=generator)].tolist()
        segments = [0] * (length - length // 2) + [second_segment] * (length // 2)
        sequences.append({"row": len(sequences), "input_ids": chosen, "token_type_ids": segments})
    return sequences


def _largest_differences(
    model: TaskModel, graph: GraphModel, sequences: Sequence[Feature], sizes: Sequence[int]
) -> tuple[float, float]:
    """The largest difference of a logit over all batches of each size, and the model's largest logit; NaN if one is."""
    # max() would pass over a NaN that does not come first.
    whole: list[Feature] = [
        {"row": i, "input_ids": sequence["input_ids"], "token_type_ids": sequence["token_type_ids"]}
        for i, sequence in enumerate(sequences)
    ]
    # Neighbouring sequences together, whatever their lengths, with heads reading all of their tokens.
    batches = [b for size in sizes for b in token_batches(range(len(whole)), [1] * len(whole), max_tokens=size)]
    found = [_difference(model, graph, [whole[i] for i in batch]) for batch in batches]
    differences, logits = torch.tensor(found, dtype=torch.float64).amax(dim=0).tolist()
    return differences, logits


def _difference(model: TaskModel, graph: GraphModel, batch: list[Feature]) -> tuple[float, float]:
    """The largest difference between the packed model and the graph on one padded batch, and the largest logit."""

    def run(_: object) -> Tensor:
        ids = torch.tensor([token for sequence in batch for token in sequence["input_ids"]])  # [N]
        segments = torch.tensor([segment for sequence in batch for segment in sequence["token_type_ids"]])  # [N]
        lengths = torch.tensor([len(sequence["input_ids"]) for sequence in batch])  # [B]
        logits = graph.rectangle_logits(ids, segments, lengths).to(model.device)  # [N, L] or [B, L]
        return model.head.with_transitions(logits) if isinstance(model.head, CRFHead) else logits

    expected, found = model.batch_logits(batch)[1], model.batch_logits(batch, run=run)[1]
    return (expected - found).abs().max().item(), expected.abs().max().item()
