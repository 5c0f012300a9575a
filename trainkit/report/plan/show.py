"""Prints the plan of a fit."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from trainkit.console import console_of
from trainkit.engine.base import Engine
from trainkit.report.plan import plan
from trainkit.report.plan.advice import advise
from trainkit.report.plan.planned import planned


def show_plan(config: dict[str, Any], cores: int) -> None:
    """Print the plan of a config for the launcher's ranks, or simulated ones, on hosts of `cores` cores.

    The config is resolved and checked; its run_dir is a temporary folder.
    """
    with planned(config) as planned_run:
        run, callbacks, engine = planned_run.run, planned_run.callbacks, planned_run.run.engine
        advice = advise(run, callbacks, {key: config.get(key) for key in ("task", "data", "vars")}, cores)
        sections = {
            f"plan of conf={config.get('conf')} at {_ranks(engine)}": plan.batch_rows(run),
            "a step, in order, with owners": plan.step_rows(run, planned_run.hooks),
            "learning rate": plan.rate_rows(run),
        }
        sizes = plan.measure(run, (config.get("engine") or {}).get("compression") or "none")
        sections["traffic, memory, disk"] = [
            *plan.size_rows(sizes, engine.ranks.world_size),
            *plan.checkpoint_rows(run, callbacks, sizes),
        ]
    console = console_of()
    for title, rows in sections.items():
        console.print(Text(f"\n{title}", style="bold"))
        table = Table.grid(padding=(0, 2))
        for row in rows:
            table.add_row(*(Text(f"  {cell}", overflow="fold") for cell in row))
        console.print(table)
    console.print(Text("\nto look at" if advice else "\nnothing to look at", style="bold"))
    for sentence in advice:
        console.print(f"  - {sentence}", soft_wrap=True, markup=False)


def _ranks(engine: Engine) -> str:
    if engine.ranks.world_size == 1:
        return "1 rank"
    return f"{engine.ranks.world_size} ranks ({engine.name}, {engine.ranks.local_size} a host)"
