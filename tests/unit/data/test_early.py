"""The next batch, fetched before the host waits for the sums of this step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.toy import Line, Net, loader, quiet
from trainkit.callbacks import ModelCheckpoint, Timeline
from trainkit.data.early import EarlyBatches, Fetching, Moved
from trainkit.device.transfer import Mover
from trainkit.engine.collectives import Collectives
from trainkit.extensions.timeline.recording import Recording


def early_of(batches: Iterator[Any]) -> EarlyBatches:
    """Return batches that are moved by a change of sign."""
    return EarlyBatches(batches, lambda batch: -batch, Fetching())


def test_a_batch_that_was_fetched_is_moved_once() -> None:
    """Others come as they were loaded."""
    early = early_of(iter([1, 2, 3]))
    early.fetch()
    early.fetch()
    assert list(early) == [Moved(-1), 2, 3]


def test_the_end_of_the_data_is_the_end_of_the_epoch() -> None:
    """A fetch in the epoch's last step finds nothing."""
    early = early_of(iter([1]))
    assert next(early) == 1
    early.fetch()
    assert list(early) == []


def test_an_error_of_the_data_is_raised_when_the_batch_is_due() -> None:
    """The step before it is finished first."""

    def batches() -> Iterator[int]:
        yield 1
        raise OSError("unreadable")

    early = early_of(batches())
    assert next(early) == 1
    early.fetch()
    with pytest.raises(OSError, match="unreadable"):
        next(early)


def test_the_wait_for_a_batch_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits add up, with the end of the last one."""
    times = iter([10, 17, 20, 25])
    monkeypatch.setattr("trainkit.data.early.time.perf_counter_ns", lambda: next(times))
    early = early_of(iter([1, 2]))
    for _ in range(2):
        early.fetch()
        next(early)
    assert early._fetching == Fetching(waited_ns=12, ended_ns=25)


class Ordered(Net):
    """Notes when batches are moved, and when the sums have come."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []
        self.first: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.order.append("step")
        self.first.append(float(batch[1][0]))
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """The sums are there."""
        self.order.append("sums")


class Hooked(Ordered):
    """Changes each batch on the device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return it, doubled."""
        return [2 * tensor for tensor in batch]


def fitted(
    folder: Path,
    task: Ordered,
    monkeypatch: pytest.MonkeyPatch,
    waits: bool,
    num_workers: int = 1,
    **settings: Any,
) -> Ordered:
    """Fit on 16 rows in two epochs, on an engine that waits for sums, or not."""

    class Noting(Mover):
        def __call__(self, batch: Any) -> Any:
            task.order.append("moved")
            return super().__call__(batch)

    monkeypatch.setattr("trainkit.run.stage_feeds.Mover", Noting)
    monkeypatch.setattr("trainkit.run.feed_maker.Mover", Noting)
    monkeypatch.setattr(Collectives, "waits_for_device", waits)
    data = loader(16, shuffle=True, num_workers=num_workers)
    quiet(folder, max_epochs=2, seed=3, **settings).fit(task, data)
    return task


def test_the_next_steps_batch_is_moved_before_the_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only there, once each, and the run is the same to the last bit."""
    late = fitted(tmp_path / "late", Ordered(), monkeypatch, False, accumulate_grad_batches=2)
    early = fitted(tmp_path / "early", Ordered(), monkeypatch, True, accumulate_grad_batches=2)
    step = ["moved", "step", "moved", "step", "sums"]
    assert late.order[-10:] == [*step, *step]
    assert early.order[-10:] == ["moved", "step", "moved", "step", "moved", "sums"] + [
        "step",
        "moved",
        "step",
        "sums",
    ]
    assert early.first == late.first
    for own, other in zip(early.state_dict().values(), late.state_dict().values(), strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param(Ordered, {"num_workers": 0}, id="a data set in this process"),
        pytest.param(Hooked, {}, id="a hook of the user's"),
        pytest.param(Ordered, {"on_bad_sample": "skip"}, id="batches may be skipped"),
    ],
)
def test_where_it_could_change_the_run_nothing_is_fetched_early(
    kind: type[Ordered],
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Random numbers are drawn in the order of the steps."""
    task = fitted(tmp_path, kind(), monkeypatch, True, **settings)
    assert task.order[-6:] == ["moved", "step", "sums"] * 2


def test_a_run_that_ends_in_an_epoch_resumes_with_the_batch_that_was_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch counts when its step is done."""
    whole = fitted(tmp_path / "whole", Ordered(), monkeypatch, True)
    settings = {"callbacks": [ModelCheckpoint(every_n_train_steps=1)]}
    fitted(tmp_path / "parts", Ordered(), monkeypatch, True, max_steps=3, **settings)
    trainer = quiet(tmp_path / "parts", max_epochs=2, seed=3, **settings)
    resumed = Ordered()
    trainer.fit(resumed, loader(16, shuffle=True, num_workers=1), ckpt_path="auto")
    assert resumed.first == whole.first[3:]


def test_a_recording_shows_the_wait_as_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes between the backward pass and the sums."""
    marks: list[list[str]] = []
    end_step = Recording.end_step

    def noted(self: Recording, is_last: bool = False) -> None:
        marks.append([name for name, _ in self._marks])
        end_step(self, is_last)

    monkeypatch.setattr(Recording, "end_step", noted)
    monkeypatch.setattr(Collectives, "waits_for_device", True)
    timeline = Timeline(0, 4, torch_profiler=False)
    quiet(tmp_path, max_epochs=1, callbacks=[timeline]).fit(Line(), loader(16, num_workers=1))
    assert [names.count("data") for names in marks] == [2, 2, 2, 1]
    assert marks[0].index("backward") < len(marks[0]) - 1 - marks[0][::-1].index("data")
