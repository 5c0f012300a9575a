"""The order of samples, and what is random about one sample: functions of (seed, epoch, index), of nothing else.

So the order does not depend on ranks, workers, or where a run was interrupted, and neither does augmentation.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

_MASK = 2**64 - 1


def mix(*numbers: int) -> int:
    """Return a 63-bit hash of whole numbers (the finalizer of splitmix64, Steele et al. 2014, applied to each in turn)."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state + (number & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def shuffled(num_samples: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the permutation of an epoch, int64 of shape [num_samples]."""
    generator = torch.Generator().manual_seed(mix(seed, epoch))
    return torch.randperm(num_samples, generator=generator)


@contextlib.contextmanager
def random_numbers_of(seed: int, epoch: int, index: int) -> Iterator[None]:
    """Within the context torch, numpy and random draw from (seed, epoch, index); afterwards they go on as before."""
    before = _states()
    number = mix(seed, epoch, index)
    # The default generator itself: torch.manual_seed would also reset the GPUs' generators, in the step's way.
    torch.default_generator.manual_seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    random.seed(number)
    try:
        yield
    finally:
        _set_states(before)


class OwnRandomNumbers:
    """Random numbers of its own: within its context torch, numpy and random draw from them, and go on where they were."""

    def __init__(self, number: int) -> None:
        """Seed them."""
        with random_numbers_of(number, 0, 0):
            self._state = _states()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Draw from them within the context."""
        before = _states()
        _set_states(self._state)
        try:
            yield
        finally:
            self._state = _states()
            _set_states(before)


def _states() -> tuple[Any, ...]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _set_states(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


class SeededDataset(Dataset[Any]):
    """A map-style data set whose random augmentation is a function of (seed, epoch, index).

    It is asked for (epoch, index), so that workers that outlive an epoch need not be told which one it is.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        """Wrap `dataset`."""
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        """Return the sample `key = (epoch, index)`."""
        epoch, index = key
        with random_numbers_of(self.seed, epoch, index):
            return self.dataset[index]


def epoch_order(num_samples: int, shuffle: bool, seed: int, epoch: int, drawn: Sequence[int] | None) -> Sequence[int]:
    """Return the order of an epoch: a user's own sampler's where it drew one, else a permutation or 0, 1, 2, ..."""
    if drawn is not None:
        return drawn
    # numpy's: an element of a tensor would cost a tensor.
    order: Sequence[int] = shuffled(num_samples, seed, epoch).numpy() if shuffle else range(num_samples)  # type: ignore[assignment]
    return order
