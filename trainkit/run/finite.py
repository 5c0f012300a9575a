"""Losses that are not finite.

LossWatch      always: rank 0 reports the first one when it next logs a step; until then nothing waits for the device. Where
               ranks step alone (LocalSGD, DiLoCo), each reports its own
FiniteLosses   `trainer.stop_on_nonfinite`: all ranks end before the update and name the samples. Opt-in, because each step
               waits once for the device and costs one small sum over ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.api.state import TrainState
from trainkit.api.view import RunView
from trainkit.data.feed import Microbatch
from trainkit.device.accelerator import wide
from trainkit.device.sync_guard import allowed_read
from trainkit.engine.ranks import Ranks
from trainkit.errors import DivergenceError
from trainkit.run.feature import Feature

_SHOWN = 64  # samples named at most


class LossWatch:
    """Reports once that a loss of this rank was not finite.

    Args:
        say: prints on rank 0.
        steps_alone: whether this rank takes its steps alone, so that the others do not have its
            loss at the next one.
        copies: whether to copy each loss: the next step writes over it (CUDA graphs).
    """

    def __init__(
        self,
        say: Callable[[str], None],
        state: TrainState,
        ranks: Ranks,
        steps_alone: Callable[[], bool] = lambda: False,
        copies: bool = False,
    ) -> None:
        self._copies = copies
        self._say = say
        self._state = state
        self._ranks = ranks
        self._steps_alone = steps_alone
        self._last: Tensor | None = None
        self._reported = False
        self._finite_at: int | None = None  # the last step whose loss was seen to be finite

    def look(self, loss: Tensor) -> None:
        """Remember the latest loss; does not wait for the device."""
        # detach() would cost more than all else here; its graph is freed by backward
        self._last = loss.detach().clone() if self._copies else loss

    @property
    def last(self) -> Tensor | None:
        """The latest loss of this rank; None after a report."""
        return self._last

    def report(self) -> None:
        """Print if the latest loss is not finite, which waits for its device. The graph of the
        loss, and with it the model, is held no longer.
        """
        last, self._last = self._last, None
        speaks = self._ranks.is_main or self._steps_alone()
        if not speaks or self._reported or last is None:
            return
        step = self._state.global_step
        if math.isfinite(loss := float(last.detach())):
            self._finite_at = step
            return
        self._reported = True
        at = "at" if step - (self._finite_at or 0) <= 1 else "at or before"
        whose = f" of rank {self._ranks.rank}" if self._steps_alone() else ""
        say = self._say if self._ranks.is_main else functools.partial(print, flush=True)
        say(
            f"WARNING: the loss{whose} is {loss} {at} step {step} (epoch"
            f" {self._state.current_epoch}), so the weights are probably not finite now. Training"
            " continues. trainer.stop_on_nonfinite=true ends a run before such an update and names"
            " the samples; a lower rate, warm-up or trainer.gradient_clip_val may prevent it."
        )


class StopOnNonfinite(Feature):
    """trainer.stop_on_nonfinite."""

    name = "trainer.stop_on_nonfinite"
    not_by_hand = "Leave it out, or check the loss in training_step"

    def in_step(
        self, run: RunView, optimizers: Sequence[torch.optim.Optimizer]
    ) -> Mapping[str, Any]:
        """Let each step look at its losses."""
        return {"finite": FiniteLosses(run)}


class FiniteLosses:
    """Looks at each loss of a step, and decides before the update."""

    def __init__(self, run: RunView) -> None:
        self._run = run
        self._seen: list[tuple[Tensor, Microbatch]] = []

    def look(self, loss: Tensor, microbatch: Microbatch) -> None:
        """Store a microbatch's loss; does not wait for the device."""
        # a CUDA graph writes the next one over it
        self._seen.append((loss.detach().clone(), microbatch))

    def forget(self) -> None:
        """Drop the losses of this step."""
        self._seen.clear()

    def decide(self) -> None:
        """End the run if a loss of this step is not finite. Call it on all ranks.

        Raises:
            DivergenceError: names step, rank and samples; the same on all ranks.
        """
        with allowed_read():
            losses = (
                torch.stack([loss.to(wide(loss.device)) for loss, _ in self._seen]).tolist()
                if self._seen
                else []
            )
            bad = [
                (loss, self._run.train_feed.indices(self._run.state.current_epoch, microbatch))
                for loss, (_, microbatch) in zip(losses, self._seen, strict=True)
                if not math.isfinite(loss)
            ]
            self._seen.clear()
            total = self._run.engine.data.sum_number(len(bad))
        if total == 0:
            return
        ranks = self._run.engine.ranks
        non_finite = [
            f"{loss} on rank {rank * ranks.model_size}{_samples(indices)}"
            for rank, losses_of_rank in enumerate(self._run.engine.data.all_gather_object(bad))
            for loss, indices in losses_of_rank
        ]
        raise DivergenceError(
            f"The loss is not finite at step {self._run.state.global_step} (epoch"
            f" {self._run.state.current_epoch}): {'; '.join(non_finite[:8])}. The weights were not"
            " updated. Look at these samples; if they are sound, try a lower rate, warm-up or"
            " trainer.gradient_clip_val. trainer.detect_anomaly=true names the operation."
        )


def _samples(indices: list[int] | None) -> str:
    if indices is None:
        return ""
    shown = ", ".join(map(str, indices[:_SHOWN]))
    return f", samples {shown}{', ...' * (len(indices) > _SHOWN)} of the data set"
