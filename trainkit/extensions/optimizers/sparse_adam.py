"""SparseAdam beside engine.sparse_as_dense: the sum of the ranks' gradients, which is dense, is
turned back into the rows that it has, as Horovod does. Other optimizers take it as it is.
"""

from __future__ import annotations

import torch

from trainkit.api.view import RunView
from trainkit.run.feature import Feature
from trainkit.run.setup import Stage


def of_stage(stage: Stage) -> RowsAgain | None:
    """Return the feature of an engine whose sums are dense; None if rows travel."""
    return RowsAgain() if stage.engine.shown_options.get("sparse_as_dense") else None


class RowsAgain(Feature):
    """See the module."""

    name = "sparse_as_dense"

    def begun(self, run: RunView) -> None:
        """Hook the updates of SparseAdam."""
        for optimizer in run.optimizers:
            if isinstance(optimizer, torch.optim.SparseAdam):
                optimizer.register_step_pre_hook(_to_rows)


def _to_rows(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and not parameter.grad.is_sparse:
                # one sparse dimension: a row is whole, as those of nn.Embedding
                parameter.grad = parameter.grad.to_sparse(1)
