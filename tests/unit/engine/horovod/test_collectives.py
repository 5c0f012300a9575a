"""Horovod's collectives, without other ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trainkit.engine.horovod import collectives
from trainkit.errors import EngineError


@pytest.mark.parametrize(("built", "enabled"), [(False, False), (True, False), (True, True)])
def test_horovod_on_mpi_is_not_stopped_to_be_started_again(
    built: bool, enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPI would end the process at the second start;
    an MPI build that runs on Gloo is stopped as any other.
    """
    stopped: list[bool] = []
    horovod: Any = SimpleNamespace(
        mpi_built=lambda: built, mpi_enabled=lambda: enabled, shutdown=lambda: stopped.append(True)
    )
    monkeypatch.setattr(collectives, "hvd", horovod)
    ours = collectives.HorovodCollectives.__new__(collectives.HorovodCollectives)
    if enabled:
        with pytest.raises(
            EngineError,
            match=r"Horovod runs on MPI here.* Start it with `horovodrun --gloo -np N \.\.\.`",
        ):
            ours.disconnect()
    else:
        ours.disconnect()
    assert stopped == [True] * (not enabled)
