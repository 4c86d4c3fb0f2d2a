"""The recipes of multiple choice read data sets of the hub as they are published.

The rows are written here; the names and the types of the columns that a recipe reads are those of the published sets.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset

from bert_tasks.recipe.check import prepare
from bert_tasks.recipe.schema import load_recipe


@dataclass(frozen=True, kw_only=True)
class Published:
    """A data set.

    Attributes:
        row: one row, without the right choice.
        label: the column with the right choice, and ``labels`` its values in the rows.
        classes: the number of classes if that column has class ids.
        expected: the same row as the task reads it, without the label, and ``indices`` the labels of the rows.
    """

    config: str
    row: dict[str, Any]
    label: str
    labels: tuple[Any, ...]
    expected: dict[str, Any]
    indices: tuple[int, ...]
    classes: int = 0


ENDINGS = ["opens the door.", "sings to the chairs.", "paints the sea.", "is late for the ferry."]
PLACES = ["oven", "sea", "ferry", "cup", "door"]
BAKER, WHY = "A baker walks to the oven.", "Why does the baker walk?"
SETS = {
    "swag": Published(
        config="regular",
        row={"sent1": BAKER, "sent2": "She", **{f"ending{number}": ending for number, ending in enumerate(ENDINGS)}},
        label="label",
        labels=(0, 3, 2, 1, 3),
        classes=4,
        expected={"context": BAKER, "question": "She", "choices": ENDINGS},
        indices=(0, 3, 2, 1, 3),
    ),
    "race": Published(
        config="all",
        row={"article": f"{BAKER}\nHe is late.", "question": WHY, "options": ENDINGS},
        label="answer",
        labels=("A", "D", "B", "C", "A"),
        expected={"context": f"{BAKER}\nHe is late.", "question": WHY, "choices": ENDINGS},
        indices=(0, 3, 1, 2, 0),
    ),
    "copa": Published(
        config="copa",
        row={"premise": BAKER, "choice1": "It was hot.", "choice2": "It rained.", "question": "cause"},
        label="label",
        labels=(0, 1, 1, 0, 0),
        classes=2,
        expected={"context": BAKER, "question": "cause", "choices": ["It was hot.", "It rained."]},
        indices=(0, 1, 1, 0, 0),
    ),
    "commonsense_qa": Published(
        config="default",
        row={"question": WHY, "choices": {"label": list("ABCDE"), "text": PLACES}},
        label="answerKey",
        labels=("A", "E", "B", "C", "D"),
        expected={"context": WHY, "choices": PLACES},
        indices=(0, 4, 1, 2, 3),
    ),
}


def written(published: Published, folder: Path) -> Path:
    """The data set laid out as on the hub: train and validation rows as parquet, and a card that names them."""
    folder.mkdir()
    table = Dataset.from_list([{**published.row, published.label: label} for label in published.labels])
    if published.classes:
        names = ClassLabel(names=[str(number) for number in range(published.classes)])
        table = table.cast_column(published.label, names)
    for split in ("train", "validation"):
        table.to_parquet(folder / f"{split}.parquet")
    files = "".join(f"  - split: {split}\n    path: {split}.parquet\n" for split in ("train", "validation"))
    card = f"---\nconfigs:\n- config_name: {published.config}\n  data_files:\n{files}---\n"
    (folder / "README.md").write_text(card, encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", SETS)
def test_published_rows_are_read(name: str, checkpoint: Path, repository: Path, tmp_path: Path) -> None:
    published = SETS[name]
    overrides = [f"model.name={checkpoint}", f"data.dataset={written(published, tmp_path / 'data')}"]
    recipe = load_recipe(repository / "recipes" / "multiple_choice" / f"{name}.toml", overrides=overrides)
    splits = prepare(recipe).splits
    for rows in (splits.train, *splits.validation.values()):
        assert [row["label"] for row in rows] == list(published.indices)
        for row in rows:
            assert {column: row[column] for column in row if column not in ("label", "line")} == published.expected
