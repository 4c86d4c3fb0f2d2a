"""The model card: README.md beside a trained model, as the hub reads it.

Owns what a card says, in which order, and when a README.md may be replaced. What it says is what the run's files say:
nothing is guessed, and what nobody stated is called unknown. The same run always gives the same card.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_tasks.cards.facts import Facts, Split, read_facts
from bert_tasks.cards.markdown import code, plain, table, visible
from bert_tasks.cards.usage import with_bert_tasks, with_transformers
from bert_tasks.checkpoints.hub import PACKAGE
from bert_tasks.errors import UsageError
from bert_tasks.paths import is_file, is_link, lexists
from bert_tasks.recipe_toml import to_toml
from bert_tasks.tasks.base import NO_STOCK_HEAD
from bert_tasks.training import outputs
from bert_tasks.training.signing import is_ours, signed

CARD = outputs.CARD
# What the hub calls the tasks.
PIPELINES = {
    "sequence-classification": "text-classification",
    "pair-classification": "text-classification",
    "token-classification": "token-classification",
    "span-extraction": "question-answering",
}
_MOST_LABELS = 100
_UNKNOWN = "unknown"


def write_card(run: str | Path, *, languages: Sequence[str] | None = None, licence: str | None = None) -> Path:
    """Writes the card of a finished run into its model folder.

    A card of ours is replaced; one that was edited, or another README.md, is not.

    Args:
        languages: ISO codes of the texts, such as "en"; None: as in the card that is replaced, if it states any.
        licence: of the model, as the hub names it (apache-2.0); None likewise.

    Raises:
        UsageError: there is no finished run, or there is a README.md that is not ours.
        CheckpointError: the model cannot be read or the card cannot be written.
    """
    folder = Path(run)
    facts, path = read_facts(folder), folder / outputs.MODEL / CARD
    stated = _stated(path)
    for name, value in (("language", languages), ("license", None if licence is None else [licence])):
        if value is not None and not all(text.strip() for text in value):
            raise UsageError(f"the {name} is empty: state one, such as en or apache-2.0, or leave it out")
    if languages is not None:
        stated["language"] = [visible(code) for code in languages]
    if licence is not None:
        stated["license"] = visible(licence)
    text = card_text(facts, stated)
    if not is_file(path) or path.read_text(encoding="utf-8") != text:
        outputs.write_text(path, text)
    for leftover in path.parent.glob(f".{CARD}.tmp-*"):  # of a process that was killed here
        leftover.unlink()
    return path


def card_text(facts: Facts, stated: Mapping[str, Any]) -> str:
    """The whole card. ``stated``: what only a person can say, ``language`` and ``license``."""
    from huggingface_hub import ModelCard

    header = _header(facts, stated).to_yaml()
    body = "\n\n".join(_sections(facts, stated))
    return signed(ModelCard(f"---\n{header}\n---\n\n{body}\n").content)


def _stated(path: Path) -> dict[str, Any]:
    """Language and licence of the card that will be replaced."""
    from huggingface_hub import ModelCard

    if not lexists(path):
        return {}
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError:
        text = ""
    if is_link(path) or not is_ours(text):
        raise UsageError(f"{path} was written or edited by somebody: it is kept; move it away to get a new card")
    data = dict(vars(ModelCard(text).data))
    return {key: data[key] for key in ("language", "license") if data.get(key) is not None}


def _header(facts: Facts, stated: Mapping[str, Any]) -> Any:
    from huggingface_hub import ModelCardData

    results = [result for split in _validation(facts) for result in _results(facts, split)]
    hub_sets = [visible(str(split.hub["dataset"])) for split in facts.splits if split.hub is not None]
    known: dict[str, Any] = {
        "language": stated.get("language"),
        "license": stated.get("license"),
        "library_name": "transformers" if facts.is_stock_head else "bert-tasks",
        "pipeline_tag": PIPELINES.get(facts.task),
        "tags": ["bert-tasks", visible(facts.family)],
        "base_model": visible(str(facts.base["name"])) if facts.is_hub_base else None,
        "datasets": list(dict.fromkeys(hub_sets)) if hub_sets else None,
        "metrics": sorted({result.metric_type for result in results}) if results else None,
    }
    index: dict[str, Any] = {"model_name": visible(_title(facts)), "eval_results": results} if results else {}
    return ModelCardData(**{key: value for key, value in known.items() if value is not None}, **index)


def _results(facts: Facts, split: Split) -> Iterator[Any]:
    from huggingface_hub import EvalResult

    hub = {} if split.hub is None else split.hub
    for name, value in facts.overall(split).items():
        if facts.is_score(name) and value is not None and math.isfinite(value):
            yield EvalResult(
                task_type=PIPELINES.get(facts.task, visible(facts.task)),
                dataset_type=visible(str(hub.get("dataset", "local"))),
                dataset_name=visible(split.source),
                dataset_config=None if hub.get("config") is None else visible(str(hub["config"])),
                dataset_split=visible(str(hub.get("split", split.name))),
                dataset_revision=hub.get("commit"),
                dataset_args={"fingerprint": split.fingerprint},
                metric_type=visible(name),
                metric_value=value,
            )


def _validation(facts: Facts) -> list[Split]:
    return [split for split in facts.splits if split.name != "train"]


def _title(facts: Facts) -> str:
    base = facts.base_name
    if base is None:
        return facts.task
    return f"{base.split('/')[-1] if facts.is_hub_base else base.removeprefix(PACKAGE).split('/')[0]} {facts.task}"


def _sections(facts: Facts, stated: Mapping[str, Any]) -> Iterator[str]:
    yield f"# {plain(_title(facts))}"
    yield _introduction(facts, stated)
    yield from _usage(facts)
    if facts.labels:
        yield "## Labels"
        yield _labels(facts)
    yield "## Results"
    yield (
        "On the validation rows, which also chose the weights (and tuned the thresholds, if there are any): "
        "expect somewhat less on other rows."
    )
    for split in _validation(facts):
        yield from _metrics(facts, split)
    yield "## Data"
    yield table(["rows of", "source", "rows", "revision", "licence", "fingerprint (sha256)"], map(_data, facts.splits))
    yield from _training(facts)
    yield "## Limits"
    yield "\n".join(f"- {line}" for line in _limits(facts))
    yield "## Versions"
    versions = {**facts.run.get("versions", {}), "python": facts.run.get("python", _UNKNOWN)}
    yield table(["package", "version"], versions.items())


def _introduction(facts: Facts, stated: Mapping[str, Any]) -> str:
    languages = stated.get("language", [])
    spoken = [languages] if isinstance(languages, str) else languages
    rows = {
        "task": facts.task,
        "architecture": f"{facts.family} ({facts.architecture})",
        "base model": _base(facts),
        "languages": ", ".join(spoken) if spoken else f"{_UNKNOWN} (not stated)",
        "licence": stated.get("license", f"{_UNKNOWN} (not stated); those of the base model and the data count too"),
    }
    return table(["", ""], rows.items())


def _base(facts: Facts) -> str:
    if facts.base_name is None:
        return _UNKNOWN if facts.base.get("name") is None else "a local folder, which is not named here"
    revision = facts.base.get("revision")
    asked = "" if revision is None else f"revision {revision}, "
    return f"{facts.base_name} ({asked}commit {facts.base['commit']})" if facts.is_hub_base else facts.base_name


def _usage(facts: Facts) -> Iterator[str]:
    yield "## Use"
    ours = with_bert_tasks(facts.task)
    if ours is not None:
        yield "With bert_tasks, which has the labels, lengths and thresholds from this folder:"
        yield code("python", ours)
    else:
        yield "The task is not built into bert_tasks: load the model with its class, which the author has."
    if facts.is_stock_head:
        yield "With transformers, which gives the same logits:"
    else:
        yield NO_STOCK_HEAD
        yield _part_for_transformers(facts)
    yield code("python", with_transformers(facts.task, facts.head))


def _part_for_transformers(facts: Facts) -> str:
    if facts.head is None:
        return (
            "The head is in task_head.safetensors; transformers' AutoModel opens the folder as the encoder and gives "
            "the same hidden states:"
        )
    return (
        "A part of the head, the CRF, is in task_head.safetensors; without it transformers gives the scores of single "
        "tags, whose ids are those of the table of labels:"
    )


def _labels(facts: Facts) -> str:
    thresholds = facts.entry.get("thresholds", [])
    shown = list(enumerate(facts.labels))[:_MOST_LABELS]
    more = len(facts.labels) - len(shown)
    tail = f"\n\nand {more} more: config.json has all." if more else ""
    if len(thresholds) != len(facts.labels):
        return table(["id", "label"], shown) + tail
    return table(["id", "label", "threshold"], [(*row, f"{thresholds[row[0]]:.4g}") for row in shown]) + tail


def _metrics(facts: Facts, split: Split) -> Iterator[str]:
    yield f"Metrics on {plain(split.name)} ({plain(split.source)}):"
    yield table(["metric", "value"], ((name, _number(value)) for name, value in facts.overall(split).items()))
    by_class = facts.by_class(split)
    if by_class:
        yield "By class:"
        yield table(["metric", "value"], ((name, _number(value)) for name, value in by_class.items()))


def _number(value: float | None) -> str:
    return "not a number" if value is None or not math.isfinite(value) else f"{value:.6g}"


def _data(split: Split) -> tuple[object, ...]:
    hub = {} if split.hub is None else split.hub
    rows = _UNKNOWN if split.rows is None else split.rows
    known = [_UNKNOWN if hub.get(key) is None else hub[key] for key in ("commit", "licence")]
    revision = known[0] if hub else "a local file"
    return (split.name, split.source, rows, revision, known[1], split.fingerprint)


def _training(facts: Facts) -> Iterator[str]:
    run, summary = facts.run, facts.summary
    yield "## Training"
    early = ", stopped early" if summary.get("stopped_early") else ""
    yield (
        f"{run.get('rows', _UNKNOWN)} rows, {summary.get('steps', _UNKNOWN)} optimizer steps{early}; these weights are "
        f"those after step {summary.get('best_step', _UNKNOWN)}. Seed {run.get('seed', _UNKNOWN)}, "
        f"{run.get('processes', _UNKNOWN)} process(es) on {plain(run.get('device', _UNKNOWN))}."
    )
    if facts.recipe is not None:
        yield "The recipe, with file names for paths:"
        yield code("toml", _ascii(to_toml(facts.recipe)))
    else:
        sections = ("optim", "run")
        stated = {key: value for key, value in run["settings"].items() if key.partition(".")[0] in sections}
        yield "The settings:"
        yield code("json", json.dumps(stated, indent=2))
    yield "What config.json says of the task (settings, thresholds):"
    yield code("json", json.dumps(facts.entry, indent=2, sort_keys=True))


def _ascii(toml: str) -> str:
    """TOML with escapes for what is not printable, which only its strings hold."""
    return "".join(c if c == "\n" or c.isprintable() else f"\\U{ord(c):08x}" for c in toml)


def _limits(facts: Facts) -> Iterator[str]:
    length = facts.entry.get("settings", {}).get("max_length")
    if isinstance(length, int):
        yield f"A window has at most {length} tokens, special tokens included."
    if facts.entry.get("settings", {}).get("long_texts") == "truncate":
        yield "Longer texts are cut, not read in windows."
    yield f"It was trained and measured on the rows above only ({plain(facts.task)}); other sources were not tried."
    yield "Whether it treats groups of people differently was not measured."
    yield "A score is what the model gives, not a calibrated probability."
