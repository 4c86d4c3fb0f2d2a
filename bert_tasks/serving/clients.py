"""Requests of clients of text-embeddings-inference (TEI), and of OpenAI's embeddings.

The paths and fields that are served have the form that the sources describe. Other fields are errors.

Sources:
    https://github.com/huggingface/text-embeddings-inference (router/src/http, core/src/infer.rs)
    https://platform.openai.com/docs/api-reference/embeddings

Shape legend: H hidden.
"""

import base64
from collections.abc import Sequence
from math import log, tanh
from typing import Annotated, Any, Literal, NotRequired

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from bert_tasks.data.columns import text_columns
from bert_tasks.model.multitask import AnyModel
from bert_tasks.outputs.prediction import float_list
from bert_tasks.serving.requests import INPUTS, Call, RequestT, Source, body_error, validated
from bert_tasks.tasks.embedding import Embedding
from bert_tasks.tasks.reranking import can_rank

_LEAST = 2.0**-126  # the smallest float32 of full precision, instead of a probability of 0


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


def _as_list(value: Any) -> Any:
    """Returns a single text as a list of one."""
    if isinstance(value, str):
        return [value]
    return value


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
    sequences = _as_list(value)
    if isinstance(sequences[0], str):
        sequences = [sequences]
    if not all(isinstance(sequence, list) and 0 < len(sequence) <= 2 for sequence in sequences):
        raise PydanticCustomError("sequences", "expected a text, a list of one or two texts, or a list of such lists")
    return sequences


Sequences = str | list[str] | list[list[str]]


class ClassifyRequest(_TEIRequest):
    """A text, a list of one text or of the two texts of a pair, or a list of lists."""

    inputs: Annotated[list[list[str]], BeforeValidator(_as_sequences, json_schema_input_type=Sequences)]
    raw_scores: Literal[False] = False


class Vector(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class OpenAIResponse(TypedDict):
    object: Literal["list"]
    data: list[Vector]
    model: str
    usage: dict[Literal["prompt_tokens", "total_tokens"], int]


class Rank(TypedDict):
    index: int
    score: float
    text: NotRequired[str]


class LabelScore(TypedDict):
    label: str
    score: float


def is_classifier(model: AnyModel) -> bool:
    """Returns True if the only task of a model classifies texts or pairs."""
    task = model.tasks.get("")
    return task is not None and task.output.hf_config().get("problem_type") is not None


def openai_call(content: Any, source: Source) -> Call:
    """Reads a request to OpenAI's ``/v1/embeddings``."""
    rows, request = _texts_to_embed(OpenAIRequest, content, source, "input")

    def respond(predictions: Sequence[Any], tokens: int) -> OpenAIResponse:
        data: list[Vector] = []
        for index, prediction in enumerate(predictions):
            vector: list[float] | str = float_list(prediction.embedding)  # [H]
            if request.encoding_format == "base64":
                # OpenAI's Python client asks for this form, which is little-endian float32 on every machine.
                vector = base64.b64encode(prediction.embedding.astype("<f4").tobytes()).decode()
            data.append({"object": "embedding", "index": index, "embedding": vector})
        usage: Any = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": source.name, "usage": usage}

    return Call(rows=rows, respond=respond)


def embed_call(content: Any, source: Source) -> Call:
    """Reads a request to TEI's ``/embed``."""
    rows, request = _texts_to_embed(EmbedRequest, content, source, INPUTS)
    task = None
    if request.normalize is not None and isinstance(source.task, Embedding):
        task = source.task.with_settings(normalize=request.normalize)

    def respond(predictions: Sequence[Any], tokens: int) -> list[list[float]]:
        return [float_list(prediction.embedding) for prediction in predictions]

    return Call(rows=rows, respond=respond, task=task, truncate=request.truncate is not False)


def _texts_to_embed(kind: type[RequestT], content: Any, source: Source, key: str) -> tuple[list[Any], RequestT]:
    """Returns the texts that a request has under a key as rows, and the request."""
    if not isinstance(source.task, Embedding):
        raise body_error((), "the model does not embed texts. Serve an encoder with --task embedding")
    request = validated(kind, content)
    return source.reader().several(getattr(request, key), key), request


def rerank_call(content: Any, source: Source) -> Call:
    """Reads a request to TEI's ``/rerank``."""
    if source.task is None or not can_rank(source.task):
        raise body_error((), "the model needs one score, or two labels, for a pair of texts")
    request = validated(RerankRequest, content)

    def respond(predictions: Sequence[Any], tokens: int) -> list[Rank]:
        ranks: list[Rank] = []
        for index, prediction in enumerate(predictions):
            score = _logit(prediction)
            if not request.raw_scores:
                score = (1 + tanh(score / 2)) / 2  # the sigmoid, which cannot overflow
            ranks.append({"index": index, "score": score})
            if request.return_text:
                ranks[-1]["text"] = request.texts[index]
        return sorted(ranks, key=lambda rank: -rank["score"])

    pairs = [{"text": request.query, "text_pair": text} for text in request.texts]
    rows = source.reader().several(pairs, "texts")
    return Call(rows=rows, respond=respond, truncate=request.truncate is not False)


def _logit(prediction: Any) -> float:
    """Returns a score without limits, which is a number as it is, or the logit of the second of two labels."""
    if not prediction.scores:
        return float(prediction.score)
    negative, positive = prediction.scores.values()
    return log(max(positive, _LEAST)) - log(max(negative, _LEAST))


def is_tei(content: Any, model: AnyModel) -> bool:
    """Returns True if ``inputs`` of ``/predict`` are a text, a pair, or lists of texts as in TEI.

    A list of texts is a pair only for a model of pairs. For other models each of the texts is a row.
    """
    if not isinstance(content, dict) or not is_classifier(model):
        return False
    inputs = content.get(INPUTS)
    if not isinstance(inputs, str | list) or len(inputs) == 0:
        return False
    if isinstance(inputs, str) or isinstance(inputs[0], list):
        return True
    reads_pairs = len(text_columns(model.input_columns)) == 2
    return reads_pairs and isinstance(inputs[0], str)


def classify_call(content: Any, source: Source) -> Call:
    """Reads a request to TEI's ``/predict``, in which a list of two texts is a pair."""
    request = validated(ClassifyRequest, content)
    is_single = isinstance(content[INPUTS][0], str)

    def respond(predictions: Sequence[Any], tokens: int) -> list[LabelScore] | list[list[LabelScore]]:
        answers = [_label_scores(prediction) for prediction in predictions]
        return answers[0] if is_single else answers

    texts = [dict(zip(("text", "text_pair"), sequence, strict=False)) for sequence in request.inputs]
    rows = source.reader().several(texts, INPUTS)
    return Call(rows=rows, respond=respond, truncate=request.truncate is not False)


def _label_scores(prediction: Any) -> list[LabelScore]:
    """Returns all labels, the most probable first. A number has one label."""
    if not prediction.scores:
        return [LabelScore(label="LABEL_0", score=prediction.score)]
    best = sorted(prediction.scores.items(), key=lambda item: -item[1])
    return [LabelScore(label=label, score=score) for label, score in best]
