"""The contract of batch and learning rate:
accumulation, factor, warm-up, and the words for them.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from trainkit.errors import ConfigError
from trainkit.optim.batch_plan import BatchPlan, derive_accumulation, derive_warmup


def contract(**changes: Any) -> BatchPlan:
    """Return a contract of 4 ranks of 8 samples, 2 accumulated: 64 samples a step."""
    known: dict[str, Any] = {
        "batch_size": 8,
        "world_size": 4,
        "accumulate": 2,
        "lr_scaling": "linear",
        "lr_reference_batch_size": None,
        "warmup_steps": 0,
    }
    return BatchPlan(**(known | changes))


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({}, 4.0),  # one rank's batch of a step is the reference: accumulation does not count
        ({"world_size": 1}, 1.0),
        ({"lr_scaling": "sqrt"}, 2.0),
        ({"lr_scaling": "none"}, 1.0),
        ({"lr_reference_batch_size": 16}, 4.0),
        ({"lr_reference_batch_size": 256}, 0.25),
        ({"lr_reference_batch_size": 16, "lr_scaling": "sqrt"}, 2.0),
        ({"batch_size": None}, 4.0),
    ],
)
def test_the_factor_follows_the_global_batch(changes: dict[str, Any], factor: float) -> None:
    """The factor is global batch / reference, its root, or 1;
    without a reference it is the number of ranks.
    """
    assert contract(**changes).lr_factor == factor


def test_a_reference_needs_a_known_batch() -> None:
    """A reference has no effect if the batch size is unknown, so it is refused."""
    with pytest.raises(
        ConfigError, match=r"trainer\.lr_reference_batch_size is 256, but .* unknown size"
    ):
        contract(batch_size=None, lr_reference_batch_size=256)


def test_warmup_goes_from_the_users_rate_to_the_scaled_one() -> None:
    """With a factor above 1 the multiplier rises in equal parts from 1 / factor,
    and reaches 1 at the last step.
    """
    rates = [contract(warmup_steps=3).warmup(step) for step in range(5)]
    assert rates == pytest.approx([0.5, 0.75, 1.0, 1.0, 1.0])


@pytest.mark.parametrize("scaling", ["none", "sqrt"])
def test_warmup_goes_from_zero_where_sgds_rule_scales_nothing_up(scaling: Any) -> None:
    """With a factor of 1 or less, or by an adaptive optimizer's rule, the multiplier rises from 0."""
    rates = [contract(lr_scaling=scaling, warmup_steps=4).warmup(step) for step in range(5)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_no_warmup_is_no_multiplier() -> None:
    """Without warm-up the first step has the full rate."""
    assert contract().warmup(0) == 1.0


@pytest.mark.parametrize(
    ("accumulate", "requested", "expected"),
    [(None, None, 1), (3, None, 3), (None, 64, 2), (2, 64, 2), (None, 32, 1)],
)
def test_accumulation_is_derived(
    accumulate: int | None, requested: int | None, expected: int
) -> None:
    """The accumulation is as given, or derived from the global batch at 4 ranks of 8."""
    assert derive_accumulation(8, 4, accumulate, requested) == [(0, expected)]


def test_accumulation_by_epoch() -> None:
    """A mapping gives the first epochs;
    the contract of an epoch has its own global batch and factor.
    """
    assert derive_accumulation(8, 4, {5: 1, 2: 4}, None) == [(0, 1), (2, 4), (5, 1)]
    whole = contract(accumulate=1, later=((2, 4), (5, 1)), lr_reference_batch_size=16)
    assert [whole.at(epoch).global_batch_size for epoch in (0, 1, 2, 4, 5, 9)] == [
        32,
        32,
        128,
        128,
        32,
        32,
    ]
    assert [whole.at(epoch).lr_factor for epoch in (0, 2, 5)] == [2.0, 8.0, 2.0]
    assert dict(whole.describe([0.1]))["global batch"].endswith(
        "= 32 samples; from epoch 3: x 4 = 128; from epoch 6: x 1 = 32"
    )
    with pytest.raises(
        ConfigError,
        match=(
            r"accumulate_grad_batches is \{0: 2\}, and trainer\.global_batch_size=64 requests one"
        ),
    ):
        derive_accumulation(8, 4, {0: 2}, 64)


def test_contracts_tell_their_differences() -> None:
    """Differences to a checkpoint's contract are reported by name."""
    assert contract().differences(contract()) == []
    said = contract(world_size=4, accumulate=2).differences(contract(world_size=2, accumulate=2))
    assert said == [
        "world_size was 4, is 2",
        "global_batch_size was 64, is 32",
        "lr_factor was 4, is 2",
    ]


@pytest.mark.parametrize(("requested", "nearest"), [(50, "32 or 64"), (31, "32"), (65, "64 or 96")])
def test_a_global_batch_that_cannot_be_met_names_the_nearest(requested: int, nearest: str) -> None:
    """A global batch that is no multiple is refused with the nearest ones that can be met."""
    words = (
        rf"global_batch_size is {requested}, .* data\.batch_size x ranks = 8 x 4 = 32\. Nearest:"
        rf" {nearest};"
    )
    with pytest.raises(ConfigError, match=words):
        derive_accumulation(8, 4, None, requested)


def test_two_answers_that_disagree_are_refused() -> None:
    """Accumulation and global batch may both be given only if they agree."""
    with pytest.raises(
        ConfigError,
        match=r"accumulate_grad_batches is 3, but trainer\.global_batch_size=64 needs 2",
    ):
        derive_accumulation(8, 4, 3, 64)


def test_a_global_batch_needs_a_known_batch() -> None:
    """For a stream of unknown batches the accumulation cannot be derived."""
    with pytest.raises(ConfigError, match=r"global_batch_size is 64, but .* unknown size"):
        derive_accumulation(None, 4, None, 64)


@pytest.mark.parametrize(
    ("steps", "epochs", "per_epoch", "expected"),
    [
        (None, None, 10, 0),
        (7, None, None, 7),
        (None, 2.0, 10, 20),
        (None, 0.25, 10, 2),
        (None, 0.0, None, 0),
    ],
)
def test_warmup_is_counted_in_steps(
    steps: int | None, epochs: float | None, per_epoch: int | None, expected: int
) -> None:
    """Warm-up in epochs becomes steps of the epoch's length."""
    assert derive_warmup(steps, epochs, lambda epoch: per_epoch) == expected


@pytest.mark.parametrize(("epochs", "expected"), [(1.0, 8), (2.0, 10), (2.5, 11), (1.25, 8)])
def test_warmup_over_epochs_of_different_lengths(epochs: float, expected: int) -> None:
    """If the accumulation changes, warm-up in epochs counts each epoch's own steps."""
    assert derive_warmup(None, epochs, lambda epoch: 8 if epoch == 0 else 2) == expected


@pytest.mark.parametrize(
    ("steps", "epochs", "words"), [(3, 1.0, "set only one"), (None, 1.0, "has no length")]
)
def test_a_warmup_that_cannot_be_counted_is_refused(
    steps: int | None, epochs: float, words: str
) -> None:
    """Two forms at once, and epochs of unknown length, are refused."""
    with pytest.raises(ConfigError, match=words):
        derive_warmup(steps, epochs, lambda epoch: None)


@pytest.mark.parametrize(
    ("changes", "batch", "rate"),
    [
        (
            {},
            "8 per rank x 4 ranks x 2 accumulated = 64 samples",
            "0.1 x 4 ranks = 0.4 (lr_scaling=linear)",
        ),
        (
            {"world_size": 1, "lr_scaling": "none"},
            "8 per rank x 1 rank x 2 accumulated = 16 samples",
            "0.1 (lr_scaling=none)",
        ),
        (
            {"lr_reference_batch_size": 16, "lr_scaling": "sqrt", "warmup_steps": 5},
            "8 per rank x 4 ranks x 2 accumulated = 64 samples",
            "0.1 x sqrt(64 / 16) = 0.2 (lr_scaling=sqrt), warm-up from 0 over 5 steps",
        ),
        (
            {"batch_size": None, "world_size": 1, "warmup_steps": 5},
            "? per rank x 1 rank x 2 accumulated = ? samples",
            "0.1 x 1 rank = 0.1 (lr_scaling=linear), warm-up from 0 over 5 steps",
        ),
    ],
)
def test_the_contract_is_described_in_words(changes: dict[str, Any], batch: str, rate: str) -> None:
    """The banner shows the arithmetic of batch and rate, equal rates once."""
    assert contract(**changes).describe([0.1, 0.1]) == [
        ("global batch", batch),
        ("learning rate", rate),
    ]


def test_rates_of_groups_are_shown_each() -> None:
    """Parameter groups with different rates are listed."""
    (_, _), (_, rate) = contract().describe([0.1, 0.01])
    assert rate.startswith("0.1, 0.01 x 4 ranks = 0.4, 0.04 ")


def test_a_checkpoint_keeps_the_contract() -> None:
    """The contract is saved as plain values from which it can be built again."""
    assert BatchPlan(**contract(warmup_steps=3).to_dict()) == contract(warmup_steps=3)
    assert math.isclose(contract().lr_factor, BatchPlan(**contract().to_dict()).lr_factor)
