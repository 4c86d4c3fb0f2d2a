"""kill -9 at random moments: the same command always goes on, and the end is that of a run nobody disturbed.

A chain is one run that is killed several times, in turn while it starts, trains, saves and evaluates, and then left to
end. BERT_TASKS_KILLS sets the kills of a chain (4), BERT_TASKS_CHAINS the chains (1). A single chain with two tasks has
half of the kills. `make faults` tries more of both, and a run with a teacher too.
"""

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from bert_tasks import load_recipe, train
from bert_tasks.training.checkpoints import newest_checkpoint
from support import runs
from support.small_checkpoints import edit_config, save_checkpoint
from support.training_runs import load_model, make_rows

KILLS, CHAINS = (int(os.environ.get(f"BERT_TASKS_{name}", default)) for name, default in (("KILLS", 4), ("CHAINS", 1)))
MOMENTS = ("start-up", "training", "saving", "evaluation")
EPOCH_STEPS = 10
START_UP_SECONDS = 3.0
KILLS_OF_TASKS = KILLS if CHAINS > 1 else KILLS // 2
RUN_TYPES = ["labels", "tasks", "teacher"] if CHAINS > 1 else ["labels", "tasks"]


TASKS = """
[tasks.labels]
task = "sequence-classification"
max_length = 40
data = {train = "train.csv", validation = "dev.csv"}
[tasks.tags]
task = "token-classification"
max_length = 40
data = {train = "tagged.jsonl", validation = "tagged.jsonl"}
"""


def kills_of(run_type: str) -> int:
    return KILLS_OF_TASKS if run_type == "tasks" else KILLS


def write_long_recipe(folder: Path, checkpoint: Path, run_type: str) -> Path:
    """Evaluations that take about as long as an epoch, so that there is time to be killed in them."""
    rows, epochs = 20 if run_type == "tasks" else 40, 6 + 2 * kills_of(run_type)
    path = runs.write_recipe(folder, checkpoint, rows=rows, epochs=epochs)
    if run_type == "tasks":
        texts = [row["text"].split() for row in make_rows(20)]
        rows = [json.dumps({"words": words, "tags": [word[0].upper() for word in words]}) for words in texts]
        (folder / "tagged.jsonl").write_text("\n".join(rows) + "\n", "utf-8")
        model, settings = path.read_text("utf-8").split("[settings]\n")
        optim = settings.split("[optim]\n")[1]
        path.write_text(model.split("\n", 1)[1] + TASKS + '[optim]\nsampling = "equal"\n' + optim, "utf-8")
    if run_type == "teacher":
        load_model(checkpoint, seed=3).save_pretrained(folder / "teacher")
        path.write_text(path.read_text("utf-8") + '\n[teacher]\nname = "./teacher"\n', "utf-8")
    lines = [f"{row['text']},{row['label']}" for row in make_rows(300, seed=1)]
    (folder / "dev.csv").write_text("\n".join(["text,label", *lines]) + "\n", "utf-8")
    return path


@pytest.fixture(scope="module", params=RUN_TYPES)
def run_type(request: pytest.FixtureRequest) -> str:
    """What the run learns from: labels, the rows of two tasks, drawn equally often, or labels and a teacher."""
    return str(request.param)


