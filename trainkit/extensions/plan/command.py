"""plan: describes a fit at any number of ranks, without training:
batches, steps, rates, order, traffic, memory, advice.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import tempfile
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from trainkit.cli import run
from trainkit.cli.guard import fail
from trainkit.cli.options import count, engine_of, split_own
from trainkit.cli.usage import help_text
from trainkit.errors import ConfigError
from trainkit.extensions.plan.usage import USAGE
from trainkit.launch.environment import pretend, read_launcher

if TYPE_CHECKING:
    from trainkit.config.compose import ComposedJob

_OWN = ("ranks", "ranks_per_host", "memory_gb")


def main(command: str, arguments: Sequence[str]) -> int:
    """Print the plan of `conf=NAME [overrides] [ranks=64] [ranks_per_host=8] [memory_gb=80]`;
    return the exit code.
    """
    started = read_launcher()
    if not started.is_main:
        return 0
    if "-h" in arguments or "--help" in arguments:
        print(help_text(command, USAGE))
        return 0
    own, rest = split_own(arguments, _OWN)
    try:
        ranks = count("ranks", own.get("ranks", str(started.world_size)))
        local = count("ranks_per_host", own.get("ranks_per_host", str(min(ranks, 8))))
        memory_gb = None if "memory_gb" not in own else count("memory_gb", own["memory_gb"])
    except ConfigError as error:
        return fail(error, started, str(error), error.exit_code)
    engine = engine_of(rest)
    without_horovod = ranks > 1 and engine == "auto" and importlib.util.find_spec("horovod") is None
    if without_horovod:
        print(
            "Horovod is not installed here: the plan is that of torchrun (engine=ddp).", flush=True
        )
    by_torchrun = (
        without_horovod or engine in ("ddp", "fsdp", "deepspeed") or started.name == "torchrun"
    )
    pretend(ranks, min(local, ranks), "torchrun" if by_torchrun else "horovodrun")
    return run.main(
        command, rest, partial(_work, memory_gb=memory_gb, overrides=" ".join(rest)), started
    )


def _work(job: ComposedJob, memory_gb: float | None, overrides: str) -> None:
    """Build and print the plan. torch is imported here, after all checks."""
    show: Any = importlib.import_module("trainkit.extensions.plan.show")
    with tempfile.TemporaryDirectory() as folder:  # a plan leaves no files
        show.show_plan(
            {**job.config, "run_dir": folder}, len(os.sched_getaffinity(0)), memory_gb, overrides
        )
