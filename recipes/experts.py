"""Mixtures of experts in transformers' models, balanced the same on any ranks and microbatches.

Routers       what the routers of a model chose in a forward
joined        weights of a folder
in_float64    for precision=64-true
even_loss     the load-balancing loss of each sequence
ExpertLoad    a callback: the load of a whole step, logged, and the biases that it moves

The loss of Switch and Mixtral is a product of two means, of shares of tokens and of probabilities:
computed by microbatch or by rank it is another loss with each layout. Here it is a mean over sequences
of a product within each (DeepSeek-V2, section 2.2.3; DeepSeek-V3, section 2.1.2), which is linear in
samples, as a step's loss has to be. Biases (Wang et al. 2024) move by the counts of the whole step.

B rows, T tokens, N = B T, D width, E experts, K experts of a token, L layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import trainkit
from trainkit.api.view import RunView
from trainkit.device.sync_guard import allowed_read
from trainkit.errors import ConfigError
from trainkit.extensions.insight.log_steps import is_log_step, write

_EXPERT = re.compile(r"(.*)\.(?:block_sparse_moe|mlp)\.experts\.(\d+)\.(w[123]|\w+_proj)\.weight")
_KINDS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # Mixtral's
BIAS = "e_score_correction_bias"


class Routed(NamedTuple):
    """What one router did.

    Attributes:
        logits_NE: its scores of each expert, before softmax.
        chosen_NK: the numbers of the experts of each token.
    """

    logits_NE: Tensor
    chosen_NK: Tensor

    @property
    def picks_NE(self) -> Tensor:
        """Return 1 where a token goes to an expert, 0 elsewhere."""
        return torch.zeros_like(self.logits_NE).scatter(1, self.chosen_NK, 1)


class Routers:
    """The routers of a model of transformers, in the order of layers.

    Args:
        model: its routers are modules of classes named ...Router, with a weight [E, D], that return
            logits, weights and numbers of the experts of each token.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = routers_of(model)
        self._routed: list[Routed] | None = None
        for module in self.modules:
            module.register_forward_hook(self._look)

    @contextmanager
    def watched(self) -> Iterator[list[Routed]]:
        """Give a list that has what each router did in a forward within the context."""
        self._routed = routed = list[Routed]()
        try:
            yield routed
        finally:
            self._routed = None  # activation checkpointing runs a forward again, in backward

    def biases(self) -> list[Tensor]:
        """Return the biases of each router, [E], which count in its choice alone."""
        return [getattr(module, BIAS) for module in self.modules]

    def _look(self, module: Any, inputs: tuple[Tensor, ...], outputs: Any) -> None:
        if not module.training:
            return
        # of transformers 5.0 the first output is not the logits. It is computed whether or not it is
        # watched: activation checkpointing requires that both forwards do the same.
        logits_NE = functional.linear(inputs[0].flatten(0, -2), module.weight)
        if self._routed is not None:
            self._routed.append(Routed(logits_NE, outputs[2]))


def routers_of(model: nn.Module) -> list[nn.Module]:
    """Return the routers of a model of transformers; none of one without experts."""
    return [each for each in model.modules() if type(each).__name__.endswith("Router")]


def in_float64(task: trainkit.Task, model: Any) -> None:
    """Let experts be computed one after the other if weights are float64, which products of groups
    refuse.
    """
    if task.dtype == torch.float64 and routers_of(model):
        model.set_experts_implementation("eager")


