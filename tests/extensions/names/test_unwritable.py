"""Weights and buffers that no checkpoint can hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.threads import ThreadEngine, World
from tests.helpers.toy import Line, loader, quiet
from trainkit.api.callback import Callback
from trainkit.errors import TaskError


class Holding(Line):
    """Has a further buffer."""

    def __init__(self, value: torch.Tensor, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("held", value, persistent=persistent)


class Counting(Line):
    """Has an extra state."""

    def get_extra_state(self) -> int:
        """Return a number."""
        return 3

    def set_extra_state(self, state: int) -> None:
        """Take it."""


class Converting(Holding):
    """Saves its sparse buffer as a dense one."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Replace it."""
        checkpoint["state_dict"]["held"] = checkpoint["state_dict"]["held"].to_dense()


REFUSED = {
    "coo": (lambda: Holding(torch.eye(3).to_sparse()), r"sparse_coo.*to_sparse\(\).*persistent"),
    "csr": (lambda: Holding(torch.eye(3).to_sparse_csr()), r"sparse_csr.*persistent=False"),
    "dtype": (lambda: Holding(torch.zeros(3, dtype=torch.complex128)), r"complex128.*view_as_real"),
    "extra": (Counting, r"'_extra_state'\] is a int; weights are tensors"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")  # torch's own, of a beta
@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_checkpoint_holds_is_refused_before_the_first_step(
    kind: str, tmp_path: Path
) -> None:
    """It ended the run at its first checkpoint, or after it, with the advice to make room."""
    make, said = REFUSED[kind]
    task: Any = make()
    with pytest.raises(TaskError, match=rf"state_dict\(\)\[.*{said}"):
        quiet(tmp_path, max_epochs=1, enable_checkpointing=True).fit(task, loader(8))
    assert task.global_step == 0


def test_it_is_refused_on_all_ranks(tmp_path: Path) -> None:
    """None waits for another."""

    def work(engine: ThreadEngine) -> str:
        trainer = quiet(tmp_path, engine=engine, max_epochs=1, enable_checkpointing=True)
        with pytest.raises(TaskError) as error:
            trainer.fit(Holding(torch.zeros(3, dtype=torch.complex128)), loader(8))
        return str(error.value)

    first, second = World(2).run(work)
    assert first == second


@pytest.mark.parametrize(
    "make",
    [
        lambda: Holding(torch.eye(3).to_sparse(), persistent=False),
        lambda: Holding(torch.zeros(3, dtype=torch.complex64)),
        lambda: Holding(torch.zeros(0, dtype=torch.uint16)),
        lambda: Converting(torch.eye(3).to_sparse()),
    ],
    ids=["not persistent", "complex64", "uint16", "converted"],
)
def test_what_is_written_or_left_out_trains(make: Any, tmp_path: Path) -> None:
    """Also what the Task itself makes writable."""
    task = make()
    quiet(tmp_path, max_epochs=1, enable_checkpointing=True).fit(task, loader(8))
    assert list((tmp_path / "checkpoints").glob("epoch*"))


def test_a_run_without_checkpoints_may_hold_anything(tmp_path: Path) -> None:
    """Nothing is written then."""
    task = Holding(torch.eye(3).to_sparse())
    quiet(tmp_path, max_epochs=1).fit(task, loader(8))
    assert task.global_step > 0


def test_a_callback_may_change_what_is_saved(tmp_path: Path) -> None:
    """Then the checkpoint decides."""

    class Dense(Callback):
        def on_save_checkpoint(self, trainer: Any, task: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"]["held"] = checkpoint["state_dict"]["held"].to_dense()

    trainer = quiet(tmp_path, max_epochs=1, enable_checkpointing=True, callbacks=Dense())
    trainer.fit(Holding(torch.eye(3).to_sparse()), loader(8))
    assert (tmp_path / "checkpoints" / "last").exists()
