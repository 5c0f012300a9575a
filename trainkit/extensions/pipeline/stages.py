"""What a plan shows of a pipeline: the stages, and how long ranks wait for one another."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from trainkit.extensions.pipeline.schedule import WORK_OF_STEP, StageSchedule, times
from trainkit.extensions.pipeline.units import (
    Unit,
    units_of,
    work_of,
)
from trainkit.extensions.pipeline.work import UnitWork
from trainkit.extensions.reports.grid import human


def stage_rows(
    task: nn.Module,
    schedule: StageSchedule,
    microbatches: int,
    ranks: int,
    work: UnitWork | None = None,
    samples: int = 1,
    needs: Sequence[int] = (),
) -> list[tuple[str, str]]:
    """Return the rows of a plan.

    Args:
        microbatches: of a step, on a rank.
        ranks: of one stage of a model (engine.tensor).
        work: of the units; weights in place of it if there is none.
        samples: of a microbatch.
        needs: bytes that a rank needs in a step beside weights and optimizer state, by its first
            stage.
    """
    counted = None if work is None else list(work.operations)
    stages = schedule.stages
    units = units_of(task, schedule.ranks, counted, schedule.chunks)
    every = counted or [work_of(unit.module) for unit in units]
    of_stages = [
        sum(own for own, unit in zip(every, units, strict=True) if unit.stage == stage)
        for stage in range(stages)
    ]
    rows = []
    for stage in range(stages):
        own = [unit for unit in units if unit.stage == stage]
        held = sum(
            p.numel() * p.element_size()
            for p in {p for unit in own for p in unit.module.parameters()}
        )
        share = of_stages[stage] / max(1, sum(every))
        first = (schedule.ranks - 1 - stage % schedule.ranks) * ranks
        who = f"rank {first}" if ranks == 1 else f"ranks {first} to {first + ranks - 1}"
        text = f"{_names(own)}: weights {human(held)}, {share:.0%} of what is multiplied"
        if stage < len(needs):
            whole = " with its other stages" * (schedule.chunks > 1)
            text += f", {human(needs[stage])} in a step{whole}"
            text += " (activations, gradients, gathered weights)"
        if stage and work is not None:
            entering = work.entering[units.index(own[0])] * samples
            text += f"; takes {human(entering)} of each microbatch, and sends its gradients back"
        rows.append((f"stage {stage}, {who}", text))
    return [
        *rows,
        ("waiting", _waiting(schedule, of_stages, microbatches)),
    ]


def idle_share(
    of_stages: Sequence[int],
    microbatches: int,
    schedule: StageSchedule | None = None,
) -> float:
    """Return the share of a step in which ranks wait, of stages of this work.

    With one stage on a rank M microbatches take the work of all stages, and M - 1 times that of the
    largest one.

    Args:
        schedule: of several stages on a rank.
    """
    busy = microbatches * sum(of_stages)
    if schedule is not None and schedule.chunks > 1:
        ends = times(
            schedule,
            microbatches,
            of_stages,
        )
        lasts = max(ends) * len(ends)
        return 1 - WORK_OF_STEP * busy / max(1, lasts)
    lasts = sum(of_stages) + (microbatches - 1) * max(of_stages)
    return 1 - busy / max(1, lasts * len(of_stages))


def _waiting(schedule: StageSchedule, of_stages: Sequence[int], microbatches: int) -> str:
    idle = idle_share(of_stages, microbatches, schedule)
    more = -(-8 * (schedule.ranks - 1) // schedule.chunks)
    then = idle_share(
        of_stages,
        more,
        schedule,
    )
    advice = f"; trainer.accumulate_grad_batches={more} would leave {then:.0%}"
    uneven = max(of_stages) * len(of_stages) / max(1, sum(of_stages)) - 1
    what = f"work up to {uneven:.0%} above the mean"
    if uneven < 0.005:
        what = "equal work"
    where = f" ({schedule.chunks} on each rank)" * (schedule.chunks > 1)
    return (
        f"{idle:.0%} of a step, with {microbatches} microbatches on {len(of_stages)} stages{where}"
        f" of {what}{advice * (microbatches < more)}"
    )


def _names(units: Sequence[Unit]) -> str:
    if len(units) == 1:
        return units[0].name
    return f"{units[0].name} to {units[-1].name}"
