"""Which callbacks a Trainer has, and in which order: those that it was given, and those that it brings itself."""

from __future__ import annotations

from collections.abc import Sequence

from trainkit.api.callback import Callback
from trainkit.arguments import Duration
from trainkit.callbacks.banner import Banner
from trainkit.callbacks.checkpoint import ModelCheckpoint
from trainkit.callbacks.elastic import Elastic
from trainkit.callbacks.profiler import PROFILERS
from trainkit.callbacks.progress.progress import ProgressBar
from trainkit.callbacks.step_clock import StepClock
from trainkit.callbacks.timeline.timeline import Timeline
from trainkit.callbacks.timer import Timer
from trainkit.loggers import CSVLogger, TensorBoardLogger
from trainkit.loggers.base import Logger


def arrange(
    given: Sequence[Callback],
    loggers: Sequence[Logger] | bool,
    clock: StepClock,
    *,
    max_time: Duration | None,
    profiler: str | Callback | None,
    shows_banner: bool,
    shows_progress: bool,
    saves: bool,
    leaves_no_files: bool,
) -> list[Callback]:
    """Return all callbacks in the order in which their hooks are called.

    Args:
        given: by the user.
        loggers: true for CSV and TensorBoard, false for none.
        clock: is there where a callback reads it.
        max_time: of training.
        profiler: one of PROFILERS, or a callback.
        shows_banner: of the run, at its start.
        shows_progress: a ProgressBar is added where none is given; false drops those.
        saves: a ModelCheckpoint is added where none is given; false drops those.
        leaves_no_files: drops what writes.
    """
    found: list[Callback] = [*([Banner()] if shows_banner else []), *given]
    if max_time is not None:
        found.append(Timer(max_time))
    if profiler is not None:
        found.append(profiler if isinstance(profiler, Callback) else PROFILERS[profiler]())
    found = _one_or_none(found, ProgressBar, shows_progress)
    if isinstance(loggers, bool):
        loggers = [CSVLogger(), TensorBoardLogger()] if loggers else []
    found = _one_or_none([*found, *loggers], ModelCheckpoint, saves)
    if leaves_no_files:
        found = [callback for callback in found if not isinstance(callback, (ModelCheckpoint, Logger))]
    if any(callback.uses_step_clock for callback in found):
        found.append(clock)
    return sorted(found, key=_place)


def _one_or_none(callbacks: list[Callback], kind: type[Callback], is_wanted: bool) -> list[Callback]:
    if not is_wanted:
        return [callback for callback in callbacks if not isinstance(callback, kind)]
    return callbacks if any(isinstance(callback, kind) for callback in callbacks) else [*callbacks, kind()]


def _place(callback: Callback) -> int:
    """Return where a callback stands: what takes the time comes first, what saves comes last."""
    first, last = isinstance(callback, (StepClock, Timeline)), isinstance(callback, ModelCheckpoint)
    return last - first + 2 * isinstance(callback, Elastic)
