"""Layouts of a run's ranks, and the bytes of a rank under each.

Of a rank under a layout are alive (Rajbhandari et al. 2020, section 5; Narayanan et al. 2021,
section 2.2):

    always              its parts of the weights and of the optimizer's state
    forward, backward   activations, as they were recorded; under fsdp a unit's gathered weights, and
                        those of the next one; in backward their gradients beside them
    between two         with several microbatches in a step the whole gradients of what it computes
    a pipeline          activations of as many microbatches as are under way on its stage

The most of it is what the rank needs. Parts are those that FSDP2 makes: of the first dimension,
after the one that engine.tensor splits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainkit.extensions.plan.record import Moment, Recording

_LINKS = 4  # microbatches for each stage whose sent tensors may be held (pipeline.Links)


@dataclass(frozen=True)
class Layout:
    """How ranks share the work.

    Attributes:
        ranks: of the run.
        engine: "auto" (whole copies) or "fsdp".
        gathers_once: weights stay gathered from forward to backward (ZeRO 2).
        replicas, tensor, pipeline, context: as of engine=fsdp.
        offloads: parts are in host memory.
        recomputes: with activation checkpointing.
        accumulate: microbatches of a step, on a rank.
    """

    ranks: int = 1
    engine: str = "auto"
    gathers_once: bool = False
    replicas: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    offloads: bool = False
    recomputes: bool = False
    accumulate: int = 1

    @property
    def parts(self) -> int:
        """The ranks that split what a rank computes."""
        if self.engine != "fsdp":
            return 1
        return max(
            1,
            self.ranks // (self.replicas * self.tensor * self.pipeline),
        )

    @property
    def shared(self) -> int:
        """The ranks that read the same samples."""
        return self.tensor * self.pipeline * self.context

    @property
    def means(self) -> int:
        """How many means it takes; variants of fsdp count as one."""
        sizes = (self.tensor, self.pipeline, self.context)
        given = (
            self.engine == "fsdp",
            self.offloads,
            self.recomputes,
        )
        return sum(given) + sum(size > 1 for size in sizes)

    @property
    def kind(self) -> tuple[int, int, int]:
        """What its activations depend on."""
        return self.tensor, self.context, int(self.recomputes)


@dataclass(frozen=True)
class Weight:
    """A parameter.

    Attributes:
        shape: of it, whole.
        width: bytes of an element.
        trained: whether it gets a gradient.
        units: those that have it, by their places; none of a parameter of the Task itself.
        in_block: whether it is gathered with a block, and not from a step's begin to its end.
        state: bytes of the optimizer's state for each element.
        more: other bytes of it.
    """

    shape: tuple[int, ...]
    width: int
    trained: bool
    units: tuple[int, ...]
    in_block: bool
    state: float
    more: int


@dataclass(frozen=True)
class Measured:
    """What was measured of a run.

    Attributes:
        weights: in the order of the Task's parameters.
        buffers: bytes.
        recordings: of a microbatch, by Layout.kind.
        split: for each number of tensor ranks, the dimension along which a parameter is split.
        entering: bytes of a microbatch that each unit takes from those before it.
        stages: for each number of stages, the stage of each unit.
        work: of each unit.
    """

    weights: Sequence[Weight]
    buffers: int
    recordings: Mapping[tuple[int, int, int], Recording]
    split: Mapping[int, Mapping[int, int]]
    entering: Sequence[int]
    stages: Mapping[int, Sequence[int]]
    work: Sequence[int] = ()


@dataclass(frozen=True)
class RankBytes:
    """The bytes of a rank.

    Attributes:
        weights, gradients, optimizer: its parts of them, at the end of a step's backward.
        step: what else is alive at the worst moment.
        host: those of them in host memory.
        stage: of a pipeline.
    """

    weights: int
    gradients: int
    optimizer: int
    step: int
    stage: int = 0
    host: int = 0

    @property
    def device(self) -> int:
        """Those of a GPU at the worst moment."""
        state = 0 if self.host else self.weights + self.optimizer
        return state + self.step


def rank_bytes(measured: Measured, layout: Layout) -> list[RankBytes]:
    """Return the bytes of a rank of each stage."""
    return [_Stage(measured, layout, stage).bytes() for stage in range(layout.pipeline)]


class _Stage:
    """A rank of one stage; of the only one without a pipeline."""

    def __init__(self, measured: Measured, layout: Layout, stage: int) -> None:
        self._measured, self._layout, self._stage = (
            measured,
            layout,
            stage,
        )
        self._recording = measured.recordings[layout.kind]
        count = len(self._recording.starts)
        self._homes = measured.stages.get(layout.pipeline, [0] * count)
        self._units = [place for place in range(count) if self._homes[place] == stage]
        self._own = [place for place, weight in enumerate(measured.weights) if self._holds(weight)]

    def bytes(self) -> RankBytes:
        """Return them."""
        layout, weights = self._layout, self._measured.weights
        parts = {place: self._part(place) for place in self._own}
        own = sum(size * weights[place].width for place, size in parts.items())
        gradients = sum(parts[p] * weights[p].width for p in self._own if weights[p].trained)
        state = sum(int(size * weights[p].state) + weights[p].more for p, size in parts.items())
        step = max(self._backward(), self._forward(), gradients)
        host = own + gradients + state if layout.offloads else 0
        return RankBytes(
            own + self._measured.buffers,
            gradients,
            state,
            step,
            self._stage,
            host,
        )

    def _holds(self, weight: Weight) -> bool:
        homes = {self._homes[unit] for unit in weight.units}
        return len(homes) != 1 or self._stage in homes

    def _part(self, place: int, *, gathered: bool = False) -> int:
        """Return the elements of a parameter that this rank has, or has gathered."""
        shape = list(self._measured.weights[place].shape)
        dimension = self._measured.split.get(self._layout.tensor, {}).get(place)
        if dimension is not None:
            shape[dimension] = shape[dimension] // self._layout.tensor
        if shape and not gathered:
            shape[0] = -(-shape[0] // self._layout.parts)
        return math.prod(shape)

    def _whole(self, places: Sequence[int], *, trained: bool = False) -> int:
        """Return the bytes of gathered weights, or of their gradients."""
        weights = self._measured.weights
        return sum(
            self._part(place, gathered=True) * weights[place].width
            for place in places
            if weights[place].trained or not trained
        )

    def _block(self) -> int:
        """Return the bytes of the largest gathered block of this stage."""
        of_unit: dict[int, list[int]] = {}
        for place in self._own:
            weight = self._measured.weights[place]
            if weight.in_block:
                of_unit.setdefault(weight.units[0], []).append(place)
        return max(map(self._whole, of_unit.values()), default=0)

    def _gathered(self, *, in_block: bool) -> int:
        layout, weights = self._layout, self._measured.weights
        if layout.engine != "fsdp":
            return 0  # FSDP2 gathers a copy of one rank's weights too
        if layout.gathers_once or layout.pipeline > 1:
            return self._whole(self._own)
        rest = [place for place in self._own if not weights[place].in_block]
        return self._whole(rest) + 2 * self._block() * in_block

    def _base(self) -> int:
        """Return what is alive in a recording and is not this stage's."""
        if self._layout.pipeline == 1 or not self._stage:
            return 0
        recording = self._recording
        return recording.starts[self._units[0]] - recording.starts[0] - self._entering()

    def _entering(self) -> int:
        return self._measured.entering[self._units[0]] if self._stage else 0

    def _under_way(self) -> int:
        """Return the bytes of other microbatches than the one that is computed."""
        layout, last = (
            self._layout,
            self._stage == self._layout.pipeline - 1,
        )
        if layout.pipeline == 1:
            return 0
        handed = 0 if last else self._measured.entering[self._units[-1] + 1]
        count = min(layout.accumulate, layout.pipeline - self._stage)
        held = 0
        if not last:
            held = self._recording.starts[self._units[-1] + 1] - self._base() + handed
        links = min(layout.accumulate, _LINKS * layout.pipeline) - count
        return (count - 1) * held + max(0, links) * (self._entering() + handed)

    def _forward(self) -> int:
        most = max(
            (self._recording.forward[unit] for unit in self._units),
            default=0,
        )
        whole = self._whole(self._own, trained=True) if self._layout.accumulate > 1 else 0
        return most - self._base() + self._under_way() + whole + self._gathered(in_block=True)

    def _backward(self) -> int:
        """Return the most in backward: gradients become more, activations fewer."""
        layout, weights = self._layout, self._measured.weights
        fixed = self._under_way() - self._base()
        # whole gradients, beside the parts that are summed; a pipeline's last microbatch is alone
        sums = self._block() if layout.engine == "fsdp" and layout.pipeline == 1 else 0
        whole = self._whole(self._own, trained=True) if layout.accumulate > 1 else 0
        done = most = 0
        for moment in self._moments():
            weight = weights[moment.parameter]
            now = moment.peak + fixed + self._gathered(in_block=weight.in_block)
            now += sums * weight.in_block
            most = max(most, now + max(done, whole))
            done += self._part(moment.parameter) * weight.width
        return most

    def _moments(self) -> Sequence[Moment]:
        """Return this stage's."""
        stage = self._layout.pipeline - 1
        own = []
        for moment in self._recording.moments:
            homes = {self._homes[unit] for unit in self._measured.weights[moment.parameter].units}
            stage = min(homes) if len(homes) == 1 else stage
            if stage == self._stage:
                own.append(moment)
        return own
