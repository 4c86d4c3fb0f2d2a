"""Metrics of one's own in a run: recorded, shown, able to choose the best model, tried before the first step."""

import json
import sys
from itertools import count

import pytest

from bert_tasks import fit, load_recipe, train
from bert_tasks.errors import UsageError
from bert_tasks.experiments.folds import train_folds
from bert_tasks.experiments.search import search
from bert_tasks.model.multitask import MultiTaskModel
from bert_tasks.recipe.toml import combined
from bert_tasks.training.files import without_folders
from support import runs
from support.evaluation_modules import write_module
from support.several_tasks import ROWS as BOTH
from support.several_tasks import TASKS
from support.stopped_runs import run, stopped
from support.task_examples import CLASSES, EXAMPLES
from support.training_runs import load_model, make_rows

ROWS = make_rows(16)
QUICK = {"epochs": 1, "batch_size": 8, "learning_rate": 1e-3, "progress": False}
FUNCTIONS = """
from itertools import count

def share(predictions, references):
    return {"share": sum(predictions) / len(predictions)}

share.lower_is_better = {"share"}

def raises(predictions, references):
    raise ValueError("no such class")

def long(predictions, references):
    if len(predictions) < 3:
        raise ValueError("needs three rows")
    return {"long": 1.0}

def first(predictions, references):
    return predictions[0]
"""


