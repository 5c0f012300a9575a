"""Each contender of each benchmark runs, and the page shows the stored results.
No figure is compared here.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import everything, history, instructions, page
from benchmarks.peers import MODULES
from tests.helpers.forks import server

ROOT = Path(__file__).parents[2]
KEPT: dict[str, Any] = json.loads(everything.RESULTS.read_text())
needs_peers = pytest.mark.skipif(
    not os.environ.get("TRAINKIT_NEEDS_PEERS"),
    reason="needs other trainers: make peers, TRAINKIT_NEEDS_PEERS=1",
)


def cells(results: dict[str, Any]) -> dict[str, dict[str, list[Any]]]:
    """Return title -> first column -> the rest of the row."""
    return {
        table["title"]: {str(row[0]): row[1:] for row in table["rows"]}
        for table in results["tables"]
    }


def numbers_of(rows: dict[str, list[Any]]) -> list[bool]:
    """Return which columns have a number in some row."""
    return [
        any(isinstance(cell, (int, float)) for cell in column)
        for column in zip(*rows.values(), strict=True)
    ]


@needs_peers
@pytest.mark.parametrize("name", everything.NAMES)
def test_each_contender_runs(name: str, tmp_path: Path) -> None:
    """The short form has the tables and contenders of the full one's results,
    a number wherever those have one.
    """
    out = tmp_path / "found.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--short", "--json", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text())
    assert not [who for who in results["missing"] if who in MODULES], results["missing"]
    full = cells(KEPT[name])
    for title, rows in cells(results).items():
        assert rows
        assert title in full, f"results.json has no table '{title}'"
        common = [who for who in rows if who in full[title]]
        here, there = (
            numbers_of({who: table[who] for who in common}) for table in (rows, full[title])
        )
        assert here == there, f"{title}: columns without a number here, or there"
        for who, values in rows.items():
            numbers = [value for value in values if isinstance(value, (int, float))]
            assert all(math.isfinite(number) for number in numbers)
            missing = [
                who in results["missing"] or absent in results["missing"] for absent in (who, title)
            ]
            assert numbers or any(missing), f"{title}: nothing was measured of {who}"
    assert {target["what"] for target in results["targets"]} <= {
        target["what"] for target in KEPT[name]["targets"]
    }


@pytest.mark.skipif(bool(instructions.why_not()), reason=instructions.why_not())
def test_a_step_costs_no_tenth_more_instructions_than_recorded() -> None:
    """What trainkit adds to a step is at most 1.1 times that of the last recorded run, but for what
    two environments of one commit differ by.
    """
    version = torch.__version__.partition("+")[0]
    assert not history.check(version)


def test_more_instructions_than_recorded_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last run with this torch is the limit, not an earlier one, and not one of another."""
    lines = [
        {"torch": version, "figures": {history.title("trainkit"): added}}
        for version, added in (("2.15.0", 9000.0), ("2.15.0", 1000.0), ("2.14.0", 5000.0))
    ]
    monkeypatch.setattr(history, "load", lambda: lines)
    steps = iter((9000.0, 7300.0, 7200.0, 9000.0, 7000.0))
    monkeypatch.setattr(
        instructions, "count", lambda names, _: dict(zip(names, (10.0, next(steps)), strict=True))
    )
    assert history.check("2.15.0") == ["trainkit adds 7,190 instructions to a step; at most 7,100"]
    assert history.check("2.15.0") == []  # the least of some counts
    with pytest.raises(LookupError, match="no instructions with torch 2.13.0"):
        history.check("2.13.0")


def test_a_run_adds_a_line_to_the_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line has the figures with a target and a step's instructions; a page draws those of two."""
    monkeypatch.setattr(history, "HISTORY", tmp_path / "history.jsonl")
    machine = {"cores": 2, "processor": "EPYC", "torch": "2.15.0"}
    for _ in range(2):
        history.append("overhead", KEPT["overhead"], machine)
    first, second = history.load()
    assert first == second and first["commit"]
    assert first["figures"][history.title("trainkit")] > 0
    history.write_html([first, second], tmp_path / "page.html")
    assert history.title("trainkit") in (tmp_path / "page.html").read_text()


def test_the_gpu_script_runs(tmp_path: Path) -> None:
    """Without a GPU it runs on the CPU with tiny models:
    all of its parts that need no compiler and no NCCL.
    """
    out = tmp_path / "gpu.json"
    command = [
        str(server()[1] / "python"),
        "-m",
        "benchmarks.gpu",
        "--device",
        "cpu",
        "--short",
        "--json",
        str(out),
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=480
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text())
    checks = next(table["rows"] for table in results["tables"] if "weights" in table["title"])
    assert len(checks) == 9
    for name, _, apart, error in checks:
        assert error == "", name
        assert apart < (1e-3 if "fp16" in name or "bf16" in name else 1e-6), name
    costs = next(table["rows"] for table in results["tables"] if table["title"] == "ms a step")
    assert {"BatchNorm2d", "sync_batchnorm, by its formulas"} <= {row[0] for row in costs}
    assert [table["title"] for table in results["tables"] if not table["rows"]] == []
    assert all("compile" in name or "NCCL" in why for name, why in results["missing"].items()), (
        results["missing"]
    )


def test_all_results_are_kept() -> None:
    """Each benchmark has results of the full form, with date and machine."""
    assert set(KEPT) == set(everything.NAMES)
    assert all(
        results["date"] and results["machine"]["torch"] and results["tables"]
        for results in KEPT.values()
    )


def test_the_page_says_what_was_found() -> None:
    """The tables are those of the results; each benchmark has its own."""
    results = KEPT | (
        {"gpu": json.loads(page.GPU_RESULTS.read_text())} if page.GPU_RESULTS.exists() else {}
    )
    for path in page.PAGES:
        text = path.read_text()
        assert page.fill(text, results) == text
    assert "<!-- summary -->" in (ROOT / "README.md").read_text()
    assert all(
        f"<!-- {name} -->" in page.PAGE.read_text()
        for name in [*everything.NAMES, "targets", "machines"]
    )


def test_a_figure_that_changed_is_noticed() -> None:
    """The page of other results is another page."""
    changed = json.loads(json.dumps(KEPT))
    changed["overhead"]["tables"][0]["rows"][0][1] = 123456.0
    assert "123,456" in page.fill(page.PAGE.read_text(), changed | {"gpu": KEPT["overhead"]})
