"""Integrated gradients, the contributions of each token of a row to a logit.

For outputs that say which logits are explained. Gradients are summed along a straight line between word embeddings,
from a baseline to the row (Sundararajan, Taly and Yan 2017, "Axiomatic Attribution for Deep Networks", equation 1). The
baseline is the row with padding tokens instead of all but the special tokens, as in Captum's tutorial on BERT
(pytorch/captum, Bert_SQUAD_Interpret). Contributions add up to the difference between the logits of row and baseline
(completeness), but for the error of the sum. The number of points of a path is doubled until this error is small.

Shape legend: N tokens of a batch, T tokens of a window, E width of the word embeddings, B sequences, K terms of logits.
"""

import copy
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bert_tasks.data.features import filled_batches
from bert_tasks.encoder.heads import Head
from bert_tasks.encoder.packing import PackedBatch, pack
from bert_tasks.errors import UsageError
from bert_tasks.model.pretrained_module import PretrainedModule
from bert_tasks.model.windows import finite
from bert_tasks.outputs.explanation import (
    TOLERANCE,
    ExplainedLogit,
    Explanation,
    TokenSpans,
    word_contributions,
)
from bert_tasks.outputs.features import Feature
from bert_tasks.tasks.base import Task

FEWEST_STEPS, MOST_STEPS = 16, 512
BATCH_TOKENS = 2048  # whose activations of all layers are kept for the backward pass
_SMALLEST_DIFFERENCE = 1e-4  # smaller differences of float32 logits are noise

_log = logging.getLogger("bert_tasks")


@dataclass(kw_only=True)
class _Window:
    """A feature that has a part in a logit."""

    feature: Feature
    spans: Sequence[Any]  # a span for each token (``Task.token_spans``)
    baseline_ids: Sequence[int]
    terms: Sequence[tuple[int, float]]  # position among the window's logits, and weight
    contributions: Tensor  # [T] float64


def check_explainable(model: PretrainedModule, task: Task, dtype: str = "float32") -> None:
    """Checks that the predictions of a model can be explained.

    Raises:
        UsageError: Its task, its form or its precision has no explanations.
    """
    reason = task.output.no_explanations_reason
    if reason is not None:
        raise UsageError(reason)
    if model.no_weights_reason:
        raise UsageError(f"there are no gradients to explain with, because {model.no_weights_reason}")
    if dtype != "float32":
        raise UsageError(f"explanations are computed in float32. Remove dtype = {dtype!r}")
    precision = model.encoder.embeddings.word.weight.dtype
    if precision not in (torch.float32, torch.float64):
        raise UsageError(
            f"explanations are computed in float32, but the model's weights are {precision}. Call model.float()"
        )


def explained(
    model: PretrainedModule,
    head: Head,
    logits: Sequence[ExplainedLogit],
    features: Sequence[Feature],
    spans: TokenSpans,
) -> list[Explanation]:
    """Returns the explanation of each logit.

    Computes with gradients and without autocast, whatever the caller's contexts are.

    Args:
        model, head: The model, which is not changed.
        logits: See ``Output.explained_logits``.
        features: The features of the rows.
        spans: See ``Task.token_spans``.

    Raises:
        CheckpointError: A logit or a gradient is not a finite number.
    """
    paths = [_RowPath(logit, features, spans, model.config.pad_token_id) for logit in logits]
    device = model.encoder.embeddings.word.weight.device.type
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device, enabled=False):
        gradients, steps, pending = _InputGradients(model, head), FEWEST_STEPS, paths
        for path, *ends in zip(paths, gradients.logits(paths, 1.0), gradients.logits(paths, 0.0), strict=True):
            path.logit, path.baseline_logit = ends
        while pending and steps <= MOST_STEPS:
            gradients.integrate(pending, steps)
            pending = [path for path in pending if not path.completeness_error <= TOLERANCE]  # also of nan
            steps *= 2
    finite(torch.tensor([path.completeness_error for path in paths]))
    if pending:
        _log.warning(
            "%d of %d explanations do not add up to the difference of the logits within 1 %% after %d steps. Each has "
            "its completeness_error",
            len(pending),
            len(paths),
            MOST_STEPS,
        )
    return [path.explanation() for path in paths]


class _RowPath:
    """The path of one row, and what has been computed of it."""

    def __init__(self, logit: ExplainedLogit, features: Sequence[Feature], spans: TokenSpans, baseline: int) -> None:
        self._logit, self.logit, self.baseline_logit, self.steps = logit, 0.0, 0.0, 0
        terms: dict[int, list[tuple[int, float]]] = {}
        for feature, position, weight in logit.terms:
            terms.setdefault(feature, []).append((position, weight))
        self.windows = [
            _Window(
                feature=features[number],
                spans=spans[number],
                baseline_ids=[
                    token if span is None else baseline
                    for token, span in zip(features[number]["input_ids"], spans[number], strict=True)
                ],
                terms=terms[number],
                contributions=torch.zeros(0),
            )
            for number in terms
        ]

    @property
    def completeness_error(self) -> float:
        difference = self.logit - self.baseline_logit
        total = sum(float(window.contributions.sum()) for window in self.windows)
        return abs(total - difference) / max(abs(difference), _SMALLEST_DIFFERENCE)

    def explanation(self) -> Explanation:
        tokens = [
            (span, contribution)
            for window in self.windows
            for span, contribution in zip(window.spans, window.contributions.tolist(), strict=True)
            if span is not None
        ]
        return Explanation(
            label=self._logit.label,
            logit=self.logit,
            baseline_logit=self.baseline_logit,
            words=word_contributions(self._logit.texts, tokens, self._logit.words),
            completeness_error=self.completeness_error,
            steps=self.steps,
        )


