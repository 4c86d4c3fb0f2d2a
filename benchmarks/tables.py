"""Writes the tables of two pages, and the README's figures and chart of speed, from the files in benchmarks/results.

    python benchmarks/tables.py
    python benchmarks/tables.py --check   # exits with 1 if a page is not what the results say

``FILES`` names the results that the pages show. A page marks where a table begins (``<!--table:NAME-->``) and ends
(``<!--end-->``). Speeds have two significant digits. A ratio is the median over turns. The interval of a difference of
means is Welch's.
"""

import argparse
import json
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/performance.md", "docs/quality.md")
CHART = "docs/images/speed.svg"
FILES = {
    "training": (
        "train_throughput_epyc_zen4_bert_base.json",
        "train_throughput_epyc_zen4.json",
    ),
    "pre-training": ("pretrain_throughput_epyc_zen4.json",),
    "prediction": ("predict_throughput_epyc_zen4.json", "embed_throughput_epyc_zen4.json"),
    "memory": ("vocabulary_rows_epyc_zen4.json", "long_inputs_epyc_zen4.json"),
    "accumulation": ("accumulation.json",),
    "gpu": ("gpu_h100.json",),
    "quality": ("quality.jsonl", "quality_rounded.jsonl", "quality_pretraining.json"),
    "distillation": ("quality_distillation.jsonl",),
}
FILES["quality"] += FILES["pre-training"]
FILES["speed"] = (FILES["training"][0], FILES["prediction"][0], *FILES["gpu"], "gpu_h100_short_epochs.json")
WITHOUT_CAPTION = ("speed", "accumulation")
GENERATIONS = {"family 25, model 17": "Zen 4", "family 26, model 2": "Zen 5"}  # of processors with the same name
DATA = {"stsb": "STS-B", "rte": "RTE", "sst2": "SST-2", "conll2003": "CoNLL-2003", "squad": "SQuAD"}
MODELS = {"embedded": "MiniLM", "bert-base": "BERT-base"}
PRE_TRAINING = {"sparse": "Trainer, masked tokens only", "grouped": "Trainer, run_mlm.py"}
WAYS = {"1 x 16": "1 batch of 16", "4 x 4": "4 micro-batches of 4", "2 processes x 8": "2 processes with 8 each"}
LIBRARIES = {"pipeline()": "`pipeline()`", "openvino": "OpenVINO"}
EMBEDDING = ("sentence-transformers", "the same, fastest batch size")
QUALITY_SIDES = ("transformers", "bert_tasks")
SCORES = {
    "SST-2, 1 epoch, accuracy": ("sst2", "accuracy"),
    "CoLA, 3 epochs, MCC": ("cola", "matthews_correlation"),
    "STS-B, 3 epochs, Pearson": ("stsb", "pearson"),
    "CoNLL-2003, 2 epochs, test entity F1": ("conll2003", "test/overall_f1"),
}
DISTILLATION_SIDES = ("teacher", "alone", "student")
JUDGED = {
    "SST-2, held-out rows, accuracy": ("sst2", "held_out"),
    "CoNLL-2003, test, entity F1": ("conll2003", "test"),
}

Result = dict[str, Any]
Lines = list[Result]


def number(value: float) -> str:
    """Formats a number with two significant digits."""
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{float(f'{mantissa}e{exponent}'):,.{max(1 - int(exponent), 0)}f}"


def ratio(values: Iterable[float], ours: Iterable[float]) -> float:
    # Turn by turn, because a machine that is slower for a while slows both sides of a turn.
    return statistics.median(value / baseline for value, baseline in zip(values, ours, strict=True))


def span(values: Sequence[float]) -> str:
    low, high = number(min(values)), number(max(values))
    return low if low == high else f"{low} to {high}"


def table(*rows: Sequence[str]) -> list[str]:
    """Returns the lines of a Markdown table, whose first row is the header."""
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return [head, "|---" * len(rows[0]) + "|", *body]


