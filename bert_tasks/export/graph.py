"""A model as an ONNX graph, exported by torch, quantized to int8 by onnxruntime.

Shape legend: B sequences, T padded length, L labels, I inputs and O outputs of a linear layer.
"""

import logging
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from bert_tasks.environment import check_libraries
from bert_tasks.errors import UsageError
from bert_tasks.model.exported import import_onnxruntime, input_names, output_names, outputs_by_head
from bert_tasks.model.multitask import AnyModel
from bert_tasks.model.shared_heads import SharedOutput
from bert_tasks.model.windows import in_evaluation
from bert_tasks.tasks.several import task_name

if TYPE_CHECKING:
    import onnx

OPSET = 20  # the first with Gelu
LIBRARIES = ("onnx", "onnxruntime", "onnxscript")


class _PaddedCall(nn.Module):
    """The padded call of a model, with the inputs and outputs of the graph only."""

    def __init__(self, model: AnyModel) -> None:
        super().__init__()
        self.model = model
        self.splits = [len(names) > 1 for names in outputs_by_head(output_names(model))]

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        output = self.model(input_ids, attention_mask, token_type_ids)
        if isinstance(output, SharedOutput):
            logits_of_heads: list[Tensor] = list(output.logits.values())
        elif isinstance(output, tuple):  # logits of tokens and of pairs of sentences, which no prediction reads
            logits_of_heads = [output[0]]
        else:
            logits_of_heads = [output]
        outputs: list[Tensor] = []
        for logits, splits in zip(logits_of_heads, self.splits, strict=True):
            if splits:  # the start and the end of a span are two outputs, as in transformers
                outputs += logits.unbind(-1)
            else:
                outputs.append(logits)
        return tuple(outputs)


def exported_graph(model: AnyModel) -> "onnx.ModelProto":
    """Returns the float32 graph of a padded call, with free batch size and length.

    Its inputs are ``input_names``, each int64 ``[B, T]``. Its outputs are ``output_names``, which are logits ``[B,
    L]``, or ``[B, T, L]`` with zeros at padding (for a CRF the emissions), or for spans two tensors ``[B, T]``. The
    encoder of several tasks is in the graph once.

    Raises:
        UsageError: The ``export`` extra is not installed, or the model is an exported one.
    """
    check_libraries(LIBRARIES, extra="export", purpose="ONNX graphs")
    if model.no_weights_reason:
        raise UsageError(f"it cannot be converted, because {model.no_weights_reason}")
    inputs, outputs = input_names(model.config), output_names(model)
    mask = torch.ones(2, 7, dtype=torch.int64)  # any sizes but 0 and 1, which the exporter treats as fixed
    mask[0, 5:] = 0
    mask = mask.to(model.device)
    example = (mask * 5, mask, torch.zeros_like(mask))  # ids, mask and segments
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    with _quiet(), torch.no_grad(), in_evaluation(model):
        program = torch.onnx.export(
            _PaddedCall(model).eval(),
            example[: len(inputs)],
            dynamo=True,
            verbose=False,
            opset_version=OPSET,
            input_names=inputs,
            output_names=outputs,
            dynamic_shapes=(free,) * len(inputs),
        )
    graph: onnx.ModelProto = program.model_proto  # type: ignore[union-attr]  # dynamo=True always gives a program
    sizes = [size.dim_param for size in graph.graph.input[0].type.tensor_type.shape.dim]
    names = dict(zip(sizes, ("batch", "sequence"), strict=True))
    for value in (*graph.graph.input, *graph.graph.output):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param in names:
                size.dim_param = names[size.dim_param]
    # The metadata of nodes contain paths of the machine that exports.
    for message in (graph, graph.graph, *graph.graph.node, *graph.graph.input, *graph.graph.output, *graph.functions):
        del message.metadata_props[:]
    for weights in graph.graph.initializer:
        del weights.metadata_props[:]
    del graph.graph.value_info[:]  # intermediate shapes, which are wrong after the quantizer has transposed weights
    return graph


def check_int8_graph(model: AnyModel) -> None:
    """Raises UsageError if the head multiplies with a table over the vocabulary."""
    if model.head.reads_embeddings:
        raise UsageError(
            f"int8 is not supported for {task_name(model.tasks)}, because its head has a weight for each token. Use "
            "float32"
        )


