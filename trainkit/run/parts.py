"""The named parts of a run that a checkpoint holds: how each saves and restores its state.

The names are keys of the checkpoint's format: state, optimizers, rates, scaler, callbacks, values,
validations, contract; and of each rank: metrics, random.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from trainkit.api.callback import Callback
from trainkit.api.datamodule import DataModule
from trainkit.api.from_checkpoint import saved_arguments
from trainkit.api.state import TrainState
from trainkit.checkpoint.contents import Contents, Part
from trainkit.checkpoint.handed import Handed
from trainkit.checkpoint.split import fill_optimizer
from trainkit.checkpoint.stateful import random_state, set_random_state, versions
from trainkit.data.feed import MapFeed
from trainkit.device.precision import Precision
from trainkit.engine.base import Engine
from trainkit.errors import WEIGHTS_ALONE, CheckpointError, clause
from trainkit.metrics import objects as metric_objects
from trainkit.metrics.latest import LatestMetrics
from trainkit.optim.optimizer_state import (
    dtypes_of,
    has_other_dtypes,
    in_order,
    is_torchs,
    lacking,
    load_state,
)
from trainkit.optim.schedule import LearningRates
from trainkit.run.feature import Features
from trainkit.run.run import Run
from trainkit.run.step_parts import StepParts


@dataclass
class OptimizersPart:
    """The optimizers' states, restored on rank 0:
    `engine.prepare` broadcasts them, unless each rank has its part.
    """

    engine: Engine
    optimizers: Sequence[torch.optim.Optimizer]
    task: nn.Module

    def state_dict(self) -> list[dict[str, Any]]:
        """Return one state for each optimizer, with the names and dtypes of its weights."""
        states = self.engine.optimizer_state(self.optimizers)
        for optimizer, groups, state in zip(self.optimizers, self._names(), states, strict=True):
            own = state["param_groups"] if is_torchs(state) else ()
            for names, dtypes, group in zip(groups, dtypes_of(optimizer), own, strict=False):
                group["param_names"] = names
                group["param_dtypes"] = dtypes
        return states

    def _names(self) -> list[list[list[str | None]]]:
        """Return the names of the weights in each group of each optimizer."""
        names = {id(parameter): name for name, parameter in self.task.named_parameters()}
        return [
            [[names.get(id(weight)) for weight in group["params"]] for group in one.param_groups]
            for one in self.optimizers
        ]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Restore them.

        Raises:
            CheckpointError: they belong to other optimizers.
        """
        if len(state) != len(self.optimizers):
            raise CheckpointError(
                f"The checkpoint has {len(state)} optimizers, this task {len(self.optimizers)}:"
                f" they do not fit. {WEIGHTS_ALONE}"
            )
        for optimizer, names, saved in zip(self.optimizers, self._names(), state, strict=True):
            own = in_order(saved, [*chain.from_iterable(names)])
            casts = has_other_dtypes(optimizer, saved)
            _refuse_another_kind(optimizer, own)
            # the states themselves may be on rank 0 alone
            if absent := self.engine.comm.broadcast_object(lacking(optimizer, own)):
                raise CheckpointError(
                    f"The checkpoint's optimizer has no {', '.join(absent)}, which this run's"
                    f" {type(optimizer).__name__} needs: it was of another class, or had other"
                    f" settings. {WEIGHTS_ALONE}"
                )
            try:
                if self.engine.splits_weights:
                    fill_optimizer(optimizer, own, self.engine, casts)
                else:
                    load_state(optimizer, own, casts)
            except ValueError as error:
                raise CheckpointError(
                    f"The checkpoint's optimizer state does not fit this task: {clause(error)}."
                    f" {WEIGHTS_ALONE}"
                ) from error


