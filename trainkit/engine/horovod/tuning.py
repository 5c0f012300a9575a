"""Horovod's own settings, which it reads from its environment when it starts. Imports no torch.

A variable that is set already (by the user, or by an option of horovodrun) wins over the engine's
argument of the same meaning, and a message says so.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

from trainkit.arguments import show
from trainkit.errors import ConfigError, EngineError


@dataclass(frozen=True)
class Tuning:
    """The settings of Horovod's background thread; None leaves Horovod's default."""

    # tensors that are ready together are summed together, up to this many MiB; 0 for one by one
    fusion_threshold_mb: float | None = None
    cycle_time_ms: float | None = None  # how often the thread looks for tensors that are ready
    cache_capacity: int | None = None  # how many tensors' negotiations are remembered; 0 for none
    autotune: bool = False  # whether Horovod searches for the best of these while training
    autotune_log_file: str | None = None  # the CSV file into which rank 0 writes what it tried

    def __post_init__(self) -> None:
        if self.autotune_log_file is not None and not self.autotune:
            raise ConfigError(
                f"engine.autotune_log_file is {show(self.autotune_log_file)}, but engine.autotune"
                " is false: there would be nothing to note. Set engine.autotune=true, or leave the"
                " file out."
            )

    def variables(self) -> dict[str, tuple[str, str, str]]:
        """Return what was set: variable -> (its value, the argument, the
        argument's value as the user wrote it).
        """
        requested: dict[str, tuple[str, str, str]] = {}
        if self.fusion_threshold_mb is not None:
            bytes_ = str(round(self.fusion_threshold_mb * 2**20))
            requested["HOROVOD_FUSION_THRESHOLD"] = (
                bytes_,
                "fusion_threshold_mb",
                show(self.fusion_threshold_mb),
            )
        if self.cycle_time_ms is not None:
            requested["HOROVOD_CYCLE_TIME"] = (
                str(self.cycle_time_ms),
                "cycle_time_ms",
                show(self.cycle_time_ms),
            )
        if self.cache_capacity is not None:
            requested["HOROVOD_CACHE_CAPACITY"] = (
                str(self.cache_capacity),
                "cache_capacity",
                show(self.cache_capacity),
            )
        if self.autotune:
            requested["HOROVOD_AUTOTUNE"] = "1", "autotune", "true"
        if self.autotune_log_file is not None:
            requested["HOROVOD_AUTOTUNE_LOG"] = (
                self.autotune_log_file,
                "autotune_log_file",
                show(self.autotune_log_file),
            )
        return requested

    def apply(self, environ: MutableMapping[str, str], runs_already: bool) -> list[str]:
        """Set the variables that are not set yet.

        Args:
            environ: the environment.
            runs_already: whether Horovod has read it: it does so once in a process.

        Returns:
            A sentence for each argument that a variable of the user overrules.

        Raises:
            EngineError: Horovod runs already, with another value.
        """
        overruled = []
        for variable, (value, argument, given) in self.variables().items():
            held = environ.get(variable)
            if runs_already and held != value:
                raise EngineError(
                    f"engine.{argument} is {given}, but Horovod runs in this process already"
                    f" ({variable}={'not set' if held is None else held}) and reads its settings"
                    " only once. Give the first engine of the process this value, or start another"
                    " process."
                )
            if held is None:
                environ[variable] = value
            elif held != value:
                overruled.append(
                    f"engine.{argument} is {given}, but {variable}={held} is set in the"
                    " environment, and wins."
                )
        return overruled
