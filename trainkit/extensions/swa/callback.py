"""StochasticWeightAveraging: the equal average of the weights at the ends of the last epochs
(Izmailov et al. 2018).

    before `swa_epoch_start`   training is unchanged
    from then on               the schedulers stop; the rate goes to `swa_lrs`; each epoch's last weights are averaged
    the run's end              the model holds the average; batch norm's statistics are recomputed; one more validation;
                               the checkpoints of this step are written again, with the average in
                               weights.safetensors

Before the end, validation and checkpoints use the trained weights: the average has no norm
statistics yet.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.arguments import IntOrFraction, NonNegativeInt, PositiveFloat, checked
from trainkit.callbacks.checkpoint import checkpoint_policies
from trainkit.console import info, warning
from trainkit.errors import ConfigError
from trainkit.extensions.swa.norm_statistics import recompute_norm_statistics
from trainkit.extensions.swa.weight_averaging import WeightAveraging


@checked
class StochasticWeightAveraging(WeightAveraging):
    """Averages the last epochs' weights at a rate that does not decay.

    Args:
        swa_lrs: the final rate, or one per parameter group; as every rate of the user, it is
            multiplied by the factor of trainer.lr_scaling.
        swa_epoch_start: the epoch with which averaging begins, from 1: a number, or a fraction of
            trainer.max_epochs.
        annealing_epochs: epochs over which the rate moves from the schedulers' last one to
            `swa_lrs`, once per epoch, as torch's SWALR does.
        annealing_strategy: along half a cosine ("cos") or a straight line ("linear").
    """

    def __init__(
        self,
        swa_lrs: PositiveFloat | list[PositiveFloat],
        swa_epoch_start: IntOrFraction = 0.8,
        annealing_epochs: NonNegativeInt = 10,
        annealing_strategy: Literal["cos", "linear"] = "cos",
    ) -> None:
        super().__init__()
        self.swa_lrs = swa_lrs
        self.swa_epoch_start = swa_epoch_start
        self.annealing_epochs = annealing_epochs
        self.annealing_strategy = annealing_strategy
        self._start = 0  # the first averaged epoch
        # the rates at that epoch, without lr_scaling's factor
        self._start_lrs: list[float] | None = None

    def setup(self, trainer: RunView, task: Task, stage: str) -> None:
        super().setup(trainer, task, stage)
        if stage == "fit":
            self._start_lrs = None

    def on_fit_start(self, trainer: RunView, task: Task) -> None:
        """Determine the first averaged epoch.

        Raises:
            ConfigError: that epoch cannot be known or is never reached, or the number of rates is
                not that of parameter groups.
        """
        super().on_fit_start(trainer, task)
        if self._start_lrs is None:  # else averaging began before the restart
            self._start = (
                0
                if trainer.options.fast_dev_run
                else self._first_epoch(trainer.options.limits.max_epochs)
            )
        num_groups = len(trainer.rates.unscaled())
        if isinstance(self.swa_lrs, (list, tuple)) and len(self.swa_lrs) != num_groups:
            raise ConfigError(
                f"StochasticWeightAveraging.swa_lrs has {len(self.swa_lrs)} rates, and the"
                f" optimizers have {num_groups} parameter groups. Give one number, or one per"
                " group."
            )

    def on_train_epoch_start(self, trainer: RunView, task: Task) -> None:
        epochs = trainer.current_epoch - self._start
        if epochs < 0:
            return
        rates = trainer.rates
        if self._start_lrs is None:
            self._start_lrs = rates.unscaled()
            if trainer.is_global_zero:
                info(self._describe(trainer))
        part = self._annealed(epochs)
        lrs = [
            lr + (goal - lr) * part for lr, goal in zip(self._start_lrs, self._goals, strict=True)
        ]
        rates.hold(lrs, trainer.global_step - trainer.state.skipped_steps)

    def on_train_epoch_end(self, trainer: RunView, task: Task) -> None:
        if trainer.current_epoch >= self._start:
            self._update(task, None)

    def on_train_end(self, trainer: RunView, task: Task) -> None:
        """Put the average into the model; recompute its norm statistics and validate it."""
        if self._average is None:
            if trainer.is_global_zero:
                warning(
                    f"SWA: the run ended before the end of epoch {self._start + 1}: there is no"
                    " average."
                )
            return
        self._show(trainer, task)
        recompute_norm_statistics(trainer, task)
        values = trainer.evaluator.validate()
        trainer.callback_metrics.put(values, trainer.global_step)
        for policy in checkpoint_policies(trainer.callbacks):
            policy.renew()
        if trainer.is_global_zero:
            shown = "".join(f"  {name} {value:.4g}" for name, value in values.items())
            info(
                f"SWA: the model holds the average of {self._average.num_updates} epochs'"
                f" weights.{shown}"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the average's state, its first epoch, and the rates at that time."""
        return super().state_dict() | {"start": self._start, "start_lrs": self._start_lrs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._start, self._start_lrs = state_dict["start"], state_dict["start_lrs"]

    @property
    def _goals(self) -> list[float]:
        assert self._start_lrs is not None
        return (
            list(self.swa_lrs)
            if isinstance(self.swa_lrs, (list, tuple))
            else [self.swa_lrs] * len(self._start_lrs)
        )

    def _annealed(self, epochs: int) -> float:
        """Return the annealed fraction of the rate's change (torch.optim.swa_utils.SWALR)."""
        part = min(1.0, epochs / self.annealing_epochs) if self.annealing_epochs else 1.0
        return part if self.annealing_strategy == "linear" else (1 - math.cos(math.pi * part)) / 2

    def _first_epoch(self, max_epochs: int | None) -> int:
        key = f"StochasticWeightAveraging.swa_epoch_start is {self.swa_epoch_start}"
        start = self.swa_epoch_start
        if isinstance(start, float):
            if max_epochs is None:
                raise ConfigError(
                    f"{key}, a fraction of trainer.max_epochs, which is not set. Set it, or give a"
                    " count."
                )
            start = int(max_epochs * start)
        if max_epochs is not None and start > max_epochs:
            raise ConfigError(
                f"{key}, and trainer.max_epochs is {max_epochs}: averaging would never begin. Use a"
                " smaller one."
            )
        return max(0, int(start) - 1)

    def _describe(self, trainer: RunView) -> str:
        assert self._start_lrs is not None
        factor = trainer.rates.factor
        pairs = dict.fromkeys(zip(self._start_lrs, self._goals, strict=True))
        rates = ", ".join(
            f"{lr * factor:.4g} -> {goal:g} x {factor:g} = {goal * factor:.4g}"
            for lr, goal in pairs
        )
        over = (
            f"over {self.annealing_epochs} epochs ({self.annealing_strategy})"
            if self.annealing_epochs
            else "at once"
        )
        return (
            f"SWA from epoch {trainer.current_epoch + 1}: learning rate {rates} {over}; the"
            " schedulers stop."
        )
