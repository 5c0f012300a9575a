"""Loggers: callbacks that write numbers, on rank 0."""

from trainkit.loggers.csv import CSVLogger
from trainkit.loggers.tensorboard import TensorBoardLogger
from trainkit.loggers.wandb import WandbLogger

__all__ = ["CSVLogger", "TensorBoardLogger", "WandbLogger"]
