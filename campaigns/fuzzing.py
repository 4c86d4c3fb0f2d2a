"""Damaged files and requests for everything that reads one: a valid one, edited at random, goes in; only our own errors
come out, and none of their messages acts on a terminal.

    PYTHONPATH=tests:campaigns python -m fuzzing --seconds 420    # of each group of targets

The figures go to results/fuzz.json.
"""

import argparse
import json
import re
import resource
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import cast

import httpx2
import torch
from fastapi import HTTPException
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from safetensors.torch import save_file

import binary_files as binary
from bert_tasks.checkpoints.hub import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from bert_tasks.data.columns import without_labels
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.reading import read as read_rows
from bert_tasks.data.rows import Rows
from bert_tasks.errors import BertTasksError, DataError
from bert_tasks.experiments.study import Study
from bert_tasks.export.graph import OPSET
from bert_tasks.model.exported import GRAPHS, INPUTS, RECORD, ExportedModel
from bert_tasks.model.multitask import MultiTaskModel
from bert_tasks.model.task_model import TaskModel
from bert_tasks.recipe.schema import load_recipe
from bert_tasks.recipe.search import SearchSection
from bert_tasks.serving.app import encoded
from bert_tasks.serving.limits import Limits
from bert_tasks.serving.requests import BodyReader, parsed_body
from bert_tasks.tasks import TASKS, SequenceClassification
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.features import checked_features
from bert_tasks.terminal import printable
from bert_tasks.training import checkpoints as checkpointing
from support.runs import PATIENCE
from support.servers import Serving
from support.terminal_characters import acting

Read = Callable[[bytes, Path], object]

SECONDS = 420.0  # of each group: five here and four that are guided, 63 minutes and the start of 20 processes
MOST_MEMORY = 6 * 2**20  # kilobytes of this process, as of the guided edits
ROUND = 50  # contents of a target before the next target's turn
ANSWER_SECONDS = 0.2  # a request without an answer by then is taken for an unfinished one

