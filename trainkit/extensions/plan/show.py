"""Prints the plan of a fit."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from trainkit.console import console_of
from trainkit.engine.base import Engine
from trainkit.extensions.plan import plan
from trainkit.extensions.plan.advice import advise
from trainkit.extensions.plan.fits import choices, fit_rows, measure_need
from trainkit.extensions.plan.planned import groups_of, planned
from trainkit.extensions.plan.traffic import traffic_rows


def show_plan(
    config: dict[str, Any], cores: int, memory_gb: float | None = None, command: str = ""
) -> None:
    """Print the plan of a config for the launcher's ranks, or simulated ones, on hosts of `cores`
    cores.

    The config is resolved and checked; its run_dir is a temporary folder.

    Args:
        memory_gb: of a GPU: which engine fits in it is planned too.
        command: the overrides of the config, for the command line to use.
    """
    with planned(config) as planned_run:
        run = planned_run.run
        callbacks = planned_run.callbacks
        engine = planned_run.run.engine
        advice = advise(
            run, callbacks, {key: config.get(key) for key in ("task", "data", "vars")}, cores
        )
        sections = {
            f"plan of conf={config.get('conf')} at {_ranks(engine)}": plan.batch_rows(run),
            "a step, in order, with owners": plan.step_rows(run, planned_run.hooks),
            "learning rate": plan.rate_rows(run),
        }
        # first: measuring the rest spoils the weights
        need = measure_need(run) if memory_gb is not None else None
        sizes = plan.measure(run, (config.get("engine") or {}).get("compression") or "none")
        ranks, (replicas, tensor) = engine.ranks.world_size, groups_of(config)
        parts = ranks // replicas if engine.name == "fsdp" else 1
        sections["traffic, memory, disk"] = [
            *plan.size_rows(sizes, ranks, parts, engine.name == "deepspeed", tensor),
            *traffic_rows(run, sizes.payload),
            *plan.checkpoint_rows(run, callbacks, sizes),
        ]
        if memory_gb is not None and need is not None:
            found = choices(sizes, need, engine.ranks.world_size, engine.ranks.local_size)
            sections[f"which engine, in {memory_gb:g} GB"] = fit_rows(
                found, need, memory_gb, command
            )
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
    groups = f", {engine.ranks.data_size} data x {engine.ranks.tensor_size} tensor" * (
        engine.ranks.tensor_size > 1
    )
    return (
        f"{engine.ranks.world_size} ranks ({engine.name}, {engine.ranks.local_size} a host{groups})"
    )
