"""Tasks that have their own rows, and how often a run draws the rows of each."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from bert_tasks import MultiTaskModel, TaskModel, evaluate, fit, load_recipe, predict, train
from bert_tasks.data.issues import RowIssues
from bert_tasks.errors import DataError, RecipeError, UsageError
from bert_tasks.model.features import tokenized
from bert_tasks.recipe.check import check, prepare
from bert_tasks.recipe.schema import OptimSection, resolved_toml, with_values
from bert_tasks.training.run import build_trainer, dry_run
from bert_tasks.training.sampling import SampleOrder, drawn_counts
from support.sampling import slow_except
from support.small_checkpoints import edit_config, save_checkpoint
from support.task_examples import CLASSES, SENTENCES
from support.training_runs import make_steps

RECIPE = """
[model]
name = "base"

[tasks.topic]
task = "sequence-classification"
columns = {label = "topic"}
max_length = 32
[tasks.topic.data]
train = "topics/*.csv"
validation = "topics/a.csv"

[tasks.slots]
task = "token-classification"
max_length = 32
doc_stride = 6
[tasks.slots.data]
dir = "slots"

[optim]
epochs = 2
batch_size = 4

[run]
output_dir = "out"
"""
TASKS: dict[str, dict[str, Any]] = {
    "topic": {"task": "sequence-classification", "columns": {"label": "topic"}, "max_length": 32},
    "slots": {"task": "token-classification", "max_length": 32, "doc_stride": 6},
}
TOPICS = [{"text": row["text"], "topic": row["label"]} for row in CLASSES]
SLOTS = list(SENTENCES)
SETTINGS: dict[str, Any] = {"epochs": 1, "batch_size": 4, "progress": False}


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def write_csv(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("text,topic\n" + "".join(f"{row['text']},{row['topic']}\n" for row in rows), "utf-8")


@pytest.fixture
def folder(tmp_path: Path, unigram_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_checkpoint(tmp_path / "base", "bert", unigram_tokenizer)
    write_csv(tmp_path / "topics" / "a.csv", TOPICS[:5])
    write_csv(tmp_path / "topics" / "b.csv", TOPICS[5:])
    write_lines(tmp_path / "slots" / "train.jsonl", SLOTS * 3)
    write_lines(tmp_path / "slots" / "dev.jsonl", SLOTS)
    (tmp_path / "recipe.toml").write_text(RECIPE, "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_recipe_reads_the_files_of_each_task(folder: Path) -> None:
    recipe = load_recipe("recipe.toml")
    splits = prepare(recipe).splits
    count, tagged = len(CLASSES), len(SENTENCES)
    assert [rows for _, rows in splits.train.joined_sources] == [3 * tagged, count]  # by the names of the tasks
    assert len(splits.validation[""]) == 5 + tagged
    assert [split.rows for split in check(recipe).splits] == [count + 3 * tagged, 5 + tagged]
    assert not any("empty" in line for line in check(recipe).lines())
    assert dry_run(recipe).steps == 2 * -(-(count + 3 * tagged) // 4)
    result = train(recipe, progress=False)
    assert {"topic.accuracy", "slots.overall_f1"} <= result.metrics.keys()
    assert train(recipe, progress=False).reused
    stored = load_recipe(folder / "out" / "recipe.toml")
    assert stored == recipe
    assert "[tasks.topic.data]" in resolved_toml(recipe)
    assert "\n[data]" not in resolved_toml(recipe)
    assert with_values(recipe, {"optim.epochs": 3}).data == recipe.data
    model = MultiTaskModel.from_pretrained("out/model")
    alone = evaluate(model.models["topic"], "topics/a.csv")
    assert result.metrics["topic.accuracy"] == alone["accuracy"]


def test_some_tasks_share_rows_and_others_have_their_own(folder: Path) -> None:
    shared = [{**row, "topic": topic["topic"]} for row, topic in zip(SLOTS, TOPICS, strict=True)]
    write_lines(folder / "shared.jsonl", shared)
    text = RECIPE.replace('[tasks.topic.data]\ntrain = "topics/*.csv"\nvalidation = "topics/a.csv"\n', "")
    text = text.replace('label = "topic"}', 'text = "words", label = "topic"}')
    (folder / "recipe.toml").write_text(text + '[data]\ntrain = "shared.jsonl"\nvalidation = "shared.jsonl"\n', "utf-8")
    splits = prepare(load_recipe("recipe.toml")).splits
    assert len(splits.train) == len(shared) + 3 * len(SLOTS)
    lines = range(1, len(shared) + 1)
    assert splits.train.of_head("topic").rows.values("line") == list(lines)
    assert splits.train.of_head("slots").rows.values("line") == list(range(1, 3 * len(SLOTS) + 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[run]", '[data]\ntrain = "a.csv"\n[run]'), "each task has its own [tasks.NAME.data]. Remove [data]"),
        (('[tasks.slots.data]\ndir = "slots"\n', ""), "task 'slots' has no rows. Name them in [data] or [tasks."),
        (('dir = "slots"', 'dri = "slots"'), "unknown key 'dri' in [tasks.slots.data], did you mean 'dir'?"),
        (('dir = "slots"', "dir = 3"), "dir is 3, expected a string"),
        (('dir = "slots"', 'dir = "slots"\ntrain = "a"'), "expected exactly one of dataset, dir, train"),
        (('dir = "slots"', 'dir = "slots"\ncolumns = {tags = "a"}'), "name the columns in [tasks.slots]"),
        (("epochs = 2", "sampling = 0.5"), "sampling is 0.5, expected"),
        (("[run]", '[data.tasks.a]\ntrain = "x"\n[run]'), "'tasks' does not belong in [data]. Write [tasks.NAME.data]"),
    ],
)
def test_wrong_sections_are_named(change: tuple[str, str], message: str, folder: Path) -> None:
    assert change[0] in RECIPE
    (folder / "recipe.toml").write_text(RECIPE.replace(*change), "utf-8")
    with pytest.raises(RecipeError) as error:
        load_recipe("recipe.toml")
    assert message in str(error.value)
    assert str(error.value).startswith("recipe.toml:")


def test_an_override_replaces_the_rows_of_a_task(folder: Path) -> None:
    recipe = load_recipe("recipe.toml", overrides=["tasks.slots.data.train=slots/dev.jsonl"])
    assert recipe.data.tasks["slots"].dir is None
    assert len(prepare(recipe).splits.train) < len(prepare(load_recipe("recipe.toml")).splits.train)


def test_wrong_rows_of_all_files_are_named(folder: Path) -> None:
    write_lines(folder / "slots" / "dev.jsonl", [{"words": ["a", "b"], "tags": ["O"]}])
    (folder / "topics" / "b.csv").write_text("text,topic\na text,low,more\n", "utf-8")
    with pytest.raises(DataError) as error:
        prepare(load_recipe("recipe.toml"))
    assert "slots/dev.jsonl:1" in str(error.value)
    assert "topics/b.csv:2" in str(error.value)
    assert "set tasks.topic.data.on_error" in str(error.value)


def test_validation_sets_must_agree(folder: Path) -> None:
    text = RECIPE.replace('"topics/a.csv"', '{old = "topics/a.csv", new = "topics/b.csv"}')
    (folder / "recipe.toml").write_text(text, "utf-8")
    with pytest.raises(DataError, match=r"different validation sets \(.*old and new.*\). Name the same sets"):
        prepare(load_recipe("recipe.toml"))


def test_sampling_needs_rows_of_tasks(folder: Path) -> None:
    model = TaskModel.from_pretrained(folder / "base", task="sequence-classification")
    with pytest.raises(RecipeError, match=r"optim\.sampling needs tasks with their own rows"):
        fit(model, list(CLASSES), list(CLASSES), output_dir=folder / "out", sampling="equal", **SETTINGS)


def test_fit_takes_rows_by_task(folder: Path) -> None:
    model = MultiTaskModel.from_pretrained(folder / "base", tasks=TASKS)
    rows = {"topic": TOPICS, "slots": folder / "slots" / "train.jsonl"}
    sets = {"topic": TOPICS, "slots": SLOTS}
    result = fit(model, rows, sets, output_dir=folder / "out", sampling=2.0, **SETTINGS)
    assert {"topic.accuracy", "slots.overall_f1"} <= result.metrics.keys()
    assert model.models["topic"].task.output.labels == ("high", "low", "mid")
    again = fit(MultiTaskModel.from_pretrained(folder / "base", tasks=TASKS), rows, output_dir=folder / "b", **SETTINGS)
    assert {"topic.accuracy", "slots.overall_f1"} <= again.metrics.keys()  # validation rows are split off of each


def test_wrong_rows_of_tasks_are_named(folder: Path) -> None:
    model, both = load(folder), {"topic": TOPICS, "slots": SLOTS}
    wrong: dict[str, tuple[Any, Any]] = {
        "fit: train needs the rows of each of the tasks slots, topic, by their names": ({"topic": TOPICS}, None),
        "fit: validation needs the rows of each of the tasks": (both, {"topic": TOPICS}),
        f"train of topic:{len(TOPICS) + 1}": ({**both, "topic": [*TOPICS, {"topic": "low"}]}, both),
    }
    for message, (rows, sets) in wrong.items():
        with pytest.raises((UsageError, DataError), match=message):
            fit(model, rows, sets, output_dir=folder / "out", **SETTINGS)
    one = TaskModel.from_pretrained(folder / "base", task="sequence-classification")
    with pytest.raises(UsageError, match="the model has one task"):
        fit(one, {"topic": TOPICS}, output_dir=folder / "out", **SETTINGS)


@pytest.mark.parametrize(
    ("sizes", "sampling", "counts"),
    [
        ([90, 10], "equal", [50, 50]),
        ([90, 10], 2.0, [75, 25]),  # 9.49 and 3.16
        ([90, 10], 1.0, [90, 10]),
        ([5, 5, 1], "equal", [4, 4, 3]),
    ],
)
def test_counts_follow_the_temperature(sizes: list[int], sampling: Any, counts: list[int]) -> None:
    assert drawn_counts(sizes, sampling) == counts


@pytest.mark.parametrize("size", [{"samples": 4}, {"tokens": 40}])
def test_every_row_is_drawn_before_any_comes_again(size: dict[str, int]) -> None:
    tables = [(np.arange(30), 18), (np.arange(30, 36), 18)]
    order = SampleOrder(np.arange(1, 37), **size, seed=3, tables=tables)
    epochs = [[sample for batch in order.epoch(epoch) for sample in batch] for epoch in range(5)]
    for epoch in epochs:
        assert len(epoch) == 36
        assert Counter(sample for sample in epoch if sample >= 30) == dict.fromkeys(range(30, 36), 3)
    large = Counter(sample for epoch in epochs for sample in epoch if sample < 30)
    assert set(large.values()) == {3}  # 90 draws of 30 rows
    assert epochs[0] != epochs[1]
    fresh = SampleOrder(np.arange(1, 37), **size, seed=3, tables=tables)
    assert [sample for batch in fresh.epoch(4) for sample in batch] == epochs[4]


def test_a_run_draws_as_its_recipe_says(folder: Path) -> None:
    recipe = load_recipe("recipe.toml", overrides=["optim.sampling=equal"])
    trainer = build_trainer(prepare(recipe))
    trainer.preflight()
    samples = tokenized(trainer.splits.train, trainer.model)
    order = SampleOrder.of(samples, OptimSection(batch_size=4, sampling="equal"), seed=0)
    names = [feature["head"] for batch in order.epoch(0) for feature in samples.features_of(batch)]
    drawn = Counter(names)
    assert drawn["topic"] == drawn["slots"] == len(samples) // 2


def test_a_row_that_is_drawn_twice_in_a_step_counts_twice(folder: Path) -> None:
    edit_config(folder / "base", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = MultiTaskModel.from_pretrained(folder / "base", tasks={"topic": {**TASKS["topic"], "labels": ["a", "b"]}})
    model.double()
    rows = [{"text": "one of them", "topic": "a"}, {"text": "another", "topic": "b"}]

    def gradient(rows: list[dict[str, str]], batch: list[int]) -> torch.Tensor:
        steps = make_steps(model, rows, batch_size=3, max_steps=1)
        steps.backward(0, batch)
        gradient = model.encoder.layers[0].attention.output.weight.grad
        assert gradient is not None
        return gradient.clone()

    torch.testing.assert_close(gradient(rows, [0, 0, 1]), gradient([rows[0], *rows], [0, 1, 2]), atol=1e-12, rtol=0.0)


def test_tasks_with_their_own_rows_learn_from_a_teacher(folder: Path) -> None:
    train(load_recipe("recipe.toml"), progress=False)
    (folder / "topics" / "b.csv").write_text("text,topic\na text without a label,\nanother one,low\n", "utf-8")
    text = RECIPE.replace('"out"', '"student"\nlogging_steps = 1')
    text = text.replace("epochs = 2", 'epochs = 1\nsampling = "equal"')
    (folder / "recipe.toml").write_text(text + '\n[teacher]\nname = "out"\n', "utf-8")
    result = train(load_recipe("recipe.toml"), progress=False)
    steps = [json.loads(line) for line in (result.output_dir / "metrics.jsonl").read_text("utf-8").splitlines()]
    terms = {name for step in steps for name in step.get("terms", {})}
    assert terms == {"topic/loss", "topic/distillation", "slots/loss", "slots/distillation"}


def test_a_task_reads_the_numbers_of_glue_as_labels(folder: Path) -> None:
    (folder / "topics" / "a.csv").unlink()
    lines = [f"source\t{number % 2}\t\t{row['text']}" for number, row in enumerate(TOPICS)]
    (folder / "cola.tsv").write_text("\n".join(lines) + "\n", "utf-8")
    section = '[tasks.topic.data]\ntrain = "cola.tsv"\nvalidation = "cola.tsv"\nformat = "glue/cola"\n'
    text = RECIPE.replace('[tasks.topic.data]\ntrain = "topics/*.csv"\nvalidation = "topics/a.csv"\n', section)
    text = text.replace('columns = {label = "topic"}\n', "")
    (folder / "recipe.toml").write_text(text, "utf-8")
    prepared = prepare(load_recipe("recipe.toml"))
    assert prepared.splits.train.of_head("topic").rows.values("label") == ["unacceptable", "acceptable"] * (
        len(TOPICS) // 2
    )
    assert prepared.heads["topic"].task.output.labels == ("unacceptable", "acceptable")  # in the order of GLUE


def test_a_task_reads_the_columns_of_the_format_of_its_files(folder: Path) -> None:
    lines = "the O\nferry B-THING\n\nthe O\nold B-THING\n"
    for name in ("train", "dev"):
        (folder / "slots" / f"{name}.jsonl").unlink()
        (folder / "slots" / f"{name}.conll").write_text(lines, "utf-8")
    rows = prepare(load_recipe("recipe.toml")).splits.validation[""].of_head("slots")
    assert rows.rows.values("tags") == [["O", "B-THING"]] * 2


COLA = "".join(f"source\t{number % 2}\t\t{row['text']}\n" for number, row in enumerate(CLASSES))
CONLL = "\n".join("".join(f"{word} {tag}\n" for word, tag in zip(*row.values(), strict=True)) for row in SENTENCES)
TEXTS = [{"text": row["text"], "label": row["label"]} for row in CLASSES]
GRADED = [{**row, "label": ("unacceptable", "acceptable")[number % 2]} for number, row in enumerate(TEXTS)]
JOINED = [{"text": " ".join(row["words"]), "label": text["label"]} for row, text in zip(SLOTS, TEXTS, strict=True)]


def with_names(rows: Sequence[Mapping[str, Any]], **names: str) -> str:
    return "".join(json.dumps({names.get(name, name): cell for name, cell in row.items()}) + "\n" for row in rows)


# The task, its columns, a file that trains it or that has its own names, options, and the rows as the task reads them.
FILES: dict[str, tuple[str, dict[str, str], str, str, dict[str, Any], Sequence[Mapping[str, Any]]]] = {
    "names": ("topic", {"label": "kind"}, "a.jsonl", with_names(TEXTS, label="kind"), {}, TEXTS),
    "own_names": ("topic", {"text": "body", "label": "kind"}, "a.jsonl", with_names(TEXTS), {}, TEXTS),
    "objects": (
        "topic",
        {"text": "of.body", "label": "kind"},
        "a.jsonl",
        "".join(json.dumps({"of": {"body": row["text"]}, "kind": row["label"]}) + "\n" for row in TEXTS),
        {},
        TEXTS,
    ),
    "words": (
        "topic",
        {"text": "words", "label": "kind"},
        "a.jsonl",
        with_names([{**row, "kind": text["label"]} for row, text in zip(SLOTS, TEXTS, strict=True)]),
        {},
        JOINED,
    ),
    "separator": (
        "topic",
        {"label": "kind"},
        "a.csv",
        "text;kind\n" + "".join(f"{row['text']};{row['label']}\n" for row in TEXTS),
        {"delimiter": ";"},
        TEXTS,
    ),
    "glue": ("topic", {}, "cola.tsv", COLA, {"format": "glue/cola"}, GRADED),
    "tags": ("slots", {"tags": "slots"}, "a.jsonl", with_names(SLOTS, tags="slots"), {}, SLOTS),
    "own_tags": ("slots", {"tags": "slots"}, "a.jsonl", with_names(SLOTS), {}, SLOTS),
    "conll": ("slots", {}, "a.conll", CONLL, {}, SLOTS),
    "conll_text": ("slots", {}, "a.txt", CONLL, {}, SLOTS),
}


def model_with(
    folder: Path, name: str, columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]
) -> MultiTaskModel:
    """A model of two tasks, one of which knows these columns and the labels of the rows."""
    labels = sorted({label for row in rows for label in (row["tags"] if name == "slots" else [row["label"]])})
    tasks = {
        "topic": {**TASKS["topic"], "labels": ["low", "mid", "high"]},
        "slots": {**TASKS["slots"], "labels": ["O", "B-THING"]},
    }
    tasks[name] = {**tasks[name], "columns": dict(columns), "labels": labels}
    model = MultiTaskModel.from_pretrained(folder / "base", tasks=tasks)
    model.save_pretrained(folder / "model")
    return model


@pytest.mark.parametrize("case", slow_except(FILES, "own_names", "words", "conll"))
def test_one_task_of_a_model_reads_the_files_that_trained_it(case: str, folder: Path) -> None:
    name, columns, file, content, options, rows = FILES[case]
    model = model_with(folder, name, columns, rows)
    (folder / file).write_text(content, "utf-8")
    single = model.models[name]
    expected = evaluate(single, list(rows))
    assert evaluate(folder / "model", file, task=name, **options) == expected
    assert evaluate(single, file, **options) == expected
    if not case.startswith("own"):  # all tasks may call their labels so
        whole = evaluate(folder / "model", file, **options)
        of_task = {key.removeprefix(f"{name}."): value for key, value in whole.items() if key.startswith(f"{name}.")}
        assert of_task == {key: value for key, value in expected.items() if key in of_task}
        assert len(of_task) > 1
    inputs = [{key: row[key] for key in ("text", "words") if key in row} for row in rows]
    predictions = single.predict(inputs)
    for model_name in (folder / "model", single):
        task = None if isinstance(model_name, TaskModel) else name
        assert predict(model_name, file, task=task, **options) == predictions
    if file.endswith(".jsonl"):
        assert single.predict([json.loads(line) for line in content.splitlines()]) == predictions


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (SLOTS, r"no row has the text of the task topic \(the columns are 'tags', 'words', the task reads 'text'\)"),
        ([{**row, "text": "a"} for row in SLOTS], "no row has a label of the task topic in 'topic'"),
        (TOPICS, "no row has a label of the task slots in 'tags' or 'entities'"),  # the words are those of the text
    ],
)
def test_what_all_rows_lack_for_a_task_is_named(rows: Any, problem: str, folder: Path) -> None:
    write_lines(folder / "rows.jsonl", rows)
    text = RECIPE.partition("[tasks.topic.data]")[0] + '[tasks.slots]\ntask = "token-classification"\n'
    text += '[data]\ntrain = "rows.jsonl"\nvalidation = "rows.jsonl"\n[run]\noutput_dir = "out"\n'
    (folder / "recipe.toml").write_text(text, "utf-8")
    recipe = load_recipe("recipe.toml")
    calls: dict[str, Callable[[], object]] = {
        r"rows\.jsonl": lambda: check(recipe),
        "rows.jsonl": lambda: train(recipe, progress=False),
        "train": lambda: fit(load(folder), list(rows), list(rows), output_dir=folder / "out", **SETTINGS),
        "(?:train|rows.jsonl)": lambda: fit(load(folder), "rows.jsonl", output_dir=folder / "out", **SETTINGS),
    }
    for source, call in calls.items():
        with pytest.raises(DataError, match=f"^{source}: {problem}$"):
            call()


def load(folder: Path) -> MultiTaskModel:
    return MultiTaskModel.from_pretrained(folder / "base", tasks=TASKS)


def test_evaluation_says_what_rows_lack_for_each_task(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    model_with(folder, "topic", {"label": "topic"}, TEXTS)
    write_lines(folder / "words.jsonl", [{"words": row["words"]} for row in SLOTS])
    message = (
        r"words\.jsonl: no row has a label of the task slots in 'tags' or 'entities', and no row has the text of the "
        r"task topic \(the columns are 'words', the task reads 'text'\)"
    )
    with pytest.raises(DataError, match=message):
        evaluate("model", "words.jsonl")
    write_lines(folder / "slots.jsonl", [{**row, "tags": ["O"] * len(row["words"])} for row in SLOTS])
    caplog.clear()
    metrics = evaluate("model", "slots.jsonl")
    assert "slots.accuracy" in metrics or "slots.overall_f1" in metrics
    assert not any(key.startswith("topic.") for key in metrics)
    assert any("no row has the text of the task topic" in record.message for record in caplog.records)


def test_all_wrong_rows_in_memory_are_named_or_skipped(folder: Path) -> None:
    shared = [{**row, **topic} for row, topic in zip(SLOTS, TOPICS, strict=True)]
    rows = [{**shared[0], "tags": ["O"]}, *shared, {**shared[0], "text": 3}]
    with pytest.raises(RowIssues, match=r"(?s)train:1: .*train:10: not a text"):
        fit(load(folder), rows, shared, output_dir=folder / "out", **SETTINGS)
    result = fit(load(folder), rows, shared, output_dir=folder / "out", on_error="skip", **SETTINGS)
    rejects = (result.output_dir / "rejects.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["line"] for line in rejects] == [1, 10]


def test_a_prediction_does_not_read_the_labels_of_the_tasks(folder: Path) -> None:
    model = model_with(folder, "topic", {"label": "topic"}, TEXTS)
    row = {"text": "a text", "topic": "neither", "tags": ["O", "O", "O"]}
    write_lines(folder / "rows.jsonl", [row])
    assert model.predict([row]) == model.predict([{"text": "a text"}])
    (prediction,) = predict("model", "rows.jsonl")
    assert prediction == model.predict([row])[0]
