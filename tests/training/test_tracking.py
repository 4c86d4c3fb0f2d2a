"""Trackers hold what metrics.jsonl holds, go on with a run, change no bit of it, and never end it."""

import json
import logging
import math
import os
import shutil
import signal
import sqlite3
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import accelerate.tracking
import pytest
from accelerate.tracking import TensorBoardTracker
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bert_tasks import fit
from bert_tasks.errors import RecipeError, StoppedError, UsageError
from bert_tasks.experiments.seeds import train_seeds
from bert_tasks.training import progress
from bert_tasks.training.progress import check_installed, points, tracker_config
from bert_tasks.training.records import EventRecord, MetricRecord, RunRecord
from support.runs import digests, events, newest, write_recipe
from support.training_runs import load_model, make_rows

ROWS, DEV = make_rows(20, seed=0), make_rows(6, seed=1)

Points = dict[tuple[str, int], list[float]]


def run(checkpoint: Path, folder: Path, *names: str, **settings: Any) -> None:
    options: dict[str, Any] = {
        "epochs": 2,
        "batch_size": 4,
        "learning_rate": 1e-3,
        "logging_steps": 3,
        "keep_checkpoints": True,
        "progress": False,
    }
    fit(load_model(checkpoint), ROWS, DEV, output_dir=folder, trackers=names, **options | settings)


def expected(folder: Path) -> Points:
    """(name, step) -> the values of metrics.jsonl, which has each once."""
    records = [EventRecord(**event) for event in logged(folder)]
    return {(name, record.step): [value] for record in records for name, value in points(record).items()}


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]