@pytest.fixture(autouse=True)
def functions(tmp_path, monkeypatch):
    """The module ``toy_metrics``."""
    (tmp_path / "toy_metrics.py").write_text(FUNCTIONS, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    yield
    sys.modules.pop("toy_metrics", None)


def read(folder, name):
    return json.loads((folder / name).read_text("utf-8"))


def write_recipe(folder, checkpoint, *lines):
    path = runs.write_recipe(folder, checkpoint, epochs=1)
    path.write_text(path.read_text("utf-8") + "".join(f"{line}\n" for line in lines), "utf-8")
    return path


def test_they_are_in_the_files_the_report_the_card_and_on_the_screen(checkpoint, tmp_path, capfd):
    def cost(predictions, references):
        return {"cost": sum(one != other for one, other in zip(predictions, references, strict=True))}

    module = write_module(tmp_path, "glue")
    metrics, folder = ["toy_metrics:share", cost, f"evaluate:{module}:sst2"], tmp_path / "run"
    options = {**QUICK, "epochs": 2, "progress": True, "lower_is_better": ["cost"]}
    result = fit(load_model(checkpoint), ROWS, ROWS, output_dir=folder, metrics=metrics, report=True, **options)
    assert result.metrics["cost"] == 16 * (1 - result.metrics["accuracy"])
    assert result.metrics["glue_accuracy"] == result.metrics["accuracy"]
    assert list(result.metrics)[-3:] == ["share", "cost", "glue_accuracy"]
    assert read(folder, "metrics.json")["metrics"] == result.metrics
    assert [event["metrics"].keys() >= {"cost", "share"} for event in runs.events(folder) if "metrics" in event] == [
        True,
        True,
    ]
    about = read(folder, "run.json")
    assert about["metrics"]["lower_is_better"] == ["cost", "ece", "loss", "share"]
    assert about["settings"]["run.metrics"] == [metrics[0], "cost", metrics[2]]
    printed = capfd.readouterr().err
    for text in (printed, (folder / "report.html").read_text("utf-8"), (folder / "model/README.md").read_text("utf-8")):
        assert "cost" in text
        assert "glue_accuracy" in text


def scripted(values):
    """A metric with the next of these values at each evaluation, after the one that tries it."""
    script = iter([0.5, *values])

    def cost(predictions, references):
        return next(script)

    return cost


@pytest.mark.parametrize(("source", "best"), [("setting", 4), ("function", 4), (None, 2)])
def test_the_best_model_may_be_that_of_a_metric_of_ones_own(checkpoint, tmp_path, source, best):
    cost, settings = scripted([0.9, 0.2, 0.4]), {**QUICK, "epochs": 3, "metric_for_best_model": "cost"}
    if source == "function":
        cost.lower_is_better = {"cost"}
    if source == "setting":
        settings["lower_is_better"] = ["cost"]
    result = fit(load_model(checkpoint), ROWS, ROWS[:8], output_dir=tmp_path / "run", metrics=[cost], **settings)
    assert result.best_step == best
    assert result.metrics["cost"] == {4: 0.2, 2: 0.9}[best]


def test_the_errors_of_evaluate_are_better_if_they_are_lower(checkpoint, tmp_path):
    import evaluate

    mse = write_module(tmp_path, "mse")
    joined = evaluate.combine([evaluate.load(str(mse))])
    model = load_model(checkpoint, EXAMPLES["regression"].task)
    rows = EXAMPLES["regression"].rows
    for number, metric in enumerate((f"evaluate:{mse}", joined)):
        folder = tmp_path / str(number)
        fit(model, rows, rows, output_dir=folder, metrics=[metric], metric_for_best_model="mse", **QUICK)
        assert "mse" in read(folder, "run.json")["metrics"]["lower_is_better"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metrics": ["toy_metrics:raises"]}, "metric 'raises' failed with ValueError: no such class"),
        ({"metrics": ["share"]}, "[run.metrics[0]] 'share' is neither 'evaluate:NAME_OR_PATH' nor 'module:function'"),
        ({"metrics": ["toy_metrics:share"] * 2}, "toy_metrics:share appears more than once"),
        ({"metrics": {"topic": ["toy_metrics:share"]}}, "the model has one task. Pass a list"),
        (
            {"metrics": ["toy_metrics:share"], "metric_for_best_model": "shares"},
            "metric_for_best_model is 'shares', expected one of loss, accuracy",
        ),
        (
            {"metrics": ["toy_metrics:share"], "lower_is_better": ["shares"]},
            "lower_is_better names 'shares', expected names among loss, accuracy",
        ),
    ],
)
def test_a_metric_that_gives_no_numbers_ends_in_one_message_before_the_first_step(
    checkpoint, tmp_path, capfd, options, message
):
    with pytest.raises(Exception, match=r".") as raised:
        fit(load_model(checkpoint), ROWS, ROWS[:8], output_dir=tmp_path / "fit", **options, **QUICK)
    assert message.partition("] ")[2] in str(raised.value) if message[0] == "[" else message in str(raised.value)
    assert raised.value.exit_code == 2
    assert not (tmp_path / "fit" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('metrics = ["toy_metrics:raises"]', "metric 'raises' failed with ValueError: no such class"),
        ("metrics = [3]", "3 is no metric. Expected 'evaluate:NAME_OR_PATH', 'module:function'"),
        ("metrics = 3", "metrics is 3, expected a list or a table"),
    ],
)
def test_the_command_exits_with_2(checkpoint, tmp_path, monkeypatch, capsys, line, message):
    from bert_tasks.cli import main

    monkeypatch.setattr(sys, "argv", ["bert-tasks", "train", str(write_recipe(tmp_path, checkpoint, line))])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "")
    assert printed.err.count(message) == 1
    assert "Traceback" not in printed.err
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_a_metric_that_needs_more_than_two_rows_is_tried_on_all(checkpoint, tmp_path):
    settings = {**QUICK, "metrics": ["toy_metrics:long"], "metric_for_best_model": "long"}
    assert fit(load_model(checkpoint), ROWS, ROWS[:3], output_dir=tmp_path / "a", **settings).metrics["long"] == 1
    with pytest.raises(UsageError, match="metric 'long' failed with ValueError: needs three rows"):
        fit(load_model(checkpoint), ROWS, ROWS[:2], output_dir=tmp_path / "b", **settings)


