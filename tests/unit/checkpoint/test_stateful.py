"""The state of a run in a checkpoint, and its restoration."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.toy import Line, loader, quiet
from trainkit.api.callback import Callback
from trainkit.checkpoint import stateful
from trainkit.checkpoint.format import load_training, verify
from trainkit.checkpoint.stateful import random_state
from trainkit.errors import CheckpointError, TaskError
from trainkit.extensions.capsule.step_record import raw_random


class Memory(Callback):
    """Remembers a value over a restart."""

    def __init__(self, value: Any = None) -> None:
        self.value = value
        self.extra: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Return the value."""
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it back."""
        self.value = state_dict["value"]

    def on_save_checkpoint(self, trainer: Any, task: Any, checkpoint: dict[str, Any]) -> None:
        """Keep something beside."""
        checkpoint["extra_value"] = self.value

    def on_load_checkpoint(self, trainer: Any, task: Any, checkpoint: dict[str, Any]) -> None:
        """Take it back."""
        self.extra = checkpoint["extra_value"]


def saved(tmp_path: Path, *callbacks: Callback, task: Line | None = None) -> Path:
    """Train a little and return a checkpoint."""
    trainer = quiet(tmp_path, max_steps=2, callbacks=list(callbacks))
    trainer.fit(task or Line(), loader())
    trainer.save_checkpoint(tmp_path / "saved")
    return tmp_path / "saved"


def resumed(tmp_path: Path, *callbacks: Callback, task: Line | None = None) -> None:
    """Resume from the checkpoint."""
    quiet(tmp_path, max_steps=3, callbacks=list(callbacks)).fit(
        task or Line(), loader(), ckpt_path=str(tmp_path / "saved")
    )


def test_a_number_of_numpy_is_saved_as_a_number(tmp_path: Path) -> None:
    """A hook's mean of losses would end the run at its first save."""

    class Means(Callback):
        def state_dict(self) -> dict[str, Any]:
            counts = dict(zip(*np.unique([7, 7, 8], return_counts=True), strict=True))
            return {"best": np.mean([1.0, 2.0]), "counts": [np.int64(3)], "classes": counts}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.loaded = state_dict

    saved(tmp_path, Means())
    resumed(tmp_path, callback := Means())
    assert callback.loaded == {"best": 1.5, "counts": [3], "classes": {7: 2, 8: 1}}
    assert type(callback.loaded["best"]) is float


def test_random_states_round_trip() -> None:
    """torch, numpy and random continue with the numbers that they would have drawn."""
    random.gauss(0, 1), np.random.randn(1)  # both keep half of a pair for the next draw
    state = stateful.random_state()
    drawn = (
        torch.rand(3).tolist(),
        np.random.randn(3).tolist(),
        [random.gauss(0, 1) for _ in range(3)],
    )
    stateful.set_random_state(state)
    assert (
        torch.rand(3).tolist(),
        np.random.randn(3).tolist(),
        [random.gauss(0, 1) for _ in range(3)],
    ) == drawn


def test_a_checkpoint_keeps_the_whole_run(tmp_path: Path) -> None:
    """Counters, optimizers, rates, loss scale, each rank's random state,
    callbacks and extras are saved.
    """
    kept = load_training(saved(tmp_path, Memory(3)))
    assert sorted(kept) == [
        "callbacks",
        "communication",
        "communication_of_ranks",
        "contract",
        "extra",
        "facts",
        "metrics",
        "optimizers",
        "random",
        "rates",
        "scaler",
        "state",
        "validations",
        "values",
    ]
    assert kept["state"]["global_step"] == 2
    assert len(kept["random"]) == 1
    assert kept["extra"] == {"extra_value": 3}


def test_the_manifest_describes_the_run(tmp_path: Path) -> None:
    """The manifest can be read without torch: step, metrics, contract, versions."""
    manifest = verify(saved(tmp_path))
    assert (manifest["global_step"], manifest["epoch"]) == (2, 0)
    assert manifest["contract"]["batch_size"] == 4
    assert set(manifest["versions"]) == {"trainkit", "torch", "python"}


