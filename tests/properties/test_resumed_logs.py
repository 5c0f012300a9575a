"""A run that dies at random moments and resumes ends with the
weights and the logs of one that did not.
"""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import trainkit
from tests.helpers.threads import ThreadEngine, World
from tests.helpers.toy import Line, loader, quiet
from trainkit.callbacks import EMA, LearningRateMonitor, ModelCheckpoint
from trainkit.loggers import CSVLogger, TensorBoardLogger

MOMENTS = (
    "on_train_epoch_start",
    "on_train_batch_end",
    "on_validation_epoch_end",
    "on_train_epoch_end",
)
STEPS, EPOCHS = 6, 3


class Logged(Line):
    """Logs the loss of steps and epochs, and that of the validation."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss."""
        loss = (self(batch[0]) - batch[1]).pow(2).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss."""
        self.log("val", (self(batch[0]) - batch[1]).pow(2).mean())


class Death(trainkit.Callback):
    """Raises in one hook, from some step on."""

    def __init__(self, hook: str, step: int) -> None:
        def die(trainer: Any, *arguments: Any) -> None:
            if trainer.global_step >= step:
                raise InterruptedError

        setattr(self, hook, die)


def fit(
    folder: Path, ranks: int, interval: Any, validations: float, every: int, death: Death | None
) -> None:
    """Train on ranks that are threads, from the run's newest checkpoint if there is one,
    to the end or the death.
    """

    def work(engine: ThreadEngine) -> None:
        callbacks = [
            LearningRateMonitor(logging_interval=interval),
            ModelCheckpoint(every_n_train_steps=every, save_on_exception=False),
            EMA(decay=0.9),
            *([] if death is None else [death]),
        ]
        trainer = quiet(
            folder,
            engine=engine,
            callbacks=callbacks,
            logger=[CSVLogger(), TensorBoardLogger()],
            enable_checkpointing=True,
            max_epochs=EPOCHS,
            log_every_n_steps=2,
            lr_scaling="none",
            val_check_interval=validations,
        )
        data = loader(4 * STEPS, batch_size=4 // ranks, shuffle=True)
        trainer.fit(Logged(), data, loader(8, batch_size=8 // ranks), ckpt_path="auto")

    try:
        World(ranks).run(work)
    except InterruptedError:
        assert death is not None


def logs(folder: Path, with_steps: bool) -> tuple[list[Any], list[Any]]:
    """Return the values of metrics.csv, and of TensorBoard, without speeds;
    a step's loss is rank 0's.
    """

    def counts(name: str) -> bool:
        return "samples" not in name and (with_steps or name != "loss_step")

    with (folder / "metrics.csv").open() as file:
        rows = [
            {name: float(text) for name, text in row.items() if text and counts(name)}
            for row in csv.DictReader(file)
        ]
    reader = EventAccumulator(str(folder / "tensorboard"))
    reader.Reload()
    names = [name for name in reader.Tags()["scalars"] if counts(name)]
    events = [(name, event.step, event.value) for name in names for event in reader.Scalars(name)]
    return [row for row in rows if len(row) > 2], sorted(events)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return those of the run's last checkpoint."""
    from trainkit.checkpoint.weights import read_weights

    return read_weights(str(folder / "checkpoints" / "last"))


@settings(deadline=None, max_examples=12)
@given(
    deaths=st.lists(
        st.tuples(st.sampled_from(MOMENTS), st.integers(1, STEPS * EPOCHS - 1), st.integers(1, 2)),
        max_size=4,
    ),
    interval=st.sampled_from(["step", "epoch", None]),
    validations=st.sampled_from([1.0, 0.5]),
    every=st.integers(1, 4),
)
@example(deaths=[("on_train_epoch_end", 6, 1)], interval="epoch", validations=1.0, every=3)
@example(deaths=[("on_train_batch_end", 9, 1)], interval="epoch", validations=1.0, every=2)
@example(
    deaths=[("on_train_batch_end", 9, 2), ("on_train_batch_end", 11, 1)],
    interval=None,
    validations=0.5,
    every=1,
)
def test_logs_and_weights_are_those_of_one_run(
    deaths: list[tuple[str, int, int]], interval: Any, validations: float, every: int
) -> None:
    """No row and no event is lost, doubled or another,
    on whatever number of ranks each start was.
    """
    with tempfile.TemporaryDirectory() as place:
        whole, resumed = Path(place, "whole"), Path(place, "resumed")
        fit(whole, 1, interval, validations, every, None)
        for hook, step, ranks in deaths:
            fit(resumed, ranks, interval, validations, every, Death(hook, step))
        fit(resumed, 1, interval, validations, every, None)
        on_one_rank = all(ranks == 1 for *_, ranks in deaths)
        (rows, events), (expected_rows, expected_events) = (
            logs(resumed, on_one_rank),
            logs(whole, on_one_rank),
        )
        assert rows == [pytest.approx(row, abs=1e-4) for row in expected_rows]
        assert [event[:2] for event in events] == [event[:2] for event in expected_events]
        assert [event[2] for event in events] == pytest.approx(
            [event[2] for event in expected_events], abs=1e-4
        )
        own = weights(resumed)
        for name, expected in weights(whole).items():
            torch.testing.assert_close(own[name], expected, rtol=0, atol=0 if on_one_rank else 1e-6)
