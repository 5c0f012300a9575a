"""Compiling the modules of a task in place."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from tests.helpers.toy import Line, compile_with
from trainkit.run.compile import _ALONE, compiled


def test_modules_in_a_list_are_compiled() -> None:
    """A list or dict of modules is never called: its modules are compiled."""

    class Blocks(Line):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.ModuleDict({"a": nn.Linear(3, 3)})])

    task = Blocks()
    with compiled(task, True):
        on = [name for name, m in task.named_modules() if m._compiled_call_impl is not None]
    assert on == ["model", "blocks.0", "blocks.1.a"]
    assert all(m._compiled_call_impl is None for m in task.modules())


class Own(nn.Linear):
    """A layer of a user's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return twice what the layer does."""
        return 2 * super().forward(x)


@pytest.mark.parametrize("kind", [nn.Linear, Own])
def test_many_modules_are_all_compiled(
    kind: type[nn.Linear], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of modules that are compiled in place torch would leave all but eight as they are,
    or those of its own classes.
    """

    class Blocks(Line):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([kind(3 + i, 2) for i in range(12)])

    counter, limit = CompileCounter(), torch._dynamo.config.recompile_limit
    compile_with(monkeypatch, counter)
    task = Blocks()
    with compiled(task, True):
        for i, block in enumerate(task.blocks):
            block(torch.ones(1, 3 + i))
    assert counter.frame_count == 12
    assert torch._dynamo.config.recompile_limit == limit


@pytest.mark.skipif(not _ALONE, reason="this torch counts modules of one class together")
def test_endless_compiling_still_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is another one at each call is given up after torch's limit,
    however many others there are.
    """

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.n = nn.Parameter(torch.ones(1)), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.n += 1
            return x * self.weight * self.n

    class Many(Line):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Counting() for _ in range(6)])

    counter = CompileCounter()
    compile_with(monkeypatch, counter)
    task = Many()
    with (
        compiled(task, True),
        torch._dynamo.config.patch(automatic_dynamic_shapes=False, assume_static_by_default=True),
    ):
        for _ in range(20):
            task.blocks[0](torch.ones(1))
    assert counter.frame_count <= torch._dynamo.config.recompile_limit + 1