# What breaks readers more often than single bytes do.
TOKENS = (
    *(b"", b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\r", b"\r\n", b"\n\n", b'"', b'""', b"'", b",", b";"),
    *(b"\t", b"\\", b"#"),
    *(b"{", b"}", b"[", b"]", b":", b"null", b"NaN", b"-1", b"1e999", b"9" * 30, b"true", b"\\ud800", b"\xed\xa0\x80"),
    *(b"-DOCSTART- -X- O O", b"I-", b"B-", b"../..", b"=", b"[[a]]", b"\xe2\x80\xa8", b"a" * 5000),
    *(b"\x1b[2J", b"\xc2\x9b31m", b"\xe2\x80\xae", b"\\u001b", b"\\u202e"),
    *(b"\r\n\r\n", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Expect: 100-continue\r\n"),
)


@dataclass(frozen=True)
class Target:
    """``valid``: what the edits start from; ``read``: must not raise anything but the package's errors."""

    valid: bytes
    read: Read
    edits: "Callable[[bytes], st.SearchStrategy[bytes]] | None" = None  # default: ``edited``


def _task(name: str) -> Task:
    return TASKS[name].of(**({"labels": ("a", "b")} if name.endswith("classification") else {}))


def _table(task: str, name: str, format: str | None = None) -> Read:
    columns = _task(task).columns

    def read(content: bytes, folder: Path) -> object:
        path = folder / name
        path.write_bytes(content)
        return read_rows(path, columns, ReadOptions(format=format), cache_dir=folder / "cache")

    return read


def _recipe(content: bytes, folder: Path) -> object:
    path = folder / "recipe.toml"
    path.write_bytes(content)
    return load_recipe(path)


SQUAD = {
    "version": "v2.0",
    "data": [
        {
            "title": "t",
            "paragraphs": [
                {
                    "context": "The ferry leaves at seven.",
                    "qas": [
                        {"id": "1", "question": "When?", "answers": [{"text": "seven", "answer_start": 20}]},
                        {"id": "2", "question": "Why?", "answers": [], "is_impossible": True},
                    ],
                }
            ],
        }
    ],
}
RECIPE = b"""task = "sequence-classification"
[model]
name = "x/y"
[settings]
max_length = 64
labels = ["a", "b"]
[data]
train = "train.csv"
validation = { one = "a.csv", two = "b.csv" }
columns = { text = "review" }
[optim]
learning_rate = 2e-5
max_grad_norm = "none"
[run]
seeds = [1, 2]
output_dir = "out"
"""
JSONL = b'{"text": "a", "label": "a"}\n{"text": "b", "label": "b"}\n'
CONLL = b"-DOCSTART- -X- -X- O\n\nEU NNP B-NP B-ORG\nrejects VBZ B-VP O\n\nPeter NNP B-NP B-PER\n"
CONLLU = b"""# text = A b
1\tA\ta\tDET\t_\t_\t2\tdet\t_\t_
2-3\tb\t_\t_\t_\t_\t_\t_\t_\t_
2\tb\tb\tNOUN\t_\t_\t0\troot\t_\t_
3\tc\tc\tVERB\t_\t_\t2\tdep\t_\t_
"""

READERS: Mapping[str, Target] = {
    "csv": Target(b'text,label\n"a, ""film""",a\nno,b\n', _table("sequence-classification", "x.csv")),
    "tsv": Target(b"text\tlabel\na film\ta\nno\tb\n", _table("sequence-classification", "x.tsv")),
    "jsonl": Target(JSONL, _table("sequence-classification", "x.jsonl")),
    "conll": Target(CONLL, _table("token-classification", "x.conll", "conll")),
    "conllu": Target(CONLLU, _table("token-classification", "x.conllu", "conllu")),
    "squad": Target(json.dumps(SQUAD).encode(), _table("span-extraction", "x.json", "squad")),
}
RECIPES: Mapping[str, Target] = {"recipe": Target(RECIPE, _recipe)}


def _checkpoint_file(name: str) -> Read:
    """Reads a run's checkpoints, of which one file is what is given."""

    def read(content: bytes, folder: Path) -> object:
        path = saved_run(folder / "checkpoints") / name
        path.write_bytes(content)
        return checkpointing.newest_checkpoint(folder / "checkpoints")

    return read


def _model_file(name: str) -> Read:
    def read(content: bytes, folder: Path) -> object:
        (saved_model(folder / "model") / name).write_bytes(content)
        return TaskModel.from_pretrained(folder / "model")

    return read


def saved_run(folder: Path) -> Path:
    """One checkpoint of a run."""
    state = checkpointing.RunState(
        step=3,
        weights={"head.bias": torch.ones(3)},
        optimizer={"head.bias/step": torch.tensor(2.0)},
        progress={"course": {"best": {"f1": 0.5}}, "scaler": None},
    )
    return checkpointing.save_checkpoint(folder, state, metadata={"seed": 1}, best_step=3, keep_last=2)


def saved_model(folder: Path) -> Path:
    """A BERT of one layer with a classifier."""
    if not folder.exists():
        config = {
            "model_type": "bert",
            "vocab_size": 20,
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 8,
            "max_position_embeddings": 16,
            "hidden_act": "gelu",
            "type_vocab_size": 2,
            "pad_token_id": 0,
            "initializer_range": 0.02,
            "layer_norm_eps": 1e-12,
            "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1,
        }
        TaskModel(config, SequenceClassification.of(labels=("a", "b"), max_length=16)).save_pretrained(folder)
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmno"]
        (folder / "vocab.txt").write_text("\n".join(words) + "\n", "utf-8")
    return folder


def _exported_graph(content: bytes, folder: Path) -> object:
    """The graph with a record that fits it: another one is refused before it is read."""
    _write_graph(saved_export(folder / "export"), content)
    return ExportedModel.from_pretrained(folder / "export").predict([{"text": "a b"}, {"text": "c d"}])


def _export_record(content: bytes, folder: Path) -> object:
    (saved_export(folder / "export") / RECORD).write_bytes(content)
    return ExportedModel.from_pretrained(folder / "export")


def saved_export(folder: Path) -> Path:
    """The same model exported, with a graph of the right inputs and outputs that computes next to nothing."""
    if not folder.exists():
        (saved_model(folder) / "model.safetensors").unlink()
        inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "sequence"]) for name in INPUTS]
        outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 2])]
        nodes = [
            helper.make_node("Cast", ["input_ids"], ["numbers"], to=TensorProto.FLOAT),
            helper.make_node("ReduceMean", ["numbers", "axes"], ["mean"]),
            helper.make_node("MatMul", ["mean", "weights"], ["logits"]),
        ]
        values = [
            helper.make_tensor("axes", TensorProto.INT64, [1], [1]),
            helper.make_tensor("weights", TensorProto.FLOAT, [1, 2], [1.0, -1.0]),
        ]
        graph = helper.make_graph(nodes, "model", inputs, outputs, values)
        model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", OPSET)])
        _write_graph(folder, model.SerializeToString())
    return folder


