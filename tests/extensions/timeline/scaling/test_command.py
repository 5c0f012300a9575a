"""`scaling hosts=...`: which launcher can start there, and the cores of a rank."""

from __future__ import annotations

import os

import pytest

from trainkit.extensions.timeline.scaling import command


def test_torchrun_has_no_hosts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before the first run, with what to do."""
    monkeypatch.setattr(command, "pretend", lambda *given: None)
    arguments = ["conf=mlp", "engine=ddp", "ranks=1,2", "hosts=a:1,b:1"]
    assert command.main("scaling", arguments) == 2
    shown = capsys.readouterr()
    assert "hosts is 'a:1,b:1', and torchrun starts these ranks, all on this host" in shown.err
    assert "1 rank," not in shown.out


@pytest.mark.parametrize(
    ("hosts", "ranks", "threads"),
    [("", 16, 1), ("a:8,b:8", 16, 2), ("a:8,b:8", 4, 4), ("a,b", 2, 8)],
)
def test_a_rank_has_the_cores_of_its_host(
    hosts: str, ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks on several hosts share those of each."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    asked = command.ScalingRequest((1, ranks), 20, (10.0,), hosts)
    assert command._threads(asked) == threads
