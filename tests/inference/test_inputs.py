"""What may be predicted besides files of rows: texts, tuples of texts, lines of a pipe; and logits on request."""

import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet
from typer.testing import CliRunner

from bert_tasks import Encoder, predict
from bert_tasks.cli import models as progress
from bert_tasks.cli.app import app
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.reading import read
from bert_tasks.errors import DataError, UsageError
from bert_tasks.inference import WriteOptions, predict_file, streams
from bert_tasks.inference.prediction import PredictionRun
from bert_tasks.inference.predictor import Predictor
from bert_tasks.inference.writing import OutputDestination
from bert_tasks.model.task_model import TaskModel
from support.runs import CONSOLE
from support.sampling import slow_except
from support.task_contract import unlabelled
from support.task_examples import EXAMPLES

UNEXPLAINED = [name for name, example in EXAMPLES.items() if example.task.output.no_explanations_reason is not None]
ONE_TEXT = ("single", "several", "regression", "windows")
ModelOf = Callable[[str], TaskModel]


@pytest.fixture(scope="module")
def model_of(base: Path) -> ModelOf:
    @cache
    def model(case: str) -> TaskModel:
        torch.manual_seed(3)
        model = TaskModel.from_pretrained(base, task=EXAMPLES[case].task)
        last = getattr(model.head, "output", model.encoder.embeddings.word)
        torch.nn.init.normal_(last.weight, std=0.5)
        return model

    return model


def contents(predictions: Any) -> list[dict[str, Any]]:
    return [prediction.to_json() for prediction in predictions]


@pytest.mark.parametrize("case", slow_except(ONE_TEXT, "single", "windows"))
def test_a_text_is_a_row_alone_or_in_a_list(case: str, model_of: ModelOf) -> None:
    model = model_of(case)
    rows = unlabelled(EXAMPLES[case])
    texts = [row["text"] for row in rows]
    expected = contents(model.predict(rows))
    assert contents(model.predict(texts)) == contents(predict(model, texts)) == expected
    assert contents(model.predict(iter([texts[0], rows[1]]))) == contents(model.predict(rows[:2]))
    assert contents(model.predict(texts[0])) == contents(model.predict(rows[0])) == contents(model.predict(rows[:1]))


@pytest.mark.parametrize(("case", "names"), [("pair", ("text", "text_pair")), ("span", ("question", "context"))])
def test_a_tuple_holds_the_texts_of_a_row_in_the_tasks_order(
    case: str, names: tuple[str, str], model_of: ModelOf
) -> None:
    model = model_of(case)
    rows = [{name: row[name] for name in names} for row in unlabelled(EXAMPLES[case])]
    pairs = [(row[names[0]], row[names[1]]) for row in rows]
    expected = contents(model.predict(rows))
    assert contents(model.predict(pairs)) == contents(predict(model, pairs)) == expected
    assert contents(model.predict(pairs[0])) == contents(model.predict(rows[:1]))
    message = rf"row 1: expected a mapping .*, or a tuple of {names[0]} and {names[1]}, got str"
    with pytest.raises(DataError, match=message):
        model.predict([rows[0], "one text"])


def test_what_is_no_row_is_refused(model_of: ModelOf) -> None:
    wrong: tuple[Any, ...] = (3, [3], ["a", None], [("a", "b")], [["a"]], [b"a"])
    for value in wrong:
        with pytest.raises(DataError, match="expected a mapping"):
            model_of("single").predict(value)


