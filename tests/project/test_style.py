"""The rules that a program can check: style and types, layers, public names, examples that run."""

from __future__ import annotations

import ast
import doctest
import functools
import graphlib
import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

import dist_prims

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dist_prims"
CHECKS = ["ruff-lint", "ruff-format", "types", "clang-format-csrc", "shell-syntax"]
SLOW = {"types"}  # mypy takes longer than any other test of the default tier
EVERY = (module.name for module in pkgutil.walk_packages(dist_prims.__path__, "dist_prims."))
NEED_MORE = ("dist_prims._mpi_", "dist_prims.integrations.")  # an MPI that is loaded, or a framework
MODULES = sorted(name for name in EVERY if not name.startswith(NEED_MORE))

# The layers of the package, from the lowest: what a module or folder of dist_prims may import from those above it here.
LAYERS: dict[str, set[str]] = {
    "_output": set(),
    "backend_name": set(),
    "datasets": set(),
    "errors": set(),
    "plain_values": set(),
    "processes": set(),
    "threads": set(),
    "torch_compat": set(),
    "units": set(),
    "schedules": {"units"},
    "_chart": {"schedules"},
    "agreement": {"errors", "plain_values", "torch_compat"},
    "learn": {"processes", "schedules"},
    "rendezvous": {"_output", "errors", "threads"},
    "tracing": {"_output", "rendezvous", "schedules", "threads"},
    "collectives": {"agreement", "errors", "rendezvous", "schedules", "torch_compat", "threads", "tracing", "units"},
    "_console": {"collectives"},
    "ops": {"collectives", "errors", "torch_compat"},
    "parallel": {"agreement", "collectives", "errors", "torch_compat"},
    "backend": {
        "_output",
        "backend_name",
        "collectives",
        "errors",
        "rendezvous",
        "schedules",
        "torch_compat",
        "tracing",
    },
    "repair": {
        "_output",
        "agreement",
        "backend",
        "backend_name",
        "collectives",
        "errors",
        "rendezvous",
        "torch_compat",
    },
    "stand_in": {"_output", "backend_name", "torch_compat"},
    "autoload": {"_output", "backend", "backend_name", "rendezvous", "repair", "stand_in", "torch_compat"},
    "integrations": {"backend", "backend_name", "rendezvous", "repair", "torch_compat"},
    "launch": {"_output", "agreement", "autoload", "processes", "rendezvous", "threads", "tracing"},
    "training": {"agreement", "backend", "collectives", "errors", "schedules", "torch_compat", "tracing"},
    "models": {"parallel", "torch_compat", "training"},
    "demo": {"_chart", "_console", "_output", "collectives", "datasets", "launch", "models", "schedules", "training"},
    "bench": {
        "_chart",
        "agreement",
        "backend",
        "collectives",
        "errors",
        "launch",
        "models",
        "rendezvous",
        "repair",
        "schedules",
        "torch_compat",
        "training",
        "units",
    },
    "cli": {
        "_output",
        "backend",
        "bench",
        "launch",
        "learn",
        "rendezvous",
        "schedules",
        "torch_compat",
        "tracing",
        "units",
    },
    "__main__": {"cli"},
}
# The files with imports inside functions, and why. An import there must not hide an edge that the layers forbid.
_START = "the command starts without torch, and without what the other subcommands need"
LATE_IMPORTS = {
    "autoload.py": "`import torch` imports it: the backend is loaded when a group is made",
    "backend/mpi_library.py": "mpi4py is optional",
    "bench/__main__.py": "the backend may not be built",
    "cli/doctor.py": "mpi4py is optional",
    "cli/main.py": _START,
    "cli/trace.py": _START,
    "schedules/cut_bound.py": "networkx is optional, and slow to import",
    "schedules/flow_bound.py": "SciPy is optional",
    "schedules/schedule.py": "each rank of a group imports it, and few programs need its pictures, pages and files",
    "launch/payload.py": "cloudpickle is slow to import, and rarely needed",
    "launch/spawn_parent.py": "`resource` exists on POSIX systems only, and the package is imported everywhere",
    "ops.py": "the compiler of torch is loaded where a graph is compiled",
    "rendezvous/mpi_exchange.py": "mpi4py is optional",
    "threads.py": "`resource` exists on POSIX systems only, and schedules work everywhere",
    "torch_compat.py": "a module of torch that many programs do not need",
    "stand_in.py": "`import torch` imports it, and few programs need it",
    "tracing/clock.py": "`fcntl` exists on POSIX systems only, and traces are read everywhere",
}
# The same within dist_prims/training.
TRAINING = {
    "incremental_reduce": set(),
    "group_duplicates": set(),
    "mixed_precision": set(),
    "compression": {"incremental_reduce"},
    "state_transfer": set(),
    "gradients": {
        "compression",
        "group_duplicates",
        "incremental_reduce",
        "mixed_precision",
        "state_transfer",
    },
    "average": {"gradients"},
    "data": set(),
    "randomness": set(),
    "stateful": set(),
    "checkpoint": {"data", "group_duplicates", "randomness", "stateful"},
    "pipeline": {"gradients", "group_duplicates", "state_transfer"},
    "sharding": {"gradients", "state_transfer"},
    "replicated_state": {"data", "gradients", "randomness", "state_transfer", "stateful"},
}
PURE = {"_output", "learn", "processes", "schedules", "tracing", "units", "_chart"}  # no torch
# The file that uses private API of torch itself, instead of torch_compat: it is about the internals of the compiler.
# The list may only become shorter.
PRIVATE_TORCH = {"ops.py"}
PRIVATE = re.compile(r"_[a-zA-Z]\w*|distributed_c10d")
NOT_OF_TORCH = {"_exit", "_extra_reducers", "_getframe", "_replace"}  # os, multiprocessing, sys, named tuples

