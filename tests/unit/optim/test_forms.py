"""What configure_optimizers may return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR

from tests.helpers.toy import Line, loader, quiet
from trainkit.errors import TaskError


def test_lbfgs_is_refused(tmp_path: Path) -> None:
    """An optimizer that needs a closure is refused before training."""

    class Closure(Line):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(TaskError, match="LBFGS"):
        quiet(tmp_path).fit(Closure(), loader(8))


def test_a_schedule_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    """It would change no rate."""

    class Wrong(Line):
        def configure_optimizers(self) -> Any:
            other = SGD(self.parameters(), lr=0.1)
            return [SGD(self.parameters(), lr=0.1)], [ExponentialLR(other, 0.1)]

    with pytest.raises(TaskError, match="a ExponentialLR for an optimizer that it did not return"):
        quiet(tmp_path).fit(Wrong(), loader(8))
