"""Objects with a state in a Task that no checkpoint holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR

from tests.helpers.toy import Line, loader, quiet
from trainkit.callbacks import EarlyStopping


class Averaged:
    """An average of weights of another package (torch_ema): no module, but a state."""

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it."""


class Holding(Line):
    """Has objects with states."""

    def __init__(self) -> None:
        super().__init__()
        self.average, self.scaler = Averaged(), torch.amp.GradScaler("cpu")
        self.stopping = EarlyStopping("val/loss")
        self.other = torch.nn.ReLU()

    def configure_optimizers(self) -> Any:
        """Return SGD and a schedule, and hold both."""
        self.optimizer = super().configure_optimizers()
        self.schedule = ExponentialLR(self.optimizer, 0.9)
        self.loose = ExponentialLR(self.optimizer, 0.9)
        return [self.optimizer], [self.schedule]


class Saving(Holding):
    """Saves its own."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save."""
        checkpoint["average"] = self.average.state_dict()


@pytest.mark.parametrize(
    ("kind", "saves", "count"), [(Holding, True, 1), (Holding, False, 0), (Saving, True, 0)]
)
def test_a_state_that_no_checkpoint_holds_is_named(
    kind: Any, saves: bool, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed run would start from its beginning in silence; what the Trainer saves is not named."""
    quiet(tmp_path, enable_checkpointing=saves).fit(kind(), loader(4))
    said = capsys.readouterr().out
    line = "Holding's average (Averaged), scaler (GradScaler), loose (ExponentialLR)"
    assert said.count(line) == said.count("on_save_checkpoint") == count
