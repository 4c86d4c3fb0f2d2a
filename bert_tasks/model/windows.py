"""The windows of rows: their features, their batches, and what all heads of a model make of the logits.

The functions loop over the tasks of a model. A model of one task has a single head with the name "", whose batches and
loss terms have their plain form.

A text that is longer than ``max_length`` may become several windows. A feature is one window with its ids, and it knows
its row. "Compact" logits are what an output keeps of the logits of a window until all windows of a row are there.

Shape legend: B sequences, L labels, R tokens that a head reads.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bert_tasks.data.columns import Row, input_rows
from bert_tasks.data.features import filled_batches, filling_order
from bert_tasks.encoder.cpu import map_batches
from bert_tasks.encoder.heads import Head
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import DataError, NotFiniteScoresError
from bert_tasks.model.encoder_with_heads import EncoderWithHeads, ForwardFn
from bert_tasks.model.shared_heads import share
from bert_tasks.outputs.base import LossTerm
from bert_tasks.outputs.features import Feature
from bert_tasks.tasks.base import FeatureKeys, Task
from bert_tasks.tasks.features import checked_features, collate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH_TOKENS = 32768
CPU_BATCH_TOKENS = 1024  # the activations of two such batches stay in a processor's cache
_BATCH_LOGITS = 2**25  # 128 MiB of float32


def features_of(model: EncoderWithHeads, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase") -> list[Feature]:
    """Returns the checked windows of rows, of several tasks row by row, in the order of the tasks.

    Raises:
        DataError: A row has the input of none of several tasks, or does not fit its task.
        UsageError: An id has no embedding.
    """
    tasks = model.tasks
    if "" in tasks:
        return checked_features(tasks[""], rows, tokenizer, model.config)
    by_row: dict[int, list[Feature]] = {number: [] for number in range(len(rows))}
    for name, task in tasks.items():
        cells = input_rows(rows, name)
        numbers = list(cells)
        for feature in checked_features(task, list(cells.values()), tokenizer, model.config):
            number = numbers[feature["row"]]
            by_row[number].append({**feature, "row": number, "head": name})
    for number, of_row in by_row.items():
        if not of_row:
            raise DataError(f"row {number + 1} has the input of none of the tasks {', '.join(tasks)}")
    return list(chain.from_iterable(by_row.values()))


def prepared_features(
    model: EncoderWithHeads, features: Sequence[Feature], keys: FeatureKeys, corpus: Sequence[Mapping[str, Any]]
) -> Sequence[Feature]:
    """Returns the features as a step sees them. See ``Task.prepare``."""
    only = model.tasks.get("")
    if only is None:
        return features  # no task that draws its windows anew can be one of several
    return only.prepare(features, keys, corpus, model.require_tokenizer())


def pack_features(model: EncoderWithHeads, features: Sequence[Feature]) -> PackedBatch:
    """Returns the features as one batch on the model's device."""
    # A CPU is faster with more calls of attention than with copies of the rows.
    pad_groups, offset = model.device.type != "cpu", model.config.position_offset
    if "" in model.tasks:
        batch = collate(features, position_offset=offset, pad_groups=pad_groups)
    else:
        batch = share(features, list(model.tasks), position_offset=offset, pad_groups=pad_groups)
    return batch.to(model.device)


def forward_windows(
    model: EncoderWithHeads,
    features: Sequence[Feature],
    *,
    max_tokens: int | None = None,
    forward_fn: ForwardFn | None = None,
) -> list[Tensor]:
    """Returns the inputs of decoding for each feature, in order, on the CPU.

    Windows of any lengths are run together, the longest first, in batches of nearly the same number of tokens (see
    ``filling_order``). Dropout is off meanwhile.

    Args:
        model: The model.
        features: The windows.
        max_tokens: Number of tokens to run together. Default: ``batch_tokens``.
        forward_fn: Computes a batch's logits instead of the model.
    """
    tokenizer, only = model.require_tokenizer(), model.tasks.get("")
    most = batch_tokens(model) if max_tokens is None else max_tokens
    run = model if forward_fn is None else forward_fn
    order = filling_order([len(feature["input_ids"]) for feature in features], max_tokens=most)
    parts: list[list[Tensor]] = [[] for _ in features]

    def copies(feature: Feature) -> Iterable[Feature]:
        if only is None:
            return (feature,)
        return only.copies(feature, tokenizer)

    def compact(batch: Sequence[tuple[int, Feature]]) -> list[tuple[int, Tensor]]:
        numbers, windows = zip(*batch, strict=True)
        with torch.inference_mode():  # of the thread, and ``map_batches`` may call this in several
            packed = pack_features(model, windows)
            logits = run(packed).to(torch.float32)
            parts_of_batch = compact_logits(model, packed, logits, windows)
        return list(zip(numbers, parts_of_batch, strict=True))

    def numbered_copies() -> Iterator[tuple[int, Feature]]:
        for number in order:
            for copy in copies(features[number]):
                yield number, copy

    batches = filled_batches(numbered_copies(), lambda pair: len(pair[1]["input_ids"]), max_tokens=most)
    with in_evaluation(model):
        for results in map_batches(compact, batches, device=model.device):
            for number, window in results:
                parts[number].append(window)
    joined: list[Tensor] = []
    for chunks in parts:
        if len(chunks) == 1:  # a window without copies, which is not copied again
            joined.append(chunks[0])
        else:
            joined.append(torch.cat(chunks))
    return joined


