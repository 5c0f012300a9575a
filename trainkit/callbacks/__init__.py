"""Callbacks that come with trainkit."""

from trainkit.callbacks.averaging.ema import EMA
from trainkit.callbacks.averaging.swa import StochasticWeightAveraging
from trainkit.callbacks.checkpoint import ModelCheckpoint
from trainkit.callbacks.crash_capsule.crash_capsule import CrashCapsule
from trainkit.callbacks.device_stats_monitor import DeviceStatsMonitor
from trainkit.callbacks.divergence_guard import DivergenceGuard
from trainkit.callbacks.early_stopping import EarlyStopping
from trainkit.callbacks.elastic import Elastic
from trainkit.callbacks.fault_injection import FaultInjection
from trainkit.callbacks.finetuning import BackboneFinetuning, BaseFinetuning
from trainkit.callbacks.goodput import Goodput
from trainkit.callbacks.gradient_monitor import GradientMonitor
from trainkit.callbacks.learning_rate_monitor import LearningRateMonitor
from trainkit.callbacks.model_summary.model_summary import ModelSummary
from trainkit.callbacks.profiler import PyTorchProfiler, SimpleProfiler
from trainkit.callbacks.progress.progress import ProgressBar
from trainkit.callbacks.spike_detection.spike_detection import SpikeDetection
from trainkit.callbacks.stragglers import Stragglers
from trainkit.callbacks.throughput import ThroughputMonitor
from trainkit.callbacks.timeline.timeline import Timeline
from trainkit.callbacks.timer import Timer
from trainkit.callbacks.watchdog.watchdog import Watchdog

__all__ = [
    "BackboneFinetuning",
    "BaseFinetuning",
    "CrashCapsule",
    "DeviceStatsMonitor",
    "DivergenceGuard",
    "EMA",
    "EarlyStopping",
    "Elastic",
    "FaultInjection",
    "Goodput",
    "GradientMonitor",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelSummary",
    "ProgressBar",
    "PyTorchProfiler",
    "SimpleProfiler",
    "SpikeDetection",
    "StochasticWeightAveraging",
    "Stragglers",
    "ThroughputMonitor",
    "Timeline",
    "Timer",
    "Watchdog",
]