def quantized_graph(graph: "onnx.ModelProto") -> bytes:
    """Returns the graph with int8 weights and dynamically quantized activations.

    Weights have one scale per output channel, and activations one per token. Among the settings that were tried, this
    changed the fewest labels (benchmarks/LOG.md). Embeddings, norms, softmax, the products of queries, keys and values,
    and the head stay in float32. One range for a padded batch remains, so a row's scores depend a little on the
    other rows.

    Args:
        graph: A float32 graph.
    """
    quantization = import_onnxruntime("onnxruntime.quantization")
    head = [node.name for node in graph.graph.node if any(name.startswith("model.head.") for name in node.input)]
    # The quantizer first makes a MatMul and an Add of a Gemm, and names the MatMul so.
    head_products = [*head, *(f"{name}_MatMul" for name in head)]
    with TemporaryDirectory() as folder, _quiet():
        path = Path(folder) / "int8.onnx"
        quantization.quantize_dynamic(
            _with_token_scales(graph, excluded=head),
            path,
            op_types_to_quantize=["MatMul", "Gemm"],
            per_channel=True,
            reduce_range=True,  # to 7 bits, because intermediate sums of 16 bits overflow on processors without VNNI
            weight_type=quantization.QuantType.QInt8,
            nodes_to_exclude=head_products,
        )
        return path.read_bytes()


def _with_token_scales(graph: "onnx.ModelProto", *, excluded: Collection[str]) -> "onnx.ModelProto":
    """Returns an equivalent graph that scales the activations of each token.

    It divides the activations by their largest magnitude before a product. The quantizer has one scale for all tokens
    of a product, so a token with large activations would leave few of the 256 steps for the others. The quotients
    ``[..., I]`` have magnitudes up to 1. The product ``[..., O]`` is multiplied by the divisor ``[..., 1]`` before the
    bias is added. A ``Gemm`` becomes a ``MatMul`` with the transposed weight, because layers may share weights, which
    the quantizer would transpose again for each product.

    Args:
        graph: The graph of ``exported_graph``, which is not changed.
        excluded: Names of products that are not changed.
    """
    helper, numpy_helper = import_module("onnx.helper"), import_module("onnx.numpy_helper")
    weights = {tensor.name: tensor for tensor in graph.graph.initializer}
    constants = {"last_axis": np.array([-1]), "least_divisor": np.array(np.finfo(np.float32).tiny)}
    nodes, transposed = [], set()
    for node in graph.graph.node:
        if node.op_type not in ("MatMul", "Gemm") or node.input[1] not in weights or node.name in excluded:
            nodes.append(node)
            continue
        tokens, weight, *bias = node.input
        (output,) = node.output
        if any(attribute.name == "transB" and attribute.i for attribute in node.attribute):
            transposed.add(weight)
            weight = f"{weight}_transposed"
        # Values of a graph are connected by their names, so each new value needs one of its own.
        magnitudes = f"{output}_magnitudes"
        largest = f"{output}_largest"
        divisor = f"{output}_divisor"
        quotients = f"{output}_quotients"
        product = f"{output}_product"
        scaled = f"{output}_scaled" if bias else output
        nodes += [
            helper.make_node("Abs", [tokens], [magnitudes]),
            helper.make_node("ReduceMax", [magnitudes, "last_axis"], [largest]),
            # A token of zeros alone has the largest magnitude 0, by which nothing can be divided.
            helper.make_node("Max", [largest, "least_divisor"], [divisor]),
            helper.make_node("Div", [tokens, divisor], [quotients]),
            helper.make_node("MatMul", [quotients, weight], [product], name=node.name),
            helper.make_node("Mul", [product, divisor], [scaled]),
        ]
        if bias:
            nodes.append(helper.make_node("Add", [scaled, *bias], [output]))
    for name in sorted(transposed):
        constants[f"{name}_transposed"] = numpy_helper.to_array(weights[name]).T
    result = type(graph)()
    result.CopyFrom(graph)
    del result.graph.node[:], result.graph.initializer[:]
    result.graph.node.extend(nodes)
    used: set[str] = set()
    for node in nodes:
        used.update(node.input)
    for name, tensor in weights.items():
        if name in used:  # a weight of which only the transpose is used would be stored for nothing
            result.graph.initializer.append(tensor)
    result.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    return result


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences messages about deprecated internals of torch, torchvision and graphs."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, message=".*isinstance.treespec, LeafSpec.*")
            warnings.filterwarnings("ignore", category=UserWarning, message=".*The axis name.*")
            yield
    finally:
        logging.disable(disabled)
