"""The random numbers of a `collate_fn`."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.utils.data import default_collate, default_convert

from trainkit.data.order import mix, random_numbers_of


def seeded_collate(own: Any, source: Any, seed: int) -> Any:
    """Return a `collate_fn` whose random numbers (MixUp, padding) are those of its batch, as a
    sample's are those of the sample. torch's draw none, and are returned as they are.

    Args:
        own: the user's, or None.
        source: the data set; its `first` is of the batch that was read last.
        seed: of the run.
    """
    if own in (None, default_collate, default_convert):
        return own
    return partial(_collate, own, source, mix(seed, 1))  # not those of its first sample


def _collate(own: Any, source: Any, seed: int, samples: Any) -> Any:
    with random_numbers_of(seed, *source.first):
        return own(samples)
