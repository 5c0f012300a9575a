"""WeightAverage: a running average of a model's weights, and the exchange of the two.

    update(decay)  exponential: average <- decay x average + (1 - decay) x weights
    update(None)   equal:       average <- average + (weights - average) / (updates so far + 1)
    show / hide    put the average into the model, and the trained weights back

The arithmetic is that of torch.optim.swa_utils. Its AveragedModel is not used: it copies the whole
Task (with its Trainer), averages batch counters like weights, turns a mask's infinities into NaN,
and waits for the device in each update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from trainkit.device.shards import local_of
from trainkit.errors import CheckpointError


class WeightAverage:
    """See the module. The first update copies the weights.

    Args:
        model: the model to average. The average is at least float32: in bfloat16 a small change is
            lost.
        buffers: average floating-point buffers too (batch norm's statistics), except buffers with
            infinities (masks). Counters are not averaged. Waits for the device once, here.
        fill: fills a tensor from a checkpoint's; of ranks that hold parts of the weights, see
            Engine.fill.
    """

    def __init__(
        self, model: nn.Module, buffers: bool, fill: Callable[[Tensor, Any], object] = Tensor.copy_
    ) -> None:
        self._live = dict(model.named_parameters()) | dict(model.named_buffers())
        names = [n for n, p in model.named_parameters() if p.is_floating_point() or p.is_complex()]
        if buffers:
            names += [
                n
                for n, b in model.named_buffers()
                if b.is_floating_point() and bool(b.isfinite().all())
            ]
        self._average = {name: _precise(self._live[name].detach().clone()) for name in names}
        self._fill = fill
        self._aside: dict[str, Tensor] | None = None
        self.num_updates = 0

    @property
    def shown(self) -> bool:
        """Whether the model holds the average now."""
        return self._aside is not None

    @torch.no_grad()
    def update(self, decay: float | None) -> None:
        """Add the model's weights to the average; `decay` (0 to 1) is the average's weight.
        Never waits for the device.
        """
        assert not self.shown, "the model holds the average, not the weights that are trained"
        averages = [local_of(average) for average in self._average.values()]
        weights = [
            local_of(self._live[name].detach()).to(average.dtype)
            for name, average in self._average.items()
        ]
        if self.num_updates == 0:
            torch._foreach_copy_(averages, weights)
        elif decay is None:
            get_swa_multi_avg_fn()(averages, weights, self.num_updates)  # type: ignore[no-untyped-call]
        else:
            get_ema_multi_avg_fn(decay)(averages, weights, self.num_updates)  # type: ignore[no-untyped-call]
        self.num_updates += 1

    def parameters(self) -> dict[str, Tensor]:
        """Return the averages of parameters: equal on all ranks."""
        return {
            name: average
            for name, average in self._average.items()
            if isinstance(self._live[name], nn.Parameter)
        }

    def buffers(self) -> dict[Tensor, Tensor]:
        """Return the averages by their buffers; they may differ between ranks as the buffers do."""
        return {
            self._live[name]: average
            for name, average in self._average.items()
            if not isinstance(self._live[name], nn.Parameter)
        }

    @torch.no_grad()
    def show(self) -> None:
        """Put the average into the model; its own parameters and buffers are set aside."""
        if self._aside is None:
            self._aside = {name: tensor.detach().clone() for name, tensor in self._live.items()}
            for name, average in self._average.items():
                self._live[name].copy_(average)

    @torch.no_grad()
    def hide(self) -> None:
        """Restore the model's own parameters and buffers."""
        if self._aside is not None:
            for name, tensor in self._aside.items():
                self._live[name].copy_(tensor)
            self._aside = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state outside of the model: the weights set aside, or the average;
        and the rounding of a dtype cast.
        """
        average = {
            n: a
            for n, a in self._average.items()
            if not self.shown or a.dtype != self._live[n].dtype
        }
        return {
            "num_updates": self.num_updates,
            "average": average,
            "aside": dict(self._aside) if self._aside else None,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it, given a model as it was when the state was taken; the average is hidden
        afterwards.

        Raises:
            CheckpointError: it is the state of another model.
        """
        aside = state["aside"]
        names = set(self._average if aside is None else self._live)
        if names != set(state["average"] if aside is None else aside):
            raise CheckpointError(
                "The checkpoint's averaged weights are of another model, or of other buffers: they"
                " do not fit."
            )
        for name, average in self._average.items():
            if name in state["average"]:
                self._fill(average, state["average"][name])
            else:
                average.copy_(self._live[name])
        self.num_updates = state["num_updates"]
        if aside is not None:
            for name, tensor in aside.items():
                self._fill(self._live[name], tensor)


def _precise(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