def test_a_metric_that_chooses_the_model_has_to_be_there_each_time(checkpoint, tmp_path):
    calls = count()

    def sometimes(predictions, references):
        return {"cost": 1.0} if next(calls) < 2 else {"other": 1.0}

    settings = {**QUICK, "epochs": 3, "metric_for_best_model": "cost", "metrics": [sometimes]}
    with pytest.raises(UsageError, match="metric_for_best_model is 'cost', which this evaluation does not report"):
        fit(load_model(checkpoint), ROWS, ROWS[:8], output_dir=tmp_path / "run", **settings)


def test_a_recipe_names_functions_and_modules_beside_it(checkpoint, tmp_path, monkeypatch):
    module = write_module(tmp_path / "mine", "accuracy")
    lines = ('metrics = ["toy_metrics:share", "evaluate:mine/accuracy"]', 'metric_for_best_model = "accuracy_accuracy"')
    recipe = load_recipe(write_recipe(tmp_path, checkpoint, *lines))
    assert recipe.run.metrics == ("toy_metrics:share", f"evaluate:{module}")
    monkeypatch.chdir(tmp_path / "mine")
    result = train(recipe, progress=False)
    assert result.metrics["accuracy_accuracy"] == result.metrics["accuracy"]
    stored = load_recipe(tmp_path / "run" / "recipe.toml")
    assert stored.run.metrics == recipe.run.metrics
    assert train(stored, progress=False).reused
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["accuracy"]
    card = (tmp_path / "run" / "model" / "README.md").read_text("utf-8")
    assert '"evaluate:accuracy"' in card
    assert str(tmp_path) not in card


def test_a_name_that_is_no_path_stays(tmp_path):
    names = [
        "evaluate:seqeval",
        "evaluate:glue:mrpc",
        "module:function",
        "evaluate:me/mine",
        "evaluate:toy_metrics.py:a",
    ]
    document = {"run": {"metrics": {"topic": names}}}
    absolute = combined(document, tmp_path, [])["run"]["metrics"]["topic"]
    assert absolute == [*names[:-1], f"evaluate:{tmp_path}/toy_metrics.py:a"]
    assert without_folders(absolute) == names


@pytest.mark.slow
def test_a_search_knows_the_direction(checkpoint, tmp_path):
    pytest.importorskip("optuna")
    lines = ('metrics = ["toy_metrics:share"]', 'metric_for_best_model = "share"', "[search]", "trials = 1")
    lines = (*lines, 'pruner = "none"', "learning_rate = {choices = [1e-3, 1e-4]}")
    path = write_recipe(tmp_path, checkpoint, *lines)
    assert search(load_recipe(path), progress=False).lower_is_better


def test_the_models_of_folds_are_chosen_by_it(checkpoint, tmp_path):
    lines = ('metrics = ["toy_metrics:share"]', 'metric_for_best_model = "share"', "[folds]", "count = 2")
    path = write_recipe(tmp_path, checkpoint, *lines)
    text = path.read_text("utf-8")
    path.write_text(text.replace('validation = "dev.csv"\n', ""), "utf-8")
    result = train_folds(load_recipe(path), progress=False)
    assert all("share" in run.validation_metrics for run in result.runs)


def two_tasks(checkpoint):
    return MultiTaskModel.from_pretrained(checkpoint, tasks=TASKS)


def test_metrics_of_several_tasks_have_their_names(checkpoint, tmp_path):
    def rows(predictions, references):
        return len(predictions)

    rows.lower_is_better = {"rows"}
    settings = {**QUICK, "metric_for_best_model": "topic.rows"}
    sets = {"a": BOTH[:4], "b": BOTH}
    settings["metric_for_best_model"] = "b/topic.rows"
    result = fit(two_tasks(checkpoint), BOTH, sets, output_dir=tmp_path / "all", metrics=[rows], **settings)
    added = {name: value for name, value in result.metrics.items() if name.endswith("rows")}
    assert added == {"a/slots.rows": 4, "a/topic.rows": 4, "b/slots.rows": 8, "b/topic.rows": 8}
    lower = read(tmp_path / "all", "run.json")["metrics"]["lower_is_better"]
    assert {"slots.rows", "topic.rows"} <= set(lower)


