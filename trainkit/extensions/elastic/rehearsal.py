"""What a worker that joins an elastic job later does before it asks for a rank:
the other ranks wait for it from then on.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from trainkit.extensions.plan.simulated import SimulatedEngine
from trainkit.launch.environment import job_started
from trainkit.run.build import StartFrom, build_run
from trainkit.run.run import Run
from trainkit.run.setup import Stage


def rehearse(stage: Stage, first_step: Callable[[Run], None]) -> None:
    """Prepare the data, build the run as the last of the job's ranks would, in this process alone,
    and drop it.

    The Task's set-up and `kept` stay: imports, the device, `setup` and `configure_optimizers` take
    no time of the others. If modules are compiled, the gradients of a first step are computed
    (`first_step`) and dropped: the Task sees that batch once more than it trains on it.
    """
    ranks = stage.engine.ranks.first_world_size
    task = stage.task
    alone = SimulatedEngine(
        stage.engine.name,
        ranks,
        local_size=1,
        rank=ranks - 1,
        device=stage.engine.pin(),
        tensor_size=stage.engine.ranks.tensor_size,
    )
    # made by nothing but the Task's own writing
    nowhere = Path(tempfile.gettempdir(), f"trainkit-rehearsal-{os.getpid()}")
    options = replace(stage.options, engine=alone, run_dir=str(nowhere))
    rehearsal = Stage(stage.kind, task, stage.data, (), options)
    rehearsal.reused = stage.reused
    with contextlib.ExitStack() as stack:
        # processes of this host one after the other
        with one_at_a_time(f"prepare-{job_started()}"):
            stack.enter_context(rehearsal)
        run = build_run(rehearsal, StartFrom())
        if options.numerics.compile and task.automatic_optimization:
            before = copy.deepcopy(task.state_dict())
            first_step(run)
            task.zero_grad(set_to_none=True)
            task.load_state_dict(before)
    shutil.rmtree(nowhere, ignore_errors=True)


@contextlib.contextmanager
def one_at_a_time(name: str) -> Iterator[None]:
    """Allow one process of this user on this host at a time in the context of a name;
    wait for the others. Leaves no file.
    """
    path = Path(tempfile.gettempdir(), f"trainkit-{os.getuid()}-{name}.lock")
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX)
        # the one before deleted it: another process may have made the next
        while not _is_at(path, file):
            os.close(file)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.lockf(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(file)


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