def in_tensorboard(folder: Path) -> Points:
    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    series: Points = {}
    for name in accumulator.Tags()["scalars"]:
        for point in accumulator.Scalars(name):
            series.setdefault((name, point.step), []).append(point.value)
    return series


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Asks the run to stop once metrics.jsonl has a step."""
    whole = progress.MetricsLogger.record

    def record(self: progress.MetricsLogger, event: Mapping[str, Any]) -> None:
        whole(self, event)
        if event["step"] == step:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(progress.MetricsLogger, "record", record)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkpoint: Path) -> None:
    monkeypatch.setattr(progress, "get_available_trackers", lambda: ["tensorboard"])
    check_installed(("tensorboard",))
    recipe = write_recipe(tmp_path, checkpoint)
    (tmp_path / "train.csv").unlink()  # it comes before the data
    with pytest.raises(UsageError, match=r"wandb and mlflow not installed, .*`pip install '\.\[tracking\]'`") as error:
        train_seeds(with_trackers(recipe, "tensorboard", "wandb", "mlflow"), [1])
    assert error.value.exit_code == 2
    with pytest.raises(UsageError, match="wandb not installed"):
        run(checkpoint, tmp_path / "fit", "wandb")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "fit").exists()


def with_trackers(recipe: Path, *names: str) -> Path:
    recipe.write_text(f"{recipe.read_text('utf-8')}trackers = {json.dumps(names)}\n", "utf-8")
    return recipe


def test_names_are_checked() -> None:
    with pytest.raises(RecipeError, match=r"trackers.0. is 'tensorbord', expected 'tensorboard', 'wandb', 'mlflow'"):
        fit(None, [], [], output_dir="x", trackers=["tensorbord"])  # type: ignore[arg-type]  # settings are checked first


def test_points_are_the_finite_numbers() -> None:
    numbers = {"loss": 0.5, "grad_norm": math.inf, "learning_rate": math.nan}
    step = EventRecord(event="step", step=3, epoch=1, **numbers)
    assert points(step) == {"train/epoch": 1, "train/loss": 0.5}
    metrics = {"dev_f1": 0.25, "loss": math.nan}
    evaluation = EventRecord(event="evaluation", step=3, epoch=1, metrics=metrics)
    assert points(evaluation) == {"validation/dev_f1": 0.25}
    assert points(EventRecord(event="diverged", step=4, loss=1.0)) == {}


def test_a_tracker_is_not_told_where_a_model_lies() -> None:
    metrics = MetricRecord(sets=[""], best="f1", primary="f1", lower_is_better=[], neutral=[])
    settings = {"model.name": "/home/ann/secret/base", "optim.epochs": 2}
    config = tracker_config(
        RunRecord(seed=1, task="", labels=[], metrics=metrics, data={}, rows=1, steps=1, settings=settings)
    )
    assert (config["model.name"], config["optim.epochs"]) == ("base", 2)


class TestTensorBoard:
    def test_it_has_what_metrics_jsonl_has_and_changes_nothing(self, dropout_checkpoint: Path, tmp_path: Path) -> None:
        run(dropout_checkpoint, tmp_path / "plain")
        run(dropout_checkpoint, tmp_path / "tracked", "tensorboard")
        assert events(tmp_path / "plain") == events(tmp_path / "tracked")
        assert digests(tmp_path / "plain") == digests(tmp_path / "tracked")
        series, reference = in_tensorboard(tmp_path / "tracked"), expected(tmp_path / "tracked")
        assert series.keys() == reference.keys()
        assert ("train/grad_norm", 3) in series
        assert ("validation/accuracy", 10) in series
        for key, (value,) in reference.items():
            assert series[key] == [pytest.approx(value, rel=1e-6)], key  # it keeps single precision
        config = next((tmp_path / "tracked" / "tensorboard").rglob("hparams.yml")).read_text("utf-8")
        assert "optim.learning_rate: 0.001" in config
        assert "versions.torch: 2." in config
        assert str(tmp_path) not in config

    def test_resuming_doubles_nothing(self, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            stop_at(patch, 6)
            with pytest.raises(StoppedError):
                run(checkpoint, tmp_path, "tensorboard", save_steps=3, logging_steps=1)
        assert max(step for _, step in in_tensorboard(tmp_path)) < 10
        shutil.rmtree(newest(tmp_path))  # as after a kill: a logged point is computed again
        run(checkpoint, tmp_path, "tensorboard", save_steps=3, logging_steps=1)
        series, reference = in_tensorboard(tmp_path), expected(tmp_path)
        assert {key: len(values) for key, values in series.items()} == dict.fromkeys(reference, 1)
        run(checkpoint, tmp_path, "tensorboard", epochs=3)  # a finished run, extended: the course so far is there too
        assert in_tensorboard(tmp_path).keys() == expected(tmp_path).keys()
        run(checkpoint, tmp_path, overwrite=True)
        assert not (tmp_path / "tensorboard").exists()
        assert not (tmp_path / "trackers.json").exists()

    def test_a_tracker_that_fails_does_not_end_the_run(
        self, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        whole, calls = TensorBoardTracker.log, []

        def full(self: TensorBoardTracker, values: dict[str, float], step: int) -> None:
            calls.append(step)
            if step > 3:  # at the evaluation after step 5
                raise OSError(28, "No space left on device")
            whole(self, values, step)

        monkeypatch.setattr(TensorBoardTracker, "log", full)
        with caplog.at_level(logging.WARNING, logger="bert_tasks"):
            run(checkpoint, tmp_path, "tensorboard")
        assert (tmp_path / "metrics.json").is_file()
        assert calls == [3, 5]
        (message,) = caplog.messages
        assert message.startswith("tracker tensorboard failed at step 5 (OSError: [Errno 28] No space left on device)")
        assert "metrics.jsonl has all records" in message

    def test_one_that_cannot_start_ends_a_run_that_has_not_begun(
        self, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def refused(self: TensorBoardTracker) -> None:
            raise ConnectionError("nobody there")

        monkeypatch.setattr(TensorBoardTracker, "start", refused)
        with pytest.raises(
            UsageError, match=r"tracker tensorboard cannot start \(ConnectionError: nobody there\)\. Fix"
        ):
            run(checkpoint, tmp_path, "tensorboard")
        run(checkpoint, tmp_path)
        run(checkpoint, tmp_path, "tensorboard", epochs=3)
        assert "tracker tensorboard cannot start" in caplog.text
        assert logged(tmp_path)[-1]["step"] == 15

    @pytest.mark.slow
    def test_each_seed_has_its_own(self, checkpoint: Path, tmp_path: Path) -> None:
        train_seeds(with_trackers(write_recipe(tmp_path, checkpoint, epochs=1), "tensorboard"), [1, 2], progress=False)
        folders = [tmp_path / "run" / f"seed-{seed}" for seed in (1, 2)]
        first, second = map(in_tensorboard, folders)
        assert first.keys() == second.keys() == expected(folders[0]).keys()
        assert first[("train/loss", 10)] != second[("train/loss", 10)]


@pytest.mark.parametrize(("folder", "name"), [("tides", "tides"), ("tides/seed-3", "tides-seed-3")])
def test_a_run_is_called_like_its_folder(
    folder: str, name: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name "seed-3" alone would not say what was trained."""
    names: list[str] = []

    class Recorder(TensorBoardTracker):
        def __init__(self, *, name: str, run_name: str, **options: Any) -> None:
            names.append(name)
            super().__init__(run_name, tmp_path)

    monkeypatch.setattr(progress, "get_available_trackers", lambda: ["wandb"])
    monkeypatch.setitem(progress.LOGGER_TYPE_TO_CLASS, "wandb", Recorder)
    run(checkpoint, tmp_path / folder, "wandb", epochs=1)
    assert names == [name]


