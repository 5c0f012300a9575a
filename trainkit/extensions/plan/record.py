"""A step of one sample or two, forward and backward, and the bytes that are alive in it: what a
microbatch of any size needs beside weights, gradients and optimizer state.

It runs on shapes alone, by torch's FakeTensorMode, in which the same tensors are alive as on a CPU; a
step that asks for values runs on the CPU.

The two sizes give the part that grows with the samples and the part that does not. A gradient is
dropped as soon as it is there, so that its bytes are added where a layout has them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_leaves, tree_map

from trainkit.api.step_call import call_step
from trainkit.api.task import LogTarget, loss_of
from trainkit.data.feed import Microbatch
from trainkit.extensions.halving.oom import split
from trainkit.extensions.pipeline.units import named_units
from trainkit.extensions.plan.living import Living
from trainkit.metrics.log import MetricLog
from trainkit.run.run import Run


@dataclass(frozen=True)
class BackwardMoment:
    """A part of backward, up to a parameter's gradient.

    Attributes:
        parameter: the one that gets its gradient, by its place among the Task's.
        peak: bytes alive in it at most.
    """

    parameter: int
    peak: int


@dataclass(frozen=True)
class StepRecording:
    """The bytes alive in a step, without weights and gradients.

    Attributes:
        starts: what is alive as each unit's forward begins.
        forward: the most within it.
        moments: of what follows the last unit's forward, in order.
        sent: bytes that this rank sends in it to ranks that share its samples.
    """

    starts: tuple[int, ...]
    forward: tuple[int, ...]
    moments: tuple[BackwardMoment, ...]
    sent: int = 0

    @property
    def peak(self) -> int:
        """The most of all."""
        return max(
            [
                *self.forward,
                *(moment.peak for moment in self.moments),
            ]
        )


Setting = Callable[[], AbstractContextManager[Any]]


def record(
    run: Run,
    microbatch: Microbatch,
    samples: int,
    within: Setting = contextlib.nullcontext,
    sent: Callable[[], int] = lambda: 0,
) -> StepRecording:
    """Return what a microbatch of `samples` samples needs.

    Args:
        within: makes the context of a step.
        sent: returns the bytes that its steps have sent so far.
    """
    few, first_size = _few(run, microbatch, 1)
    try_forward(run, microbatch, within)  # what is made once is there from here on
    before = sent()
    step = _step_without_values
    try:
        first = step(run, few, within)
    except Exception:  # any: a step that asks for values, an operation that has no shapes alone
        before = sent()
        step = _step
        first = step(run, few, within)
    travels = (sent() - before) * samples // first_size
    more, size = _few(run, microbatch, 2)
    second = first if size == first_size else step(run, more, within)

    def at(one: int, two: int) -> int:
        if size == first_size:
            return one * samples // size
        return one + (two - one) * (samples - first_size) // (size - first_size)

    return _combined(first, second, at, travels)


def try_forward(run: Run, microbatch: Microbatch, within: Setting) -> None:
    """Run the forward of a sample of a microbatch."""
    few, _ = _few(run, microbatch, 1)
    with within(), torch.no_grad():
        _forward(run, few)


def _few(run: Run, microbatch: Microbatch, samples: int) -> tuple[Any, int]:
    """Return a part of a microbatch, and its samples: so many, or twice with batch norm, which
    takes no single one; or some more, if the microbatch does not come out even.
    """
    norms = any(isinstance(each, _BatchNorm) for each in run.task.modules())
    count = microbatch.num_samples
    pieces = max(1, count // (samples * (1 + norms)))
    return split(microbatch.batch, count, pieces)[0], -(-count // pieces)


def _forward(run: Run, batch: Any) -> Any:
    task = run.task
    task._log_to(LogTarget(MetricLog(), 1, on_step=True, on_epoch=False))
    try:
        with run.precision.autocast():
            return call_step(task, "training_step", batch, 0)
    finally:
        task._log_to(None)


def _step_without_values(run: Run, batch: Any, within: Setting) -> StepRecording:
    """Run a step on shapes alone: operations allocate nothing and take no time."""
    shapes = FakeTensorMode()

    @contextlib.contextmanager
    def blank() -> Iterator[None]:
        with within(), shapes, contextlib.ExitStack() as stack:
            task = run.task
            own = itertools.chain(task.named_parameters(), task.named_buffers())
            fakes: dict[str, Any] = {name: shapes.from_tensor(tensor) for name, tensor in own}
            stack.enter_context(_reparametrize_module(task, fakes, tie_weights=True))
            yield

    def faked(leaf: Any) -> Any:
        return shapes.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf

    return _step(run, tree_map(faked, batch), blank)


def _step(run: Run, batch: Any, within: Setting) -> StepRecording:
    """Run forward and backward of a batch once."""
    task = run.task
    units = [module for _, module in named_units(task)]
    task.zero_grad(set_to_none=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(within())
        living = stack.enter_context(Living([*task.parameters(), *task.buffers()]))
        for leaf in tree_leaves(batch):
            if isinstance(leaf, Tensor):
                living.add(leaf)
        seen = _Seen(living, len(units))
        for place, unit in enumerate(units):
            stack.callback(unit.register_forward_pre_hook(seen.before(place)).remove)
            stack.callback(unit.register_forward_hook(seen.after(place)).remove)
        for place, parameter in enumerate(task.parameters()):
            if parameter.requires_grad:
                register: Any = parameter.register_post_accumulate_grad_hook
                stack.callback(register(seen.gradient(place)).remove)
        loss: Any = loss_of(_forward(run, batch), task)
        if isinstance(loss, Tensor) and loss.requires_grad:
            torch.autograd.backward(loss)
    return StepRecording(
        tuple(seen.starts),
        tuple(seen.forward),
        tuple(seen.moments),
    )


class _Seen:
    """Notes what is alive as a step runs."""

    def __init__(self, living: Living, units: int) -> None:
        self._living = living
        self.starts = [0] * units
        self.forward = [0] * units
        self.moments: list[BackwardMoment] = []

    def before(self, place: int) -> Callable[..., None]:
        """Return the hook of a unit that begins."""

        def hook(*given: Any) -> None:
            self.starts[place] = self.starts[place] or self._living.bytes
            self._living.peak = self._living.bytes

        return hook

    def after(self, place: int) -> Callable[..., None]:
        """Return the hook of a unit that has ended."""

        def hook(*given: Any) -> None:
            self.forward[place] = max(self.forward[place], self._living.peak)
            self._living.peak = self._living.bytes

        return hook

    def gradient(self, place: int) -> Callable[[Tensor], None]:
        """Return the hook of a parameter whose gradient is there."""

        def hook(parameter: Tensor) -> None:
            self.moments.append(BackwardMoment(place, self._living.peak))
            parameter.grad = None
            self._living.peak = self._living.bytes

        return hook


def shared_by(whole: StepRecording, halved: StepRecording, ranks: int) -> StepRecording:
    """Return the recording of a rank that shares layers, or tokens, with others.

    Args:
        whole: of a rank that shares nothing.
        halved: of a rank that shares with one other; a part of it is half as large, and a part as
            large as in `whole`.
        ranks: that share.
    """

    def at(one: int, two: int) -> int:
        return max(0, 2 * two - one + 2 * (one - two) // ranks)

    # a ring sends (ranks - 1) / ranks of it
    return _combined(
        whole,
        halved,
        at,
        halved.sent * 2 * (ranks - 1) // ranks,
    )


def _combined(
    first: StepRecording,
    second: StepRecording,
    at: Callable[[int, int], int],
    sent: int,
) -> StepRecording:
    order = [moment.parameter for moment in first.moments]
    if order != [moment.parameter for moment in second.moments]:
        first = second  # other samples take other ways
    moments = zip(first.moments, second.moments, strict=True)
    return StepRecording(
        tuple(map(at, first.starts, second.starts)),
        tuple(map(at, first.forward, second.forward)),
        tuple(BackwardMoment(one.parameter, at(one.peak, two.peak)) for one, two in moments),
        sent,
    )