def joined(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of `save_pretrained`, which have a name for each expert, by those of a model
    that has gate_up_proj [E, 2 F, D] and down_proj [E, D, F]; others as they are.
    """
    if not any(name.endswith(".experts.gate_up_proj") for name, _ in model.named_parameters()):
        return weights
    others: dict[str, Tensor] = {}
    experts: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name, weight in weights.items():
        if match := _EXPERT.fullmatch(name):
            layer, number, kind = match.groups()
            own = experts.setdefault(layer, {}).setdefault(_KINDS.get(kind, kind), {})
            own[int(number)] = weight
        else:
            others[name.replace(".block_sparse_moe.", ".mlp.")] = weight
    for layer, by_kind in experts.items():
        stacked = {
            kind: torch.stack([own[number] for number in sorted(own)])
            for kind, own in by_kind.items()
        }
        both = [stacked["gate_proj"], stacked["up_proj"]]
        others[f"{layer}.mlp.experts.gate_up_proj"] = torch.cat(both, 1)
        others[f"{layer}.mlp.experts.down_proj"] = stacked["down_proj"]
    return others


def even_loss(routed: list[Routed], rows: int) -> Tensor:
    """Return the load-balancing loss of each row, summed over layers, [B].

    Of a layer: the sum over experts of E / K times the share of the row's tokens that go to it, times
    its mean probability there. It is 1 if the row's tokens are spread evenly, E / K if all go to
    the same K experts with certainty.

    Args:
        routed: of each layer.
        rows: B; each has as many tokens.
    """
    layers = []
    for each in routed:
        wide = torch.promote_types(each.logits_NE.dtype, torch.float32)
        chances_BE = each.logits_NE.to(wide).softmax(-1).unflatten(0, (rows, -1)).mean(1)
        shares_BE = each.picks_NE.to(wide).unflatten(0, (rows, -1)).mean(1)
        factor = each.logits_NE.shape[1] / each.chosen_NK.shape[1]
        layers.append(factor * (shares_BE * chances_BE).sum(1))
    return torch.stack(layers).sum(0)


class ExpertLoad(trainkit.Callback):
    """Logs `expert_load/max` and `expert_load/min`: of all layers the largest and the smallest number
    of a step's tokens that an expert gets, divided by the mean; 1 and 1 are even, a minimum that stays
    0 is a dead expert. With a rate, biases move by what it counts.

    All is counted over all ranks and microbatches of a step; borrowed samples do not count.

    Args:
        rate: what is added after each step to the bias of an expert with less than the mean, and
            taken from that of one with more; None if there are no biases.
    """

    def __init__(self, rate: float | None = None) -> None:
        self.rate = rate
        self.routers: Routers | None = None
        self.seen_LE: Tensor | None = None  # of the microbatch whose forward was last
        self._own_LE: Tensor | None = None  # of this rank's microbatches of the step so far
        self._all_LE: Tensor | None = None  # of the step

    def look(self, routed: list[Routed]) -> None:
        """Take what the routers did in a microbatch."""
        self.seen_LE = torch.stack([each.picks_NE.sum(0) for each in routed]).long()

    def on_fit_start(self, trainer: RunView, task: trainkit.Task) -> None:
        """Check that biases can move by small steps.

        Raises:
            ConfigError: they would be rounded off, or a step could be counted twice.
        """
        if self.rate is None or self.routers is None:
            return
        held = self.routers.biases()[0].dtype
        if torch.finfo(held).bits < 32:
            raise ConfigError(
                f"task.balance is 'bias', and trainer.precision holds the biases in {held}, which"
                f" rounds steps of {self.rate:g} off. Use trainer.precision=bf16-mixed, or"
                " task.balance=loss."
            )
        if trainer.options.numerics.halve_batch_on_oom:
            raise ConfigError(
                "task.balance is 'bias', and trainer.halve_batch_on_oom is true: a step that is"
                " taken again would count twice in the biases. Use task.balance=loss, or"
                " trainer.halve_batch_on_oom=false."
            )

    def on_train_step_start(self, trainer: RunView, task: trainkit.Task) -> None:
        """Count from zero: the last step may have failed."""
        self._own_LE = self._all_LE = None

    def on_before_backward(self, trainer: RunView, task: trainkit.Task, loss: Any) -> None:
        """Add the microbatch, which is not borrowed."""
        assert self.seen_LE is not None
        self._own_LE = self.seen_LE if self._own_LE is None else self._own_LE + self.seen_LE

    def on_before_optimizer_step(
        self, trainer: RunView, task: trainkit.Task, optimizer: Any
    ) -> None:
        """Sum over ranks, where it is read."""
        is_due = self.rate is not None or is_log_step(trainer, 1)
        if not is_due or optimizer is not trainer.optimizers[0]:
            return
        assert (
            self.seen_LE is not None
        )  # every rank has run a forward, of borrowed samples at least
        own_LE = torch.zeros_like(self.seen_LE) if self._own_LE is None else self._own_LE
        self._all_LE = trainer.engine.data.all_reduce(own_LE)

    def on_after_optimizer_step(self, trainer: RunView, task: trainkit.Task) -> None:
        """Move the biases, also if mixed precision held the update back."""
        if self.rate is None or self.routers is None or self._all_LE is None:
            return
        missing_LE = self._all_LE.sum(1, keepdim=True) - self._all_LE * self._all_LE.shape[1]
        for bias_E, missing_E in zip(self.routers.biases(), missing_LE, strict=True):
            bias_E.add_(missing_E.sign().to(bias_E.dtype), alpha=self.rate)

    def on_train_step_end(self, trainer: RunView, task: trainkit.Task) -> None:
        """Log the load."""
        if self._all_LE is None or not is_log_step(trainer):
            return
        load_LE = self._all_LE / self._all_LE.double().mean(1, keepdim=True)
        with allowed_read():
            values = torch.stack([load_LE.max(), load_LE.min()]).tolist()
        write(trainer, dict(zip(("expert_load/max", "expert_load/min"), values, strict=True)))
