"""What a plan shows of a pipeline: the stages, and how long ranks wait for one another."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from trainkit.extensions.pipeline.units import Unit, units_of, work_of
from trainkit.extensions.reports.grid import human


def stage_rows(
    task: nn.Module, stages: int, microbatches: int, ranks: int
) -> list[tuple[str, str]]:
    """Return the rows of a plan.

    Args:
        microbatches: of a step, on a rank.
        ranks: of one stage of a model (engine.tensor).
    """
    units = units_of(task, stages)
    every = [work_of(unit.module) for unit in units]
    rows = []
    for stage in range(stages):
        own = [unit for unit in units if unit.stage == stage]
        held = sum(
            p.numel() * p.element_size()
            for p in {p for unit in own for p in unit.module.parameters()}
        )
        share = sum(work_of(unit.module) for unit in own) / max(1, sum(every))
        first = (stages - 1 - stage) * ranks
        who = f"rank {first}" if ranks == 1 else f"ranks {first} to {first + ranks - 1}"
        rows.append(
            (
                f"stage {stage}, {who}",
                f"{_names(own)}: weights {human(held)}, {share:.0%} of what is multiplied",
            )
        )
    idle = (stages - 1) / (microbatches + stages - 1)
    more = 8 * (stages - 1)
    advice = (
        f"; trainer.accumulate_grad_batches={more} would leave"
        f" {(stages - 1) / (more + stages - 1):.0%}"
    )
    rows.append(
        (
            "waiting",
            f"{idle:.0%} of a step, with {microbatches} microbatches on {stages} stages of equal"
            f" work{advice * (microbatches < more)}",
        )
    )
    return rows


def _names(units: Sequence[Unit]) -> str:
    if len(units) == 1:
        return units[0].name
    return f"{units[0].name} to {units[-1].name}"
