"""Training and prediction on one device side by side: bert_tasks against transformers' Trainer and a sorted loop.

    python benchmarks/gpu.py --minutes 8 --json FILE
    python benchmarks/gpu.py --device cpu --shape tiny

Weights are random, and lengths are drawn from the distributions in ``LENGTHS``, so no data is needed. Training is an
epoch in bfloat16 autocast after a warm-up epoch: batches, forward, backward, clipping and fused AdamW. Sides:

    ours              the steps of ``fit``
    ours eager        without CUDA graphs
    dynamic           Trainer with sdpa attention, dynamic padding and batches of like lengths
    padded            Trainer with sdpa attention, padded to the maximum length
    compiled          dynamic, with ``torch_compile``

Prediction is bfloat16 autocast over the same texts: ours and a loop over sorted, padded batches of 128.

tokens/s counts real tokens, never padding. MFU is the share of the card's peak in bfloat16 that the model needs: 6 for
each weight of a product and token, and 12 x layers x hidden size x T^2 for attention, summed over the sequences.
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
import transformers
from datasets import Dataset
from result_files import write_results
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from bert_tasks import TaskModel
from bert_tasks.data.reading import read
from bert_tasks.distributed import make_accelerator
from bert_tasks.model.features import tokenized
from bert_tasks.model.windows import forward_windows
from bert_tasks.recipe.schema import OptimSection
from bert_tasks.tasks import SequenceClassification
from bert_tasks.training.objectives import Supervised
from bert_tasks.training.step import OptimizerSteps

# Tokens at the quantiles 0, 0.05, ..., 1, counted with BERT's uncased vocabulary: the training sets of SST-2 and RTE
# (at most 128 tokens), questions with their paragraphs of SQuAD 2.0 (at most 384), articles of WikiText-2 (8192).
LENGTHS = {
    "sst2": [3, 4, 4, 5, 6, 6, 7, 8, 8, 9, 10, 11, 13, 14, 16, 18, 20, 23, 27, 33, 66],
    "rte": [13, 29, 33, 37, 40, 43, 45, 47, 50, 53, 56, 59, 62, 67, 72, 85, 103, 120, 128, 128, 128],
    "squad": [41, 109, 119, 125, 130, 134, 138, 143, 150, 156, 163, 171, 179, 188, 200, 213, 231, 250, 281, 327, 384],
    "articles": [
        *(318, 1166, 1324, 1519, 1655, 1847, 2037, 2345, 2690, 3114, 3300, 3659, 4307, 4790, 5302, 5910, 6965),
        *(8150, 8192, 8192, 8192),
    ],
}
LABELS = ("no", "yes")
PEAKS = {"NVIDIA H100": 989e12, "NVIDIA H200": 989e12, "NVIDIA A100": 312e12}  # dense bfloat16, from the data sheets

Fields = dict[str, Any]  # of a config
BASE: Fields = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
LARGE: Fields = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
TINY: Fields = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
DEBERTA: Fields = {
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "type_vocab_size": 0,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "tiny": lambda: transformers.BertConfig(**TINY, vocab_size=2000),
    "bert-base": lambda: transformers.BertConfig(**BASE),
    "bert-large": lambda: transformers.BertConfig(**LARGE),
    "modernbert-base": transformers.ModernBertConfig,
    "deberta-v3-base": lambda: transformers.DebertaV2Config(**BASE, **DEBERTA, vocab_size=128_100),
}


@dataclass(frozen=True)
class Cell:
    """The texts of one epoch on one model, which is what every side runs.

    Attributes:
        steps: optimizer steps of an epoch.
    """

    shape: str
    lengths: str
    batch_size: int
    steps: int

    @property
    def max_length(self) -> int:
        return LENGTHS[self.lengths][-1]

    @cached_property
    def config(self) -> Any:
        config = CONFIGS[self.shape]()
        config.num_labels = len(LABELS)
        return config

    @cached_property
    def drawn_lengths(self) -> list[int]:
        shares = np.random.default_rng(0).random(self.steps * self.batch_size)
        quantiles = np.linspace(0, 1, len(LENGTHS[self.lengths]))
        return [int(length) for length in np.interp(shares, quantiles, LENGTHS[self.lengths])]

    @cached_property
    def rows(self) -> list[dict[str, str]]:
        """Returns texts in which each word is one token. The two special tokens are added to these."""
        words = np.random.default_rng(1).integers(5, 2000, size=sum(self.drawn_lengths))
        texts = np.split(words, np.cumsum(self.drawn_lengths)[:-1])
        labels = np.random.default_rng(2).integers(2, size=len(texts))
        return [
            {"text": " ".join(map(str, text[: max(1, len(text) - 2)])), "label": LABELS[label]}
            for text, label in zip(texts, labels, strict=True)
        ]

    @property
    def operations(self) -> float:
        """Returns the floating-point operations that an epoch of training needs."""
        config = self.config
        hidden, layers = config.hidden_size, config.num_hidden_layers
        # Four products of the attention (query, key, value, output), and the feed-forward part: two products, or three
        # where a gate multiplies the first one.
        gated = 3 if config.model_type == "modernbert" else 2
        weights = layers * (4 * hidden**2 + gated * hidden * config.intermediate_size)
        pairs = [length * _keys(config, length) for length in self.drawn_lengths]
        # Two operations for each multiply-add, forward once and backward twice: 6 for each weight and token. Scores and
        # context are two products of the hidden size for each pair of a query and a key: 12.
        return float(6.0 * weights * sum(self.drawn_lengths) + 12.0 * hidden * sum(pairs))


def _keys(config: Any, length: int) -> int:
    """Returns how many keys a query of a sequence attends to, summed over the layers."""
    kinds = getattr(config, "layer_types", None)
    if config.model_type != "modernbert" or kinds is None:
        return int(config.num_hidden_layers) * length
    # A local layer sees half of the window on either side, and the token itself.
    local = min(length, config.local_attention + 1)
    return sum(length if layer_type == "full_attention" else local for layer_type in kinds)


CELLS = (
    Cell("bert-base", "sst2", 32, 100),
    Cell("bert-base", "rte", 32, 60),
    Cell("bert-base", "squad", 32, 40),
    Cell("bert-base", "squad", 128, 15),
    Cell("bert-large", "squad", 32, 20),
    Cell("modernbert-base", "articles", 4, 15),
    Cell("modernbert-base", "squad", 32, 30),
    Cell("deberta-v3-base", "rte", 32, 30),
    Cell("bert-base", "sst2", 512, 30),
)
TINY_CELLS = (Cell("tiny", "sst2", 8, 4), Cell("tiny", "rte", 8, 3))


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer that has one token for each number, so that lengths are known."""
    vocabulary = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3} | {str(n): n for n in range(5, 2000)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.backend_tokenizer.post_processor = _with_special_tokens()
    return tokenizer


def _with_special_tokens() -> Any:
    from tokenizers import processors

    return processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])


