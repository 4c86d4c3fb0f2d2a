"""Ray Data and Spark with ``batch_predictor``: their output is that of ``predict``, row by row.

Both libraries come with the extra ``engines``; Spark needs Java, too. Run by `make engines`.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from bert_tasks import TaskModel, batch_predictor, predict
from bert_tasks.tasks import SequenceClassification, SpanExtraction, TokenClassification
from bert_tasks.tasks.base import Task
from support.small_checkpoints import save_checkpoint
from support.task_examples import EXAMPLES, LABELS, SPANS, TEXTS

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of libraries that lag behind pandas and Python

TASKS: dict[str, Task] = {
    "texts": SequenceClassification.of(labels=("no.1", "a b"), max_length=24),
    "words": TokenClassification.of(labels=LABELS, max_length=24, doc_stride=6),
    "questions": SpanExtraction.of(**SPANS, version_2_with_negative=True),
}
ROWS: dict[str, list[dict[str, Any]]] = {
    "texts": [{"text": f"{text} {number}", "label": number} for number in range(5) for text in TEXTS],
    "words": [{"words": row["words"], "number": 7} for row in EXAMPLES["token"].rows] * 5,
    "questions": [{k: row[k] for k in ("id", "question", "context")} for row in EXAMPLES["span"].rows] * 5,
}


@pytest.fixture(scope="module", params=TASKS)
def job(
    request: pytest.FixtureRequest, bpe_tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    """A model of the task, and rows for it."""
    folder = tmp_path_factory.mktemp(request.param)
    save_checkpoint(folder, "roberta", bpe_tokenizer, wide=True)
    TaskModel.from_pretrained(folder, task=TASKS[request.param]).save_pretrained(folder / "model")
    return folder / "model", ROWS[request.param]


def expected(folder: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of ``predict``: each prediction, with the number of its row."""
    return [{"row": number, **prediction.to_json()} for number, prediction in enumerate(predict(folder, rows))]


def close(result: Any, reference: Any) -> bool:
    """Equal; scores up to the rounding of batches that hold other rows beside them."""
    if isinstance(reference, float):
        return result == pytest.approx(reference, abs=2e-6, rel=1e-5)
    if isinstance(reference, dict):
        return all(close(result[name], value) for name, value in reference.items())
    if isinstance(reference, list):
        return len(result) == len(reference) and all(map(close, result, reference))
    return bool(result == reference)


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray = pytest.importorskip("ray", reason="Ray comes with the extra `engines`")
    data = pytest.importorskip("ray.data")
    data.DataContext.get_current().enable_progress_bars = False
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.mark.parametrize("form", ["pyarrow", "pandas", "numpy"])
def test_ray_data(job: tuple[Path, list[dict[str, Any]]], form: str, ray: Any) -> None:
    folder, rows = job
    predictor = batch_predictor(folder)
    data = ray.data.from_items([{"row": number, **row} for number, row in enumerate(rows)], override_num_blocks=3)
    predictions = data.map_batches(predictor, batch_format=form, batch_size=7).materialize()
    output = sorted(predictions.take_all(), key=lambda row: row["row"])
    assert len(output) == len(rows)
    assert all(map(close, output, expected(folder, rows)))
    if form == "pyarrow":
        kinds = dict(zip(predictions.schema().names, predictions.schema().types, strict=True))
        assert {field.name: kinds[field.name] for field in predictor.schema} == {
            f.name: f.type for f in predictor.schema
        }
    none = data.filter(lambda row: row["row"] < 0).map_batches(predictor, batch_format=form)
    assert none.take_all() == []


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    sql = pytest.importorskip("pyspark.sql", reason="Spark comes with the extra `engines`")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java")
    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.sql.shuffle.partitions": "2"}
    builder = sql.SparkSession.builder.master("local[2]").appName("bert-tasks")
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.mark.parametrize("function", ["mapInPandas", "mapInArrow"])
def test_spark(job: tuple[Path, list[dict[str, Any]]], function: str, spark: Any) -> None:
    from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

    folder, rows = job
    predictor = batch_predictor(folder, on_error="skip")
    frame = spark.createDataFrame([{"row": number, **row} for number, row in enumerate(rows)]).repartition(3)
    schema = from_arrow_schema(predictor.output_schema(to_arrow_schema(frame.schema)))
    predictions = getattr(frame, function)(lambda batches: map(predictor, batches), schema)
    assert predictions.schema == schema
    output = [row.asDict(recursive=True) for row in predictions.orderBy("row").collect()]
    assert len(output) == len(rows)
    assert all(map(close, output, expected(folder, rows)))
    assert {row["error"] for row in output} == {None}


def test_spark_keeps_rows_that_cannot_be_used(job: tuple[Path, list[dict[str, Any]]], spark: Any) -> None:
    from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

    folder, rows = job
    column = next(name for name in ("text", "words", "context") if name in rows[0])
    frame = spark.createDataFrame([{**rows[0], column: None}, *rows[1:4]], _schema_of(spark, rows))
    for policy in ("skip", "fail"):
        predictor = batch_predictor(folder, on_error=policy)
        schema = from_arrow_schema(predictor.output_schema(to_arrow_schema(frame.schema)))
        predictions = frame.mapInPandas(lambda frames, predict=predictor: map(predict, frames), schema)
        if policy == "skip":
            assert sorted(row["error"] is None for row in predictions.collect()) == [False, True, True, True]
        else:
            with pytest.raises(Exception, match=f"cannot be used(?s:.*)missing .* in column '{column}'"):
                predictions.collect()


def _schema_of(spark: Any, rows: list[dict[str, Any]]) -> Any:
    return spark.createDataFrame(rows[:1]).schema