@pytest.mark.parametrize("case", EXAMPLES)
def test_logits_are_those_that_the_scores_were_made_of(case: str, model_of: ModelOf) -> None:
    model, rows = model_of(case), unlabelled(EXAMPLES[case])
    if case in ("token crf", "masked"):
        with pytest.raises(UsageError, match=r"without (logits|them)"):
            model.predict(rows, logits=True)
        return
    plain, asked = model.predict(rows), model.predict(rows, logits=True)
    assert not any("logits" in prediction for prediction in contents(plain))
    for before, after in zip(contents(plain), contents(asked), strict=True):
        logits = torch.tensor(after.pop("logits", []), dtype=torch.float64)
        assert after == before
        if "tags" in before:
            probabilities = logits.softmax(-1)
            assert logits.shape == (len(before["words"]), len(model.task.output.labels))
            assert probabilities.max(-1).values.tolist() == pytest.approx(before["scores"], abs=1e-6)
            assert [model.task.output.labels[best] for best in probabilities.argmax(-1)] == before["tags"]
        elif "n_best" in before:
            assert {"start_logit", "end_logit"} <= before["n_best"][0].keys()
        elif isinstance(before.get("scores"), list):  # of the choices of the row
            assert logits.softmax(-1).tolist() == pytest.approx(before["scores"], abs=1e-6)
        elif "scores" in before:
            several = "labels" in before
            probabilities = logits.sigmoid() if several else logits.softmax(-1)
            assert dict(zip(model.task.output.labels, probabilities.tolist(), strict=True)) == pytest.approx(
                before["scores"], abs=1e-6
            )
        else:
            assert logits.tolist() == [before["score"]]


def test_logits_and_explanations_are_written(model_of: ModelOf, tmp_path: Path) -> None:
    model, texts = model_of("single"), ["a fine film", "what a bore"]
    asked = [prediction.to_json() for prediction in model.predict(texts, logits=True, explain=True)]
    for form in ("jsonl", "csv", "parquet"):
        predict_file(model, texts, tmp_path / f"out.{form}", logits=True, explain=True)
    cells = list(csv.DictReader(io.StringIO((tmp_path / "out.csv").read_text("utf-8"))))
    for field in ("logits", "explanation"):
        expected = json.loads(json.dumps([row[field] for row in asked]))
        lines = (tmp_path / "out.jsonl").read_text("utf-8").splitlines()
        assert [json.loads(line)[field] for line in lines] == expected
        assert [json.loads(row[field]) for row in cells] == expected
        assert parquet.read_table(tmp_path / "out.parquet")[field].to_pylist() == expected


def test_entities_are_written_with_their_explanations(
    model_of: ModelOf, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, rows, folder = model_of("token"), unlabelled(EXAMPLES["token"])[:4], tmp_path / "tagger"
    expected = [prediction.to_json()["entities"] for prediction in model.predict(rows, explain=True)]
    assert all(entity["explanation"]["words"] for entities in expected for entity in entities)
    for name in ("out.jsonl", "out.csv", "out.parquet"):
        predict_file(model, rows, tmp_path / name, explain=True)
    lines = (tmp_path / "out.jsonl").read_text("utf-8").splitlines()
    cells = csv.DictReader(io.StringIO((tmp_path / "out.csv").read_text("utf-8")))
    assert [json.loads(line)["entities"] for line in lines] == expected
    assert [json.loads(row["entities"]) for row in cells] == expected
    assert parquet.read_table(tmp_path / "out.parquet")["entities"].to_pylist() == expected
    with pytest.raises(UsageError, match=r"\.conll has no place for explanations"):
        predict_file(model, rows, tmp_path / "out.conll", explain=True)
    model.save_pretrained(folder)
    text = " ".join(rows[0]["words"])
    assert CliRunner().invoke(app, ["predict", str(folder), "--text", text, "--explain"]).exit_code == 0
    (entity, *_) = json.loads(capfd.readouterr().out)["entities"]
    assert {word["column"] for word in entity["explanation"]["words"]} == {"text"}
    assert [word["word"] for word in entity["explanation"]["words"]] == rows[0]["words"]


@pytest.mark.parametrize("case", UNEXPLAINED)
def test_tasks_without_explanations_say_so(case: str, model_of: ModelOf, tmp_path: Path) -> None:
    model, rows = model_of(case), unlabelled(EXAMPLES[case])[:2]
    for output in (None, tmp_path / "out.jsonl"):
        with pytest.raises(UsageError, match=re.escape(model.task.output.no_explanations_reason)):
            predict_file(model, rows, output, explain=True)


def test_logits_and_explanations_need_a_place_and_gradients(model_of: ModelOf, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\.conll has no place for logits"):
        predict_file(model_of("token"), unlabelled(EXAMPLES["token"]), tmp_path / "out.conll", logits=True)
    with pytest.raises(UsageError, match=r"\.json has no place for explanations"):
        predict_file(model_of("span"), unlabelled(EXAMPLES["span"]), tmp_path / "out.json", explain=True)
    with pytest.raises(UsageError, match=r"explanations are computed in float32\. Remove dtype = 'int8'"):
        predict(model_of("single"), ["a"], explain=True, dtype="int8")


def piped(model: TaskModel, content: str, tmp_path: Path, **options: Any) -> list[dict[str, Any]]:
    """The rows that ``predict -`` writes for what comes through a pipe, in and out."""
    source = tmp_path / "pipe"
    source.write_text(content, "utf-8", newline="")
    out = io.BytesIO()
    run = PredictionRun(Predictor(model), OutputDestination(out, "-", WriteOptions(), None), WriteOptions())
    with source.open("rb") as file:
        run.predict_stream(file, ReadOptions(**options))
    return [json.loads(line) for line in out.getvalue().decode().splitlines()]


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ("one\ntwo\r\n", ["one", "two"]),
        ("one, two; three\n\nfour", ["one, two; three", "", "four"]),
        ("[laughs] yes\n{no}\n", ["[laughs] yes", "{no}"]),
        ('{"text": "one"}\n{"text": "two"}\n', ["one", "two"]),
        ('[{"text": "one"},\n {"text": "two"}]\n', ["one", "two"]),
        ("3\n[1, 2]\n", ["3", "[1, 2]"]),
    ],
)
def test_lines_of_a_pipe_are_texts_unless_they_are_json(
    content: str, texts: list[str], model_of: ModelOf, tmp_path: Path
) -> None:
    model = model_of("single")
    assert [row["text"] for row in piped(model, content, tmp_path)] == texts
    stored = streams.detected(ReadOptions(), tmp_path / "pipe", model)
    assert predict_file(model, tmp_path / "pipe", tmp_path / "out.jsonl", reading=stored).rows == len(texts)


