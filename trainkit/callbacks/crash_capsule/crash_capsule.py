"""CrashCapsule: a step that went wrong, in a folder, so that it can be taken again without the run and without its data:
`python -m trainkit replay runs/mine/capsules/step=180-rank=1`.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainkit.api.callback import Callback
from trainkit.arguments import NonNegativeInt, PositiveInt, checked
from trainkit.callbacks.crash_capsule.step_record import BufferCopies, StepRecord, Taken, about, as_stored, raw_random
from trainkit.callbacks.spike_detection.async_losses import LateLosses
from trainkit.checkpoint.capsule import FOLDER, write
from trainkit.console import short
from trainkit.device.sync_guard import allowed_read
from trainkit.errors import DivergenceError, EngineError

if TYPE_CHECKING:
    from trainkit.api.task import Task
    from trainkit.trainer import Trainer


@checked
class CrashCapsule(Callback):
    """Writes a step of this rank to `<run_dir>/capsules/step=<n>-rank=<r>/` where its loss is not finite, where its update has
    left weights that are not, where SpikeDetection finds one, and where an error ends the run within a step.

    In it are the microbatches, the random states before each, the loss scale, the config, and the weights where they were still
    those of the step: on the CPU and with trainer.stop_on_nonfinite they are; on a GPU, whose losses are known some steps
    later, it names the last checkpoint instead. `step=N` is the step that came after N steps, as in the errors about losses.

    No step waits for the device. The last `keep` steps' microbatches stay in memory (references: as many more batches on the
    device), the buffers that a checkpoint keeps are copied at each step's start, and the random states are noted before each
    microbatch, which takes about 0.1 ms. A batch that training_step changes in place is kept as it is then.

    Args:
        keep: steps that are kept in memory; on a GPU, those by which the host may be ahead when a loss turns out to be bad.
        max_capsules: capsules that a rank writes in one start of the run; 0 for none.
        on_error: write one where any error ends the run within a step, not only for losses.
    """

    config_key = "callbacks.capsule"

    def __init__(self, keep: PositiveInt = 4, max_capsules: NonNegativeInt = 3, on_error: bool = True) -> None:
        self.keep, self.max_capsules, self.on_error = keep, max_capsules, on_error
        self.written: list[str] = []
        self._ring: deque[StepRecord] = deque(maxlen=keep)
        self._late: LateLosses | None = None

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        """Begin with nothing."""
        self._ring.clear()
        self.written, self._failed, self._was_bad = [], False, False
        self._late = LateLosses(trainer.engine.device)
        self._buffers = BufferCopies(task)

    def on_train_step_start(self, trainer: Trainer, task: Task) -> None:
        """Note where a step begins."""
        state, run = trainer.state, trainer.session.run
        with allowed_read():  # fp16 alone reads its scale, which it has waited for at the last update
            scaler = run.precision.scaler.state_dict()
        groups = [[_numbers(group) for group in optimizer.param_groups] for optimizer in run.optimizers]
        pieces = 1 if run.halving is None else run.halving.pieces
        record = StepRecord(state.global_step, state.current_epoch, state.step_in_epoch, dict(scaler), groups, pieces=pieces)
        self._ring.append(record)
        self._losses.begin_step()
        self._buffers.update()

    def on_train_batch_start(self, trainer: Trainer, task: Task, batch: Any, batch_idx: int) -> None:
        """Note a microbatch, and the random states that it begins with."""
        record, halving, target = self._ring[-1], trainer.session.run.halving, task._log_target
        if halving is not None and halving.pieces != record.pieces:  # the step is taken anew
            record.pieces = halving.pieces
            record.taken.clear()
        assert target is not None, "the loop has set it"
        record.taken.append(Taken(batch, target.num_samples, batch_idx, raw_random()))

    def on_before_backward(self, trainer: Trainer, task: Task, loss: Any) -> None:
        """Note its loss."""
        taken = self._ring[-1].taken[-1]
        taken.loss = loss.detach().clone()  # a CUDA graph writes the next one over it
        self._losses.add(loss, taken.num_samples, self._ring[-1].pieces)

    def on_before_optimizer_step(self, trainer: Trainer, task: Task, optimizer: Any) -> None:
        """Look at the losses that are known by now: what the CPU has computed is, and the weights are still the step's."""
        if optimizer is trainer.session.run.optimizers[0]:
            self._losses.end_step(trainer.global_step)
            self._look(trainer, task, self._losses.ready())

    def on_train_step_end(self, trainer: Trainer, task: Task) -> None:
        """Look again."""
        self._look(trainer, task, self._losses.ready())

    def on_train_end(self, trainer: Trainer, task: Task) -> None:
        """Look at the last ones, and let go of the batches."""
        self._look(trainer, task, self._losses.drain())
        self._ring.clear()

    def on_exception(self, trainer: Trainer, task: Task, exception: BaseException) -> None:
        """Write the step that failed, where it was this rank's: an error of the ranks or the launcher is none of a step."""
        if isinstance(exception, Exception) and not isinstance(exception, EngineError):
            self._keep_failed(trainer, exception)
        self._ring.clear()
        if isinstance(exception, DivergenceError) and trainer.world_size > 1:  # it is raised on all ranks at one step
            with contextlib.suppress(EngineError):
                trainer.engine.comm.barrier()  # the launcher ends all ranks with the first: no rank may still be writing

    def _keep_failed(self, trainer: Trainer, exception: Exception) -> None:
        record = self._ring[-1] if self._ring else None
        if record is None or record.step != trainer.global_step or not record.taken:
            return
        bad: list[float] = []

        def look() -> None:  # what a GPU has broken off cannot be read any more
            bad.extend(value for value in record.losses() if not math.isfinite(value))

        self._try(look)
        if bad and not self._was_bad:
            self.keep_step(trainer, record.step, f"the loss is {bad[0]}")
        elif self.on_error and not bad and not isinstance(exception, DivergenceError):
            self.keep_step(trainer, record.step, f"{type(exception).__name__}: {exception}")

    def keep_step(self, trainer: Trainer, step: int, why: str) -> bool:
        """Write a step that is still in memory; return whether it was written. It waits for the device.

        Args:
            trainer: whose run it is.
            step: the number of steps before it.
            why: for the manifest and the user.
        """
        record = next((record for record in self._ring if record.step == step), None)
        folder = trainer.run_dir / FOLDER / f"step={step}-rank={trainer.global_rank}"
        if record is None or str(folder) in self.written or len(self.written) >= self.max_capsules:
            return False
        own = step == trainer.global_step and not trainer.session.run.half_updated
        with allowed_read():
            done = self._try(
                lambda: write(folder, about(trainer, record, why, own), as_stored(record), self._weights(trainer, own))
            )
        if done:
            self.written.append(str(folder))
            more = (
                "" if len(self.written) < self.max_capsules else f" No more will be written (max_capsules={self.max_capsules})."
            )
            what = f"step {step} on rank {trainer.global_rank} is kept ({why})"
            print(f"Capsule: {what}. To take it again: python -m trainkit replay {short(folder)}{more}", flush=True)
        return done

    @property
    def _losses(self) -> LateLosses:
        assert self._late is not None, "training has begun"
        return self._late

    def _look(self, trainer: Trainer, task: Task, came: list[tuple[int, float]]) -> None:
        for step, loss in came:
            bad = not math.isfinite(loss)
            if bad and not self._was_bad:  # weights that are not finite stay so: of a spell the first step tells
                if step == trainer.global_step and not are_finite(task):
                    self._keep_cause(trainer, step, loss)
                else:
                    self.keep_step(trainer, step, f"the loss is {loss}")
            self._was_bad = bad

    def _keep_cause(self, trainer: Trainer, step: int, loss: float) -> None:
        """Write the step whose update has left weights that are not finite, where no rank has kept it for its own loss."""
        why = f"its update left weights that are not finite: the loss after it is {loss}"
        is_kept = any((trainer.run_dir / FOLDER).glob(f"step={step - 1}-rank=*"))
        if is_kept or not self.keep_step(trainer, step - 1, why):
            told = f"The loss of rank {trainer.global_rank} is {loss} at step {step}, as weights are not finite."
            print(told, flush=True)

    def _weights(self, trainer: Trainer, own: bool) -> dict[str, Tensor] | None:
        if not own:
            return None
        state = {name: value for name, value in trainer.session.task.state_dict().items() if isinstance(value, Tensor)}
        return state | self._buffers.copies

    def _try(self, work: Callable[[], Any]) -> bool:
        """Do what a full disk, a strange batch or a broken GPU may refuse; told once, and the run goes on."""
        try:
            work()
        except Exception as error:
            if not self._failed:
                told = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                print(f"A capsule could not be written: {told}. The run does not need it.", flush=True)
            self._failed = True
            return False
        return True


def are_finite(task: Task) -> bool:
    """Whether all weights are. Waits for the device."""
    with allowed_read():
        return all(bool(parameter.detach().isfinite().all()) for parameter in task.parameters())


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    """Return the plain settings of a parameter group: lr, momentum, betas, ..."""
    plain = (bool, int, float, str, type(None))
    return {
        key: value
        for key, value in group.items()
        if key != "params"
        and (isinstance(value, plain) or (isinstance(value, tuple) and all(isinstance(v, plain) for v in value)))
    }
