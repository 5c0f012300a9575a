"""seed_everything: the random numbers of this process."""

from __future__ import annotations

import os
import random

import numpy as np
import torch


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed random, numpy and torch (all devices) of this process; return the seed, by default
    PL_GLOBAL_SEED's, or 0.

    `workers` and `verbose` have no effect: samples have random numbers of their own, whichever
    worker loads them.
    """
    seed = int(os.environ.get("PL_GLOBAL_SEED", "0")) if seed is None else seed
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)
    return seed
