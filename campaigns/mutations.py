"""Owns which faults the mutation campaign can put into a source text, found in its syntax tree.

Docstrings, annotations, decorators, f-strings, messages (strings with a space), ``__repr__``, ``__all__`` and code
under ``TYPE_CHECKING`` are left as they are: no test could, or should, notice a fault there.
"""

import ast
from dataclasses import dataclass
from functools import cached_property

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPPOSITES = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)  # of these a comparison's fault is the negation
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
LONGEST_NAME = 40  # characters of a string that may be a key or a name rather than a text


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One fault: the bytes ``start`` to ``end`` of a source text are replaced.

    ``function`` is the dotted name of the function or class around it, ``""`` at the level of the module.
    """

    operator: str
    function: str
    line: int
    start: int
    end: int
    before: str
    after: str

    @property
    def change(self) -> str:
        """The replacement on one line, which stays the same where the code around it moves."""
        return f"{' '.join(self.before.split())} -> {' '.join(self.after.split())}"

    def apply(self, text: str) -> str:
        data = text.encode()
        return (data[: self.start] + self.after.encode() + data[self.end :]).decode()


@dataclass(frozen=True)
class _Text:
    """A source text by the positions of its syntax tree, which count bytes of a line."""

    text: str

    @cached_property
    def data(self) -> bytes:
        return self.text.encode()

    @cached_property
    def line_starts(self) -> list[int]:
        starts = [0]
        for line in self.data.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        return starts

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self.line_starts[node.lineno - 1] + node.col_offset,
            self.line_starts[node.end_lineno - 1] + node.end_col_offset,
        )


def mutations_of(text: str) -> list[Mutation]:
    """Every fault that can be put into a module, in the order of its text."""
    finder = _Finder(_Text(text))
    finder.visit(ast.parse(text))
    return sorted(finder.found, key=lambda mutation: (mutation.start, mutation.end, mutation.after))


def code_lines(text: str) -> int:
    """Lines on which a statement or an expression begins, without docstrings."""
    tree = ast.parse(text)
    texts = {id(node.value) for node in ast.walk(tree) if _is_text(node) and isinstance(node, ast.Expr)}
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.stmt | ast.expr))
    return len({node.lineno for node in nodes if id(node) not in texts and not _is_text(node)})


def _is_text(node: ast.AST) -> bool:
    """A docstring, of a module, a function, a class or a field."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


class _Finder(ast.NodeVisitor):
    def __init__(self, text: _Text) -> None:
        self.text, self.found, self.scope, self.default = text, list[Mutation](), list[str](), False

    def replace(self, node: ast.expr | ast.stmt, after: str, operator: str) -> None:
        start, end = self.text.span(node)
        before = self.text.data[start:end].decode()
        self.found.append(
            Mutation(
                operator=operator,
                function=".".join(self.scope),
                line=node.lineno,
                start=start,
                end=end,
                before=before,
                after=after,
            )
        )

    def expression(self, node: ast.expr, new: ast.expr, operator: str) -> None:
        self.replace(node, f"({ast.unparse(ast.fix_missing_locations(new))})", operator)

    # Scopes, and what is left as it is.

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name == "__repr__":
            return
        self.scope.append(node.name)
        with_default = [*node.args.defaults, *(value for value in node.args.kw_defaults if value is not None)]
        self.defaults(with_default)
        self.visit_all(node.body)
        self.scope.pop()

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815  # the name that ast.NodeVisitor looks for

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.scope.append(node.name)
        self.visit_all(node.body)
        self.scope.pop()

    def visit_all(self, nodes: list[ast.stmt]) -> None:
        for node in nodes:
            self.visit(node)

    def defaults(self, nodes: list[ast.expr]) -> None:
        before, self.default = self.default, True
        for node in nodes:
            self.visit(node)
        self.default = before

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.defaults([node.value]) if self.scope and self.scope[-1][0].isupper() else self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Left as it is: before Python 3.12 the parts of an f-string have no positions."""

    def visit_Import(self, node: ast.Import) -> None:
        """Left as it is."""

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if not (isinstance(node.value, ast.Name) and node.value.id in {"Literal", "Annotated"}):
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.visit(node.func)
        for argument in node.args:
            self.visit(argument)
        for keyword in node.keywords:
            # `strict` of zip guards what the lines before it make sure of.
            if keyword.arg != "strict":
                self.visit(keyword.value)

    # Statements.

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            self.visit_all(node.orelse)
            return
        self.condition(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self.condition(node.test)
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not _is_constant(node.value, None):
            self.replace(node, "return None", "return value")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call | ast.Await):
            self.replace(node, "pass", "dropped statement")
            self.generic_visit(node)
        elif not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        if "__all__" in names:
            return
        if not names and not any(isinstance(target, ast.Tuple) for target in node.targets):
            self.replace(node, "pass", "dropped statement")
        self.generic_visit(node)

    def dropped(self, node: ast.stmt) -> None:
        self.replace(node, "pass", "dropped statement")
        self.generic_visit(node)

    visit_AugAssign = dropped  # noqa: N815  # the name that ast.NodeVisitor looks for
    visit_Raise = dropped  # noqa: N815  # the name that ast.NodeVisitor looks for
    visit_Continue = dropped  # noqa: N815  # the name that ast.NodeVisitor looks for
    visit_Break = dropped  # noqa: N815  # the name that ast.NodeVisitor looks for

    # Expressions.

    def condition(self, node: ast.expr) -> None:
        """Negated, unless another fault says the same."""
        is_negated = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
        has_opposite = isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], OPPOSITES)
        if not (isinstance(node, ast.Constant) or is_negated or has_opposite):
            self.expression(node, ast.UnaryOp(ast.Not(), node), "negated condition")

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.condition(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self.condition(test)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for index, operator in enumerate(node.ops):
            ops = [*node.ops[:index], COMPARISONS[type(operator)](), *node.ops[index + 1 :]]
            self.expression(node, ast.Compare(node.left, ops, node.comparators), "comparison")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        operator = OPERATORS.get(type(node.op))
        # At the level of a module `A | B` is a type.
        if operator is not None and (self.scope or not isinstance(node.op, ast.BitOr)):
            self.expression(node, ast.BinOp(node.left, operator(), node.right), "operator")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        operator = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self.expression(node, ast.BoolOp(operator, node.values), "operator")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.expression(node, node.operand, "dropped not")
        elif isinstance(node.op, ast.USub):
            self.expression(node, node.operand, "operator")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        changed = _changed(node.value)
        if changed is not None:
            self.expression(node, ast.Constant(changed), "default" if self.default else "constant")


def _is_constant(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _changed(value: object) -> object:
    """Another value of the same type, or None where there is none that a test should notice."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 2 if value else 1.0
    if isinstance(value, str) and 0 < len(value) <= LONGEST_NAME and not any(char.isspace() for char in value):
        return f"{value}X"
    return None
