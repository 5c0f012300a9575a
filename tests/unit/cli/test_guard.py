"""The exit code of a command says how it ended."""

from __future__ import annotations

import pytest

from trainkit.cli.guard import guarded
from trainkit.errors import Preempted
from trainkit.launch.environment import read_launcher


@pytest.mark.parametrize(
    ("error", "code"), [(None, 0), (Preempted("SIGTERM on rank 0"), 75), (KeyboardInterrupt(), 130)]
)
def test_a_command_ends_with_its_code(error: BaseException | None, code: int) -> None:
    """0 if all was done, 75 if a checkpoint waits to be resumed (sysexits.h: EX_TEMPFAIL),
    130 after Ctrl-C.
    """

    def work() -> None:
        if error is not None:
            raise error

    assert guarded(work, read_launcher()) == code
