"""Writes the tables of a page, and the README's figures and chart of speed, from the files in benchmarks/results.

    python benchmarks/tables.py
    python benchmarks/tables.py --check   # exits with 1 if a page is not what the results say

``FILES`` names the results that the pages show. A page marks where a table begins (``<!--table:NAME-->``) and ends
(``<!--end-->``). Speeds have two significant digits. A ratio is the median over runs. The interval of a difference of
means is Welch's.
"""

import argparse
import json
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/benchmarks.md", "docs/comparison.md")
CHART = "docs/images/speed.svg"
FILES = {
    "training": ("train_throughput_epyc_zen3.json",),
    "prediction": ("predict_throughput_epyc_zen4.json", "embed_throughput_epyc_zen4.json"),
    "accumulation": ("accumulation.json",),
    "quality": ("quality.jsonl", "quality_rounded.jsonl"),
    "distillation": ("quality_distillation.jsonl",),
}
FILES["speed"] = (FILES["training"][0], FILES["prediction"][0])
WITHOUT_CAPTION = ("speed", "accumulation")
GENERATIONS = {
    "family 25, model 1": "Zen 3",
    "family 25, model 17": "Zen 4",
    "family 26, model 2": "Zen 5",
}  # of processors with the same name
DATA = {"sst2": "SST-2", "stsb": "STS-B", "conll2003": "CoNLL-2003"}
MODELS = {"embedded": "all-MiniLM-L6-v2", "bert-base": "BERT-base"}
OURS = "ours"
TRAINING_SIDES = {
    OURS: "bert_tasks",
    "grouped": "Trainer, length-grouped batches",
    "default": "Trainer, default",
    "compiled": "Trainer, length-grouped, `torch_compile`",
    "routed": "Trainer, length-grouped, oneDNN",
}
WAYS = {"1 x 16": "1 batch of 16", "4 x 4": "4 micro-batches of 4", "2 processes x 8": "2 processes with 8 each"}
PRECISIONS = {"": "float32", " bf16": "bfloat16", " int8": "int8"}
PREDICTION_SIDES = {
    "bert_tasks": "bert_tasks",
    "pipeline()": "transformers' `pipeline()`",
    "sorted loop": "transformers, length-sorted batches",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
}
EMBEDDING_SIDES = {
    "bert_tasks": "bert_tasks",
    "sentence-transformers": "sentence-transformers, default batch size",
    "the same, fastest batch size": "sentence-transformers, best of one try of each batch size",
}
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
    name: str = next(values[name] for name in ("cpu", "processor") if name in values).partition(" (AVX")[0]
    if values.get("cpu_model") not in GENERATIONS:
        return name
    return f"{name}, {GENERATIONS[values['cpu_model']]}"


def caption(result: Result | Lines) -> str:
    """Returns the processor, the threads, the date and the commit, as far as the file records them."""
    if isinstance(result, list):
        return f"{len(result)} runs"
    fields = facts(result)
    templates = {"threads": "{} threads", "date": "{}", "commit": "{}"}
    values = [text.format(fields[name]) for name, text in templates.items() if name in fields]
    return ", ".join([processor(result), *values])


def times(turns: Lines, name: str) -> list[float]:
    return [turn[name] for turn in turns]


def run_times(turns: Lines) -> list[float]:
    """Returns the seconds of both epochs."""
    return [turn["first_epoch"] + turn["steady"] for turn in turns]


def quartiles(values: Sequence[float]) -> str:
    """Returns the median, and the quartiles in brackets."""
    low, _, high = statistics.quantiles(values, n=4)
    return f"{number(statistics.median(values))} ({number(low)} to {number(high)})"


def training(result: Result) -> list[str]:
    """Returns a row for each data set and program: the seconds of each epoch, the ratio of both epochs, and memory."""
    rows = []
    for workload, figures in result["figures"].items():
        first = [DATA[workload]]
        for side, label in {**TRAINING_SIDES, "bound": "lower bound"}.items():
            if side not in figures:
                continue
            turns, ours = run_times(figures[side]), run_times(figures[OURS])
            cells = [quartiles(times(figures[side], name)) for name in ("first_epoch", "steady")]
            factors = [theirs / baseline for theirs, baseline in zip(turns, ours, strict=True)]
            spread = f"{number(statistics.median(factors))} ({number(min(factors))} to {number(max(factors))})"
            cells.append("" if side == OURS else spread)
            peak = number(statistics.median(times(figures[side], "peak_rss_mib")))
            cells.append("" if side == "bound" else peak)
            rows.append([*first, label, *cells])
            first = [""]
    head = ["data", "program", "first epoch, s", "second epoch, s", "time of both, in times of bert_tasks", "peak MiB"]
    return table(head, *rows)


