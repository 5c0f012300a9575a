"""The callbacks of a Trainer, in order: the given ones, and those that it adds.
The only list of concrete callbacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

from trainkit import callbacks
from trainkit import loggers as named_loggers
from trainkit.api.callback import Callback, in_order
from trainkit.api.lightning_names import of_another_class
from trainkit.callbacks.banner import Banner
from trainkit.callbacks.checkpoint import ModelCheckpoint
from trainkit.callbacks.divergence_guard import DivergenceGuard
from trainkit.callbacks.progress.progress import ProgressBar
from trainkit.callbacks.step_clock import StepClock
from trainkit.callbacks.timer import Timer
from trainkit.errors import ConfigError
from trainkit.extension import public, public_names
from trainkit.loggers import CSVLogger, TensorBoardLogger
from trainkit.loggers.base import Logger

# of an extension: the name of `trainer.profiler`, and of the class in trainkit.callbacks
_PROFILERS = {
    "simple": "SimpleProfiler",
    "advanced": "AdvancedProfiler",
    "pytorch": "PyTorchProfiler",
}


def default_callbacks(arguments: Mapping[str, Any]) -> list[Callback]:
    """Return all callbacks of a Trainer with these arguments,
    in the order in which their hooks are called.
    """
    given, loggers, profiler = arguments["callbacks"], arguments["logger"], arguments["profiler"]
    quick = bool(arguments["fast_dev_run"])  # leaves no files
    result = _list_of(given, Callback, "trainer.callbacks has", "Callback", callbacks)
    if arguments["enable_model_summary"]:
        result.insert(0, Banner())
    else:
        result.append(Banner(is_whole=False))
    if not any(isinstance(callback, DivergenceGuard) for callback in result):
        result.append(DivergenceGuard(every_n_steps=None, action="warn"))
    if arguments["max_time"] is not None and not quick:
        result.append(Timer(arguments["max_time"]))
    if profiler is not None:
        if not isinstance(profiler, Callback) and (
            not isinstance(profiler, str) or profiler not in _PROFILERS
        ):
            is_of_config = isinstance(profiler, (str, int, float, Mapping, Sequence))
            shown = profiler if is_of_config else f"a {type(profiler).__name__}"
            raise ConfigError(
                f"trainer.profiler is {shown}; it must be one of {', '.join(_PROFILERS)}, or a"
                " trainkit.Callback."
            )
        result.append(
            profiler
            if isinstance(profiler, Callback)
            else public("trainkit.callbacks", _PROFILERS[profiler])()
        )
    result = _one_or_none(result, ProgressBar, arguments["enable_progress_bar"])
    if isinstance(loggers, bool):
        result += [CSVLogger(), TensorBoardLogger()] if loggers and not quick else []
    else:
        result += _list_of(
            loggers, Logger, "trainer.logger is", "loggers.base.Logger", named_loggers
        )
    result = _one_or_none(result, ModelCheckpoint, arguments["enable_checkpointing"] and not quick)
    if quick:
        result = [
            callback for callback in result if not isinstance(callback, (ModelCheckpoint, Logger))
        ]
    if any(callback.uses_step_clock for callback in result):
        result.append(StepClock())
    return in_order(result)


def _list_of(
    given: Any, kind: type[Callback], place: str, name: str, room: ModuleType
) -> list[Callback]:
    """Return one object or several as a list.

    Args:
        place: the start of a sentence, as "trainer.callbacks has".
        name: of `kind`, after "trainkit.".
        room: has the classes of this kind by their names.

    Raises:
        ConfigError: one is not of this kind; names it, and its class of trainkit.
    """
    several = list(given) if isinstance(given, Iterable) else [] if given is None else [given]
    for each in several:
        if not isinstance(each, kind):
            known = {*vars(room), *public_names(room.__name__)}
            raise ConfigError(of_another_class(place, each, name, known.__contains__))
    return several


def callbacks_with(callbacks: Sequence[Callback], of_task: Any) -> list[Callback]:
    """Return the callbacks with the Task's own (Task.configure_callbacks), which take the places of
    those of their classes.

    Raises:
        ConfigError: the Task's are no callbacks.
    """
    own = [of_task] if isinstance(of_task, Callback) else list(of_task or [])
    if strange := [
        type(callback).__name__ for callback in own if not isinstance(callback, Callback)
    ]:
        raise ConfigError(
            f"configure_callbacks() returned a {strange[0]}; it must return a trainkit.Callback, or"
            " a list of them."
        )
    kinds = {type(callback) for callback in own}
    return (
        in_order([*(c for c in callbacks if type(c) not in kinds), *own])
        if own
        else list(callbacks)
    )


def _one_or_none(
    callbacks: list[Callback], kind: type[Callback], is_wanted: bool
) -> list[Callback]:
    if not is_wanted:
        return [callback for callback in callbacks if not isinstance(callback, kind)]
    return (
        callbacks
        if any(isinstance(callback, kind) for callback in callbacks)
        else [*callbacks, kind()]
    )
