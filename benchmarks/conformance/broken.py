"""trainkit broken on purpose: each break turns the right cells red.

A break replaces functions of trainkit in the process of each run.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Break:
    """A way to break trainkit.

    Attributes:
        sentence: what is wrong then.
        apply: replaces functions in this process.
        turns: claims that hold, and must not hold then.
        stays: a claim that holds still: the break is no crash.
        launcher: "alone", or "horovodrun" for two ranks.
    """

    sentence: str
    apply: Callable[[], None]
    turns: tuple[str, ...]
    stays: str
    launcher: str = "alone"


BREAKS: dict[str, Break] = {}


def breaks(
    turns: tuple[str, ...], stays: str, launcher: str = "alone"
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Enter a break; its docstring is the sentence."""

    def enter(apply: Callable[[], None]) -> Callable[[], None]:
        name = apply.__name__.replace("_", "-")
        BREAKS[name] = Break(" ".join((apply.__doc__ or "").split()), apply, turns, stays, launcher)
        return apply

    return enter


def change(path: str, make: Callable[[Any], Any]) -> None:
    """Replace a function or a method, given by its dotted path, by `make(the old one)`."""
    module, _, name = path.rpartition(".")
    try:
        owner: Any = importlib.import_module(module)
    except ModuleNotFoundError:
        above, _, kind = module.rpartition(".")
        owner = getattr(importlib.import_module(above), kind)
    old = getattr(owner, name)
    setattr(owner, name, functools.wraps(old)(make(old)))


def nothing(old: Any) -> Any:
    """Return a function that does nothing."""
    return lambda *args, **kwargs: None


@breaks(("resume-weights",), "resume-samples")
def random_states_are_not_restored() -> None:
    """A checkpoint's random states are not restored."""
    change("trainkit.run.parts.set_random_state", nothing)


@breaks(("resume-samples", "resume-weights"), "a-run-repeats")
def the_position_is_not_restored() -> None:
    """A resumed epoch begins at its first sample."""
    change(
        "trainkit.data.feed.MapFeed.steps",
        lambda old: lambda self, epoch, start=0: old(self, epoch, 0),
    )


@breaks(("resume-schedule",), "resume-samples")
def the_schedule_is_not_restored() -> None:
    """Schedules begin again after resuming."""
    change("trainkit.optim.schedule.LearningRates.load_state_dict", nothing)


@breaks(("resume-ema",), "resume-at-an-epochs-end")
def the_average_is_not_restored() -> None:
    """EMA's average begins again after resuming."""
    change(
        "trainkit.extensions.swa.ema.EMA.load_state_dict",
        lambda old: lambda self, state: setattr(self, "_loaded", None),
    )


@breaks(("resume-patience",), "resume-samples")
def patience_is_not_restored() -> None:
    """Early stopping's count begins again after resuming."""
    change("trainkit.callbacks.early_stopping.EarlyStopping.load_state_dict", nothing)


@breaks(("a-changed-byte-is-seen",), "resume-weights")
def hashes_are_not_compared() -> None:
    """A checkpoint's files are not compared with the hashes of its manifest."""
    change("trainkit.checkpoint.format.check_files", nothing)


@breaks(("a-checkpoint-runs-no-command",), "resume-weights")
def pickles_are_loaded() -> None:
    """A checkpoint is read by Python's own unpickler."""

    def unsafe(path: Any, *_: Any, **__: Any) -> Any:
        return torch.load(path, weights_only=False)

    change("trainkit.checkpoint.format.load_plain", lambda old: unsafe)


@breaks(("a-config-runs-no-command",), "a-run-repeats")
def configs_may_name_anything() -> None:
    """The list of what a config may name is not asked."""
    change("trainkit.config.schema.check_name", nothing)
    change("trainkit.config.allowlist.check_name", nothing)
    change("trainkit.config.allowlist._fits", lambda old: lambda *_: True)
    change("trainkit.config.allowlist._listed", lambda old: lambda *_: True)


@breaks(("nan-is-never-the-best",), "resume-samples")
def nan_is_the_best() -> None:
    """A score that is not a number ranks before all others."""

    def rank(old: Any) -> Any:
        return lambda self, name: -math.inf if math.isnan(self.scores[name]) else old(self, name)

    change("trainkit.checkpoint.retention.Retained._rank", rank)
    change("trainkit.callbacks.checkpoint._is_finite", lambda old: lambda *_: True)


@breaks(("clipping-under-accumulation",), "a-run-repeats")
def microbatches_are_clipped() -> None:
    """Gradients are clipped before they are those of the whole step."""

    def backward(old: Any) -> Any:
        def clipped(self: Any, *args: Any, **more: Any) -> None:
            old(self, *args, **more)
            parameters = [p for o in self._optimizers for g in o.param_groups for p in g["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, 0.25)

        return clipped

    change("trainkit.engine.base.Engine.backward", backward)


@breaks(("tokens-over-accumulation",), "accumulation-is-a-larger-batch")
def microbatches_weigh_the_same() -> None:
    """A step's gradient is the mean of the means of its microbatches."""

    def share(old: Any) -> Any:
        # 4 samples are a microbatch of these claims, or all of a step's
        return lambda self, loss, outputs, count, in_step, batch=None: (
            loss if count == in_step else loss / math.ceil(in_step / 4)
        )

    change("trainkit.optim.sample_weights.SampleWeights.weighted", share)
    change(
        "trainkit.optim.sample_weights.SampleWeights.correction",
        lambda old: lambda *_, **__: None,
    )


@breaks(("evaluation-of-a-short-batch", "training-loss-of-an-epoch"), "a-run-repeats")
def batches_weigh_the_same() -> None:
    """A logged value is the mean over batches, not over samples."""
    change(
        "trainkit.metrics.log.Accumulator.add",
        lambda old: lambda self, value, weight: old(self, value, 1.0),
    )


@breaks(("schedule-and-a-skipped-update",), "schedule-under-accumulation")
def skipped_updates_move_the_schedule() -> None:
    """An update that the loss scale holds back moves the schedule."""

    def step(old: Any) -> Any:
        def counted(self: Any, *args: Any, **more: Any) -> bool:
            old(self, *args, **more)
            return True

        return counted

    change("trainkit.engine.base.Engine.step", step)


@breaks(("ranks-start-equal",), "epochs-have-different-orders", "horovodrun")
def weights_are_not_broadcast() -> None:
    """Ranks start with weights of their own."""
    change("trainkit.engine.horovod.collectives.HorovodCollectives.broadcast_tensors", nothing)


@breaks(("ranks-are-a-larger-batch", "uneven-ranks-gradient"), "ranks-start-equal", "horovodrun")
def the_sum_is_divided_again() -> None:
    """The gradient is divided by the number of ranks once more."""

    def finish(old: Any) -> Any:
        def divided(self: Any, *args: Any, **more: Any) -> None:
            old(self, *args, **more)
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad /= self.ranks.world_size

        return divided

    change("trainkit.engine.base.Engine.finish_gradients", finish)


@breaks(("evaluation-over-ranks",), "ranks-start-equal", "horovodrun")
def ranks_report_their_own_values() -> None:
    """A logged value is that of rank 0 alone."""
    change(
        "trainkit.metrics.log.combine",
        lambda old: lambda parts: old(parts[:1]),
    )
