"""ModelCheckpoint: when a checkpoint is written, and which ones are retained."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from trainkit.api.callback import Callback
from trainkit.api.lightning_arguments import nothing
from trainkit.api.task import Task
from trainkit.api.view import RunView, with_role
from trainkit.arguments import (
    Duration,
    NonNegativeInt,
    PositiveInt,
    checked,
    not_logged,
    seconds_of,
)
from trainkit.callbacks.checkpoint_names import FILENAME, check_filename, filled
from trainkit.callbacks.retained_paths import RetainedPaths
from trainkit.checkpoint.contents import AfterWriting
from trainkit.checkpoint.places import make_store
from trainkit.checkpoint.retention import Retained, Retention
from trainkit.checkpoint.split import require_saveable
from trainkit.checkpoint.store import LINKS, Store
from trainkit.errors import ConfigError


@dataclass(frozen=True)
class _Saved:
    """The last save, the same on all ranks whether the disk took it or not: to save again is a
    collective.

    Attributes:
        at: the step, the epoch that comes next, and whether a validation is still due.
        score: of the checkpoint.
        when: by rank 0's clock.
        is_possible: whether the optimizers' states are known to be such as can be saved.
        is_left_out: whether it was not written: others are better.
    """

    at: tuple[int, int, int]
    score: float
    when: float
    is_possible: bool = False
    is_left_out: bool = False


_NEVER = _Saved((-1, -1, 0), math.nan, 0.0)


@checked
class ModelCheckpoint(RetainedPaths, Callback):
    """Writes `<run_dir>/checkpoints/<filename>/` beside training, with the links `last` and `best`.

    Args:
        monitor: the logged value that decides which is best; None retains the newest.
        verbose: print each save, and each step that is not saved since others are better.
        mode: whether less ("min") or more ("max") of it is better.
        save_top_k: how many are retained: the best, or the newest without `monitor`; -1 for all, 0
            for only the last.
        save_last: whether the newest is retained too, and one is written when training ends. The
            link `last` names it: "link" is true. None is false, as in Lightning.
        every_n_epochs: epochs between two checkpoints at epochs' ends, or 0 for none there.
            Default: 1, and 0 if one of the next two is set, as in Lightning.
        every_n_train_steps: steps between two checkpoints inside epochs, or None for none there.
        train_time_interval: time between two checkpoints inside epochs, or None: seconds, a
            timedelta, or "HH:MM:SS". The clock is rank 0's.
        save_on_exception: write one if an error ends the run, as of the step before. At several
            ranks rank 0 writes it alone, without the other ranks' random numbers and their share of
            the epoch's means.
        save_weights_only: leave out the state that a run needs to resume.
        filename: a folder's name; {epoch}, {step} and names of logged values are filled in ("/" in
            them becomes "_").
        auto_insert_metric_name: {epoch} in `filename` stands for "epoch=3", and not for "3".
        save_on_train_epoch_end: true saves at epochs' ends alone. Default: as in Lightning, after
            validations within those epochs too (trainer.val_check_interval).
        dirpath: a folder or fsspec URL (s3://bucket/run) in place of `<run_dir>/checkpoints`.

    Attributes:
        best_model_path: the path of the best one; "" before the first.
        best_model_score: its value of `monitor`.
        best_k_models: the value of `monitor` of each that is retained, by its path.
        last_model_path: the path of the newest one; "" before the first.
    """

    taken_arguments: ClassVar = {"enable_version_counter": nothing}
    role = "checkpoints"
    # a checkpoint includes the effects of the other callbacks' and the Task's hooks
    runs_last = True

    def __init__(
        self,
        *,  # their order is another one in Lightning
        monitor: str | None = None,
        verbose: bool = False,
        mode: Literal["min", "max"] = "min",
        save_top_k: int = 1,
        save_last: bool | Literal["link"] | None = True,
        every_n_epochs: NonNegativeInt | None = None,
        every_n_train_steps: PositiveInt | None = None,
        train_time_interval: Duration | None = None,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        filename: str | None = FILENAME,
        dirpath: str | None = None,
        auto_insert_metric_name: bool = True,
        save_on_train_epoch_end: bool | None = None,
    ) -> None:
        if save_top_k < -1 or (save_top_k == 0 and not save_last):
            raise ConfigError(
                f"ModelCheckpoint.save_top_k is {save_top_k}; it must be 1 or more, -1 to retain"
                " all, or 0 with save_last=true to retain only the last. To write none:"
                " trainer.enable_checkpointing=false."
            )
        if save_on_exception and save_weights_only:
            raise ConfigError(
                "ModelCheckpoint.save_on_exception is for resuming, and save_weights_only leaves"
                " that state out."
            )
        self.monitor = monitor
        self.verbose = verbose
        self.mode = mode
        self.save_top_k = save_top_k
        self.save_last = bool(save_last)
        if every_n_epochs is None:
            every_n_epochs = int(every_n_train_steps is None and train_time_interval is None)
        self.every_n_epochs = every_n_epochs
        self.every_n_train_steps = every_n_train_steps
        self.train_time_interval = train_time_interval
        self._interval_s = None if train_time_interval is None else seconds_of(train_time_interval)
        self.save_on_exception = save_on_exception
        self.save_weights_only = save_weights_only
        self.filename = check_filename(FILENAME if filename is None else filename)
        self.auto_insert_metric_name = auto_insert_metric_name
        self.save_on_train_epoch_end = save_on_train_epoch_end
        self.dirpath = (
            dirpath if dirpath is None or "://" in str(dirpath) else os.path.expanduser(dirpath)
        )
        # Without a value to compare, the newest is the best.
        self._retention = Retention(
            Retained("max" if monitor is None else mode, save_top_k, self.save_last)
        )
        self._saved = _NEVER

    def setup(self, trainer: RunView, task: Task, stage: str) -> None:
        """Find the store, and refuse one that another ModelCheckpoint has."""
        own = self.store_of(trainer.run_dir)
        self.store: Store = next(
            (store for store in trainer.checkpoints.stores if store.place == own.place), own
        )
        places = [
            c.store_of(trainer.run_dir).place
            for c in trainer.callbacks
            if isinstance(c, ModelCheckpoint)
        ]
        if places.count(self.store.place) > 1:
            raise ConfigError(
                f"Two ModelCheckpoints write to {self.store.place} and would delete each other's:"
                " set a dirpath on one."
            )
        if stage == "fit":  # a second fit of the same Trainer is another run
            self._retention, self._saved = self._retention.restarted(), _NEVER

    def on_train_start(self, trainer: RunView, task: Task) -> None:
        """Count the time from here on, and remove what a killed run did not come to remove."""
        if self._interval_s is not None:
            self._saved = replace(self._saved, when=trainer.coordinator.sync_clock())
        if trainer.is_global_zero:
            for name in self._retention.dropped:
                self.store.remove(name)

    def on_train_step_start(self, trainer: RunView, task: Task) -> None:
        """Remember the state before the step, in case it fails."""
        if self.save_on_exception:
            trainer.checkpoints.remember_step()

    def on_train_step_end(self, trainer: RunView, task: Task) -> None:
        if not self._saved.is_possible:
            self._saved = replace(self._saved, is_possible=True)
            if not self.save_weights_only:
                require_saveable(trainer.optimizers, trainer.engine)
        due = (
            self._interval_s is not None
            and trainer.coordinator.now - self._saved.when >= self._interval_s
        )
        if _has_validated(trainer) and not self.save_on_train_epoch_end:
            due = due or _is_nth(self.every_n_epochs, trainer.current_epoch + 1)
        if due or _is_nth(self.every_n_train_steps, trainer.global_step):
            self.save(trainer)

    def on_train_epoch_end(self, trainer: RunView, task: Task) -> None:
        # a step that was saved before its validation
        is_scored = self._saved.at[0] == trainer.global_step and _has_new_score(self, trainer)
        if is_scored or _is_nth(self.every_n_epochs, trainer.current_epoch + 1):
            self.save(trainer)

    def on_train_end(self, trainer: RunView, task: Task) -> None:
        """Save the steps since the last checkpoint; without save_last, remove temporary ones."""
        if self.save_last:
            self.save(trainer)
            return
        self._settle(trainer)
        if trainer.is_global_zero:
            for name in self._retention.temporary:
                self.store.remove(name)

    def on_exception(self, trainer: RunView, task: Task, exception: BaseException) -> None:
        """Save the state from before the step that failed."""
        if self.save_on_exception and isinstance(exception, Exception):
            trainer.checkpoints.rescue(lambda: self.save(trainer, "-exception", always=True))

    def renew(self) -> None:
        """Save again when a save is due, though no step was taken:
        a callback has changed the weights.
        """
        self._saved = replace(self._saved, at=_NEVER.at)

    def state_dict(self) -> dict[str, Any]:
        """Return which are retained and which is best, by name: a run's folder can be moved."""
        return self._retention.state_dict() | {
            "saved_at": self._saved.at,
            "saved_score": self._saved.score,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._retention.load_state_dict(state_dict, self.store.names())
        # This step need not be written again. What this rank sees of the disk may not decide that:
        # a save is a collective.
        self._saved = replace(
            self._saved, at=tuple(state_dict["saved_at"]), score=state_dict["saved_score"]
        )

    def save(self, trainer: RunView, end: str = "", always: bool = False) -> None:
        """Save now, unless this step is saved. Call it on all ranks.

        Args:
            trainer: the run.
            end: is appended to the name.
            always: also if it is neither among the best nor retained as the last.
        """
        state = trainer.state
        ended = state.epoch_done and not state.end_open
        here = (state.global_step, state.current_epoch + ended, int(state.owes_validation))
        again = here[0] == self._saved.at[0]
        is_known = here == self._saved.at and not (always and self._saved.is_left_out)
        if is_known and not _has_new_score(self, trainer):
            return
        self._settle(trainer)
        # values may be logged later
        early = always or trainer.evaluator.is_awaited or (state.current_epoch == 0 and not ended)
        stale = _stale(trainer) if self.every_n_epochs else set[str]()
        name = filled(self.filename, trainer, early, stale, self.auto_insert_metric_name) + end
        score = self._score(trainer, early)
        retention = self._retention
        is_finite = trainer.checkpoints.has_finite_weights(name) and _is_finite(
            self.monitor, trainer
        )
        name = retention.name_for(name, score, again, is_finite)
        if not trainer.checkpoints.saves_alone:
            name = trainer.engine.comm.broadcast_object(name)
        before = retention.plan(name, score, again, is_finite)
        self._saved = _Saved(here, score, trainer.coordinator.now, is_possible=True)
        is_retained = name in retention.names.scores
        is_wanted = self.save_last or always
        if not is_wanted and not trainer.engine.comm.broadcast_object(is_retained):
            self._saved = replace(self._saved, is_left_out=True)
            retention.leave_out()  # others are better
            _say(self, trainer, name, score, "is not saved: others are better")
            return
        retention.temporary = [] if is_retained else [name]
        last = retention.names.last if self.save_last else ""
        links = dict(zip(LINKS, (last, retention.names.best), strict=True))
        removed = [old for old in retention.dropped if old not in retention.names.scores]
        changes = AfterWriting({link: target for link, target in links.items() if target}, removed)
        written = trainer.checkpoints.save(self.store, name, self.save_weights_only, changes)
        retention.begin(name, before, written)
        _say(self, trainer, name, score, f"is saved; best is {retention.names.best or 'none'}")

    def save_now(self, trainer: RunView) -> bool:
        """Save this step, unless it is saved; return, on all ranks, whether it is on disk.
        Call it on all ranks.
        """
        self._settle(trainer)
        if trainer.engine.comm.broadcast_object(self._retention.failed):
            self.renew()
        self.save(trainer, always=True)
        self._settle(trainer)
        return not trainer.engine.comm.broadcast_object(self._retention.failed)

    def _settle(self, trainer: RunView) -> None:
        trainer.checkpoints.wait()
        self._retention.settle()

    def store_of(self, run_dir: Path) -> Store:
        """Return where the checkpoints are in a run with this folder."""
        return make_store(self.dirpath or run_dir / "checkpoints")

    def _score(self, trainer: RunView, early: bool) -> float:
        if self.monitor is None:
            return float(trainer.global_step)
        if self.monitor not in trainer.callback_metrics:
            if early:
                return math.nan  # it is logged later: this checkpoint ranks last
            raise ConfigError(
                f"ModelCheckpoint.monitor is {not_logged(self.monitor, trainer.callback_metrics)}"
            )
        is_own = trainer.callback_metrics.logged_at.get(self.monitor) == trainer.global_step
        if self.every_n_epochs and not is_own:
            return math.nan  # the value is of other weights: this checkpoint ranks last
        # of saves within epochs alone few have a value of their own: the newest there is counts
        return float(trainer.callback_metrics[self.monitor])


def _stale(trainer: RunView) -> set[str]:
    """Return the values of an earlier validation: they are of other weights."""
    logged_at = trainer.callback_metrics.logged_at
    return {name for name in trainer.evaluator.names if logged_at.get(name) != trainer.global_step}


def _has_new_score(policy: ModelCheckpoint, trainer: RunView) -> bool:
    """Whether the value has changed since this step was saved: its validation ran later."""
    if (
        policy.monitor is None
        or trainer.callback_metrics.logged_at.get(policy.monitor) != trainer.global_step
    ):
        return False
    return policy._saved.score != trainer.callback_metrics[policy.monitor]


def _say(policy: ModelCheckpoint, trainer: RunView, name: str, score: float, outcome: str) -> None:
    if policy.verbose:
        value = "" if policy.monitor is None else f" ({policy.monitor} = {score:g})"
        if math.isnan(score) and _is_finite(policy.monitor, trainer):
            value = f" (without {policy.monitor} of this step)"
        trainer.say(f"Checkpoint {name}{value} {outcome}.")


def _is_nth(every: int | None, count: int) -> bool:
    return count % every == 0 if every else False


def _has_validated(trainer: RunView) -> bool:
    """Return, the same on all ranks, whether this step was validated, and is not the epoch's last."""
    state = trainer.state
    if state.validated_at != state.global_step:
        return False
    return state.step_in_epoch != trainer.train_feed.num_steps_in(state.current_epoch)


def _is_finite(monitor: str | None, trainer: RunView) -> bool:
    return monitor is None or math.isfinite(trainer.callback_metrics.get(monitor, 0.0))


def checkpoint_policies(callbacks: Sequence[Callback]) -> list[ModelCheckpoint]:
    """Return those callbacks that decide about checkpoints, in their order."""
    return with_role(callbacks, "checkpoints")
