"""What `plan` measures of a run, once, for all layouts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from trainkit.data.feed import MapFeed, Microbatch
from trainkit.engine.blocks import repeated_blocks
from trainkit.errors import ConfigError, TaskError
from trainkit.extensions.context.pretended import (
    PretendedGroup,
    pretended_step,
)
from trainkit.extensions.fsdp.units import without_shared
from trainkit.extensions.fsdp.widths import Widths
from trainkit.extensions.halving.oom import split
from trainkit.extensions.pipeline.units import named_units, units_of
from trainkit.extensions.pipeline.work import UnitWork, count_work
from trainkit.extensions.plan.layouts import MeasuredRun, Weight
from trainkit.extensions.plan.plan import averaged_width
from trainkit.extensions.plan.record import (
    Setting,
    StepRecording,
    record,
    shared_by,
    try_forward,
)
from trainkit.extensions.recompute.feature import recomputed
from trainkit.run.run import Run


class Measuring:
    """Measures rank 0's run of a plan.

    Attributes:
        microbatch: the first one.
        samples: of the largest microbatch of a rank.
        recomputes: whether the run has activation checkpointing.
        left_out: settings that the Task cannot take, with reasons.

    Raises:
        ConfigError: there is no batch to measure.
    """

    def __init__(self, run: Run, tensor_plan: Mapping[str, Any] | None = None) -> None:
        step = next(iter(run.train_feed.steps(0)), None)
        microbatch = next(iter(step.microbatches), None) if step is not None else None
        if microbatch is None:
            raise ConfigError(
                "memory_gb needs a batch of training data, and rank 0 has none. Use fewer ranks."
            )
        self._run = run
        self._plan = tensor_plan
        self.recomputes = bool(run.options.numerics.activation_checkpointing)
        self.microbatch: Microbatch = microbatch
        self.samples = _largest(run, microbatch)
        self.left_out: dict[str, str] = {}
        self.recordings: dict[tuple[int, int, int], StepRecording] = {}
        self.split: dict[int, dict[int, int]] = {}
        self.stages: dict[int, list[int]] = {}
        self.work: UnitWork | None = None

    def measure(
        self,
        tensors: Sequence[int],
        pipelines: Sequence[int],
        contexts: Sequence[int],
    ) -> None:
        """Record a step of a rank alone, and of one of two that share layers or tokens, from which
        more ranks follow.

        Args:
            tensors, pipelines, contexts: those of engine.tensor, .pipeline and .context to try,
                ascending.
        """
        self._record((1, 1), contextlib.nullcontext, lambda: 0)
        for count in tensors:
            self._try("tensor", count, self._with_widths)
        for count in contexts:
            self._try("context", count, self._with_parts)
        for count in pipelines:
            self._try("pipeline", count, self._with_stages)

    def _try(self, name: str, count: int, measure: Callable[[int], None]) -> None:
        if any(key.startswith(f"engine.{name}=") for key in self.left_out):
            return  # more ranks cannot either
        try:
            measure(count)
        except (ConfigError, TaskError) as error:
            self.left_out[f"engine.{name}={count}"] = str(error)

    def _with_widths(self, count: int) -> None:
        widths = Widths(self._run.task, count, self._plan)
        places = {id(own): place for place, own in enumerate(self._run.task.parameters())}
        split_of = widths.dimension_of().items()
        self.split[count] = {places[id(own)]: dimension for own, dimension in split_of}
        if not self._extends((count, 1), (2, 1), count):
            self._record((count, 1), widths.narrow, lambda: widths.sent)

    def _with_parts(self, count: int) -> None:
        group = PretendedGroup(count)

        @contextlib.contextmanager
        def within() -> Iterator[None]:
            with pretended_step(self._run.task, group) as step:
                yield
            if not step.attends:
                kind = type(self._run.task).__name__
                raise TaskError(f"{kind} takes no part of a sequence.")

        if self._extends((1, count), (1, 2), count):
            try_forward(self._run, self.microbatch, within)  # it raises if they cannot be so many
        else:
            self._record((1, count), within, lambda: group.sent)

    def _extends(
        self,
        kind: tuple[int, int],
        halved: tuple[int, int],
        count: int,
    ) -> bool:
        """Take the recordings of a kind from those of two ranks; return whether there are any."""
        for again in self._settings:
            own = self.recordings.get((*halved, int(again)))
            if own is None:
                return False
            alone = self.recordings[1, 1, int(again)]
            self.recordings[(*kind, int(again))] = shared_by(alone, own, count)
        return True

    def _with_stages(self, count: int) -> None:
        task = self._run.task
        units = named_units(task)
        if self.work is None:
            one = self.microbatch.num_samples
            sample = split(self.microbatch.batch, one, one)[0]
            self.work = count_work(task, units, sample, self._run.engine.device)
        chosen = units_of(task, count, self.work.operations)
        self.stages[count] = [unit.stage for unit in chosen]

    @property
    def _settings(self) -> list[bool]:
        """Without activation checkpointing, and with it if there are blocks; with it alone if the
        run has it.
        """
        if self.recomputes:
            return [True]
        has_blocks = any(True for _ in repeated_blocks(self._run.task))
        return [False, *[True] * has_blocks]

    def _record(
        self,
        kind: tuple[int, int],
        within: Setting,
        sent: Callable[[], int],
    ) -> None:
        run = self._run
        for again in self._settings:

            def both(
                again: bool = again,
            ) -> AbstractContextManager[None]:
                return _both(
                    recomputed(run.task, again and not self.recomputes),
                    within(),
                )

            own = record(run, self.microbatch, self.samples, both, sent)
            self.recordings[(*kind, int(again))] = own

    def measured(self) -> MeasuredRun:
        """Return all; the optimizers have taken a step (plan.measure)."""
        work, samples = self.work, self.samples
        return MeasuredRun(
            weights_of(self._run),
            sum(buffer.nbytes for buffer in self._run.task.buffers()),
            self.recordings,
            self.split,
            () if work is None else [own * samples for own in work.entering],
            self.stages,
            () if work is None else work.operations,
        )


@contextlib.contextmanager
def _both(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _largest(run: Run, microbatch: Microbatch) -> int:
    """Return the samples of the largest microbatch: trainer.rank_shares may give a rank more."""
    if not isinstance(run.train_feed, MapFeed):
        return microbatch.num_samples
    plan = run.train_feed.plan_of(0)
    ranks = range(plan.world_size)
    return max(len(part) for rank in ranks for part in plan.microbatches(0, rank))


def weights_of(run: Run) -> list[Weight]:
    """Return the parameters of a run, whose optimizers have taken a step."""
    task = run.task
    blocks = {id(block) for block in without_shared(task, list(repeated_blocks(task)))}
    homes: dict[int, list[int]] = {}
    in_block: set[int] = set()
    for place, (_, module) in enumerate(named_units(task)):
        for parameter in module.parameters():
            homes.setdefault(id(parameter), []).append(place)
            if id(module) in blocks:
                in_block.add(id(parameter))
    states = {
        id(parameter): [value for value in state.values() if isinstance(value, Tensor)]
        for optimizer in run.optimizers
        for parameter, state in optimizer.state.items()
    }
    weights = []
    for parameter in task.parameters():
        own = states.get(id(parameter), [])
        # a factor of a state, as Adafactor's, is split as the weight is
        alike = sum(value.nbytes for value in own if value.numel() > 1)
        weights.append(
            Weight(
                tuple(parameter.shape),
                parameter.element_size(),
                parameter.requires_grad,
                tuple(homes.get(id(parameter), ())),
                id(parameter) in in_block,
                alike / max(1, parameter.numel()) + averaged_width(run, parameter),
                sum(value.nbytes for value in own if value.numel() <= 1),
            )
        )
    return weights
