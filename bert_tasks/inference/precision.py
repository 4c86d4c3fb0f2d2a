"""Device and precision of a prediction in float32, bfloat16 or int8.

The precision is that of the large matrix products of the encoder, which take most of the time. All that follows them,
the head, the loss and decoding, is computed in float32.
"""

import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from bert_tasks.checkpoints.activation_ranges import read_ranges
from bert_tasks.checkpoints.hub import ACTIVATION_RANGES, resolve
from bert_tasks.encoder.cpu import slow_bfloat16
from bert_tasks.encoder.int8 import int8_encoder, int8_obstacle, range_shapes
from bert_tasks.encoder.layers import TransformerEncoder
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import UsageError
from bert_tasks.model.encoder_with_heads import ForwardFn
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
    """Returns the function of logits in float32, bfloat16 or int8.

    In bfloat16 and int8 the function has copies of the weights, which do not follow later changes of the model.

    Raises:
        UsageError: The dtype is unknown, the model is an exported one, or it cannot be computed in int8 here.
        CheckpointError: The ranges of activations beside the weights cannot be used.
    """
    check_dtype(dtype)
    if dtype == "float32":
        return model
    if dtype == "int8":
        check_int8(model)
        return int8_logits(model, _stored_ranges(model))
    if model.no_weights_reason:
        raise UsageError(f"it cannot be converted, because {model.no_weights_reason}")
    if model.device.type == "cpu":
        slow = slow_bfloat16()
        if slow is not None:
            _log.warning("%s", slow)
    return _bfloat16_logits(model)


def check_int8(model: AnyModel) -> None:
    """Raises UsageError if a model cannot be computed in int8 on its device."""
    if model.no_weights_reason:
        raise UsageError(f"it cannot be converted, because {model.no_weights_reason}")
    obstacle = int8_obstacle()
    if model.device.type != "cpu":
        obstacle = f"the model is on {model.device}, and int8 is computed on a CPU"
    weights = model.encoder.embeddings.word.weight
    if weights.dtype != torch.float32:
        obstacle = f"the weights are {weights.dtype}, and int8 is made of float32"
    if obstacle is not None:
        raise UsageError(f"int8 is not possible, because {obstacle}. Use float32")


def int8_logits(model: AnyModel, ranges: Mapping[str, Tensor]) -> ForwardFn:
    """Returns the function of logits whose encoder has its linear layers in int8.

    Args:
        model: A model for which ``check_int8`` raises no error.
        ranges: See ``int8_encoder``.
    """
    encoder = int8_encoder(model.encoder, ranges)

    def run(batch: PackedBatch) -> Any:
        return _head_logits(model, _states(model, encoder, batch), batch)

    return run


def _stored_ranges(model: AnyModel) -> dict[str, Tensor]:
    """Returns the ranges in the folder of a model. Raises UsageError if there are none."""
    if model.origin is None:
        raise UsageError(
            f"int8 needs a model from a folder with {ACTIVATION_RANGES}, which `bert-tasks quantize` writes"
        )
    folder = resolve(model.origin.name, revision=model.origin.commit)
    ranges = read_ranges(folder, range_shapes(model.encoder), model.encoder.state_dict())
    if ranges is None:
        name: str | Path = "FOLDER"
        if Path(model.origin.name).expanduser().is_dir():
            name = folder
        raise UsageError(
            f"int8 needs {ACTIVATION_RANGES}, which {model.origin.name} lacks. Write it with `bert-tasks quantize "
            f"{name} FILE`, where FILE has rows like those to predict. If the model is from the hub or a package, or "
            "was changed after it was loaded, save it to a folder first, and load it from there"
        )
    return ranges


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

    def run(batch: PackedBatch) -> Any:
        # Inside autocast torch chooses the precision of each operation, bfloat16 for matrix products.
        with torch.autocast(model.device.type, torch.bfloat16):
            hidden = _states(model, encoder, batch)
        return _head_logits(model, hidden.float(), batch)

    return run


def _states(model: AnyModel, encoder: TransformerEncoder, batch: PackedBatch) -> Tensor:
    """Returns the states that the head of a model reads, computed by another encoder."""
    selection = model.head.select(batch.layout)
    ids = batch.input_ids, batch.position_ids, batch.token_type_ids
    states: Tensor = encoder(*ids, batch.layout, selection=selection, depth=model.head.depth)
    return states


def _head_logits(model: AnyModel, hidden: Tensor, batch: PackedBatch) -> Any:
    """Returns the logits of a model for states that another encoder has computed."""
    return model.head(hidden, batch.layout, model.encoder.embeddings.word.weight)
