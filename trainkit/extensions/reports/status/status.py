"""Status: what a run does now, from the files of its folder, and its driver's port.

State:
    starting   a process holds the folder, and does not train yet
    running    rank 0 trains, or validates
    waiting    rank 0 lives, and has waited for other ranks for a while; or an elastic job's driver forms the ranks again
    ended      training is done
    stopped    a signal ended it, with a checkpoint: it can be resumed
    failed     an error ended it
    lost       the process, or its host, ended without a word

Rank 0's process is looked up if it is of this host. Of another host the file decides: it changes
every few seconds. Clocks of two hosts may differ, and network disks show a change late, so a file
that looks old is watched for a moment first.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from trainkit.api.alerts import FILES
from trainkit.errors import ConfigError
from trainkit.extensions.reports.show.files import SavedCheckpoint, read_checkpoints
from trainkit.launch.moments import Moment
from trainkit.run.lock import holder_of, is_alive, is_held
from trainkit.run.progress_file import EVERY_S, FILE, Progress, read_progress
from trainkit.run.state import STATE, read_state

OVER = ("ended", "failed")  # states that nothing but a new start changes
_OLD_S = 60.0  # a network disk may show a file this late
_WATCH_S = 3 * EVERY_S
# a wait for other ranks that is worth a word: seconds, and durations of a step
_WAITS_S = 10.0
_WAITS_STEPS = 5
_DRIVER_S = 2.0
_DEPTH = 3  # of the runs below a folder that is none
_OVER = {"done": "ended", "stopped": "stopped", "failed": "failed", "killed": "lost"}
_WHY = {
    "lost": "it was killed, or its host was lost; resume=auto continues from its last checkpoint",
    "stopped": "a signal ended it; resume=auto continues from its checkpoint",
}
_FILES = (
    "config.yaml",
    STATE,
    FILE,
    "metrics.csv",
    "metrics.jsonl",
    "goodput.json",
    "checkpoints",
    ".lock",
)
_STACKS = re.compile(r"stacks-rank(\d+)-\d+\.txt")
_CAPSULE = re.compile(r"step=(\d+)(?:-batch=\d+)?-rank=(\d+)")


@dataclass(frozen=True)
class Alert:
    """What an operator should hear of;
    `unix_s` is the time of day by the clock of the rank's host.
    """

    unix_s: float
    kind: str
    text: str
    step: int | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Status:
    """See the module.

    Attributes:
        folder: of the run.
        state: one of the module's.
        why: a sentence about the state; may be empty.
        progress: what the job wrote last; None before its first step, and of a run of an older
            version.
        silent_s: seconds since then.
        checkpoints: in the run's folder, by step.
        stores: URLs of checkpoints elsewhere.
        goodput: content of goodput.json; empty without callbacks=goodput.
        alerts: the oldest first.
    """

    folder: Path
    state: str
    why: str = ""
    progress: Progress | None = None
    silent_s: float | None = None
    checkpoints: list[SavedCheckpoint] = field(default_factory=list)
    stores: list[str] = field(default_factory=list)
    goodput: dict[str, Any] = field(default_factory=dict)
    alerts: list[Alert] = field(default_factory=list)


def check_folder(folder: Path) -> None:
    """Check that a folder is a run's.

    Raises:
        ConfigError: there is none, or it is another one's; names the runs that it holds.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ConfigError(
            f"{folder} {what}. Give a run's folder, as the run printed it (run_dir); `python -m"
            " trainkit runs` lists those in runs/."
        )
    if not any((folder / name).exists() for name in _FILES):
        inside = [
            path for depth in range(1, _DEPTH + 1) for path in folder.glob(f"{'*/' * depth}{FILE}")
        ]
        newest = max(inside, key=lambda path: path.stat().st_mtime, default=None)
        what = (
            f"The newest run below it is {newest.parent}."
            if newest
            else "No run has begun there yet."
        )
        raise ConfigError(
            f"{folder} is no run's folder: it has none of {', '.join(_FILES)}. {what}"
        )


def read_status(folder: Path, sleep: Callable[[float], None] = time.sleep) -> Status:
    """Return the status of a run. It takes some seconds if the run is another host's, and looks
    lost.

    Args:
        folder: of the run.
        sleep: waits for that.
    """
    progress = read_progress(folder)
    state, why, progress = _state_of(folder, progress, sleep)
    places = [] if progress is None else progress.checkpoints
    local = [Path(place) for place in places if "://" not in place] or [folder / "checkpoints"]
    checkpoints = sorted(
        (saved for place in local for saved in read_checkpoints(place)),
        key=lambda saved: saved.step,
    )
    silent_s = None if progress is None else max(0.0, Moment.now().seconds_since(progress.written))
    stores = [place for place in places if "://" in place]
    return Status(
        folder,
        state,
        why,
        progress,
        silent_s,
        checkpoints,
        stores,
        _goodput(folder),
        list(_alerts(folder)),
    )


