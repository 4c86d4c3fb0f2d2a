"""Integrated gradients, the contributions of each token of a row to a logit.

For outputs that say which logits are explained. Gradients are summed along a straight line between word embeddings,
from a baseline to the row (Sundararajan, Taly and Yan 2017, "Axiomatic Attribution for Deep Networks", equation 1). The
baseline is the row with padding tokens instead of all but the special tokens, as in Captum's tutorial on BERT
(pytorch/captum, Bert_SQUAD_Interpret). Contributions add up to the difference between the logits of row and baseline
(completeness), but for the error of the sum. The number of points of a path is doubled until this error is small.

A row may have several windows, and an explained logit may be a weighted sum of their logits, such as a mean over the
windows. Each summand is called a term.

Shape legend: N tokens of a batch, T tokens of a window, E width of the word embeddings, B sequences, K terms of logits.
"""

import copy
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
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
    spans: Sequence[Any]  # a span for each token, None for a special token (``Task.token_spans``)
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

    It computes with gradients and without autocast, whatever the caller's contexts are.

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
        gradients = _InputGradients(model, head)
        logits_of_rows = gradients.logits(paths, 1.0)
        logits_of_baselines = gradients.logits(paths, 0.0)
        for path, logit, baseline_logit in zip(paths, logits_of_rows, logits_of_baselines, strict=True):
            path.logit, path.baseline_logit = logit, baseline_logit
        # The points of a Gauss-Legendre rule are not among those of the next one, so each attempt starts afresh.
        pending, steps = paths, FEWEST_STEPS
        while pending and steps <= MOST_STEPS:
            gradients.integrate(pending, steps)
            # "not <=" instead of ">", so that an error of nan counts as too large.
            pending = [path for path in pending if not path.completeness_error <= TOLERANCE]
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
        self._logit = logit
        self.logit, self.baseline_logit, self.steps = 0.0, 0.0, 0
        terms_of_features: dict[int, list[tuple[int, float]]] = {}
        for number, position, weight in logit.terms:
            terms_of_features.setdefault(number, []).append((position, weight))
        self.windows: list[_Window] = []
        for number, terms in terms_of_features.items():
            feature = features[number]
            baseline_ids: list[int] = []
            for token, span in zip(feature["input_ids"], spans[number], strict=True):
                if span is None:  # special tokens have no span, and stay in the baseline
                    baseline_ids.append(token)
                else:
                    baseline_ids.append(baseline)
            window = _Window(
                feature=feature,
                spans=spans[number],
                baseline_ids=baseline_ids,
                terms=terms,
                contributions=torch.zeros(0),
            )
            self.windows.append(window)

    @property
    def completeness_error(self) -> float:
        """The relative difference between the sum of the contributions and that of the logits."""
        difference = self.logit - self.baseline_logit
        total = sum(float(window.contributions.sum()) for window in self.windows)
        return abs(total - difference) / max(abs(difference), _SMALLEST_DIFFERENCE)

    def explanation(self) -> Explanation:
        """Returns what users see, the contributions of words instead of tokens."""
        tokens: list[tuple[Any, float]] = []
        for window in self.windows:
            for span, contribution in zip(window.spans, window.contributions.tolist(), strict=True):
                if span is not None:
                    tokens.append((span, contribution))
        return Explanation(
            label=self._logit.label,
            logit=self.logit,
            baseline_logit=self.baseline_logit,
            words=word_contributions(self._logit.texts, tokens, self._logit.words),
            completeness_error=self.completeness_error,
            steps=self.steps,
        )


