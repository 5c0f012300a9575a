"""A fit that is built from a config for the ranks of the launcher (or of a simulated one),
and not started.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trainkit.api.callback import Callback
from trainkit.api.dispatch import Hooks
from trainkit.config.instantiate import build
from trainkit.engine.ranks import check_groups, check_ranks
from trainkit.engine.simulated import SimulatedEngine
from trainkit.launch.environment import read_launcher
from trainkit.loggers.base import Logger
from trainkit.run.build import StartFrom, build_run
from trainkit.run.data_sources import DataSources
from trainkit.run.run import Run
from trainkit.run.setup import Stage


@dataclass(frozen=True)
class Planned:
    """A fit that is built."""

    run: Run  # without loggers, so that none opens a file or a connection
    callbacks: Sequence[Callback]  # all callbacks, loggers included
    hooks: Hooks  # the table of their hooks


def groups_of(config: dict[str, Any]) -> tuple[int, int]:
    """Return the replicas and the tensor ranks of a config's engine."""
    engine = config.get("engine") or {}
    return int(engine.get("replicas") or 1), int(engine.get("tensor") or 1)


@contextlib.contextmanager
def planned(config: dict[str, Any]) -> Iterator[Planned]:
    """Build rank 0's run on the CPU, in this process alone.

    Args:
        config: resolved and checked; its run_dir is a folder that may be thrown away.
    """
    built = build(config, [])
    options, callbacks, launcher = built.trainer.options, built.trainer.callbacks, read_launcher()
    name = options.engine if isinstance(options.engine, str) else options.engine.name
    if name == "auto":
        name = launcher.engine
    chosen = (config.get("engine") or {}).get("process_set")
    if chosen:
        check_ranks(chosen, launcher.world_size)
        launcher = dataclasses.replace(
            launcher, world_size=len(chosen), local_size=min(launcher.local_size, len(chosen))
        )
    replicas, tensor = groups_of(config)
    check_groups(launcher.world_size, replicas, tensor)
    name = "single" if launcher.world_size == 1 else name
    engine = SimulatedEngine(name, launcher.world_size, launcher.local_size, tensor_size=tensor)
    options = dataclasses.replace(options, engine=engine)
    silent = [callback for callback in callbacks if not isinstance(callback, Logger)]
    with Stage(
        "fit", built.task, DataSources(datamodule=built.datamodule), silent, options
    ) as stage:
        run = build_run(stage, StartFrom())
        yield Planned(run, callbacks, Hooks(run, built.task, callbacks))
