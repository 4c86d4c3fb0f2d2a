"""The documents are true: their code runs and prints what they say, links lead somewhere, commands, recipe keys and the
tests that are named exist, and the reference is what the package says of itself."""

import dataclasses
import re
import shlex
import shutil
import time
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from transformers import TrainingArguments

import generate_reference as reference
from bert_tasks import TaskModel, load_recipe
from bert_tasks.cli.app import app
from bert_tasks.families import FAMILIES
from bert_tasks.families.base import VALUE_REASONS
from bert_tasks.recipe import arguments
from bert_tasks.recipe.schema import Recipe
from bert_tasks.tasks import TASKS
from support.documents import (
    Block,
    Page,
    agrees,
    anchors,
    blocks,
    broken_links,
    inline_code,
    is_exempt,
    program_lines,
    prose,
    shows,
)
from support.hf_models import VERSION
from support.reference import documented

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ALL_PAGES = sorted(
    [*ROOT.glob("*.md"), *(path for name in ("benchmarks", "docs", "recipes") for path in (ROOT / name).rglob("*.md"))]
)
UsageError = typer.BadParameter.__mro__[1]  # typer has no public name for it


def runs(block: Block) -> bool:
    return block.language in ("python", "sh") and not is_exempt(block)


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def shown(page: Path) -> str:
    return str(page.relative_to(ROOT) if page.is_relative_to(ROOT) else page)


