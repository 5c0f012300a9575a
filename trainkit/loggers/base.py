"""Logger: base class of all loggers. Training queues the values, and a thread of the logger writes
them.

main thread     require (is the package installed?) -> on_metrics: queue the values -> at the end: wait for the queue, limited
its thread      open -> write_hyperparams -> write_metrics, ... -> flush, if the queue is empty -> finalize
"""

from __future__ import annotations

import functools
import time
from abc import abstractmethod
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.checkpoint.store import Store
from trainkit.errors import ConfigError
from trainkit.launch.environment import read_launcher
from trainkit.loggers.background import Background
from trainkit.metrics.media import Media
from trainkit.safety.masking import masked

_SETTLE_S = 5.0
_HURRY_S = 10.0  # limit for a run that was preempted or failed, or never reached its server


@dataclass(frozen=True)
class RunFacts:
    """Facts about the run, copied when a logger is opened; the Trainer has moved on by then.

    Attributes:
        run_dir: the run's folder.
        global_step: steps taken before the fit began.
        resumes: whether the run resumes from its own checkpoint, or with other ranks.
        follows: whether the values are those of `validate` or `test`, which follow all that was
            logged before.
        hyperparams: the config, or the Task's saved hyperparameters.
        stores: locations of the run's checkpoints.
        task: the Task's class.
        engine: its name, as "ddp".
        rank: this process's rank.
        world_size: the number of ranks.
        secrets: values of secret settings, which stay here.
    """

    run_dir: Path
    global_step: int
    resumes: bool
    hyperparams: dict[str, Any]
    stores: tuple[Store, ...]
    task: str
    engine: str
    rank: int
    world_size: int
    follows: bool = False
    secrets: tuple[str, ...] = field(default=(), repr=False)

    def without_secrets(self, tree: Any) -> Any:
        """Return plain values with secrets masked:
        those under secret keys, and those of the config.
        """
        return masked(tree, self.secrets)


