"""WeightAveraging: the base of callbacks that put an average of the weights into the model (EMA,
StochasticWeightAveraging).
"""

from __future__ import annotations

from typing import Any

from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.engine.pieces import filling
from trainkit.errors import ConfigError
from trainkit.extensions.swa.averaging import WeightAverage


class WeightAveraging(Callback):
    """One average, created by each fit, and its state in a checkpoint."""

    role = "weight_average"
    needs_of_engine = frozenset({"weights", "equal_weights"})
    use_buffers = False

    def __init__(self) -> None:
        self._average: WeightAverage | None = None
        self._loaded: dict[str, Any] | None = None

    def setup(self, trainer: RunView, task: Task, stage: str) -> None:
        """Reset.

        Raises:
            ConfigError: another callback averages the weights too.
        """
        same = [type(c).__name__ for c in trainer.callbacks if isinstance(c, WeightAveraging)]
        if len(same) > 1:
            raise ConfigError(
                f"{' and '.join(same)} would each put their own average into the model. Keep one of"
                " them."
            )
        if stage == "fit":
            self._average = self._loaded = None

    def on_fit_start(self, trainer: RunView, task: Task) -> None:
        """Restore the checkpoint's average, now that all ranks hold the weights saved with it."""
        if self._loaded is not None:
            self._average = WeightAverage(task, self.use_buffers, filling(trainer.engine.piece_of))
            self._average.load_state_dict(self._loaded)
            self._loaded = None

    def on_exception(self, trainer: RunView, task: Task, exception: BaseException) -> None:
        self._hide()

    def shared_tensors(self) -> dict[str, Any]:
        held = {} if self._average is None else self._average.parameters()
        return {f"{type(self).__name__}'s {name}": average for name, average in held.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the average, or the trained weights if the
        checkpoint's own weights are the average.
        """
        return {"average": None if self._average is None else self._average.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state for `on_fit_start`: only rank 0 has read the weights so far."""
        self._loaded = state_dict["average"]

    def _update(self, task: Task, decay: float | None) -> None:
        if self._average is None:
            self._average = WeightAverage(task, self.use_buffers)
        self._average.update(decay)

    def _show(self, trainer: RunView, task: Task) -> None:
        """Put the average into the model, if there is one. A collective: all ranks get the buffers,
        and averages of them, that are evaluated and saved, as without averaging.
        """
        if self._average is not None and not self._average.shown:
            # after an error no other rank is here
            if trainer.state.phase != "fit" or not trainer.checkpoints.saves_alone:
                trainer.engine.send_buffers(task, self._average.buffers())
            self._average.show()

    def _hide(self) -> None:
        if self._average is not None:
            self._average.hide()
