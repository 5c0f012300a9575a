"""Batch norm statistics for averaged weights: one pass over the training data of all ranks.

Like torch.optim.swa_utils.update_bn for one process (Izmailov et al. 2018, section 3.2): each
norm's mean and variance become the averages of those of the training batches. Unlike there, a batch
counts by its samples; each rank processes its own share and the sums are combined, so that any
number of ranks gets the statistics of one process with the same microbatches; and dropout is off,
as it is when the statistics are used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from trainkit.api.step_call import call_step
from trainkit.api.task import LogTarget, Task
from trainkit.api.view import RunView
from trainkit.checkpoint.stateful import random_state, set_random_state
from trainkit.metrics.log import MetricLog
from trainkit.metrics.objects import reset_metrics


class _Sums:
    """Sums of one norm's batch statistics, weighted by samples, to be summed over ranks."""

    def __init__(self, norm: _BatchNorm) -> None:
        assert norm.running_mean is not None
        # the last: samples of the current batch
        self.norm = norm
        self.momentum = norm.momentum
        self.num_samples = 0
        self.total = torch.zeros(
            2 * norm.num_features + 2, dtype=torch.float64, device=norm.running_mean.device
        )

    def add(self, *_: Any) -> None:
        """Add the current batch: with a momentum of 1 the running
        statistics are those of the batch.
        """
        mean, var = self.norm.running_mean, self.norm.running_var
        assert mean is not None and var is not None
        own = torch.cat(
            [mean.double(), var.double(), torch.ones(1, dtype=torch.float64, device=mean.device)]
        )
        self.total[:-1].add_(own, alpha=self.num_samples)
        self.total[-1] += 1  # batches

    def finish(self, total: Tensor) -> None:
        """Set the norm's statistics to the averages over all ranks;
        an unused norm keeps its own.
        """
        weight, batches = total[-2:].tolist()
        mean = self.norm.running_mean
        var = self.norm.running_var
        count = self.norm.num_batches_tracked
        assert mean is not None and var is not None and count is not None
        if weight:
            mean.copy_(total[: self.norm.num_features] / weight)
            var.copy_(total[self.norm.num_features : -2] / weight)
            count.fill_(int(batches))


@torch.no_grad()
def recompute_norm_statistics(trainer: RunView, task: Task) -> None:
    """Recompute the statistics of all batch norms in training mode. A collective; costs a forward
    pass over an epoch's data.

    It runs `training_step` without gradients. Norms with frozen statistics (in eval mode, or not
    tracked) are skipped. The random states are restored.
    """
    sums = [
        _Sums(m)
        for m in task.modules()
        if isinstance(m, _BatchNorm) and m.training and m.running_mean is not None
    ]
    if not sums:
        return
    modes = [(module, module.training) for module in task.modules()]
    random = random_state()
    task.eval()
    hooks = []
    try:
        for entry in sums:
            entry.norm.train()
            entry.norm.momentum = 1.0
            hooks.append(entry.norm.register_forward_hook(entry.add))
        with torch.compiler.set_stance("force_eager"):  # no recompilation for one pass
            _pass(trainer, task, sums)
    finally:
        for hook in hooks:
            hook.remove()
        for entry in sums:
            entry.norm.momentum = entry.momentum
        for module, training in modes:
            module.training = training
        task._log_to(None)
        reset_metrics(task)  # they counted this pass
        set_random_state(random)
    total = trainer.engine.data.all_reduce(torch.cat([entry.total for entry in sums]))
    for entry, own in zip(
        sums, torch.split(total, [len(entry.total) for entry in sums]), strict=True
    ):
        entry.finish(own)


def _pass(trainer: RunView, task: Task, sums: list[_Sums]) -> None:
    batch_idx = 0
    for step in trainer.train_feed.steps(trainer.current_epoch):
        for microbatch in step.microbatches:
            for entry in sums:
                entry.num_samples = microbatch.num_samples
            task._log_to(
                LogTarget(MetricLog(), microbatch.num_samples, on_step=True, on_epoch=False)
            )
            with trainer.precision.autocast():
                call_step(task, "training_step", microbatch.batch, batch_idx)
            batch_idx += 1
