"""A source includes the standard headers of what it uses, itself or by a header of ours.

The headers of one compiler include others, which those of the next version do not: GCC 13 refused a source that used
``std::uint16_t`` and had got it from a header of GCC 12.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
SOURCES = sorted(
    path
    for path in CSRC.rglob("*.*")
    if path.suffix in (".h", ".cpp")
    and "torch" not in path.parts
    and not path.name.endswith("_body.h")  # a part of the sources that include it
)
HEADER_OF = {
    r"u?int\d\d_t": "cstdint",
    "string|to_string": "string",
    "function": "functional",
    "(make_unique|make_shared|unique_ptr|shared_ptr)": "memory",
    "runtime_error|invalid_argument|logic_error": "stdexcept",
    "mem(cpy|set|cmp|move)|strerror": "cstring",
    "getenv|abort|strtol|strtoul": "cstdlib",
    "optional": "optional",
    "array": "array",
    "vector": "vector",
    "map": "map",
    "mutex|lock_guard|unique_lock": "mutex",
    "atomic": "atomic",
    "thread|this_thread": "thread",
    "sort|find_if|any_of|all_of|none_of|copy_n|fill_n|max_element|min_element": "algorithm",
    "chrono": "chrono",
    "exchange|move|swap|pair": "utility",
    "numeric_limits": "limits",
    "back_inserter|make_move_iterator": "iterator",
    "condition_variable": "condition_variable",
}


def included(path: Path, seen: set[Path]) -> set[str]:
    found = set()
    for name in re.findall(r'#include\s+[<"]([^>"]+)[>"]', path.read_text()):
        found.add(name)
        for ours in {(path.parent / name).resolve(), CSRC / name} - seen:
            if ours.exists():
                seen.add(ours)
                found |= included(ours, seen)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(CSRC)))
def test_what_is_used_is_included(path: Path) -> None:
    code = re.sub(r"//.*", "", path.read_text())
    found = included(path, {path})
    missing = {header for names, header in HEADER_OF.items() if re.search(rf"\bstd::({names})\b", code)} - found
    assert not missing