RUNNABLE = [page for page in sorted(DOCS.rglob("*.md")) if any(map(runs, blocks(read(page))))]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like the repository to a page: it holds the recipes."""
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / ".hf"))
    return tmp_path


ENGINES = {"pyspark", "ray"}  # of the extra `engines`, which `dev` does not hold
_WARNS = pytest.mark.filterwarnings("ignore")  # these libraries lag behind pandas and Python


def page_case(page: Path) -> Any:
    return pytest.param(page, id=shown(page), marks=_WARNS if any(map(engines_of, blocks(read(page)))) else ())


def engines_of(block: Block) -> set[str]:
    """The engines that a block imports."""
    return ENGINES & set(re.findall(r"^(?:from|import) (\w+)", block.text, flags=re.MULTILINE))


@pytest.mark.slow  # pages start dozens of processes; the README's Python runs among the quick tests
@pytest.mark.parametrize("page", [*map(page_case, RUNNABLE)])
def test_code_of_the_page_prints_what_the_page_says(
    page: Path, workplace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runner = Page(shown(page), capture=capfd)
    try:
        for block in filter(runs, blocks(read(page))):
            for engine in sorted(engines_of(block)):
                pytest.importorskip(engine, reason="run by `make engines`")
            printed = runner.run(block)
            assert shows(block, printed), f"{shown(page)}:{block.line} printed:\n{printed}"
    finally:
        runner.close()


def test_pages_with_code_are_found() -> None:
    assert {DOCS / "tutorials" / "first_model.md", DOCS / "how_to" / "serve.md"} <= set(RUNNABLE)


def test_every_link_leads_somewhere() -> None:
    texts = {page.resolve(): read(page) for page in ALL_PAGES}
    assert [problem for page in texts for problem in broken_links(page, texts)] == []


def test_every_page_is_in_the_index_and_in_the_navigation_of_the_site() -> None:
    index = read(DOCS / "README.md") + read(DOCS / "reference" / "README.md").replace("](", "](reference/")
    navigation = read(ROOT / "mkdocs.yml")
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"README.md"}
    assert {page for page in pages if f"]({page})" not in index} == set()
    assert {page for page in pages if not re.search(rf"[:-] {re.escape(page)}$", navigation, re.MULTILINE)} == set()


@cache
def command_line() -> tuple[Any, dict[str, Any]]:
    """The real one: its root, and every command by its name."""
    group = typer.main.get_command(app)
    return group, reference.commands(group)


def command_problems(page: Path) -> Iterator[str]:
    text = read(page)
    for block in blocks(text):
        if block.language in ("sh", "console"):
            for command in block.commands:
                yield from (f"{shown(page)}:{block.line}: {problem}" for problem in parsed(command, whole=True))
    for span in inline_code(text):
        yield from (f"{shown(page)}: {problem}" for problem in parsed(span, whole=False))


def parsed(text: str, *, whole: bool) -> Iterator[str]:
    """What the real command line has against the command in a text; where it is not ``whole``, it may lack values."""
    for line in program_lines(text):
        plain = line if whole else re.sub(r"[\[\]]|\.\.\.", " ", line)
        arguments = [argument for argument in shlex.split(plain, comments=True) if argument != "--debug"]
        try:
            yield from _wrong_keys(arguments)
        except UsageError as error:
            if whole or type(error).__name__ != "MissingParameter":
                yield f"bert-tasks {line}: {error.format_message()}"


def _wrong_keys(arguments: list[str]) -> Iterator[str]:
    group, named = command_line()
    words = next((n for n in (2, 1) if " ".join(arguments[:n]) in named), 0)
    if not words:
        options = {"-h", "--help", *(name for option in group.params for name in option.opts)}
        if arguments and arguments[0] not in options:
            yield f"bert-tasks {shlex.join(arguments)}: no such command"
        return
    name = " ".join(arguments[:words])
    if {"-h", "--help"} & set(arguments):
        return
    context = named[name].make_context(name, arguments[words:])
    for pair in context.params.get("set_") or ():
        key = pair.partition("=")[0]
        of_task = name not in ("train", "check", "search")
        if key != "KEY" and not is_key(f"settings.{key.removeprefix('settings.')}" if of_task else key):
            yield f"--set {pair}: no such key"


@cache
def keys() -> dict[str, set[str]]:
    """The keys of every section; those of any task for settings."""
    schema = Recipe.model_json_schema()
    sections = {"model": "ModelSection", "data": "DataSpec", "optim": "OptimSection", "run": "RunSection"}
    sections |= {"teacher": "TeacherSection", "folds": "FoldsSection"}
    names = {name: set(schema["$defs"][definition]["properties"]) for name, definition in sections.items()}
    settings = {name for task in TASKS.values() for name in task.settings_by_name()}
    names["search"] = names["optim"] | set(schema["$defs"]["SearchSection"]["properties"])
    return {**names, "settings": settings, "task": set()}


def is_key(path: str) -> bool:
    section, _, rest = path.partition(".")
    names = keys()
    if section == "tasks":  # its keys are the names of tasks; reading the recipe checks what is below
        return True
    return section in names and (not rest or rest.split(".")[0] in names[section])


KEY = re.compile(r"(?<![\w./\-])((?:model|data|optim|run|settings|teacher|folds|search)\.([a-z]\w*))(?![\w(/]|\.\w+\()")
FILES = ("json", "jsonl", "lock", "toml", "safetensors", "onnx", "py", "md", "csv", "html")
# What a model in Python has, and run.json under "model".
OF_MODELS = {*vars(TaskModel), "commit", "task", "tokenizer", "config", "hf_config", "load_report"}


def key_problems(page: Path) -> Iterator[str]:
    for span in inline_code(read(page)):
        for key, name in KEY.findall(span):
            is_python = key.startswith("model.") and name in OF_MODELS
            if name not in FILES and not is_python and not is_key(key):
                yield f"{shown(page)}: `{span}`: a recipe has no key {key}"


def recipe_problems(page: Path, folder: Path) -> Iterator[str]:
    for block in blocks(read(page)):
        if block.language != "toml":
            continue
        document: dict[str, Any] = tomllib.loads(block.text)
        is_whole = {"model", "data"} <= set(document) and {"task", "tasks"} & set(document)
        if is_whole and ":" not in document.get("task", ""):
            (folder / "recipe.toml").write_text(block.text, encoding="utf-8")
            load_recipe(folder / "recipe.toml")
        for section, entries in document.items():
            names = entries if isinstance(entries, dict) else {}
            wrong = [name for name in names if not is_key(f"{section}.{name}")] if is_key(section) else [section]
            yield from (f"{shown(page)}:{block.line}: [{section}] {name}: no such key" for name in wrong)


def test_every_command_line_parses() -> None:
    assert [problem for page in ALL_PAGES for problem in command_problems(page)] == []


def test_every_recipe_key_exists(tmp_path: Path) -> None:
    assert [problem for page in ALL_PAGES for problem in key_problems(page)] == []
    assert [problem for page in ALL_PAGES for problem in recipe_problems(page, tmp_path)] == []


def test_arguments_of_fit_are_the_keys_of_the_sections() -> None:
    path = Path(arguments.__file__)
    assert path.read_text("utf-8") == reference.arguments_module(), (
        "recipe/arguments.py is out of date: run `make docs`"
    )


@pytest.mark.parametrize("name", reference.PAGES)
def test_reference_is_what_the_package_says(name: str) -> None:
    written = read(ROOT / reference.FOLDER / name)
    assert written == reference.PAGES[name](), f"docs/reference/{name} is out of date: run `make docs`"


def test_every_import_of_a_page_is_in_the_reference() -> None:
    named = set(documented(DOCS / "reference"))
    imports = {
        (f"{module}.{name}", shown(page))
        for page in (ROOT / "README.md", *DOCS.rglob("*.md"))
        for module, names in re.findall(r"\bfrom (bert_tasks[\w.]*) import (\w+(?:, \w+)*)", read(page))
        for name in names.split(", ")
    }
    assert len(imports) > 20
    assert [(name, page) for name, page in sorted(imports) if name not in named] == []


def test_every_key_and_option_has_a_meaning() -> None:
    for name in ("cli.md", "recipe.md"):
        rows = re.findall(r"^\| `.*\|$", read(ROOT / reference.FOLDER / name), flags=re.MULTILINE)
        assert len(rows) > 20
        assert [row for row in rows if row.endswith("|  |")] == [], "give them a help text or a docstring: `make docs`"


@pytest.mark.skipif(VERSION < (5, 23), reason="the page is about transformers 5.23")
def test_arguments_of_the_comparison_exist() -> None:
    """The rows about the Trainer name arguments that the installed transformers has."""
    text = read(DOCS / "comparison.md")
    table = text[text.index("## TrainingArguments") :].split("\n## ")[0].split("\n## ")[0]
    named = {
        name for row in re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert len(named) > 20
    assert named - fields == set()


def test_the_page_on_installing_lists_every_extra_with_its_packages_and_the_minimum_versions() -> None:
    project = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]
    text = read(DOCS / "how_to" / "install.md")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", text, flags=re.MULTILINE))
    extras = {
        name: ", ".join(sorted(re.split(r"[\[>=]", requirement)[0] for requirement in requirements))
        for name, requirements in project["optional-dependencies"].items()
    }
    assert rows == {name: packages for name, packages in extras.items() if name not in {"dev", "fuzz"}}
    assert f"Python {project['requires-python'].removeprefix('>=')} or newer" in text
    for name in ("torch", "transformers"):
        (minimum,) = [value.partition(">=")[2] for value in project["dependencies"] if re.match(rf"{name}>=", value)]
        assert f"{name} {minimum} or newer" in text


def test_guarantees_name_tests_that_exist() -> None:
    table = read(DOCS / "guarantees.md").partition("| guarantee |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (.*) \|$", table, flags=re.MULTILINE)
    assert len(rows) > 8
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", row)
        assert named, row
        for file, test in named:
            assert f"def {test}" in read(ROOT / file), row


def test_every_command_is_in_the_changelog() -> None:
    section = read(ROOT / "CHANGELOG.md").split("### Command line\n")[1]
    listed = set(re.findall(r"`([a-z-]+)`", section.split(";")[0]))
    assert listed == {name.split()[0] for name in command_line()[1]}


def test_the_table_of_heads_names_every_head_that_a_family_lacks() -> None:
    heads = {"span": "span extraction", "choice": "multiple choice", "masked-lm": "masked language modelling"}
    rows = re.findall(
        r"^\| (.+?) \| (.+?) \| .+? \|$", read(DOCS / "tasks.md").partition("## Heads of the families")[2], re.M
    )
    named = {
        (family.lower(), head)
        for families, lacks in rows[1:]
        for family in families.split(", ")
        for head in lacks.split(", ")
    }
    lacking = {
        (family.model_type.replace("_", ""), name)
        for family in FAMILIES.values()
        for head, name in heads.items()
        if head not in family.heads
    }
    assert named == lacking


def test_the_table_of_config_values_has_every_field_with_its_reason() -> None:
    rows = re.findall(
        r"^\| (`.+`) \| (.+?) \|$", read(DOCS / "tasks.md").partition("## Values of config.json")[2], re.M
    )
    assert {field: reason for fields, reason in rows for field in re.findall(r"`(\w+)`", fields)} == VALUE_REASONS
    assert {name for family in FAMILIES.values() for name in family.only_values} == VALUE_REASONS.keys()


def test_the_page_on_data_names_every_task_that_is_found() -> None:
    (detected,) = re.findall(r"the columns fit: (.*?)\. ", read(DOCS / "how_to" / "data.md").replace("\n", " "))
    spellings = {name.replace("-", " ").replace("modeling", "modelling") for name in TASKS}
    assert {name for name in spellings if name not in detected} == {"replaced token detection"}


# What the checks above are made of, on pages with faults.


@pytest.mark.parametrize(
    ("printed", "expected", "verdict"),
    [
        ("a 0.97\n", "a 0.95", True),
        ("a 0.97", "b 0.97", False),
        ("a 0.97", "a 0.7", False),
        ("a", "a 0.7", False),
        ("f1   80.5", "f1 84.2", True),
        ("4,762  README.md\n544  x", "4,701 README.md\n544 x", True),
        ("4,762  README.md\n544  x", "3,701 README.md\n544 x", False),
        ("4,762  README.md\n544  x", "4,701 README.md\n545 x", False),
        ("f1 60.5", "f1 84.2", False),
        ("a\nb\nc\nd 0.5\n", "a\n...\nd 0.5\n", True),
        ("a\nd 0.5\n", "a\n...\nd 0.5\n", True),
        ("a\nb\n", "a\n...\nd 0.5\n", False),
        ("a\nb\n", "a\n...\n", True),
        ("model: /a/b/model\n", "model: .../b/model", True),
        ("model: /a/c/model\n", "model: .../b/model", False),
    ],
)
def test_comparison_of_outputs(printed: str, expected: str, verdict: bool) -> None:
    assert agrees(printed, expected) is verdict


def test_after_several_commands_the_last_ones_may_be_shown() -> None:
    several = Block(language="sh", text="a\nb\n", line=1, following="2\n")
    block = Block(language="sh", text="a\n", line=1, following="2\n")
    assert shows(several, "1\n2\n")
    assert not shows(several, "2\n1\n")
    assert not shows(block, "1\n2\n")
    assert shows(Block(language="sh", text="a\n", line=1), "anything")


def test_blocks_are_found() -> None:
    page = (
        "```sh\na \\\n  b\n```\n\n```text\nout\n```\n\n  ```sh\n  no\n  ```\n"
        "```python\nx = 1\n```\nwords\n```text\ny\n```\n"
    )
    shell, output, python, text = blocks(page)
    assert (shell.commands, shell.following, python.following) == (["a b"], "out\n", None)
    assert (output.language, text.language, python.line) == ("text", "text", 13)
    assert "x = 1" not in prose(page)


def test_code_that_fails_is_told(workplace: Path) -> None:
    runner = Page("page.md")
    with pytest.raises(AssertionError, match="exit code 3"):
        runner.run(Block(language="sh", text="(exit 3)\ntrue\n", line=1))
    with pytest.raises(AssertionError, match="error: lost"):
        runner.run(Block(language="sh", text="echo error: lost >&2 | cat\n", line=1))
    with pytest.raises(ZeroDivisionError):
        runner.run(Block(language="python", text="1 / 0\n", line=1))
    assert runner.run(Block(language="python", text="# kept.py\nx = 1\nprint(x)\n", line=1)) == "1\n"
    assert runner.run(Block(language="sh", text="python -c 'import kept'\npip install x\n", line=1)) == "1\n"
    assert runner.run(Block(language="sh", text="pip install x\nmake y\n", line=1)) == ""


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("bert-tasks check x.toml\n\n# a comment\nbert-tasks env \\\n  --json\n", True),
        ("""bert-tasks predict model --text "a; b > c" --set 'x=[{y="$z"}]'\n""", True),
        ("bert-tasks env | head\n", False),
        ("bert-tasks serve model &\n", False),
        ("bert-tasks env > env.txt\n", False),
        ("bert-tasks check x.toml || true\n", False),
        ("PYTHONPATH=. bert-tasks check x.toml\n", True),
        ("PYTHONPATH=/tmp bert-tasks check x.toml\n", False),
        ('bert-tasks check "$RECIPE"\n', False),
        ("bert-tasks report runs/*\n", False),
        ("bert-tasks env\nls\n", False),
    ],
)
def test_plain_blocks_need_no_shell(text: str, verdict: bool) -> None:
    assert Block(language="sh", text=text, line=1).is_plain is verdict


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "cat > x <<END\n\n# a\nb\nEND\nbert-tasks check x\n",
            ["cat > x <<END\n\n# a\nb\nEND\n", "bert-tasks check x\n"],
        ),
        (
            "sed 's/a$/b/' x && ls\nbert-tasks env \\\n  --json\n",
            ["sed 's/a$/b/' x && ls\n", "bert-tasks env --json\n"],
        ),
        ("bert-tasks env\n\n# a comment\nbert-tasks env\n", ["bert-tasks env\n\n# a comment\nbert-tasks env\n"]),
        ("sleep 1 &\nbert-tasks env\n", ["sleep 1 &\nbert-tasks env\n"]),
        ("for x in a b; do\n  bert-tasks check $x\ndone\n", ["for x in a b; do\n  bert-tasks check $x\ndone\n"]),
        ("cd runs\nbert-tasks env\n", ["cd runs\nbert-tasks env\n"]),
    ],
)
def test_other_blocks_are_divided_unless_commands_share_the_shell(text: str, parts: list[str]) -> None:
    assert [part.text for part in Block(language="sh", text=text, line=1).parts] == parts


def test_plain_blocks_run_in_this_process(workplace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    runner = Page("page.md", capture=capfd)
    version = Block(language="sh", text="bert-tasks --version\n", line=1)
    failing = Block(language="sh", text="bert-tasks --version\nbert-tasks inspect none\nbert-tasks env\n", line=1)
    kept = Block(language="python", text="# kept.py\n", line=1)
    runner.environment["PATH"] = ""  # no process can be started
    assert re.fullmatch(r"bert-tasks [\d.]+\n", runner.run(version))
    with pytest.raises(AssertionError, match=r"exit code 4\n(.*\n)*\nbert-tasks [\d.]+\n\nerror: none"):
        runner.run(failing)
    runner.run(kept)
    with pytest.raises(FileNotFoundError, match="bash"):
        runner.run(version)
    finding = Block(language="sh", text="PYTHONPATH=. bert-tasks --version\n", line=1)
    assert runner.run(finding) == runner.run(finding) != ""


def test_what_a_page_leaves_running_is_ended(workplace: Path) -> None:
    runner = Page("page.md")
    pid = int(runner.run(Block(language="sh", text="sleep 600 & echo $!\n", line=1)))
    runner.close()
    end = time.monotonic() + 60
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.01)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    """Whether a process is there, and not only waits to be counted."""
    stat = Path("/proc") / str(pid) / "stat"
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(
    "text",
    [
        "`bert-tasks trian recipe.toml`",
        "`bert-tasks train recipe.toml --epochs 3`",
        "```sh\nbert-tasks train\n```\n",
        "```sh\nhead x.csv | NO_COLOR=1 .venv/bin/bert-tasks check --fast\n```\n",
        "```sh\ntorchrun --nproc_per_node 2 -m bert_tasks train recipe.toml --set optim.epoch=1\n```\n",
        "```sh\nbert-tasks evaluate model x.csv --set max_lenght=3\n```\n",
        "    bert-tasks train recipe.toml --fast\n",
    ],
)
def test_wrong_command_is_found(text: str, tmp_path: Path) -> None:
    right = "`bert-tasks train RECIPE [--set KEY=VALUE]...`, `bert-tasks --help`, `docker build -t bert-tasks .`"
    (tmp_path / "page.md").write_text(f"{text}\n\n{right}\n")
    assert len(list(command_problems(tmp_path / "page.md"))) == 1


def test_wrong_keys_and_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Two words\n\n`optim.epoch`, `run.json`, `model.predict(x)`, `model/model.safetensors`, `optim.epochs`\n"
        "[a](page.md#two-words) [b](page.md#three) [c](none.md) [d](https://x.org)\n```toml\n[optim]\nepocs = 3\n```\n"
    )
    assert [problem.rpartition(" ")[2] for problem in key_problems(page)] == ["optim.epoch"]
    assert len(list(recipe_problems(page, tmp_path))) == 1
    assert len(list(broken_links(page, {page: read(page)}))) == 2
    assert anchors("# A `b` & c\n# A\n# A\n") == {"a-b--c", "a", "a-1"}
