"""All kinds of pages in a real browser, at three widths and in both schemes:
what is visible, by boxes, colors and pixels.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Page

from tests.helpers.browser import launched
from tests.helpers.report_pages import write_pages

WIDTHS, SCHEMES = (390, 768, 1280), ("light", "dark")
CONTRAST_AT = 768  # colors do not depend on the width
LEAST_CONTRAST = 4.5  # WCAG 2.2, 1.4.3

# What is wrong with the layout, as sentences.
_LAYOUT = """() => {
  const wrong = [], width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width) wrong.push("the page scrolls sideways");
  const visible = (e) => e.getBoundingClientRect().width > 0;
  for (const section of document.querySelectorAll("section, .card")) {
    const card = section.getBoundingClientRect();
    const inside = section.querySelectorAll(
      "h2, p, .scroll, figure, .main-svg, .legend, .xtick text, .ytick text, .updatemenu-header");
    for (const element of [...inside].filter(visible)) {
      const box = element.getBoundingClientRect();
      if (box.left < card.left - 1 || box.right > card.right + 1 || box.bottom > card.bottom + 1)
        wrong.push(`${section.id}: ${element.getAttribute("class") ?? element.tagName} leaves it`);
    }
    const area = section.querySelector(".nsewdrag")?.getBoundingClientRect();
    if (area && area.width < 0.35 * card.width) wrong.push(`${section.id}: the chart is narrow`);
    if (area && area.height < 60) wrong.push(`${section.id}: the chart is flat`);
    const over = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
    const menu = section.querySelector(".updatemenu-header")?.getBoundingClientRect();
    for (const text of section.querySelectorAll(".legendtext, .xtick text"))
      if (menu && over(menu, text.getBoundingClientRect())) wrong.push(`${section.id}: the menu covers text`);
  }
  for (const table of document.querySelectorAll(".table")) {
    const scroll = table.querySelector(".scroll"), hint = table.querySelector(".hint");
    if (scroll.scrollWidth > scroll.clientWidth + 2 !== visible(hint))
      wrong.push(`${table.parentElement.id}: a hint ${visible(hint) ? "for nothing" : "is missing"}`);
  }
  // Parts of names: what stands between spaces, dots, slashes, equals signs, and before "-name=".
  for (const cell of document.querySelectorAll("td, th, .card span")) {
    const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode())
      for (const part of node.data.matchAll(/(?:[^\\s./=-]|-(?![a-z_]+=)){2,28}/g)) {
        const range = document.createRange();
        range.setStart(node, part.index);
        range.setEnd(node, part.index + part[0].length);
        const tops = new Set([...range.getClientRects()].map((box) => Math.round(box.top)));
        if (tops.size > 1) wrong.push(`${part[0]} breaks`);
      }
  }
  return wrong;
}"""

# All visible pieces of text: what, color, box on the page.
_TEXTS = """() => {
  const found = [];
  const add = (text, color, box) => box.width > 1 && box.height > 1 && found.push(
    [text, color, [box.left + scrollX, box.top + scrollY, box.right + scrollX, box.bottom + scrollY]]);
  for (const element of document.querySelectorAll("h1, h2, p, b, span, td, th, figcaption")) {
    if (element.closest(".plot") || !element.checkVisibility()) continue;
    for (const node of element.childNodes)
      if (node.nodeType === Node.TEXT_NODE && node.data.trim()) {
        const range = document.createRange();
        range.selectNodeContents(node);
        const clip = element.closest(".scroll")?.getBoundingClientRect();
        const [box] = range.getClientRects();
        if (clip && box.right > clip.right - 30) continue;  // where the edge fades
        add(node.data.trim(), getComputedStyle(element).color, box);
      }
  }
  for (const element of document.querySelectorAll(".plot svg text"))
    if (element.checkVisibility() && element.textContent.trim())
      add(element.textContent, getComputedStyle(element).fill, element.getBoundingClientRect());
  return found;
}"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """All kinds of pages, also those with little to show."""
    return write_pages(tmp_path_factory.mktemp("pages"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    """One browser for all pages."""
    with launched(offline=True) as page:
        yield page


@pytest.fixture
def opened(request: pytest.FixtureRequest, pages: dict[str, Path], browser: Page) -> Page:
    """One page, in the browser; errors of its scripts fail the test."""
    errors: list[str] = []
    browser.on("pageerror", lambda error: errors.append(str(error)))
    browser.goto(pages[request.param].as_uri(), timeout=120_000)
    assert errors == []
    return browser


def looks(page: Page) -> Iterator[tuple[int, str]]:
    """Yield each width and scheme after the page has taken it."""
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            yield width, scheme


_NAMES = [
    "run",
    "runs",
    "run-without-values",
    "test",
    "test-without-a-mistake",
    "timeline",
    "timeline-of-one-rank",
    "scaling",
    "scaling-of-one-number",
    "rates",
    "no-rates",
]


def test_every_kind_of_page_is_here(pages: dict[str, Path]) -> None:
    """The list of the tests below is that of the helper."""
    assert list(pages) == _NAMES


def test_one_rank_is_counted_as_one(pages: dict[str, Path]) -> None:
    """Not "1 ranks"."""
    assert "1 ranks" not in re.sub(r"<[^>]*>", "", pages["scaling-of-one-number"].read_text())


@pytest.mark.parametrize("opened", _NAMES, indirect=True)
def test_a_page_is_right_at_three_widths_and_in_both_schemes(opened: Page) -> None:
    """Nothing leaves its card, tables that scroll have a hint, names do not break within a part,
    and all text has a contrast of 4.5:1 to the pixels around it.
    """
    wrong = []
    for width, scheme in looks(opened):
        look = f"{width}, {scheme}"
        wrong += [f"{look}: {sentence}" for sentence in _misplaced(opened)]
        if width == CONTRAST_AT:
            wrong += [f"{look}: {sentence}" for sentence in _pale(opened)]
        back = opened.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (_luminance(_rgb(back)) < 0.05) == (scheme == "dark"), look
    assert wrong == []


@pytest.mark.parametrize("opened", ["runs"], indirect=True)
def test_a_page_of_runs_begins_with_charts(opened: Page) -> None:
    """The charts of one task are together, above all tables; rows without a difference are out."""
    titles = opened.locator("h2").all_inner_texts()
    tables = titles.index("Last values")
    assert titles[0] == "loss, ImageClassifier" and titles[tables - 1] == "Samples per second"
    tasks = [title.split(", ")[1] for title in titles[: tables - 1]]
    assert tasks == sorted(tasks, key=tasks.index) and len(set(tasks)) == 2
    differ = opened.locator("#settings-imageclassifier td:first-child").all_inner_texts()
    assert differ == [
        "optimizer._target_",
        "optimizer.lr",
        "task.data_augmentation_probability",
        "callbacks.throughput",
    ]
    rates = opened.locator("#runs td:last-child").all_inner_texts()
    assert len(rates) == 3 and all(float(rate) > 0 for rate in rates)


@pytest.mark.parametrize("opened", ["test"], indirect=True)
def test_scores_are_above_confused_pairs(opened: Page) -> None:
    """By their places on the page."""
    tops = [opened.locator(f"#{name}").bounding_box() for name in ("classes", "confusion")]
    assert tops[0] is not None and tops[1] is not None and tops[0]["y"] < tops[1]["y"]


@pytest.mark.parametrize("opened", ["timeline-of-one-rank"], indirect=True)
def test_a_page_of_one_rank_has_no_communication(opened: Page) -> None:
    """Neither in cards, nor in tables, legends or notes; the parts of its own work are there."""
    text = opened.locator("body").inner_text()
    assert "forward" in text and "data wait" in text
    for part in ("communication", "waiting", "slowest", "reduction", "all ranks"):
        assert part not in text, part


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("opened", ["timeline"], indirect=True)
def test_each_rank_can_be_chosen(opened: Page, width: int) -> None:
    """The menu opens within its chart, and another rank's bars are drawn."""
    opened.set_viewport_size({"width": width, "height": 900})
    assert _misplaced(opened) == []
    bars = opened.locator("#steps .bars")
    before = bars.evaluate_all("all => all.map(one => one.innerHTML)")
    opened.locator("#steps .updatemenu-header").click()
    button = opened.locator("#steps .updatemenu-dropdown-button", has_text="rank 1")
    button.click(timeout=10_000)
    opened.wait_for_timeout(500)
    assert bars.evaluate_all("all => all.map(one => one.innerHTML)") != before
    assert "rank 1" in (opened.locator("#steps .updatemenu-header").text_content() or "")


