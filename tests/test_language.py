"""The rules of language for names, phrases, and the punctuation of docstrings.

``language_budget.json`` holds how often each file still breaks a rule. A budget may only fall: lower it when you
correct a file, and delete the entry at 0.
"""

import ast
import inspect
import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from support.sources import Source, package_sources

BUDGET = Path(__file__).with_name("language_budget.json")
# A participle or a pronoun alone says nothing about the value.
NAMES = frozenset(
    ["found", "one", "place", "part", "kind", "given", "known", "stated", "chosen", "own", "made", "wanted", "what"]
)
PHRASES = {
    r"\bof which\b": "repeat the noun",
    r"\bof so many\b": "say 'number of'",
    r"\bso many\b": "say the number, or 'as many as'",
    r"\bsome hundred\b": "about 100",
    r"\bin place of\b": "instead of",
    r"\bthose of\b": "repeat the noun",
    r"\bthat of\b": "repeat the noun",
    r"\bis left out\b|\bare left out\b": "skip",
    r"\bleft alone\b": "is not changed",
    r"\bis refused\b|\bare refused\b": "rejects, raises",
    r"\bwhat became of\b": "the result of",
    r"\bset aside\b": "held out",
    r"^See ``[\w.]+``\.?$": "leave the docstring out",
}
FORBIDDEN = re.compile("|".join(f"(?:{pattern})" for pattern in PHRASES), re.IGNORECASE)
# Docstrings of the whole package: semicolons, and colons that precede no list, example or code. Both may only fall.
MAX_SEMICOLONS = 0
MAX_PROSE_COLONS = 5
# Text of docstrings that is no part of a sentence.
NO_PROSE = re.compile(
    r"""``.*?``|`[^`]*`|"[^"]*"                     # code and quotations
    |^\s*>>>.*?(?=\n\s*\n|\Z)|^\w+::?$            # doctests and headings
    |^\ {4}\w+(?:,\s+\w+)*:\ |\b(?:Default|Shape\ legend|Sources?|Example):  # names of arguments and labels
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
# Text of pages that is no part of a sentence.
NO_PAGE_PROSE = re.compile(
    r"""^```.*?^```$|^\ {4}\S.*?$|`[^`]*`           # code
    |(?<=\])\([^)]*\)|:(?=\s*\n\s*(?:\n|[-|\d]))  # addresses of links, and colons before a list or an example
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
MAX_COLONS_OF_PAGES = 13
PROSE_COLON = re.compile(r":\s+[A-Za-z(]")
# Strings of the package that join statements, without docstrings. May only fall.
MAX_JOINED_MESSAGES = 73
# What may stand before the colon of a message: a location, or the name of a value.
LOCATION = re.compile(r"^(?:\S*\{\}\S*|`?[\w.]+`?|[\w() ]{1,30}(?=: \{)): ")
# Defaults in helps, quoted code, and HTML.
NO_MESSAGE = re.compile(r"""Default: |"[^"]*"|'[^']*'|<.*|; \w[\w-]*[-:].*""", re.DOTALL)
FRONTED = re.compile(r"(?:^|[.!?]\s+|\n\s*\n\s*|: )(?:What|Whether|Of)\s[^.?!|]*[.!]")


def bad_names(source: Source) -> int:
    """Assignments, loop variables, also of comprehensions, and parameters with a forbidden name."""
    return sum(
        (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in NAMES)
        or (isinstance(node, ast.arg) and node.arg in NAMES)
        for node in ast.walk(source.tree)
    )


def bad_phrases(text: str) -> int:
    return len(FORBIDDEN.findall(text))


def docstring_prose(source: Source) -> str:
    """The sentences of docstrings, also of fields, without code and names of arguments."""
    statements = (node.value for node in ast.walk(source.tree) if isinstance(node, ast.Expr))
    texts = (node.value for node in statements if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return "\n".join(NO_PROSE.sub("`", inspect.cleandoc(text)) for text in texts)


def joined_sentences(sources: Iterable[Source]) -> tuple[int, int]:
    """The numbers of semicolons and of prose colons in docstrings."""
    texts = [docstring_prose(source) for source in sources]
    return sum(text.count(";") for text in texts), sum(len(PROSE_COLON.findall(text)) for text in texts)