def _state_of(
    folder: Path, progress: Progress | None, sleep: Callable[[float], None]
) -> tuple[str, str, Progress | None]:
    stated = read_state(folder)  # by the command; a script of the user's writes none
    over = _OVER.get(stated.name, "")
    if progress is None:
        if over:
            return over, stated.error or _WHY.get(over, ""), None
        return (
            ("starting", "it does not train yet", None)
            if is_held(folder)
            else ("lost", _WHY["lost"], None)
        )
    if progress.ended in _OVER:
        if _is_taken_over(folder, progress):
            return "starting", "it was started again, and does not train yet", progress
        state = "failed" if over == "failed" else _OVER[progress.ended]
        return state, progress.error or stated.error or _WHY.get(state, ""), progress
    is_there, progress = _is_there(folder, progress, sleep)
    if is_there and not progress.ended:
        return *_waits(progress), progress
    if progress.driver and _answers(progress.driver):
        return "waiting", f"the job's driver ({progress.driver}) forms the ranks again", progress
    if is_there:
        return "waiting", "the ranks are formed again", progress
    if _is_taken_over(folder, progress):
        return "starting", "it was started again, and does not train yet", progress
    state = over or "lost"
    return state, stated.error or _WHY.get(state, ""), progress


def _is_taken_over(folder: Path, progress: Progress) -> bool:
    """Return whether another process than the one that wrote progress.json holds the folder."""
    holder = holder_of(folder)
    return is_held(folder) and (holder.get("host"), holder.get("birth")) != (
        progress.host,
        progress.birth,
    )


def _is_there(
    folder: Path, progress: Progress, sleep: Callable[[float], None]
) -> tuple[bool, Progress]:
    """Return whether rank 0's process lives, and what it wrote last."""
    if (
        progress.host == socket.gethostname()
        and progress.birth is not None
        and _is_of_this_boot(progress)
    ):
        return is_alive({"pid": progress.pid, "birth": progress.birth}), progress
    age = time.time() - progress.written.unix_s
    if 0 <= age < _OLD_S:
        return True, progress
    for _ in range(int(_WATCH_S / 0.5)):  # its clock may be another one
        sleep(0.5)
        newer = read_progress(folder)
        if newer is not None and newer.written != progress.written:
            return True, newer
    return False, progress


def _is_of_this_boot(progress: Progress) -> bool:
    return Moment.now().boot == progress.written.boot


def _waits(progress: Progress) -> tuple[str, str]:
    usual_s = 1 / progress.steps_per_s if progress.steps_per_s else 0.0
    if progress.waiting_for and progress.still_s > max(_WAITS_S, _WAITS_STEPS * usual_s):
        return (
            "waiting",
            f"rank 0 has waited {progress.still_s:.0f} s for other ranks ({progress.waiting_for})",
        )
    return "running", progress.phase


def _answers(address: str) -> bool:
    """Return whether a server listens at address:port."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_DRIVER_S):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def _goodput(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / "goodput.json").read_text())
        return {
            "goodput": float(content["goodput"]),
            "seconds": {key: float(s) for key, s in content["seconds"].items()},
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _alerts(folder: Path) -> Iterator[Alert]:
    yield from sorted(
        [*_kept_alerts(folder), *_stacks(folder), *_capsules(folder)],
        key=lambda alert: alert.unix_s,
    )


def _kept_alerts(folder: Path) -> Iterator[Alert]:
    for path in (folder / "logs").glob(FILES):
        for line in path.read_text(errors="replace").splitlines():
            try:
                yield Alert(**json.loads(line))
            except (ValueError, TypeError):
                continue  # cut by a crash


def _stacks(folder: Path) -> Iterator[Alert]:
    for path in (folder / "logs").glob("stacks-rank*.txt"):
        if match := _STACKS.fullmatch(path.name):
            with path.open(errors="replace") as file:
                text = f"stall: {file.readline().strip()}; its stacks are in logs/{path.name}"
            yield Alert(path.stat().st_mtime, "stall", text, rank=int(match[1]))


def _capsules(folder: Path) -> Iterator[Alert]:
    for path in (folder / "capsules").glob("step=*-rank=*"):
        if match := _CAPSULE.fullmatch(path.name):
            text = f"step {match[1]} is stored in capsules/{path.name}"
            if "-batch=" not in path.name:  # else its updates were by hand
                text += ": `python -m trainkit replay` repeats it"
            yield Alert(path.stat().st_mtime, "capsule", text, int(match[1]), int(match[2]))


def written_s(saved: SavedCheckpoint) -> float | None:
    """Return the seconds since a checkpoint was written, by the time of day; None if unknown."""
    if saved.written is None:
        return None
    now = datetime.now(saved.written.tzinfo)
    return max(0.0, (now - saved.written).total_seconds())
