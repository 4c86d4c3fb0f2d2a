"""Requests of clients of OpenAI, text-embeddings-inference (TEI) and the hub.

Sources:
    https://platform.openai.com/docs/api-reference/embeddings
    https://github.com/huggingface/text-embeddings-inference (router/src/http, core/src/infer.rs)
    https://huggingface.co/docs/inference-providers/tasks/index

Shape legend: H hidden.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log, tanh
from typing import Annotated, Any, Literal, NotRequired, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, SkipValidation, ValidationError, create_model
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from bert_tasks.data.columns import Row, as_row, text_columns
from bert_tasks.errors import DataError
from bert_tasks.model.task_model import TaskModel
from bert_tasks.serving.failures import EMBED, HUB, OPENAI, RERANK
from bert_tasks.serving.limits import Limits
from bert_tasks.serving.requests import INPUTS, LABELS, BodyReader, body_error, check_pairs, requested_labels
from bert_tasks.tasks.base import Feature, Task, float_list
from bert_tasks.tasks.embedding import Embedding
from bert_tasks.tasks.shared.card import Card

_CLASSES = "single_label_classification"
_LEAST = 2.0**-126  # the smallest float32 of full precision, instead of a probability of 0
ModelT = TypeVar("ModelT", bound=BaseModel)


@dataclass(kw_only=True)
class Call:
    """The rows of a request, and the content of its response.

    Attributes:
        rows, task: See ``Batcher.answer``.
        respond: Returns the content of the response from the predictions and the number of tokens of the request.
        truncate: True if a text that is too long is cut. Otherwise it is rejected.
        tokens: The number of tokens that the model reads, which ``count`` sets.
    """

    rows: Sequence[Row]
    respond: Callable[[Sequence[Any], int], Any]
    task: Task | None = None
    truncate: bool = True
    tokens: int = 0

    def count(self, features: Sequence[Feature]) -> None:
        """Counts the tokens of the features.

        Raises:
            DataError: A text is too long, and may not be cut.
        """
        self.tokens = sum(len(feature["input_ids"]) for feature in features)
        longest = max((feature.get("lost_tokens", 0) for feature in features), default=0)
        if longest and not self.truncate:
            raise DataError(f"a text is {longest} tokens too long. Shorten it, or set truncate to true")


@dataclass(frozen=True, kw_only=True)
class Source:
    """The model that a request is for.

    Attributes:
        name: The name of the model in responses.
        has_adapters: True if requests choose a model.
    """

    name: str
    model: TaskModel
    limits: Limits
    has_adapters: bool

    def reader(self, task: Task | None = None) -> BodyReader:
        task = self.model.task if task is None else task
        return BodyReader(task, self.limits, self.model.columns, has_adapters=self.has_adapters)


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Texts = Annotated[list[str], BeforeValidator(_as_list, json_schema_input_type=str | list[str])]


class OpenAIRequest(_Request):
    """Texts to embed. ``model`` and ``user`` are not read."""

    input: Texts
    model: str = ""
    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = None


class _TEIRequest(_Request):
    truncate: bool | None = None
    truncation_direction: Literal["Right", "right"] = "right"


class EmbedRequest(_TEIRequest):
    """Texts to embed. With ``truncate`` false a text that is too long is an error."""

    inputs: Texts
    normalize: bool | None = None


class RerankRequest(_TEIRequest):
    """A query, and the texts to sort by their scores with it."""

    query: str
    texts: list[str]
    raw_scores: bool = False
    return_text: bool = False


def _as_sequences(value: Any) -> Any:
    """Returns one or several texts or pairs as a list of lists."""
    sequences = [[value]] if isinstance(value, str) else [value] if isinstance(value[0], str) else value
    if not all(isinstance(sequence, list) and 0 < len(sequence) <= 2 for sequence in sequences):
        raise PydanticCustomError("sequences", "expected a text, a list of one or two texts, or a list of such lists")
    return sequences


class ClassifyRequest(_TEIRequest):
    """A text, a list of one text or of the two texts of a pair, or a list of lists."""

    inputs: Annotated[
        list[list[str]], BeforeValidator(_as_sequences, json_schema_input_type=str | list[str] | list[list[str]])
    ]
    raw_scores: Literal[False] = False


class HubRequest(BaseModel):
    """A text, a row of the task, or a list of them. ``options`` are not read."""

    model_config = ConfigDict(extra="allow", strict=True)

    inputs: SkipValidation[str | dict[str, Any] | list[str | dict[str, Any]]]
    parameters: dict[str, Any] = {}
    options: dict[str, Any] = {}


class _Vector(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class OpenAIResponse(TypedDict):
    object: Literal["list"]
    data: list[_Vector]
    model: str
    usage: dict[Literal["prompt_tokens", "total_tokens"], int]


class Rank(TypedDict):
    index: int
    score: float
    text: NotRequired[str]


class LabelScore(TypedDict):
    label: str
    score: float


def _validated(model: type[ModelT], content: Any) -> ModelT:
    """Returns the request, or raises the response with its first error, not its value."""
    if not isinstance(content, dict):
        raise body_error((), "expected an object, sent as application/json")
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        path = [key.encode(errors="replace").decode()[:100] if isinstance(key, str) else key for key in first["loc"]]
        raise body_error(path, first["msg"]) from None


def _needs_vectors(model: TaskModel) -> str | None:
    is_embedding = isinstance(model.task, Embedding)
    return None if is_embedding else "the model does not embed texts. Serve an encoder with --task embedding"


def _needs_scores(model: TaskModel) -> str | None:
    problem, labels = getattr(model.task, "problem_type", None), len(model.task.labels)
    has_scores = problem == "regression" or (problem == _CLASSES and labels == 2)
    return None if has_scores else "the model needs one score, or two labels, for a pair of texts"


def _needs_hub_form(model: TaskModel) -> str | None:
    has_form = Card.of(model.task).hub_parameters is not None
    return None if has_form else f"the hub has no form for {model.task.name}. Send rows to /predict"


def _openai(content: Any, source: Source) -> Call:
    request = _validated(OpenAIRequest, content)

    def encode(vector: Any) -> list[float] | str:
        is_float = request.encoding_format == "float"
        return float_list(vector) if is_float else base64.b64encode(vector.astype("<f4").tobytes()).decode()

    def respond(predictions: Sequence[Any], tokens: int) -> dict[str, Any]:
        vectors = [encode(prediction.embedding) for prediction in predictions]  # [H] each
        data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": source.name, "usage": usage}

    return Call(rows=source.reader().several([{"text": text} for text in request.input], "input"), respond=respond)


def _embed(content: Any, source: Source) -> Call:
    request = _validated(EmbedRequest, content)
    return Call(
        rows=source.reader().several([{"text": text} for text in request.inputs], INPUTS),
        respond=lambda predictions, _: [float_list(prediction.embedding) for prediction in predictions],
        task=_with_norm(source.model.task, request.normalize),
        truncate=request.truncate is not False,
    )


def _with_norm(task: Task, normalize: bool | None) -> Task:
    """Returns the task with or without vectors of length 1, if it embeds."""
    return task if normalize is None or not isinstance(task, Embedding) else replace(task, normalize=normalize)


def _rerank(content: Any, source: Source) -> Call:
    """Reads TEI's ``/rerank``. With two labels the second label has the score."""
    request = _validated(RerankRequest, content)

    def score(prediction: Any) -> float:
        logit = prediction.score
        if prediction.scores:
            negative, positive = prediction.scores.values()
            logit = log(max(positive, _LEAST)) - log(max(negative, _LEAST))
        return logit if request.raw_scores else (1 + tanh(logit / 2)) / 2  # the sigmoid, which cannot overflow

    def respond(predictions: Sequence[Any], tokens: int) -> list[Rank]:
        ranks = [Rank(index=index, score=score(prediction)) for index, prediction in enumerate(predictions)]
        if request.return_text:
            ranks = [Rank(**rank, text=request.texts[rank["index"]]) for rank in ranks]
        return sorted(ranks, key=lambda rank: -rank["score"])

    rows = source.reader().several([{"text": request.query, "text_pair": text} for text in request.texts], "texts")
    return Call(rows=rows, respond=respond, truncate=request.truncate is not False)