PUBLIC = [
    "__version__",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "average_gradients",
    "BackendOptions",
    "barrier",
    "broadcast",
    "CommError",
    "CommInterruptedError",
    "CommTimeoutError",
    "DataPartitioner",
    "empty",
    "gather",
    "GradientAverager",
    "grow",
    "init",
    "join",
    "LeftOutError",
    "MismatchError",
    "partition_dataset",
    "PeerDiedError",
    "PeerLeftError",
    "Pipeline",
    "RankFailedError",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
    "ShardedSampler",
    "shrink",
    "spawn",
    "trace",
]
# The modules whose __all__ is the public interface, beside that of every package. In others it is empty.
DOCUMENTED = {"errors", "models.gpt", "models.resnet", "ops", "schedules.topology", "training.checkpoint"}
DOCUMENTED |= {"training.mixed_precision"}
# The examples of these run in a group of one rank.
WITH_A_GROUP = ("agreement", "backend", "collectives", "ops", "parallel", "torch_compat", "training")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    # mypy needs 20 s of a processor without a cache: at a load of 16 on two cores 110 s were not enough.
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=290, check=False)


@functools.cache
def sources() -> list[tuple[str, Path, ast.Module]]:
    """Layer, file and syntax tree of every module."""
    paths = sorted(PACKAGE.rglob("*.py"))
    layers = [path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in paths]
    return [(layer, path, ast.parse(path.read_text())) for layer, path in zip(layers, paths, strict=True)]


