"""ModelCheckpoint: when a checkpoint is written, and which are kept."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainkit.arguments import PositiveInt, checked
from trainkit.callback import Callback
from trainkit.checkpoint.format import MANIFEST, point
from trainkit.errors import ConfigError

if TYPE_CHECKING:
    from trainkit.task import Task
    from trainkit.trainer import Trainer


@checked
class ModelCheckpoint(Callback):
    """Writes `<run_dir>/checkpoints/<filename>/`, with the links `last` and `best`.

    Args:
        monitor: the logged value that says which is best; None keeps the newest.
        mode: whether less ("min") or more ("max") of it is better.
        save_top_k: how many are kept: the best, or the newest without `monitor`; -1 keeps all. `last` is kept always.
        every_n_epochs: epochs between two checkpoints at epochs' ends, or None for none there.
        every_n_train_steps: steps between two checkpoints inside epochs, or None for none there.
        save_weights_only: leave out what a run needs to go on.
        filename: a folder's name; {epoch}, {step} and names of logged values are filled in ("/" in them becomes "_").
        dirpath: the folder, where it is not `<run_dir>/checkpoints`.
    """

    def __init__(
        self,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        save_top_k: int = 1,
        every_n_epochs: PositiveInt | None = 1,
        every_n_train_steps: PositiveInt | None = None,
        save_weights_only: bool = False,
        filename: str = "epoch={epoch}-step={step}",
        dirpath: str | None = None,
    ) -> None:
        if save_top_k < -1 or save_top_k == 0:
            raise ConfigError(f"ModelCheckpoint.save_top_k is {save_top_k}; it must be 1 or more, or -1 to keep all.")
        self.monitor, self.mode, self.save_top_k = monitor, mode, save_top_k
        self.every_n_epochs, self.every_n_train_steps = every_n_epochs, every_n_train_steps
        self.save_weights_only, self.filename, self.dirpath = save_weights_only, filename, dirpath
        self.best_model_path = ""
        self.best_model_score: float | None = None
        self.last_model_path = ""
        self._kept: dict[str, float] = {}
        # Of the last attempt, the same on all ranks whether the disk took it or not: who saves again is a collective.
        self._saved_at, self._saved_score = -1, math.nan

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Find out where."""
        self._folder = self._place(trainer)
        same = [c for c in trainer.callbacks if isinstance(c, ModelCheckpoint) and c._place(trainer) == self._folder]
        if len(same) > 1:
            raise ConfigError(
                f"Two ModelCheckpoints write to {self._folder} and would delete each other's: set a dirpath on one."
            )
        if stage == "fit":  # a second fit of the same Trainer is another run
            self.best_model_path, self.best_model_score, self.last_model_path = "", None, ""
            self._kept, self._saved_at, self._saved_score = {}, -1, math.nan

    def on_train_step_end(self, trainer: Trainer, task: Task) -> None:
        """Save where a step's number says so."""
        if self.every_n_train_steps and trainer.global_step % self.every_n_train_steps == 0:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
        """Save where an epoch's number says so."""
        if self.every_n_epochs and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, task: Task) -> None:
        """Save what was trained since the last checkpoint."""
        self._save(trainer)

    def renew(self) -> None:
        """Save again when a save is due, though no step was taken: a callback has changed the weights."""
        self._saved_at = -1

    def state_dict(self) -> dict[str, Any]:
        """Return which are kept and which is best; paths are relative, so that a run's folder can be moved."""
        return {
            "kept": {Path(path).name: score for path, score in self._kept.items()},
            "best": Path(self.best_model_path).name if self.best_model_path else "",
            "score": self.best_model_score,
            "last": Path(self.last_model_path).name,
            "saved_at": self._saved_at,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over those that are still there."""
        there = {n: s for n, s in state_dict["kept"].items() if (self._folder / n / MANIFEST).is_file()}
        self._kept = {str(self._folder / name): score for name, score in there.items()}
        if state_dict["best"] in there:
            self.best_model_path, self.best_model_score = str(self._folder / state_dict["best"]), state_dict["score"]
        if state_dict["last"] in there:
            self.last_model_path = str(self._folder / state_dict["last"])
        # It need not be written again where this run adds no step. What this rank sees of the disk may not decide that.
        self._saved_at, self._saved_score = state_dict["saved_at"], state_dict["kept"].get(state_dict["last"], math.nan)

    def _place(self, trainer: Trainer) -> Path:
        return Path(self.dirpath).absolute() if self.dirpath else trainer.run_dir / "checkpoints"

    def _save(self, trainer: Trainer) -> None:
        again = trainer.global_step == self._saved_at
        if again and not self._has_new_score(trainer):
            return
        folder = self._folder / self._name(trainer)
        before = self._kept.copy(), self.last_model_path, self.best_model_path, self.best_model_score
        for path in {str(folder), self.last_model_path} if again else {str(folder)}:
            self._kept.pop(path, None)
        self._kept[str(folder)] = self._saved_score = self._score(trainer)
        # Decided before writing, so that the checkpoint itself remembers it.
        self._saved_at, self.last_model_path = trainer.global_step, str(folder)
        self.best_model_path = self._best()
        self.best_model_score = self._kept[self.best_model_path] if self.monitor else None
        self._drop()
        trainer.save_checkpoint(folder, weights_only=self.save_weights_only)
        if not trainer.is_global_zero:
            return
        if not (folder / MANIFEST).is_file():  # the disk did not take it: those that are there stay
            self._kept, self.last_model_path, self.best_model_path, self.best_model_score = before
            return
        try:
            point(self._folder / "last", folder)
            point(self._folder / "best", Path(self.best_model_path))
        except OSError as error:
            print(f"The links in {self._folder} could not be set: {error}. Training goes on.", flush=True)
        for path in set(before[0]) - set(self._kept):
            shutil.rmtree(path, ignore_errors=True)

    def _has_new_score(self, trainer: Trainer) -> bool:
        """Whether the value has changed since this step was saved: its validation came after."""
        if self.monitor is None or trainer.session.run.metrics_at.get(self.monitor) != trainer.global_step:
            return False
        return self._saved_score != trainer.callback_metrics[self.monitor]

    def _score(self, trainer: Trainer) -> float:
        if self.monitor is None:
            return float(trainer.global_step)  # the newest is the best
        if self.monitor not in trainer.callback_metrics:
            if trainer.session.awaits_validation:
                return math.nan  # the first validation is still to come: this one ranks last
            raise ConfigError(
                f"ModelCheckpoint.monitor is '{self.monitor}', which was not logged; there are "
                f"{', '.join(sorted(trainer.callback_metrics)) or 'none'}."
            )
        if trainer.session.run.metrics_at.get(self.monitor) != trainer.global_step:
            return math.nan  # the value is of other weights: this one ranks last
        return trainer.callback_metrics[self.monitor]

    def _name(self, trainer: Trainer) -> str:
        values = {k.replace("/", "_"): v for k, v in trainer.callback_metrics.items()}
        places = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        try:
            name = self.filename.replace("/", "_").format(**(values | places))
        except KeyError as error:
            raise ConfigError(
                f"ModelCheckpoint.filename is '{self.filename}', but {error} is not known; there are epoch, step"
                f"{''.join(', ' + name for name in sorted(values))}."
            ) from error
        if name.startswith(".") or name in ("", "last", "best"):
            raise ConfigError(
                f"ModelCheckpoint.filename is '{self.filename}', which gives '{name}'; it must name a folder of its own."
            )
        return name

    def _rank(self, path: str) -> float:
        score = self._kept[path]
        if math.isnan(score):
            return math.inf  # a value that is not a number is the worst
        return -score if self.mode == "max" or self.monitor is None else score

    def _best(self) -> str:
        best = min(self._kept, key=self._rank)
        return self.last_model_path if self._rank(best) == math.inf else best

    def _drop(self) -> None:
        """Forget those that are neither among the best nor the last."""
        if self.save_top_k == -1:
            return
        best = sorted(self._kept, key=self._rank)[: self.save_top_k]
        self._kept = {path: score for path, score in self._kept.items() if path in best or path == self.last_model_path}
