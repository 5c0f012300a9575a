"""Loggers: callbacks that write numbers,
on rank 0 (PrometheusLogger: on the first rank of each host).
"""

from trainkit.loggers.csv import CSVLogger
from trainkit.loggers.jsonl import JSONLLogger
from trainkit.loggers.mlflow import MLFlowLogger
from trainkit.loggers.prometheus import PrometheusLogger
from trainkit.loggers.tensorboard import TensorBoardLogger
from trainkit.loggers.wandb import WandbLogger

__all__ = [
    "CSVLogger",
    "JSONLLogger",
    "MLFlowLogger",
    "PrometheusLogger",
    "TensorBoardLogger",
    "WandbLogger",
]
