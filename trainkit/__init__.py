"""trainkit: a trainer for PyTorch on Horovod.

Public names are imported on first use: `python -m trainkit --help` and a config error need no
torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from trainkit.version import __version__ as __version__

if TYPE_CHECKING:
    from trainkit.api.callback import Callback as Callback
    from trainkit.api.datamodule import DataModule as DataModule
    from trainkit.api.task import Task as Task
    from trainkit.callbacks import EMA as EMA
    from trainkit.callbacks import AdvancedProfiler as AdvancedProfiler
    from trainkit.callbacks import BackboneFinetuning as BackboneFinetuning
    from trainkit.callbacks import Balance as Balance
    from trainkit.callbacks import BaseFinetuning as BaseFinetuning
    from trainkit.callbacks import BasePredictionWriter as BasePredictionWriter
    from trainkit.callbacks import CrashCapsule as CrashCapsule
    from trainkit.callbacks import DeviceStatsMonitor as DeviceStatsMonitor
    from trainkit.callbacks import EarlyStopping as EarlyStopping
    from trainkit.callbacks import Elastic as Elastic
    from trainkit.callbacks import FaultInjection as FaultInjection
    from trainkit.callbacks import Goodput as Goodput
    from trainkit.callbacks import GradientMonitor as GradientMonitor
    from trainkit.callbacks import LambdaCallback as LambdaCallback
    from trainkit.callbacks import LearningRateMonitor as LearningRateMonitor
    from trainkit.callbacks import ModelCheckpoint as ModelCheckpoint
    from trainkit.callbacks import ModelSummary as ModelSummary
    from trainkit.callbacks import ProgressBar as ProgressBar
    from trainkit.callbacks import PyTorchProfiler as PyTorchProfiler
    from trainkit.callbacks import SimpleProfiler as SimpleProfiler
    from trainkit.callbacks import SpikeDetection as SpikeDetection
    from trainkit.callbacks import StochasticWeightAveraging as StochasticWeightAveraging
    from trainkit.callbacks import Stragglers as Stragglers
    from trainkit.callbacks import ThroughputMonitor as ThroughputMonitor
    from trainkit.callbacks import Timeline as Timeline
    from trainkit.callbacks import Timer as Timer
    from trainkit.callbacks import Watchdog as Watchdog
    from trainkit.data.combined import CombinedLoader as CombinedLoader
    from trainkit.data.seeding import seed_everything as seed_everything
    from trainkit.data.streams import sharded as sharded
    from trainkit.errors import Preempted as Preempted
    from trainkit.errors import TrainkitError as TrainkitError
    from trainkit.extensions.by_hand.loop import Loop as Loop
    from trainkit.extensions.capsule.replay import replay as replay
    from trainkit.extensions.communication.settings import DiLoCo as DiLoCo
    from trainkit.extensions.communication.settings import LocalSGD as LocalSGD
    from trainkit.extensions.communication.settings import PowerSGD as PowerSGD
    from trainkit.extensions.exporting.export import export as export
    from trainkit.extensions.find.lr import find_lr as find_lr
    from trainkit.launch.environment import rank as rank
    from trainkit.launch.environment import rank_zero_only as rank_zero_only
    from trainkit.launch.environment import world_size as world_size
    from trainkit.loggers import CSVLogger as CSVLogger
    from trainkit.loggers import JSONLLogger as JSONLLogger
    from trainkit.loggers import MLFlowLogger as MLFlowLogger
    from trainkit.loggers import PrometheusLogger as PrometheusLogger
    from trainkit.loggers import TensorBoardLogger as TensorBoardLogger
    from trainkit.loggers import WandbLogger as WandbLogger
    from trainkit.run.predictions import read_predictions as read_predictions
    from trainkit.trainer import Trainer as Trainer

_NAMES = {
    "trainkit.api.callback": "Callback",
    "trainkit.api.datamodule": "DataModule",
    "trainkit.api.task": "Task",
    "trainkit.extensions.by_hand.loop": "Loop",
    "trainkit.callbacks": (
        "AdvancedProfiler BackboneFinetuning Balance BaseFinetuning BasePredictionWriter"
        " CrashCapsule DeviceStatsMonitor EMA EarlyStopping Elastic FaultInjection Goodput"
        " GradientMonitor LambdaCallback LearningRateMonitor ModelCheckpoint ModelSummary"
        " ProgressBar PyTorchProfiler SimpleProfiler SpikeDetection StochasticWeightAveraging"
        " Stragglers ThroughputMonitor Timeline Timer Watchdog"
    ),
    "trainkit.data.combined": "CombinedLoader",
    "trainkit.data.seeding": "seed_everything",
    "trainkit.data.streams": "sharded",
    "trainkit.extensions.communication.settings": "DiLoCo LocalSGD PowerSGD",
    "trainkit.errors": "Preempted TrainkitError",
    "trainkit.extensions.exporting.export": "export",
    "trainkit.launch.environment": "rank rank_zero_only world_size",
    "trainkit.loggers": (
        "CSVLogger JSONLLogger MLFlowLogger PrometheusLogger TensorBoardLogger WandbLogger"
    ),
    "trainkit.extensions.capsule.replay": "replay",
    "trainkit.run.predictions": "read_predictions",
    "trainkit.trainer": "Trainer",
    "trainkit.extensions.find.lr": "find_lr",
}
_ROOMS = ("callbacks", "loggers")
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES)  # noqa: PLE0605


# packages that Lightning has, and trainkit has not; and those of which it has no such modules
_LIGHTNINGS = (
    "accelerators core demos fabric loops overrides plugins profilers pytorch strategies tuner"
    " utilities"
)


class _Explained:
    """The last finder of imports: says what to import in place of a module of Lightning's."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Find nothing.

        Raises:
            ModuleNotFoundError: Lightning has a module of that name.
        """
        owner, _, module = name.partition(".")
        first, _, part = module.partition(".")
        is_part = bool(part) and first in _ROOMS and name.islower()
        if owner == __name__ and (is_part or first in _LIGHTNINGS.split()):
            find = importlib.import_module("trainkit.extension").advice
            if text := find("modules", f"{owner}.{first}"):
                raise ModuleNotFoundError(f"There is no module {name}{text}", name=name)


sys.meta_path.append(_Explained)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        if name in _ROOMS:
            return importlib.import_module(f"trainkit.{name}")
        return importlib.import_module("trainkit.extension").public(__name__, name)
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