def _write_graph(folder: Path, content: bytes) -> None:
    (folder / GRAPHS["onnx"]).parent.mkdir(exist_ok=True)
    (folder / GRAPHS["onnx"]).write_bytes(content)
    (folder / RECORD).write_text(json.dumps({"to": "onnx", "sha256": sha256(content).hexdigest()}), "utf-8")


def saved_adapter(folder: Path, base: Path) -> Path:
    """Low-rank adapters of two layers of a model, as peft writes them."""
    folder.mkdir(exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS",
        "base_model_name_or_path": str(base),
        "r": 2,
        "lora_alpha": 4,
        "rank_pattern": {"self.value": 1},
        "alpha_pattern": {r"layer\\.0\\.attention.*": 3, "query": 5},
        "use_rslora": False,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config), "utf-8")
    tensors = {
        "base_model.model.classifier.weight": torch.ones(2, 8),
        "base_model.model.classifier.bias": torch.ones(2),
    }
    for name, rank in (("query", 2), ("value", 1)):
        module = f"base_model.model.bert.encoder.layer.0.attention.self.{name}"
        tensors |= {f"{module}.lora_A.weight": torch.ones(rank, 8), f"{module}.lora_B.weight": torch.ones(8, rank)}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    return folder


def _adapter_file(name: str) -> Read:
    def read(content: bytes, folder: Path) -> object:
        (saved_adapter(folder / "adapter", saved_model(folder / "model")) / name).write_bytes(content)
        return TaskModel.from_pretrained(folder / "adapter", task="sequence-classification", labels=("a", "b"))

    return read


def saved_tasks(folder: Path) -> Path:
    """A model of two tasks."""
    if not folder.exists():
        tasks = {
            "intent": {"task": "sequence-classification", "labels": ["a", "b"], "max_length": 16},
            "slots": {"task": "token-classification", "labels": ["O", "B-X"], "max_length": 16, "weight": 0.5},
        }
        base = saved_model(folder.with_name("base"))
        MultiTaskModel.from_pretrained(base, tasks=tasks).save_pretrained(folder)
    return folder


def _tasks_config(content: bytes, folder: Path) -> object:
    (saved_tasks(folder / "tasks") / "config.json").write_bytes(content)
    model = MultiTaskModel.from_pretrained(folder / "tasks")
    return model.predict({"text": "a b", "words": ["a", "b"]})


SPACE = SearchSection.model_validate({"trials": 4, "learning_rate": {"low": 1e-5, "high": 1e-3, "log": True}})


def _open_study(path: Path) -> Study:
    study = Study(path, SPACE)
    study.open({"rows": 3}, first={}, seed=1, lower_is_better=False)
    return study


def saved_study(path: Path) -> Path:
    """The trials of a search, of which one is running."""
    study = _open_study(path)
    for score in (0.5, None, 0.7):
        study.ask()
        study.prunes(0.4, 1, is_last=True)
        study.end(score, note="")
    study.ask()
    return path


def _study_file(content: bytes, folder: Path) -> object:
    (folder / "study.db").write_bytes(content)
    study = _open_study(folder / "study.db")
    study.ask()
    study.prunes(0.3, 1, is_last=False)
    study.end(0.3, note="")
    return study.trials()


