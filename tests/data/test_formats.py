"""A file format is one object: registering it makes its files readable everywhere."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from bert_tasks.data.formats import Format, base, expected_files, files_of_split, register_format
from bert_tasks.data.readers import ReadOptions
from bert_tasks.data.records import BoundedText, ParseOptions, Record, Records
from bert_tasks.data.table import RowTable
from bert_tasks.errors import DataError
from bert_tasks.inference import predict
from bert_tasks.init.sample import read_sample
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks import SequenceClassification
from support.small_checkpoints import save_checkpoint

ROWS = "review=fine label=good\nreview=poor label=bad\n"


class KeyValues(Format):
    """Lines such as ``review=fine label=good``."""

    def records(self, lines: BoundedText, path: Path, options: ParseOptions) -> Records:
        cells = (dict(pair.split("=") for pair in line.split()) for line in lines)
        return Records(None, (Record(number, row) for number, row in enumerate(cells, start=1)))


@pytest.fixture(autouse=True)
def key_values() -> Iterator[None]:
    register_format(KeyValues(name="kv", extensions=(".kv",), columns={"text": "review"}))
    yield
    del base._FORMATS["kv"]


@pytest.mark.parametrize("name", ["rows.kv", "rows.kv.gz", "rows.data"])
def test_rows_are_read_by_the_extension_or_the_name(name: str, read: Callable[..., RowTable]) -> None:
    rows = read(ROWS, name, format="kv" if name == "rows.data" else None)
    assert [(row["text"], row["label"], row["line"]) for row in rows] == [("fine", "good", 1), ("poor", "bad", 2)]
    with pytest.raises(DataError, match="header = false is for csv and tsv files, but kv has no header line"):
        read(ROWS, name, format="kv", header=False)


def test_splits_init_and_predict_know_the_extension(tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerBase) -> None:
    path = tmp_path / "train.kv"
    path.write_text(ROWS)
    assert files_of_split(tmp_path, "train", None) == [path]
    assert "train.kv" in expected_files("train", None)
    assert read_sample(path, ReadOptions()).columns == ("review", "label")
    save_checkpoint(tmp_path / "base", "roberta", bpe_tokenizer)
    model = TaskModel.from_pretrained(
        tmp_path / "base", task=SequenceClassification(labels=("bad", "good"), max_length=16)
    )
    assert [row.label for row in predict(model, path)] == [row.label for row in model.predict(["fine", "poor"])]
