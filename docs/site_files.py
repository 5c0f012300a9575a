"""What the site has beside its pages, made at each build: `conf.py` connects it to Sphinx.

what_it_was_run_on   the last line of a page: who runs its commands, and when that last passed
classes_of           the reference of a module's public classes, those of extensions included
write_redirects      a page at each address that was one before, which leads to the new one
write_llms           llms.txt, each page in a line, and llms-full.txt, their text
"""

from __future__ import annotations

import html
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.groups.stamps import read_stamps
from tests.groups.table import all_groups, group_of
from tests.helpers.page_tests import TESTS
from tests.helpers.pages import blocks
from trainkit import extension
from trainkit.version import __version__

DOCS = Path(__file__).parent
COMPOSES = "pages/test_composed.py"
# Pages that are files from elsewhere.
INCLUDED = {
    "index": DOCS.parent / "README.md",
    "errors": DOCS.parent / "trainkit" / "cli" / "explained" / "errors.md",
}
# Addresses of pages that are parts of others now.
REDIRECTS = {
    "chat_models": "language_models.html#chat-models",
    "compared": "migrate.html#compared",
    "containers": "launchers.html#containers",
    "data_at_scale": "data.html#data-at-a-clusters-scale",
    "deepspeed": "large_models.html#enginedeepspeed",
    "experiments": "optimizers.html#experiments-with-pairs",
    "extensions": "how_it_works.html#extensions",
    "finding_settings": "optimizers.html#finding-settings",
    "from_accelerate": "migrate.html#from-accelerate-or-fabric",
    "from_horovod": "migrate.html#from-horovod-or-torchrun",
    "from_transformers": "migrate.html#from-transformers-trainer",
    "horovod_edits": "horovod.html#horovod-for-todays-torch",
    "mpi": "horovod.html#horovod-on-mpi",
    "own_loop": "tutorial_script.html#your-own-loop",
    "own_script": "tutorial_script.html#the-tools-for-your-own-script",
    "recipes": "configs.html#recipes",
    "reliability": "elastic.html#reliability",
    "reporting": "releases.html#reporting-a-vulnerability",
    "security": "releases.html#what-is-trusted",
    "seeing_a_run": "logging.html#seeing-a-run",
    "several_hosts": "launchers.html#several-hosts",
    "status": "logging.html#what-a-job-does-now",
    "unequal_ranks": "communication.html#ranks-of-unequal-speed",
}
_REDIRECT = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Moved</title>
<link rel="canonical" href="{to}"><meta http-equiv="refresh" content="0; url={to}">
<script>location.replace("{page}" + (location.hash || "#{part}"))</script>
</head><body>This page is now <a href="{to}">{to}</a>.</body></html>
"""
_INCLUDE = re.compile(r"^```\{include\} (\S+)\n(?:.*\n)*?```$", re.MULTILINE)
_NAVIGATION = re.compile(r"^```\{toctree\}\n(?:.*\n)*?```$", re.MULTILINE)


def what_it_was_run_on(page: str) -> str:
    """Return the last line of a page, by stamps.json and the tables of the tests; empty for a page
    that no test runs.
    """
    tests = TESTS.get(page, {})
    file = INCLUDED.get(page, DOCS / f"{page}.md")
    shown = blocks(file) if file.is_file() else []
    said = []
    is_composed = file.parent in (DOCS, DOCS.parent) and any(block.commands for block in shown)
    if tests and is_composed:
        said.append(f"Its commands are composed and checked in {_passed(COMPOSES)}.")
    if tests:
        said.append(f"It is tested in {_runs(tests)}.")
    said += [
        f"Not run: `{block.commands[0].rstrip()}` ({block.comment.partition(': ')[2]})."
        for block in shown
        if not block.is_run
    ]
    return " ".join(["**What it was run on.**", *said]) if said else ""


def _runs(tests: dict[str, str]) -> str:
    """Return who tests a page: the rest of it first, then its parts."""
    places = {title: _passed(test) for title, test in tests.items()}
    if len(set(places.values())) == 1:
        return next(iter(places.values()))
    return "; ".join(f"*{title}* in {place}" if title else place for title, place in places.items())


def _passed(test: str) -> str:
    """Return the group of a test, and when it last passed, on what."""
    group = group_of(f"tests/{test}", all_groups())
    stamp = read_stamps().get(str(group))
    if stamp is None:
        return f"`make {group}`, which has not passed as a whole yet"
    day = f"`make {group}`, {stamp['date'][:10]}"
    if "torch" not in stamp:
        return day
    return f"{day} on Python {stamp['python']}, torch {stamp['torch']}, {stamp['cores']} cores"


def classes_of(module: str) -> str:
    """Return the reference of a module's public classes: each class, with the file that configures
    it if there is one.
    """
    return "\n\n".join(_reference(module, name) for name in class_names(module))


def class_names(module: str) -> list[str]:
    """Return the names of a module's public classes, those that extensions bring included."""
    there = importlib.import_module(module)
    own = [
        name
        for name, value in vars(there).items()
        if inspect.isclass(value) and value.__module__.startswith("trainkit.")
    ]
    return sorted({*own, *extension.public_names(module)})


