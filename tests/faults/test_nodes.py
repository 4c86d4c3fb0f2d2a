"""Two agents of torchrun, as on two machines, and a run that goes on with another number of processes."""

import signal
import socket
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

from bert_tasks import load_recipe, train
from support import runs
from support.training_runs import distance, save_checkpoint

pytestmark = pytest.mark.slow


def agents(port: int, recipe: Path, output: Path) -> list[list[object]]:
    """The same command for each of two nodes, with one process each."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc_per_node", 1]
    meeting = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}", "--rdzv_id", "nodes"]
    return [[*torchrun, *meeting, "-m", "bert_tasks", "train", recipe, "--output-dir", output] for _ in range(2)]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_two_nodes_train_the_weights_of_two_processes(recipe: Path, tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("first", "second", "together")]
    for folder in places:
        folder.mkdir()
    output = tmp_path / "nodes"
    nodes = [
        runs.Program(command, folder=folder)
        for command, folder in zip(agents(free_port(), recipe, output), places[:2], strict=True)
    ]
    for node in nodes:
        ended = node.wait()
        assert ended.code == 0, ended.err
    together = [*runs.TORCHRUN, "train", recipe, "--output-dir", tmp_path / "processes"]
    assert runs.run(together, folder=places[2]).code == 0
    assert runs.digests(output) == runs.digests(tmp_path / "processes")
    assert runs.events(output) == runs.events(tmp_path / "processes")


def test_a_run_of_two_processes_goes_on_with_one(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, bpe_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Without dropout the number of processes changes only rounding: equal losses say that samples were equal."""
    whole = tmp_path_factory.mktemp("whole")
    plain = save_checkpoint(tmp_path_factory.mktemp("plain"), bpe_tokenizer)
    recipe, straight = runs.write_recipe(tmp_path, plain), runs.write_recipe(whole, plain)
    train(load_recipe(straight), progress=False)
    program = runs.Program([*runs.TORCHRUN, "train", recipe], folder=tmp_path)
    program.until(lambda: runs.steps_done(tmp_path / "run") >= 13)
    program.send(signal.SIGTERM)
    program.wait()
    stopped = runs.steps_done(tmp_path / "run")
    ended = runs.run([*runs.CONSOLE, "train", recipe], folder=tmp_path)
    assert ended.code == 0, ended.err
    assert f"resumed after step {stopped} " in ended.err
    for ours, theirs in zip(runs.events(tmp_path / "run"), runs.events(whole / "run"), strict=True):
        assert (ours["event"], ours["step"]) == (theirs["event"], theirs["step"])
        if ours["event"] == "step":
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    weights = [load_file(runs.newest(folder / "run") / "weights.safetensors") for folder in (tmp_path, whole)]
    assert distance(*weights) < 1e-4
