"""The GLUE files of pairs of texts, as their publishers wrote them."""

from collections.abc import Callable

import pytest

from bert_tasks.data.checks import data_report
from bert_tasks.data.columns import Column
from bert_tasks.data.formats import FORMATS
from bert_tasks.data.issues import RowIssues
from bert_tasks.data.rows import Rows
from bert_tasks.data.splits import Splits
from bert_tasks.errors import DataError

TEXTS = (Column(name="text", kind="text"), Column(name="text_pair", kind="text"))
COLUMNS = (*TEXTS, Column(name="label", kind="label", required=False))
SCORED = (*TEXTS, Column(name="label", kind="number", required=False))

Read = Callable[..., Rows]

MNLI = "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse"
MNLI_TRAIN = [*MNLI.split(), "sentence1", "sentence2", "label1", "gold_label"]
MNLI_TEST = [*MNLI.split(), "sentence1", "sentence2"]
STSB = ["index", "genre", "filename", "year", "old_index", "source1", "source2", "sentence1", "sentence2"]


def tsv(header: list[str], *rows: dict[str, str]) -> str:
    lines = [header, *([row.get(name, "-") for name in header] for row in rows)]
    return "".join("\t".join(line) + "\n" for line in lines)


def same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


@pytest.mark.parametrize(
    ("task", "header", "pair", "labels"),
    [
        ("mrpc", "\ufeffQuality|#1 ID|#2 ID", "#1 String|#2 String", {"1": "equivalent", "0": "not_equivalent"}),
        ("qqp", "is_duplicate|id|qid1", "question1|question2", {"1": "duplicate", "0": "not_duplicate"}),
        ("mnli", "gold_label|index|genre", "sentence1|sentence2", same("neutral", "entailment", "contradiction")),
        ("qnli", "label|index", "question|sentence", same("entailment", "not_entailment")),
        ("rte", "label|index", "sentence1|sentence2", same("entailment", "not_entailment")),
        ("wnli", "label|index", "sentence1|sentence2", {"1": "entailment", "0": "not_entailment"}),
    ],
)
def test_pairs_with_labels(read: Read, task: str, header: str, pair: str, labels: dict[str, str]) -> None:
    names, (first, second) = f"{header}|{pair}".split("|"), pair.split("|")
    rows = [{first: 'a "quote', second: "b", names[0]: value} for value in labels]
    table = read(tsv(names, *rows), "train.tsv", format=f"glue/{task}", columns=COLUMNS)
    assert [row["label"] for row in table] == list(labels.values())
    assert {(row["text"], row["text_pair"]) for row in table} == {('a "quote', "b")}
    assert set(FORMATS[f"glue/{task}"].label_names.values()) == set(labels.values())


@pytest.mark.parametrize(
    ("task", "labels"),
    [
        ("mnli", ["entailment", "neutral", "contradiction"]),
        ("ax", ["entailment", "neutral", "contradiction"]),
        ("qnli", ["entailment", "not_entailment"]),
        ("rte", ["entailment", "not_entailment"]),
        ("wnli", ["not_entailment", "entailment"]),
        ("mrpc", ["not_equivalent", "equivalent"]),
        ("qqp", ["not_duplicate", "duplicate"]),
    ],
)
def test_labels_are_in_the_order_of_the_hub(task: str, labels: list[str]) -> None:
    assert list(FORMATS[f"glue/{task}"].label_names.items()) == [(str(i), label) for i, label in enumerate(labels)]


def test_scores(read: Read) -> None:
    content = tsv([*STSB, "score"], {"sentence1": "a", "sentence2": "b", "score": "4.750"})
    table = read(content, "train.tsv", format="glue/stsb", columns=SCORED)
    assert table[0] == {"text": "a", "text_pair": "b", "label": 4.75, "line": 2}


@pytest.mark.parametrize(
    ("task", "header"),
    [
        ("mnli", MNLI_TEST),
        ("stsb", STSB),
        ("ax", ["index", "sentence1", "sentence2"]),
        ("mrpc", ["index", "#1 ID", "#2 ID", "#1 String", "#2 String"]),
        ("qqp", ["id", "question1", "question2"]),
    ],
)
def test_test_files_have_no_labels(read: Read, task: str, header: list[str]) -> None:
    columns = SCORED if task == "stsb" else COLUMNS
    content = tsv(header, {header[-2]: "a", header[-1]: "b"})
    table = read(content, "test.tsv", format=f"glue/{task}", columns=columns, require_labels=False)
    assert list(table) == [{"text": "a", "text_pair": "b", "line": 2}]


def test_an_unknown_label_is_named_with_those_there_are(read: Read) -> None:
    content = tsv(MNLI_TRAIN, {"sentence1": "a", "sentence2": "b", "gold_label": "-"})
    with pytest.raises(
        RowIssues, match=r"unknown label in column 'gold_label': '-'. Expected one of 0, 1, 2, or entailment,"
    ):
        read(content, "train.tsv", format="glue/mnli", columns=COLUMNS)


QQP = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"


def test_short_rows_of_qqp_are_skipped_and_counted(read: Read) -> None:
    content = QQP + "1\t2\t3\ta\tb\t1\n" + "4\t5\t6\tbroken\n" * 6 + "7\t8\t9\tc\td\t0\n"
    for _ in range(2):  # parsed, and from the cache
        table = read(content, "train.tsv", format="glue/qqp", columns=COLUMNS)
        assert [row["line"] for row in table] == [2, 9]
        note = "6 of 8 rows skipped: too few cells (line 3, 4, 5, 6, 7, ...)"
        assert table.notes == (note,)
    report = data_report(Splits(train=table.select([0]), validation={}), columns=COLUMNS)
    assert report.splits[0].notes == (note,)
    assert f"  {note}" in report.lines()


def test_only_short_rows_and_only_of_qqp_are_skipped(read: Read) -> None:
    with pytest.raises(RowIssues, match=r"train.tsv:2: 7 cells where the header has 6"):
        read(QQP + "1\t2\t3\ta\tb\t1\tmore\n", "train.tsv", format="glue/qqp", columns=COLUMNS)
    with pytest.raises(DataError, match=r"train.tsv: no rows. 1 of 1 row skipped: too few cells \(line 2\)"):
        read(QQP + "1\t2\n", "train.tsv", format="glue/qqp", columns=COLUMNS)
    with pytest.raises(RowIssues, match="2 cells where the header has 4"):
        read("index\tsentence1\tsentence2\tlabel\n1\ta\n", "train.tsv", format="glue/rte", columns=COLUMNS)
