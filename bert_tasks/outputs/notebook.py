"""Predictions and results in notebooks, as small tables of HTML and shaded words."""

from collections.abc import Iterable, Mapping
from html import escape
from operator import is_
from typing import Any

from bert_tasks.errors import UsageError
from bert_tasks.outputs.prediction import PredictionT
from bert_tasks.tables import Html, Table

_SHOWN = 20  # predictions that a table shows
_LONGEST = 12  # values that a cell shows
# Colours of entities, one for each type. Black text is readable on all, in light and in dark notebooks.
_COLOURS = ("#aecbfa", "#fdd663", "#a8dab5", "#f6aea9", "#d7aefb", "#fcc934", "#9fe3e7", "#e6c9a8")


class Predictions(list[PredictionT]):
    """The predictions of rows in order, as a list that notebooks show as a table.

    Args:
        predictions: One prediction for each row.
        index: The index of the pandas object that the rows came from. None for other rows.

    Examples:
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

        Examples:
            >>> shuffled = frame.sample(frac=1)
            >>> shuffled.join(predict(model, shuffled).to_frame()[["score"]])
        """
        import pandas

        # By identity, because equal predictions may belong to different rows.
        is_same = len(self) == len(self._indexed) and all(map(is_, self, self._indexed))
        if self._index is not None and not is_same:
            raise UsageError(
                "the list of predictions was changed or sorted, so that the index of the rows no longer fits. Call "
                "to_frame first, and sort or filter the frame"
            )
        return pandas.DataFrame([_content(prediction) for prediction in self], index=self._index)

    def _repr_html_(self) -> str:
        cells = [_prediction_cells(prediction) for prediction in self[:_SHOWN]]
        # Predictions lack fields that have their default, so the columns are those of any prediction.
        columns: dict[str, None] = {}
        for of_prediction in cells:
            columns |= dict.fromkeys(of_prediction)
        rows: list[list[str]] = []
        for of_prediction in cells:
            rows.append([of_prediction.get(name, "") for name in columns])
        table = Table(columns=list(columns), rows=rows).html()
        if len(self) > _SHOWN:
            table += f"<p>... and {len(self) - _SHOWN} more</p>"
        return table


def _content(prediction: Any) -> dict[str, Any]:
    """Returns the written fields of a prediction, or those of the predictions of several tasks by their names."""
    if isinstance(prediction, Mapping):
        return {name: of_task.to_json() for name, of_task in prediction.items()}
    content: dict[str, Any] = prediction.to_json()
    return content


def _prediction_cells(prediction: Any) -> dict[str, str]:
    """Returns the cells of a prediction's fields. Tags and explanations shade words."""
    content = _content(prediction)
    items = [content]
    if "tags" in content:
        items += content["entities"]  # a tagger explains entities, other models explain the row
    explanations = [item.pop("explanation") for item in items if "explanation" in item]
    if explanations:
        lines = [_contributions(explanation) for explanation in explanations]
        content["explanation"] = Html("<br />".join(lines))
    if "tags" in content:
        content = _tagger_cells(content)
    cells: dict[str, str] = {}
    for name, value in content.items():
        cells[name] = value if isinstance(value, Html) else _short(value)
    return cells


def _tagger_cells(content: dict[str, Any]) -> dict[str, Any]:
    """Returns a tagger's words on the colours of their types, before the other fields of the prediction."""
    words, tags, scores = content.pop("words"), content.pop("tags"), content.pop("scores")
    types = [tag.removeprefix("B-").removeprefix("I-") for tag in tags]
    colours: dict[str, str] = {}
    for index, name in enumerate(sorted(set(types))):
        colours[name] = _COLOURS[index % len(_COLOURS)]
    colours["O"] = ""
    shaded: list[str] = []
    for word, tag, name, score in zip(words, tags, types, scores, strict=True):
        shaded.append(_shaded(word, colours[name], f"{tag} {score:.3f}"))
    entities = [f"{entity['word']} ({entity['entity_group']})" for entity in content["entities"]]
    content["entities"] = ", ".join(entities)
    return {"words": Html(" ".join(shaded)), **content}


def _contributions(explanation: Mapping[str, Any]) -> str:
    """Returns the words of an explanation in a line."""
    words = explanation["words"]
    largest = max((abs(word["contribution"]) for word in words), default=0.0)
    return " ".join(_contribution(word, largest) for word in words)


def _contribution(word: Mapping[str, Any], largest: float) -> str:
    """Returns a word on green if it supports the prediction, on red if it opposes it."""
    share = word["contribution"] / largest if largest else 0.0
    hue = "52, 168, 83" if share > 0 else "234, 67, 53"
    return _shaded(word["word"], f"rgba({hue}, {abs(share):.2f})", f"{word['contribution']:+.4f}")


def _shaded(text: str, colour: str, title: str) -> str:
    """Returns a text as HTML on a colour, with a title that appears under the pointer."""
    if not colour:
        return escape(text)
    # The opaque colours need black text in dark notebooks, too. Transparent ones keep the notebook's colour of text.
    ink = "; color: black" if colour.startswith("#") else ""
    return f'<span title="{escape(title)}" style="background: {colour}{ink}; border-radius: 3px">{escape(text)}</span>'


def _short(value: Any) -> str:
    """Returns a value in a few characters, with four digits of a number and the first items of a list."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        value = [f"{name} {_short(item)}" for name, item in value.items()]
    if isinstance(value, list):
        shown = [_short(item) for item in value[:_LONGEST]]
        if len(value) > _LONGEST:
            shown.append("...")
        return ", ".join(shown)
    return str(value)
