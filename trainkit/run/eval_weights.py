"""Optimizers with a switch, `train()` and `eval()`, as schedulefree's: the weights that they train
are not those to evaluate.

    a step                               at the trained weights: train()
    a validation, a checkpoint, a commit at the weights to evaluate: eval(); then the trained ones return, bit for bit
    the fit's end                        the model holds the weights to evaluate

So weights.safetensors has the weights to evaluate, and validate, predict and export need no switch;
the trained ones are in training.pt. `train()` alone would bring them back but for rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR

from trainkit.api.view import RunView
from trainkit.checkpoint.contents import TRAINED, Part
from trainkit.engine.pieces import fill
from trainkit.errors import ConfigError
from trainkit.optim.schedule_free import has_switch, is_schedule_free
from trainkit.run.feature import Feature
from trainkit.run.step_parts import WeightSwitch


class EvalWeights(Feature, WeightSwitch):
    """Of every fit: without an optimizer that has a switch, it does nothing."""

    name = "eval_weights"

    def __init__(self) -> None:
        self._optimizers: list[Any] = []
        self._weights: dict[str, nn.Parameter] = {}
        self._aside: dict[str, Tensor] | None = None
        self._run: RunView | None = None

    def in_step(self, run: RunView, optimizers: Sequence[Optimizer]) -> Mapping[str, Any]:
        """Name itself, if an optimizer has a switch."""
        self._optimizers = [optimizer for optimizer in optimizers if has_switch(optimizer)]
        if not self._optimizers:
            return {}
        own = {p for opt in self._optimizers for group in opt.param_groups for p in group["params"]}
        self._weights = {n: p for n, p in run.task.named_parameters() if p in own}
        self._run = run
        return {"eval_weights": self}

    def begun(self, run: RunView) -> None:
        """Refuse what does not go with a switch, and switch to training."""
        if self._optimizers:
            _check(run, self._optimizers)
            run.say(_described(run, self._optimizers))
            self._switch("train")

    def parts(self, run: RunView) -> Mapping[str, Part]:
        """The trained weights."""
        return {TRAINED: self} if self._optimizers else {}

    def state_dict(self) -> dict[str, Any]:
        """Return the trained weights, by name: within `shown` the model does not hold them."""
        return dict(self._aside or {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them, and switch to training; the optimizers' state was restored before."""
        assert self._run is not None
        self._switch("train")
        for name, value in state.items():
            fill(self._run.engine.piece_of(self._weights[name].detach()), value)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """A context in which the model holds the weights to evaluate; one within another is none."""
        if self._aside is not None:
            yield
            return
        self.show()
        try:
            yield
        finally:
            self._hide()

    def show(self) -> None:
        """Put the weights to evaluate into the model; the trained ones are set aside."""
        if self._aside is None:
            self._aside = {name: p.detach().clone() for name, p in self._weights.items()}
            self._switch("eval")

    @torch.no_grad()
    def _hide(self) -> None:
        aside, self._aside = self._aside, None
        self._switch("train")
        for name, tensor in (aside or {}).items():
            self._weights[name].copy_(tensor)

    def _switch(self, mode: str) -> None:
        for optimizer in self._optimizers:
            getattr(optimizer, mode)()


def _check(run: RunView, optimizers: Sequence[Any]) -> None:
    """Refuse what does not go with a switch.

    Raises:
        ConfigError: there is something.
    """
    name = type(optimizers[0]).__name__
    for callback in run.callbacks:
        if callback.role == "weight_average":
            raise ConfigError(
                f"The optimizer is {name}, which puts its own averages into the model (eval()), and"
                f" so would {type(callback).__name__}. Leave one of them out."
            )
        if "optimizer_groups" in callback.needs_of_engine:
            raise ConfigError(
                f"{type(callback).__name__} adds weights to the optimizer while it trains, and"
                f" {name} averages weights from the first step. Use another optimizer, as"
                " optimizer=adamw."
            )
    if run.engine.approximation.averages_weights:
        raise ConfigError(
            f"The optimizer is {name}, and with communication={run.options.communication.name}"
            " ranks average their weights, not the optimizer's averages: they would validate"
            " different ones. Use communication=exact, or another optimizer."
        )
    twice = [g["warmup_steps"] for o in optimizers for g in o.param_groups if g.get("warmup_steps")]
    if twice and run.batch_plan.warmup_steps:
        raise ConfigError(
            f"{name} has warmup_steps={twice[0]}, and the trainer warms up too"
            f" ({run.batch_plan.warmup_steps} steps): the rate would rise by both. Leave out the"
            " optimizer's warmup_steps, or trainer.lr_warmup_steps and lr_warmup_epochs."
        )


def _described(run: RunView, optimizers: Sequence[Any]) -> str:
    names = ", ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
    text = (
        f"{names}: steps train the weights of its train(); validation, checkpoints and the end of"
        " the run use those of its eval()."
    )
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in run.task.modules()):
        text += " Batch norm's statistics are of the former."
    scheduled = [
        config.scheduler
        for config in run.rates.schedules
        if is_schedule_free(config.scheduler.optimizer)
        and not isinstance(config.scheduler, ConstantLR)
    ]
    if scheduled:
        text += (
            " The latter are averages in the place of a schedule, and"
            f" {type(scheduled[0]).__name__} changes the rate too: leave it out (lr=constant)."
        )
    return text
