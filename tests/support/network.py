"""Owns child processes whose every connection is recorded: those of Python code, and where strace works all others."""

import ipaddress
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Run by Python before anything else. Names are not resolved and nothing but this machine is reached.
_SITE = """
import os, socket
def _record(what):
    with open(os.environ["BERT_TASKS_TEST_NETWORK"], "a") as file:
        file.write(f"{what!r}\\n")
def _local(host):
    return host in (None, "", "localhost", "127.0.0.1", "::1", b"localhost", b"127.0.0.1", "0.0.0.0")
def _guarded(name):
    old = getattr(socket, name)
    def call(host, *arguments, **options):
        if not _local(host):
            _record((name, host))
            raise socket.gaierror(socket.EAI_AGAIN, "no names are resolved here")
        return old(host, *arguments, **options)
    setattr(socket, name, call)
for name in ("getaddrinfo", "gethostbyname", "gethostbyname_ex"):
    _guarded(name)
def _connection(name):
    old = getattr(socket.socket, name)
    def call(self, address):
        if self.family != socket.AF_UNIX and not _local(address[0]):
            _record((name, address))
            raise OSError("nothing but this machine is reached")
        return old(self, address)
    setattr(socket.socket, name, call)
for name in ("connect", "connect_ex"):
    _connection(name)
"""
_ADDRESS = re.compile(r'sin6?_port=htons\((\d+)\).*?(?:inet_addr\("([^"]+)"\)|inet_pton\(AF_INET6, "([^"]+)")')


@dataclass(frozen=True)
class Watched:
    """A user of this machine who has just come: an empty home, no CI, offline.

    Attributes:
        tracer: what a command stands behind, so that system calls are recorded, too; empty where that is not allowed.
    """

    folder: Path
    tracer: list[str] = field(default_factory=list)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ}
        paths = [str(self.folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **kept,
            "HOME": str(self.home),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
            "BERT_TASKS_TEST_NETWORK": str(self.folder / "python.txt"),
        }

    def reached(self) -> list[str]:
        """Names that were resolved, and addresses beyond this machine."""
        python, calls = self.folder / "python.txt", self.folder / "calls.txt"
        lines = python.read_text("utf-8").splitlines() if python.exists() else []
        for line in calls.read_text("utf-8", errors="replace").splitlines() if calls.exists() else []:
            for _, four, six in _ADDRESS.findall(line):
                if not ipaddress.ip_address(four or six).is_loopback:
                    lines.append(line)
        return lines

    def left(self) -> list[str]:
        """Files below the home, but for what is known to be Hugging Face's cache."""
        files = (path.relative_to(self.home) for path in self.home.rglob("*") if path.is_file())
        return sorted(str(path) for path in files if path.parts[:2] != (".cache", "huggingface"))


def watched(folder: Path) -> Watched:
    for name in ("home", "site"):
        (folder / name).mkdir(parents=True)
    (folder / "site" / "sitecustomize.py").write_text(_SITE, "utf-8")
    calls = "connect,sendto,sendmsg,sendmmsg"
    tracer = ["strace", "-f", "-qq", "--seccomp-bpf", "-e", f"trace={calls}", "-o", str(folder / "calls.txt")]
    return Watched(folder, tracer if _works(tracer) else [])


def _works(tracer: Sequence[str]) -> bool:
    if shutil.which(tracer[0]) is None:
        return False
    done = subprocess.run([*tracer, sys.executable, "-S", "-c", ""], capture_output=True, timeout=60)
    return done.returncode == 0