def prediction(result: Result, embedding: Result) -> list[str]:
    """Returns a row for each precision and program: rows/s, the ratio in the same precision, and equal labels."""
    seconds, rows = result["seconds"], []
    for suffix, precision in PRECISIONS.items():
        ours = seconds["bert_tasks" + suffix]
        for name, label in PREDICTION_SIDES.items():
            side = result["sides"].get(name + suffix)
            if side is None:
                continue
            low, median, high = map(number, side["rows_per_second"])
            factor = "" if name == "bert_tasks" else number(ratio(seconds[name + suffix], ours))
            equal = f"{100 * side['equal_labels']:.1f} %"
            rows.append([precision, label, f"{median} ({low} to {high})", factor, equal])
    head = ["precision", "program", "rows/s", "time, in times of bert_tasks", "labels equal to float32"]
    embeddings = []
    for name, side in embedding["sides"].items():
        low, median, high = map(number, side["texts_per_second"])
        factor = "" if name == "bert_tasks" else number(side["ours_is"])
        embeddings.append([EMBEDDING_SIDES[name], f"{median} ({low} to {high})", factor])
    return [
        *table(head, *rows),
        "",
        f"Embeddings of the same sentences ({processor(embedding)}, {embedding['threads']} threads):",
        "",
        *table(["program", "texts/s", "time, in times of bert_tasks"], *embeddings),
    ]


def speed(train: Result, predict: Result) -> list[str]:
    """Returns the README's sentences."""
    rivals = {
        "grouped": "with length-grouped batches",
        "default": "at its default",
        "compiled": "with such batches and `torch_compile`",
    }
    claims = []
    for side, words in rivals.items():
        measured = [figures for figures in train["figures"].values() if side in figures]
        if measured:
            factors = [ratio(run_times(figures[side]), run_times(figures[OURS])) for figures in measured]
            claims.append(f"{span(factors)} times as fast as the Trainer {words}")
    loop, pipeline = (
        number(ratio(predict["seconds"][name], predict["seconds"]["bert_tasks"]))
        for name in ("sorted loop", "pipeline()")
    )
    options = train["options"]
    data = " and ".join(DATA[workload] for workload in train["figures"])
    *others, last = claims
    model = MODELS[options["shape"]]
    fitting = f"Fine-tuning {model} for two epochs on 3,200 rows of {data} is {', '.join(others)}, and {last}"
    fitting_runs = f"{processor(train)}, {options['threads']} threads, medians of {options['repeats']} interleaved runs"
    predicting = (
        f"Predicting 872 sentences is {loop} times as fast as a loop of transformers over length-sorted batches, and "
        f"{pipeline} times as fast as `pipeline()` at its default batch size of 1"
    )
    predicting_runs = f"{processor(predict)}, {len(predict['seconds']['bert_tasks'])} runs"
    more = "[Benchmarks](docs/benchmarks.md) has the spread, memory, other processors, and what does not profit."
    return textwrap.wrap(f"{fitting} ({fitting_runs}). {predicting} ({predicting_runs}). {more}", 140)


def accumulation(result: Result) -> list[str]:
    """Returns the loss and the norm of the gradient of each way to make a step."""
    steps = [result["steps"][side] for side in ("bert_tasks", "transformers")]
    rows = [
        [label, *("{loss:.2f}, {grad_norm:.2f}".format(**side[name]) for side in steps)] for name, label in WAYS.items()
    ]
    return table(["batch", "bert_tasks", "Trainer"], *rows)


