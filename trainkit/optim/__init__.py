"""Optimisation: the contract of batch and learning rate, warm-up and schedules, decay,
optimizers, parameter groups.
"""

from trainkit.optim.adafactor import Adafactor
from trainkit.optim.decay import constant, cosine, polynomial, step, wsd
from trainkit.optim.lamb import LAMB
from trainkit.optim.lars import LARS
from trainkit.optim.muon import Muon
from trainkit.optim.parameter_groups import decay_groups
from trainkit.optim.schedule_free import schedule_free

__all__ = [
    "LAMB",
    "LARS",
    "Adafactor",
    "Muon",
    "constant",
    "cosine",
    "decay_groups",
    "polynomial",
    "schedule_free",
    "step",
    "wsd",
]
