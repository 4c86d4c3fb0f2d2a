"""The rows of the table of word embeddings that a run trains.

A row whose token is in no training sample has no gradient. AdamW's moments for it stay 0, and each of its steps only
multiplies the row by 1 - learning rate x weight decay. So the run trains a smaller table of the other rows, and
multiplies the factors of all steps into the whole table before anything reads it. It multiplies one factor after the
other, as AdamW would have done. On the CPU this gives the same bits, wherever the run is evaluated, saved or stopped.

Shape legend: V vocabulary, R rows that are trained, E width of the embeddings, N tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bert_tasks.data.arrow import ArrowRows
from bert_tasks.errors import CheckpointError
from bert_tasks.model.multitask import AnyModel

# Largest share of a table's rows for which the smaller table saves enough for its memory.
_LARGEST_SHARE = 0.5
# The number of rows is a multiple of this, so that AdamW's kernel for the CPU has whole vectors only: numbers that are
# left over at the end of a tensor are rounded in another way.
_MULTIPLE = 16
# Numbers that get all their factors at once on the CPU, while they are in the cache of the processor.
_BLOCK = 2**15


def token_ids(model: AnyModel, features: ArrowRows) -> Tensor:
    """Returns the ids ``[R]``, ascending, of all tokens in the features, of special tokens and of a few others."""
    is_used = np.zeros(model.config.vocab_size, dtype=bool)
    special = (*model.require_tokenizer().all_special_ids, model.config.pad_token_id)
    # A tokenizer may have special tokens beyond the table, for example those that were added after the pre-training.
    is_used[[number for number in special if number < len(is_used)]] = True
    for rows in features.tables(["input_ids"]):
        is_used[rows.column(0).combine_chunks().flatten().to_numpy()] = True
    missing = -int(is_used.sum()) % _MULTIPLE  # up to the next multiple
    is_used[np.flatnonzero(~is_used)[:missing]] = True
    return torch.from_numpy(np.flatnonzero(is_used))


class TrainedVocabulary:
    """A smaller table that takes the place of a model's word embeddings while a step runs.

    Outside ``attached`` the model has its whole table, whose rows are of an earlier step until ``update_table``.

    Attributes:
        table: The model's word embeddings.
        ids: ``[R]`` the rows that are trained, ascending.
        weight: ``[R, E]`` the smaller table.
    """

    def __init__(self, table: nn.Embedding, ids: Tensor) -> None:
        whole = table.weight
        self.table, self.ids = table, ids.to(whole.device)
        self.weight = nn.Parameter(whole.detach().index_select(0, self.ids))
        places = torch.full((len(whole),), -1, device=whole.device)  # reading a table at -1 is an error
        self._places = places.index_copy(0, self.ids, torch.arange(len(ids), device=whole.device))  # [V]
        padding = table.padding_idx
        self._padding_place = None if padding is None else int(self._places[padding])
        # One float64 for each step since the whole table was up to date. They stay on the device, so that recording a
        # step does not wait for it.
        self._factors: list[Tensor] = []

    @classmethod
    def of(cls, model: AnyModel, features: ArrowRows) -> "TrainedVocabulary | None":
        """Returns the smaller table of a model, or None if it would save little, or the embeddings are frozen."""
        table = model.encoder.embeddings.word
        if not table.weight.requires_grad:
            return None
        ids = token_ids(model, features)
        if len(ids) > _LARGEST_SHARE * len(table.weight):
            return None
        return cls(table, ids)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Lets the model read the smaller table, through a hook that turns the ids into places in it.

        The module itself stays in the model, so that hooks of other libraries on it still run.
        """
        whole, padding = self.table.weight, self.table.padding_idx
        hook = self.table.register_forward_pre_hook(lambda _, ids: (self._places.index_select(0, ids[0]),))  # [N]
        self.table.weight, self.table.padding_idx = self.weight, self._padding_place
        try:
            yield
        finally:
            hook.remove()
            self.table.weight, self.table.padding_idx = whole, padding

    def add_step(self, groups: Sequence[Mapping[str, Any]], skipped: Tensor) -> None:
        """Records the factor of an optimizer step, which is 1 if ``skipped`` (0-dimensional) is True."""
        group = next(group for group in groups if any(parameter is self.weight for parameter in group["params"]))
        self._factors.append(1.0 - (~skipped).double() * (group["lr"] * group["weight_decay"]))

    @torch.no_grad()
    def update_table(self) -> None:
        """Makes the whole table what it would be if all its rows had been trained."""
        if not self._factors:
            return
        table = self.table.weight
        factors = [factor for factor in torch.stack(self._factors).tolist() if factor != 1.0]
        size = _BLOCK if table.device.type == "cpu" else table.numel()
        if factors:
            for block in torch.split(table.view(-1), size):
                # Not by the product of the factors, which would be rounded in another way than AdamW's steps.
                for factor in factors:
                    block.mul_(factor)
        table.index_copy_(0, self.ids, self.weight)
        self._factors.clear()

    @torch.no_grad()
    def read_table(self) -> None:
        """Copies the trained rows from the whole table, after its weights were replaced by those of a checkpoint."""
        torch.index_select(self.table.weight, 0, self.ids, out=self.weight)
        self._factors.clear()


def remap_moment(moment: Tensor, stored: Tensor | None, wanted_ids: Tensor | None, count: int) -> Tensor:
    """Returns a moment of AdamW for the rows ``wanted_ids`` from one for the rows ``stored``.

    The whole table has ``count`` rows. Rows are given by ascending ids, or by None for all of them. The two differ if a
    run is resumed with another value of ``optim.vocabulary_rows``, or with a tokenizer that has changed.

    Raises:
        CheckpointError: A row that is not wanted was trained.
    """
    if stored is not None and wanted_ids is not None and torch.equal(stored, wanted_ids):
        return moment
    whole = moment
    if stored is not None:
        whole = moment.new_zeros(count, moment.shape[1]).index_copy_(0, stored, moment)
    if wanted_ids is None:
        return whole
    selected = whole.index_select(0, wanted_ids)
    if selected.count_nonzero() != whole.count_nonzero():
        raise CheckpointError(
            "the checkpoint has trained embeddings of tokens that are not in the training rows, because the tokenizer "
            'has changed. Set optim.vocabulary_rows = "all" to resume the run'
        )
    return selected