def chart(result: Result) -> str:
    """Returns an SVG image: for each data set a bar of each program's median tokens/s, with a line over all runs."""
    bars = []
    for workload, figures in result["figures"].items():
        name = DATA[workload]
        for side, label in TRAINING_SIDES.items():
            if side in figures:
                speeds = [
                    2 * turn["tokens"] / seconds
                    for turn, seconds in zip(figures[side], run_times(figures[side]), strict=True)
                ]
                bars.append((name, side, label.replace("`", ""), speeds))
                name = ""
    scale = 300 / max(max(speeds) for *_, speeds in bars)
    lines, top = [], 40
    for name, side, label, speeds in bars:
        top += 34 if name else 22
        median, low, high = (round(scale * value) for value in (statistics.median(speeds), min(speeds), max(speeds)))
        colour = "#2563eb" if side == OURS else "#9ca3af"
        lines += [
            f'<text x="8" y="{top - 8}" font-weight="bold">{name}</text>' if name else "",
            f'<text x="268" y="{top + 13}" text-anchor="end">{label}</text>',
            f'<rect x="276" y="{top}" width="{median}" height="17" fill="{colour}"/>',
            f'<path d="M{276 + low} {top + 8}H{276 + high}" stroke="#111827"/>',
            f'<text x="{284 + max(median, high)}" y="{top + 13}">{number(statistics.median(speeds))}</text>',
        ]
    height = top + 34
    options = result["options"]
    title = f"Fine-tuning {MODELS[options['shape']]}, tokens/s, two epochs"
    subtitle = (
        f"{processor(result)}, {options['threads']} threads, {options['repeats']} runs: median, and range as a line"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="640" height="{height}" viewBox="0 0 640 {height}"'
    head += ' font-family="sans-serif" font-size="13" fill="#111827">'
    background = f'<rect width="640" height="{height}" fill="#ffffff"/>'
    headings = [f'<text x="8" y="20" font-size="15">{title}</text>', f'<text x="8" y="38">{subtitle}</text>']
    return "\n".join([head, background, *headings, *filter(None, lines), "</svg>\n"])


def seeds(values: Sequence[float]) -> str:
    return ", ".join(str(round(value, 2)) for value in values)


def difference(values: Sequence[float], others: Sequence[float]) -> str:
    """Returns the difference of the means with its 95 % interval."""
    from scipy.stats import ttest_ind  # here: its import takes 2 s

    # Welch's test: the sides may have different variances.
    low, high = ttest_ind(values, others, equal_var=False).confidence_interval()
    mean = statistics.mean(values) - statistics.mean(others)
    # `z` prints a rounded minus zero as +0.0.
    return f"{mean:+z.1f} [{low:+z.1f}, {high:+z.1f}]"


def quality_row(label: str, sides: Sequence[Sequence[float]]) -> list[str]:
    """Returns the cells of a score: each seed of the Trainer and of bert_tasks, their means and the difference."""
    spreads = [f"{statistics.mean(side):.1f}±{statistics.stdev(side):.1f}" for side in sides]
    theirs, ours = sides
    return [label, seeds(theirs), seeds(ours), " and ".join(spreads), difference(ours, theirs)]


def medians(sides: Sequence[Sequence[float]]) -> str:
    """Returns the median of each side, or nothing if a side was not measured."""
    return " and ".join(number(statistics.median(values)) for values in sides) if all(sides) else ""


def quality(runs: Lines, rounded: Lines) -> list[str]:
    """Returns a row for each task: the scores of the Trainer and of bert_tasks, and the memory of their processes."""
    rows = []
    for label, (task, metric) in SCORES.items():
        lines = sorted((run for run in [*runs, *rounded] if run["task"] == task), key=lambda run: int(run["seed"]))
        sides = [[line for line in lines if line["side"] == name] for name in QUALITY_SIDES]
        batches = " and ".join(sorted({line["batches"] for line in sides[0]}))
        peaks = medians([[line["peak_mib"] for line in side if "peak_mib" in line] for side in sides])
        scores = [[100 * line["metrics"][metric] for line in side] for side in sides]
        rows.append([*quality_row(label, scores), batches, peaks])
    head = ["score", "Trainer", "bert_tasks", "mean±sd", "difference", "batches of the Trainer", "peak MiB"]
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
    "prediction": prediction,
    "quality": quality,
    "distillation": distillation,
    "speed": speed,
    "accumulation": accumulation,
}
MARKED = re.compile(r"(<!--table:([\w-]+)-->\n)(?:.*?\n)??(<!--end-->)", re.DOTALL)


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
    return MARKED.sub(lambda match: f"{match[1]}{rendered(match[2])}\n{match[3]}", text)


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
