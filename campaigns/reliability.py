"""Runs the fault suite at full length and writes results/: a JSON for each class, and RELIABILITY.md.

    PYTHONPATH=tests:campaigns python -m reliability                 # all classes
    PYTHONPATH=tests:campaigns python -m reliability kills ranks     # some
    PYTHONPATH=tests:campaigns python -m reliability --document      # only the document, from the JSON files there are

A case is a test, or what a test says it tried (``record_property("cases", N)``).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).with_name("results")
DOCUMENT = FOLDER / "RELIABILITY.md"
VERSIONS = ("bert-tasks", "torch", "transformers", "accelerate", "safetensors")


@dataclass(frozen=True, kw_only=True)
class FaultClass:
    """``promise``: what holds; ``tests``: files, or tests (``file::name``) of one, that prove it; ``full``: what makes
    them run at full length."""

    promise: str
    tests: tuple[str, ...]
    full: dict[str, str] = field(default_factory=dict)


CLASSES = {
    "resume": FaultClass(
        promise="A run stopped after any step, of every kind of task, on one process and on two, ends with the "
        "weights, moments and logged losses of an uninterrupted run, bit for bit; a damaged checkpoint is named and "
        "the previous one is used.",
        tests=(
            "tests/training/test_resuming.py",
            "tests/training/test_resuming_processes.py",
            "tests/training/test_checkpoints.py",
        ),
        full={"BERT_TASKS_STOPS": "all"},
    ),
    "kills": FaultClass(
        promise="A run killed (SIGKILL) at random moments of its start, its training, its saving and its "
        "evaluation always resumes from a complete checkpoint, ends as if it had not been killed, and "
        "leaves no temporary files.",
        tests=("tests/faults/test_kills.py",),
        full={"BERT_TASKS_KILLS": "20", "BERT_TASKS_CHAINS": "5"},
    ),
    "signals": FaultClass(
        promise="SIGTERM and SIGINT save after the step within 10 seconds, print the command that resumes the run, and "
        "exit with 143 and 130; a second signal ends at once; two runs never share a folder.",
        tests=("tests/faults/test_signals.py",),
    ),
    "ranks": FaultClass(
        promise="A process of several that raises, is killed, leaves or hangs ends the job with its own message "
        "first; what was saved stays good. Two nodes train the same bits as two processes; another number of processes "
        "resumes with the same samples.",
        tests=("tests/faults/test_ranks.py", "tests/faults/test_nodes.py"),
    ),
    "disk": FaultClass(
        promise="A full disk, a read-only folder or a file in the way is named with what was needed; what was "
        "saved stays good; the umask decides who may read.",
        tests=("tests/faults/test_disk.py", "tests/test_storage.py", "tests/training/test_files.py"),
    ),
    "inputs": FaultClass(
        promise="Bad files are refused with every bad row named, or read as intended; nothing is dropped silently.",
        tests=(
            "tests/data/test_reading.py",
            "tests/data/test_columns.py",
            "tests/data/test_checks.py",
            "tests/data/test_conversion.py",
            "tests/data/test_conll.py",
            "tests/data/test_arrow_cache.py",
            "tests/recipe/test_errors.py",
        ),
    ),
    "payloads": FaultClass(
        promise="No code from a model folder, a checkpoint, a recipe's text or the working directory runs; "
        "hostile files are refused by name.",
        tests=(
            "tests/checkpoints/test_weights.py",
            "tests/checkpoints/test_tokenizers.py",
            "tests/checkpoints/test_hub.py",
            "tests/checkpoints/test_load.py",
            "tests/faults/test_trust.py",
        ),
    ),
    "network": FaultClass(
        promise="No command opens a connection that it was not asked for, and none leaves a file of telemetry or "
        "anything else of a library's own in the home folder.",
        tests=("tests/faults/test_network.py",),
    ),
    "terminal": FaultClass(
        promise="Whatever labels, columns, tensors, files and arguments are called, nothing acts on the terminal; a "
        "stream that cannot be written never ends a run, and only a command's own result may fail on it.",
        tests=("tests/faults/test_streams.py", "tests/cli/test_terminal.py", "tests/test_terminal.py"),
    ),
    "clients": FaultClass(
        promise="Slow, idle, vanishing and hostile clients of the server are refused or closed in time; nobody else's "
        "answer is lost or exchanged, and memory and open files do not grow.",
        tests=(
            "tests/serving/test_latency.py",
            "tests/serving/test_process.py::test_a_short_soak_loses_nothing_and_uses_no_more_memory_or_files",
        ),
    ),
    "fuzz": FaultClass(
        promise="Whatever a file or a request holds, readers, the recipe parser, the loaders of models, exports and "
        "checkpoints and the server read it or refuse it with an error of the package whose message does not act on a "
        "terminal.",
        tests=("tests/faults/test_damaged_files.py",),
    ),
    "guided": FaultClass(
        promise="The same files and bodies of requests, with edits that are guided by the lines of the package that "
        "they reach (atheris).",
        tests=("campaigns/guided_fuzzing.py",),
    ),
    "mutants": FaultClass(
        promise="A random fault in the code of the package (another comparison, operator, constant, default or return "
        "value, a negated condition, a dropped statement) makes a test of that part of the package fail. A failure is "
        "a fault that no test noticed; skipped are faults that change nothing anybody can see. In brackets is how many "
        "of the faults in each part of the package were killed.",
        tests=("campaigns/mutants.py",),
    ),
}

OWN_CAMPAIGN = ("fuzz", "guided", "mutants")


def run_class(name: str) -> dict[str, object]:
    """Runs the tests of a class; the counts, and what they were run with."""
    fault_class, began = CLASSES[name], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        pytest = Path(sys.executable).with_name("pytest")  # unlike -m, it leaves the source tree off the import path
        command = [
            pytest,
            "-q",
            "-m",
            "not gpu",
            *fault_class.tests,
            f"--junitxml={report}",
            "--tb=short",
            "-o",
            "junit_family=xunit1",
        ]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | fault_class.full, check=False)
        if done.returncode not in (0, 1):
            raise SystemExit(f"{name}: pytest ended with {done.returncode}")
        figures = counts(ElementTree.parse(report).getroot())
    environment = " ".join(f"{key}={value}" for key, value in fault_class.full.items())
    return {**figures, **provenance(f"{environment} pytest -m 'not gpu' {' '.join(fault_class.tests)}".strip(), began)}


def provenance(command: str, began: float) -> dict[str, object]:
    """What figures were made with. ``began``: of ``time.monotonic``."""
    return {
        "seconds": round(time.monotonic() - began),
        "commit": commit(),
        "command": command,
        "versions": {library: version(library) for library in VERSIONS},
    }


def write(name: str, figures: dict[str, object]) -> None:
    """The figures of a class, and the document anew."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    DOCUMENT.write_text(document(), encoding="utf-8")


