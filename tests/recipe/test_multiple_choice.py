"""The recipes of multiple choice read data sets of the hub as they are published.

The rows are written here; the columns, their types and the names of configurations are those of the published sets.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, Features, List, Value

from bert_tasks.recipe.check import prepare
from bert_tasks.recipe.schema import Recipe, load_recipe

TEXT, INTEGER = Value("string"), Value("int32")


@dataclass(frozen=True, kw_only=True)
class Published:
    """A data set.

    Attributes:
        features: its columns with their types.
        row: one row, of which ``label`` is the column with the right choice, and ``labels`` the values of five rows.
        expected: the same row as the task reads it, without the label.
        indices: the labels of the five rows.
    """

    features: dict[str, Any]
    row: dict[str, Any]
    label: str
    labels: tuple[Any, ...]
    expected: dict[str, Any]
    indices: tuple[int, ...]
    config: str = "default"


ENDINGS = ["opens the door.", "sings to the chairs.", "paints the sea.", "is late for the ferry."]
SWAG = Published(
    config="regular",
    features={
        **dict.fromkeys(("video-id", "fold-ind", "startphrase", "sent1", "sent2", "gold-source"), TEXT),
        **{f"ending{number}": TEXT for number in range(4)},
        "label": ClassLabel(names=["0", "1", "2", "3"]),
    },
    row={
        "video-id": "x_1",
        "fold-ind": "7",
        "startphrase": "A baker walks to the oven. She",
        "sent1": "A baker walks to the oven.",
        "sent2": "She",
        "gold-source": "gold",
        **{f"ending{number}": ending for number, ending in enumerate(ENDINGS)},
    },
    label="label",
    labels=(0, 3, 2, 1, 3),
    expected={"context": "A baker walks to the oven.", "question": "She", "choices": ENDINGS},
    indices=(0, 3, 2, 1, 3),
)
RACE = Published(
    config="all",
    features={
        **dict.fromkeys(("example_id", "article", "answer", "question"), TEXT),
        "options": List(TEXT),
    },
    row={
        "example_id": "high1.txt",
        "article": "The ferry leaves at seven. The baker is late.\nHe walks home.",
        "question": "Why does the baker walk?",
        "options": ENDINGS,
    },
    label="answer",
    labels=("A", "D", "B", "C", "A"),
    expected={
        "context": "The ferry leaves at seven. The baker is late.\nHe walks home.",
        "question": "Why does the baker walk?",
        "choices": ENDINGS,
    },
    indices=(0, 3, 1, 2, 0),
)
COPA = Published(
    config="copa",
    features={
        **dict.fromkeys(("premise", "choice1", "choice2", "question"), TEXT),
        "idx": INTEGER,
        "label": ClassLabel(names=["choice1", "choice2"]),
    },
    row={
        "premise": "The bread was black.",
        "choice1": "The oven was hot.",
        "choice2": "It rained.",
        "question": "cause",
        "idx": 0,
    },
    label="label",
    labels=(0, 1, 1, 0, 0),
    expected={
        "context": "The bread was black.",
        "question": "cause",
        "choices": ["The oven was hot.", "It rained."],
    },
    indices=(0, 1, 1, 0, 0),
)
PLACES = ["oven", "sea", "ferry", "cup", "door"]
COMMONSENSE_QA = Published(
    features={
        **dict.fromkeys(("id", "question", "question_concept", "answerKey"), TEXT),
        "choices": {"label": List(TEXT), "text": List(TEXT)},
    },
    row={
        "id": "1afa",
        "question": "Where does a baker put bread?",
        "question_concept": "bread",
        "choices": {"label": list("ABCDE"), "text": PLACES},
    },
    label="answerKey",
    labels=("A", "E", "B", "C", "D"),
    expected={"context": "Where does a baker put bread?", "choices": PLACES},
    indices=(0, 4, 1, 2, 3),
)
SETS = {"swag": SWAG, "race": RACE, "copa": COPA, "commonsense_qa": COMMONSENSE_QA}


def written(published: Published, folder: Path) -> Path:
    """The data set laid out as on the hub: train and validation rows as parquet, and a card that names them."""
    rows = [{**published.row, published.label: label} for label in published.labels]
    table = Dataset.from_list(rows, features=Features(published.features))
    for split in ("train", "validation"):
        table.to_parquet(folder / f"{split}.parquet")
    files = "".join(f"  - split: {split}\n    path: {split}.parquet\n" for split in ("train", "validation"))
    card = f"---\nconfigs:\n- config_name: {published.config}\n  data_files:\n{files}---\n"
    (folder / "README.md").write_text(card, encoding="utf-8")
    return folder


@pytest.fixture(params=SETS)
def case(
    request: pytest.FixtureRequest, checkpoint: Path, repository: Path, tmp_path: Path
) -> tuple[Recipe, Published]:
    """A recipe that is changed only in what is too large for a test, and its data set."""
    published = SETS[request.param]
    (tmp_path / "data").mkdir()
    changes = {
        "model.name": checkpoint,
        "settings.max_length": 40,
        "data.dataset": written(published, tmp_path / "data"),
        "run.output_dir": tmp_path / "run",
    }
    path = repository / "recipes" / "multiple_choice" / f"{request.param}.toml"
    return load_recipe(path, overrides=[f"{key}={value}" for key, value in changes.items()]), published


def test_published_rows_are_read(case: tuple[Recipe, Published]) -> None:
    recipe, published = case
    splits = prepare(recipe).splits
    for rows in (splits.train, *splits.validation.values()):
        assert [row["label"] for row in rows] == list(published.indices)
        for row in rows:
            assert {name: row[name] for name in row if name not in ("label", "line")} == published.expected
