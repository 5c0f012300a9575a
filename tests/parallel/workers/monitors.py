"""Runs, in one start of a launcher, the scenarios of monitors that agree over ranks; see runs.py.

    python monitors.py OUT, horovodrun -np 2 python monitors.py OUT, torchrun --nproc-per-node 2
    monitors.py OUT

The last rank is the one that things happen to.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from torch import Tensor

from tests.helpers.logger_calls import Written
from tests.helpers.toy import Line, loader, quiet
from trainkit.api.callback import Callback
from trainkit.callbacks import (
    DeviceStatsMonitor,
    GradientMonitor,
    LearningRateMonitor,
    ModelSummary,
    SpikeDetection,
    ThroughputMonitor,
    Timer,
)
from trainkit.engine.select import make_engine

OUT = sys.argv[1]
ENGINE = make_engine("auto")
with ENGINE:
    RANKS, RANK = ENGINE.ranks.world_size, ENGINE.ranks.rank


class Given(Line):
    """Has losses of its own, in which that of the last rank leaps at step 6, and learns nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        leaps = RANK == RANKS - 1 and self.trainer.global_step == 6
        return self.model(batch[0]).sum() * 0 + (
            50.0 if leaps else 1.0 + 0.01 * (self.trainer.global_step % 3)
        )


def spike() -> dict[str, Any]:
    """One rank sees a spike; all stop at the next log step."""
    detection = SpikeDetection(window=8, warmup=2, stop=True)
    run = quiet(FOLDER, callbacks=detection, log_every_n_steps=4, max_epochs=1)
    run.fit(Given(), loader(4 * RANKS * 20))
    return {"spikes": detection.spikes, "step": run.global_step, "reason": run.state.stop_reason}


class Lame(Callback):
    """Makes the clock of the last rank differ from rank 0's."""

    def on_fit_start(self, trainer: Any, task: Any) -> None:
        """Restore it."""
        if RANK == RANKS - 1 and RANKS > 1:
            trainer.coordinator._started += 1e6


def timer() -> dict[str, Any]:
    """A limit of time ends all ranks at one step, by rank 0's clock."""
    limit = Timer(0.8)
    run = quiet(FOLDER, callbacks=[Lame(), limit], max_epochs=None, max_time=3600)
    run.fit(Line(lr=0.0), loader(4 * RANKS * 8))
    return {"step": run.global_step, "reason": run.state.stop_reason, "kept": limit.state_dict()}


def written() -> dict[str, Any]:
    """All writers of numbers write only on rank 0, and no rank waits for an absent one."""
    kept = Written()
    callbacks = [
        ThroughputMonitor(
            batch_size_fn=lambda batch: len(batch[0]), length_fn=lambda batch: 10 * len(batch[0])
        ),
        LearningRateMonitor("step"),
        GradientMonitor(update_ratio=True),
        DeviceStatsMonitor(),
        ModelSummary(),
        kept,
    ]
    run = quiet(FOLDER, callbacks=callbacks, log_every_n_steps=2, max_epochs=2)
    run.fit(Line(), loader(4 * RANKS * 4 + 1))  # the last step is one sample of one rank
    return {"rows": kept.rows, "samples": run.state.samples_seen}


with ENGINE:
    FOLDER = ENGINE.comm.broadcast_object(tempfile.mkdtemp())
results = {}
for scenario in (spike, timer, written):
    own = scenario()
    with ENGINE:
        results[scenario.__name__] = ENGINE.comm.all_gather_object(own)
if RANK == 0:
    torch.save(results, OUT)