def counts(report: ElementTree.Element) -> dict[str, object]:
    """Cases and failures of a JUnit report; details are the sums of what tests recorded."""
    cases = failures = skipped = 0
    details: Counter[str] = Counter()
    for case in report.iter("testcase"):
        if case.find("skipped") is not None:
            skipped += 1
            continue
        recorded = {p.get("name", ""): int(p.get("value", "0")) for p in case.iter("property")}
        details.update(recorded)
        cases += sum(recorded.values()) if recorded else 1
        failures += case.find("failure") is not None or case.find("error") is not None
    return {"cases": cases, "failures": failures, "skipped": skipped, "details": dict(details)}


def commit() -> str:
    """The commit, marked where the tree differs from it in more than the documents that this writes."""
    head, changed = (
        subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        for command in (
            ["rev-parse", "--short", "HEAD"],
            ["status", "--porcelain", "--", ".", ":!docs", f":!{FOLDER.relative_to(ROOT)}"],
        )
    )
    return f"{head}-dirty" if changed else head


def document() -> str:
    """RELIABILITY.md, from the JSON files."""
    lines = [
        "# Reliability",
        "",
        "What holds under faults, the tests that prove it, and what they found at full length. Written by `make",
        "faults`, `make fuzz` and `make mutants` from the JSON files of this folder, which hold command, commit and",
        "versions.",
        "",
    ]
    for name, fault_class in CLASSES.items():
        lines += [f"## {name.capitalize()}", "", fault_class.promise, "", *_figures(name), ""]
        lines += [f"- `{test}`" for test in fault_class.tests] + [""]
    return "\n".join(lines)


def _figures(name: str) -> list[str]:
    path = FOLDER / f"{name}.json"
    if not path.is_file():
        return ["Not yet run at full length."]
    figures = json.loads(path.read_text(encoding="utf-8"))
    details = ", ".join(f"{count} {description}" for description, count in figures["details"].items())
    skipped = f", {figures['skipped']} skipped" if figures["skipped"] else ""
    return [
        f"**{figures['cases']} cases, {figures['failures']} failures**{skipped}{f' ({details})' if details else ''}, "
        f"{figures['seconds']} s, commit {figures['commit']}.{' ' + figures['note'] if 'note' in figures else ''}",
        *_not_killed(figures.get("not_killed", [])),
    ]


def _not_killed(mutants: list[dict[str, str]]) -> list[str]:
    """Faults in the package that no test noticed, and why nothing can."""
    listed = [f"- `{each['mutant']}`: {each['reason'] or each['verdict']}" for each in mutants]
    return ["", "Not killed:", "", *listed] if listed else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*", choices=[*CLASSES, []], help="default: all")
    parser.add_argument("--document", action="store_true", help="run nothing")
    options = parser.parse_args()
    failed = []
    names = options.classes if options.classes else [name for name in CLASSES if name not in OWN_CAMPAIGN]
    for name in [] if options.document else names:
        figures = run_class(name)
        write(name, figures)
        failed += [name] if figures["failures"] else []
    DOCUMENT.write_text(document(), encoding="utf-8")
    if failed:
        raise SystemExit(f"failures: {', '.join(failed)}")


if __name__ == "__main__":
    main()
