"""LearningRates: sets the learning rates by factor, warm-up and schedulers.

A torch scheduler reads and writes `group["lr"]`. To let any scheduler work under warm-up, its rate
is separate from the optimizer's:

    scheduled rate  = factor x the user's rate, as the schedulers move it
    group["lr"]     = scheduled rate x warm-up(step)

A scheduler that is not torch's, which a Task steps by lr_scheduler_step, reads and writes the user's
rates: the factor is divided out around its step.

A rate that differs from what was written here last was set by the user, or by a scheduler that the
user steps. It is the group's scheduled rate from then on, exactly as it was set: no factor, and no
warm-up; until a scheduler whose rates are independent of it (LambdaLR, OneCycleLR) writes another.

Momentum while a rate changes (Goyal et al. 2017, section 2.1, remark 2): torch's SGD has u = m u +
g and steps by lr x u, so a new rate applies to all of u at once; the paper calls this form
corrected. Other frameworks have v = m v + lr x g. `momentum_correction=False` reproduces these:
with momentum m x (last rate / rate), lr x u is their v.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainkit.arguments import not_logged
from trainkit.errors import WEIGHTS_ALONE, CheckpointError, TaskError
from trainkit.optim.batch_plan import BatchPlan
from trainkit.optim.forms import ScheduleConfig
from trainkit.optim.momentum import Momentum, uncorrected
from trainkit.optim.schedule_length import (
    curves,
    has_overwritten,
    has_own_rates,
    made,
    restore,
)
from trainkit.optim.scheduler_state import (
    GROUP_RATES,
    SCHEDULER_RATES,
    changed_groups,
    given_by,
    groups_of_others,
    in_users_rates,
    of_torch,
    storable,
)
from trainkit.optim.users_rates import UsersRates

_OF_GROUPS = {"base_lrs", "min_lrs", "lr_lambdas"}  # of schedulers: an entry for each group
_ABSOLUTE = "{} computes rates itself: lr_scaling's factor of {:g} reaches no rate of its own."


class LearningRates:
    """Sets every group's rate: scaling once, warm-up each step,
    the schedulers when they are due.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        schedules: Sequence[ScheduleConfig],
        contract: BatchPlan,
        momentum_correction: bool = True,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Scale the rates, and the schedulers' base rates, by the contract's factor.

        Args:
            say: takes a line about a rate that the user has set, once.

        Raises:
            ConfigError: momentum correction is off, and there is no momentum, or a scheduler
                changes it too.
        """
        self._optimizers = optimizers
        self._schedules = schedules
        self._whole = contract
        self._contract = contract.at(0)
        self.user_lrs = [float(group.get("initial_lr", group["lr"])) for group in self.groups]
        self._scheduled = [float(group["lr"]) for group in self.groups]
        self._momenta = None if momentum_correction else uncorrected(self.groups, schedules)
        self.moves_by_hand = False  # whether the Task moves the schedulers
        self._held = False  # whether the schedulers are switched off (`hold`)
        self._shares: dict[int, float] = {}  # group -> share of its rate
        self._users = UsersRates(say, [len(optimizer.param_groups) for optimizer in optimizers])
        self._made = [made(config) for config in schedules]
        self._given = [
            given_by(group, lr) for group, lr in zip(self.groups, self.user_lrs, strict=True)
        ]
        self.changes: list[str] = []  # of the user's settings since the checkpoint
        for kind in {type(scheduler) for scheduler in of_torch(schedules)}:
            if self.factor != 1.0 and not kind.get_lr.__module__.startswith("torch.optim."):
                say(_ABSOLUTE.format(kind.__name__, self.factor))
        self._scale([self._contract.lr_factor] * len(self.user_lrs))
        self._last: list[float] | None = None  # the rates of the last update
        self.apply(0)

    @property
    def schedules(self) -> Sequence[ScheduleConfig]:
        """The schedulers and the times of their steps."""
        return self._schedules

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        # Not cached: optimizer.load_state_dict replaces the groups' dicts.
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _scale(self, factors: Sequence[float], by_user: bool = False) -> None:
        """Multiply all rates of each group by its factor, which is lr_scaling's; or the user's for
        `lr`: the rates of schedulers are independent of it. lr_scaling's reaches no rate that the
        user has set; one that the user's scheduler has written has it.
        """
        is_exact = not by_user and all(config.interval != "hand" for config in self._schedules)
        held = self._users.places if is_exact else ()
        self._scheduled = [
            lr if place in held else lr * factor
            for place, (lr, factor) in enumerate(zip(self._scheduled, factors, strict=True))
        ]
        unscaled = groups_of_others(self._schedules)
        for group, factor in zip(self.groups, factors, strict=True):
            for name in ("initial_lr",) if by_user else GROUP_RATES:
                if name in group and (by_user or id(group) not in unscaled):
                    group[name] *= factor
        of_group = {id(group): factor for group, factor in zip(self.groups, factors, strict=True)}
        for scheduler in of_torch(self._schedules):
            own = [of_group[id(group)] for group in scheduler.optimizer.param_groups]
            for name in ("base_lrs",) if by_user else SCHEDULER_RATES:
                if isinstance(rates := getattr(scheduler, name, None), (list, tuple)):
                    rates = [lr * factor for lr, factor in zip(rates, own, strict=True)]
                    setattr(scheduler, name, rates)
                elif rates is not None:
                    setattr(scheduler, name, rates * own[0])

    def apply(self, steps_taken: int) -> None:
        """Set the rates for the next step."""
        groups = self.groups
        multiplier = self._contract.warmup(steps_taken)
        rates = [
            rate if place in self._users.places else rate * multiplier
            for place, rate in enumerate(self._scheduled)
        ]
        if self._shares:
            rates = [rate * self._shares.get(place, 1.0) for place, rate in enumerate(rates)]
        self._users.write(groups, rates, multiplier)
        if self._momenta is not None and self._last is not None:
            for momentum, group, last in zip(self._momenta, groups, self._last, strict=True):
                momentum.apply(group, last)

    def take_users(self) -> None:
        """Adopt the rates that differ from those written last: the user has set them.
        Groups may have been added.
        """
        self._add_groups()
        for place, rate in self._users.new_rates(self.groups, self._contract, self._schedules):
            self._scheduled[place] = rate / (self._shares.get(place) or 1.0)

    def _add_groups(self) -> None:
        """Take the groups that were added to an optimizer, each at its rate, which schedulers take
        for its first one but for an `initial_lr` (BaseFinetuning.unfreeze_and_add_param_group).
        """
        place = 0
        for number, optimizer in enumerate(self._optimizers):
            place += self._users.sizes[number]
            for group in optimizer.param_groups[self._users.sizes[number] :]:
                rate = float(group["lr"])
                if isinstance(group["lr"], Tensor):  # the first group may have this one too
                    group["lr"] = group["lr"].clone()
                self._scheduled.insert(place, rate)
                self._users.insert(place, rate)
                self.user_lrs.insert(place, rate / self.factor)
                self._given.insert(place, given_by(group, rate / self.factor))
                if self._last is not None:
                    self._last.insert(place, rate)
                if self._momenta is not None:
                    self._momenta.insert(place, Momentum(float(group.get("momentum", 0.0))))
                base = float(group.get("initial_lr", rate))
                own = of_torch(c for c in self._schedules if c.scheduler.optimizer is optimizer)
                for scheduler in own:
                    for name in _OF_GROUPS & vars(scheduler).keys():
                        values = getattr(scheduler, name)
                        values.append(base if name == "base_lrs" else values[-1])
                place += 1
            self._users.sizes[number] = len(optimizer.param_groups)

    def start_epoch(self, epoch: int, steps_taken: int) -> None:
        """Update the factor if the accumulation changes with this epoch."""
        self.take_users()
        before = self._contract.lr_factor
        self._contract = self._whole.at(epoch)
        if self._contract.lr_factor != before:
            self._scale([self._contract.lr_factor / before] * len(self.user_lrs))
            self.apply(steps_taken)

    def after_step(self, steps_taken: int) -> None:
        """Move the schedulers that count steps, then warm-up."""
        multiplier = self._contract.warmup(steps_taken)
        moves = self._schedules or self._momenta is not None
        if not moves and self._users.stand(self._optimizers, multiplier):
            return
        self.take_users()
        due = [
            c for c in self._schedules if c.interval == "step" and steps_taken % c.frequency == 0
        ]
        self._move(due, {})
        self.apply(steps_taken)

    def after_epoch(
        self, epochs_done: int, steps_taken: int, fresh: Mapping[str, float], complete: bool = True
    ) -> None:
        """Move the schedulers that count epochs; one that monitors moves only if there is a new
        value.

        Args:
            complete: whether `fresh` has all values of an epoch; False if validation was not due.

        Raises:
            TaskError: a monitored value was not logged in an epoch that is complete.
        """
        self.take_users()
        due = [
            c for c in self._schedules if c.interval == "epoch" and epochs_done % c.frequency == 0
        ]
        if not complete:
            due = [c for c in due if c.monitor is None or c.monitor in fresh]
        self._move(due, fresh)
        self.apply(steps_taken)

    def current(self) -> list[float]:
        """Return the rate of each group."""
        return self._users.read(self.groups)

    def record_update(self, others_follow: bool = False) -> None:
        """Note that an update uses the present rates.

        Args:
            others_follow: code of the user may set others before the next call, which leaves these.
        """
        if not self._users.follow:
            self._last = self.current()
        self._users.follow = others_follow

    def last(self) -> list[float]:
        """Return the rate of each group in the last update;
        before the first one, that of the next.
        """
        return self.current() if self._last is None else self._last

    @property
    def factor(self) -> float:
        """The current factor of the user's rates."""
        return self._contract.lr_factor

    def unscaled(self) -> list[float]:
        """Return each group's rate in the user's terms:
        as scheduled, without factor and warm-up.
        """
        self.take_users()
        return [lr / self.factor for lr in self._scheduled]

    def hold(self, lrs: Sequence[float], steps_taken: int) -> None:
        """Set the rates, and switch the schedulers off for the rest of the run;
        `lrs` are in the user's terms.
        """
        self._held = True
        self._scheduled = [lr * self.factor for lr in lrs]
        self.apply(steps_taken)

    def set_shares(self, shares: Mapping[int, float], steps_taken: int) -> None:
        """Multiply the rates of some groups by a share, until the next call;
        shares are not saved.
        """
        self.take_users()
        self._shares = dict(shares)
        self.apply(steps_taken)

    def move(self, place: int, metric: float | None, steps_taken: int) -> None:
        """Move one scheduler of a Task that moves them by hand."""
        config = self._schedules[place]
        if metric is None and isinstance(config.scheduler, ReduceLROnPlateau):
            raise TaskError(
                "lr_schedulers().step() moves a ReduceLROnPlateau, which needs the monitored value:"
                " step(value)."
            )
        self.take_users()
        self.moves_by_hand = False
        config = replace(config, monitor="", reduce_on_plateau=metric is not None)
        self._move([config], {} if metric is None else {"": metric})
        self.moves_by_hand = True
        self.apply(steps_taken)

    def _move(self, due: Sequence[ScheduleConfig], metrics: Mapping[str, float]) -> None:
        if not due or self._held or self.moves_by_hand:
            return
        self._users.write(self.groups, self._scheduled, 1.0)
        for config in due:
            scheduler = config.scheduler
            metric = None
            if config.reads_value:
                assert config.monitor is not None  # checked by _read_schedule
                if config.monitor not in metrics:
                    if config.strict:
                        raise TaskError(
                            f"lr_scheduler monitors {not_logged(config.monitor, metrics)}"
                        )
                    continue
                metric = metrics[config.monitor]
            if config.is_torchs:
                config.step(scheduler, metric)
                if has_overwritten(scheduler):
                    self._users.release(self.groups, scheduler.optimizer.param_groups)
                continue
            with in_users_rates(scheduler.optimizer, self.factor):
                config.step(scheduler, metric)
        self._scheduled = self._users.read(self.groups)

    def state_dict(self) -> dict[str, Any]:
        """Return the schedulers' states and the scheduled rates."""
        self.take_users()
        return {
            "schedulers": [storable(config.scheduler.state_dict()) for config in self._schedules],
            "scheduled": list(self._scheduled),
            "factor": self._contract.lr_factor,
            "last": self._last,
            "held": self._held,
            "by_hand": sorted(self._users.places),
            "made": self._made,
            "given": self._given,
        }

    def load_state_dict(self, state: Mapping[str, Any], steps_taken: int) -> None:
        """Restore them; the rates follow this run's factor (number of ranks, global batch) and its
        optimizers' settings.

        Raises:
            CheckpointError: the number of schedulers differs.
        """
        if len(state["schedulers"]) != len(self._schedules):
            raise CheckpointError(
                f"The checkpoint has {len(state['schedulers'])} learning-rate schedulers, this task"
                f" {len(self._schedules)}: they do not fit. {WEIGHTS_ALONE}"
            )
        self._scheduled = list(state["scheduled"])
        self._last = state["last"]
        self._held = state.get("held", False)
        self._users.places = set(state.get("by_hand", ()))
        of_schedulers, moved = restore(
            self._schedules,
            state["schedulers"],
            state.get("made", self._made),
            self._made,
            state["factor"],
        )
        for momentum, group in zip(self._momenta or (), self.groups, strict=False):
            momentum.restore(group)
        if state["factor"] != self._contract.lr_factor:
            self._scale([self._contract.lr_factor / state["factor"]] * len(self._scheduled))
        unscaled, groups = groups_of_others(self._schedules), self.groups
        scales = [1.0 if id(group) in unscaled else self.factor for group in groups]
        changes, factors, has_rates = changed_groups(
            state.get("given", self._given),
            self._given,
            groups,
            scales,
        )
        self.changes = [*changes, *of_schedulers]
        if has_rates:
            self._scale(factors, by_user=True)
            torchs = [config.scheduler for config in self._schedules if config.is_torchs]
            moved += filter(has_own_rates, torchs)
        places = {id(group): place for place, group in enumerate(groups)}
        for group, rate in [] if self._held else curves(self._schedules, moved):
            if places[id(group)] not in self._users.places:
                self._scheduled[places[id(group)]] = rate
        self.apply(steps_taken)
