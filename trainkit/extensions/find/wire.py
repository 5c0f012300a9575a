"""find settings: how gradients travel (fusion, cycle, groups, buckets, compression),
tried on the job itself.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainkit.callbacks.step_clock import StepClock
from trainkit.errors import ConfigError
from trainkit.extensions.find.trial_run import (
    measured,
    random_numbers_kept,
    trial_run,
)
from trainkit.extensions.script.subject import Subject

_WARM_STEPS = 3  # the first ones allocate, and Horovod negotiates
_ROUNDS = 3  # of all settings in turn; the fastest counts, since other work only ever slows a step
_GAIN = 1.03  # a smaller one is noise
_MIB = 2**20

_EXACT: dict[str, tuple[tuple[str, tuple[Any, ...]], ...]] = {
    "horovod": (
        ("num_groups", (1, 4, 16)),
        ("fusion_threshold_mb", (2, 16, 64)),
        ("cycle_time_ms", (0.1, 1, 5)),
    ),
    "ddp": (("bucket_cap_mb", (1.0, 5.0, 25.0, 100.0)),),
}
_ROUNDED = {"horovod": ("fp16",), "ddp": ("fp16", "bf16")}
_OWN_VARIABLES = {
    "fusion_threshold_mb": "HOROVOD_FUSION_THRESHOLD",
    "cycle_time_ms": "HOROVOD_CYCLE_TIME",
}
_OTHERS = {
    "fsdp": (
        "engine=fsdp gathers weights unit by unit; its settings are engine.shard and"
        " engine.reshard_after_forward"
    ),
    "deepspeed": "DeepSpeed sums gradients its own way; engine.config sets its buckets",
}


@dataclass(frozen=True)
class Setting:
    """Options of the engine, and what they give.

    Attributes:
        options: that differ from the config's; empty for the config's own.
        step_s: seconds of a step, of the slowest rank.
        waits_s: of these, seconds that it waits for gradients behind backward.
        refused: why it could not be tried; empty otherwise.
    """

    options: Mapping[str, Any]
    step_s: float = math.inf
    waits_s: float = math.nan
    refused: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether gradients travel as the config has them."""
        return "compression" not in self.options


@dataclass
class WireSettings:
    """What was found.

    Attributes:
        engine: "horovod" or "ddp".
        ranks: that took part.
        gradient_bytes: that each rank sends in a step, without compression.
        tensors: that they are in.
        on_gpu: whether ranks compute on GPUs.
        tried: in the order of trials; the config's own first.
        skipped: sentences: which settings were left out, and why.
        rounds: whether the config itself rounds gradients (engine.compression).
    """

    engine: str
    ranks: int
    gradient_bytes: int
    tensors: int
    on_gpu: bool
    tried: list[Setting] = field(default_factory=lambda: [Setting({})])
    skipped: list[str] = field(default_factory=list)
    rounds: bool = False

    def faster(self, exact: bool) -> Setting | None:
        """Return the fastest setting, if it gains more than noise over the fastest exact one (over
        the config's own).

        Args:
            exact: of those that leave gradients as they are; of the others otherwise.
        """
        best = min((one for one in self.tried if one.is_exact), key=lambda one: one.step_s)
        if exact:
            return best if best.options and self.tried[0].step_s > _GAIN * best.step_s else None
        fastest = min(
            (one for one in self.tried if not one.is_exact),
            key=lambda one: one.step_s,
            default=None,
        )
        exact_best = self.faster(exact=True) or self.tried[0]
        return (
            fastest if fastest is not None and exact_best.step_s > _GAIN * fastest.step_s else None
        )


def find_settings(subject: Subject, steps: int = 20) -> WireSettings:
    """Try the engine's settings of a fit, one option after another, each beside the best of
    those before it.

    Call it on all ranks, under horovodrun or torchrun.

    Args:
        subject: the fit.
        steps: measured for each setting in each of three rounds, after three; 1 or more.

    Raises:
        ConfigError: one rank, an engine without such settings, or approximate communication.
    """
    engine = dict(subject.engine)
    settings = _look(subject)
    for option, values in _EXACT[settings.engine]:
        if why := _without(option, engine):
            settings.skipped.append(why)
            continue
        best = settings.faster(exact=True) or Setting({})
        values = tuple(
            value for value in values if _differs(option, value, engine.get(option), settings)
        )
        _measure(
            subject,
            settings,
            [best.options, *({**best.options, option: value} for value in values)],
            steps,
        )
    if engine.get("compression", "none") == "none":
        best = settings.faster(exact=True) or Setting({})
        rounded = [{**best.options, "compression": dtype} for dtype in _ROUNDED[settings.engine]]
        _measure(subject, settings, [best.options, *rounded], steps)
    return settings


