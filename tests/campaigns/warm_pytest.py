"""Runs pytest again and again, each time in a fork of a process that has imported the libraries, but not the package.

Started by ``mutants``; ``--bare`` imports no libraries. Reads one JSON object per line: ``arguments`` of pytest,
``folder`` to run in, ``environment`` to add, and ``output``, the file for what is printed. Answers with two lines: the
process, which leads a group of its own, and later its exit status.
"""

import contextlib
import json
import os
import resource
import sys
import tempfile
import traceback
import warnings
from typing import Any

MOST_MEMORY, LARGEST_FILE = 12 * 2**30, 2**30  # bytes that a fault may use up


def import_libraries() -> None:
    """What takes most of the time that a run of a few tests takes."""
    warnings.simplefilter("ignore")
    import accelerate
    import datasets
    import hypothesis
    import pytest
    import scipy.stats
    import sklearn.metrics
    import torch
    import transformers

    torch.set_num_threads(1)
    del accelerate, datasets, hypothesis, pytest, scipy, sklearn
    # transformers imports what is below its names when they are first used.
    _ = transformers.AutoTokenizer, transformers.PreTrainedTokenizerBase, transformers.BertModel
    warnings.resetwarnings()


def run(order: dict[str, Any]) -> int:
    """The exit status of pytest, in a process that ends with it."""
    os.setpgid(0, 0)
    os.chdir(order["folder"])
    os.environ.update(order["environment"])
    tempfile.tempdir = None  # to be read from the environment again
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for stream, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(stream, target)
    import pytest

    return int(pytest.main(order["arguments"]))


def main() -> None:
    if "--bare" not in sys.argv:
        import_libraries()
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            status = 3  # pytest's own, of an internal error
            try:
                status = run(json.loads(line))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        with contextlib.suppress(OSError):  # whichever of the two comes first
            os.setpgid(process, process)
        print(process, flush=True)
        _, ended = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(ended), flush=True)


if __name__ == "__main__":
    main()
