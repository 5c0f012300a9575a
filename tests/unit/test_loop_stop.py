"""When training stops, validates and reports: counted in optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.helpers.toy import Line, Recorder, loader, quiet, rows
from trainkit.api.callback import Callback
from trainkit.errors import ConfigError, DataError


class Watch(Callback):
    """Notes the step of each validation and report, and may ask for a stop."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at = stop_at
        self.validated: list[int] = []
        self.reported: list[tuple[int, list[str]]] = []
        self.epochs = 0

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        """Stop at the given step."""
        if trainer.global_step == self.stop_at:
            trainer.request_stop("the test says so")

    def on_train_epoch_end(self, trainer: Any, task: Any) -> None:
        """Count."""
        self.epochs += 1

    def on_validation_end(self, trainer: Any, task: Any) -> None:
        """Note when."""
        if not trainer.sanity_checking:
            self.validated.append(trainer.global_step)

    def on_metrics(self, trainer: Any, task: Any, metrics: dict[str, float], step: int) -> None:
        """Record the step and the values."""
        self.reported.append((step, sorted(metrics)))


class Rows(IterableDataset[Any]):
    """Rows without a length."""

    def __iter__(self) -> Iterator[Any]:
        data = rows(10)
        yield from (data[i] for i in range(10))


@pytest.mark.parametrize(("accumulate", "steps"), [(1, 6), (2, 3), (3, 2), (4, 2)])
def test_updates_are_counted_by_accumulation(tmp_path: Path, accumulate: int, steps: int) -> None:
    """An epoch of six microbatches makes 6, 3, 2 and 2 updates at accumulation 1 to 4."""
    recorder, trainer = Recorder(), quiet(tmp_path, accumulate_grad_batches=accumulate)
    trainer.callbacks.append(recorder)
    trainer.fit(Line(), loader(23))
    assert len(recorder.lrs) == trainer.global_step == steps
    assert trainer.state.samples_seen == 23


def test_max_steps_stops_inside_an_epoch(tmp_path: Path) -> None:
    """max_steps ends the run at that step, validates once more, and leaves the epoch unfinished."""
    watch = Watch()
    trainer = quiet(tmp_path, max_steps=8, callbacks=watch)
    trainer.fit(Line(), loader(23), loader(4))
    assert (trainer.global_step, trainer.current_epoch, trainer.state.step_in_epoch) == (8, 1, 2)
    assert (watch.validated, watch.epochs) == ([6, 8], 1)


def test_max_steps_at_an_epochs_end_finishes_it(tmp_path: Path) -> None:
    """A limit that falls on an epoch's last step ends the epoch as well."""
    watch = Watch()
    trainer = quiet(tmp_path, max_steps=6, callbacks=watch)
    trainer.fit(Line(), loader(23), loader(4))
    assert (trainer.current_epoch, trainer.state.step_in_epoch) == (1, 0)
    assert (watch.validated, watch.epochs) == ([6], 1)


def test_the_first_limit_wins(tmp_path: Path) -> None:
    """Of max_steps and max_epochs the one that is reached first ends the run."""
    for limits, steps in (
        ({"max_epochs": 2, "max_steps": 50}, 12),
        ({"max_epochs": 9, "max_steps": 7}, 7),
    ):
        trainer = quiet(tmp_path, **limits)
        trainer.fit(Line(), loader(23))
        assert trainer.global_step == steps


def test_empty_epochs_end_by_the_time_limit(tmp_path: Path) -> None:
    """Also if a hook ends each of them before its first step."""

    class Skips(Callback):
        def on_train_batch_start(
            self, trainer: Any, task: Any, batch: Any, batch_idx: int
        ) -> int | None:
            return -1

    trainer = quiet(tmp_path, max_steps=9, max_epochs=-1, max_time=0.3, callbacks=Skips())
    trainer.fit(Line(), loader(8))
    assert trainer.global_step == 0 and trainer.current_epoch > 0


def test_a_requested_stop_ends_after_the_step(tmp_path: Path) -> None:
    """request_stop ends the run after the current step, and its reason is stored."""
    watch = Watch(stop_at=3)
    trainer = quiet(tmp_path, callbacks=watch)
    trainer.fit(Line(), loader(23), loader(4))
    assert (trainer.global_step, trainer.state.stop_reason) == (3, "the test says so")
    assert trainer.should_stop
    assert watch.validated == [3]


@pytest.mark.parametrize(
    ("settings", "validated"),
    [
        ({}, [6, 12, 18, 24]),
        ({"check_val_every_n_epoch": 2}, [12, 24]),
        ({"check_val_every_n_epoch": 3}, [18]),
        ({"val_check_interval": 4}, [4, 10, 16, 22]),
        ({"val_check_interval": 3}, [3, 6, 9, 12, 15, 18, 21, 24]),
        ({"val_check_interval": 0.5}, [3, 6, 9, 12, 15, 18, 21, 24]),
        ({"val_check_interval": 0.7}, [4, 10, 16, 22]),
        ({"val_check_interval": 1.0}, [6, 12, 18, 24]),
        ({"val_check_interval": 4, "check_val_every_n_epoch": 2}, [10, 22]),
        ({"limit_val_batches": 0}, []),
    ],
)
def test_validation_comes_when_asked_for(
    tmp_path: Path, settings: dict[str, Any], validated: list[int]
) -> None:
    """Validation runs at epochs' ends or inside epochs, as often as the settings say."""
    watch = Watch()
    quiet(tmp_path, max_epochs=4, callbacks=watch, **settings).fit(Line(), loader(23), loader(4))
    assert watch.validated == validated


