"""A family that is one data file: added to families/, it works on the command line with no other edit.

It is a family of transformers that is RoBERTa under another prefix. A family with names and options of its own is in
test_unusual_options.py.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from transformers import PreTrainedTokenizerBase

import bert_tasks
from support.hf_models import widen

DATA2VEC = '''"""data2vec for texts (Baevski et al., 2022): RoBERTa under another prefix."""

from dataclasses import replace

from bert_tasks.families.base import architectures
from bert_tasks.families.roberta import FAMILY as ROBERTA

FAMILY = replace(
    ROBERTA,
    model_type="data2vec-text",
    prefix="data2vec_text.",
    fields={**ROBERTA.fields, "vocab_size": ("vocab_size", 30522)},
    architectures=architectures("Data2VecText"),
)
'''
# Prints for each of transformers' classes how far its logits are from ours.
COMPARE = """
import sys
import torch
import transformers
from bert_tasks.model.task_model import TaskModel

for name in sys.argv[1:]:
    stock = getattr(transformers, name).from_pretrained(name).eval()
    task = {"task": "masked-language-modeling"} if name.endswith("MaskedLM") else {}
    model = TaskModel.from_pretrained(name, **task)
    inputs = model.tokenizer(["the bird sang in the old harbour", "a dog"], padding=True, return_tensors="pt")
    with torch.no_grad():
        theirs, ours = stock(**inputs), model(**inputs)
    first = [theirs.start_logits, theirs.end_logits] if "start_logits" in theirs else [theirs.logits]
    expected = torch.stack(first, -1) if len(first) == 2 else first[0]
    apart = (expected - ours).abs()
    real = inputs["attention_mask"].bool() if apart.dim() == 3 else slice(None)
    print(name, apart[real].max().item() <= 5e-5, expected.std().item() > 0.05)
"""
RECIPE = """
task = "sequence-classification"
[model]
name = "{name}"
[settings]
max_length = 40
[data]
train = "rows.jsonl"
validation = "rows.jsonl"
[optim]
epochs = 1
[run]
output_dir = "run"
"""
TINY = {
    "hidden_size": 36,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 56,
    "max_position_embeddings": 50,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}
ROWS = [{"text": "the bird sang", "label": "yes"}, {"text": "a dog", "label": "no"}] * 4


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A folder with a copy of the package and one more file."""
    source = Path(bert_tasks.__file__).parent
    shutil.copytree(source, tmp_path / "lib" / "bert_tasks", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "lib" / "bert_tasks" / "families" / "data2vec_text.py").write_text(DATA2VEC)
    return tmp_path / "lib"


def run(library: Path, *arguments: str | Path, module: str = "bert_tasks") -> str:
    environment = {**os.environ, "PYTHONPATH": str(library), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *(["-m", module] if module else []), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=library.parent, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_roberta_like_family_of_transformers_in_one_file(
    library: Path, tmp_path: Path, by_kind: dict[str, PreTrainedTokenizerBase]
) -> None:
    """Every head computes what transformers' class does, and stock transformers opens what a run saves."""
    tokenizer = by_kind["bpe"]
    config = transformers.Data2VecTextConfig(vocab_size=len(tokenizer), num_labels=3, **TINY)
    names = [f"Data2VecTextFor{head}" for head in ("SequenceClassification", "TokenClassification", "MaskedLM")]
    for name in [*names, "Data2VecTextForQuestionAnswering"]:
        config.num_labels = 2 if "Question" in name else 3
        model = getattr(transformers, name)(config)
        widen(model, seed=1)
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    (tmp_path / "compare.py").write_text(COMPARE)
    lines = run(library, "compare.py", *names, "Data2VecTextForQuestionAnswering", module="").splitlines()
    assert lines == [f"{name} True True" for name in [*names, "Data2VecTextForQuestionAnswering"]]

    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "recipe.toml").write_text(RECIPE.format(name="Data2VecTextForMaskedLM"))
    run(library, "train", "recipe.toml")
    assert "data2vec-text (Data2VecTextForSequenceClassification)" in run(library, "inspect", tmp_path / "run/model")
    stock, report = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "run" / "model", output_loading_info=True
    )
    assert type(stock).__name__ == "Data2VecTextForSequenceClassification"
    assert not any(report.values())
