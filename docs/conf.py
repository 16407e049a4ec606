"""The documentation site. launch_scripts/docs.sh builds it, from the files of docs/, the README and the docstrings."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

sys.path.insert(0, str(Path(__file__).parent))

import generated_pages

import dist_prims

project = "dist_prims"
copyright = "dist_prims contributors"
version = release = dist_prims.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
highlight_language = "none"  # diagrams and listings; examples name their language
myst_heading_anchors = 3
nitpicky = True
# Types of annotations: torch's and Python's are in no inventory that can be read offline, ours may be internal.
nitpick_ignore_regex = [("py:(class|obj|data|exc)", r"(?!dist_prims).*"), ("py:class", r"dist_prims\..*\._?[a-z].*")]

autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
maximum_signature_line_length = 88

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = f"dist_prims {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False

LIST = re.compile(r"\s*([-*] |\d+\. |\.\. )")
EXAMPLE = re.compile(rf"\s*>>>|{LIST.pattern}")
DESIGN = ["schedules", "shared_memory", "multi_host", "repair", "long_life", "training", "tracing"]
NAVIGATION = {
    "Guide": ["docs/installation", "docs/guide"],
    "Training": ["docs/data_parallel", "docs/split_models", "docs/several_models", "docs/repair"],
    "How to": ["docs/frameworks", "docs/multi_host", "docs/torch_distributed", "docs/tracing", "docs/security"],
    "Learning": ["docs/course/index"],
    "Algorithms": ["docs/algorithms", "pictures/algorithms", "pictures/pipelines"],
    "Reference": ["api/index", "docs/design/glossary"],
    "Design": ["docs/architecture", *(f"docs/design/{page}" for page in DESIGN)],
    "Benchmarks": ["docs/benchmarks/README"],
    "Project": ["CONTRIBUTING", "CHANGELOG"],
}


def add_navigation(app: Sphinx, page: str, text: list[str]) -> None:
    """Append the navigation to the front page, which is the README."""
    if page == "index":
        for caption, entries in NAVIGATION.items():
            lines = ["```{toctree}", ":hidden:", f":caption: {caption}", "", *entries, "```"]
            text[0] += "\n" + "\n".join(lines) + "\n"


def mark_listings(app: Sphinx, what: str, name: str, of: Any, options: Any, lines: list[str]) -> None:
    """Make listings of the indented blocks of a docstring, which is plain text. Examples (>>>) and lists stay."""
    blocks = re.split(r"\n\s*\n", "\n".join(lines))
    above, in_listing = "", False  # the last block that is no listing
    for number, block in enumerate(blocks):
        depth = len(above) - len(above.lstrip())
        inside = bool(above) and len(block) - len(block.lstrip()) > depth
        if inside and (in_listing or not (EXAMPLE.match(block) or LIST.match(above))):
            if not in_listing and not above.rstrip().endswith("::"):
                blocks[number] = f"{' ' * depth}::\n\n{block}"
            in_listing = True
        else:
            above, in_listing = block, False
    lines[:] = "\n\n".join(blocks).split("\n")


def shorten_signature(
    app: Sphinx, what: str, name: str, of: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Remove what Sphinx leaves in signatures that it cannot parse: those of dataclasses with a default factory."""
    if signature and "<factory>" in signature:
        signature = re.sub(r"~[\w.]+\.(\w+)", r"\1", signature).replace("<factory>", "...")
    return signature, returns


class CodeCell(SphinxDirective):
    """A cell of a lesson, and what it prints and shows.

    Lessons are executed while the site is built. DIST_PRIMS_EXECUTE_LESSONS=0 leaves that out.
    """

    has_content = True
    optional_arguments = 1  # the language of the cell in Jupyter

    def run(self) -> list[nodes.Node]:
        code = "\n".join(self.content)
        found: list[nodes.Node] = [nodes.literal_block(code, code, language="python")]
        if os.environ.get("DIST_PRIMS_EXECUTE_LESSONS") == "0":
            return found
        outputs = self.env.temp_data.setdefault("outputs_of_cells", None)
        if outputs is None:
            outputs = self.env.temp_data["outputs_of_cells"] = iter(
                outputs_of(Path(self.env.doc2path(self.env.docname)))
            )
        output = next(outputs)
        if output["text"].strip():
            found.append(nodes.literal_block(output["text"], output["text"].rstrip(), classes=["cell-output"]))
        if output["html"]:
            found.append(nodes.raw("", output["html"], format="html"))
        return found


def outputs_of(lesson: Path) -> list[dict[str, str]]:
    """What each cell of a lesson prints and shows. A cell that fails ends the build."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "outputs.json")
        command = [sys.executable, "-m", "dist_prims.learn.course", str(lesson), str(written)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
        if done.returncode:
            raise ExtensionError(f"{lesson.name}: a cell has failed\n{done.stderr}")
        found: list[dict[str, str]] = json.loads(written.read_text())
    return found


class LinkPublicNames(SphinxPostTransform):
    """Make links of public names in texts: ``dist_prims.training.Pipeline``, and of classes also ``Pipeline``."""

    default_priority = 20

    def run(self, **_: Any) -> None:
        domain = self.env.domains.python_domain
        classes: dict[str, str] = {}
        for each in generated_pages.public_names():
            if each.home == each.module and each.name[0].isupper():
                classes[each.name] = "" if each.name in classes else f"{each.home}.{each.name}"
        for literal in list(self.document.findall(nodes.literal)):
            word = re.split(r"[(\[]", literal.astext())[0]
            target = domain.objects.get(classes.get(word) or word)
            outer = literal.parent
            while outer is not None and not isinstance(outer, nodes.reference | nodes.title | addnodes.desc_signature):
                outer = outer.parent
            if target and outer is None and (word.startswith("dist_prims.") or word in classes):
                builder = self.app.builder
                link = make_refnode(builder, self.env.docname, target.docname, target.node_id, literal.deepcopy())
                literal.replace_self(link)


def setup(app: Sphinx) -> None:
    generated_pages.write_api(Path(app.srcdir) / "api")
    generated_pages.write_pictures(Path(app.srcdir) / "pictures")
    app.add_directive("code-cell", CodeCell)
    app.connect("source-read", add_navigation)
    app.connect("autodoc-process-docstring", mark_listings)
    app.connect("autodoc-process-signature", shorten_signature)
    app.add_post_transform(LinkPublicNames)
