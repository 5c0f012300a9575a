"""Manual optimization, as Lightning writes it: what `training_step` calls if the Task sets
`automatic_optimization = False`. And `optimizer_step`, for what a Task does around an update
otherwise.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from trainkit.errors import TaskError
from trainkit.optim.forms import step_scheduler


class ManualStep(Protocol):
    """See run/manual.py."""

    @property
    def optimizers(self) -> Sequence[Any]: ...  # noqa: D102
    @property
    def schedulers(self) -> Sequence[Any]: ...  # noqa: D102
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None: ...  # noqa: D102
    def clip(
        self, optimizer: torch.optim.Optimizer, value: float | None, algorithm: str | None
    ) -> None: ...  # noqa: D102
    def move_schedule(self, place: int, metric: float | None) -> None: ...  # noqa: D102


class Schedule:
    """A scheduler of `configure_optimizers`, for manual optimization: all but `step` is torch's, and
    so is its class (isinstance).
    """

    def __init__(self, scheduler: Any, move: Callable[[float | None], None]) -> None:
        self._scheduler = scheduler
        self._move = move

    __class__ = property(lambda self: type(self._scheduler))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def step(self, metric: float | None = None, epoch: float | None = None) -> None:
        """Move it by a step; `metric` is the monitored value of ReduceLROnPlateau. Other schedulers
        get either as their `epoch`.
        """
        self._move(epoch if metric is None else metric)


class ManualOptimization:
    """The part of a Task that is for manual optimization: backward and optimizer steps in
    `training_step`.

    The learning rates are scaled and warmed up as in automatic optimization; schedulers move only
    by `lr_schedulers()`.
    """

    if TYPE_CHECKING:

        @property
        def trainer(self) -> Any:
            """The run in progress."""

    automatic_optimization = True
    _manual: ManualStep | None = None
    _clip_of_step: Callable[[Any, float | None, str | None], None] | None = None
    _toggled: dict[Tensor, bool] | None = None

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer of `configure_optimizers`, or the list of them; under automatic
        optimization to read them.

        Each is used as a torch optimizer. Its `step(closure=None)` sums the gradients over ranks,
        clips them by `trainer.gradient_clip_val` and updates; all ranks must call it alike.

        Args:
            use_pl_optimizer: a name of Lightning's; without effect where they are to read.

        Raises:
            TaskError: it is false in manual optimization.
        """
        if not use_pl_optimizer and not self.automatic_optimization:
            raise TaskError(
                f"{type(self).__name__}.optimizers(use_pl_optimizer=False): a step of torch's own"
                " optimizer would leave the other ranks out. Leave it out: what is returned has all"
                " that torch's has, and `.optimizer` is torch's, to read."
            )
        if self.automatic_optimization:
            name = type(self).__name__
            own = [ReadOnly(optimizer, name) for optimizer in self.trainer.optimizers]
        else:
            own = list(self._need("optimizers").optimizers)
        return own[0] if len(own) == 1 else own

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Any,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Make the update; for one optimizer, under automatic optimization.

        Args:
            batch_idx: of this rank's last batch of the step.
            optimizer: its `step` clips the gradients and updates the weights; call it once.
            optimizer_closure: returns the loss; the gradients are computed before this method.
        """
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Drop the gradients of the step before; under automatic optimization."""
        optimizer.zero_grad()

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip an optimizer's gradients of a step, which are those of all ranks; under automatic
        optimization.

        Args:
            gradient_clip_val, gradient_clip_algorithm: the Trainer's.
        """
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def lr_scheduler_step(self, scheduler: Any, metric: float | None) -> None:
        """Step a scheduler of `configure_optimizers` when it is due; under automatic optimization.

        A Task that defines it may return any scheduler with `optimizer`, `state_dict` and
        `load_state_dict`. One that is not torch's gets the rates without lr_scaling's factor. What
        this method sets itself counts as the scheduler's.

        Args:
            metric: the monitored value of ReduceLROnPlateau, or of a scheduler that was returned
                with reduce_on_plateau=True; None for others.
        """
        step_scheduler(scheduler, metric)

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward of a mean loss over the batch of this rank;
        other arguments are those of `Tensor.backward`.
        """
        self._need("manual_backward").backward(loss, *args, **kwargs)

    def clip_gradients(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip an optimizer's gradients, summed over the ranks, at a norm or a value; in
        `configure_gradient_clipping`, and before its `step` in manual optimization.

        Args:
            gradient_clip_val: 0 clips nothing, as None in manual optimization, where `step` clips
                by the Trainer's; else that is the default.
            gradient_clip_algorithm: "norm" or "value"; the Trainer's by default.

        Raises:
            TaskError: it is called elsewhere, or there is no such algorithm.
        """
        algorithm = gradient_clip_algorithm and gradient_clip_algorithm.lower()
        if algorithm not in (None, "norm", "value"):
            raise TaskError(
                f"{type(self).__name__}.clip_gradients(gradient_clip_algorithm="
                f"{gradient_clip_algorithm!r}): it must be 'norm' or 'value'."
            )
        clip = (
            self._clip_of_step
            or self._need("clip_gradients", " Or call it in configure_gradient_clipping.").clip
        )
        clip(getattr(optimizer, "optimizer", optimizer), gradient_clip_val, algorithm)

    def lr_schedulers(self) -> Any:
        """Return the scheduler of `configure_optimizers`, the list of them, or None; call `step()`
        when one is due.

        Under automatic optimization they are torch's, to read: the Trainer steps them.
        """
        if self.automatic_optimization:
            own = [config.scheduler for config in self.trainer.rates.schedules]
            return own[0] if len(own) == 1 else own or None
        manual = self._need("lr_schedulers")

        schedulers = [
            Schedule(scheduler, functools.partial(manual.move_schedule, place))
            for place, scheduler in enumerate(manual.schedulers)
        ]
        return schedulers[0] if len(schedulers) == 1 else schedulers or None

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Let only the parameters of this optimizer require a gradient,
        until `untoggle_optimizer`.
        """
        self.untoggle_optimizer()
        own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        groups = [
            group
            for other in self._need("toggle_optimizer").optimizers
            for group in other.param_groups
        ]
        every = [parameter for group in groups for parameter in group["params"]]
        self._toggled = {
            parameter: parameter.requires_grad for parameter in every if parameter not in own
        }
        for parameter in self._toggled:
            parameter.requires_grad_(False)

    def untoggle_optimizer(self, optimizer: Any = None) -> None:
        """Let the other parameters require a gradient again, as before `toggle_optimizer`."""
        for parameter, required in (self._toggled or {}).items():
            parameter.requires_grad_(required)
        self._toggled = None

    @contextlib.contextmanager
    def toggled_optimizer(self, optimizer: Any) -> Iterator[None]:
        """Within the context only the parameters of this optimizer require a gradient."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def _need(self, method: str, otherwise: str = "") -> ManualStep:
        name = type(self).__name__
        if self.automatic_optimization:
            raise TaskError(
                f"{name}.{method}() is for manual optimization. Set self.automatic_optimization ="
                f" False in {name}.__init__.{otherwise}"
            )
        if self._manual is None:
            raise TaskError(
                f"{name}.{method}() was called outside of a fit: there are no optimizers yet."
            )
        return self._manual


class ReadOnly:
    """An optimizer under automatic optimization:
    the Trainer steps it, and all else can be read or set.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        self.optimizer = optimizer
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name in ("step", "zero_grad"):
            raise TaskError(
                f"{self._name}.optimizers().{name}() is for manual optimization: the Trainer"
                " updates the weights. Set self.automatic_optimization = False in"
                f" {self._name}.__init__ to do it yourself."
            )
        return getattr(self.optimizer, name)


def connect(task: nn.Module, manual: ManualStep | None) -> None:
    """Give a Task its optimizers, or take them away."""
    task.__dict__["_manual"] = manual
