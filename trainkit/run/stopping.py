"""Stopping: ends a run early, between two steps, on all ranks at the same one.

After a signal to any rank, all save a checkpoint, wait for the disk, and raise Preempted, or
CheckpointError if this start could write none. In an elastic run only the rank that received it
leaves, and the others form new ranks without it; they do too if the launcher requests other ranks.
If it is of the only replica of split weights, all save first.
"""

from __future__ import annotations

from types import TracebackType
from typing import NoReturn

from trainkit.api.view import RunView
from trainkit.callbacks.checkpoint import checkpoint_policies
from trainkit.engine.coordinator import Coordinator
from trainkit.engine.ranks import RanksChanged
from trainkit.engine.signals import Signals
from trainkit.errors import Preempted
from trainkit.run.elastic import ElasticState


class Stopping:
    """See the module. A context manager: within it, signals are recorded."""

    def __init__(
        self, run: RunView, signals: Signals, coordinator: Coordinator, elastic: ElasticState | None
    ) -> None:
        self._run = run
        self.signals = signals
        self._coordinator = coordinator
        self._elastic = elastic
        self._was_signalled = False

    def __enter__(self) -> Stopping:
        self.signals.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.signals.__exit__()

    def check(self) -> None:
        """End the run if it must end. Call it on all ranks, once between two steps or batches.

        Raises:
            Preempted: all ranks end, with a checkpoint; or this rank leaves an elastic run.
            RanksChanged: other ranks take over an elastic run from here.
        """
        if not self._coordinator.count_round():
            return
        signalled = self._coordinator.num_signalled
        if self._elastic is None or signalled == self._run.world_size:
            self._end_with_checkpoint()
        if signalled and not self._was_signalled:
            self._was_signalled = True  # the other ranks may be about to receive the same signal
            return
        self._elastic.commit()
        step = self._run.global_step
        ranks = self._run.engine.ranks
        others = "the others continue."
        if signalled and ranks.replica_size == ranks.world_size and not ranks.copies:
            self._save()  # its part of the weights leaves with it
            others = "with it went a part of the weights: the run resumes from its checkpoint."
        if self._coordinator.includes_this_rank:
            raise Preempted(f"{self.signals.received}: this rank left after step {step}; {others}")
        raise RanksChanged(f"The ranks are formed again after step {step}.")

    def _end_with_checkpoint(self) -> NoReturn:
        run, engine = self._run, self._run.engine
        received: list[str | None] = engine.comm.all_gather_object(self.signals.received)
        requested, written = self._save()
        # a launcher ends all ranks when the first one leaves: rank 0 has written by then
        engine.comm.barrier()
        from_where = ", ".join(
            f"{name} on rank {rank}" for rank, name in enumerate(received) if name
        )
        how = f"to resume: ckpt_path=last run_dir={run.run_dir}"
        if not written:
            how = (
                "its checkpoint was NOT written; older ones are left."
                if requested
                else "no checkpoint was requested."
            )
        text = f"{from_where}: the run ended after step {run.global_step}; {how}"
        run.say(text)
        if requested and not written:
            run.checkpoints.require_one()  # another start would train the same steps, in vain
        raise Preempted(text)

    def _save(self) -> tuple[bool, bool]:
        """Save a checkpoint; return whether one is requested, and whether it was written."""
        run = self._run
        full = [
            policy for policy in checkpoint_policies(run.callbacks) if not policy.save_weights_only
        ]
        return bool(full), any([policy.save_now(run) for policy in full])  # noqa: C419 - each one saves