class Logger(Callback):
    """Opens on rank 0 when a fit starts, receives values, and is closed however the fit ends; it
    opens again for the values of `validate` and `test`.

    `open`, `write_hyperparams`, `write_metrics`, `flush` and `finalize` run one at a time in this
    logger's thread; a subclass has them. `log_hyperparams` and `log_metrics` are for hooks. The
    first exception is reported; then this logger stops, and training continues. An error of
    trainkit's own (ConfigError) means wrong settings and ends the run.

    Attributes:
        stores_media: it has a `log_media`.
        settles: a checkpoint waits (5 s at most) until all values logged before it are written, so
            that a run killed right after it has lost none. For local files.
        given_hparams: what `log_hyperparams` was given.
        finish_timeout_s: seconds that the end of a fit waits for pending writes; at most 10 if the
            run was preempted or failed, or if `open` has not returned and asks a server.
        logged_at: in `write_metrics`: the time at which the values were logged, in seconds since
            1970.
    """

    may_differ = True
    settles = False
    stores_media = False
    finish_timeout_s: float = 60.0
    logged_at = 0.0
    _background: Background | None = None
    _is_elsewhere = False  # open on another rank
    _run_dir: Path | None = None
    given_hparams: Mapping[str, Any] = MappingProxyType({})

    @property
    def asks_a_server(self) -> bool:
        """Whether `open` waits for a server, which may never answer."""
        return True

    def on_fit_start(self, trainer: RunView, task: Task) -> None:
        """Start the thread, open, and write the run's settings."""
        self.start(trainer, task, follows=False)

    def on_validation_start(self, trainer: RunView, task: Task) -> None:
        if trainer.state.phase == "validate":
            self.on_test_start(trainer, task)

    def on_test_start(self, trainer: RunView, task: Task) -> None:
        """Open for `test` or `validate`: after a fit, or else as a run of its own. Files of a run
        that this process has not trained stay as they are.
        """
        if self._run_dir == trainer.run_dir:
            self.start(trainer, task, follows=True)
        elif not (self.settles and any(trainer.run_dir.iterdir())):
            self.on_fit_start(trainer, task)

    def start(self, trainer: RunView, task: Task, follows: bool) -> None:
        """Start the thread and open; write the run's settings, unless values follow earlier ones."""
        self._run_dir = Path(trainer.run_dir)
        self._is_elsewhere = not self.takes_part(trainer)
        if self._is_elsewhere:
            return
        self.require()
        here = trainer.engine.heartbeat
        checkpoints = trainer.checkpoints

        def get_on() -> None:
            here.progress += 1

        facts = RunFacts(
            run_dir=Path(trainer.run_dir),
            global_step=trainer.global_step,
            resumes=follows or checkpoints.resumed_in_place,
            hyperparams=_hyperparams(trainer, task),
            stores=tuple(checkpoints.stores),
            task=type(task).__name__,
            engine=trainer.engine.name,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            follows=follows,
            secrets=trainer.options.masked_values,
        )
        background = Background(type(self).__name__, self.flush, get_on)
        background.position = lambda: (trainer.global_step, trainer.current_epoch)
        background.is_whole = trainer.state.phase != "fit"
        background.facts = facts
        self._background = background
        background.put("opening", functools.partial(_open, self, background, facts))
        if not follows:
            self.log_hyperparams({})

    def on_metrics(
        self, trainer: RunView, task: Task, metrics: dict[str, float], step: int
    ) -> None:
        if self._background is not None:
            if self._background.mistake is not None:
                raise self._background.mistake
            work = functools.partial(
                _write, self, dict(metrics), step, trainer.current_epoch, time.time()
            )
            if self.hand_over(f"writing step {step}", work):
                self.taken(step)

    def on_media(self, trainer: RunView, task: Task, media: Media, step: int) -> None:
        """Queue it for the thread."""
        if self.stores_media:
            self.hand_over(
                f"writing '{media.name}' of step {step}",
                functools.partial(self.log_media, media, step),
            )

    def on_save_checkpoint(self, trainer: RunView, task: Task, checkpoint: dict[str, Any]) -> None:
        """Wait for the queue if `settles` is set."""
        if self.settles:
            self.settle()

    def on_exception(self, trainer: RunView, task: Task, exception: BaseException) -> None:
        _finish(self, "failed")

    def on_fit_end(self, trainer: RunView, task: Task) -> None:
        """Raise what is wrong with the settings; the Task's on_fit_end may log more."""
        self.settle()
        if self._background is not None:
            self._background.is_whole = True
            if self._background.mistake is not None:
                raise self._background.mistake

    def teardown(self, trainer: RunView, task: Task, stage: str) -> None:
        """Close, also if a signal ended the run."""
        if (background := self._background) is not None:
            _finish(self, "success" if background.is_whole else "preempted")
            if background.is_whole and background.mistake is not None:
                raise background.mistake

    @property
    def experiment(self) -> Any:
        """The library's own object (SummaryWriter, W&B's run, MlflowClient), open. On other ranks
        it ignores all calls.

        Prefer `log_image` and its kin, which every logger takes.

        Raises:
            ConfigError: this logger writes plain files, and has none; or it is not open.
        """
        if self._background is None:
            refuse_on_main(self, "experiment")
            return _Ignored()
        self.settle()
        return self.native()

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers to this logger alone, from a hook. Other ranks ignore the call.

        Args:
            metrics: of one element each.
            step: default: the run's.

        Raises:
            ConfigError: this logger is not open.
        """
        if self._background is None:
            refuse_on_main(self, "log_metrics")
            return
        here, epoch = self._background.position()
        step = here if step is None else step
        values = {name: float(value) for name, value in metrics.items()}
        work = functools.partial(_write, self, values, step, epoch, time.time())
        if self.hand_over(f"writing step {step}", work):
            self.taken(step)

    def log_hyperparams(
        self, params: Mapping[str, Any] | Namespace, metrics: Mapping[str, Any] | None = None
    ) -> None:
        """Log settings beside the run's own: now, or before a fit once it opens; and first values
        of metrics, if it is open.
        """
        if metrics:
            self.log_metrics(metrics)
        own = vars(params) if isinstance(params, Namespace) else params
        self.given_hparams = {**self.given_hparams, **own}
        if self._background is not None:
            facts: RunFacts = self._background.facts
            settings = facts.hyperparams | facts.without_secrets(self.given_hparams)
            work = functools.partial(self.write_hyperparams, settings)
            self.hand_over("writing the settings", work)

    def native(self) -> Any:
        """Return the library's object, for `experiment`."""
        raise ConfigError(
            f"{type(self).__name__}.experiment: this logger writes plain files. Use self.log_image or"
            " self.log_text, or Trainer(logger=TensorBoardLogger()); in configs logger=tensorboard."
        )

    def hand_over(self, what: str, work: Callable[[], object]) -> bool:
        """Queue work for the thread; return whether it was accepted:
        the logger is open, has not failed, and keeps up.
        """
        return self._background is not None and self._background.put(what, work)

    def settle(self, timeout_s: float = _SETTLE_S) -> bool:
        """Wait until all queued work is done; return whether it is."""
        return self._background is None or self._background.settle(timeout_s)

    def taken(self, step: int) -> None:
        """Called in the main thread after values of this step were queued."""

    def takes_part(self, trainer: RunView) -> bool:
        """Return whether this rank logs."""
        return trainer.is_global_zero

    def require(self) -> None:
        """Import the packages that `open` needs. Called in the main thread.

        Raises:
            ConfigError: a package is not installed.
        """

    @abstractmethod
    def open(self, run: RunFacts) -> None:
        """Open the files, or the connection."""

    @abstractmethod
    def write_metrics(self, metrics: dict[str, float], step: int, epoch: int) -> None:
        """Write the values of a step."""

    def log_media(self, media: Media, step: int) -> None:  # noqa: B027 - see stores_media
        """Write a picture, text, table, sound or histogram."""

    def write_hyperparams(self, params: dict[str, Any]) -> None:
        """Write the run's settings, nested as in the config; or those of `log_hyperparams`."""

    def flush(self) -> None:
        """Write buffered values; called if the queue is empty."""

    @abstractmethod
    def finalize(self, status: str) -> None:
        """Close; `status` is "success", "failed" or "preempted"."""