def facts(result: Result) -> Result:
    """Returns what a file says of the machine, together with what it says of the run."""
    values = dict(result)
    for section in ("environment", "machine", "options"):
        values |= result.get(section, {})
    return values


def processor(result: Result) -> str:
    values = facts(result)
    name: str = next(values[name] for name in ("device", "cpu", "processor") if name in values).partition(" (AVX")[0]
    is_named = "device" not in values and values.get("cpu_model") in GENERATIONS
    return f"{name}, {GENERATIONS[values['cpu_model']]}" if is_named else name


def caption(result: Result | Lines) -> str:
    """Returns the processor, the threads, the date and the commit, as far as the file records them."""
    if isinstance(result, list):
        return f"{len(result)} runs"
    fields = facts(result)
    templates = {"threads": "{} threads", "date": "{}", "commit": "{}"}
    values = [text.format(fields[name]) for name, text in templates.items() if name in fields]
    return ", ".join([processor(result), *values])


def training_cells(result: Result) -> dict[str, dict[str, float]]:
    """Returns tokens/s, the speed-up and the share of the limit, if it was measured, by data set."""
    cells: dict[str, dict[str, float]] = {}
    for row in result["results"]:
        seconds = row["seconds"]
        tokens = row["tokens"] / statistics.median(seconds["ours"])
        values = {"tokens/s": tokens, "speed-up": ratio(seconds["grouped"], seconds["ours"])}
        if "limit" in seconds:
            values["limit"] = ratio(seconds["limit"], seconds["ours"])
        cells[row["workload"]] = values
    return cells


def training(*results: Result) -> list[str]:
    """Returns a row for each data set, and a group of columns for each file."""
    head, rows = ["tokens/s"], {name: [label] for name, label in DATA.items()}
    for result in results:
        cells = training_cells(result)
        titles = list(next(iter(cells.values())))
        options = result["options"]
        head += [f"{MODELS[options['shape']]}{', bf16' if options['bf16'] else ''}", *titles[1:]]
        for name, row in rows.items():
            row += [number(cells[name][title]) if name in cells else "" for title in titles]
    return table(head, *(row for row in rows.values() if any(row[1:])))


def pre_training(result: Result) -> list[str]:
    rows, ours = [], result["sides"]["ours"]
    for name, label in {"ours": "bert_tasks", **PRE_TRAINING}.items():
        side = result["sides"][name]
        speeds, baseline = ([run["tokens"] / seconds for seconds in run["seconds"]] for run in (side, ours))
        factors = [ratio(baseline, speeds), ours["peak_mib"] / side["peak_mib"]]
        factor, share = ["", ""] if side is ours else map(number, factors)
        rows.append([label, number(statistics.median(speeds)), factor, share])
    return table(["program", "tokens/s", "speed-up", "memory"], *rows)


def prediction(result: Result, embedding: Result) -> list[str]:
    precisions, ours = ("", " bf16", " int8"), "bert_tasks"
    names = [name for name in result["sides"] if not name.endswith((*precisions[1:], " graph"))]
    rows = []
    for name in names:
        cells = [LIBRARIES.get(name, name)]
        for precision in precisions:
            side, baseline = result["sides"].get(name + precision), result["seconds"].get(ours + precision)
            times = result["seconds"].get(name + precision)
            if side is None:
                cells.append("")
                continue
            cell = number(side["rows_per_second"][1])
            if name != ours and baseline and times:
                cell += f" ({number(ratio(times, baseline))})"
            cells.append(cell)
        rows.append(cells)
    sides = [result["sides"].get(ours + precision) for precision in precisions[1:]]
    changed = ["" if side is None else f"{number(100 * (1 - side['equal_labels']))}%" for side in sides]
    rows.append(["changed labels", "", *changed])
    factors = [number(embedding["sides"][name]["ours_is"]) for name in EMBEDDING]
    sentence = (
        f"Embeddings ({processor(embedding)}): {factors[0]} times as fast as sentence-transformers at its default "
        f"batch size, and {factors[1]} times at its fastest."
    )
    return [*table(["rows/s", "float32", "bf16", "int8"], *rows), "", sentence]