@pytest.mark.parametrize(
    ("settings", "validated"),
    [({"val_check_interval": 4}, [4, 8]), ({"check_val_every_n_epoch": 9}, [8])],
)
def test_a_run_ends_with_a_validation(
    tmp_path: Path, settings: dict[str, Any], validated: list[int]
) -> None:
    """A run that stops inside an epoch validates its final weights,
    also if no validation is due.
    """
    watch = Watch()
    quiet(tmp_path, max_steps=8, callbacks=watch, **settings).fit(Line(), loader(23), loader(4))
    assert watch.validated == validated


def test_a_validation_that_would_never_come_is_refused(tmp_path: Path) -> None:
    """An interval longer than the epoch has no effect, so it is refused."""
    with pytest.raises(
        ConfigError, match=r"trainer\.val_check_interval is 7, but epoch 0 has 6 steps"
    ):
        quiet(tmp_path, val_check_interval=7).fit(Line(), loader(23), loader(4))


def test_validation_goes_back_to_training_mode(tmp_path: Path) -> None:
    """Validation runs in eval mode without gradients, training in train mode."""
    modes: list[tuple[str, bool, bool]] = []

    class Modes(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            modes.append(("train", self.training, torch.is_grad_enabled()))
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            modes.append(("val", self.training, torch.is_grad_enabled()))

    quiet(tmp_path, val_check_interval=1, limit_train_batches=2).fit(Modes(), loader(23), loader(4))
    step = [("train", True, True), ("val", False, False)]
    assert modes == [("val", False, False), *step, *step]


def test_step_values_are_reported_every_n_steps(tmp_path: Path) -> None:
    """Step values and the learning rate are reported each log_every_n_steps, over epochs."""
    watch = Watch()
    quiet(tmp_path, max_epochs=2, log_every_n_steps=4, callbacks=watch).fit(Line(), loader(23))
    assert watch.reported == [
        (4, ["lr", "train/loss"]),
        (8, ["lr", "train/loss"]),
        (12, ["lr", "train/loss"]),
    ]


def test_a_step_value_is_the_mean_of_its_step(tmp_path: Path) -> None:
    """The reported step value is the mean over the samples of the step's microbatches."""
    values: list[float] = []

    class Fixed(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("value", float(batch_idx), on_epoch=True)
            return super().training_step(batch, batch_idx)

    class Keep(Callback):
        def on_metrics(self, trainer: Any, task: Any, metrics: dict[str, float], step: int) -> None:
            values.extend(v for k, v in metrics.items() if k == "value_step")

    trainer = quiet(tmp_path, accumulate_grad_batches=2, log_every_n_steps=1, callbacks=Keep())
    trainer.fit(Fixed(), loader(15))
    assert values == pytest.approx([0.5, (4 * 2 + 3 * 3) / 7])
    assert trainer.callback_metrics["value_epoch"] == pytest.approx(
        (0 * 4 + 1 * 4 + 2 * 4 + 3 * 3) / 15
    )


def test_a_stream_ends_when_it_is_used_up(tmp_path: Path) -> None:
    """A stream of unknown length makes epochs as long as it lasts."""
    trainer = quiet(tmp_path, max_epochs=2, accumulate_grad_batches=2)
    trainer.fit(Line(), DataLoader(Rows(), 4))
    assert (trainer.global_step, trainer.state.samples_seen) == (4, 20)


def test_a_stream_that_is_used_up_raises(tmp_path: Path) -> None:
    """An iterable that cannot restart yields nothing in its second epoch, which is an error."""
    with pytest.raises(DataError, match=r"yielded no batch in this epoch\. .*restart each epoch"):
        quiet(tmp_path, max_epochs=2).fit(Line(), iter([[torch.zeros(2, 3), torch.zeros(2, 1)]]))


def test_a_share_of_a_stream_is_no_interval(tmp_path: Path) -> None:
    """A share needs an epoch of known length; 0 is refused."""
    with pytest.raises(
        ConfigError,
        match=r"val_check_interval is 0\.5, a share of an epoch, but the training data is a stream",
    ):
        quiet(tmp_path, val_check_interval=0.5).fit(
            Line(), (batch for batch in loader(8)), loader(4)
        )
    with pytest.raises(
        ConfigError,
        match=r"val_check_interval is 0; it must be a whole number of steps, 1 or more, or a share",
    ):
        quiet(tmp_path, val_check_interval=0)
