"""A fit that is built from a config, for the launcher's ranks or simulated ones, but not started."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from trainkit.api.dispatch import Hooks
from trainkit.config.instantiate import build
from trainkit.engine.process_set import check_ranks
from trainkit.engine.simulated import PretendedEngine
from trainkit.launch.environment import read_launcher
from trainkit.loggers.base import Logger
from trainkit.run.build import FitSession


@contextlib.contextmanager
def planned(config: dict[str, Any]) -> Iterator[FitSession]:
    """Build rank 0's session on the CPU, in this process alone.

    Args:
        config: resolved and checked; its run_dir is a temporary folder.
    """
    built = build(config, [])
    trainer, launcher = built.trainer, read_launcher()
    requested = trainer.settings.engine
    name = requested if isinstance(requested, str) else requested.name
    if name == "auto":
        name = launcher.engine
    chosen = (config.get("engine") or {}).get("process_set")
    if chosen:
        check_ranks(chosen, launcher.world_size)
        launcher = dataclasses.replace(launcher, world_size=len(chosen), local_size=min(launcher.local_size, len(chosen)))
    engine = PretendedEngine("single" if launcher.world_size == 1 else name, launcher.world_size, launcher.local_size)
    trainer.settings = dataclasses.replace(trainer.settings, engine=engine)
    callbacks = trainer.callbacks
    trainer.callbacks = [c for c in callbacks if not isinstance(c, Logger)]  # a logger would open files or connections
    with trainer.open(built.task, built.datamodule) as session:
        session.build(None, None, None)
        trainer.callbacks, session.hooks = callbacks, Hooks(trainer, built.task, callbacks)
        yield session
