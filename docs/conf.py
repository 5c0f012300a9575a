"""How Sphinx builds the site: `make docs` writes build/site."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from site_files import (  # noqa: E402 - beside this file
    classes_of,
    what_it_was_run_on,
    write_llms,
    write_redirects,
)

from tests.groups.stamps import FILE as STAMPS  # noqa: E402
from trainkit.version import __version__  # noqa: E402

project = "trainkit"
author = "The trainkit authors"
copyright = "The trainkit authors, Apache-2.0"  # noqa: A001 - Sphinx's name
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
root_doc = "index"
exclude_patterns = ["pictures/*.py", "notebooks/.ipynb_checkpoints"]
source_suffix = {".md": "markdown"}

html_theme = "furo"
html_title = f"trainkit {__version__}"
html_baseurl = os.environ.get("TRAINKIT_SITE", "")  # the site's address, with its last slash
html_copy_source = False
html_theme_options = {"sidebar_hide_name": False}
templates_path = ["templates"]
html_sidebars = {  # furo's, and the switch of versions
    "**": [
        "sidebar/brand.html",
        "versions.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

autodoc_typehints = "none"  # the docstrings name types where they say something
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
default_role = "code"
napoleon_google_docstring = True
napoleon_use_rtype = False
copybutton_prompt_text = "$ "

# Files outside docs/ that are pages of the site, and folders of the repository that are not.
PAGES = {
    "README.md": "index",
    "CONTRIBUTING.md": "contributing",
    "CHANGELOG.md": "changelog",
    "SECURITY.md": "security",
}
PAGES |= {
    "benchmarks/README.md": "figures",
    "trainkit/cli/explained/errors.md": "errors",
    "docs/errors.md": "errors",
}
PAGES |= {"trainkit/extensions/horovod_build/README.md": "horovod"}


def _links_of_the_site(app: object, name: str, source: list[str]) -> None:
    """Replace links to files of the repository by the pages that the site has of them; other files
    are downloads.

    A folder of the repository, which GitHub shows as a list, has no page: its link becomes code.
    """
    import re  # noqa: PLC0415

    text = source[0]
    up = "../" * name.count("/")
    for file, page in PAGES.items():
        text = re.sub(rf"\]\((?:\.\./)+{re.escape(file)}(#[\w-]+)?\)", rf"]({up}{page}.md\1)", text)

    def folder(match: re.Match[str]) -> str:
        path = (ROOT / "docs" / name).parent / match[2]
        return f"`{match[1].strip('`')}`" if path.is_dir() else match[0]

    text = text.replace("<!-- commands -->", _commands())
    text = re.sub("<!-- classes of (.*) -->", lambda match: classes_of(match[1]), text)
    text += f"\n\n{what_it_was_run_on(name)}\n"
    app.env.note_dependency(str(STAMPS))  # type: ignore[attr-defined]
    source[0] = re.sub(r"(?<!!)\[([^\]]+)\]\((\.\./[^)#]+)\)", folder, text)


def _commands() -> str:
    """Return the help of all commands."""
    from trainkit.cli.commands import all_commands, find_usage  # noqa: PLC0415
    from trainkit.cli.usage import help_text  # noqa: PLC0415

    usages = {name: find_usage(name) for name in all_commands()}
    texts = {name: help_text(name, usage) for name, usage in usages.items() if usage is not None}
    return "\n\n".join(f"## {name}\n\n```text\n{text}```" for name, text in texts.items())


def _included(app: object, path: Path, name: str, source: list[str]) -> None:
    """The same for files of the repository that a page includes:
    their links are relative to their own folder.
    """
    import re  # noqa: PLC0415

    home = (ROOT / "docs" / path).resolve().parent

    def link(match: re.Match[str]) -> str:
        target, _, anchor = match[3].partition("#")
        if "://" in target or not target:
            return match[0]
        file = (home / target).resolve()
        relative = str(file.relative_to(ROOT))
        page = PAGES.get(relative) or (
            str(file.relative_to(ROOT / "docs").with_suffix("")) if _is_page(file) else None
        )
        if page is not None:
            return f"{match[1]}[{match[2]}]({page}.md{f'#{anchor}' if anchor else ''})"
        if file.is_dir() or not file.exists():
            return f"`{match[2].strip('`')}`"
        return f"{match[1]}[{match[2]}](../{relative})"

    source[0] = re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", link, source[0])


def _is_page(file: Path) -> bool:
    return file.suffix == ".md" and file.is_relative_to(ROOT / "docs")


def _keep_blocks(
    app: object, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """Show the indented blocks of a docstring as they stand: they are examples and tables."""
    kept: list[str] = []
    in_block = False
    for before, line in zip(["", *lines], lines, strict=False):
        if line.startswith("    ") and not before.strip() and not in_block:
            in_block = True
            kept += [".. code-block:: text", ""]
        elif line.strip() and not line.startswith("    "):
            in_block = False
        kept.append("   " + line if in_block and line.strip() else line)
    lines[:] = kept


def _beside_pages(app: Any, failed: Exception | None) -> None:
    if failed is None and app.builder.format == "html":
        write_redirects(Path(app.outdir))
        write_llms(app)


def setup(app: object) -> None:
    """Connect all to Sphinx's events."""
    app.connect("autodoc-process-docstring", _keep_blocks, priority=100)  # type: ignore[attr-defined]
    app.connect("source-read", _links_of_the_site)  # type: ignore[attr-defined]
    app.connect("include-read", _included)  # type: ignore[attr-defined]
    app.connect("build-finished", _beside_pages)  # type: ignore[attr-defined]
