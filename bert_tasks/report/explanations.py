"""The first examples of a report, whose words are shaded by their contributions to the prediction.

``model.explanation`` computes the contributions. This module says which examples have them and what a page shows.
"""

from collections.abc import Iterator
from dataclasses import replace

from bert_tasks.data.columns import Row
from bert_tasks.model.prediction import predict_rows
from bert_tasks.model.task_model import TaskModel
from bert_tasks.outputs.explanation import Explanation
from bert_tasks.outputs.sections import MOST_CHARACTERS, Shading
from bert_tasks.report.results import Results

_SMALLEST = 1e-9  # instead of a largest contribution of 0, by which the others are divided
_SHOWN_CHARACTERS = 2 * MOST_CHARACTERS  # in one text


def with_explanations(results: Results, model: TaskModel, count: int) -> Results:
    """Returns the results with explanations of the first ``count`` examples.

    The predictions of the model must have explanations. The rows of these examples are predicted once more, because
    an explanation needs gradients.
    """
    examples = results.sections.examples
    if examples is None:
        return results
    items = list(examples.items)
    explained = [(index, example.row) for index, example in enumerate(items[:count]) if example.row is not None]
    predictions = predict_rows(model, [row for _, row in explained], explain=True)
    for (index, row), prediction in zip(explained, predictions, strict=True):
        explanation = prediction.explanation
        columns = dict.fromkeys(word.column for word in explanation.words)
        texts = []
        for column in columns:
            pieces = tuple(_pieces(explanation, column, row))
            texts.append((column, pieces))
        largest = _SMALLEST
        for word in explanation.words:
            largest = max(largest, abs(word.contribution))
        total = sum(word.contribution for word in explanation.words)
        shading = Shading(label=explanation.label, texts=tuple(texts), largest=largest, total=total)
        items[index] = replace(items[index], shading=shading)
    sections = replace(results.sections, examples=replace(examples, items=tuple(items)))
    return replace(results, sections=sections)


def _pieces(explanation: Explanation, column: str, row: Row) -> Iterator[tuple[str, float | None]]:
    """Yields the words of a text with their contributions, and the text between them without, up to a limit."""
    text = row[column]
    if not isinstance(text, str):
        # Of a column of several texts, such as choices, the explained one is the label of the prediction.
        text = str(explanation.label)
    end = 0
    for word in explanation.words:
        if word.column != column:
            continue
        if word.end > _SHOWN_CHARACTERS:
            yield " …", None
            return
        yield text[end : word.start], None
        yield word.word, word.contribution
        end = word.end
    yield text[end:], None
