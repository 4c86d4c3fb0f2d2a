"""transformers.js opens exported folders. Needs node and the package:

npm install --prefix DIR @huggingface/transformers; NODE_PATH=DIR/node_modules pytest -m slow THIS_FILE
"""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from bert_tasks.export import export
from bert_tasks.inference import predict
from bert_tasks.model.encoder import Encoder
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks.base import Task
from support.small_checkpoints import save_checkpoint
from support.task_contract import unlabelled
from support.task_examples import EXAMPLES

pytestmark = pytest.mark.slow
TEXTS = ["nobody told the baker", "a cold wind brought rain", "is this seat free"]
PIPELINE = """
const { env, pipeline } = require('@huggingface/transformers');
env.allowRemoteModels = false;
const { task, folder, dtype, inputs, options } = JSON.parse(process.argv[1]);
(async () => {
  const run = await pipeline(task, folder, { dtype, local_files_only: true });
  const answers = [];
  for (const input of inputs) answers.push(await run(...input, options));
  console.log(JSON.stringify(answers));
})();
"""


def in_node(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node")
    return subprocess.run([node, "-e", script, *arguments], capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    if in_node("require.resolve('@huggingface/transformers')").returncode:
        pytest.skip("node does not find @huggingface/transformers")


def answers_of(task: str, folder: Path, inputs: list[list[str]], dtype: str = "fp32", **options: Any) -> list[Any]:
    request = {"task": task, "folder": str(folder), "dtype": dtype, "inputs": inputs, "options": options}
    process = in_node(PIPELINE, json.dumps(request))
    assert process.returncode == 0, process.stderr
    answers: list[Any] = json.loads(process.stdout.splitlines()[-1])
    return answers


@pytest.fixture
def saved(wordpiece_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Any:
    def folder(task: Task) -> Path:
        torch.manual_seed(3)
        save_checkpoint(tmp_path / "base", "bert", wordpiece_tokenizer, wide=True)
        model = TaskModel.from_pretrained(tmp_path / "base", task=task)
        torch.nn.init.normal_(getattr(model.head, "output", model.encoder.embeddings.word).weight, std=0.5)
        model.save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return folder


@pytest.mark.parametrize(("to", "dtype", "allowed"), [("onnx", "fp32", 1e-4), ("int8", "q8", 0.1)])
def test_labels(saved: Any, tmp_path: Path, to: Any, dtype: str, allowed: float) -> None:
    model, rows = saved(EXAMPLES["single"].task), unlabelled(EXAMPLES["single"])
    exported = export(model, to=to, output=tmp_path / "exported", data=rows)
    answers = answers_of("text-classification", exported.folder, [[text] for text in TEXTS], dtype, top_k=3)
    for text, answer, prediction in zip(TEXTS, answers, predict(exported.folder, TEXTS), strict=True):
        scores = {entry["label"]: entry["score"] for entry in answer}
        assert scores == pytest.approx(prediction.scores, abs=allowed), text


def test_tags_of_words(saved: Any, tmp_path: Path) -> None:
    exported = export(saved(EXAMPLES["token"].task), to="onnx", output=tmp_path / "exported")
    (answer,) = answers_of("token-classification", exported.folder, [[TEXTS[1]]], ignore_labels=[])
    (prediction,) = predict(exported.folder, [{"words": TEXTS[1].split()}])
    firsts = [token for token in answer if not token["word"].startswith("##")]
    assert [token["entity"] for token in firsts] == list(prediction.tags)
    assert [token["score"] for token in firsts] == pytest.approx(prediction.scores, abs=1e-4)


def test_answers(saved: Any, tmp_path: Path) -> None:
    exported = export(saved(EXAMPLES["span"].task), to="onnx", output=tmp_path / "exported")
    question, context = "who was told", TEXTS[0]
    (answer,) = answers_of("question-answering", exported.folder, [[question, context]])
    (prediction,) = predict(exported.folder, [{"question": question, "context": context}])
    assert answer["answer"] == prediction.answer


def test_masks(saved: Any, tmp_path: Path) -> None:
    exported = export(saved(EXAMPLES["masked"].task), to="onnx", output=tmp_path / "exported")
    text = "a cold [MASK] brought rain"
    (answer,) = answers_of("fill-mask", exported.folder, [[text]], top_k=3)
    (prediction,) = predict(exported.folder, [{"text": text}])
    best = prediction.masks[0][:3]
    assert [candidate["token"] for candidate in answer] == [candidate.token for candidate in best]
    assert [candidate["score"] for candidate in answer] == pytest.approx(
        [candidate.score for candidate in best], abs=1e-4
    )


def test_vectors(wordpiece_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "base", "bert", wordpiece_tokenizer, wide=True)
    exported = export(tmp_path / "base", to="onnx", task="embedding", output=tmp_path / "exported")
    assert exported.record["outputs"] == ["last_hidden_state"]
    request: dict[str, Any] = {"pooling": "mean", "normalize": True}
    answers = answers_of("feature-extraction", exported.folder, [[text] for text in TEXTS], **request)
    vectors = [list(answer["ort_tensor"]["cpuData"].values()) for answer in answers]
    expected = Encoder.from_pretrained(tmp_path / "base").embed(TEXTS)
    for vector, other in zip(vectors, expected, strict=True):
        assert vector == pytest.approx(list(other), abs=1e-4)
