"""CheckpointManager: saves and restores named parts of a run; a thread writes beside training.

save      rank-local parts gathered -> weights and parts copied to the host -> a thread writes, sets links, removes old ones
find      rank 0 finds and verifies (find.py) and loads the weights -> the rest is sent to all ranks
restore   each part takes its own back
rescue    after an error rank 0 alone saves the state from before the step that failed

It knows parts with `state_dict`, and neither a run nor a callback. Which checkpoints are written,
and which stay, is the policy's (callbacks/checkpoint.py).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.checkpoint import split
from trainkit.checkpoint.contents import GRADIENTS, NOTHING, OWN, AfterWriting, Contents, StepUndo
from trainkit.checkpoint.find import Difference, Loaded, Say, as_any, later, locate, read
from trainkit.checkpoint.format import Snapshot, load_weights
from trainkit.checkpoint.parts import RankFile, report
from trainkit.checkpoint.stateful import require_plain
from trainkit.checkpoint.store import LeaseLost, Store
from trainkit.checkpoint.writer import Writer
from trainkit.console import warning
from trainkit.engine.base import Engine
from trainkit.engine.collectives import PeerError
from trainkit.errors import CheckpointError, TrainkitError, clause
from trainkit.optim.optimizer_state import is_torchs
from trainkit.optim.scheduler_state import with_plain_numbers

# Takes what was saved beside the weights, and those by name (on ranks that do not hold them, without
# values: on the device "meta"); returns the weights to load. Call it on all ranks.
Change = Callable[[dict[str, Any], dict[str, Tensor]], dict[str, Tensor]]
MEMORY = "memory"  # the source of a run that resumes from host memory after its ranks changed


class CheckpointManager:
    """See the module.

    Attributes:
        stores: where this run's checkpoints are, those of policies first.
        resumed_from: the checkpoint that this run resumed from, MEMORY, or None.
        saves_alone: whether rank 0 saves without the other ranks, after an error.
        opened: the checkpoint of which each rank reads its part, until it is closed.
    """

    def __init__(
        self,
        engine: Engine,
        stores: Sequence[Store],
        say: Say,
        writer: Writer | None = None,
        difference: Difference = as_any,
    ) -> None:
        self._engine = engine
        self.stores = list(stores)
        self._say = say
        self._difference = difference
        self.writer = writer or Writer()
        self.resumed_from: str | None = None
        self.saves_alone = False
        self._contents: Contents | None = None
        self._undo: StepUndo | None = None
        self._held_parts: dict[str, Any] | None = None
        self._was_finite = True
        self._written = ""  # when the last one was
        self.opened: split.Opened | None = None

    def connect(self, contents: Contents, undo: StepUndo | None = None) -> None:
        """Take the parts of a run that was built."""
        self._contents = contents
        self._undo = undo

    @property
    def contents(self) -> Contents:
        """The parts.

        Raises:
            CheckpointError: no fit has been built.
        """
        if self._contents is None:
            raise CheckpointError(
                "There is nothing to save: a checkpoint holds a fit, and none has been built yet."
            )
        return self._contents

    @property
    def resumed_from_memory(self) -> bool:
        """Whether the run resumed from host memory after ranks changed."""
        return self.resumed_from == MEMORY

    @property
    def resumed_in_place(self) -> bool:
        """Whether the run resumed from its own checkpoint, or from memory,
        and not from another run's checkpoint.
        """
        source = self.resumed_from or ""
        return self.resumed_from_memory or any(
            source.startswith(f"{store.place}/") for store in self.stores
        )

    def save(
        self, store: Store, name: str, weights_only: bool = False, changes: AfterWriting = NOTHING
    ) -> Future[bool]:
        """Copy a checkpoint to the host, and write it beside training. Call it on all ranks.

        Args:
            weights_only: leave out everything that a run needs to resume.
            changes: links and removals that follow, if it was written.

        Returns:
            A future, on rank 0: whether it was written (a full disk does not end training). On
            other ranks it is done, and true.
        """
        contents, outcome = self.contents, Future[bool]()
        if not self.saves_alone:
            self._engine.send_buffers(contents.task)
        with contents.saving() as handed:
            extra, changed = handed.split()
            training = None
            if not weights_only:
                own = self.rank_parts()
                ranks = [own] if self.saves_alone else self._engine.data.all_gather_object(own)
                training = self.collect(extra, ranks)
            if weights_only:
                changed = None  # no hook will read it
            # on all ranks: an engine may gather them
            weights = self._engine.model_state(contents.task) if changed is None else changed
            if self._engine.splits_weights:
                token, about = self._engine.comm.broadcast_object(time.time_ns()), contents.about()
                snapshot = split.snapshot(
                    self._engine, self.writer, weights, training, about, token
                )
            elif self._engine.ranks.is_main:
                snapshot = self.writer.snapshot(weights, training, contents.about())
        if self._engine.ranks.is_main:
            self.writer.start(
                lambda: outcome.set_result(self._write(store, name, snapshot, changes))
            )
            return outcome
        outcome.set_result(True)
        if self._engine.splits_weights and snapshot.part is not None:
            part = snapshot.part
            self.writer.start(lambda: self._write_part(store, name, part))
        return outcome

    def _write_part(self, store: Store, name: str, part: RankFile) -> None:
        """Write this rank's part, and report to rank 0 how that ended:
        it prints an error, and writes no manifest.
        """
        try:
            about = store.write_part(name, part)
        except Exception as error:  # see _write
            about = {"error": _describe(error)}
        with contextlib.suppress(PeerError):  # ranks have changed: rank 0 waits no more
            report(part, about, self._engine.comm.leave)

    def has_finite_weights(self, name: str) -> bool:
        """Return, on all ranks alike, whether no weight is NaN or infinite; report the first
        checkpoint that has one. Waits for the device. Call it on all ranks.
        """
        held = self._engine.weights_here(self.contents.task)
        weights = [p for p in held if p.is_floating_point() and p.numel()]
        bad = int(
            bool(weights) and not torch.isfinite(torch.nn.utils.get_total_norm(weights, math.inf))
        )
        is_finite = not (bad if self.saves_alone else self._engine.comm.sum_number(bad))
        if self._was_finite and not is_finite:
            self._say(
                f"WARNING: the weights of checkpoint {name} are not finite, so it is not taken for"
                " the best one."
            )
        self._was_finite = is_finite
        return is_finite

    def rank_parts(self) -> dict[str, Any]:
        """Return what is saved of this rank alone.
        Waits for the device if values are still being computed.
        """
        return self._held_parts or {
            name: part.state_dict() for name, part in self.contents.rank_parts.items()
        }

    def committed_rank_parts(self) -> dict[str, Any]:
        """Return what a commit holds of this rank: nothing large, since it is gathered from all."""
        return {
            name: part.state_dict()
            for name, part in self.contents.rank_parts.items()
            if name not in (OWN, GRADIENTS)
        }

    @contextlib.contextmanager
    def holding_rank_parts(self) -> Iterator[None]:
        """Within the context a checkpoint holds this rank's parts as they are now:
        a validation draws random numbers.
        """
        self._held_parts = self.rank_parts()
        yield
        # not after an error: the checkpoint that follows is of the state before
        self._held_parts = None

    def collect(self, extra: dict[str, Any], ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return everything but the weights: what hooks added, and `rank_parts` of each rank (none:
        they are added later).

        Raises:
            TaskError: an object is among them that is no tensor or plain value; names it.
        """
        content = {name: part.state_dict() for name, part in self.contents.parts.items()}
        content |= {
            name: [own[name] for own in ranks if name in own] for name in self.contents.rank_parts
        }
        plain: dict[str, Any] = with_plain_numbers(content | {"extra": extra})
        require_plain(plain)
        return plain

    def _write(self, store: Store, name: str, snapshot: Snapshot, changes: AfterWriting) -> bool:
        """Write, in the writing thread. Whatever a disk, a remote library or a strange tensor raises,
        the run is worth more.
        """
        try:
            self._written = later(self._written, self.stores)
            snapshot = replace(snapshot, written=self._written)
            if snapshot.part is None:
                store.write(name, snapshot)
            else:
                self._write_part(store, name, snapshot.part)
                store.write(name, snapshot, self._engine.comm.take)
        except LeaseLost:
            raise
        except Exception as error:
            self.writer.unwritten.append(store.path_of(name))
            self.writer.failure = f"{store.path_of(name)}: {clause(_describe(error))}."
            if isinstance(error, (OSError, TrainkitError)):
                self.writer.failure += (
                    " Make room there, or choose another folder (run_dir=..., or"
                    " callbacks.checkpoint.dirpath=...)."
                )
            warning(
                f"The checkpoint {store.path_of(name)} was NOT written:"
                f" {clause(_describe(error))}. Older ones are left."
            )
            return False
        self.writer.num_written += 1
        for link, target in changes.links.items():
            try:
                store.point(link, target)
            except OSError as error:
                warning(f"'{link}' could not be set, though {name} is written: {clause(error)}.")
        for old in changes.removed:
            store.remove(old)
        return True

    def wait(self) -> None:
        """Wait until nothing is being written."""
        self.writer.wait()

    def finish(self) -> None:
        """Wait for the last checkpoint, and repeat which ones the disk did not take."""
        self.writer.wait()
        if self.writer.unwritten:
            warning(f"Checkpoints that were NOT written: {', '.join(self.writer.unwritten)}.")
            self.writer.unwritten.clear()

    def require_one(self) -> None:
        """After a fit, raise if it should have written checkpoints and could write none. Call it on
        all ranks.

        Raises:
            CheckpointError: on all ranks; names the reason.
        """
        if self.stores:
            self._engine.comm.run_on_main(self._require_one)

    def _require_one(self) -> None:
        if self.writer.failure and not self.writer.num_written:
            raise CheckpointError(
                "Training has ended, and not one checkpoint of it could be written, so its weights"
                f" are lost. The last: {self.writer.failure}"
            )

    def find(
        self, read: Callable[[], Loaded | None], task: nn.Module, change: Change
    ) -> dict[str, Any] | None:
        """Load a checkpoint's weights into the task on rank 0; return what was saved beside them, on
        all ranks.

        The optimizers' state stays on rank 0, whose `engine.prepare` sends it on; the others get
        its settings alone.

        Args:
            read: on rank 0: returns the checkpoint.

        Returns:
            None if there is nothing to resume from.
        """
        held: list[Loaded] = []

        def read_on_rank_0() -> Loaded | None:
            if (checkpoint := read()) is None:
                return None
            held.append(checkpoint)
            states = checkpoint.training.get("optimizers", [])
            # an optimizer's own form of state is for all ranks
            settings = [s | {"state": {}} if is_torchs(s) else s for s in states]
            names = {name: weight.to("meta") for name, weight in checkpoint.weights.items()}
            return Loaded(checkpoint.path, names, checkpoint.training | {"optimizers": settings})

        checkpoint = self._engine.comm.run_on_main(read_on_rank_0)
        if checkpoint is None:
            return None
        own: Loaded = [*held, checkpoint][0]
        changed = change(own.training, dict(own.weights))
        weights = own.weights if own.path == MEMORY else changed  # a commit has all, as they are
        self._engine.comm.run_on_main(lambda: load_weights(Path(own.path), task, weights))
        self.resumed_from = own.path
        return own.training

    def read(self, ckpt_path: str, resume: bool = True) -> Loaded | None:
        """Rank 0: read a checkpoint; see find.read."""
        return read(ckpt_path, self.stores, resume, self._say, self._difference)

    def open(self, ckpt_path: str, change: Change, resume: bool = True) -> dict[str, Any] | None:
        """Find and open a checkpoint of which each rank reads its part: `opened` fills them. Call
        it on all ranks.

        Returns:
            What was saved beside the weights, at most that of `load_extra` if not `resume`; None
            for "auto" if there is no checkpoint.

        Raises:
            CheckpointError: there is none, it is damaged, or a rank cannot read it.
        """
        path = self._engine.comm.run_on_main(
            lambda: locate(ckpt_path, self.stores, resume, self._say, self._difference)
        )
        if path is None:
            return None
        self.resumed_from = path
        self.opened = split.Opened(self._engine, path, resume, self.stores)
        self.opened.change(change)
        return self.opened.training

    def restore(self, saved: Mapping[str, Any]) -> list[str]:
        """Let each part take its state back; return, in words, states that found no place."""
        left: list[str] = []
        for name, part in self.contents.parts.items():
            if name in saved or name not in self.contents.optional_parts:
                left += part.load_state_dict(saved[name]) or []
        for name, rank_part in self.contents.rank_parts.items():
            if name in saved or name not in self.contents.optional_parts:
                left += rank_part.load_state_dicts(saved[name]) or []
        return left

    def remember_step(self) -> None:
        """Note where this rank is before a step, for `rescue`."""
        if self._undo is not None:
            self._undo.remember()

    def rescue(self, save: Callable[[], None]) -> None:
        """Let rank 0 save the state from before the step that failed;
        the other ranks may be anywhere.
        """
        if not self._engine.ranks.is_main or self._undo is None:
            return
        if self._engine.saves_together:
            warning(
                "No checkpoint of this error: rank 0 cannot save alone what is split over the"
                " ranks."
            )
            return
        parts = self._undo.undo()
        if parts is None:
            return
        self._held_parts = self._held_parts or parts
        self.saves_alone = True
        try:
            save()
            self.finish()
        except Exception as error:  # the first error is the one to report
            warning(f"No checkpoint of this error: {_describe(error)}")
        finally:
            self.saves_alone = False


def _describe(error: Exception) -> str:
    if isinstance(error, (OSError, TrainkitError)):
        return str(error)
    return f"{type(error).__name__}: {error}"