def our_model(cell: Cell, device: torch.device) -> TaskModel:
    torch.manual_seed(0)
    task = SequenceClassification.of(labels=LABELS, max_length=cell.max_length)
    with device:
        return TaskModel(cell.config.to_dict(), task, tokenizer=word_tokenizer()).to(device)


def their_model(cell: Cell, device: torch.device) -> Any:
    torch.manual_seed(0)
    with device:
        return transformers.AutoModelForSequenceClassification.from_config(cell.config, attn_implementation=_best(cell))


def _best(cell: Cell) -> str:
    return "eager" if cell.shape.startswith("deberta") else "sdpa"  # transformers' DeBERTa has no other


def train_ours(cell: Cell, device: torch.device, *, bf16: bool, graphs: bool = True) -> float:
    """Returns the seconds of an epoch of ``fit``."""
    model = our_model(cell, device)
    precision: Literal["bf16", "no"] = "bf16" if bf16 else "no"
    steps = OptimizerSteps(
        objective=Supervised(model),
        samples=tokenized(read(cell.rows, model.task.columns, require_labels=False), model),
        optim=OptimSection(
            epochs=2, batch_size=cell.batch_size, mixed_precision=precision, micro_batch_tokens=32768, weight_decay=0.01
        ),
        seed=0,
        accelerator=make_accelerator(precision),
    )
    if not graphs:
        model.encoder.graphs = None
    for step, batch in steps.batches():
        if step == cell.steps:
            _synchronize(device)
            started = time.perf_counter()
        steps.update(step, batch, steps.backward(step, batch))
    _synchronize(device)
    return time.perf_counter() - started


