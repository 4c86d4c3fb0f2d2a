"""The recipe in the folder of a finished run trains the same bits again."""

from pathlib import Path

import pytest

from bert_tasks.recipe.schema import load_recipe
from bert_tasks.training.run import train
from support.runs import digests, events, write_recipe
from support.sampling import slow_except


@pytest.mark.parametrize("precision", slow_except(["no", "bf16"], "no"))
def test_recipe_of_a_run_gives_its_bits(precision: str, dropout_checkpoint: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, dropout_checkpoint, rows=12, epochs=1)
    text = recipe.read_text("utf-8").replace("[run]", f'mixed_precision = "{precision}"\n[run]')
    recipe.write_text(text, "utf-8")
    train(load_recipe(recipe), progress=False)
    first, again = tmp_path / "run", tmp_path / "again"
    train(load_recipe(first / "recipe.toml", output_dir=again), progress=False)
    assert (events(again), digests(again)) == (events(first), digests(first))
    assert len(digests(first)) > 0
