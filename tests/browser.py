"""A real browser without a screen, and without a network."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Page, sync_playwright

_QUIET = "no-sandbox disable-gpu disable-quic no-first-run disable-background-networking disable-component-update"


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
    """Return Chromium's program; skip the test where there is none, unless TRAINKIT_NEEDS_BROWSER says that there must be."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    if os.environ.get("TRAINKIT_NEEDS_BROWSER"):
        pytest.fail("there must be a browser here, and there is none: apt-get install chromium")
    pytest.skip("no browser: apt-get install chromium")


@contextmanager
def opened(path: Path) -> Iterator[Opened]:
    """Open a file in Chromium; nothing may leave this machine."""
    with sync_playwright() as playwright:
        arguments = [f"--{name}" for name in _QUIET.split()]
        browser = playwright.chromium.launch(executable_path=find_browser(), args=arguments)
        context = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
        page = context.new_page()
        found = Opened(page)
        page.on("console", lambda message: found.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: found.errors.append(str(error)))
        page.on("request", lambda request: found.asked_for.append(request.url))
        page.goto(path.absolute().as_uri())
        page.wait_for_selector(".js-plotly-plot .main-svg", timeout=30_000)
        found.asked_for = [url for url in found.asked_for if not url.startswith(("data:", path.absolute().as_uri()))]
        yield found
        browser.close()
