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

A round is cut short by `close_round`: before a validation, at the end of training, and before an elastic
run changes its ranks. A checkpoint leaves it as it is: its weights are the shared ones, and beside
them it holds what each rank has of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.engine.approximation import Approximation
from trainkit.engine.collectives import Collectives
from trainkit.engine.reduce.buckets import NamedParameter, split_frozen
from trainkit.errors import ConfigError
from trainkit.extensions.communication.settings import Alone
from trainkit.optim.optimizer_state import is_torchs, load_state, state_of


class Rounds(Approximation):
    """See the module.

    Args:
        settings: of communication=local_sgd or diloco.
        comm: of the engine.

    Attributes:
        steps: of the run.
    """

    kind = "rounds"
    averages_weights = True

    def __init__(self, settings: Alone, comm: Collectives) -> None:
        super().__init__(comm.ranks)
        self._settings = settings
        self._comm = comm
        self.shown = f"approximate: {settings.describe()}"
        self.steps = 0
        self._last = [0] * settings.fragments  # the step of each fragment's last outer step
        self._momentum: dict[str, Tensor] = {}
        self._restored: Sequence[dict[str, Any]] = ()
        self._named: list[NamedParameter] = []
        self._optimizers: Sequence[Optimizer] = ()
        self._shared: dict[str, Tensor] = {}
        # This rank's samples since each fragment's last outer step, in parts of a step's samples.
        self._shares = [torch.zeros((), dtype=torch.float64)] * settings.fragments

    @property
    def steps_alone(self) -> bool:
        """See Approximation."""
        return self.steps >= self._settings.start_after_steps

    @property
    def is_closed(self) -> bool:
        """Whether all ranks hold the same weights:
        none has stepped since the last outer step of any fragment.
        """
        return not self._shared or all(last == self.steps for last in self._last)

    @property
    def has_met(self) -> bool:
        """See Approximation: an outer step was part of the last step, or all steps are exact yet."""
        return not self._shared or self.steps in self._last

    def start(
        self,
        task: nn.Module,
        optimizers: Sequence[Optimizer],
        sparse: AbstractSet[Tensor] = frozenset(),
    ) -> None:
        """See Approximation: take the weights and optimizers that all ranks share now, then what
        was restored of this rank's own.

        Raises:
            ConfigError: there are fewer parameters than fragments, or an optimizer's state has a
                form of its own.
        """
        if not optimizers:
            return
        for optimizer in optimizers:
            if not is_torchs(optimizer.state_dict()):
                raise ConfigError(
                    f"communication is {self.kind}, where each rank saves the state of its own"
                    f" optimizer, and that of {type(optimizer).__name__} has a form of its own, not"
                    " torch's. Use another optimizer, or leave communication out."
                )
        trained, _ = split_frozen(task.named_parameters())
        if len(trained) < self._settings.fragments:
            raise ConfigError(
                f"communication.fragments is {self._settings.fragments}, but the Task has"
                f" {len(trained)} trained parameters. Use fewer fragments."
            )
        self._named = list(trained)
        self._optimizers = optimizers
        if self.steps_alone:
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
        """See Approximation."""
        if not self.steps_alone:
            return
        if factor is None:
            self._shares = [share + 1.0 for share in self._shares]
        else:
            factor = factor.to(self._shares[0])
            own = torch.where(factor == 0, factor, 1 / factor)
            self._shares = [share + own for share in self._shares]

    def end_step(self) -> bool:
        """See Approximation."""
        was_alone = self.steps_alone
        self.steps += 1
        if not was_alone:
            if self.steps_alone:
                self._last = [self.steps] * self._settings.fragments
                self._begin()
            return self.steps_alone
        every, fragments = self._settings.every_n_steps, self._settings.fragments
        taken = self.steps - self._settings.start_after_steps
        for fragment in range(fragments):
            if (taken - (fragment + 1) * every // fragments) % every == 0:
                self._outer_step(fragment)
        return False

    def close_round(self) -> None:
        """See Approximation: take the outer step of each fragment whose weights may differ."""
        if self._shared:
            for fragment, last in enumerate(self._last):
                if last != self.steps:
                    self._outer_step(fragment)

    @torch.no_grad()
    def _outer_step(self, fragment: int) -> None:
        named = self._fragment(fragment)
        settings = self._settings
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
        self._last[fragment] = self.steps
        self._shares[fragment] = torch.zeros_like(self._shares[fragment])

    def _fragment(self, number: int) -> list[NamedParameter]:
        count = len(self._named)
        parts = self._settings.fragments
        return self._named[number * count // parts : (number + 1) * count // parts]

    # -- state ------------------------------------------------------------------------------------------------------

    def shared_tensors(self) -> dict[str, Tensor]:
        """See Approximation: equal at any step; empty before the first step alone."""
        momentum = (
            {f"the outer momentum of {name}": t for name, t in self._momentum.items()}
            if self._shared
            else {}
        )
        return {f"the shared {name}": t for name, t in self._shared.items()} | momentum

    def with_shared(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """See Approximation."""
        shared = {
            p.data_ptr(): self._shared[name]
            for name, p in self._named
            if name in self._shared and p.numel()
        }
        return {name: shared.get(value.data_ptr(), value) for name, value in state.items()}

    def shared_state(self) -> dict[str, Any]:
        """See Approximation: what there is beside the shared weights."""
        return {
            "kind": self.kind,
            "steps": self.steps,
            "last": list(self._last),
            "momentum": dict(self._momentum),
        }

    def own_state(self) -> dict[str, Any]:
        """See Approximation: optimizer state, and in a round weights and this rank's part of the
        samples.
        """
        if not self._shared:
            return {}
        shares = [float(share) for share in self._shares]
        weights = {} if self.is_closed else {name: p.detach() for name, p in self._named}
        return {
            "kind": self.kind,
            "shares": shares,
            "weights": weights,
            "optimizers": [state_of(opt)["state"] for opt in self._optimizers],
        }

    def load_shared(self, state: dict[str, Any]) -> list[str]:
        """See Approximation; before `start`. Other settings than the checkpoint's begin a new
        round.
        """
        if not state or state["kind"] != self.kind:
            return super().load_shared(state)
        self.steps, self._momentum = int(state["steps"]), dict(state["momentum"])
        last = list(state["last"])
        self._last = last if len(last) == len(self._last) else [self.steps] * len(self._last)
        return []

    def load_own(self, states: Sequence[dict[str, Any]]) -> None:
        """See Approximation; before `start`. At another number of ranks it is the mean of the
        parts: of weights by samples, as the next outer step would; of the optimizer's moments
        evenly.
        """
        states = [state for state in states if state.get("kind") == self.kind]
        if not states:
            return
        rank, world_size = self._ranks.rank, self._ranks.world_size
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
            weights_of_ranks = [state["weights"].get(name) for state in states]
            if all(
                weights is not None and weights.shape == p.shape for weights in weights_of_ranks
            ):
                p.copy_(mean_of(weights_of_ranks, shares).to(p.device))
        for i, optimizer in enumerate(self._optimizers):
            own = mean_of([state["optimizers"][i] for state in states], [1.0] * len(states))
            load_state(optimizer, optimizer.state_dict() | {"state": own})
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
        by_key = {
            key: [(value[key], weight) for value, weight in pairs if key in value] for key in keys
        }
        return {key: mean_of(*map(list, zip(*there, strict=True))) for key, there in by_key.items()}
    if isinstance(first, Tensor) and first.is_floating_point():
        total = sum(
            (value.double() * weight for value, weight in zip(values, weights, strict=True)),
            torch.zeros(()),
        )
        return (total / sum(weights)).to(first.dtype)
    return first