class _InputGradients:
    """A copy of a model's modules with shared weights and gradients of the inputs."""

    def __init__(self, model: PretrainedModule, head: Head) -> None:
        modules = {"encoder": model.encoder, "head": head}
        weights = [parameter for module in modules.values() for parameter in module.parameters()]
        # Weights that were made in inference mode cannot take part in a backward pass.
        usable = [weight.clone() if weight.is_inference() else weight for weight in weights]
        memo = {
            id(weight): nn.Parameter(tensor.detach(), requires_grad=False)
            for weight, tensor in zip(weights, usable, strict=True)
        }
        copied: dict[str, Any] = copy.deepcopy(modules, memo)
        self._stack, self._head = copied["encoder"].eval(), copied["head"].eval()
        self._table: Tensor = self._stack.embeddings.word.weight  # [V, E]
        self._position_offset, self._pad_groups = model.config.position_offset, self._table.device.type != "cpu"

    def logits(self, paths: Sequence[_RowPath], share: float) -> list[float]:
        """Returns the explained logits at one point, from 0 (the baseline) to 1 (the row)."""
        sums = [0.0] * len(paths)
        items = [(number, window) for number, path in enumerate(paths) for window in path.windows]
        with torch.no_grad():
            for numbers, windows in self._batches(items):
                point, _, packed = self._points(windows, [share] * len(windows))
                terms, owners = self._terms(point, packed, windows)
                for owner, term in zip(owners, terms.tolist(), strict=True):
                    sums[numbers[owner]] += term
        return sums

    def integrate(self, paths: Sequence[_RowPath], steps: int) -> None:
        """Sets the contributions of rows by the Gauss-Legendre formula."""
        nodes, weights = np.polynomial.legendre.leggauss(steps)
        for path in paths:
            path.steps = steps
            for window in path.windows:
                window.contributions = torch.zeros(len(window.baseline_ids), dtype=torch.float64)
        points = [
            ((float(node + 1) / 2, float(weight) / 2), window)
            for path in paths
            for window in path.windows
            for node, weight in zip(nodes, weights, strict=True)
        ]
        for keys, windows in self._batches(points):
            point, change, packed = self._points(windows, [share for share, _ in keys])
            point.requires_grad_()
            terms, _ = self._terms(point, packed, windows)
            (slope,) = torch.autograd.grad(terms.sum(), point)
            parts = torch.split((slope * change).sum(1).double().cpu(), list(packed.layout.lengths))  # of [N]
            for (_, weight), window, shares in zip(keys, windows, parts, strict=True):
                window.contributions.add_(shares, alpha=weight)

    def _batches(self, items: Sequence[tuple[Any, _Window]]) -> Iterator[tuple[tuple[Any, ...], tuple[_Window, ...]]]:
        """Returns batches of ascending length, so that rows are in the order of sequences."""
        ordered = sorted(items, key=lambda item: len(item[1].baseline_ids))
        for batch in filled_batches(ordered, lambda item: len(item[1].baseline_ids), max_tokens=BATCH_TOKENS):
            keys, windows = zip(*batch, strict=True)
            yield keys, windows

    def _points(self, windows: Sequence[_Window], shares: Sequence[float]) -> tuple[Tensor, Tensor, PackedBatch]:
        """Returns embeddings ``[N, E]``, row minus baseline ``[N, E]``, and the batch."""
        packed = pack(
            [window.feature["input_ids"] for window in windows],
            [window.feature["token_type_ids"] for window in windows],
            position_offset=self._position_offset,
            gather_positions=[window.feature.get("gather_positions") for window in windows],
            pad_groups=self._pad_groups,
        ).to(self._table.device)
        ids = [token for window in windows for token in window.baseline_ids]
        baseline = F.embedding(torch.tensor(ids, device=self._table.device), self._table)
        change = F.embedding(packed.input_ids, self._table) - baseline
        lengths = torch.tensor(packed.layout.lengths)
        weights = torch.tensor(shares, dtype=self._table.dtype).repeat_interleave(lengths).to(self._table.device)
        return baseline + weights[:, None] * change, change, packed

    def _terms(self, words: Tensor, packed: PackedBatch, windows: Sequence[_Window]) -> tuple[Tensor, list[int]]:
        """Returns ``[K]`` weighted logits, and the sequence of each."""
        embedded = self._stack.embeddings.combine(words, packed.position_ids, packed.token_type_ids)
        selection, depth = self._head.select(packed.layout), self._head.depth
        hidden = self._stack.run_layers(embedded, packed.position_ids, packed.layout, selection=selection, depth=depth)
        logits: Tensor = self._head(hidden, packed.layout, self._table)
        counts = packed.layout.gather_counts if self._head.per_token else (1,) * len(windows)
        firsts = accumulate((count * logits.shape[-1] for count in counts), initial=0)
        terms = [
            (owner, first + position, weight)
            for owner, (window, first) in enumerate(zip(windows, firsts, strict=False))
            for position, weight in window.terms
        ]
        positions = torch.tensor([position for _, position, _ in terms], device=logits.device)
        weights = torch.tensor([weight for _, _, weight in terms], dtype=logits.dtype, device=logits.device)
        return logits.flatten().index_select(0, positions) * weights, [owner for owner, _, _ in terms]