def imported(path: Path, tree: ast.AST) -> Iterator[str]:
    """The absolute names that a module, or a part of it, imports."""
    package = ["dist_prims", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def is_torch(name: str | None) -> bool:
    return (name or "").partition(".")[0] == "torch"


def is_private(name: str) -> bool:
    return any(PRIVATE.fullmatch(part) for part in name.split("."))


def defined_names(tree: ast.Module) -> Iterator[str]:
    """The functions, classes, variables and attributes of ``self`` that a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def private_torch(tree: ast.Module, defined: set[str]) -> Iterator[str]:
    """The private API of torch that a module uses, as far as its syntax shows.

    - An import from a private module of torch, or of a private name.
    - A private attribute of a name imported from torch: ``torch._C``, ``dist.distributed_c10d``.
    - A private attribute that is not among the ``defined`` names: ``group._get_backend``.
    - The same names as strings: ``"torch._inductor.lowering"``, ``getattr(options, "_timeout")``.
    """
    from_torch = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names if is_torch(each.name)]
            from_torch |= {each.asname or "torch" for each in node.names if is_torch(each.name)}
        elif isinstance(node, ast.ImportFrom) and not node.level and is_torch(node.module):
            names = [f"{node.module}.{each.name}" for each in node.names]
            from_torch |= {each.asname or each.name for each in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_name = re.fullmatch(r"torch(\.\w+)+", node.value) or node.value == "_timeout"
            names = [node.value] if is_name else []
        else:
            names = []
        yield from filter(is_private, names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in NOT_OF_TORCH:
            root = ast.unparse(node).partition(".")[0]
            if root in from_torch or node.attr not in defined:
                yield ast.unparse(node)


def test_private_api_of_torch_is_used_in_torch_compat_only() -> None:
    defined: dict[Path, set[str]] = {}
    for _, path, tree in sources():
        defined.setdefault(path.parent, set()).update(defined_names(tree))
    found = {
        path.relative_to(PACKAGE).as_posix(): names
        for layer, path, tree in sources()
        if layer != "torch_compat" and (names := sorted({*private_torch(tree, defined[path.parent])}))
    }
    new = {name: names for name, names in found.items() if name not in PRIVATE_TORCH}
    assert not new, "use, or add, a function of dist_prims/torch_compat.py"
    assert not PRIVATE_TORCH - set(found), "these files use none any more: remove them from PRIVATE_TORCH"


@pytest.mark.timeout(300)  # of mypy without a cache, beside other tests
@pytest.mark.parametrize(
    "check", [pytest.param(check, marks=pytest.mark.slow) if check in SLOW else check for check in CHECKS]
)
def test_style_and_types(check: str) -> None:
    found = run("launch_scripts/checks.sh", check)
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_list_of_checks_is_the_one_that_is_run() -> None:
    assert run("launch_scripts/checks.sh", "--list").stdout.split() == CHECKS
    assert "launch_scripts/checks.sh" in (ROOT / ".pre-commit-config.yaml").read_text()


def test_every_module_imports_from_the_layers_below_it_only() -> None:
    for layer, path, tree in sources():
        if layer == "__init__":
            continue  # it fetches public names when they are used
        part = path.relative_to(PACKAGE).parts[1].removesuffix(".py") if layer == "training" else ""
        for name in imported(path, tree):
            top, target, inner = [*name.split("."), "", ""][:3]
            if top == "dist_prims" and target in LAYERS:
                assert target == layer or target in LAYERS[layer], f"{path}: {layer} must not import {name}"
            if f"{top}.{target}" == "dist_prims.training" and part in TRAINING and inner in TRAINING:
                assert inner == part or inner in TRAINING[part], f"{path}: {part} must not import {name}"
            assert not (top == "torch" and layer in PURE), f"{path} must not import torch"


def test_the_layers_have_an_order() -> None:
    for number, (layer, below) in enumerate(LAYERS.items()):
        assert below <= set([*LAYERS][:number]), f"{layer} is listed above a layer that it may import"


def test_imports_inside_functions_have_a_reason() -> None:
    late = set()
    for _, path, tree in sources():
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Lambda)]
        if any([*imported(path, function)] for function in functions):
            late.add(path.relative_to(PACKAGE).as_posix())
    assert late == set(LATE_IMPORTS), "import at the top of the module, or give a reason in LATE_IMPORTS"


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports for type checkers alone do not count."""
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for _, path, _ in sources()}
    modules = {name.removesuffix(".__init__") for name in names.values()}
    graph: dict[str, set[str]] = {}
    for layer, path, tree in sources():
        if layer == "__init__":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                node.body = []
        module = names[path].removesuffix(".__init__")
        targets = {name if name in modules else name.rpartition(".")[0] for name in imported(path, tree)}
        graph[module] = {target for target in targets & modules if target.count(".")} - {module}
    assert [*graphlib.TopologicalSorter(graph).static_order()]


