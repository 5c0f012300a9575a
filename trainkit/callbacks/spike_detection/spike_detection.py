"""SpikeDetection: notices a loss that leaps, or is not finite, without a step that waits for it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainkit.api.callback import Callback
from trainkit.arguments import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, checked
from trainkit.callbacks.crash_capsule.crash_capsule import CrashCapsule, are_finite
from trainkit.callbacks.crash_capsule.step_record import samples_of
from trainkit.callbacks.spike_detection.async_losses import LateLosses
from trainkit.callbacks.spike_detection.loss_baseline import Usual
from trainkit.device.sync_guard import allowed_read
from trainkit.errors import ConfigError

if TYPE_CHECKING:
    from trainkit.api.task import Task
    from trainkit.trainer import Trainer

_SHOWN = 64  # samples named at most


@checked
class SpikeDetection(Callback):
    """Looks at the loss of each step of this rank; where it leaps, or is not finite, says so with the step's samples, and has
    the step kept where there is a CrashCapsule. Of spikes in a row the first one is told.

    Each rank looks at its own microbatches, since a bad sample is one rank's. Nothing waits for the device: on a GPU a loss is
    looked at some steps later, when it has come (late_losses.py). See Usual for the rule.

    Args:
        mode: whether the loss should fall ("min") or rise ("max").
        window: losses that are looked back on.
        warmup: losses at the beginning of which none is a spike.
        atol: how far above the usual one a loss must be at least; None for no such limit.
        rtol: the same, as a multiple of the usual loss: with 2.0 a spike is three times the usual one.
        deviations: the same, in (robust) standard deviations of the last losses.
        exclude_batches_path: a JSON file that gets the samples of each spike, {"step", "rank", "loss", "usual", "samples"} a
            line, one file for each rank (its number is put before the suffix).
        finite_only: a loss that is not finite is a spike too.
        stop: end the run, on all ranks, at the next of the steps at which values are logged.

    Attributes:
        spikes: (step, loss, usual loss) of those of this start.
    """

    config_key = "callbacks.spikes"

    def __init__(
        self,
        mode: Literal["min", "max"] = "min",
        window: PositiveInt = 50,
        warmup: NonNegativeInt = 10,
        atol: NonNegativeFloat | None = None,
        rtol: PositiveFloat | None = 2.0,
        deviations: PositiveFloat | None = 6.0,
        exclude_batches_path: str | None = None,
        finite_only: bool = True,
        stop: bool = False,
    ) -> None:
        if atol is None and rtol is None and deviations is None:
            raise ConfigError(
                f"{self.config_key}: atol, rtol and deviations are all null: every rise would be a spike. Set one."
            )
        if window < 2:
            raise ConfigError(f"{self.config_key}.window is {window}; it must be 2 or more: a median of one says nothing.")
        self._rule = (mode, window, warmup, atol, rtol, deviations)
        self.exclude_batches_path, self.finite_only, self.stop = exclude_batches_path, finite_only, stop
        self.spikes: list[tuple[int, float, float | None]] = []
        self._usual = Usual(*self._rule)
        self._late: LateLosses | None = None

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Begin anew."""
        if stage == "fit":
            self.spikes, self._usual, self._late = [], Usual(*self._rule), None
            self._was_bad = False
            self._was_leaping, self._places, self._why_stop = False, dict[int, tuple[int, int]](), ""

    def on_train_step_start(self, trainer: Trainer, task: Task) -> None:
        """Note where a step is, to name its samples later."""
        state = trainer.state
        self._losses(trainer).begin_step()
        self._places[state.global_step] = (state.current_epoch, state.step_in_epoch)

    def on_before_backward(self, trainer: Trainer, task: Task, loss: Any) -> None:
        """Take a microbatch's loss."""
        target, halving = task._log_target, trainer.session.run.halving
        assert target is not None, "the loop has set it"
        self._losses(trainer).add(loss, target.num_samples, 1 if halving is None else halving.pieces)

    def on_before_optimizer_step(self, trainer: Trainer, task: Task, optimizer: Any) -> None:
        """Look at those that have come: on the CPU that of this step, whose weights a capsule can still keep."""
        if optimizer is trainer.session.run.optimizers[0]:
            self._losses(trainer).end_step(trainer.global_step)
            self._look(trainer, self._losses(trainer).ready())

    def on_train_step_end(self, trainer: Trainer, task: Task) -> None:
        """Stop where it was asked for; all ranks say then whether they have seen one."""
        if self.stop and trainer.global_step % trainer.settings.limits.log_every_n_steps == 0:
            self._look(trainer, self._losses(trainer).ready())
            if trainer.engine.comm.sum_number(int(bool(self._why_stop))):
                told = [text for text in trainer.engine.comm.all_gather_object(self._why_stop) if text]
                trainer.request_stop("; ".join(told[:4]))

    def on_train_end(self, trainer: Trainer, task: Task) -> None:
        """Look at the last ones."""
        self._look(trainer, self._losses(trainer).drain())

    def state_dict(self) -> dict[str, Any]:
        """Return what rank 0's losses usually are."""
        return self._usual.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it back; all ranks begin with rank 0's."""
        self._usual = Usual(*self._rule)
        self._usual.load_state_dict(state_dict)

    def _losses(self, trainer: Trainer) -> LateLosses:
        if self._late is None:
            self._late = LateLosses(trainer.engine.device)
        return self._late

    def _look(self, trainer: Trainer, came: Sequence[tuple[int, float]]) -> None:
        for step, loss in came:
            usual, bad = self._usual.median, not math.isfinite(loss)
            epoch, step_in_epoch = self._places.pop(step)
            for older in [known for known in self._places if known < step]:
                del self._places[older]  # a rank without samples in it has no loss
            leaps = self._usual.is_spike(loss) or (bad and self.finite_only)
            may_be_innocent = bad and (self._was_bad or step == trainer.global_step)
            spoilt = may_be_innocent and not are_finite(trainer.session.task)
            if spoilt and not self._was_bad:  # of those that follow nobody learns more
                text = f"the loss of rank {trainer.global_rank} is {loss} at step {step}, as weights are not finite"
                print(f"{text[0].upper()}{text[1:]}.", flush=True)
                self._why_stop = self._why_stop or text
            if leaps and not spoilt:
                with allowed_read():  # the order of samples is the host's
                    samples = samples_of(trainer, epoch, step_in_epoch)
                own = None if samples is None else [index for of_microbatch in samples for index in of_microbatch]
                self.spikes.append((step, loss, usual))
                self._note(trainer, step, loss, usual, own)
                if not self._was_leaping:
                    self._tell(trainer, step, loss, usual, own)
            self._was_leaping, self._was_bad = leaps, bad

    def _note(self, trainer: Trainer, step: int, loss: float, usual: float | None, samples: list[int] | None) -> None:
        if self.exclude_batches_path is None:
            return
        told: dict[str, Any] = {"step": step, "rank": trainer.global_rank, "loss": loss if math.isfinite(loss) else str(loss)}
        told |= {"usual": usual, "samples": samples}
        path = Path(self.exclude_batches_path)
        path = path.with_name(f"{path.stem}-rank={trainer.global_rank}{path.suffix}")
        trainer.session.try_files(lambda: _append(path, told), f"{path} could not be written")

    def _tell(self, trainer: Trainer, step: int, loss: float, usual: float | None, samples: list[int] | None) -> None:
        shown = "" if usual is None else f", usually {usual:.4g}"
        text = f"loss spike on rank {trainer.global_rank} at step {step}: {loss:.4g}{shown}"
        print(text[0].upper() + text[1:] + _named(samples), flush=True)
        self._why_stop = self._why_stop or text
        for capsule in trainer.callbacks:
            if isinstance(capsule, CrashCapsule):
                capsule.keep_step(trainer, step, text)


def _named(samples: list[int] | None) -> str:
    if samples is None:
        return "."
    return f". Samples {', '.join(map(str, samples[:_SHOWN]))}{', ...' * (len(samples) > _SHOWN)} of the data set."


def _append(path: Path, line: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
