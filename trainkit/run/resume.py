"""ResumingSession: how a fit goes on: from a checkpoint, or from what a process kept in memory (elastic.py).

rank 0 finds and verifies (finding.py), loads the weights -> everybody is told what was kept beside them -> the run is built by
the contract that holds -> states back in place -> contracts compared
"""

from __future__ import annotations

from typing import Any

from trainkit.callbacks.checkpoint import keepers
from trainkit.checkpoint import stateful
from trainkit.checkpoint.find import load
from trainkit.console import plural
from trainkit.data.order import mix
from trainkit.loop import Run
from trainkit.optim.batch_plan import Contract
from trainkit.run.setup import Session, seed_everything

MEMORY = "memory"  # where a run goes on from whose ranks have changed; see elastic.py


class ResumingSession(Session):
    """A Session that goes on; `run` and `contract` are there once a fit is built."""

    run: Run
    contract: Contract
    num_validations = 0

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

        found = self.engine.comm.run_on_main(read)
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
        left = stateful.restore(self.run, self.trainer.callbacks, saved)
        if left:
            self.tell(f"The checkpoint keeps what this run does not have: {', '.join(left)}. It goes on without.")
        if len(saved["random"]) != self.engine.ranks.world_size:  # others than those of the beginning, whose dropout was used
            seed_everything(mix(self.settings.seed, self.engine.ranks.rank, self.state.global_step))
        self.num_validations = saved["validations"]
        for keeper in [] if self.goes_on_from_memory else keepers(self.trainer.callbacks):
            if not self.resumed_from.startswith(f"{keeper.store.place}/"):
                keeper.renew()  # another run's: nothing of this step lies here yet
        if (before := len(saved["random"])) != self.engine.ranks.world_size and not self.goes_on_from_memory:
            self.tell(
                f"The checkpoint is of {plural(before, 'rank')}, this run has {self.engine.ranks.world_size}: random "
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
