"""The pages of the documentation site that have no source file: the API reference, and a picture of each algorithm.

A public module is one with names in ``__all__``. A name that several modules export is described once, in the module
with the shortest path; the other pages refer to that description.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import dist_prims
from dist_prims.schedules import COLLECTIVES, algorithms, build, lookup
from dist_prims.schedules.draw import write_svg
from dist_prims.schedules.pipelines import draw_gantt, pipeline_plan, pipeline_plans

# Bases outside this package: their methods are not repeated in the reference.
FOREIGN_BASES = "Module, Optimizer, Sampler, IterableDataset, DistBackendError, TimeoutError, Exception, tuple"


@dataclass(frozen=True)
class PublicName:
    """A name in the ``__all__`` of a module. ``home`` is the module whose page describes it."""

    module: str
    name: str
    home: str

    @property
    def value(self) -> object:
        return getattr(importlib.import_module(self.module), self.name)

    @property
    def kind(self) -> str:
        """The kind of object in Sphinx's Python domain."""
        if inspect.isclass(self.value):
            return "exception" if issubclass(self.value, BaseException) else "class"
        return "function" if callable(self.value) else "data"

    @property
    def summary(self) -> str:
        """The first sentence of the docstring."""
        if self.kind == "data":
            return f"``{self.value!r}``"
        paragraph = " ".join((inspect.getdoc(self.value) or "").partition("\n\n")[0].split())
        plain = re.sub(r":\w+:`[~.]*(.+?)`", r"``\1``", paragraph)
        return re.split(r"(?<=\.)\s", plain)[0].rstrip(":")


def public_modules() -> list[ModuleType]:
    """The modules of the public interface, those of the shortest path first."""
    found = (module.name for module in pkgutil.walk_packages(dist_prims.__path__, "dist_prims."))
    # Adapters need their frameworks, and are not part of the reference.
    names = [name for name in found if not any(part.startswith(("_", "integrations")) for part in name.split("."))]
    modules = [dist_prims, *map(importlib.import_module, names)]
    return sorted((each for each in modules if getattr(each, "__all__", [])), key=lambda each: each.__name__.count("."))


def public_names() -> list[PublicName]:
    """Every name of every public module."""
    homes: dict[int, str] = {}
    names = []
    for module in public_modules():
        for name in module.__all__:
            value = getattr(module, name)
            shared = inspect.isclass(value) or inspect.isfunction(value)
            home = homes.setdefault(id(value), module.__name__) if shared else module.__name__
            names.append(PublicName(module.__name__, name, home))
    return names


def heading(text: str, line: str = "=") -> list[str]:
    return [text, line * len(text), ""]


def _table(names: list[PublicName]) -> Iterator[str]:
    yield from [".. list-table::", "   :widths: 35 65", "   :class: summary", ""]
    for each in names:
        yield f"   * - :py:obj:`~{each.home}.{each.name}`"
        yield f"     - {each.summary}"
    yield ""


def _entry(each: PublicName) -> Iterator[str]:
    full = f"{each.module}.{each.name}"
    if each.home != each.module:
        yield from [f".. py:{each.kind}:: {full}", ""]
        yield from [f"   The same as :py:obj:`{each.home}.{each.name}`.", ""]
        return
    if each.kind == "data":
        yield from [f".. py:data:: {full}", f"   :value: {each.value!r}", ""]
        return
    yield f".. auto{each.kind}:: {full}"
    if each.kind == "class":
        yield from ["   :members:", f"   :inherited-members: {FOREIGN_BASES}"]
    yield ""


def _module_page(module: ModuleType, names: list[PublicName]) -> Iterator[str]:
    yield from heading(module.__name__)
    yield from [f".. automodule:: {module.__name__}", "   :no-members:", "", ".. py:currentmodule:: None", ""]
    yield from _table(names)
    own = [each for each in names if each.home == each.module]
    if own and len(own) < len(names):
        yield from heading("Described here", "-")
    for each in own:
        yield from _entry(each)
    if len(own) < len(names):
        yield from heading("Described elsewhere", "-")
        for each in names:
            if each not in own:
                yield from _entry(each)


def _write(path: Path, lines: Iterator[str] | list[str]) -> None:
    """Write the file if its text is new, so that Sphinx reads changed pages only."""
    text = "\n".join(lines) + "\n"
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def write_api(folder: Path) -> None:
    names = public_names()
    modules = public_modules()
    for module in modules:
        page = _module_page(module, [each for each in names if each.module == module.__name__])
        _write(folder / f"{module.__name__}.rst", page)
    listed = sorted(module.__name__ for module in modules)
    described = len([each for each in names if each.home == each.module])
    index = [
        *heading("API reference"),
        f"The {described} public names of {len(modules)} modules, from their docstrings.",
        "The test suite runs every example.",
        "",
        ".. toctree::",
        "   :maxdepth: 1",
        "",
        *(f"   {name.removeprefix('dist_prims.')} <{name}>" for name in listed),
    ]
    _write(folder / "index.rst", index)


def _algorithm(collective: str, name: str, pictures: Path) -> Iterator[str]:
    path = write_svg(build(collective, name, size=4), pictures / f"{collective}-{name}.svg")
    yield from heading(name, "~")
    card = lookup(collective, name).card
    if card is not None:
        yield from [f"Wins: {card.wins}. Source: {card.source}.", ""]
    yield from [f".. image:: {pictures.name}/{path.name}", f"   :alt: {collective} {name} of 4 ranks", ""]


def write_pictures(folder: Path) -> None:
    """A page with every registered algorithm on 4 ranks, and every pipeline plan on 4 ranks."""
    pictures = folder / "drawn"
    pictures.mkdir(parents=True, exist_ok=True)
    lines = [
        *heading("Pictures of the algorithms"),
        "Each algorithm on 4 ranks. A vertical line is a rank, and time goes down. An arrow is a chunk that is copied;",
        "a circle at its end means that the chunk is added.",
        "``python -m dist_prims show COLLECTIVE ALGORITHM --size N`` prints the steps for another number of ranks.",
        "",
    ]
    for collective in COLLECTIVES:
        if names := algorithms(collective):
            lines += heading(collective, "-")
            for name in names:
                lines += _algorithm(collective, name, pictures)
    _write(folder / "algorithms.rst", lines)
    lines = [
        *heading("Pictures of the pipelines"),
        "Each plan on 4 ranks with 8 micro-batches. A row is a rank, and time goes to the right.",
        "",
    ]
    for name in pipeline_plans():
        rows = pipeline_plan(name, ranks=4, num_microbatches=8).cost().rows
        path = draw_gantt(pictures / f"pipeline-{name}.svg", rows, title=name)
        lines += [*heading(name, "-"), f".. image:: drawn/{path.name}", f"   :alt: {name} of 4 ranks", ""]
    _write(folder / "pipelines.rst", lines)