class _InputGradients:
    """A copy of a model's modules with shared weights and gradients of the inputs.

    The weights of the copy need no gradients, so that the backward pass computes those of the embeddings alone. The
    mode and the gradients of the caller's model do not change.
    """

    def __init__(self, model: PretrainedModule, head: Head) -> None:
        modules = {"encoder": model.encoder, "head": head}
        # ``deepcopy`` takes a parameter that is in ``memo`` instead of copying it, so no memory is used for weights.
        memo: dict[int, Any] = {}
        for module in modules.values():
            for weight in module.parameters():
                usable: Tensor = weight
                if weight.is_inference():  # such weights cannot take part in a backward pass
                    usable = weight.clone()
                memo[id(weight)] = nn.Parameter(usable.detach(), requires_grad=False)
        copied: dict[str, Any] = copy.deepcopy(modules, memo)
        self._stack, self._head = copied["encoder"].eval(), copied["head"].eval()
        self._table: Tensor = self._stack.embeddings.word.weight  # [V, E]
        self._position_offset = model.config.position_offset
        self._pad_groups = self._table.device.type != "cpu"

    def logits(self, paths: Sequence[_RowPath], share: float) -> list[float]:
        """Returns the explained logits at one point, from 0 (the baseline) to 1 (the row)."""
        sums = [0.0] * len(paths)
        items: list[tuple[int, _Window]] = []
        for number, path in enumerate(paths):
            items += [(number, window) for window in path.windows]
        with torch.no_grad():
            for numbers, windows in self._batches(items):
                point, _, packed = self._points(windows, [share] * len(windows))
                terms, owners = self._terms(point, packed, windows)
                for owner, term in zip(owners, terms.tolist(), strict=True):
                    sums[numbers[owner]] += term
        return sums

    def integrate(self, paths: Sequence[_RowPath], steps: int) -> None:
        """Sets the contributions of rows by the Gauss-Legendre formula.

        The formula with n points is exact for polynomials up to degree 2n - 1, so it needs fewer points than a sum over
        equal steps.
        """
        nodes, weights = np.polynomial.legendre.leggauss(steps)
        # numpy's nodes are for the interval from -1 to 1, and the path goes from 0 to 1.
        shares = [(float(node + 1) / 2, float(weight) / 2) for node, weight in zip(nodes, weights, strict=True)]
        points: list[tuple[tuple[float, float], _Window]] = []
        for path in paths:
            path.steps = steps
            for window in path.windows:
                window.contributions = torch.zeros(len(window.baseline_ids), dtype=torch.float64)
                points += [(share, window) for share in shares]
        for keys, windows in self._batches(points):
            point, change, packed = self._points(windows, [share for share, _ in keys])
            point.requires_grad_()
            terms, _ = self._terms(point, packed, windows)
            # One backward pass for all windows: a term depends on the tokens of its own window only, so the gradient of
            # the sum is the gradient of each.
            (slope,) = torch.autograd.grad(terms.sum(), point)
            contributions = (slope * change).sum(1).double().cpu()  # [N]
            parts = torch.split(contributions, list(packed.layout.lengths))
            for (_, weight), window, part in zip(keys, windows, parts, strict=True):
                window.contributions.add_(part, alpha=weight)

    def _batches(self, items: Sequence[tuple[Any, _Window]]) -> Iterator[tuple[tuple[Any, ...], tuple[_Window, ...]]]:
        """Returns batches of ascending length, so that rows are in the order of sequences."""
        ordered = sorted(items, key=lambda item: len(item[1].baseline_ids))
        for batch in filled_batches(ordered, lambda item: len(item[1].baseline_ids), max_tokens=BATCH_TOKENS):
            keys, windows = zip(*batch, strict=True)
            yield keys, windows

    def _points(self, windows: Sequence[_Window], shares: Sequence[float]) -> tuple[Tensor, Tensor, PackedBatch]:
        """Returns points of the paths ``[N, E]``, row minus baseline ``[N, E]``, and the batch."""
        packed = pack(
            [window.feature["input_ids"] for window in windows],
            [window.feature["token_type_ids"] for window in windows],
            position_offset=self._position_offset,
            gather_positions=[window.feature.get("gather_positions") for window in windows],
            pad_groups=self._pad_groups,
        ).to(self._table.device)
        ids = list(chain.from_iterable(window.baseline_ids for window in windows))
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
        owners: list[int] = []
        positions: list[int] = []
        weights: list[float] = []
        first = 0  # where the logits of a window begin among the flattened logits of the batch
        for owner, (window, count) in enumerate(zip(windows, counts, strict=True)):
            for position, weight in window.terms:
                owners.append(owner)
                positions.append(first + position)
                weights.append(weight)
            first += count * logits.shape[-1]
        selected = logits.flatten().index_select(0, torch.tensor(positions, device=logits.device))
        return selected * torch.tensor(weights, dtype=logits.dtype, device=logits.device), owners
