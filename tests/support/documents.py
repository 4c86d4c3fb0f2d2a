"""Reads Markdown pages and runs their code.

Owns what counts as a block, a command, a link and a printed output. Must not know which pages there are.
"""

import contextlib
import io
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby, zip_longest
from pathlib import Path
from unittest.mock import patch

import pytest

from bert_tasks.cli import main
from bert_tasks.encoder.int8 import int8_obstacle

NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?|\d{1,3}(?:,\d{3})+")  # decimals, and large numbers such as 1,096
TOLERANCE = 0.1  # of printed accuracies and probabilities: processors round differently, and training magnifies it
# Commands that a test cannot run: they need a network, other machines, GPUs or data that is not in the repository.
EXEMPT = re.compile(r"^(git clone|pip install|make |docker |.*--nnodes|.*--gpus|.*\bsrun\b|.*\$\{?BERT_TASKS_DATA)")
if int8_obstacle() is not None:
    EXEMPT = re.compile(rf"{EXEMPT.pattern}|^bert-tasks (quantize|.*--dtype int8)")
# A command that needs no shell: outside quotes, it has no character that a shell acts on.
PLAIN = re.compile(r"""(?:PYTHONPATH=\. )?bert-tasks (?:'[^']*'|"[^"$`\\!]*"|[^'"$`\\!|&;<>(){*?#~])*""")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block. ``following``: the block of text that stands right below it, its expected output."""

    language: str
    text: str
    line: int
    following: str | None = None

    @property
    def commands(self) -> list[str]:
        """The command lines of a shell block, lines that go on with a backslash as one."""
        joined = re.sub(r"\\\n\s*", "", self.text)
        return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]

    @property
    def is_plain(self) -> bool:
        """Whether a shell block is a sequence of `bert-tasks` commands and nothing else."""
        return all(PLAIN.fullmatch(command) for command in self.commands)

    @property
    def parts(self) -> list["Block"]:
        """A shell block in parts that are plain or have no plain command. It stays whole if commands need one shell."""
        unquoted = re.sub(r"'[^']*'", "", self.text)
        needs_one_shell = re.search(r"\$|(?<!&)&(?!&)|^(?:cd|export) ", unquoted, flags=re.MULTILINE)
        if self.is_plain or needs_one_shell:
            return [self]
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines(keepends=True)
        groups = groupby(lines, key=lambda line: PLAIN.fullmatch(line.rstrip("\n")) is not None)
        return [replace(self, text="".join(group)) for _, group in groups]

    @property
    def finds_modules(self) -> bool:
        """Whether all commands of a shell block find the modules in the current folder."""
        return all(command.startswith("PYTHONPATH=. ") for command in self.commands)


def blocks(document: str) -> list[Block]:
    """The fenced blocks that begin at the left margin and name a language."""
    fences = list(re.finditer(r"^```(\w+)\n(.*?)^```$", document, flags=re.MULTILINE | re.DOTALL))
    result = []
    for fence, after in zip_longest(fences, fences[1:]):
        between = "" if after is None else document[fence.end() : after.start()].strip()
        is_output = after is not None and after[1] == "text" and fence[1] != "text" and not between
        line = document.count("\n", 0, fence.start()) + 1
        following = after[2] if after is not None and is_output else None
        result.append(Block(language=fence[1], text=fence[2], line=line, following=following))
    return result


def prose(document: str) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", document, flags=re.MULTILINE | re.DOTALL)


def inline_code(document: str) -> list[str]:
    """What stands between single backticks, wherever lines break; and indented blocks, line by line."""
    text = re.sub(r"\\\n\s*", "", prose(document))
    spans = [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]
    return spans + [line.strip() for line in re.findall(r"^ {4}(\S.*)$", text, flags=re.MULTILINE)]


def agrees(printed: str, expected: str) -> bool:
    """Equal text, with decimal numbers equal within the tolerance.

    Three dots stand for anything: on a line of their own for any lines, else for the rest of a word or line.
    """
    parts = re.split(r"^\.\.\.\n", expected.strip() + "\n", flags=re.MULTILINE)
    pattern = r"(?:.*\n)*?".join(_pattern(section) for section in parts)
    match = re.fullmatch(pattern, printed.strip() + "\n")
    if match is None:
        return False
    pairs = zip(match.groups(), NUMBER.findall(expected), strict=True)
    return all(_close(_value(ours), _value(theirs)) for ours, theirs in pairs)


def shows(block: Block, printed: str) -> bool:
    """Whether a block printed what the page shows below it; after several commands it may show the last ones' only."""
    if block.following is None:
        return True
    many = block.language == "sh" and len(block.commands) > 1
    return agrees(printed, block.following) or (many and agrees(printed, f"...\n{block.following}"))


def _pattern(text: str) -> str:
    """The text as a pattern in which every decimal number is a group; blanks may be wider or narrower."""
    plain = [re.sub(r"(?:\\[ \t])+", r"[ \\t]+", re.escape(piece)) for piece in NUMBER.split(text)]
    return f"({NUMBER.pattern})".join(plain).replace(re.escape("..."), ".*")


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def _close(ours: float, theirs: float) -> bool:
    """Numbers above 1 are percentages, seconds, losses or norms."""
    return math.isclose(ours, theirs, abs_tol=TOLERANCE * max(1.0, abs(theirs)))


