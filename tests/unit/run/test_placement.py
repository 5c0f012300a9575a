"""What a task holds, when it is placed on a rank:
what ranks could not send to one another is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from tests.helpers.threads import ThreadEngine, World
from tests.helpers.toy import Line, loader, quiet
from trainkit import Task
from trainkit.callbacks import EMA
from trainkit.errors import TaskError


def test_a_parameter_outside_the_task_is_refused(tmp_path: Path) -> None:
    """An optimizer may only update the task's own parameters."""

    class Small(Line):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.zeros(3))], lr=0.1)

    with pytest.raises(
        TaskError, match=r"updates 1 parameters \(one of shape \[3\]\) that are not among Small's"
    ):
        quiet(tmp_path).fit(Small(), loader(8))


def test_weights_without_a_shape_are_refused_at_several_ranks(tmp_path: Path) -> None:
    """By name, before anything is sent; one process trains them."""

    class Lazy(Task):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.model(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return SGD(self.parameters(), lr=0.1)

    quiet(tmp_path / "one").fit(Lazy(), loader(8))

    def one(engine: ThreadEngine) -> str:
        with pytest.raises(TaskError) as raised:
            quiet(tmp_path / "two", engine=engine).fit(Lazy(), loader(8))
        return str(raised.value)

    assert "'model.0.weight' of Lazy has no shape yet" in World(2).run(one)[0]


class Buffers(Line):
    """Has a buffer of its own."""

    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        self.model.register_buffer("mask", buffer, persistent=False)


def test_an_expanded_buffer_gets_memory_of_its_own(tmp_path: Path) -> None:
    """Ranks send it to one another, and an average copies it."""

    def one(engine: ThreadEngine) -> Any:
        task = Buffers(torch.ones(1, 3).expand(4, 3))
        quiet(tmp_path, engine=engine, callbacks=EMA()).fit(task, loader(8), loader(4))
        return task.model.mask, set(task.state_dict())

    for mask, names in World(2).run(one):
        assert torch.equal(mask, torch.ones(4, 3)) and mask.is_contiguous()
        assert names == {"model.weight", "model.bias"}


def test_a_sparse_buffer_is_refused_at_several_ranks(tmp_path: Path) -> None:
    """By name; one process trains with it."""
    quiet(tmp_path / "one").fit(Buffers(torch.eye(3).to_sparse()), loader(8))

    def one(engine: ThreadEngine) -> str:
        with pytest.raises(TaskError) as raised:
            quiet(tmp_path / "two", engine=engine).fit(Buffers(torch.eye(3).to_sparse()), loader(8))
        return str(raised.value)

    assert "The buffer 'model.mask' of Buffers is sparse" in World(2).run(one)[0]
