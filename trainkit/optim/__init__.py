"""Optimisation: the contract of batch and learning rate, warm-up and schedules, decay,
parameter groups; optimizers of extensions by their names.
"""

from typing import Any

from trainkit.extension import public
from trainkit.optim.decay import constant as constant
from trainkit.optim.decay import cosine as cosine
from trainkit.optim.decay import polynomial as polynomial
from trainkit.optim.decay import step as step
from trainkit.optim.decay import wsd as wsd
from trainkit.optim.parameter_groups import decay_groups as decay_groups
from trainkit.optim.schedule_free import schedule_free as schedule_free


def __getattr__(name: str) -> Any:
    return public(__name__, name)
