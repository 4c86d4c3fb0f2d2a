"""Puts random faults into the package, one at a time, and reports which of them its tests notice.

    PYTHONPATH=tests:campaigns python -m mutants                                # 200 of the package
    PYTHONPATH=tests:campaigns python -m mutants --package encoder --count 40   # 40 of one package, or one module
    PYTHONPATH=tests:campaigns python -m mutants --package encoder --list       # print them and run nothing

A fault is drawn by its seed, put into a copy of the package, and the tests of that part of the package run on the copy:
first those of the module, then those of its folder, then those of the folders that use it most. It is killed if a test
fails or the time is up. What survives is a missing test, or a fault that changes nothing anybody can see: these are
listed with the reason in ``equivalent_mutants.toml``. The figures of all packages go to results/mutants.json.

mutmut (3.8) and cosmic-ray (8.7) were looked at and not taken. mutmut puts all faults of a function beside it and
switches between them in forked processes, so that sources, signatures and pickled names are no longer those that the
tests read, and knows no fault outside a function, such as a default of a field or an entry of a table. cosmic-ray edits
the source tree in place and runs one command for every fault. Neither draws a sample by seed, and all faults of this
package would take weeks.
"""

import argparse
import contextlib
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import reliability
from mutations import Mutation, code_lines, mutations_of

PACKAGE = reliability.ROOT / "bert_tasks"
TESTS = reliability.ROOT / "tests"
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")
COUNT, SEED = 200, 0
LONGEST = 1800.0  # seconds for the tests of one part without a fault

# Tests that run after those of the folder that is called like the part of the package.
NEIGHBOURS: dict[str, tuple[str, ...]] = {
    "": ("test_readme.py", "cli/test_processes.py"),
    "__main__": ("cli/test_processes.py",),
    "api": ("training/test_fit_arguments.py", "training/test_fit_inputs.py", "training/test_loop.py"),
    "checkpoints": ("model/test_pretrained.py",),
    "data": ("init", "inference/test_prediction.py", "tasks/test_crf_head.py"),
    "distributed": (
        "training/test_threads.py",
        "training/test_processes.py",
        "inference/test_prediction_processes.py",
    ),
    "encoder": (
        "model/test_parity.py",
        "model/test_dropout.py",
        "model/test_gradients.py",
        "model/test_pretrained.py",
        "model/test_pretrained_config.py",
        "training/test_replaced_tokens.py",
    ),
    "environment": ("cli/test_commands.py",),
    "errors": ("recipe", "cli/test_commands.py"),
    "families": ("checkpoints", "model/test_parity.py", "model/test_dropout.py", "model/test_segments.py"),
    "inference": ("cli/test_commands.py",),
    "metrics": ("report/test_resampling.py", "tasks"),
    "model": ("tasks/test_contract.py", "inference/test_files.py", "training/test_replaced_tokens.py"),
    "outputs": (
        "tasks",
        "inference/test_files.py",
        "inference/test_notebook.py",
        "serving/test_app.py",
        "report/test_build.py",
        "report",
        "cards",
        "model/test_multitask_folders.py",
    ),
    "recipe": ("cli/test_commands.py", "training/test_run.py"),
    "storage": ("checkpoints/test_save.py", "training/test_files.py", "cli/test_commands.py"),
    "tasks": (
        "inference/test_files.py",
        "serving/test_app.py",
        "serving/test_clients.py",
        "report/test_build.py",
        "init/test_recipe.py",
    ),
    "terminal": ("cli/test_terminal.py",),
    "training": ("experiments", "inference/test_trained_names.py"),
    "variables": ("faults/test_network.py",),
}

# Tests that measure time are left out: on a busy machine they fail without a fault.
TIMED = ("serving/test_latency.py",)


def unit_of(file: str) -> str:
    """The part of the package that a file belongs to: a folder or a module, ``""`` for the package itself."""
    return "" if file == "__init__.py" else file.split("/")[0].removesuffix(".py")


@dataclass(frozen=True)
class Mutant:
    """A fault in a file of the package, whose path is relative to it."""

    file: str
    mutation: Mutation

    @property
    def unit(self) -> str:
        return unit_of(self.file)

    @property
    def key(self) -> tuple[str, str, str]:
        return self.file, self.mutation.function, self.mutation.change

    def __str__(self) -> str:
        location = f"{self.file}:{self.mutation.line}"
        return f"{location} {self.mutation.function or '(module)'}: {self.mutation.operator}: {self.mutation.change}"


@dataclass(frozen=True, kw_only=True)
class Result:
    """``verdict``: killed, survived, or equivalent; ``reason``: the test that failed, or why nothing can."""

    mutant: Mutant
    verdict: str
    reason: str
    seconds: float


