"""Prediction in another precision than float32: an encoder in bfloat16, or an int8 graph.

Owns the choice that ``predict``, ``evaluate`` and ``serve`` share. The graph itself is made and run by onnx.py.
"""

import copy
import logging
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.environment import slow_bfloat16
from bert_tasks.errors import UsageError
from bert_tasks.model.onnx import GraphModel, check_int8, check_weights, exported_graph, quantized_graph
from bert_tasks.model.task_model import Logits, TaskModel

DType = Literal["float32", "bf16", "int8"]

_log = logging.getLogger(__name__)


def logits_of(model: TaskModel, dtype: DType) -> Logits:
    """The function that computes a batch's logits: the model itself, its int8 graph, or it with an encoder in bfloat16.

    Graph and bfloat16 have copies of the weights, which do not follow later changes. A graph takes seconds to make.

    Raises:
        UsageError: the dtype is unknown, or the model is an exported one; for int8 also as in ``exported_graph``.
    """
    if dtype not in get_args(DType):
        raise UsageError(f"dtype is {dtype!r}, expected one of {', '.join(map(repr, get_args(DType)))}")
    if dtype == "float32":
        return model.packed_logits
    if dtype == "bf16":
        return _bfloat16_logits(model)
    known = torch.cpu.get_capabilities()
    weight_bits: Literal[7, 8] = 8 if known.get("avx512_vnni") or known.get("avx_vnni") else 7
    check_int8(model)
    return GraphModel.of(model, quantized_graph(exported_graph(model), weight_bits=weight_bits)).packed_logits


def _bfloat16_logits(model: TaskModel) -> Logits:
    """Linear layers of the encoder have weights in bfloat16; sums, norms and softmax, and the head, are in float32."""
    check_weights(model)
    slow = slow_bfloat16() if model.device.type == "cpu" else None
    if slow is not None:
        _log.warning("%s", slow)
    stack = copy.deepcopy(model.stack, {id(parameter): parameter for parameter in model.stack.parameters()}).eval()
    for layer in stack.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(layer.weight.detach().bfloat16(), requires_grad=False)

    def run(batch: PackedBatch) -> Tensor:
        selection = model.head.select(batch.layout)
        with torch.autocast(model.device.type, torch.bfloat16):
            hidden = stack(batch.input_ids, batch.position_ids, batch.token_type_ids, batch.layout, selection=selection)
        logits: Tensor = model.head(hidden.float(), batch.layout, model.stack.embeddings.word.weight)
        return logits

    return run
