"""Mistakes for C++ sources: edits of lines that are a whole statement or condition, found by their text."""

from __future__ import annotations

import re
from collections.abc import Iterator

from planting.mistake import Edit

__all__ = ["cpp_mistakes"]

_NAME = r"[A-Za-z_][\w.]*"
_DECLARATION = r"template|using|namespace|static_assert|class|struct|enum|case|public|private"
_NO_CODE = re.compile(rf'^\s*(//|#|\*|/\*|{_DECLARATION})|"')
_DANGEROUS = re.compile(r"kill|unlink|remove")  # with another argument they may concern other programs
_CALL = re.compile(rf"^(\s+)((?:{_NAME}(?:->|::))*{_NAME})\(.*\);$")
_VERIFY = re.compile(r"check|verify|validate|require|compare|ensure|expect|reject", re.IGNORECASE)
_RANK = r"(?:root|src|dst|peer|source|target|rank|mine|rank_)"
_CONDITION = re.compile(r"^(\s+)if \((.*)\)( \{)?$")
_RAISE = re.compile(r"\s+(throw|fail|die)\b")
_SUBSTITUTIONS = (
    ("swapped operands", re.compile(rf"({_NAME}) (-|/|%) ({_NAME})(?=[;,) ])"), r"\3 \2 \1"),
    ("swapped operands", re.compile(rf"({_NAME}) (<|>|<=|>=) ({_NAME})(?=[;,) ])"), r"\3 \2 \1"),
    ("off by one", re.compile(rf"({_NAME}) < (?=[\w(])"), r"\1 <= "),
    ("off by one", re.compile(rf"({_NAME}) > (?=[\w(])"), r"\1 >= "),
    ("off by one", re.compile(r" [+-] 1(?=[;,)\]])"), ""),
    ("wrong root", re.compile(rf"== ({_RANK})\b"), r"!= \1"),
    ("wrong root", re.compile(rf"\b({_RANK}) == "), r"\1 != "),
    ("missing check", re.compile(r"\bif \((.*)\) (throw|fail)\b"), r"if (false && (\1)) \2"),
    ("negated check", re.compile(r"\bif \((.*)\) (return|continue|break)\b"), r"if (!(\1)) \2"),
)


def cpp_mistakes(text: str) -> Iterator[Edit]:
    """The edits of a source, in the order of its lines."""
    before = ""
    lines = text.splitlines()
    for number, (line, after) in enumerate(zip(lines, [*lines[1:], ""], strict=True), 1):
        code = line.partition("//")[0].rstrip()
        if not _NO_CODE.search(line) and not _DANGEROUS.search(line):
            starts_statement = before.endswith((";", "{", "}", ":"))
            if starts_statement and (found := _CALL.match(code)) and code.count("(") == code.count(")"):
                kind = "skipped verify" if _VERIFY.search(found[2]) else "dropped call"
                yield Edit(kind, number, f"{found[1]};")
            if (found := _CONDITION.match(code)) and _RAISE.match(after):
                yield Edit("missing check", number, f"{found[1]}if (false && ({found[2]})){found[3]}")
            for kind, pattern, new in _SUBSTITUTIONS:
                if (changed := pattern.sub(new, code, count=1)) != code:
                    yield Edit(kind, number, changed)
        before = code or before
