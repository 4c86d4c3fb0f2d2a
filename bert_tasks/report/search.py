"""The page about a search, which lists the best values and the trials."""

from pathlib import Path

from bert_tasks.data.issues import counted
from bert_tasks.experiments.search import BEST, LUCK, load_search, shown_value
from bert_tasks.report.page import page_environment

_MOST_ROWS = 1_000  # rows of the table of trials


def search_page(folder: Path) -> str:
    """Returns the page about the search in a folder, which may have been interrupted.

    Raises:
        UsageError, RecipeError, CheckpointError: Its files are missing or damaged.
    """
    search = load_search(folder)
    name = folder.absolute().name
    keys: list[str] = []
    if search.trials:
        keys = list(search.trials[0].params)
    rows = []
    for trial in search.trials:
        values = [shown_value(trial.params.get(key)) for key in keys]
        rows.append((trial, values, search.note_on(trial)))
    best: list[tuple[str, str]] = []
    if search.best is not None:
        best = [(key, shown_value(value)) for key, value in search.best.params.items()]
    missing = sum(trial.value is None for trial in search.trials)
    ended = counted(len(search.trials), "trial")
    if missing:
        ended = f"{ended}, {missing} of them without a score"
    better = "lower" if search.lower_is_better else "higher"
    return (
        page_environment()
        .get_template("search.html")
        .render(
            title=f"{name} · bert-tasks search",
            name=name,
            metric=search.metric,
            better=better,
            ended=ended,
            keys=keys,
            rows=rows[:_MOST_ROWS],
            unlisted=max(0, len(rows) - _MOST_ROWS),
            best=best,
            recipe=BEST,
            note=LUCK,
        )
    )