def test_cpp_imports_only_the_errors() -> None:
    texts = [path.read_text() for path in (ROOT / "csrc").rglob("*.cpp")]
    names = {name for text in texts for name in re.findall(r'import\("(dist_prims.*?)"', text)}
    assert names == {"dist_prims.errors"}


def test_every_file_has_its_layer() -> None:
    assert {layer for layer, _, _ in sources()} == {"__init__", *LAYERS}
    inside = {
        path.relative_to(PACKAGE).parts[1].removesuffix(".py") for layer, path, _ in sources() if layer == "training"
    }
    assert inside == {"__init__", *TRAINING}


def exported(tree: ast.Module) -> list[str] | None:
    """The names in __all__; None where there is none."""
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return [
                ast.literal_eval(each)
                for each in getattr(getattr(node, "value", None), "elts", [])
                if isinstance(each, ast.Constant)
            ]
    return None


def test_modules_have_a_docstring_and_an_all() -> None:
    """An empty __all__ marks an internal module."""
    for _, path, tree in sources():
        assert ast.get_docstring(tree), f"{path} has no docstring"
        if path.name != "__main__.py" and any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in tree.body):
            names = exported(tree)
            assert names is not None, f"{path} has no __all__"
            module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
            if path.name != "__init__.py" and module not in DOCUMENTED:
                assert not names, f"{path}: only documented modules and packages export names"


def test_at_most_100_names_are_public() -> None:
    """A name that several packages export counts once."""
    names = {name for _, _, tree in sources() for name in exported(tree) or []}
    assert len({*names, *dist_prims.__all__}) <= 100


def test_files_and_functions_stay_short() -> None:
    for _, path, tree in sources():
        assert len(path.read_text().splitlines()) <= 400, f"{path} is long: the idea is not found yet"
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path}: {node.name} is long"


def test_public_names_are_few_and_stay() -> None:
    assert sorted(dist_prims.__all__) == sorted(PUBLIC)
    for name in dist_prims.__all__:
        assert getattr(dist_prims, name)
    with pytest.raises(AttributeError, match="no attribute 'all_reduc'"):
        _ = dist_prims.all_reduc


def test_public_functions_have_an_example() -> None:
    for name in set(PUBLIC) - {"__version__"}:
        found = getattr(dist_prims, name)
        text = (found.__doc__ or "") + (importlib.import_module(found.__module__).__doc__ or "")
        assert ">>>" in text, f"{name} has no example"


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)  # another test may have loaded it
    if name.endswith("__main__"):
        pytest.skip("a program, run by its own tests")
    examples = doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name))
    # Where a group is in use, spawn() cannot fork: ranks would be fresh interpreters, which take seconds to start.
    examples.sort(key=lambda example: "spawn(" not in example.docstring)
    try:
        for example in filter(lambda example: example.examples, examples):
            needs_group = any(part in name for part in WITH_A_GROUP) and "spawn(" not in example.docstring
            if needs_group and not dist.is_initialized():
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            assert doctest.DocTestRunner().run(example).failed == 0, example.name
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_nothing_of_a_machine_in_the_project() -> None:
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard").stdout.split()
    for name in listed:
        path = ROOT / name
        if path.is_file() and path.suffix not in {".gz", ".png"}:
            text = path.read_text()
            for word in ("/" + "root/", "/" + "home/", "index" + "-url"):
                assert word not in text, f"{name} holds {word}"
