"""Precision: the dtypes of a run, and the loss scale of fp16."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState

from trainkit import extension
from trainkit.device.sync_guard import allowed_read
from trainkit.errors import ConfigError

PrecisionName = Literal["32-true", "16-mixed", "bf16-mixed", "bf16-true", "64-true", "fp8-mixed"]

_TRUE_DTYPES = {"bf16-true": torch.bfloat16, "64-true": torch.float64}
_MIXED_DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}
_OWN = ("32-true", *_MIXED_DTYPES, *_TRUE_DTYPES)


def precision_of(name: PrecisionName, device: torch.device) -> Precision:
    """Return the precision of a name, the core's or an extension's.

    Raises:
        ConfigError: there is none, or the device cannot serve it.
    """
    target = extension.find("precisions", name, {})
    return Precision(name, device) if target is None else extension.resolve(target)(name, device)


class Precision:
    """Applies one of the names to weights, batches, forward and update.

    "*-mixed": weights stay float32 and forward runs under autocast; fp16 scales its loss, so small
    gradients do not vanish, and skips an update if they overflow (Micikevicius et al. 2018).
    "*-true": weights and inputs have that dtype.

    Attributes:
        note: what a user should know beside the name.
        sum_over_ranks: sums an overflow over ranks, if a rank may hold a part of the gradients that
            others do not see; an engine sets it.
    """

    note: str = ""
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None

    def __init__(self, name: PrecisionName, device: torch.device) -> None:
        """Build for a device.

        Raises:
            ConfigError: there is no such precision, or the device lacks it.
        """
        if device.type == "mps" and name in ("64-true", "16-mixed"):
            lacks = "float64" if name == "64-true" else "the loss scale that float16 needs"
            raise ConfigError(
                f"trainer.precision is '{name}', and engine.device=mps lacks {lacks}. Use bf16-mixed"
                " or 32-true."
            )
        if name not in _OWN:
            raise ConfigError(
                f"trainer.precision is '{name}'; it must be one of"
                f" {', '.join([*_OWN, *extension.names('precisions')])}."
            )
        self.name: str = name
        self.device = device
        self.input_dtype = _TRUE_DTYPES.get(name)
        self._autocast_dtype = _MIXED_DTYPES.get(name)
        self.scales_loss = name == "16-mixed"
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.scales_loss)
        self._has_stepped = False  # since the loss scale was changed

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of forward's matrix products."""
        return self._autocast_dtype or self.input_dtype or torch.float32

    def convert(self, model: nn.Module) -> None:
        """Cast the weights, in place, if the precision is a true one."""
        # Not by `to`: metric objects ignore only these two, since their counts do not fit into
        # bfloat16; and complex weights stay complex.
        if self.input_dtype is torch.bfloat16:
            model.bfloat16()
        elif self.input_dtype is torch.float64:
            model.double()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context that a step of the Task runs in. Casts of weights are not stored, as in
        Lightning: a step may update weights, and use them again.
        """
        if self._autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self._autocast_dtype, cache_enabled=False)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale (1 except for fp16)."""
        return self.scaler.scale(loss) if self.scales_loss else loss

    def unscale(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Divide the gradients by the loss scale, in place. Call after they are reduced."""
        if self.scales_loss:
            if any(self._stage_of(each) is not OptState.READY for each in optimizers):
                self.end_step()  # by hand, one may step several times in a batch
            if self.scaler._scale is None:  # the rank has had no loss yet
                self.scaler._lazy_init_scale_growth_tracker(self.device)
            for optimizer in optimizers:
                self.scaler.unscale_(optimizer)
            if self.sum_over_ranks is not None:
                for overflow in self._overflows(optimizers):
                    overflow.copy_(self.sum_over_ranks(overflow))

    def _overflows(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[Tensor]:
        """Return what `unscale` has found, on each device: above 0 if a gradient is not finite."""
        return [
            overflow
            for optimizer in optimizers
            for overflow in self.scaler._found_inf_per_device(optimizer).values()
        ]

    def _stage_of(self, optimizer: torch.optim.Optimizer) -> OptState:
        stage: OptState = self.scaler._per_optimizer_states[id(optimizer)]["stage"]
        return stage

    def end_step(self) -> None:
        """Change the loss scale, once for all updates since the last call: gradients of others may
        be of the same scale.
        """
        if self._has_stepped:
            self._has_stepped = False
            self.scaler.update()

    def step(self, optimizers: Sequence[torch.optim.Optimizer], ends: bool = True) -> bool:
        """Update the weights under fp16's loss scale; return False if an overflow held the update
        back. Without `ends` the scale is changed by `end_step`.

        Waits for the device, once. All ranks decide alike: an overflow on one is in the sum of all.
        """
        overflows = self._overflows(optimizers)
        states = self.scaler._per_optimizer_states
        stages = [self._stage_of(optimizer) for optimizer in optimizers]
        if not overflows and OptState.READY not in stages:  # no gradients: the Task skips the step
            for optimizer in optimizers:
                del states[id(optimizer)]
                optimizer.step()
            return True
        with allowed_read():
            # one skips all: they are one step, and are clipped as one
            together = torch.stack([overflow.to(self.device) for overflow in overflows])
            is_finite = not bool(together.any())
        if is_finite:
            for optimizer in optimizers:
                # Not by the scaler, which reads again. Nor with its scale: a fused SGD that finds
                # an overflow on the device keeps momenta of uninitialised memory.
                optimizer.step()
        self._has_stepped = True
        if ends:
            self.end_step()
        return is_finite