def _refuse_another_kind(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a state is of another class of optimizers.

    A newer torch may have settings more, so both sides must have some that the other lacks; those
    that schedulers leave do not count.
    """
    there = {name for group in saved.get("param_groups", ()) for name in group}
    here = {name for group in optimizer.param_groups for name in group}
    lacks = sorted(optimizer.defaults.keys() - there)
    of_schedulers = ("initial_", "base_", "max_", "min_", "param_names", "param_dtypes")
    strange = sorted(name for name in there - here if not name.startswith(of_schedulers))
    form = optimizer.state_dict()
    differs = is_torchs(saved) != is_torchs(form)
    if differs or not is_torchs(form):
        lacks, strange = sorted(form.keys() - saved.keys()), sorted(saved.keys() - form.keys())
    if differs or (lacks and strange):
        raise CheckpointError(
            f"The checkpoint's optimizer has {', '.join(strange)}, and no {', '.join(lacks)}: it was"
            f" another one than this run's {type(optimizer).__name__}. {WEIGHTS_ALONE}"
        )


@dataclass
class RatesPart:
    """The schedules, at the number of updates of the counters, which are restored before."""

    rates: LearningRates
    state: TrainState

    def state_dict(self) -> dict[str, Any]:
        """Return the schedules' states."""
        return self.rates.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore them."""
        self.rates.load_state_dict(state, self.state.num_updates)


@dataclass
class ScalerPart:
    """The loss scale of fp16."""

    precision: Precision

    def state_dict(self) -> dict[str, Any]:
        """Return it; empty for other precisions."""
        return self.precision.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it, if both runs have one."""
        if self.precision.scaler.is_enabled() and state:
            self.precision.scaler.load_state_dict(dict(state))


@dataclass
class CallbacksPart:
    """The callbacks' states, by `state_key` and, among those with the same one, place."""

    callbacks: Sequence[Callback]

    def state_dict(self) -> dict[str, Any]:
        """Return them."""
        return {key: callback.state_dict() for key, callback in _keyed(self.callbacks, _name_of)}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Restore them; return states that no callback of this run took."""
        remaining = dict(state)
        for name_of in (_name_of, _class_of):  # an older trainkit has named all by their classes
            for key, callback in _keyed(self.callbacks, name_of):
                if key in remaining:
                    callback.load_state_dict(remaining.pop(key))
        return _describe(remaining, {_class_of(callback) for callback in self.callbacks})


def _class_of(callback: Callback) -> str:
    return type(callback).__name__


def _name_of(callback: Callback) -> str:
    own = callback.state_key
    return _class_of(callback) if own == type(callback).__qualname__ else own


def _keyed(
    callbacks: Sequence[Callback], name_of: Callable[[Callback], str]
) -> list[tuple[str, Callback]]:
    seen = Counter[str]()
    keyed = []
    for callback in callbacks:
        name = name_of(callback)
        keyed.append((f"{name}.{seen[name]}", callback))
        seen[name] += 1
    return keyed


def _describe(remaining: Mapping[str, Any], here: Collection[str]) -> list[str]:
    """Name callbacks of unused states; a logger is not needed to resume, nor is a ModelCheckpoint,
    unless there is one `here` (names of classes) that retains by another value.
    """
    unused = []
    for key, state in remaining.items():
        name = key.rpartition(".")[0]
        kind = name.partition("{")[0]
        is_needless = kind == "ModelCheckpoint" and kind not in here
        if not state or is_needless or kind.endswith("Logger"):
            continue
        average = state.get("average") if isinstance(state, Mapping) else None
        averages = isinstance(average, Mapping) and average.get("aside") is not None
        hint = " (the saved weights are its averages: add it to resume from the trained ones)"
        unused.append(f"the state of {name}{hint * averages}")
    return unused


@dataclass
class ValuesPart:
    """The latest logged values."""

    metrics: LatestMetrics
    of_validation: set[str]

    def state_dict(self) -> dict[str, Any]:
        """Return values, their steps, the history, and which values are of validations."""
        return {
            "metrics": dict(self.metrics),
            "at": dict(self.metrics.logged_at),
            "history": list(self.metrics.history),
            "of_validation": sorted(self.of_validation),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore them."""
        self.metrics.update(state["metrics"])
        self.metrics.logged_at.update(state["at"])
        # none in a checkpoint of an older trainkit
        self.metrics.history = list(state.get("history", ()))
        self.of_validation.update(state.get("of_validation", ()))


@dataclass
class SavedPart:
    """What is restored elsewhere: compared with what a run computes, or loaded before its data."""

    current: Callable[[], dict[str, Any]]

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        return self.current()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: see run/resume.py and load_datamodule."""


@dataclass
class LogPart:
    """This rank's part of the epoch's means, and its metric objects."""

    task: nn.Module
    step: StepParts
    engine: Engine

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part."""
        return {
            "log": self.step.log.state_dict(),
            "objects": metric_objects.state_of(self.task, self.step.log.objects),
        }

    def load_state_dicts(self, states: list[dict[str, Any]]) -> list[str]:
        """Restore this rank's share; return metric objects that it does not restore."""
        rank, size = self.engine.ranks.data_rank, self.engine.ranks.data_size
        self.step.log.load_state_dict(
            [state["log"] for state in states], rank, size, self.engine.device
        )
        objects = [state["objects"] for state in states]
        return metric_objects.restore(self.task, self.step.log.objects, objects, rank, size)


@dataclass
class RandomPart:
    """This rank's random numbers."""

    engine: Engine

    def state_dict(self) -> dict[str, Any]:
        """Return the generators' states."""
        return random_state()

    def load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        """Restore this rank's state; does nothing at another number of ranks."""
        if len(states) == self.engine.ranks.data_size:
            set_random_state(states[self.engine.ranks.data_rank])


_OF_RESULTS = ("precision", "gradient_clip_val", "gradient_clip_algorithm")


def facts_of(run: Run) -> dict[str, Any]:
    """Return what is compared when a run resumes, by words for it: the optimizers' classes, settings
    that change results, and what the order of an epoch's samples follows from.
    """
    facts: dict[str, Any] = {"optimizer": ", ".join(type(one).__name__ for one in run.optimizers)}
    numerics = asdict(run.options.numerics)
    facts |= {f"trainer.{name}": numerics[name] for name in _OF_RESULTS}
    limit = run.options.batch.limit_train_batches  # 1.0 is all, 1 is one batch
    facts["trainer.limit_train_batches"] = limit if limit != 1 or isinstance(limit, int) else None
    if not isinstance(run.train_feed, MapFeed):
        return facts | {"seed": run.options.seed, "order": "that of a stream"}
    source = run.train_feed.source
    order = "shuffled" if source.shuffle else "the data set's"
    if source.sampler is not None:
        order = f"that of {type(source.sampler).__name__}"
    facts |= {"seed": run.options.seed, "order": order, "samples": source.num_samples}
    return facts | {"drop_last": source.drop_last}


def contents_of(run: Run, features: Features) -> Contents:
    """Return what a checkpoint of a run is made of."""

    @contextlib.contextmanager
    def saving() -> Any:
        handed = Handed({}, run.state.state_dict(), lambda: run.engine.model_state(run.task))
        with run.step.eval_weights.shown():
            try:
                run.hooks("on_save_checkpoint", handed)
                yield handed
            finally:
                run.hooks("on_save_checkpoint_end")

    def about() -> dict[str, Any]:
        content: dict[str, Any] = {"epoch": run.current_epoch, "global_step": run.global_step}
        content |= {"metrics": dict(run.callback_metrics), "contract": run.batch_plan.to_dict()}
        content |= {"versions": versions(), "config": run.options.config}
        return content | saved_arguments(run.task, run.options.masked_values)

    data = run.datamodule
    of_data: dict[str, Part] = {}
    if data is not None and type(data).state_dict is not DataModule.state_dict:
        of_data["datamodule"] = SavedPart(data.state_dict)
    return Contents(
        task=run.task,
        parts={
            **of_data,
            "state": run.state,
            "callbacks": CallbacksPart(run.callbacks),  # first: one may add groups to an optimizer
            "optimizers": OptimizersPart(run.engine, run.optimizers, run.task),
            "rates": RatesPart(run.rates, run.state),
            "scaler": ScalerPart(run.precision),
            "values": ValuesPart(run.callback_metrics, run.evaluator.names),
            "validations": run.evaluator,
            "contract": SavedPart(lambda: asdict(run.batch_plan)),
            "facts": SavedPart(lambda: facts_of(run)),
            **features.parts(run),
        },
        rank_parts={
            "metrics": LogPart(run.task, run.step, run.engine),
            "random": RandomPart(run.engine),
            **features.rank_parts(run),
        },
        about=about,
        saving=saving,
    )
