"""Two checkpoints are compared part by part, and differences are named."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from trainkit.checkpoint.format import TRAINING, WEIGHTS
from trainkit.checkpoint.stateful import random_state
from trainkit.extensions.check_resume.compare import Names, compare, differences, unsteady

NAMES = Names(frozenset({"model.0.weight", "model.0.bias"}), [["model.0.weight", "model.0.bias"]])
Contents = dict[str, Any]


def contents() -> Contents:
    """Return the checkpoint of two ranks: weights under "weights", and training.pt's dict."""
    adam = {"step": torch.tensor(7.0), "exp_avg": torch.ones(2, 3)}
    return {
        "weights": {
            "model.0.weight": torch.linspace(-1, 1, 6).reshape(2, 3),
            "model.0.bias": torch.tensor([0.0, float("nan")]),
            "model.1.running_mean": torch.tensor([0.5]),
        },
        "training": {
            "state": {"batch_idx": 14, "global_step": 7, "epoch_values": {"val/loss": 0.5}},
            "optimizers": [
                {
                    "state": {0: adam, 1: copy.deepcopy(adam)},
                    "param_groups": [{"lr": 0.1, "params": [0, 1]}],
                }
            ],
            "rates": {"schedulers": [{"last_epoch": 7}], "scheduled": [0.1]},
            "scaler": {"scale": 1024.0, "growth": 0.0},
            "random": [random_state(), random_state()],
            "metrics": [{"log": {"loss": {"numbers": [1.0]}}}, {"log": {}}],
            "values": {"at": {"val/loss": 5}},
            "callbacks": {
                "EarlyStopping.0": {"wait_count": 2},
                "ModelCheckpoint.0": {"best": "a", "saved_at": 5},
            },
            "extra": {"ema": torch.ones(1)},
        },
    }


def put(folder: Path, saved: Contents) -> Path:
    """Write it as a checkpoint's files."""
    folder.mkdir()
    safetensors.torch.save_file(saved["weights"], folder / WEIGHTS)
    torch.save(saved["training"], folder / TRAINING)
    return folder


@pytest.fixture
def pair(tmp_path: Path) -> Callable[[Callable[[Contents], None]], tuple[Path, Path]]:
    """A function that returns two checkpoints, the second of which was changed."""

    def make(change: Callable[[Contents], None]) -> tuple[Path, Path]:
        saved = contents()
        first = put(tmp_path / "a", saved)
        change(saved)
        return first, put(tmp_path / "b", saved)

    return make


def test_equal_checkpoints_are_equal_in_every_part(pair: Any) -> None:
    """Values equal bit for bit, NaN included, are equal;
    every part is listed, with the number of values compared.
    """
    parts = compare(*pair(lambda saved: None), names=NAMES)
    assert {part.what: part.count for part in parts if part.what != "random states"} == {
        "weights": 2,
        "buffers": 1,
        "optimizer state": 7,
        "schedules": 2,
        "loss scale": 2,
        "counters": 3,
        "metrics so far": 2,
        "callbacks": 2,
        "kept by hooks": 1,
    }
    assert [part for part in parts if part.first or part.left_out] == []


def change(path: str, value: Any) -> Callable[[Contents], None]:
    """Return a function that sets one value, by its keys."""

    def apply(saved: Contents) -> None:
        *keys, last = (int(key) if key.isdigit() else key for key in path.split("/"))
        place: Any = saved
        for key in keys:
            place = place[key]
        place[last] = value(place[last]) if callable(value) else value

    return apply


