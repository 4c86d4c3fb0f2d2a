"""Predictions in the format of GLUE's server (https://gluebenchmark.com), a file for each set of test rows.

The labels of the test rows are not public, so the server computes their scores.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bert_tasks.data.formats import named_format
from bert_tasks.data.formats.hub import HubSplit
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.reading import read
from bert_tasks.data.rows import Rows
from bert_tasks.data.splits import DataSpec
from bert_tasks.errors import DataError, UsageError
from bert_tasks.inference import predict
from bert_tasks.model.task_model import TaskModel
from bert_tasks.recipe.schema import load_recipe
from bert_tasks.storage import atomic_path, check_path

_LOWEST, _HIGHEST = 0.0, 5.0  # the scale of STS-B, which a regression may leave


@dataclass(frozen=True)
class TestSet:
    """The test rows of one file of a submission.

    Attributes:
        format: The format of the rows.
        files: Paths in the folder of the data, of which the first that exists is read.
        split, config: The split and the configuration of a data set on the hub.
        words: True if classes are written by name rather than by number.
    """

    format: str
    files: tuple[str, ...] = ("test.tsv",)
    split: str = "test"
    config: str | None = None
    words: bool = False


# The files of a submission, with their test rows, for each format of a run's data.
TEST_SETS: Mapping[str, Mapping[str, TestSet]] = MappingProxyType(
    {
        "glue/cola": {"CoLA.tsv": TestSet("glue/cola")},
        "glue/sst2": {"SST-2.tsv": TestSet("glue/sst2")},
        "glue/mrpc": {"MRPC.tsv": TestSet("glue/mrpc")},
        "glue/stsb": {"STS-B.tsv": TestSet("glue/stsb")},
        "glue/qqp": {"QQP.tsv": TestSet("glue/qqp")},
        "glue/mnli": {
            "MNLI-m.tsv": TestSet("glue/mnli", ("test_matched.tsv",), split="test_matched", words=True),
            "MNLI-mm.tsv": TestSet("glue/mnli", ("test_mismatched.tsv",), split="test_mismatched", words=True),
            "AX.tsv": TestSet(
                "glue/ax", ("../AX/diagnostic.tsv", "../diagnostic/diagnostic.tsv"), config="ax", words=True
            ),
        },
        "glue/qnli": {"QNLI.tsv": TestSet("glue/qnli", words=True)},
        "glue/rte": {"RTE.tsv": TestSet("glue/rte", words=True)},
        "glue/wnli": {"WNLI.tsv": TestSet("glue/wnli")},
    }
)


def glue_submission(run: str | Path, folder: str | Path) -> dict[str, int]:
    """Predicts the test rows of a finished run and writes the files of a submission.

    The server takes a zip of the files of all tasks.

    Args:
        run: The folder of a finished run on a data set of GLUE.
        folder: The folder of the files, which is created if it does not exist.

    Returns:
        The number of rows of each file.

    Raises:
        UsageError: The folder holds no finished run, or a run on other data.
        DataError: The test rows cannot be read.
    """
    check_path(run)
    check_path(folder)
    run, folder = Path(run), Path(folder)
    if not (run / "metrics.json").is_file():
        raise UsageError(f"{run} holds no finished run (no metrics.json)")
    spec = load_recipe(run / "recipe.toml").data
    if spec.format is None or spec.format not in TEST_SETS:
        raise UsageError(f"{run}: its data has the format {spec.format!r}, expected one of {', '.join(TEST_SETS)}")
    model = TaskModel.from_pretrained(run / "model")
    rows = {}
    for name, test_set in TEST_SETS[spec.format].items():
        table = _test_rows(spec, test_set, model)
        if table is None:
            continue
        predictions = [prediction.to_json() for prediction in predict(model, table)]
        text = _text(predictions, test_set)
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_path(folder / name) as temporary:
            temporary.write_text(text, "utf-8")
        rows[name] = len(table)
    return rows


def _test_rows(spec: DataSpec, test_set: TestSet, model: TaskModel) -> Rows | None:
    """Returns the test rows, or None if the rows of AX are missing, which are no part of MNLI's folder."""
    columns = model.input_columns
    if spec.dataset is not None:
        config = test_set.config
        if config is None:
            config = spec.config
        source = HubSplit(dataset=spec.dataset, config=config, split=test_set.split, revision=spec.revision)
        return read(source, columns, ReadOptions(format=test_set.format), require_labels=False)
    if spec.dir is None:
        raise DataError(
            "the run was trained on single files. Train it with data.dir or data.dataset, which include test rows"
        )
    paths = [Path(spec.dir, file) for file in test_set.files]
    path = next((path for path in paths if path.exists()), paths[0])
    if test_set.config is not None and not path.exists():
        return None
    table = read(path, columns, ReadOptions(format=test_set.format), require_labels=False)
    # The server expects a line for each row of its own file, so none may be left out.
    if table.notes:
        raise DataError(f"{path}: every test row needs a prediction, but {' and '.join(table.notes)}")
    return table


def _text(predictions: Sequence[Mapping[str, Any]], test_set: TestSet) -> str:
    """Returns the file for predictions of ``to_json``, with a label or a number."""
    numbers = {label: number for number, label in named_format(test_set.format).label_names.items()}
    lines = ["index\tprediction"]
    for index, prediction in enumerate(predictions):
        label = prediction.get("label")
        if label is None:
            score = min(max(prediction["score"], _LOWEST), _HIGHEST)
            value = f"{score:.3f}"
        else:
            value = label if test_set.words else numbers[label]
        lines.append(f"{index}\t{value}")
    return "\n".join(lines) + "\n"
