"""Long inputs: one text of 8192 tokens through ModernBERT, ours beside transformers with its sdpa attention.

    python benchmarks/long_inputs.py --threads 2 --repeats 5 --json FILE
    python benchmarks/long_inputs.py --tokens 16384 --original 8192 --layers 7 --width 256 --threads 1 --repeats 1

With --original, YaRN scales the positions of a model of so many tokens to --tokens.

The model has by default ModernBERT-base's size. It has random weights and a classifier, and is saved once; every
measurement is a process of its own that loads it and runs one text without gradients, and the two sides take turns.
Each process runs a short text first. Printed: median seconds by the clock and of the processors (which other work on
the machine changes less), the peak of memory above what the loaded model takes (as the kernel keeps it, VmHWM less
VmRSS), how far the logits are apart, and the load average.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from result_files import write_results
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    PreTrainedTokenizerFast,
)

from bert_tasks import TaskModel
from bert_tasks.model.windows import pack_features
from bert_tasks.outputs.features import Feature
from bert_tasks.tasks import SequenceClassification
from bert_tasks.training.files import environment

SIDES = ("bert_tasks", "transformers")
LABELS = ("no", "yes")


def save_model(folder: Path, *, layers: int, width: int, tokens: int, original: int | None) -> None:
    """Saves random weights, whose heads have 64 components as those of the published models have."""
    torch.manual_seed(0)
    positions: dict[Literal["full_attention", "sliding_attention"], dict[str, Any]] | None = None
    if original is not None:
        scaling = {"rope_type": "yarn", "factor": tokens / original, "original_max_position_embeddings": original}
        positions = {"full_attention": scaling, "sliding_attention": dict(scaling)}
    config = ModernBertConfig(
        hidden_size=width,
        num_attention_heads=width // 64,
        intermediate_size=3 * width // 2,
        num_hidden_layers=layers,
        max_position_embeddings=tokens,
        rope_parameters=positions,
    )
    ModernBertForSequenceClassification(config).save_pretrained(folder)
    # Ids are drawn here, but the model of a task has a tokenizer: this one knows bytes.
    vocabulary = ["[PAD]", "[CLS]", "[SEP]", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(vocabulary)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    named = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **named).save_pretrained(folder)


def runner_of_ours(folder: Path, tokens: int) -> Callable[[list[int]], torch.Tensor]:
    model = TaskModel.from_pretrained(folder, task=SequenceClassification.of(labels=LABELS, max_length=tokens))

    def run(ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            batch = pack_features(model, [Feature(row=0, input_ids=ids, token_type_ids=[0] * len(ids))])
            logits: torch.Tensor = model(batch).float()
        return logits

    return run


def runner_of_theirs(folder: Path, tokens: int) -> Callable[[list[int]], torch.Tensor]:
    model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="sdpa").eval()

    def run(ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = model(input_ids=torch.tensor([ids])).logits
            return logits

    return run


def kilobytes(name: str) -> int:
    """Returns a line of the kernel's table of this process, in kilobytes."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def measure(side: str, folder: Path, *, tokens: int, threads: int) -> dict[str, Any]:
    """Loads the model and runs one text, both in this process."""
    torch.set_num_threads(threads)
    run = {"bert_tasks": runner_of_ours, "transformers": runner_of_theirs}[side](folder, tokens)
    ids = torch.randint(5, 50000, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    run(ids[:256])
    before = kilobytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", "ascii")  # from now on the peak counts anew
    started = time.perf_counter(), time.process_time()
    logits = run(ids)
    seconds, processor = time.perf_counter() - started[0], time.process_time() - started[1]
    mib = (kilobytes("VmHWM") - before) / 1024
    return {"seconds": seconds, "processor_seconds": processor, "mib": mib, "logits": logits.flatten().tolist()}


def in_fresh_process(side: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--side", side, "--folder", str(folder)]
    command += ["--tokens", str(options.tokens), "--threads", str(options.threads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def report(figures: Mapping[str, Sequence[dict[str, Any]]]) -> list[str]:
    lines = []
    for side, runs in figures.items():
        names = ("seconds", "processor_seconds", "mib")
        seconds, processor, mib = (statistics.median(run[name] for run in runs) for name in names)
        lines.append(f"{side:<14}{seconds:8.2f} s ({processor:.2f} s of processors)  {mib:8.0f} MiB above the model")
    ours, theirs = (figures[side][0]["logits"] for side in SIDES)
    apart = max(abs(logit - other) for logit, other in zip(ours, theirs, strict=True))
    return [*lines, f"logits apart by at most {apart:.1e}; load average {os.getloadavg()[0]:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--original", type=int, help="the length that YaRN scales to --tokens")
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=SIDES, help="measure this side in this process, and print JSON")
    parser.add_argument("--folder", type=Path, help="the saved model, for --side")
    options = parser.parse_args()
    if options.side is not None:
        print(json.dumps(measure(options.side, options.folder, tokens=options.tokens, threads=options.threads)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = {name: getattr(options, name) for name in ("layers", "width", "tokens", "original")}
        save_model(folder, **sizes)
        figures: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for _ in range(options.repeats):
            for side, runs in figures.items():
                runs.append(in_fresh_process(side, folder, options))
    print("\n".join(report(figures)))
    if options.json is not None:
        content = {
            "options": sizes | {"threads": options.threads, "repeats": options.repeats},
            "environment": environment(),
            "sides": figures,
        }
        write_results(options.json, content)


if __name__ == "__main__":
    main()
