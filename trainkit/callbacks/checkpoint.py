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
        self._saved_at = -1

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Find out where."""
        self._folder = Path(self.dirpath) if self.dirpath else trainer.run_dir / "checkpoints"

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

    def state_dict(self) -> dict[str, Any]:
        """Return which are kept and which is best; paths are relative, so that a run's folder can be moved."""
        return {
            "kept": {Path(path).name: score for path, score in self._kept.items()},
            "best": Path(self.best_model_path).name if self.best_model_path else "",
            "score": self.best_model_score,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over those that are still there."""
        there = {n: s for n, s in state_dict["kept"].items() if (self._folder / n / MANIFEST).is_file()}
        self._kept = {str(self._folder / name): score for name, score in there.items()}
        if state_dict["best"] in there:
            self.best_model_path, self.best_model_score = str(self._folder / state_dict["best"]), state_dict["score"]

    def _save(self, trainer: Trainer) -> None:
        if trainer.global_step == self._saved_at:
            return
        self._saved_at = trainer.global_step
        score = self._score(trainer)
        folder = self._folder / self._name(trainer)
        before = self._kept.copy()
        self._kept.pop(str(folder), None)
        self._kept[str(folder)] = score
        # Decided before writing, so that the checkpoint itself remembers it.
        self.last_model_path = str(folder)
        self.best_model_path = self._best()
        self.best_model_score = self._kept[self.best_model_path] if self.monitor else None
        dropped = self._drop()
        trainer.save_checkpoint(folder, weights_only=self.save_weights_only)
        if not trainer.is_global_zero:
            return
        point(self._folder / "last", folder)
        point(self._folder / "best", Path(self.best_model_path))
        for path in [p for p in {**before, **dict.fromkeys(dropped)} if p not in self._kept and p != str(folder)]:
            shutil.rmtree(path, ignore_errors=True)

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
        return trainer.callback_metrics[self.monitor]

    def _name(self, trainer: Trainer) -> str:
        values = {k.replace("/", "_"): v for k, v in trainer.callback_metrics.items()}
        try:
            name = self.filename.replace("/", "_").format(epoch=trainer.current_epoch, step=trainer.global_step, **values)
        except KeyError as error:
            raise ConfigError(
                f"ModelCheckpoint.filename is '{self.filename}', but {error} is not known; there are epoch, step"
                f"{''.join(', ' + name for name in sorted(values))}."
            ) from error
        return name

    def _rank(self, path: str) -> float:
        score = self._kept[path]
        if math.isnan(score):
            return math.inf  # a value that is not a number is the worst
        return -score if self.mode == "max" or self.monitor is None else score

    def _best(self) -> str:
        return min(self._kept, key=self._rank)

    def _drop(self) -> list[str]:
        """Forget those that are neither among the best nor the last; return them."""
        if self.save_top_k == -1:
            return []
        best = sorted(self._kept, key=self._rank)[: self.save_top_k]
        dropped = [path for path in self._kept if path not in best and path != self.last_model_path]
        for path in dropped:
            del self._kept[path]
        return dropped