def test_metrics_may_be_of_some_of_several_tasks(checkpoint, tmp_path):
    module = write_module(tmp_path, "seqeval")
    metrics = {"slots": [f"evaluate:{module}"], "topic": ["toy_metrics:first"]}
    result = fit(two_tasks(checkpoint), BOTH, BOTH, output_dir=tmp_path / "run", metrics=metrics, **QUICK)
    added = [name for name in result.metrics if "first" in name or "seqeval" in name]
    assert "topic.first" in added
    assert result.metrics["slots.seqeval_overall_f1"] == result.metrics["slots.overall_f1"]
    assert not [name for name in added if name not in ("topic.first",) and not name.startswith("slots.seqeval_")]
    with pytest.raises(UsageError, match="given for the task 'slot', but the model has the tasks slots, topic"):
        fit(
            two_tasks(checkpoint),
            BOTH,
            BOTH,
            output_dir=tmp_path / "b",
            metrics={"slot": ["toy_metrics:first"]},
            **QUICK,
        )
    with pytest.raises(UsageError, match="metric 'seqeval' failed"):
        fit(two_tasks(checkpoint), BOTH, BOTH, output_dir=tmp_path / "c", metrics=metrics["slots"], **QUICK)


def test_the_metric_of_a_later_task_is_tried_before_the_first_step(checkpoint, tmp_path):
    first, last = ([{"text": row["text"], "topic": row["label"]} for row in CLASSES], BOTH)
    metrics = {"slots": ["toy_metrics:raises"]}
    with pytest.raises(UsageError, match="metric 'raises' failed"):
        fit(two_tasks(checkpoint), BOTH, [*first, *last], output_dir=tmp_path / "run", metrics=metrics, **QUICK)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_resumed_run_may_have_other_metrics_but_no_other_direction(dropout_checkpoint, tmp_path):
    folder, metrics = tmp_path / "run", ["toy_metrics:share"]
    run(tmp_path / "whole", dropout_checkpoint, metrics=metrics)
    stopped(4, folder, dropout_checkpoint, metrics=metrics)
    with pytest.raises(UsageError, match=r"differs in run\.lower_is_better"):
        run(folder, dropout_checkpoint, metrics=metrics, lower_is_better=["share"])
    _, result = run(folder, dropout_checkpoint, metrics=[*metrics, "toy_metrics:long"], report=True)
    assert runs.digests(folder) == runs.digests(tmp_path / "whole")
    assert result.last_metrics["long"] == 1
    (change,) = read(folder, "run.json")["changes"]
    assert "run.metrics" in change["change"]


@pytest.mark.slow
def test_two_processes_report_the_same(checkpoint, tmp_path):
    module = write_module(tmp_path, "accuracy")
    line = f'metrics = ["toy_metrics:share", "evaluate:{module}"]'
    recipe = write_recipe(tmp_path, checkpoint, line)
    single = train(load_recipe(recipe, output_dir=tmp_path / "single"), progress=False)
    ended = runs.run([*runs.TORCHRUN, "train", recipe], folder=tmp_path)
    assert ended.code == 0, ended.err
    assert read(tmp_path / "run", "metrics.json")["metrics"].keys() == single.metrics.keys()
    assert {"share", "accuracy_accuracy"} <= single.metrics.keys()
    recipe = write_recipe(tmp_path, checkpoint, 'metrics = ["toy_metrics:raises"]')
    broken = runs.run([*runs.TORCHRUN, "train", recipe, "--overwrite"], folder=tmp_path)
    # torchrun may end the main process before it has printed its message.
    assert broken.err.count("metric 'raises' failed with ValueError") in (0, 1), broken.err
    assert "exitcode  : 2" in broken.err