def installed(name: str) -> None:
    if name not in map(str, accelerate.tracking.get_available_trackers()):
        pytest.skip(f"{name} is not installed: pip install '.[tracking]'")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the libraries' own
class TestOthers:
    def test_wandb_without_a_network(
        self, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        installed("wandb")
        monkeypatch.setenv("WANDB_MODE", "offline")
        self._stopped_and_resumed(checkpoint, tmp_path, "wandb", monkeypatch)
        files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
        assert len({file.name for file in files}) == 1  # one run in two parts
        series = {key: values for file in files for key, values in in_wandb(file).items()}
        assert len(files) == 2
        assert in_wandb(files[0]).keys() & in_wandb(files[1]).keys() == set()
        self._same(series, expected(tmp_path))
        assert all(str(tmp_path).encode() not in file.read_bytes() for file in files)
        assert capfd.readouterr().out == ""

    def test_trackio_in_a_folder(
        self, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        installed("trackio")
        import trackio.utils

        home = tmp_path / "trackio"
        monkeypatch.setenv("TRACKIO_DIR", str(home))
        for module in (trackio.utils, trackio.sqlite_storage):
            monkeypatch.setattr(module, "TRACKIO_DIR", home)
        self._stopped_and_resumed(checkpoint, tmp_path / "run", "trackio", monkeypatch)
        (file,) = home.glob("*.db")
        series: Points = {}
        with sqlite3.connect(file) as store:
            for step, metrics in store.execute("SELECT step, metrics FROM metrics"):
                for name, value in json.loads(metrics).items():
                    series.setdefault((name, step), []).append(value)
        self._same(series, expected(tmp_path / "run"))
        assert capfd.readouterr().out == ""

    def test_mlflow_in_a_file(self, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        installed("mlflow")
        mlflow = pytest.importorskip("mlflow", reason="pip install '.[tracking]'")
        if not hasattr(mlflow, "search_experiments"):
            pytest.skip("this mlflow is older than accelerate wants: pip install '.[tracking]'")
        monkeypatch.chdir(tmp_path)
        mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
        self._stopped_and_resumed(checkpoint, tmp_path / "run", "mlflow", monkeypatch)
        client = mlflow.MlflowClient()
        (experiment,) = client.search_experiments(filter_string="name = 'tides'")
        (tracked_run,) = client.search_runs([experiment.experiment_id])
        series: Points = {}
        for name in tracked_run.data.metrics:
            for point in client.get_metric_history(tracked_run.info.run_id, name):
                series.setdefault((name, point.step), []).append(point.value)
        self._same(series, expected(tmp_path / "run"))
        assert tracked_run.data.params["optim.batch_size"] == "4"
        assert tracked_run.data.tags["mlflow.source.name"] == "bert-tasks"

    @staticmethod
    def _same(series: Points, reference: Points) -> None:
        """The points after the checkpoint were sent twice, with equal values but for the time that a step takes."""
        assert {(key, len(values) > 2) for key, values in series.items()} == {(key, False) for key in reference}
        for (name, step), values in series.items():
            if name != "train/tokens_per_second":
                assert set(values) == set(reference[name, step])

    @staticmethod
    def _stopped_and_resumed(checkpoint: Path, folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """As after a kill: the run goes on from a checkpoint before the last logged point."""
        with monkeypatch.context() as patch:
            stop_at(patch, 6)
            with pytest.raises(StoppedError):
                run(checkpoint, folder, name, project="tides", save_steps=3, logging_steps=1)
        shutil.rmtree(newest(folder))
        run(checkpoint, folder, name, project="tides", save_steps=3, logging_steps=1)


def in_wandb(file: Path) -> Points:
    """The history of an offline run."""
    from wandb.proto import wandb_internal_pb2

    series: Points = {}
    for record in wandb_records(file.read_bytes()):
        message = wandb_internal_pb2.Record()
        message.ParseFromString(record)
        values = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in message.history.item}
        for name, value in values.items():
            if not name.startswith("_"):
                series.setdefault((name, values["_step"]), []).append(value)
    return series


def wandb_records(content: bytes) -> Iterator[bytes]:
    """LevelDB's log format: blocks of 32 KiB, of pieces with a header of 7 bytes (checksum, length, kind)."""
    offset, record = 7, b""  # the file's own header
    while offset < len(content):
        left = 2**15 - offset % 2**15
        if left < 7:
            offset += left
            continue
        length, record_type = struct.unpack("<HB", content[offset + 4 : offset + 7])
        record += content[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if record_type in (1, 4):  # whole, or the last piece
            yield record
            record = b""