def _look(subject: Subject) -> WireSettings:
    """Return the job's engine, ranks and bytes, without training."""
    with random_numbers_kept(), _variables_kept():
        asked = subject.with_engine()
        with trial_run(asked.task, asked.data, asked.options) as run:
            engine = run.engine
            sizes = [p.numel() * p.element_size() for p in run.task.parameters() if p.requires_grad]
            on_gpu = engine.device.type == "cuda"
            if engine.name in _OTHERS:
                raise ConfigError(
                    f"find settings tries the wire of horovod and ddp: {_OTHERS[engine.name]}."
                )
            if engine.ranks.world_size == 1:
                raise ConfigError(
                    "One rank sends no gradients, so there are no settings to find. Start several:"
                    " torchrun --nproc-per-node 2 -m trainkit find settings conf=..., or horovodrun"
                    " -np 2 python -m trainkit ..."
                )
            if engine.approximation.shown:
                raise ConfigError(
                    "find settings measures exact gradients, and trainer.communication sends"
                    " others. Leave it out here: communication=exact."
                )
            settings = WireSettings(
                engine.name, engine.ranks.world_size, sum(sizes), len(sizes), on_gpu
            )
            settings.rounds = subject.engine.get("compression") not in (None, "none")
    engine.comm.disconnect()
    return settings


@contextlib.contextmanager
def _variables_kept() -> Iterator[None]:
    """Remove the variables of Horovod that the engine sets within the context."""
    absent = [variable for variable in _OWN_VARIABLES.values() if variable not in os.environ]
    try:
        yield
    finally:
        for variable in absent:
            os.environ.pop(variable, None)


def _without(option: str, engine: Mapping[str, Any]) -> str:
    """Return why an option is not tried; empty if it is."""
    if engine.get("autotune") and option != "num_groups":
        return f"engine.{option}: engine.autotune searches for it."
    if option == "num_groups" and engine.get("groups"):
        return "engine.num_groups: engine.groups is set."
    variable = _OWN_VARIABLES.get(option, "")
    return (
        f"engine.{option}: {variable} is set in the environment, and wins."
        if variable in os.environ
        else ""
    )


def _differs(option: str, value: Any, own: Any, settings: WireSettings) -> bool:
    """Whether a value makes another job than the config's own."""
    if option == "num_groups":
        return bool(value != own and value < settings.tensors)
    if option == "cycle_time_ms":
        # Horovod's, and on a GPU the engine's
        return bool(value != (own or (0.1 if settings.on_gpu else 1)))
    own = own or {"bucket_cap_mb": 25.0, "fusion_threshold_mb": 128}[option]
    # What holds all gradients is the same at any size.
    return bool(
        min(value * _MIB, settings.gradient_bytes) != min(own * _MIB, settings.gradient_bytes)
    )


def _measure(
    subject: Subject, settings: WireSettings, choices: Sequence[Mapping[str, Any]], steps: int
) -> None:
    """Measure choices in turn; add them to what was tried,
    or replace a slower measurement of the same.
    """
    for _ in range(_ROUNDS):
        for options in choices:
            now = _try(subject, options, steps)
            place = next(
                (i for i, one in enumerate(settings.tried) if one.options == options), None
            )
            if place is None:
                settings.tried.append(now)
            elif now.step_s < settings.tried[place].step_s:
                settings.tried[place] = now


def _try(subject: Subject, options: Mapping[str, Any], steps: int) -> Setting:
    try:
        with random_numbers_kept(), _variables_kept():
            asked = subject.with_engine(**options)
            with trial_run(asked.task, asked.data, asked.options, [clock := StepClock()]) as run:
                times, _ = measured(run, clock, _WARM_STEPS, steps)
                seen = run.engine.comm.all_gather_object(
                    (times.step_s, times.per_step()["communication"])
                )
    except ConfigError as error:  # the same on all ranks: options that exclude each other
        return Setting(options, refused=str(error))
    run.engine.comm.disconnect()
    step_s, waits_s = max(seen)
    return Setting(options, step_s, waits_s)