def is_tei(content: Any, model: TaskModel) -> bool:
    """Returns True if ``inputs`` of ``/predict`` are a text, a pair, or lists of texts as in TEI.

    A list of texts is a pair only for a model of pairs. For other models each of the texts is a row.
    """
    inputs = content.get(INPUTS) if isinstance(content, Mapping) else None
    if not is_classifier(model) or not isinstance(inputs, str | list) or len(inputs) == 0:
        return False
    reads_pairs = len(text_columns(model.input_columns)) == 2
    return isinstance(inputs, str) or isinstance(inputs[0], list) or (reads_pairs and isinstance(inputs[0], str))


def is_classifier(model: TaskModel) -> bool:
    """Returns True if a model classifies texts or pairs."""
    return getattr(model.task, "problem_type", None) is not None


def tei_predict(content: Any, source: Source) -> Call:
    """Reads TEI's form of ``/predict``, in which a list of two texts is a pair."""
    request, card = _validated(ClassifyRequest, content), Card.of(source.model.task)
    is_single = isinstance(content[INPUTS][0], str)
    rows = [dict(zip(("text", "text_pair"), sequence, strict=False)) for sequence in request.inputs]

    def respond(predictions: Sequence[Any], _: int) -> Any:
        answers = [card.hub_answer(prediction, {}) for prediction in predictions]
        return answers[0] if is_single else answers

    return Call(rows=source.reader().several(rows, INPUTS), respond=respond, truncate=request.truncate is not False)