def _finish(logger: Logger, status: str) -> None:
    background, logger._background = logger._background, None
    if background is not None:
        has_time = status == "success" and (background.is_open or not logger.asks_a_server)
        limit_s = logger.finish_timeout_s if has_time else min(logger.finish_timeout_s, _HURRY_S)
        background.close(functools.partial(logger.finalize, status), limit_s)


def refuse_on_main(logger: Logger, name: str) -> None:
    """Refuse what needs an open logger, on rank 0: the others have none open.

    Raises:
        ConfigError: this is rank 0.
    """
    if not (logger._is_elsewhere or read_launcher().rank):
        raise ConfigError(
            f"{type(logger).__name__}.{name}: this logger is open in fit, validate and test alone."
            " Use it in their hooks: from on_fit_start to on_fit_end."
        )


def _open(logger: Logger, background: Background, facts: RunFacts) -> None:
    logger.open(facts)
    background.is_open = True


def _write(logger: Logger, metrics: dict[str, float], step: int, epoch: int, now: float) -> None:
    logger.logged_at = now
    logger.write_metrics(metrics, step, epoch)


class _Ignored:
    """Accepts any call, and does nothing."""

    def _same(self, *_: Any, **__: Any) -> _Ignored:
        return self

    __getattr__ = __getitem__ = __call__ = __enter__ = _same

    def __setitem__(self, name: Any, value: Any) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def _hyperparams(trainer: RunView, task: Task) -> dict[str, Any]:
    # a DataModule of Lightning's has none
    of_data = getattr(trainer.datamodule, "logged_hparams", {})
    own = dict(trainer.options.config or {**of_data, **task.logged_hparams})
    return dict(masked(own, trainer.options.masked_values))


def loggers_of(callbacks: Sequence[Callback]) -> list[Logger]:
    """Return the loggers among the callbacks."""
    return [callback for callback in callbacks if isinstance(callback, Logger)]
