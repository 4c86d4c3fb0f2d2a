"""Prediction into files and streams, in this process: columns, bad rows, parts that are gone on with, refusals."""

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from bert_tasks.errors import ClosedPipeError, DataError, UsageError
from bert_tasks.inference import WriteOptions, predict, predict_file, sinks
from bert_tasks.inference.sinks import MANIFEST, ROWS, unfinished_folder
from bert_tasks.inference.writing import Written
from bert_tasks.model.task_model import TaskModel
from bert_tasks.storage import locked
from bert_tasks.tasks import SequenceClassification, SpanExtraction, TokenClassification
from support.training_runs import make_rows

LABELS = ("calm", "glad")
TAGGER = TokenClassification.of(labels=("O", "B-x"), max_length=16, doc_stride=4)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bert_tasks.model.prediction.BATCH_ROWS", 4)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Ten rows with an id, a label of their own and a column that no task reads."""
    path = tmp_path / "new.csv"
    rows = [[f"r{n}", row["text"], row["label"], "=x"] for n, row in enumerate(make_rows(10))]
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["id", "text", "label", "note"], *rows])
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class TestColumns:
    def test_the_inputs_columns_stand_before_the_prediction(self, model: TaskModel, data: Path, tmp_path: Path) -> None:
        bare = [answer.to_json() for answer in predict(model, data)]
        assert predict_file(model, data, tmp_path / "a.jsonl").rows == 10
        rows = read(tmp_path / "a.jsonl")
        assert list(rows[0]) == ["id", "text", "input.label", "note", "label", "score", "scores"]
        assert [row["id"] for row in rows] == [f"r{n}" for n in range(10)]
        assert [row["input.label"] for row in rows] == [row["label"] for row in make_rows(10)]
        assert [{name: row[name] for name in ("label", "score", "scores")} for row in rows] == bare
        assert names(tmp_path) == ["a.jsonl", "new.csv"]

    def test_columns_are_chosen(self, model: TaskModel, data: Path, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"new\.csv: no column 'ids' to keep, did you mean 'id'\?"):
            predict_file(model, data, tmp_path / "a.jsonl", writing=WriteOptions(keep_columns=["ids"]))
        assert names(tmp_path) == ["new.csv"]
        choices: tuple[tuple[Any, list[str]], ...] = (("none", []), (["note", "id"], ["id", "note"]))
        for keep, kept in choices:
            predict_file(model, data, tmp_path / "a.jsonl", writing=WriteOptions(keep_columns=keep))
            assert list(read(tmp_path / "a.jsonl")[0]) == [*kept, "label", "score", "scores"]

    def test_names_never_clash(self, model: TaskModel, tmp_path: Path) -> None:
        source_row = {"text": "a", "score": 1, "scores.calm": 2, "input.score": 3, "logits": 4, "line": 5, "labels": 6}
        predict_file(model, [source_row], tmp_path / "a.jsonl")
        (row,) = read(tmp_path / "a.jsonl")
        renamed = {"input.score": 1, "input.scores.calm": 2, "input.input.score": 3, "input.logits": 4}
        assert {name: row[name] for name in renamed} == renamed
        assert (row["label"] in LABELS, row["line"], row["labels"]) == (True, 5, 6)  # a class has no field ``labels``

    def test_what_json_cannot_say_is_made_plain(self, model: TaskModel, tmp_path: Path) -> None:
        source = tmp_path / "odd.jsonl"
        source.write_text('{"text": "a", "x": NaN, "y": "\\ud800z", "z": [Infinity]}\n')
        predict_file(model, source, tmp_path / "a.jsonl")
        (row,) = read(tmp_path / "a.jsonl")
        assert (row["x"], row["y"], row["z"]) == (None, "\ufffdz", [None])
        predict_file(model, [{"text": "a", "day": date(2026, 1, 2)}], tmp_path / "b.parquet")
        predict_file(model, tmp_path / "b.parquet", tmp_path / "b.jsonl")
        assert read(tmp_path / "b.jsonl")[0]["day"] == "2026-01-02"

    def test_words_and_ids_stand_once(self, base: Path, tmp_path: Path) -> None:
        tagger = TaskModel.from_pretrained(base, task=TAGGER)
        (tmp_path / "s.conll").write_text("Ann B-x\nwalks O\n\nhome O\n")
        predict_file(tagger, tmp_path / "s.conll", tmp_path / "a.jsonl")
        rows = read(tmp_path / "a.jsonl")
        assert list(rows[0]) == ["input.tags", "words", "tags", "scores", "entities"]
        assert (rows[0]["input.tags"], rows[0]["words"]) == (["B-x", "O"], ["Ann", "walks"])
        predict_file(tagger, tmp_path / "s.conll", tmp_path / "b.jsonl", writing=WriteOptions(keep_columns=["1"]))
        assert read(tmp_path / "b.jsonl")[0]["1"] == ["B-x", "O"]
        predict_file(tagger, tmp_path / "s.conll", tmp_path / "a.csv", writing=WriteOptions(keep_columns="none"))
        again = predict(tagger, tmp_path / "a.csv")  # what a tagger writes is what it reads
        assert [list(answer.to_json()["words"]) for answer in again] == [row["words"] for row in rows]


