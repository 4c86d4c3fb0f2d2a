"""The Dockerfile, read and not built: a pinned base, no root, no secrets, and everything that it copies is there."""

import inspect
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from bert_tasks.serving import serve


class Instruction(NamedTuple):
    name: str
    value: str


@pytest.fixture(scope="module")
def instructions(repository: Path) -> list[Instruction]:
    text = (repository / "Dockerfile").read_text("utf-8")
    lines = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    result = [Instruction(*line.split(maxsplit=1)) for line in lines if line.strip()]
    names = {instruction.name for instruction in result}
    assert names <= {
        "FROM",
        "ARG",
        "ENV",
        "RUN",
        "WORKDIR",
        "COPY",
        "USER",
        "EXPOSE",
        "HEALTHCHECK",
        "ENTRYPOINT",
        "CMD",
    }
    return result


def last_stage(instructions: list[Instruction]) -> list[Instruction]:
    start = max(number for number, instruction in enumerate(instructions) if instruction.name == "FROM")
    return instructions[start:]


def test_the_base_is_pinned_to_a_patch_release(instructions: list[Instruction], repository: Path) -> None:
    bases = {instruction.value.split()[0] for instruction in instructions if instruction.name == "FROM"}
    assert len(bases) == 1
    (version,) = re.fullmatch(r"python:(3\.\d+)\.\d+-slim-[a-z]+", bases.pop()).groups()  # type: ignore[union-attr]
    assert f'requires-python = ">={version}"' in (repository / "pyproject.toml").read_text("utf-8")


def test_it_runs_the_command_as_nobody_special(instructions: list[Instruction]) -> None:
    final = last_stage(instructions)
    users = [instruction.value for instruction in final if instruction.name == "USER"]
    assert users == ["10001:10001"]
    assert [instruction.value for instruction in final if instruction.name == "ENTRYPOINT"] == ['["bert-tasks"]']
    assert final.index(Instruction("USER", users[0])) > max(
        n for n, instruction in enumerate(final) if instruction.name == "RUN"
    )


def test_it_serves_as_it_is(instructions: list[Instruction], repository: Path) -> None:
    (extras,) = [value.removeprefix("EXTRAS=") for name, value in instructions if name == "ARG" and "EXTRAS" in value]
    assert {"serve", "export"} <= set(extras.split(","))
    (port,) = [instruction.value for instruction in last_stage(instructions) if instruction.name == "EXPOSE"]
    (check,) = [instruction.value for instruction in last_stage(instructions) if instruction.name == "HEALTHCHECK"]
    assert f"http://localhost:{port}/healthz" in check
    page = (repository / "docs" / "how_to" / "serve.md").read_text("utf-8")
    assert f"docker run --rm --publish {port}:{port}" in page
    assert inspect.signature(serve).parameters["port"].default == int(port)


def test_no_secrets_and_no_copy_of_everything(instructions: list[Instruction], repository: Path) -> None:
    for instruction in instructions:
        if instruction.name in ("ARG", "ENV"):
            assert not re.search(r"token|secret|password|api_?key", instruction.value, flags=re.IGNORECASE), instruction
        if instruction.name == "COPY" and not instruction.value.startswith("--from="):
            *sources, target = instruction.value.split()
            assert target.startswith("./")
            assert "." not in sources
            assert all((repository / source).exists() for source in sources), instruction


def test_the_ignore_file_lets_through_what_is_copied(instructions: list[Instruction], repository: Path) -> None:
    lines = (repository / ".dockerignore").read_text("utf-8").splitlines()
    assert "*" in lines
    copied = {
        source
        for instruction in instructions
        if instruction.name == "COPY" and not instruction.value.startswith("--from=")
        for source in instruction.value.split()[:-1]
    }
    assert copied == {line[1:] for line in lines if line.startswith("!")}


def test_what_is_installed_is_pinned(instructions: list[Instruction]) -> None:
    installs = [
        instruction.value
        for instruction in instructions
        if instruction.name == "RUN" and "pip install" in instruction.value
    ]
    assert len(installs) == 2
    assert all("--constraint constraints.txt" in value for value in installs)