def loaders(folder: Path) -> Mapping[str, Target]:
    """Targets that need files of their own to start from."""
    run, model, export = saved_run(folder / "run"), saved_model(folder / "model"), saved_export(folder / "export")
    adapter, tasks = saved_adapter(folder / "adapter", model), saved_tasks(folder / "tasks")
    runs = {f"run {path.name}": Target(path.read_bytes(), _checkpoint_file(path.name)) for path in run.iterdir()}
    models = {f"model {path.name}": Target(path.read_bytes(), _model_file(path.name)) for path in model.iterdir()}
    exports = {
        "export model.onnx": Target((export / GRAPHS["onnx"]).read_bytes(), _exported_graph),
        f"export {RECORD}": Target((export / RECORD).read_bytes(), _export_record),
    }
    adapters = {
        f"adapter {path.name}": Target(path.read_bytes(), _adapter_file(path.name)) for path in adapter.iterdir()
    }
    others = {
        "tasks config.json": Target((tasks / "config.json").read_bytes(), _tasks_config),
        "study.db": Target(saved_study(folder / "trials.db").read_bytes(), _study_file),
    }
    return {**runs, **models, **exports, **adapters, **others}


def _body(task: Task, model: TaskModel) -> Read:
    """Reads the body of a request as far as the server does before the model runs."""
    reader = BodyReader(without_labels(task.columns), Limits(), {}, rejected=task.rejected_columns)

    def read(content: bytes, folder: Path) -> object:
        try:
            rows, _ = reader.rows(parsed_body(content, "application/json"))
            return checked_features(task, rows, model.require_tokenizer(), model.config)
        except HTTPException as error:
            status, detail = error.status_code, error.detail
        except DataError as error:
            status, detail = 422, str(error)
        except BertTasksError as error:
            raise AssertionError("the server would answer with 500") from error
        assert 400 <= status < 500
        raise DataError(encoded({"detail": detail}).decode())

    return read


def requests(folder: Path) -> Mapping[str, Target]:
    """A target for the body of each task's requests."""
    model = TaskModel.from_pretrained(saved_model(folder / "model"))
    tasks = {name: _task(name) for name in TASKS}
    return {f"request {name}": Target(_rows(task), _body(task, model)) for name, task in tasks.items()}


def _rows(task: Task) -> bytes:
    return json.dumps({"inputs": list(task.example_rows)}).encode()


@contextmanager
def connections(folder: Path) -> Iterator[Mapping[str, Target]]:
    """Targets that send what they are given to a server: as a request, and as the body of one.

    The server runs meanwhile; at the end it must stop as if nothing had happened, without a traceback in its log.
    """
    model = saved_model(folder / "model")
    served = Serving(model, folder=folder)
    body = _rows(TaskModel.from_pretrained(model).task)
    try:
        yield {
            "connection request": Target(_request(body), lambda content, _: _sent(served, content)),
            "connection body": Target(body, lambda content, _: _sent(served, _request(content))),
        }
    finally:
        served.program.send(signal.SIGTERM)
        ended = served.program.wait()
    assert (ended.code, ended.err) == (0, "")


def _request(body: bytes) -> bytes:
    head = "POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _sent(served: Serving, request: bytes) -> bytes:
    """The answer of a server that goes on answering.

    Raises:
        DataError: there was none but the end of the connection, or one that refuses the request.
    """
    answer = _answer(served, request)
    statuses = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", answer)]
    assert all(status < 500 for status in statuses), answer
    assert httpx2.get(f"{served.url}/healthz", timeout=PATIENCE).status_code == 200
    if max(statuses, default=400) >= 400:
        raise DataError(answer.decode("utf-8", errors="replace"))
    return answer


