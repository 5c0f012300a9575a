"""seed_everything: the random numbers of this process."""

from __future__ import annotations

import os
import random

import numpy as np
import torch

_of_user: list[int] = []  # the seed of the last call of seed_everything


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed random, numpy and torch (all devices) of this process, and the Trainers without a `seed`
    that are made after it; return the seed, by default PL_GLOBAL_SEED's, or 0.

    `workers` and `verbose` have no effect: samples have random numbers of their own, whichever
    worker loads them.
    """
    seed = int(os.environ.get("PL_GLOBAL_SEED", "0")) if seed is None else seed
    _of_user[:] = [seed]
    seed_process(seed)
    return seed


def seed_of_user() -> int:
    """Return the seed of the last call of seed_everything, or 0."""
    return _of_user[0] if _of_user else 0


def seed_process(seed: int) -> None:
    """Seed random, numpy and torch of this process, and no Trainer."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)
