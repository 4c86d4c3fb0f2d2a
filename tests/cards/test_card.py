"""The model card: it says what the run's files say, its code runs, and nothing that a user wrote breaks it."""

import contextlib
import io
import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from transformers import PreTrainedTokenizerBase

from bert_tasks import TaskModel, fit, load_recipe, train
from bert_tasks.cards.card import write_card
from bert_tasks.cards.facts import read_facts
from bert_tasks.cards.markdown import code, plain, table, visible
from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.runs import train_seeds
from bert_tasks.tasks.base import NO_STOCK_HEAD
from bert_tasks.training.signing import is_ours
from runs import write_recipe
from small_checkpoints import copied
from task_examples import EXAMPLES
from training import save_checkpoint

MARKDOWN = MarkdownIt("commonmark").enable("table")
WRITTEN = ("single", "several", "pair", "token crf", "span v2")
HOSTILE = (
    "a\n---\nb: [",
    "x|y | z",
    "<script>alert(1)</script>",
    "`x` **b** [l](http://x)",
    "# \u202e1. - \x00",
    "'\"\\",
)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, bpe_tokenizer: PreTrainedTokenizerBase) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("secret_place") / "base", bpe_tokenizer)


@pytest.fixture(scope="session")
def recipe_run(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """The folder of a run that a recipe made."""
    folder = tmp_path_factory.mktemp("private")
    train(load_recipe(write_recipe(folder, checkpoint, rows=20, epochs=1)), progress=False)
    return folder / "run"


@pytest.fixture
def run(recipe_run: Path, tmp_path: Path) -> Path:
    """A copy of that run."""
    folder = copied_files(recipe_run, tmp_path / "run")
    copied(recipe_run / "model", folder / "model")
    return folder


def copied_files(source: Path, target: Path) -> Path:
    target.mkdir()
    for file in filter(Path.is_file, source.iterdir()):
        (target / file.name).write_bytes(file.read_bytes())
    return target


def card_of(run: Path) -> ModelCard:
    return ModelCard.load(run / "model" / "README.md")


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), "utf-8")


def blocks(text: str, language: str) -> list[str]:
    return [token.content for token in MARKDOWN.parse(text) if token.type == "fence" and token.info == language]


