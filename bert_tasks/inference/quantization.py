"""The ranges of activations that int8 needs, recorded on rows of the user and stored beside the weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, Unpack

from torch import Tensor

from bert_tasks.checkpoints.activation_ranges import write_ranges
from bert_tasks.checkpoints.hub import ACTIVATION_RANGES, resolve
from bert_tasks.data.columns import Row
from bert_tasks.data.issues import counted
from bert_tasks.data.options import ReadingArguments, ReadOptions
from bert_tasks.data.reading import valid_rows
from bert_tasks.encoder.int8 import record_ranges
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import CheckpointError, DataError, UsageError
from bert_tasks.inference.embedding import load_embedder
from bert_tasks.inference.precision import check_int8, int8_logits
from bert_tasks.model.inputs import Data, load_table, load_trained, reading_for_prediction
from bert_tasks.model.multitask import AnyModel
from bert_tasks.model.prediction import REQUIRED_AGREEMENT, agreements, predictions_by_head
from bert_tasks.model.windows import features_of, finite, forward_windows
from bert_tasks.storage import check_path
from bert_tasks.tables import Result
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.embedding import Embedding

ROWS = 300  # that ranges are recorded on, and at most as many to compare predictions on


@dataclass(frozen=True, kw_only=True)
class Quantization(Result):
    """What ``quantize`` has written and measured.

    Attributes:
        file: The file with the ranges of activations.
        rows: Number of rows that the ranges were recorded on.
        kept: Share of the predictions for other rows that int8 leaves unchanged.
        predictions: Number of these predictions.
    """

    file: Path
    rows: int
    kept: float
    predictions: int

    def lines(self) -> list[str]:
        """Returns the measurement for a terminal."""
        return [
            f"ranges of activations: {self.file} (from {counted(self.rows, 'row')})",
            f"int8: {self.kept:.1%} of {counted(self.predictions, 'prediction')} for other rows unchanged, required "
            f"{REQUIRED_AGREEMENT:.0%}",
        ]


def quantize(
    model: str | Path,
    data: Data,
    *,
    task: str | type[Task] | None = None,
    settings: Mapping[str, Any] | None = None,
    **reading: Unpack[ReadingArguments],
) -> Quantization:
    """Prepares a model for ``dtype="int8"`` on a CPU, and measures how many predictions stay the same.

    Use it before predictions, evaluations or a server in int8, which are faster than in float32 where the processor
    has VNNI or AMX. It runs up to 600 rows, and takes about as long as two predictions for them. From every other row
    it records between which values the inputs of each linear layer lie. They go to a small file,
    ``activation_ranges.safetensors``, beside the weights, which do not change. The other rows are predicted in float32
    and in int8. If fewer than 95 % of the predictions agree, no file is written.

    Args:
        model: A model folder or the folder of a run.
        data: Rows like those that will be predicted, for example the training data. Labels are not read.
        task: See ``evaluate``. ``embedding`` prepares an encoder for ``embed``.
        settings: See ``evaluate``.
        reading: Fields of `ReadOptions` for ``data``.

    Returns:
        The file and the share of equal predictions.

    Raises:
        UsageError: The processor cannot compute in int8, or the model is not a folder with weights in
            float32.
        DataError: A row cannot be used, there are fewer than two, or they cannot show whether predictions agree.
        CheckpointError: The model cannot be loaded, int8 changes too many predictions, or the folder cannot be written.

    Examples:
        >>> result = quantize("runs/first", "train.csv")
        >>> result.file.name, result.kept >= 0.95
        ('activation_ranges.safetensors', True)
    """
    check_path(model, CheckpointError)
    options = ReadOptions.from_arguments(quantize, reading)
    # A hub id or package has no folder of the user, so it is refused before anything is downloaded or loaded.
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise UsageError(
            f"{model} is not a folder, and quantize adds a file to the weights. Save the model to a folder first"
        )
    loading: dict[str, Any] = {"settings": settings, "revision": None}
    loaded: AnyModel
    if task == Embedding.name:
        loaded = load_embedder(model, **loading)
    else:
        loaded = load_trained(model, task=task, data=data, reading=options, **loading)
    check_int8(loaded)
    how = reading_for_prediction(loaded, data, options)
    table = load_table(data, loaded.row_columns, names=loaded.columns, reading=how, labels="unread")
    rows = list(valid_rows(islice(table, 2 * ROWS), loaded.input_columns))
    if len(rows) < 2:
        raise DataError(f"{table.source}: at least 2 rows are needed, one to record ranges and one to compare")
    # Every other row, because a file may be sorted by its labels.
    ranges = _recorded(loaded, rows[::2])
    kept = _agreements(loaded, rows[1::2], ranges)
    share = fmean(kept)
    if share < REQUIRED_AGREEMENT:
        raise CheckpointError(
            f"int8 changes too many predictions, so no file was written. {share:.1%} of {len(kept)} stay the same, "
            f"required are {REQUIRED_AGREEMENT:.0%}. Use float32 or bf16"
        )
    folder = resolve(folder)  # a run's folder holds the folder of its model
    write_ranges(folder, ranges, loaded.encoder.state_dict())
    return Quantization(file=folder / ACTIVATION_RANGES, rows=len(rows[::2]), kept=share, predictions=len(kept))


def _recorded(model: AnyModel, rows: list[Row]) -> dict[str, Tensor]:
    """Returns the ranges of the model's activations on some rows."""

    def logits_of_all_tokens(batch: PackedBatch) -> Any:
        # ``model`` itself would compute only the tokens that the head reads in the last layer.
        logits, _ = model.forward_states(batch)
        return logits

    features = features_of(model, rows, model.require_tokenizer())
    with record_ranges(model.encoder) as ranges:
        forward_windows(model, features, forward_fn=logits_of_all_tokens)
    for extremes in ranges.values():
        finite(extremes)
    return ranges


def _agreements(model: AnyModel, rows: list[Row], ranges: Mapping[str, Tensor]) -> list[bool]:
    """Returns for each decision about some rows whether int8 leaves it unchanged.

    Raises:
        DataError: There is no decision, or the predictions cannot show whether the models agree.
    """
    expected = predictions_by_head(model, rows)
    actual = predictions_by_head(model, rows, forward_fn=int8_logits(model, ranges))
    kept = agreements(model, expected, actual)
    if not kept:
        raise DataError("the rows have nothing to predict, so int8 cannot be compared with float32. Pass other rows")
    return kept
