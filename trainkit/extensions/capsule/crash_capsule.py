"""CrashCapsule: stores a failed step in a folder, to be replayed without the run and without its
data: `python -m trainkit replay runs/mine/capsules/step=180-rank=1`.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.arguments import NonNegativeInt, PositiveInt, checked
from trainkit.console import short, warning
from trainkit.device.sync_guard import allowed_read
from trainkit.errors import DivergenceError, EngineError, clause
from trainkit.extensions.capsule.async_losses import AsyncLosses
from trainkit.extensions.capsule.folder import FOLDER, write
from trainkit.extensions.capsule.step_record import (
    BufferCopies,
    StepRecord,
    Taken,
    about,
    as_stored,
    last_checkpoint,
    raw_random,
)


@checked
class CrashCapsule(Callback):
    """Writes a step of this rank to `<run_dir>/capsules/step=<n>-rank=<r>/` if its loss is not
    finite, if its update made weights non-finite, if SpikeDetection reports it, or if an error
    within the step ends the run. Under `automatic_optimization = False` it is a batch, and the
    folder's name has the number of batches before it too: `step=<n>-batch=<b>-rank=<r>`.

    A capsule holds the microbatches, the random states before each, the loss scale, the config, and
    the weights if they are still those of the step. They are on the CPU and with
    trainer.stop_on_nonfinite; on a GPU, whose losses arrive some steps later, and for a step whose
    update is the cause, it names the last checkpoint instead. Until there is one, the host keeps a
    copy of the weights that training started from, and the capsule holds those. `step=N` is the
    step after N steps, as in the errors about losses.

    No step waits for the device. The last `keep` steps' microbatches stay in memory (references: as
    many more batches on the device), the buffers that a checkpoint contains are copied at each
    step's start, and the random states are recorded before each microbatch, which takes about 0.1
    ms. A batch that training_step changes in place is stored in its changed form.

    Args:
        keep: steps retained in memory; on a GPU, the number of steps by which the host may be ahead
            when a bad loss arrives.
        max_capsules: capsules that a rank writes per start of the run; 0 for none.
        on_error: write one for any error that ends the run within a step, not only for losses.
    """

    config_key = "callbacks.capsule"
    needs_of_engine = frozenset({"weights", "layers"})

    def __init__(
        self, keep: PositiveInt = 4, max_capsules: NonNegativeInt = 3, on_error: bool = True
    ) -> None:
        self.keep = keep
        self.max_capsules = max_capsules
        self.on_error = on_error
        self.written: list[str] = []
        self._ring: deque[StepRecord] = deque(maxlen=keep)
        self._late: AsyncLosses | None = None
        self._start: dict[str, Tensor] | None = None

    def on_train_start(self, trainer: RunView, task: Task) -> None:
        self._ring.clear()
        self.written = []
        self._failed = False
        self._was_bad = False
        self._late = AsyncLosses(trainer.engine.device)
        self._buffers = BufferCopies(task)
        self._start = None
        self._start_step = trainer.global_step
        if last_checkpoint(trainer) is None:
            self._start = {
                name: value.detach().to("cpu", copy=True) for name, value in _tensors(task).items()
            }

    def on_train_step_start(self, trainer: RunView, task: Task) -> None:
        state = trainer.state
        with allowed_read():  # only fp16 reads its scale, and the last update waited for it already
            scaler = trainer.precision.scaler.state_dict()
        groups = [
            [_numbers(group) for group in optimizer.param_groups]
            for optimizer in trainer.optimizers
        ]
        record = StepRecord(
            state.loop_steps,
            state.global_step,
            state.current_epoch,
            state.step_in_epoch,
            dict(scaler),
            groups,
            pieces=state.oom_pieces,
        )
        self._ring.append(record)
        self._losses.begin_step()
        self._buffers.update()

    def on_train_batch_start(
        self, trainer: RunView, task: Task, batch: Any, batch_idx: int
    ) -> None:
        record = self._ring[-1]
        pieces = trainer.state.oom_pieces
        target = task._log_target
        if pieces != record.pieces:  # the step is repeated
            record.pieces = pieces
            record.taken.clear()
        assert target is not None, "the loop has set it"
        record.taken.append(Taken(batch, target.num_samples, batch_idx, raw_random()))

    def on_before_backward(self, trainer: RunView, task: Task, loss: Any) -> None:
        taken = self._ring[-1].taken[-1]
        taken.loss = loss.detach().clone()  # a CUDA graph overwrites it with the next loss
        self._losses.add(loss, taken.num_samples, self._ring[-1].pieces)

    def on_before_optimizer_step(self, trainer: RunView, task: Task, optimizer: Any) -> None:
        """Check the losses available so far:
        on the CPU this step's is, and the weights are still the step's.
        """
        if task.automatic_optimization and optimizer is trainer.optimizers[0]:
            self._losses.end_step(self._ring[-1].number)
            self._look(trainer, task, self._losses.ready())

    def on_train_step_end(self, trainer: RunView, task: Task) -> None:
        if not task.automatic_optimization:  # its updates may come before some of its losses
            self._losses.end_step(self._ring[-1].number)
        self._look(trainer, task, self._losses.ready())

    def on_train_end(self, trainer: RunView, task: Task) -> None:
        """Check the last losses, and release the batches."""
        self._look(trainer, task, self._losses.drain())
        self._ring.clear()

    def on_save_checkpoint_end(self, trainer: RunView, task: Task) -> None:
        """Release the weights of the start once a checkpoint is newer."""
        if last_checkpoint(trainer) is not None:
            self._start = None

    def on_exception(self, trainer: RunView, task: Task, exception: BaseException) -> None:
        """Write the failed step if this rank failed in it:
        an EngineError of the ranks or the launcher belongs to no step.
        """
        if isinstance(exception, Exception) and not isinstance(exception, EngineError):
            self._keep_failed(trainer, exception)
        self._ring.clear()
        # it is raised on all ranks at one step
        if isinstance(exception, DivergenceError) and trainer.world_size > 1:
            with contextlib.suppress(EngineError):
                # the first exit ends all ranks: wait for ranks that still write
                trainer.engine.comm.barrier()

    def _keep_failed(self, trainer: RunView, exception: Exception) -> None:
        record = self._ring[-1] if self._ring else None
        now = (trainer.state.current_epoch, trainer.state.step_in_epoch)
        if record is None or (record.epoch, record.step_in_epoch) != now or not record.taken:
            return
        bad: list[float] = []

        def look() -> None:  # after a GPU error the losses cannot be read
            bad.extend(value for value in record.losses() if not math.isfinite(value))

        self._try(look)
        if bad and not self._was_bad:
            self.keep_step(trainer, record.number, f"the loss is {bad[0]}")
        elif self.on_error and not bad and not isinstance(exception, DivergenceError):
            self.keep_step(trainer, record.number, f"{type(exception).__name__}: {exception}")

    def keep_step(self, trainer: RunView, number: int, why: str) -> bool:
        """Write the step after `number` steps (batches, under `automatic_optimization = False`) if
        it is still in memory; return whether it was written. Waits for the device.
        """
        record = self._record_of(number)
        if record is None or len(self.written) >= self.max_capsules:
            return False
        step = record.step
        batch = "" if trainer.task.automatic_optimization else f"-batch={number}"
        folder = trainer.run_dir / FOLDER / f"step={step}{batch}-rank={trainer.global_rank}"
        if str(folder) in self.written:
            return False
        # a later batch of the same step has changed buffers
        own = record is self._ring[-1] and step == trainer.global_step
        own = own and not trainer.state.half_updated
        with allowed_read():
            weights, of_step = self._weights(trainer, step, own)
            done = self._try(
                lambda: write(
                    folder, about(trainer, record, why, of_step), as_stored(record), weights
                )
            )
        if done:
            self.written.append(str(folder))
            more = (
                ""
                if len(self.written) < self.max_capsules
                else f" No more will be written (max_capsules={self.max_capsules})."
            )
            what = f"step {step} on rank {trainer.global_rank} is stored ({why})"
            age = f" (with the weights of step {of_step}: there is no checkpoint yet)" * (
                of_step not in (None, step)
            )
            by_hand = not trainer.task.automatic_optimization  # replay takes no such step
            use = "It is in" if by_hand else "Replay it with: python -m trainkit replay"
            warning(f"Capsule: {what}. {use} {short(folder)}{age}{more}")
        return done

    def _record_of(self, number: int) -> StepRecord | None:
        # the newest: an epoch may end at a batch that is not trained on, and is not counted
        return next((record for record in reversed(self._ring) if record.number == number), None)

    @property
    def _losses(self) -> AsyncLosses:
        assert self._late is not None, "training has begun"
        return self._late

    def _look(self, trainer: RunView, task: Task, came: list[tuple[int, float]]) -> None:
        for number, loss in came:
            bad = not math.isfinite(loss)
            # non-finite weights stay so: report only the first step of a series
            if bad and not self._was_bad:
                record = self._record_of(number)
                is_now = record is not None and record.step == trainer.global_step
                if is_now and not are_finite(task):
                    self._keep_cause(trainer, trainer.global_step, loss)
                else:
                    self.keep_step(trainer, number, f"the loss is {loss}")
            self._was_bad = bad

    def _keep_cause(self, trainer: RunView, step: int, loss: float) -> None:
        """Write the step whose update made weights non-finite,
        unless a rank has stored it for its own loss.
        """
        why = f"its update made weights non-finite: the loss after it is {loss}"
        before = [record for record in self._ring if record.step < step]
        is_kept = before and any((trainer.run_dir / FOLDER).glob(f"step={before[-1].step}-*rank=*"))
        if not before or is_kept or not self.keep_step(trainer, before[-1].number, why):
            text = (
                f"The loss of rank {trainer.global_rank} is {loss} at step {step}, because weights"
                " are not finite."
            )
            warning(text)

    def _weights(
        self, trainer: RunView, step: int, own: bool
    ) -> tuple[dict[str, Tensor] | None, int | None]:
        """Return the weights to store, and their step:
        the step's own, else those of the start if there is no checkpoint.
        """
        if own:
            return _tensors(trainer.task) | self._buffers.copies, step
        return (self._start, self._start_step) if self._start is not None else (None, None)

    def _try(self, work: Callable[[], Any]) -> bool:
        """Run `work`, which fails on a full disk, a strange batch or a broken GPU;
        report only the first failure.
        """
        try:
            work()
        except Exception as error:
            if not self._failed:
                reason = (
                    str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                )
                warning(
                    f"A capsule could not be written: {clause(reason)}. The run continues without it."
                )
            self._failed = True
            return False
        return True


def _tensors(task: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in task.state_dict().items() if isinstance(value, Tensor)}


def are_finite(task: nn.Module) -> bool:
    """Return whether all weights are finite. Waits for the device."""
    with allowed_read():
        return all(bool(parameter.detach().isfinite().all()) for parameter in task.parameters())


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    """Return the plain settings of a parameter group: lr, momentum, betas, ..."""
    plain = (bool, int, float, str, type(None))
    return {
        key: value
        for key, value in group.items()
        if key != "params"
        and (
            isinstance(value, plain)
            or (isinstance(value, tuple) and all(isinstance(v, plain) for v in value))
        )
    }
