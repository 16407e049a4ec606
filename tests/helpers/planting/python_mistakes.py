"""Mistakes for Python sources: edits of one line, found in the syntax tree."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from planting.mistake import Edit

__all__ = ["python_mistakes"]

_WAIT = re.compile(r"wait|join|barrier|synchronize|flush|close|release|destroy|acquire|set|record|update|stop")
_VERIFY = re.compile(r"check|verify|validate|prove|agree|compare|require|assert|ensure|raise_")
_RANK = re.compile(r"root|src|dst|source|target|peer|rank|left|right")
_TEXT = re.compile(r"print|warn|log|write|help|add_argument|append")  # calls whose loss changes a text only
_DANGEROUS = re.compile(r"kill|unlink|rmtree|remove")  # with another argument they may concern other programs
_FLIPPED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
_SIGN = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
_OTHER = {"==": "!=", "!=": "=="}


def python_mistakes(text: str) -> Iterator[Edit]:
    """The edits of a source, in the order of its syntax tree."""
    lines = text.splitlines()
    for edit in _edits(text, lines):
        old = lines[edit.number - 1]
        if edit.text != old and not _DANGEROUS.search(old):
            yield edit


def _edits(text: str, lines: list[str]) -> Iterator[Edit]:
    for node in _code_nodes(ast.parse(text)):
        if getattr(node, "lineno", None) is not None and node.lineno == node.end_lineno:  # type: ignore[attr-defined]
            for kind, new in _of_node(node, text):
                number = node.lineno  # type: ignore[attr-defined]
                yield Edit(kind, number, _replaced(lines[number - 1], node, new))
        if isinstance(node, ast.If) and node.test.lineno == node.test.end_lineno:
            for kind, new in _of_check(node, text):
                yield Edit(kind, node.test.lineno, _replaced(lines[node.test.lineno - 1], node.test, new))


def _code_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of what runs: no annotations, no texts, and no exceptions, which are mostly texts."""
    if isinstance(node, ast.JoinedStr | ast.Raise):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not (isinstance(node, ast.If) and _is_type_checking(node)):
                yield from _code_nodes(child)


def _is_type_checking(node: ast.If) -> bool:
    return "TYPE_CHECKING" in ast.dump(node.test)


def _of_node(node: ast.AST, text: str) -> Iterator[tuple[str, str]]:
    def source(part: ast.AST) -> str:
        return ast.get_source_segment(text, part) or ""

    if isinstance(node, ast.BinOp):
        left, right = source(node.left), source(node.right)
        texts = any(isinstance(part, ast.Constant | ast.JoinedStr) for part in (node.left, node.right))
        if isinstance(node.op, ast.Sub | ast.FloorDiv | ast.Mod) and not texts:
            sign = {ast.Sub: "-", ast.FloorDiv: "//", ast.Mod: "%"}[type(node.op)]
            yield "swapped operands", f"({right}) {sign} ({left})"
        if isinstance(node.op, ast.Add | ast.Sub) and isinstance(node.right, ast.Constant) and node.right.value == 1:
            yield "off by one", left
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = source(node.left), source(node.comparators[0])
        sign = _SIGN.get(type(node.ops[0]), "")
        if type(node.ops[0]) in _FLIPPED:
            yield "off by one", f"{left} {_FLIPPED[type(node.ops[0])]} {right}"
            yield "swapped operands", f"{right} {sign} {left}"
        if sign in _OTHER and _RANK.search(left + right):
            yield "wrong root", f"{left} {_OTHER[sign]} {right}"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = source(node.value.func)
        name = called.rpartition(".")[2]
        if _VERIFY.search(name):
            yield "skipped verify", "pass"
        elif _WAIT.search(name) and not _TEXT.search(called):
            yield "dropped call", "pass"
    elif isinstance(node, ast.Call):
        for argument in node.args:
            if isinstance(argument, ast.Name) and _RANK.fullmatch(argument.id):
                yield "wrong root", source(node).replace(f"({argument.id}", f"({argument.id} + 1", 1)


def _of_check(node: ast.If, text: str) -> Iterator[tuple[str, str]]:
    condition = ast.get_source_segment(text, node.test) or ""
    if isinstance(node.body[-1], ast.Raise) and not node.orelse:
        yield "missing check", f"False and ({condition})"
    elif isinstance(node.body[-1], ast.Return | ast.Continue | ast.Break):
        yield "negated check", f"not ({condition})"


def _replaced(line: str, node: ast.AST, new: str) -> str:
    """The line with a node's text replaced; offsets of ``ast`` count bytes."""
    content = line.encode()
    begin, end = node.col_offset, node.end_col_offset  # type: ignore[attr-defined]
    return (content[:begin] + new.encode() + content[end:]).decode()
