"""CUDA graphs of the layers in training, with one launch instead of a thousand.

BERT-base on 32 short sentences keeps an H200 busy for 4 ms a step, and the host needs 45 ms to launch the kernels. A
graph is launched at once, but its shapes are fixed. So a batch's rows are padded, by half at most (small batches to
128), with sequences that no other row attends to and that have no gradient. A batch's graph depends on its lengths and
on the order of the passes of a step, so a resumed run uses the same graphs.

A captured graph does not follow changes of modules' hooks, rates of dropout, or the set of trained parameters.

Shape legend: N tokens, P padded rows, B sequences, H hidden.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bert_tasks.encoder.packing import Packed

# Batches with more tokens keep a GPU busy for longer than the host needs to launch their kernels.
MOST_ROWS = 16384
_FEWEST_ROWS = 128
_SHORTEST = 64
_WARM_UPS = 2  # in which libraries choose their kernels


@dataclass(frozen=True)
class GraphShape:
    """The fixed shape of a graph.

    Attributes:
        rows: Number of padded rows, P.
        sequences: Number of sequences, padding included.
        longest: Maximum length of a sequence.
    """

    rows: int
    sequences: int
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "GraphShape":
        """Returns the smallest shape that holds sequences of these lengths."""
        total, rows, longest = sum(lengths), _FEWEST_ROWS, _SHORTEST
        # Few shapes, because each has a graph: 2^k and 1.5 x 2^k rows in turn.
        while rows < total:
            step = rows // 2
            if rows & (rows - 1) != 0:  # no power of 2
                step = rows // 3
            rows += step
        while longest < max(lengths):
            longest *= 4
        padding = -(-(rows - total) // longest)
        return cls(rows, 1 << (len(lengths) + padding - 1).bit_length(), longest)

    def starts(self, lengths: Sequence[int]) -> Tensor:
        """Returns the starts of sequences, ``[sequences + 1]`` int32, empty ones last."""
        starts = [0]
        for length in sorted(lengths):
            starts.append(starts[-1] + length)
        while starts[-1] < self.rows:
            starts.append(min(self.rows, starts[-1] + self.longest))
        starts += [self.rows] * (self.sequences + 1 - len(starts))
        return torch.tensor(starts, dtype=torch.int32)

    def layout(self, starts: Tensor) -> Packed:
        """Returns a layout for the flash kernel, which reads nothing else."""
        nothing = starts.new_empty(0)
        return Packed(
            lengths=(self.longest,),
            first_rows=nothing,
            caller_order=nothing,
            sequence_of_row=nothing,
            row_lengths=nothing,
            cu_seqlens=starts,
            gather_positions=nothing,
            gather_counts=(),
            groups=(),
            regroup=None,
        )


_Layers = Callable[[Tensor, Tensor, Packed], Tensor]


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the only capture stream, because libraries allocate memory per stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch


class _Graph:
    """The captured passes of one shape, whose backward adds to ``gradients``."""

    def __init__(
        self,
        layers: _Layers,
        shape: GraphShape,
        *,
        embedded: Tensor,
        starts: Tensor,
        trained: Sequence[nn.Parameter],
        gradients: list[Tensor],
        pool: Any,
    ) -> None:
        device, size = embedded.device, (shape.rows, embedded.shape[1])
        stream = _capture_stream(device)
        self.embedded = torch.zeros(size, dtype=embedded.dtype, device=device, requires_grad=True)
        self.position_ids = torch.zeros(shape.rows, dtype=torch.long, device=device)
        self.starts = starts.to(device)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        layout, inputs = shape.layout(self.starts), (self.embedded, *trained)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                output = layers(self.embedded, self.position_ids, layout)
                torch.autograd.grad(output, inputs, torch.zeros_like(output))
        torch.cuda.current_stream(device).wait_stream(stream)
        del output
        with torch.cuda.graph(self._forward, pool=pool, stream=stream):
            self.output = layers(self.embedded, self.position_ids, layout)
        self.outer = torch.zeros_like(self.output)
        with torch.cuda.graph(self._backward, pool=pool, stream=stream):
            self.gradient, *added = torch.autograd.grad(self.output, inputs, self.outer)
            torch._foreach_add_(gradients, added)
        self.output = self.output.detach()

    def forward(self, embedded: Tensor, position_ids: Tensor, starts: Tensor) -> Tensor:
        rows = embedded.shape[0]
        with torch.no_grad():
            self.embedded[:rows].copy_(embedded)
        self.position_ids[:rows].copy_(position_ids)
        self.starts.copy_(starts, non_blocking=True)
        self._forward.replay()
        return self.output[:rows]

    def backward(self, gradient: Tensor) -> Tensor:
        rows = gradient.shape[0]
        self.outer[:rows].copy_(gradient)
        self.outer[rows:].zero_()
        self._backward.replay()
        return self.gradient[:rows]


class LayerGraphs:
    """Graphs for the shapes of a run, captured when a shape is first met.

    The gradients of the trained parameters have fixed addresses, to which graphs add.

    Args:
        layers: Function of all layers, from embeddings ``[P, H]``, position ids ``[P]`` and a layout to ``[P, H]``.
        parameters: Parameters of the layers. At least one is trained.
    """

    def __init__(self, layers: _Layers, parameters: Sequence[nn.Parameter]) -> None:
        self._layers, self._pool = layers, torch.cuda.graph_pool_handle()
        self._parameters, self._addresses = parameters, [parameter.data_ptr() for parameter in parameters]
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._gradients = [torch.zeros_like(parameter) for parameter in self._trained]
        self._graphs: dict[GraphShape, _Graph] = {}
        self._is_busy = False

    def begin_step(self) -> None:
        """Sets the parameters' gradients to 0. Drops graphs of weights that have moved."""
        addresses = [parameter.data_ptr() for parameter in self._parameters]
        if addresses != self._addresses:
            self._graphs.clear()
            self._addresses = addresses
        torch._foreach_zero_(self._gradients)
        for parameter, gradient in zip(self._trained, self._gradients, strict=True):
            parameter.grad = gradient
        self._is_busy = False

    def run(self, embedded: Tensor, position_ids: Tensor, layout: Packed) -> Tensor | None:
        """Returns the output ``[N, H]`` of the layers for embeddings ``[N, H]``.

        Returns None if no graph can compute it. Either the batch is too large, or the backward pass of the batch before
        has not run, which still needs the graphs' memory.
        """
        if self._is_busy or embedded.shape[0] > MOST_ROWS or not torch.is_grad_enabled():
            return None
        if not embedded.requires_grad:  # frozen embeddings
            embedded = embedded.detach().requires_grad_()
        self._is_busy = True  # also while a graph is captured, which calls the layers
        shape = GraphShape.of(layout.lengths)
        starts = shape.starts(layout.lengths)
        graph = self._graphs.get(shape)
        if graph is None:
            with torch.random.fork_rng(devices=[embedded.device]):
                self._graphs[shape] = graph = _Graph(
                    self._layers,
                    shape,
                    embedded=embedded,
                    starts=starts,
                    trained=self._trained,
                    gradients=self._gradients,
                    pool=self._pool,
                )
        return _replay(embedded, self, graph, position_ids, starts)

    def end(self) -> None:
        """Records that the backward pass has run."""
        self._is_busy = False

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Drops the graphs from copies, because they use this encoder's weights."""
        return type(None), ()


class _Replay(torch.autograd.Function):
    """Runs the graphs of both passes where autograd expects the layers."""

    @staticmethod
    def forward(
        ctx: Any, embedded: Tensor, graphs: LayerGraphs, graph: _Graph, position_ids: Tensor, starts: Tensor
    ) -> Tensor:
        ctx.graphs, ctx.graph = graphs, graph
        return graph.forward(embedded, position_ids, starts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        if ctx.graph is None:
            raise RuntimeError("the layers were run as a CUDA graph, which has one backward pass for a forward pass")
        of_embedded, ctx.graph = ctx.graph.backward(gradient), None
        ctx.graphs.end()
        return of_embedded, None, None, None, None


_replay: Callable[..., Tensor] = _Replay.apply