@pytest.fixture(scope="module")
def undisturbed(checkpoint: Path, run_type: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    recipe = write_long_recipe(folder, checkpoint, run_type)
    train(load_recipe(recipe), progress=False)
    return folder / "run"


def await_moment(program: runs.Program, run: Path, moment: str, chance: random.Random) -> None:
    """Waits for a random point of the kind, after a step more than the run has already done."""
    before = runs.steps_done(run)
    if moment == "start-up":
        time.sleep(chance.uniform(0.05, START_UP_SECONDS))
        return
    program.until(lambda: runs.steps_done(run) != before, seconds=60)
    if moment == "training":
        target = runs.steps_done(run) + chance.randrange(EPOCH_STEPS)
        program.until(lambda: runs.steps_done(run) >= target or is_done(run))
    elif moment == "saving":
        program.until(lambda: any((run / "checkpoints").glob("*.tmp-*")) or is_done(run))
        time.sleep(chance.choice((0.0, chance.uniform(0, 0.01))))
    else:
        program.until(lambda: is_evaluating(run) or is_done(run))
        time.sleep(chance.uniform(0, 0.05))


def is_done(run: Path) -> bool:
    return (run / "metrics.json").exists()


def is_evaluating(run: Path) -> bool:
    log = (run / "metrics.jsonl").read_text("utf-8") if (run / "metrics.jsonl").exists() else ""
    steps = log.count('"event": "step"')
    return steps > 0 and steps % EPOCH_STEPS == 0 and steps // EPOCH_STEPS > log.count('"event": "evaluation"')


def found_in(run: Path, moment: str) -> str:
    """What the process was doing when it died, as far as its files tell."""
    if any((run / "checkpoints").glob("*.tmp-*")) or any((run / "checkpoints").glob("*.old-*")):
        return "saving"
    if not (run / "run.json").exists() or moment == "start-up":
        return "start-up"
    return "evaluation" if is_evaluating(run) else "training"


def names(run: Path) -> set[str]:
    return {path.name for path in [*run.iterdir(), *(run / "checkpoints").iterdir()]}


@pytest.mark.slow
@pytest.mark.parametrize("chain", range(CHAINS))
def test_a_run_that_is_killed_again_and_again_ends_as_if_it_were_not(
    undisturbed: Path,
    run_type: str,
    checkpoint: Path,
    tmp_path: Path,
    chain: int,
    record_property: Callable[[str, object], None],
) -> None:
    chance, run = random.Random(chain), tmp_path / "run"
    recipe = write_long_recipe(tmp_path, checkpoint, run_type)
    kills = kills_of(run_type)
    killed: Counter[str] = Counter()
    while killed.total() < kills:
        moment = min(MOMENTS, key=lambda name: killed[name])
        program = runs.Program([*runs.CONSOLE, "train", recipe], folder=tmp_path)
        await_moment(program, run, moment, chance)
        if program.process.poll() is not None:
            break  # it ended before it could be killed
        program.send(signal.SIGKILL)
        program.wait()
        killed[found_in(run, moment)] += 1
        newest_checkpoint(run / "checkpoints")  # raises if there are some and none is good
        assert len(list((run / "checkpoints").glob("*.*-*"))) <= 2
    assert killed.total() == kills, "the run ended before it was killed often enough"
    ended = runs.run([*runs.CONSOLE, "train", recipe], folder=tmp_path)
    assert ended.code == 0, ended.err
    assert runs.digests(run) == runs.digests(undisturbed)
    assert runs.events(run) == runs.events(undisturbed)
    assert names(run) - {"report.html"} == names(undisturbed)  # the command writes a report
    for moment in MOMENTS:
        record_property(moment, killed[moment])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "electra"])
def test_masks_and_drawn_tokens_are_the_same_after_a_kill(
    family: str, bpe_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """Masked language modelling with pairs, and replaced-token detection; the run without a kill is in this process."""
    save_checkpoint(tmp_path / "base", family, bpe_tokenizer)
    edit_config(tmp_path / "base", hidden_dropout_prob=0.1)
    is_masked = family == "bert"
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        task = "masked-language-modeling" if is_masked else "replaced-token-detection"
        recipe = runs.write_recipe(tmp_path / name, tmp_path / "base", task=task, epochs=4)
        settings = '[settings]\nsentence_objective = "sop"\n' if is_masked else "[settings]\n"
        recipe.write_text(recipe.read_text("utf-8").replace("[settings]\n", settings), "utf-8")
    train(load_recipe(tmp_path / "whole" / "recipe.toml"), progress=False)
    run = tmp_path / "killed" / "run"
    program = runs.Program([*runs.CONSOLE, "train", recipe], folder=tmp_path / "killed")
    await_moment(program, run, "saving" if is_masked else "training", random.Random(family))
    program.send(signal.SIGKILL)
    assert program.wait().code == -signal.SIGKILL
    ended = runs.run([*runs.CONSOLE, "train", recipe], folder=tmp_path / "killed")
    assert ended.code == 0, ended.err
    assert runs.digests(run) == runs.digests(tmp_path / "whole" / "run")
    assert runs.events(run) == runs.events(tmp_path / "whole" / "run")
    if not is_masked:
        weights = [(tmp_path / name / "run/generator/model.safetensors").read_bytes() for name in ("whole", "killed")]
        assert weights[0] == weights[1]
