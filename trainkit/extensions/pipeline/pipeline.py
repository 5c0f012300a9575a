"""Pipeline: the stages of one model on neighbouring ranks, which FSDPEngine asks.

    cut               units of other stages lose their weights here: parameters without memory, by
                      which names, optimizers' groups and checkpoints are the same on all ranks
    enter_steps       the Task's steps are run by stages (passes.py)
    run_microbatches  the schedule (schedule.py): which forwards run before which backwards
    backward          of the loss, or of what was handed on, with the next stage's gradients
    sum_shared        gradients of weights that several stages hold

The microbatches of a step are those of accumulation, so batch, rate and the order of samples are
what they are without a pipeline. A rank that holds several stages runs the step once for each; its
hooks are called once for each microbatch: before its first pass, and after its last backward.

If a rank has its stage alone, its weights are plain tensors (FSDPEngine._split), and those
of other stages are on other ranks: a checkpoint knows by these which ones are in pieces
(checkpoint/split.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.device.shards import is_spread, norms_of
from trainkit.engine.base import Calls, Forwarded, HandedOn, Microbatch
from trainkit.engine.ddp.collectives import DDPCollectives
from trainkit.engine.ranks import Ranks
from trainkit.engine.sending import with_averages
from trainkit.errors import TaskError
from trainkit.extensions.fsdp.layouts import STAGE
from trainkit.extensions.pipeline.links import Links, make_group
from trainkit.extensions.pipeline.passes import Pass, Passes, stage_class
from trainkit.extensions.pipeline.repeated import Repeated
from trainkit.extensions.pipeline.schedule import schedule_of
from trainkit.extensions.pipeline.shared import sum_gradients
from trainkit.extensions.pipeline.units import Unit, units_of
from trainkit.extensions.pipeline.work import try_to_count

Entry = TypeVar("Entry")


class Pipeline:
    """This rank's stages, and its neighbours.

    Args:
        schedule: "1f1b" runs a backward as soon as its gradients can be there, and holds the
            activations of at most as many microbatches as there are ranks; "gpipe" runs all
            forwards of a step first; "interleaved_1f1b" is 1f1b of several stages on each rank.
        chunks: stages of a rank; None: two if the schedule interleaves them, else one.
    """

    def __init__(
        self,
        ranks: Ranks,
        comm: DDPCollectives,
        device: torch.device,
        schedule: str,
        chunks: int | None = None,
    ) -> None:
        self._ranks, self._comm, self._device = ranks, comm, device
        self._place = ranks.stage
        self._schedule = schedule_of(schedule, ranks.pipeline_size, chunks)
        group = make_group(
            ranks.world_size, ranks.tensor_size, self._schedule, ranks.rank, comm.connecting
        )
        self._links = Links(group, self._place, self._schedule, device, comm)
        self._passes = Passes(
            self._links,
            self._place,
            self._schedule.ranks,
            device,
            self._schedule.chunks,
        )
        self._units: list[Unit] = []
        # by microbatch, then chunk
        self._open: dict[int, dict[int, Pass]] = {}
        self._at: tuple[int, int] | None = None
        self.elsewhere: set[nn.Parameter] = set()
        self._shared: list[str] = []
        self._task: nn.Module | None = None
        self._repeated: Repeated | None = None

    # -- weights ------------------------------------------------------------------------------------------------------

    def cut(self, task: nn.Module, sample: Callable[[], Any] | None) -> None:
        """Give the Task's units their stages; those of other stages lose the memory of their
        weights.

        Weights of several units (a head that shares the embedding's), and of none (a parameter of
        the model itself), stay on all stages.

        Args:
            sample: returns a batch of one sample, by which their work is counted.

        Raises:
            ConfigError: the Task cannot be cut into so many stages.
        """
        self._task = task
        self._units = units_of(
            task,
            self._schedule.ranks,
            self._work_of_units(task, sample),
            self._schedule.chunks,
        )
        homes: dict[nn.Parameter, set[int]] = {p: set() for p in task.parameters()}
        for unit in self._units:
            for parameter in unit.module.parameters():
                homes[parameter].add(self._place_of(unit))
        everywhere = set(range(self._schedule.ranks))
        homes = {p: places if len(places) == 1 else everywhere for p, places in homes.items()}
        names = {parameter: name for name, parameter in task.named_parameters()}
        self._shared = [names[parameter] for parameter, places in homes.items() if len(places) > 1]
        blank = {
            parameter: nn.Parameter(
                torch.empty_like(parameter, device="meta"), parameter.requires_grad
            )
            for parameter, places in homes.items()
            if self._place not in places
        }
        for module in task.modules():
            for name, own in module._parameters.items():
                if own is not None and own in blank:
                    module._parameters[name] = blank[own]
        self.elsewhere = set(blank.values())
        for unit in self._units:
            unit.module.__class__ = stage_class(type(unit.module))
            object.__setattr__(unit.module, STAGE, (self._passes, unit))
        if self._schedule.chunks > 1:
            self._repeated = Repeated(task, [unit.module for unit in self._units])

    def _place_of(self, unit: Unit) -> int:
        """Return the rank that holds a unit, by its place among those of a model."""
        return unit.stage % self._schedule.ranks

    def _work_of_units(
        self, task: nn.Module, sample: Callable[[], Any] | None
    ) -> Sequence[int] | None:
        """Return what rank 0 counts; all ranks count, since a step may have collectives."""
        if sample is None or hasattr(task, "pipeline_stages"):
            return None
        counted, reason = try_to_count(task, sample, self._device)
        if reason:
            self._ranks.say(reason)
        own = None if counted is None else list(counted.operations)
        agreed: list[int] | None = self._comm.run_on_main(lambda: own)
        return agreed

    def send_buffers(self, task: nn.Module, averages: Mapping[Tensor, Tensor] | None) -> None:
        """Give all ranks each unit's buffers, and averages of them, of the first rank that computes
        it, and rank 0's of all else.
        """
        of_units = set[int]()
        for unit in self._units:
            own = list(unit.module.buffers())
            of_units |= {id(buffer) for buffer in own}
            after = self._schedule.ranks - 1 - self._place_of(unit)
            first = after * self._ranks.tensor_size
            self._broadcast(with_averages(own, averages), first)
        others = [each for each in task.buffers() if id(each) not in of_units]
        self._broadcast(with_averages(others, averages), 0)

    def _broadcast(self, tensors: Sequence[Tensor], first: int) -> None:
        with self._comm.waiting_for("the broadcast of buffers"):
            for tensor in tensors:
                dist.broadcast(tensor, first)

    # -- steps --------------------------------------------------------------------------------------------------------

    def cutting(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a step that ends where the next stage begins."""
        return self._passes.cutting(step)

    def staged(
        self, name: str, step: Callable[..., Any], whole: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return this stage's part of a step, whose forward is hooked by FSDP2.

        Args:
            whole: the user's, which another step may call.
        """

        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._passes.current is not None:
                return whole(*args, **kwargs)
            if name == "training_step" and self._at is not None:
                return self._train(step, args, kwargs, *self._at)
            seed, outputs = None, None
            for chunk in range(self._schedule.chunks):
                own = self._passes.begin(name, chunk, seed)
                seed = own.seed
                outputs = self._run(own, step, args, kwargs)
                self._links.hold(own.sent)
            return None if isinstance(outputs, HandedOn) else outputs

        return run

    def _train(
        self,
        step: Callable[..., Any],
        args: Any,
        kwargs: Any,
        microbatch: int,
        chunk: int,
    ) -> Any:
        """Run a pass of a microbatch, whose backward follows."""
        passes = self._open.setdefault(microbatch, {})
        seed = passes[0].seed if passes else None
        passes[chunk] = own = self._passes.begin("training_step", chunk, seed)
        outputs = self._run(own, step, args, kwargs)
        if outputs is None:
            raise TaskError(
                f"{type(self._task).__name__}.training_step returned None to skip a batch,"
                " which earlier pipeline stages have computed. Return a loss times 0, and"
                " {'loss': loss, 'num_samples': 0} if the batch is not to count."
            )
        return outputs

    def _run(self, own: Pass, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._repeated is None:
            return self._passes.run(own, step, *args, **kwargs)
        again = own.stage + self._schedule.ranks < self._schedule.stages
        with self._repeated.one_of_several(own.kind[0], args, kwargs, again) as (args, kwargs):
            return self._passes.run(own, step, *args, **kwargs)

    def run_microbatches(
        self,
        microbatches: Iterable[Microbatch],
        calls: Calls[Microbatch, Forwarded],
        no_sync: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        """See Engine.

        Args:
            no_sync: makes a context in which backward leaves gradients on this rank.
        """
        self._open.clear()
        forwarded: dict[int, Forwarded] = {}
        actions = self._schedule.order(self._place, enumerate(microbatches))
        last = self._schedule.chunks - 1
        try:
            for action, following in _with_next(actions):
                # in the order of backwards: one may follow its own forward
                for each in (action, following):
                    if each is not None and not each.forward:
                        self._expect(each.microbatch[0], each.chunk)
                number, microbatch = action.microbatch
                self._at = number, action.chunk
                if action.forward:
                    begun = forwarded.get(number)
                    forwarded[number] = (
                        calls.forward(microbatch) if begun is None else calls.again(begun)
                    )
                    continue
                with no_sync() if following and last else contextlib.nullcontext():
                    if action.chunk == last:
                        calls.backward(forwarded[number])
                    else:
                        self.backward(HandedOn())
                if not action.chunk:
                    del self._open[number]
                    calls.leave(forwarded.pop(number))
        finally:
            self._at = None
        self._links.finish()

    def backward(
        self, loss: Tensor | HandedOn, run: Callable[[Tensor], None] | None = None
    ) -> None:
        """Run backward of the pass that is due, and send its gradients on.

        Args:
            run: runs backward of a scalar loss.
        """
        assert self._at is not None
        number, chunk = self._at
        own = self._open[number].pop(chunk)
        if isinstance(loss, Tensor):
            assert run is not None
            run(loss)
        elif outputs := own.trained_outputs:
            gradients = self._links.arrived(own.stage, own.coming)
            torch.autograd.backward(outputs, gradients)
        self._links.wait(own.sent)
        self._links.send_gradients(own.stage, [tensor for _, tensor in own.inputs])

    def _expect(self, microbatch: int, chunk: int) -> None:
        """Begin to receive the gradients of a pass, if its forward is done."""
        own = self._open.get(microbatch, {}).get(chunk)
        if own is not None and own.trained_outputs and not own.coming:
            own.coming = self._links.expect_gradients(own.stage, own.trained_outputs)

    def release(self) -> None:
        """See Engine."""
        self._open.clear()
        self._links.release()

    # -- gradients and state over stages ------------------------------------------------------------------------------

    def sum_shared(self) -> None:
        """Sum the gradients of weights that several stages hold."""
        if not self._shared:
            return
        parameters = self._parameters()
        own = [parameters[name] for name in self._shared]
        sum_gradients([weight for weight in own if weight.requires_grad], self._links.sum)

    def norm_of(self, gradients: Sequence[Tensor]) -> Tensor:
        """See Engine: each weight counts once."""
        parameters = self._parameters()
        again = {id(parameters[name].grad) for name in self._shared} if self._place else ()
        own = [gradient for gradient in gradients if id(gradient) not in again]
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        if own:
            square += torch.linalg.vector_norm(norms_of(own)).double().square()
        return self._links.sum(square).sqrt()

    def with_others(self, optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
        """Return the optimizers' states, with those of other stages' weights as tensors without
        memory: their pieces are in the files of those stages. Call it on all ranks.
        """
        states = [optimizer.state_dict() for optimizer in optimizers]
        own = [
            {
                index: entries
                for index, entries in state["state"].items()
                if isinstance(index, str)  # beside the weights'
                or _parameter(optimizer, index) not in self.elsewhere
            }
            for optimizer, state in zip(optimizers, states, strict=True)
        ]
        seen = [
            {
                index: entries
                if isinstance(index, str)
                else _without_memory(entries, _parameter(optimizer, index))
                for index, entries in of_one.items()
            }
            for optimizer, of_one in zip(optimizers, own, strict=True)
        ]
        # those of the first model's ranks; tensor ranks know the same
        everyone = self._comm.all_gather_object(seen)[: self._ranks.model_size]
        for place, state in enumerate(states):
            merged: dict[Any, Any] = {}
            for of_rank in everyone:
                merged |= of_rank[place]
            merged |= own[place]
            state["state"] = {index: merged[index] for index in sorted(merged, key=str)}
        return states

    def _parameters(self) -> dict[str, nn.Parameter]:
        assert self._task is not None
        return dict(self._task.named_parameters())


def _with_next(actions: Iterable[Entry]) -> Iterator[tuple[Entry, Entry | None]]:
    """Yield each, and the one after it."""
    source = iter(actions)
    own = next(source, None)
    while own is not None:
        following = next(source, None)
        yield own, following
        own = following


def _parameter(optimizer: Optimizer, index: int) -> nn.Parameter:
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    at_index: nn.Parameter = every[index]
    return at_index


def _without_memory(entries: dict[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """Return an optimizer's state of a weight, with what is in pieces as tensors without memory."""
    is_whole = not is_spread(parameter)
    return {
        name: (
            torch.empty(value.shape, dtype=value.dtype, device="meta")
            if isinstance(value, Tensor)
            and (is_spread(value) or (is_whole and value.dim() and value.shape == parameter.shape))
            else value
        )
        for name, value in entries.items()
    }
