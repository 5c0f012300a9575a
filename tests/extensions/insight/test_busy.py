"""The line of a fit on a CPU that other programs use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.helpers.toy import Line, loader
from trainkit import Trainer
from trainkit.extensions.insight import busy


@pytest.mark.parametrize(
    ("load", "others", "threads", "set_already", "is_said"),
    [
        (99.0, 1, 2, None, True),
        (0.1, 1, 2, None, False),
        (99.0, 0, 2, None, False),  # what ran has ended
        (99.0, 1, 1, None, False),
        (99.0, 1, 2, "GOMP_SPINCOUNT", False),
        (99.0, 1, 2, "OMP_WAIT_POLICY", False),
    ],
)
def test_a_fit_beside_others_says_what_to_set(
    load: float,
    others: int,
    threads: int,
    set_already: str | None,
    is_said: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Once, and only if the threads could spin."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    if set_already:
        monkeypatch.setenv(set_already, "passive")
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(busy, "_others", lambda: others)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    Trainer(max_steps=1, logger=False, run_dir=tmp_path).fit(Line(), loader(8))
    assert capsys.readouterr().out.count("start it with GOMP_SPINCOUNT=1000") == is_said


def test_this_process_is_no_other() -> None:
    """None is counted that does not run."""
    assert 0 <= busy._others() < 1000
