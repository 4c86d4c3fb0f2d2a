"""Cross-validation: the runs of the folds, the predictions for all rows, and the metrics over them."""

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bert_tasks import TaskModel, batch_predictor, load_recipe, train
from bert_tasks.cli import main
from bert_tasks.data.columns import RECORD
from bert_tasks.data.rows import Rows
from bert_tasks.errors import CheckpointError, DivergedError, RecipeError, UsageError
from bert_tasks.experiments.folds import (
    FoldPredictions,
    FoldsResult,
    dry_run_folds,
    out_of_fold,
    train_folds,
    write_predictions,
)
from bert_tasks.experiments.seeds import train_seeds
from bert_tasks.outputs.classes import ClassPrediction
from bert_tasks.recipe.schema import Recipe
from bert_tasks.report import make_report
from bert_tasks.report.collect import gather, with_file_columns
from bert_tasks.report.label_issues import LabelIssue, issue_cells
from bert_tasks.report.results import file_cells
from support.training_runs import TASK, make_rows

ROWS = 24
CHANNELS = ("web", "phone", "mail")


def write(folder: Path, checkpoint: Path, *, settings: str = "", epochs: int = 1) -> Path:
    rows = enumerate(make_rows(ROWS))
    lines = [f"{row['text']} {number},{row['label']},{CHANNELS[number % 3]}" for number, row in rows]
    (folder / "train.csv").write_text("\n".join(["text,label,channel", *lines]) + "\n", "utf-8")
    path = folder / "recipe.toml"
    path.write_text(
        f'task = "sequence-classification"\n[model]\nname = "{checkpoint}"\n[settings]\nmax_length = 40\n{settings}'
        '[data]\ntrain = "train.csv"\nvalidation_share = 0.25\n'
        f"[optim]\nepochs = {epochs}\nbatch_size = 4\nlearning_rate = 1e-3\n"
        '[run]\noutput_dir = "out"\nlogging_steps = 1\n[folds]\ncount = 3\n',
        "utf-8",
    )
    return path


@pytest.fixture
def recipe(tmp_path: Path, checkpoint: Path) -> Callable[..., Recipe]:
    path = write(tmp_path, checkpoint)
    return lambda *overrides: load_recipe(path, overrides=overrides)


