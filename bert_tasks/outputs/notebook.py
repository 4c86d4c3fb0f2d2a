"""Predictions and results in notebooks, as small tables of HTML and shaded words."""

from collections.abc import Iterable, Mapping
from html import escape
from operator import is_
from typing import Any

from bert_tasks.errors import UsageError
from bert_tasks.outputs.prediction import PredictionT
from bert_tasks.tables import Html, Table

_SHOWN = 20  # predictions of a table
_LONGEST = 12  # values of a cell
# Colours of entities, one for each type. Black text is readable on all, in light and in dark notebooks.
_COLOURS = ("#aecbfa", "#fdd663", "#a8dab5", "#f6aea9", "#d7aefb", "#fcc934", "#9fe3e7", "#e6c9a8")


class Predictions(list[PredictionT]):
    """The predictions of rows in order, as a list that notebooks show as a table.

    Args:
        predictions: One prediction for each row.
        index: The index of the pandas object that the rows came from. None for other rows.

    Example:
        >>> predictions = model.predict(["a fine film", "a dull one"])
        >>> predictions[0].label
        'positive'
        >>> predictions.to_frame()[["label", "score"]]
    """

    def __init__(self, predictions: Iterable[PredictionT] = (), *, index: Any = None) -> None:
        super().__init__(predictions)
        self._index = index
        self._indexed = tuple(self)

    def to_frame(self) -> Any:
        """Returns a pandas DataFrame with a row for each prediction, as in a written file.

        If the rows came from a DataFrame or a Series, the result has the same index, so that ``frame.join`` and the
        assignment of a column match the rows, whatever their order. Other rows are numbered from 0 in their order.

        Raises:
            ImportError: pandas is not installed.
            UsageError: The list was changed or sorted, so that the index does not fit.

        Example:
            >>> shuffled = frame.sample(frac=1)
            >>> shuffled.join(predict(model, shuffled).to_frame()[["score"]])
        """
        import pandas

        is_same = len(self) == len(self._indexed) and all(map(is_, self, self._indexed))
        if self._index is not None and not is_same:
            raise UsageError(
                "the list of predictions was changed or sorted, so that the index of the rows no longer fits. Call "
                "to_frame first, and sort or filter the frame"
            )
        return pandas.DataFrame([_content(prediction) for prediction in self], index=self._index)

    def _repr_html_(self) -> str:
        cells = [_prediction_cells(prediction) for prediction in self[:_SHOWN]]
        more = f"<p>... and {len(self) - _SHOWN} more</p>" if len(self) > _SHOWN else ""
        columns = list(dict.fromkeys(name for row in cells for name in row))
        rows = [[row.get(name, "") for name in columns] for row in cells]
        return Table(columns=columns, rows=rows).html() + more


def _content(prediction: Any) -> dict[str, Any]:
    """Returns the written fields of a prediction, or those of the predictions of several tasks by their names."""
    if isinstance(prediction, Mapping):
        return {name: of_task.to_json() for name, of_task in prediction.items()}
    content: dict[str, Any] = prediction.to_json()
    return content


def _prediction_cells(prediction: Any) -> dict[str, str]:
    """Returns the cells of a prediction's fields. Tags and explanations shade words."""
    content = _content(prediction)
    items = [content, *content["entities"]] if "tags" in content else [content]
    explanations = [item.pop("explanation") for item in items if "explanation" in item]
    if explanations:
        content["explanation"] = Html("<br />".join(map(_contributions, explanations)))
    if "tags" in content:
        words, tags, scores = (content.pop(name) for name in ("words", "tags", "scores"))
        types = sorted({tag.removeprefix("B-").removeprefix("I-") for tag in tags})
        colours = {name: "" if name == "O" else _COLOURS[index % len(_COLOURS)] for index, name in enumerate(types)}
        shaded = (
            _shaded(word, colours[tag.removeprefix("B-").removeprefix("I-")], f"{tag} {score:.3f}")
            for word, tag, score in zip(words, tags, scores, strict=True)
        )
        content["entities"] = ", ".join(
            f"{entity['word']} ({entity['entity_group']})" for entity in content["entities"]
        )
        content = {"words": Html(" ".join(shaded)), **content}
    return {name: value if isinstance(value, Html) else _short(value) for name, value in content.items()}


def _contributions(explanation: Mapping[str, Any]) -> str:
    """Returns the words of an explanation in a line."""
    largest = max((abs(word["contribution"]) for word in explanation["words"]), default=0.0)
    return " ".join(_contribution(word, largest) for word in explanation["words"])


def _contribution(word: Mapping[str, Any], largest: float) -> str:
    """Returns a word on green if it supports the prediction, on red if it opposes it."""
    share = word["contribution"] / largest if largest else 0.0
    colour = f"rgba({'52, 168, 83' if share > 0 else '234, 67, 53'}, {abs(share):.2f})"
    return _shaded(word["word"], colour, f"{word['contribution']:+.4f}")


def _shaded(text: str, colour: str, title: str) -> str:
    if not colour:
        return escape(text)
    ink = "; color: black" if colour.startswith("#") else ""
    return f'<span title="{escape(title)}" style="background: {colour}{ink}; border-radius: 3px">{escape(text)}</span>'


def _short(value: Any) -> str:
    """Returns a value in a few characters, with four digits and first items."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        value = [f"{name} {_short(item)}" for name, item in value.items()]
    if isinstance(value, list):
        more = ["..."] if len(value) > _LONGEST else []
        return ", ".join([*map(_short, value[:_LONGEST]), *more])
    return str(value)
