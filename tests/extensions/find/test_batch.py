"""find batch: the largest microbatch that fits, to a sixteenth,
and the one that keeps the global batch.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipes.image_classifier import ImageClassifier
from trainkit.config import compose
from trainkit.config.compose import ComposedJob
from trainkit.errors import ConfigError
from trainkit.extensions.find.batch import Batches, find_batch, largest_that_fits
from trainkit.extensions.script.subject import ConfigSubject


@given(st.integers(0, 5000), st.integers(1, 600), st.integers(1, 4096))
def test_the_largest_is_found(limit: int, first: int, most: int) -> None:
    """To a sixteenth, in few trials, each size once; nothing above `most` is tried."""
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    largest, above = largest_that_fits(fits, min(first, most), most)
    assert len(tried) == len(set(tried)) <= 30 and max(tried) <= most
    if limit == 0:
        assert (largest, above) == (None, 1)
    elif limit >= most:
        assert (largest, above) == (most, None)
    else:
        assert largest is not None and above is not None
        assert largest <= limit < above and above - largest <= max(1, largest // 16)


@pytest.mark.parametrize(
    ("largest", "batch", "ranks", "choice"),
    [
        (100, 256, 2, (64, 2)),
        (500, 256, 2, (128, 1)),
        (1, 256, 2, (1, 128)),
        (50, 90, 3, (30, 1)),
        (None, 64, 2, None),
    ],
)
def test_the_global_batch_is_kept(
    largest: int | None, batch: int, ranks: int, choice: tuple[int, int] | None
) -> None:
    """By the largest microbatch that divides a rank's part of it, and accumulation."""
    assert Batches((), largest, False, batch, ranks).choice() == choice


def subject_of(*words: str) -> ConfigSubject:
    """Return the fit of a config, as the command has it."""
    jobs: list[Any] = []
    overrides = ["conf=mlp", "engine=single", *words]
    compose.run("find", overrides, True, jobs.append)
    return ConfigSubject(jobs[0], overrides)


def test_what_is_out_of_memory_ends_a_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Real steps of a real task, with its hooks, which has room for 40 samples; random numbers
    stay.
    """
    monkeypatch.chdir(tmp_path)
    plain, sizes = ImageClassifier.training_step, []

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        sizes.append(len(batch[0]))
        if len(batch[0]) > 40:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(self, batch, batch_idx)

    def clip(self: Any, optimizer: Any, **trainers: Any) -> None:
        clipped.append(optimizer)

    clipped: list[Any] = []
    monkeypatch.setattr(ImageClassifier, "training_step", step)
    monkeypatch.setattr(ImageClassifier, "configure_gradient_clipping", clip)
    before = torch.get_rng_state()
    batch = find_batch(subject_of("trainer.global_batch_size=128"), memory_gb=1000)
    assert clipped
    assert batch.largest is not None and 38 <= batch.largest <= 40 and not batch.is_limited
    assert batch.choice() == (32, 4) and batch.global_batch == 128
    assert {tried.batch_size for tried in batch.tried if tried.failed} == {
        size for size in sizes if size > 40
    }
    assert all(tried.peak_bytes > 10**7 for tried in batch.tried if not tried.failed)
    assert torch.equal(before, torch.get_rng_state()) and list(tmp_path.iterdir()) == []


def test_memory_of_the_cpu_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Below the process's own memory nothing fits; the limit must be given there."""
    monkeypatch.chdir(tmp_path)
    batch = find_batch(subject_of(), memory_gb=0.01)
    assert batch.largest is None and batch.choice() is None
    assert [tried.batch_size for tried in batch.tried] == [32, 16, 8, 4, 2, 1]
    with pytest.raises(
        ConfigError,
        match="memory_gb is missing: on the CPU it must be the memory that a rank may use",
    ):
        find_batch(subject_of())


@pytest.mark.parametrize(
    ("data", "remedy"),
    [
        ({"_target_": "recipes.digits.Digits"}, "begin with: data.batch_size=32"),
        (
            {"_target_": "trainkit.DataModule"},
            "which takes no batch_size, so none can be tried. Give",
        ),
        ({}, "Give the data as a DataModule"),
        ({"batch_size": "x"}, "data.batch_size is 'x'; it must be a whole number"),
    ],
)
def test_a_config_without_a_batch_size_is_refused(data: dict[str, Any], remedy: str) -> None:
    """With what is missing, and what to give."""
    with pytest.raises(ConfigError, match=re.escape(remedy)):
        config = {"trainer": {}, "data": data, "task": {}, "run_dir": "runs/x"}
        find_batch(ConfigSubject(ComposedJob("find", config, {}), []), memory_gb=1)
