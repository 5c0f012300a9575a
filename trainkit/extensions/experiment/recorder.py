"""PairRecorder: notes what the two runs of a seed must share, and what they end with."""

from __future__ import annotations

import hashlib
import json
import math
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.arguments import checked
from trainkit.data.feed import MapFeed, Microbatch
from trainkit.device.sync_guard import allowed_read
from trainkit.extensions.check_resume.recorder import digests


@checked
class PairRecorder(Callback):
    """Writes `path` at the end of a fit, on rank 0: digests of the first weights and of each step's
    samples, seconds, samples and the last logged values. It changes nothing and draws no random
    numbers. Reading each batch waits for the device.

    Args:
        path: of the file.
    """

    config_key = "callbacks.experiment"

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._weights: dict[str, str] = {}
        self._order: list[str] = []
        self._samples: list[str] = []
        self._started = 0.0

    def on_train_start(self, trainer: RunView, task: Task) -> None:
        """Note the first weights."""
        self._started = time.monotonic()
        if trainer.is_global_zero:
            with allowed_read():
                self._weights = {name: _digest(value) for name, value in task.named_parameters()}

    def on_train_step_start(self, trainer: RunView, task: Task) -> None:
        """Note the indices of this rank's samples."""
        state, feed = trainer.state, trainer.train_feed
        self._samples.append("")
        if not isinstance(feed, MapFeed):
            self._order.append("")
            return
        shares = feed.plan_of(state.current_epoch).microbatches(
            state.step_in_epoch, trainer.engine.ranks.data_rank
        )
        indices = [
            feed.indices(state.current_epoch, Microbatch(None, len(places), False, places)) or []
            for places in shares
        ]
        self._order.append(_short(json.dumps([int(i) for part in indices for i in part])))

    def on_train_batch_start(
        self, trainer: RunView, task: Task, batch: Any, batch_idx: int
    ) -> None:
        """Note the samples themselves."""
        with allowed_read():
            self._samples[-1] = _short(self._samples[-1] + "".join(digests(batch)))

    def on_fit_end(self, trainer: RunView, task: Task) -> None:
        """Write the record, with the digests of all ranks."""
        ranks = trainer.engine.comm.all_gather_object((self._order, self._samples))
        if not trainer.is_global_zero:
            return
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        record = {
            "weights": self._weights,
            "order": [order for order, _ in ranks],
            "samples": [samples for _, samples in ranks],
            "steps": trainer.global_step,
            "samples_seen": int(trainer.state.samples_seen),
            "fit_s": time.monotonic() - self._started,
            "values": {name: value for name, value in values.items() if math.isfinite(value)},
            "not_finite": [name for name, value in values.items() if not math.isfinite(value)],
        }
        self.path.write_text(json.dumps(record))


def _digest(value: Tensor) -> str:
    """Return a digest of a tensor's shape and bits."""
    return digests([value.detach().unsqueeze(0)])[0]


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
