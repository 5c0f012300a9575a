"""The work of a Task's layers is counted from the shapes of a sample, and stages are cut by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recipes.gpt import GPT
from recipes.language_model import LanguageModel
from trainkit.errors import TaskError
from trainkit.extensions.pipeline.units import named_units, units_of
from trainkit.extensions.pipeline.work import count_work, try_to_count

CPU = torch.device("cpu")


class Convolution(nn.Module):
    """Halves an image, and doubles its channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layer = nn.Conv2d(channels, 2 * channels, 3, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(2 * channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return the smaller one."""
        return self.norm(self.layer(x)).relu()


class Images(nn.Module):
    """Convolutions of ever more weights, with as much work each; a step draws, counts and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Convolution(4 * 2**place) for place in range(4)))
        self.head = nn.Linear(64, 2)
        self.seen: list[int] = []
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch: Tensor) -> Tensor:
        """Return a loss of the batch's own values."""
        self.seen.append(len(batch))
        self.steps += 1
        x = batch * torch.rand(())
        return self.head(self.blocks(x).mean((2, 3))).square().mean()


def stages_of(task: nn.Module, stages: int, work: Any = None) -> list[int]:
    """The stage of each unit."""
    return [unit.stage for unit in units_of(task, stages, work)]


def test_stages_of_an_uneven_chain_have_equal_work() -> None:
    """The last of four convolutions has most weights, and each has the same work. Batch norm, which
    takes no single pixel of a single sample, counts too.
    """
    task = Images()
    work, reason = try_to_count(task, lambda: torch.ones(1, 4, 32, 32), CPU)
    assert try_to_count(task, lambda: torch.ones(1, 4, 16, 16), CPU)[0] is not None
    assert task.training and all(module.training for module in task.modules())
    assert work is not None and not reason
    one = 2 * 16 * 16 * 8 * 4 * 9
    assert work.operations == [one, one, one, one, 2 * 64 * 2]
    assert work.entering == [0, 16 * 16 * 8 * 4, 8 * 8 * 16 * 4, 4 * 4 * 32 * 4, 64 * 4]
    assert stages_of(task, 2) == [0, 0, 0, 1, 1]
    assert stages_of(task, 2, work.operations) == [0, 0, 1, 1, 1]


def test_the_head_and_attention_weigh_and_the_embedding_does_not() -> None:
    """A head of many tokens is as much work as some blocks, though it shares the table's weights."""
    model = GPT(vocab_size=512, context=32, width=16, depth=4, heads=2)
    task = LanguageModel(model, torch.optim.SGD)
    units = named_units(task)
    work = count_work(task, units, torch.zeros(1, 33, dtype=torch.long), CPU)
    counted = {name: own for (name, _), own in zip(units, work.operations, strict=True) if own}
    blocks = [own for name, own in counted.items() if ".blocks." in name]
    (head,) = [own for name, own in counted.items() if ".blocks." not in name]
    assert len(blocks) == 4 and len(set(blocks)) == 1
    layers = 2 * 32 * 12 * 16 * 16
    assert layers + 2 * 2 * 32 * 32 * 16 == blocks[0]
    assert head == 2 * 32 * 16 * 512
    assert stages_of(task, 2, [1] * len(units)).count(0) < stages_of(
        task, 2, work.operations
    ).count(0)


def test_counting_leaves_no_trace() -> None:
    """Of the step's own counters, buffers, weights and random numbers; weights need no memory."""
    task = Images()
    before = torch.get_rng_state()
    count_work(task, named_units(task), torch.ones(1, 4, 32, 32), CPU)
    assert task.seen == [] and task.steps == 0
    assert torch.equal(torch.get_rng_state(), before)
    expected = count_work(task, named_units(task), torch.ones(1, 4, 32, 32), CPU)
    assert count_work(task.to("meta"), named_units(task), torch.ones(1, 4, 32, 32), CPU) == expected


class Asks(Images):
    """Looks at a value that layers compute, before the last of them."""

    def training_step(self, batch: Tensor) -> Tensor:
        """Return a loss if a number is small."""
        x = self.blocks(batch).mean((2, 3))
        return self.head(x) if float(x.sum()) < 9 else x


class Plain(nn.Module):
    """Multiplies no matrices."""

    def training_step(self, batch: Tensor) -> Tensor:
        """Return a loss."""
        return batch.sum()


class Tied(Images):
    """Uses the head's weight, and does not call it."""

    def training_step(self, batch: Tensor) -> Tensor:
        """Return a loss."""
        return nn.functional.linear(self.blocks(batch).mean((2, 3)), self.head.weight).mean()


def test_what_is_computed_between_layers_is_the_last_units() -> None:
    """A product with a layer's weight that does not call it."""
    task = Tied()
    work = count_work(task, named_units(task), torch.ones(1, 4, 32, 32), CPU)
    assert work.operations[-1] == 2 * 64 * 2 and work.entering[-1] == 0


def test_what_cannot_be_counted_is_cut_by_weights() -> None:
    """The reason is in the sentence; a loss that asks for values comes after all layers."""
    work, reason = try_to_count(Asks(), lambda: torch.ones(1, 4, 32, 32), CPU)
    assert work is None
    assert reason.startswith("Pipeline stages are cut by weights, since the work of a sample")
    assert "needs the values of a tensor" in reason
    with pytest.raises(TaskError, match="no layer multiplies matrices"):
        count_work(Plain(), [], torch.ones(1), CPU)

    class Last(Images):
        def training_step(self, batch: Tensor) -> Any:
            return float(super().training_step(batch))

    assert try_to_count(Last(), lambda: torch.ones(1, 4, 32, 32), CPU)[0] is not None
