"""Logger: what all loggers have in common. Training hands over, a thread of the logger's own writes.

main thread     require (is the package there?) -> on_metrics: into a queue -> at the end: waits for the queue, for a while
its thread      open -> log_hyperparams -> log_metrics, ... -> flush, where nothing waits -> finalize
"""

from __future__ import annotations

import functools
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.api.callback import Callback
from trainkit.checkpoint.store import Store
from trainkit.loggers.background import Background

if TYPE_CHECKING:
    from trainkit.api.task import Task
    from trainkit.trainer import Trainer

_SETTLE_S = 5.0
_HURRY_S = 10.0  # who was asked to end, has failed, or has to do with a server that never answered has no more time


@dataclass(frozen=True)
class RunFacts:
    """What a logger is told of the run when it is opened; the Trainer itself has gone on by then.

    Attributes:
        run_dir: the run's folder.
        global_step: the steps that were taken when the fit began.
        goes_on: whether the run goes on from its own checkpoint, or with other ranks.
        hyperparams: the config, or what the Task saved.
        stores: where the run's checkpoints lie.
        task: the Task's class.
        engine: "single", "horovod" or "ddp".
        rank: this process.
        world_size: the number of ranks.
    """

    run_dir: Path
    global_step: int
    goes_on: bool
    hyperparams: dict[str, Any]
    stores: tuple[Store, ...]
    task: str
    engine: str
    rank: int
    world_size: int


class Logger(Callback):
    """Opens on rank 0 when a fit starts, is handed numbers, and is closed whatever the end.

    `open`, `log_hyperparams`, `log_metrics`, `flush` and `finalize` run one after the other in a thread of this logger. What
    one of them raises is told once; then this logger is done, and training goes on. An error of trainkit's own (ConfigError)
    ends the run: it is for a mistake in the settings.

    Attributes:
        settles: whether a checkpoint waits (5 s at most) until what was logged before it is written, so that a run which is
            killed right after it has lost nothing. For local files.
        finish_timeout_s: seconds that the end of a fit waits for what is still to be written; 10 at most where the run was
            asked to end or has failed, or where `open` has not come to its end.
        logged_at: in `log_metrics`: when the numbers were logged, in seconds since 1970.
    """

    settles = False
    finish_timeout_s: float = 60.0
    logged_at = 0.0
    _background: Background | None = None
    _is_open = False

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        """Start the thread, open, and write the run's settings."""
        if not self.takes_part(trainer):
            return
        self.require()
        here, session = trainer.engine.heartbeat, trainer.session

        def get_on() -> None:
            here.progress += 1

        facts = RunFacts(
            run_dir=Path(trainer.run_dir),
            global_step=trainer.global_step,
            goes_on=session.goes_on_in_place,
            hyperparams=dict(session.hyperparams),
            stores=tuple(session.stores),
            task=type(task).__name__,
            engine=trainer.engine.name,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
        )
        self._is_open = False
        self._background = Background(type(self).__name__, self.flush, get_on)
        self._background.put("opening", functools.partial(self._open, facts))
        self._background.put("writing the settings", functools.partial(self.log_hyperparams, facts.hyperparams))

    def on_metrics(self, trainer: Trainer, task: Task, metrics: dict[str, float], step: int) -> None:
        """Hand over numbers."""
        if self._background is not None:
            if self._background.mistake is not None:
                raise self._background.mistake
            work = functools.partial(self._write, dict(metrics), step, trainer.current_epoch, time.time())
            if self.hand_over(f"writing step {step}", work):
                self.taken(step)

    def on_save_checkpoint(self, trainer: Trainer, task: Task, checkpoint: dict[str, Any]) -> None:
        """See `settles`."""
        if self.settles:
            self.settle()

    def on_exception(self, trainer: Trainer, task: Task, exception: BaseException) -> None:
        """Close as failed."""
        self._finish("failed")

    def on_fit_end(self, trainer: Trainer, task: Task) -> None:
        """Close as done."""
        background = self._background
        self._finish("success")
        if background is not None and background.mistake is not None:
            raise background.mistake

    def teardown(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Close what a signal ended."""
        if stage == "fit":
            self._finish("preempted")

    def hand_over(self, what: str, work: Callable[[], object]) -> bool:
        """Let the thread do something; return whether it was taken: it is open, has not failed, and keeps up.

        Args:
            what: for the message, should it fail: "writing step 3".
            work: what to do.
        """
        return self._background is not None and self._background.put(what, work)

    def settle(self, timeout_s: float = _SETTLE_S) -> bool:
        """Wait until what was handed over is done; return whether it is."""
        return self._background is None or self._background.settle(timeout_s)

    def _open(self, facts: RunFacts) -> None:
        self.open(facts)
        self._is_open = True

    def _write(self, metrics: dict[str, float], step: int, epoch: int, now: float) -> None:
        self.logged_at = now
        self.log_metrics(metrics, step, epoch)

    def _finish(self, status: str) -> None:
        background, self._background = self._background, None
        if background is not None:
            has_time = status == "success" and self._is_open
            limit_s = self.finish_timeout_s if has_time else min(self.finish_timeout_s, _HURRY_S)
            background.close(functools.partial(self.finalize, status), limit_s)

    def taken(self, step: int) -> None:
        """In the main thread: numbers of this step are on their way."""

    def takes_part(self, trainer: Trainer) -> bool:
        """Whether this rank logs."""
        return trainer.is_global_zero

    def require(self) -> None:
        """In the main thread: import what `open` needs.

        Raises:
            ConfigError: it is not installed.
        """

    @abstractmethod
    def open(self, run: RunFacts) -> None:
        """Open the files, or the connection."""

    @abstractmethod
    def log_metrics(self, metrics: dict[str, float], step: int, epoch: int) -> None:
        """Write numbers of a step."""

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        """Write the run's settings, nested as in the config."""

    def flush(self) -> None:
        """Send on what was gathered; called where nothing waits."""

    @abstractmethod
    def finalize(self, status: str) -> None:
        """Close; `status` is "success", "failed" or "preempted"."""
