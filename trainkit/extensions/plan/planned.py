"""A fit of a config or a script that is built for the ranks of the launcher (or of a simulated
one), and not started.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainkit.api.callback import Callback
from trainkit.api.dispatch import Hooks
from trainkit.api.options import NumericOptions
from trainkit.engine.ranks import check_ranks
from trainkit.extensions.fsdp.layouts import check_groups, refuse_schedule
from trainkit.extensions.pipeline.schedule import StageSchedule, schedule_of
from trainkit.extensions.plan.simulated import SimulatedEngine
from trainkit.extensions.script.subject import Subject
from trainkit.launch.environment import read_launcher
from trainkit.loggers.base import Logger
from trainkit.run.build import StartFrom, build_run
from trainkit.run.default_callbacks import callbacks_with
from trainkit.run.run import Run
from trainkit.run.setup import Stage


@dataclass(frozen=True)
class Planned:
    """A fit that is built."""

    run: Run  # without loggers, so that none opens a file or a connection
    callbacks: Sequence[Callback]  # all callbacks, loggers included
    hooks: Hooks  # the table of their hooks


def groups_of(engine: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Return the replicas, tensor ranks, pipeline stages and context ranks of an engine's options."""
    replicas, tensor, stages, context = (
        int(engine.get(name) or 1) for name in ("replicas", "tensor", "pipeline", "context")
    )
    return replicas, tensor, stages, context


def schedule_in(engine: Mapping[str, Any]) -> StageSchedule:
    """Return the schedule of an engine's options.

    Raises:
        ConfigError: they do not go together.
    """
    name = str(engine.get("pipeline_schedule") or "1f1b")
    chunks = engine.get("pipeline_chunks")
    _, _, ranks, _ = groups_of(engine)
    refuse_schedule(ranks, name, chunks)
    return schedule_of(name, ranks, chunks)


def _on_any_machine(numerics: NumericOptions) -> NumericOptions:
    """Return the same without what asks for the GPU of the ranks; weights, optimizers and batches
    are equal.
    """
    precision = "bf16-mixed" if numerics.precision == "fp8-mixed" else numerics.precision
    return dataclasses.replace(numerics, precision=precision, assert_no_sync=False)


@contextlib.contextmanager
def planned(subject: Subject, run_dir: str) -> Iterator[Planned]:
    """Build rank 0's run on the CPU, in this process alone.

    Args:
        subject: the fit.
        run_dir: a folder that may be thrown away.
    """
    asked = subject.requested
    callbacks = callbacks_with(asked.callbacks, asked.task.configure_callbacks())
    options = dataclasses.replace(asked.options, run_dir=run_dir)
    launcher = read_launcher()
    name = options.engine if isinstance(options.engine, str) else options.engine.name
    if name == "auto":
        name = launcher.engine
    chosen = subject.engine.get("process_set")
    if chosen:
        check_ranks(chosen, launcher.world_size)
        launcher = dataclasses.replace(
            launcher, world_size=len(chosen), local_size=min(launcher.local_size, len(chosen))
        )
    replicas, tensor, stages, context = groups_of(subject.engine)
    check_groups(launcher.world_size, replicas, tensor, stages, context)
    name = "single" if launcher.world_size == 1 else name
    engine = SimulatedEngine(
        name,
        launcher.world_size,
        launcher.local_size,
        tensor_size=tensor,
        pipeline_size=stages,
        context_size=context,
    )
    options = dataclasses.replace(
        options, engine=engine, numerics=_on_any_machine(options.numerics)
    )
    silent = [callback for callback in callbacks if not isinstance(callback, Logger)]
    with Stage("fit", asked.task, asked.data, silent, options) as stage:
        run = build_run(stage, StartFrom())
        yield Planned(run, callbacks, Hooks(run, asked.task, callbacks))
