"""SavingSession: what a fit does about its checkpoints: save, go on from one, and end early with one.

save        hooks -> each rank's own part gathered -> weights and states copied to the host -> a thread writes (writer.py)
resume      rank 0 finds and verifies (finding.py) -> everybody is told -> states back in place -> contracts compared
a signal    noticed by the pulse, at the same step on all ranks -> save -> wait for the disk -> Preempted
an error    rank 0 alone saves what there was before the step that failed, where a ModelCheckpoint asks for it
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor

from trainkit import loop, metric_objects
from trainkit.callbacks.checkpoint import ModelCheckpoint, keepers
from trainkit.checkpoint import contents
from trainkit.checkpoint.finding import load
from trainkit.checkpoint.format import Snapshot
from trainkit.checkpoint.store import Store
from trainkit.checkpoint.writer import Writer
from trainkit.data.order import mix
from trainkit.engine.base import PeerError
from trainkit.errors import Preempted, TaskError, TrainkitError
from trainkit.loop import Run
from trainkit.metrics import MetricLog
from trainkit.optim.contract import Contract
from trainkit.pulse import Pulse
from trainkit.session import Session, seed_everything
from trainkit.signals import Signals

MEMORY = "memory"  # where a run goes on from whose ranks have changed; see elastic.py


@dataclass(frozen=True)
class _Begun:
    """Where a step began, so that one that failed can be undone."""

    step: int
    batch_idx: int
    log: MetricLog
    random: dict[str, Any]
    buffers: dict[str, Tensor]
    undo_metrics: Callable[[], None]


class SavingSession(Session):
    """A Session with checkpoints; `run` and `contract` are there once a fit is built."""

    run: Run
    contract: Contract

    def __init__(self, *args: Any) -> None:
        """See Session."""
        super().__init__(*args)
        self.writer, self.signals = Writer(), Signals()
        self.writer.get_on = self._get_on
        self.pulse = Pulse(self.engine, self.signals)
        self.num_validations = 0
        self._unwritten: list[str] = []
        self._begun: _Begun | None = None
        self.saves_alone = False  # whether rank 0 saves without the others
        self._part_before: dict[str, Any] | None = None  # of this rank, as of before the validation that is going on

    def _tear_down(self, error: BaseException | None) -> None:
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
        self.engine.whereabouts.progress += 1

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
            self.engine.broadcast_tensors(self.task.buffers())
        with self._collected(weights_only) as training:
            if self.engine.is_main:
                snapshot = self.writer.snapshot(tensors_of(self.task), training, self._about())
        if self.engine.is_main:
            self.writer.start(lambda: settle(self._write(store, name, snapshot)))

    @contextlib.contextmanager
    def _collected(self, weights_only: bool = False, for_all: bool = False) -> Iterator[dict[str, Any] | None]:
        """Within the context the task's weights are those to be saved; yield what is saved beside them.

        Args:
            weights_only: yield None.
            for_all: any rank is to go on from it as if it were rank 0, whose callbacks alone know of the run's files.
        """
        extra: dict[str, Any] = {}
        try:
            self.hooks("on_save_checkpoint", extra)
            training = None
            if not weights_only:
                part = self._part_before or contents.own_part(self.run)
                if for_all and self.engine.is_main:
                    part = part | {"of_rank_0": contents.without_tensors(contents.of_callbacks(self.trainer.callbacks, extra))}
                ranks = [part] if self.saves_alone else self.engine.all_gather_object(part)
                training = contents.gather(self.run, self.trainer.callbacks, extra, ranks)
                training |= {"contract": self.contract.to_dict(), "validations": self.num_validations}
                if for_all:
                    training |= contents.with_tensors(ranks[0]["of_rank_0"], training)
            yield training
        finally:
            self.hooks("on_save_checkpoint_end")

    def _about(self) -> dict[str, Any]:
        about: dict[str, Any] = {"epoch": self.state.current_epoch, "global_step": self.state.global_step}
        about |= {"metrics": dict(self.trainer.callback_metrics), "contract": self.contract.to_dict()}
        return about | {"versions": contents.versions(), "config": self.trainer.config}

    def _write(self, store: Store, name: str, snapshot: Snapshot) -> bool:
        """Write, in the writing thread; whatever keeps a checkpoint from being written does not end training."""
        try:
            store.write(name, snapshot)
        except Exception as error:  # whatever a disk, a remote library or a strange tensor raises: the run is worth more
            self._unwritten.append(store.path_of(name))
            print(f"The checkpoint {store.path_of(name)} was NOT written: {_told(error)}. Training goes on.", flush=True)
            return False
        return True

    # -- resume -----------------------------------------------------------------------------------------------------

    def _find(self, ckpt_path: str | None) -> dict[str, Any] | None:
        """Load on rank 0 the weights that the run goes on from; return what was kept beside them, on all ranks.

        The state of optimizers stays on rank 0, whose `engine.prepare` sends it on; the others get its settings alone.

        Returns:
            None where there is nothing to go on from, and "auto" or nothing was asked for.
        """
        if not self._may_go_on(ckpt_path):
            return None
        states: list[dict[str, Any]] = []

        def read() -> tuple[str, dict[str, Any]] | None:
            found = self._read_training(ckpt_path)
            if found is None:
                return None
            path, training = found
            states.extend(training["optimizers"])
            settings = [{"state": {}, "param_groups": state["param_groups"]} for state in states]
            return path, training | {"optimizers": settings}

        found = self.engine.run_on_main(read)
        if found is None:
            return None
        self.resumed_from, saved = found
        return saved | {"optimizers": states} if states else saved  # type: ignore[no-any-return]

    @property
    def goes_on_from_memory(self) -> bool:
        """Whether the run goes on from what a process kept in memory while ranks changed."""
        return self.resumed_from == MEMORY

    @property
    def goes_on_in_place(self) -> bool:
        """Whether the run goes on from its own checkpoint, or from memory, and not from another run's."""
        source = self.resumed_from or ""
        return self.goes_on_from_memory or any(source.startswith(f"{store.place}/") for store in self.stores)

    def _may_go_on(self, ckpt_path: str | None) -> bool:
        """Whether there may be something to go on from; the same on all ranks."""
        return ckpt_path is not None

    def _read_training(self, ckpt_path: str | None) -> tuple[str, dict[str, Any]] | None:
        """Rank 0: load weights into the task; return where they came from and what was kept beside them."""
        assert ckpt_path is not None
        found = load(ckpt_path, self.stores, self.task, True, self.tell)
        return None if found is None else (found.path, found.training or {})

    def _put_back(self, saved: dict[str, Any]) -> None:
        """Put the run where it was when it was saved."""
        assert self.resumed_from is not None
        left = contents.restore(self.run, self.trainer.callbacks, saved)
        if left:
            self.tell(f"The checkpoint keeps what this run does not have: {', '.join(left)}. It goes on without.")
        if len(saved["random"]) != self.engine.world_size:  # others than those of the beginning, whose dropout was used
            seed_everything(mix(self.settings.seed, self.engine.rank, self.state.global_step))
        self.num_validations = saved["validations"]
        for keeper in [] if self.goes_on_from_memory else keepers(self.trainer.callbacks):
            if not self.resumed_from.startswith(f"{keeper.store.place}/"):
                keeper.renew()  # another run's: nothing of this step lies here yet
        if (before := len(saved["random"])) != self.engine.world_size and not self.goes_on_from_memory:
            self.tell(
                f"The checkpoint is of {before} rank{'s' * (before > 1)}, this run has {self.engine.world_size}: random "
                "numbers begin anew, all else goes on."
            )
        self._compare_contracts(Contract(**saved["contract"]))
        self.hooks("on_load_checkpoint", saved["extra"])

    def _compare_contracts(self, saved: Contract) -> None:
        """Say what changed since the checkpoint; inside an epoch, find the step that its samples led to."""
        state, changes = self.state, saved.differences(self.contract)
        before, now = saved.at(state.current_epoch), self.contract.at(state.current_epoch)
        known = before.global_batch_size is not None and now.global_batch_size is not None
        sizes = (before.global_batch_size, now.global_batch_size) if known else (before.accumulate, now.accumulate)
        if state.step_in_epoch and sizes[0] != sizes[1]:
            step, again = divmod(state.step_in_epoch * sizes[0], sizes[1])  # type: ignore[operator]
            state.step_in_epoch, state.batch_idx = step, step * now.accumulate
            what = "samples" if known else "microbatches of each rank"
            changes.append(f"step {step} of the epoch comes next, {again} {what} of it for the second time")
        elif before.accumulate != now.accumulate:
            state.batch_idx = state.step_in_epoch * now.accumulate
        if changes:
            self.tell(f"Other than in the checkpoint: {'; '.join(changes)}.")

    # -- end early --------------------------------------------------------------------------------------------------

    def check_pulse(self) -> None:
        """End the run with a checkpoint where a signal came to any rank.

        Raises:
            Preempted: it did.
        """
        if self.pulse.beat():
            self._end_with_checkpoint()

    def _end_with_checkpoint(self) -> NoReturn:
        came: list[str | None] = self.engine.all_gather_object(self.signals.received)
        full = [keeper for keeper in keepers(self.trainer.callbacks) if not keeper.save_weights_only]
        written = any(self._written_by(keeper) for keeper in full)
        self.engine.barrier()  # a launcher ends all ranks when the first one leaves: rank 0 has written by then
        who = ", ".join(f"{name} on rank {rank}" for rank, name in enumerate(came) if name)
        how = f"to go on: ckpt_path=last run_dir={self.run_dir}"
        if not written:
            how = "its checkpoint was NOT written; older ones are left." if full else "no checkpoint was asked for."
        text = f"{who}: the run ended after step {self.state.global_step}; {how}"
        self.tell(text)
        raise Preempted(text)

    def _written_by(self, keeper: ModelCheckpoint) -> bool:
        """Let a ModelCheckpoint save this step, unless it has; return whether it is on disk. Call it on all ranks."""
        if self.engine.broadcast_object(keeper.failed):
            keeper.renew()
        keeper.save(self.trainer, always=True)
        self.writer.wait()
        return not self.engine.broadcast_object(keeper.failed)

    def remember_step(self) -> None:
        """Note where this rank stands before a step, for `rescue`."""
        state = self.state
        buffers = {name: buffer.detach().clone() for name, buffer in self.task.named_buffers()}
        undo = metric_objects.remember(metric_objects.metrics_in(self.task))
        self._begun = _Begun(state.global_step, state.batch_idx, self.run.log.copy(), contents.random_state(), buffers, undo)

    def rescue(self, save: Callable[[], None]) -> None:
        """Let rank 0 save what there was before the step that failed; the other ranks may be anywhere."""
        if not self.engine.is_main or not hasattr(self, "run") or self.state.global_step == 0:
            return
        begun = self._begun
        if self.run.half_updated:
            print("No checkpoint of this error: it came while the weights were being changed.", flush=True)
            return
        part = contents.own_part(self.run)
        if begun is not None and begun.step == self.state.global_step:
            loop.forget_gradients(self.run, begun.log, begun.batch_idx)
            begun.undo_metrics()
            with torch.no_grad():
                for name, buffer in self.task.named_buffers():
                    buffer.copy_(begun.buffers[name])
            part = contents.own_part(self.run) | {"random": begun.random}
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


def tensors_of(task: Any) -> dict[str, Any]:
    """Return a Task's weights and buffers by name.

    Raises:
        TaskError: its state_dict holds something else.
    """
    state: dict[str, Any] = task.state_dict()
    if strange := [name for name, value in state.items() if not hasattr(value, "data_ptr")]:
        raise TaskError(
            f"{type(task).__name__}.state_dict()['{strange[0]}'] is a {type(state[strange[0]]).__name__}; weights are tensors. "
            "Keep other things in on_save_checkpoint."
        )
    return state
