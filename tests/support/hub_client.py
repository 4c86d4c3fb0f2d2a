"""Owns a client of the hub in a process of its own: it does a list of things and says what became of each."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Each thing is [kind, ...]: what it answers is JSON, an error of the package as {"error": message, "kind": its class}.
_DO = """
import json, os, sys
from pathlib import Path
import torch
from bert_tasks import Encoder, TaskModel, load_recipe, predict, train
from bert_tasks.checkpoints.hub import resolve
from bert_tasks.errors import BertTasksError

def do(kind, *given):
    if kind == "token":
        os.environ["HF_TOKEN"] = given[0]
    elif kind == "encoder":
        name, revision = given
        encoder = Encoder.from_pretrained(name, revision=revision)
        return encoder(torch.arange(2, 8)[None]).double().sum().item()
    elif kind == "model":
        name, revision = given
        model = TaskModel.from_pretrained(name, revision=revision)
        (answer,) = model.predict([{"text": "the ferry leaves at seven"}])
        return {"score": answer.score, "origin": vars(model.origin)}
    elif kind == "int8":
        name, text = given
        (answer,) = predict(name, [{"text": text}], dtype="int8")
        return answer.score
    elif kind == "folder":
        return str(resolve(*given))
    elif kind == "train":
        recipe, folder, *overrides = given
        train(load_recipe(recipe, overrides=overrides, output_dir=folder), progress=False)
        return json.loads((Path(folder) / "run.json").read_text("utf-8"))

answers = []
for kind, *given in json.loads(sys.argv[1]):
    try:
        answers.append(do(kind, *given))
    except BertTasksError as error:
        answers.append({"error": str(error), "kind": type(error).__name__})
print("ANSWERS" + json.dumps(answers))
"""


def ask(environment: Mapping[str, str], things: Sequence[Sequence[object]], *, cwd: Path) -> tuple[list[Any], str]:
    """The answers, and all that was printed beside them."""
    program = [sys.executable, "-W", "ignore", "-c", _DO, json.dumps([list(map(_plain, thing)) for thing in things])]
    variables = {**environment, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(program, env=variables, cwd=cwd, capture_output=True, text=True, timeout=240)
    printed, mark, answers = done.stdout.rpartition("ANSWERS")
    assert mark, done.stderr
    return list(json.loads(answers)), printed + done.stderr


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value
