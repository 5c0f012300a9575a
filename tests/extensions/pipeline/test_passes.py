"""A stage's part of a step, with the stages one after the other in this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainkit.engine.base import HandedOn
from trainkit.errors import TaskError
from trainkit.extensions.pipeline.passes import Pass, Passes, stage_class
from trainkit.extensions.pipeline.placeholder import Placeholder, placeholder
from trainkit.extensions.pipeline.units import units_of

CPU = torch.device("cpu")


class Wire:
    """Stands for the links of two stages: what one sends, the other receives, later."""

    def __init__(self, places: Sequence[int]) -> None:
        self.places, self.sent = list(places), deque[list[Tensor]]()

    def request(self, stage: int, places: Sequence[int]) -> None:
        """Check what stage 1 asks for: stage 0 ran first."""
        assert list(places) == self.places

    def requested(self, stage: int) -> list[int]:
        """Return what stage 1 will ask for."""
        return self.places

    def send(self, stage: int, tensors: Sequence[Tensor]) -> None:
        """Hold copies of tensors."""
        self.sent.append([t.detach().clone().requires_grad_(t.requires_grad) for t in tensors])

    def receive(self, stage: int) -> list[Tensor]:
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

    def __init__(
        self, after: Callable[[Any, Tensor, Tensor], Tensor] | None = None, depth: int = 4
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(5, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(3, 1)
        self.constant = False
        self.call = lambda block, *args: block(*args)
        self.after = after or (lambda self, x, first: self.head(x))

    def step(self, ids: Tensor) -> Tensor:
        """Return the mean."""
        mask = (ids > 0).float()[..., None]
        first = x = self.table(ids) * 2
        for block in self.blocks:
            x = self.call(block, x, torch.ones(3) if self.constant else first, mask)
        return self.after(self, x, first).mean()


class Rank:
    """A rank of two: calls run a pass of its copy of a model's step."""

    def __init__(self, model: Model, wire: Wire, place: int, chunks: int = 1) -> None:
        self.passes = Passes(wire, place, 2, CPU, chunks)  # type: ignore[arg-type]
        self.model = Model(model.after, len(model.blocks))
        self.model.load_state_dict(model.state_dict())
        for unit in units_of(self.model, 2, chunks=chunks):
            if unit.stage % 2 != place:
                unit.module.to("meta")
            unit.module.__class__ = stage_class(type(unit.module))
            object.__setattr__(unit.module, "_pipeline_place", (self.passes, unit))

    def __call__(self, ids: Tensor, chunk: int = 0, seed: int | None = None) -> tuple[Any, Pass]:
        """Return the outputs and the pass."""
        own = self.passes.begin("training_step", chunk, seed)
        return self.passes.run(own, self.passes.cutting(self.model.step), ids), own


IDS = torch.tensor([[1, 0, 4], [2, 2, 3]])


def test_two_stages_compute_what_one_process_does() -> None:
    """A tensor that all blocks take is handed on too; the mask is each stage's own."""
    model, wire = Model(), Wire([0, 1])
    first, last = Rank(model, wire, 0), Rank(model, wire, 1)
    outputs, own = first(IDS)
    assert isinstance(outputs, HandedOn) and len(own.outputs) == 2
    loss, other = last(IDS)
    assert torch.equal(loss, model.step(IDS))
    loss.backward()
    torch.autograd.backward(own.outputs, [tensor.grad for _, tensor in other.inputs])
    assert all(tensor.grad is not None for _, tensor in other.inputs)


def test_a_rank_with_two_stages_runs_the_step_twice() -> None:
    """Four stages on two ranks: in its second pass the layers of its first stage are placeholders."""
    model = Model()
    model.blocks.extend([Block(), Block()])
    wire = Wire([0, 1])
    ranks = [Rank(model, wire, place, 2) for place in range(2)]
    expected = model.step(IDS)
    passes = []
    for stage in range(4):
        outputs, own = ranks[stage % 2](IDS, stage // 2, 7)
        passes.append(own)
    assert torch.equal(outputs, expected)
    outputs.backward()
    for earlier, later in zip(passes[2::-1], passes[3:0:-1], strict=True):
        torch.autograd.backward(earlier.outputs, [tensor.grad for _, tensor in later.inputs])
    expected.backward()
    for rank in ranks:
        for own, one in zip(rank.model.parameters(), model.parameters(), strict=True):
            if not own.is_meta:
                assert torch.equal(own.grad, one.grad)  # type: ignore[arg-type]


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
            run = Rank(model, wire, stage)
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
        runs = [Rank(model, wire, stage) for stage in range(2)]
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
    first, last = Rank(model, wire, 0), Rank(model, wire, 1)
    first(IDS)
    last(IDS)
    first(IDS)
    last.model.constant = True
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
    Rank(model, wire, 0)(IDS)
    run = Rank(model, wire, 1)
    if not text:
        run(IDS)
        return
    with pytest.raises(TaskError, match=text):
        run(IDS)


def test_a_layer_of_another_stage_runs_in_steps_alone() -> None:
    """Outside of a step the error names the layer and the stage."""
    model = Model()
    first = Rank(model, Wire([0, 1]), 0)
    with pytest.raises(TaskError, match=r"'head' was called outside of a step, .* stage 1"):
        first.model.head(torch.ones(2, 3))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # placeholders
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_torchs_checkpoint_around_a_layer_is_refused(use_reentrant: bool) -> None:
    """On the stage whose first layer it would compute again from a placeholder, or without
    gradients: the error names the setting.
    """
    model, wire = Model(), Wire([0, 1])
    first, last = Rank(model, wire, 0), Rank(model, wire, 1)
    for rank in (first, last):
        rank.model.call = partial(checkpoint, use_reentrant=use_reentrant)
    first(IDS)
    with pytest.raises(TaskError, match=r"'blocks\.[23]'.* trainer\.activation_checkpointing=true"):
        last(IDS)[0].backward()


def test_a_frozen_layer_may_be_called_without_gradients() -> None:
    """What it takes has none either; a whole evaluation is without."""
    model, wire = Model(), Wire([0, 1])
    first, last = Rank(model, wire, 0), Rank(model, wire, 1)
    for rank in (first, last):
        rank.model.call = torch.no_grad()(rank.model.call)
        rank.model.table.requires_grad_(False)
    first(IDS)
    last(IDS)
    with torch.no_grad():
        first.model.table.requires_grad_(True)
        first(IDS)
        last(IDS)


def test_a_placeholder_has_a_shape_and_no_values() -> None:
    """What is computed from it is one too, also with real tensors; it has a device of its own."""
    blank = placeholder(torch.ones(2, 3), CPU)
    made = torch.nn.functional.softmax(blank @ torch.ones(3, 4) + 1, -1)[:, :2]
    assert type(made) is Placeholder and made.shape == (2, 2) and made.device == CPU
    assert type(torch.arange(3, device=made.device)) is Tensor
    assert repr(made) == "Placeholder(shape=[2, 2], dtype=torch.float32)"
    assert placeholder("text", CPU) == "text"