def messages(source: Source) -> Iterable[str]:
    """The strings of a file without docstrings, with ``{}`` for values."""
    nodes = list(ast.walk(source.tree))
    skipped = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    skipped |= {id(piece) for node in nodes if isinstance(node, ast.JoinedStr) for piece in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(piece.value) if isinstance(piece, ast.Constant) else "{}" for piece in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.value


def joins(message: str) -> int:
    """The number of colons after the location and semicolons in a string of several words."""
    text = NO_MESSAGE.sub("", LOCATION.sub("", message))
    return len(re.findall(r": |;", text)) if " " in message.strip() else 0


def prose(source: Source) -> str:
    """Docstrings, messages and comments."""
    strings = (
        node.value for node in ast.walk(source.tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    comments = (line.partition("#")[2] for line in source.text.splitlines() if "#" in line)
    return "\n".join([*strings, *comments])


def documents(repository: Path) -> list[Path]:
    return sorted(
        [*repository.glob("*.md"), *(repository / "benchmarks").glob("*.md"), *(repository / "docs").rglob("*.md")]
    )


def breaches(repository: Path = Path()) -> Counter[str]:
    """How often each file breaks a rule, by its path in the repository."""
    counts: Counter[str] = Counter()
    for source in package_sources():
        counts[f"bert_tasks.{source.name}"] = bad_names(source) + bad_phrases(prose(source))
    for path in documents(repository):
        counts[path.relative_to(repository).as_posix()] = bad_phrases(path.read_text(encoding="utf-8"))
    return +counts


def test_no_file_breaks_more_rules_than_its_budget(repository: Path) -> None:
    budget = json.loads(BUDGET.read_text(encoding="utf-8"))
    assert breaches(repository) == budget, "correct the file, or lower its budget to what is left"


def test_tests_and_benchmarks_have_no_vague_names(repository: Path) -> None:
    paths = sorted([*(repository / "tests").rglob("*.py"), *(repository / "benchmarks").glob("*.py")])
    sources = [Source(str(path.relative_to(repository)), path.read_text(encoding="utf-8")) for path in paths]
    assert {source.name: count for source in sources if (count := bad_names(source))} == {}


def test_docstrings_join_no_more_sentences() -> None:
    semicolons, colons = joined_sentences(package_sources())
    assert semicolons <= MAX_SEMICOLONS, "write 'because', 'so' or 'but', or begin a sentence"
    assert colons <= MAX_PROSE_COLONS, "begin a sentence; a colon precedes a list, an example or code"


def test_pages_join_no_more_sentences(repository: Path) -> None:
    pages = [repository / "README.md", *(repository / "docs").rglob("*.md")]
    texts = {
        path.name: NO_PAGE_PROSE.sub("`", path.read_text(encoding="utf-8"))
        for path in pages
        if path.parent.name != "reference"
    }
    assert [name for name, text in texts.items() if ";" in text] == []
    assert sum(len(re.findall(r":\s", text)) for text in texts.values()) <= MAX_COLONS_OF_PAGES


def test_messages_join_no_more_statements() -> None:
    texts = [text for source in package_sources() for text in messages(source) if joins(text)]
    assert sum(map(joins, texts)) <= MAX_JOINED_MESSAGES, "begin a sentence: what happened, then what to do"


def test_few_sentences_begin_with_a_clause(repository: Path) -> None:
    pages = [path.read_text(encoding="utf-8") for path in documents(repository)]
    assert [match for text in pages for match in FRONTED.findall(NO_PAGE_PROSE.sub("`", text))] == []
    assert sum(len(FRONTED.findall(docstring_prose(source))) for source in package_sources()) == 0


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ('raise E(f"{path}:{line}: unknown label. Did you mean x?")', 0),
        ('raise E(f"{path}: no such file: check the name")', 1),
        ('raise E("no such file; check the name")', 1),
        ('print(f"Device: {device}")', 0),
        ('x = ";".join(names)', 0),
        ('def f():\n    """Reads: a; b."""', 0),
    ],
)
def test_joined_statements_of_messages_are_counted(code: str, count: int) -> None:
    assert sum(map(joins, messages(Source("model.x", code)))) == count


@pytest.mark.parametrize("text", ["What it reads is text.", "One. Whether it runs is unknown.", "Of these, one."])
def test_fronted_clauses_are_counted(text: str) -> None:
    assert len(FRONTED.findall(text)) == 1
    assert FRONTED.findall("What is it? The rows.") == []


@pytest.mark.parametrize(
    "text", ["One; two.", "It is this: one.", "A list:\nnot one", "| a cell: this |", "See [x; y](page.md)."]
)
def test_joined_sentences_of_pages_are_counted(text: str) -> None:
    assert len(re.findall(r";|:\s", NO_PAGE_PROSE.sub("`", text))) == 1


@pytest.mark.parametrize(
    "text", ["A list:\n\n- one", "A list:\n- one", "Code: `a; b`"[6:], "```\na; b: c\n```", "    a; b"]
)
def test_code_and_lists_of_pages_are_not_counted(text: str) -> None:
    assert re.findall(r";|:\s", NO_PAGE_PROSE.sub("`", text)) == []


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ('def f():\n    """Returns x; y stays."""', (1, 0)),
        ('def f():\n    """Returns one number: the mean."""', (0, 1)),
        ('def f():\n    """Returns one number:\n    the mean.\n    """', (0, 1)),
        ('class A:\n    x: int\n    """The size: in tokens; or rows."""', (1, 1)),
        (
            'def f(x):\n    """Doubles.\n\n    Args:\n        x: One; 0.\n        y: one: two.\n    """',
            (1, 1),
        ),
        ('def f(x):\n    """Doubles.\n\n    Args:\n        x, y: Numbers. Default: the mean.\n    """', (0, 0)),
        ('def f():\n    """Doubles.\n\n    Example:\n        >>> f()\n        {a: b; c}\n    """', (0, 0)),
        ('def f():\n    """Reads ``a: b; c``, "a; b" and these formats:\n\n    - csv\n    """', (0, 0)),
        ('x = "a; b: c"', (0, 0)),
    ],
)
def test_joined_sentences_are_counted(text: str, counts: tuple[int, int]) -> None:
    assert joined_sentences([Source("model.x", text)]) == counts


@pytest.mark.parametrize(
    "text",
    [
        "found = 1",
        "for one in rows:\n    f(one)",
        "x = [one for one in rows]",
        'x = "".join(f"{part}" for part in parts)',
        "def f(kind): ...",
        'x = "a list, of which the first counts"',
        "x = 1  # in place of y",
        'def f():\n    """See ``Task``."""',
    ],
)
def test_breach_is_counted(text: str) -> None:
    source = Source("model.x", text)
    assert bad_names(source) + bad_phrases(prose(source)) == 1


@pytest.mark.parametrize("text", ["x = [row for row in rows]", "match = 1", 'x = "instead of a list"'])
def test_plain_language_passes(text: str) -> None:
    source = Source("model.x", text)
    assert bad_names(source) + bad_phrases(prose(source)) == 0
