"""Callbacks that come with trainkit; those of extensions are found by their names."""

from typing import Any

from trainkit.api.callback import Callback as Callback
from trainkit.callbacks.checkpoint import ModelCheckpoint as ModelCheckpoint
from trainkit.callbacks.divergence_guard import DivergenceGuard as DivergenceGuard
from trainkit.callbacks.early_stopping import EarlyStopping as EarlyStopping
from trainkit.callbacks.progress.progress import ProgressBar as ProgressBar
from trainkit.callbacks.timer import Timer as Timer
from trainkit.extension import public


def __getattr__(name: str) -> Any:
    return public(__name__, name)
