"""Batch norm's statistics over the training data:
every sample counts the same, and nothing else changes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.helpers.toy import Line, loader, quiet, rows
from trainkit.api.callback import Callback
from trainkit.extensions.swa.norm_statistics import recompute_norm_statistics


class Normed(Line):
    """A norm of the inputs, an unused one, and one without statistics;
    draws a random number per batch.
    """

    def make_model(self) -> Any:
        """Return the model."""
        self.idle = nn.BatchNorm1d(2)
        return nn.Sequential(
            nn.BatchNorm1d(3), nn.Linear(3, 1), nn.BatchNorm1d(1, track_running_stats=False)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Draw."""
        torch.rand(1)
        return super().training_step(batch, batch_idx)


class Recompute(Callback):
    """Recomputes the statistics at the end."""

    def on_train_end(self, trainer: Any, task: Any) -> None:
        """Record the state before and after."""
        before = torch.get_rng_state()
        recompute_norm_statistics(trainer, task)
        assert torch.equal(torch.get_rng_state(), before)


def test_each_sample_counts_the_same(tmp_path: Path) -> None:
    """With a short last batch the mean is that of all samples,
    and the variance the batch variances weighted by samples.
    """
    task = Normed()
    quiet(tmp_path, max_epochs=2, precision="64-true", callbacks=Recompute()).fit(task, loader(22))
    x_NI = rows(22).tensors[0].double()
    batches = x_NI.split(4)
    variances = torch.stack([len(batch) * batch.var(0) for batch in batches]).sum(0) / 22
    torch.testing.assert_close(task.model[0].running_mean, x_NI.mean(0))
    torch.testing.assert_close(task.model[0].running_var, variances)
    assert task.model[0].num_batches_tracked == len(batches)
    assert (task.model[0].momentum, task.model[0].training, task.training) == (0.1, True, True)
    assert task.idle.running_mean.tolist() == [0.0, 0.0]
