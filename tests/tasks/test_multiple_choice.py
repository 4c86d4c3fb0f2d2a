"""Multiple choice: logits, loss and gradients of transformers, any number of choices, and every spelling of a row."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from fastapi import HTTPException
from transformers import PreTrainedTokenizerBase

from bert_tasks import TaskModel, evaluate
from bert_tasks.data.columns import without_labels
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.reading import read as read_rows
from bert_tasks.data.reading import valid_rows
from bert_tasks.data.splits import row_keys, train_validation_split
from bert_tasks.encoder.packing import pack
from bert_tasks.errors import CheckpointError, DataError
from bert_tasks.families import encoder_config
from bert_tasks.serving.limits import Limits
from bert_tasks.serving.requests import BodyReader
from bert_tasks.tasks import MultipleChoice
from bert_tasks.tasks.features import collate
from support.hf_models import WITH_CHOICE, Head, hf_config, hf_model, random_batch
from support.parity import in_our_names, ours_from, packed_batch, packed_difference, shaped_difference
from support.sampling import slow_except
from support.small_checkpoints import save_checkpoint

HEAD: Head = "choice"
LENGTHS = (17, 1, 30, 9, 2, 16)
TASK = MultipleChoice.of(max_length=32)
ROW: dict[str, Any] = {"context": "It rained.", "choices": ["The street was wet.", "The street was sold."], "label": 0}


def loss_and_gradients(family: str) -> tuple[float, float, float]:
    """How far our loss is from transformers', and our gradients from its (in units of the largest); both losses > 0.

    Two rows of three choices each, of which transformers' class gets a rectangle.
    """
    theirs = hf_model(family, HEAD)
    ours = ours_from(theirs, HEAD)
    assert isinstance(ours, TaskModel)
    batch = random_batch(family, lengths=LENGTHS)
    inputs = {name: tensor.view(2, 3, -1) for name, tensor in batch.inputs(family).items()}
    expected = theirs(**inputs, labels=torch.tensor([2, 0])).loss
    expected.backward()
    plain = packed_batch(ours, batch)
    sequences = torch.split(plain.input_ids.index_select(0, plain.layout.gather_positions), list(plain.layout.lengths))
    real = [mask.bool() for mask in batch.attention_mask]
    packed = pack(
        [sequence.tolist() for sequence in sequences],
        [types[mask].tolist() for types, mask in zip(batch.token_type_ids, real, strict=True)],
        position_offset=ours.config.position_offset,
        windows=[3, 3],
        labels=[[2.0], [], [], [0.0], [], []],
    )
    (term,) = TASK.output.loss(ours(packed), packed)
    assert term.count == 2
    mean = term.total / term.count
    mean.backward()
    their_gradients = {name: value.grad for name, value in theirs.named_parameters() if value.grad is not None}
    named = in_our_names(their_gradients, theirs, HEAD)
    our_gradients = {name: value.grad for name, value in ours.named_parameters() if value.grad is not None}
    assert our_gradients.keys() == named.keys()
    largest = max(float(value.abs().max()) for value in named.values())
    apart = max(float((named[name] - our_gradients[name]).abs().max()) for name in named) / largest
    return abs(mean.item() - expected.item()), apart, expected.item()


@pytest.mark.parametrize("family", slow_except(WITH_CHOICE, "bert"))
def test_logits_loss_and_gradients_are_those_of_transformers(family: str) -> None:
    theirs = hf_model(family, HEAD)
    ours = ours_from(theirs, HEAD)
    batch = random_batch(family, lengths=(17, 1, 48, 9))
    assert shaped_difference(theirs, ours, batch) <= 1e-10
    assert packed_difference(theirs, ours, batch) <= 1e-10
    loss, gradients, size = loss_and_gradients(family)
    assert loss <= 1e-10 * max(1.0, size)
    assert gradients <= 1e-9


@pytest.mark.parametrize("family", ["electra"])
def test_other_summaries_are_refused_by_name(family: str) -> None:
    with pytest.raises(CheckpointError, match="summary_type = 'mean' is not supported, only 'first' is"):
        encoder_config(hf_config(family, summary_type="mean").to_dict())


def test_modernbert_reads_the_mean_where_its_config_says_so() -> None:
    theirs = hf_model("modernbert", HEAD, config=hf_config("modernbert", classifier_pooling="mean"))
    assert shaped_difference(theirs, ours_from(theirs, HEAD), random_batch("modernbert")) <= 1e-10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, wordpiece_tokenizer: PreTrainedTokenizerBase) -> TaskModel:
    folder = tmp_path_factory.mktemp("choice")
    save_checkpoint(folder, "bert", wordpiece_tokenizer, wide=True)
    torch.manual_seed(0)
    return TaskModel.from_pretrained(folder, task=TASK)


def test_rows_with_different_numbers_of_choices_have_the_softmax_of_their_own(model: TaskModel) -> None:
    rows = [
        {"context": "the ferry leaves", "question": "when", "choices": ["at seven", "at nine"], "label": 1},
        {"context": "nobody told the baker", "choices": ["bread", "wind", "rain", "a cup", "the sound"], "label": 4},
        {"context": "", "question": "", "choices": ["", "a cold wind brought rain and the sound"]},
    ]
    predictions = model.predict([{k: v for k, v in row.items() if k != "label"} for row in rows], logits=True)
    assert [len(prediction.scores) for prediction in predictions] == [2, 5, 2]
    losses = []
    for row, prediction in zip(rows, predictions, strict=True):
        scores = torch.tensor(prediction.logits).softmax(0)
        torch.testing.assert_close(torch.tensor(prediction.scores), scores)
        assert sum(prediction.scores) == pytest.approx(1.0)
        assert (prediction.answer, prediction.score) == (row["choices"][prediction.label], max(prediction.scores))
        losses += [] if "label" not in row else [-scores[row["label"]].log().item()]
    batch = collate(TASK.features(rows, model.require_tokenizer()), position_offset=0)
    assert batch.windows == (2, 5, 2)
    with torch.no_grad():
        (term,) = TASK.output.loss(model.eval()(batch), batch)
    assert term.count == 2
    assert term.total.item() == pytest.approx(sum(losses), rel=1e-4)
    assert TASK.output.counts(TASK.features(rows, model.require_tokenizer())) == {TASK.output.name: 2.0}


def test_a_choice_is_read_as_the_pair_of_context_and_question_with_choice(model: TaskModel) -> None:
    tokenizer = model.require_tokenizer()
    row = {"context": "the ferry leaves", "question": "when is it", "choices": ["at seven", "[SEP] at nine"]}
    first, second = TASK.features([row], tokenizer)
    expected = tokenizer("the ferry leaves", "when is it at seven")
    assert (first["input_ids"], first["token_type_ids"]) == (expected["input_ids"], expected["token_type_ids"])
    assert second["input_ids"].count(tokenizer.sep_token_id) == 2  # none of them from the text
    (short, _) = TASK.features([row | {"question": ""}], tokenizer)
    assert short["input_ids"] == tokenizer("the ferry leaves", "at seven")["input_ids"]


@pytest.mark.parametrize(
    ("value", "names", "index"),
    [
        (1, (), 1),
        ("1", (), 1),
        ("wet", (), 1),
        (" wet ", (), 1),
        ("B", (), 1),
        ("choice2", ("choice1", "choice2", "choice3"), 1),
        ("2", ("1", "2", "3"), 1),  # as ARC names its choices
    ],
)
def test_the_right_choice_is_named_by_index_text_letter_or_column(
    value: int | str, names: tuple[str, ...], index: int
) -> None:
    choices = {"text": ["dry", "wet", "sold"], "label": list(names)}
    (row,) = valid_rows([ROW | {"choices": choices, "label": value}], TASK.columns)
    assert (row["choices"], row["label"]) == (choices["text"], index)


@pytest.mark.parametrize(
    ("row", "names", "choices", "label"),
    [
        (ROW | {"label": "The street was sold."}, {}, ROW["choices"], 1),
        (ROW | {"choices": json.dumps(ROW["choices"]), "label": "1"}, {}, ROW["choices"], 1),
        ({"context": "c", "choice0": "a", "choice1": "b", "choice2": "", "label": 1}, {}, ["a", "b"], 1),
        ({"context": "c", "choice1": "a", "choice2": "b", "label": "choice2"}, {}, ["a", "b"], 1),
        ({"context": "c", "ending_0": "a", "ending_1": "b", "label": 0.0}, {"choices": "ending"}, ["a", "b"], 0),
        (
            {"context": "c", **{f"ending{number}": f"text {number}" for number in reversed(range(11))}},
            {"choices": "endings"},
            [f"text {number}" for number in range(11)],  # by number: 10 is after 9
            None,
        ),
        ({"context": "c", "choices": {"label": ["1", "2"], "text": ["a", "b"]}, "label": "2"}, {}, ["a", "b"], 1),
        (ROW | {"label": -1}, {}, ROW["choices"], None),
        (ROW | {"label": ""}, {}, ROW["choices"], None),
    ],
)
def test_the_spellings_of_rows(
    row: dict[str, Any], names: dict[str, str], choices: list[str], label: int | None
) -> None:
    (read,) = valid_rows([row], TASK.columns, names=names)
    assert (read["choices"], read.get("label")) == (choices, label)


@pytest.mark.parametrize(
    "columns", [("choice1", "choice_1"), ("choice0", "choice1", "choice3"), ("choice2", "choice3")]
)
def test_columns_of_choices_are_numbered_one_by_one(columns: tuple[str, ...], tmp_path: Path) -> None:
    message = "the columns of single choices are " + ", ".join(map(repr, sorted(columns)))
    row = {"context": "c", **dict.fromkeys(columns, "a")}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=message):
        read_rows(tmp_path / "rows.jsonl", TASK.columns, require_labels=False)
    with pytest.raises(DataError, match=message):
        list(valid_rows([row], TASK.columns))
    with pytest.raises(DataError, match=message):
        read_rows([row], TASK.columns, require_labels=False)
    with pytest.raises(HTTPException) as refused:
        BodyReader(without_labels(TASK.columns), Limits(), {}).rows(row)
    assert message in str(refused.value.detail).replace("\\'", "'")


WINOGRANDE = {"context": "sentence", "choices": "option", "label": "answer"}


def read_written(rows: list[dict[str, Any]], suffix: str, folder: Path, names: dict[str, str], base: int) -> list[Any]:
    """The labels of rows that are written to a file and read from it, or given in memory."""
    task = TASK.with_settings(label_base=base)
    if suffix == "memory":
        table = read_rows(rows, task.columns, ReadOptions(columns=names), require_labels=False)
        return [row.get("label") for row in table]
    file = folder / f"rows.{suffix}"
    lines = [",".join(rows[0]), *(",".join("" if v is None else str(v) for v in row.values()) for row in rows)]
    file.write_text("\n".join(lines if suffix == "csv" else map(json.dumps, rows)) + "\n")
    table = read_rows(file, task.columns, ReadOptions(columns=names), require_labels=False)
    return [row.get("label") for row in table]


def winogrande(labels: list[Any], count: int = 2) -> list[dict[str, Any]]:
    options = {f"option{number}": f"text {number}" for number in range(1, count + 1)}
    return [{"sentence": f"The _ was {number}.", **options, "answer": label} for number, label in enumerate(labels)]


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "memory"])
@pytest.mark.parametrize(
    ("base", "labels", "indices"),
    [
        (1, [1, 2, 1, None], [0, 1, 0, None]),  # WinoGrande
        (1, ["1.0", "-1.0", "2.0"], [0, None, 1]),
        (0, [1, 0, 1, -1], [1, 0, 1, None]),  # COPA and PIQA
        (1, ["option1", "B", "text 1"], [0, 1, 0]),
        (0, ["option1", "B", "text 1"], [0, 1, 0]),
    ],
)
def test_label_base_says_whether_labels_count_from_0_or_1(
    base: int, labels: list[Any], indices: list[int | None], suffix: str, tmp_path: Path
) -> None:
    assert read_written(winogrande(labels), suffix, tmp_path, WINOGRANDE, base) == indices


def test_files_with_a_list_or_a_column_for_each_choice_read_alike(tmp_path: Path) -> None:
    rows = [ROW, ROW | {"choices": ["a", "b", "c"], "label": 2}]
    wide = "context,choice0,choice1,choice2,label\nIt rained.,The street was wet.,The street was sold.,,0\n"
    (tmp_path / "wide.csv").write_text(wide + "It rained.,a,b,c,C\n")
    (tmp_path / "lists.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Dataset.from_list(
        [{"context": r["context"], "opt0": r["choices"][0], "opt1": r["choices"][1]} for r in rows]
    ).to_parquet(str(tmp_path / "wide.parquet"))
    for name in ("wide.csv", "lists.jsonl"):
        table = read_rows(tmp_path / name, TASK.columns, require_labels=True)
        assert [(row["choices"], row["label"]) for row in table] == [(row["choices"], row["label"]) for row in rows]
    kept = [column for column in TASK.columns if not column.is_label]
    options = ReadOptions(columns={"choices": "opt"})
    assert [row["choices"] for row in read_rows(tmp_path / "wide.parquet", kept, options)] == [
        row["choices"][:2] for row in rows
    ]
    (tmp_path / "none.csv").write_text("context,label\na,0\n")
    with pytest.raises(DataError, match="no column 'choices', nor columns of single choices such as 'choice0'"):
        read_rows(tmp_path / "none.csv", TASK.columns)


def test_rows_on_one_context_stay_on_one_side_of_the_split() -> None:
    rows = [
        {"context": f"text {number // 4}", "question": f"q{number}", "choices": ["a", "b"], "label": number % 2}
        for number in range(80)
    ]
    train, validation = train_validation_split(
        read_rows(rows, TASK.columns, require_labels=False), TASK.columns, 0.25, 1
    )
    assert len(train) + len(validation) == 80
    assert {row["context"] for row in train}.isdisjoint(row["context"] for row in validation)
    alike = [row | {"context": "one"} for row in rows]
    train, validation = train_validation_split(
        read_rows(alike, TASK.columns, require_labels=False), TASK.columns, 0.25, 1
    )
    assert 0 < len(validation) < len(train)


def test_the_question_may_be_missing_and_tells_rows_apart() -> None:
    rows = [ROW, ROW | {"question": "And then?"}, ROW | {"context": " "}]
    keys = row_keys(read_rows(rows, TASK.columns, require_labels=False), TASK.columns)
    assert keys["empty"].tolist() == [False, False, True]
    assert len(set(keys["text"].tolist())) == 3


ASKED = {"question": "Where is it?", "choices": {"label": ["A", "B"], "text": ["x", "y"]}, "answerKey": "B"}
ASKED_NAMES = {"context": "question", "choices": "choices", "label": "answerKey"}


def as_commonsense_qa(row: dict[str, Any]) -> dict[str, Any]:
    """What is read of a row, which must be that of ``ASKED``: the question is the context, and not read once more."""
    assert (row["context"], row["choices"]) == (ASKED["question"], ASKED["choices"]["text"])
    assert row.get("question") is None
    return row


def test_a_column_that_is_stated_to_be_another_is_not_read_by_its_name_too(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ASKED) + "\n")
    (row,) = read_rows(file, TASK.columns, ReadOptions(columns=ASKED_NAMES), require_labels=True)
    assert as_commonsense_qa(row)["label"] == 1
    both = {**ASKED_NAMES, "question": "question"}  # unless that is stated
    (row,) = read_rows(file, TASK.columns, ReadOptions(columns=both))
    assert row["question"] == row["context"] == ASKED["question"]


def test_rows_in_memory_and_requests_read_the_question_once() -> None:
    (row,) = valid_rows([ASKED], TASK.columns, names=ASKED_NAMES)
    as_commonsense_qa(row)
    for names, remembered in ((ASKED_NAMES, {}), (None, ASKED_NAMES)):
        (row,) = read_rows([ASKED], TASK.columns, ReadOptions(columns=names), others=remembered)
        assert as_commonsense_qa(row)["label"] == 1
    body = {"question": ASKED["question"], "choices": ASKED["choices"]["text"]}
    (row,), _ = BodyReader(without_labels(TASK.columns), Limits(), ASKED_NAMES).rows(body)
    as_commonsense_qa(dict(row))
    task_row = {"context": "c", "question": "q", "choices": ["a", "b"]}  # under the task's names a question is one
    assert list(valid_rows([task_row], TASK.columns, names=ASKED_NAMES)) == [task_row]
    assert BodyReader(without_labels(TASK.columns), Limits(), ASKED_NAMES).rows(task_row)[0] == [task_row]


@pytest.mark.parametrize("name", ["choices", "ending0"])
def test_a_request_may_have_a_list_or_a_key_for_each_choice(name: str) -> None:
    reader = BodyReader(without_labels(TASK.columns), Limits(), {"choices": "ending"})
    choices = {"choices": ["a", "b"]} if name == "choices" else {"ending0": "a", "ending1": "b"}
    rows, several = reader.rows({"context": "c", **choices})
    assert (rows, several) == ([{"context": "c", "choices": ["a", "b"]}], False)
    with pytest.raises(HTTPException) as refused:
        reader.rows({"context": "c", "choices": ["a"]})
    assert "1 choice. Give at least 2." in str(refused.value.detail)


def test_the_report_shows_mistakes_with_their_choices(model: TaskModel) -> None:
    rows = [ROW | {"context": f"It rained {n} times.", "label": n % 2} for n in range(6)]
    predictions = model.predict([{k: v for k, v in row.items() if k != "label"} for row in rows])
    sections = TASK.output.report(predictions, rows, TASK.texts)
    metrics = evaluate(model, rows)
    assert sections.measure.values() == {"accuracy": pytest.approx(metrics["accuracy"])}
    assert sections.examples is not None
    example = sections.examples.items[0]
    assert sorted(text for text, _ in example.candidates) == sorted(ROW["choices"])
    assert example.candidates[0][1] >= example.candidates[1][1]
    same = [prediction for prediction in predictions if prediction.label == 0][:1] * 2
    if same:
        assert TASK.output.degeneracy(same, rows[:2]) == "predicts choice 0 for every row"
    assert TASK.output.metrics(predictions, [{**row, "label": None} for row in rows]) == {}
