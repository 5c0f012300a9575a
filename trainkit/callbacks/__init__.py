"""Callbacks that come with trainkit; those of extensions are found by their names."""

from typing import Any

from trainkit.callbacks.averaging.ema import EMA as EMA
from trainkit.callbacks.averaging.swa import StochasticWeightAveraging as StochasticWeightAveraging
from trainkit.callbacks.balance import Balance as Balance
from trainkit.callbacks.checkpoint import ModelCheckpoint as ModelCheckpoint
from trainkit.callbacks.device_stats_monitor import DeviceStatsMonitor as DeviceStatsMonitor
from trainkit.callbacks.divergence_guard import DivergenceGuard as DivergenceGuard
from trainkit.callbacks.early_stopping import EarlyStopping as EarlyStopping
from trainkit.callbacks.elastic import Elastic as Elastic
from trainkit.callbacks.fault_injection import FaultInjection as FaultInjection
from trainkit.callbacks.finetuning import BackboneFinetuning as BackboneFinetuning
from trainkit.callbacks.finetuning import BaseFinetuning as BaseFinetuning
from trainkit.callbacks.goodput import Goodput as Goodput
from trainkit.callbacks.gradient_monitor import GradientMonitor as GradientMonitor
from trainkit.callbacks.lambda_callback import LambdaCallback as LambdaCallback
from trainkit.callbacks.learning_rate_monitor import LearningRateMonitor as LearningRateMonitor
from trainkit.callbacks.model_summary.model_summary import ModelSummary as ModelSummary
from trainkit.callbacks.prediction_writer import BasePredictionWriter as BasePredictionWriter
from trainkit.callbacks.profiler import AdvancedProfiler as AdvancedProfiler
from trainkit.callbacks.profiler import PyTorchProfiler as PyTorchProfiler
from trainkit.callbacks.profiler import SimpleProfiler as SimpleProfiler
from trainkit.callbacks.progress.progress import ProgressBar as ProgressBar
from trainkit.callbacks.stragglers import Stragglers as Stragglers
from trainkit.callbacks.throughput import ThroughputMonitor as ThroughputMonitor
from trainkit.callbacks.timer import Timer as Timer
from trainkit.callbacks.watchdog.watchdog import Watchdog as Watchdog
from trainkit.extension import public


def __getattr__(name: str) -> Any:
    return public(__name__, name)