def memory(vocabulary: Result, long_text: Result) -> list[str]:
    training = (vocabulary["figures"]["fit"], vocabulary["figures"]["trainer"], "seconds_per_step", "peak_rss_mib")
    reading = (long_text["sides"]["bert_tasks"], long_text["sides"]["transformers"], "seconds", "mib")
    rows = []
    for label, (ours, theirs, time, peak) in {
        "training, XLM-RoBERTa base's shape": training,
        "8192 tokens, ModernBERT base's shape, above the weights": reading,
    }.items():
        peaks = [statistics.median(turn[peak] for turn in turns) for turns in (ours, theirs)]
        factor = ratio([turn[time] for turn in theirs], [turn[time] for turn in ours])
        rows.append([label, *map(number, peaks), number(peaks[0] / peaks[1]), number(factor)])
    return table(["peak MiB", "bert_tasks", "transformers", "memory", "speed-up"], *rows)


def gpu_cells(result: Result, workload: str) -> dict[tuple[str, str, int], tuple[Result, Result]]:
    """Returns our side and the fastest other one by shape, lengths and batch size."""
    sides: dict[tuple[str, str, int], dict[str, Result]] = {}
    for row in result["results"]:
        if row["kind"] == workload and "error" not in row and row["side"] != "ours eager":
            sides.setdefault((row["shape"], row["lengths"], row["batch_size"]), {})[row["side"]] = row
    return {
        cell: (rows.pop("ours"), max(rows.values(), key=lambda row: float(row["tokens_per_second"])))
        for cell, rows in sides.items()
        if "ours" in rows and len(rows) > 1
    }


def gpu_ratios(result: Result, workload: str) -> dict[tuple[str, str, int], float]:
    cells = gpu_cells(result, workload).items()
    return {cell: ours["tokens_per_second"] / theirs["tokens_per_second"] for cell, (ours, theirs) in cells}


def gpu(result: Result) -> list[str]:
    """Returns a row for each model, with ranges over data sets and batch sizes."""
    models: dict[str, list[tuple[float, float, float]]] = {}
    for (model, *_), (ours, theirs) in gpu_cells(result, "training").items():
        tokens, share = ours["tokens_per_second"], ours["reserved_gib"] / theirs["reserved_gib"]
        models.setdefault(model, []).append((tokens / 1000, tokens / theirs["tokens_per_second"], share))
    rows = [[model, *map(span, zip(*values, strict=True))] for model, values in models.items()]
    reading = list(gpu_ratios(result, "prediction").values())
    sentence = f"Prediction: {span(reading)} times a sorted loop, median {number(statistics.median(reading))}."
    return [*table(["1000 tokens/s", "bfloat16", "speed-up", "memory"], *rows), "", sentence]


def speed(train: Result, predict: Result, card: Result, short: Result) -> list[str]:
    """Returns the README's sentences."""
    ours = predict["seconds"]["bert_tasks"]
    loop, pipeline = (number(ratio(predict["seconds"][name], ours)) for name in ("sorted loop", "pipeline()"))
    fitting = span([cells["speed-up"] for cells in training_cells(train).values()])
    shares = [ours["reserved_gib"] / theirs["reserved_gib"] for ours, theirs in gpu_cells(card, "training").values()]
    fitting_gpu = list(gpu_ratios(card, "training").values())
    larger = [share for share in shares if share > 1]
    new_shapes = gpu_ratios(short, "training")["bert-base", "sst2", 32]
    return [
        f"On {train['options']['threads']} threads of an {processor(train)}, BERT-base trains {fitting} times as fast",
        "as in transformers' Trainer at its best (one run of 5 to 10 steps with random weights), and MiniLM predicts",
        f"{loop} times as fast as a loop over sorted texts ({pipeline} times `pipeline()`).",
        f"On an {processor(card)} (one run, random weights), models train",
        f"{span(fitting_gpu)} times as fast after the shapes of the batches were recorded.",
        f"In an epoch of 60 new shapes, which are recorded first, BERT-base trains {new_shapes:.2f} times as fast.",
        f"{len(larger)} of {len(shares)} cells need {span(larger)} times the memory",
        "([measurements](docs/performance.md#on-a-gpu)).",
    ]