def train_theirs(
    cell: Cell, device: torch.device, *, bf16: bool, padded: bool = False, compiled: bool = False
) -> float:
    """Returns the seconds of an epoch of ``Trainer``."""
    from transformers import DataCollatorWithPadding, Trainer, TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):
        started = seconds = 0.0

        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            _synchronize(device)
            self.started = time.perf_counter()

        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            _synchronize(device)
            self.seconds = time.perf_counter() - self.started

    tokenizer, clock = word_tokenizer(), Clock()
    encoded = tokenizer([row["text"] for row in cell.rows])
    columns = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    dataset = Dataset.from_dict(columns | {"labels": [LABELS.index(row["label"]) for row in cell.rows]})
    if padded:
        shape: dict[str, Any] = {"padding": "max_length", "max_length": cell.max_length}
        sampling = "random"
    else:
        # Tensor cores want lengths that are multiples of 8.
        shape, sampling = {"pad_to_multiple_of": 8}, "group_by_length"
    on_cpu = device.type == "cpu"
    workers = 0 if on_cpu else 2
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=2,
            per_device_train_batch_size=cell.batch_size,
            weight_decay=0.01,
            optim="adamw_torch_fused",
            train_sampling_strategy=sampling,
            use_cpu=on_cpu,
            bf16=bf16,
            torch_compile=compiled,
            dataloader_num_workers=workers,
            dataloader_persistent_workers=not on_cpu,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        collator = DataCollatorWithPadding(tokenizer, **shape)
        model = their_model(cell, device)
        Trainer(model, arguments, collator, dataset, callbacks=[clock]).train()
    return clock.seconds


@torch.inference_mode()
def predict_ours(cell: Cell, device: torch.device, *, bf16: bool) -> float:
    """Returns the seconds for all texts."""
    model = our_model(cell, device).eval()
    features = model.task.features(cell.rows, model.require_tokenizer())

    def predict() -> object:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            return forward_windows(model, features)

    return _seconds_of_second(predict, device)


@torch.inference_mode()
def predict_theirs(cell: Cell, device: torch.device, *, bf16: bool) -> float:
    """Returns the seconds for all texts, in padded batches of similar lengths."""
    model, tokenizer = their_model(cell, device).eval(), word_tokenizer()
    ids = sorted(tokenizer([row["text"] for row in cell.rows])["input_ids"], key=len)
    size = 128 if cell.max_length < 1000 else 4

    def predict() -> object:
        logits = []
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            for start in range(0, len(ids), size):
                batch = tokenizer.pad({"input_ids": ids[start : start + size]}, return_tensors="pt")
                logits.append(model(**{name: tensor.to(device) for name, tensor in batch.items()}).logits)
        return torch.cat(logits).float().cpu()

    return _seconds_of_second(predict, device)


def _seconds_of_second(call: Callable[[], object], device: torch.device) -> float:
    call()  # the first call loads kernels and fills the caches of memory
    _synchronize(device)
    started = time.perf_counter()
    call()
    _synchronize(device)
    return time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    # A CUDA call returns before its kernel has run, so a clock without this would measure the launch alone.
    if device.type == "cuda":
        torch.cuda.synchronize()


