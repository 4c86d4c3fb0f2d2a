"""What ``fit`` takes beside a model: rows in many forms, the settings of recipes by name, a report and a callback."""

import inspect
import json
from typing import get_args, get_type_hints

import pandas as pd
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

from bert_tasks import TaskModel, evaluate, fit, predict
from bert_tasks.data.options import ReadingArguments, ReadOptions
from bert_tasks.errors import DataError, RecipeError, UsageError
from bert_tasks.export import export
from bert_tasks.model.hf_names import HF_ARGUMENTS
from support.sampling import slow_except
from support.training_runs import LABELS, distance, load_model, make_rows, weights_of

QUICK = {"epochs": 1, "batch_size": 8, "learning_rate": 1e-3, "progress": False}
ROWS, OTHERS = make_rows(16), make_rows(9, seed=1)
NAMES = {"text": "review", "label": "stars"}


def renamed(rows):
    return [{NAMES[name]: value for name, value in row.items()} for row in rows]


def csv_of(path, rows):
    pd.DataFrame(renamed(rows)).to_csv(path, sep="|", index=False, encoding="utf-16")
    return path


def classes(rows):
    kinds = Features({"review": Value("string"), "stars": ClassLabel(names=list(LABELS))})
    return Dataset.from_list(renamed(rows)).cast(kinds)


FORMS = {
    "rows": lambda rows, folder: renamed(rows),
    "frame": lambda rows, folder: pd.DataFrame(renamed(rows), index=range(5, 5 + len(rows))),
    "dataset": lambda rows, folder: Dataset.from_list(renamed(rows)),
    "classes": lambda rows, folder: classes(rows),
    "file": lambda rows, folder: csv_of(folder / f"{len(rows)}.csv", rows),
}


@pytest.fixture(scope="module")
def plain(checkpoint, tmp_path_factory):
    """The weights that rows under the task's own names give, and their metrics."""
    model = load_model(checkpoint)
    result = fit(model, ROWS, OTHERS, output_dir=tmp_path_factory.mktemp("plain"), **QUICK)
    return weights_of(model), result.metrics


@pytest.mark.parametrize("form", slow_except(FORMS, "frame", "file"))
def test_the_form_of_the_rows_changes_nothing(checkpoint, tmp_path, plain, form):
    train, validation = (FORMS[form](rows, tmp_path) for rows in (ROWS, OTHERS))
    reading = {"delimiter": "|", "encoding": "utf-16"} if form == "file" else {}
    model = load_model(checkpoint)
    result = fit(model, train, validation, output_dir=tmp_path / "run", columns=NAMES, **reading, **QUICK)
    assert (distance(weights_of(model), plain[0]), result.metrics) == (0, plain[1])
    saved = TaskModel.from_pretrained(tmp_path / "run" / "model")  # it knows the names of its columns
    assert evaluate(saved, validation, **reading) == result.metrics


@pytest.mark.parametrize("form", ["rows", "file"])
def test_the_same_call_with_the_same_model_reports_the_finished_run(checkpoint, tmp_path, form):
    train, validation = (FORMS[form](rows, tmp_path) for rows in (ROWS, OTHERS))
    reading = {"delimiter": "|", "encoding": "utf-16"} if form == "file" else {}
    model = TaskModel.from_pretrained(checkpoint, task="sequence-classification", max_length=40)  # without labels
    first, second = (
        fit(model, train, validation, output_dir=tmp_path / "run", columns=NAMES, **reading, **QUICK) for _ in range(2)
    )
    assert (first.reused, second.reused) == (False, True)
    assert second.metrics == first.metrics


@pytest.mark.parametrize(("names", "form"), [(("False", "True"), "frame"), (("0", "1"), "records")])
def test_labels_that_pandas_reads_as_numbers_are_those_of_the_file(checkpoint, tmp_path, names, form):
    for name, rows in (("train", ROWS), ("dev", OTHERS)):
        named = [{**row, "label": names[LABELS.index(row["label"])]} for row in rows]
        pd.DataFrame(named).to_csv(tmp_path / f"{name}.csv", index=False)
    files = [tmp_path / "train.csv", tmp_path / "dev.csv"]
    frames = [pd.read_csv(file) for file in files]
    if names == ("0", "1"):  # as after dropna
        frames = [frame.astype({"label": float}) for frame in frames]
    data = frames if form == "frame" else [frame.to_dict("records") for frame in frames]
    fitted, metrics = [], []
    for number, (train, dev) in enumerate((files, data)):
        model = TaskModel.from_pretrained(checkpoint, task="sequence-classification", labels=names, max_length=40)
        metrics.append(fit(model, train, dev, output_dir=tmp_path / str(number), **QUICK).metrics)
        fitted.append(model)
    assert metrics[0] == metrics[1] == evaluate(fitted[0], data[1]) == evaluate(fitted[1], files[1])
    assert predict(fitted[0], data[1]) == predict(fitted[0], files[1])


def test_missing_values_of_a_frame_are_missing(checkpoint, tmp_path):
    frame = pd.DataFrame([*ROWS, {"text": float("nan"), "label": "positive"}])
    with pytest.raises(DataError, match=r"train:17: .* in column 'text'"):
        fit(load_model(checkpoint), frame, OTHERS, output_dir=tmp_path, **QUICK)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (DatasetDict(dev=Dataset.from_list(ROWS)), "the DatasetDict has no split 'train'. Its splits are 'dev'"),
        (Dataset.from_list(ROWS).to_iterable_dataset(), "train: cannot read IterableDataset. Pass a Dataset"),
        (3, "train: expected a file, a list of dicts .* not int"),
        (
            pd.DataFrame({"text": ["a", 1], "label": ["b", "c"]}),
            "train: a column of the DataFrame holds values of several types",
        ),
    ],
)
def test_what_holds_no_rows_is_named(checkpoint, tmp_path, rows, said):
    with pytest.raises(DataError, match=said):
        fit(load_model(checkpoint), rows, OTHERS, output_dir=tmp_path, **QUICK)