@contextmanager
def in_evaluation(module: nn.Module) -> Iterator[None]:
    """Disables dropout inside a ``with`` block, and restores the mode of the module afterwards.

    A model that is in evaluation mode already is not touched, because setting the mode of all modules takes longer than
    all else around the forward pass of a short row.
    """
    if not any(part.training for part in module.modules()):
        yield
        return
    was_training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)


def finite(scores: Any) -> Any:
    """Returns the scores, or raises NotFiniteScoresError if one is not finite."""
    if not scores.isfinite().all():  # a nan would become some label, and a wrong prediction is worse than an error
        raise NotFiniteScoresError("the model's scores are not finite numbers. Its weights or its precision are broken")
    return scores


def batch_tokens(model: EncoderWithHeads) -> int:
    """Returns the number of tokens to run together, which is smaller for a CRF with its matrix of logits."""
    most = CPU_BATCH_TOKENS if model.device.type == "cpu" else BATCH_TOKENS
    outputs_per_token = max(of_head.head.outputs_per_token for of_head in model.heads.values())
    return max(1, min(most, _BATCH_LOGITS // outputs_per_token))


def compact_logits(
    model: EncoderWithHeads, batch: PackedBatch, logits: Any, features: Sequence[Feature]
) -> tuple[Tensor, ...]:
    """Returns the result of ``Output.compact`` for each feature of a batch, on the CPU. Call it in inference mode."""
    tasks = model.tasks
    if "" in tasks:
        return _compact_logits_of_head(tasks[""], model.head, batch, logits, features)
    compact: dict[int, Tensor] = {}
    for (name, of_head), head_batch in zip(model.heads.items(), logits.batches, strict=True):
        if head_batch.numbers:
            members = [features[number] for number in head_batch.numbers]
            parts = _compact_logits_of_head(tasks[name], of_head.head, head_batch, logits.logits[name], members)
            compact |= zip(head_batch.numbers, parts, strict=True)
    return tuple(compact[number] for number in range(len(features)))


def _compact_logits_of_head(
    task: Task, head: Head, batch: PackedBatch, logits: Any, features: Sequence[Feature]
) -> tuple[Tensor, ...]:
    """Returns the compact logits of one head for each feature, from its logits ``[R, L]`` or ``[B, L]``."""
    parts = logits.split(list(batch.layout.gather_counts)) if head.per_token else logits.unbind()
    return tuple(tensor.cpu() for tensor in task.output.compact(parts, features))


def count_terms(model: EncoderWithHeads, features: Sequence[Feature]) -> dict[str, float]:
    """Returns the count of each loss term, by which a step divides its sum. See ``Output.counts``."""
    tasks = model.tasks
    if "" in tasks:
        return tasks[""].output.counts(features)
    counts: dict[str, float] = {}
    for name, task in tasks.items():
        members = [feature for feature in features if feature.get("head") == name]
        of_head = task.output.counts(members)
        counts |= {_term_name(name, term, len(of_head)): count for term, count in of_head.items()}
    return counts


def loss_terms(model: EncoderWithHeads, logits: Any, batch: PackedBatch) -> tuple[LossTerm, ...]:
    """Returns the loss terms of all heads. See ``Output.loss``.

    Terms of several tasks have names such as ``intent/loss``, each with its own count and times the weight of its task.
    """
    tasks = model.tasks
    if "" in tasks:
        return tasks[""].output.loss(logits, batch)
    terms: list[LossTerm] = []
    for (name, task), head_batch in zip(tasks.items(), logits.batches, strict=True):
        of_head = task.output.loss(logits.logits[name], head_batch)
        for term in of_head:
            weight = term.weight * model.weights[name]
            terms.append(replace(term, name=_term_name(name, term.name, len(of_head)), weight=weight))
    return tuple(terms)


def _term_name(name: str, term: str, count: int) -> str:
    """Returns the name of a task's loss term, "loss" for a single term."""
    if count == 1:
        return f"{name}/loss"
    return f"{name}/{term}"
