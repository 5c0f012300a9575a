"""A fit that is built from a config for the ranks of the launcher (or of who pretends to be one), and not started."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from trainkit.api.dispatch import Hooks
from trainkit.config.instantiate import build
from trainkit.engine.process_set import check_ranks
from trainkit.engine.simulated import SimulatedEngine
from trainkit.launch.environment import read_launcher
from trainkit.loggers.base import Logger
from trainkit.run.build import FitSession


@contextlib.contextmanager
def planned(config: dict[str, Any]) -> Iterator[FitSession]:
    """Build rank 0's session on the CPU, in this process alone.

    Args:
        config: resolved and checked; its run_dir is a folder that may be thrown away.
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
    engine = SimulatedEngine("single" if launcher.world_size == 1 else name, launcher.world_size, launcher.local_size)
    trainer.settings = dataclasses.replace(trainer.settings, engine=engine)
    everyone = trainer.callbacks
    trainer.callbacks = [c for c in everyone if not isinstance(c, Logger)]  # none opens a file or a connection
    with trainer.open(built.task, built.datamodule) as session:
        session.build(None, None, None)
        trainer.callbacks, session.hooks = everyone, Hooks(trainer, built.task, everyone)
        yield session