@pytest.fixture(scope="module")
def finished(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[FoldsResult, Recipe]:
    """A cross-validation that no test changes."""
    folder = tmp_path_factory.mktemp("folds")
    loaded = load_recipe(write(folder, checkpoint, settings='class_weights = "balanced"\n'))
    return train_folds(loaded, progress=False), loaded


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_every_row_is_predicted_once_by_a_model_that_did_not_see_it(finished: tuple[FoldsResult, Recipe]) -> None:
    result, _ = finished
    out = result.output_dir
    rows = lines_of(out / "out_of_fold.jsonl")
    assert [row["line"] for row in rows] == list(range(2, ROWS + 2))
    for fold in (1, 2, 3):
        data = json.loads((out / f"fold-{fold}" / "run.json").read_text("utf-8"))["data"]
        held_out = [row for row in rows if row["fold"] == fold]
        assert data["train"]["rows"] + data["validation"]["rows"] + len(held_out) == ROWS
        model = TaskModel.from_pretrained(out / f"fold-{fold}" / "model")
        for row, again in zip(held_out, model.predict([{"text": row["text"]} for row in held_out]), strict=True):
            assert row["label"] == again.label
            assert row["score"] == pytest.approx(again.score, abs=1e-5)


def test_columns_of_the_row_come_first(finished: tuple[FoldsResult, Recipe]) -> None:
    result, _ = finished
    first = lines_of(result.output_dir / "out_of_fold.jsonl")[0]
    assert list(first) == ["line", "text", "input.label", "fold", "label", "score", "scores"]


def test_rows_of_several_files_name_their_file(tmp_path: Path) -> None:
    """Lines are counted in each file."""
    files = [Rows.unchecked(make_rows(count), name) for name, count in (("a.csv", 2), ("b.csv", 3))]
    whole = Rows.joined(files)
    prediction = ClassPrediction(label="positive", score=1.0, scores={"negative": 0.0, "positive": 1.0})
    parts = [
        FoldPredictions(fold=fold, table=whole.select_part(indices), predictions=[prediction] * len(indices))
        for fold, indices in enumerate(([0, 3], [1, 2, 4]), start=1)
    ]
    rows, folds, predictions = out_of_fold(parts)
    assert [(row["file"], row["line"]) for row in rows] == [
        ("a.csv", 1),
        ("a.csv", 2),
        ("b.csv", 1),
        ("b.csv", 2),
        ("b.csv", 3),
    ]
    assert folds == [1, 2, 2, 1, 2]
    result = FoldsResult(
        output_dir=tmp_path,
        metric="accuracy",
        summary="",
        runs=(),
        rows=rows,
        predictions=predictions,
        folds=folds,
        task=TASK,
    )
    write_predictions(result)
    written = lines_of(tmp_path / "out_of_fold.jsonl")
    assert [(row["file"], row["line"]) for row in written] == [(row["file"], row["line"]) for row in rows]
    assert list(written[0])[:3] == ["line", "file", "text"]
    issue = LabelIssue(row=rows[2], label="a", suggested="b", probability=0.1, suggested_probability=0.9)
    assert list(issue_cells(issue, file_cells(issue.row)))[:2] == ["line", "file"]
    assert whole.select([3, 4]).joined_sources == ()


def test_metrics_are_of_all_rows_and_of_each_fold(finished: tuple[FoldsResult, Recipe]) -> None:
    result, _ = finished
    rows = lines_of(result.output_dir / "out_of_fold.jsonl")
    right = [row["label"] == row["input.label"] for row in rows]
    each = [
        statistics.fmean(is_right for is_right, row in zip(right, rows, strict=True) if row["fold"] == fold)
        for fold in (1, 2, 3)
    ]
    accuracy = result.metrics["accuracy"]
    assert accuracy.out_of_fold == pytest.approx(statistics.fmean(right))
    assert accuracy.mean == pytest.approx(statistics.fmean(each))
    assert accuracy.std == pytest.approx(statistics.stdev(each))
    assert result.metrics["loss"].out_of_fold is None
    summary = json.loads((result.output_dir / "folds.json").read_text("utf-8"))
    assert summary == json.loads(json.dumps(result.to_json()))
    assert [run["rows"] for run in summary["runs"]] == [8, 8, 8]
    assert f"predictions: {result.output_dir / 'out_of_fold.jsonl'}" in result.lines()


def test_weights_are_fitted_and_labels_ordered_alike(finished: tuple[FoldsResult, Recipe]) -> None:
    result, _ = finished
    tasks = [TaskModel.from_pretrained(run.output_dir / "model").task for run in result.runs]
    assert {task.output.labels for task in tasks} == {("negative", "positive")}
    assert all(len(task.output.balanced_weights) == 2 for task in tasks)


def test_a_finished_cross_validation_is_only_reported(finished: tuple[FoldsResult, Recipe]) -> None:
    result, loaded = finished
    before = {path: path.stat().st_mtime_ns for path in result.output_dir.rglob("*.safetensors")}
    again = train_folds(loaded, progress=False)
    assert all(run.reused for run in again.runs)
    assert again.to_json() == result.to_json()
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())


