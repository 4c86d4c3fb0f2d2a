"""The page of a search's best values, fresh seeds and trials."""

from pathlib import Path
from typing import Any

from bert_tasks.data.problems import counted
from bert_tasks.errors import UsageError
from bert_tasks.experiments.search import SEARCH, shown_value
from bert_tasks.recipe.schema import load_recipe
from bert_tasks.report.page import page_environment
from bert_tasks.training import files as outputs
from bert_tasks.training.records import SearchRecord, read_record

_MOST_ROWS = 1_000  # rows of the table of trials
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
    keys, trials = list(space), result["trials"]
    for trial in trials:
        key = next((key for key in keys if trial["values"].get(key) not in space[key]), None)
        if key is not None:
            raise UsageError(f"{path} is damaged (trial {trial['number']}, {key}). {remedy.capitalize()}")
    best = next((trial for trial in trials if trial["number"] == result["best"]), None)
    rows = [(trial, [shown_value(trial["values"][key]) for key in keys], trial == best) for trial in trials]
    fresh = _NO_RUNS if result["fresh"] is None else result["fresh"]
    title = f"{result['sampler']}, {counted(len(trials), 'trial')}"
    summary = [(title, None if best is None else best["score"], fresh)]
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
            rows=rows[:_MOST_ROWS],
            unlisted=max(0, len(rows) - _MOST_ROWS),
            ended=_count_trials(result),
            sampler=result["sampler"],
            best=[] if best is None else [(key, shown_value(best["values"][key])) for key in keys],
            summary=summary,
            notes=result["notes"],
        )
    )


def _count_trials(result: dict[str, Any]) -> str:
    """Returns the number of trials, and how many of them have no score."""
    trials = result["trials"]
    missing = sum(trial["score"] is None for trial in trials)
    count = f"{counted(len(trials), 'trial')} of {result['sampler']}"
    return f"{count}, {missing} of them without a score" if missing else count