@pytest.mark.parametrize("header", ["text", "id,text", '"text";"label"', "review\tstars"])
def test_a_table_on_a_pipe_is_not_taken_for_texts(header: str, model_of: ModelOf, base: Path, tmp_path: Path) -> None:
    model = TaskModel.from_pretrained(base, task=EXAMPLES["single"].task)
    model.columns = {"text": "review"}
    with pytest.raises(UsageError, match=r"names the column '(text|review)'.*format='csv', tsv, .* or text if"):
        piped(model, f"{header}\nx\n", tmp_path)
    if header == "text":
        rows = piped(model, f"{header}\nx\n", tmp_path, format="text")
        assert [row["text"] for row in rows] == ["text", "x"]


def test_stored_columns_are_found_in_a_pipe(base: Path, tmp_path: Path) -> None:
    model = TaskModel.from_pretrained(base, task=EXAMPLES["single"].task)
    model.columns = {"text": "review"}
    rows = piped(model, '{"review": "one", "n": 1}\n', tmp_path)
    assert [(row["review"], row["n"]) for row in rows] == [("one", 1)]
    assert [row["review"] for row in piped(model, "n,review\n1,one\n", tmp_path, format="csv")] == ["one"]


def test_the_command_line_predicts_texts_and_pipes(
    model_of: ModelOf, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model_of("single").save_pretrained(tmp_path / "model")
    arguments = ["predict", str(tmp_path / "model"), "--logits"]
    texts = ["a fine film", "what a bore"]
    CliRunner().invoke(app, [*arguments, "--text", texts[0], "--text", texts[1]])
    named = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [row["text"] for row in named] == texts
    assert len(named[0]["logits"]) == 3
    shown = CliRunner().invoke(app, ["predict", "model", "--text", "a", "b.csv"])
    assert shown.exit_code == 2
    assert "exclude each other" in shown.output


# Rows of two texts or more: the kind, the row, and its texts on the command line.
SEVERAL_TEXTS = {
    "pair": ({"text": "It rains.", "text_pair": "It is wet."}, ("It rains.", "It is wet.")),
    "span": ({"question": "Who sang?", "context": "Ada sang."}, ("Who sang?", "Ada sang.")),
    "choice": ({"context": "He was late.", "choices": ["He ran.", "Ok."]}, ("He was late.", "He ran.", "Ok.")),
}


@pytest.mark.parametrize("case", SEVERAL_TEXTS)
def test_a_row_of_several_texts_is_a_tuple_options_or_a_line(
    case: str, model_of: ModelOf, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    row, texts = SEVERAL_TEXTS[case]
    model = model_of(case)
    expected = contents(model.predict([row]))
    assert contents(model.predict(texts)) == contents(model.predict([texts])) == expected
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    seconds = [argument for text in texts[1:] for argument in ("--text-pair", text)]
    assert CliRunner().invoke(app, ["predict", str(folder), "--text", texts[0], *seconds]).exit_code == 0
    assert json.loads(capfd.readouterr().out) == {**row, **expected[0]}


@pytest.mark.slow  # starts programs
@pytest.mark.parametrize("case", ["single", "pair", "span"])  # a line has no number of choices
def test_a_real_pipe_has_a_row_in_each_line(case: str, model_of: ModelOf, tmp_path: Path) -> None:
    row, texts = SEVERAL_TEXTS.get(case, ({"text": "a fine film"}, ("a fine film",)))
    model_of(case).save_pretrained(tmp_path / "model")
    expected = contents(model_of(case).predict([row]))[0]
    numbered = ("0", "1") if len(texts) > 1 else ("text",)  # the columns of a table of lines
    for output, names in (("-", tuple(row)), (str(tmp_path / "rows.jsonl"), numbered)):
        command = [*CONSOLE, "predict", str(tmp_path / "model"), "--output", output]
        ended = subprocess.run(command, input="\t".join(texts) + "\n", capture_output=True, text=True, check=True)
        assert "rows/s" not in ended.stderr
        written = ended.stdout if output == "-" else Path(output).read_text("utf-8")
        assert json.loads(written) == {**dict(zip(names, texts, strict=True)), **expected}


def test_second_texts_need_their_first(capfd: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--text-pair", "a"], ["--text", "a", "--text", "b", "--text-pair", "c"]):
        shown = CliRunner().invoke(app, ["predict", "model", *arguments])
        assert shown.exit_code == 2
        assert "Pass a --text-pair for each --text" in " ".join(shown.output.replace("│", "").split())


def test_texts_are_embedded(base: Path, capfd: pytest.CaptureFixture[str]) -> None:
    CliRunner().invoke(app, ["embed", str(base), "--text", "one", "--text", "two"])
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [row["text"] for row in rows] == ["one", "two"]
    expected = Encoder.from_pretrained(base).embed(["one", "two"])
    assert torch.tensor([row["embedding"] for row in rows]).sub(torch.as_tensor(expected)).abs().max() < 1e-6


def test_tags_are_written_as_universal_dependencies(model_of: ModelOf, tmp_path: Path) -> None:
    """What is written is read again as the words and their tags."""
    model, output = model_of("token"), tmp_path / "rows.conllu"
    rows = [{"words": ["Ada", "met", "Bob"]}, {"words": ["a b", ""]}]
    predict_file(model, rows, output)
    table = read(output, model.task.columns)
    assert [row["words"] for row in table] == [["Ada", "met", "Bob"], ["a_b", "_"]]
    assert [row["tags"] for row in table] == [list(prediction.tags) for prediction in model.predict(rows)]


def test_comments_of_universal_dependencies_are_kept(model_of: ModelOf, tmp_path: Path) -> None:
    word = "{0}\t{1}\t_\t_\t_\t_\t0\troot\t_\t_\n"
    head = ["# newdoc id = d1\n# sent_id = d1-s1\n# text = Ada met\n", "# sent_id = d1-s2\n", ""]
    words = [["Ada", "met"], ["Bob"], ["she"]]
    sentences = [
        above + "".join(word.format(number, text) for number, text in enumerate(texts, start=1)) + "\n"
        for above, texts in zip(head, words, strict=True)
    ]
    (tmp_path / "rows.conllu").write_text("".join(sentences), "utf-8")
    model = model_of("token")
    predict_file(model, tmp_path / "rows.conllu", tmp_path / "predicted.conllu")
    written = (tmp_path / "predicted.conllu").read_text("utf-8")
    tags = [prediction.tags for prediction in model.predict([{"words": texts} for texts in words])]
    expected = ""
    for above, texts, row_tags in zip(head, words, tags, strict=True):
        numbered = enumerate(zip(texts, row_tags, strict=True), start=1)
        lines = [f"{number}\t{text}\t_\t{tag}" + "\t_" * 6 + "\n" for number, (text, tag) in numbered]
        expected += above + "".join(lines) + "\n"
    assert written == expected
    predict_file(model, tmp_path / "rows.conllu", tmp_path / "predicted.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "predicted.jsonl").read_text("utf-8").splitlines()]
    assert [row.get("comments", []) for row in rows] == [text.splitlines() for text in head]


def test_other_columns_of_this_name_are_no_comments(model_of: ModelOf, tmp_path: Path) -> None:
    for comments in (3, "# text", ["text", 3, "# a\n1\tb"], None):
        predict_file(model_of("token"), [{"words": ["Ada"], "comments": comments}], tmp_path / "rows.conllu")
        assert (tmp_path / "rows.conllu").read_text("utf-8").startswith("1\tAda\t_\t")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("quiet", "terminal"), [(False, True), (True, True), (False, False)])
def test_progress_is_shown_on_a_terminal_unless_quiet(
    quiet: bool, terminal: bool, model_of: ModelOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = _Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr("bert_tasks.model.prediction.BATCH_ROWS", 2)
    with progress.rows_progress(quiet=quiet) as show:
        predict_file(model_of("single"), ["a"] * 5, tmp_path / "out.csv", progress=show)
    text = shown.getvalue()
    if quiet or not terminal:
        assert text == ""
        return
    states = text.split("\r")
    assert "0 of 5 rows" in text
    assert re.search(r"5 of 5 rows, [\d,]+ rows/s", text)
    assert states[-1] == ""
    assert states[-2].strip() == ""


TEXT = "  Nobody told the  baker's wife: \U0001f600 the ferry, at seven."


@pytest.mark.parametrize("case", slow_except([case for case in EXAMPLES if case.startswith("token")], "token"))
def test_a_tagger_takes_a_text_and_says_where_in_it_entities_are(case: str, model_of: ModelOf, tmp_path: Path) -> None:
    model = model_of(case)
    (prediction,) = contents(model.predict(TEXT))
    words = [word for word in prediction["words"] if not word.isspace()]
    assert "".join(words) == "".join(TEXT.split())
    assert words[3:6] == ["baker", "'s", "wife"]
    (split,) = contents(model.predict([{"words": words}]))
    assert (prediction["tags"], prediction["scores"]) == (split["tags"], split["scores"])
    assert len(prediction["entities"]) == len(split["entities"]) > 0
    for entity, by_words in zip(prediction["entities"], split["entities"], strict=True):
        assert entity["word"] == TEXT[entity["start"] : entity["end"]]
        assert "".join(entity["word"].split()) == "".join(by_words["word"].split())
    for rows in ([{"text": TEXT}], [TEXT], [{"words": words, "text": TEXT}]):
        assert contents(model.predict(rows)) == contents(predict(model, rows)) == [prediction]
    lines = piped(model, TEXT + "\n", tmp_path)
    assert [{name: row[name] for name in prediction} for row in lines] == [prediction]
    (tmp_path / "new.csv").write_text('text\n"' + TEXT + '"\n', "utf-8")
    assert contents(predict(model, tmp_path / "new.csv")) == [prediction]


def test_words_that_are_not_in_the_text_have_their_own_places(model_of: ModelOf) -> None:
    words = ["the", "baker"]
    assert contents(model_of("token").predict([{"words": words, "text": "another"}])) == contents(
        model_of("token").predict([{"words": words}])
    )
    with pytest.raises(DataError, match=r"missing words in column 'words'. The row has 'tokens'"):
        model_of("token").predict([{"tokens": words}])


def test_a_table_without_words_and_text_is_told_that_either_will_do(model_of: ModelOf, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("id,Satz\n1,the baker\n", "utf-8")
    with pytest.raises(DataError) as error:
        predict(model_of("token"), tmp_path / "new.csv")
    assert "no column 'words', nor 'text'" in str(error.value)
    assert "columns={'words': 'NAME'} or columns={'text': 'NAME'}" in str(error.value)
    assert len(predict(model_of("token"), tmp_path / "new.csv", columns={"text": "Satz"})) == 1