def _misplaced(page: Page) -> list[str]:
    """Return what is wrong with the layout once plotly has drawn in the new size,
    which takes a while on a loaded machine.
    """
    wrong: list[str] = []
    for _ in range(20):
        page.wait_for_timeout(150)
        wrong = page.evaluate(_LAYOUT)
        if not wrong:
            break
    return wrong


def _pale(page: Page) -> list[str]:
    """Return the text with too little contrast: its color against the color that most pixels of
    its box have.
    """
    texts: list[Any] = page.evaluate(_TEXTS)
    picture = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
    pale = []
    for text, color, box in texts:
        pixels = picture.crop(tuple(round(edge) for edge in box))  # type: ignore[arg-type]
        colors = pixels.getcolors(pixels.width * pixels.height)
        back = max(colors)[1]  # pairs of count and color
        if (contrast := _contrast(_rgb(color), back)) < LEAST_CONTRAST:
            pale.append(f"'{text[:40]}' has {contrast:.1f}:1 ({color} on {back})")
    assert len(texts) > 5
    return pale


def _rgb(color: str) -> tuple[int, int, int]:
    numbers = color[color.index("(") + 1 : -1].split(",")
    return int(numbers[0]), int(numbers[1]), int(numbers[2])


def _luminance(color: tuple[int, int, int]) -> float:
    """Return the relative luminance (WCAG 2.2, "relative luminance")."""
    parts = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in color]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def _contrast(a: tuple[int, int, int], b: tuple[int, int, int]) -> float:
    dark, light = sorted([_luminance(a), _luminance(b)])
    return (light + 0.05) / (dark + 0.05)
