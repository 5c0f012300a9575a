"""Optimisation: the contract of batch and learning rate, warm-up, the user's schedules, parameter
groups; optimizers and schedules of extensions by their names.
"""

from typing import Any

from trainkit.extension import public
from trainkit.optim.parameter_groups import decay_groups as decay_groups
from trainkit.optim.schedule_free import schedule_free as schedule_free


def __getattr__(name: str) -> Any:
    return public(__name__, name)
