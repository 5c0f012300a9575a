"""SpikeDetection: detects a loss that jumps or is not finite, without blocking a step."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from trainkit.api.alerts import keep_alert
from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.arguments import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, checked
from trainkit.console import try_to_write, warning
from trainkit.device.sync_guard import allowed_read
from trainkit.errors import ConfigError
from trainkit.extensions.capsule.async_losses import AsyncLosses
from trainkit.extensions.capsule.crash_capsule import CrashCapsule, are_finite
from trainkit.extensions.capsule.loss_baseline import LossBaseline
from trainkit.extensions.capsule.step_record import samples_of
from trainkit.extensions.insight.log_steps import is_log_step

_SHOWN = 64  # maximum number of samples printed


@checked
class SpikeDetection(Callback):
    """Checks the loss of each step of this rank. If it jumps or is not finite, prints the step's
    samples, and makes a CrashCapsule in the list store the step. Of consecutive spikes only the
    first is reported.

    Each rank checks its own microbatches, since a bad sample is in one rank's. Nothing waits for
    the device: on a GPU a loss is checked when it arrives, some steps later (async_losses.py).
    LossBaseline holds the rule.

    Args:
        mode: "min" if the loss should fall, "max" if it should rise.
        window: number of losses in the baseline.
        warmup: losses at the beginning that are never spikes.
        atol: minimum distance of a spike from the usual loss; None for no such limit.
        rtol: the same, as a multiple of the usual loss: with 2.0 a spike is three times the usual
            loss.
        deviations: the same, in (robust) standard deviations of the last losses.
        exclude_batches_path: JSON file for the samples of spikes, one {"step", "rank", "loss",
            "usual", "samples"} per line, one file per rank (its number precedes the suffix).
        finite_only: treat a loss that is not finite as a spike.
        stop: end the run, on all ranks, at the next log step.

    Attributes:
        spikes: (step, loss, usual loss) of the spikes since this start.
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
                f"{self.config_key}: atol, rtol and deviations are all null: every rise would be a"
                " spike. Set one of them."
            )
        if window < 2:
            raise ConfigError(
                f"{self.config_key}.window is {window}; it must be 2 or more: one loss has no"
                " median."
            )
        self.mode = mode
        self.window = window
        self.warmup = warmup
        self.atol = atol
        self.rtol = rtol
        self.deviations = deviations
        self.exclude_batches_path = exclude_batches_path
        self.finite_only = finite_only
        self.stop = stop
        self.spikes: list[tuple[int, float, float | None]] = []
        self._usual = self._baseline()
        self._late: AsyncLosses | None = None

    def setup(self, trainer: RunView, task: Task, stage: str) -> None:
        if stage == "fit":
            self.spikes = []
            self._usual = self._baseline()
            self._late = None
            self._was_bad = False
            self._was_leaping = False
            self._places = dict[int, tuple[int, int, int]]()
            self._why_stop = ""

    def _baseline(self) -> LossBaseline:
        return LossBaseline(
            self.mode, self.window, self.warmup, self.atol, self.rtol, self.deviations
        )

    def on_train_step_start(self, trainer: RunView, task: Task) -> None:
        """Record a step's place, to find its samples later."""
        state = trainer.state
        self._losses(trainer).begin_step()
        self._number = state.loop_steps  # batches by hand may share a step
        place = (state.global_step, state.current_epoch, state.step_in_epoch)
        self._places[self._number] = place

    def on_before_backward(self, trainer: RunView, task: Task, loss: Any) -> None:
        target = task._log_target
        assert target is not None, "the loop has set it"
        self._losses(trainer).add(loss, target.num_samples, trainer.state.oom_pieces)

    def on_before_optimizer_step(self, trainer: RunView, task: Task, optimizer: Any) -> None:
        """Check the losses that have arrived:
        on the CPU this step's, whose weights a capsule can still store.
        """
        if task.automatic_optimization and optimizer is trainer.optimizers[0]:
            self._losses(trainer).end_step(self._number)
            self._look(trainer, self._losses(trainer).ready())

    def on_train_step_end(self, trainer: RunView, task: Task) -> None:
        """Stop if configured; at log steps all ranks exchange whether they found a spike."""
        if not task.automatic_optimization:  # its updates may come before some of its losses
            self._losses(trainer).end_step(self._number)
            self._look(trainer, self._losses(trainer).ready())
        if self.stop and is_log_step(trainer):
            self._look(trainer, self._losses(trainer).ready())
            if trainer.engine.comm.sum_number(int(bool(self._why_stop))):
                reasons = [
                    text for text in trainer.engine.comm.all_gather_object(self._why_stop) if text
                ]
                trainer.request_stop("; ".join(reasons[:4]))

    def on_train_end(self, trainer: RunView, task: Task) -> None:
        self._look(trainer, self._losses(trainer).drain())

    def state_dict(self) -> dict[str, Any]:
        """Return the baseline of rank 0's losses."""
        return self._usual.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it; all ranks start with rank 0's."""
        self._usual = self._baseline()
        self._usual.load_state_dict(state_dict)

    def _losses(self, trainer: RunView) -> AsyncLosses:
        if self._late is None:
            self._late = AsyncLosses(trainer.engine.device)
        return self._late

    def _look(self, trainer: RunView, came: Sequence[tuple[int, float]]) -> None:
        for number, loss in came:
            usual = self._usual.median
            bad = not math.isfinite(loss)
            step, epoch, step_in_epoch = self._places.pop(number)
            for older in [known for known in self._places if known < number]:
                del self._places[older]  # a step without samples on this rank has no loss
            leaps = self._usual.is_spike(loss) or (bad and self.finite_only)
            may_be_innocent = bad and (self._was_bad or step == trainer.global_step)
            spoilt = may_be_innocent and not are_finite(trainer.task)
            if spoilt and not self._was_bad:  # report only the first bad step of a series
                text = (
                    f"the loss of rank {trainer.global_rank} is {loss} at step {step}, because"
                    " weights are not finite"
                )
                warning(f"{text[0].upper()}{text[1:]}.")
                keep_alert(trainer, "non-finite", text)
                self._why_stop = self._why_stop or text
            if leaps and not spoilt:
                with allowed_read():  # the sample order is on the host
                    samples = samples_of(trainer, epoch, step_in_epoch)
                own = (
                    None
                    if samples is None
                    else [index for of_microbatch in samples for index in of_microbatch]
                )
                self.spikes.append((step, loss, usual))
                self._note(trainer, step, loss, usual, own)
                if not self._was_leaping:
                    text = self._report(trainer, step, loss, usual, own)
                    self._keep(trainer, number, text)
            self._was_leaping = leaps
            self._was_bad = bad

    def _note(
        self,
        trainer: RunView,
        step: int,
        loss: float,
        usual: float | None,
        samples: list[int] | None,
    ) -> None:
        if self.exclude_batches_path is None:
            return
        entry: dict[str, Any] = {
            "step": step,
            "rank": trainer.global_rank,
            "loss": loss if math.isfinite(loss) else str(loss),
        }
        entry |= {"usual": usual, "samples": samples}
        path = Path(self.exclude_batches_path)
        path = path.with_name(f"{path.stem}-rank={trainer.global_rank}{path.suffix}")
        try_to_write(lambda: _append(path, entry), f"{path} could not be written")

    def _report(
        self,
        trainer: RunView,
        step: int,
        loss: float,
        usual: float | None,
        samples: list[int] | None,
    ) -> str:
        shown = "" if usual is None else f", usually {usual:.4g}"
        text = f"loss spike on rank {trainer.global_rank} at step {step}: {loss:.4g}{shown}"
        warning(text[0].upper() + text[1:] + _named(samples))
        keep_alert(trainer, "spike", text + _named(samples))
        self._why_stop = self._why_stop or text
        return text

    def _keep(self, trainer: RunView, number: int, why: str) -> None:
        for capsule in trainer.callbacks:
            if isinstance(capsule, CrashCapsule):
                capsule.keep_step(trainer, number, why)


def _named(samples: list[int] | None) -> str:
    if samples is None:
        return "."
    return (
        f". Samples {', '.join(map(str, samples[:_SHOWN]))}{', ...' * (len(samples) > _SHOWN)} of"
        " the data set."
    )


def _append(path: Path, line: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
