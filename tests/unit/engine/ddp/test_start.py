"""Where torch's ranks take their numbers from, and what they say if the others do not come."""

from __future__ import annotations

import time

import pytest

from trainkit.engine.ddp import late_ranks
from trainkit.engine.ddp.start import assign_ranks
from trainkit.engine.ranks import Ranks
from trainkit.errors import EngineError
from trainkit.launch.environment import Launcher, read_launcher

OF_TORCH = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")


@pytest.mark.parametrize(
    ("left", "missing"),
    [
        ({"TORCHELASTIC_RUN_ID": "none"}, "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "2"}, "MASTER_PORT"),
    ],
)
def test_variables_that_a_launcher_left_are_no_launcher(
    left: dict[str, str], missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names those that a launcher would have set."""
    for name in OF_TORCH:
        monkeypatch.delenv(name, raising=False)
    for name, value in left.items():
        monkeypatch.setenv(name, value)
    launcher = read_launcher()
    with pytest.raises(EngineError, match=rf"\(not set: {missing}\)\. Start with `torchrun"):
        assign_ranks(Ranks(launcher), launcher, "ddp")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "3"},
            "for 2 other ranks to come at 10.0.0.1:29500. It waits on. They are expected since",
        ),
        ({}, "for 2 other ranks to come. It waits on; the output of their hosts says why"),
    ],
)
def test_ranks_that_do_not_come_are_named(
    variables: dict[str, str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the first rank of a host; a job whose ranks meet prints nothing."""
    for name in OF_TORCH:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(late_ranks, "_AFTER_S", 0.01)
    first = Ranks(Launcher("torchrun", 0, 3, 0, 3))
    second = Ranks(Launcher("torchrun", 1, 3, 1, 3))
    with late_ranks.named(second):
        time.sleep(0.05)
    with late_ranks.named(Ranks(Launcher("none", 0, 1, 0, 1))):
        time.sleep(0.05)
    assert capsys.readouterr().out == ""
    printed = ""
    with late_ranks.named(first):
        deadline = time.monotonic() + 20
        while expected not in printed and time.monotonic() < deadline:
            time.sleep(0.01)
            printed += capsys.readouterr().out
    monkeypatch.setattr(late_ranks, "_AFTER_S", 60.0)
    with late_ranks.named(first):
        pass
    assert expected in printed
    assert printed.count("Rank 0 has waited") == 1 and capsys.readouterr().out == ""
