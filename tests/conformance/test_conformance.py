"""The conformance suite, run: trainkit's column, peers' cells that are known to fail, breaks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.conformance.claims import load_claims
from benchmarks.conformance.suite import Start, run
from tests.helpers.forks import server

ROOT = Path(__file__).parents[2]
TIMED = ("import-time", "step-time")  # figures, which load on the machine moves


@pytest.fixture(autouse=True)
def _forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers, launchers and their ranks be forks."""
    monkeypatch.setattr(sys, "executable", str(server()[1] / "python"))


def conformance(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the suite's command, without recording anything."""
    line = [sys.executable, "-m", "benchmarks.conformance", "--check", *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=1500, check=False)


@pytest.mark.timeout(1500)
def test_trainkits_column_is_as_it_was_recorded() -> None:
    """Every claim but two times, alone, under horovodrun and under torchrun, has its recorded
    result.
    """
    names = [f"--only={name}" for name in load_claims() if name not in TIMED]
    done = conformance("--trainer", "trainkit", *names)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("trainer", "claims"),
    [
        ("Lightning", ("resume-weights", "short-last-window", "tokens-over-accumulation")),
        ("by hand", ("schedule-and-a-skipped-update",)),
        ("Accelerate", ("short-last-batch", "short-last-window")),
        ("transformers", ("training-loss-of-an-epoch",)),
    ],
)
def test_known_failures_of_others_are_seen(trainer: str, claims: tuple[str, ...]) -> None:
    """Cells of four others that are known to fail do, with numbers."""
    results = run(Start(trainer, "alone", claims))
    assert {name: result["status"] for name, result in results.items()} == dict.fromkeys(
        claims, "fails"
    ), results


@pytest.mark.timeout(600)
def test_breaks_are_seen() -> None:
    """trainkit broken on purpose turns the right cells, and leaves another alone."""
    breaks = (
        "the-position-is-not-restored",
        "pickles-are-loaded",
        "batches-weigh-the-same",
        "nan-is-the-best",
    )
    done = conformance("--broken", *breaks)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
