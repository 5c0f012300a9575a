"""Optimisation: the contract of batch and learning rate, warm-up and schedules, decay,
LARS and LAMB, parameter groups.
"""

from trainkit.optim.decay import cosine, polynomial, step
from trainkit.optim.lamb import LAMB
from trainkit.optim.lars import LARS
from trainkit.optim.parameter_groups import decay_groups

__all__ = ["LAMB", "LARS", "cosine", "decay_groups", "polynomial", "step"]
