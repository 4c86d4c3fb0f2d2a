"""Embedding of the texts of files, tables and streams, which works as prediction.

Shape legend: H hidden.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

from bert_tasks.data.options import ReadOptions
from bert_tasks.distributed import broadcast_from_main, make_accelerator
from bert_tasks.errors import UsageError
from bert_tasks.inference.precision import DType
from bert_tasks.inference.prediction import predict_file
from bert_tasks.inference.writing import OutputDestination, Progress, WriteOptions, Written
from bert_tasks.model.encoder import Encoder
from bert_tasks.model.hf_names import hf_hint
from bert_tasks.model.inputs import Data
from bert_tasks.model.pretrained import typed_settings
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks.embedding import Embedding, EmbeddingPooling, EmbeddingPrediction

SETTINGS = ("pooling", "normalize", "layer", "max_length", "prompt")  # arguments of ``Encoder.embed``


def load_embedder(
    model: str | Path, *, settings: Mapping[str, Any] | None, revision: str | None
) -> TaskModel[EmbeddingPrediction]:
    """Loads an encoder, or a trained model's encoder, to predict embeddings.

    Args:
        model: A folder or the name of a model.
        settings: Arguments of ``Encoder.embed`` by their names.
        revision: See ``Encoder.from_pretrained``.

    Raises:
        UsageError: A setting is not one of `SETTINGS`, or has another type.
        CheckpointError: See ``Encoder.embed``.
    """
    options = {} if settings is None else dict(settings)
    unknown = next((name for name in options if name not in SETTINGS), None)
    if unknown is not None:
        raise UsageError(f"{Embedding.name} has no setting {unknown!r}{hf_hint(unknown, SETTINGS)}")
    return Encoder.from_pretrained(model, revision=revision).embedding_model(**typed_settings(Embedding, options))


def embed_file(
    model: Encoder | str | Path,
    data: Data,
    output: str | Path | IO[bytes],
    *,
    pooling: EmbeddingPooling | None = None,
    normalize: bool = True,
    layer: int = -1,
    max_length: int | None = None,
    prompt: str | None = None,
    revision: str | None = None,
    dtype: DType = "float32",
    writing: WriteOptions | None = None,
    reading: ReadOptions | None = None,
    progress: Progress | None = None,
) -> Written:
    """Writes a row with its ``embedding`` for every row of a file.

    Use it if the vectors are needed later or do not fit into memory. For some texts in memory use ``Encoder.embed``,
    which returns the same vectors. The file is written as ``predict_file`` writes predictions: it appears complete or
    not at all, the same call resumes, and several processes divide the rows. The ``notes`` of the result say how the
    vectors were computed, and where this differs from what sentence-transformers would do with the model.

    Args:
        model: An encoder, or the folder or name of an encoder or of a trained model, whose head is not used.
        output: .parquet (the column ``embedding`` holds lists of fixed size of float32), .jsonl, or .npy (an array
            ``[rows, H]`` of float32, and nothing else).
        pooling, normalize, layer, max_length, prompt: See ``Encoder.embed``.
        revision, dtype, writing, reading, progress: See ``predict_file``.

    Returns:
        The number of rows, and messages about them.

    Raises:
        DataError: Rows are bad. The message lists them.
        UsageError, CheckpointError: As for ``predict_file`` and ``Encoder.embed``.

    Examples:
        >>> embed_file(base, "test.csv", "vectors.npy").rows
        5
    """
    writing = WriteOptions() if writing is None else writing
    destination = OutputDestination(output, data, writing, Embedding)
    if destination.form == "npy":
        if writing.keep_columns not in ("all", "none"):
            raise UsageError("npy holds the vectors alone, so no column can be kept. Use parquet or jsonl")
        if writing.on_error == "skip":
            raise UsageError("npy has no place for line numbers, so no row can be skipped. Use parquet or jsonl")
        writing = replace(writing, keep_columns="none")  # an array has no place for them
    broadcast_from_main(make_accelerator(), destination.check_places)  # before the model is loaded
    encoder = model if isinstance(model, Encoder) else Encoder.from_pretrained(model, revision=revision)
    embedder = encoder.embedding_model(
        pooling=pooling, normalize=normalize, layer=layer, max_length=max_length, prompt=prompt
    )
    embedded = predict_file(embedder, data, output, dtype=dtype, writing=writing, reading=reading, progress=progress)
    return replace(embedded, notes=(*_notes(encoder, cast("Embedding", embedder.task), pooling), *embedded.notes))


def _notes(encoder: Encoder, task: Embedding, pooling: EmbeddingPooling | None) -> list[str]:
    """Returns the computation and its differences from sentence-transformers files."""
    settings, layers = encoder.sentence_settings, len(encoder.encoder.layer_order)
    vectors = f"{task.pooling} pooling"
    if pooling is None and settings is not None:
        vectors += f" ({settings.source})"
    if task.depth == 0:
        vectors += " of the embeddings"
    elif task.depth != layers:
        vectors += f" of layer {task.depth} of {layers}"
    norm = "length 1" if task.output.normalize else "not normalised"
    notes = [f"{vectors}, {encoder.config.hidden_size} numbers, {norm}, at most {task.max_length} tokens"]
    if task.prompt:
        notes.append(f"prompt {task.prompt!r} in front of each text")
    if settings is None:
        return notes
    if settings.prompt and task.prompt != settings.prompt:
        notes.append(f"the model's default prompt is {settings.prompt!r}")
    if task.lowercase:
        notes.append("texts in lower case (sentence_bert_config.json)")
    if settings.unsupported is not None:
        notes.append(f"the model's {settings.unsupported}, which is ignored")
    elif pooling is not None and pooling != settings.pooling:
        notes.append(f"the model's {settings.source} asks for {settings.pooling} pooling")
    return notes
