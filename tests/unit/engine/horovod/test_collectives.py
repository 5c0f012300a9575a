"""Horovod's collectives, without other ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainkit.engine.heartbeat import Heartbeat
from trainkit.engine.horovod import collectives
from trainkit.engine.ranks import Ranks
from trainkit.errors import EngineError
from trainkit.launch.environment import Launcher


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


def test_the_buffer_of_fusion_is_allocated_before_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two tensors are summed as one, on the device: only that makes Horovod allocate it."""
    summed: list[list[torch.device]] = []
    horovod: Any = SimpleNamespace(
        Sum=1, grouped_allreduce=lambda two, **named: summed.append([t.device for t in two])
    )
    monkeypatch.setattr(collectives, "hvd", horovod)
    ranks = Ranks(Launcher("horovodrun", 0, 2, 0, 2))
    ours = collectives.HorovodCollectives(ranks, Heartbeat())
    ours.reserve_fusion_buffer(torch.device("meta"))
    assert summed == [[torch.device("meta")] * 2]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers_are_summed_as_pairs(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Horovod has sums of real numbers alone: no imaginary part is lost, nor rounded to integers."""

    def twice(own: torch.Tensor, **named: Any) -> torch.Tensor:
        assert own.dtype is dtype.to_real()
        return own * 2

    horovod: Any = SimpleNamespace(
        Sum=1, allreduce_async=twice, global_process_set=SimpleNamespace(ranks=[0, 1])
    )
    monkeypatch.setattr(collectives, "hvd", horovod)
    monkeypatch.setattr(collectives, "wait_for", lambda handle: handle)
    ranks = Ranks(Launcher("horovodrun", 0, 2, 0, 2))
    ours = collectives.HorovodCollectives(ranks, Heartbeat())
    own = torch.tensor([[0.25 + 0.75j, 1j], [2.0, -0.5j]], dtype=dtype)
    for tensor in (own, own.t(), own.conj(), own[0, 0]):
        total = ours.all_reduce(tensor)
        assert total.dtype is dtype
        assert torch.equal(total, tensor * 2)