def test_callbacks_of_one_class_have_separate_states(tmp_path: Path) -> None:
    """Two callbacks of one class get their own states back, by their place;
    extras are restored too.
    """
    saved(tmp_path, Memory("first"), Memory("second"))
    callbacks = [Memory(), Memory()]
    resumed(tmp_path, *callbacks)
    assert [c.value for c in callbacks] == ["first", "second"]
    assert callbacks[0].extra == "second"


def test_a_new_callback_starts_afresh(tmp_path: Path) -> None:
    """A callback that the checkpoint does not know keeps its own state."""
    trainer = quiet(tmp_path, max_steps=2)
    trainer.fit(Line(), loader())
    trainer.save_checkpoint(tmp_path / "saved")

    class Fresh(Memory):
        def on_load_checkpoint(self, *_: Any) -> None:
            assert self.value == "own"

    resumed(tmp_path, Fresh("own"))


@pytest.mark.parametrize(
    "value",
    [
        None,
        1.5,
        [1, (2, "a")],
        {"a": {1, 2}},
        torch.zeros(2),
        Counter("aa"),
        torch.float16,
        b"bytes",
        1j,
    ],
)
def test_plain_values_are_kept(tmp_path: Path, value: Any) -> None:
    """Tensors and plain values of any nesting are restored."""
    saved(tmp_path, Memory(value))
    back = Memory()
    resumed(tmp_path, back)
    assert (
        torch.equal(back.value, value) if isinstance(value, torch.Tensor) else back.value == value
    )


@pytest.mark.parametrize(
    "value",
    [np.zeros(2), Path("a"), frozenset({1}), object(), {"a": [np.zeros(1)]}],
)
def test_what_no_reader_would_take_is_refused_when_it_is_saved(tmp_path: Path, value: Any) -> None:
    """An object that a safe reader refuses is refused at the first checkpoint, not on resume."""
    with pytest.raises(
        TaskError,
        match=r"^The checkpoint's callbacks\.Memory\.0\.value.* is of type .*tensors and plain",
    ):
        saved(tmp_path, Memory(value))
    assert not (tmp_path / "saved").exists()


def test_another_number_of_optimizers_does_not_fit(tmp_path: Path) -> None:
    """A checkpoint of another number of optimizers is refused."""

    class Two(Line):
        def configure_optimizers(self) -> Any:
            return [super().configure_optimizers(), super().configure_optimizers()]

    saved(tmp_path)
    with pytest.raises(CheckpointError, match="has 1 optimizers, this task 2: they do not fit"):
        resumed(tmp_path, task=Two())


def test_another_optimizers_state_does_not_fit(tmp_path: Path) -> None:
    """A checkpoint of an optimizer with other groups is refused."""

    class Groups(Line):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([{"params": [p]} for p in self.parameters()], lr=0.1)

    saved(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"optimizer state does not fit this task: .*parameter group"
    ):
        resumed(tmp_path, task=Groups())


@pytest.mark.parametrize("is_first", [True, False])
def test_another_class_of_optimizers_does_not_fit(tmp_path: Path, is_first: bool) -> None:
    """A checkpoint of Adam is refused by SGD, whose momentum it lacks, and one of SGD by Adam."""

    class Adam(Line):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.1)

    saved(tmp_path, task=Adam() if is_first else Line(momentum=0.9))
    expected = "has amsgrad, .*no dampening, .*SGD" if is_first else "no amsgrad, .*run's Adam"
    with pytest.raises(CheckpointError, match=expected):
        resumed(tmp_path, task=Line(momentum=0.9) if is_first else Adam())


def test_a_rank_on_the_cpu_leaves_the_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking a GPU that nothing has used yet for its random state would make a context there."""

    def touched(*device: Any) -> Tensor:
        raise AssertionError("the GPU was asked")

    monkeypatch.setattr(
        torch,
        "cuda",
        SimpleNamespace(
            is_available=lambda: True, is_initialized=lambda: False, get_rng_state=touched
        ),
    )
    assert random_state()["cuda"] is None
    assert raw_random()[1] is None
