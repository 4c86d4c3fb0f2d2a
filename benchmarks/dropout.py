"""Dropout on a CPU: ours from 16 random bits an element beside torch's, forward and backward.

    python benchmarks/dropout.py --repeats 15

The first rows drop hidden states, the others attention weights (12 heads of size 32, as in the embedded weights), ours
against ``scaled_dot_product_attention`` with and without dropout. Printed: medians of interleaved runs in processor
milliseconds of one thread, so that other work on the machine matters little.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from bert_tasks.encoder.attention import attention_with_dropout
from bert_tasks.encoder.dropout import Dropout

P = 0.1
HEADS, SIZE = 12, 32
HIDDEN = [(900, 384), (4096, 768)]
SEQUENCES = [(32, 13), (32, 28), (32, 64), (16, 128), (16, 384)]


def milliseconds(sides: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        for name, side in sides.items():
            started = time.process_time()
            side()
            if turn:  # the first one warms up
                times[name].append(1000 * (time.process_time() - started))
    return {name: statistics.median(values) for name, values in times.items()}


def hidden_sides(rows: int, width: int) -> dict[str, Callable[[], object]]:
    hidden, gradient = torch.randn(rows, width, requires_grad=True), torch.randn(rows, width)
    ours = Dropout(P).train()
    return {
        "torch": lambda: torch.autograd.grad(F.dropout(hidden, P), hidden, gradient),
        "ours": lambda: torch.autograd.grad(ours(hidden), hidden, gradient),
    }


def attention_sides(batch: int, length: int) -> dict[str, Callable[[], object]]:
    qkv = torch.randn(batch, length, 3, HEADS, SIZE, requires_grad=True)
    gradient = torch.randn(batch, length, HEADS, SIZE)

    def theirs(p: float) -> tuple[Tensor, ...]:
        # [B, T, 3, A, D] -> three times [B, A, T, D], as the fused kernel wants them.
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        context = F.scaled_dot_product_attention(query, key, value, dropout_p=p).transpose(1, 2)
        return torch.autograd.grad(context, qkv, gradient)

    return {
        "torch": lambda: theirs(P),
        "torch without dropout": lambda: theirs(0.0),
        "ours": lambda: torch.autograd.grad(attention_with_dropout(qkv, None, P), qkv, gradient),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    cases = {f"hidden {rows} x {width}": hidden_sides(rows, width) for rows, width in HIDDEN}
    cases |= {f"attention {batch} x {length}": attention_sides(batch, length) for batch, length in SEQUENCES}
    for name, sides in cases.items():
        medians = milliseconds(sides, repeats)
        print(f"{name:22}", *(f"{side} {value:.2f} ms" for side, value in medians.items()), sep="   ")


if __name__ == "__main__":
    main()
