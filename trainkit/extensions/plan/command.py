"""plan: describes a fit at any number of ranks, without training:
batches, steps, rates, order, traffic, memory, advice.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainkit.cli.as_json import split_json
from trainkit.cli.guard import fail
from trainkit.cli.options import count, engine_of
from trainkit.cli.usage import help_text
from trainkit.errors import ConfigError
from trainkit.extensions.plan.usage import USAGE
from trainkit.extensions.programs.local import pretend
from trainkit.extensions.script.command_line import split_script
from trainkit.extensions.script.entry import look_at
from trainkit.extensions.script.own_options import split_own
from trainkit.launch.environment import read_launcher

if TYPE_CHECKING:
    from trainkit.extensions.script.subject import Subject

_OWN = ("ranks", "ranks_per_host", "memory_gb")


def main(command: str, arguments: Sequence[str]) -> int:
    """Print the plan of a config or a script, with [ranks=64] [ranks_per_host=8] [memory_gb=80];
    return the exit code: 1 if no engine fits in `memory_gb`.
    """
    started = read_launcher()
    if not started.is_main:
        return 0
    before, script = split_script(arguments)
    if "-h" in before or "--help" in before:
        print(help_text(command, USAGE))
        return 0
    argv, as_json = split_json(before)
    own, left = split_own(argv, _OWN)
    try:
        ranks = count("ranks", own.get("ranks", str(started.world_size)))
        local = count("ranks_per_host", own.get("ranks_per_host", str(min(ranks, 8))))
        memory_gb = None if "memory_gb" not in own else count("memory_gb", own["memory_gb"])
    except ConfigError as error:
        return fail(error, started, str(error), error.exit_code)
    engine = engine_of(left)
    without_horovod = ranks > 1 and engine == "auto" and importlib.util.find_spec("horovod") is None
    if without_horovod:
        print(
            "Horovod is not installed here: the plan is that of torchrun (engine=ddp).",
            file=sys.stderr if as_json else sys.stdout,
            flush=True,
        )
    by_torchrun = (
        without_horovod or engine in ("ddp", "fsdp", "deepspeed") or started.name == "torchrun"
    )
    launcher: Any = "torchrun" if by_torchrun else "horovodrun"
    fits = [True]

    def work(subject: Subject, facts: dict[str, Any]) -> None:
        fits[0] = _plan(subject, facts, memory_gb)

    code = look_at(
        command,
        left,
        script,
        _OWN,
        work,
        started,
        as_json,
        lambda: pretend(ranks, min(local, ranks), launcher),
    )
    return code or int(not fits[0])


def _plan(subject: Subject, facts: dict[str, Any], memory_gb: float | None) -> bool:
    """Build and print the plan; return whether an engine fits in the memory.
    torch is imported here, after all checks.
    """
    show: Any = importlib.import_module("trainkit.extensions.plan.show")
    with tempfile.TemporaryDirectory() as folder:  # a plan leaves no files
        made = show.make_plan(subject, folder, len(os.sched_getaffinity(0)), memory_gb)
    show.show_plan(made)
    facts.update(made.facts())
    return made.fits is not False
