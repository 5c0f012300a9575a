"""Optimisation: the contract of batch and learning rate, warm-up and schedules, decay, LARS and LAMB, parameter groups."""

from trainkit.optim.decay import cosine, polynomial, step
from trainkit.optim.forms import decay_groups
from trainkit.optim.lamb import LAMB
from trainkit.optim.lars import LARS

__all__ = ["LAMB", "LARS", "cosine", "decay_groups", "polynomial", "step"]