def draw(sources: Mapping[str, str], *, count: int, seed: int) -> list[Mutant]:
    """Different faults of some source texts: a file in proportion to its lines of code, then any fault of it.

    Args:
        sources: Texts by path relative to the package.
        count: Faults wanted; fewer are returned where there are fewer.
        seed: Decides which.
    """
    generator = random.Random(seed)
    left = {file: mutations_of(text) for file, text in sorted(sources.items())}
    lines = {file: code_lines(text) for file, text in sources.items()}
    drawn: list[Mutant] = []
    while len(drawn) < count and any(left.values()):
        files = [file for file, mutations in left.items() if mutations]
        file = generator.choices(files, [lines[name] for name in files])[0]
        mutation = left[file].pop(generator.randrange(len(left[file])))
        if _compiles(mutation.apply(sources[file])):
            drawn.append(Mutant(file, mutation))
    return drawn


def _compiles(text: str) -> bool:
    try:
        compile(text, "<mutant>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def sources_of(packages: Sequence[str]) -> dict[str, str]:
    """Source texts of the package, or of parts of it, which are named as modules are (``encoder``, ``data.splits``)."""
    files = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}
    units = [package.replace(".", "/") for package in packages]
    return {
        file: path.read_text("utf-8")
        for file, path in files.items()
        if not units or any(file in (f"{name}.py", name) or file.startswith(f"{name}/") for name in units)
    }


def own_tests(unit: str) -> list[Path]:
    """The tests of a part of the package: those of its folder, and a file that is called like it."""
    paths = [*(TESTS / unit).glob("test_*.py"), *TESTS.glob(f"test_{unit}.py")] if unit else []
    return [path for path in sorted(paths) if str(path.relative_to(TESTS)) not in TIMED]


def neighbours(unit: str) -> list[Path]:
    """Tests of other parts that use this one most."""
    named = [TESTS / name for name in NEIGHBOURS.get(unit, ())]
    return [path for name in named for path in (sorted(name.glob("test_*.py")) if name.is_dir() else [name])]


def stages(file: str) -> list[list[Path]]:
    """The tests that may notice a fault in a file: of the module, of its folder, of its neighbours."""
    tests = own_tests(unit_of(file))
    *_, package, module = ("", *Path(file).with_suffix("").parts)
    name = package if module in ("task", "base") else module
    near = [path for path in tests if name in path.stem]
    groups = [near, [path for path in tests if path not in near], neighbours(unit_of(file))]
    return [stage for stage in groups if stage]


class Copy:
    """A copy of the package in a folder of its own, in which one worker runs one fault after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))

    def run(self, tests: Iterable[Path], seconds: float) -> str | None:
        """Runs tests on the copy; what ended them, or None if all passed."""
        with tempfile.TemporaryDirectory(dir=self.folder, ignore_cleanup_errors=True) as scratch:
            options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-rfE", "--no-header"]
            config = ["-c", str(reliability.ROOT / "pyproject.toml"), "--rootdir", str(reliability.ROOT)]
            command = [sys.executable, "-m", "pytest", *config, *options, *map(str, tests)]
            output = Path(scratch) / "output.txt"
            with output.open("wb") as file:
                process = subprocess.Popen(
                    command,
                    cwd=scratch,
                    env=self._environment(scratch),
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
            try:
                status: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                status = None
            _end(process, scratch)
            return "time limit" if status is None else _first_failure(output.read_text("utf-8", "replace"), status)

    def _environment(self, scratch: str) -> dict[str, str]:
        return os.environ | {
            "PYTHONPATH": str(self.folder),
            "PYTHONSAFEPATH": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(Path(scratch) / "huggingface"),
            "TMPDIR": scratch,
            "BERT_TASKS_REPOSITORY": str(reliability.ROOT),
        }

    def test(self, mutant: Mutant, limits: Mapping[str, float]) -> Result:
        """The verdict of the tests on a fault. ``limits``: seconds of a stage, by part."""
        began = time.monotonic()
        path = self.folder / PACKAGE.name / mutant.file
        text = path.read_text("utf-8")
        path.write_text(mutant.mutation.apply(text), "utf-8")
        try:
            for stage in stages(mutant.file):
                reason = self.run(stage, limits[mutant.unit])
                if reason is not None:
                    return Result(mutant=mutant, verdict="killed", reason=reason, seconds=time.monotonic() - began)
        finally:
            path.write_text(text, "utf-8")
        reason = equivalent().get(mutant.key)
        verdict = "survived" if reason is None else "equivalent"
        return Result(mutant=mutant, verdict=verdict, reason=reason or "", seconds=time.monotonic() - began)


def _end(process: subprocess.Popen[bytes], scratch: str) -> None:
    """Ends a run of tests and the programs that it left running, which have its folder in their environment."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"TMPDIR={scratch}".encode() in environment.read_bytes().split(b"\0"):
                os.kill(int(environment.parent.name), signal.SIGKILL)


