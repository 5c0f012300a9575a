"""Callbacks that come with trainkit."""

from trainkit.callbacks.checkpoint import ModelCheckpoint
from trainkit.callbacks.early_stopping import EarlyStopping

__all__ = ["EarlyStopping", "ModelCheckpoint"]