def test_the_run_of_a_fold_is_an_ordinary_run(
    finished: tuple[FoldsResult, Recipe], recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    result, _ = finished
    loaded = load_recipe(result.output_dir / "fold-2" / "recipe.toml", output_dir=tmp_path / "alone")
    assert loaded.folds is not None
    assert loaded.folds.fold == 2
    alone = train(loaded, progress=False)
    assert alone.metrics == result.runs[1].validation_metrics
    report = make_report(result.output_dir / "fold-2", tmp_path / "page.html")
    assert report.runs[0].missing == ()


def test_the_report_is_of_all_rows(finished: tuple[FoldsResult, Recipe], tmp_path: Path) -> None:
    result, _ = finished
    report = make_report(result.output_dir, tmp_path / "page.html", mistakes=tmp_path / "wrong.jsonl")
    assert report.results[0][""].rows == ROWS
    assert report.results[0][""].estimates["accuracy"].value == pytest.approx(result.metrics["accuracy"].out_of_fold)
    shown = [prediction.score for prediction in report.runs[0].predicted[0].predictions]
    assert shown == pytest.approx([prediction.score for prediction in result.predictions], abs=1e-5)
    assert max(shown) - min(shown) > 1e-3  # so that another order would be noticed
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "labels are spread evenly" in page
    assert '<th scope="col">fold 3</th>' in page
    assert f"{ROWS} held-out rows" in page
    wrong = [
        row["line"] for row in lines_of(result.output_dir / "out_of_fold.jsonl") if row["label"] != row["input.label"]
    ]
    assert sorted(row["line"] for row in lines_of(tmp_path / "wrong.jsonl")) == wrong
    assert report.to_json()["runs"][0]["folds"]["metric"] == "accuracy"


def test_slices_are_of_the_predictions_for_all_rows(finished: tuple[FoldsResult, Recipe], tmp_path: Path) -> None:
    """By a column that only the file has."""
    result, _ = finished
    report = make_report(result.output_dir, tmp_path / "page.html", by=["channel"])
    (slices,) = report.results[0][""].slices
    predicted = lines_of(result.output_dir / "out_of_fold.jsonl")
    for number, channel in enumerate(CHANNELS):
        (group,) = (row_slice for row_slice in slices.slices if row_slice.name == channel)
        is_right = [row["label"] == row["input.label"] for row in predicted[number::3]]
        assert (group.count, group.scores["accuracy"].value) == (8, pytest.approx(statistics.fmean(is_right)))
    single = make_report(result.output_dir / "fold-2", tmp_path / "page.html", by=["channel"]).results[0][""]
    assert {row_slice.name for row_slice in single.slices[0].slices} <= {*CHANNELS}
    assert sum(row_slice.count for row_slice in single.slices[0].slices) == single.rows


def test_rows_that_changed_have_no_slices(finished: tuple[FoldsResult, Recipe]) -> None:
    (run,) = gather([finished[0].output_dir])
    assert all(RECORD in row for row in with_file_columns(run).predicted[0].rows)
    rows = run.predicted[0].rows
    other_texts = [{**row, "text": other["text"]} for row, other in zip(rows, [*rows[1:], rows[0]], strict=True)]
    for changed in (rows[1:], other_texts):
        stale_run = replace(run, predicted=(replace(run.predicted[0], rows=changed),))
        with pytest.raises(UsageError, match=r"has changed while the report was made\. Run the command again"):
            with_file_columns(stale_run)


def test_a_folder_that_is_not_complete(finished: tuple[FoldsResult, Recipe], tmp_path: Path) -> None:
    folder = finished[0].output_dir
    for name in ("fold-1/run.json", "fold-2/run.json", "fold-3/run.json"):
        (tmp_path / "copy" / name).parent.mkdir(parents=True)
        (tmp_path / "copy" / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(UsageError, match=r"copy: the cross-validation is not finished\. Run the same command again"):
        make_report(tmp_path / "copy")
    (tmp_path / "copy" / "folds.json").write_bytes((folder / "folds.json").read_bytes())
    report = make_report(tmp_path / "copy")
    assert report.runs[0].missing[-1].startswith("The models could not predict their rows again: ")
    with pytest.raises(UsageError, match="--by needs the rows of all folds"):
        make_report(tmp_path / "copy", by=["label"])


def test_one_model_is_needed_for_other_rows(finished: tuple[FoldsResult, Recipe], tmp_path: Path) -> None:
    folder = finished[0].output_dir
    for options in ({"data": folder.parent / "train.csv"}, {"explain": 1}):
        with pytest.raises(UsageError, match=r"has a model for each fold\. Name the folder of one of them to "):
            make_report(folder, tmp_path / "page.html", **options)
    with pytest.raises(UsageError, match=r"'text', 'label', 'channel'$"):
        make_report(folder, tmp_path / "page.html", by=["group"])


def test_given_validation_rows_are_in_no_fold(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    (tmp_path / "dev.csv").write_text("text,label\na wonderful day,positive\na terrible day,negative\n", "utf-8")
    result = train_folds(recipe(f"data.validation={tmp_path / 'dev.csv'}", "folds.count=2"), progress=False)
    assert [row["line"] for row in lines_of(result.output_dir / "out_of_fold.jsonl")] == list(range(2, ROWS + 2))
    for run in result.runs:
        data = json.loads((run.output_dir / "run.json").read_text("utf-8"))["data"]
        assert (data["train"]["rows"], data["validation"]["rows"]) == (ROWS - run.rows, 2)


def test_an_interrupted_cross_validation_resumes(
    recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated = []

    def stop(*arguments: object, **options: object) -> None:
        evaluated.append(1)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("bert_tasks.experiments.folds.evaluate_data", stop)
        with pytest.raises(KeyboardInterrupt):
            train_folds(recipe("run.keep_checkpoints=true"), progress=False)
    assert evaluated == [1]
    result = train_folds(recipe("run.keep_checkpoints=true"), progress=False)
    assert [run.reused for run in result.runs] == [True, False, False]
    with monkeypatch.context() as patch:  # while runs are extended, the folder is not that of one cross-validation
        patch.setattr("bert_tasks.experiments.folds.evaluate_data", stop)
        with pytest.raises(KeyboardInterrupt):
            train_folds(recipe("run.keep_checkpoints=true", "optim.epochs=2"), progress=False)
    assert not (result.output_dir / "folds.json").exists()
    assert not (result.output_dir / "out_of_fold.jsonl").exists()


def test_other_folds_are_refused(finished: tuple[FoldsResult, Recipe]) -> None:
    _, loaded = finished
    assert loaded.folds is not None
    changed = loaded.model_copy(update={"folds": loaded.folds.model_copy(update={"count": 2})})
    with pytest.raises(UsageError, match=r"holds runs that differ in folds\.count = 2 \(was 3\)\. Choose"):
        train_folds(changed, progress=False)


@pytest.mark.slow  # five runs
def test_overwriting_replaces_all_folds(recipe: Callable[..., Recipe]) -> None:
    first = train_folds(recipe(), progress=False)
    replaced = train_folds(recipe("folds.count=2"), overwrite=True, progress=False)
    assert first.output_dir == replaced.output_dir
    names = sorted(path.name for path in replaced.output_dir.iterdir())
    assert names == ["fold-1", "fold-2", "folds.json", "out_of_fold.jsonl"]


def test_a_fold_that_diverges_is_named(recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(DivergedError, match=r"^fold 1, step "):
        train_folds(recipe("optim.learning_rate=1e30", "optim.epochs=3"), progress=False)


def test_folds_and_one_run_are_told_apart(recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(RecipeError, match="Call train_folds"):
        train(recipe(), progress=False)
    with pytest.raises(RecipeError, match=r"folds\.fold = 2 is a single run"):
        train_folds(recipe("folds.fold=2"), progress=False)
    with pytest.raises(RecipeError, match="fold is 4, but there are 3 folds"):
        recipe("folds.fold=4")
    with pytest.raises(RecipeError, match=r"run\.seeds and \[folds\] exclude each other"):
        recipe("run.seeds=[1, 2]")
    with pytest.raises(RecipeError, match=r"has \[folds\]"):
        train_seeds(recipe(), [1, 2], progress=False)
    assert dry_run_folds(recipe()).state == "a new run"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--folds", "1"], 2, "greater than or equal to 2"),
        (["--folds", "x"], 2, "--folds"),
        (["--folds", "3", "--seeds", "1,2"], 2, "--seeds and folds exclude each other"),
        (["--folds", "500"], 3, "too few for 500 folds"),
        (["--set", "folds.group=autor"], 3, "no column 'autor'"),
    ],
)
def test_wrong_input(
    recipe: Callable[..., Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.setattr("sys.argv", ["bert-tasks", "train", str(tmp_path / "recipe.toml"), *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == code
    assert message in capsys.readouterr().err


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["bert-tasks", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


@pytest.fixture
def folds(finished: tuple[FoldsResult, Recipe]) -> Path:
    return finished[0].output_dir


@pytest.mark.parametrize(
    "arguments",
    [
        ("predict", "--text", "a day"),
        ("evaluate", "new.txt"),
        ("serve",),
        ("push", "me/model", "--dry-run"),
        pytest.param(("export", "--to", "onnx", "--output", "exported"), marks=pytest.mark.slow),
        pytest.param(("embed", "new.txt"), marks=pytest.mark.slow),
        pytest.param(("inspect",), marks=pytest.mark.slow),
    ],
)
def test_commands_name_one_fold(
    folds: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new.txt").write_text("a day\n", "utf-8")
    name, *options = arguments
    assert command(monkeypatch, name, folds, *options) == 4
    error = capsys.readouterr().err
    assert "holds the models of several runs. Name one of them" in error
    assert str(folds / "fold-1") in error


def test_neither_a_start_nor_a_teacher(folds: Path, recipe: Callable[..., Recipe]) -> None:
    for setting in (f"model.name={folds}", f"teacher.name={folds}"):
        with pytest.raises(CheckpointError, match="holds the models of several runs"):
            train(recipe(setting, "folds.fold=1"), progress=False)
    with pytest.raises(CheckpointError, match="holds the models of several runs"):
        batch_predictor(folds)
