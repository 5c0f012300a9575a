"""Optimisation: the contract of batch and learning rate, warm-up and schedules, decay, parameter groups, clipping."""

from trainkit.optim.decay import cosine, polynomial, step
from trainkit.optim.groups import decay_groups

__all__ = ["cosine", "decay_groups", "polynomial", "step"]