def _hub(content: Any, source: Source) -> Call:
    """Reads the hub's request. Feature extraction has its options next to ``inputs``."""
    request = _validated(HubRequest, content)
    parameters = {**request.parameters, **(request.model_extra if request.model_extra is not None else {})}
    parameters = {name: value for name, value in parameters.items() if value is not None}
    task, similar = _zero_shot(parameters, source), _compared(request.inputs, source)
    card = Card.of(task)
    values = _validated(_parameters(task), parameters).model_dump(exclude_none=True)
    truncate, is_single = values.pop("truncate", True), not isinstance(request.inputs, list)
    inputs: Any = similar if similar else [request.inputs] if is_single else request.inputs
    columns = [column for column in task.columns if not column.is_label]
    try:
        rows = [as_row(each, columns, number) for number, each in enumerate(inputs)]
    except DataError as error:
        raise body_error((INPUTS,), str(error)) from None

    def respond(predictions: Sequence[Any], _: int) -> Any:
        if similar:
            first, *others = (prediction.embedding for prediction in predictions)
            return [float(first @ other) for other in others]
        answers = [card.hub_answer(prediction, values) for prediction in predictions]
        return answers[0] if is_single and not card.hub_nests else answers

    rows = source.reader(task).several(rows, INPUTS)
    check_pairs(rows, task, source.limits)
    task = _with_norm(task, True if similar else values.get("normalize"))
    return Call(rows=rows, respond=respond, task=task, truncate=truncate)


def _zero_shot(parameters: dict[str, Any], source: Source) -> Task:
    """Removes candidate labels from parameters. Returns their or the model's task."""
    if "candidate_labels" not in parameters:
        return source.model.task
    names = {"candidate_labels": LABELS, "hypothesis_template": "hypothesis", "multi_label": "multi_label"}
    content = {names[name]: parameters.pop(name) for name in [*names] if name in parameters}
    task = requested_labels(content, source.model, source.limits)
    return source.model.task if task is None else task


def _compared(inputs: Any, source: Source) -> list[str]:
    """Returns the sentence and the others of a request for sentence similarity."""
    if not isinstance(source.model.task, Embedding) or not isinstance(inputs, dict) or "source_sentence" not in inputs:
        return []
    request = _validated(create_model("Similarity", __base__=_Request, source_sentence=str, sentences=Texts), inputs)
    return [request.source_sentence, *request.sentences]  # type: ignore[attr-defined]


def _parameters(task: Task) -> type[BaseModel]:
    """Returns the type of the parameters of the hub for a task."""
    names = Card.of(task).hub_parameters
    fields: Any = {name: (value | None, None) for name, value in ({} if names is None else names).items()}
    return create_model("Parameters", __base__=_Request, truncate=(bool | None, None), **fields)


@dataclass(frozen=True)
class Shape:
    """A path that answers as another server does.

    Attributes:
        summary: Its title in the OpenAPI document.
        request, response: The types of the bodies.
        read: Reads the content of a body.
        problem: Returns why a model cannot answer, or None.
    """

    path: str
    summary: str
    request: type[BaseModel]
    response: Any
    read: Callable[[Any, Source], Call]
    problem: Callable[[TaskModel], str | None]

    def call(self, content: Any, source: Source) -> Call:
        """Returns the call of a request, or raises the response to an invalid request."""
        problem = self.problem(source.model)
        if problem is not None:
            raise body_error((), problem)
        return self.read(content, source)


_OPENAI = "Embed texts, in OpenAI's form"
_EMBED = "Embed texts, in the form of text-embeddings-inference"
_RERANK = "Sort texts by their scores with a query, in the form of text-embeddings-inference"
_HUB = "Predict in the form of the hub's inference API"
SHAPES = (
    Shape(OPENAI, _OPENAI, OpenAIRequest, OpenAIResponse, _openai, _needs_vectors),
    Shape(EMBED, _EMBED, EmbedRequest, list[list[float]], _embed, _needs_vectors),
    Shape(RERANK, _RERANK, RerankRequest, list[Rank], _rerank, _needs_scores),
    Shape(HUB, _HUB, HubRequest, list[Any] | dict[str, Any], _hub, _needs_hub_form),
)
