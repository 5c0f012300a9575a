"""A run that is resumed with another length:
the rates are those of the new schedule, from the first step on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from tests.helpers.toy import Line, Recorder, loader, quiet
from trainkit.callbacks import ModelCheckpoint
from trainkit.optim import cosine

Make = Callable[[Any, Any], Any]
STEPS = 2  # of an epoch

MADE: dict[str, Make] = {
    "ours": lambda optimizer, trainer: {
        "scheduler": cosine(optimizer, trainer.estimated_stepping_batches),
        "interval": "step",
    },
    "cosine": lambda optimizer, trainer: lr_scheduler.CosineAnnealingLR(
        optimizer, trainer.max_epochs
    ),
    "milestones": lambda optimizer, trainer: lr_scheduler.MultiStepLR(
        optimizer, [trainer.max_epochs // 2]
    ),
    "one cycle": lambda optimizer, trainer: {
        "scheduler": lr_scheduler.OneCycleLR(
            optimizer, 0.1, trainer.estimated_stepping_batches, cycle_momentum=False
        ),
        "interval": "step",
    },
    "in a sequence": lambda optimizer, trainer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.ConstantLR(optimizer, 0.5, 1),
            lr_scheduler.CosineAnnealingLR(optimizer, trainer.max_epochs - 1),
        ],
        [1],
    ),
}


def rates(folder: Path, make: Make, max_epochs: int, **settings: Any) -> list[float]:
    """Train; return the rate of each step."""

    class Scheduled(Line):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
            return {"optimizer": optimizer, "lr_scheduler": make(optimizer, self.trainer)}

    recorder = Recorder()
    trainer = quiet(
        folder,
        max_epochs=max_epochs,
        callbacks=[recorder, ModelCheckpoint()],
        enable_checkpointing=True,
    )
    trainer.fit(Scheduled(), loader(8), **settings)
    return recorder.lrs


@pytest.mark.parametrize("name", MADE)
def test_a_longer_run_goes_on_as_one_that_was_longer_from_the_start(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ended at 4 epochs and resumed to 8, its last 4 epochs have the rates of a run of 8;
    the end of the old curve is left.
    """
    whole = rates(tmp_path / "whole", MADE[name], 8)
    rates(tmp_path / "parts", MADE[name], 4)
    capsys.readouterr()
    rest = rates(tmp_path / "parts", MADE[name], 8, ckpt_path="last")
    assert rest == pytest.approx(whole[4 * STEPS :], rel=1e-6)
    assert len(rest) == 4 * STEPS


def test_an_unchanged_schedule_keeps_its_bits(tmp_path: Path) -> None:
    """What the formula gives is not put in place of what the scheduler has computed,
    if nothing was changed.
    """
    make: Make = lambda optimizer, trainer: lr_scheduler.CosineAnnealingLR(optimizer, 8)  # noqa: E731
    whole = rates(tmp_path / "whole", make, 8)
    rates(tmp_path / "parts", make, 4)
    assert rates(tmp_path / "parts", make, 8, ckpt_path="last") == whole[4 * STEPS :]
