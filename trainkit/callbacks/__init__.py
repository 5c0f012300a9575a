"""Callbacks that come with trainkit."""

from trainkit.callbacks.checkpoint import ModelCheckpoint
from trainkit.callbacks.divergence_guard import DivergenceGuard
from trainkit.callbacks.early_stopping import EarlyStopping
from trainkit.callbacks.elastic import Elastic
from trainkit.callbacks.fault_injection import FaultInjection
from trainkit.callbacks.finetuning import BackboneFinetuning, BaseFinetuning
from trainkit.callbacks.goodput import Goodput
from trainkit.callbacks.stragglers import Stragglers
from trainkit.callbacks.swa import StochasticWeightAveraging
from trainkit.callbacks.watchdog import Watchdog
from trainkit.callbacks.weight_averaging import EMA

__all__ = [
    "BackboneFinetuning",
    "BaseFinetuning",
    "DivergenceGuard",
    "EMA",
    "EarlyStopping",
    "Elastic",
    "FaultInjection",
    "Goodput",
    "ModelCheckpoint",
    "StochasticWeightAveraging",
    "Stragglers",
    "Watchdog",
]
