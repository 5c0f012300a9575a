"""DeepSpeed's ZeRO behind the wall: optimizer state (stage 1), gradients (2) and weights (3) are
split over the ranks.

DeepSpeed owns a part of the step: `backward` starts its sums, and `step` clips and updates in one.
So that the gradient is the sum that trainkit's loop means (engine/base.py), each loss is multiplied
by the number of ranks: DeepSpeed divides by it. What this leaves no place for is refused before
training (refusals.py).
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainkit.arguments import checked
from trainkit.device.precision import Precision
from trainkit.engine.base import HandedOn
from trainkit.engine.ddp.engine import DDPEngine
from trainkit.engine.options import refusals
from trainkit.engine.pinning import DeviceName
from trainkit.engine.sending import send_optimizer_state, tensors_of
from trainkit.engine.step_settings import StepSettings
from trainkit.errors import ConfigError, EngineError, TaskError
from trainkit.extensions.deepspeed import adapter, extensions
from trainkit.extensions.deepspeed.config import DeepSpeedOptions, Place, read_config, write_config
from trainkit.extensions.deepspeed.refusals import check_optimizers, check_settings
from trainkit.extensions.deepspeed.split import WholeState
from trainkit.optim.clipping import clear_gradients

_ENTRIES = ("training_step", "validation_step", "test_step", "predict_step")


class _Calls(nn.Module):
    """What DeepSpeed sees of a Task: a module that runs one of the Task's steps in its forward."""

    def __init__(self, task: nn.Module, precision: Precision) -> None:
        super().__init__()
        self.task = task
        self._precision = precision
        self.steps = {name: getattr(task, name) for name in _ENTRIES if hasattr(task, name)}

    def forward(self, name: str, arguments: Any, options: dict[str, Any]) -> Any:
        # on a GPU, DeepSpeed switches off an autocast that is not its own
        with self._precision.autocast():
            return self.steps[name](*arguments, **options)


