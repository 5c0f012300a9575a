"""A stage's part of a step, with the stages one after the other in this process."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trainkit.engine.base import HandedOn
from trainkit.errors import TaskError
from trainkit.extensions.pipeline.passes import Passes, stage_class
from trainkit.extensions.pipeline.placeholder import Placeholder, placeholder
from trainkit.extensions.pipeline.units import units_of

CPU = torch.device("cpu")


class Wire:
    """Stands for the links of two stages: what one sends, the other receives, later."""

    def __init__(self, places: Sequence[int]) -> None:
        self.places, self.sent = list(places), deque[list[Tensor]]()

    def request(self, places: Sequence[int]) -> None:
        """Check what stage 1 asks for: stage 0 ran first."""
        assert list(places) == self.places

    def requested(self) -> list[int]:
        """Return what stage 1 will ask for."""
        return self.places

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Hold copies of tensors."""
        self.sent.append([t.detach().clone().requires_grad_(t.requires_grad) for t in tensors])

    def receive(self) -> list[Tensor]:
        """Return them."""
        return self.sent.popleft()


class Block(nn.Module):
    """Adds to its input, and to the input of all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, first: Tensor, mask: Tensor) -> Tensor:
        """Return as many features."""
        return x + self.layer(x) * mask + 0.5 * first


class Model(nn.Module):
    """Takes tokens; `after` is what follows the blocks."""

    def __init__(self, after: Callable[[Any, Tensor, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(5, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(3, 1)
        self.constant = False
        self.after = after or (lambda self, x, first: self.head(x))

    def step(self, ids: Tensor) -> Tensor:
        """Return the mean."""
        mask = (ids > 0).float()[..., None]
        first = x = self.table(ids) * 2
        for block in self.blocks:
            x = block(x, torch.ones(3) if self.constant else first, mask)
        return self.after(self, x, first).mean()


def staged(model: Model, wire: Wire, stage: int) -> Callable[..., Any]:
    """Return a copy of the model's step as a stage runs it, and its pass."""
    passes = Passes(wire, stage, 2, CPU)  # type: ignore[arg-type]
    own = Model(model.after)
    own.load_state_dict(model.state_dict())
    for unit in units_of(own, 2):
        if unit.stage != stage:
            unit.module.to("meta")
        unit.module.__class__ = stage_class(type(unit.module))
        object.__setattr__(unit.module, "_pipeline_place", (passes, unit))
    return functools.partial(passes.run, "training_step", passes.cutting(own.step))


IDS = torch.tensor([[1, 0, 4], [2, 2, 3]])


def test_two_stages_compute_what_one_process_does() -> None:
    """A tensor that all blocks take is handed on too; the mask is each stage's own."""
    model, wire = Model(), Wire([0, 1])
    first, last = staged(model, wire, 0), staged(model, wire, 1)
    outputs, own = first(IDS)
    assert isinstance(outputs, HandedOn) and len(own.outputs) == 2
    loss, other = last(IDS)
    assert torch.equal(loss, model.step(IDS))
    loss.backward()
    torch.autograd.backward(own.outputs, [tensor.grad for _, tensor in other.inputs])
    assert all(tensor.grad is not None for _, tensor in other.inputs)


def test_random_numbers_outside_of_layers_are_those_of_all_stages() -> None:
    """As those of mixup; after a step the stream continues as if one number had been drawn."""
    seen: list[tuple[float, float]] = []

    def after(model: Any, x: Tensor, first: Tensor) -> Tensor:
        return model.head(x)  # type: ignore[no-any-return]

    model, wire = Model(after), Wire([0, 1])
    model_step = Model.step

    def step(self: Model, ids: Tensor) -> Tensor:
        seen.append((float(torch.rand(())), float(np.random.rand())))
        return model_step(self, ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "step", step)
        for stage in range(2):
            run = staged(model, wire, stage)
            torch.manual_seed(3)
            np.random.seed(stage)
            run(IDS)
            continued = torch.rand(())
    assert seen[0] == seen[1]
    torch.manual_seed(3)
    torch.randint(2**31, ())
    assert torch.equal(torch.rand(()), continued)


def test_random_numbers_inside_of_layers_are_a_stages_own() -> None:
    """Else two layers of dropout would have one mask."""
    drawn: list[Tensor] = []

    def forward(self: Block, x: Tensor, first: Tensor, mask: Tensor) -> Tensor:
        drawn.append(torch.rand(3))
        return x + self.layer(x) + first

    model, wire = Model(), Wire([0, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Block, "forward", forward)
        runs = [staged(model, wire, stage) for stage in range(2)]
        for run in runs:  # the first time layers of the earlier stage draw for their shapes
            run(IDS)
        of_stages = []
        for run in runs:
            torch.manual_seed(3)
            drawn.clear()
            run(IDS)
            of_stages.append(drawn[0])
    assert not torch.equal(*of_stages)


def test_arguments_that_change_are_refused() -> None:
    """The previous stage sends what was asked for in the first step of the kind."""
    model, wire = Model(), Wire([0, 1])
    first, last = staged(model, wire, 0), staged(model, wire, 1)
    first(IDS)
    last(IDS)
    first(IDS)
    last.args[1].__wrapped__.__self__.constant = True
    with pytest.raises(TaskError, match=r"'blocks\.2' that earlier .* change from one"):
        last(IDS)


@pytest.mark.parametrize(
    ("after", "text"),
    [
        (lambda self, x, first: self.head(x) + first, "returned what the last pipeline stage does"),
        (lambda self, x, first: self.head(x + self.table(IDS)), "'head' of pipeline stage 1 takes"),
        (lambda self, x, first: self.head(x) * first.sum().item(), "needs the values of a tensor"),
        (
            lambda self, x, first: self.head(torch.zeros_like(x).copy_(self.table(IDS))),
            "writes what another pipeline stage computes into a tensor of this stage",
        ),
        (lambda self, x, first: x, ""),
    ],
    ids=["beside the blocks", "called again", "a value", "written", "fine"],
)
def test_what_is_no_chain_is_refused(after: Any, text: str) -> None:
    """On the stage that lacks the values, with what it needs."""
    model, wire = Model(after), Wire([0, 1])
    staged(model, wire, 0)(IDS)
    run = staged(model, wire, 1)
    if not text:
        run(IDS)
        return
    with pytest.raises(TaskError, match=text):
        run(IDS)


def test_a_layer_of_another_stage_runs_in_steps_alone() -> None:
    """Outside of a step the error names the layer and the stage."""
    model = Model()
    run = staged(model, Wire([0, 1]), 0)
    own = run.args[1].__wrapped__.__self__
    with pytest.raises(TaskError, match=r"'head' was called outside of a step, .* stage 1"):
        own.head(torch.ones(2, 3))


def test_a_placeholder_has_a_shape_and_no_values() -> None:
    """What is computed from it is one too, also with real tensors; it has a device of its own."""
    blank = placeholder(torch.ones(2, 3), CPU)
    made = torch.nn.functional.softmax(blank @ torch.ones(3, 4) + 1, -1)[:, :2]
    assert type(made) is Placeholder and made.shape == (2, 2) and made.device == CPU
    assert type(torch.arange(3, device=made.device)) is Tensor
    assert repr(made) == "Placeholder(shape=[2, 2], dtype=torch.float32)"
    assert placeholder("text", CPU) == "text"