@pytest.mark.parametrize("name", WRITTEN)
def test_the_code_of_a_card_runs(name: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = EXAMPLES[name]
    model = TaskModel.from_pretrained(checkpoint, task=example.task)
    result = fit(model, list(example.rows), list(example.rows), output_dir=tmp_path / "run", epochs=1, progress=False)
    found = blocks(card_of(result.output_dir).text, "python")
    assert len(found) == 2
    card = card_of(result.output_dir)
    assert (NO_STOCK_HEAD in card.text) == (not example.task.is_stock_head) == (card.data.library_name == "bert-tasks")
    monkeypatch.chdir(result.output_dir / "model")
    printed = []
    for block in found:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            names: dict[str, Any] = {}
            exec(block, names)
        printed.append(out.getvalue())
    assert "Prediction(" in printed[0]
    assert (example.task.hf_head is None) == (printed[1].startswith("torch.Size"))
    (mine,) = [value for value in names.values() if isinstance(value, torch.nn.Module)]
    assert type(mine).__name__ == json.loads(Path("config.json").read_text("utf-8"))["architectures"][0]


def test_a_card_says_what_the_run_was(recipe_run: Path) -> None:
    card, facts = card_of(recipe_run), read_facts(recipe_run)
    (result,) = {r.metric_value for r in card.data.eval_results if r.metric_type == "accuracy"}
    assert result == json.loads((recipe_run / "metrics.json").read_text("utf-8"))["metrics"]["accuracy"]
    first = card.data.eval_results[0]
    assert (first.task_type, first.dataset_name, first.dataset_split) == (
        "text-classification",
        "dev.csv",
        "validation",
    )
    fingerprints = [split.fingerprint for split in facts.splits]
    assert first.dataset_args == {"fingerprint": fingerprints[1]}
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-classification")
    assert card.data.tags == ["bert-tasks", "roberta"]
    assert {"loss", "f1_positive"}.isdisjoint(card.data.metrics)
    for words in (
        *fingerprints,
        "train.csv",
        "negative",
        "20 rows, 5 optimizer steps",
        "learning\\_rate",
        torch.__version__,
    ):
        assert words.replace("\\", "") in card.content.replace("\\", "")
    assert "languages | unknown" in card.content
    assert card.data.license is None
    assert card.data.base_model is None
    (recipe,) = blocks(card.text, "toml")
    assert 'train = "train.csv"' in recipe


def test_a_card_names_no_folder_of_its_author(recipe_run: Path) -> None:
    content = card_of(recipe_run).content
    assert str(recipe_run.parent) not in content
    assert recipe_run.parent.name not in content
    assert "secret_place" not in content
    assert "output_dir" not in content


def test_the_same_run_gives_the_same_card_and_does_not_touch_it(run: Path) -> None:
    path = run / "model" / "README.md"
    leftover = path.with_name(".README.md.tmp-1")
    leftover.touch()
    before = (path.read_bytes(), path.stat().st_mtime_ns)
    assert write_card(run) == path
    assert not leftover.exists()
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


def test_what_a_person_states_is_kept_when_the_card_is_written_anew(run: Path) -> None:
    write_card(run, languages=["en", "no"], licence="apache-2.0")
    rewrite(run / "metrics.json", steps=77)
    write_card(run)
    card = card_of(run)
    assert "77 optimizer steps" in card.text
    assert (card.data.language, card.data.license) == (["en", "no"], "apache-2.0")
    assert "| languages | en, no |" in card.text


@pytest.mark.parametrize("edit", ["append", "foreign", "link", "folder"])
def test_a_card_that_is_not_ours_is_kept(edit: str, run: Path, tmp_path: Path) -> None:
    path = run / "model" / "README.md"
    text = path.read_text("utf-8")
    path.unlink()
    if edit == "link":
        (tmp_path / "elsewhere.md").write_text(text, "utf-8")
        path.symlink_to(tmp_path / "elsewhere.md")
    elif edit == "folder":
        path.mkdir()
    else:
        path.write_text("# Mine\n" if edit == "foreign" else text.replace("## Limits", "## My limits"), "utf-8")
    before = path.read_bytes() if path.is_file() else b""
    rewrite(run / "metrics.json", steps=77)
    with pytest.raises(UsageError, match="it is kept"):
        write_card(run)
    assert (path.read_bytes() if path.is_file() else b"") == before


def test_a_card_that_cannot_be_written_loses_no_run(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = load_recipe(write_recipe(tmp_path, checkpoint, rows=20, epochs=1))
    first = train(recipe, progress=False)
    (tmp_path / "run" / "model" / "README.md").write_text("# Mine\n", "utf-8")
    with caplog.at_level(logging.WARNING, "bert_tasks"):
        again = train(recipe, progress=False)
    assert again == replace(first, reused=True)
    assert "it is kept" in caplog.text
    assert (tmp_path / "run" / "model" / "README.md").read_text("utf-8") == "# Mine\n"


def test_every_seed_gets_its_card(checkpoint: Path, tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path, checkpoint, rows=20, epochs=1))
    train_seeds(recipe, [1, 2], progress=False)
    for seed in (1, 2):
        assert f"Seed {seed}," in card_of(tmp_path / "run" / f"seed-{seed}").text


def test_an_unfinished_run_has_no_card(run: Path) -> None:
    (run / "metrics.json").unlink()
    with pytest.raises(UsageError, match="no finished run"):
        write_card(run)


def test_damaged_files_are_named(run: Path) -> None:
    rewrite(run / "run.json", data=None)
    with pytest.raises(UsageError, match=r"run\.json or metrics\.json is damaged"):
        write_card(run)
    (run / "model" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        write_card(run)


def shape(text: str) -> list[str]:
    """The structure of Markdown, without its text."""
    return [token.type for token in MARKDOWN.parse(text)]


def test_labels_cannot_break_a_card(run: Path) -> None:
    """The same card with harmless labels has the same structure, and the hostile ones are shown as they are."""
    sheets = {}
    for labels in (HOSTILE, [f"label{number}" for number in range(len(HOSTILE))]):
        metrics = {"accuracy": 0.5, **{f"f1_{label}": 0.25 for label in labels}}
        rewrite(run / "run.json", labels=labels)
        rewrite(run / "metrics.json", metrics=metrics)
        write_card(run)
        sheets[tuple(labels)] = card_of(run)
    hostile, harmless = sheets.values()
    assert shape(hostile.text) == shape(harmless.text)
    assert hostile.data.metrics == harmless.data.metrics == ["accuracy"]
    assert is_ours(hostile.content)
    words = [child.content for token in MARKDOWN.parse(hostile.text) for child in token.children or []]
    kinds = {child.type for token in MARKDOWN.parse(hostile.text) for child in token.children or []}
    assert kinds <= {"text", "text_special", "softbreak"}
    shown = "".join(words)
    assert all(visible(label) in shown for label in HOSTILE)


def test_names_cannot_break_the_header(run: Path) -> None:
    data = json.loads((run / "run.json").read_text("utf-8"))["data"]
    hub = {
        "dataset": "o/n\n---\nlicense: mit",
        "config": "c\n---",
        "split": "s: [",
        "commit": "0" * 40,
        "licence": "l|\n",
    }
    data["validation"] |= {"source": "o/n\n---\n", "hub": hub}
    base = {"name": "org/x\n---\nlicense: mit", "revision": None, "commit": "1" * 40}
    rewrite(run / "run.json", data=data, model=base)
    rewrite(run / "metrics.json", metrics={"odd\n---\nlicense: mit": 1.0})
    write_card(run)
    card = card_of(run)
    assert card.data.license is None
    assert card.data.datasets == [visible(hub["dataset"])]
    assert card.data.base_model == visible(base["name"])
    assert card.data.metrics == ["odd\\n---\\nlicense: mit"]
    assert "l\\|\\\\n" in card.text


def test_metrics_of_named_sets_are_told_apart(run: Path) -> None:
    data = json.loads((run / "run.json").read_text("utf-8"))["data"]
    sets = {f"validation_{name}": {**data["validation"], "source": f"{name}.csv"} for name in ("a", "a_b")}
    rewrite(run / "run.json", data={"train": data["train"], **sets})
    rewrite(run / "metrics.json", metrics={"a/accuracy": 0.25, "a_b/accuracy": 0.5, "a/f1_positive": 0.75})
    write_card(run)
    results = {(r.dataset_name, r.metric_type): r.metric_value for r in card_of(run).data.eval_results}
    assert results == {("a.csv", "accuracy"): 0.25, ("a_b.csv", "accuracy"): 0.5}


def test_a_metric_that_is_no_number_is_said_so(run: Path) -> None:
    rewrite(run / "metrics.json", metrics={"accuracy": 0.5, "matthews_correlation": None})
    write_card(run)
    assert re.search(r"matthews\\_correlation \| not a number", card_of(run).text)
    assert card_of(run).data.metrics == ["accuracy"]


@pytest.mark.parametrize(
    "text", ["plain words", "a_b*c*", "&amp; <b>", "x\ty\r\n", "1 | 2", "\\", "![i](x)", "~~s~~", "$x$"]
)
def test_plain_text_survives_markdown(text: str) -> None:
    (row,) = [t.children for t in MARKDOWN.parse(table(["h"], [[f"“{text}”"]])) if t.content.startswith("“")]
    assert row is not None
    assert "".join(child.content for child in row) == visible(f"“{text}”")
    assert plain(text) == plain(str(text))


def test_long_text_is_shortened() -> None:
    assert len(visible("x" * 10_000)) == 200


def test_a_code_block_cannot_be_ended() -> None:
    (token,) = MARKDOWN.parse(code("toml", 'x = "\n```\n# out\n````"'))
    assert token.type == "fence"


@pytest.mark.parametrize("empty", ["", " ", "\t"])
def test_an_empty_language_or_licence_is_refused(run: Path, empty: str) -> None:
    for options, name in (({"languages": ["en", empty]}, "language"), ({"licence": empty}, "license")):
        with pytest.raises(UsageError, match=f"the {name} is empty"):
            write_card(run, **options)  # type: ignore[arg-type]  # options of two types


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("recipe.toml", "x = " + "[" * 5000 + "]" * 5000),
        ("recipe.toml", "x = " + "9" * 5000),
        ("run.json", "[" * 100_000),
    ],
)
def test_a_file_of_a_run_beyond_what_is_read_is_damaged(run: Path, name: str, text: str) -> None:
    (run / name).write_text(text)
    with pytest.raises(UsageError, match=f"{name} is damaged"):
        write_card(run)
