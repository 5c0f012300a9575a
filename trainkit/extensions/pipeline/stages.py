"""What a plan shows of a pipeline: the stages, and how long ranks wait for one another."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from trainkit.extensions.pipeline.units import (
    Unit,
    units_of,
    work_of,
)
from trainkit.extensions.pipeline.work import Work
from trainkit.extensions.reports.grid import human


def stage_rows(
    task: nn.Module,
    stages: int,
    microbatches: int,
    ranks: int,
    work: Work | None = None,
    samples: int = 1,
    needs: Sequence[int] = (),
) -> list[tuple[str, str]]:
    """Return the rows of a plan.

    Args:
        microbatches: of a step, on a rank.
        ranks: of one stage of a model (engine.tensor).
        work: of the units; weights in place of it if there is none.
        samples: of a microbatch.
        needs: bytes that a rank of each stage needs in a step beside weights and optimizer state.
    """
    counted = None if work is None else list(work.operations)
    units = units_of(task, stages, counted)
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
        first = (stages - 1 - stage) * ranks
        who = f"rank {first}" if ranks == 1 else f"ranks {first} to {first + ranks - 1}"
        text = f"{_names(own)}: weights {human(held)}, {share:.0%} of what is multiplied"
        if needs:
            text += f", {human(needs[stage])} in a step (activations, gradients, gathered weights)"
        if stage and work is not None:
            entering = work.entering[units.index(own[0])] * samples
            text += f"; takes {human(entering)} of each microbatch, and sends its gradients back"
        rows.append((f"stage {stage}, {who}", text))
    return [
        *rows,
        ("waiting", _waiting(of_stages, microbatches)),
    ]


def idle_share(of_stages: Sequence[int], microbatches: int) -> float:
    """Return the share of a step in which ranks wait, of stages of this work: M microbatches take
    the work of all stages, and M - 1 times that of the largest one.
    """
    busy = microbatches * sum(of_stages)
    lasts = sum(of_stages) + (microbatches - 1) * max(of_stages)
    return 1 - busy / max(1, lasts * len(of_stages))


def _waiting(of_stages: Sequence[int], microbatches: int) -> str:
    stages = len(of_stages)
    idle = idle_share(of_stages, microbatches)
    more = 8 * (stages - 1)
    advice = (
        f"; trainer.accumulate_grad_batches={more} would leave {idle_share(of_stages, more):.0%}"
    )
    uneven = max(of_stages) * stages / max(1, sum(of_stages)) - 1
    what = "equal work" if uneven < 0.005 else f"work up to {uneven:.0%} above the mean"
    return (
        f"{idle:.0%} of a step, with {microbatches} microbatches on {stages} stages of"
        f" {what}{advice * (microbatches < more)}"
    )


def _names(units: Sequence[Unit]) -> str:
    if len(units) == 1:
        return units[0].name
    return f"{units[0].name} to {units[-1].name}"
