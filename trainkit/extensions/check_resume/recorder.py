"""ResumeRecorder: saves, kills and records for `python -m trainkit check-resume`."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.arguments import PositiveInt, checked
from trainkit.data.feed import MapFeed, Microbatch
from trainkit.device.sync_guard import allowed_read


@checked
class ResumeRecorder(Callback):
    """Records a run without changing it: it draws no random numbers. Reading each batch waits for
    the device.

    It writes to `record_to`:

        names.json     the names of the parameters behind a checkpoint's numbers
        rank0.jsonl    per rank, a line for each step: the samples that it trained on
        end/           the checkpoint of the last step, before that step's epoch is closed

    Args:
        record_to: folder of the records.
        end_at: the last step.
        save_at: after this step, a checkpoint is written into the run's folder.
        kill_at: every rank kills itself within this step, once it holds gradients that are not
            applied yet.
    """

    config_key = "callbacks.check_resume"
    runs_last = True  # its checkpoints must include the other callbacks' and the Task's changes

    def __init__(
        self,
        record_to: str,
        end_at: PositiveInt,
        save_at: PositiveInt | None = None,
        kill_at: PositiveInt | None = None,
    ) -> None:
        self.record_to = Path(record_to)
        self.end_at = end_at
        self.save_at = save_at
        self.kill_at = kill_at
        self._notes: TextIO | None = None
        self._step: dict[str, Any] | None = None
        self._has_ended = False

    def on_train_start(self, trainer: RunView, task: Task) -> None:
        """Open the record."""
        self.record_to.mkdir(parents=True, exist_ok=True)
        self._notes = (self.record_to / f"rank{trainer.engine.ranks.rank}.jsonl").open("w")
        if trainer.is_global_zero:
            called = {parameter: name for name, parameter in task.named_parameters()}
            optimizers = [
                [
                    called.get(parameter, "a tensor of no module")
                    for group in optimizer.param_groups
                    for parameter in group["params"]
                ]
                for optimizer in trainer.optimizers
            ]
            parameters = [name for name, _ in task.named_parameters(remove_duplicate=False)]
            (self.record_to / "names.json").write_text(
                json.dumps({"parameters": parameters, "optimizers": optimizers})
            )

    def on_train_step_start(self, trainer: RunView, task: Task) -> None:
        """Record which samples this rank should get."""
        epoch = trainer.state.current_epoch
        step = trainer.state.step_in_epoch
        indices: list[int] | None = None
        if isinstance(trainer.train_feed, MapFeed):
            shares = trainer.train_feed.plan_of(epoch).microbatches(
                step, trainer.engine.ranks.data_rank
            )
            parts = [
                trainer.train_feed.indices(epoch, Microbatch(None, len(places), False, places))
                or []
                for places in shares
            ]
            indices = [index for part in parts for index in part]
        self._step = {
            "step": trainer.global_step + 1,
            "epoch": epoch,
            "indices": indices,
            "samples": [],
        }

    def on_train_batch_start(
        self, trainer: RunView, task: Task, batch: Any, batch_idx: int
    ) -> None:
        """Record which samples it got."""
        assert self._step is not None
        with allowed_read():
            self._step["samples"] += digests(batch)

    def on_after_backward(self, trainer: RunView, task: Task) -> None:
        """Kill this rank when due."""
        self._die(trainer)

    def on_before_optimizer_step(self, trainer: RunView, task: Task, optimizer: Any) -> None:
        """Kill this rank when due, also if it has no sample in the step."""
        self._die(trainer)

    def on_train_step_end(self, trainer: RunView, task: Task) -> None:
        """Write the step's record, and the checkpoint when due."""
        if self._step is None:
            return  # a resumed run may first close the step in which it was saved
        self._write(self._step)
        self._step = None
        if trainer.global_step == self.save_at:
            trainer.save_checkpoint(
                trainer.run_dir / "checkpoints" / f"check-resume-step={self.save_at}"
            )
            # the checkpoint is written before any kill, which ends all ranks
            trainer.engine.comm.barrier()
        if trainer.global_step == self.end_at:
            self._end(trainer)

    def on_train_end(self, trainer: RunView, task: Task) -> None:
        """Save a run that ended before the expected step."""
        if not self._has_ended:
            self._end(trainer)

    def teardown(self, trainer: RunView, task: Task, stage: str) -> None:
        """Close the record."""
        if self._notes is not None:
            self._notes.close()

    def _end(self, trainer: RunView) -> None:
        self._has_ended = True
        trainer.save_checkpoint(self.record_to / "end")

    def _die(self, trainer: RunView) -> None:
        if self.kill_at is not None and trainer.global_step == self.kill_at - 1:
            self._write({"killed": self.kill_at})
            os.kill(os.getpid(), signal.SIGKILL)

    def _write(self, note: dict[str, Any]) -> None:
        assert self._notes is not None
        self._notes.write(json.dumps(note) + "\n")
        self._notes.flush()


def digests(batch: Any) -> list[str]:
    """Return a hash per sample of a batch,
    or one for the whole batch if its tensors do not show the samples.
    """
    leaves = list(_leaves(batch))
    lengths = {len(leaf) if isinstance(leaf, Tensor) and leaf.dim() else None for leaf in leaves}
    (length,) = lengths if len(lengths) == 1 else (None,)
    if length is None:
        return [f"batch {_digest(leaves)}"]
    on_host = [leaf.detach().cpu() for leaf in leaves]
    return [_digest([leaf[i] for leaf in on_host]) for i in range(length)]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key in value:
            yield from _leaves(value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _digest(values: list[Any]) -> str:
    digest = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            dense = (
                value.detach().cpu()
                if value.layout is torch.strided
                else value.detach().cpu().to_dense()
            )
            digest.update(f"{dense.dtype} {list(dense.shape)} ".encode())
            digest.update(dense.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()[:16]