class Page:
    """Runs the blocks of a page in order, in the current folder, with one namespace for all Python blocks.

    A Python block whose first line is a comment that names a file is also saved under that name.

    With ``capture``, plain commands run in this process, because each new one takes seconds to import torch and
    transformers. Here a command finds the modules that Python blocks save, so after these it has its own process
    unless it is meant to find them.
    """

    def __init__(self, name: str, *, threads: int = 1, capture: pytest.CaptureFixture[str] | None = None) -> None:
        self.name = name
        self.capture = capture
        self.module = types.ModuleType("__page__")
        here = Path(sys.executable).parent
        self.environment = os.environ | {
            "PATH": f"{here}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": str(threads),
            "NO_COLOR": "1",
        }
        self.environment.pop("PYTHONSAFEPATH", None)  # a reader has not set it
        self.groups: list[int] = []
        self.saved: list[str] = []
        self.folder = str(Path.cwd())
        sys.path.insert(0, self.folder)  # as where Python is started by hand

    def run(self, block: Block) -> str:
        """What a block of Python or shell prints.

        Raises:
            AssertionError: it fails.
        """
        if block.language == "python":
            return self._python(block)
        return "".join(self._shell(part) for part in block.parts)

    def _python(self, block: Block) -> str:
        named = re.match(r"# (\w+\.py)\n", block.text)
        if named:
            Path(named[1]).write_text(block.text, encoding="utf-8")
            self.saved.append(Path(named[1]).stem)
        output = io.StringIO()
        sys.modules[self.module.__name__] = self.module  # dataclasses look their module up
        with contextlib.redirect_stdout(output):
            exec(compile(block.text, f"{self.name}:{block.line}", "exec"), vars(self.module))
        return output.getvalue()

    def _shell(self, block: Block) -> str:
        lines = [command for command in block.commands if not EXEMPT.match(command)]
        if not lines:
            return ""
        text = block.text if len(lines) == len(block.commands) else "\n".join(lines)
        is_alike = block.is_plain and (not self.saved or block.finds_modules)
        if self.capture is not None and is_alike:
            code, printed, told = self._call(lines, self.capture)
        else:
            code, printed, told = self._start(text)
        # A pipe hides the code of all but its last command, and `head` may well end before the one that feeds it.
        failed = code != 0 or ("||" not in text and re.search(r"^(internal )?error: ", told, flags=re.MULTILINE))
        assert not failed, f"{self.name}:{block.line}: exit code {code}\n{text}\n{printed}\n{told}"
        return printed

    def _call(self, commands: list[str], capture: pytest.CaptureFixture[str]) -> tuple[object, str, str]:
        """Calls commands until one fails. Returns the last exit code, and what all of them print."""
        capture.readouterr()
        code: object = 0
        for command in commands:
            arguments = shlex.split(command.removeprefix("PYTHONPATH=. "))
            with patch.object(sys, "argv", arguments), patch.dict(os.environ, self.environment, clear=True):
                try:
                    main()
                except SystemExit as end:
                    code = end.code
            if code != 0:
                break
        return code, *capture.readouterr()

    def _start(self, text: str) -> tuple[int, str, str]:
        """Starts a shell. Returns its exit code, and what it prints."""
        out, err = Path(".stdout"), Path(".stderr")  # files, because a server in the background would keep a pipe open
        with out.open("w") as stdout, err.open("w") as stderr:
            process = subprocess.Popen(
                ["bash", "-eu", "-c", text],
                env=self.environment,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
            self.groups.append(process.pid)
            code = process.wait(timeout=600)
        return code, out.read_text("utf-8"), err.read_text("utf-8", errors="replace")

    def close(self) -> None:
        """Ends what blocks have left running, and forgets what they have saved."""
        sys.path.remove(self.folder)
        for name in (self.module.__name__, *self.saved):
            sys.modules.pop(name, None)
        for group in self.groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)


def is_exempt(block: Block) -> bool:
    return block.language == "sh" and all(EXEMPT.match(command) for command in block.commands)


def anchors(document: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    counts: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#{1,6} (.+?)\s*$", prose(document), flags=re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        count = counts.get(anchor, 0)
        counts[anchor] = count + 1
        names.add(anchor if count == 0 else f"{anchor}-{count}")
    return names


def links(document: str) -> list[str]:
    """Targets of links and pictures that are not addresses of the web."""
    plain = re.sub(r"`[^`]*`", "", prose(document))
    targets = re.findall(r"\]\(([^)\s]+)[^)]*\)", plain) + re.findall(r'(?:src|srcset|href)="([^"]+)"', plain)
    return [target for target in targets if not re.match(r"\w+:", target)]


def broken_links(page: Path, texts: Mapping[Path, str]) -> Iterator[str]:
    """Relative links of a page that lead nowhere; ``texts`` are all pages by resolved path."""
    for target in links(texts[page]):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            yield f"{page.name}: {target}: no such file"
        elif anchor and anchor not in anchors(texts.get(file, "")):
            yield f"{page.name}: {target}: no such heading"


def program_lines(command: str) -> list[str]:
    """The arguments of `bert-tasks` (or `-m bert_tasks`) where it is what a command line, or inline code, runs."""
    prefix = r"(?:(?:^|[|;&(]\s*|\bdo\s+)(?:\w+=\S*\s+)*(?:\S*/)?bert-tasks|\s-m bert_tasks)"
    return [arguments.strip() for arguments in re.findall(rf"{prefix}(?=\s|$)([^|;&>`)]*)", command)]
