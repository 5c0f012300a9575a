"""The folder of a run: created, and checked to be writable and to be that of all hosts,
before training.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path

from trainkit.api.callback import Callback
from trainkit.callbacks.checkpoint import checkpoint_policies
from trainkit.checkpoint.places import make_store
from trainkit.checkpoint.store import Store
from trainkit.console import info, short
from trainkit.engine.base import Engine
from trainkit.errors import ConfigError
from trainkit.launch.environment import job_started
from trainkit.launch.shared_folder import host_name, not_shared, remove_tokens, sees, token_in
from trainkit.run.progress_file import FILE
from trainkit.run.state import STATE

LEDGER = "goodput.json"
CONFIG = "config.yaml"
# A run's files, which a new run in the folder must not find.
_OF_A_RUN = (
    "checkpoints",
    "metrics.csv",
    "metrics.jsonl",
    "tensorboard",
    LEDGER,
    "timeline",
    "reports",
    "capsules",
)
# without which it cannot be resumed by itself, or its status be shown
_BESIDE = (CONFIG, ".hydra", STATE, FILE, "reference")
_WRITER = "rank0"  # of the file that shows whether hosts share the folder


def agreed_run_dir(
    requested: str | Path | None,
    task_name: str,
    engine: Engine,
    callbacks: Sequence[Callback],
    needed: bool,
) -> Path:
    """Return the run's folder, which rank 0 makes; see make_run_dir and check_shared.
    Call it on all ranks.
    """
    run_dir: Path = engine.comm.run_on_main(lambda: make_run_dir(requested, task_name))
    check_shared(run_dir, engine, callbacks, needed)
    return run_dir


def make_run_dir(requested: str | Path | None, task_name: str) -> Path:
    """Return the folder; creates it if needed.

    Args:
        requested: the folder; None for a new folder runs/<task_name>/<time> below the current one.
            In an elastic job, which ranks may join later, the time is the job's.
        task_name: the Task's class.

    Raises:
        ConfigError: it cannot be written to.
    """
    try:
        if requested is None and (started := job_started()):
            requested = Path("runs", task_name, started)
        if requested is None:
            return _new_folder(
                Path("runs", task_name, time.strftime("%Y-%m-%d_%H-%M-%S")).absolute()
            )
        folder = Path(requested).expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        shown = (
            f"'{requested}'" if requested is not None else "null (runs/ below the current folder)"
        )
        raise ConfigError(
            f"run_dir is {shown}, which cannot be written: {error.strerror}. Give another folder."
        ) from error
    return folder


def check_shared(
    run_dir: Path, engine: Engine, callbacks: Sequence[Callback], needed: bool
) -> None:
    """Find out, if the ranks are on several hosts, whether all of these see the run's folder. Call
    it on all ranks.

    Args:
        run_dir: the folder that rank 0 has made.
        engine: its ranks look for a file there.
        callbacks: those that save may have a folder of their own.
        needed: whether other ranks than rank 0 use it: each writes its part, or rank 0 may be on
            another host later (an elastic job). Checkpoints at a URL are enough then. Otherwise a
            message names the hosts.

    Raises:
        ConfigError: it is needed, and a host does not see it. In a job that trains already only the
            new ranks of that host raise it: the others continue without them.
    """
    ranks = engine.ranks
    comm = engine.comm
    if ranks.local_size >= ranks.world_size:
        if ranks.is_main:
            remove_tokens(run_dir, _WRITER)  # a rank 0 that was killed among more hosts
        return
    with contextlib.ExitStack() as stack:
        name = comm.run_on_main(lambda: stack.enter_context(token_in(run_dir, _WRITER)).name)
        trains = ranks.committed_step >= 0
        seen = comm.all_gather_object((host_name(), trains or sees(run_dir / name), trains))
    if not (blind := ", ".join(sorted({host for host, is_seen, _ in seen if not is_seen}))):
        return
    is_elsewhere = any(
        "://" in policy.store_of(run_dir).place for policy in checkpoint_policies(callbacks)
    )
    if not (needed or engine.splits_weights) or is_elsewhere:
        ranks.say(
            f"run_dir is '{run_dir}', and {blind} does not see it: the run's files are on"
            f" {seen[0][0]} alone."
        )
    elif not seen[ranks.rank][1] or not any(trains for _, _, trains in seen):
        if ranks.is_main:
            with contextlib.suppress(OSError):
                run_dir.rmdir()  # empty: made for this start
        raise ConfigError(not_shared(run_dir, blind))


def stores_of(run_dir: Path, callbacks: Sequence[Callback]) -> list[Store]:
    """Return the stores of a run's checkpoints, those of policies first."""
    stores = [policy.store_of(run_dir) for policy in checkpoint_policies(callbacks)]
    own = make_store(run_dir / "checkpoints")
    return stores if own.place in [store.place for store in stores] else [*stores, own]


def _new_folder(path: Path) -> Path:
    """Make a folder that no other run has: two may start in the same second."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(2):
        try:
            path.mkdir()
        except FileExistsError:
            path = path.with_name(f"{path.name.partition('.')[0]}.{number}")
        else:
            break
    return path


def is_of_another(checkpoint: str, run_dir: Path) -> bool:
    """Return whether a checkpoint's path is in the folder of another run."""
    folder = Path(checkpoint).parent.parent.resolve()
    return "://" not in checkpoint and folder != run_dir.resolve() and (folder / FILE).is_file()


def set_aside(run_dir: Path) -> None:
    """Move an earlier run's files in the folder to `before-<time>/` in it, and report it.
    Nothing is mixed or lost.
    """
    there = [run_dir / name for name in _OF_A_RUN if (run_dir / name).exists()]
    # it counts what the job has lost
    there = [path for path in there if path.name != LEDGER or not _is_of_this_job(path)]
    if not any(path.name != "tensorboard" for path in there):
        return
    place = _new_folder(run_dir / f"before-{time.strftime('%Y-%m-%d_%H-%M-%S')}")
    for path in [*there, *(run_dir / name for name in _BESIDE if (run_dir / name).exists())]:
        path.rename(place / path.name)
    info(
        f"{run_dir} held an earlier run; its files are in {place.name}/ now. To resume that one:"
        f" run_dir={short(place)} ckpt_path=last"
    )


def _is_of_this_job(ledger: Path) -> bool:
    """Return whether an elastic job that lost all workers before its
    first checkpoint has begun this ledger.
    """
    try:
        return bool(job_started()) and json.loads(ledger.read_text())["job"] == job_started()
    except (OSError, ValueError, KeyError, TypeError):
        return False
