"""Elastic training: a fit goes on in its living processes when ranks die, leave or come.

    keep_going                  a fit, and again with the ranks that there are then, until it is done
        fit                     each time a session like any other, from the engine's start on
            go on from          rank 0's memory (the process with the newest commit is rank 0); else the run's newest checkpoint
            commit              each few steps all ranks keep in memory what a checkpoint would hold (callbacks/elastic.py)
            a rank is lost      a collective fails on the others: PeerError
            others are asked    the pulse tells all ranks at the same step: they commit, and RanksChanged

The contract of batch and learning rate is that of the run's beginning. A step stays the same samples, spread evenly over the
ranks that there are (data/plan.py), so that each sample of an epoch counts once, whatever happens to ranks. (A stream cannot be
dealt anew: each rank reads its own, and the user is told.)
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import TracebackType
from typing import Any

from trainkit.callbacks.elastic import Elastic
from trainkit.checkpoint import stateful
from trainkit.engine.collectives import PeerError
from trainkit.engine.gathering import Gathering
from trainkit.engine.ranks import RanksChanged
from trainkit.engine.states import whole_state
from trainkit.errors import ConfigError, Dismissed, EngineError, Preempted
from trainkit.optim.batch_plan import Contract
from trainkit.run.coordinator import Pulse
from trainkit.run.lock import RunLock
from trainkit.run.resume import MEMORY
from trainkit.run.saving import SavingSession

_LOCK_PATIENCE_S = 60.0  # a rank 0 that was dismissed may still write its last checkpoint
_FRUITLESS = 5  # recoveries without a step in between, after which an error is an error


class ElasticSession(SavingSession):
    """A SavingSession whose ranks may change between it and the next one of the same fit."""

    def __init__(self, *args: Any) -> None:
        """See Session."""
        super().__init__(*args)
        self.elastic: Elastic | None = next((c for c in self.trainer.callbacks if isinstance(c, Elastic)), None)
        self._was_signalled, self.is_set_up = False, False
        self._gathering = Gathering(self.engine.comm)
        if self.engine.ranks.is_elastic and self.elastic is None:
            raise ConfigError(
                "horovodrun started this job elastically (--min-np, --host-discovery-script), but its fit cannot go on when "
                "ranks change. Add callbacks=elastic (Trainer: callbacks=[trainkit.Elastic()]), or leave those options out."
            )
        if self.elastic is not None:
            self.engine.ranks.committed_step = self.elastic.memory.step
            self._folder_wish = self.elastic.run_dir or self._folder_wish
            self.signals = self.elastic.signals
            self.pulse = Pulse(self.engine, self.signals)
            if self.elastic.writing is not None:
                self.writer, self._unwritten = self.elastic.writing
                self.writer.get_on = self._get_on

    @property
    def is_elastic(self) -> bool:
        """Whether this fit goes on when its ranks change."""
        return self.elastic is not None and self.engine.ranks.is_elastic

    @property
    def _goes_on_here(self) -> bool:
        return self.elastic is not None and self.elastic.run_dir is not None

    def end(self, error: BaseException) -> None:
        """Do what the end of a fit owes the user, where no later session came so far as to do it."""
        if not isinstance(error, (Dismissed, Preempted)):
            self.hooks("on_exception", error)
        self.hooks.of_task("teardown", self.stage)
        if self._datamodule is not None:
            self._datamodule.teardown(self.stage)

    def _begin_stage(self) -> None:
        if self.elastic is not None and self.elastic.has_begun:
            self._has_data = self.elastic.has_data
            return
        super()._begin_stage()
        if self.elastic is not None:
            self.elastic.has_begun, self.elastic.has_data = True, self._has_data

    def _set_up(self) -> None:
        if not self.engine.ranks.is_main:
            self.writer.wait()  # of a rank 0 that is none any more: the files are another's from here on
        super()._set_up()
        self.is_set_up = True
        if self.elastic is not None:
            self.elastic.run_dir = self.run_dir

    def _claim(self) -> None:
        lock = self._stack.enter_context(RunLock())
        self.engine.comm.run_on_main(lambda: lock.take(self.run_dir, _LOCK_PATIENCE_S * self._goes_on_here))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stays = self.is_elastic and isinstance(error, (PeerError, RanksChanged))
        super().__exit__(kind, error, trace)

    def _is_orderly(self, error: BaseException | None) -> bool:
        return super()._is_orderly(error) or self._stays

    def let_go(self) -> None:
        """Drop what the loop worked with, so that its memory is free for the next session."""
        if self.elastic is not None:
            self.elastic.writing = self.writer, self._unwritten
        for name in ("run", "writer", "_val_data"):
            self.__dict__.pop(name, None)
        self._feeds.clear()
        if self.engine.device.type == "cuda":
            gc.collect()  # torch's schedulers and optimizers refer to each other

    # -- commit and go on -------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Keep in memory what a checkpoint would hold. Call it on all ranks."""
        assert self.elastic is not None
        with self._to_be_saved() as extra:
            others = stateful.of_callbacks(self.trainer.callbacks, extra)
            wait = self._gathering.start(stateful.packed_part(self._own_part(), others if self.engine.ranks.is_main else None))
            training, weights = self._beside_weights(others, []), whole_state(self.task)
            ranks = wait()  # first: where a rank is lost, the last commit is still there
            self.elastic.memory.keep(self.state.global_step, weights, training, ranks)

    def _may_go_on(self, ckpt_path: str | None) -> bool:
        if self.elastic is not None and self.engine.name == "ddp" and ckpt_path != "auto":
            raise ConfigError(
                "callbacks=elastic under torchrun, which starts all processes anew when one is lost: they would begin anew. "
                "Let them go on from the run's checkpoint: resume=auto run_dir=runs/mine (Trainer: ckpt_path='auto', run_dir)."
            )
        return super()._may_go_on(ckpt_path) or self.is_elastic

    def _read_training(self, ckpt_path: str | None) -> tuple[str, dict[str, Any]] | None:
        if self.is_elastic:
            assert self.elastic is not None
            if self.elastic.memory.step >= 0:
                return MEMORY, self.elastic.memory.load_into(self.task)
            # Nobody has anything in memory. Where rank 0 has come late, all others were lost; else the job begins.
            found = super()._read_training("auto") if self.engine.ranks.joins_late else None
            if found is not None or ckpt_path is None:
                return found
        return super()._read_training(ckpt_path)

    def _declared_ranks(self, saved: dict[str, Any] | None) -> int:
        """Return the number of ranks that the settings of batch and learning rate are meant for."""
        if self.elastic is None or saved is None:
            return self.engine.ranks.first_world_size if self.is_elastic else self.engine.ranks.world_size
        return Contract(**saved["contract"]).world_size

    # -- other ranks ------------------------------------------------------------------------------------------------

    def check_pulse(self) -> None:
        """End this session where ranks change, or the run where all are asked to end.

        Raises:
            RanksChanged: the launcher asks for other ranks, or some of them leave.
            Preempted: this rank leaves, or the run ends.
        """
        if not self.pulse.beat():
            return
        if not self.is_elastic or self.pulse.signalled == self.engine.ranks.world_size:
            self._end_with_checkpoint()
        if self.pulse.signalled and not self._was_signalled:
            self._was_signalled = True  # the others may be about to get the same signal
            return
        self.commit()
        if self.pulse.is_among_them:
            raise Preempted(f"{self.signals.received}: this rank left after step {self.state.global_step}; the others go on.")
        raise RanksChanged(f"The ranks are formed anew after step {self.state.global_step}.")


def keep_going(elastic: Elastic | None, fit: Callable[[], None], session: Callable[[], ElasticSession]) -> None:
    """Fit, and again for as long as all that happened is that ranks changed.

    Args:
        elastic: what makes a run elastic; None for a plain fit.
        fit: runs one session.
        session: returns the session that ran last.
    """
    if elastic is None:
        fit()
        return
    elastic.begin()
    fruitless, last = 0, -1
    before: ElasticSession | None = None
    try:
        while True:
            try:
                fit()
                break
            except (PeerError, RanksChanged) as change:
                if not session().is_elastic:
                    raise
                before = session() if session().is_set_up else before
                fruitless = 0 if elastic.memory.step > last or isinstance(change, RanksChanged) else fruitless + 1
                if fruitless == _FRUITLESS:
                    raise EngineError(
                        f"The ranks were formed anew {_FRUITLESS} times, and each time the run failed before it got on from "
                        f"step {last}. The last time: {change}"
                    ) from change
            last = elastic.memory.step
            session().engine.ranks.leave()
            session().let_go()
    except BaseException as error:
        if before is not None and (session() is before or not session().is_set_up):
            before.end(error)
        raise
    finally:
        elastic.begin()