@checked
class DeepSpeedEngine(DDPEngine):
    """Ranks that torchrun started, which split the state of training by DeepSpeed's ZeRO
    (Rajbhandari et al. 2020).

    Args:
        device: "auto" takes the GPU of this rank's local rank if there are GPUs.
        stage: 1 splits the optimizer's state over the ranks, 2 gradients too, 3 weights too. None:
            that of `config`, or 2.
        offload_optimizer: "cpu" keeps the optimizer's state in host memory, and updates there;
            "nvme" (stage 3) on a disk.
        offload_param: "cpu" keeps weights in host memory, "nvme" on a disk; stage 3.
        nvme_path: the folder of that disk.
        config: a config of DeepSpeed, as a mapping or the path of a file of JSON. What it and
            trainkit both name must be equal, or "auto" there; all else is passed on.
    """

    name = "deepspeed"
    explained_arguments = refusals("deepspeed")
    saves_together = True
    needs_even_rounds = True

    def __init__(
        self,
        device: DeviceName = "auto",
        stage: Literal[1, 2, 3] | None = None,
        offload_optimizer: Literal["none", "cpu", "nvme"] | None = None,
        offload_param: Literal["none", "cpu", "nvme"] | None = None,
        nvme_path: str | None = None,
        config: str | dict[str, Any] | None = None,
    ) -> None:
        super().__init__(device)
        self._config = read_config(config)
        self._chosen = DeepSpeedOptions(
            stage, offload_optimizer, offload_param, nvme_path
        ).resolved(self._config)
        offloads: dict[str, Place | None] = {
            "offload_optimizer": self._chosen.offload_optimizer,
            "offload_param": self._chosen.offload_param,
        }
        self.shown_options = {"ZeRO stage": self._chosen.stage} | {
            key: to for key, to in offloads.items() if to != "none"
        }
        self._settings: StepSettings | None = None
        self._zero: adapter.Zero | None = None
        self._layout: WholeState | None = None
        # names of the Task's steps that run inside DeepSpeed's forward
        self._redirected: list[str] = []
        self._trained: list[bool] = []
        self._has_failed = False

    def _start(self) -> None:
        # before the ranks meet, so that none compiles yet
        if self._on_disk and self.launcher.local_rank == 0:
            extensions.clear_locks(extensions.choose_folder(os.environ))
        super()._start()
        self._has_failed = False
        if adapter.device_type() != self.device.type:
            raise EngineError(
                f"engine.device is {self.device.type}, but DeepSpeed computes on"
                f" {adapter.device_type()} here: it decides once a process. Set"
                f" DS_ACCELERATOR={self.device.type}."
            )
        if self._on_disk:
            self._require_disk()

    @property
    def _on_disk(self) -> bool:
        return "nvme" in (self._chosen.offload_optimizer, self._chosen.offload_param)

    def _require_disk(self) -> None:
        folder = extensions.choose_folder(os.environ)
        if not adapter.can_build("async_io"):
            raise EngineError(
                "engine.offload_optimizer or engine.offload_param is 'nvme', which needs"
                " DeepSpeed's async_io, and that needs libaio with its headers (Debian, Ubuntu:"
                " apt-get install libaio-dev). Install it, or offload to cpu."
            )
        if not extensions.is_built(folder, "async_io"):
            raise EngineError(
                "DeepSpeed's async_io is not built yet. Build it once: python -m trainkit deepspeed"
                " check"
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._has_failed = kind is not None
        super().__exit__(kind, error, trace)

    # -- the step ---------------------------------------------------------------------------------------------------

    def agree(self, settings: StepSettings) -> None:
        """See Engine."""
        super().agree(settings)
        assert self._chosen.stage is not None
        check_settings(settings, self._chosen.stage)
        self._settings = settings

    def prepare(
        self,
        task: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        precision: Precision | None = None,
    ) -> None:
        """See Engine. For an evaluation alone (no optimizers) the
        weights stay whole on each rank.
        """
        self.release()
        super(DDPEngine, self).prepare(task, optimizers, precision)
        self.comm.broadcast_tensors(tensors_of(task))
        if not optimizers and self._settings is None:
            return
        assert self._settings is not None and precision is not None
        assert self._chosen.stage is not None
        is_allowed = self._config.get("zero_allow_untested_optimizer") is True
        check_optimizers(task, optimizers, is_allowed, self._chosen.stage)
        send_optimizer_state(self.comm, optimizers, self.device)
        (optimizer,) = optimizers
        config = write_config(
            self._settings, self._chosen, self._config, self.ranks.world_size, optimizer
        )
        config["zero_allow_untested_optimizer"] = True
        self._layout = WholeState(task, optimizer)
        calls = _Calls(task, precision)
        own_number = extensions.as_local_rank(self.device.type, self.device.index)
        with self.comm.waiting_for("DeepSpeed's start"), own_number:
            self._zero = adapter.Zero(calls, optimizer, config)
        self._layout.hand_over(self._zero)
        self._redirect(task, calls)
        self._trained = [parameter.requires_grad for parameter in task.parameters()]
        own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        others = [
            parameter
            for parameter in task.parameters()
            if parameter not in own and not parameter.requires_grad
        ]
        # its update drops the gradients itself
        self.clear_gradients = functools.partial(clear_gradients, (), others)

    def _redirect(self, task: nn.Module, calls: _Calls) -> None:
        """Let the Task's steps run inside DeepSpeed's forward,
        which gathers weights and prepares backward.
        """
        zero = self._zero
        assert zero is not None

        def through(name: str) -> Callable[..., Any]:
            def step(*arguments: Any, **options: Any) -> Any:
                calls.training = task.training
                return zero.forward(name, arguments, options)

            return step

        for name in calls.steps:
            setattr(task, name, through(name))
        self._redirected = list(calls.steps)

    def release(self) -> None:
        """See Engine. Call it on all ranks:
        the Task's weights are gathered, unless the run failed.
        """
        if self._zero is not None and self._layout is not None and self._task is not None:
            for name in self._redirected:
                delattr(self._task, name)
            self._layout.make_whole(self._zero, gathers=not self._has_failed)
            self._task.zero_grad(set_to_none=True)
        self._zero = None
        self._layout = None
        super().release()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """See Engine. Stages 2 and 3 sum the gradients of each microbatch:
        no rank has room for all of them.
        """
        if self._zero is None:
            yield
            return
        self._zero.mark_last(False)
        yield
        self._zero.mark_last(True)

    def backward(self, loss: Tensor | HandedOn) -> None:
        """See Engine."""
        if self._zero is None:
            super().backward(loss)
        elif isinstance(loss, Tensor):
            self._zero.backward(loss * self.ranks.world_size)

    def finish_gradients(
        self,
        correction: Callable[[], Tensor | None] = lambda: None,
        reduced: bool = False,
    ) -> None:
        """Do nothing: DeepSpeed sums in backward and in `step`. See Engine.

        Raises:
            TaskError: there is a correction; DeepSpeed has no place for it.
        """
        if correction() is not None:
            raise TaskError(
                f"{type(self._task).__name__}.training_step returned 'num_samples', but with such"
                " weights the factor of a gradient is known only after the sum over ranks, and"
                " DeepSpeed clips and updates right after its sum. Leave it out, or use"
                " engine=ddp."
            )

    def step(self, clip_val: float | None = None, clip_algorithm: str = "norm") -> bool:
        """See Engine. An update is held back if a gradient is not finite.

        Raises:
            ConfigError: it is to clip by value.
            TaskError: weights were frozen or thawed since the start.
        """
        if self._zero is None or self._task is None:
            return super().step(clip_val, clip_algorithm)
        if clip_algorithm != "norm" and clip_val is not None:
            raise ConfigError("DeepSpeed clips by the norm of all gradients only.")
        if self._trained != [parameter.requires_grad for parameter in self._task.parameters()]:
            raise TaskError(
                "requires_grad of a weight changed during training, and DeepSpeed splits what is"
                " trained once, at the start. Freeze weights before the fit, or use engine=ddp."
            )
        self._zero.mark_last(True)
        with self.comm.waiting_for("DeepSpeed's update"):
            return self._zero.step(clip_val)

    # -- state ------------------------------------------------------------------------------------------------------

    def model_state(self, task: nn.Module) -> dict[str, Tensor]:
        """See Engine."""
        plain = super().model_state(task)  # raises for what is no tensor
        if self._zero is None or self._layout is None or self._chosen.stage != 3:
            return plain
        with self.comm.waiting_for("the weights of all ranks"):
            return self._layout.model_state(self._zero, self.ranks.is_main)

    def optimizer_state(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any]]:
        """See Engine."""
        if self._zero is None or self._layout is None:
            return super().optimizer_state(optimizers)
        with self.comm.waiting_for("the optimizer state of all ranks"):
            return [
                self._layout.optimizer_state(self._zero, self.comm.all_reduce, self.ranks.is_main)
            ]

    def weights_here(self, task: nn.Module) -> list[Tensor]:
        """See Engine."""
        return [adapter.part_here(parameter) for parameter in task.parameters()]
