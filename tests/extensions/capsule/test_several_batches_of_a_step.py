"""Capsules and spikes of batches that share a step, as those of gradients accumulated by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.by_hand import Seldom
from tests.helpers.toy import Line, loader, quiet
from trainkit.api.callback import Callback
from trainkit.callbacks import CrashCapsule, SpikeDetection
from trainkit.extensions.capsule.async_losses import AsyncLosses

FLAT = [1.0, 1.1, 0.9, 1.0, 1.05, 0.95]


def manifests(run_dir: Path) -> dict[str, Any]:
    """Return the capsules' manifests by name."""
    folders = sorted((run_dir / "capsules").iterdir())
    return {path.name: json.loads((path / "manifest.json").read_text()) for path in folders}


def fit(run_dir: Path, task: Seldom, *more: Callback, num_batches: int = 12) -> SpikeDetection:
    """Train on batches of four samples; return the detection."""
    spikes = SpikeDetection(window=8, warmup=2, deviations=None)
    callbacks = [spikes, CrashCapsule(), *more]
    quiet(run_dir, callbacks=callbacks).fit(task, loader(4 * num_batches))
    return spikes


@pytest.fixture(params=["at once", "two at a time"])
def arrival(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """When losses arrive: on a GPU several may come together."""
    ready = AsyncLosses.ready

    def in_pairs(self: AsyncLosses) -> list[tuple[int, float]]:
        return ready(self) if len(self._ready) != 1 else []

    if request.param != "at once":
        monkeypatch.setattr(AsyncLosses, "ready", in_pairs)
    return str(request.param)


def test_the_batch_of_a_spike_is_kept(
    arrival: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Batches 4 to 7 are of step 1: the samples that are printed and stored are those of the one
    whose loss jumped.
    """
    spikes = fit(tmp_path, Seldom([*FLAT, 9.0, *[1.0] * 5]))
    assert spikes.spikes == [(1, 9.0, 1.0)]
    assert "at step 1: 9, usually 1. Samples 24, 25, 26, 27" in capsys.readouterr().out
    ((name, about),) = manifests(tmp_path).items()
    assert (name, about["step"], about["step_in_epoch"]) == ("step=1-batch=6-rank=0", 1, 6)
    (microbatch,) = about["microbatches"]
    assert (microbatch["samples"], microbatch["loss"]) == ([24, 25, 26, 27], 9.0)
    is_own = about["weights"] == "of this step, before its update"
    assert is_own == (arrival == "at once")  # else its buffers are those of the next batch


def test_two_capsules_of_a_step_are_both_kept(arrival: str, tmp_path: Path) -> None:
    """Each is named after its batch, by the number of batches before it."""
    fit(tmp_path, Seldom([*FLAT[:4], math.nan, 1.0, math.nan, *[1.0] * 5]))
    kept = manifests(tmp_path)
    assert list(kept) == ["step=1-batch=4-rank=0", "step=1-batch=6-rank=0"]
    assert [about["microbatches"][0]["batch_idx"] for about in kept.values()] == [4, 6]


def test_the_update_that_spoilt_the_weights_is_kept(tmp_path: Path) -> None:
    """It is the last batch of the step before: the one that made the update."""

    class Spoils(Callback):
        def on_train_batch_end(self, trainer: Any, task: Any, *_: Any) -> None:
            if task.seen == 8:
                with torch.no_grad():
                    task.model.bias.fill_(float("inf"))

    fit(tmp_path, Seldom(), Spoils())
    ((name, about),) = manifests(tmp_path).items()
    assert name == "step=1-batch=7-rank=0"
    assert about["why"] == "its update made weights non-finite: the loss after it is inf"


def test_the_batch_of_an_error_is_kept(tmp_path: Path) -> None:
    """An error names the batch it occurred in, not the step's first."""

    class Fails(Seldom):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 6:
                raise ValueError("strange")
            super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match="strange"):
        fit(tmp_path, Fails())
    ((name, about),) = manifests(tmp_path).items()
    assert name == "step=1-batch=6-rank=0"
    assert about["microbatches"][0]["samples"] == [24, 25, 26, 27]


def test_a_batch_that_ends_its_epoch_is_not_kept(tmp_path: Path) -> None:
    """on_train_batch_start returned -1: the next epoch's first batch is that step's."""

    class Short(Line):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * math.nan if self.current_epoch else loss

    quiet(tmp_path, callbacks=[CrashCapsule()], max_epochs=2).fit(Short(), loader(16))
    about = manifests(tmp_path)["step=2-rank=0"]
    assert (about["epoch"], about["microbatches"][0]["batch_idx"]) == (1, 0)
