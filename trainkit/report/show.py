"""Builds a planned fit from a config and prints its plan."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.table import Table
from rich.text import Text

from trainkit.build import build
from trainkit.callbacks.banner import console_of
from trainkit.engine.launcher import read_launcher
from trainkit.engine.pretended import PretendedEngine
from trainkit.engine.process_set import check_ranks
from trainkit.hooks import Hooks
from trainkit.loggers.base import Logger
from trainkit.report import plan
from trainkit.report.advice import advise


def show_plan(config: dict[str, Any], cores: int) -> None:
    """Print the plan of a config for the ranks that the launcher (or who pretends to be one) says.

    Args:
        config: resolved and checked; its run_dir is a folder that may be thrown away.
        cores: of a host.
    """
    built = build(config, [])
    trainer, launcher = built.trainer, read_launcher()
    asked = trainer.settings.engine
    name = asked if isinstance(asked, str) else asked.name
    if name == "auto":
        name = launcher.engine
    chosen = (config.get("engine") or {}).get("process_set")
    if chosen:
        check_ranks(chosen, launcher.world_size)
        launcher = dataclasses.replace(launcher, world_size=len(chosen), local_size=min(launcher.local_size, len(chosen)))
    engine = PretendedEngine("single" if launcher.world_size == 1 else name, launcher.world_size, launcher.local_size)
    trainer.settings = dataclasses.replace(trainer.settings, engine=engine)
    everyone = trainer.callbacks
    trainer.callbacks = [c for c in everyone if not isinstance(c, Logger)]  # none opens a file or a connection
    with trainer.open(built.task, built.datamodule) as session:
        session.build(None, None, None)
        trainer.callbacks, session.hooks = everyone, Hooks(trainer, built.task, everyone)
        advice = advise(session, trainer, {key: config.get(key) for key in ("task", "data", "vars")}, cores)
        sections = {
            f"plan of conf={config.get('conf')} at {_ranks(engine)}": plan.batch_rows(session),
            "a step, in order, and who owns what": plan.step_rows(session),
            "learning rate": plan.rate_rows(session),
        }
        sizes = plan.measure(session, (config.get("engine") or {}).get("compression") or "none")
        sections["traffic, memory, disk"] = [
            *plan.size_rows(sizes, engine.world_size),
            *plan.checkpoint_rows(session, trainer, sizes),
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


def _ranks(engine: PretendedEngine) -> str:
    if engine.world_size == 1:
        return "1 rank"
    return f"{engine.world_size} ranks ({engine.name}, {engine.local_size} a host)"
