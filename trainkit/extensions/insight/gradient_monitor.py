"""GradientMonitor: gradient norms by layer, and the size of updates relative to the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.arguments import PositiveFloat, PositiveInt, checked
from trainkit.device.shards import norms_of
from trainkit.device.sync_guard import allowed_read
from trainkit.extensions.insight.log_steps import is_log_step, write


@checked
class GradientMonitor(Callback):
    """Logs `grad_norm/total` and `grad_norm/<group>` of the gradient that the optimizer uses.

    It is the gradient of the whole step: summed over ranks and unscaled, before
    trainer.gradient_clip_val clips it (the total is then at most that value). A group is all
    parameters that share the first parts of their name. Nothing is computed at steps without
    logging; at the others the norms stay on the device until one copy reads them all.

    Args:
        norm_type: p of the p-norm, above 0; inf for the largest absolute value.
        group_depth: number of name parts that make a group: 1 for `model`, 2 for `model.layer1`.
        every_n_steps: steps between two log steps. Default: trainer.log_every_n_steps.
        update_ratio: log `update_ratio/<group>` and `update_ratio/total` too: the norm of the
            update divided by that of the weights. It costs a copy of the weights at those steps.
    """

    config_key = "callbacks.gradients"
    needs_of_engine = frozenset({"gradients", "layers"})

    def __init__(
        self,
        norm_type: PositiveFloat = 2.0,
        group_depth: PositiveInt = 2,
        every_n_steps: PositiveInt | None = None,
        update_ratio: bool = False,
    ) -> None:
        self.norm_type = float(norm_type)
        self.group_depth = group_depth
        self.every_n_steps = every_n_steps
        self.update_ratio = update_ratio
        self._norms: dict[str, Tensor] = {}
        self._before: dict[str, list[Tensor]] = {}

    def on_train_step_start(self, trainer: RunView, task: Task) -> None:
        """Discard norms of an earlier step, which may have failed."""
        self._norms = {}
        self._before = {}

    def on_before_optimizer_step(self, trainer: RunView, task: Task, optimizer: Any) -> None:
        """Compute the norms, once per step, whatever the number of optimizers."""
        due = is_log_step(trainer, 1, self.every_n_steps)
        # then a norm is summed over ranks
        takes_part = trainer.is_global_zero or trainer.engine.splits_weights
        if not due or not takes_part or optimizer is not trainer.optimizers[0]:
            return
        groups = self._groups(task)
        gradients = {
            name: [_dense(p.grad) for p in own if p.grad is not None]
            for name, own in groups.items()
        }
        self._norms = self._by_group(
            "grad_norm", {name: grads for name, grads in gradients.items() if grads}
        )
        if self.update_ratio:
            self._before = {name: [p.detach().clone() for p in own] for name, own in groups.items()}

    def on_train_step_end(self, trainer: RunView, task: Task) -> None:
        """Read the norms in one copy and log them."""
        if not self._norms:
            return
        ratios = self._ratios(task) if self._before else {}
        with allowed_read():
            names = list(self._norms)
            values = torch.stack(list(self._norms.values())).tolist()
            ratios = (
                dict(zip(ratios, torch.stack(list(ratios.values())).tolist(), strict=True))
                if ratios
                else {}
            )
        self._norms = {}
        self._before = {}
        write(trainer, dict(zip(names, values, strict=True)) | ratios)

    def _groups(self, task: Task) -> dict[str, list[Tensor]]:
        groups: dict[str, list[Tensor]] = {}
        for name, parameter in task.named_parameters():
            if parameter.requires_grad and parameter.numel():
                parts = name.split(".")
                groups.setdefault(
                    ".".join(parts[: min(self.group_depth, max(1, len(parts) - 1))]), []
                ).append(parameter)
        return groups

    def _by_group(self, what: str, gradients: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        norms = {
            f"{what}/{name}": norm_of(tensors, self.norm_type)
            for name, tensors in gradients.items()
        }
        total = norm_of(list(norms.values()), self.norm_type) if norms else None
        return norms if total is None else {f"{what}/total": total} | norms

    def _ratios(self, task: Task) -> dict[str, Tensor]:
        groups = self._groups(task)
        with torch.no_grad():
            moved = {
                name: torch._foreach_sub(list(own), self._before[name])
                for name, own in groups.items()
            }
        updates = self._by_group(
            "update_ratio", {name: list(tensors) for name, tensors in moved.items()}
        )
        weights = self._by_group("update_ratio", self._before)
        return {name: update / weights[name].clamp_min(1e-12) for name, update in updates.items()}


def norm_of(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the p-norm of all tensors taken as one vector, in float32 at least,
    on their device. Does not wait.
    """
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    # a few kernels for all
    total: Tensor = torch.linalg.vector_norm(
        norms_of(tensors, norm_type, dtype).double(), norm_type
    )
    return total


def _dense(grad: Tensor) -> Tensor:
    """Return the values of a gradient; rows that occur twice in a sparse gradient are summed."""
    grad = grad.detach()
    if not grad.is_sparse:
        return grad
    with allowed_read():
        return grad.coalesce().values()
