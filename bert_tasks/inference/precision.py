"""Device and precision of a prediction in float32, bfloat16 or int8.

The precision is that of the large matrix products of the encoder, which take most of the time. All that follows them,
the head, the loss and decoding, is computed in float32.
"""

import copy
import logging
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from bert_tasks.encoder.cpu import slow_bfloat16
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import UsageError
from bert_tasks.export.graph import check_int8, exported_graph, quantized_graph
from bert_tasks.model.encoder_with_heads import ForwardFn
from bert_tasks.model.exported import GraphModel
from bert_tasks.model.multitask import AnyModel

DType = Literal["float32", "bf16", "int8"]

_log = logging.getLogger(__name__)


def default_device() -> str:
    """Returns the device of a model that no accelerator places."""
    if torch.cuda.is_available():
        return "cuda"
    return "cpu"


def check_dtype(dtype: str) -> None:
    """Raises UsageError for a dtype that is not in `DType`."""
    if dtype not in get_args(DType):
        raise UsageError(f"dtype is {dtype!r}, expected one of {', '.join(map(repr, get_args(DType)))}")


def logits_of(model: AnyModel, dtype: DType) -> ForwardFn:
    """Returns the function of logits in float32, in bfloat16 or by an int8 graph.

    In bfloat16 and int8 the function has copies of the weights, which do not follow later changes of the model. A graph
    takes seconds to make.

    Raises:
        UsageError: The dtype is unknown, or the model is an exported one. For int8 see also ``exported_graph``.
    """
    check_dtype(dtype)
    if dtype == "float32":
        return model
    if model.no_weights_reason:
        raise UsageError(f"it cannot be converted, because {model.no_weights_reason}")
    if dtype == "int8":
        return _int8_logits(model)
    if model.device.type == "cpu":
        slow = slow_bfloat16()
        if slow is not None:
            _log.warning("%s", slow)
    return _bfloat16_logits(model)


def float32(logits: Any) -> Any:
    """Returns logits in the precision of losses, float32 or double precision."""
    if logits.dtype in (torch.float16, torch.bfloat16):
        return logits.to(torch.float32)
    return logits


def _bfloat16_logits(model: AnyModel) -> ForwardFn:
    """Runs the encoder's linear layers in bfloat16, and all else in float32."""
    # ``deepcopy`` takes the parameters that it finds here instead of copying them, so embeddings are not stored twice.
    shared: dict[int, Any] = {id(parameter): parameter for parameter in model.encoder.parameters()}
    encoder = copy.deepcopy(model.encoder, shared).eval()
    for layer in encoder.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(layer.weight.detach().bfloat16(), requires_grad=False)

    def run(batch: PackedBatch) -> Tensor:
        selection = model.head.select(batch.layout)
        # Inside autocast torch chooses the precision of each operation, bfloat16 for matrix products.
        with torch.autocast(model.device.type, torch.bfloat16):
            ids = batch.input_ids, batch.position_ids, batch.token_type_ids
            hidden = encoder(*ids, batch.layout, selection=selection, depth=model.head.depth)
        logits: Tensor = model.head(hidden.float(), batch.layout, model.encoder.embeddings.word.weight)
        return logits

    return run


def _int8_logits(model: AnyModel) -> ForwardFn:
    """Runs an int8 graph, whose weights have 7 bits on processors without VNNI (see ``quantized_graph``)."""
    capabilities = torch.cpu.get_capabilities()
    weight_bits: Literal[7, 8] = 7
    if capabilities.get("avx512_vnni") or capabilities.get("avx_vnni"):
        weight_bits = 8
    check_int8(model)
    return GraphModel.of(model, quantized_graph(exported_graph(model), weight_bits=weight_bits))
