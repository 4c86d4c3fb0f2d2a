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
    "texts": SequenceClassification(labels=("no.1", "a b"), max_length=24),
    "words": TokenClassification(labels=LABELS, max_length=24, doc_stride=6),
    "questions": SpanExtraction(**SPANS, version_2_with_negative=True),
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
    return [{"row": number, **one.to_json()} for number, one in enumerate(predict(folder, rows))]


def close(found: Any, wanted: Any) -> bool:
    """Equal; scores up to the rounding of batches that hold other rows beside them."""
    if isinstance(wanted, float):
        return found == pytest.approx(wanted, abs=2e-6, rel=1e-5)
    if isinstance(wanted, dict):
        return all(close(found[name], value) for name, value in wanted.items())
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(close, found, wanted))
    return bool(found == wanted)


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
    made = data.map_batches(predictor, batch_format=form, batch_size=7).materialize()
    found = sorted(made.take_all(), key=lambda row: row["row"])
    assert len(found) == len(rows)
    assert all(map(close, found, expected(folder, rows)))
    if form == "pyarrow":
        kinds = dict(zip(made.schema().names, made.schema().types, strict=True))
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
    given = spark.createDataFrame([{"row": number, **row} for number, row in enumerate(rows)]).repartition(3)
    schema = from_arrow_schema(predictor.output_schema(to_arrow_schema(given.schema)))
    made = getattr(given, function)(lambda batches: map(predictor, batches), schema)
    assert made.schema == schema
    found = [row.asDict(recursive=True) for row in made.orderBy("row").collect()]
    assert len(found) == len(rows)
    assert all(map(close, found, expected(folder, rows)))
    assert {row["error"] for row in found} == {None}


def test_spark_keeps_rows_that_cannot_be_used(job: tuple[Path, list[dict[str, Any]]], spark: Any) -> None:
    from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

    folder, rows = job
    column = next(name for name in ("text", "words", "context") if name in rows[0])
    given = spark.createDataFrame([{**rows[0], column: None}, *rows[1:4]], _schema_of(spark, rows))
    for policy in ("skip", "fail"):
        predictor = batch_predictor(folder, on_error=policy)
        schema = from_arrow_schema(predictor.output_schema(to_arrow_schema(given.schema)))
        made = given.mapInPandas(lambda frames, predict=predictor: map(predict, frames), schema)
        if policy == "skip":
            assert sorted(row["error"] is None for row in made.collect()) == [False, True, True, True]
        else:
            with pytest.raises(Exception, match=f"cannot be used(?s:.*)missing .* in column '{column}'"):
                made.collect()


def _schema_of(spark: Any, rows: list[dict[str, Any]]) -> Any:
    return spark.createDataFrame(rows[:1]).schema
