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
from trainkit import Callback
from trainkit.callbacks import ModelCheckpoint
from trainkit.optim import cosine, wsd

Make = Callable[[Any, Any], Any]
STEPS = 2  # of an epoch

MADE: dict[str, Make] = {
    "ours": lambda optimizer, trainer: {
        "scheduler": cosine(optimizer, trainer.estimated_stepping_batches),
        "interval": "step",
    },
    "wsd": lambda optimizer, trainer: {
        "scheduler": wsd(optimizer, trainer.estimated_stepping_batches, decay=0.5),
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


class StopAt(Callback):
    """Ends training after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Ask for the end."""
        if trainer.global_step == self.step:
            trainer.request_stop("the test says so", at_once=True)


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
def test_a_resumed_run_is_one_that_was_as_long_from_the_start(
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


def test_a_run_prolonged_in_its_stable_phase_has_the_weights_of_the_longer_one(
    tmp_path: Path,
) -> None:
    """Stopped before the decay and resumed with twice the steps, bit for bit; up to there the rates
    do not depend on the length.
    """

    class Scheduled(Line):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
            return {"optimizer": optimizer, "lr_scheduler": MADE["wsd"](optimizer, self.trainer)}

    def fit(name: str, steps: int, stop: int = 99, **settings: Any) -> tuple[Any, list[float]]:
        task, recorder = Scheduled(), Recorder()
        callbacks = [recorder, ModelCheckpoint(save_last=True), StopAt(stop)]
        trainer = quiet(tmp_path / name, max_steps=steps, callbacks=callbacks)
        trainer.fit(task, loader(80), **settings)
        return torch.cat([p.detach().reshape(-1) for p in task.parameters()]), recorder.lrs

    whole, rates_of_whole = fit("whole", 20)
    _, first = fit("parts", 10, stop=5)
    result, rest = fit("parts", 20, ckpt_path="last")
    assert torch.equal(result, whole)
    assert first + rest == rates_of_whole
    assert rates_of_whole[:11] == [0.05] * 11
    assert rates_of_whole[11] < 0.05


def test_another_class_inside_a_sequence_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the class of a scheduler that is alone."""

    def sequence(kind: Any) -> Make:
        return lambda optimizer, trainer: lr_scheduler.SequentialLR(
            optimizer, [lr_scheduler.ConstantLR(optimizer, 0.5, 1), kind(optimizer)], [1]
        )

    rates(tmp_path, sequence(lambda o: lr_scheduler.ExponentialLR(o, 0.5)), 2)
    rates(tmp_path, sequence(lambda o: lr_scheduler.StepLR(o, 1, 0.5)), 4, ckpt_path="last")
    said = capsys.readouterr().out
    assert "SequentialLR.schedulers[1].class ExponentialLR -> StepLR" in said


def test_each_scheduler_of_a_sequence_has_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of one class that were both changed."""

    def sequence(first: float, second: float) -> Make:
        return lambda optimizer, trainer: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.ConstantLR(optimizer, factor, 1) for factor in (first, second)],
            [1],
        )

    rates(tmp_path, sequence(0.5, 0.25), 2)
    rates(tmp_path, sequence(0.4, 0.2), 4, ckpt_path="last")
    said = capsys.readouterr().out
    assert "SequentialLR.schedulers[0].factor 0.5 -> 0.4" in said
    assert "SequentialLR.schedulers[1].factor 0.25 -> 0.2" in said