TRAINING: dict[str, Callable[..., float]] = {
    "ours": train_ours,
    "dynamic": train_theirs,
    "padded": partial(train_theirs, padded=True),
    "ours eager": partial(train_ours, graphs=False),
    "compiled": partial(train_theirs, compiled=True),
}
PREDICTION: dict[str, Callable[..., float]] = {"ours": predict_ours, "sorted loop": predict_theirs}


@contextmanager
def clean_memory(device: torch.device) -> Iterator[None]:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    yield


def measured(side: Callable[..., float], cell: Cell, device: torch.device, *, bf16: bool, training: bool) -> Any:
    """Returns the figures of a side, or its error if it fails, for example because memory runs out."""
    with clean_memory(device):
        try:
            seconds = side(cell, device, bf16=bf16)
        except (RuntimeError, ValueError, TypeError, ImportError, AttributeError) as error:
            return {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    figures = {"tokens_per_second": round(sum(cell.drawn_lengths) / seconds, 1), "seconds": round(seconds, 4)}
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        peak = next((value for card, value in PEAKS.items() if name.startswith(card)), None)
        figures["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        figures["reserved_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
        if peak is not None and bf16:
            # Prediction has the forward pass only, which is a third of the operations of training.
            figures["mfu"] = round(cell.operations / (1 if training else 3) / seconds / peak, 4)
    return figures


def run(
    cells: Sequence[Cell], sides: Sequence[str], device: torch.device, *, deadline: float, path: Path | None
) -> list[dict[str, Any]]:
    """Measures one cell after another until the deadline, and writes the results after each side."""
    results: list[dict[str, Any]] = []
    bf16 = device.type == "cuda"
    kinds = {"training": TRAINING, "prediction": PREDICTION}
    for cell in cells:
        for phase, functions in kinds.items():
            for side, function in functions.items():
                if (phase == "training" and side not in sides) or time.monotonic() > deadline:
                    continue
                figures = measured(function, cell, device, bf16=bf16, training=phase == "training")
                results.append({**asdict(cell), "kind": phase, "side": side, **figures})
                print(_line(results[-1]), flush=True)
                if path is not None:
                    write_results(path, {"machine": machine(device), "results": results})
    return results


def _line(result: dict[str, Any]) -> str:
    name = f"{result['shape']:16}{result['lengths']:9}{result['batch_size']:4} {result['kind']:11}{result['side']:14}"
    if "error" in result:
        return f"{name}{result['error']}"
    mfu = f"{result['mfu']:7.1%} MFU" if "mfu" in result else ""
    memory = f"{result['peak_gib']:7.2f} GiB" if "peak_gib" in result else ""
    return f"{name}{result['tokens_per_second']:11,.0f} tokens/s{mfu}{memory}"


def machine(device: torch.device) -> dict[str, str]:
    """Returns what the figures depend on, such as the device and the versions of the libraries."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="no side starts after that")
    found = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cuda", "cpu"], default=found)
    parser.add_argument("--shape", action="append", choices=CONFIGS, help="default: all but tiny; may be repeated")
    parser.add_argument("--side", action="append", choices=TRAINING, help="of training; default: ours, dynamic, padded")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cells = [cell for cell in (*CELLS, *TINY_CELLS) if cell.shape in (options.shape or [*CONFIGS][1:])]
    device = torch.device(options.device)
    if device.type == "cpu":
        cells = [replace(cell, steps=min(cell.steps, 4)) for cell in cells]
    torch.set_float32_matmul_precision("high")
    print(machine(device))
    deadline = time.monotonic() + 60 * options.minutes
    run(cells, options.side or ["ours", "dynamic", "padded"], device, deadline=deadline, path=options.json)


if __name__ == "__main__":
    main()
