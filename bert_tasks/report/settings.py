"""What was run: the settings of a run in groups, when and on what it was trained, and the command that repeats it."""

import shlex
from collections.abc import Mapping

from bert_tasks.report.collect import Run
from bert_tasks.training import files as outputs

# The keys of run.json's settings that a page shows, by their names on the page.
_OF_MODEL = {
    "layers of the checkpoint": "model.layers",
    "maximum length in tokens": "settings.max_length",
    "teacher": "teacher.name",
    "temperature": "teacher.temperature",
    "weight of the teacher": "teacher.weight",
}
_OF_OPTIMISATION = {
    "epochs": "optim.epochs",
    "steps at most": "optim.max_steps",
    "batch size": "optim.batch_size",
    "tokens of a batch": "optim.batch_tokens",
    "learning rate": "optim.learning_rate",
    "schedule": "optim.lr_scheduler_type",
    "warm-up ratio": "optim.warmup_ratio",
    "weight decay": "optim.weight_decay",
    "mixed precision": "optim.mixed_precision",
    "metric for best model": "run.metric_for_best_model",
}


def setting_groups(run: Run) -> dict[str, dict[str, str]]:
    """Returns the names and values of what was run, without those that are not set, in three groups by title."""
    groups = {
        "Data": _data_properties(run),
        "Model and task": _model_properties(run),
        "Optimisation and run": _run_properties(run),
    }
    shown: dict[str, dict[str, str]] = {}
    for title, properties in groups.items():
        shown[title] = {name: str(value) for name, value in properties.items() if value is not None}
    return shown


def repeat_command(run: Run) -> str | None:
    """Returns the command that repeats a run, or the first fold of a cross-validation. None without a recipe."""
    if run.recipe is None:
        return None
    folder = run.folder if run.folds is None else run.folder / "fold-1"
    program = "bert-tasks"
    if run.metadata.processes > 1:
        program = f"torchrun --nproc_per_node {run.metadata.processes} -m bert_tasks"
    recipe = shlex.quote(str(folder / outputs.RECIPE))
    return f"{program} train {recipe} --output-dir {shlex.quote(f'{folder}-again')}"


def circumstances(run: Run) -> list[str]:
    """Returns when, how long and on what device the run was trained, as far as it has recorded them."""
    metadata = run.metadata
    parts = []
    if metadata.started is not None:
        parts.append(f"started {metadata.started} UTC")
    if run.summary is not None:
        parts.append(f"trained for {duration(run.summary.train_seconds)}")
    return [*parts, f"on {_devices(run)}"]


def duration(seconds: float) -> str:
    """Returns a time in its two largest units."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_of_hour = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes_of_hour} min"
    if minutes:
        return f"{minutes} min {rest} s"
    return f"{rest} s"


def _devices(run: Run) -> str:
    """Returns the number of processes, and the name of the GPU or of the processor that each of them used."""
    metadata = run.metadata
    name = metadata.device_name
    if name is None and metadata.device == "cpu":
        name = metadata.cpu
    devices = f"{metadata.processes} x {metadata.device}"
    if name is None:
        return devices
    return f"{devices}, {name}"


def _data_properties(run: Run) -> dict[str, object]:
    metadata = run.metadata
    properties: dict[str, object] = {}
    for name, split in metadata.data.items():
        properties[f"{name} rows from"] = split.source
    for name, split in metadata.data.items():
        properties[f"{name} fingerprint"] = split.fingerprint[:12]
    properties["training rows"] = f"{metadata.rows:,}"
    if run.folds is not None:
        properties["folds"] = run.folds.summary
    return properties


def _model_properties(run: Run) -> dict[str, object]:
    metadata = run.metadata
    properties: dict[str, object] = {"task": metadata.task, "model": metadata.settings.get("model.name")}
    if run.folds is not None:
        properties["models"] = f"one per fold, {run.folder}/fold-N (first one below)"
    return {**properties, **_chosen(_OF_MODEL, metadata.settings)}


def _run_properties(run: Run) -> dict[str, object]:
    metadata = run.metadata
    settings = _chosen(_OF_OPTIMISATION, metadata.settings)
    # A limit of steps decides how long a run is, and the number of epochs then says nothing.
    if settings["steps at most"] is not None:
        settings["epochs"] = None
    if metadata.settings.get("optim.linear_probe"):
        settings = {"optimizer": "scikit-learn (linear probe)"}
    properties: dict[str, object] = {"steps": f"{metadata.steps:,}"}
    if run.summary is not None:
        properties["best model after step"] = f"{run.summary.best_step:,}"
        properties["training time"] = duration(run.summary.train_seconds)
        properties["stopped early"] = "yes" if run.summary.stopped_early else "no"
    for event in run.events:
        if event.event == "agreement":
            shares = []
            for name, share in event.agreement.items():
                on_set = f" on {name}" if name else ""
                shares.append(f"{share:.1%}{on_set}")
            properties["predictions as the teacher's"] = ", ".join(shares)
    return {
        **properties,
        **settings,
        "seed": metadata.seed,
        "processes": f"{metadata.processes} x {metadata.device}",
        "attention": metadata.attention,
        "machine": metadata.platform,
        "python": metadata.python,
        **metadata.versions,
    }


def _chosen(names: Mapping[str, str], settings: Mapping[str, object]) -> dict[str, object]:
    """Returns the values of some settings by their names on the page."""
    return {name: settings.get(key) for name, key in names.items()}
