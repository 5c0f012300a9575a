"""DeepSpeed itself: the only file that imports it. Written for 0.19.8.

Its switches are set before the import: which device it computes on, and where it builds its
compiled parts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.extensions.deepspeed import extensions

extensions.choose_folder(os.environ)
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

import deepspeed  # noqa: E402 - after its switches
import deepspeed.ops  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402
from deepspeed.ops.op_builder.all_ops import ALL_OPS  # noqa: E402
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus  # noqa: E402
from deepspeed.utils import (  # noqa: E402
    logger,
    safe_get_full_optimizer_state,
    safe_set_local_optimizer_state,
)

# Of the whole group it warns at each start: that it is not tested with torch's optimizers
# (trainkit's tests do that), and that the autocast around it is not its own.
logger.setLevel(logging.getLevelName(os.environ.get("DS_LOG_LEVEL", "error").upper()))
# Its all-reduce through shared memory is for inference. Without this line each start on a CPU
# compiles it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

VERSION: str = deepspeed.__version__


def device_type() -> str:
    """Return where DeepSpeed computes: "cpu" or "cuda"."""
    return str(get_accelerator().device_name())


def can_build(op: str) -> bool:
    """Return whether a compiled part can be built here, from what it needs on this machine."""
    return op in ALL_OPS and bool(ALL_OPS[op].is_compatible(verbose=False))


def build(op: str) -> None:
    """Load a compiled part; the first time it is compiled.

    Raises:
        Exception: of the compiler, or torch's.
    """
    ALL_OPS[op].load(verbose=False)


class Zero:
    """DeepSpeed's engine of one model and its optimizer.

    Args:
        model: what is called; its parameters are those of the Task.
        optimizer: is changed: its groups then hold flat pieces of the parameters.
        config: DeepSpeed's.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]
    ) -> None:
        # torch.distributed runs already: DeepSpeed uses its default group.
        self._engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self._zero = self._engine.optimizer
        self._stage = int(self._engine.zero_optimization_stage())
        self._states = self._zero.optimizer.state

    def forward(self, *arguments: Any) -> Any:
        """Call the model; without a call there is nothing that `backward` may follow."""
        return self._engine(*arguments)

    def mark_last(self, is_last: bool) -> None:
        """Say whether the next forward and backward are the last ones before an update."""
        self._engine.set_gradient_accumulation_boundary(is_last)

    def backward(self, loss: Tensor) -> None:
        """Run backward and the sums of this microbatch; the loss is not divided by their number."""
        self._engine.backward(loss, scale_wrt_gas=False)

    def step(self, clip_val: float | None) -> bool:
        """Clip, update, and clear the gradients;
        return False if they were not finite, which holds the update back.
        """
        self._zero.clip_grad = clip_val or 0.0
        self._engine.step()
        return bool(self._engine.was_step_applied())

    def end(self) -> None:
        """Take all hooks off the model."""
        self._engine.destroy()

    # -- the parts of this rank -------------------------------------------------------------------------------------

    def whole(self, parameter: nn.Parameter) -> Tensor:
        """Return a parameter's value. Call it on all ranks if it is split."""
        if not is_split(parameter):
            return parameter.detach()
        was_here = parameter.ds_status == ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
        with deepspeed.zero.GatheredParameters([parameter], enabled=not was_here):
            return parameter.detach().clone()

    def state_here(self, parameter: nn.Parameter, group: int) -> dict[str, Any]:
        """Return the optimizer's state of the piece that holds this parameter:
        flat tensors, and values for the whole piece.
        """
        return self._states.get(self._flat(parameter, group), {})  # type: ignore[no-any-return]

    def is_flat(self, parameter: nn.Parameter, group: int, value: Any) -> bool:
        """Whether a value of `state_here` has an element for each one of the piece."""
        return (
            isinstance(value, Tensor)
            and value.dim() > 0
            and value.numel() == self._flat(parameter, group).numel()
        )

    def whole_state(
        self, parameter: nn.Parameter, group: int, key: str, total: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return a parameter's part of a flat state, whole. Call it on all ranks.

        Args:
            total: returns the sum of a tensor over ranks.
        """
        if self._stage == 3:
            return safe_get_full_optimizer_state(parameter, key)  # type: ignore[no-any-return]
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        pieces = self._pieces(parameter)
        if pieces is not None:
            of_parameter, of_flat = pieces
            whole[of_parameter] = self.state_here(parameter, group)[key][of_flat].to(whole.device)
        return total(whole).reshape(parameter.shape)

    def set_state(self, parameter: nn.Parameter, group: int, key: str, value: Any) -> None:
        """Take this rank's part of a state that is whole, or a value for the whole piece."""
        flat = self._flat(parameter, group)
        state = self._states[flat]
        if not isinstance(value, Tensor) or value.shape != _shape(parameter) or key == "step":
            state[key] = value
            return
        if key not in state:
            state[key] = torch.zeros_like(flat)
        value = value.detach().reshape(-1)
        if self._stage == 3:
            own: int = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
            padded = value.new_zeros(own * deepspeed.comm.get_world_size())
            padded[: value.numel()] = value
            start = own * deepspeed.comm.get_rank()
            safe_set_local_optimizer_state(parameter, padded[start : start + own].to(flat), key)
            return
        pieces = self._pieces(parameter)
        if pieces is not None:
            of_parameter, of_flat = pieces
            state[key][of_flat] = value[of_parameter].to(flat)

    def _flat(self, parameter: nn.Parameter, group: int) -> Tensor:
        """Return the flat piece of this rank that a parameter is a part of,
        for which the optimizer has state.
        """
        if self._stage < 3:
            return self._zero.single_partition_of_fp32_groups[group]  # type: ignore[no-any-return]
        place, *_ = self._zero.grad_position[self._zero.get_param_id(parameter)]
        return self._zero.fp32_partitioned_groups_flat[place]  # type: ignore[no-any-return]

    def _pieces(self, parameter: nn.Parameter) -> tuple[slice, slice] | None:
        """Stages 1 and 2: return where this rank's part is in the parameter and in the flat piece,
        or None if it has none.
        """
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return None
        addresses = mapping.lp_fragment_address, mapping.hp_fragment_address
        of_parameter, of_flat = (slice(at.start, at.start + at.numel) for at in addresses)
        return of_parameter, of_flat


def is_split(parameter: Tensor) -> bool:
    """Whether stage 3 has split a parameter."""
    return hasattr(parameter, "ds_tensor")


def part_here(parameter: nn.Parameter) -> Tensor:
    """Return the part of a parameter that this rank holds in memory; empty if it is on disk."""
    if not is_split(parameter):
        return parameter.detach()
    part: Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
    return part.detach()


def _shape(parameter: nn.Parameter) -> torch.Size:
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))
