"""A new key of a recipe is one edit: a field of a section."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import bert_tasks

FIELD = '''    toy: Annotated[int, Field(ge=1), OnResume("noted")] = 3
    """How many toys there are."""
'''
PROGRAM = """
import json, sys
from pathlib import Path
from bert_tasks import fit, load_recipe
from bert_tasks.errors import RecipeError
from bert_tasks.recipe.json_schema import recipe_schema
from bert_tasks.training.files import read_run_metadata
from support.training_runs import load_model, make_rows

folder, checkpoint = Path(sys.argv[1]), Path(sys.argv[2])
recipe = load_recipe(folder / "recipe.toml", overrides=["optim.toy=5"])
errors = []
options = {"epochs": 1, "batch_size": 8, "keep_checkpoints": True, "progress": False}
for toy in (0, 4):
    try:
        fit(load_model(checkpoint), make_rows(16), output_dir=folder / "run", toy=toy, **options)
    except RecipeError as error:
        errors.append(str(error))
before = read_run_metadata(folder / "run").settings["optim.toy"]
fit(load_model(checkpoint), make_rows(16), output_dir=folder / "run", toy=6, **{**options, "epochs": 2})
print(json.dumps({
    "recipe": recipe.optim.toy,
    "errors": errors,
    "settings": before,
    "changes": read_run_metadata(folder / "run").to_json()["changes"],
    "schema": recipe_schema()["$defs"]["OptimSection"]["properties"]["toy"],
}))
"""
RECIPE = """task = "sequence-classification"
model.name = "anything"
data.train = "rows.csv"
optim.toy = 2
"""


@pytest.mark.slow
def test_a_field_is_all_that_a_new_key_needs(checkpoint, tmp_path):
    package = tmp_path / "copy" / "bert_tasks"
    shutil.copytree(Path(bert_tasks.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    schema = package / "recipe" / "schema.py"
    anchor = "    learning_rate: Annotated["
    text = schema.read_text("utf-8")
    assert text.count(anchor) == 1
    schema.write_text(text.replace(anchor, FIELD + anchor), "utf-8")
    (tmp_path / "recipe.toml").write_text(RECIPE, "utf-8")
    path = [str(package.parent), str(Path(__file__).parents[1])]
    program = f"import sys; sys.path[:0] = {path!r}\n{PROGRAM}"
    command = [sys.executable, "-c", program, str(tmp_path), str(checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)
    assert (output["recipe"], output["settings"], output["errors"]) == (5, 4, ["toy is 0, expected at least 1"])
    assert [change["change"] for change in output["changes"]] == ["optim.epochs = 2 (was 1)", "optim.toy = 6 (was 4)"]
    assert output["schema"] == {
        "default": 3,
        "description": "How many toys there are.",
        "minimum": 1,
        "title": "Toy",
        "type": "integer",
    }
