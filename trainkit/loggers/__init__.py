"""Loggers: callbacks that write numbers on rank 0; those of extensions are there by their names."""

from typing import Any

from trainkit.extension import public
from trainkit.loggers.csv import CSVLogger as CSVLogger
from trainkit.loggers.tensorboard import TensorBoardLogger as TensorBoardLogger


def __getattr__(name: str) -> Any:
    return public(__name__, name)