def one_bit(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the last bit of its last element turned over."""
    changed = tensor.clone()
    changed.view(torch.int32).reshape(-1)[-1] ^= 1
    return changed


def drawn(state: Any) -> Any:
    """Return the state of Python's generator one number on."""
    generator = random.Random()
    version, numbers, gauss_next = state
    generator.setstate((version, tuple(numbers.tolist()), gauss_next))
    generator.random()
    version, changed, gauss_next = generator.getstate()
    return [version, torch.tensor(changed), gauss_next]


CHANGES = {
    "one bit of a weight": (
        lambda s: s["weights"].update({"model.0.weight": one_bit(s["weights"]["model.0.weight"])}),
        "weight model.0.weight: 1 of 6 elements differ, the first at [1, 2]: 1.0 and 1.0000001",
    ),
    "a buffer": (
        lambda s: s["weights"]["model.1.running_mean"].add_(1),
        "buffer model.1.running_mean: 1 of 1",
    ),
    "a weight that is missing": (
        lambda s: s["weights"].pop("model.0.bias"),
        "weight model.0.bias: a tensor of shape [2] and nothing",
    ),
    "another shape": (
        lambda s: s["weights"].update({"model.0.bias": torch.ones(3)}),
        "of shape [2] and torch.float32 of shape [3]",
    ),
    "a moment": (
        change("training/optimizers/0/state/1/exp_avg", one_bit),
        "optimizer 0, exp_avg of model.0.bias: 1 of 6",
    ),
    "a step count": (
        change("training/optimizers/0/state/0/step", torch.tensor(8.0)),
        "optimizer 0, step of model.0.weight: 1 of 1 elements differ, the first: 7.0 and 8.0",
    ),
    "a rate": (
        change("training/optimizers/0/param_groups/0/lr", 0.2),
        "optimizer 0, lr of group 0: 0.1 and 0.2",
    ),
    "a schedule": (
        change("training/rates/schedulers/0/last_epoch", 6),
        "schedule, schedulers[0].last_epoch: 7 and 6",
    ),
    "the loss scale": (
        change("training/scaler/scale", 512.0),
        "loss scale, scale: 1024.0 and 512.0",
    ),
    "a counter": (change("training/state/global_step", 8), "counter global_step: 7 and 8"),
    "numpy's numbers": (
        change("training/random/1/numpy", lambda s: [*s[:2], s[2] + 1, *s[3:]]),
        "random state of rank 1 (numpy)[2]: ",
    ),
    "torch's numbers": (
        change("training/random/0/torch", lambda s: torch.Generator().manual_seed(9).get_state()),
        "random state of rank 0 (torch): ",
    ),
    "Python's numbers": (
        change("training/random/1/python", drawn),
        "random state of rank 1 (python)[1]: ",
    ),
    "a rank's numbers": (
        change("training/random", lambda s: s[:1]),
        "random state of rank 1 (torch): a tensor of shape",
    ),
    "an epoch's mean": (
        change("training/metrics/0/log/loss/numbers", [1.0, 2.0]),
        "metrics of rank 0 (log).loss.numbers[1]: nothing and 2.0",
    ),
    "a callback": (
        change("training/callbacks/EarlyStopping.0/wait_count", 0),
        "state of EarlyStopping.0, wait_count: 2 and 0",
    ),
    "what a hook keeps": (
        change("training/extra/ema", torch.zeros(1)),
        "on_save_checkpoint's ema: 1 of 1 elements differ",
    ),
    "the sign of a number that is zero": (
        change("training/scaler/growth", -0.0),
        "loss scale, growth: 0.0 and -0.0",
    ),
    "what one alone has": (
        change("training/callbacks/EarlyStopping.0/more", 1),
        "state of EarlyStopping.0, more: nothing and 1",
    ),
    "an int for a float": (
        change("training/scaler/scale", 1024),
        "loss scale, scale: 1024.0 and 1024",
    ),
    "the sign of a zero": (
        lambda s: s["weights"].update({"model.0.bias": torch.tensor([-0.0, float("nan")])}),
        "weight model.0.bias: 1 of 2 elements differ, the first at [0]: 0.0 and -0.0",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_differs_is_named(name: str, pair: Any) -> None:
    """Each kind of difference, even of one bit, is found, and no other;
    its place and both values are named.
    """
    apply, said = CHANGES[name]
    (part,) = differences(*pair(apply), names=NAMES)
    assert said in str(part.first)


def test_places_on_disk_are_no_difference(pair: Any) -> None:
    """A ModelCheckpoint's list of checkpoints is not compared; the rest of its state is."""
    assert differences(*pair(change("training/callbacks/ModelCheckpoint.0/best", "b"))) == []


def test_where_a_checkpoint_was_last_written_counts(pair: Any) -> None:
    """A ModelCheckpoint that has saved at another step is another one."""
    (part,) = differences(*pair(change("training/callbacks/ModelCheckpoint.0/saved_at", 6)))
    assert part.first == "state of ModelCheckpoint.0, saved_at: 5 and 6"


def test_without_names_numbers_are_shown(pair: Any) -> None:
    """Without names, numbers identify parameters."""
    (part,) = differences(*pair(change("training/optimizers/0/state/1/exp_avg", one_bit)))
    assert str(part.first).startswith("optimizer 0, exp_avg of parameter 1: 1 of 6")


@pytest.mark.parametrize(("share", "is_equal"), [(0.5e-4, True), (2e-4, False)])
def test_rounding_is_a_share_of_the_largest_element(
    share: float, is_equal: bool, pair: Any
) -> None:
    """At another number of ranks a tensor may differ by its bound, and by no more;
    the bound is named.
    """
    parts = differences(
        *pair(lambda s: s["weights"]["model.0.weight"][0, 2:].add_(share)),
        rounding=True,
        names=NAMES,
    )
    assert [part.what for part in parts] == ([] if is_equal else ["weights"])
    assert is_equal or str(parts[0].first).endswith("(allowed: 1.0e-04)")


@pytest.mark.parametrize(
    ("last", "is_equal"), [(1.00001, True), (1.01, False), (float("nan"), False)]
)
def test_rounding_is_no_excuse_for_nan(last: float, is_equal: bool, tmp_path: Path) -> None:
    """NaN and infinity in a tensor widen no bound, and are equal only to themselves."""
    sides = []
    for name, value in (("a", 1.0), ("b", last)):
        saved = contents()
        saved["weights"]["model.0.bias"] = torch.tensor([float("nan"), float("inf"), value])
        sides.append(put(tmp_path / name, saved))
    assert (differences(sides[0], sides[1], rounding=True) == []) is is_equal
    assert (differences(sides[1], sides[0], rounding=True) == []) is is_equal


def test_at_other_ranks_only_what_is_of_a_rank_is_left_out(pair: Any) -> None:
    """Random states, collected metrics and others' states are reported as not compared;
    counters must be equal.
    """

    def apply(saved: Contents) -> None:
        change("training/random", lambda s: s[:1])(saved)
        change("training/state/batch_idx", 28)(saved)
        change("training/state/global_step", 8)(saved)

    parts = compare(*pair(apply), rounding=True, names=NAMES)
    left_out = {part.what for part in parts if part.left_out}
    assert left_out == {"random states", "metrics so far", "callbacks", "kept by hooks"}
    assert [part.first for part in parts if part.first] == ["counter global_step: 7 and 8"]


def test_what_two_equal_runs_do_not_share_can_be_passed_over(pair: Any) -> None:
    """A time in a callback's state is found to be unsteady by its name,
    and is then no difference.
    """
    folders = pair(change("training/callbacks/EarlyStopping.0/wait_count", 0))
    assert unsteady(*folders) == ["state of EarlyStopping.0, wait_count"]
    assert all(part.first is None for part in compare(*folders, ignored=unsteady(*folders)))