def _answer(served: Serving, request: bytes) -> bytes:
    """All bytes until the server closes the connection. An unfinished request is ended, not waited for."""
    parts = list[bytes]()
    address = "127.0.0.1", int(served.url.rpartition(":")[2])
    with (
        socket.create_connection(address, PATIENCE) as connection,
        suppress(ConnectionError),  # it may be closed before all is sent, or with something unread
    ):
        connection.sendall(request)
        try:
            parts.extend(_received(connection, ANSWER_SECONDS))
        except TimeoutError:
            connection.shutdown(socket.SHUT_WR)
            parts.extend(_received(connection, PATIENCE))
    return b"".join(parts)


def _received(connection: socket.socket, seconds: float) -> Iterator[bytes]:
    connection.settimeout(seconds)
    while chunk := connection.recv(2**16):
        yield chunk


def binary_files() -> Mapping[str, Target]:
    """Workbooks, DocBins and parquet files, edited inside their compression."""
    targets = {}
    for name, make in binary.VALID.items():
        task, extension = ("token-classification", "spacy") if name == "docbin" else ("sequence-classification", name)
        edits = partial(binary.EDITS[name], edit=edit_bytes)
        targets[name] = Target(make(), _sensible(_table(task, f"x.{extension}")), edits)
    return targets


def _sensible(read: Read) -> Read:
    """Reads rows, which must be texts that can be stored, in a bounded amount of memory."""

    def read_bounded(content: bytes, folder: Path) -> object:
        rows = read(content, folder)
        for row in cast(Rows, rows):
            assert row["line"] >= 1
            text = row["text"] if "text" in row else " ".join(row["words"])
            text.encode()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < MOST_MEMORY
        return rows

    return read_bounded


def file_groups(folder: Path) -> Mapping[str, Mapping[str, Target]]:
    """The targets that run in this process."""
    return {
        "readers": READERS,
        "binary files": binary_files(),
        "recipes": RECIPES,
        "loaders": loaders(folder),
        "requests": requests(folder),
    }


@st.composite
def edited(draw: st.DrawFn, valid: bytes) -> bytes:
    """The valid content after up to six edits: bytes deleted, repeated or put in."""
    return edit_bytes(draw, valid)


def edit_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(content)))
        removed = draw(st.integers(0, 12))
        put_in = draw(st.sampled_from(TOKENS) | st.binary(max_size=6) | st.just(content[at : at + 20]))
        content = content[:at] + put_in + content[at + removed :]
    return content


def attempt(target: Target, content: bytes, folder: Path) -> bool:
    """Whether the content was read; anything but the package's own refusal, fit for a terminal, escapes."""
    try:
        target.read(content, folder)
    except BertTasksError as error:
        shown = printable(str(error))
    else:
        return True
    assert not acting(shown), ascii(shown)
    return False


def fuzz(target: Target, folder: Path, *, examples: int, seed_value: int = 0) -> int:
    """Tries that many contents; returns how many were read."""
    read = 0

    @seed(seed_value)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(edited(target.valid) if target.edits is None else target.edits(target.valid))
    def run(content: bytes) -> None:
        nonlocal read
        read += attempt(target, content, folder)

    run()
    return read


def campaign(groups: Mapping[str, Mapping[str, Target]], folder: Path, seconds: float) -> dict[str, int]:
    """Contents tried of each target, in rounds with another seed each, until the time of a group is up."""
    tried: dict[str, int] = {}
    for targets in groups.values():
        end, number = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            for name, target in targets.items():
                with tempfile.TemporaryDirectory(dir=folder) as scratch:
                    fuzz(target, Path(scratch), examples=ROUND, seed_value=number)
                tried[name] = tried.get(name, 0) + ROUND
            number += 1
    return tried


def main() -> None:
    import reliability

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each group of targets")
    seconds = parser.parse_args().seconds
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder, server = Path(name), Path(name) / "server"
        server.mkdir()
        with connections(server) as sent:
            tried = campaign({**file_groups(folder), "connections": sent}, folder, seconds)
    figures = {"cases": sum(tried.values()), "failures": 0, "skipped": 0, "details": tried}
    about = reliability.provenance(f"python -m fuzzing --seconds {seconds:g}", began)
    reliability.write("fuzz", {**figures, **about})


if __name__ == "__main__":
    main()