def _reference(module: str, name: str) -> str:
    """Return the reference of a class."""
    shown = f"```{{eval-rst}}\n.. autoclass:: {module}.{name}\n   :no-members:\n```"
    target = re.compile(rf"_target_: {re.escape(module)}\.{name}$", re.MULTILINE)
    for file in sorted((DOCS.parent / "conf").glob("*/*.yaml")):
        text = file.read_text()
        if target.search(text):
            shown += f"\n\n`{file.parent.name}={file.stem}` is\n\n```yaml\n{text}```"
    return shown


def write_redirects(folder: Path) -> None:
    """Write a page at each address that was one before."""
    for old, new in REDIRECTS.items():
        page, _, part = new.partition("#")
        text = _REDIRECT.format(to=html.escape(new), page=page, part=part)
        (folder / f"{old}.html").write_text(text)


def write_llms(app: Any) -> None:
    """Write llms.txt as https://llmstxt.org asks for it: the title, a summary, the pages by their
    captions, each with its first sentence; and llms-full.txt with the text of all pages.
    """
    lines = [f"# {app.config.project} {__version__}", "", f"> {_first_sentence(app, 'index')}"]
    whole = [lines[0]]
    for caption, pages in _captions(app):
        lines += ["", f"## {caption}", ""]
        for page in pages:
            title = app.env.titles[page].astext()
            address = f"{app.config.html_baseurl}{page}.html"
            lines.append(f"- [{title}]({address}): {_first_sentence(app, page)}")
            whole.append(f"<!-- {page}.html -->\n\n{_text(app, page)}")
    folder = Path(app.outdir)
    (folder / "llms.txt").write_text("\n".join(lines) + "\n")
    (folder / "llms-full.txt").write_text("\n\n".join(whole) + "\n")


def _captions(app: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield the captions of the navigation, each with its pages."""
    from sphinx.addnodes import toctree  # noqa: PLC0415

    for tree in app.env.get_doctree("index").findall(toctree):
        below = app.env.toctree_includes  # of a page that only lists others
        yield (
            tree["caption"],
            [page for _, name in tree["entries"] for page in below.get(name, [name])],
        )


def _first_sentence(app: Any, page: str) -> str:
    """Return the first sentence of a page's text; of a page without one, its headings."""
    from docutils import nodes  # noqa: PLC0415

    tree = app.env.get_doctree(page)
    for paragraph in tree.findall(nodes.paragraph):
        text = " ".join(paragraph.astext().split())
        if len(text) > 30 and not text.startswith("What it was run on"):
            return re.split(r"(?<=[^.]\.) (?=[A-Z])", text)[0]
    return ", ".join(title.astext() for title in tree.findall(nodes.title))


def _text(app: Any, page: str) -> str:
    """Return a page as Markdown with what it includes; of the reference, the text."""
    if page.startswith("reference/"):
        return str(app.env.get_doctree(page).astext())
    file = DOCS / f"{page}.md"

    def included(match: re.Match[str]) -> str:
        return (file.parent / match[1]).read_text()

    return _NAVIGATION.sub("", _INCLUDE.sub(included, file.read_text())).strip()
