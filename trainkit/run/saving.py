"""SavingSession: what a fit does about its checkpoints: save, and end early with one.

save        hooks -> each rank's own part gathered -> weights and states copied to the host -> a thread writes (writer.py)
a signal    noticed by the pulse, at the same step on all ranks -> save -> wait for the disk -> Preempted
an error    rank 0 alone saves what there was before the step that failed, where a ModelCheckpoint asks for it
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor

from trainkit import loop
from trainkit.callbacks.checkpoint import ModelCheckpoint, keepers
from trainkit.checkpoint import stateful
from trainkit.checkpoint.format import Snapshot
from trainkit.checkpoint.store import Store
from trainkit.checkpoint.writer import Writer
from trainkit.engine.collectives import PeerError
from trainkit.engine.states import whole_state
from trainkit.errors import Preempted, TrainkitError
from trainkit.metrics import objects as metric_objects
from trainkit.metrics.log import MetricLog
from trainkit.run.coordinator import Pulse
from trainkit.run.resume import ResumingSession
from trainkit.run.signals import Signals


@dataclass(frozen=True)
class _Begun:
    """Where a step began, so that one that failed can be undone."""

    step: int
    batch_idx: int
    log: MetricLog
    random: dict[str, Any]
    buffers: dict[str, Tensor]
    undo_metrics: Callable[[], None]


class SavingSession(ResumingSession):
    """A Session with checkpoints; `run` and `contract` are there once a fit is built."""

    def __init__(self, *args: Any) -> None:
        """See Session."""
        super().__init__(*args)
        self.writer, self.signals = Writer(), Signals()
        self.writer.get_on = self._get_on
        self.pulse = Pulse(self.engine, self.signals)
        self._unwritten: list[str] = []
        self._begun: _Begun | None = None
        self.saves_alone = False  # whether rank 0 saves without the others
        self._part_before: dict[str, Any] | None = None  # of this rank, as of before the validation that is going on

    def _tear_down(self, error: BaseException | None) -> None:
        if error is None and not self._stays:
            with contextlib.suppress(PeerError):  # a rank that is gone by now has done its part
                self.pulse.settle()  # nothing is under way when the next fit begins
        super()._tear_down(error)
        if self._stays:
            return  # the next session goes on with the writing
        try:
            self.finish_writing()
        except Exception as failed:
            if error is None:
                raise
            print(f"The last checkpoint failed too: {type(failed).__name__}: {failed}", flush=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, PeerError) and not self._stays:  # the launcher ends this rank: the one that failed has told why
            self.signals.raise_again()

    def _get_on(self) -> None:
        self.engine.heartbeat.progress += 1

    def finish_writing(self) -> None:
        """Wait for the last checkpoint, and say once more what the disk did not take."""
        self.writer.wait()
        if self._unwritten:
            print(f"Checkpoints that were NOT written: {', '.join(self._unwritten)}.", flush=True)
            self._unwritten.clear()

    def try_files(self, work: Callable[[], Any], problem: str) -> None:
        """Do what a disk may refuse, and say so where it does."""
        try:
            work()
        except OSError as error:
            print(f"{problem}: {error}. Training goes on.", flush=True)

    # -- save -------------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, store: Store, name: str, weights_only: bool = False, settle: Callable[[bool], None] = lambda written: None
    ) -> None:
        """Copy what a checkpoint is made of to the host, and write it beside training. Call it on all ranks.

        Args:
            store: where.
            name: its name there.
            weights_only: leave out what a run needs to go on.
            settle: is called on rank 0, in the writing thread, with whether it was written.
        """
        if not self.saves_alone:
            self.engine.comm.broadcast_tensors(self.task.buffers())
        with self._to_be_saved() as extra:
            training = None
            if not weights_only:
                part = self._own_part()
                ranks = [part] if self.saves_alone else self.engine.comm.all_gather_object(part)
                training = self._beside_weights(stateful.of_callbacks(self.trainer.callbacks, extra), ranks)
            if self.engine.ranks.is_main:
                snapshot = self.writer.snapshot(whole_state(self.task), training, self._about())
        if self.engine.ranks.is_main:
            self.writer.start(lambda: settle(self._write(store, name, snapshot)))

    @contextlib.contextmanager
    def _to_be_saved(self) -> Iterator[dict[str, Any]]:
        """Within the context the task's weights are those to be saved; yield what hooks add to them."""
        extra: dict[str, Any] = {}
        try:
            self.hooks("on_save_checkpoint", extra)
            yield extra
        finally:
            self.hooks("on_save_checkpoint_end")

    def _own_part(self) -> dict[str, Any]:
        """Return what is saved of this rank alone."""
        return self._part_before or stateful.own_part(self.run)

    def _beside_weights(self, others: dict[str, Any], ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return what is saved beside the weights: see stateful.gather."""
        training = stateful.gather(self.run, others, ranks)
        return training | {"contract": self.contract.to_dict(), "validations": self.num_validations}

    def _about(self) -> dict[str, Any]:
        about: dict[str, Any] = {"epoch": self.state.current_epoch, "global_step": self.state.global_step}
        about |= {"metrics": dict(self.trainer.callback_metrics), "contract": self.contract.to_dict()}
        return about | {"versions": stateful.versions(), "config": self.trainer.config}

    def _write(self, store: Store, name: str, snapshot: Snapshot) -> bool:
        """Write, in the writing thread; whatever keeps a checkpoint from being written does not end training."""
        try:
            store.write(name, snapshot)
        except Exception as error:  # whatever a disk, a remote library or a strange tensor raises: the run is worth more
            self._unwritten.append(store.path_of(name))
            print(f"The checkpoint {store.path_of(name)} was NOT written: {_told(error)}. Training goes on.", flush=True)
            return False
        return True

    # -- end early --------------------------------------------------------------------------------------------------

    def check_pulse(self) -> None:
        """End the run with a checkpoint where a signal came to any rank.

        Raises:
            Preempted: it did.
        """
        if self.pulse.beat():
            self._end_with_checkpoint()

    def _end_with_checkpoint(self) -> NoReturn:
        came: list[str | None] = self.engine.comm.all_gather_object(self.signals.received)
        full = [keeper for keeper in keepers(self.trainer.callbacks) if not keeper.save_weights_only]
        written = any(self._written_by(keeper) for keeper in full)
        self.engine.comm.barrier()  # a launcher ends all ranks when the first one leaves: rank 0 has written by then
        who = ", ".join(f"{name} on rank {rank}" for rank, name in enumerate(came) if name)
        how = f"to go on: ckpt_path=last run_dir={self.run_dir}"
        if not written:
            how = "its checkpoint was NOT written; older ones are left." if full else "no checkpoint was asked for."
        text = f"{who}: the run ended after step {self.state.global_step}; {how}"
        self.tell(text)
        raise Preempted(text)

    def _written_by(self, keeper: ModelCheckpoint) -> bool:
        """Let a ModelCheckpoint save this step, unless it has; return whether it is on disk. Call it on all ranks."""
        if self.engine.comm.broadcast_object(keeper.failed):
            keeper.renew()
        keeper.save(self.trainer, always=True)
        self.writer.wait()
        return not self.engine.comm.broadcast_object(keeper.failed)

    def remember_step(self) -> None:
        """Note where this rank stands before a step, for `rescue`."""
        state = self.state
        buffers = {name: buffer.detach().clone() for name, buffer in self.task.named_buffers()}
        undo = metric_objects.remember(metric_objects.metrics_in(self.task))
        self._begun = _Begun(state.global_step, state.batch_idx, self.run.log.copy(), stateful.random_state(), buffers, undo)

    def rescue(self, save: Callable[[], None]) -> None:
        """Let rank 0 save what there was before the step that failed; the other ranks may be anywhere."""
        if not self.engine.ranks.is_main or not hasattr(self, "run") or self.state.global_step == 0:
            return
        begun = self._begun
        if self.run.half_updated:
            print("No checkpoint of this error: it came while the weights were being changed.", flush=True)
            return
        part = stateful.own_part(self.run)
        if begun is not None and begun.step == self.state.global_step:
            loop.forget_gradients(self.run, begun.log, begun.batch_idx)
            begun.undo_metrics()
            with torch.no_grad():
                for name, buffer in self.task.named_buffers():
                    buffer.copy_(begun.buffers[name])
            part = stateful.own_part(self.run) | {"random": begun.random}
        self._part_before = self._part_before or part
        self.saves_alone = True
        try:
            save()
            self.finish_writing()
        except Exception as error:  # the first error is the one to tell
            print(f"No checkpoint of this error: {_told(error)}", flush=True)
        finally:
            self.saves_alone = False


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, (OSError, TrainkitError)) else f"{type(error).__name__}: {error}"