@pytest.mark.parametrize("form", slow_except(["frame", "rows", "file"], "frame"))
def test_a_column_of_splits_divides_the_rows(checkpoint, tmp_path, plain, form):
    tests = make_rows(5, seed=2)
    split = [*(["train"] * len(ROWS)), *(["dev"] * len(OTHERS)), *(["test"] * len(tests))]
    rows = [{**row, "split": name} for row, name in zip([*ROWS, *OTHERS, *tests], split, strict=True)]
    data = rows
    if form == "file":
        data = tmp_path / "all.csv"
        pd.DataFrame(rows).to_csv(data, index=False)
    elif form == "frame":
        data = pd.DataFrame(rows)
    model = load_model(checkpoint)
    result = fit(model, data, output_dir=tmp_path / "run", split_column="split", **QUICK)
    assert (distance(weights_of(model), plain[0]), result.metrics) == (0, plain[1])
    assert evaluate(model, data, split_column="split") == evaluate(model, tests)
    assert predict(model, data, split_column="split") == predict(model, tests)
    with pytest.raises(UsageError, match="split_column divides the rows of train, but validation is given"):
        fit(model, data, OTHERS, output_dir=tmp_path / "other", split_column="split", **QUICK)


def test_without_validation_rows_a_share_is_set_aside(checkpoint, tmp_path):
    fit(load_model(checkpoint), make_rows(40), output_dir=tmp_path, validation_share=0.25, **QUICK)
    data = json.loads((tmp_path / "run.json").read_text("utf-8"))["data"]
    assert {name: table["rows"] for name, table in data.items()} == {"train": 30, "validation": 10}
    with pytest.raises(RecipeError, match=r"validation_share = 1\.5"):
        fit(load_model(checkpoint), make_rows(40), output_dir=tmp_path / "b", validation_share=1.5, **QUICK)


def unpacked(function):
    """The TypedDict of the keyword arguments."""
    *_, keywords = inspect.signature(function).parameters.values()
    return get_args(keywords.annotation)[0]


@pytest.mark.parametrize("function", [fit, evaluate, predict, export])
def test_every_option_of_reading_is_an_argument_that_editors_know(function):
    hints = get_type_hints(ReadOptions)
    for internal in ("document", "split", "__pydantic_config__"):
        hints.pop(internal)
    assert get_type_hints(ReadingArguments) == hints
    assert unpacked(function).__annotations__.keys() >= hints.keys()


@pytest.mark.parametrize(
    ("function", "name", "meant"), [(evaluate, "delimter", "delimiter"), (predict, "setings", "settings")]
)
def test_an_unknown_argument_is_told_the_one_that_was_meant(function, name, meant):
    with pytest.raises(UsageError, match=f"{function.__name__}: unknown argument '{name}', did you mean '{meant}'"):
        function("nowhere", [], **{name: ";"})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("num_train_epochs", "Use epochs"),
        ("per_device_train_batch_size", "Use batch_size, which counts"),
        ("lr", "Use learning_rate"),
        ("load_best_model_at_end", "The model ends with the best weights"),
        ("learning_rat", "did you mean 'learning_rate'"),
        ("seeds", "did you mean 'seed'"),
        ("deepspeed", "A model must fit on one device"),
        ("compute_metrics", "Use metrics, a function of predictions"),
    ],
)
def test_an_argument_of_transformers_or_a_slip_is_told_ours(checkpoint, tmp_path, name, said):
    with pytest.raises(UsageError, match=f"fit: unknown argument '{name}'.*{said}"):
        fit(load_model(checkpoint), ROWS, OTHERS, output_dir=tmp_path / "run", **{name: 1}, **QUICK)
    assert not (tmp_path / "run").exists()


def test_hints_name_arguments_that_exist():
    shown = {*inspect.signature(fit).parameters, *unpacked(fit).__annotations__}
    assert not HF_ARGUMENTS.keys() & shown
    named = [ours.partition("=")[0].partition(",")[0].partition(".")[0] for ours in HF_ARGUMENTS.values()]
    unknown = {name for name in named if name not in shown and not name[0].isupper()}
    assert unknown == {f"the setting {name} of the model's task" for name in ("label_smoothing", "max_length")}


def test_the_callback_sees_every_line_that_is_recorded(checkpoint, tmp_path):
    seen = []
    settings = {**QUICK, "epochs": 2, "logging_steps": 1}
    result = fit(load_model(checkpoint), ROWS, OTHERS, output_dir=tmp_path, callback=seen.append, **settings)
    lines = (tmp_path / "metrics.jsonl").read_text("utf-8").splitlines()
    assert seen == [json.loads(line) for line in lines]
    assert [record["event"] for record in seen] == ["step", "step", "evaluation"] * 2
    assert not result.stopped_early


@pytest.mark.parametrize(("event", "steps"), [("evaluation", 4), ("step", 6)])
def test_the_callback_may_end_the_run_at_an_evaluation(checkpoint, tmp_path, event, steps):
    settings = {**QUICK, "epochs": 3, "logging_steps": 1, "output_dir": tmp_path}
    model = load_model(checkpoint)
    result = fit(
        model, ROWS, OTHERS, callback=lambda record: record["event"] == event and record["step"] >= 4, **settings
    )
    assert (result.steps, result.stopped_early) == (steps, steps == 4)
    assert evaluate(model, OTHERS) == result.metrics
    assert fit(load_model(checkpoint), ROWS, OTHERS, **settings).reused
