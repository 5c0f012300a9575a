"""The site as a reader and a host have it: old addresses, search, versions, llms.txt, what each
page was run on.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Page

from tests.architecture.test_site_files import site_files
from tests.groups.stamps import read_stamps
from tests.helpers.browser import launched
from tests.helpers.pages import ROOT
from trainkit.version import __version__


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the site, built from nothing, in the folder of its version."""
    folder = tmp_path_factory.mktemp("host") / __version__
    build = ["sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", str(folder.parent / "trees")]
    command = [sys.executable, "-m", *build, str(ROOT / "docs"), str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Quiet(SimpleHTTPRequestHandler):
    """A host of static files that prints nothing."""

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Return the address at which the folder above the site is served, with two versions in it."""
    (site.parent / "versions.json").write_text(json.dumps(["9.0.0", __version__]))
    handler = functools.partial(Quiet, directory=str(site.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/{__version__}"
        server.shutdown()


@pytest.fixture
def page() -> Iterator[Page]:
    """Return an empty page of a browser."""
    with launched(offline=False) as empty:
        yield empty


def test_each_old_address_leads_to_a_heading(site: Path) -> None:
    """Of the built page that has the text now."""
    assert len(site_files.REDIRECTS) >= 20
    for old, new in site_files.REDIRECTS.items():
        text = (site / f"{old}.html").read_text()
        assert f'content="0; url={new}"' in text
        name, _, anchor = new.partition("#")
        assert f'id="{anchor}"' in (site / name).read_text(), new


def test_a_browser_follows_an_old_address(address: str, page: Page) -> None:
    """To the part of the new page; with a heading of the old one, to that."""
    page.goto(f"{address}/chat_models.html#packing")
    page.wait_for_url("**/language_models.html#packing")
    page.goto(f"{address}/status.html")
    page.wait_for_url("**/logging.html#what-a-job-does-now")
    assert page.locator("#what-a-job-does-now h2").inner_text().startswith("What a job does now")


def test_search_finds_a_page(address: str, page: Page) -> None:
    """By Sphinx's own index, in the browser."""
    page.goto(f"{address}/search.html?q=stragglers")
    page.locator("ul.search li a").first.wait_for(timeout=20_000)
    titles = page.locator("ul.search li > a").all_inner_texts()
    assert any("Elastic training" in title for title in titles), titles


def test_the_versions_of_the_host_are_offered(address: str, page: Page) -> None:
    """Also on a page in a folder; the shown one is chosen, and another leads to its first page."""
    page.goto(f"{address}/reference/trainer.html")
    select = page.get_by_label("Version of the pages")
    select.wait_for(timeout=20_000)
    assert select.locator("option").all_inner_texts() == ["9.0.0", __version__]
    assert select.input_value() == __version__
    assert page.title().endswith(f"trainkit {__version__}")
    select.select_option("9.0.0")
    page.wait_for_url("**/9.0.0/index.html")


def test_without_a_list_no_version_is_offered(site: Path, page: Page) -> None:
    """As of files on a disk."""
    page.goto((site / "index.html").as_uri())
    page.wait_for_timeout(500)
    assert page.locator("#versions").is_hidden()


def test_llms_txt_has_each_page_in_a_line(site: Path) -> None:
    """With an address that exists, and a sentence; llms-full.txt has their text."""
    text = (site / "llms.txt").read_text()
    lines = re.findall(r"^- \[(.+)\]\((\S+)\): (.+)$", text, re.MULTILINE)
    assert text.startswith(f"# trainkit {__version__}\n\n> A PyTorch trainer")
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"}
    assert pages <= {Path(address).stem for _, address, _ in lines}
    assert [address for _, address, _ in lines if not (site / address).is_file()] == []
    assert [title for title, _, said in lines if len(said) < 20 and " " not in said] == []
    whole = (site / "llms-full.txt").read_text()
    assert "```{include}" not in whole and "```{toctree}" not in whole
    for title, _, _ in lines:
        assert re.search(re.escape(title).replace("’", "['’]"), whole), title


def test_a_page_says_when_its_tests_last_passed(site: Path) -> None:
    """By the stamps of their groups; a page of which blocks are not run names them."""
    stamps = read_stamps()
    text = re.sub("<[^>]+>", "", (site / "launchers.html").read_text())
    (line,) = re.findall(r"What it was run on\..*", text)
    for name in ("unit", "pages", "hosts"):
        assert f"make {name}, {stamps[name]['date'][:10]}" in line
    assert "Not run: docker build -t trainkit:cpu . (make long builds" in line