def _first_failure(printed: str, code: int) -> str | None:
    if code in (0, 5):  # 5: no test was chosen
        return None
    lines = [line for line in printed.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return lines[0].split(" - ")[0].split(" ", 1)[1] if lines else f"pytest ended with {code}"


@functools.cache
def equivalent() -> dict[tuple[str, str, str], str]:
    """The faults that nobody can see, with the reason."""
    entries = tomllib.loads(EQUIVALENT.read_text("utf-8"))["mutant"]
    return {(entry["file"], entry["function"], entry["change"]): entry["reason"] for entry in entries}


def check_equivalent() -> None:
    """Ends the campaign if an entry of ``equivalent_mutants.toml`` names code that has changed: judge it again.

    Raises:
        SystemExit: The package has no such fault any more.
    """
    keys = {Mutant(file, fault).key for file, text in sources_of([]).items() for fault in mutations_of(text)}
    outdated = [key for key in equivalent() if key not in keys]
    if outdated:
        raise SystemExit(f"{EQUIVALENT.name} names faults that the package no longer has: {outdated}")


def time_limit(unit: str, copy: Copy) -> float:
    """Seconds for a stage of a part: half a minute and four times what all of its tests take without a fault.

    Raises:
        SystemExit: A test fails without a fault.
    """
    began = time.monotonic()
    failed = copy.run([*own_tests(unit), *neighbours(unit)], LONGEST)
    if failed is not None:
        raise SystemExit(f"{unit}, without a fault: {failed}")
    print(f"{unit or '__init__'}: {time.monotonic() - began:.0f} s without a fault", flush=True)
    return 30 + 4 * (time.monotonic() - began)


def campaign(mutants: Sequence[Mutant], workers: int) -> list[Result]:
    """Tests every fault, ``workers`` at a time, and prints its verdict as soon as it is there."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as root, ThreadPoolExecutor(workers) as pool:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(workers):
            copies.put(Copy(Path(root) / str(number)))

        @contextlib.contextmanager
        def free_copy() -> Iterator[Copy]:
            copy = copies.get()
            try:
                yield copy
            finally:
                copies.put(copy)

        def limit(unit: str) -> float:
            with free_copy() as copy:
                return time_limit(unit, copy)

        def test(mutant: Mutant) -> Result:
            with free_copy() as copy:
                result = copy.test(mutant, limits)
            print(f"{result.verdict:10} {result.seconds:4.0f} s  {mutant}  [{result.reason}]", flush=True)
            return result

        units = sorted({mutant.unit for mutant in mutants})
        limits = dict(zip(units, pool.map(limit, units), strict=True))
        return list(pool.map(test, mutants))


def report(results: Sequence[Result]) -> dict[str, Any]:
    """The figures, in the form of the other campaigns: a failure is a survivor, an equivalent fault is left out."""
    counted = [result for result in results if result.verdict != "equivalent"]
    total, killed = Counter[str](), Counter[str]()
    for result in counted:
        total[result.mutant.unit] += 1
        killed[result.mutant.unit] += result.verdict == "killed"
    return {
        "cases": len(counted),
        "failures": sum(result.verdict == "survived" for result in counted),
        "skipped": len(results) - len(counted),
        "details": {unit or "__init__": f"{killed[unit]} of {total[unit]}" for unit in sorted(total)},
        "not_killed": [
            {"mutant": str(result.mutant), "verdict": result.verdict, "reason": result.reason}
            for result in results
            if result.verdict != "killed"
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=COUNT, help=f"faults to try (default: {COUNT})")
    parser.add_argument("--seed", type=int, default=SEED, help="decides which faults")
    parser.add_argument(
        "--package", action="append", default=[], help="only of this part, such as encoder or data.splits"
    )
    parser.add_argument("--workers", type=int, default=1, help="test runs at a time")
    parser.add_argument("--list", action="store_true", help="print the faults and run nothing")
    options = parser.parse_args()
    mutants = draw(sources_of(options.package), count=options.count, seed=options.seed)
    if options.list:
        print(*mutants, sep="\n")
        return
    check_equivalent()
    began = time.monotonic()
    summary = report(campaign(mutants, options.workers))
    if options.package:
        print(json.dumps(summary, indent=2))
        return
    command = f"python -m mutants --count {options.count} --seed {options.seed}"
    reliability.write("mutants", {**summary, **reliability.provenance(command, began)})


if __name__ == "__main__":
    main()
