"""Manual optimization: a Task with `automatic_optimization = False` runs backward and its
optimizers itself.

    training_step(batch)
      manual_backward(loss)    loss x (this rank's samples / the step's samples) -> backward; gradients stay on the rank
      optimizer.step()         sum this optimizer's gradients over ranks -> unscale -> hooks -> clip -> update

So each rank's loss weighs as in automatic optimization, and a step that runs any number of
optimizers any number of times is that of one process with all samples. All ranks must call the same
steps in the same order. A training step is one batch of each rank; `global_step` counts the calls
of `optimizer.step()`, as in Lightning.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.api.manual import connect
from trainkit.api.step_call import call_step
from trainkit.api.task import LogTarget
from trainkit.api.view import RunView
from trainkit.checkpoint.contents import GRADIENTS, RankPart
from trainkit.data.feed import MapFeed, Microbatch, Step
from trainkit.device.accelerator import wide
from trainkit.device.sync_guard import allowed_read
from trainkit.errors import ConfigError, TaskError
from trainkit.optim.clipping import clip
from trainkit.run.batches import start_batch
from trainkit.run.feature import Feature, Features
from trainkit.run.gradients import (
    WaitingGradients,
    parameters_of,
    read_gradients,
    sum_gradients,
)
from trainkit.run.run import Run
from trainkit.run.setup import Stage


class ManualUpdates(Feature):
    """A Task with `automatic_optimization = False`.

    Args:
        features: of the fit; some need one backward and one update a step.
    """

    name = "manual_optimization"
    not_split = (
        "the Task updates its weights itself (automatic_optimization=False). Use engine=ddp, or"
        " automatic optimization."
    )

    def __init__(self, stage: Stage, features: Features) -> None:
        self._stage = stage
        self._features = features
        self._manual: ManualRun | None = None

    def data_read(self, run: RunView) -> None:
        """Refuse what needs automatic optimization.

        Raises:
            ConfigError: names the setting.
        """
        wrong = {
            feature.key or feature.name: feature.not_by_hand
            for feature in self._features
            if feature.not_by_hand
        }
        if any(count > 1 for _, count in ((0, run.batch_plan.accumulate), *run.batch_plan.later)):
            advice = (
                "Run optimizer.step() every n-th batch_idx in training_step, and divide the loss"
                " by n"
            )
            wrong = {"trainer.accumulate_grad_batches": advice} | wrong
        for name, advice in wrong.items():
            raise ConfigError(
                f"{name} needs automatic optimization, and {type(run.task).__name__} has it off."
                f" {advice}."
            )
        steps, plan_of = run.train_feed.num_steps_in(0), getattr(run.train_feed, "plan_of", None)
        if (
            plan_of is not None
            and steps
            and not all(plan_of(0).microbatches(steps - 1, r) for r in range(run.world_size))
        ):
            raise ConfigError(
                f"The last step of an epoch has {plan_of(0).samples_in(steps - 1)} samples for"
                f" {run.world_size} ranks. With manual optimization each rank needs one, since all"
                " ranks run the optimizers. Set trainer.pad_last_step=true, or drop_last=True in"
                " the DataLoader."
            )

    def in_step(
        self, run: RunView, optimizers: Sequence[torch.optim.Optimizer]
    ) -> Mapping[str, Any]:
        """Let the Task run each step."""
        self._manual = ManualRun(self._stage.run, optimizers)
        return {"manual": self._manual.train}

    def rank_parts(self, run: RunView) -> Mapping[str, RankPart]:
        """Save the gradients of batches that no update has counted."""
        assert self._manual is not None
        return {GRADIENTS: self._manual.waiting}

    def begun(self, run: RunView) -> None:
        """Give the Task its optimizers; its schedulers move by its own hand."""
        run.rates.moves_by_hand = True
        connect(run.task, self._manual)


class ManualRun:
    """Runs backward and the optimizers for a Task; see the module."""

    def __init__(self, run: Run, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Wrap the optimizers of a run."""
        self._run = run
        self._share, self._counted = 0.0, False
        self._reduced: list[torch.optim.Optimizer] = []  # since the last backward
        self._gradients: dict[int, tuple[int, int]] = {}  # as backward left them, see `_read`
        self._reported = False
        # whether another method of an optimizer has updated in this batch: SAM's second_step
        self.steps_otherwise = False
        self._updated = True  # whether no overflow held an update of this batch back
        self._steps = False  # whether an optimizer steps by its Stepper
        ranks = run.engine.ranks.data_rank, run.engine.ranks.data_size
        self.waiting = WaitingGradients(optimizers, ranks)
        self.optimizers = [Stepper(optimizer, self) for optimizer in optimizers]
        refuse = weakref.WeakMethod(self._refuse_own)  # an optimizer may outlive a run
        for optimizer in optimizers:
            if hasattr(optimizer, "_optimizer_step_pre_hooks"):  # not of all wrappers
                optimizer.register_step_pre_hook(lambda *_: (own := refuse()) and own())

    def train(self, step: Step) -> bool:
        """Let the Task train on this rank's batch of a step, and update the weights itself; return
        whether no overflow held an update back.
        """
        run, task = self._run, self._run.task
        for microbatch in self._batches(step):
            batch = microbatch.batch
            batch_idx = run.state.batch_idx
            log = LogTarget(run.step.log, microbatch.num_samples, on_step=True, on_epoch=False)
            task._log_to(log)
            start_batch(run, batch, batch_idx, first=True)
            with self._batch(microbatch.num_samples, step.num_samples), run.precision.autocast():
                outputs = call_step(task, "training_step", batch, batch_idx)
            run.hooks("on_train_batch_end", _shown(outputs), batch, batch_idx)
            task._log_to(None)
            run.state.batch_idx += 1
        return self._updated

    @contextlib.contextmanager
    def _batch(self, num_samples: int, num_in_step: int) -> Iterator[None]:
        """Within the context the Task trains on a batch of this rank."""
        self._share = num_samples / num_in_step
        self.waiting.begin()
        self._updated = True
        self._counted = self.steps_otherwise = False
        try:
            yield
        finally:
            self._share = 0.0
        self._run.precision.end_step()
        if self.steps_otherwise and not self._counted:
            self.count()

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Within the context optimizers step with the gradients of all ranks."""
        self._steps = True
        try:
            yield
        finally:
            self._steps = False

    def _refuse_own(self, *args: Any) -> None:
        if self._share and not self._steps:
            raise TaskError(
                f"{type(self._run.task).__name__} steps torch's own optimizer: other ranks'"
                " gradients would be left out, and no step be counted. Call step() of what"
                " self.optimizers() returns, or give that to GradScaler.step."
            )

    def _batches(self, step: Step) -> Iterable[Microbatch]:
        """Return this rank's batch of a step;
        none on all ranks if a stream has one for some ranks only.
        """
        if isinstance(self._run.train_feed, MapFeed) or self._run.world_size == 1:
            return step.microbatches
        microbatches = list(step.microbatches)
        return (
            microbatches
            if self._run.engine.comm.sum_number(int(bool(microbatches))) == self._run.world_size
            else []
        )

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward of a loss of this rank's batch."""
        run = self._run
        if not self._share:
            raise TaskError(
                f"{type(run.task).__name__}.manual_backward(...) was called outside training_step."
                " Call it there."
            )
        self._divide()
        run.step.watch.look(loss)
        run.hooks("on_before_backward", loss)
        with run.engine.no_sync():  # summed by `step`, for one optimizer at a time
            torch.autograd.backward(run.precision.scale(loss * self._share), *args, **kwargs)
        if run.world_size > 1 and not self._reported:
            self._gradients = read_gradients(
                p for each in self.optimizers for p in parameters_of(each.optimizer)
            )
        run.hooks("on_after_backward")

    def _divide(self) -> None:
        """Divide what was summed and not cleared by the number of ranks: the next sum restores it."""
        world_size = self._run.world_size
        for optimizer in self._reduced if world_size > 1 else ():
            for parameter in parameters_of(optimizer):
                if parameter.grad is not None:
                    parameter.grad /= world_size
        self._reduced.clear()

    def reduce(self, optimizer: torch.optim.Optimizer) -> None:
        """Sum an optimizer's gradients over ranks, once for each backward, and divide them by the
        loss scale.

        Waits for the device if there are several ranks: which parameters have a gradient on any
        rank decides what is summed.
        """
        if any(each is optimizer for each in self._reduced):
            return
        self._reduced.append(optimizer)
        run = self._run
        if run.world_size > 1:
            parameters = parameters_of(optimizer)
            self._look_for_changes(parameters)
            with allowed_read():
                sum_gradients(parameters, run.engine.comm.all_reduce, run.engine.device)
        run.precision.unscale([optimizer])

    def _look_for_changes(self, parameters: list[Tensor]) -> None:
        """Report, once, gradients that something else than manual_backward has written.

        Raises:
            TaskError: manual_backward wrote none of them.
        """
        if self._reported or read_gradients(parameters).items() <= self._gradients.items():
            return
        self._reported = True
        if not self._gradients:
            raise TaskError(
                f"{type(self._run.task).__name__} calls backward() of a loss itself: its gradients"
                " would be summed over ranks without the share of each rank's samples. Call"
                " self.manual_backward(loss)."
            )
        self._run.say(
            "Gradients were changed between manual_backward and optimizer.step(), where each rank has"
            " its part of their sum. To clip the sum, call self.clip_gradients(optimizer,"
            " gradient_clip_val=...); other changes belong in on_before_optimizer_step."
        )

    def clip(
        self, optimizer: torch.optim.Optimizer, value: float | None, algorithm: str | None
    ) -> None:
        """Clip an optimizer's gradients, summed over ranks, by the Trainer's algorithm if none is
        given; no value clips nothing, as `step` clips by the Trainer's.
        """
        self.reduce(optimizer)
        algorithm = algorithm or self._run.options.numerics.gradient_clip_algorithm
        clip([optimizer], value, algorithm)

    def step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None, **kwargs: Any
    ) -> Any:
        """Update an optimizer's weights with the gradients of all ranks."""
        run, result = self._run, None
        if closure is None:
            self._finish_gradients(optimizer)
        else:
            self.refuse_scaled(optimizer, "step(closure)")
        run.state.half_updated = True
        run.rates.record_update()
        with self.stepping():
            if closure is not None:
                result = optimizer.step(lambda: self._evaluate(optimizer, closure), **kwargs)
            elif run.precision.scales_loss:
                self._updated &= run.precision.step([optimizer], ends=False)
            else:
                result = optimizer.step(**kwargs)
        self.count()
        self.waiting.use(optimizer)
        return result

    def _finish_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        numerics = self._run.options.numerics
        self.reduce(optimizer)
        self._run.hooks("on_before_optimizer_step", optimizer)
        self.clip(optimizer, numerics.gradient_clip_val, numerics.gradient_clip_algorithm)

    def refuse_scaled(self, optimizer: torch.optim.Optimizer, call: str) -> None:
        """Refuse a call that updates weights, or computes gradients, more often than once a step:
        the loss scale is judged and changed once.
        """
        if self._run.precision.scales_loss:
            raise TaskError(
                f"{type(optimizer).__name__}.{call} under trainer.precision=16-mixed: its loss scale"
                " needs one backward and one step(). Use bf16-mixed, which has no loss scale."
            )

    def count(self) -> None:
        """Count a call of `optimizer.step()`."""
        self._run.state.global_step += 1
        self._counted = True

    def _evaluate(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Any:
        """Call a closure that runs `backward`;
        return the loss of all ranks' samples, the same on all ranks.
        """
        with torch.enable_grad():
            loss = closure()
        self._finish_gradients(optimizer)
        if not isinstance(loss, Tensor):
            return loss
        wide_loss = loss.detach().to(wide(loss.device))
        return self._run.engine.comm.all_reduce(wide_loss * self._share).to(loss.dtype)

    def before_clear(self, optimizer: torch.optim.Optimizer) -> None:
        """Call the hook before an optimizer's gradients are dropped."""
        self._run.hooks("on_before_zero_grad", optimizer)

    def move_schedule(self, place: int, metric: float | None) -> None:
        """Move one scheduler of `configure_optimizers` by a step."""
        self._run.rates.move(place, metric, self._run.state.num_updates)

    @property
    def schedulers(self) -> list[Any]:
        """Torch's."""
        return [config.scheduler for config in self._run.rates.schedules]


class Stepper:
    """An optimizer as training_step gets it: all else than the methods below is the torch
    optimizer's own, and so is its class (isinstance).
    """

    def __init__(self, optimizer: torch.optim.Optimizer, manual: ManualRun) -> None:
        self.optimizer = optimizer
        self._manual = manual

    __class__ = property(lambda self: type(self.optimizer))

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update the weights with the gradients of all ranks.

        Args:
            closure: clears the gradients, runs manual_backward and returns the loss. It is called
                as often as the optimizer requires (L-BFGS, SAM), each time with the gradients and
                the loss of all ranks.
            kwargs: for the optimizer's own `step`.
        """
        return self._manual.step(self.optimizer, closure, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of this optimizer's parameters."""
        self._manual.before_clear(self.optimizer)
        self.optimizer.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.optimizer, name)
        if not (name.endswith("step") and callable(value)):
            return value

        # as SAM's first_step and second_step
        def with_all_gradients(*args: Any, **kwargs: Any) -> Any:
            self._manual.refuse_scaled(self.optimizer, f"{name}()")
            self._manual.reduce(self.optimizer)
            self._manual.steps_otherwise = True
            with self._manual.stepping():
                result = value(*args, **kwargs)
            self._manual.waiting.use(self.optimizer)
            return result

        return with_all_gradients


def _shown(out: Any) -> dict[str, Any]:
    """Return what hooks get of a batch: a dict of training_step's, or of its loss, detached."""
    if not isinstance(out, Mapping):
        out = {} if out is None else {"loss": out}
    return {k: v.detach() if k == "loss" and isinstance(v, Tensor) else v for k, v in out.items()}
