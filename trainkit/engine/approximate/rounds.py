"""Rounds: steps that each rank takes alone, and the outer steps that bring the ranks together.

    exact steps                            the first ones, if settings ask for them
    rank's own steps, by its own samples   weights and the optimizer's state differ between ranks
    outer step, each `every_n_steps`       d = mean over ranks of (shared weights - own weights)      one message
                                           v = momentum v + d;  shared -= rate (d + momentum v)       Nesterov's, as in torch
                                           own weights = shared ones; the optimizer's state stays
                                           each rank's

The mean weighs each rank by its samples since the last outer step (McMahan et al. 2017), so that
with one step, rate 1 and no momentum plain SGD is the same as exact sums, however unevenly samples
are split. Fragments take their outer steps in turn.

A round is cut short by `close`: before a validation, at the end of training, and before an elastic
run changes its ranks. A checkpoint leaves it as it is: its weights are the shared ones, and beside
them it holds what each rank has of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainkit.engine.approximate.settings import Alone
from trainkit.engine.collectives import Collectives
from trainkit.engine.reduce.buckets import NamedParameter
from trainkit.errors import ConfigError


class Rounds:
    """See the module.

    Args:
        settings: of communication=local_sgd or diloco.
        comm: of the engine.

    Attributes:
        steps: of the run.
        notes: what was translated from a checkpoint, in words.
    """

    kind = "rounds"

    def __init__(self, settings: Alone, comm: Collectives) -> None:
        self._settings = settings
        self._comm = comm
        self.steps = 0
        self.notes: list[str] = []
        self._last = [0] * settings.fragments  # the step of each fragment's last outer step
        self._momentum: dict[str, Tensor] = {}
        self._restored: Sequence[dict[str, Any]] = ()
        self._named: list[NamedParameter] = []
        self._optimizers: Sequence[Optimizer] = ()
        self._shared: dict[str, Tensor] = {}
        # This rank's samples since each fragment's last outer step, in parts of a step's samples.
        self._shares = [torch.zeros((), dtype=torch.float64)] * settings.fragments

    @property
    def is_alone(self) -> bool:
        """Whether this rank takes its next step alone."""
        return self.steps >= self._settings.start_after_steps

    @property
    def is_closed(self) -> bool:
        """Whether all ranks hold the same weights:
        none has stepped since the last outer step of any fragment.
        """
        return not self._shared or all(last == self.steps for last in self._last)

    @property
    def is_met(self) -> bool:
        """Whether an outer step was part of the last step, or all steps are exact yet."""
        return not self._shared or self.steps in self._last

    def start(self, trained: Sequence[NamedParameter], optimizers: Sequence[Optimizer]) -> None:
        """Take the weights and optimizers that all ranks share now, then what was restored of this
        rank's own.

        Raises:
            ConfigError: there are fewer parameters than fragments.
        """
        if len(trained) < self._settings.fragments:
            raise ConfigError(
                f"communication.fragments is {self._settings.fragments}, but the Task has"
                f" {len(trained)} trained parameters. Use fewer fragments."
            )
        self._named = list(trained)
        self._optimizers = optimizers
        if self.is_alone:
            self._begin()
            if self._restored:
                self._take_own()
        self._restored = ()

    def _begin(self) -> None:
        device = self._named[0][1].device
        self._shared = {name: p.detach().clone() for name, p in self._named}
        if self._settings.outer_momentum:
            held = self._momentum
            self._momentum = {
                n: held[n].to(p) if n in held else torch.zeros_like(p) for n, p in self._named
            }
        self._shares = [share.to(device) for share in self._shares]

    # -- a step -----------------------------------------------------------------------------------------------------

    def count(self, factor: Tensor | None) -> None:
        """Count this rank's samples of a step.

        Args:
            factor: planned samples of the step / own ones, by which gradients are multiplied; 0 for
                none, None for 1.
        """
        if factor is None:
            self._shares = [share + 1.0 for share in self._shares]
        else:
            factor = factor.to(self._shares[0])
            own = torch.where(factor == 0, factor, 1 / factor)
            self._shares = [share + own for share in self._shares]

    def after_step(self) -> bool:
        """Count a step, and take the outer steps that are due;
        return whether the next step is the first one alone.
        """
        was_alone = self.is_alone
        self.steps += 1
        if not was_alone:
            if self.is_alone:
                self._last = [self.steps] * self._settings.fragments
                self._begin()
            return self.is_alone
        every, fragments = self._settings.every_n_steps, self._settings.fragments
        taken = self.steps - self._settings.start_after_steps
        for fragment in range(fragments):
            if (taken - (fragment + 1) * every // fragments) % every == 0:
                self._outer_step(fragment)
        return False

    def close(self) -> None:
        """Take the outer step of each fragment whose weights may differ. Call it on all ranks."""
        if self._shared:
            for fragment, last in enumerate(self._last):
                if last != self.steps:
                    self._outer_step(fragment)

    @torch.no_grad()
    def _outer_step(self, fragment: int) -> None:
        named, settings = self._fragment(fragment), self._settings
        dtype = torch.float32
        for _, p in named:
            dtype = torch.promote_types(dtype, p.dtype)
        weight = self._shares[fragment].to(dtype)
        changes = [(self._shared[name] - p).reshape(-1).to(dtype) for name, p in named]
        with self._comm.waiting_for("an outer step"):
            total = self._comm.all_reduce(
                torch.cat([*changes, torch.ones_like(changes[0][:1])]) * weight
            )
        mean = total[:-1] / total[-1].real.clamp(min=torch.finfo(dtype).tiny)
        start = 0
        for name, p in named:
            change = mean[start : start + p.numel()].view(p.shape)
            start += p.numel()
            if settings.outer_momentum:
                speed = self._momentum[name].mul_(settings.outer_momentum).add_(change.to(p.dtype))
                change = change + settings.outer_momentum * speed
            self._shared[name].sub_((settings.outer_lr * change).to(p.dtype))
            p.copy_(self._shared[name])
        self._last[fragment], self._shares[fragment] = (
            self.steps,
            torch.zeros_like(self._shares[fragment]),
        )

    def _fragment(self, number: int) -> list[NamedParameter]:
        count, parts = len(self._named), self._settings.fragments
        return self._named[number * count // parts : (number + 1) * count // parts]

    # -- state ------------------------------------------------------------------------------------------------------

    def shared_tensors(self) -> dict[str, Tensor]:
        """Return what is equal on all ranks at any step; empty before the first step alone."""
        momentum = (
            {f"the outer momentum of {name}": t for name, t in self._momentum.items()}
            if self._shared
            else {}
        )
        return {f"the shared {name}": t for name, t in self._shared.items()} | momentum

    def with_shared(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a task's state_dict with the shared weights in place of this rank's own."""
        shared = {
            p.data_ptr(): self._shared[name]
            for name, p in self._named
            if name in self._shared and p.numel()
        }
        return {name: shared.get(value.data_ptr(), value) for name, value in state.items()}

    def shared_state(self) -> dict[str, Any]:
        """Return what is equal on all ranks, beside the shared weights."""
        return {
            "kind": self.kind,
            "steps": self.steps,
            "last": list(self._last),
            "momentum": dict(self._momentum),
        }

    def own_state(self) -> dict[str, Any]:
        """Return what this rank has of its own:
        optimizer state, and in a round weights and its part of the samples.
        """
        if not self._shared:
            return {}
        shares = [float(share) for share in self._shares]
        weights = {} if self.is_closed else {name: p.detach() for name, p in self._named}
        return {
            "shares": shares,
            "weights": weights,
            "optimizers": [opt.state_dict()["state"] for opt in self._optimizers],
        }

    def load_shared(self, state: dict[str, Any]) -> None:
        """Take back `shared_state`, before `start`.
        Other settings than the checkpoint's begin a new round.
        """
        self.steps, self._momentum = int(state["steps"]), dict(state["momentum"])
        last = list(state["last"])
        self._last = last if len(last) == len(self._last) else [self.steps] * len(self._last)

    def load_own(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> None:
        """Take back this rank's own part, before `start`; at another number of ranks, the mean of
        the parts.

        Weights are averaged by samples, as the next outer step would; moments of the optimizer
        evenly.
        """
        if len(states) == world_size:
            self._restored = [states[rank]]
            return
        self._restored = states
        self.notes.append(
            f"{len(states)} ranks stepped alone: their weights since the last outer step, and the"
            f" state of their optimizers, are averaged for {world_size}."
        )

    @torch.no_grad()
    def _take_own(self) -> None:
        states = self._restored
        shares = [sum(state["shares"]) or 1.0 for state in states]
        for name, p in self._named:
            found = [state["weights"].get(name) for state in states]
            if all(weights is not None and weights.shape == p.shape for weights in found):
                p.copy_(mean_of(found, shares).to(p.device))
        for i, optimizer in enumerate(self._optimizers):
            own = mean_of([state["optimizers"][i] for state in states], [1.0] * len(states))
            optimizer.load_state_dict(optimizer.state_dict() | {"state": own})
        if len(states[0]["shares"]) == len(self._shares):
            each = [
                sum(state["shares"][i] for state in states) / len(states)
                for i in range(len(self._shares))
            ]
            self._shares = [torch.full_like(self._shares[0], share) for share in each]


def mean_of(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Return the weighted mean of alike trees: of their floating-point tensors;
    of all else the first one's.
    """
    first = values[0]
    if len(values) == 1:
        return first
    if isinstance(first, dict):
        pairs = list(zip(values, weights, strict=True))
        # a rank without samples has no moments yet
        keys = dict.fromkeys(key for value in values for key in value)
        found = {
            key: [(value[key], weight) for value, weight in pairs if key in value] for key in keys
        }
        return {key: mean_of(*map(list, zip(*there, strict=True))) for key, there in found.items()}
    if isinstance(first, Tensor) and first.is_floating_point():
        total = sum(
            (value.double() * weight for value, weight in zip(values, weights, strict=True)),
            torch.zeros(()),
        )
        return (total / sum(weights)).to(first.dtype)
    return first
