"""Every Example in a docstring on the pages of the reference runs, on a small checkpoint, and prints what it shows.

An example without an expected output only has to run. Each of them starts in a copy of the same folder.
"""

import doctest
import inspect
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import bert_tasks
from bert_tasks import Encoder, TaskModel, load_recipe, train
from bert_tasks.encoder.int8 import int8_obstacle
from bert_tasks.recipe.check import prepare
from bert_tasks.tasks.windows.words import WindowRules, split_words
from support.reference import documented, documented_methods
from support.small_checkpoints import save_checkpoint

BASE, ELECTRA = "google-bert/bert-base-uncased", "google/electra-small-discriminator"
TEXTS = {"complaint": ("Cold soup.", "Rude waiter.", "We waited an hour."), "praise": ("Kind staff.", "A lovely room.")}
RECIPE = f"""
task = "sequence-classification"
[model]
name = "{BASE}"
[settings]
max_length = 32
[data]
train = "train.csv"
validation = "dev.csv"
[optim]
max_steps = 20
learning_rate = 1e-3
[run]
output_dir = "runs/recipe"
"""
SEARCH = """
[search]
trials = 2
learning_rate = {low = 1e-5, high = 1e-4, log = true}
"""
PAGES = Path(__file__).parents[1] / "docs" / "reference"
PUBLIC = documented(PAGES)
EXAMPLES = {
    name: value for name, value in {**PUBLIC, **documented_methods(PAGES)}.items() if ">>>" in str(value.__doc__)
}
# What functions return, what a report or an explanation is made of, and functions that need a task of one's own.
WITHOUT_EXAMPLE = re.compile(
    r"\.(errors\.\w+|\w+(Result|Prediction)|Written|Quantization|Export|Report|Push|EntitySpan|Span|Candidate|TaskSettings"
    r"|labelled_samples|row_logits|shown_logits|ReportSections|RowResult|TokenSpan|ExplainedLogit|EncodedText)$"
)


class Checker(doctest.OutputChecker):
    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


def write_csv(path: Path, *, count: int, header: str = "text,label", separator: str = ",") -> None:
    rows = [f"{text}{separator}{label}" for label, texts in TEXTS.items() for text in texts]
    path.write_text("\n".join([header, *rows * count]) + "\n", encoding="utf-8")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, wordpiece_tokenizer: PreTrainedTokenizerBase) -> Iterator[Path]:
    """A folder with a base model, rows, recipes and a finished run."""
    folder = tmp_path_factory.mktemp("examples")
    save_checkpoint(folder / BASE, "bert", wordpiece_tokenizer, positions=512)
    save_checkpoint(folder / ELECTRA, "electra", wordpiece_tokenizer, positions=512)
    write_csv(folder / "train.csv", count=4)
    for name in ("dev.csv", "test.csv"):
        write_csv(folder / name, count=1)
    write_csv(folder / "held_out.csv", count=8)
    write_csv(folder / "reviews.csv", count=1, header="review;label", separator=";")
    words = [[verb, "a", item] for item in ("table", "room", "seat", "boat") for verb in ("book", "cancel")]
    rows = [{"text": " ".join(row), "words": row, "slots": ["O", "O", "B-item"], "intent": row[0]} for row in words]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (folder / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    (folder / "search.toml").write_text(RECIPE.replace("max_steps = 20", "max_steps = 2") + SEARCH, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train(load_recipe("recipe.toml", output_dir="runs/first"), progress=False)
    yield folder
    shutil.rmtree(folder)


def names(folder: Path, text: str) -> dict[str, Any]:
    """What an example names: everything on the pages, and of the objects that the pages introduce those in its text."""
    pair = {"task": "pair-classification"}
    introduced: dict[str, Callable[[], Any]] = {
        "base": lambda: BASE,
        "model": lambda: TaskModel.from_pretrained(folder / "runs" / "first"),
        "task": lambda: TaskModel.from_pretrained(folder / "runs" / "first").task,
        "tokenizer": lambda: AutoTokenizer.from_pretrained(folder / BASE),
        "rows": lambda: [{"text": "Cold soup.", "label": "complaint"}],
        "encoder": lambda: Encoder.from_pretrained(folder / BASE),
        "reranker": lambda: TaskModel.from_pretrained(folder / BASE, **pair, problem_type="regression"),
        "nli": lambda: TaskModel.from_pretrained(folder / BASE, **pair, labels=["entailment", "neutral"]),
        "prepare": lambda: prepare,
        "rules": lambda: WindowRules.of(AutoTokenizer.from_pretrained(folder / BASE), max_length=32, overlap=8),
        "words": lambda: split_words([["Cold", "soup"]], AutoTokenizer.from_pretrained(folder / BASE), longest=30)[0],
        "torch": lambda: torch,
    }
    named = set(re.findall(r"\w+", text))
    used = {name: make() for name, make in introduced.items() if name in named}
    return {**{value.__name__: value for value in PUBLIC.values()}, **used}


@pytest.mark.slow  # some of them train
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_prints_what_it_shows(
    name: str, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "bert_tasks.inference.quantize" and int8_obstacle() is not None:
        pytest.skip(f"{int8_obstacle()}")
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    text = inspect.getdoc(EXAMPLES[name]) or ""
    example = doctest.DocTestParser().get_doctest(text, names(tmp_path, text), name, None, 0)
    assert example.examples, f"{name} has no Example"
    told: list[str] = []
    runner = doctest.DocTestRunner(Checker(), verbose=False, optionflags=doctest.ELLIPSIS)
    runner.run(example, out=told.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(told)


def test_every_public_name_has_an_example() -> None:
    assert [name for name in PUBLIC if name not in EXAMPLES and not WITHOUT_EXAMPLE.search(name)] == []
    assert {f"bert_tasks.{name}" for name in bert_tasks.__all__} <= set(PUBLIC)
