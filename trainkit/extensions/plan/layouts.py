"""Layouts of a run's ranks, and the bytes of a rank under each.

Of a rank under a layout are alive (Rajbhandari et al. 2020, section 5; Narayanan et al. 2021,
section 2.2):

    always              its parts of the weights and of the optimizer's state
    forward, backward   activations, as they were recorded; under fsdp a unit's gathered weights, and
                        those of the next one; in backward their gradients beside them
    between two         with several microbatches in a step the whole gradients of what it computes
    a pipeline          activations of the passes that are open on its stages at once (the schedule
                        says it), and gradients on their way to the stage before

The most of it is what the rank needs. Parts are those that FSDP2 makes: of the first dimension,
after the one that engine.tensor splits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from trainkit.extensions.pipeline.schedule import StageSchedule
from trainkit.extensions.plan.record import BackwardMoment, StepRecording


@dataclass(frozen=True)
class Layout:
    """How ranks share the work.

    Attributes:
        ranks: of the run.
        engine: "auto" (whole copies) or "fsdp".
        gathers_once: weights stay gathered from forward to backward (ZeRO 2).
        replicas, tensor, pipeline, context: as of engine=fsdp.
        schedule, chunks: of the pipeline: engine.pipeline_schedule, and stages of a rank.
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
    schedule: str = "1f1b"
    chunks: int = 1
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
    def has_whole_stages(self) -> bool:
        """Whether a rank alone holds its pipeline stage, and gathers nothing."""
        is_alone = self.ranks == self.pipeline
        return self.pipeline > 1 and is_alone and not self.offloads

    @property
    def shared(self) -> int:
        """The ranks that read the same samples."""
        return self.tensor * self.pipeline * self.context

    @property
    def gathers(self) -> int:
        """How often a step gathers the weights, if ranks split them."""
        if self.gathers_once or self.pipeline > 1:
            return 1
        return 2 * self.accumulate

    @property
    def data_ranks(self) -> int:
        """The groups of ranks that read samples of their own."""
        return max(1, self.ranks // self.shared)

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
        state: bytes of the optimizer's state, and of an average of the weights, for each element.
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
class MeasuredRun:
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
    recordings: Mapping[tuple[int, int, int], StepRecording]
    split: Mapping[int, Mapping[int, int]]
    entering: Sequence[int]
    stages: Mapping[int, Sequence[int]]
    work: Sequence[int] = ()


@dataclass(frozen=True)
class RankBytes:
    """The bytes of a rank.

    Attributes:
        weights, gradients, optimizer: its parts of them, at the end of a step's backward; the
            optimizer's with those of an average of the weights (callbacks=ema).
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


def rank_bytes(measured: MeasuredRun, layout: Layout) -> list[RankBytes]:
    """Return the bytes of a rank of each of a pipeline's places, by its first stage."""
    return [_Rank(measured, layout, place).bytes() for place in range(layout.pipeline)]


def gathered_bytes(measured: MeasuredRun, layout: Layout) -> tuple[int, int]:
    """Return the bytes of the weights that a rank gathers at a time, and of the gradients that are
    summed in parts; of a pipeline's places the most.
    """
    return max(_Rank(measured, layout, place).whole() for place in range(layout.pipeline))


@dataclass(frozen=True)
class _Chunk:
    """A stage of a rank.

    Attributes:
        units: its units.
        entering, handed: bytes that it takes from the stage before it, and hands on.
        base: bytes that are alive in a recording and are not this stage's, as it begins.
        others: bytes that are held for other passes while it runs.
    """

    stage: int
    units: Sequence[int]
    entering: int
    handed: int
    base: int
    others: int = 0


class _Rank:
    """A rank of a pipeline; any, without one."""

    def __init__(self, measured: MeasuredRun, layout: Layout, place: int) -> None:
        self._measured, self._layout, self._place = (
            measured,
            layout,
            place,
        )
        self._recording = measured.recordings[layout.kind]
        self._count = len(self._recording.starts)
        self._schedule = StageSchedule(layout.schedule, layout.pipeline, layout.chunks)
        self._homes = measured.stages.get(self._schedule.stages, [0] * self._count)
        self._own = [index for index, weight in enumerate(measured.weights) if self._holds(weight)]
        stages = range(place, self._schedule.stages, layout.pipeline)
        self._chunks = self._with_others([self._chunk(stage) for stage in stages])

    def bytes(self) -> RankBytes:
        """Return them."""
        layout = self._layout
        weights = self._measured.weights
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
            self._place,
            host,
        )

    def whole(self) -> tuple[int, int]:
        """Return the bytes of its weights and of their gradients, gathered."""
        return self._whole(self._own), self._whole(self._own, trained=True)

    def _holds(self, weight: Weight) -> bool:
        homes = {self._homes[unit] % self._layout.pipeline for unit in weight.units}
        return len(homes) != 1 or self._place in homes

    def _chunk(self, stage: int) -> _Chunk:
        units = [unit for unit in range(self._count) if self._homes[unit] == stage]
        starts = self._recording.starts
        is_last = stage == self._schedule.stages - 1
        entering = self._measured.entering[units[0]] if stage else 0
        handed = 0 if is_last else self._measured.entering[units[-1] + 1]
        base = starts[units[0]] - starts[0] - entering if stage else 0
        return _Chunk(
            stage,
            units,
            entering,
            handed,
            base,
        )

    def _with_others(self, chunks: Sequence[_Chunk]) -> list[_Chunk]:
        """Return chunks with the bytes that are held for other passes."""
        if self._schedule.ranks == 1:
            return list(chunks)
        held = [self._held(chunk) for chunk in chunks]
        count = self._layout.accumulate
        others = self._schedule.most_of(
            self._place,
            count,
            held,
        )
        under_way = self._schedule.gradients_under_way(self._place)
        sent = min(under_way, count) * max(chunk.entering for chunk in chunks)
        return [
            replace(
                chunk,
                others=own + sent,
            )
            for chunk, own in zip(chunks, others, strict=True)
        ]

    def _held(self, chunk: _Chunk) -> int:
        """Return what a pass holds until its backward; the last stage's follows at once."""
        if chunk.stage == self._schedule.stages - 1:
            return 0
        return self._recording.starts[chunk.units[-1] + 1] - chunk.base + chunk.handed

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
        layout = self._layout
        weights = self._measured.weights
        if layout.engine != "fsdp" or layout.has_whole_stages:
            return 0  # else FSDP2 gathers a copy of one rank's weights too
        if layout.gathers_once or layout.pipeline > 1:
            return self._whole(self._own)
        rest = [place for place in self._own if not weights[place].in_block]
        return self._whole(rest) + 2 * self._block() * in_block

    def _forward(self) -> int:
        most = 0
        for chunk in self._chunks:
            own = max((self._recording.forward[unit] for unit in chunk.units), default=0)
            now = own - chunk.base + chunk.others
            most = max(most, now)
        whole = 0
        if self._layout.accumulate > 1:
            whole = self._whole(self._own, trained=True)
        return most + whole + self._gathered(in_block=True)

    def _backward(self) -> int:
        """Return the most in backward: gradients become more, activations fewer."""
        layout = self._layout
        weights = self._measured.weights
        # whole gradients, beside the parts that are summed; a pipeline's last microbatch is alone
        sums = self._block() if layout.engine == "fsdp" and layout.pipeline == 1 else 0
        whole = self._whole(self._own, trained=True) if layout.accumulate > 1 else 0
        done = most = 0
        for chunk, moment in self._moments():
            weight = weights[moment.parameter]
            now = moment.peak + chunk.others - chunk.base
            now += self._gathered(in_block=weight.in_block)
            now += sums * weight.in_block
            most = max(most, now + max(done, whole))
            done += self._part(moment.parameter) * weight.width
        return most

    def _moments(self) -> Iterator[tuple[_Chunk, BackwardMoment]]:
        """Yield those of this rank's stages."""
        of_stage = {chunk.stage: chunk for chunk in self._chunks}
        stage = self._schedule.stages - 1
        for moment in self._recording.moments:
            homes = {self._homes[unit] for unit in self._measured.weights[moment.parameter].units}
            stage = min(homes) if len(homes) == 1 else stage
            if stage in of_stage:
                yield of_stage[stage], moment
