"""What is installed is the wheel, complete and nothing else, and it declares what it imports."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, distribution, packages_distributions
from pathlib import Path
from typing import Any

import pytest

import bert_tasks
from support.sources import Source, imports, package_sources

HEAVY = ("torch", "transformers", "datasets", "accelerate", "evaluate", "sklearn", "scipy", "numpy", "fastapi")
PACKAGED = {".css", ".html", ".md", ".py", ".typed"}
made_by_make = pytest.mark.skipif(
    "BERT_TASKS_REPOSITORY" not in os.environ, reason="about the installed wheel: run by `make test`"
)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement_name(requirement: str) -> str:
    return canonical(re.split(r"[\s\[<>=!~;]", requirement, maxsplit=1)[0])


@pytest.fixture(scope="module")
def project(repository: Path) -> dict[str, Any]:
    return tomllib.loads((repository / "pyproject.toml").read_text("utf-8"))["project"]


@cache
def installed_distributions() -> Mapping[str, list[str]]:
    """Import names -> distributions: it reads the files of everything that is installed."""
    return packages_distributions()


def imported_distributions(sources: Iterable[Source]) -> set[str]:
    """The distributions of every library that any of the modules imports."""
    libraries = {statement.module.split(".")[0] for source in sources for statement in imports(source)}
    distributions = installed_distributions()
    third_party = libraries - set(sys.stdlib_module_names) - {"bert_tasks"}
    return {canonical(name) for library in third_party for name in distributions.get(library, [library])}


@made_by_make
def test_tests_import_the_installed_wheel(repository: Path) -> None:
    location = Path(bert_tasks.__file__).resolve()
    assert Path(os.environ["BERT_TASKS_REPOSITORY"]).resolve() == repository.resolve()
    assert location.parents[1].name == "site-packages"
    assert str(repository.resolve()) not in {str(Path(folder).resolve()) for folder in sys.path}


@made_by_make
def test_wheel_carries_the_package_and_nothing_else(repository: Path) -> None:
    files = distribution("bert-tasks").files
    assert files is not None
    installed = {str(file) for file in files if file.suffix != ".pyc"}
    package = {file for file in installed if file.startswith("bert_tasks/")}
    in_repository = (repository / "bert_tasks").rglob("*")
    expected = {str(file.relative_to(repository)) for file in in_repository if file.suffix in PACKAGED}
    assert package == expected
    assert "bert_tasks/py.typed" in package
    others = {file for file in installed - package if ".dist-info/" not in file}
    assert {Path(file).name for file in others} == {"bert-tasks"}


def test_make_builds_the_wheel_anew_when_any_of_its_files_changes(repository: Path) -> None:
    make = shutil.which("make")
    if make is None:
        pytest.skip("no make on the path")
    command = [make, "--print-data-base", "--question", "--directory", str(repository), "help"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    (sources,) = re.findall(r"^SOURCES := (.*)$", output, re.MULTILINE)
    packaged = (file for file in (repository / "bert_tasks").rglob("*") if file.suffix in PACKAGED)
    assert {str(file.relative_to(repository)) for file in packaged} - set(sources.split()) == set()


def test_console_script_names_a_function(project: dict[str, Any]) -> None:
    script = EntryPoint("bert-tasks", project["scripts"]["bert-tasks"], "console_scripts")
    assert callable(script.load())


def test_every_import_is_declared(project: dict[str, Any]) -> None:
    extras = project["optional-dependencies"]
    used = ("excel", "export", "labels", "notebook", "search", "sentences", "serve", "spacy", "tracking")
    needed = project["dependencies"] + [name for extra in used for name in extras[extra]]
    declared = {requirement_name(requirement) for requirement in needed}
    assert imported_distributions(package_sources()) - declared == set()


def test_every_dependency_is_imported(project: dict[str, Any]) -> None:
    declared = {requirement_name(requirement) for requirement in project["dependencies"]}
    # transformers reads vocabularies of SentencePiece by these two.
    assert declared - imported_distributions(package_sources()) == {"protobuf", "sentencepiece"}


def test_every_import_of_the_tests_is_declared(project: dict[str, Any], repository: Path) -> None:
    files = sorted(set((repository / "tests").rglob("*.py")))
    sources = [Source(f"tests.{file.stem}", file.read_text("utf-8")) for file in files]
    scripts = [*(repository / "campaigns").glob("*.py"), repository / "docs" / "generate_reference.py"]
    own = {"support", "images", *(canonical(script.stem) for script in scripts)}
    extras = project["optional-dependencies"]
    needed = project["dependencies"] + [name for extra in extras.values() for name in extra]
    declared = {requirement_name(requirement) for requirement in needed}
    assert imported_distributions(sources) - declared - own == set()


def test_constraints_pin_every_direct_dependency_at_its_floor_or_above(
    project: dict[str, Any], repository: Path
) -> None:
    pinned = pins(repository / "constraints.txt")
    for name, floor in floors(project, *project["optional-dependencies"]).items():
        assert numbers(pinned[name]) >= numbers(floor), name


def test_oldest_constraints_pin_what_users_install_at_its_floor(project: dict[str, Any], repository: Path) -> None:
    oldest = pins(repository / "constraints-oldest.txt")
    tested = {"excel", "export", "labels", "quickstart", "search", "sentences", "serve", "spacy"}
    assert f"[{','.join(sorted({*tested, 'docs'}))}]" in project["optional-dependencies"]["dev"][0]
    for name, floor in floors(project, *tested).items():
        assert numbers(oldest[name]) == numbers(floor), name
    for name, floor in floors(project, "dev", "docs").items():  # tools, which may be newer
        assert numbers(oldest[name]) >= numbers(floor), name


def pins(constraints: Path) -> dict[str, str]:
    """Returns distribution -> version."""
    lines = constraints.read_text("utf-8").splitlines()
    return {canonical(name): version for name, _, version in (line.partition("==") for line in lines) if version}


def floors(project: dict[str, Any], *extras: str) -> dict[str, str]:
    """Returns distribution -> version, of the package itself and these extras."""
    requirements = list(project["dependencies"])
    for extra in extras:
        requirements += project["optional-dependencies"][extra]
    others = [requirement for requirement in requirements if requirement_name(requirement) != "bert-tasks"]
    return {requirement_name(requirement): re.split("[>=]=", requirement)[1] for requirement in others}


def numbers(version: str) -> tuple[int, ...]:
    """Returns the parts of a version without zeros at its end."""
    return tuple(int(number) for number in re.sub(r"(\.0)+$", "", version).split("."))


def test_public_names_are_imported_when_asked_for() -> None:
    code = f"import bert_tasks, sys; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""
    assert all(getattr(bert_tasks, name) is not None for name in bert_tasks.__all__)


def test_extras_are_spelled_in_one_way(repository: Path) -> None:
    """Each file and message says ``pip install '.[export]'``: the package is installed from its repository."""
    extras = tomllib.loads((repository / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    written = re.compile(r"""pip install\b[^\n'"]*(?:["' \n]+)([^\s"']*\[(?:\w+,?)+\].?)""")
    tops = (*repository.glob("*.md"), *(repository / "recipes").rglob("*.toml"), *(repository / "docs").rglob("*.md"))
    spellings = set()
    for path in (*tops, *(repository / "bert_tasks").rglob("*.py")):
        spellings |= set(written.findall(path.read_text("utf-8")))
    assert len(spellings) > 5
    assert [text for text in spellings if not re.fullmatch(r"\.\[[\w,]+\]'", text)] == []
    assert {name for text in spellings for name in re.findall(r"\w+", text)} <= {*extras, "extra"}
    others = re.compile(r"bert[-_]tasks\[(?:" + "|".join(extras) + ")")
    assert [path for path in tops if others.search(path.read_text("utf-8"))] == []
