"""The page of a search's best values, fresh seeds, importance and trials."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_tasks.data.problems import counted
from bert_tasks.errors import UsageError
from bert_tasks.experiments.search import SEARCH, shown_value
from bert_tasks.recipe.schema import load_recipe
from bert_tasks.report.page import page_environment
from bert_tasks.training import files as outputs
from bert_tasks.training.records import SearchRecord, read_record

_MOST_ROWS = 1_000  # rows of the table of a sampler's trials
_NO_RUNS = {"mean": None, "std": None, "runs": 0}


def search_page(folder: Path) -> str:
    """Returns the page about the search in a folder.

    Raises:
        UsageError, RecipeError: if its files are missing or damaged.
    """
    path, name = folder / SEARCH, folder.absolute().name
    if not path.is_file():
        raise UsageError(f"the search in {folder} is not finished. Run the same command again to resume it")
    recipe = load_recipe(folder / outputs.RECIPE)
    space = {} if recipe.search is None else recipe.search.space
    remedy = "run the search again, which writes it anew"
    result = read_record(path, SearchRecord, remedy=remedy)
    for trial in (trial for study in result["studies"] for trial in study["trials"]):
        key = next((key for key in space if trial["values"].get(key) not in space[key]), None)
        if key is not None:
            raise UsageError(f"{path} is damaged (trial {trial['number']}, {key}). {remedy.capitalize()}")
    keys, studies, first = list(space), result["studies"], result["studies"][0]
    best = [next((trial for trial in study["trials"] if trial["number"] == study["best"]), None) for study in studies]
    summary = [
        (
            f"{study['sampler']}, {counted(len(study['trials']), 'trial')}",
            None if trial is None else trial["score"],
            _NO_RUNS if study["fresh"] is None else study["fresh"],
        )
        for study, trial in zip(studies, best, strict=True)
    ]
    if result["baseline"] is not None:
        summary.append(("the recipe as it is", None, result["baseline"]))
    return (
        page_environment()
        .get_template("search.html")
        .render(
            title=f"{name} · bert-tasks search",
            name=name,
            metric=result["metric"],
            better="lower" if result["lower_is_better"] else "higher",
            keys=keys,
            tables=[_trial_table(study, keys) for study in studies],
            ended=" and ".join(map(_count_trials, studies)),
            sampler=first["sampler"],
            best=[] if best[0] is None else [(key, shown_value(best[0]["values"][key])) for key in keys],
            summary=summary,
            importance=list(first["importance"].items()),
            notes=result["notes"],
        )
    )


def _count_trials(study: Mapping[str, Any]) -> str:
    """Returns the number of trials of a sampler, and how many of them have no score."""
    trials = study["trials"]
    missing = sum(trial["score"] is None for trial in trials)
    count = f"{counted(len(trials), 'trial')} of {study['sampler']}"
    return f"{count}, {missing} of them without a score" if missing else count


def _trial_table(study: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Returns the trials of a sampler in the order in which they ran."""
    rows = [
        (trial, [shown_value(trial["values"][key]) for key in keys], trial["number"] == study["best"])
        for trial in study["trials"]
    ]
    return {"sampler": study["sampler"], "rows": rows[:_MOST_ROWS], "unlisted": max(0, len(rows) - _MOST_ROWS)}