def accumulation(result: Result) -> list[str]:
    """Returns the loss and the norm of the gradient of each way to make a step."""
    steps = [result["steps"][side] for side in ("bert_tasks", "transformers")]
    rows = [
        [label, *("{loss:.2f}, {grad_norm:.2f}".format(**side[name]) for side in steps)] for name, label in WAYS.items()
    ]
    return table(["batch", "bert_tasks", "Trainer"], *rows)


def chart(result: Result) -> str:
    """Returns an SVG image with two bars for each data set: tokens/s of bert_tasks and of the Trainer."""
    bars = []
    for row in result["results"]:
        for side, label in (("ours", "bert_tasks"), ("grouped", "Trainer")):
            speed = row["tokens"] / statistics.median(row["seconds"][side])
            bars.append((DATA[row["workload"]] if side == "ours" else "", label, speed))
    longest = max(speed for *_, speed in bars)
    lines = []
    for i, (name, label, speed) in enumerate(bars):
        top = 46 + 20 * i + 12 * (i // 2)
        width = round(360 * speed / longest)
        colour = "#2563eb" if label == "bert_tasks" else "#9ca3af"
        lines += [
            f'<text x="8" y="{top + 13}" font-weight="bold">{name}</text>' if name else "",
            f'<text x="178" y="{top + 13}" text-anchor="end">{label}</text>',
            f'<rect x="186" y="{top}" width="{width}" height="17" fill="{colour}"/>',
            f'<text x="{192 + width}" y="{top + 13}">{number(speed)}</text>',
        ]
    height = 52 + 20 * len(bars) + 6 * len(bars)
    options = result["options"]
    title = f"Fine-tuning {MODELS[options['shape']]}, tokens/s ({processor(result)}, {options['threads']} threads)"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="640" height="{height}" viewBox="0 0 640 {height}"'
    head += ' font-family="sans-serif" font-size="13" fill="#111827">'
    background = f'<rect width="640" height="{height}" fill="#ffffff"/>'
    heading = f'<text x="8" y="24" font-size="15">{title}</text>'
    return "\n".join([head, background, heading, *filter(None, lines), "</svg>\n"])


def seeds(values: Sequence[float]) -> str:
    return ", ".join(str(round(value, 2)) for value in values)


def difference(values: Sequence[float], others: Sequence[float], digits: int = 1) -> str:
    """Returns the difference of the means with its 95 % interval."""
    from scipy.stats import ttest_ind  # here: its import takes 2 s

    # Welch's test: the sides may have different variances.
    low, high = ttest_ind(values, others, equal_var=False).confidence_interval()
    mean = statistics.mean(values) - statistics.mean(others)
    # `z` prints a rounded minus zero as +0.0.
    return "{:+z.{digits}f} [{:+z.{digits}f}, {:+z.{digits}f}]".format(mean, low, high, digits=digits)


def quality_row(label: str, sides: Sequence[Sequence[float]], digits: int = 1) -> list[str]:
    """Returns the cells of a score: each seed of the Trainer and of bert_tasks, their means and the difference."""
    spreads = [f"{statistics.mean(side):.{digits}f}±{statistics.stdev(side):.{digits}f}" for side in sides]
    theirs, ours = sides
    return [label, seeds(theirs), seeds(ours), " and ".join(spreads), difference(ours, theirs, digits)]


def medians(sides: Sequence[Sequence[float]]) -> str:
    """Returns the median of each side, or nothing if a side was not measured."""
    return " and ".join(number(statistics.median(values)) for values in sides) if all(sides) else ""


def quality(runs: Lines, rounded: Lines, masked: Result, pretrain: Result) -> list[str]:
    """Returns a row for each task: the scores of the Trainer and of bert_tasks, minutes and memory of training."""
    rows = []
    for label, (task, metric) in SCORES.items():
        lines = sorted((run for run in [*runs, *rounded] if run["task"] == task), key=lambda run: int(run["seed"]))
        sides = [[line for line in lines if line["side"] == name] for name in QUALITY_SIDES]
        measured = [[line for line in side if "peak_mib" in line] for side in sides]  # on one machine, two threads
        minutes = medians([[line["train_seconds"] / 60 for line in side] for side in measured])
        peaks = medians([[line["peak_mib"] for line in side] for side in measured])
        scores = [[100 * line["metrics"][metric] for line in side] for side in sides]
        rows.append([*quality_row(label, scores), minutes, peaks])
    losses = [[run["loss"] for run in masked["metrics"][side]] for side in QUALITY_SIDES]
    peaks = medians([[pretrain["sides"][side]["peak_mib"]] for side in ("sparse", "ours")])
    rows.append([*quality_row("wikitext-2, 60 steps, loss of masked tokens", losses, digits=2), "", peaks])
    head = ["score", "Trainer", "bert_tasks", "mean±sd", "difference", "minutes", "peak MiB"]
    return table(head, *rows)


def distillation(runs: Lines) -> list[str]:
    rows = []
    for label, (task, metric) in JUDGED.items():
        lines = [[run for run in runs if (run["task"], run["side"]) == (task, side)] for side in DISTILLATION_SIDES]
        teacher, alone, student = ([100 * line["metrics"][metric] for line in side] for side in lines)
        speeds = [statistics.median(line["rows_per_second"] for line in side) for side in (lines[0], lines[2])]
        means = [difference(student, peer) for peer in (alone, teacher)]
        scores = map(seeds, (teacher, alone, student))
        rows.append([label, *scores, *means, " and ".join(map(number, speeds))])
    head = ["score", "teacher", "layers alone", "student", "student - alone", "student - teacher", "rows/s"]
    return table(head, *rows)


RENDERERS: dict[str, Callable[..., list[str]]] = {
    "training": training,
    "pre-training": pre_training,
    "prediction": prediction,
    "memory": memory,
    "gpu": gpu,
    "quality": quality,
    "distillation": distillation,
    "speed": speed,
    "accumulation": accumulation,
}
MARKED = re.compile(r"(<!--table:([\w-]+)-->\s).*?(\s<!--end-->)", re.DOTALL)


def read_result(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)


def rendered(name: str) -> str:
    """Returns a table below its caption, which links to the results."""
    paths = [ROOT / "benchmarks" / "results" / file for file in FILES[name]]
    results = [read_result(path) for path in paths]
    lines = RENDERERS[name](*results)
    if name not in WITHOUT_CAPTION:
        links: dict[str, str] = {}
        for result, path in zip(results, paths, strict=True):
            links.setdefault(caption(result), path.name)
        text = ", ".join(f"[{text}](../benchmarks/results/{file})" for text, file in links.items())
        lines = [f"*{text}*", "", *lines]
    return "\n".join(lines)


def updated(text: str) -> str:
    """Returns the text of a page with the tables that the results give."""
    return MARKED.sub(lambda match: f"{match[1]}{rendered(match[2])}{match[3]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a page is out of date")
    options = parser.parse_args()
    for path in (ROOT / name for name in (*PAGES, CHART)):
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        measured = read_result(ROOT / "benchmarks" / "results" / FILES["training"][0])
        expected = chart(measured) if path.suffix == ".svg" else updated(text)
        if expected == text:
            continue
        if options.check:
            raise SystemExit(f"{path} is not what the results say. Run `python benchmarks/tables.py`.")
        path.write_text(expected, encoding="utf-8")


if __name__ == "__main__":
    main()
