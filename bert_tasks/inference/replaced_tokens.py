"""Draws tokens of a generator, and detects them with a discriminator (ELECTRA).

In ELECTRA (Clark et al. 2020, https://arxiv.org/abs/2003.10555) a small generator fills masked tokens, and the
discriminator decides for every token whether it was replaced. Only the discriminator is kept in the end.

Shape legend: B sequences, N tokens, R masked tokens, V vocabulary.
"""

from dataclasses import replace

import torch
from torch import Tensor

from bert_tasks.encoder.heads import UNIFORM, ReplacedTokenOutput
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.inference.precision import float32
from bert_tasks.model.encoder_with_heads import ForwardFn


def replaced_token_output(batch: PackedBatch, *, generator: ForwardFn, discriminator: ForwardFn) -> ReplacedTokenOutput:
    """Runs the generator on masked tokens, and the discriminator on drawn tokens.

    No token depends on its batch or process. The task draws one uniform number for each masked token, which decides the
    token of the generator. No gradient goes through the draw.

    Args:
        batch: Prepared by a task with a generator.
        generator, discriminator: Functions that run a batch. Logits in half precision become float32.
    """
    generated = float32(generator(batch))
    masked, labels = batch.layout.gather_positions, batch.labels.long()  # [R]
    with torch.no_grad():
        drawn = generated.sample(batch.fields[UNIFORM])  # [R]
        ids = batch.input_ids.index_copy(0, masked, drawn)  # [N]
        flags = torch.zeros_like(ids)
        is_masked = flags.index_fill(0, masked, 1)
        # A token that the generator has guessed right counts as original, as in the paper.
        replaced = flags.index_copy(0, masked, (drawn != labels).to(flags.dtype))
    rows, lengths = all_rows(batch), batch.layout.lengths
    layout = replace(batch.layout, gather_positions=rows, gather_counts=lengths)
    logits = discriminator(replace(batch, input_ids=ids, layout=layout))
    return ReplacedTokenOutput(
        logits=float32(logits).squeeze(1),
        replaced=replaced.index_select(0, rows),
        masked=is_masked.index_select(0, rows),
        ids=ids.index_select(0, rows),
        generator=generated,
        lengths=lengths,
    )


def all_rows(batch: PackedBatch) -> Tensor:
    """Returns ``[N]`` the rows of all tokens, sequence after sequence."""
    layout, count = batch.layout, len(batch.input_ids)
    lengths = layout.row_lengths.index_select(0, layout.caller_order)  # [B]
    # By how much the rows of each sequence are moved in the batch, whose sequences are ordered by length.
    starts = layout.first_rows - (lengths.cumsum(0) - lengths)
    return torch.arange(count, device=starts.device) + starts.repeat_interleave(lengths, output_size=count)
