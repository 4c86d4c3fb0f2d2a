"""The targets of ``fuzzing`` but those of a server, with edits guided by the lines of the package that they reach.

    PYTHONPATH=tests:campaigns python -m guided_fuzzing --seconds 420    # of each group of targets

The figures go to results/guided.json.

Every target runs in a process of its own, because libFuzzer ends the process that it runs in. What breaks one stays
in a file whose name is printed. Needs the extra ``fuzz``.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["bert_tasks"]):
    from fuzzing import SECONDS, TOKENS, Target, attempt, file_groups

KEPT = 200  # contents after which the files that reading them left are removed


def run_target(target: Target, folder: Path, seconds: float) -> None:
    """Edits the target's valid content until the time is up; does not return."""
    corpus, scratch, tried = folder / "corpus", folder / "place", 0
    corpus.mkdir(parents=True)
    (corpus / "valid").write_bytes(target.valid)
    words = folder / "words"
    words.write_text("".join(f'"{_escaped(token)}"\n' for token in TOKENS if 0 < len(token) < 60), "ascii")

    def run_input(content: bytes) -> None:
        nonlocal tried
        if tried % KEPT == 0:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
        tried += 1
        attempt(target, content, scratch)

    limits = [f"-max_total_time={seconds:.0f}", "-timeout=60", "-rss_limit_mb=6000", "-max_len=20000"]
    atheris.Setup([sys.argv[0], str(corpus), f"-dict={words}", f"-artifact_prefix={folder}/", *limits], run_input)
    atheris.Fuzz()


def _escaped(token: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in token)


def run_process(name: str, folder: Path, seconds: float) -> int:
    """Contents that were tried of a target.

    Raises:
        SystemExit: one of them broke something.
    """
    command = [
        sys.executable,
        "-m",
        "guided_fuzzing",
        "--target",
        name,
        "--folder",
        str(folder),
        "--seconds",
        str(seconds),
    ]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    match = re.search(r"Done (\d+) runs", done.stderr)
    if done.returncode != 0 or match is None:
        raise SystemExit(f"{name}: ended with {done.returncode}; contents in {folder}\n{done.stderr[-4000:]}")
    return int(match[1])


def campaign(seconds: float) -> None:
    import reliability

    began, tried = time.monotonic(), {}
    root = Path(tempfile.mkdtemp(prefix="guided-"))
    for group in file_groups(root / "started").values():
        for number, name in enumerate(group):
            tried[name] = run_process(name, root / f"{len(tried)}-{number}", seconds / len(group))
    shutil.rmtree(root)
    about = reliability.provenance(f"python -m guided_fuzzing --seconds {seconds:g}", began)
    figures = {"cases": sum(tried.values()), "failures": 0, "skipped": 0, "details": tried}
    reliability.write("guided", {**figures, **about})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each group of targets")
    parser.add_argument("--target", help="only this one, in this process")
    parser.add_argument("--folder", type=Path, help="where it works")
    options = parser.parse_args()
    if options.target is None:
        campaign(options.seconds)
    else:
        options.folder.mkdir(parents=True)
        groups = file_groups(options.folder / "started").values()
        run_target(
            next(group[options.target] for group in groups if options.target in group), options.folder, options.seconds
        )


if __name__ == "__main__":
    main()
