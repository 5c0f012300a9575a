"""Compiling the modules of a task in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

from tests.helpers.toy import Line, compile_with, loader, quiet, weights
from trainkit.api.step_call import call_step
from trainkit.errors import ConfigError
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


class Residual(nn.Module):
    """A block."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, 3] of [B, 3]."""
        return x + self.layer(x).relu()


class Stack(nn.Module):
    """Twelve blocks and a head; notes in `events` when a gradient is there."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(12))
        self.head = nn.Linear(3, 1)
        self.events: list[int] = []
        for i, block in enumerate(self.blocks):
            weight: Any = block.layer.weight
            weight.register_post_accumulate_grad_hook(lambda _, i=i: self.events.append(i))

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, 1] of [B, 3]."""
        for block in self.blocks[:6]:
            x = block(x)
        if x.requires_grad:
            x.register_hook(lambda _: self.events.append(-1))
        for block in self.blocks[6:]:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class OfBlocks(Line):
    """A Task of them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Stack()  # type: ignore[assignment]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of the compiler itself
def test_blocks_are_compiled_once_and_hand_gradients_over_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """trainer.compile=blocks: two compilations, without and with a gradient of the input, serve all
    of one class. The last blocks' gradients are there, and their sums start, before the first
    blocks' backward begins.
    """
    task = OfBlocks()
    x = torch.ones(2, 3)
    expected = task.model(x)
    counter = CompileCounterWithBackend("aot_eager")
    compile_with(monkeypatch, counter)
    with compiled(task, "blocks"):
        on = [name for name, m in task.named_modules() if m._compiled_call_impl is not None]
        out = task.model(x)
        out.sum().backward()
    assert on == [f"model.blocks.{i}" for i in range(12)]
    assert counter.frame_count == 2
    assert torch.equal(out, expected)
    assert task.model.events == [*range(11, 5, -1), -1, *range(5, -1, -1)]  # type: ignore[attr-defined]


def test_a_task_without_blocks_is_refused() -> None:
    """With what to set in place of it."""
    with (
        pytest.raises(ConfigError, match="is blocks, but Line has no list.*trainer.compile=true"),
        compiled(Line(), "blocks"),
    ):
        pass


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


class Graphs:
    """Behaves as torch's CUDA graphs do: when something new begins, all that compiled calls and
    their backwards have returned is written over. That is where the caller says so; else at a call
    after a backward, or without gradients (torch/_inductor/cudagraph_trees.py).
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, task: nn.Module) -> None:
        self._alive: list[Tensor] = []
        self._is_shown = self._pending = False
        for parameter in task.parameters():
            parameter.register_post_accumulate_grad_hook(self._after_backward)
        monkeypatch.setattr(torch, "compile", lambda call, **options: self._replayed(call))
        monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", self._shown)

    def _shown(self) -> None:
        self._is_shown = True
        self._begin()

    def _begin(self) -> None:
        for tensor in self._alive:
            tensor.data.fill_(float("nan"))
        self._alive.clear()

    def _after_backward(self, parameter: Tensor) -> None:
        self._pending = False
        self._alive.append(parameter.grad.detach())

    def _replayed(self, call: Any) -> Any:
        def replayed(*arguments: Any) -> Any:
            if not self._is_shown and not self._pending:
                self._begin()
            output = call(*arguments)
            self._pending = torch.is_grad_enabled()
            self._alive.append(output.detach())
            return output

        return replayed


class Parts(Line):
    """One module or two, the last of which returns the loss."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        one = nn.Sequential(nn.Linear(3, 8), nn.Tanh())
        two = nn.Sequential(nn.Linear(8, 1), nn.Flatten(0), nn.Softplus(), Mean())
        self.model = nn.Sequential(one, two) if parts == 1 else one
        self.head = nn.Identity() if parts == 1 else two

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return and log the loss, which is a module's own output."""
        loss = self.head(self.model(batch[0]))
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the output."""
        self.log("val", self.head(self.model(batch[0])))


class Mean(nn.Module):
    """The mean."""

    def forward(self, x: Tensor) -> Tensor:
        """Return it."""
        return x.mean()


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("every", [1.0, 0.5])
def test_what_graphs_overwrite_is_not_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    parts: int,
    accumulate: int,
    every: float,
) -> None:
    """Of one module and of two, with and without accumulation, and with a validation between the
    steps: weights and logged values are those of a run that is not compiled.
    """
    options: dict[str, Any] = {
        "accumulate_grad_batches": accumulate,
        "max_epochs": 2,
        "val_check_interval": every,
    }
    plain, fast = Parts(parts), Parts(parts)
    expected = quiet(tmp_path / "plain", **options)
    expected.fit(plain, loader(24), loader(9))
    Graphs(monkeypatch, fast)
    found = quiet(tmp_path / "fast", compile="reduce-overhead", **options)
    found.fit(fast, loader(24), loader(9))
    assert torch.equal(weights(fast), weights(plain))
    assert found.callback_metrics == expected.callback_metrics
    assert "WARNING: the loss" not in "".join(capsys.readouterr())


def test_graphs_of_ones_own_are_guessed_again_after_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch is shown steps only while the Task's modules are compiled."""
    trees = pytest.importorskip("torch._inductor.cudagraph_trees")
    compile_with(monkeypatch, "eager")
    task = Line()
    with compiled(task, "reduce-overhead"):
        call_step(task, "forward", torch.ones(1, 3))
        assert trees.MarkStepBox.mark_step_counter < 0
    assert trees.MarkStepBox.mark_step_counter == 0
    assert task._before_step is None
