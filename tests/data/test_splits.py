"""Where rows are looked for, hub data sets from a folder, and the split made when none is given."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from bert_tasks.data.columns import Column
from bert_tasks.data.formats.hub import HubSplit
from bert_tasks.data.issues import RowIssues
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.reading import read as read_rows
from bert_tasks.data.rows import Rows
from bert_tasks.data.splits import DataSpec, Splits, load_splits, split_files
from bert_tasks.errors import DataError

COLUMNS = (Column(name="text", kind="text"), Column(name="label", kind="label", required=False))
PAIRS = (COLUMNS[0], Column(name="text_pair", kind="text"), COLUMNS[1])
TAGGED = (Column(name="words", kind="words"), Column(name="tags", kind="tags", required=False))
ASKED = (
    Column(name="question", kind="text"),
    Column(name="context", kind="text"),
    Column(name="answers", kind="answers", required=False),
)
SETS = (Column(name="text", kind="text"), Column(name="labels", kind="labels", required=False))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, *rows: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["text,label", *rows, ""]))
    return str(path)


def load(folder: Path, task_columns: tuple[Column, ...] = COLUMNS, seed: int = 1, **fields: Any) -> Splits:
    labels = fields.pop("labels", None)
    return load_splits(DataSpec(**fields), columns=task_columns, seed=seed, labels=labels, cache_dir=folder / "cache")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "expected exactly one of dataset, dir, train, but none of them is set"),
        ({"dir": "a", "train": "b"}, "expected exactly one of dataset, dir, train, but dir and train are set"),
        ({"dataset": ""}, "dataset is empty. Name a data set"),
        ({"train": ""}, "train is empty. Name a path"),
        ({"dir": "a", "config": "b"}, "config belongs to dataset"),
        ({"train": "a", "revision": "b"}, "revision belongs to dataset"),
        ({"train": "a", "validation_share": 1.0}, "validation_share = 1.0"),
        ({"train": "a", "max_rows": 0}, "max_rows = 0 is no number of rows"),
    ],
)
def test_a_spec_that_contradicts_itself(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DataSpec(**fields)
    with pytest.raises(ValidationError, match=said):
        TypeAdapter(DataSpec).validate_python(fields)


def test_a_spec_is_closed() -> None:
    with pytest.raises(ValidationError, match="colums"):
        TypeAdapter(DataSpec).validate_python({"train": "a.csv", "colums": {}})
    spec = TypeAdapter(DataSpec).validate_python({"train": "a.csv", "validation": {"x": "b.csv"}})
    assert spec == DataSpec(train="a.csv", validation={"x": "b.csv"})


def test_files_by_name(folder: Path) -> None:
    train, dev = write(folder / "train.csv", "a,x", "b,y"), write(folder / "dev.csv", "c,x")
    splits = load(folder, train=train, validation=dev)
    assert splits.train.source == "train.csv"
    assert [row["text"] for row in splits.validation[""]] == ["c"]
    named = load(folder, train=train, validation={"same": dev, "other": train}).validation
    assert {name: len(rows) for name, rows in named.items()} == {"same": 1, "other": 2}


@pytest.mark.parametrize("name", ["dev.csv", "validation.csv", "valid.csv"])
def test_a_folder(folder: Path, name: str) -> None:
    write(folder / "data/train.csv", "a,x", "b,y")
    write(folder / "data" / name, "c,x")
    assert list(load(folder, dir="data").validation) == [""]
    assert load(folder, dir="data", validation="train.csv").validation[""].source == "data/train.csv"


def test_the_two_validation_sets_of_mnli(folder: Path) -> None:
    for name, text in {"train": "a", "dev_matched": "b", "dev_mismatched": "c"}.items():
        row = f"{text}\t{text}\tneutral\n"
        (folder / f"{name}.tsv").write_text("sentence1\tsentence2\tgold_label\n" + row)
    splits = load(folder, PAIRS, dir=str(folder), format="glue/mnli")
    assert {name: rows[0]["text"] for name, rows in splits.validation.items()} == {"matched": "b", "mismatched": "c"}
    dev_splits = load(folder, PAIRS, dir=str(folder), format="glue/mnli", validation="dev_matched.tsv")
    assert list(dev_splits.validation) == [""]
    (folder / "dev_matched.tsv").rename(folder / "dev.tsv")
    with pytest.raises(DataError, match=r"dev_matched.tsv: no such file, did you mean 'dev_mismatched.tsv'"):
        load(folder, PAIRS, dir=str(folder), format="glue/mnli")
    (folder / "dev_mismatched.tsv").unlink()
    assert list(load(folder, PAIRS, dir=str(folder), format="glue/mnli").validation) == [""]


SENTENCES = "a\tB-X\n\nb\tO\n"
UNIVERSAL = "1\ta\t_\tNOUN\t_\t_\t_\t_\t_\t_\n"
SQUAD = '{"data": [{"paragraphs": [{"context": "To Paris.", "qas": [{"id": "1", "question": "?", "answers": []}]}]}]}'


@pytest.mark.parametrize(
    ("columns", "content", "names", "named"),
    [
        (TAGGED, SENTENCES, ("train.txt", "valid.txt"), "conll"),
        (TAGGED, SENTENCES, ("train.conll", "dev.bio"), "conll"),
        (TAGGED, UNIVERSAL, ("en_ewt-ud-train.conllu", "en_ewt-ud-dev.conllu"), "conllu"),
        (ASKED, SQUAD, ("train.json", "validation.json"), "squad"),
        (ASKED, SQUAD, ("train-v2.0.json", "dev-v2.0.json"), "squad"),
    ],
)
def test_folders_as_they_are_published(
    folder: Path, columns: tuple[Column, ...], content: str, names: tuple[str, str], named: str
) -> None:
    (folder / "data").mkdir()
    for name in (*names, "test.txt", "README"):
        (folder / "data" / name).write_text(content)
    for format in (None, named):
        splits = load(folder, columns, dir="data", format=format)
        assert splits.train.source == f"data/{names[0]}"
        assert splits.validation[""].source == f"data/{names[1]}"


def test_folders_that_do_not_fit(folder: Path) -> None:
    train = write(folder / "data/train.csv", "a,x")
    for fields, said in [
        ({"dir": "dat"}, "no such folder, did you mean 'data'?"),
        ({"dir": train}, "a file where a folder was expected"),
        ({"dir": "data", "format": "glue/sst2"}, "no file train.tsv. The folder holds train.csv"),
    ]:
        with pytest.raises(DataError) as error:
            load(folder, **fields)
        assert said in str(error.value)
    (folder / "data/train.jsonl").touch()
    with pytest.raises(DataError, match=r"train.csv, train.jsonl all match"):
        load(folder, dir="data")


def test_validation_is_set_aside(folder: Path) -> None:
    rows = [f"text {number},{'abb'[number % 3]}" for number in range(60)]
    train = write(folder / "train.csv", *rows)
    splits = load(folder, train=train, seed=3)
    assert Counter(row["label"] for row in splits.validation[""]) == {"a": 2, "b": 4}
    assert Counter(row["label"] for row in splits.train) == {"a": 18, "b": 36}
    again, other = load(folder, train=train, seed=3), load(folder, train=train, seed=4)
    assert list(again.validation[""]) == list(splits.validation[""])
    assert list(other.validation[""]) != list(splits.validation[""])
    assert len(load(folder, train=train, validation_share=0.5).validation[""]) == 30
    with pytest.raises(DataError, match="too few rows to split off validation rows"):
        load(folder, train=write(folder / "few.csv", "a,x", "b,y"))


def test_rare_labels_of_sets_stay_in_training(folder: Path) -> None:
    path = folder / "train.csv"
    rows = [*(f"a{n},common" for n in range(20)), "b,common;rare", *(f"c{n}," for n in range(4))]
    path.write_text("text,labels\n" + "".join(f"{row}\n" for row in rows))
    for seed in range(5):
        splits = load(folder, SETS, train=str(path), seed=seed)
        assert any("rare" in row["labels"] for row in splits.train)
        assert any(row["labels"] == [] for row in splits.validation[""])


def test_each_line_of_a_text_file_is_a_training_row_if_a_teacher_labels_it(folder: Path) -> None:
    """The lines of a document are one row only in a corpus."""
    (folder / "texts.txt").write_text("a b\nc d\ne f\n")
    write(folder / "dev.csv", "a,x", "b,y")
    spec = DataSpec(train="texts.txt", validation="dev.csv")
    splits = load_splits(spec, columns=COLUMNS, seed=1, cache_dir=folder / "cache", unlabelled=True)
    assert [row["text"] for row in splits.train] == ["a b", "c d", "e f"]


@pytest.fixture
def hub(folder: Path) -> Path:
    """A data set with two configs, laid out as on the hub; `load_dataset` takes its path for a name."""
    from datasets import ClassLabel, Dataset, Features, List, Value

    features = Features({"sentence": Value("string"), "label": ClassLabel(names=["negative", "positive"])})
    root = folder / "dataset"
    for name, labels in {"train": [1, 0, 1, 0], "validation": [0], "test": [-1, -1]}.items():
        rows = {"sentence": [f"{name} {number}" for number in range(len(labels))], "label": labels}
        path = root / "sst2" / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        Dataset.from_dict(rows, features=features).to_parquet(path)
    words = {"tokens": [["a", "b"], []], "ner_tags": [[1, 0], []], "upos": [["DET", "NOUN"], []], "id": [1, 2]}
    texts = List(Value("string"))
    names = List(ClassLabel(names=["O", "B-X"]))
    kinds = {"tokens": texts, "ner_tags": names, "upos": texts, "id": Value("int32")}
    (root / "ner").mkdir()
    Dataset.from_dict(words, features=Features(kinds)).to_parquet(root / "ner/train.parquet")
    hidden = {**words, "ner_tags": [[-1, -1], [-1]], "tokens": [["a", "b"], ["c"]]}
    Dataset.from_dict(hidden, features=Features(kinds)).to_parquet(root / "ner/test.parquet")
    (root / "qa").mkdir()
    answers = [{"text": ["Paris"], "answer_start": [3]}, {"text": [], "answer_start": []}]
    asked = {"question": ["?", "?"], "context": ["To Paris."] * 2, "answers": answers}
    Dataset.from_dict(asked).to_parquet(root / "qa/train.parquet")
    (root / "plain").mkdir()
    Dataset.from_dict({"text": list("abcd"), "label": list("xyxy")}).to_parquet(root / "plain/train.parquet")
    (root / "ids").mkdir()
    Dataset.from_dict({"sentence": ["a", "b"], "label": [1, -1]}).to_parquet(root / "ids/train.parquet")
    (root / "README.md").write_text(
        "---\nconfigs:\n- config_name: sst2\n  data_files:\n"
        + "".join(f"  - split: {name}\n    path: sst2/{name}.parquet\n" for name in ("train", "validation", "test"))
        + "- config_name: ner\n  data_files:\n"
        + "".join(f"  - split: {name}\n    path: ner/{name}.parquet\n" for name in ("train", "test"))
        + "- config_name: qa\n  data_files:\n  - split: train\n    path: qa/train.parquet\n"
        + "- config_name: plain\n  data_files:\n  - split: train\n    path: plain/train.parquet\n"
        + "- config_name: ids\n  data_files:\n  - split: train\n    path: ids/train.parquet\n---\n"
    )
    return root


def test_a_hub_data_set(folder: Path, hub: Path) -> None:
    splits = load(folder, dataset=str(hub), config="sst2", format="glue/sst2", labels=("negative", "positive"))
    assert [row["label"] for row in splits.train] == ["positive", "negative"] * 2
    assert splits.train[1] == {"text": "train 1", "label": "negative", "line": 2}
    assert [row["text"] for row in splits.validation[""]] == ["validation 0"]
    again = load(folder, dataset=str(hub), config="sst2", format="glue/sst2")
    assert again.train.fingerprint == splits.train.fingerprint


def test_hidden_labels_are_no_labels(folder: Path, hub: Path) -> None:
    def read(config: str, split: str, *, require_labels: bool = True, **options: Any) -> Rows:
        source, reading = HubSplit(dataset=str(hub), config=config, split=split), ReadOptions(**options)
        return read_rows(source, COLUMNS, reading, require_labels=require_labels, cache_dir=folder)

    hidden = [{"text": "test 0", "line": 1}, {"text": "test 1", "line": 2}]
    assert list(read("sst2", "test", format="glue/sst2", require_labels=False)) == hidden
    assert list(read("sst2", "test", columns={"text": "sentence"}, require_labels=False)) == hidden
    ids = read("ids", "train", format="glue/sst2", require_labels=False)
    assert [row["label"] for row in ids] == ["positive", None]
    with pytest.raises(RowIssues, match="missing label"):
        read("sst2", "test", format="glue/sst2")


def test_tags_from_the_hub(folder: Path, hub: Path) -> None:
    def read(split: str, *, format: str = "conll", require_labels: bool = True) -> list[dict[str, Any]]:
        source, reading = HubSplit(dataset=str(hub), config="ner", split=split), ReadOptions(format=format)
        return list(read_rows(source, TAGGED, reading, require_labels=require_labels, cache_dir=folder))

    assert read("train") == [
        {"words": ["a", "b"], "tags": ["B-X", "O"], "line": 1},
        {"words": [], "tags": [], "line": 2},
    ]
    assert [row["tags"] for row in read("train", format="conllu")] == [["DET", "NOUN"], []]
    assert read("test", require_labels=False) == [{"words": ["a", "b"], "line": 1}, {"words": ["c"], "line": 2}]
    with pytest.raises(RowIssues, match="missing tags in column 'ner_tags'"):
        read("test")


def test_the_validation_splits_of_mnli_on_the_hub() -> None:
    spec = DataSpec(dataset="nyu-mll/glue", config="mnli", format="glue/mnli")
    sets = {"matched": "validation_matched", "mismatched": "validation_mismatched"}
    assert split_files(spec) == (("train",), sets)


def test_hub_data_sets_that_cannot_be_loaded(folder: Path, hub: Path) -> None:
    for fields, said in [
        ({"dataset": "no-such/dataset"}, "no-such/dataset: the data set cannot be loaded"),
        ({"dataset": str(hub), "config": "sst3"}, "(config 'sst3'): the data set cannot be loaded"),
        ({"dataset": str(hub), "config": "sst2", "columns": {"text": "sentence"}, "validation": "dev"}, '"dev"'),
        ({"dataset": str(hub), "config": "sst2"}, "no column 'text'"),
    ]:
        with pytest.raises(DataError) as error:
            load(folder, **fields)
        assert said in str(error.value)


def test_max_rows_is_a_sample_of_the_training_rows(folder: Path) -> None:
    rows = [f"text {number},{'rare' if number == 77 else 'often'}" for number in range(100)]
    train, validation = write(folder / "train.csv", *rows), write(folder / "dev.csv", *rows[:30])
    sample = load(folder, train=train, validation=validation, max_rows=10).train
    lines = [row["line"] for row in sample]
    assert (len(lines), lines) == (10, sorted(lines))
    assert lines != list(range(2, 12))  # not the first rows, which a sorted file would make one label
    assert Counter(row["label"] for row in sample) == {"often": 9, "rare": 1}
    assert sample.notes == ("a random sample of 10 of 100 rows (max_rows)",)
    again = load(folder, train=train, validation=validation, max_rows=10, seed=2)
    assert [row["line"] for row in again.train] == lines
    assert len(again.validation[""]) == 30
    split = load(folder, train=train, max_rows=10, validation_share=0.2)
    assert (len(split.train), len(split.validation[""])) == (8, 2)
    for count in (100, 1000, None):
        whole = load(folder, train=train, validation=validation, max_rows=count).train
        assert (len(whole), whole.sample, whole.notes) == (100, "", ())
