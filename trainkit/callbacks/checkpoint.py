"""ModelCheckpoint: when a checkpoint is written, and which are kept."""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any, Literal

from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.arguments import Duration, PositiveInt, checked, not_logged, seconds_of
from trainkit.checkpoint.manager import Changes
from trainkit.checkpoint.retention import Kept
from trainkit.checkpoint.store import LINKS, Store, make_store
from trainkit.errors import ConfigError


@dataclass(frozen=True)
class _Pending:
    """A save whose outcome is not known yet, and the retention before it."""

    name: str
    before: Kept
    outcome: Future[bool]


_NEVER = (-1, -1, 0)  # a step, the epoch that would come next, and whether a validation is still to come


@checked
class ModelCheckpoint(Callback):
    """Writes `<run_dir>/checkpoints/<filename>/` beside training, with the links `last` and `best`.

    Args:
        monitor: the logged value that says which is best; None keeps the newest.
        mode: whether less ("min") or more ("max") of it is better.
        save_top_k: how many are kept: the best, or the newest without `monitor`; -1 keeps all, 0 none but the last.
        save_last: whether the newest is kept too, and one is written where training ends.
        every_n_epochs: epochs between two checkpoints at epochs' ends, or None for none there.
        every_n_train_steps: steps between two checkpoints inside epochs, or None for none there.
        train_time_interval: time between two checkpoints inside epochs, or None: seconds, a timedelta, or "HH:MM:SS". The
            clock is rank 0's.
        save_on_exception: write one where an error ends the run, as of the step before. At several ranks rank 0 writes it
            alone: what belongs to the others (random numbers, their part of an epoch's means) is not in it.
        save_weights_only: leave out what a run needs to go on.
        filename: a folder's name; {epoch}, {step} and names of logged values are filled in ("/" in them becomes "_").
        dirpath: the folder or fsspec URL (s3://bucket/run), where it is not `<run_dir>/checkpoints`.

    Attributes:
        best_model_path: where the best one lies; "" before the first.
        best_model_score: its value of `monitor`.
        last_model_path: where the newest one lies.
    """

    runs_last = True  # it saves what the others, and the Task's own hooks, did

    def __init__(
        self,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        save_top_k: int = 1,
        save_last: bool = True,
        every_n_epochs: PositiveInt | None = 1,
        every_n_train_steps: PositiveInt | None = None,
        train_time_interval: Duration | None = None,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        filename: str = "epoch={epoch}-step={step}",
        dirpath: str | None = None,
    ) -> None:
        if save_top_k < -1 or (save_top_k == 0 and not save_last):
            raise ConfigError(
                f"ModelCheckpoint.save_top_k is {save_top_k}; it must be 1 or more, -1 to keep all, or 0 with save_last=true "
                "to keep the last alone. To write none: trainer.enable_checkpointing=false."
            )
        if save_on_exception and save_weights_only:
            raise ConfigError("ModelCheckpoint.save_on_exception is for going on, and save_weights_only leaves that out.")
        self.monitor, self.mode, self.save_top_k, self.save_last = monitor, mode, save_top_k, save_last
        self.every_n_epochs, self.every_n_train_steps = every_n_epochs, every_n_train_steps
        self._interval_s = None if train_time_interval is None else seconds_of(train_time_interval)
        self.save_on_exception = save_on_exception
        self.save_weights_only, self.filename, self.dirpath = save_weights_only, filename, dirpath
        self._check_filename()
        self._pending: _Pending | None = None  # the save whose outcome is not known yet
        self._earlier: _Pending | None = None  # the same, of an earlier attempt of an elastic fit
        self._begin()

    def _check_filename(self) -> None:
        try:
            fields = [name for _, name, _, _ in Formatter().parse(self.filename) if name is not None]
        except ValueError as error:
            raise ConfigError(f"ModelCheckpoint.filename is '{self.filename}', which cannot be filled in: {error}.") from error
        if strange := [name for name in fields if not name or name[0].isdigit() or "." in name or "[" in name]:
            raise ConfigError(
                f"ModelCheckpoint.filename is '{self.filename}', and '{{{strange[0]}}}' is no name; there are epoch, step, "
                'and the names of logged values, with "_" for "/".'
            )

    def _begin(self) -> None:
        # Without a value to compare, the newest is the best.
        self._kept = Kept("max" if self.monitor is None else self.mode, self.save_top_k, self.save_last)
        # Of the last attempt, the same on all ranks whether the disk took it or not: who saves again is a collective.
        self._saved_at, self._saved_score, self._saved_when = _NEVER, math.nan, 0.0
        self._dropping: list[str] = []
        self._written = ""  # rank 0: the name that the last attempt gave a checkpoint; "" if it failed
        self._failed = False  # rank 0: whether it did
        self._unkept: list[str] = []  # written for going on alone: they go with the next one, or at the end
        if self._pending is not None:
            self._earlier, self._pending = self._pending, None

    @property
    def best_model_path(self) -> str:
        """See the class."""
        self._settle_if_done()
        return self.store.path_of(self._kept.best) if self._kept.best else ""

    @property
    def best_model_score(self) -> float | None:
        """See the class."""
        self._settle_if_done()
        return self._kept.scores[self._kept.best] if self.monitor is not None and self._kept.best else None

    @property
    def last_model_path(self) -> str:
        """See the class."""
        self._settle_if_done()
        return self.store.path_of(self._kept.last) if self._kept.last else ""

    def setup(self, trainer: RunView, task: Task, stage: str) -> None:
        """Find the store, and refuse one that another ModelCheckpoint has."""
        self.store: Store = self.store_of(trainer.run_dir)
        places = [c.store_of(trainer.run_dir).place for c in trainer.callbacks if isinstance(c, ModelCheckpoint)]
        if places.count(self.store.place) > 1:
            raise ConfigError(
                f"Two ModelCheckpoints write to {self.store.place} and would delete each other's: set a dirpath on one."
            )
        if stage == "fit":  # a second fit of the same Trainer is another run
            self._begin()

    def on_train_start(self, trainer: RunView, task: Task) -> None:
        """Count the time from here on, and take away what a killed run no longer came to delete."""
        if self._interval_s is not None:
            self._saved_when = trainer.coordinator.sync_clock()
        if trainer.is_global_zero:
            for name in self._dropping:
                self.store.remove(name)

    def on_train_step_start(self, trainer: RunView, task: Task) -> None:
        """Note where the step begins, should it fail."""
        if self.save_on_exception:
            trainer.checkpoints.remember_step()

    def on_train_step_end(self, trainer: RunView, task: Task) -> None:
        """Save where a step's number or the time says so."""
        due = self._interval_s is not None and trainer.coordinator.now - self._saved_when >= self._interval_s
        if due or (self.every_n_train_steps and trainer.global_step % self.every_n_train_steps == 0):
            self.save(trainer)

    def on_train_epoch_end(self, trainer: RunView, task: Task) -> None:
        """Save where an epoch's number says so."""
        if self.every_n_epochs and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self.save(trainer)

    def on_train_end(self, trainer: RunView, task: Task) -> None:
        """Save what was trained since the last checkpoint."""
        if self.save_last:
            self.save(trainer)
            return
        trainer.checkpoints.wait()
        self._settle()
        if trainer.is_global_zero:
            for name in self._unkept:
                self.store.remove(name)

    def on_exception(self, trainer: RunView, task: Task, exception: BaseException) -> None:
        """Save what there was before the step that failed."""
        if self.save_on_exception and isinstance(exception, Exception):
            trainer.checkpoints.rescue(lambda: self.save(trainer, "-exception", always=True))

    def renew(self) -> None:
        """Save again when a save is due, though no step was taken: a callback has changed the weights."""
        self._saved_at = _NEVER

    def state_dict(self) -> dict[str, Any]:
        """Return which are kept and which is best, by name, so that a run's folder can be moved."""
        self._settle_if_done()
        own = {"saved_at": self._saved_at, "saved_score": self._saved_score}
        return self._kept.state_dict() | own | {"dropping": list(self._dropping), "unkept": list(self._unkept)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over those that are still there."""
        there = {*self.store.names(), self._earlier.name if self._earlier else ""}
        self._kept.load_state_dict(state_dict, there)
        self._dropping = [name for name in state_dict["dropping"] if name in there and name not in self._kept.scores]
        # It need not be written again where this run adds no step. What this rank sees of the disk may not decide that.
        self._saved_at, self._saved_score = tuple(state_dict["saved_at"]), state_dict["saved_score"]
        self._unkept, self._written = list(state_dict["unkept"]), self._kept.last

    def save(self, trainer: RunView, end: str = "", always: bool = False) -> None:
        """Save now, unless this step is saved. Call it on all ranks.

        Args:
            trainer: whose run it is.
            end: of the name.
            always: also where it is neither among the best nor kept as the last.
        """
        state = trainer.state
        ended = state.epoch_done and not state.end_open
        here = (state.global_step, state.current_epoch + ended, int(state.owes_validation))
        again = here[0] == self._saved_at[0]
        if here == self._saved_at and not self._has_new_score(trainer):
            return
        trainer.checkpoints.wait()
        self._settle()
        early = always or (state.current_epoch == 0 and not ended)  # values may still be to come
        name, score = self._name(trainer, early) + end, self._score(trainer, early)
        before, last = self._kept.copy(), self._written
        if again and last:
            self._kept.scores.pop(last, None)
        self._saved_at, self._saved_score, self._saved_when = here, score, trainer.coordinator.now
        # Decided before writing, so that the checkpoint itself remembers it.
        dropped = dict.fromkeys([*self._kept.add(name, score), *[last] * again, *self._unkept])
        self._dropping = [known for known in dropped if known and known != name]
        if not self.save_last and not always and not trainer.engine.comm.broadcast_object(name in self._kept.scores):
            return  # others are better
        self._unkept = [] if name in self._kept.scores else [name]
        links = dict(zip(LINKS, (self._kept.last if self.save_last else "", self._kept.best), strict=True))
        changes = Changes(
            {link: target for link, target in links.items() if target},
            [old for old in self._dropping if old not in self._kept.scores],
        )
        outcome = trainer.checkpoints.save(self.store, name, self.save_weights_only, changes)
        self._pending = _Pending(name, before, outcome)

    def save_now(self, trainer: RunView) -> bool:
        """Save this step, unless it is saved; return, on all ranks, whether it is on disk. Call it on all ranks."""
        trainer.checkpoints.wait()
        self._settle()
        if trainer.engine.comm.broadcast_object(self._failed):
            self.renew()
        self.save(trainer, always=True)
        trainer.checkpoints.wait()
        self._settle()
        return not trainer.engine.comm.broadcast_object(self._failed)

    def _settle_if_done(self) -> None:
        if all(pending is None or pending.outcome.done() for pending in (self._earlier, self._pending)):
            self._settle()

    def _settle(self) -> None:
        """Take the outcome of the last save into account. Nothing is being written."""
        if self._earlier is not None:  # of an attempt before ranks changed: what was restored counts
            name, written = self._earlier.name, self._earlier.outcome.result()
            self._earlier = None
            if not written:
                self._kept.scores.pop(name, None)
            elif name not in self._kept.scores and name not in self._unkept:
                self._unkept.append(name)
        if self._pending is not None:
            written = self._pending.outcome.result()
            self._failed, self._written = not written, self._pending.name if written else ""
            if not written:
                self._kept = self._pending.before
            self._pending = None

    def store_of(self, run_dir: Path) -> Store:
        """Return where the checkpoints are in a run with this folder."""
        return make_store(self.dirpath or run_dir / "checkpoints")

    def _has_new_score(self, trainer: RunView) -> bool:
        """Whether the value has changed since this step was saved: its validation came after."""
        if self.monitor is None or trainer.callback_metrics.logged_at.get(self.monitor) != trainer.global_step:
            return False
        return self._saved_score != trainer.callback_metrics[self.monitor]

    def _score(self, trainer: RunView, early: bool) -> float:
        if self.monitor is None:
            return float(trainer.global_step)
        if self.monitor not in trainer.callback_metrics:
            if early or trainer.evaluator.is_awaited:
                return math.nan  # it is still to come: this one ranks last
            raise ConfigError(f"ModelCheckpoint.monitor is {not_logged(self.monitor, trainer.callback_metrics)}")
        if trainer.callback_metrics.logged_at.get(self.monitor) != trainer.global_step:
            return math.nan  # the value is of other weights: this one ranks last
        return trainer.callback_metrics[self.monitor]

    def _name(self, trainer: RunView, early: bool) -> str:
        values = {k.replace("/", "_"): v for k, v in trainer.callback_metrics.items()}
        places = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        try:
            known = values | places
            name = self.filename.replace("/", "_").format_map(_Early(known) if early else known)
        except (KeyError, ValueError) as error:
            why = f"{error} is not known" if isinstance(error, KeyError) else str(error)
            raise ConfigError(
                f"ModelCheckpoint.filename is '{self.filename}', but {why}; there are epoch, step"
                f"{''.join(', ' + name for name in sorted(values))}."
            ) from error
        if name.startswith(".") or name in ("", *LINKS):
            raise ConfigError(
                f"ModelCheckpoint.filename is '{self.filename}', which gives '{name}'; it must name a folder of its own."
            )
        return name


class _Early(dict[str, Any]):
    """Values of which some may be missing: those are written as nan."""

    def __missing__(self, name: str) -> float:
        return math.nan
