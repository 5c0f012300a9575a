"""EMA: an exponential moving average of the weights, which is what is validated, saved and left at the end.

each update      the average follows the weights
a validation     the model holds the average; the weights that are trained come back at its end
a checkpoint     weights.safetensors holds the average, so that validate, test and predict need no EMA; the weights
                 that are trained lie in training.pt, so that fit goes on from there bit for bit
the fit's end    the model holds the average
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainkit.api.callback import Callback
from trainkit.arguments import Fraction, NonNegativeInt, PositiveInt, checked
from trainkit.errors import ConfigError
from trainkit.optim.averaging import WeightAverage

if TYPE_CHECKING:
    from trainkit.api.task import Task
    from trainkit.trainer import Trainer


class WeightAveraging(Callback):
    """What EMA and StochasticWeightAveraging share: one average, made anew by each fit, and its place in a checkpoint."""

    use_buffers = False

    def __init__(self) -> None:
        self._average: WeightAverage | None = None
        self._loaded: dict[str, Any] | None = None

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Begin anew.

        Raises:
            ConfigError: another callback averages the weights too.
        """
        same = [type(c).__name__ for c in trainer.callbacks if isinstance(c, WeightAveraging)]
        if len(same) > 1:
            raise ConfigError(f"{' and '.join(same)} would each put their own average into the model. Keep one of them.")
        if stage == "fit":
            self._average = self._loaded = None

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        """Take back what a checkpoint held, now that all ranks have the weights that were saved with it."""
        if self._loaded is not None:
            self._average = WeightAverage(task, self.use_buffers)
            self._average.load_state_dict(self._loaded)
            self._loaded = None

    def on_exception(self, trainer: Trainer, task: Task, exception: BaseException) -> None:
        """Leave the weights that were trained."""
        self._hide()

    def shared_tensors(self) -> dict[str, Any]:
        """Return the averages of parameters."""
        held = {} if self._average is None else self._average.parameters()
        return {f"{type(self).__name__}'s {name}": average for name, average in held.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the average, or the weights where the checkpoint's own are the average."""
        return {"average": None if self._average is None else self._average.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep them for `on_fit_start`: only rank 0 has read the weights yet."""
        self._loaded = state_dict["average"]

    def _update(self, task: Task, decay: float | None) -> None:
        if self._average is None:
            self._average = WeightAverage(task, self.use_buffers)
        self._average.update(decay)

    def _show(self, trainer: Trainer) -> None:
        """Put the average into the model, where there is one. A collective: buffers are rank 0's, as they are without us."""
        if self._average is not None and not self._average.shown:
            if trainer.state.stage != "fit" or not trainer.session.saves_alone:  # after an error nobody else comes here
                trainer.engine.comm.broadcast_tensors(self._average.buffers())
            self._average.show()

    def _hide(self) -> None:
        if self._average is not None:
            self._average.hide()


@checked
class EMA(WeightAveraging):
    """Averages the weights exponentially: average <- decay x average + (1 - decay) x weights (Polyak and Juditsky 1992).

    The first update copies the weights. An update that fp16 held back is none.

    Args:
        decay: what is kept of the average in an update; 0.999 looks back on about 1000 updates.
        warmup: begin with a smaller decay, (1 + n) / (10 + n) after n updates, as TensorFlow's ExponentialMovingAverage
            does with `num_updates`: a short run would end near its first weights otherwise.
        update_every_n_steps: optimizer steps between two updates.
        update_starting_at_step: optimizer steps before the first; until then there is no average, and the weights
            themselves are validated and saved.
        use_buffers: average batch norm's statistics too; false takes the model's last.
    """

    def __init__(
        self,
        decay: Fraction = 0.999,
        warmup: bool = True,
        update_every_n_steps: PositiveInt = 1,
        update_starting_at_step: NonNegativeInt = 0,
        use_buffers: bool = True,
    ) -> None:
        super().__init__()
        if decay == 1:
            raise ConfigError("EMA.decay is 1, which would keep the first weights for ever; it must be below 1, as 0.999.")
        self.decay, self.warmup, self.use_buffers = decay, warmup, use_buffers
        self.update_every_n_steps, self.update_starting_at_step = update_every_n_steps, update_starting_at_step
        self._seen = 0  # optimizer updates that the average knows of
        self._shown_to_save = False

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Begin anew."""
        super().setup(trainer, task, stage)
        if stage == "fit":
            self._seen = 0

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        """Say which weights the run's values are about."""
        if trainer.is_global_zero:
            print(
                f"EMA: validation, checkpoints and the end of the run have averaged weights (decay {self.decay:g}).", flush=True
            )

    def on_train_step_end(self, trainer: Trainer, task: Task) -> None:
        """Follow the weights."""
        self._follow(trainer, task)

    def on_validation_start(self, trainer: Trainer, task: Task) -> None:
        """Show the average; a validation inside an epoch comes before `on_train_step_end`."""
        if trainer.state.stage == "fit":
            self._follow(trainer, task)
            self._show(trainer)

    def on_validation_end(self, trainer: Trainer, task: Task) -> None:
        """Go back to the weights that are trained."""
        if trainer.state.stage == "fit":
            self._hide()

    def on_save_checkpoint(self, trainer: Trainer, task: Task, checkpoint: dict[str, Any]) -> None:
        """Show the average: what the model holds now is written after this hook."""
        if not self._is_shown:  # else the fit has ended, or a validation is going on
            self._follow(trainer, task)
            self._show(trainer)
            self._shown_to_save = True

    def on_save_checkpoint_end(self, trainer: Trainer, task: Task) -> None:
        """Go back to the weights that are trained."""
        if self._shown_to_save:
            self._hide()
            self._shown_to_save = False

    def on_train_end(self, trainer: Trainer, task: Task) -> None:
        """Leave the average in the model."""
        self._show(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the average's state and the updates that it knows of."""
        return super().state_dict() | {"seen": self._seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take them back."""
        super().load_state_dict(state_dict)
        self._seen = state_dict["seen"]

    @property
    def _is_shown(self) -> bool:
        return self._average is not None and self._average.shown

    def _follow(self, trainer: Trainer, task: Task) -> None:
        """Take the last update in, once."""
        made = trainer.global_step - trainer.state.skipped_steps
        if made == self._seen:
            return
        self._seen = made
        if made > self.update_starting_at_step and (made - self.update_starting_at_step) % self.update_every_n_steps == 0:
            n = 0 if self._average is None else self._average.num_updates
            self._update(task, min(self.decay, (1 + n) / (10 + n)) if self.warmup else self.decay)
