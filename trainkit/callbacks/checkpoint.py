"""ModelCheckpoint: when a checkpoint is written, and which are kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from string import Formatter
from typing import TYPE_CHECKING, Any, Literal

from trainkit.api.callback import Callback
from trainkit.arguments import Duration, PositiveInt, checked, not_logged, seconds_of
from trainkit.checkpoint.retention import Kept
from trainkit.checkpoint.store import LINKS, Store, make_store
from trainkit.errors import ConfigError

if TYPE_CHECKING:
    from trainkit.api.task import Task
    from trainkit.trainer import Trainer


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
        self._pending = ""  # what is being written, also while an elastic fit is begun again
        self._round = 0
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
        self._written = ""  # rank 0: the name that the last attempt gave a checkpoint; "" where it failed
        self.failed = False  # rank 0: whether it did
        self._unkept: list[str] = []  # written for going on alone: they go with the next one, or at the end
        self._round += 1

    @property
    def best_model_path(self) -> str:
        """See the class."""
        return self.store.path_of(self._kept.best) if self._kept.best else ""

    @property
    def best_model_score(self) -> float | None:
        """See the class."""
        return self._kept.scores[self._kept.best] if self.monitor is not None and self._kept.best else None

    @property
    def last_model_path(self) -> str:
        """See the class."""
        return self.store.path_of(self._kept.last) if self._kept.last else ""

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Find out where."""
        self.store: Store = self._place(trainer)
        places = [c._place(trainer).place for c in trainer.callbacks if isinstance(c, ModelCheckpoint)]
        if places.count(self.store.place) > 1:
            raise ConfigError(
                f"Two ModelCheckpoints write to {self.store.place} and would delete each other's: set a dirpath on one."
            )
        if stage == "fit":  # a second fit of the same Trainer is another run
            self._begin()

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        """Count the time from here on, and take away what a killed run no longer came to delete."""
        if self._interval_s is not None:
            self._saved_when = trainer.session.pulse.look()
        if trainer.is_global_zero:
            for name in self._dropping:
                self.store.remove(name)

    def on_train_step_start(self, trainer: Trainer, task: Task) -> None:
        """Note where the step begins, should it fail."""
        if self.save_on_exception:
            trainer.session.remember_step()

    def on_train_step_end(self, trainer: Trainer, task: Task) -> None:
        """Save where a step's number or the time says so."""
        due = self._interval_s is not None and trainer.session.pulse.now - self._saved_when >= self._interval_s
        if due or (self.every_n_train_steps and trainer.global_step % self.every_n_train_steps == 0):
            self.save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
        """Save where an epoch's number says so."""
        if self.every_n_epochs and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self.save(trainer)

    def on_train_end(self, trainer: Trainer, task: Task) -> None:
        """Save what was trained since the last checkpoint."""
        if self.save_last:
            self.save(trainer)
        elif trainer.is_global_zero:
            trainer.session.writer.wait()
            for name in self._unkept:
                self.store.remove(name)

    def on_exception(self, trainer: Trainer, task: Task, exception: BaseException) -> None:
        """Save what there was before the step that failed."""
        if self.save_on_exception and isinstance(exception, Exception):
            trainer.session.rescue(lambda: self.save(trainer, "-exception", always=True))

    def renew(self) -> None:
        """Save again when a save is due, though no step was taken: a callback has changed the weights."""
        self._saved_at = _NEVER

    def state_dict(self) -> dict[str, Any]:
        """Return which are kept and which is best, by name, so that a run's folder can be moved."""
        own = {"saved_at": self._saved_at, "saved_score": self._saved_score}
        return self._kept.state_dict() | own | {"dropping": list(self._dropping), "unkept": list(self._unkept)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over those that are still there."""
        there = {*self.store.names(), self._pending}
        self._kept.load_state_dict(state_dict, there)
        self._dropping = [name for name in state_dict["dropping"] if name in there and name not in self._kept.scores]
        # It need not be written again where this run adds no step. What this rank sees of the disk may not decide that.
        self._saved_at, self._saved_score = tuple(state_dict["saved_at"]), state_dict["saved_score"]
        self._unkept, self._written = list(state_dict["unkept"]), self._kept.last

    def save(self, trainer: Trainer, end: str = "", always: bool = False) -> None:
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
        trainer.session.writer.wait()  # its outcome is known from here on
        early = always or (state.current_epoch == 0 and not ended)  # values may still be to come
        name, score = self._name(trainer, early) + end, self._score(trainer, early)
        before, last = self._kept.copy(), self._written
        if again and last:
            self._kept.scores.pop(last, None)
        self._saved_at, self._saved_score, self._saved_when = here, score, trainer.session.pulse.now
        # Decided before writing, so that the checkpoint itself remembers it.
        dropped = dict.fromkeys([*self._kept.add(name, score), *[last] * again, *self._unkept])
        self._dropping = [known for known in dropped if known and known != name]
        if not self.save_last and not always and not trainer.engine.comm.broadcast_object(name in self._kept.scores):
            return  # others are better
        self._unkept = [] if name in self._kept.scores else [name]
        self._pending, begun = name, self._round

        def settle(written: bool) -> None:
            """Rank 0, in the writing thread: what follows from the outcome."""
            self._pending = ""
            if begun != self._round:  # ranks have changed since: what is kept is what was known then
                if not written:
                    self._kept.scores.pop(name, None)
                elif name not in self._kept.scores:
                    self._unkept.append(name)
                return
            self.failed, self._written = not written, name if written else ""
            if not written:
                self._kept = before
                return
            for link, target in zip(LINKS, (self._kept.last if self.save_last else "", self._kept.best), strict=True):
                if target:
                    trainer.session.try_files(lambda: self.store.point(link, target), f"'{link}' could not be set")  # noqa: B023
            for dropped in self._dropping:
                if dropped not in self._kept.scores:
                    self.store.remove(dropped)

        trainer.session.save_checkpoint(self.store, name, self.save_weights_only, settle)

    def _place(self, trainer: Trainer) -> Store:
        return make_store(self.dirpath or trainer.run_dir / "checkpoints")

    def _has_new_score(self, trainer: Trainer) -> bool:
        """Whether the value has changed since this step was saved: its validation came after."""
        if self.monitor is None or trainer.session.run.metrics_at.get(self.monitor) != trainer.global_step:
            return False
        return self._saved_score != trainer.callback_metrics[self.monitor]

    def _score(self, trainer: Trainer, early: bool) -> float:
        if self.monitor is None:
            return float(trainer.global_step)
        if self.monitor not in trainer.callback_metrics:
            if early or trainer.session.awaits_validation:
                return math.nan  # it is still to come: this one ranks last
            raise ConfigError(f"ModelCheckpoint.monitor is {not_logged(self.monitor, trainer.callback_metrics)}")
        if trainer.session.run.metrics_at.get(self.monitor) != trainer.global_step:
            return math.nan  # the value is of other weights: this one ranks last
        return trainer.callback_metrics[self.monitor]

    def _name(self, trainer: Trainer, early: bool) -> str:
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


def keepers(callbacks: Sequence[Callback]) -> list[ModelCheckpoint]:
    """Return the ModelCheckpoints among callbacks."""
    return [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]