class TestFormats:
    def test_the_same_rows_in_every_format(self, model: TaskModel, data: Path, tmp_path: Path) -> None:
        for form in ("jsonl", "csv", "tsv", "parquet"):
            assert predict_file(model, data, tmp_path / f"a.{form}").rows == 10
        rows = read(tmp_path / "a.jsonl")
        assert parquet.read_table(tmp_path / "a.parquet").to_pylist() == rows
        for form, delimiter in (("csv", ","), ("tsv", "\t")):
            with (tmp_path / f"a.{form}").open(newline="") as file:
                cells = list(csv.DictReader(file, delimiter=delimiter))
            assert [(row["id"], row["label"], float(row["scores.calm"])) for row in cells] == [
                (row["id"], row["label"], row["scores"]["calm"]) for row in rows
            ]
            assert {row["note"] for row in cells} == {"'=x"}
        predict_file(model, data, tmp_path / "raw.csv", writing=WriteOptions(csv_raw=True))
        assert "'=x" not in (tmp_path / "raw.csv").read_text()
        predict_file(model, tmp_path / "a.parquet", tmp_path / "b.jsonl", writing=WriteOptions(keep_columns=["id"]))
        assert [row["score"] for row in read(tmp_path / "b.jsonl")] == [row["score"] for row in rows]

    def test_a_format_that_the_name_does_not_say(self, model: TaskModel, data: Path, tmp_path: Path) -> None:
        predict_file(model, data, tmp_path / "answers.txt", writing=WriteOptions(format="csv"))
        assert (tmp_path / "answers.txt").read_text().startswith("id,text,input.label")

    def test_official_files_bear_the_outputs_name(self, base: Path, tmp_path: Path) -> None:
        reader = TaskModel.from_pretrained(
            base, task=SpanExtraction.of(max_length=32, doc_stride=4, max_query_length=8, version_2_with_negative=True)
        )
        rows = [{"id": f"q{n}", "question": "Who walks?", "context": "Ann walks home."} for n in range(5)]
        (tmp_path / "nbest.json").write_text("mine")
        assert predict_file(reader, rows, tmp_path / "x.json").rows == 5
        assert names(tmp_path) == ["nbest.json", "x.json", "x.nbest.json", "x.null_odds.json"]
        assert list(json.loads((tmp_path / "x.json").read_text())) == [row["id"] for row in rows]
        assert (tmp_path / "nbest.json").read_text() == "mine"

    def test_an_open_stream(self, model: TaskModel, data: Path, tmp_path: Path) -> None:
        predict_file(model, data, tmp_path / "a.jsonl")
        predict_file(model, data, tmp_path / "a.csv")
        for form in ("jsonl", "csv"):
            stream = io.BytesIO()
            assert predict_file(model, data, stream, writing=WriteOptions(format=form)).rows == 10
            assert stream.getvalue() == (tmp_path / f"a.{form}").read_bytes()

    def test_a_column_that_comes_after_the_header_of_a_stream(self, model: TaskModel) -> None:
        rows = [{"text": "a"}] * 4 + [{"text": "b", "new": "1"}]
        with pytest.raises(UsageError, match="a row has the column 'new', which the header lacks"):
            predict_file(model, rows, io.BytesIO(), writing=WriteOptions(format="csv"))

    def test_a_stream_that_nobody_reads(self, model: TaskModel, data: Path) -> None:
        class Closed(io.BytesIO):
            def write(self, content: Any) -> int:
                raise BrokenPipeError

        with pytest.raises(ClosedPipeError):
            predict_file(model, data, Closed())

    def test_counts_of_a_stream_are_those_of_a_file_and_resumed_rows_are_not_counted_again(
        self, model: TaskModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rows = [{"text": "home " * (3 if n % 2 else 40)} for n in range(9)]
        for output in (io.BytesIO(), tmp_path / "whole.jsonl"):
            done = predict_file(model, rows, output)
            assert (done.rows, done.truncated, done.rejected) == (9, 5, 0)
        assert done.lines() == ["5 of 9 (55.6%) rows are longer than max_length = 16 tokens and were truncated"]
        with monkeypatch.context() as patch:
            patch.setattr(sinks.LineFile, "finish", None)
            with pytest.raises(TypeError):
                predict_file(model, rows, tmp_path / "a.jsonl")
        done = predict_file(model, rows, tmp_path / "a.jsonl")
        assert (done.resumed, done.rows, done.truncated, done.rejected) == (9, 9, 0, 0)
        assert done.labels == {}

    def test_labels_are_counted_if_a_row_has_one(self, model: TaskModel, base: Path, tmp_path: Path) -> None:
        rows = [{"text": word} for word in ("home", "walks", "home", "Ann", "the")]
        done = predict_file(model, rows, tmp_path / "a.jsonl")
        assert done.labels == Counter(row["label"] for row in read(tmp_path / "a.jsonl"))
        highest = max(row["score"] for row in read(tmp_path / "a.jsonl"))
        done = predict_file(model, rows, tmp_path / "b.jsonl", abstain_below=highest)
        assert done.labels == Counter(row["label"] for row in read(tmp_path / "b.jsonl"))
        assert done.labels[None] > 0
        tagger = TaskModel.from_pretrained(base, task=TAGGER)
        assert predict_file(tagger, [{"words": ["Ann"]}], tmp_path / "c.jsonl").labels == {}

    def test_the_line_of_counts_has_the_most_frequent_labels(self) -> None:
        labels = Counter({"glad": 3, "a\nb": 4, None: 1})
        assert Written(rows=8, labels=labels).label_counts() == "labels: 'a\\nb' 4 (50%), glad 3 (38%), null 1 (12%)"
        resumed = Written(rows=10, resumed=9, labels=Counter(["glad"]))
        assert resumed.label_counts() == "labels of 1 new row: glad 1 (100%)"
        many = Written(rows=12, labels=Counter({f"l{n}": 1 for n in range(12)})).label_counts()
        assert (many.count("("), many[-3:]) == (10, "...")


class TestSkipping:
    BAD = 'text,id\n=1,a\nonly one\nfine,b\n"a ""quoted"" one",c\none,two,three\nb\udcffd,d\nlast,e\n'

    @pytest.fixture
    def bad(self, tmp_path: Path) -> Path:
        path = tmp_path / "bad.csv"
        path.write_bytes(self.BAD.encode(errors="surrogateescape"))
        return path

    def test_bad_rows_fail_in_one_report(self, model: TaskModel, bad: Path, tmp_path: Path) -> None:
        with pytest.raises(DataError) as caught:
            predict_file(model, bad, tmp_path / "a.jsonl")
        assert "3 problems in the data" in str(caught.value)
        assert [f"bad.csv:{line}:" in str(caught.value) for line in (3, 6, 7)] == [True] * 3
        assert names(tmp_path) == ["bad.csv"]

    def test_bad_rows_are_left_out(self, model: TaskModel, bad: Path, tmp_path: Path) -> None:
        done = predict_file(model, bad, tmp_path / "a.jsonl", writing=WriteOptions(on_error="skip"))
        assert (done.rows, done.rejected) == (4, 3)
        assert "3 of 7 rows skipped, see " in done.lines()[0]
        assert [(row["line"], row["id"]) for row in read(tmp_path / "a.jsonl")] == [
            (2, "a"),
            (4, "b"),
            (5, "c"),
            (8, "e"),
        ]
        rejects = read(tmp_path / "a.jsonl.rejects.jsonl")
        assert [row["line"] for row in rejects] == [3, 6, 7]
        assert [row["raw"] for row in rejects] == ["only one", "one,two,three", {"text": "b\udcffd", "id": "d"}]
        assert "1 cell where the header has 2" in rejects[0]["reason"]
        assert "invalid byte 0xFF in column 'text'" in rejects[2]["reason"]
        alone = predict(model, [{"text": row["text"]} for row in read(tmp_path / "a.jsonl")])
        assert [answer.to_json()["label"] for answer in alone] == [row["label"] for row in read(tmp_path / "a.jsonl")]

    def test_every_kind_of_bad_line(self, model: TaskModel, tmp_path: Path) -> None:
        source = tmp_path / "bad.jsonl"
        source.write_text('{"text": "a"}\n{"text": 5}\n{"text"\n[1]\n{"id": 1}\n\n{"text": "\\ud800"}\n{"text": "b"}\n')
        assert (
            predict_file(
                model, source, tmp_path / "a.csv", writing=WriteOptions(on_error="skip", rejects=tmp_path / "r")
            ).rows
            == 2
        )
        rejects = read(tmp_path / "r")
        assert [row["line"] for row in rejects] == [2, 3, 4, 5, 7]
        assert [row["raw"] for row in rejects] == [{"text": 5}, '{"text"', "[1]", {"id": 1}, {"text": "\ud800"}]
        with (tmp_path / "a.csv").open() as file:
            assert [row["line"] for row in csv.DictReader(file)] == ["1", "8"]

    def test_a_sentence_with_a_broken_line_goes_whole(self, base: Path, tmp_path: Path) -> None:
        tagger = TaskModel.from_pretrained(base, task=TAGGER)
        source = tmp_path / "bad.conll"
        source.write_text("Ann B-x\nwalks O\n\nto O\nhome\nnow O\n\nend O\n")
        predict_file(tagger, source, tmp_path / "a.jsonl", writing=WriteOptions(on_error="skip"))
        assert [row["words"] for row in read(tmp_path / "a.jsonl")] == [["Ann", "walks"], ["end"]]
        assert [row["raw"] for row in read(tmp_path / "a.jsonl.rejects.jsonl")] == ["to O\nhome\nnow O"]
        assert predict_file(tagger, source, tmp_path / "a.conll", writing=WriteOptions(on_error="skip")).rows == 2
        assert (tmp_path / "a.conll").read_text().count("\n\n") == 2

    def test_what_a_format_cannot_hold_is_known_before_rows_are_predicted(
        self, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reader = TaskModel.from_pretrained(
            base, task=SpanExtraction.of(max_length=32, doc_stride=4, max_query_length=8, max_answer_length=4)
        )
        rows = [{"id": name, "question": "who", "context": "Ann walks"} for name in "aba"]
        (tmp_path / "same.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        tagger = TaskModel.from_pretrained(base, task=TAGGER)
        done = predict_file(tagger, [{"words": ["New York", "is"]}, {"words": [""]}], tmp_path / "a.conll")
        assert [line.partition(" have")[0] for line in done.lines()] == ["2 of 3 words"]
        lines = (tmp_path / "a.conll").read_text().splitlines()
        assert [line.partition(" ")[0] for line in lines] == ["New_York", "is", "", "_", ""]

        def never(*_: Any, **__: Any) -> None:
            raise AssertionError("a row is predicted")

        monkeypatch.setattr("bert_tasks.inference.predictor.predict_batch", never)
        with pytest.raises(DataError, match="id 'a' appears 2 times"):
            predict_file(reader, tmp_path / "same.jsonl", tmp_path / "answers.json")
        assert names(tmp_path) == ["a.conll", "same.jsonl"]

    def test_nothing_or_everything_is_wrong(self, model: TaskModel, data: Path, tmp_path: Path) -> None:
        assert predict_file(model, data, tmp_path / "a.jsonl", writing=WriteOptions(on_error="skip")).rows == 10
        assert (tmp_path / "a.jsonl.rejects.jsonl").read_text() == ""
        for path in tmp_path.iterdir():
            path.unlink()
        (tmp_path / "bad.jsonl").write_text("{\n[]\n")
        with pytest.raises(DataError, match="2 problems"):
            predict_file(model, tmp_path / "bad.jsonl", tmp_path / "a.jsonl", writing=WriteOptions(on_error="skip"))
        assert names(tmp_path) == ["bad.jsonl"]


class TestGoingOn:
    """An attempt is broken off after two of three parts."""

    @pytest.fixture
    def expected(self, model: TaskModel, data: Path, tmp_path: Path) -> bytes:
        predict_file(model, data, tmp_path / "whole.jsonl")
        content = (tmp_path / "whole.jsonl").read_bytes()
        (tmp_path / "whole.jsonl").unlink()
        return content

    @pytest.fixture
    def broken(
        self, expected: bytes, model: TaskModel, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Path:
        features, calls = SequenceClassification.features, []

        def breaks(self: SequenceClassification, rows: Any, tokenizer: Any) -> Any:
            calls.append(len(rows))
            if len(calls) == 3:
                raise KeyboardInterrupt
            return features(self, rows, tokenizer)

        with monkeypatch.context() as patch:
            patch.setattr(SequenceClassification, "features", breaks)
            with pytest.raises(KeyboardInterrupt):
                predict_file(model, data, tmp_path / "a.jsonl")
        assert names(tmp_path) == ["a.jsonl.parts", "new.csv"]
        return unfinished_folder(tmp_path / "a.jsonl")

    def test_the_same_call_goes_on(
        self, broken: Path, expected: bytes, model: TaskModel, data: Path, tmp_path: Path, caplog: Any
    ) -> None:
        done = predict_file(model, data, tmp_path / "a.jsonl")
        assert (done.rows, done.resumed) == (10, 8)
        assert "8 of 10 rows had been completed by an earlier attempt" in done.lines()
        assert "resuming after 8 rows" in caplog.text
        assert (tmp_path / "a.jsonl").read_bytes() == expected
        assert names(tmp_path) == ["a.jsonl", "new.csv"]

    def test_skipped_rows_are_not_counted_as_lines(
        self, model: TaskModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Chunks have four usable rows; the attempt ends before the second one."""
        source, options = tmp_path / "bad.jsonl", WriteOptions(on_error="skip")
        good = [*range(4), 8, 10, 12, 13]
        source.write_text("".join(json.dumps({"text": f"a{n}"} if n in good else [n]) + "\n" for n in range(16)))
        whole = predict_file(model, source, tmp_path / "whole.jsonl", writing=options)
        append = sinks.LineFile.append

        def stop(partial: sinks.LineFile, lines: bytes) -> None:
            append(partial, lines)
            if partial.completed == 4:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(sinks.LineFile, "append", stop)
            with pytest.raises(KeyboardInterrupt):
                predict_file(model, source, tmp_path / "a.jsonl", writing=options)
        done = predict_file(model, source, tmp_path / "a.jsonl", writing=options)
        assert (done.resumed, done.rows, done.rejected) == (4, 8, 8) == (4, whole.rows, whole.rejected)
        assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()

    @pytest.mark.parametrize(("damage", "resumed"), [("cut", 4), ("gone", 0), ("manifest", 0)])
    def test_damaged_lines_are_made_again(
        self, damage: str, resumed: int, broken: Path, expected: bytes, model: TaskModel, data: Path, tmp_path: Path
    ) -> None:
        path = broken / ROWS
        content = path.read_bytes()
        match damage:
            case "cut":
                path.write_bytes(content[:-5])
            case "gone":
                path.unlink()
            case "manifest":
                (broken / MANIFEST).write_text(json.dumps({"input": "another"}))
        done = predict_file(model, data, tmp_path / "a.jsonl")
        assert done.resumed == resumed
        assert (tmp_path / "a.jsonl").read_bytes() == expected

    @pytest.mark.parametrize("changed", ["input", "model", "settings"])
    def test_other_facts_begin_again(
        self, changed: str, broken: Path, model: TaskModel, data: Path, tmp_path: Path, caplog: Any
    ) -> None:
        options: dict[str, Any] = {}
        used = model
        if changed == "input":
            data.write_text(data.read_text() + "new,row,calm,1\n")
        elif changed == "model":
            used = TaskModel(model.hf_config, model.task, tokenizer=model.tokenizer)
        else:
            options = {"keep_columns": ["id"]}
        done = predict_file(used, data, tmp_path / "a.jsonl", writing=WriteOptions(**options))
        assert done.resumed == 0
        assert re.search(rf"starting again, because (.* and )?{changed} changed", caplog.text)
        assert len(read(tmp_path / "a.jsonl")) == done.rows

    def test_files_of_others_stay(self, broken: Path, model: TaskModel, data: Path, tmp_path: Path) -> None:
        (broken / "notes.txt").write_text("mine")
        predict_file(model, data, tmp_path / "a.jsonl")
        assert names(broken) == ["notes.txt"]

    def test_one_at_a_time(self, broken: Path, model: TaskModel, data: Path, tmp_path: Path) -> None:
        with locked(broken), pytest.raises(UsageError, match=r"a\.jsonl\.parts is in use by another run \(process"):
            predict_file(model, data, tmp_path / "a.jsonl")
        assert predict_file(model, data, tmp_path / "a.jsonl").rows == 10

    def test_a_kill_while_the_table_is_made(
        self, model: TaskModel, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def killed(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(sinks.LineFile, "finish", killed)
            with pytest.raises(KeyboardInterrupt):
                predict_file(model, data, tmp_path / "a.csv")
        assert not (tmp_path / "a.csv").exists()
        assert predict_file(model, data, tmp_path / "a.csv").resumed == 10


class TestRefusals:
    def refused(self, match: str, data: Any, output: Any, **writing: Any) -> None:
        with pytest.raises(UsageError, match=match):
            predict_file("no model", data, output, writing=WriteOptions(**writing))

    def test_outputs(self, data: Path, tmp_path: Path) -> None:
        self.refused("is both output and input", data, data)
        (tmp_path / "link.csv").symlink_to(data)
        (tmp_path / "name.csv").hardlink_to(data)
        for name in ("link.csv", "name.csv"):
            self.refused("is both output and input", data, tmp_path / name)
        self.refused("no output format 'xlsx'", data, tmp_path / "a", format="xlsx")
        self.refused("parquet cannot be written to a stream", data, io.BytesIO(), format="parquet")
        self.refused("only written with on_error='skip'", data, tmp_path / "a.csv", rejects=tmp_path / "r")
        self.refused("name a file for the skipped rows", data, io.BytesIO(), on_error="skip")
        self.refused("'skip' is for files", [{"text": "a"}], tmp_path / "a.csv", on_error="skip")
        self.refused("expected 'fail' or 'skip'", data, tmp_path / "a.csv", on_error="ignore")
        skipping = {"on_error": "skip", "rejects": tmp_path / "a.csv"}
        self.refused("is both output and rejects", data, tmp_path / "a.csv", **skipping)
        assert names(tmp_path) == ["link.csv", "name.csv", "new.csv"]

    @pytest.mark.parametrize(("content", "told"), [("", "the file is empty"), ("text,id\n", "no rows")])
    def test_files_without_rows(self, content: str, told: str, model: TaskModel, tmp_path: Path) -> None:
        (tmp_path / "none.csv").write_text(content)
        with pytest.raises(DataError, match=told):
            predict_file(model, tmp_path / "none.csv", tmp_path / "a.csv")
        assert names(tmp_path) == ["none.csv"]


def test_rows_that_read_their_neighbours_are_one_part(base: Path, tmp_path: Path) -> None:
    """A tagger with context sees whole documents, whatever the size of parts."""
    task = TokenClassification.of(labels=("O", "B-x"), max_length=32, doc_stride=4, context_tokens=8)
    tagger = TaskModel.from_pretrained(base, task=task)
    rows: Sequence[dict[str, Any]] = [{"words": row["text"].split(), "document": "d"} for row in make_rows(11)]
    predict_file(tagger, rows, tmp_path / "a.jsonl")
    expected = [answer.to_json()["scores"] for answer in tagger.predict(rows)]
    assert [row["scores"] for row in read(tmp_path / "a.jsonl")] == expected
