"""Damaged files for everything that reads one: a valid file, edited at random, goes in; only our own errors come out.

python tests/support/fuzzing.py --seconds 600    # for each group of targets; writes docs/reliability/fuzz.json
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from bert_tasks.data.readers import read_table
from bert_tasks.errors import BertTasksError
from bert_tasks.model.task_model import TaskModel
from bert_tasks.recipe import load_recipe
from bert_tasks.tasks import TASKS, SequenceClassification
from bert_tasks.training import checkpointing

Read = Callable[[bytes, Path], object]

# What breaks readers more often than single bytes do.
TOKENS = (
    *(b"", b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\r", b"\r\n", b"\n\n", b'"', b'""', b"'", b",", b";"),
    *(b"\t", b"\\", b"#"),
    *(b"{", b"}", b"[", b"]", b":", b"null", b"NaN", b"-1", b"1e999", b"9" * 30, b"true", b"\\ud800", b"\xed\xa0\x80"),
    *(b"-DOCSTART- -X- O O", b"I-", b"B-", b"../..", b"=", b"[[a]]", b"\xe2\x80\xa8", b"a" * 5000),
)


@dataclass(frozen=True)
class Target:
    """``valid``: what the edits start from; ``read``: must not raise anything but the package's errors."""

    valid: bytes
    read: Read


def _table(task: str, name: str, format: str | None = None) -> Read:
    labels = {} if task == "span-extraction" else {"labels": ("a", "b")}
    columns = TASKS[task](**labels).columns

    def read(content: bytes, folder: Path) -> object:
        path = folder / name
        path.write_bytes(content)
        return read_table(path, columns=columns, format=format, cache_dir=folder / "cache")

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
        made = saved_run(folder / "checkpoints") / name
        made.write_bytes(content)
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
    return checkpointing.save_checkpoint(folder, state, facts={"seed": 1}, best_step=3, keep_last=2)


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
        TaskModel(config, SequenceClassification(labels=("a", "b"), max_length=16)).save_pretrained(folder)
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmno"]
        (folder / "vocab.txt").write_text("\n".join(words) + "\n", "utf-8")
    return folder


def loaders(folder: Path) -> Mapping[str, Target]:
    """Targets that need files of their own to start from."""
    run, model = saved_run(folder / "run"), saved_model(folder / "model")
    runs = {f"run {path.name}": Target(path.read_bytes(), _checkpoint_file(path.name)) for path in run.iterdir()}
    models = {f"model {path.name}": Target(path.read_bytes(), _model_file(path.name)) for path in model.iterdir()}
    return {**runs, **models}


@st.composite
def edited(draw: st.DrawFn, valid: bytes) -> bytes:
    """The valid content after up to six edits: bytes deleted, repeated or put in."""
    content = valid
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(content)))
        removed = draw(st.integers(0, 12))
        put_in = draw(st.sampled_from(TOKENS) | st.binary(max_size=6) | st.just(content[at : at + 20]))
        content = content[:at] + put_in + content[at + removed :]
    return content


def attempt(target: Target, content: bytes, folder: Path) -> bool:
    """Whether the content was read; anything but the package's own refusal escapes."""
    try:
        target.read(content, folder)
    except BertTasksError:
        return False
    return True


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
    @given(edited(target.valid))
    def run(content: bytes) -> None:
        nonlocal read
        read += attempt(target, content, folder)

    run()
    return read


def campaign(groups: Mapping[str, Mapping[str, Target]], folder: Path, seconds: float) -> dict[str, int]:
    """Contents tried of each target, in rounds of 200 with another seed each, until the time of a group is up."""
    tried: dict[str, int] = {}
    for targets in groups.values():
        end, number = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            for name, target in targets.items():
                with tempfile.TemporaryDirectory(dir=folder) as place:
                    fuzz(target, Path(place), examples=200, seed_value=number)
                tried[name] = tried.get(name, 0) + 200
            number += 1
    return tried


def main() -> None:
    import fault_campaign

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=600.0, help="of each group: readers, recipes, loaders")
    seconds = parser.parse_args().seconds
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tried = campaign({"readers": READERS, "recipes": RECIPES, "loaders": loaders(folder)}, folder, seconds)
    found = {"cases": sum(tried.values()), "failures": 0, "skipped": 0, "details": tried}
    about = fault_campaign.provenance(f"python tests/support/fuzzing.py --seconds {seconds:g}", began)
    fault_campaign.write("fuzz", {**found, **about})


if __name__ == "__main__":
    main()
